"""The operators with vLLM's signatures, against float64 definitions. Known mistakes must be detected.

All memory that an operator must not read holds NaN: slots of padding, unused slots, the last slot (which an index of -1
would reach), tokens of padding, and windows and states of sequences that begin.
"""

import ast
import inspect
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from granite4_neuron.ops import Rounding, stochastic_round
from granite4_neuron.vllm import operators
from test.support import oracles, slot_oracles

NEW, CONTINUED, NULL, PAD = "new", "continued", "null block", "-1"
rows_of_prefill = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([NEW, CONTINUED, CONTINUED, NULL, PAD])), min_size=1, max_size=5
)
rows_of_decode = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([CONTINUED, CONTINUED, NULL, PAD])), min_size=1, max_size=5
)
seeds = st.integers(0, 1000)


def agrees(value, exact, tolerance=1e-5):
    """Compare shapes, places of NaN, and the largest difference relative to the largest value."""
    value = value.double()
    if value.shape != exact.shape or not torch.equal(value.isnan(), exact.isnan()):
        return False
    value, exact = value.nan_to_num(), exact.nan_to_num()
    return exact.numel() == 0 or bool((value - exact).abs().max() <= tolerance * exact.abs().max())


def offsets_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def slots_of(kinds, blocks=1):
    """Return [rows, blocks] of slots in disorder, and their number. 0 is the null block; the last slot is unused."""
    num_slots = len(kinds) * blocks + 3
    table = (torch.randperm(num_slots - 2)[: len(kinds) * blocks] + 1).int().view(len(kinds), blocks)
    for row, kind in enumerate(kinds):
        if kind in (NULL, PAD):
            table[row] = 0 if kind == NULL else -1
    return table, num_slots


def tokens_like(lengths, kinds, *shape, dtype=torch.float32, trailing=2):
    """Return [tokens, *shape] with NaN for the tokens of padding, and for some after the last row."""
    values = torch.randn(sum(lengths) + trailing, *shape).to(dtype)
    start = 0
    for length, kind in zip(lengths, kinds, strict=True):
        if kind in (NULL, PAD):
            values[start : start + length] = math.nan
        start += length
    values[start:] = math.nan
    return values


def poisoned(num_slots, readable, *shape, dtype=torch.float32):
    """Return state in slots, with NaN in each slot outside `readable`."""
    state = torch.full((num_slots, *shape), math.nan)
    for slot in readable:
        if slot > 0:
            state[slot] = torch.randn(shape)
    return state.to(dtype)


class Case:
    """An operator's arguments. `state` names the one that is updated in place."""

    def __init__(self, state, arguments, *, inputs=()):
        self.state, self.arguments, self.inputs = state, arguments, inputs

    def run(self, operator, double=False):
        """Run an operator on copies and return (output, state)."""
        arguments = {name: value.clone() if torch.is_tensor(value) else value for name, value in self.arguments.items()}
        if double:
            arguments[self.state] = arguments[self.state].double()
        output = operator(**arguments)
        assert all(torch.equal(arguments[name].nan_to_num(), self.arguments[name].nan_to_num()) for name in self.inputs)
        return output, arguments[self.state]

    def holds(self, operator, oracle, tolerance=1e-5, double=False):
        (output, state), (exact_output, exact_state) = self.run(operator, double), self.run(oracle, True)
        untouched = (exact_state == self.arguments[self.state].double()) | exact_state.isnan()
        return (
            agrees(output, exact_output, tolerance)
            and agrees(state, exact_state, tolerance)
            and torch.equal(state[untouched].nan_to_num(), self.arguments[self.state].to(state)[untouched].nan_to_num())
        )


