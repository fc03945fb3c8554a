"""The rejection sampler's description of a batch. Fields have vLLM's names, so that its objects can be used too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch

PLACEHOLDER_TOKEN_ID = -1


@dataclass
class SamplingMetadata:
    """Sampling options of a batch's requests.

    temperature: [batch_size], float32, 0 for greedy requests; None if all are greedy.
    all_greedy, all_random: whether all requests are greedy; whether none is.
    top_k, top_p: [batch_size], int64 and float32, or None for all tokens.
    generators: for requests with their own random numbers, by index in the batch.
    max_num_logprobs: must be None.
    no_penalties: whether the next four fields have no effect.
    prompt_token_ids: [batch_size, longest prompt], int64, filled with vocab_size; None without penalties.
    frequency_penalties, presence_penalties, repetition_penalties: [batch_size], float32; anything without penalties.
    output_token_ids: the tokens that each request has generated so far.
    allowed_token_ids_mask: [batch_size, vocab_size], bool, true for tokens that are not allowed; or None.
    bad_words_token_ids: by index in the batch, sequences of tokens that must not occur.
    """

    temperature: torch.Tensor | None
    all_greedy: bool
    all_random: bool
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    generators: Mapping[int, torch.Generator] = field(default_factory=dict)
    max_num_logprobs: int | None = None
    no_penalties: bool = True
    prompt_token_ids: torch.Tensor | None = None
    frequency_penalties: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    presence_penalties: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    repetition_penalties: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    output_token_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids_mask: torch.Tensor | None = None
    bad_words_token_ids: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)


@dataclass
class SpecDecodeMetadata:
    """The drafts of a batch, and where their logits are.

    draft_token_ids: [num_tokens], int32.
    num_draft_tokens: each request's number of drafts.
    cu_num_draft_tokens: [batch_size], int32, their running sum.
    target_logits_indices: [num_tokens], the index of the logits that judge each draft, among the step's logits.
    bonus_logits_indices: [batch_size], the index of the logits after each request's last draft.
    """

    draft_token_ids: torch.Tensor
    num_draft_tokens: list[int]
    cu_num_draft_tokens: torch.Tensor
    target_logits_indices: torch.Tensor
    bonus_logits_indices: torch.Tensor

    @property
    def max_spec_len(self) -> int:
        return max(self.num_draft_tokens)

    @classmethod
    def of(cls, drafts: Sequence[Sequence[int]]) -> SpecDecodeMetadata:
        """Describe drafts by request; the step's logits are those of request 0's drafts, its bonus, request 1's, ..."""
        counts = [len(each) for each in drafts]
        bonus = [end + index for index, end in enumerate(accumulate(counts))]
        target = [end - count + j for end, count in zip(bonus, counts, strict=True) for j in range(count)]
        return cls(
            torch.tensor([token for each in drafts for token in each], dtype=torch.int32),
            counts,
            torch.tensor(list(accumulate(counts)), dtype=torch.int32),
            torch.tensor(target, dtype=torch.int64),
            torch.tensor(bonus),
        )


@dataclass
class SamplerOutput:
    """sampled_token_ids: [batch_size, most tokens of a request], integer, filled with -1."""

    sampled_token_ids: torch.Tensor


class SpecConfig(Protocol):
    """The fields of vLLM's speculative configuration that the rejection sampler reads."""

    rejection_sample_method: str
    synthetic_acceptance_rates: Sequence[float] | None
