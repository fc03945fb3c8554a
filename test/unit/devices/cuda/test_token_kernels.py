"""The Triton kernels of a token of each sequence against their definitions, as in test_kernels.py."""

import math
from types import SimpleNamespace

import pytest
import torch

from granite4_neuron.devices.cuda import gemv, token_many
from granite4_neuron.devices.cuda.head import score_tokens
from granite4_neuron.devices.cuda.operator import LAUNCHES
from granite4_neuron.devices.cuda.token_operators import ManyRowsOperators, OneRowOperators, TokenOperators
from test.support import inline_ptx
from test.support.unwritten import unwritten_memory_is_nan
from test.unit.devices.cuda.test_kernels import DEVICE, DTYPES, copied, random, seed

pytestmark = pytest.mark.versions

tl = pytest.importorskip("triton.language", reason="Triton is not installed")
__all__ = ["seed"]  # a fixture
# Triton's interpreter truncates where a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2 if DEVICE == "cuda" else 4e-2}
# A program's rows and columns are powers of two; most of these sizes are not. The interpreter is slow.
SIZES = pytest.mark.parametrize("columns", [16, 80, 768, 5000] if DEVICE == "cuda" else [80, 768])
EPS = 1e-5


# (rows, the operators, the size from which on a program of one row reads two tiles of a matrix)
BATCHES = {
    "one": (1, OneRowOperators, 2**24),
    "one, two tiles": (1, OneRowOperators, 1),
    "one of any number": (1, TokenOperators, 1),
    "twenty": (20, TokenOperators, 1),
    "forty": (40, TokenOperators, 1),
    "forty, which are many": (40, ManyRowsOperators, 1),
}
if DEVICE != "cuda":  # the interpreter is slow
    del BATCHES["one of any number"], BATCHES["twenty"]


@pytest.fixture(params=BATCHES.values(), ids=BATCHES)
def rows(request, monkeypatch):
    """Return (the number of rows, the operators)."""
    batch, operators, size = request.param
    monkeypatch.setattr(gemv, "_MIN_SIZE_OF_TWO_TILES", size)
    return batch, operators


@pytest.fixture
def batch(rows):
    return rows[0]


