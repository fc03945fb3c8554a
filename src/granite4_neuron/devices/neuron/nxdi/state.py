"""The hybrid's state in NxD Inference: two tensors per layer, key and value or conv_state and ssm_state."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from torch import nn

from granite4_neuron.config import MAMBA
from granite4_neuron.devices.neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.model.step import DenseStep
from granite4_neuron.state.hybrid_state import MambaState
from granite4_neuron.state.sizes import mamba_state_shapes


class NeuronStep(DenseStep):
    """A step of NxD Inference. `positions` are -1 for padding and for rows without a sequence.

    NxD Inference runs a full batch in the order of its slots and decodes no row at position 0, so decode keeps the
    contract of `DenseStep`.

    Args:
        has_begun: whether no row is at position 0, so that each starts from its state in place. Selecting between state
            and zeros would cost as much as advancing the state.
    """

    def __init__(self, *args, has_begun: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.has_begun = has_begun

    def read(self, state: torch.Tensor) -> torch.Tensor:
        return self.rows_of(state).clone() if self.has_begun else super().read(state)

    def keep(self, inputs: torch.Tensor) -> None:
        """Do nothing with the inputs of a Mamba layer's `advance`; `JournalStep` keeps them."""

    @property
    def is_context_encoding(self) -> bool:
        """Whether the step has the first tokens of its sequences."""
        return 1 < self.positions.shape[1] == self.kv_length

    @property
    def is_continuation(self) -> bool:
        """Whether the step has several tokens, and comes after others of the same sequences."""
        return 1 < self.positions.shape[1] < self.kv_length

    @property
    def cache_rows(self) -> torch.Tensor:
        """[batch], the cache row of each row's keys and values."""
        rows = int32_arange(len(self.slots), self.slots)
        return rows if self.sequences is None else self.sequences


class HybridCacheManager(KVCacheManager):
    """NxD Inference's cache for the attention layers, conv_state and ssm_state for the Mamba layers.

    All of them are in `past_key_values`, in the order of `HybridState.tensors`. NxD Inference treats the whole state as
    its cache: it aliases a graph's outputs to its inputs and keeps it on the device, or on the CPU copies it from model
    to model.
    """

    past_key_values: nn.ParameterList

    def __init__(self, config: GraniteMoeHybridInferenceConfig, num_kv_head: int, global_rank: nn.Module):
        layer_types = config.granite.layer_types
        attention_layers = copy.copy(config)
        attention_layers.num_hidden_layers = len(layer_types) - layer_types.count(MAMBA)
        # Rows without a sequence write to the last entry, see `_with_tokens`, so a cache needs no room for them.
        attention_layers.neuron_config = copy.copy(config.neuron_config)
        attention_layers.neuron_config.apply_seq_ids_mask = False
        super().__init__(attention_layers, num_kv_head, global_rank)
        self.config = config
        self.layer_types = layer_types
        self.num_slots = config.neuron_config.kv_cache_batch_size
        self.state_dtype = getattr(torch, config.state_dtype)

        degree, kernel_layout = config.neuron_config.tp_degree, config.operators.mamba_decode.has_kernel_layout
        conv_shape, ssm_shape = mamba_state_shapes(config.granite, degree, kernel_layout)
        caches = iter(self.past_key_values)
        tensors = []
        for layer_type in layer_types:
            if layer_type == MAMBA:
                conv_state = torch.zeros(self.num_slots, *conv_shape, dtype=config.neuron_config.torch_dtype)
                ssm_state = torch.zeros(self.num_slots, *ssm_shape, dtype=self.state_dtype)
                tensors += [nn.Parameter(tensor, requires_grad=False) for tensor in (conv_state, ssm_state)]
            else:
                tensors += [next(caches), next(caches)]
        self.past_key_values = nn.ParameterList(tensors)

    def mamba_state(self, idx: int, kvcache_buffer: Sequence[torch.Tensor] | None = None) -> MambaState:
        """Return a copy of a Mamba layer's state, because a graph returns its new state and writes none in place.

        In a compiled graph this copies nothing.

        Args:
            kvcache_buffer: state that an earlier step of the same graph returned, in place of `past_key_values`.
        """
        return MambaState(*(state.clone() for state in self._fetch_cache(idx, kvcache_buffer)))

    def get_kv_by_layer_id(
        self, idx: int, *args, step: NeuronStep, kvcache_buffer: Sequence[torch.Tensor] | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a cache up to the bucket's length, or both tensors of a Mamba layer, read through `mamba_state`."""
        if self.layer_types[idx] == MAMBA:
            return self._fetch_cache(idx, kvcache_buffer)
        key, value = super().get_kv_by_layer_id(idx, *args, kvcache_buffer=kvcache_buffer, **kwargs)
        return (step.rows_of(key), step.rows_of(value)) if step.is_continuation else (key, value)

    def update_kv_by_layer_id(
        self,
        idx: int,
        *args,
        kv_per_layer: tuple[torch.Tensor, torch.Tensor],
        step: NeuronStep,
        kvcache_buffer: Sequence[torch.Tensor] | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's new state for all slots, from a Mamba layer's result or from keys and values of the rows."""
        if self.layer_types[idx] == MAMBA:
            return kv_per_layer
        # Entries that are read with weight 0 must be finite, and a cache is not cleared between two sequences.
        key, value = (torch.nan_to_num(new, 0.0, 0.0, 0.0) for new in kv_per_layer)
        if step.is_context_encoding:
            return super().update_kv_by_layer_id(
                idx, *args, kv_per_layer=(key, value), kvcache_buffer=kvcache_buffer, **kwargs
            )
        keys, values = self._fetch_cache(idx, kvcache_buffer)
        return _with_tokens(keys, key, step), _with_tokens(values, value, step)

    def _apply(self, fn, recurse: bool = True) -> HybridCacheManager:
        """Keep the dtype of SSM states when a model is cast to the dtype of its weights."""
        super()._apply(fn, recurse)
        for idx, layer_type in enumerate(self.layer_types):
            if layer_type == MAMBA:
                ssm_state = self.past_key_values[2 * idx + 1]
                ssm_state.data = ssm_state.data.to(self.state_dtype)
        return self


def _with_tokens(cache: torch.Tensor, new: torch.Tensor, step: NeuronStep) -> torch.Tensor:
    """Add a batch's tokens [batch, kv_heads, tokens, head_dim] to a cache [slots, kv_heads, length, head_dim].

    Padding writes its row's first token again, to the same entry. Rows without a sequence write to the last entry,
    which only later tokens would read, and there are none.
    """
    is_real = step.is_real
    new = new.where(is_real[:, None, :, None], new[:, :, :1])
    positions = step.positions.where(is_real, step.positions[:, :1])
    positions = positions.where(step.lengths[:, None] > 0, cache.shape[2] - 1)
    heads = int32_arange(cache.shape[1], cache)[None, :, None]
    places = (step.cache_rows[:, None, None], heads, positions[:, None, :])
    return torch.index_put(cache, places, new.to(cache.dtype))


def int32_arange(count: int, like: torch.Tensor) -> torch.Tensor:
    """Return 0 to count - 1 on a tensor's device, in int32: `hlo_lint` finds arithmetic on integers of 64 bits."""
    return torch.arange(count, dtype=torch.int32, device=like.device)
