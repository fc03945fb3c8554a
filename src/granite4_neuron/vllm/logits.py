"""Sampling options applied to the target's logits before they judge drafts. All work in place on [num_tokens,
vocab_size].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from granite4_neuron.vllm.metadata import SamplingMetadata, SpecDecodeMetadata


def apply_penalties(
    logits: torch.Tensor, metadata: SpecDecodeMetadata, sampling_metadata: SamplingMetadata
) -> torch.Tensor:
    """Apply penalties, then mask tokens that are not allowed, then bad words. Earlier drafts count as generated."""
    counts = metadata.num_draft_tokens
    request = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(logits.device)
    if not sampling_metadata.no_penalties:
        _penalize(logits, request, _histories(metadata, sampling_metadata), sampling_metadata)
    if sampling_metadata.allowed_token_ids_mask is not None:
        logits.masked_fill_(sampling_metadata.allowed_token_ids_mask[request], -torch.inf)
    if sampling_metadata.bad_words_token_ids:
        histories = _histories(metadata, sampling_metadata)
        for row, index, history in zip(logits, request.tolist(), histories, strict=True):
            for *before, last in sampling_metadata.bad_words_token_ids.get(index, ()):
                if not before or history[-len(before) :] == before:
                    row[last] = -torch.inf
    return logits


def apply_constraints(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Set all but the `top_k` likeliest tokens to -inf, then all but the likeliest that make up `top_p`; at least one
    stays.

    Args:
        top_k, top_p: [num_tokens], or None.
    """
    if top_k is None and top_p is None:
        return logits
    ascending, tokens = logits.sort(-1)
    if top_k is not None:
        least = ascending.gather(1, ascending.shape[1] - top_k.long()[:, None])
        ascending.masked_fill_(ascending < least, -torch.inf)
    if top_p is not None:
        outside = ascending.softmax(-1).cumsum_(-1) <= 1 - top_p[:, None]
        outside[:, -1] = False
        ascending.masked_fill_(outside, -torch.inf)
    return logits.scatter_(1, tokens, ascending)


def _penalize(
    logits: torch.Tensor,
    request: torch.Tensor,
    histories: Sequence[Sequence[int]],
    sampling_metadata: SamplingMetadata,
) -> None:
    """Apply the three penalties. Repetition divides positive logits and multiplies others, of prompt and generated
    tokens; frequency and presence are subtracted, for generated ones.
    """
    vocab_size, prompts = logits.shape[1], sampling_metadata.prompt_token_ids
    assert prompts is not None  # there are penalties
    in_prompt = torch.zeros(len(logits), vocab_size + 1, dtype=torch.bool, device=logits.device)
    in_prompt.scatter_(1, prompts[request], True)
    counts = [torch.bincount(torch.tensor(history, dtype=torch.int64), minlength=vocab_size) for history in histories]
    generated = torch.stack(counts).to(logits.device)
    is_repeated = in_prompt[:, :vocab_size] | (generated > 0)
    repetition = sampling_metadata.repetition_penalties[request][:, None].where(is_repeated, 1.0)
    logits.copy_(torch.where(logits > 0, logits / repetition, logits * repetition))
    logits.sub_(sampling_metadata.frequency_penalties[request][:, None] * generated)
    logits.sub_(sampling_metadata.presence_penalties[request][:, None] * (generated > 0))


def _histories(metadata: SpecDecodeMetadata, sampling_metadata: SamplingMetadata) -> list[list[int]]:
    """Return the generated tokens before each draft, if all drafts before it are accepted."""
    drafts = [part.tolist() for part in metadata.draft_token_ids.split(metadata.num_draft_tokens)]
    return [
        [token for token in (*generated, *request_drafts[:j]) if token >= 0]
        for generated, request_drafts in zip(sampling_metadata.output_token_ids, drafts, strict=True)
        for j in range(len(request_drafts))
    ]
