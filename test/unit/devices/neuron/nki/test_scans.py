"""The NKI kernels against recurrences in float64, token by token, with their instructions, traffic and memory."""

import pytest
import torch

from granite4_neuron.config import published_config
from granite4_neuron.devices.neuron.nki.conv1d_prefill import conv1d_prefill, conv1d_prefill_torch
from granite4_neuron.devices.neuron.nki.launch import launch
from granite4_neuron.devices.neuron.nki.ssd_chunk_scan import ssd_chunk_scan, ssd_chunk_scan_torch
from granite4_neuron.devices.neuron.nki.tensor_tensor_scan import tensor_tensor_scan, tensor_tensor_scan_torch
from test.support.checkpoints import granite_names
from test.support.nki_cases import (
    conv_inputs,
    conv_oracle,
    error,
    nbytes,
    scan_inputs,
    scan_oracle,
)
from test.support.nki_checks import check, last_launch

SCANS = {"ssd": ssd_chunk_scan, "scan": tensor_tensor_scan}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HYBRIDS = [name for name in granite_names() if published_config(name).layer_types.count("mamba")]

scans = pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS.keys())


def run(kernel, inputs, programs=1):
    return launch(kernel, *inputs.values(), programs=programs)


class TestDefinitions:
    """The kernels' definitions in torch."""

    @pytest.mark.parametrize("definition", [ssd_chunk_scan_torch, tensor_tensor_scan_torch])
    def test_scans(self, definition):
        inputs = scan_inputs(2, 150, heads=4, head_dim=32, groups=2, d_state=64)
        check(definition(**inputs), scan_oracle(inputs))

    def test_the_scan_goes_token_by_token(self):
        """Token by token it gives the same bits, which chunks of matrix products would not."""
        inputs = scan_inputs(2, 20, heads=4, head_dim=32, groups=2, d_state=64, dtype=torch.bfloat16)
        y, states = tensor_tensor_scan_torch(**inputs)
        state = inputs["initial_states"]
        for t in range(20):
            token = {name: inputs[name][:, t : t + 1] for name in ("x", "dt", "B", "C")}
            one, state = tensor_tensor_scan_torch(**{**inputs, **token, "initial_states": state})
            assert torch.equal(one[:, 0], y[:, t])
        assert torch.equal(state, states)

    def test_convolution(self):
        inputs = conv_inputs(3, 7, 96, lengths=[7, 2, 0])
        check(conv1d_prefill_torch(**inputs), conv_oracle(inputs))


