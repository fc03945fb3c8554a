"""Hidden states after each layer: this implementation against transformers, on the same weights and the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from granite4_neuron.config.choices import FLOAT32_TOLERANCE
from granite4_neuron.evaluation.accuracy import greedy, longest_of
from granite4_neuron.evaluation.reference import load_reference
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.families import model_of
from granite4_neuron.ops import Operators
from granite4_neuron.ops.operators import recording
from granite4_neuron.runtime.interface import Row, Runtime
from granite4_neuron.state.hybrid_state import HybridState

# Two ways to round in 16 bits differ by chance; a bug in a layer is far above this limit.
_MARGIN = 2.0
_TRIAL_TOKENS = 32


class BoundRuntime(Runtime[HybridState], Protocol):
    """A runtime with a model in this process: a `runtime.bound_model.BoundModel`."""

    @property
    def model(self) -> HybridForCausalLM: ...

    def with_model(self, model: HybridForCausalLM) -> BoundRuntime:
        """Return a runtime like this one for another bound model, on the same device."""


@dataclass(frozen=True)
class Gap:
    """The difference of hidden states from the reference's, over some tokens.

    maximum: the largest absolute difference. relative: the norm of the difference, divided by the reference's norm.
    """

    maximum: float
    relative: float

    @classmethod
    def between(cls, ours: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> Gap:
        """Compare hidden states of several sequences, both [tokens, hidden_size]."""
        expected = torch.cat(list(reference)).double()
        error = torch.cat(list(ours)).double() - expected
        return cls(error.abs().max().item(), (error.norm() / expected.norm()).item())


@dataclass(frozen=True)
class LayerReport:
    """The error of the hidden states after a layer.

    kind: one of the config's layer types, such as "mamba".
    prefill, decode: over the tokens of prompts, and over the tokens that were decoded one by one.
    limit: the limit of the relative difference; None if it is not judged: with quantized weights or 16-bit SSM states.
    r_ratio: the error over transformers' error in the same dtype, as in `accuracy.r_ratio`; None in float32.
    """

    kind: str
    prefill: Gap
    decode: Gap
    limit: float | None
    r_ratio: float | None

    @property
    def is_off(self) -> bool:
        """Whether a relative difference is above the limit, or NaN."""
        return self.limit is not None and not all(gap.relative <= self.limit for gap in (self.prefill, self.decode))


def compare_layers(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    runtime: BoundRuntime,
    tolerance: float = FLOAT32_TOLERANCE,
) -> Iterator[LayerReport]:
    """Compare hidden states after each layer in turn, over prompts and the reference's own greedy continuation of them.

    Hidden states after layer k come from a model of the first k layers, with the same weights and operators. This also
    works where all layers run as one call.

    Args:
        folder: the checkpoint that `runtime` was loaded from.
        prompts: token ids.
        new_tokens: how many tokens of decode to compare, at least 1.
        runtime: ours.
        tolerance: for the relative difference in float32. In other dtypes twice transformers' difference is allowed.

    Raises:
        UserError: the sequences are longer than the model allows.
    """
    longest_of(prompts, new_tokens, runtime)
    reference = load_reference(folder, torch.float32)
    sequences = [greedy(reference, prompt, new_tokens) for prompt in prompts]
    expected = _reference_hidden_states(reference, sequences)
    del reference
    own: list[float] | None = None
    if runtime.dtype != torch.float32:
        in_dtype = load_reference(folder, runtime.dtype)
        pairs = zip(_reference_hidden_states(in_dtype, sequences), expected, strict=True)
        own = [Gap.between(*pair).relative for pair in pairs]
        del in_dtype
    is_judged = not runtime.is_quantized and runtime.state_dtype == torch.float32
    lengths = [len(prompt) for prompt in prompts]
    phases = [slice(None, n) for n in lengths], [slice(n, None) for n in lengths]
    for layer, kind in enumerate(runtime.config.layer_types):
        part = _with_layers(runtime, slice(layer + 1), runtime.model.operators)
        ours = [_hidden_states(part, tokens, n) for tokens, n in zip(sequences, lengths, strict=True)]
        prefill, decode = (Gap.between(_parts(ours, phase), _parts(expected[layer], phase)) for phase in phases)
        limit = tolerance if own is None else _MARGIN * own[layer]
        ratio = None if own is None else Gap.between(ours, expected[layer]).relative / own[layer]
        yield LayerReport(kind, prefill, decode, limit if is_judged else None, ratio)


def operators_of_layers(runtime: BoundRuntime, kind: str) -> list[str]:
    """Return the operators that the first layer of a kind runs for a prompt and for a token of decode, by names such as
    "ops.norm.rms_norm".
    """
    names: dict[str, None] = {}  # an ordered set
    layer = runtime.config.layer_types.index(kind)
    part = _with_layers(runtime, slice(layer, layer + 1), recording(runtime.model.operators, names.setdefault))
    # The prompt has more tokens than kernels for a few tokens take.
    _hidden_states(part, [0] * (_TRIAL_TOKENS + 1), _TRIAL_TOKENS)
    return list(names)


def _with_layers(runtime: BoundRuntime, layers: slice, operators: Operators) -> BoundRuntime:
    """Return a runtime of some of the model's layers, over the same weights. Its logits are their hidden states."""
    whole = runtime.model
    layer_types = whole.config.layer_types[layers]
    config = replace(whole.config, layer_types=layer_types, num_hidden_layers=len(layer_types))
    with torch.device("meta"):
        model = model_of(config)
    model.model.embed_tokens, model.model.norm = whole.model.embed_tokens, whole.model.norm
    model.model.layers, model.lm_head = whole.model.layers[layers], whole.lm_head
    bound = model.bind(operators)
    bound.model.embed_tokens.operators = whole.operators
    bound.model.norm.operators = replace(whole.operators, rms_norm=lambda x, weight, eps: x)
    bound.operators = replace(whole.operators, logits=lambda x, weight, scaling: x, decode_logits=None)
    return runtime.with_model(bound)


def _hidden_states(runtime: BoundRuntime, tokens: Sequence[int], prompt_length: int) -> torch.Tensor:
    """Return the hidden states [tokens, hidden_size] of `_with_layers`: a prompt in the same steps as in generation,
    then token by token.
    """
    starts = [*range(0, prompt_length, runtime.tokens_per_step), *range(prompt_length, len(tokens))]
    state, seen = runtime.allocate(1, len(tokens)), []
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        hidden_states = runtime.step(state, [Row(1, start, tokens[start:stop])], all_logits=True)
        seen.append(hidden_states[0, : stop - start].float().cpu().clone())
    return torch.cat(seen)


@torch.inference_mode()
def _reference_hidden_states(
    reference: PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> list[list[torch.Tensor]]:
    """Return hidden states by layer and sequence: [tokens, hidden_size] in float32. The model sees each sequence alone,
    whole and without a cache.
    """
    layers = reference.model.layers
    seen: list[list[torch.Tensor]] = [[] for _ in layers]
    for layer, layer_outputs in zip(layers, seen, strict=True):
        layer.register_forward_hook(lambda _, __, output, keep=layer_outputs.append: keep(_tensor(output)[0].float()))
    for tokens in sequences:
        reference(torch.tensor([tokens]), use_cache=False)
    return seen


def _tensor(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return a layer's hidden states, which transformers 4.57 has in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def _parts(sequences: Sequence[torch.Tensor], parts: Sequence[slice]) -> list[torch.Tensor]:
    return [sequence[part] for sequence, part in zip(sequences, parts, strict=True)]
