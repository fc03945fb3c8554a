"""A simulated server, which makes its engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from granite4_neuron.engine.prefix.slot_cache import prefix_cache_of
from granite4_neuron.planning.simulation.engine import SimulatedEngine
from granite4_neuron.planning.simulation.runtime import SimulatedRuntime


@dataclass(frozen=True)
class Server:
    """Makes the engine of a replica with the limits of `granite4-neuron serve`.

    runtime: the arguments of `SimulatedRuntime`.
    num_sequences: sequences that run at a time. max_length: the most tokens of a sequence.
    max_gap: of an engine, in seconds.
    cache_bytes: memory of the prefix cache; 0 for none. A runtime that keeps its own slots needs spare ones for a
        cache.
    """

    num_sequences: int
    max_length: int
    cache_bytes: int
    max_gap: float | None = None
    runtime: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> SimulatedEngine:
        """Return a new engine."""
        runtime = SimulatedRuntime(**self.runtime)
        cache = None
        if self.cache_bytes and not 0 < runtime.own_slots <= self.num_sequences:
            cache = prefix_cache_of(runtime, self.cache_bytes, self.num_sequences, at_branches=True)
        return SimulatedEngine(
            runtime, self.num_sequences, max_length=self.max_length, prefix_cache=cache, max_gap=self.max_gap
        )
