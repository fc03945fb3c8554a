"""The state of sequences: convolution windows, SSM states, keys and values, all addressed by slot.

Sequences are in slots 1 and up; slot 0 is the null slot. Keys and values of padded tokens go there. Its recurrent state
is always zeros: rows at position 0 start from it, and rows without a sequence read it and write it back unchanged. A
compiled graph does this in other ways (`model.step.DenseStep`), and its recurrent state has no null slot: the sequence
of slot s is entry s - 1.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from granite4_neuron.config import MAMBA, ModelConfig
from granite4_neuron.state.sizes import mamba_state_shapes

NULL_SLOT = 0


@dataclass
class MambaState:
    """State of one Mamba layer; its size does not depend on the context's length.

    conv_state: [slots, conv_dim, d_conv - 1], model dtype, the last inputs of the convolution, oldest first. Channels
        come first, as in vLLM and mamba_ssm, and as the NKI kernels need it: a partition of a core takes consecutive
        channels, so its part of the window is contiguous (18 channels of 3 inputs in h-small on 4 ranks: 108 bytes).
        With the inputs first it would be three pieces, each a third as long. The convolution of a graph has tokens
        first and transposes the window, which is 14 kB of the 68 MB that such a rank moves in a Mamba layer's decode.
    ssm_state: [slots, num_heads, head_dim, d_state], float32, or float16 or bfloat16 where asked for; in the NKI
        kernels' layout [slots, d_state, num_heads, head_dim].
    """

    conv_state: torch.Tensor
    ssm_state: torch.Tensor


@dataclass
class KeyValueState:
    """Cache of one attention layer: key and value, each [slots, kv_heads, max_length, head_dim], model dtype."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass
class NoState:
    """State of a layer without a mixer, an MLP or experts alone: no tensors."""


LayerState = MambaState | KeyValueState | NoState


