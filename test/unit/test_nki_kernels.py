"""The NKI kernels against recurrences in float64, token by token; their instructions, traffic and memory."""

import math

import nki.language as nl
import pytest
import torch

from granite4_neuron.config import GraniteMoeHybridConfig, family_names
from granite4_neuron.ops.nki.conv1d_prefill import conv1d_prefill, conv1d_prefill_torch
from granite4_neuron.ops.nki.conv1d_update import conv1d_update, conv1d_update_torch
from granite4_neuron.ops.nki.launch import launch
from granite4_neuron.ops.nki.ssd_chunk_scan import ssd_chunk_scan, ssd_chunk_scan_torch
from granite4_neuron.ops.nki.ssm_decode import ssm_decode, ssm_decode_torch
from granite4_neuron.ops.nki.tensor_tensor_scan import tensor_tensor_scan, tensor_tensor_scan_torch
from test.support.nki_cases import (
    conv_inputs,
    conv_oracle,
    decode_inputs,
    decode_oracle,
    error,
    nbytes,
    scan_inputs,
    scan_oracle,
)
from test.support.nki_checks import check, last_launch

SCANS = {"ssd": ssd_chunk_scan, "scan": tensor_tensor_scan}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
HYBRIDS = [name for name in family_names() if GraniteMoeHybridConfig.from_family(name).layer_types.count("mamba")]

scans = pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS.keys())


def run(kernel, inputs, programs=1):
    return launch(kernel, *inputs.values(), programs=programs)


class TestDefinitions:
    """The torch definitions beside the kernels."""

    @pytest.mark.parametrize("definition", [ssd_chunk_scan_torch, tensor_tensor_scan_torch])
    def test_scans(self, definition):
        inputs = scan_inputs(2, 150, heads=4, head_dim=32, groups=2, d_state=64)
        check(definition(**inputs), scan_oracle(inputs))

    def test_decode(self):
        inputs = decode_inputs(3, heads=4, groups=2)
        check(ssm_decode_torch(**inputs), decode_oracle(inputs))

    def test_convolutions(self):
        inputs = conv_inputs(3, 7, 96, lengths=[7, 2, 0])
        check(conv1d_prefill_torch(**inputs), conv_oracle(inputs))
        inputs = conv_inputs(3, 1, 96)
        expected_y, expected_states = conv_oracle(inputs)
        check(conv1d_update_torch(inputs["x"][:, 0], *list(inputs.values())[1:4]), (expected_y[:, 0], expected_states))


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
    def test_long_decays_stay_finite_and_right(self, scan):
        """sum |dt A| of a chunk far above 100: exp(cs_i) * exp(-cs_j) would overflow."""
        inputs = scan_inputs(1, 200, heads=4, head_dim=32, max_A=128.0)
        inputs["dt"] = torch.full_like(inputs["dt"], 0.7)
        inputs["A"] = torch.tensor([-1.5, -10.0, -60.0, -128.0])
        check(run(scan, inputs), scan_oracle(inputs))

    @scans
    def test_short_decays_are_right(self, scan):
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

    @scans
    def test_two_programs_equal_one(self, scan):
        inputs = scan_inputs(2, 130, heads=4, head_dim=32)
        for one, two in zip(run(scan, inputs, 1), run(scan, inputs, 2), strict=True):
            assert error(two, one) <= 1e-6

    @scans
    def test_prefill_then_decode_equals_a_longer_prefill(self, scan):
        whole = scan_inputs(2, 133, heads=2, head_dim=32)
        start = {name: value[:, :130] if name in ("x", "dt", "B", "C") else value for name, value in whole.items()}
        y, states = run(scan, start)
        outputs = [y]
        for t in range(130, 133):
            x, dt, B, C = (whole[name][:, t] for name in ("x", "dt", "B", "C"))
            y, states = launch(ssm_decode, states, x, dt, whole["A"], B, C, whole["D"])
            outputs.append(y[:, None])
        for value, expected in zip((torch.cat(outputs, 1), states), run(scan, whole), strict=True):
            assert error(value, expected) <= 1e-5

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

    @pytest.mark.parametrize("tp_degree", [1, 4])
    @pytest.mark.parametrize("name", HYBRIDS)
    def test_family(self, name, tp_degree):
        """One rank and its two cores, for every published model with Mamba layers."""
        config = GraniteMoeHybridConfig.from_family(name)
        heads = config.rank_dimensions(tp_degree).mamba_heads
        dimensions = dict(heads=heads, head_dim=config.mamba_d_head, d_state=config.mamba_d_state)
        inputs = scan_inputs(1, 131, **dimensions)
        check(run(ssd_chunk_scan, inputs, 2), scan_oracle(inputs))
        if tp_degree > 1:  # it goes head by head, and more of them are nothing new
            inputs = scan_inputs(1, 3, **dimensions)
            check(run(tensor_tensor_scan, inputs, 2), scan_oracle(inputs))
        inputs = decode_inputs(5, **dimensions)
        check(run(ssm_decode, inputs, 2), decode_oracle(inputs))
        inputs = conv_inputs(1, 12, config.rank_dimensions(tp_degree).mamba_conv_dim, config.mamba_d_conv)
        check(run(conv1d_prefill, inputs, 2), conv_oracle(inputs))