def conv_fn_case(rows, dim=6, width=4, extra_columns=0, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    lengths, kinds = zip(*rows, strict=True)
    table, num_slots = slots_of(kinds)
    slots = table[:, 0]
    readable = [slot for slot, kind in zip(slots.tolist(), kinds, strict=True) if kind == CONTINUED]
    arguments = dict(
        x=tokens_like(lengths, kinds, dim, dtype=dtype).T,
        weight=torch.randn(dim, width).to(dtype),
        bias=torch.randn(dim).to(dtype) if seed % 2 == 0 else None,
        conv_states=poisoned(num_slots, readable, dim, width - 1 + extra_columns, dtype=dtype),
        query_start_loc=offsets_of(lengths),
        cache_indices=slots,
        has_initial_state=torch.tensor([kind != NEW for kind in kinds]),
        activation="silu" if seed % 3 else None,
    )
    return Case("conv_states", arguments, inputs=("x",))


def conv_update_case(rows, dim=6, width=4, speculative=True, blocks=0, num_spec=3, seed=0, dtype=torch.float32):
    """With `blocks`, windows are read in one block of a row's table and written in another. The first row's
    destination is the second row's source, and the last row has none.
    """
    torch.manual_seed(seed)
    lengths, kinds = zip(*rows, strict=True)
    table, num_slots = slots_of(kinds, max(blocks, 1))
    read = torch.randint(0, max(blocks, 1), (len(rows),))
    write = (read + 1) % max(blocks, 1)
    sources = table.gather(1, read[:, None])[:, 0]
    live = [row for row, kind in enumerate(kinds) if kind == CONTINUED]
    if blocks and len(live) > 1:
        table[live[0], write[live[0]]] = sources[live[1]]
        table[live[-1], write[live[-1]]] = seed % 2 - 1
    arguments = dict(
        x=tokens_like(lengths, kinds, dim, dtype=dtype),
        weight=torch.randn(dim, width).to(dtype),
        bias=torch.randn(dim).to(dtype) if seed % 2 == 0 else None,
        conv_state=poisoned(num_slots, sources.tolist(), dim, width - 1 + num_spec, dtype=dtype),
        query_start_loc=offsets_of(lengths),
        conv_state_indices=table if blocks else table[:, 0],
        activation="silu" if seed % 3 else None,
    )
    if speculative:
        arguments["num_accepted_tokens"] = torch.randint(0, num_spec + 2, (len(rows),), dtype=torch.int32)
    if blocks:
        arguments |= dict(initial_state_idx=read, block_idx_last_scheduled_token=write)
    return Case("conv_state", arguments)


def state_update_case(
    rows, heads=4, head_dim=4, d_state=8, groups=2, columns=4, speculative=True, other=True, seed=0, max_A=16.0,
    dtype=torch.float32, state_dtype=torch.float32
):  # fmt: skip
    """With `other`, a row's destinations are the sources of the next one, so that rows write what others read.
    Columns behind a row's tokens mean nothing, and the second token of the last row is stored nowhere.
    """
    torch.manual_seed(seed)
    lengths, kinds = zip(*rows, strict=True)
    table, num_slots = slots_of(kinds, columns)
    destinations = table.clone()
    if other:
        live = [row for row, kind in enumerate(kinds) if kind == CONTINUED]
        destinations[live] = table[[*live[1:], *live[:1]]]
        for row in live:
            destinations[row, max(lengths[row], 1) :] = destinations[live[0], 0]
        destinations[live[-1:], 1] = seed % 2 - 1
    accepted = torch.randint(0, columns + 1, (len(rows),), dtype=torch.int32)
    sources = table.gather(1, (accepted.long() - 1).clamp(min=0)[:, None] if speculative else table[:, :1].long() * 0)
    tokens = partial(tokens_like, lengths, kinds, dtype=dtype)
    arguments = dict(
        state=poisoned(num_slots, sources[:, 0].tolist(), heads, head_dim, d_state, dtype=state_dtype),
        x=tokens(heads, head_dim),
        dt=tokens(heads)[..., None].expand(-1, -1, head_dim),
        A=-torch.empty(heads).uniform_(1, max_A)[:, None, None].expand(-1, head_dim, d_state),
        B=tokens(groups, d_state),
        C=tokens(groups, d_state),
        D=torch.randn(heads)[:, None].expand(-1, head_dim),
        dt_bias=torch.randn(heads)[:, None].expand(-1, head_dim),
        z=tokens(heads, head_dim) if seed % 2 else None,
        dt_softplus=True,
        state_batch_indices=table,
        dst_state_batch_indices=destinations if other else None,
        cu_seqlens=offsets_of(lengths),
    )
    if speculative:
        arguments["num_accepted_tokens"] = accepted
    return Case("state", arguments, inputs=("x", "dt"))


def chunk_scan_arguments(lengths, chunk_size, seed=0, max_A=16.0, dtype=torch.float32, misaligned=0):
    """Make the first sequence's first chunk `misaligned` tokens short, so that it goes on where a chunk was left."""
    torch.manual_seed(seed)
    heads, head_dim, groups, d_state = 4, 8, 2, 16
    sizes, owners, last = [], [], []
    for sequence, length in enumerate(lengths):
        room = chunk_size - misaligned if sequence == 0 else chunk_size
        while length:
            sizes.append(min(room, length))
            owners.append(sequence)
            length, room = length - sizes[-1], chunk_size
        last.append(len(sizes) - 1 if owners and owners[-1] == sequence else -1)
    tokens = partial(tokens_like, lengths, [CONTINUED] * len(lengths), dtype=dtype)
    return dict(
        x=tokens(heads, head_dim),
        dt=F.softplus(tokens(heads).float() - 1).to(dtype),
        A=-torch.empty(heads).uniform_(1, max_A),
        B=tokens(groups, d_state),
        C=tokens(groups, d_state),
        chunk_size=chunk_size,
        cu_seqlens=offsets_of(lengths),
        cu_chunk_seqlens=offsets_of(sizes),
        last_chunk_indices=torch.tensor(last, dtype=torch.int32),
        seq_idx=torch.tensor(owners, dtype=torch.int32),
        out=torch.full((sum(lengths) + 2, heads, head_dim), math.nan, dtype=dtype),
        D=torch.randn(heads),
        initial_states=torch.randn(len(lengths), heads, head_dim, d_state),
        state_dtype=torch.float32,
    )


def scan_case(rows, dim=6, d_state=4, groups=2, seed=0, max_A=16.0, dtype=torch.float32, state_dtype=torch.float32):
    torch.manual_seed(seed)
    lengths, kinds = zip(*rows, strict=True)
    table, num_slots = slots_of(kinds)
    readable = [slot for slot, kind in zip(table[:, 0].tolist(), kinds, strict=True) if kind == CONTINUED]
    tokens = partial(tokens_like, lengths, kinds, dtype=dtype)
    arguments = dict(
        u=tokens(dim).T,
        ssm_states=poisoned(num_slots, readable, dim, d_state, dtype=state_dtype),
        delta=tokens(dim).T,
        A=-torch.empty(dim, d_state).uniform_(1, max_A),
        B=tokens(groups, d_state).permute(1, 2, 0),
        C=tokens(groups, d_state).permute(1, 2, 0),
        D=torch.randn(dim),
        z=tokens(dim).T if seed % 2 else None,
        delta_bias=torch.randn(dim),
        delta_softplus=True,
        query_start_loc=offsets_of(lengths),
        cache_indices=table[:, 0],
        has_initial_state=torch.tensor([kind != NEW for kind in kinds]),
    )
    return Case("ssm_states", arguments, inputs=("u", "B", "C"))


def scan_oracle(mistake=None):
    return lambda **arguments: slot_oracles.selective_scan_fn(**arguments, mistake=mistake)[1]


MIXED = [(2, CONTINUED), (5, NULL), (7, CONTINUED), (1, PAD), (1, NEW), (0, CONTINUED), (9, NEW)]
VERIFY = [(4, CONTINUED), (2, NULL), (3, CONTINUED), (1, PAD), (1, CONTINUED), (0, CONTINUED)]
CASES = {
    "causal_conv1d_fn": [conv_fn_case(MIXED, extra_columns=2)],
    "causal_conv1d_update": [
        conv_update_case(VERIFY),
        conv_update_case(VERIFY, speculative=False),
        conv_update_case(VERIFY, blocks=3, seed=2),
    ],
    "selective_state_update": [state_update_case(VERIFY), state_update_case(VERIFY, speculative=False)],
}
MISTAKES = [
    ("causal_conv1d_fn", "shifted twice"),  # R1
    ("causal_conv1d_fn", "padding is computed"),  # R2
    ("causal_conv1d_fn", "width from the state"),  # R12
    ("causal_conv1d_fn", "leftovers of the last sequence"),  # R16
    ("causal_conv1d_fn", "dead output"),  # R17
    ("causal_conv1d_update", "shifted twice"),
    ("causal_conv1d_update", "padding is computed"),
    ("causal_conv1d_update", "one index to read and write"),  # R6
    ("causal_conv1d_update", "read after write"),
    ("causal_conv1d_update", "source is written"),  # R11
    ("causal_conv1d_update", "width from the state"),
    ("causal_conv1d_update", "accepted tokens ignored"),  # R13
    ("causal_conv1d_update", "shift smears"),  # R15
    ("selective_state_update", "padding is computed"),
    ("selective_state_update", "one state per row"),  # R3
    ("selective_state_update", "first column only"),  # R4
    ("selective_state_update", "every token reads the committed state"),  # R5
    ("selective_state_update", "read after write"),
    ("selective_state_update", "source is written"),
    ("selective_state_update", "accepted tokens ignored"),
    ("selective_state_update", "dead output"),
]


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_known_mistakes_are_detected(name, mistake):
    exact, operator = getattr(slot_oracles, name), getattr(operators, name)
    assert all(case.holds(operator, exact) for case in CASES[name])
    assert not all(case.holds(partial(exact, mistake=mistake), exact, double=True) for case in CASES[name])


class TestConvFn:
    @given(rows_of_prefill, st.sampled_from([2, 3, 4]), st.integers(0, 3), seeds)
    def test_equals_the_definition(self, rows, width, extra_columns, seed):
        case = conv_fn_case(rows, 6, width, extra_columns, seed)
        assert case.holds(operators.causal_conv1d_fn, slot_oracles.causal_conv1d_fn)

    def test_half_precision(self):
        case = conv_fn_case(MIXED, dtype=torch.bfloat16, seed=1)
        assert case.holds(operators.causal_conv1d_fn, slot_oracles.causal_conv1d_fn, 1e-2)
        output, _ = case.run(operators.causal_conv1d_fn)
        assert output.dtype == torch.bfloat16 and output.stride() == case.arguments["x"].stride()

    def test_without_a_table_row_b_is_in_slot_b(self):
        case = conv_fn_case([(3, NEW), (2, NEW)])
        case.arguments |= dict(cache_indices=None, has_initial_state=None)
        assert case.holds(operators.causal_conv1d_fn, slot_oracles.causal_conv1d_fn)

    def test_a_table_may_be_longer_than_the_batch(self):
        case = conv_fn_case(MIXED)
        longer = Case(case.state, dict(case.arguments, cache_indices=F.pad(case.arguments["cache_indices"], (0, 3))))
        assert torch.equal(longer.run(operators.causal_conv1d_fn)[0], case.run(operators.causal_conv1d_fn)[0])

    @given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sampled_from([2, 4]))
    def test_cuts(self, pieces, width):
        """A sequence in pieces, shorter than the window or not, gives the whole sequence."""
        history = torch.randn(sum(pieces), 5)
        weight, bias = torch.randn(5, width), torch.randn(5)
        states, outputs, start = torch.full((3, 5, width - 1), math.nan), [], 0
        for piece in pieces:
            x = history[start : start + piece].T
            here = torch.tensor([0, piece]), torch.tensor([2]), torch.tensor([start > 0])
            outputs.append(operators.causal_conv1d_fn(x, weight, bias, states, *here))
            start += piece
        assert agrees(torch.cat(outputs, 1).T, oracles.causal_conv(history, weight, bias))

    def test_cuts_where_windows_are_narrower_than_x(self):
        """Tokens have the precision that a window keeps of them, whether they come from a window or not."""
        x, weight = torch.randn(5, 6), torch.randn(5, 4)
        states, slots = torch.zeros(2, 5, 3, dtype=torch.bfloat16), torch.tensor([1])
        whole = operators.causal_conv1d_fn(x, weight, None, states, torch.tensor([0, 6]), slots)
        first = operators.causal_conv1d_fn(x[:, :4], weight, None, states, torch.tensor([0, 4]), slots)
        more = torch.tensor([True])
        second = operators.causal_conv1d_fn(x[:, 4:5], weight, None, states, torch.tensor([0, 1]), slots, more)
        third = operators.causal_conv1d_update(x[:, 5:].T.clone(), states, weight, None, "silu", slots).T
        assert whole.dtype == torch.float32 and torch.equal(torch.cat([first, second, third], 1), whole)


