"""All decoder layers as one call of fused kernels, which saves the time that Python takes between short kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from granite4_neuron.config import ModelConfig
from granite4_neuron.devices.cpu.layers import Decoder, HalfLayer, LayerMakers
from granite4_neuron.devices.cpu.weights import PackedWeight, pack
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.model.attention import Attention, RotaryTables
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.norm import why_not_fusible
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.stack import LayersAsOne
from granite4_neuron.model.step import PackedStep, Step
from granite4_neuron.ops import Operators, Weight
from granite4_neuron.state.hybrid_state import HybridState


class FusedLayers(LayersAsOne):
    """`LayersAsOne` by the C++ kernels."""

    @staticmethod
    def why_not(parallel: Parallel, norm: nn.Module, layers: Sequence[DecoderLayer]) -> str | None:
        if parallel.degree > 1:
            return f"they are for a whole model, and this is a part of {parallel.degree}"
        for layer in layers:
            mixers = [layer.mamba if layer.is_mamba else layer.self_attn] if layer.has_mixer else []
            # A subclass may compute more than the weights tell that the kernels get.
            for part in (layer, *mixers):
                if type(part) not in (DecoderLayer, Mamba2, Attention):
                    return f"they do not compute {type(part).__name__}"
        return why_not_fusible(norm)

    def why_not_one_call(self, embedding: Weight, head: Weight) -> str | None:
        if self._config.uses_rope:
            return "it makes no rotary positions"
        if not isinstance(embedding, torch.Tensor) and embedding is not head:
            return "it looks up rows of a plain embedding, or of the head's matrix"
        return None

    def __init__(
        self,
        operators: Operators,
        layers: Sequence[DecoderLayer],
        config: ModelConfig,
        adapters: Sequence[Adapter] = (),
    ):
        makers = operators.fused_layers
        assert isinstance(makers, LayerMakers)  # these are made of them
        self._config = config
        self._has_embedding_and_head = False
        self._decoder: Decoder = makers.decoder()
        halves: list[dict[str, HalfLayer]] = []  # of each layer, by the modules that they compute
        for layer in layers:
            of_layer: dict[str, HalfLayer] = {}
            if layer.is_mamba:
                weights = layer.mamba_weights()
                inner = makers.mamba_mixer(weights.mixer, operators.launch_parameters)
                of_layer["mamba"] = mamba = makers.mamba_layer(weights, inner)
                self._decoder.append_mamba(half=mamba)
            elif layer.has_mixer:
                of_layer["self_attn"] = attention = makers.attention_layer(layer.attention_weights())
                self._decoder.append_attention(half=attention)
            if layer.has_feed_forward:
                feed_forward = makers.feed_forward(layer.feed_forward_weights())
                of_layer["shared_mlp"] = of_layer["block_sparse_moe"] = feed_forward
                self._decoder.append_feed_forward(half=feed_forward)
            halves.append(of_layer)
        for adapter in adapters:
            for name, addition in adapter.additions.items():
                _, _, layer_number, module, projection, _ = name.split(".")
                down, up = (pack(matrix, torch.float32).packed for matrix in (addition.down, addition.up))
                half, projection = halves[int(layer_number)][module], projection.removesuffix("_linear")
                if module == "block_sparse_moe":
                    projection = f"expert_{projection}"
                half.adapt(adapter=adapter.number, projection=projection, down=down, up=up)

    def __call__(
        self, hidden_states: torch.Tensor, step: Step, state: HybridState, rotary: RotaryTables | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        cos, sin = (None, None) if rotary is None else (table.flatten(0, 1)[None] for table in rotary)
        results = self._decoder.step(
            hidden_states=hidden_states.flatten(0, 1),
            states=state.mixer_tensors,
            slots=step.slots,
            adapters=step.adapters,
            cos=cos,
            sin=sin,
            keep_inputs=step.verifies,
            **step.rows(),
        )
        hidden_states, *inputs = (result.unflatten(0, hidden_states.shape[:2]) for result in results)
        return hidden_states, inputs

    def set_embedding_and_head(self, embedding: Weight, norm: torch.Tensor, head: Weight) -> None:
        assert isinstance(head, PackedWeight)  # as all matrices of the model
        self._has_embedding_and_head = True
        self._decoder.set_embedding_and_head(
            head=head.packed,
            embedding=embedding if isinstance(embedding, torch.Tensor) else None,
            embedding_multiplier=self._config.embedding_multiplier,
            norm=norm,
            eps=self._config.rms_norm_eps,
            logits_scaling=self._config.logits_scaling,
        )

    def takes(self, step: PackedStep) -> bool:
        return self._has_embedding_and_head and step.adapters is None

    def forward_packed(self, input_ids: torch.Tensor, step: PackedStep, state: HybridState) -> torch.Tensor:
        return self._decoder.forward_packed(tokens=input_ids[0], states=state.mixer_tensors, **step.on_host)

    def advance(self, kept_inputs: Sequence[torch.Tensor], step: Step, state: HybridState) -> None:
        kept_inputs = [inputs.flatten(0, 1) for inputs in kept_inputs]
        self._decoder.advance(kept_inputs=kept_inputs, states=state.mixer_tensors, **step.rows())
