"""The Triton kernels of prompts against their definitions in float64, as in test_kernels.py. A token's numbers stay the
same bit by bit, however a prompt is cut, padded and cached.
"""

import math

import pytest
import torch

from granite4_neuron import ops
from granite4_neuron.devices.cuda import flash_attention, fused_moe, products, ssd_chunk_scan
from granite4_neuron.devices.cuda.causal_conv1d import convolve_tokens
from granite4_neuron.devices.cuda.flash_attention import attend_prompt
from granite4_neuron.devices.cuda.fused_moe import multiply_by_experts
from granite4_neuron.devices.cuda.norms import add_and_normalize, normalize
from granite4_neuron.devices.cuda.operator import LAUNCHES
from granite4_neuron.devices.cuda.products import multiply_tokens
from granite4_neuron.devices.cuda.prompt_mixer import convolve_prompt, scan_prompt
from granite4_neuron.devices.cuda.ssd_chunk_scan import scan_chunks
from granite4_neuron.devices.graphs.mamba import CHUNK_SIZE
from test.support.oracles import relative_error, ssm_recurrence
from test.support.unwritten import unwritten_memory_is_nan
from test.unit.devices.cuda.test_kernels import DEVICE, copied, random, seed
from test.unit.devices.cuda.test_token_kernels import products_of_bfloat16

pytestmark = pytest.mark.versions

pytest.importorskip("triton", reason="Triton is not installed")
__all__ = ["products_of_bfloat16", "seed"]  # fixtures
BFLOAT16 = torch.bfloat16
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(BFLOAT16, marks=pytest.mark.exhaustive)], ids=str
)
# For tests that compare bits: float32 shows another order of sums; on a GPU bfloat16 tests wgmma.
OF_BITS = BFLOAT16 if DEVICE == "cuda" else torch.float32
# Triton's interpreter truncates where a GPU rounds.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2 if DEVICE == "cuda" else 4e-2}


def weights(*shape, dtype):
    return (random(*shape) / shape[-1] ** 0.5).to(dtype)


def launch(operator, *arguments):
    """Return the results, on the CPU; memory that a kernel does not write is NaN."""
    with unwritten_memory_is_nan():
        results = LAUNCHES[operator](*(copied(each, DEVICE) for each in arguments))
    return results.cpu() if isinstance(results, torch.Tensor) else [result.cpu() for result in results]


def exact(*arguments):
    return [
        each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in arguments
    ]


def same_bits(one, other):
    integers = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(integers), other.contiguous().view(integers))


class TestProducts:
    @DTYPES
    @pytest.mark.parametrize(
        ("kind", "columns"),
        [("plain", 128), ("plain", 81), ("bias", 80), ("gated", 80), ("gated", 81), ("in float32", 80)],
        ids=str,
    )
    def test_numbers(self, kind, columns, dtype):
        """Rows are part of a wider tensor. Descriptors do not take rows of 81 numbers."""
        x, weight = random(70, columns + 8, dtype=dtype)[:, :columns], weights(72, columns, dtype=dtype)
        bias = random(72, dtype=dtype) if kind == "bias" else None
        output = launch(multiply_tokens, x, weight, bias, kind == "gated", kind == "in float32")
        expected = multiply_tokens(*exact(x, weight, bias), kind == "gated", False)
        assert output.dtype == (torch.float32 if kind == "in float32" else dtype)
        tolerance = TOLERANCE[torch.float32 if kind == "in float32" else dtype]
        assert relative_error(output, expected) <= tolerance

    @pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
    def test_other_rows_do_not_matter(self, is_gated):
        """Neither the number nor the values of the other rows matter."""
        x, weight = random(150, 80, dtype=OF_BITS), weights(40, 80, dtype=OF_BITS)
        together = launch(multiply_tokens, x, weight, None, is_gated, False)
        for rows in (slice(0, 64), slice(64, 150)):
            assert same_bits(launch(multiply_tokens, x[rows], weight, None, is_gated, False), together[rows])
        x[1::2] = math.nan
        assert same_bits(launch(multiply_tokens, x, weight, None, is_gated, False)[::2], together[::2])

    @pytest.mark.parametrize("columns", [768, 81])
    def test_outputs_show_another_order_of_sums(self, columns):
        """In bfloat16 too. Of other numbers most outputs are the same in both orders."""
        x, weight = products.numbers_that_cancel(3, 5, columns, BFLOAT16, torch.device("cpu"))
        assert (x.shape, weight.shape) == ((3, columns), (5, columns)) and x.dtype == weight.dtype == BFLOAT16
        assert (x.double() @ weight.double().T == 0).all()
        terms = x.float()[:, None] * weight.float()
        ascending, descending = (sum(part.unbind(-1)).to(BFLOAT16) for part in (terms, terms.flip(-1)))
        assert (ascending != descending).float().mean() >= 0.8

    @pytest.mark.skipif(DEVICE != "cuda", reason="cuBLAS is for a GPU")
    def test_a_library_that_divides_sums_is_not_used(self, monkeypatch):
        def divided(x, weight, in_float32):
            return sum(each @ part.T for each, part in zip(x.split(40, 1), weight.split(40, 1), strict=True))

        x, weight = random(150, 80, dtype=BFLOAT16), weights(40, 80, dtype=BFLOAT16)
        expected = launch(multiply_tokens, x, weight, None, False, False)
        monkeypatch.setattr(products, "_library_product", divided)
        assert not same_bits(divided(x, weight, False), expected)
        products._library_adds_alike.cache_clear()
        assert same_bits(launch(multiply_tokens, x, weight, None, False, False), expected)
        products._library_adds_alike.cache_clear()

    def test_tiles_suit_the_number_of_tokens(self):
        x = torch.empty(1, 1, dtype=torch.bfloat16)
        sizes = [products.tiles(x, tokens, 4096, 1) for tokens in (128, 512, 8192)]
        assert [(each["BLOCK_M"], each["BLOCK_N"]) for each in sizes] == [(64, 64), (128, 128), (128, 128)]