class TestConvUpdate:
    @given(rows_of_decode, st.sampled_from([2, 3, 4]), st.booleans(), st.sampled_from([0, 3]), seeds)
    def test_equals_the_definition(self, rows, width, speculative, blocks, seed):
        case = conv_update_case(rows, 6, width, speculative, blocks, seed=seed)
        assert case.holds(operators.causal_conv1d_update, slot_oracles.causal_conv1d_update)

    def test_half_precision(self):
        for case in (conv_update_case(VERIFY, dtype=torch.bfloat16), conv_update_case(VERIFY, 6, 4, False, seed=1)):
            assert case.holds(operators.causal_conv1d_update, slot_oracles.causal_conv1d_update, 1e-2)

    @pytest.mark.parametrize("tokens", [None, 1, 3])
    def test_forms_of_x(self, tokens):
        """[batch, dim] and [batch, dim, tokens] give the same as the ragged form with equal rows, in place or not."""
        batch, dim = 3, 5
        x = torch.randn(batch, dim) if tokens is None else torch.randn(batch, dim, tokens)
        ragged = x if tokens is None else x.transpose(1, 2).reshape(-1, dim)
        state, weight = torch.randn(batch + 1, dim, 3), torch.randn(dim, 4)
        slots = torch.tensor([3, 1, 2])
        offsets = torch.arange(batch + 1) * (tokens or 1)
        states = [state.clone() for _ in range(3)]
        expected = operators.causal_conv1d_update(
            ragged.clone(), states[0], weight, None, True, slots, query_start_loc=offsets, max_query_len=tokens or 1
        )
        if tokens:
            expected = expected.view(batch, tokens, dim).transpose(1, 2)
        out, given_x = torch.empty_like(x), x.clone()
        assert operators.causal_conv1d_update(given_x, states[1], weight, None, "swish", slots, out=out) is out
        assert torch.equal(given_x, x)
        assert operators.causal_conv1d_update(given_x, states[2], weight, None, "silu", slots) is given_x
        assert torch.equal(out, expected) and torch.equal(given_x, expected)
        assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])

    def test_short_rows_without_speculation_keep_a_whole_window(self):
        """vLLM 0.33 narrows the window of rows that are shorter than max_query_len."""
        state = torch.randn(2, 5, 3)
        before, x = state.clone(), torch.randn(1, 5)
        slots, offsets = torch.tensor([1]), torch.tensor([0, 1])
        operators.causal_conv1d_update(
            x.clone(), state, torch.randn(5, 4), conv_state_indices=slots, query_start_loc=offsets, max_query_len=3
        )
        assert torch.equal(state[1], torch.cat([before[1, :, 1:], x.T], 1))

    @given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 8), st.booleans())
    def test_verify_steps_are_the_accepted_sequence(self, accepted, prompt, moves):
        """A prompt runs, then steps of one token and three drafts, of which `accepted` count, in one block or from
        block to block. The outputs of accepted tokens are those of the sequence that they make.
        """
        dim, width, drafts = 5, 4, 3
        history = torch.randn(prompt + sum(accepted), dim)
        weight, bias = torch.randn(dim, width), torch.randn(dim)
        states = torch.full((len(accepted) + 3, dim, width - 1 + drafts), math.nan)
        offsets = torch.tensor([0, prompt])
        y = operators.causal_conv1d_fn(history[:prompt].T, weight, bias, states, offsets, torch.tensor([1]))
        outputs = [y.T.contiguous()]
        done, previous, block = prompt, 1, 0
        table = torch.arange(1, len(accepted) + 2)[None]
        for count in accepted:
            x = torch.randn(1 + drafts, dim)
            x[:count] = history[done : done + count]
            operators.causal_conv1d_update(
                x,
                states,
                weight,
                bias,
                "silu",
                table,
                torch.tensor([previous]),
                torch.tensor([0, 1 + drafts]),
                1 + drafts,
                initial_state_idx=torch.tensor([block]),
                block_idx_last_scheduled_token=torch.tensor([block + moves]),
            )
            outputs.append(x[:count])
            done, previous, block = done + count, count, block + moves
        assert agrees(torch.cat(outputs), oracles.causal_conv(history, weight, bias))


