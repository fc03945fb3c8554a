"""A decoder layer: its definition, which all faster forms of it are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.attention import Attention, RotaryTables
from granite4_neuron.model.binding import Module
from granite4_neuron.model.mamba2 import Mamba2
from granite4_neuron.model.moe import SharedMLP, SparseMoe
from granite4_neuron.model.norm import RMSNorm, norm_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.step import Step
from granite4_neuron.ops.layer_weights import AttentionWeights, FeedForwardWeights, MambaWeights
from granite4_neuron.state.hybrid_state import LayerState, MambaState


class DecoderLayer(Module):
    """Mamba or attention, then MLP and experts; each half has a norm before it and is added with the residual
    multiplier. A layer may have only one of the halves.

    A subclass may replace `mix` and `feed_forward`, or the modules that they call; see `model.forms`.

    mamba, self_attn: one of them, by `is_mamba`; neither where `has_mixer` is false.
    shared_mlp, block_sparse_moe: where `has_feed_forward` is true; block_sparse_moe may be None.
    """

    mamba: Mamba2
    self_attn: Attention
    shared_mlp: SharedMLP
    block_sparse_moe: SparseMoe | None

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallel,
        mixer: Mamba2 | Attention | None,
        shared_mlp: SharedMLP | None,
        experts: SparseMoe | None,
    ):
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.parallel = parallel
        self.input_layernorm = norm_of(config)
        self.is_mamba = isinstance(mixer, Mamba2)
        self.has_mixer, self.has_feed_forward = mixer is not None, shared_mlp is not None
        if isinstance(mixer, Mamba2):
            self.mamba = mixer
        elif mixer is not None:
            self.self_attn = mixer
        if mixer is not None and shared_mlp is not None:
            self.post_attention_layernorm = norm_of(config)
        if shared_mlp is not None:
            self.block_sparse_moe = experts
            self.shared_mlp = shared_mlp

    @property
    def kind(self) -> str:
        """The layer's name: its mixer's, or its feed-forward part's if it has no mixer."""
        if self.has_mixer:
            return "Mamba" if self.is_mamba else "attention"
        return "MLP" if self.block_sparse_moe is None else "expert"

    @property
    def feed_forward_norm(self) -> RMSNorm:
        """The norm before MLP and experts: a layer with one half has one norm."""
        return self.post_attention_layernorm if self.has_mixer else self.input_layernorm

    def forward(
        self,
        hidden_states: torch.Tensor,
        step: Step,
        state: LayerState,
        rotary: RotaryTables | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the new hidden_states, [batch, tokens, hidden_size]; a Mamba layer also returns `advance`'s inputs."""
        normed = self.input_layernorm(hidden_states)
        if not self.has_mixer:
            return self.add_feed_forward(hidden_states, normed, step), None
        mixed, inputs = self.mix(normed, step, state, rotary)
        if not self.has_feed_forward:
            return self.operators.residual_add(hidden_states, mixed, self.residual_multiplier), inputs
        return self.add_feed_forward(*self.add_mixed(hidden_states, mixed), step), inputs

    def add_mixed(self, hidden_states: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the mixer's output to [batch, tokens, hidden_size]; also return the input of the feed-forward part."""
        hidden_states = self.operators.residual_add(hidden_states, mixed, self.residual_multiplier)
        return hidden_states, self.feed_forward_norm(hidden_states)

    def add_feed_forward(self, hidden_states: torch.Tensor, normed: torch.Tensor, step: Step) -> torch.Tensor:
        """Apply MLP and experts to the normalised hidden_states; all are [batch, tokens, hidden_size]."""
        for output in self.feed_forward(normed, step):
            hidden_states = self.operators.residual_add(hidden_states, output, self.residual_multiplier)
        return hidden_states

    def mix(
        self, x: torch.Tensor, step: Step, state: LayerState, rotary: RotaryTables | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the layer's `Mamba2` or `Attention` to [batch, tokens, hidden_size]."""
        if self.is_mamba:
            return self.mamba(x, step, state)
        return self.self_attn(x, step, state, rotary), None

    def feed_forward(self, x: torch.Tensor, step: Step) -> Iterator[torch.Tensor]:
        """Return the terms to add one after the other, each [batch, tokens, hidden_size].

        Ranks add up MLP and experts in one message, so these are one term.
        """
        outputs = [self.shared_mlp(x)]
        if self.block_sparse_moe is not None:
            outputs.append(self.block_sparse_moe(x))
        yield from outputs if self.parallel.degree == 1 else [self.parallel.all_reduce(sum(outputs[1:], outputs[0]))]

    def advance(self, inputs: torch.Tensor, step: Step, state: MambaState) -> None:
        """Advance a Mamba layer's state by inputs of a step that verified, see `Mamba2.advance`."""
        self.mamba.advance(inputs, step, state)

    def mamba_weights(self) -> MambaWeights:
        """Return the weights of the first half of a Mamba layer."""
        norm = self.input_layernorm
        return self.mamba.weights(norm.weight, norm.eps, self.residual_multiplier)

    def attention_weights(self) -> AttentionWeights:
        """Return the weights of the first half of an attention layer."""
        norm = self.input_layernorm
        return self.self_attn.weights(norm.weight, norm.eps, self.residual_multiplier)

    def feed_forward_weights(self) -> FeedForwardWeights:
        """Return the weights of the second half."""
        norm, mlp, experts = self.feed_forward_norm, self.shared_mlp, self.block_sparse_moe
        return FeedForwardWeights(
            norm=norm.weight,
            input=mlp.input_linear.weight,
            output=mlp.output_linear.weight,
            router=None if experts is None else experts.router.layer.weight,
            expert_input=None if experts is None else experts.input_linear.weight,
            expert_output=None if experts is None else experts.output_linear.weight,
            top_k=0 if experts is None else experts.top_k,
            eps=norm.eps,
            residual_multiplier=self.residual_multiplier,
            **({} if experts is None else experts.choice() | experts.latent_weights()),
        )