@DTYPES
@pytest.mark.parametrize(("is_gated", "groups"), [(False, 1), (True, 2)], ids=["plain", "gated"])
def test_norms(is_gated, groups, dtype):
    """The gate's rows are part of a wider tensor."""
    x, z = random(5, 80), random(5, 90, dtype=dtype)[:, 3:83] if is_gated else None
    weight = 1 + random(80, dtype=dtype)
    output = launch(normalize, x, z, weight, 1e-5, groups)
    assert output.dtype == dtype
    assert relative_error(output, normalize(*exact(x, z, weight), 1e-5, groups)) <= TOLERANCE[dtype]
    alone = launch(normalize, x[3:4], None if z is None else z[3:4], weight, 1e-5, groups)
    assert same_bits(alone, output[3:4])


@DTYPES
def test_sum_and_norm(dtype):
    """Rows of both terms are parts of wider tensors."""
    x, y = random(5, 90)[:, 3:83], random(5, 90, dtype=dtype)[:, 3:83]
    weight = 1 + random(80, dtype=dtype)
    total, normed = launch(add_and_normalize, x, y, 0.22, weight, 1e-5)
    assert total.dtype == torch.float32 and normed.dtype == dtype
    expected, expected_normed = add_and_normalize(*exact(x, y), 0.22, *exact(weight), 1e-5)
    assert relative_error(total, expected) <= 2e-7
    assert relative_error(normed, expected_normed) <= TOLERANCE[dtype]
    alone = launch(add_and_normalize, x[3:4], y[3:4], 0.22, weight, 1e-5)
    assert all(same_bits(one, other[3:4]) for one, other in zip(alone, (total, normed), strict=True))


class TestConvolution:
    @DTYPES
    @pytest.mark.parametrize(("has_bias", "width"), [(False, 2), (True, 4)], ids=["no bias", "bias"])
    def test_numbers(self, has_bias, width, dtype):
        """Rows are part of a wider tensor. Lengths go from no token to all tokens."""
        x = random(4, 37, 90, dtype=dtype)[..., :70]
        state, weight = random(4, 70, width - 1, dtype=dtype), random(70, width, dtype=dtype)
        bias, lengths = random(70, dtype=dtype) if has_bias else None, torch.tensor([0, 1, 20, 37], dtype=torch.int32)
        arguments = x, state, weight, bias
        output, window = launch(convolve_tokens, *arguments, lengths)
        expected, expected_window = ops.causal_conv1d(*exact(*arguments), lengths)
        assert output.dtype == dtype
        assert relative_error(output, expected) <= (2e-6 if dtype == torch.float32 else TOLERANCE[dtype])
        assert same_bits(window, expected_window.to(dtype))

    def test_cuts_do_not_matter(self):
        x, state = random(1, 60, 70), random(1, 70, 3)
        constants = random(70, 4), random(70)
        whole, last = launch(convolve_tokens, x, state, *constants, torch.tensor([60]))
        pieces = []
        for piece in x.split([16, 2, 42], 1):
            output, state = launch(convolve_tokens, piece, state, *constants, torch.tensor([piece.shape[1]]))
            pieces.append(output)
        assert same_bits(torch.cat(pieces, 1), whole) and same_bits(state, last)


