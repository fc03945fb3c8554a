"""Layers of fused kernels: objects of C++ classes, each made once from its weights (a record of `ops.layer_weights`)
and called with named arguments.

Weights and settings are checked when a layer is made, arguments when it is called. An error there is a RuntimeError.
Matrices are packed, see `weights.pack`. Other weights are in the model's dtype; none is copied. Arithmetic is float32
inside. A row's results are the same bit by bit, whatever other rows the step has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from granite4_neuron.devices.cpu.weights import PackedWeight
from granite4_neuron.ops.launch_parameters import HEURISTIC, LaunchParameters
from granite4_neuron.ops.layer_weights import AttentionWeights, FeedForwardWeights, MambaWeights, MixerWeights
from granite4_neuron.ops.operators import FunctionSet


class MambaMixer(Protocol):
    """The part of a Mamba-2 layer between in_proj and the gated norm.

    Methods return y, [tokens, num_heads * head_dim] in float32, 0 for padding.
    """

    def step(
        self,
        projected: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        offsets: torch.Tensor,
        lengths: torch.Tensor,
        read_slots: torch.Tensor,
        write_slots: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor:
        """Run a step. Its rows have any lengths and lie one after another, with or without padding between them.
        Padding is not read, and rows of length 0 change no state.

        Args:
            projected: [tokens, conv_dim + num_heads]: x, B, C and dt as in_proj gives them.
            conv_state: [slots, conv_dim, d_conv - 1] in projected's dtype, advanced in place.
            ssm_state: [slots, num_heads, head_dim, d_state], advanced in place; in float32, or in float16 or bfloat16
                with `stochastic_round` after every token.
            offsets, lengths, read_slots, write_slots, starts: [rows], int64: the index of a row's first token in
                projected; how many of its tokens are real; the slot where its state is read; the slot where it is
                written, -1 for none; its first token's position.
        """

    def step_paged(
        self,
        projected: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        starts: torch.Tensor,
        pages: torch.Tensor,
        accepted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a few tokens of each sequence over states in the pages of a paged cache, as `causal_conv1d_update` and
        `selective_state_update` of vLLM.

        Args:
            projected: [tokens, conv_dim + num_heads], sequence after sequence.
            conv_state: [pages, conv_dim, columns], at any strides, in projected's dtype. Updated in place.
            ssm_state: [pages, num_heads, head_dim, d_state], float32; a page is contiguous. Updated in place.
            starts: [sequences + 1], where each sequence begins in projected, int32.
            pages: [sequences, n], int32; the first is the sequence's own, and -1 or 0 for padding.
            accepted: None; or for a speculative step [sequences], int32: how many tokens of the sequence's last step
                were accepted, 1 or more. Then the state before the first token is in page accepted - 1 of the row, the
                state after token t goes to page t, and the first page holds n - 1 more columns of inputs.
        """


class HalfLayer(Protocol):
    """A half of a decoder layer, with the norm before it and the residual around it."""

    def adapt(self, adapter: int, projection: str, down: torch.Tensor, up: torch.Tensor) -> None:
        """Add an adapter's up . down to a projection, for rows of `decoder` with this number.

        Args:
            projection: "in_proj" or "out_proj" of a `MambaLayer`; "q_proj", "k_proj", "v_proj" or "o_proj" of an
                `AttentionLayer`; "input", "output", "expert_input", "expert_output", "expert_fc1_latent_proj" or
                "expert_fc2_latent_proj" of a `FeedForward`.
            down, up: packed matrices for float32, or one of each expert.
        """


