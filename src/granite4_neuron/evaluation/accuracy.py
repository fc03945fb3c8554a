"""Logit accuracy: this implementation against transformers, on the same weights and the same tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from granite4_neuron.checkpoint.tokenizing import encode
from granite4_neuron.config.choices import FLOAT32_TOLERANCE
from granite4_neuron.errors import UserError
from granite4_neuron.evaluation.reference import load_reference
from granite4_neuron.runtime.interface import Row, Runtime
from granite4_neuron.state.hybrid_state import HybridState

COMPRESSED_AGREEMENT = 0.9  # the least share of equal top tokens if weights or states are less exact than the dtype
# AWS accepts ports below this R-ratio; above 10 a formula is wrong. Source: the Neuron SDK's page on its skill
# neuron-framework-equivalence.
MOST_R_RATIO = 1.2
# AWS's tolerances for the logits of the k likeliest tokens, None for all, and the amount first subtracted from a
# difference. Source: the Neuron SDK's page on the logit validation of vLLM Neuron.
TOP_K_TOLERANCES = {5: 0.011, 50: 0.02, 1000: 0.03, None: 0.05}
_ABSOLUTE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Difference:
    """The difference of logits from the reference's, over some tokens."""

    tokens: int
    maximum: float
    mean: float
    top1_agreement: float
    pearson: float

    @classmethod
    def between(cls, logits: torch.Tensor, reference: torch.Tensor) -> Difference:
        """Compare logits, both [tokens, vocab_size]."""
        error = (logits.double() - reference.double()).abs()
        return cls(
            tokens=len(reference),
            maximum=error.max().item(),
            mean=error.mean().item(),
            top1_agreement=(logits.argmax(-1) == reference.argmax(-1)).double().mean().item(),
            pearson=torch.corrcoef(torch.stack([logits.flatten(), reference.flatten()]).double())[0, 1].item(),
        )


@dataclass(frozen=True)
class TopKError:
    """The error of the logits of the k likeliest tokens.

    k: None for all tokens.
    tolerance: AWS's tolerance for this k.
    largest: the largest error of a logit, relative to the largest absolute logit of the k.
    within: the share of positions at which no error is above the tolerance.
    """

    k: int | None
    tolerance: float
    largest: float
    within: float

    @property
    def passed(self) -> bool:
        return self.largest <= self.tolerance


def top_k_errors(logits: torch.Tensor, reference: torch.Tensor) -> list[TopKError]:
    """Return the errors of logits as AWS judges them, for `TOP_K_TOLERANCES`. Both are [tokens, vocab_size], after the
    same tokens.

    The reference decides which tokens are the likeliest. A position's constant shift, the intercept of the regression
    on the reference's logits, does not count as an error.
    """
    expected, found = reference.double(), logits.double()
    centred = expected - expected.mean(-1, keepdim=True)
    slope = (centred * found).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True)
    found = found - (found.mean(-1, keepdim=True) - slope * expected.mean(-1, keepdim=True))
    errors = []
    for k, tolerance in TOP_K_TOLERANCES.items():
        values, tokens = expected.topk(min(k or expected.shape[-1], expected.shape[-1]), dim=-1)
        difference = (found.gather(-1, tokens) - values).abs().amax(-1) - _ABSOLUTE_TOLERANCE
        error = difference / values.abs().amax(-1)
        errors.append(TopKError(k, tolerance, error.max().item(), (error <= tolerance).double().mean().item()))
    return errors


def r_ratio(ours: torch.Tensor, reference: torch.Tensor, reference_in_dtype: torch.Tensor) -> float:
    """Return the norm of our error over that of the reference in our dtype, both against the reference in float32."""
    own, error = ((each.double() - reference.double()).norm().item() for each in (reference_in_dtype, ours))
    return error / own if own else math.inf