class TestScan:
    def inputs(self, tokens, heads=4, head_dim=24, groups=2, d_state=40, batch=1, largest_A=16.0, dtype=torch.float32):
        """Return x, dt, A, B, C and D, where x, B and C are parts of one tensor; and a state."""
        inner, width = heads * head_dim, groups * d_state
        columns = random(batch, tokens, inner + 2 * width, dtype=dtype)
        x = columns[..., :inner].unflatten(-1, (heads, head_dim))
        B, C = (part.unflatten(-1, (groups, d_state)) for part in columns[..., inner:].chunk(2, -1))
        dt, A = torch.nn.functional.softplus(random(batch, tokens, heads)), -torch.linspace(1, largest_A, heads)
        return [x, dt, A, B, C, random(heads, dtype=torch.bfloat16)], random(batch, heads, head_dim, d_state)

    @pytest.mark.parametrize(
        ("tokens", "sizes", "largest_A"),
        [
            (5, {"batch": 2}, 16.0),
            (300, {"heads": 2}, 16.0),
            (130, {"heads": 2, "groups": 1, "head_dim": 32, "d_state": 128}, 300.0),
        ],
        ids=["few tokens", "three chunks", "decays that vanish"],
    )
    def test_numbers(self, tokens, sizes, largest_A):
        """A few long steps among short ones make sums of decays large. Their differences keep their digits."""
        arguments, state = self.inputs(tokens, largest_A=largest_A, **sizes)
        if largest_A > 100:
            arguments[1].mul_(0.01)
            arguments[1][:, 1::40] = 50.0
        outputs = launch(scan_chunks, *arguments, state)
        for ours, expected in zip(outputs, ssm_recurrence(*arguments, state), strict=True):
            assert relative_error(ours, expected) <= 2e-6

    def test_parts_of_long_prompts(self, monkeypatch):
        """Of several sequences; the last part has no whole chunk."""
        monkeypatch.setattr(ssd_chunk_scan, "_MOST_TOKENS", CHUNK_SIZE)
        arguments, state = self.inputs(300, heads=2, batch=2, largest_A=1.0)
        arguments[1].mul_(0.01)  # so that states last
        outputs = launch(scan_chunks, *arguments, state)
        for ours, expected in zip(outputs, ssm_recurrence(*arguments, state), strict=True):
            assert relative_error(ours, expected) <= 2e-6

    @pytest.mark.parametrize(("head_dim", "d_state"), [(24, 40), (32, 64), (32, 128), (64, 128)])
    def test_numbers_of_bfloat16(self, head_dim, d_state):
        """Their products with float32 keep 16 bits, so that only the outputs are rounded."""
        arguments, state = self.inputs(150, 2, head_dim, d_state=d_state, dtype=BFLOAT16)
        y, states = launch(scan_chunks, *arguments, state)
        expected, expected_states = ssm_recurrence(*exact(*arguments), state)
        assert y.dtype == BFLOAT16 and relative_error(y, expected) <= TOLERANCE[BFLOAT16]
        assert relative_error(states, expected_states) <= 5e-5

    @pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
    def test_cuts_and_padding_do_not_matter(self, dtype):
        """300 tokens run together, and in pieces of 128, the last one padded."""
        (x, dt, A, B, C, D), state = self.inputs(384, heads=2, dtype=dtype)
        dt[:, 300:], pieces = 0, []
        whole, last = launch(scan_chunks, x[:, :300], dt[:, :300], A, B[:, :300], C[:, :300], D, state)
        for part in (slice(0, 128), slice(128, 256), slice(256, 384)):
            piece, state = launch(scan_chunks, x[:, part], dt[:, part], A, B[:, part], C[:, part], D, state)
            pieces.append(piece)
        assert same_bits(torch.cat(pieces, 1)[:, :300], whole) and same_bits(state, last)

    def test_padding_alone_keeps_states(self):
        arguments, state = self.inputs(130)
        arguments[1].zero_()
        _, last = launch(scan_chunks, *arguments, state)
        assert same_bits(last, state)