class MambaLayer(HalfLayer, Protocol):
    """The half with `model.mamba2.Mamba2`. hidden_states are [..., hidden_size] in float32."""

    def step_paged(
        self,
        hidden_states: torch.Tensor,
        conv_state: torch.Tensor,
        ssm_state: torch.Tensor,
        starts: torch.Tensor,
        pages: torch.Tensor,
        accepted: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the whole half, for [tokens, hidden_size]; further arguments as for `MambaMixer.step_paged`."""

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return z, x, B, C and dt side by side, and a view of them without z, which is the mixer's input."""

    def finish(self, hidden_states: torch.Tensor, projected: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Run the part after the mixer, whose output is y."""


class AttentionLayer(HalfLayer, Protocol):
    """The half with `model.attention.Attention`."""

    def step_paged(
        self,
        hidden_states: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        pages: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the whole half with `paged_attention`, for hidden_states [tokens, hidden_size] in float32.

        cos, sin: [1, tokens, head_dim / 2], float32, or None.
        """


class FeedForward(HalfLayer, Protocol):
    """The half with `model.moe.SharedMLP` and `model.moe.SparseMoe`."""

    def step(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Run it, for [..., hidden_size] in float32."""


class Decoder(Protocol):
    """All decoder layers, by halves. Rows are as for `MambaMixer.step`; tensors in `states` are advanced in place."""

    def append_mamba(self, half: MambaLayer) -> None:
        """Add a half with Mamba-2."""

    def append_attention(self, half: AttentionLayer) -> None:
        """Add a half with attention."""

    def append_feed_forward(self, half: FeedForward) -> None:
        """Add a half with MLP and experts."""

    def step(
        self,
        *,
        hidden_states: torch.Tensor,
        states: Sequence[tuple[torch.Tensor, ...]],
        offsets: torch.Tensor,
        lengths: torch.Tensor,
        read_slots: torch.Tensor,
        write_slots: torch.Tensor,
        starts: torch.Tensor,
        slots: torch.Tensor,
        adapters: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        keep_inputs: bool,
    ) -> list[torch.Tensor]:
        """Return hidden_states, [tokens, hidden_size], after all layers; with keep_inputs, also the inputs of each
        Mamba layer's mixer.

        Args:
            states: the two tensors of `MambaState` or `KeyValueState` for each half with Mamba-2 or attention, in
                order.
            slots: [rows], int64, each row's slot in the caches.
            adapters: [rows], int64, the number of each row's adapter, 0 for none; None for a step without adapters.
            cos, sin: [1, tokens, head_dim / 2], float32, or None.
        """

    def advance(
        self,
        kept_inputs: Sequence[torch.Tensor],
        states: Sequence[tuple[torch.Tensor, ...]],
        offsets: torch.Tensor,
        lengths: torch.Tensor,
        read_slots: torch.Tensor,
        write_slots: torch.Tensor,
        starts: torch.Tensor,
    ) -> None:
        """Advance the Mamba layers' states by inputs that `step` kept."""

    def set_embedding_and_head(
        self,
        head: torch.Tensor,
        embedding: torch.Tensor | None,
        embedding_multiplier: float,
        norm: torch.Tensor,
        eps: float,
        logits_scaling: float,
    ) -> None:
        """Set embedding, final norm and head, for `forward_packed`.

        Args:
            head: packed.
            embedding: [vocab_size, hidden_size], or None for the head's rows.
        """

    def forward_packed(
        self,
        tokens: torch.Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
        states: Sequence[tuple[torch.Tensor, ...]],
    ) -> torch.Tensor:
        """Return logits after each row's last token, [rows, vocab_size] in float32.

        Args:
            tokens: [tokens], int64, of all rows, one row after another.
            starts, lengths, slots: of each row the position of its first token, how many it has, at least one, and its
                slot.
        """


def mamba_mixer(weights: MixerWeights, launch_parameters: LaunchParameters = HEURISTIC) -> MambaMixer:
    """Make the part of a Mamba-2 layer between in_proj and the gated norm: `causal_conv1d`, then with dt =
    clamp(softplus(dt + dt_bias)) and A = -exp(A_log) `selective_state_step`, or for several tokens
    `mamba_chunk_scan_combined`.
    """
    dt_min, dt_max = weights.time_step_limit
    return torch.classes.granite4_neuron.MambaMixer(
        conv_weight=weights.conv_weight,
        conv_bias=weights.conv_bias,
        dt_bias=weights.dt_bias,
        A_log=weights.A_log,
        D=weights.D,
        n_groups=weights.n_groups,
        dt_min=dt_min,
        dt_max=dt_max,
        chunk_size=launch_parameters.chunk_size,
        heads_per_task=launch_parameters.heads_per_task,
        **weights.rounding._asdict(),
    )


def mamba_layer(weights: MambaWeights, mixer: MambaMixer) -> MambaLayer:
    """Make the half of a decoder layer with `model.mamba2.Mamba2`.

    It is hidden_states + residual_multiplier * out_proj(rms_norm_gated(y, z)), where y = mixer(x, B, C, dt) and
    (z, x, B, C, dt) = in_proj(rms_norm(hidden_states)).
    """
    return torch.classes.granite4_neuron.MambaLayer(mixer=mixer, **_packed(weights, without=("mixer",)))


def attention_layer(weights: AttentionWeights) -> AttentionLayer:
    """Make the half of a decoder layer with `model.attention.Attention`."""
    return torch.classes.granite4_neuron.AttentionLayer(**_packed(weights))


def feed_forward(weights: FeedForwardWeights) -> FeedForward:
    """Make the half of a decoder layer with `model.moe.SharedMLP` and `model.moe.SparseMoe`."""
    return torch.classes.granite4_neuron.FeedForward(**_packed(weights))


def _packed(
    weights: MambaWeights | AttentionWeights | FeedForwardWeights, without: tuple[str, ...] = ()
) -> dict[str, object]:
    """Return the arguments of a C++ class, which are named as the weights are."""
    return {
        name: value.packed if isinstance(value, PackedWeight) else value
        for name, value in weights._asdict().items()
        if name not in without
    }


def decoder() -> Decoder:
    """Make an empty `Decoder`, to which halves are appended."""
    return torch.classes.granite4_neuron.Decoder()


class LayerMakers(FunctionSet):
    """The functions above, of which `FusedLayers` makes its decoder."""

    mamba_mixer = staticmethod(mamba_mixer)
    mamba_layer = staticmethod(mamba_layer)
    attention_layer = staticmethod(attention_layer)
    feed_forward = staticmethod(feed_forward)
    decoder = staticmethod(decoder)
