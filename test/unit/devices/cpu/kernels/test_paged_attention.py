"""Attention over keys and values in pages, against each token's own softmax in float64."""

import math

import pytest
import torch

from granite4_neuron.devices.cpu import operators as cpu

KV_HEADS, SHARED, HEAD_DIM, SCALE = 2, 3, 20, 0.3
# New tokens of each sequence and its length with them: decode, a prompt, its later part, a verify step, nothing.
STEP = ((1, 90), (70, 70), (33, 120), (4, 65), (0, 0), (1, 1))
PADDING = 3

pytestmark = pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")


class Step:
    """Sequences over pages that are NaN wherever no sequence has written. Keys and values share a page."""

    def __init__(self, page_size, dtype=torch.float32):
        torch.manual_seed(2)
        self.page_size, self.dtype = page_size, dtype
        columns = -(-max(length for _, length in STEP) // page_size) + 1
        num_pages = 1 + len(STEP) * columns
        table = 1 + torch.randperm(num_pages - 1)[: len(STEP) * columns].view(len(STEP), columns)
        self.pages = torch.full((len(STEP), columns + 3), -7, dtype=torch.int32)[:, :columns].copy_(table)
        self.starts = torch.tensor([0, *torch.tensor([new for new, _ in STEP]).cumsum(0)], dtype=torch.int32)
        self.lengths = torch.tensor([length for _, length in STEP], dtype=torch.int32)
        memory = torch.full((num_pages, KV_HEADS * 2 * page_size * HEAD_DIM + 24), math.nan, dtype=dtype)
        shared = memory[:, :-24].view(num_pages, KV_HEADS, 2 * page_size, HEAD_DIM)
        self.key_pages, self.value_pages = shared.chunk(2, dim=2)
        self.texts = [torch.randn(2, length, KV_HEADS, HEAD_DIM).to(dtype) for _, length in STEP]
        tokens = int(self.starts[-1])
        projected = torch.full((tokens + PADDING, (SHARED + 2) * KV_HEADS * HEAD_DIM), math.nan, dtype=dtype)
        widths = [SHARED * KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        self.query, self.key, self.value = projected.split(widths, dim=1)
        self.query[:tokens] = torch.randn(tokens, widths[0]).to(dtype)
        for row, (new, length) in enumerate(STEP):
            keys, values = self.texts[row]
            here = slice(int(self.starts[row]), int(self.starts[row + 1]))
            self.key[here], self.value[here] = keys[length - new :].flatten(1), values[length - new :].flatten(1)
            for position in range(length - new):
                page, offset = self.place(row, position)
                self.key_pages[page, :, offset], self.value_pages[page, :, offset] = keys[position], values[position]

    def place(self, row, position):
        return int(self.pages[row, position // self.page_size]), position % self.page_size

    def run(self):
        rows = dict(starts=self.starts, lengths=self.lengths, pages=self.pages)
        pages = self.key_pages, self.value_pages
        return cpu.paged_attention(self.query, self.key, self.value, *pages, **rows, scale=SCALE)

    def exact(self, seen=lambda position: position + 1):
        """Compute attention in float64. A token at `position` sees seen(position) keys."""
        outputs = []
        for row, (new, length) in enumerate(STEP):
            keys, values = (part.double().repeat_interleave(SHARED, dim=1) for part in self.texts[row])
            for n in range(new):
                count = seen(length - new + n)
                query = self.query[int(self.starts[row]) + n].double().unflatten(0, (-1, HEAD_DIM))
                weights = torch.einsum("hd,shd->hs", query * SCALE, keys[:count]).softmax(-1)
                outputs.append(torch.einsum("hs,shd->hd", weights, values[:count]).flatten())
        return torch.stack(outputs)


def agrees(y, exact, tolerance):
    return torch.allclose(y[: len(exact)].double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_size", [32, 48, 64, 544])
def test_paged_attention(page_size):
    """Memory that no sequence has written is NaN, and is not read."""
    step = Step(page_size)
    y = step.run()
    assert agrees(y, step.exact(), 2e-5)
    assert (y[-PADDING:] == 0).all()


def test_16_bits():
    step = Step(96, torch.bfloat16)
    assert agrees(step.run(), step.exact(), 2e-2)


def test_new_keys_and_values_go_to_their_places():
    step = Step(48)
    step.run()
    written = 0
    for row, (_, length) in enumerate(STEP):
        for position in range(length):
            page, offset = step.place(row, position)
            for pages, text in zip((step.key_pages, step.value_pages), step.texts[row], strict=True):
                assert torch.equal(pages[page, :, offset], text[position])
                written += text[position].numel()
    assert step.key_pages.isfinite().sum() + step.value_pages.isfinite().sum() == written


def test_the_same_bits_as_without_pages():
    step = Step(48)
    y = step.run()
    for row, (new, length) in enumerate(STEP):
        if new == 0:
            continue
        keys, values = (part.transpose(0, 1)[None].contiguous() for part in step.texts[row])
        query = step.query[int(step.starts[row]) : int(step.starts[row + 1])].unflatten(1, (-1, HEAD_DIM))[None]
        positions, slot = torch.arange(length - new, length)[None], torch.zeros(1, dtype=torch.int64)
        expected = cpu.cached_attention(query, keys, values, positions, torch.tensor([new]), slot, SCALE, length)
        assert torch.equal(y[int(step.starts[row]) : int(step.starts[row + 1])], expected[0].flatten(1))


@pytest.mark.parametrize("seen", [lambda position: position + 2, lambda position: max(position, 1)])
def test_one_key_too_many_or_too_few_is_detected(seen):
    step = Step(48)
    assert not agrees(step.run(), step.exact(seen), 2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: step.pages.fill_(10**6), "has page 1000000"),
        (lambda step: step.lengths.fill_(3), "is shorter than its new tokens"),
        (lambda step: step.lengths.fill_(10**6), "has too few pages"),
        (lambda step: step.starts.fill_(500), "starts go beyond"),
    ],
)
def test_indices_out_of_range_are_refused(change, message):
    step = Step(48)
    change(step)
    with pytest.raises(RuntimeError, match=message):
        step.run()