class TestStateUpdate:
    @given(
        rows_of_decode,
        st.sampled_from([1, 2, 4]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([2.0, 128.0]),
        seeds,
    )
    def test_equals_the_definition(self, rows, groups, speculative, other, max_A, seed):
        case = state_update_case(rows, 4, 4, 8, groups, 4, speculative, other, seed, max_A)
        assert case.holds(operators.selective_state_update, slot_oracles.selective_state_update)

    def test_half_precision(self):
        case = state_update_case(VERIFY, dtype=torch.bfloat16, state_dtype=torch.bfloat16, seed=1)
        assert case.holds(operators.selective_state_update, slot_oracles.selective_state_update, 1e-2)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_stochastic_rounding(self, dtype):
        """The stored state is the float32 state after that token, rounded as at its position."""
        case = state_update_case(VERIFY, speculative=True, other=False, seed=3, state_dtype=dtype)
        exact = {**case.arguments, "state": case.arguments["state"].float()}
        first = torch.arange(len(exact["cu_seqlens"]) - 1) * 100
        rounded = {**case.arguments, "state": case.arguments["state"].clone()}
        options = dict(enable_stochastic_rounding=True, cache_philox_rounds=7, rounding_seed=5, positions=first)
        y = operators.selective_state_update(**rounded, **options)
        from_exact_states = operators.selective_state_update(**exact)
        assert torch.equal(y, from_exact_states), "the output is computed before the state is rounded"
        lengths = exact["cu_seqlens"].diff()
        for row, (length, slots) in enumerate(zip(lengths, exact["state_batch_indices"], strict=True)):
            for t, slot in enumerate(slots[:length].tolist()):
                if slot > 0:
                    position, state = first[row : row + 1] + t, exact["state"][slot][None]
                    expected = stochastic_round(state, dtype, position, Rounding(5, 0, 7))[0]
                    assert torch.equal(rounded["state"][slot].nan_to_num(), expected.nan_to_num())

    def test_seeds_of_stochastic_rounding(self):
        def states(seed, **options):
            torch.manual_seed(seed)
            state = torch.full((3, 1, 4, 64), 1.0, dtype=torch.float16)
            x, B = torch.ones(3, 1, 4), torch.full((3, 1, 64), 3e-4)
            A = -torch.full((1, 4, 64), 1e-6)
            operators.selective_state_update(state, x, x, A, B, B, enable_stochastic_rounding=True, **options)
            return state

        assert torch.equal(states(1), states(1)) and not torch.equal(states(1), states(2))
        assert torch.equal(states(1, rounding_seed=7), states(2, rounding_seed=7))
        at = [torch.tensor([5, 6, 7]), torch.tensor([7, 7, 7])]
        first, second = (states(1, rounding_seed=7, positions=positions) for positions in at)
        assert torch.equal(first[2], second[0]) and not torch.equal(first[0], second[0])

    @pytest.mark.parametrize("heads", [1, 4])
    def test_one_token_per_row(self, heads):
        """There are no cu_seqlens, indices or heads. x has a row per slot; D, dt_bias and z come in vLLM's order."""
        shape = (3, heads, 4)
        x, z, dt = (torch.randn(shape) for _ in range(3))
        A, D, dt_bias = -torch.rand(heads, 4, 8), torch.randn(heads, 4), torch.randn(heads, 4)
        B, C = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
        state = torch.randn(3, heads, 4, 8)
        exact_state = state.double()
        exact = slot_oracles.selective_state_update(
            exact_state, x, dt, A, B, C, D, dt_bias, z, True, torch.arange(3)[:, None], None, None, None,
            torch.arange(4)
        )  # fmt: skip
        tensors = [state, x, dt, A, B, C, D, dt_bias, z]
        if heads == 1:
            axes = [1, 1, 1, 0, 1, 1, 0, 0, 1]
            tensors = [tensor.squeeze(axis) for tensor, axis in zip(tensors, axes, strict=True)]
            exact = exact[:, 0]
        y = operators.selective_state_update(*tensors, dt_softplus=True)
        assert agrees(y, exact) and agrees(state, exact_state)

    def test_in_place_and_new(self):
        case = state_update_case(VERIFY)
        expected, _ = case.run(operators.selective_state_update)
        for name in ("x", "out"):
            arguments = dict(case.arguments, state=case.arguments["state"].clone(), x=case.arguments["x"].clone())
            out = arguments["x"] if name == "x" else torch.full_like(arguments["x"], math.nan)
            assert operators.selective_state_update(**arguments, out=out) is out and torch.equal(out, expected)

    @given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 30), st.integers(0, 100))
    def test_verify_steps_are_the_accepted_sequence(self, accepted, prompt, seed):
        """A prompt runs by the chunk scan, then verify steps, as for convolution. The last state is the sequence's."""
        drafts, length = 3, prompt + sum(accepted)
        arguments = chunk_scan_arguments([prompt], 8, seed)
        torch.manual_seed(seed)
        inputs = dict(
            x=torch.randn(1, length, 4, 8),
            dt=torch.rand(1, length, 4),
            B=torch.randn(1, length, 2, 16),
            C=torch.randn(1, length, 2, 16),
        )
        A, D = arguments["A"], arguments["D"]
        exact, exact_state = oracles.ssm_recurrence(**inputs, A=A, D=D, state=torch.zeros(1, 4, 8, 16))
        state, columns = torch.full((6, 4, 8, 16), math.nan), torch.tensor([[3, 1, 4, 2]])
        out = torch.empty(prompt, 4, 8)
        arguments |= {name: values[0, :prompt] for name, values in inputs.items()}
        arguments |= dict(final_states_out=state, final_state_indices=columns[0, :1], initial_states=None, out=out)
        assert operators.mamba_chunk_scan_combined_varlen(**arguments) is None
        outputs, done, previous = [out], prompt, 1
        for count in accepted:
            step = {name: torch.randn(1 + drafts, *values.shape[2:]).abs() for name, values in inputs.items()}
            for name, values in inputs.items():
                step[name][:count] = values[0, done : done + count]
            y = operators.selective_state_update(
                state,
                step["x"],
                step["dt"][..., None].expand(-1, -1, 8),
                A[:, None, None].expand(-1, 8, 16),
                step["B"],
                step["C"],
                D[:, None].expand(-1, 8),
                state_batch_indices=columns,
                num_accepted_tokens=torch.tensor([previous]),
                cu_seqlens=torch.tensor([0, 1 + drafts]),
            )
            outputs.append(y[:count])
            done, previous = done + count, count
        assert agrees(torch.cat(outputs), exact[0])
        assert agrees(state[columns[0, previous - 1]], exact_state[0])