@pytest.mark.parametrize("slots", [[2, 1, 4], None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
def test_mixer_in_place(slots, dtype, monkeypatch):
    """The third sequence begins, whatever its entries held. The second has no tokens, and keeps its entries bit by bit.
    The first goes on for longer than a part. Starts are the first column of positions, as in a step.
    """
    monkeypatch.setattr(ssd_chunk_scan, "_MOST_TOKENS", CHUNK_SIZE)
    heads, head_dim, d_state, tokens = 2, 32, 16, 150
    channels = heads * head_dim + 2 * d_state
    xBC_dt = random(3, tokens, channels + heads, dtype=dtype)
    xBC, dt = xBC_dt[..., :channels], xBC_dt[..., channels:]
    states = random(4, channels, 3, dtype=dtype), random(4, heads, head_dim, d_state)
    positions = torch.tensor([[384], [0], [0]]) + torch.arange(tokens)
    index = positions[:, 0], torch.tensor([150, 0, 90], dtype=torch.int32)
    index = *index, None if slots is None else torch.tensor(slots, dtype=torch.int32)
    entries = [0, 1, 2] if slots is None else [slot - 1 for slot in slots]
    for state in states:
        state[entries[2]] = math.nan
    convolution = xBC, random(channels, 4, dtype=dtype), random(channels, dtype=dtype)
    others, limits = (random(heads), torch.rand(heads), random(heads)), (0.01, 2.0)
    results = []
    for convolve, scan in ((convolve_prompt, scan_prompt), map(LAUNCHES.get, (convolve_prompt, scan_prompt))):
        device = "cpu" if convolve is convolve_prompt else DEVICE
        conv_state, ssm_state = (copied(state[: len(states[0]) if slots else 3], device) for state in states)
        there = [copied(each, device) for each in index]
        y = convolve(*(copied(each, device) for each in convolution), conv_state, *there)
        outputs = scan(y, copied(dt, device), *(copied(each, device) for each in others), ssm_state, *there, *limits)
        results.append([each.cpu() for each in (y, outputs, conv_state, ssm_state)])
    (y, outputs, conv_state, ssm_state), (our_y, our_outputs, our_conv_state, our_ssm_state) = results
    for row, length in enumerate((150, 0, 90)):
        for ours, theirs in ((our_y, y), (our_outputs, outputs)):
            assert length == 0 or relative_error(ours[row, :length], theirs[row, :length]) <= TOLERANCE[dtype]
    assert same_bits(our_conv_state, conv_state)
    assert relative_error(our_ssm_state, ssm_state) <= TOLERANCE[dtype]
    for ours, before in ((our_conv_state, states[0]), (our_ssm_state, states[1])):
        for entry in {*range(len(ours))} - {entries[0], entries[2]}:
            assert same_bits(ours[entry], before[entry])


SPREAD = 0.3 * 24**0.5  # of scores
# In 16 bits a GPU of compute capability 9.0 has other kernels for heads of 64 and 128; the interpreter has none.
HEAD_DIMS = pytest.mark.parametrize("head_dim", [24, 64, 128] if DEVICE == "cuda" else [24])


class TestAttention:
    def inputs(self, ends, tokens, dtype, head_dim, max_length=160):
        """Return a query, caches and the sequences' places. Entries that no sequence has written are NaN."""
        positions = torch.tensor(ends)[:, None] - tokens + torch.arange(tokens)
        key, value = (random(len(ends) + 1, 2, max_length, head_dim, dtype=dtype) for _ in range(2))
        for cache in (key, value):
            for row, end in enumerate(ends, 1):
                cache[row, :, end:] = math.nan
            cache[0] = math.nan
        return random(len(ends), tokens, 4, head_dim, dtype=dtype), key, value, positions.int()

    @HEAD_DIMS
    @pytest.mark.parametrize(
        ("slots", "dtype"),
        [
            ([2, 1, 3], torch.float32),
            *(pytest.param(each, BFLOAT16, marks=pytest.mark.exhaustive) for each in ([2, 1, 3], None)),
        ],
        ids=str,
    )
    def test_numbers(self, slots, dtype, head_dim):
        """The third sequence has no tokens."""
        scale = SPREAD * head_dim**-0.5
        query, key, value, positions = self.inputs([150, 150, 150] if slots else [150, 70, 70], 70, dtype, head_dim)
        lengths = torch.tensor([70, 70, 0], dtype=torch.int32)
        where = positions, lengths, None if slots is None else torch.tensor(slots, dtype=torch.int32)
        output = launch(attend_prompt, query, key, value, *where, scale)
        expected = ops.cached_attention(*exact(query, key, value), *where, scale, key.shape[2])
        assert output.dtype == dtype and output.isfinite().all()
        assert relative_error(output[:2], expected[:2]) <= TOLERANCE[dtype]

    @HEAD_DIMS
    def test_cuts_padding_and_the_caches_length_do_not_matter(self, head_dim, dtype=OF_BITS):
        scale = SPREAD * head_dim**-0.5
        query, key, value, positions = self.inputs([150], 150, dtype, head_dim)
        slots, longer = torch.tensor([1]), torch.full((2, 2, 700, head_dim), math.nan, dtype=dtype)
        whole = launch(attend_prompt, query, key, value, positions, torch.tensor([150]), slots, scale)
        for part in (slice(0, 128), slice(128, 150)):
            where = positions[:, part], torch.tensor([part.stop - part.start]), slots
            assert same_bits(launch(attend_prompt, query[:, part], key, value, *where, scale), whole[:, part])
        longer_key, longer_value = longer.clone(), longer.clone()
        longer_key[:, :, :160], longer_value[:, :, :160] = key, value
        padded = torch.cat([query, torch.zeros(1, 40, 4, head_dim, dtype=dtype)], 1), longer_key, longer_value
        where = torch.arange(190, dtype=torch.int32)[None], torch.tensor([150]), slots
        assert same_bits(launch(attend_prompt, *padded, *where, scale)[:, :150], whole)

    @pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter has one kernel for all numbers of programs")
    def test_the_number_of_programs_does_not_matter(self, tokens=4400, rest=300):
        """A program has fewer tokens if a GPU runs all programs at once."""
        query, *caches, positions = self.inputs([tokens], tokens, BFLOAT16, 64, max_length=tokens)
        whole, part = (
            launch(attend_prompt, query[:, -n:], *caches, positions[:, -n:], torch.tensor([n]), torch.tensor([1]), 0.1)
            for n in (tokens, rest)
        )
        assert same_bits(part, whole[:, -rest:])

    def test_blocks_of_keys_are_at_multiples_of_their_size(self):
        assert 128 % flash_attention._BLOCK_M == 128 % flash_attention._BLOCK_KV == 0


class TestExperts:
    def inputs(self, tokens, dtype, spread=1.0, experts=6, hidden=40, width=24):
        logits = random(tokens, experts) * spread + torch.tensor([0.0, 0.1, 0.0, 0.0, 0.2, 0.0])
        chosen = ops.topk_softmax(logits, 2)
        matrices = weights(experts, 2 * width, hidden, dtype=dtype), weights(experts, hidden, width, dtype=dtype)
        return random(tokens, hidden, dtype=dtype), *matrices, *chosen

    @DTYPES
    @pytest.mark.parametrize(("tokens", "spread", "hidden"), [(3, 1.0, 40), (80, 0.0, 40), (80, 0.0, 42)], ids=str)
    def test_numbers(self, tokens, spread, hidden, dtype, monkeypatch):
        """If all tokens choose the same two experts, these have several blocks, and so have the lists of choices.
        Descriptors do not take rows of 42 numbers.
        """
        monkeypatch.setattr(fused_moe, "_BLOCK_OF_CHOICES", 64)
        arguments = self.inputs(tokens, dtype, spread, hidden=hidden)
        output = launch(multiply_by_experts, *arguments)
        assert output.dtype == dtype
        x, w1, w2, topk_weights, topk_ids = exact(*arguments)
        expected = torch.zeros_like(x)
        for place in range(2):
            gate, up = torch.einsum("tnk,tk->tn", w1[topk_ids[:, place]], x).chunk(2, -1)
            y = torch.einsum("tnk,tk->tn", w2[topk_ids[:, place]], torch.nn.functional.silu(gate) * up)
            expected += topk_weights[:, place, None] * y
        assert relative_error(output, expected) <= TOLERANCE[dtype]

    def test_other_tokens_do_not_matter(self):
        """Neither the number, the experts nor the values of other tokens matter."""
        x, w1, w2, *chosen = self.inputs(80, OF_BITS, spread=0.0)
        together = launch(multiply_by_experts, x, w1, w2, *chosen)
        for rows in (slice(0, 64), slice(64, 80)):
            some = x[rows], w1, w2, *(each[rows] for each in chosen)
            assert same_bits(launch(multiply_by_experts, *some), together[rows])
        x[1::2] = math.nan
        assert same_bits(launch(multiply_by_experts, x, w1, w2, *chosen)[::2], together[::2])