@pytest.fixture
def operators(rows):
    return rows[1]


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch):
    """Have the interpreter multiply the values of bfloat16, not the bits, and add from the first column on, as a GPU
    does: NumPy's order depends on the shapes. Have it round a fused multiply-add once. And give it what a GPU's
    instructions for bytes and bits do.
    """
    if DEVICE == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

    def values(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype("uint32") << 16).view("float32")

    def create_dot(self, a, b, acc, *others):
        total = acc.data.copy()
        for row, column in zip(values(b), values(a).T, strict=True):
            total += column[:, None] * row
        return TensorHandle(total, acc.dtype.scalar)

    def create_fma(self, x, y, z):
        exact = x.data.astype("float64") * y.data + z.data
        return TensorHandle(exact.astype(x.data.dtype), x.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fma", create_fma)

    def create_inline_asm(self, assembly, constraints, handles, types, is_pure, pack):
        types = [each.scalar for each in types]
        dtypes = [_get_np_dtype(each) for each in types]
        outputs = inline_ptx.run(assembly, constraints, [each.data for each in handles], dtypes)
        outputs = [TensorHandle(*each) for each in zip(outputs, types, strict=True)]
        return SimpleNamespace(get_result=outputs.__getitem__)

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", create_inline_asm)


def lengths_of(batch, length):
    """Return lengths of sequences: the last one has `length`; the others alternate between real and idle."""
    return torch.tensor([number % 2 for number in range(batch - 1)] + [length], dtype=torch.int32)


def slots_of(batch):
    """Return (the number of sequences of a state, the slots of a batch's rows): forty rows look up their state."""
    if batch != 40:
        return batch, None
    return 43, 1 + torch.randperm(43)[:batch].int()


def weights(*shape, dtype):
    return (random(*shape) / shape[-1] ** 0.5).to(dtype)


def compare(operator, *arguments, dtype=torch.float32, real=None, **constants):
    """Compare results and arguments written in place, and return the definition's results. With the lengths `real` only
    sequences that are not idle count.
    """
    theirs, ours = [[copied(each, device) for each in arguments] for device in ("cpu", DEVICE)]
    expected, outputs = operator(*theirs, **constants), LAUNCHES[operator](*ours, **constants)
    if not isinstance(expected, tuple):
        expected, outputs = ([] if each is None else [each] for each in (expected, outputs))
    if real is not None:
        outputs, expected = ([of_real(each, real) for each in those] for those in (outputs, expected))
    for mine, other in zip([*outputs, *ours], [*expected, *theirs], strict=True):
        if isinstance(other, torch.Tensor) and other.numel():
            mine = mine.cpu()
            assert mine.dtype == other.dtype and mine.shape == other.shape
            if not other.is_floating_point():
                assert torch.equal(mine, other)
                continue
            largest = other.nan_to_num().abs().max().item()
            torch.testing.assert_close(mine, other, rtol=0, atol=TOLERANCE[dtype] * largest, equal_nan=True)
    return expected


def of_real(values, lengths):
    """Return rows of sequences that are not idle."""
    return values[(lengths > 0).repeat_interleave(len(values) // len(lengths)).to(values.device)]


@DTYPES
@SIZES
@pytest.mark.parametrize(("has_bias", "length"), [(True, 1), (False, 0)], ids=["bias, real", "no bias, idle"])
def test_mixer_inputs(has_bias, length, columns, dtype, batch, operators):
    channels, num_heads, taps = 21, 3, 4
    sequences, slots = slots_of(batch)
    convolution = (
        random(channels, taps, dtype=dtype),
        random(channels, dtype=dtype) if has_bias else None,
        random(sequences, channels, taps - 1, dtype=dtype),
        lengths_of(batch, length),
        slots,
    )
    weight = weights(13 + channels + num_heads, columns, dtype=dtype)
    arguments = random(batch, columns), 1 + random(columns, dtype=dtype), weight, *convolution
    compare(operators.mixer_inputs, *arguments, dtype=dtype, num_heads=num_heads, eps=EPS)


@pytest.mark.parametrize(("length", "limits"), [(1, (0.0, math.inf)), (1, (0.01, 1.0)), (0, (0.01, 1.0))], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "d_state", "groups", "dtype"), [(32, 128, 1, torch.float32), (24, 24, 2, torch.bfloat16)]
)
def test_recurrence(head_dim, d_state, groups, length, limits, dtype, batch, operators):
    """dt goes from almost zero to values where softplus is the identity."""
    heads = 6
    inputs = random(batch, 2 * heads * head_dim + 2 * groups * d_state + heads)
    inputs[-1, -heads:] = torch.tensor([-12.0, -5.0, 0.0, 2.0, 19.0, 25.0])
    constants = [random(heads, dtype=dtype) for _ in range(3)]
    (sequences, slots), lengths = slots_of(batch), lengths_of(batch, length)
    state = random(sequences, heads, head_dim, d_state)
    before = state.clone()
    compare(operators.advance_mixer, inputs, *constants, state, lengths, *limits, slots, real=lengths)
    assert torch.equal(state, before)
    inputs[-1, -1] = state[-1, 0] = math.nan
    compare(operators.advance_mixer, inputs, *constants, state, lengths, *limits, slots, real=lengths)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_recurrence_of_a_rounded_state(dtype, batch, operators):
    """The state has the definition's bits, except where a sum in another order is at the other side of a number."""
    heads, head_dim, d_state = 3, 24, 72
    inputs = random(batch, 2 * heads * head_dim + 2 * d_state + heads)
    (sequences, slots), lengths = slots_of(batch), lengths_of(batch, 1)
    state = random(sequences, heads, head_dim, d_state, dtype=dtype)
    positions, stream = torch.arange(100, 100 + batch, dtype=torch.int32), torch.tensor(5)
    arguments = inputs, *(random(heads) for _ in range(3)), state, lengths, 0.01, 1.0, slots, positions, stream
    theirs, ours = [[copied(each, device) for each in arguments] for device in ("cpu", DEVICE)]
    expected, outputs = operators.advance_mixer(*theirs), LAUNCHES[operators.advance_mixer](*ours)
    torch.testing.assert_close(of_real(outputs.cpu(), lengths), of_real(expected, lengths), rtol=0, atol=1e-4)
    found, expected, before = ours[4].cpu(), theirs[4], arguments[4]
    assert not torch.equal(expected, before) and (found != expected).float().mean() < 1e-3
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-6)
    idle = (torch.arange(batch) if slots is None else slots - 1)[lengths == 0]
    assert torch.equal(found[idle], before[idle])


@DTYPES
@SIZES
def test_heads(columns, dtype, batch, operators):
    parts = [weights(rows, columns, dtype=dtype) for rows in (37, 11, 11)]
    compare(operators.project_heads, random(batch, columns), 1 + random(columns, dtype=dtype), *parts, EPS, dtype=dtype)


@DTYPES
@SIZES
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
def test_sum_with_a_product(has_norm, columns, dtype, batch, operators):
    x, norm = random(batch, columns, dtype=dtype), None
    if has_norm:
        x, norm = 3 * random(batch, columns), 1 + random(columns, dtype=dtype)
    compare(
        operators.add_product, random(batch, 22), x, norm, weights(22, columns, dtype=dtype), 0.22, EPS, dtype=dtype
    )


@DTYPES
@SIZES
def test_mlp(columns, dtype, batch, operators):
    arguments = random(batch, columns), 1 + random(columns, dtype=dtype), weights(44, columns, dtype=dtype)
    compare(operators.activate, *arguments, EPS, dtype=dtype)


@DTYPES
@SIZES
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "no norm"])
def test_sum_with_a_product_and_an_mlp(has_norm, columns, dtype, monkeypatch):
    """Products are cut into parts; the last one may be shorter."""
    monkeypatch.setattr(token_many, "_PART_COLUMNS", 192)
    rows, hidden, width = 40, 208, 208
    x, norm = random(rows, columns, dtype=dtype), None
    if has_norm:
        x, norm = 3 * random(rows, columns), 1 + random(columns, dtype=dtype)
    shapes = (hidden, columns), (2 * width, hidden), (hidden, width)
    output, first, second = (weights(*shape, dtype=dtype) for shape in shapes)
    arguments = random(rows, hidden), x, norm, output, 1 + random(hidden, dtype=dtype), first, second
    compare(ManyRowsOperators.add_product_and_mlp, *arguments, 0.22, EPS, dtype=dtype)