class TestChunkScan:
    @settings(max_examples=25)
    @given(
        st.lists(st.integers(0, 40), min_size=1, max_size=4),
        st.sampled_from([3, 8, 64]),
        st.sampled_from([2.0, 128.0]),
        seeds,
    )
    def test_equals_the_recurrence(self, lengths, chunk_size, max_A, seed):
        arguments = chunk_scan_arguments(lengths, chunk_size, seed, max_A, misaligned=seed % chunk_size)
        y, after_chunk, after_sequence = slot_oracles.mamba_chunk_scan_combined_varlen(**arguments)
        states = operators.mamba_chunk_scan_combined_varlen(**arguments)
        assert agrees(arguments["out"], y) and agrees(states, after_sequence)
        states = operators.mamba_chunk_scan_combined_varlen(**arguments, return_intermediate_states=True)
        assert agrees(states, torch.stack(after_chunk) if after_chunk else after_sequence[:0])

    @pytest.mark.parametrize(
        "mistake",
        ["state of the sequence before", "every chunk starts from the initial state", "final states by last chunk"],
    )
    def test_known_mistakes_are_detected(self, mistake):
        """The last mistake is vLLM's: a sequence without tokens has the last chunk -1, which is another sequence's."""
        arguments = chunk_scan_arguments([9, 0, 12], 8, max_A=2.0)
        exact = slot_oracles.mamba_chunk_scan_combined_varlen(**arguments)
        states = operators.mamba_chunk_scan_combined_varlen(**arguments)
        y, _, wrong_states = slot_oracles.mamba_chunk_scan_combined_varlen(**arguments, mistake=mistake)
        assert agrees(arguments["out"], exact[0]) and agrees(states, exact[2])
        assert not (agrees(y, exact[0]) and agrees(wrong_states, exact[2]))

    def test_long_decays(self):
        """sum |dt A| of one chunk is far above 100, and slow tokens follow fast ones."""
        arguments = chunk_scan_arguments([128, 100], 128, max_A=128.0)
        arguments["dt"][:] = 0.7
        arguments["dt"][64:128] = arguments["dt"][200:] = 1e-4
        assert (arguments["dt"][:128, None] * arguments["A"].abs()).sum(0).min() > 100
        y, _, after_sequence = slot_oracles.mamba_chunk_scan_combined_varlen(**arguments)
        states = operators.mamba_chunk_scan_combined_varlen(**arguments)
        assert agrees(arguments["out"], y) and agrees(states, after_sequence)

    def test_half_precision(self):
        arguments = chunk_scan_arguments([40, 3], 16, dtype=torch.bfloat16) | dict(state_dtype=None)
        y, _, after_sequence = slot_oracles.mamba_chunk_scan_combined_varlen(**arguments)
        states = operators.mamba_chunk_scan_combined_varlen(**arguments)
        assert states.dtype == arguments["out"].dtype == torch.bfloat16
        assert agrees(arguments["out"], y, 1e-2) and agrees(states, after_sequence, 1e-2)

    def test_softplus_bias_limit_and_gate(self):
        arguments = chunk_scan_arguments([30, 5], 8)
        raw, bias, z = torch.randn(37, 4), torch.randn(4), torch.randn(37, 4, 8)
        arguments["dt"] = F.softplus(raw + bias).clamp(0.1, 0.9)
        y, _, _ = slot_oracles.mamba_chunk_scan_combined_varlen(**arguments)
        arguments |= dict(dt=raw, dt_bias=bias, dt_softplus=True, dt_limit=(0.1, 0.9), z=z)
        operators.mamba_chunk_scan_combined_varlen(**arguments)
        assert agrees(arguments["out"], y * F.silu(z.double()))

    def test_final_states_go_to_their_slots_and_nowhere_else(self):
        arguments = chunk_scan_arguments([9, 4, 0, 6], 8)
        _, _, after_sequence = slot_oracles.mamba_chunk_scan_combined_varlen(**arguments)
        cache = torch.full((7, 4, 8, 16), math.nan)
        slots = torch.tensor([5, 0, 2, -1], dtype=torch.int32)
        operators.mamba_chunk_scan_combined_varlen(**arguments, final_states_out=cache, final_state_indices=slots)
        expected = torch.full((7, 4, 8, 16), math.nan).double()
        expected[[5, 2]] = after_sequence[[0, 2]]
        assert agrees(cache, expected)