@dataclass(frozen=True)
class AccuracyReport:
    """Logits of each sequence, [tokens, vocab_size]: ours, the float32 reference's, and the reference's in our dtype.

    The first prompt_lengths[i] tokens of a sequence went through prefill, the others through decode one by one. With
    `is_last_of_prompt`, logits start at the last token of each prompt, and at its first token otherwise.
    """

    prompt_lengths: list[int]
    ours: list[torch.Tensor]
    reference: list[torch.Tensor]
    reference_in_dtype: list[torch.Tensor] | None  # None in float32, where it equals the reference
    is_quantized: bool = False
    state_dtype: torch.dtype = torch.float32
    is_last_of_prompt: bool = False

    def phase(self, prefill: bool) -> Difference:
        """Return the difference over all tokens of prefill, or of decode."""
        ends = [length - start for length, start in zip(self.prompt_lengths, self._starts, strict=True)]
        return self._difference(self.ours, [slice(None, end) if prefill else slice(end, None) for end in ends])

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return max(start + len(logits) for start, logits in zip(self._starts, self.reference, strict=True))

    def positions(self, start: int, stop: int) -> Difference | None:
        """Return the difference over the tokens at positions start to stop - 1 of every sequence; None if none of them
        was compared.
        """
        parts = [slice(max(0, start - first), max(0, stop - first)) for first in self._starts]
        if not any(len(logits[part]) for logits, part in zip(self.reference, parts, strict=True)):
            return None
        return self._difference(self.ours, parts)

    def overall(self) -> Difference:
        return self._difference(self.ours, [slice(None)] * len(self.ours))

    def transformers_error(self) -> Difference | None:
        """Return the error of transformers in our dtype; None in float32."""
        if self.reference_in_dtype is None:
            return None
        return self._difference(self.reference_in_dtype, [slice(None)] * len(self.ours))

    def r_ratio(self) -> float | None:
        """Return `r_ratio` over all tokens; None in float32."""
        if self.reference_in_dtype is None:
            return None
        return r_ratio(*map(torch.cat, (self.ours, self.reference, self.reference_in_dtype)))

    def top_k_errors(self) -> list[TopKError]:
        """Return the errors of the logits from each prompt's last token on, which choose the new tokens."""
        return self._top_k_errors(self.ours)

    def transformers_top_k_errors(self) -> list[TopKError] | None:
        """Return the same errors of transformers in our dtype; None in float32."""
        return None if self.reference_in_dtype is None else self._top_k_errors(self.reference_in_dtype)

    def _top_k_errors(self, logits: list[torch.Tensor]) -> list[TopKError]:
        firsts = [length - 1 - start for length, start in zip(self.prompt_lengths, self._starts, strict=True)]
        generated = [
            torch.cat([one[first:] for one, first in zip(each, firsts, strict=True)])
            for each in (logits, self.reference)
        ]
        return top_k_errors(*generated)

    def passed(self, tolerance: float = FLOAT32_TOLERANCE) -> bool:
        """Return whether `criterion` holds."""
        if self.is_compressed:
            return self.overall().top1_agreement >= COMPRESSED_AGREEMENT
        transformers_error = self.transformers_error()
        if transformers_error is None:
            return self.overall().maximum <= tolerance
        return self.overall().mean <= transformers_error.mean

    def criterion(self, tolerance: float = FLOAT32_TOLERANCE) -> str:
        """The condition that `passed` checks."""
        if self.is_compressed:
            what = "quantized" if self.is_quantized else "SSM states in 16 bits"
            return f"{what}: the same top token for {COMPRESSED_AGREEMENT:.0%} of the tokens at least"
        if self.reference_in_dtype is None:
            return f"no logit further off than {tolerance:g}"
        return "mean difference not above that of transformers in this dtype"

    @property
    def is_compressed(self) -> bool:
        """Whether weights or states are less exact than the dtype; then errors are not the port's."""
        return self.is_quantized or self.state_dtype != torch.float32

    @property
    def _starts(self) -> list[int]:
        """Return the position of each sequence's first logits."""
        return [length - 1 if self.is_last_of_prompt else 0 for length in self.prompt_lengths]

    def _difference(self, logits: list[torch.Tensor], parts: list[slice]) -> Difference:
        return Difference.between(
            torch.cat([one[part] for one, part in zip(logits, parts, strict=True)]),
            torch.cat([one[part] for one, part in zip(self.reference, parts, strict=True)]),
        )