@dataclass(eq=False)
class HybridState:
    """One `LayerState` per layer. A step updates the tensors in place.

    A slot needs no clearing between two sequences: a step whose first position is 0 starts from zeros.

    has_null_slot: whether the Mamba layers' states have a null slot; the caches always do.
    """

    layers: list[LayerState]
    num_sequences: int
    max_length: int
    has_null_slot: bool

    @cached_property
    def mixer_tensors(self) -> list[tuple[torch.Tensor, ...]]:
        """The tensors of each layer that has a state, as fused layers take them."""
        return [tuple(vars(layer).values()) for layer in self.layers if not isinstance(layer, NoState)]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_sequences: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        tp_degree: int = 1,
        kernel_layout: bool = False,
        has_null_slot: bool = True,
        *,
        state_dtype: torch.dtype = torch.float32,
    ) -> HybridState:
        """Allocate a rank's state for `num_sequences` sequences of up to `max_length` tokens, in slots from 1 on.

        SSM states are in `state_dtype`, and with `kernel_layout` (see the model's property) in the NKI kernels' layout.

        Keys and values are not cleared: attention reads only what was written. On a CPU the operating system provides a
        slot's memory only as it is written, so the null slot costs nothing.
        """
        layers: list[LayerState] = []
        for layer_type in config.layer_types:
            mixer = config.parts(layer_type).mixer
            if mixer is None:
                layers.append(NoState())
            elif mixer == MAMBA:
                entries = num_sequences + has_null_slot
                conv_shape, ssm_shape = mamba_state_shapes(config, tp_degree, kernel_layout)
                layers.append(
                    MambaState(
                        _zeros((entries, *conv_shape), dtype, device),
                        _zeros((entries, *ssm_shape), state_dtype, device),
                    )
                )
            else:
                kv_heads = config.rank_dimensions(tp_degree).key_value_heads
                shape = (num_sequences + 1, kv_heads, max_length, config.head_dim)
                key, value = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
                layers.append(KeyValueState(key, value))
        return cls(layers, num_sequences, max_length, has_null_slot)

    def tensors(self, kind: type[MambaState] | type[KeyValueState] | None = None) -> Iterator[torch.Tensor]:
        """Return every state tensor, layer by layer; with `kind`, only those of layers of this kind."""
        for layer in self.layers:
            if kind is None or isinstance(layer, kind):
                yield from vars(layer).values()

    def slot_views(self, slot: int) -> dict[str, torch.Tensor]:
        """Return a slot's part of each state tensor, by layer and field: "layers.0.ssm_state"."""
        return {
            f"layers.{index}.{field}": tensor[slot - self._first_slot(layer)]
            for index, layer in enumerate(self.layers)
            for field, tensor in vars(layer).items()
        }

    def copy(self, source: torch.Tensor, destination: torch.Tensor, length: int) -> None:
        """Copy the state of sequences of up to `length` tokens from slots to other slots; both [n], int64."""
        for layer in self.layers:
            first = self._first_slot(layer)
            for tensor in _layer_tensors(layer, 0, length).values():
                tensor.index_copy_(0, destination - first, tensor.index_select(0, source - first))

    def slot_tensors(
        self, slot: torch.Tensor, start: int, length: int, memory: Mapping[str, torch.Tensor] = {}
    ) -> dict[str, torch.Tensor]:
        """Return copies of a slot's state ([1], int64) under the names of `slot_views`: recurrent state, and keys and
        values of positions start to length - 1. On a CPU, tensors named in `memory` are written there.
        """
        copies = {}
        for index, layer in enumerate(self.layers):
            for field, tensor in _layer_tensors(layer, start, length).items():
                name, entry = f"layers.{index}.{field}", slot - self._first_slot(layer)
                if tensor.device.type != "cpu":
                    copies[name] = tensor.index_select(0, entry)[0]
                elif name in memory:
                    copies[name] = _write(memory[name], tensor[int(entry)])
                else:
                    copies[name] = copy_of(tensor[int(entry)])
        return copies

    def set_slot_tensors(
        self, tensors: Mapping[str, torch.Tensor], slot: torch.Tensor, start: int, length: int
    ) -> None:
        """Write tensors of `slot_tensors` back into a slot; leave all others unchanged."""
        for index, layer in enumerate(self.layers):
            for field, tensor in _layer_tensors(layer, start, length).items():
                name, entry = f"layers.{index}.{field}", slot - self._first_slot(layer)
                if name not in tensors:
                    continue
                if tensor.device.type == "cpu":
                    _write(tensor[int(entry)], tensors[name])
                else:
                    tensor.index_copy_(0, entry, tensors[name][None])

    def _first_slot(self, layer: LayerState) -> int:
        """Return the slot that is entry 0 of a layer's tensors."""
        return NULL_SLOT if self.has_null_slot or isinstance(layer, KeyValueState) else NULL_SLOT + 1


def input_output_aliases(states: Iterable[torch.Tensor], num_results: int) -> dict[torch.Tensor, int]:
    """Map each state tensor to the output of a compiled graph that is its new value and takes over its memory.

    Every XLA graph, NxD Inference's included, returns its results first, then the new value of each state tensor that
    it writes.

    Args:
        states: the tensors that the graph writes, in the order of `HybridState.tensors`.
        num_results: the number of outputs before them: tokens, logits, kept inputs.
    """
    return {state: index for index, state in enumerate(states, start=num_results)}


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Unlike torch's zeros, these pages have not been written.
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy; of a CPU tensor it is made on one thread, see `_write`."""
    if tensor.device.type != "cpu":
        return tensor.clone()
    return _write(torch.empty(tensor.shape, dtype=tensor.dtype), tensor)


def _write(to: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to another one like it on one thread, and return the copy.

    On several threads, each layer of a model would wait for all of them, which on a busy machine takes milliseconds.
    Torch's threads would also spin beside those of the next step.
    """
    to.view(torch.uint8).numpy()[...] = tensor.view(torch.uint8).numpy()
    return to


def _layer_tensors(layer: LayerState, start: int, length: int) -> dict[str, torch.Tensor]:
    """Return a layer's tensors by field; keys and values only of positions start to length - 1.

    A whole tensor is returned itself, not as a view: torch_xla donates tensors that are written as a whole.
    """
    if not isinstance(layer, KeyValueState) or (start, length) == (0, layer.key.shape[2]):
        return vars(layer)
    return {field: tensor[:, :, start:length] for field, tensor in vars(layer).items()}
