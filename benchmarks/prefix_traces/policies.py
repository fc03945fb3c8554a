"""Policies of prefix caches, and a replay of traces without a model: states in the package's cache have sizes only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.prefix_traces.traces import Tokens, Turn, replay
from granite4_neuron.config import ModelConfig
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import PrefixCache, Request
from granite4_neuron.engine.adapters import AppliedAdapter
from granite4_neuron.engine.prefix.interface import any_length
from granite4_neuron.engine.prefix.tree import Entries, Node
from granite4_neuron.engine.sequence import RunningSequence
from granite4_neuron.engine.text import TextStream
from granite4_neuron.planning.analysis.roofline import minimum
from granite4_neuron.runtime.interface import Runtime
from granite4_neuron.runtime.prompt_cuts import ANYWHERE, PromptCuts, cost, pieces
from granite4_neuron.state.fingerprint import Fingerprint
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from granite4_neuron.state.snapshot import Snapshot

OURS, LRU, MARCONI = "this package", "LRU", "Marconi"
_ALPHAS = [number / 10 for number in range(21)]
_BOOTSTRAP = 5


class SizesOnly:
    """A runtime as a prefix cache sees it. Its snapshots have the sizes of a model's in bfloat16, but no memory.

    Args:
        cuts: where prompts may be cut; by default as the fused kernels allow.
        buckets: sizes of prompts' pieces in tokens; None for steps of any size.
        chunk: tokens of a step, unless it is long; None for the largest bucket.
    """

    cannot: Mapping[str, str] = {}
    dtype, state_dtype = torch.bfloat16, torch.float32
    fingerprint = Fingerprint.parse("")

    def __init__(
        self,
        config: ModelConfig,
        cuts: PromptCuts = ANYWHERE,
        buckets: Sequence[int] | None = None,
        chunk: int | None = None,
    ):
        self.config = config
        self.prompt_cuts = cuts
        self.buckets = buckets
        self.tokens_per_long_step = buckets[-1] if buckets else CPURuntime.tokens_per_step
        self.tokens_per_step = chunk or self.tokens_per_long_step
        self.logits = torch.empty(config.vocab_size, device="meta")
        self._recurrent = _bytes(sequence_bytes(config, self.dtype.itemsize))
        self._token_bytes = token_bytes(config, self.dtype.itemsize)

    def snapshot(self, state: None, slot: int, length: int, start: int = 0) -> Snapshot:
        tensors = {"recurrent": self._recurrent, "all.key": _bytes(1, length - start, self._token_bytes)}
        return Snapshot(start, length, tensors, self.dtype, self.fingerprint)


class LeastRecentlyUsed(Entries):
    """Evicts the least recently used entry."""

    def victim(self, used: Collection[Node]) -> Node:
        return min((entry for entry in self if entry not in used), key=lambda entry: entry.last_use)


class LRUCache(PrefixCache):
    """The package's cache, but it evicts the least recently used entry."""

    def __init__(self, runtime: Runtime, max_bytes: int | None):
        super().__init__(runtime, max_bytes, runtime.tokens_per_step, at_branches=True)
        self._entries = LeastRecentlyUsed()


class MarconiEntries(Entries):
    """Marconi's order of eviction, as in the code of its authors (github.com/ruipeterpan/marconi).

    Of the nodes with at most one child it takes the one with the least sum of recency and `alpha` times the FLOPs saved
    per byte, each between 0 and 1.
    """

    def __init__(self, runtime: Runtime):
        super().__init__()
        self.alpha = 0.0
        self.has_evicted = False
        self._config, self._itemsize = runtime.config, runtime.dtype.itemsize
        self._saved: dict[tuple[int, int], float] = {}

    def victim(self, used: Collection[Node]) -> Node:
        self.has_evicted = True
        unused = [entry for entry in self if entry not in used]
        entries = [entry for entry in unused if len(entry.children) <= 1] or unused
        recency = _normalized([1 / (self._look_ups + 1 - entry.last_use) for entry in entries])
        saved = _normalized([self._saved_per_byte(entry) for entry in entries])
        scores = [one + self.alpha * other for one, other in zip(recency, saved, strict=True)]
        return entries[scores.index(min(scores))]

    def _saved_per_byte(self, entry: Node) -> float:
        key = entry.start, entry.length
        if key not in self._saved:
            flops = prefill_flops(self._config, entry.length) - prefill_flops(self._config, entry.start)
            num_bytes = sequence_bytes(self._config, self._itemsize)
            self._saved[key] = flops / (num_bytes + entry.length * token_bytes(self._config, self._itemsize))
        return self._saved[key]