class TestSelectiveScan:
    @given(rows_of_prefill, st.sampled_from([1, 2]), st.sampled_from([2.0, 128.0]), seeds)
    def test_equals_the_definition(self, rows, groups, max_A, seed):
        case = scan_case(rows, 6, 4, groups, seed, max_A)
        assert case.holds(operators.selective_scan_fn, scan_oracle())

    @pytest.mark.parametrize("mistake", ["padding is computed", "leftovers of the last sequence", "dead output"])
    def test_known_mistakes_are_detected(self, mistake):
        case = scan_case(MIXED)
        assert case.holds(operators.selective_scan_fn, scan_oracle())
        assert not case.holds(scan_oracle(mistake), scan_oracle(), double=True)

    def test_half_precision(self):
        case = scan_case(MIXED, dtype=torch.bfloat16, state_dtype=torch.bfloat16, seed=1)
        assert case.holds(operators.selective_scan_fn, scan_oracle(), 1e-2)

    def test_in_place(self):
        """delta receives y before the gate, and z receives the result, which is returned."""
        arguments = scan_case([(5, NEW), (40, CONTINUED)], seed=1).arguments
        exact = arguments | dict(ssm_states=arguments["ssm_states"].double())
        y, gated = slot_oracles.selective_scan_fn(**exact)
        assert operators.selective_scan_fn(**arguments) is arguments["z"]
        assert agrees(arguments["delta"], y) and agrees(arguments["z"], gated)

    def test_batched_equals_ragged(self):
        case = scan_case([(20, CONTINUED), (20, NULL), (20, NEW)], groups=1)
        ragged, ragged_states = case.run(operators.selective_scan_fn)
        batched = dict(case.arguments, query_start_loc=None)
        for name in ("u", "delta", "B", "C"):
            values = case.arguments[name][..., :60]
            batched[name] = values.reshape(-1, 3, 20).transpose(0, 1).contiguous()
        y, states = Case("ssm_states", batched).run(operators.selective_scan_fn)
        assert agrees(y.transpose(0, 1).reshape(6, 60), ragged[:, :60].double(), 1e-6)
        assert agrees(states, ragged_states.double(), 1e-6)

    @pytest.mark.parametrize("cut_by_caller", [True, False])
    def test_block_table(self, cut_by_caller):
        """After each block of 8 the state is in its slot, if it has one, and at the end in the last one's."""
        case = scan_case([(20, CONTINUED), (20, NULL), (5, NEW)])
        arguments = case.arguments
        sizes = [[8, 8, 4], [], [5]] if not cut_by_caller else [[3, 8, 8, 1], [], [5]]
        source = int(arguments["cache_indices"][0])
        states = torch.full((12, 6, 4), math.nan)
        states[10] = arguments["ssm_states"][source]
        slots = [[7, 10, 3, 5, 0, 8], [0] * 6, [1, 2, 4, 6, 0, 0]]
        expected, h = states.double(), states[10].double()
        start = 0
        for size, slot in zip(sizes[0], (5, 0, 8) if not cut_by_caller else (3, 5, 0, 8), strict=True):
            piece = {name: arguments[name][..., start : start + size] for name in ("u", "delta", "B", "C")}
            piece |= dict(query_start_loc=torch.tensor([0, size]), cache_indices=torch.tensor([1]))
            piece |= dict(has_initial_state=torch.tensor([True]), ssm_states=torch.stack([h, h]))
            slot_oracles.selective_scan_fn(**arguments | piece)
            h = piece["ssm_states"][1]
            if slot:
                expected[slot] = h
            start += size
        piece = {name: arguments[name][..., 40:45] for name in ("u", "delta", "B", "C")}
        piece |= dict(query_start_loc=torch.tensor([0, 5]), cache_indices=torch.tensor([1]))
        piece |= dict(has_initial_state=torch.tensor([False]), ssm_states=torch.zeros(2, 6, 4, dtype=torch.float64))
        slot_oracles.selective_scan_fn(**arguments | piece)
        expected[2] = piece["ssm_states"][1]

        first = 2 if cut_by_caller else 3
        arguments |= dict(
            ssm_states=states,
            cache_indices=torch.tensor(slots),
            block_size=8,
            block_idx_first_scheduled_token=torch.tensor([first, 0, 1]),
            block_idx_last_scheduled_token=torch.tensor([5, 0, 1]),
            initial_state_idx=torch.tensor([1, 0, 0]),
        )
        if cut_by_caller:
            arguments["cu_chunk_seqlen"] = torch.tensor([0, 3, 11, 19, 20, 28, 36, 40, 45])
            arguments["last_chunk_indices"] = torch.tensor([3, 6, 7])
        operators.selective_scan_fn(**arguments)
        assert agrees(states, expected)


