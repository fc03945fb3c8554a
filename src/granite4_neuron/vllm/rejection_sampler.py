"""Accepts or rejects drafts so that the tokens are distributed as if the target model had drawn them.

Speculative sampling (Leviathan et al., https://arxiv.org/abs/2211.17192, algorithm 1; Chen et al.,
https://arxiv.org/abs/2302.01318). Drafts x_i were drawn from q_i; the target model has p_i:

* x_i is accepted with probability min(1, p_i(x_i) / q_i(x_i)). A draft that was chosen and not drawn has q_i(x_i) = 1.
* At the first rejected draft, a token is drawn from max(p_i - q_i, 0), normalised, and the drafts after it are dropped.
  For a draft that was chosen, this is p_i without x_i.
* If all are accepted, a further token, the bonus, comes from the target model alone.

Greedy requests accept drafts that equal the target's argmax. Names, arguments, shapes and fillers are as in vLLM 0.33
(`vllm.v1.sample.rejection_sampler`) without its mode "fly"; its metadata objects can be passed too. Drafts of all
requests of a batch are concatenated: request i has `num_draft_tokens[i]` of the `num_tokens`, up to
`cu_num_draft_tokens[i]`.

This is a public API, for other programs: the engine of this package has a rule of its own, and does not call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from granite4_neuron.errors import UserError
from granite4_neuron.vllm.logits import apply_constraints, apply_penalties
from granite4_neuron.vllm.metadata import (
    PLACEHOLDER_TOKEN_ID,
    SamplerOutput,
    SamplingMetadata,
    SpecConfig,
    SpecDecodeMetadata,
)

MAX_SPEC_LEN = 128


class RejectionSampler(nn.Module):
    """Chooses the accepted tokens from the logits of drafts.

    Args:
        sampler: chooses the bonus tokens; called as `sampler(logits=, sampling_metadata=, predict_bonus_token=True)`
            with logits [batch_size, vocab_size], it returns an object with `sampled_token_ids`, [batch_size, 1].
        spec_config: None, or an object that defines how drafts are judged: its `rejection_sample_method` is "standard",
            or "synthetic" for `synthetic_acceptance_rates`, the share of requests in which the drafts up to each
            position are accepted whatever the models say.
        device: the device of these rates.

    Raises:
        UserError: the method is another one.
    """

    def __init__(
        self,
        sampler: Callable[..., SamplerOutput],
        spec_config: SpecConfig | None = None,
        device: torch.device | None = None,
    ):
        super().__init__()
        self.sampler = sampler
        self._synthetic_rates: torch.Tensor | None = None
        if spec_config is None:
            return
        method = spec_config.rejection_sample_method
        if method not in ("standard", "synthetic"):
            raise UserError(f"the rejection sampler judges drafts in the ways standard and synthetic, not {method}.")
        if method == "synthetic":
            rates = spec_config.synthetic_acceptance_rates
            assert rates is not None  # this method has them
            conditional = [rate / before if before else 0.0 for before, rate in zip((1.0, *rates), rates, strict=False)]
            self._synthetic_rates = torch.tensor(conditional, device=device)

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Apply penalties and other rules of the requests, then temperature, top-k and top-p, then `rejection_sample`.

        Args:
            metadata: the drafts.
            draft_probs: [num_tokens, vocab_size], float32, the distribution that each draft was drawn from; None for
                chosen drafts.
            logits: [num_tokens + batch_size, vocab_size], the target model's; the metadata say which belong to drafts
                and which to bonus tokens. They are not changed.
            sampling_metadata: the requests' sampling options.

        Returns:
            sampled_token_ids as `rejection_sample` gives them; no log probabilities.

        Raises:
            UserError: log probabilities are asked for, or a request has more than 128 drafts.
        """
        if sampling_metadata.max_num_logprobs is not None:
            raise UserError("the rejection sampler gives no log probabilities; leave max_num_logprobs at None.")
        if metadata.max_spec_len > MAX_SPEC_LEN:
            raise UserError(f"a request has {metadata.max_spec_len} drafts, and may have {MAX_SPEC_LEN}.")
        bonus = self.sampler(
            logits=logits[metadata.bonus_logits_indices], sampling_metadata=sampling_metadata, predict_bonus_token=True
        )
        target_logits = logits[metadata.target_logits_indices].float()
        apply_penalties(target_logits, metadata, sampling_metadata)
        target_logits = apply_sampling_constraints(target_logits, metadata.cu_num_draft_tokens, sampling_metadata)
        output_token_ids = rejection_sample(
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            metadata.max_spec_len,
            metadata.cu_num_draft_tokens,
            draft_probs,
            target_logits,
            bonus.sampled_token_ids,
            sampling_metadata,
            self._synthetic_rates is not None,
            self._synthetic_rates,
        )
        return SamplerOutput(output_token_ids)

    @staticmethod
    def parse_output(
        output_token_ids: torch.Tensor, vocab_size: int, discard_req_indices: Sequence[int] = ()
    ) -> tuple[list[list[int]], None]:
        """Return the tokens of each request without fillers and ids beyond the vocabulary; none for discarded requests.

        The second of the pair stands for vLLM's log probabilities.
        """
        discarded = set(discard_req_indices)
        rows = enumerate(output_token_ids.tolist())
        return [[t for t in row if 0 <= t < vocab_size and i not in discarded] for i, row in rows], None


def rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64_gumbel: bool = False,
) -> torch.Tensor:
    """Accept or reject drafts; return the tokens that each request gains.

    Args:
        draft_token_ids: [num_tokens], integer. An id of -1 is never accepted.
        num_draft_tokens: each request's number of drafts, 0 to `max_spec_len`.
        cu_num_draft_tokens: [batch_size], integer, their running sum.
        draft_probs: [num_tokens, vocab_size], float32, or None. A draft of probability 0 is never accepted.
        target_logits: [num_tokens, vocab_size], float32, with all sampling options applied.
        bonus_token_ids: [batch_size, 1] or [batch_size], integer.
        sampling_metadata: all_greedy, all_random, temperature [batch_size] (0 for a greedy request) and generators.
        synthetic_mode: accept the draft at position j of a request with probability `synthetic_conditional_rates[j]`
            whatever the models say, for measurements of speed.
        use_fp64_gumbel: draw recovered tokens with random numbers in float64.

    Returns:
        int32 [batch_size, max_spec_len + 1]: accepted drafts, then the recovered or the bonus token, then -1.
    """
    device = target_logits.device
    counts = torch.tensor(num_draft_tokens, device=device)
    request, position = _places(counts)
    drafts = draft_token_ids.long()
    instead = target_logits.argmax(-1)
    accepted = drafts == instead
    if synthetic_mode or not sampling_metadata.all_greedy:
        uniform = generate_uniform_probs(len(drafts), num_draft_tokens, sampling_metadata.generators, device)
        if not sampling_metadata.all_greedy:
            assert sampling_metadata.temperature is not None
            target_probs = target_logits.softmax(-1, dtype=torch.float32)
            recovered = sample_recovered_tokens(
                max_spec_len,
                num_draft_tokens,
                cu_num_draft_tokens,
                draft_token_ids,
                draft_probs,
                target_probs,
                sampling_metadata,
                device,
                use_fp64_gumbel,
            )
            is_greedy = (sampling_metadata.temperature == 0)[request]
            accepted = accepted.where(is_greedy, _is_accepted(drafts, draft_probs, target_probs, uniform))
            instead = instead.where(is_greedy, recovered.long())
        if synthetic_mode:
            assert synthetic_conditional_rates is not None  # of this mode
            accepted = (uniform < synthetic_conditional_rates[position]) & (drafts >= 0)

    stands = torch.zeros(len(counts), max_spec_len + 1, dtype=torch.bool, device=device)
    stands[request, position] = accepted
    num_accepted = stands.long().cumprod(1).sum(1)
    output = torch.full_like(stands, PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
    kept = position <= num_accepted[request]  # the accepted drafts and the first rejected one
    output[request[kept], position[kept]] = drafts.where(accepted, instead)[kept].int()
    all_accepted = (num_accepted == counts).nonzero()[:, 0]
    output[all_accepted, counts[all_accepted]] = bonus_token_ids.flatten()[all_accepted].int()
    return output


def sample_recovered_tokens(
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    device: torch.device,
    use_fp64_gumbel: bool = False,
) -> torch.Tensor:
    """Return for each draft the token that replaces it if it is rejected, in draft_token_ids' shape and dtype.

    It is the argmax of weight / E, where E are independent exponential random numbers, one for each request and token
    of the vocabulary. This is an exponential race, which each token wins in proportion to its weight. A request's
    drafts share them, since at most one of its recovered tokens is used.
    """
    request, _ = _places(torch.tensor(num_draft_tokens, device=device))
    drafts = draft_token_ids.reshape(-1, 1).long()
    if draft_probs is None:
        tokens = torch.arange(target_probs.shape[-1], device=device)
        weights = target_probs.where(tokens != drafts, 0.0)
    else:
        weights = (target_probs - draft_probs).clamp_(min=0)
    # With rounding, the target's probabilities may nowhere exceed the draft's. Then both are the same.
    weights = weights.where(weights.any(-1, keepdim=True), target_probs)

    dtype = torch.float64 if use_fp64_gumbel else torch.float32
    race = torch.empty(len(num_draft_tokens), target_probs.shape[-1], dtype=dtype, device=device).exponential_()
    for index, generator in sampling_metadata.generators.items():
        if num_draft_tokens[index] > 0:  # a request's random numbers do not depend on steps without drafts
            race[index].exponential_(generator=generator)
    rates = race.clamp_(min=torch.finfo(dtype).tiny).reciprocal_()
    return (weights * rates[request]).argmax(-1).to(draft_token_ids.dtype).view_as(draft_token_ids)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for its tokens, [batch_size] to [num_tokens], with `replace_from` replaced."""
    replaced = x.masked_fill(x == replace_from, replace_to)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def apply_sampling_constraints(
    logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: SamplingMetadata
) -> torch.Tensor:
    """Apply the requests' temperature, top-k and top-p to logits [num_tokens, vocab_size] in place; do nothing if all
    requests are greedy.
    """
    if sampling_metadata.all_greedy:
        return logits

    def expand(x: torch.Tensor, **replaced: int) -> torch.Tensor:
        return expand_batch_to_tokens(x, cu_num_draft_tokens, len(logits), **replaced)

    temperature = sampling_metadata.temperature
    assert temperature is not None  # not all requests are greedy
    logits.div_(expand(temperature, replace_from=0, replace_to=1)[:, None])
    limits = (sampling_metadata.top_k, sampling_metadata.top_p)
    top_k, top_p = (None if each is None else expand(each) for each in limits)
    return apply_constraints(logits, top_k, top_p)


def generate_uniform_probs(
    num_tokens: int, num_draft_tokens: Sequence[int], generators: Mapping[int, torch.Generator], device: torch.device
) -> torch.Tensor:
    """Draw [num_tokens] random numbers in [0, 1), for each request from its generator if it has one.

    They are float64: in float32, exact zeros, which would accept an impossible draft, are too frequent.
    """
    uniform = torch.rand(num_tokens, dtype=torch.float64, device=device)
    for index, part in enumerate(uniform.split(list(num_draft_tokens))):
        if index in generators and len(part):
            part.uniform_(generator=generators[index])
    return uniform


def _is_accepted(
    drafts: torch.Tensor, draft_probs: torch.Tensor | None, target_probs: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    places = drafts.clamp(min=0)[:, None]
    p = target_probs.gather(1, places)[:, 0]
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, places)[:, 0]
    return (drafts >= 0) & (q > 0) & (p / q >= uniform)


def _places(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each draft, [num_tokens], its request's index, and its position among the request's drafts."""
    request = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    return request, torch.arange(len(request), device=counts.device) - first[request]
