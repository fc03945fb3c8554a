"""Perplexity of a model on a text, and the divergence of its predictions from another model's."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from granite4_neuron.errors import UserError
from granite4_neuron.runtime.interface import Row, Runtime, require
from granite4_neuron.state.hybrid_state import HybridState

_ROWS = 64  # rows of logits at a time: 51 MB in float64 with a vocabulary of 100,000
_DECODE_TOKENS = 32


@dataclass(frozen=True)
class Window:
    """Tokens start to stop - 1 of a text, run as a sequence of its own.

    scored: the first token whose probability counts; earlier ones are context.
    """

    start: int
    scored: int
    stop: int


@dataclass
class Score:
    """A model's totals over a text; they grow during the measurement.

    tokens: how many were scored.
    nats: the sum of -ln of their probabilities.
    divergence: Kullback-Leibler divergence from the first model's next-token distributions to this one's, in nats,
        summed over the scored tokens.
    run_tokens, seconds: the tokens and the time of the steps, without the scoring.
    progress: tokens and nats so far, after each piece of the text.
    """

    tokens: int = 0
    nats: float = 0.0
    divergence: float = 0.0
    run_tokens: int = 0
    seconds: float = 0.0
    progress: list[tuple[int, float]] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        """Per token; infinity if it is beyond double precision."""
        return _exp(self.nats / self.tokens)

    def perplexity_per_byte(self, num_bytes: int) -> float:
        """Per byte of the scored tokens, which does not depend on the tokenizer."""
        return _exp(self.nats / num_bytes)

    @property
    def mean_divergence(self) -> float:
        return self.divergence / self.tokens

    @property
    def tokens_per_second(self) -> float:
        return self.run_tokens / self.seconds


def one_window(length: int) -> list[Window]:
    """Return the whole text as one window, whose state is carried from its start to its end."""
    return [Window(0, 1, length)] if length > 1 else []


def sliding_windows(length: int, window: int, stride: int) -> list[Window]:
    """Return windows that begin every `stride` tokens; each scores the tokens that the previous one has not seen.

    So each scored token has at least `window - stride` tokens before it, or everything from the text's start on. If
    `stride` equals `window`, the first token of each window has no context and is not scored.

    Raises:
        UserError: the window has fewer than two tokens, or the stride is not between 1 and the window.
    """
    if window < 2:
        raise UserError(f"the window is {window}, and must be at least 2 tokens: one is the context of the other.")
    if not 1 <= stride <= window:
        raise UserError(f"the stride is {stride}; it must be at least 1 and at most the window, {window}.")
    windows, seen = [], 0
    for start in range(0, length, stride):
        stop = min(start + window, length)
        scored = max(seen, start + 1)
        if scored < stop:
            windows.append(Window(start, scored, stop))
        seen = stop
        if stop == length:
            break
    return windows


def measure(
    runtimes: Sequence[Runtime],
    tokens: Sequence[int],
    windows: Sequence[Window],
    progress: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Score a text with one model or several, which process each chunk of it in turn.

    Args:
        runtimes: of models with the same vocabulary. Divergence is measured from the first.
        tokens: the text's token ids.
        windows: the parts of the text to run, and the tokens in them to score.
        progress: called with (tokens run, tokens to run).

    Raises:
        UserError: a runtime cannot give logits of all tokens, or has no room for the longest window; nothing is
            scored; or logits are not finite.
    """
    for runtime in runtimes:
        require(runtime, "all_logits")
    if not windows:
        raise UserError(f"the text has {len(tokens)} tokens; at least 2 are needed: one is the context of the other.")
    longest = max(window.stop - window.start for window in windows)
    states = [runtime.allocate(1, longest) for runtime in runtimes]
    scores = [Score() for _ in runtimes]
    tokens_per_step = min(runtime.tokens_per_step for runtime in runtimes)
    done, total = 0, sum(window.stop - window.start - 1 for window in windows)
    for window in windows:
        last = window.stop - 1  # it is predicted and need not be run
        for start in range(window.start, last, tokens_per_step):
            stop = min(start + tokens_per_step, last)
            row = Row(1, start - window.start, tokens[start:stop])
            logits = [_step(*each, row) for each in zip(runtimes, states, scores, strict=True)]
            first = max(start, window.scored - 1)  # its logits predict the next token
            _add(scores, [model_logits[first - start :] for model_logits in logits], tokens[first + 1 : stop + 1])
            done += stop - start
            if progress is not None:
                progress(done, total)
    if not all(math.isfinite(score.nats) for score in scores):
        raise UserError("the text cannot be scored: the model's logits are not finite.")
    return scores


def decode_seconds(runtimes: Sequence[Runtime], tokens: Sequence[int]) -> list[float]:
    """Time one more token of one sequence on each runtime, in turn; return medians over the first tokens of a text."""
    states = [runtime.allocate(1, _DECODE_TOKENS) for runtime in runtimes]
    seconds: list[list[float]] = [[] for _ in runtimes]
    for position, token in enumerate(tokens[:_DECODE_TOKENS]):
        for runtime, state, runtime_seconds in zip(runtimes, states, seconds, strict=True):
            started = time.perf_counter()
            runtime.step(state, [Row(1, position, [token])])
            runtime_seconds.append(time.perf_counter() - started)
    return [statistics.median(runtime_seconds) for runtime_seconds in seconds]


def _step(runtime: Runtime, state: HybridState | None, score: Score, row: Row) -> torch.Tensor:
    """Run a row; return the logits after every token, [tokens, vocab_size]."""
    started = time.perf_counter()
    logits = runtime.step(state, [row], all_logits=True)[0, : len(row.tokens)]
    score.seconds += time.perf_counter() - started
    score.run_tokens += len(row.tokens)
    return logits


def _add(scores: Sequence[Score], logits: Sequence[torch.Tensor], targets: Sequence[int]) -> None:
    """Add tokens to each model's score; logits [tokens, vocab_size] predict these tokens."""
    for start in range(0, len(targets), _ROWS):
        expected = torch.tensor(targets[start : start + _ROWS])[:, None]
        reference = None
        for score, model_logits in zip(scores, logits, strict=True):
            log_probabilities = model_logits[start : start + _ROWS].double().log_softmax(-1)
            reference = log_probabilities if reference is None else reference
            score.tokens += len(expected)
            score.nats -= log_probabilities.gather(1, expected).sum().item()
            score.divergence += F.kl_div(log_probabilities, reference, reduction="sum", log_target=True).item()
            score.progress.append((score.tokens, score.nats))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