BLOCKS = ("block_idx_last_scheduled_token", "initial_state_idx")
SOURCES, DESTINATIONS = "state_batch_indices", "dst_state_batch_indices"
# Each entry has an operator's case, the argument that the message must begin with, and the change that makes it wrong.
WRONG = [
    (conv_fn_case, "x", lambda a: dict(x=a["x"][None])),
    (conv_fn_case, "x", lambda a: dict(x=a["x"].nan_to_num().int())),
    (conv_fn_case, "weight", lambda a: dict(weight=a["weight"][1:])),
    (conv_fn_case, "weight", lambda a: dict(weight=a["weight"][:, :1])),
    (conv_fn_case, "bias", lambda a: dict(bias=a["bias"][1:])),
    (conv_fn_case, "conv_states", lambda a: dict(conv_states=a["conv_states"][:, :, 1:])),
    (conv_fn_case, "conv_states", lambda a: dict(conv_states=a["conv_states"][:2], cache_indices=None)),
    (conv_fn_case, "query_start_loc", lambda a: dict(query_start_loc=a["query_start_loc"] + 1)),
    (conv_fn_case, "query_start_loc", lambda a: dict(query_start_loc=a["query_start_loc"] * 2)),
    (conv_fn_case, "query_start_loc", lambda a: dict(query_start_loc=a["query_start_loc"].float())),
    (conv_fn_case, "cache_indices", lambda a: dict(cache_indices=a["cache_indices"] + 5)),
    (conv_fn_case, "cache_indices", lambda a: dict(cache_indices=a["cache_indices"] - 2)),
    (conv_fn_case, "cache_indices", lambda a: dict(cache_indices=a["cache_indices"].clamp(1, 1))),
    (conv_fn_case, "cache_indices", lambda a: dict(cache_indices=a["cache_indices"][1:])),
    (conv_fn_case, "cache_indices", lambda a: dict(cache_indices=table_of(a))),
    (conv_fn_case, "has_initial_state", lambda a: dict(has_initial_state=a["has_initial_state"].int())),
    (conv_fn_case, "activation", lambda a: dict(activation="gelu")),
    (conv_update_case, "x", lambda a: dict(x=a["x"][None])),
    (conv_update_case, "out", lambda a: dict(out=a["x"].double())),
    (conv_update_case, "out", lambda a: dict(out=a["x"][1:])),
    (conv_update_case, "max_query_len", lambda a: dict(max_query_len=2)),
    (conv_update_case, "num_accepted_tokens", lambda a: dict(num_accepted_tokens=a["num_accepted_tokens"] + 5)),
    (conv_update_case, "num_accepted_tokens", lambda a: dict(num_accepted_tokens=a["num_accepted_tokens"][1:])),
    (conv_update_case, "conv_state", lambda a: dict(conv_state=a["conv_state"][:, :, :4], num_accepted_tokens=ones(a))),
    (conv_update_case, "conv_state_indices", lambda a: dict(conv_state_indices=a["conv_state_indices"].clamp(1, 1))),
    (conv_update_case, "initial_state_idx", lambda a: dict(block_idx_last_scheduled_token=ones(a) * 0)),
    (conv_update_case, "initial_state_idx", lambda a: dict(**dict.fromkeys(BLOCKS, ones(a)))),
    (state_update_case, "state", lambda a: dict(state=a["state"][None])),
    (state_update_case, "x", lambda a: dict(x=a["x"][:, 1:])),
    (state_update_case, "dt", lambda a: dict(dt=a["dt"][:, 1:])),
    (state_update_case, "A", lambda a: dict(A=a["A"][:, 0])),
    (state_update_case, "B", lambda a: dict(B=a["B"][1:])),
    (state_update_case, "B", lambda a: dict(B=a["B"][:, [0, 0, 0]], C=a["C"][:, [0, 0, 0]])),
    (state_update_case, "C", lambda a: dict(C=a["C"][:, :1])),
    (state_update_case, "D", lambda a: dict(D=a["D"][0])),
    (state_update_case, "dt_bias", lambda a: dict(dt_bias=a["x"])),
    (state_update_case, "z", lambda a: dict(z=a["x"][1:])),
    (state_update_case, "out", lambda a: dict(out=a["x"][1:])),
    (state_update_case, "cu_seqlens", lambda a: dict(cu_seqlens=a["cu_seqlens"].flip(0))),
    (state_update_case, SOURCES, lambda a: dict(state_batch_indices=a[SOURCES] + 9)),
    (state_update_case, SOURCES, lambda a: dict(state_batch_indices=a[SOURCES][1:])),
    (state_update_case, SOURCES, lambda a: dict(state_batch_indices=None)),
    (state_update_case, DESTINATIONS, lambda a: dict(dst_state_batch_indices=a[SOURCES][:, :2])),
    (state_update_case, DESTINATIONS, lambda a: dict(dst_state_batch_indices=a[SOURCES].clamp(1, 1))),
    (state_update_case, "num_accepted_tokens", lambda a: dict(num_accepted_tokens=ones(a) * 5)),
    (state_update_case, "state", lambda a: dict(enable_stochastic_rounding=True)),
    (state_update_case, "enable_stochastic_rounding", lambda a: dict(rounding_seed=1)),
    (scan_case, "u", lambda a: dict(u=a["u"][1:])),
    (scan_case, "ssm_states", lambda a: dict(ssm_states=a["ssm_states"][:, 1:])),
    (scan_case, "delta", lambda a: dict(delta=a["delta"][:, 1:])),
    (scan_case, "B", lambda a: dict(B=a["B"][..., 1:])),
    (scan_case, "C", lambda a: dict(C=a["C"][1:])),
    (scan_case, "D", lambda a: dict(D=a["D"].int())),
    (scan_case, "cache_indices", lambda a: dict(cache_indices=a["cache_indices"].clamp(1, 1))),
    (scan_case, "cache_indices", lambda a: dict(block_idx_first_scheduled_token=ones(a))),
    (scan_case, BLOCKS[0], lambda a: dict(block_idx_first_scheduled_token=ones(a) * 0, cache_indices=table_of(a))),
]  # fmt: skip


