"""The experts' NKI kernel over blocks against a loop over choices in float64, with its blocks and its reads."""

import math

import pytest
import torch

from granite4_neuron import UserError
from granite4_neuron.config import published_config
from granite4_neuron.devices.neuron.expert_blocks import BLOCK_ROWS, combine_choices, expert_blocks, num_blocks
from granite4_neuron.devices.neuron.nki.experts_prefill import (
    check_experts_prefill,
    experts_prefill,
    experts_prefill_torch,
)
from granite4_neuron.devices.neuron.nki.launch import launch
from granite4_neuron.planning.analysis.hlo_lint import findings, instructions
from test.support.checkpoints import granite_names
from test.support.nki_cases import error, experts_inputs, experts_oracle, nbytes
from test.support.nki_checks import last_launch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MOES = [name for name in granite_names() if published_config(name).num_local_experts]


def run(inputs, programs=1):
    x, gate_up_proj, down_proj, topk_ids, topk_weights = inputs.values()
    blocks = expert_blocks(topk_ids, len(down_proj))
    (y,) = launch(experts_prefill, x, gate_up_proj, down_proj, *blocks, programs=programs)
    return combine_choices(y, topk_ids, topk_weights, len(down_proj))


def check(inputs, programs=1):
    y = run(inputs, programs)
    assert y.dtype == inputs["x"].dtype
    assert error(y, sum(experts_oracle(inputs))) <= TOLERANCE[y.dtype]


def chosen(tokens, num_experts, top_k, seed=0):
    return torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(seed)).topk(top_k).indices


class TestBlocks:
    @pytest.mark.parametrize(
        ("tokens", "num_experts", "top_k"), [(1, 8, 3), (128, 8, 3), (129, 8, 8), (1000, 62, 6), (700, 72, 10)]
    )
    @pytest.mark.parametrize("skew", [0, 5], ids=["even", "skewed"])
    def test_every_choice_has_a_row_of_its_expert(self, tokens, num_experts, top_k, skew):
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(tokens, num_experts, generator=generator) * torch.linspace(1, 1 + skew, num_experts)
        topk_ids = scores.topk(top_k).indices
        topk_ids[tokens // 2 :: 7] = num_experts
        loads, rows, choices = expert_blocks(topk_ids, num_experts)
        size = num_blocks(tokens, top_k, num_experts)
        assert loads.shape == (size,) and rows.shape == choices.shape == (BLOCK_ROWS, size)
        assert loads.dtype == rows.dtype == choices.dtype == torch.int32

        expert, seen = -1, []
        for block in range(size):
            expert = loads[block].item() if loads[block] < num_experts else expert
            is_row = rows[:, block] < tokens
            assert torch.equal(is_row, choices[:, block] < choices.numel())
            assert (topk_ids.flatten()[choices[is_row, block]] == expert).all()
            assert torch.equal(rows[is_row, block], choices[is_row, block] // top_k)
            seen += choices[is_row, block].tolist()
        assert sorted(seen) == (topk_ids.flatten() < num_experts).nonzero().flatten().tolist()

    @pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(640, 8, 3), (1024, 72, 10)])
    def test_parts_are_even_and_load_an_expert_once(self, tokens, num_experts, top_k):
        loads, rows, _ = expert_blocks(chosen(tokens, num_experts, top_k), num_experts)
        has_rows = (rows < tokens).any(0)
        first, second = has_rows.chunk(2)
        assert 0 <= first.sum() - second.sum() <= 1
        for part in loads.chunk(2):
            experts = part[part < num_experts].tolist()
            assert experts == sorted(set(experts))
        shared = set(loads[: len(first)].tolist()) & set(loads[len(first) :].tolist()) - {num_experts}
        assert len(shared) <= 1

    def test_the_most_blocks(self):
        """Each expert has one row more than fills whole blocks, or all tokens have the same experts."""
        topk_ids = torch.arange(4)[:, None].expand(4, 129).reshape(-1, 1)
        loads, rows, _ = expert_blocks(topk_ids, 4)
        assert (rows < len(topk_ids)).any(0).sum() == 8 <= len(loads) == num_blocks(516, 1, 4)
        same = torch.arange(3).expand(400, 3)
        loads, rows, _ = expert_blocks(same, 8)
        assert (rows < 400).any(0).sum() == 12 and (loads < 8).sum() == 4  # one of the three is in both parts

    def test_no_expert_chosen(self):
        loads, rows, choices = expert_blocks(torch.full((5, 2), 9), 9)
        assert (loads == 9).all() and (rows == 5).all() and (choices == choices.numel()).all()

    def test_graph(self):
        torch_xla = pytest.importorskip("torch_xla", reason="torch_xla is not installed")
        outputs = expert_blocks(torch.zeros(512, 10, dtype=torch.int64).to(torch_xla.device()), 72)
        text = torch_xla._XLAC._get_xla_tensors_hlo(list(outputs))
        opcodes = {instruction.opcode for instruction in instructions(text).values()}
        assert not findings(text) and not opcodes & {"sort", "reduce-window", "gather", "custom-call"}


