"""Step times predicted for a Neuron device; see `planning.latency`. Nothing here is measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from granite4_neuron.config import ModelConfig
from granite4_neuron.devices.graphs.runtime import bucket
from granite4_neuron.devices.neuron.sdk import TRAINIUM2, Chip
from granite4_neuron.devices.selection import default_experts_decode
from granite4_neuron.planning.analysis.roofline import minimum_of_copy
from granite4_neuron.planning.latency import hbm_bytes_per_second, latency, step_work
from granite4_neuron.runtime.interface import Row


class PredictedSteps:
    """`StepTimes` of compiled graphs. Decode is for all slots; the pieces of prompts run one after another.

    Experts of decoded tokens have the default form without NKI kernels. Each graph reads as many entries of the cache
    as its bucket has.

    Args:
        slots: sequences in a graph of decode, used or not.
        prompt_pieces: returns the tokens of the graphs that a prompt's tokens from a start to a stop run in, in order;
            a single token is decoded.
        cache_buckets: entries of the cache that graphs read, ascending.
        chip: that the ranks are on.

    Raises:
        UserError: `tp_degree` does not divide the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp_degree: int,
        dtype: torch.dtype,
        *,
        slots: int,
        prompt_pieces: Callable[[int, int], Sequence[int]],
        cache_buckets: Sequence[int],
        chip: Chip = TRAINIUM2,
    ):
        self._model, self._chip = (config, tp_degree, dtype), chip
        self._prompt_pieces, self._cache_buckets = prompt_pieces, cache_buckets
        form = default_experts_decode("torch", config, tp_degree, slots)
        self._decode_times = {
            each: latency(step_work(*self._model, slots, 1, each, experts_decode=form, chip=chip), chip).predicted
            for each in cache_buckets
        }
        self._pieces: dict[tuple[int, int], float] = {}

    def step(self, rows: Sequence[Row]) -> float:
        """Prompts and single tokens have graphs of their own."""
        starts = [row.start for row in rows if len(row.tokens) == 1 and row.start > 0]
        prompts = [row for row in rows if len(row.tokens) > 1 or row.start == 0]
        decode = self.decode(starts, 1)[0] if starts else 0.0
        return decode + sum(map(self._prompt, prompts))

    def decode(self, starts: Sequence[int], steps: int) -> list[float]:
        longest = max(starts) + 1
        seconds: list[float] = []
        while len(seconds) < steps:
            of_bucket = bucket(longest + len(seconds), self._cache_buckets)
            seconds += [self._decode_times[of_bucket]] * min(
                of_bucket - longest - len(seconds) + 1, steps - len(seconds)
            )
        return seconds

    def snapshot(self, tokens: int) -> float:
        """Return 0, because it is not known how fast the host reads the device."""
        return 0.0

    def restore(self, tokens: int) -> float:
        """Return 0, as for `snapshot`."""
        return 0.0

    def copy(self, tokens: int) -> float:
        """Return the time to copy a whole slot at the rate of HBM."""
        config, tp_degree, dtype = self._model
        moved = minimum_of_copy(config, tp_degree, dtype, self._cache_buckets[-1]).bytes_accessed
        return moved / hbm_bytes_per_second(self._chip)

    def _prompt(self, row: Row) -> float:
        stop = row.start + len(row.tokens)
        pieces = self._prompt_pieces(row.start, stop)
        starts = itertools.accumulate(pieces[:-1], initial=row.start)
        graphs = zip(pieces, starts, strict=True)
        return sum(self._piece(tokens, start, min(start + tokens, stop)) for tokens, start in graphs)

    def _piece(self, tokens: int, start: int, stop: int) -> float:
        """Return the time of a graph of `tokens` for the tokens from `start` to `stop`; the rest is padding."""
        if tokens == 1:
            return self.decode([start], 1)[0]
        # The entries of the bucket before the graph's own tokens.
        context = max(start, bucket(stop, self._cache_buckets) - tokens) if start else 0
        key = tokens, context
        if key not in self._pieces:
            self._pieces[key] = latency(
                step_work(*self._model, 1, tokens, context, chip=self._chip), self._chip
            ).predicted
        return self._pieces[key]