def ones(arguments):
    """Return a one per row."""
    offsets = arguments.get("query_start_loc", arguments.get("cu_seqlens"))
    return torch.ones(len(offsets) - 1, dtype=torch.int64)


def table_of(arguments):
    return arguments["cache_indices"][:, None]


@pytest.mark.parametrize(("make", "argument", "wrong"), WRONG)
def test_wrong_arguments_are_named(make, argument, wrong):
    operator_of = {
        conv_fn_case: operators.causal_conv1d_fn,
        conv_update_case: operators.causal_conv1d_update,
        state_update_case: operators.selective_state_update,
        scan_case: operators.selective_scan_fn,
    }
    arguments = make([(3, CONTINUED), (2, CONTINUED), (1, NULL)]).arguments
    state = arguments[make([(1, NEW)]).state]
    before = state.clone()
    with pytest.raises(ValueError, match=f"^{argument} "):
        operator_of[make](**arguments | wrong(arguments))
    assert torch.equal(state.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("dt", lambda a: dict(dt=a["dt"][:, 1:])),
        ("A", lambda a: dict(A=a["A"][1:])),
        ("B", lambda a: dict(B=a["B"][1:])),
        ("out", lambda a: dict(out=a["out"][1:])),
        ("D", lambda a: dict(D=a["D"][1:])),
        ("initial_states", lambda a: dict(initial_states=a["initial_states"][1:])),
        ("cu_seqlens", lambda a: dict(cu_seqlens=a["cu_seqlens"] + 1)),
        ("cu_chunk_seqlens", lambda a: dict(chunk_size=4)),
        ("seq_idx", lambda a: dict(seq_idx=a["seq_idx"].flip(0))),
        ("seq_idx", lambda a: dict(seq_idx=a["seq_idx"][1:])),
        ("last_chunk_indices", lambda a: dict(last_chunk_indices=a["last_chunk_indices"].flip(0))),
        ("return_intermediate_states", lambda a: dict(return_intermediate_states=True, final_states_out=cache(a))),
        ("final_state_indices", lambda a: dict(final_states_out=cache(a))),
        ("final_state_indices", lambda a: dict(final_states_out=cache(a), final_state_indices=torch.tensor([1, 1]))),
        ("final_state_indices", lambda a: dict(final_states_out=cache(a), final_state_indices=torch.tensor([1, 2]))),
    ],
)
def test_wrong_arguments_of_the_chunk_scan_are_named(argument, wrong):
    arguments = chunk_scan_arguments([9, 4], 8)
    with pytest.raises(ValueError, match=f"^{argument} "):
        operators.mamba_chunk_scan_combined_varlen(**arguments | wrong(arguments))


def cache(arguments):
    return arguments["initial_states"].clone()


# The modules in which vLLM keeps the operators.
VLLM_MODULES = {
    "causal_conv1d_fn": "causal_conv1d",
    "causal_conv1d_update": "causal_conv1d",
    "selective_state_update": "mamba_ssm",
    "selective_scan_fn": "mamba_ssm",
    "mamba_chunk_scan_combined_varlen": "ssd_combined",
}
# vLLM has these arguments until 0.32, for the cache mode "all"; callers pass them by keyword.
GONE = {
    "causal_conv1d_fn": {
        "block_idx_first_scheduled_token",
        "block_idx_last_scheduled_token",
        "initial_state_idx",
        "num_computed_tokens",
        "block_size_to_align",
    },
    "causal_conv1d_update": {"block_idx_last_scheduled_token", "initial_state_idx"},
}


def positional_names(function):
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]


def defined_names(module, name):
    """Return the positional arguments of the function of this name that a module defines. On a CPU the name is
    bound to another function afterwards, whose arguments are in another order.
    """
    tree = ast.parse(inspect.getsource(module))
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return [argument.arg for argument in function.args.posonlyargs + function.args.args]


@pytest.mark.parametrize("name", VLLM_MODULES)
def test_signatures_are_those_of_an_installed_vllm(name):
    """Ours take all that vLLM's do, in the same order. The last ones may come from a later version than this."""
    path = f"vllm.model_executor.layers.mamba.ops.{VLLM_MODULES[name]}"
    module = pytest.importorskip(path, reason="vLLM is not installed", exc_type=ImportError)
    theirs = [argument for argument in defined_names(module, name) if argument not in GONE.get(name, ())]
    assert positional_names(getattr(operators, name))[: len(theirs)] == theirs


def test_signatures_are_vllms():
    """Names are in vLLM 0.33's order, and others are keywords only. This is for machines without vLLM."""
    expected = {
        "causal_conv1d_fn": "x weight bias conv_states query_start_loc cache_indices has_initial_state activation "
        "pad_slot_id null_block_id metadata validate_data",
        "causal_conv1d_update": "x conv_state weight bias activation conv_state_indices num_accepted_tokens "
        "query_start_loc max_query_len null_block_id validate_data out",
        "selective_state_update": "state x dt A B C D dt_bias z dt_softplus state_batch_indices "
        "dst_state_batch_indices null_block_id out num_accepted_tokens cu_seqlens is_blackwell "
        "enable_stochastic_rounding cache_philox_rounds",
        "selective_scan_fn": "u ssm_states delta A B C D z delta_bias delta_softplus query_start_loc cache_indices "
        "has_initial_state null_block_id block_size block_idx_first_scheduled_token block_idx_last_scheduled_token "
        "initial_state_idx cu_chunk_seqlen last_chunk_indices",
        "mamba_chunk_scan_combined_varlen": "x dt A B C chunk_size cu_seqlens cu_chunk_seqlens last_chunk_indices "
        "seq_idx out D z dt_bias initial_states dt_softplus dt_limit return_intermediate_states state_dtype "
        "final_states_out final_state_indices",
    }
    for name, arguments in expected.items():
        assert positional_names(getattr(operators, name)) == arguments.split()