class TestDecode:
    @pytest.mark.parametrize("programs", [1, 2])
    @pytest.mark.parametrize(
        "dimensions",
        [
            dict(heads=16, head_dim=64, d_state=128),
            dict(heads=6, head_dim=32, d_state=64),
            dict(heads=8, head_dim=128, d_state=128),
            dict(heads=8, head_dim=64, d_state=64, groups=2),
            dict(heads=12, head_dim=32, d_state=128, groups=3),
        ],
        ids=lambda d: "-".join(map(str, d.values())),
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_equals_the_recurrence(self, programs, dimensions, dtype):
        inputs = decode_inputs(3, dtype=dtype, **dimensions)
        y, states = run(ssm_decode, inputs, programs)
        exact_y, exact_states = decode_oracle(inputs)
        assert y.dtype == dtype
        assert error(y, exact_y) <= (1e-5 if dtype == torch.float32 else 1e-2)
        assert error(states, exact_states) <= 1e-5  # float32 whatever the dtype of x

    @pytest.mark.parametrize("batch", [1, 16, 17, 35])
    def test_batch(self, batch):
        inputs = decode_inputs(batch, heads=2, head_dim=64)
        check(run(ssm_decode, inputs), decode_oracle(inputs))

    def test_large_decay(self):
        inputs = decode_inputs(2, heads=4, max_A=128.0)
        inputs["dt"] = torch.full_like(inputs["dt"], 20.0)
        check(run(ssm_decode, inputs), decode_oracle(inputs))

    def test_padding_changes_nothing(self):
        inputs = decode_inputs(2, heads=4)
        inputs["dt"][1] = 0.0
        assert torch.equal(run(ssm_decode, inputs)[1][1], inputs["states"][1])

    def test_nan_stays_in_its_sequence(self):
        inputs = decode_inputs(3, heads=4)
        expected = run(ssm_decode, inputs)
        for name in ("states", "x", "dt", "B", "C"):
            poisoned = inputs | {name: inputs[name].clone()}
            poisoned[name][1] = math.nan
            for value, clean in zip(run(ssm_decode, poisoned), expected, strict=True):
                assert torch.equal(value[0], clean[0]) and torch.equal(value[2], clean[2])

    @pytest.mark.parametrize("programs", [1, 2])
    def test_in_place(self, programs, monkeypatch):
        """The output that takes the memory of `states` ends up right: nothing is read after it was overwritten."""
        emulation = pytest.importorskip("nki.emulation", reason="aliases are given to the graph, not to a simulator")
        inputs = decode_inputs(3, heads=4)
        exact = decode_oracle(inputs)
        aliased = emulation.NkiTensor.of_array(inputs["states"].numpy())
        ndarray = nl.ndarray

        def with_alias(shape, dtype, buffer):
            return aliased if shape == aliased.shape else ndarray(shape, dtype, buffer)

        monkeypatch.setattr(nl, "ndarray", with_alias)
        y, states = run(ssm_decode, inputs, programs)
        assert states.data_ptr() == inputs["states"].data_ptr()
        check((y, states), exact)


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
        """Also where fewer tokens are real than the window holds, and on both sides of a block of 128."""
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

    @pytest.mark.parametrize("programs", [1, 2])
    @pytest.mark.parametrize(("batch", "channels", "d_conv"), [(1, 256, 4), (3, 640, 4), (8, 320, 3), (40, 96, 2)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_update(self, programs, batch, channels, d_conv, dtype):
        inputs = conv_inputs(batch, 1, channels, d_conv, dtype)
        x, conv_states, weight, bias, _ = inputs.values()
        y, states = launch(conv1d_update, x[:, 0], conv_states, weight, bias, programs=programs)
        exact_y, exact_states = conv_oracle(inputs)
        assert y.dtype == states.dtype == dtype
        assert error(y, exact_y[:, 0]) <= TOLERANCE[dtype]
        assert torch.equal(states, exact_states)

    def test_prefill_then_update_equals_a_longer_prefill(self):
        inputs = conv_inputs(2, 130, 64)
        x, states, weight, bias, lengths = inputs.values()
        expected_y, expected_states = run(conv1d_prefill, inputs)
        _, states = launch(conv1d_prefill, x[:, :129], states, weight, bias, lengths - 1)
        y, states = launch(conv1d_update, x[:, 129], states, weight, bias)
        check((y, states), (expected_y[:, 129], expected_states))


# granite-4.0-h-small on four ranks of two cores each.
H_SMALL = dict(heads=32, head_dim=64, d_state=128)
H_SMALL_CHANNELS = 32 * 64 + 2 * 128
SBUF_LIMIT = 207 * 1024


def check_traffic(inputs, outputs):
    """At most 1.5 times every argument and every result once, with two cores that both read what they share."""
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

    def test_tensor_tensor_scan_of_1024_tokens(self):
        """A twentieth of the published kernel's 8,192 scans and 65,000 VectorE instructions; they grow with length."""
        inputs = scan_inputs(1, 128, **H_SMALL)
        outputs = run(tensor_tensor_scan, inputs, 2)
        check_traffic(inputs, outputs)
        assert 8 * last_launch().count("vector", "tensor_tensor_scan") <= 8192 / 20
        assert 8 * last_launch().count("vector") <= 65000 / 20

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_ssm_decode(self, dtype):
        counts = []
        for batch in (1, 8):
            inputs = decode_inputs(batch, dtype=dtype, **H_SMALL)
            outputs = run(ssm_decode, inputs, 2)
            check_traffic(inputs, outputs)
            counts.append(last_launch().count())
        assert (counts[1] - counts[0]) / 7 <= 20
        assert counts[1] / 8 <= 20  # setup included

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_convolutions(self, dtype):
        inputs = conv_inputs(1, 256, H_SMALL_CHANNELS, dtype=dtype)
        check_traffic(inputs, run(conv1d_prefill, inputs, 2))
        inputs = conv_inputs(8, 1, H_SMALL_CHANNELS, dtype=dtype)
        arguments = dict(inputs, x=inputs["x"][:, 0])
        del arguments["lengths"]
        check_traffic(arguments, run(conv1d_update, arguments, 2))
        assert last_launch().count() <= 10

    @scans
    def test_prefill_reads_and_writes_a_state_once(self, scan):
        """However many chunks there are: what is of a core's states' size in float32 is not x or y, in bfloat16."""
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