class TestScans:
    @scans
    @pytest.mark.parametrize("programs", [1, 2])
    @pytest.mark.parametrize(
        "dimensions",
        [
            dict(heads=2, head_dim=64, d_state=128),
            dict(heads=2, head_dim=32, d_state=64),
            dict(heads=2, head_dim=128, d_state=64),
            dict(heads=4, head_dim=32, d_state=128, groups=2),
            dict(heads=6, head_dim=32, d_state=64, groups=3),
        ],
        ids=lambda d: "-".join(map(str, d.values())),
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_equals_the_recurrence(self, scan, programs, dimensions, dtype):
        inputs = scan_inputs(1, 150, dtype=dtype, **dimensions)
        y, states = run(scan, inputs, programs)
        assert y.dtype == dtype and states.dtype == torch.float32
        check((y, states), scan_oracle(inputs), TOLERANCE[dtype])

    @scans
    @pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 300])
    def test_any_length(self, scan, length):
        inputs = scan_inputs(1, length, heads=1, head_dim=32, d_state=64)
        check(run(scan, inputs), scan_oracle(inputs))

    @scans
    def test_batch(self, scan):
        inputs = scan_inputs(3, 140, heads=2, head_dim=32)
        check(run(scan, inputs), scan_oracle(inputs))

    @scans
    def test_large_decays_stay_finite_and_right(self, scan):
        """sum |dt A| of a chunk is far above 100, so exp(cs_i) * exp(-cs_j) would overflow."""
        inputs = scan_inputs(1, 200, heads=4, head_dim=32, max_A=128.0)
        inputs["dt"] = torch.full_like(inputs["dt"], 0.7)
        inputs["A"] = torch.tensor([-1.5, -10.0, -60.0, -128.0])
        check(run(scan, inputs), scan_oracle(inputs))

    @scans
    def test_small_decays_are_right(self, scan):
        inputs = scan_inputs(1, 256, heads=2, head_dim=32)
        inputs["dt"] *= 1e-3
        check(run(scan, inputs), scan_oracle(inputs))

    @scans
    def test_padding_changes_nothing(self, scan):
        inputs = scan_inputs(1, 200, heads=2, head_dim=32)
        inputs["dt"][:, 137:] = 0.0
        real = {name: value[:, :137] if name in ("x", "dt", "B", "C") else value for name, value in inputs.items()}
        y, states = run(scan, inputs)
        check((y[:, :137], states), scan_oracle(real))

    @scans
    def test_nothing_but_padding(self, scan):
        inputs = scan_inputs(1, 8, heads=2, head_dim=32)
        inputs["dt"].zero_()
        assert torch.equal(run(scan, inputs)[1], inputs["initial_states"])

    @pytest.mark.slow_cases
    @scans
    def test_two_programs_equal_one(self, scan):
        inputs = scan_inputs(2, 130, heads=4, head_dim=32)
        for one, two in zip(run(scan, inputs, 1), run(scan, inputs, 2), strict=True):
            assert error(two, one) <= 1e-6

    @scans
    def test_further_chunk_of_prefill(self, scan):
        whole = scan_inputs(1, 170, heads=2, head_dim=32)
        expected = run(scan, whole)
        outputs, states = [], whole["initial_states"]
        for cut in (slice(0, 60), slice(60, 170)):
            piece = {name: value[:, cut] if name in ("x", "dt", "B", "C") else value for name, value in whole.items()}
            y, states = run(scan, piece | {"initial_states": states})
            outputs.append(y)
        check((torch.cat(outputs, 1), states), expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("tp_degree", [1, 4])
    @pytest.mark.parametrize("name", HYBRIDS)
    def test_family(self, name, tp_degree):
        """One rank and its two cores are tested for every published model with Mamba layers."""
        config = published_config(name)
        heads = config.rank_dimensions(tp_degree).mamba_heads
        dimensions = dict(heads=heads, head_dim=config.mamba_d_head, d_state=config.mamba_d_state)
        inputs = scan_inputs(1, 131, **dimensions)
        check(run(ssd_chunk_scan, inputs, 2), scan_oracle(inputs))
        if tp_degree > 1:  # the kernel goes head by head, and more heads show nothing new
            inputs = scan_inputs(1, 3, **dimensions)
            check(run(tensor_tensor_scan, inputs, 2), scan_oracle(inputs))
        inputs = conv_inputs(1, 12, config.rank_dimensions(tp_degree).mamba_conv_dim, config.mamba_d_conv)
        check(run(conv1d_prefill, inputs, 2), conv_oracle(inputs))


class TestConvolution:
    @pytest.mark.parametrize("programs", [1, 2])
    @pytest.mark.parametrize("channels", [256, 320, 640])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_equals_the_definition(self, programs, channels, dtype):
        inputs = conv_inputs(2, 200, channels, dtype=dtype, lengths=[200, 129])
        y, states = run(conv1d_prefill, inputs, programs)
        exact_y, exact_states = conv_oracle(inputs)
        assert y.dtype == states.dtype == dtype
        assert error(y, exact_y) <= TOLERANCE[dtype]
        assert torch.equal(states, exact_states)

    @pytest.mark.parametrize("d_conv", [2, 3, 4])
    def test_windows_at_every_length(self, d_conv):
        """There may be fewer real tokens than the window holds. Lengths lie on both sides of a block of 128."""
        lengths = [0, 1, 2, 3, 4, 126, 127, 128, 129, 130, 131]
        inputs = conv_inputs(len(lengths), 131, 64, d_conv, lengths=lengths)
        y, states = run(conv1d_prefill, inputs)
        exact_y, exact_states = conv_oracle(inputs)
        assert error(y, exact_y) <= 1e-5
        assert torch.equal(states, exact_states)

    @pytest.mark.parametrize("length", [1, 2, 128, 257])
    def test_any_length(self, length):
        inputs = conv_inputs(1, length, 64)
        check(run(conv1d_prefill, inputs), conv_oracle(inputs))


# granite-4.0-h-small on four ranks of two cores each.
H_SMALL = dict(heads=32, head_dim=64, d_state=128)
H_SMALL_CHANNELS = 32 * 64 + 2 * 128
SBUF_LIMIT = 207 * 1024


def check_traffic(inputs, outputs):
    """Check that traffic is at most 1.5 times the bytes of arguments and results. Two cores both read shared ones."""
    assert last_launch().hbm_bytes <= 1.5 * nbytes(*inputs.values(), *outputs)
    assert last_launch().peak_sbuf_bytes < SBUF_LIMIT


class TestBudgets:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_ssd_chunk_scan(self, dtype):
        counts = []
        for length in (128, 256):
            inputs = scan_inputs(1, length, dtype=dtype, **H_SMALL)
            outputs = run(ssd_chunk_scan, inputs, 2)
            check_traffic(inputs, outputs)
            counts.append(last_launch().count())
        assert counts[1] - counts[0] <= 90
        assert counts[1] / 2 <= 90  # setup included

    @pytest.mark.slow
    def test_tensor_tensor_scan_of_1024_tokens(self):
        """The published kernel has 8,192 scans and 65,000 VectorE instructions. These are at most a twentieth, and
        grow with length.
        """
        inputs = scan_inputs(1, 128, **H_SMALL)
        outputs = run(tensor_tensor_scan, inputs, 2)
        check_traffic(inputs, outputs)
        assert 8 * last_launch().count("vector", "tensor_tensor_scan") <= 8192 / 20
        assert 8 * last_launch().count("vector") <= 65000 / 20

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_convolution(self, dtype):
        inputs = conv_inputs(1, 256, H_SMALL_CHANNELS, dtype=dtype)
        check_traffic(inputs, run(conv1d_prefill, inputs, 2))

    @pytest.mark.slow_cases
    @scans
    def test_prefill_reads_and_writes_a_state_once(self, scan):
        """This holds for any number of chunks. Float32 transfers of a state's size are not x or y, in bfloat16."""
        inputs = scan_inputs(2, 300, heads=4, head_dim=64, dtype=torch.bfloat16)
        run(scan, inputs, 2)
        state = 128 * 2 * 64 * 4
        for program in (0, 1):
            own = [i for i in last_launch().instructions if i.program == program]
            assert sum(i.hbm_read == state for i in own) == sum(i.hbm_written == state for i in own) == 2

    def test_memory_does_not_grow_with_length(self):
        peaks = set()
        for length in (256, 512):
            run(ssd_chunk_scan, scan_inputs(1, length, heads=2), 1)
            scan_peak = last_launch().peak_sbuf_bytes
            run(conv1d_prefill, conv_inputs(1, length, 64), 1)
            peaks.add((scan_peak, last_launch().peak_sbuf_bytes))
        assert len(peaks) == 1
