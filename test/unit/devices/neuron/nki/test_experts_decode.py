"""The experts' NKI kernel against a loop over choices in float64, with its reads and the number of its instructions."""

import math

import pytest
import torch

from benchmarks.kernels.command import experts_hbm_bytes
from granite4_neuron import UserError
from granite4_neuron.config import published_config
from granite4_neuron.devices.neuron.expert_slots import expert_slots, num_slots
from granite4_neuron.devices.neuron.nki.experts_decode import check_experts_decode, experts_decode, experts_decode_torch
from granite4_neuron.devices.neuron.nki.launch import launch
from granite4_neuron.planning.analysis.hlo_lint import findings, instructions
from test.support.checkpoints import granite_names
from test.support.nki_cases import error, experts_arguments, experts_inputs, experts_oracle
from test.support.nki_checks import last_launch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
MOES = [name for name in granite_names() if published_config(name).num_local_experts]
H_SMALL = dict(hidden=4096, width=192, top_k=10)  # a rank of four


def run(inputs, programs=1):
    return sum(launch(experts_decode, *experts_arguments(inputs), programs=programs))


def check(inputs, programs=1, tolerance=1e-5):
    assert error(run(inputs, programs), sum(experts_oracle(inputs))) <= tolerance


class TestSlots:
    @pytest.mark.parametrize(("tokens", "top_k"), [(1, 3), (4, 3), (16, 6), (1, 1)])
    def test_distinct_experts_in_order(self, tokens, top_k):
        topk_ids = experts_inputs(tokens, num_experts=8, top_k=top_k)["topk_ids"]
        expert_ids, _ = expert_slots(topk_ids, torch.ones(tokens, top_k), 8)
        distinct = topk_ids.unique().tolist()
        assert expert_ids.dtype == torch.int32 and len(expert_ids) == num_slots(tokens, top_k, 8)
        assert expert_ids.tolist() == distinct + [8] * (len(expert_ids) - len(distinct))

    def test_weights_add_up_per_expert(self):
        topk_ids = torch.tensor([[5, 0], [7, 5], [9, 9]])
        expert_ids, weights = expert_slots(topk_ids, torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]), 9)
        assert expert_ids.tolist() == [0, 5, 7, 9, 9, 9]
        expected = [[0.75, 0.25, 0, 0, 0, 0], [0, 0.5, 0.5, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
        assert weights.tolist() == expected

    @pytest.mark.parametrize("outside", [-1, 8, 2**31 - 1])
    def test_ids_outside_choose_nothing(self, outside):
        topk_ids = torch.full((2, 3), outside)
        topk_ids[1] = torch.tensor([6, 2, 4])
        expert_ids, weights = expert_slots(topk_ids, torch.ones(2, 3), 8)
        assert expert_ids.tolist() == [2, 4, 6, 8, 8, 8]
        assert weights.tolist() == [[0] * 6, [1, 1, 1, 0, 0, 0]]

    def test_graph(self):
        """neuronx-cc gets static shapes, and only comparisons, selections and sums over short axes."""
        torch_xla = pytest.importorskip("torch_xla", reason="torch_xla is not installed")
        device = torch_xla.device()
        outputs = expert_slots(torch.zeros(4, 10, dtype=torch.int64).to(device), torch.ones(4, 10).to(device), 72)
        text = torch_xla._XLAC._get_xla_tensors_hlo(list(outputs))
        opcodes = {instruction.opcode for instruction in instructions(text).values()}
        assert not findings(text) and not opcodes & {"sort", "reduce-window", "gather", "scatter", "dot", "custom-call"}


class TestExperts:
    def test_definition(self):
        inputs = experts_inputs(idle=(2,))
        results = experts_decode_torch(*experts_arguments(inputs))
        for result, exact in zip(results, experts_oracle(inputs), strict=True):
            assert error(result, exact) <= 1e-5

    @pytest.mark.parametrize("programs", [1, 2])
    @pytest.mark.parametrize("width", [32, 96, 192, 256, 320, 768])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_equals_the_loop(self, programs, width, dtype):
        inputs = experts_inputs(width=width, dtype=dtype)
        check(inputs, programs, TOLERANCE[dtype])

    @pytest.mark.parametrize("tokens", [1, 2, 8, 16, 128])
    @pytest.mark.parametrize("top_k", [1, 4])
    def test_tokens(self, tokens, top_k):
        inputs = experts_inputs(tokens, top_k=top_k, hidden=640)
        check(inputs)

    def test_float32_tokens_and_bfloat16_weights(self):
        inputs = experts_inputs(dtype=torch.bfloat16)
        assert torch.equal(run(inputs | dict(x=inputs["x"].float())), run(inputs))

    @pytest.mark.parametrize("programs", [1, 2])
    def test_idle_tokens(self, programs):
        """Idle tokens cost nothing and get zeros, even if most of the memory for weights stays unwritten."""
        inputs = experts_inputs(6, idle=(0, 1, 3, 4, 5))
        check(inputs, programs)
        y = run(inputs, programs)
        assert not y[[0, 1, 3, 4, 5]].any()
        assert not run(experts_inputs(2, idle=(0, 1)), programs).any()
        assert last_launch().hbm_bytes < 20_000  # an expert has 295 kB

    def test_weights_of_other_experts_are_not_read(self):
        inputs = experts_inputs(2)
        expected = run(inputs)
        others = [expert for expert in range(8) if expert not in inputs["topk_ids"]]
        assert others
        for name in ("gate_up_proj", "down_proj"):
            inputs[name][others] = math.nan
        assert torch.equal(run(inputs), expected)

    def test_nan_stays_in_its_token(self):
        inputs = experts_inputs(3)
        expected = run(inputs)
        inputs["x"][1] = math.nan
        y = run(inputs)
        assert torch.equal(y[[0, 2]], expected[[0, 2]]) and y[1].isnan().all()

    @pytest.mark.slow
    @pytest.mark.parametrize("tp_degree", [1, 4])
    @pytest.mark.parametrize("name", MOES)
    def test_family(self, name, tp_degree):
        """One rank and its two cores are tested for every published model with experts, with a dozen of the experts."""
        config = published_config(name)
        width = config.rank_dimensions(tp_degree).intermediate_size
        check_experts_decode(16, config.num_local_experts, config.hidden_size, width, itemsize=2)
        inputs = experts_inputs(2, 12, config.hidden_size, width, config.num_experts_per_tok, torch.bfloat16)
        check(inputs, 2, 1e-2)


@pytest.mark.parametrize(
    "dimensions",
    [(129, 72, 4096, 192, 2), (1, 10, 4000, 192, 2), (1, 10, 8192, 192, 2), (1, 10, 4096, 768, 4)],
    ids=str,
)
def test_dimensions_that_the_kernel_does_not_take(dimensions):
    tokens, _, hidden, width, _ = dimensions
    with pytest.raises(UserError, match=f"here are {tokens} tokens, hidden size {hidden} and width {width}"):
        check_experts_decode(*dimensions)


class TestBudgets:
    @pytest.mark.slow_cases
    @pytest.mark.parametrize("tokens", [1, 4, 16])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_h_small(self, tokens, dtype):
        inputs = experts_inputs(tokens, 16, dtype=dtype, **H_SMALL)
        run(inputs, 2)
        distinct = inputs["topk_ids"].unique().numel()
        assert last_launch().hbm_bytes <= 1.05 * experts_hbm_bytes(tokens, distinct, 4096, 192, dtype.itemsize)
        slots = num_slots(tokens, 10, 16)
        assert last_launch().count() <= 25 + 56 * slots / 2
        assert last_launch().peak_sbuf_bytes < 207 * 1024 and last_launch().peak_psum_banks <= 8

    @pytest.mark.slow_cases
    @pytest.mark.parametrize(
        ("slots", "hidden", "width", "dtype"),
        [(6, 2688, 480, torch.bfloat16), (4, 1408, 672, torch.float32), (2, 2560, 608, torch.float32)],
        ids=str,
    )
    def test_dimensions_that_barely_fit(self, slots, hidden, width, dtype):
        """The dimensions leave less than 400 bytes with 128 tokens. The emulator refuses kernels that do not fit."""
        check_experts_decode(128, slots, hidden, width, dtype.itemsize)
        check(experts_inputs(128, slots, hidden, width, 1, dtype), 2, TOLERANCE[dtype])

    def test_a_shared_expert_is_read_once(self):
        inputs = experts_inputs(4, **H_SMALL | dict(top_k=1))
        inputs["topk_ids"].fill_(5)
        run(inputs, 2)
        assert last_launch().hbm_bytes <= 1.05 * experts_hbm_bytes(4, 1, 4096, 192, 4)
