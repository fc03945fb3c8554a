"""Facts about a runtime's model, shared by runtimes in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from granite4_neuron.config import MAMBA, ModelConfig
from granite4_neuron.config.choices import NO_ADAPTERS, NO_HIDDEN_STATES
from granite4_neuron.model.adapters import Adapter, adapter_weights
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.parameters import weight_bytes
from granite4_neuron.runtime.interface import Ability, Refusals
from granite4_neuron.runtime.prompt_cuts import PromptCuts
from granite4_neuron.state.fingerprint import Fingerprint, facts_digest, weights_digest
from granite4_neuron.state.hybrid_state import HybridState
from granite4_neuron.state.sizes import sequence_bytes, token_bytes
from granite4_neuron.state.snapshot import Layout
from granite4_neuron.system.available_memory import available_bytes
from granite4_neuron.system.processor import instruction_sets
from granite4_neuron.system.version import installed_version

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on


class BoundModel(Refusals):
    """The part of `Runtime` that follows from a model bound to its operators.

    weights_digest: returns `digest_of_weights` of all weights that it computes with.
    numerics: facts for `facts_digest` that distinguish its numbers from others, besides the model and the versions.
    """

    cannot: Mapping[Ability, str] = {
        "decode": "this backend brings the logits of all steps to the host.",
        "hidden_states": NO_HIDDEN_STATES,
        "adapters": NO_ADAPTERS,
    }
    own_slots = 0
    tokens_per_step: int
    sampling: ModuleType | None = None
    prompt_cuts: PromptCuts
    adapters: Mapping[str, Adapter] = {}
    model: HybridForCausalLM
    state_dtype: torch.dtype
    weights_digest: Callable[[], str]
    numerics: Sequence[object]

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def packs_rows(self) -> bool:
        """Whether rows of different lengths share a step without padding."""
        return False

    @property
    def tokens_per_long_step(self) -> int:
        """No step has more than others."""
        return self.tokens_per_step

    @property
    def max_length(self) -> int:
        """The most tokens of a sequence."""
        return self.config.max_position_embeddings

    @property
    def begins_snapshots(self) -> bool:
        """Whether `step` begins the snapshots of rows that are kept."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and of the cache."""
        return self.model.dtype

    @property
    def is_quantized(self) -> bool:
        """Whether the large weights are quantized."""
        return self.model.is_quantized

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as `model.parameters.weight_bytes` counts them."""
        weights = {name: one for name, one in self.model.named_weights() if not isinstance(one, torch.Tensor)}
        quantized = {name: one.format.num_bytes(one.shape) for name, one in weights.items() if one.format is not None}
        return weight_bytes(self.config, self.dtype.itemsize, quantized)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """For each faster implementation that this runtime does not use, a sentence that says why."""
        return self.model.fallbacks

    @cached_property
    def fingerprint(self) -> Fingerprint:
        state_dtype = self.state_dtype if MAMBA in self.config.layer_types else None
        machine = instruction_sets(), torch.__version__, installed_version()
        facts = self.numerics, self.prompt_cuts, self.model.kernel_layout, state_dtype, machine
        return Fingerprint(self.weights_digest, facts_digest(*facts))

    def with_model(self, model: HybridForCausalLM) -> Self:
        """Return a runtime like this one for another bound model, on the same device."""
        other = copy.copy(self)
        other.__dict__.pop("fingerprint", None)
        other.model = model
        return other

    def sequences_that_fit(self, max_length: int) -> int | None:
        """A CPU's memory is taken as it is written: the null slot takes none."""
        available, itemsize = available_bytes(), self.dtype.itemsize
        state = sequence_bytes(self.config, itemsize, state_itemsize=self.state_dtype.itemsize)
        needed = state + max_length * token_bytes(self.config, itemsize)
        return None if available is None else available // 2 // needed

    def warm_up(self, state: HybridState, verified_tokens: int = 0) -> None:
        """There is nothing to compile in advance."""

    def prepare_snapshot(self, is_wanted: bool) -> None:
        """Each snapshot allocates its own memory."""

    def slot_layout(self, start: int, length: int) -> Layout:
        """Ask a state that takes no memory."""
        degree, positions = self.model.parallel.degree, length - start
        state = HybridState.allocate(
            self.config,
            1,
            positions,
            self.dtype,
            "meta",
            degree,
            kernel_layout=self.model.kernel_layout,
            state_dtype=self.state_dtype,
        )
        tensors = state.slot_tensors(torch.tensor([1], device="meta"), 0, positions)
        return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def digest_of_weights(model: HybridForCausalLM, adapters: Mapping[str, Adapter] = {}) -> str:
    """Return `weights_digest` of a model, or of a rank's part of it, with its config and adapters."""
    invocations = [adapter.invocation for adapter in adapters.values()]
    weights = [*model.named_weights(), *adapter_weights(adapters)]
    return weights_digest(weights, model.dtype, model.config, model.parallel.degree, invocations)
