"""The hybrid's state among NxD Inference's: two tensors per layer, key and value or conv_state and ssm_state."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import KVCacheManager
from torch import nn

from granite4_neuron.config import MAMBA
from granite4_neuron.layers.step import Step
from granite4_neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.state import MambaState, mamba_state_shapes


@dataclass(frozen=True)
class NeuronStep(Step):
    """A step of a traced graph: the state is not written in place but returned.

    Every slot belongs to a sequence, there is no null slot. `positions` are -1 for padding and for rows without a
    sequence: these have no real token and so leave the state alone.

    num_slots: of the state.
    """

    num_slots: int

    @property
    def is_continuation(self) -> bool:
        """Whether the step has several tokens, and comes after others of the same sequences."""
        return 1 < self.positions.shape[1] < self.kv_length

    @cached_property
    def is_fresh(self) -> torch.Tensor:
        """[batch], true for rows that start from zeros, whatever their slot holds."""
        return self.positions[:, 0] == 0

    @property
    def fills_all_slots(self) -> bool:
        """Whether row i is slot i. NxD Inference runs a full batch in the order of its slots."""
        return self.positions.shape[0] == self.num_slots

    def rows(self, state: torch.Tensor) -> torch.Tensor:
        """[slots, ...] to each row's own part, [batch, ...], as a tensor of its own."""
        return state.clone() if self.fills_all_slots else state.index_select(0, self.slots)

    def with_rows(self, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """A state [slots, ...] like `state`, but for the batch's rows."""
        return rows if self.fills_all_slots else torch.index_put(state, (self.slots,), rows)

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """Here `state` is what `rows` gave."""
        return state.masked_fill(self.is_fresh.view(-1, *[1] * (state.dim() - 1)), 0.0)

    def write(self, state: torch.Tensor, rows: torch.Tensor) -> None:
        """Here `state` is what `rows` gave."""
        state.copy_(rows)


class HybridCacheManager(KVCacheManager):
    """NxD Inference's cache for the attention layers, conv_state and ssm_state for the Mamba layers.

    All of them are in `past_key_values`, in the order of `HybridState.input_output_aliases`. So whatever NxD Inference
    does with a cache it does with the whole state: alias a graph's outputs to its inputs, keep it on the device, or
    copy it from model to model on the CPU.
    """

    def __init__(self, config: GraniteMoeHybridInferenceConfig, num_kv_head: int, global_rank: nn.Module):
        layer_types = config.granite.layer_types
        attention_layers = copy.copy(config)
        attention_layers.num_hidden_layers = len(layer_types) - layer_types.count(MAMBA)
        super().__init__(attention_layers, num_kv_head, global_rank)
        self.config = config
        self.layer_types = layer_types
        self.num_slots = config.neuron_config.kv_cache_batch_size

        degree, kernel_layout = config.neuron_config.tp_degree, config.mamba_kernels.has_kernel_layout
        conv_shape, ssm_shape = mamba_state_shapes(config.granite, degree, kernel_layout)
        caches = iter(self.past_key_values)
        tensors = []
        for layer_type in layer_types:
            if layer_type == MAMBA:
                conv_state = torch.zeros(self.num_slots, *conv_shape, dtype=config.neuron_config.torch_dtype)
                ssm_state = torch.zeros(self.num_slots, *ssm_shape, dtype=torch.float32)
                tensors += [nn.Parameter(tensor, requires_grad=False) for tensor in (conv_state, ssm_state)]
            else:
                tensors += [next(caches), next(caches)]
        self.past_key_values = nn.ParameterList(tensors)

    def mamba_rows(self, idx: int, step: NeuronStep) -> MambaState:
        """The state of a Mamba layer for the rows of a batch."""
        return MambaState(*(step.rows(state) for state in self._fetch_cache(idx)))

    def get_kv_by_layer_id(self, idx: int, *args, step: NeuronStep, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """A cache up to the bucket's length; of a Mamba layer both tensors, which it reads through `mamba_rows`."""
        if self.layer_types[idx] == MAMBA:
            return self._fetch_cache(idx)
        key, value = super().get_kv_by_layer_id(idx, *args, **kwargs)
        return (step.rows(key), step.rows(value)) if step.is_continuation else (key, value)

    def update_kv_by_layer_id(
        self, idx: int, *args, kv_per_layer: tuple[torch.Tensor, torch.Tensor], step: NeuronStep, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new state of a layer, of all slots, from what the layer returned for the rows of the batch."""
        if self.layer_types[idx] == MAMBA:
            return tuple(map(step.with_rows, self._fetch_cache(idx), kv_per_layer))
        if step.is_continuation:
            return tuple(_with_tokens(*pair, step) for pair in zip(self._fetch_cache(idx), kv_per_layer, strict=True))
        return super().update_kv_by_layer_id(idx, *args, kv_per_layer=kv_per_layer, **kwargs)

    def _apply(self, fn, recurse: bool = True) -> HybridCacheManager:
        """Keeps the SSM states in float32 when a model is cast to the dtype of its weights."""
        super()._apply(fn, recurse)
        for idx, layer_type in enumerate(self.layer_types):
            if layer_type == MAMBA:
                ssm_state = self.past_key_values[2 * idx + 1]
                ssm_state.data = ssm_state.data.float()
        return self


def _with_tokens(cache: torch.Tensor, new: torch.Tensor, step: NeuronStep) -> torch.Tensor:
    """A cache [slots, kv_heads, length, head_dim] with a batch's tokens [batch, kv_heads, tokens, head_dim] added.

    Padding goes to the last place: what is there is read by tokens after it, and there are none.
    """
    positions = step.positions.where(step.is_real, cache.shape[2] - 1)
    heads = torch.arange(cache.shape[1], device=cache.device)[None, :, None]
    places = (step.slots[:, None, None], heads, positions[:, None, :])
    return torch.index_put(cache, places, new.to(cache.dtype))
