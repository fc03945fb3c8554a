"""State that a graph writes in place: whole tensors, caches of keys and values, and views of one slot.

The source of TorchNeuron's beta allows a graph to write its inputs. AWS's documentation does not mention it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.probe.device import compiled, judge, memory_bytes, milliseconds, to_device
from benchmarks.probe.process import EQUAL, FACT, WRONG, Finding, Place
from granite4_neuron.devices.graphs.operators import write_cache_as
from granite4_neuron.ops import write_cache

MEGABYTES = (8, 32, 128)  # sizes of caches
# A write by index takes the same time for any size of the cache. Measured times of such a write vary by less than this.
_MOST_GROWTH = 2.0


@torch.no_grad()
def alias(place: Place) -> Iterator[Finding]:
    """A graph that writes a whole input, 64 MB, over and over."""

    def step(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.copy_(state * 0.5 + x)
        return x[:1] + 0  # a graph for Neuron must have an output

    expected, x = torch.randn(16, 1024, 1024), torch.randn(1024)
    (state, given), run = to_device(place, (expected, x)), compiled(place, step)
    address, used = state.data_ptr(), []
    for _ in range(10):
        step(expected, x)
        run(state, given)
        used.append(memory_bytes(place))
    yield judge("value", state, expected)
    yield Finding("address", EQUAL if state.data_ptr() == address else WRONG)
    if used[-1] is None:
        yield Finding("memory", FACT, message="the device does not say")
        return
    growth = used[-1] - used[1]
    verdict, message = EQUAL if growth < state.nbytes else WRONG, f"{growth / 2**20:.0f} MiB more after 8 more steps"
    yield Finding("memory", verdict, message=message, numbers={"growth_bytes": growth})


@torch.no_grad()
def kv_write(place: Place, form: str) -> Iterator[Finding]:
    """One token of each of 7 sequences, of which one idles, and 128 tokens of one, in caches of 8, 32 and 128 MB."""
    lengths = torch.tensor([1, 1, 0, 1, 1, 1, 1], dtype=torch.int32)
    slots = torch.arange(1, 8, dtype=torch.int32).where(lengths > 0, 0)
    positions = torch.tensor([0, 3, 5, 100, 511, 900, 1023], dtype=torch.int32)[:, None]
    decode = (positions, lengths, slots)
    prefill = (torch.arange(200, 328, dtype=torch.int32)[None], *torch.tensor([[100], [3]], dtype=torch.int32))
    for what, index in (("decode", decode), ("prefill", prefill)):
        values = torch.randn(*index[0].shape, 4, 128).bfloat16()
        run, times = compiled(place, _writing(write_cache_as(form))), {}
        for megabytes in MEGABYTES:
            expected = torch.randn(8, 4, megabytes * 128, 128, dtype=torch.bfloat16)
            cache, *arguments = to_device(place, (expected, values, *index))
            write_cache(expected, values, *index)
            run(cache, *arguments)
            # The null slot, which takes the writes of idle rows and padding, is not compared.
            yield judge(f"{what}, {megabytes} MB", cache[1:], expected[1:], tolerance=0)
            times[megabytes] = milliseconds(place, lambda run=run, cache=cache, rest=arguments: run(cache, *rest))
        smallest, largest = MEGABYTES[0], MEGABYTES[-1]
        ratio = times[largest] / times[smallest]
        message = f"{times[smallest]:.3f} ms at {smallest} MB, {ratio:.1f} times at {largest}"
        if form != "select" and ratio > _MOST_GROWTH:
            message += ": grows with the cache"
        yield Finding(f"time of {what}", FACT, message=message, numbers={"milliseconds": times, "ratio": ratio})


def _writing(write: Callable[..., None]) -> Callable[..., torch.Tensor]:
    def step(cache: torch.Tensor, values: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
        write(cache, values, *index)
        return values[:1] + 0

    return step


@torch.no_grad()
def leading_view(place: Place) -> Iterator[Finding]:
    """One graph for all slots writes a view of one slot of two states. The other slots stay unchanged."""

    def step(first: torch.Tensor, second: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first.copy_(first * 0.5 + x)
        second.copy_(second + first.sum())
        return x + 0

    expected = torch.randn(4, 48, 32, 128), torch.randn(4, 1792, 3)
    x = torch.randn(1, 48, 32, 1)
    given, on_device, run = to_device(place, expected), to_device(place, x), compiled(place, step)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for slot in (1, 4, 2):
        for tensors, one, function in ((expected, x, step), (given, on_device, run)):
            function(*(tensor[slot - 1 : slot] for tensor in tensors), one)
        yield judge(f"slot {slot}", given, expected)
        untouched = torch.equal(given[0][2].cpu(), expected[0][2])
        yield Finding(f"other slots than {slot}", EQUAL if untouched else WRONG)
    number = graphs["unique_graphs"] - before
    yield Finding("graphs", EQUAL if number == 1 else WRONG, message=str(number))