@DTYPES
@SIZES
def test_logits_of_many(columns, dtype):
    x, weight = random(40, columns, dtype=dtype), weights(75, columns, dtype=dtype)
    compare(token_many.score_tokens, x, weight, 3.0, dtype=dtype)


@pytest.mark.parametrize(
    ("experts", "top_k", "columns", "dtype"),
    [
        (6, 2, 16, torch.float32),
        (6, 2, 5000, torch.bfloat16),
        (5, 5, 80, torch.float32),
        (72, 10, 80, torch.bfloat16),
    ],
)
def test_experts(experts, top_k, columns, dtype, batch, operators):
    """Router logits are whole numbers, so that some are equal; then they are NaN, which must reach the result."""
    x, norm = random(batch, columns), 1 + random(columns, dtype=dtype)
    all_real, some_idle = torch.ones(batch, dtype=torch.int32), lengths_of(batch, 1)
    normed, logits = compare(operators.route, x, norm, weights(experts, columns, dtype=dtype), EPS, dtype=dtype)
    logits = logits.mul(3).round()
    first, w1 = weights(42, columns, dtype=dtype), weights(experts, 36, columns, dtype=dtype)
    compare(operators.activate_experts, normed, first, w1, logits, some_idle, top_k, dtype=dtype, real=some_idle)
    activated = compare(operators.activate_experts, normed, first, w1, logits, all_real, top_k, dtype=dtype)
    second, w2 = weights(24, 21, dtype=dtype), weights(experts, 24, 18, dtype=dtype)
    of_nan = torch.full_like(logits, math.nan)
    for each, lengths in ((logits, some_idle), (logits, all_real), (of_nan, all_real)):
        arguments = random(batch, 24), activated[0], second, activated[1], w2, each, lengths, 0.3
        compare(operators.add_feed_forward, *arguments, dtype=dtype, real=lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [None, [4, 1, 5]], ids=["in order", "looked up"])