def measure(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    runtime: Runtime,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AccuracyReport:
    """Compare logits over prompts and the reference's own greedy continuation of them.

    The reference sees each sequence alone, whole and without a cache. Ours runs all of them as one ragged batch: the
    prompts in the same steps as in generation, then token by token. So the comparison covers padding, slots and carried
    state. If a runtime cannot give logits of all tokens of a prompt, it is compared from the last one on.

    Args:
        folder: the checkpoint that `runtime` was loaded from.
        prompts: token ids.
        new_tokens: how many tokens of decode to compare, at least 1.
        runtime: ours.
        progress: called with (parts done, parts in all); a part is the reference's continuation of a prompt, or one
            model's run over all of them.

    Raises:
        UserError: the sequences are longer than the model allows, or the runtime has no room for them.
    """
    parts = itertools.count(1)
    num_parts = len(prompts) + 3
    state = runtime.allocate(len(prompts), longest_of(prompts, new_tokens, runtime))  # first, because it may be refused
    reference = load_reference(folder, torch.float32)
    progress(0, num_parts)
    sequences = []
    for prompt in prompts:
        sequences.append(greedy(reference, prompt, new_tokens))
        progress(next(parts), num_parts)
    is_last_of_prompt = "all_logits" in runtime.cannot
    starts = [len(prompt) - 1 if is_last_of_prompt else 0 for prompt in prompts]
    expected = _whole(reference, sequences, starts)
    del reference
    progress(next(parts), num_parts)
    in_dtype = None
    if runtime.dtype != torch.float32:
        in_dtype = _whole(load_reference(folder, runtime.dtype), sequences, starts)
    progress(next(parts), num_parts)
    lengths = [len(prompt) for prompt in prompts]
    run_prompts = last_of_prompts if is_last_of_prompt else _all_of_prompts
    prefill = run_prompts(runtime, state, sequences, lengths)
    decoded = all_of_continuations(runtime, state, sequences, lengths)
    ours = [torch.cat(both) for both in zip(prefill, decoded, strict=True)]
    progress(next(parts), num_parts)
    about = runtime.is_quantized, runtime.state_dtype, is_last_of_prompt
    return AccuracyReport(lengths, ours, expected, in_dtype, *about)


def default_prompts(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Return texts of several lengths to check any model with; one is shorter than the convolution window."""
    texts = (
        "A",
        "The import statement",
        "An assignment statement evaluates the expression list and assigns the single resulting object to each target.",
        "Deletion of a target list recursively deletes each target, from left to right. " * 6,
    )
    return [encode(tokenizer, text) for text in texts]


def longest_of(prompts: Sequence[Sequence[int]], new_tokens: int, runtime: Runtime) -> int:
    """Return the length of the longest prompt with its new tokens.

    Raises:
        UserError: it is more than the model allows.
    """
    longest = max(map(len, prompts)) + new_tokens
    if longest > runtime.max_length:
        raise UserError(f"a prompt and its new tokens are {longest:,}; the model's longest are {runtime.max_length:,}.")
    return longest


@torch.inference_mode()
def greedy(reference: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Return a prompt and the reference's own continuation of it."""
    tokens = torch.tensor([list(prompt)])
    for _ in range(new_tokens):
        logits = reference(tokens, use_cache=False, logits_to_keep=1).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0].tolist()


@torch.inference_mode()
def _whole(reference: PreTrainedModel, sequences: list[list[int]], starts: list[int]) -> list[torch.Tensor]:
    logits = (reference(torch.tensor([tokens]), use_cache=False).logits[0].float() for tokens in sequences)
    return [one[start:] for one, start in zip(logits, starts, strict=True)]


def _all_of_prompts(
    runtime: Runtime, state: HybridState | None, sequences: list[list[int]], prompt_lengths: list[int]
) -> list[torch.Tensor]:
    """Return logits after each token of the prompts, in the same steps as in generation."""
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for start in range(0, max(prompt_lengths), runtime.tokens_per_step):
        stop = start + runtime.tokens_per_step
        running = [i for i, n in enumerate(prompt_lengths) if n > start]
        rows = [Row(i + 1, start, sequences[i][start : min(stop, prompt_lengths[i])]) for i in running]
        for i, row, part in zip(running, rows, runtime.step(state, rows, all_logits=True), strict=True):
            logits[i].append(part[: len(row.tokens)])
    return [torch.cat(one) for one in logits]


def last_of_prompts(
    runtime: Runtime, state: HybridState | None, sequences: list[list[int]], prompt_lengths: list[int]
) -> list[torch.Tensor]:
    """Return logits after the last token of each prompt, one prompt after another."""
    rows = [Row(i + 1, 0, tokens[:n]) for i, (tokens, n) in enumerate(zip(sequences, prompt_lengths, strict=True))]
    return [runtime.step(state, [row]) for row in rows]


def all_of_continuations(
    runtime: Runtime, state: HybridState | None, sequences: list[list[int]], prompt_lengths: list[int]
) -> list[torch.Tensor]:
    """Return logits after each token that follows the prompts, all sequences at a time."""
    logits = []
    for step in range(len(sequences[0]) - prompt_lengths[0]):
        rows = [
            Row(i + 1, n + step, [tokens[n + step]])
            for i, (tokens, n) in enumerate(zip(sequences, prompt_lengths, strict=True))
        ]
        logits.append(runtime.step(state, rows))
    return list(torch.stack(logits, dim=1))