class TestExperts:
    def test_definition(self):
        inputs = experts_inputs(300, idle=(2, 299))
        x, gate_up_proj, down_proj, topk_ids, weights = inputs.values()
        (y,) = experts_prefill_torch(x, gate_up_proj, down_proj, *expert_blocks(topk_ids, 8))
        assert error(combine_choices(y, topk_ids, weights, 8), sum(experts_oracle(inputs))) <= 1e-5

    @pytest.mark.parametrize("programs", [1, 2])
    @pytest.mark.parametrize("width", [96, 192, 512])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_equals_the_loop(self, programs, width, dtype):
        check(experts_inputs(200, width=width, dtype=dtype), programs)

    @pytest.mark.parametrize("tokens", [1, 127, 128, 129, 513])
    def test_tokens(self, tokens):
        check(experts_inputs(tokens, 4, hidden=640, top_k=2))

    @pytest.mark.parametrize("programs", [1, 2])
    def test_padding(self, programs):
        """Rows of padding are never written, and the values in their place do not matter."""
        inputs = experts_inputs(300, idle=tuple(range(130, 300)))
        inputs["x"][130:] = math.nan
        check(inputs | dict(x=inputs["x"].nan_to_num()), programs)
        assert torch.equal(run(inputs, programs), run(inputs | dict(x=inputs["x"].nan_to_num()), programs))

    def test_weights_of_other_experts_are_not_read(self):
        inputs = experts_inputs(40, top_k=2)
        inputs["topk_ids"][(inputs["topk_ids"] == 3).any(1)] = 8  # all choices of a token are inside, or none is
        expected = run(inputs)
        for name in ("gate_up_proj", "down_proj"):
            inputs[name][3] = math.nan
        assert torch.equal(run(inputs), expected)

    def test_nan_stays_in_its_token(self):
        inputs = experts_inputs(150)
        expected = run(inputs)
        inputs["x"][7] = math.nan
        y = run(inputs)
        others = torch.arange(150) != 7
        assert torch.equal(y[others], expected[others]) and y[7].isnan().all()

    @pytest.mark.slow
    @pytest.mark.parametrize("tp_degree", [1, 4])
    @pytest.mark.parametrize("name", MOES)
    def test_family(self, name, tp_degree):
        """One rank and its two cores are tested for every published model with experts, with four of the experts."""
        config = published_config(name)
        width = config.rank_dimensions(tp_degree).intermediate_size
        check_experts_prefill(config.hidden_size, width, itemsize=2)
        check(experts_inputs(140, 4, config.hidden_size, width, 2, torch.bfloat16), 2)


@pytest.mark.parametrize("dimensions", [(4000, 192, 2), (4096, 768, 4), (8192, 768, 2)], ids=str)
def test_dimensions_that_the_kernel_does_not_take(dimensions):
    with pytest.raises(UserError, match=f"here are hidden size {dimensions[0]} and width {dimensions[1]}"):
        check_experts_prefill(*dimensions)


def minimum(inputs):
    """Return the bytes of all weights, plus an input row and an output row for every choice."""
    x, gate_up_proj, down_proj, topk_ids, _ = inputs.values()
    assert topk_ids.unique().numel() == len(down_proj)
    return nbytes(gate_up_proj, down_proj) + 2 * topk_ids.numel() * nbytes(x[0])


class TestBudgets:
    """Budgets of h-small on a rank of four, with fewer experts."""

    @pytest.mark.slow_cases
    @pytest.mark.parametrize(
        ("dtype", "per_block"), [(torch.bfloat16, 102), (torch.float32, 106)], ids=["bfloat16", "float32"]
    )
    def test_h_small(self, dtype, per_block):
        check_experts_prefill(4096, 192, dtype.itemsize)
        inputs = experts_inputs(100, 8, 4096, 192, 2, dtype)
        run(inputs, 2)
        assert last_launch().hbm_bytes <= 1.05 * minimum(inputs)
        assert last_launch().count() <= 3 + per_block * num_blocks(100, 2, 8) / 2

    @pytest.mark.parametrize("programs", [1, 2])
    def test_weights_are_read_once_for_all_blocks(self, programs):
        """One expert is an exception, because both parts can have it."""
        inputs = experts_inputs(600, 4, 512, 96, 2)
        run(inputs, programs)
        one_expert = nbytes(inputs["gate_up_proj"][0], inputs["down_proj"][0])
        assert last_launch().hbm_bytes <= 1.05 * (minimum(inputs) + one_expert)

    @pytest.mark.slow_cases
    @pytest.mark.parametrize(
        ("hidden", "width", "dtype"),
        [(2688, 1088, torch.bfloat16), (2304, 688, torch.float32)],
        ids=str,
    )
    def test_dimensions_that_barely_fit(self, hidden, width, dtype):
        check_experts_prefill(hidden, width, dtype.itemsize)
        check(experts_inputs(40, 1, hidden, width, 1, dtype))
