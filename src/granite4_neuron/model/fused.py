"""All decoder layers as one call of fused kernels: the time that Python takes between short kernels is saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.model.adapters import Adapter
from granite4_neuron.model.attention import Attention, RotaryTables
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.step import NullSlotStep
from granite4_neuron.ops import CompactWeight, Operators
from granite4_neuron.state.hybrid_state import HybridState


def why_not_fused(parallel: Parallel) -> str | None:
    """Return why the fused layers do not support a model, as a clause; None if they do."""
    if parallel.degree > 1:
        return f"they are for a whole model, and this is a part of {parallel.degree}"
    return None


def why_not_one_call(
    config: GraniteMoeHybridConfig, embedding: torch.Tensor | CompactWeight, head: CompactWeight
) -> str | None:
    """Return why fused layers have no `decode` for a model, as a clause; None if they have."""
    if config.uses_rope:
        return "it makes no rotary positions"
    if not isinstance(embedding, torch.Tensor) and embedding is not head:
        return "it looks up rows of a plain embedding, or of the head's matrix"
    return None


class FusedLayers:
    """The decoder layers of a model, with the weights that they have when this is made.

    Args:
        operators: with fused layers.
        layers: whose matrices are packed.
        config: of the whole model.
        adapters: numbered from 1 on.
    """

    def __init__(
        self,
        operators: Operators,
        layers: Sequence[DecoderLayer],
        config: GraniteMoeHybridConfig,
        adapters: Sequence[Adapter] = (),
    ):
        self._kernels, self._launch_parameters = operators.fused_layers, operators.launch_parameters
        self._config = config
        self._decoder = self._kernels.decoder()
        halves: list[dict[str, torch.ScriptObject]] = []  # of each layer, by the modules that they compute
        for layer in layers:
            feed_forward = self._feed_forward(layer)
            if layer.is_mamba:
                mixer = self._mamba_layer(layer)
                self._decoder.append_mamba(mixer=mixer, feed_forward=feed_forward)
            else:
                mixer = self._attention_layer(layer)
                self._decoder.append_attention(mixer=mixer, feed_forward=feed_forward)
            halves.append({"mamba": mixer, "self_attn": mixer, "shared_mlp": feed_forward})
        for number, adapter in enumerate(adapters, start=1):
            for name, addition in adapter.additions.items():
                _, _, layer_number, module, projection, _ = name.split(".")
                down, up = (operators.pack(matrix, torch.float32).packed for matrix in (addition.down, addition.up))
                half, projection = halves[int(layer_number)][module], projection.removesuffix("_linear")
                half.adapt(adapter=number, projection=projection, down=down, up=up)

    def __call__(
        self, hidden_states: torch.Tensor, step: NullSlotStep, state: HybridState, rotary: RotaryTables | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Advance hidden_states, [batch, tokens, hidden_size] in float32, through all layers, and the state in place.

        Returns:
            The new hidden_states; and if the step verifies, the inputs of each Mamba layer's recurrence.
        """
        cos, sin = rotary or (None, None)
        hidden_states, *inputs = self._decoder.step(
            hidden_states=hidden_states,
            states=_pairs(state),
            slots=step.slots,
            adapters=step.adapters,
            cos=cos,
            sin=sin,
            keep_inputs=step.verifies,
            **step.rows(),
        )
        return hidden_states, inputs

    def set_embedding_and_head(
        self, embedding: torch.Tensor | CompactWeight, norm: torch.Tensor, head: CompactWeight
    ) -> None:
        """Give it the model's embedding, final norm and head, for `decode`."""
        self._decoder.set_embedding_and_head(
            head=head.packed,
            embedding=None if embedding is head else embedding,
            embedding_multiplier=self._config.embedding_multiplier,
            norm=norm,
            eps=self._config.rms_norm_eps,
            logits_scaling=self._config.logits_scaling,
        )

    def decode(
        self, tokens: Sequence[int], starts: Sequence[int], slots: Sequence[int], state: HybridState
    ) -> torch.Tensor:
        """Compute `GraniteMoeHybridForCausalLM.decode`."""
        return self._decoder.decode(tokens=tokens, starts=starts, slots=slots, states=_pairs(state))

    def advance(self, kept_inputs: Sequence[torch.Tensor], step: NullSlotStep, state: HybridState) -> None:
        """Advance the Mamba layers' states by inputs that a call kept, see `Mamba2.advance`."""
        self._decoder.advance(kept_inputs=list(kept_inputs), states=_pairs(state), **step.rows())

    def _mamba_layer(self, layer: DecoderLayer) -> torch.ScriptObject:
        mamba: Mamba2 = layer.mamba
        mixer = self._kernels.mamba_mixer(
            conv_weight=mamba.conv1d.weight,
            conv_bias=mamba.conv1d.bias,
            dt_bias=mamba.dt_bias,
            A_log=mamba.A_log,
            D=mamba.D,
            n_groups=mamba.n_groups,
            time_step_limit=mamba.time_step_limit,
            rounding=mamba.rounding,
            launch_parameters=self._launch_parameters,
        )
        return self._kernels.mamba_layer(
            mixer=mixer,
            norm=layer.input_layernorm.weight,
            in_proj=mamba.in_proj.weight,
            in_bias=mamba.in_proj.bias,
            gated_norm=mamba.norm.weight,
            out_proj=mamba.out_proj.weight,
            out_bias=mamba.out_proj.bias,
            **self._residual(),
        )

    def _attention_layer(self, layer: DecoderLayer) -> torch.ScriptObject:
        attention: Attention = layer.self_attn
        return self._kernels.attention_layer(
            norm=layer.input_layernorm.weight,
            q_proj=attention.q_proj.weight,
            q_bias=attention.q_proj.bias,
            k_proj=attention.k_proj.weight,
            k_bias=attention.k_proj.bias,
            v_proj=attention.v_proj.weight,
            v_bias=attention.v_proj.bias,
            o_proj=attention.o_proj.weight,
            o_bias=attention.o_proj.bias,
            head_dim=attention.head_dim,
            scale=attention.scale,
            **self._residual(),
        )

    def _feed_forward(self, layer: DecoderLayer) -> torch.ScriptObject:
        mlp, experts = layer.shared_mlp, layer.block_sparse_moe
        return self._kernels.feed_forward(
            norm=layer.post_attention_layernorm.weight,
            input=mlp.input_linear.weight,
            output=mlp.output_linear.weight,
            router=experts and experts.router.layer.weight,
            expert_input=experts and experts.input_linear.weight,
            expert_output=experts and experts.output_linear.weight,
            top_k=experts.top_k if experts else 0,
            **self._residual(),
        )

    def _residual(self) -> dict[str, float]:
        return {"eps": self._config.rms_norm_eps, "residual_multiplier": self._config.residual_multiplier}


def _pairs(state: HybridState) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(vars(layer).values()) for layer in state.layers]
