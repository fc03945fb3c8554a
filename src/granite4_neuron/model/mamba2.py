"""The Mamba-2 layer: one forward for prefill, a further chunk, a verify step and decode."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.binding import Module
from granite4_neuron.model.linear import Linear, Projection
from granite4_neuron.model.norm import RMSNormGated
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.step import Step
from granite4_neuron.ops import Rounding
from granite4_neuron.ops.layer_weights import MambaWeights, MixerWeights
from granite4_neuron.state.hybrid_state import MambaState


class Mamba2(Module):
    """Projection, causal convolution, selective scan, gated norm, projection; heads are split over the ranks.

    Args:
        layer: its number in the model, so that no two layers round 16-bit states alike.

    Source: Dao and Gu 2024, figure 6, in the sequential form; Hugging Face's GraniteMoeHybridMambaLayer.
    """

    stream: torch.Tensor

    def __init__(self, config: ModelConfig, parallel: Parallel, layer: int = 0):
        super().__init__()
        self.rounding = Rounding(stream=layer)
        # A tensor, so that layers can share a graph. On the CPU even if the model is made on the meta device.
        self.register_buffer("stream", torch.tensor(layer, device="cpu"), persistent=False)
        dimensions = config.rank_dimensions(parallel.degree)
        self.num_heads = dimensions.mamba_heads
        self.head_dim = config.mamba_d_head
        self.n_groups = dimensions.mamba_groups
        self.d_state = config.mamba_d_state
        self.d_inner = dimensions.mamba_intermediate_size
        self.conv_dim = dimensions.mamba_conv_dim
        self.time_step_limit = config.time_step_limit

        bias = config.mamba_proj_bias
        self.in_proj = Linear(config.hidden_size, self.d_inner + self.conv_dim + self.num_heads, bias=bias)
        self.conv1d = _ConvWeights(self.conv_dim, config.mamba_d_conv, config.mamba_conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.norm = RMSNormGated(self.d_inner, config.rms_norm_eps, self.n_groups)
        self.out_proj = _NormedProjection(config, self.d_inner, parallel)

    def forward(self, hidden_states: torch.Tensor, step: Step, state: MambaState) -> tuple[torch.Tensor, torch.Tensor]:
        """Map [batch, tokens, hidden_size] to the same shape; also return the inputs of `advance`, [batch, tokens,
        conv_dim + num_heads]. `state` is advanced in place by the step's real tokens, unless the step verifies.
        """
        z, xBC_dt = self.project(hidden_states)
        y = self._mix(xBC_dt, step, state)
        return self.out_proj(y, z, self.norm), xBC_dt

    def advance(self, inputs: torch.Tensor, step: Step, state: MambaState) -> None:
        """Advance `state` in place by the first `step.lengths` inputs of a step that verified.

        Inputs after these are padding, whose dt is 0. The cost does not depend on the context's length.
        """
        self._mix(inputs, step, state)

    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gate z, [batch, tokens, d_inner], and x, B, C and dt, [batch, tokens, conv_dim + num_heads]."""
        projected = self.in_proj(hidden_states)
        return projected[..., : self.d_inner], projected[..., self.d_inner :]

    def recurrence_inputs(self, xBC_dt: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the convolution's input, and the scan's dt, [batch, tokens, num_heads], float32."""
        dt = xBC_dt[..., self.conv_dim :].float() + self.dt_bias.float()
        dt = F.softplus(dt).clamp(*self.time_step_limit)
        # A padded token must not change the state: dt = 0 makes its decay 1 and its update 0, since x and B are finite.
        return xBC_dt[..., : self.conv_dim], dt.masked_fill(~step.is_real[..., None], 0.0)

    def A(self) -> torch.Tensor:
        """Return the recurrence's A, [num_heads], float32."""
        return -torch.exp(self.A_log.float())

    def weights(self, norm: torch.Tensor, eps: float, residual_multiplier: float) -> MambaWeights:
        """Return the weights of the half of a decoder layer that holds this module; the arguments are the other
        weights.
        """
        mixer = MixerWeights(
            conv_weight=self.conv1d.weight,
            conv_bias=self.conv1d.bias,
            dt_bias=self.dt_bias,
            A_log=self.A_log,
            D=self.D,
            n_groups=self.n_groups,
            time_step_limit=self.time_step_limit,
            rounding=self.rounding,
        )
        return MambaWeights(
            norm=norm,
            in_proj=self.in_proj.weight,
            in_bias=self.in_proj.bias,
            mixer=mixer,
            gated_norm=self.norm.weight,
            out_proj=self.out_proj.weight,
            out_bias=self.out_proj.bias,
            eps=eps,
            residual_multiplier=residual_multiplier,
        )

    def _mix(self, xBC_dt: torch.Tensor, step: Step, state: MambaState) -> torch.Tensor:
        """Apply convolution and scan: [batch, tokens, conv_dim + num_heads] to [batch, tokens, d_inner]."""
        xBC, dt = self.recurrence_inputs(xBC_dt, step)
        mamba = self.operators.mamba_decode if xBC.shape[1] == 1 else self.operators.mamba_prefill
        weight = self.conv1d.weight.squeeze(1)
        xBC, conv_state = mamba.convolve(xBC, step.read(state.conv_state), weight, self.conv1d.bias, step.lengths)
        step.write(state.conv_state, conv_state)

        batch, tokens, _ = xBC.shape
        group_width = self.n_groups * self.d_state
        x = xBC[..., : self.d_inner].unflatten(-1, (self.num_heads, self.head_dim))
        B = xBC[..., self.d_inner : self.d_inner + group_width].unflatten(-1, (self.n_groups, self.d_state))
        C = xBC[..., self.d_inner + group_width :].unflatten(-1, (self.n_groups, self.d_state))
        chunk_size = self.operators.launch_parameters.torch_chunk_size
        dtype = state.ssm_state.dtype
        y, ssm_state = mamba.scan(x, dt, self.A(), B, C, self.D, step.read(state.ssm_state).float(), chunk_size)
        if dtype != torch.float32:
            rounding = self.rounding._replace(stream=self.stream)
            ssm_state = self.operators.round_state(ssm_state, dtype, step.last_positions, rounding)
        step.write(state.ssm_state, ssm_state)
        return y.reshape(batch, tokens, self.d_inner)


class _ConvWeights(Module):
    """Weights under the checkpoint's names; `ops.causal_conv1d` does the work."""

    bias: nn.Parameter | None

    def __init__(self, channels: int, width: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.register_parameter("bias", nn.Parameter(torch.empty(channels)) if bias else None)


class _NormedProjection(Projection):
    """The gated norm and out_proj. If the norm has one group, whose channels are split over ranks, one all-reduce
    serves the norm and the projection.

    The norm divides a token by a scalar, which commutes with the projection. So the sum of squares is reduced together
    with the partial sums, in float32 like them, and the division comes afterwards. With several groups, each split over
    ranks, there is a scalar for each, and so their sums of squares have an all-reduce of their own.

    own_group: whether a group is this rank's, [n_groups], where ranks share one of several. It is a tensor, so that a
        graph takes it as an input, see `VocabParallelEmbedding.first_row`.
    """

    own_group: torch.Tensor | None

    def __init__(self, config: ModelConfig, in_features: int, parallel: Parallel):
        super().__init__(in_features, config.hidden_size, bias=config.mamba_proj_bias)
        groups = config.mamba_n_groups
        self.parallel = parallel
        self.norm_is_split = parallel.degree > groups
        self.norm_channels = config.mamba_intermediate_size // groups
        own_group = None
        if config.has_collective_for_norms(parallel.degree):
            # On the CPU even if the model is made on the meta device: no checkpoint has these values.
            own_group = torch.arange(groups, device="cpu") == parallel.rank * groups // parallel.degree
        self.register_buffer("own_group", own_group, persistent=False)

    def forward(self, y: torch.Tensor, z: torch.Tensor | None, norm: RMSNormGated) -> torch.Tensor:
        """Map y and z [..., d_inner of this rank] to [..., hidden_size]; without z, y is already gated."""
        if self.parallel.degree == 1:
            return self.operators.linear(norm(y, z), self.weight, self.bias)
        if not self.norm_is_split:
            total = self.parallel.all_reduce(self.operators.linear(norm(y, z), self.weight, None).float())
        else:
            gated = y.float() if z is None else y.float() * F.silu(z.float())
            squares = (gated * gated).sum(-1, keepdim=True)
            if self.own_group is not None:
                of_groups = self.parallel.all_reduce(squares.where(self.own_group, 0.0))
                squares = of_groups.where(self.own_group, 0.0).sum(-1, keepdim=True)
                total = self.parallel.all_reduce(self._multiply(gated * self._factor(squares, norm), norm))
            else:
                total, squares = self.parallel.all_reduce_together(self._multiply(gated, norm), squares)
                total = total * self._factor(squares, norm)
        return total if self.bias is None else total + self.bias.float()

    def _factor(self, squares: torch.Tensor, norm: RMSNormGated) -> torch.Tensor:
        return torch.rsqrt(squares / self.norm_channels + norm.eps)

    def _multiply(self, normed: torch.Tensor, norm: RMSNormGated) -> torch.Tensor:
        """Return this rank's partial sums in float32."""
        weighted = (normed * norm.weight.float()).to(norm.weight.dtype)
        return self.operators.linear(weighted, self.weight, None).float()