class MarconiCache(PrefixCache):
    """Marconi's policy in the package's tree, for one sequence at a time whose answer has two tokens or more.

    It keeps states only where a prompt diverges from an earlier sequence, and after the last token that was run.
    `alpha` is 0 until five times as many requests have come as before the first eviction. Then these requests are
    replayed with each value from 0 to 2, and the value that saves most FLOPs stays.
    """

    def __init__(self, runtime: Runtime, max_bytes: int | None):
        super().__init__(runtime, max_bytes, None, at_branches=True)
        self._entries = MarconiEntries(runtime)
        self._prompts: list[Tokens] = []
        self._sequences: list[Tokens] = []
        self._window: int | None = None
        self._branches: set[int] = set()

    def match_prefix(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = any_length):
        self._prompts.append(list(tokens))
        return super().match_prefix(tokens, is_cut_point)

    def new_cuts(self, tokens: Sequence[int], is_cut_point: Callable[[int], bool] = any_length) -> set[int]:
        self._branches = super().new_cuts(tokens, is_cut_point)
        return self._branches

    def insert(self, tokens: Sequence[int], state: object, slot: int, logits: torch.Tensor) -> None:
        is_end = len(tokens) > len(self._prompts[-1])
        if is_end:
            self._sequences.append(list(tokens))
        if is_end or len(tokens) in self._branches:
            super().insert(tokens, state, slot, logits)

    def tune(self) -> None:
        """Choose `alpha` if it is time. It is done between requests here; Marconi does it in the background."""
        if self._window is None and self._entries.has_evicted:
            self._window = _BOOTSTRAP * len(self._prompts)
        if self._window is not None and len(self._prompts) == self._window:
            self._entries.alpha = max(_ALPHAS, key=self._saved_with)

    def _saved_with(self, alpha: float) -> float:
        runtime = SizesOnly(self._runtime.config)
        cache = MarconiCache(runtime, self.max_bytes)
        cache._entries.alpha = alpha
        saved = 0.0
        for prompt, sequence in zip(self._prompts, self._sequences, strict=True):
            found, _ = _serve(cache, runtime, prompt, [*sequence[len(prompt) :], 0])
            saved += prefill_flops(runtime.config, found)
        return saved


def our_cache(runtime: Runtime, max_bytes: int | None) -> PrefixCache:
    """Return the cache of `granite4-neuron serve`."""
    return PrefixCache(runtime, max_bytes, runtime.tokens_per_step, at_branches=True)


POLICIES: Mapping[str, Callable[[Runtime, int | None], PrefixCache]] = {
    LRU: LRUCache,
    MARCONI: MarconiCache,
    OURS: our_cache,
}


@dataclass
class Savings:
    """Totals over the prompts of a trace.

    num_bytes: the cache's size at the end.
    work: the cost in tokens of the prompts' pieces that were run, see `prompt_cuts.cost`.
    """

    prompt_tokens: int = 0
    found_tokens: int = 0
    flops: float = 0.0
    saved_flops: float = 0.0
    num_bytes: int = 0
    work: int = 0

    def add(self, config: ModelConfig, prompt_tokens: int, found_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.found_tokens += found_tokens
        self.flops += prefill_flops(config, prompt_tokens)
        self.saved_flops += prefill_flops(config, found_tokens)

    @property
    def hit_rate(self) -> float:
        return self.found_tokens / self.prompt_tokens

    @property
    def saved(self) -> float:
        return self.saved_flops / self.flops


def savings(
    turns: Sequence[Turn],
    policy: str,
    config: ModelConfig,
    max_bytes: int | None,
    cuts: PromptCuts = ANYWHERE,
    buckets: Sequence[int] | None = None,
    chunk: int | None = None,
) -> Savings:
    """Replay a trace with a policy. Answers are random, the same for each policy.

    Args:
        cuts, buckets, chunk: as of `SizesOnly`.
    """
    runtime = SizesOnly(config, cuts, buckets, chunk)
    cache, total = POLICIES[policy](runtime, max_bytes), Savings()
    generator = torch.Generator().manual_seed(0)

    def answer(prompt: Tokens, length: int) -> Tokens:
        tokens = torch.randint(3, config.vocab_size, (length,), generator=generator).tolist()
        found, work = _serve(cache, runtime, prompt, tokens)
        total.add(config, len(prompt), found)
        total.work += work
        if isinstance(cache, MarconiCache):
            cache.tune()
        return tokens

    replay(turns, answer)
    total.num_bytes = cache.stats.num_bytes
    return total


@functools.cache
def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Return the FLOPs of a prompt of that many tokens."""
    return minimum(config, 1, torch.bfloat16, 1, tokens, 0).flops if tokens else 0.0


def _serve(cache: PrefixCache, runtime: SizesOnly, prompt: Tokens, answer: Tokens) -> tuple[int, int]:
    """Query and fill a cache as `Engine` does for a sequence that runs alone.

    Return the number of tokens found, and the work for the others.
    """
    limit, cuts, work = len(prompt) + len(answer), runtime.prompt_cuts, 0
    request, text = Request(prompt, len(answer)), TextStream(None, [], prompt)
    sequence = RunningSequence(0, request, limit, text, AppliedAdapter(), cuts)
    prefix = cache.match_prefix(prompt, sequence.is_cut_point)
    sequence.cut_at(cache.new_cuts(prompt, sequence.is_cut_point))
    sequence.stored = 0 if prefix is None else prefix.length
    while sequence.is_prompt:
        cut = max(sequence.next_cut(runtime.tokens_per_step), sequence.long_cut(runtime.tokens_per_long_step))
        before, sequence.stored = sequence.stored, cut
        if runtime.buckets is not None:
            work += cost(pieces(sequence.stored - before, runtime.buckets))
        if sequence.is_kept(cache.interval):
            cache.insert(prompt[: sequence.stored], None, 0, runtime.logits)
    sequence.tokens += answer
    while cuts.keeps_answers and sequence.stored < limit - 1:  # the last token is chosen but not run
        interval = cache.interval or limit
        sequence.stored = min(limit - 1, (sequence.stored // interval + 1) * interval)
        cache.insert(sequence.tokens[: sequence.stored], None, 0, runtime.logits)
    if prefix is not None:
        cache.release(prefix)
    return 0 if prefix is None else prefix.length, work


def _normalized(numbers: Sequence[float]) -> list[float]:
    least, most = min(numbers), max(numbers)
    return [(number - least) / (most - least) if most > least else 0.0 for number in numbers]


def _bytes(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")