def test_verified_mixer(slots, dtype):
    """One of three sequences begins, one has fewer tokens, and one is idle."""
    slots, sequences = (None, 3) if slots is None else (torch.tensor(slots, dtype=torch.int32), 5)
    batch, tokens, heads, head_dim, d_state, taps = 3, 4, 4, 24, 16, 4
    inner = heads * head_dim
    channels = inner + 2 * d_state
    starts, lengths = torch.tensor([[0, 4], [7, 2], [9, 0]], dtype=torch.int32).unbind(1)
    x, norm, weight = random(12, 80), 1 + random(80, dtype=dtype), weights(inner + channels + heads, 80, dtype=dtype)
    [projected] = compare(TokenOperators.project, x, norm, weight, EPS, dtype=dtype)
    convolution = random(channels, taps, dtype=dtype), random(channels, dtype=dtype)
    conv_state = random(sequences, channels, taps - 1, dtype=dtype)
    projected = projected.view(batch, tokens, -1)
    arguments = projected, *convolution, conv_state, starts, heads, slots
    [inputs] = compare(TokenOperators.convolve_verified, *arguments, dtype=dtype)
    head_params, ssm_state = [random(heads, dtype=dtype) for _ in range(3)], random(sequences, heads, head_dim, d_state)
    is_real = (torch.arange(tokens) < lengths[:, None]).flatten().int()
    index = starts, lengths, 0.0, 1.0, slots
    compare(TokenOperators.scan_verified, inputs, *head_params, ssm_state, *index, real=is_real)
    kept = projected[..., inner:]
    arguments = kept, *convolution, *head_params, conv_state, ssm_state, *index
    compare(TokenOperators.advance_verified, *arguments, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_a_verified_mixer_has_the_bits_of_decode(dtype, state_dtype):
    """The second of two sequences has fewer tokens. Accepted tokens advance the state as decode does, which is rounded
    after every token if it has 16 bits.
    """
    batch, tokens, heads, head_dim, d_state, taps, columns = 2, 3, 2, 16, 16, 4, 32
    inner, launch = heads * head_dim, LAUNCHES
    channels = inner + 2 * d_state
    lengths, starts = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([7, 9], dtype=torch.int32)
    x, norm = random(batch, tokens, columns), 1 + random(columns, dtype=dtype)
    weight, conv_weight = weights(inner + channels + heads, columns, dtype=dtype), random(channels, taps, dtype=dtype)
    conv_state = random(batch, channels, taps - 1, dtype=dtype)
    ssm_state = random(batch, heads, head_dim, d_state, dtype=state_dtype)
    stream = None if state_dtype == torch.float32 else torch.tensor(3, device=DEVICE)
    head_params, conv_bias = [random(heads, dtype=dtype) for _ in range(3)], random(channels, dtype=dtype)
    given = [x, norm, weight, conv_weight, conv_bias, *head_params, lengths, starts]
    x, norm, weight, conv_weight, conv_bias, *head_params, lengths, starts = (each.to(DEVICE) for each in given)
    head_params, limits = (*head_params,), (0.0, math.inf)

    decoded, states = [], [conv_state.to(DEVICE).clone(), ssm_state.to(DEVICE).clone()]
    for token in range(tokens):
        real, convolution = (lengths > token).int(), (conv_weight, conv_bias, states[0])
        token_inputs = launch[TokenOperators.mixer_inputs](
            x[:, token].contiguous(), norm, weight, *convolution, real, num_heads=heads, eps=EPS
        )
        rounding = None, starts + token, stream
        decoded.append(
            launch[TokenOperators.advance_mixer](token_inputs, *head_params, states[1], real, *limits, *rounding)
        )

    before = [conv_state.to(DEVICE), ssm_state.to(DEVICE)]
    projected = launch[TokenOperators.project](x.flatten(0, 1), norm, weight, EPS).view(batch, tokens, -1)
    inputs = launch[TokenOperators.convolve_verified](projected, conv_weight, conv_bias, before[0], starts, heads)
    index = starts, lengths, *limits, None, stream
    y = launch[TokenOperators.scan_verified](inputs, *head_params, before[1], *index)
    for row, length in enumerate(lengths.tolist()):
        for token in range(length):
            assert torch.equal(y.view(batch, tokens, -1)[row, token], decoded[token][row])
    kept = projected[..., inner:]
    launch[TokenOperators.advance_verified](kept, conv_weight, conv_bias, *head_params, *before, *index)
    assert all(map(torch.equal, before, states))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_do_not_depend_on_other_rows(dtype):
    """The row runs alone, in another place among others, and after the rows of one program."""
    columns, rows, experts = 80, 40, 6
    x, norm = random(rows, columns), 1 + random(columns, dtype=dtype)
    by_rows = {
        TokenOperators.project: (x, norm, weights(37, columns, dtype=dtype), EPS),
        TokenOperators.project_heads: (x, norm, *(weights(16, columns, dtype=dtype) for _ in range(3)), EPS),
        TokenOperators.activate: (x, norm, weights(44, columns, dtype=dtype), EPS),
        TokenOperators.route: (x, norm, weights(experts, columns, dtype=dtype), EPS),
        score_tokens: (random(rows, columns, dtype=dtype), weights(50, columns, dtype=dtype), 3.0),
    }
    for operator, (values, *others) in by_rows.items():
        others = [each.to(DEVICE) if isinstance(each, torch.Tensor) else each for each in others]
        outcomes = {
            count: LAUNCHES[operator](values[-count:].flip(0).contiguous().to(DEVICE), *others)
            for count in (1, 3, rows)
        }
        for outcome in outcomes.values():
            outcome = outcome if isinstance(outcome, tuple) else (outcome,)
            expected = outcomes[1] if isinstance(outcomes[1], tuple) else (outcomes[1],)
            assert all(torch.equal(mine[0], its[0]) for mine, its in zip(outcome, expected, strict=True)), operator


def test_idle_sequences_choose_no_expert():
    lengths, top_k, experts = lengths_of(8, 1), 2, 6
    arguments = random(8, 16), weights(42, 16, dtype=torch.float32), weights(experts, 36, 16, dtype=torch.float32)
    normed, first, w1, logits, lengths = (each.to(DEVICE) for each in (*arguments, random(8, experts), lengths))
    with unwritten_memory_is_nan():
        _, outputs = LAUNCHES[TokenOperators.activate_experts](normed, first, w1, logits, lengths, top_k)
    is_written = ~outputs.isnan().view(8, -1).any(1)
    assert torch.equal(is_written, lengths > 0)
