"""A Mamba layer's convolution and recurrence for one token per sequence, in place; a prompt's quadratic scan."""

from __future__ import annotations

import torch

from granite4_neuron.devices.cuda.causal_conv1d import convolve_tokens
from granite4_neuron.devices.cuda.operator import operator, register_launch
from granite4_neuron.devices.cuda.ssd_chunk_scan import scan_chunks
from granite4_neuron.devices.cuda.triton_utils import tl, triton
from granite4_neuron.ops.causal_conv1d import causal_conv1d
from granite4_neuron.ops.mamba_operators import MambaOperators, Results

# -- the convolution


@operator(mutates=("conv_state",))
def convolve_token(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: torch.Tensor
) -> torch.Tensor:
    """Compute `ops.causal_conv1d` of one token, [batch, 1, channels], in float32, and update conv_state in place."""
    y, window = causal_conv1d(x, conv_state, weight, bias, lengths)
    conv_state.copy_(window)
    return y


@convolve_token.register_fake
def _(x, conv_state, weight, bias, lengths):
    return x.new_empty(x.shape, dtype=torch.float32)


def _launch_convolve_token(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lengths: torch.Tensor
) -> torch.Tensor:
    batch, _, channels = x.shape
    y = x.new_empty(x.shape, dtype=torch.float32)
    d_conv, block_c = weight.shape[1], 128
    _convolve_token_kernel[batch, triton.cdiv(channels, block_c)](
        x,
        x.stride(0),
        conv_state,
        weight,
        bias,
        lengths,
        y,
        channels,
        D_CONV=d_conv,
        BLOCK_C=block_c,
        BLOCK_W=triton.next_power_of_2(d_conv),
    )
    return y


register_launch(convolve_token, _launch_convolve_token)


@triton.jit
def _convolve_token_kernel(
    x,
    stride_x_batch,
    conv_state,
    weight,
    bias,
    lengths,
    y,
    channels,
    D_CONV: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Convolve BLOCK_C channels of one sequence's token, and shift their windows.

    Grid: (batch, cdiv(channels, BLOCK_C)).

    Args:
        x: [batch, channels], with its stride.
        conv_state: [batch, channels, D_CONV - 1]; unchanged where lengths is 0.
        weight: [channels, D_CONV]. bias: [channels], or None.
        lengths: [batch] int32.
        y: [batch, channels] in float32.
    """
    pid_b = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < channels
    conv_state += pid_b * channels * (D_CONV - 1)
    window, shifted, weights, biases = load_convolution(conv_state, weight, bias, offs_c, mask_c, D_CONV, BLOCK_W)
    is_real = tl.load(lengths + pid_b) > 0
    new = tl.load(x + pid_b * stride_x_batch + offs_c, mask_c)
    tl.store(y + pid_b * channels + offs_c, convolve_channels(new, window, weights, biases, D_CONV, BLOCK_W), mask_c)
    shift_window(conv_state, new, shifted, offs_c, mask_c & is_real, D_CONV, BLOCK_W)


@triton.jit
def load_convolution(conv_state, weight, bias, offs_c, mask_c, D_CONV: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return channels' windows, shifted windows, weights, each [BLOCK_C, BLOCK_W], and biases, [BLOCK_C] in float32."""
    offs_w = tl.arange(0, BLOCK_W)[None]
    ptrs = conv_state + offs_c[:, None] * (D_CONV - 1) + offs_w
    window = tl.load(ptrs, mask_c[:, None] & (offs_w < D_CONV - 1))
    shifted = tl.load(ptrs + 1, mask_c[:, None] & (offs_w < D_CONV - 2))
    weights = tl.load(weight + offs_c[:, None] * D_CONV + offs_w, mask_c[:, None] & (offs_w < D_CONV), 0.0)
    biases = tl.zeros_like(offs_c).to(tl.float32)
    if bias is not None:
        biases = tl.load(bias + offs_c, mask_c, 0.0).to(tl.float32)
    return window, shifted, weights, biases


@triton.jit
def convolve_channels(new, window, weights, biases, D_CONV: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return the convolution's outputs, [BLOCK_C] in float32, of new inputs [BLOCK_C] after windows."""
    offs_w = tl.arange(0, BLOCK_W)[None]
    window = tl.where(offs_w < D_CONV - 1, window, new[:, None]).to(tl.float32)
    total = tl.sum(tl.where(offs_w < D_CONV, window * weights.to(tl.float32), 0.0), 1) + biases
    return total * tl.sigmoid(total)


@triton.jit
def shift_window(conv_state, new, shifted, offs_c, mask_c, D_CONV: tl.constexpr, BLOCK_W: tl.constexpr):
    """Write shifted windows with new inputs at their ends."""
    offs_w = tl.arange(0, BLOCK_W)[None]
    # A thread may have read values that another thread overwrites.
    tl.debug_barrier()
    values = tl.where(offs_w < D_CONV - 2, shifted, new[:, None])
    tl.store(conv_state + offs_c[:, None] * (D_CONV - 1) + offs_w, values, mask_c[:, None] & (offs_w < D_CONV - 1))


# -- the recurrence


@operator(mutates=("ssm_state",))
def advance_token(
    x: torch.Tensor,
    dt: torch.Tensor,
    log_decay: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
) -> torch.Tensor:
    """Compute `ops.selective_state_step`, with log_decay = dt * A, [batch, num_heads], in place of A; in float32."""
    heads_per_group = x.shape[1] // B.shape[1]
    b, c = (values.float().repeat_interleave(heads_per_group, 1)[:, :, None] for values in (B, C))
    inputs = x.float()
    ssm_state.mul_(torch.exp(log_decay)[..., None, None]).add_((dt[..., None] * inputs)[..., None] * b)
    return (ssm_state * c).sum(-1) + inputs * D.float()[:, None]


@advance_token.register_fake
def _(x, *others):
    return x.new_empty(x.shape, dtype=torch.float32)


def _launch_advance_token(
    x: torch.Tensor,
    dt: torch.Tensor,
    log_decay: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    ssm_state: torch.Tensor,
) -> torch.Tensor:
    batch, num_heads, head_dim = x.shape
    n_groups, d_state = B.shape[1:]
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    block_d = min(16, triton.next_power_of_2(head_dim))
    _advance_token_kernel[batch, num_heads, triton.cdiv(head_dim, block_d)](
        x,
        dt,
        log_decay,
        B,
        C,
        D,
        ssm_state,
        y,
        x.stride(0),
        B.stride(0),
        C.stride(0),
        num_heads,
        num_heads // n_groups,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        BLOCK_D=block_d,
        BLOCK_DSTATE=triton.next_power_of_2(d_state),
    )
    return y


register_launch(advance_token, _launch_advance_token)


@triton.jit
def _advance_token_kernel(
    x,
    dt,
    log_decay,
    B,
    C,
    D,
    ssm_state,
    y,
    stride_x_batch,
    stride_B_batch,
    stride_C_batch,
    num_heads,
    heads_per_group,
    HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr,
):
    """Advance BLOCK_D rows of one head's state by one token.

    Grid: (batch, num_heads, cdiv(HEAD_DIM, BLOCK_D)).

    Args:
        x: [batch, num_heads, HEAD_DIM], with its stride.
        dt, log_decay: [batch, num_heads] in float32.
        B, C: [batch, groups, D_STATE], with their strides.
        D: [num_heads].
        ssm_state: [batch, num_heads, HEAD_DIM, D_STATE] in float32.
        y: [batch, num_heads, HEAD_DIM] in float32.
    """
    pid_b, pid_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, BLOCK_DSTATE)
    mask_d, mask_n = offs_d < HEAD_DIM, offs_n < D_STATE
    offs_group = (pid_h // heads_per_group) * D_STATE + offs_n
    b = tl.load(B + pid_b * stride_B_batch + offs_group, mask_n, other=0.0).to(tl.float32)
    c = tl.load(C + pid_b * stride_C_batch + offs_group, mask_n, other=0.0).to(tl.float32)
    inputs = tl.load(x + pid_b * stride_x_batch + pid_h * HEAD_DIM + offs_d, mask_d, other=0.0).to(tl.float32)
    head = pid_b * num_heads + pid_h
    decay = tl.exp(tl.load(log_decay + head))
    dt_x = tl.load(dt + head) * inputs

    offs = (head * HEAD_DIM + offs_d)[:, None] * D_STATE + offs_n[None]
    mask = mask_d[:, None] & mask_n[None]
    state = tl.load(ssm_state + offs, mask, other=0.0) * decay + dt_x[:, None] * b[None]
    tl.store(ssm_state + offs, state, mask)
    outputs = tl.sum(state * c[None], 1) + inputs * tl.load(D + pid_h).to(tl.float32)
    tl.store(y + head * HEAD_DIM + offs_d, outputs, mask_d)


# -- the functions that layers call


def _convolve(x, conv_state, weight, bias, lengths) -> Results:
    """Compute `causal_conv1d` of one token."""
    return convolve_token(x, conv_state, weight, bias, lengths), conv_state


def _single_token(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_operators.single_token_scan`."""
    dt = dt[:, 0]
    y = advance_token(x[:, 0], dt, dt * A, B[:, 0], C[:, 0], D, ssm_state)
    return y.to(x.dtype)[:, None], ssm_state


def _chunked(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_operators.chunked_scan`; the chunk size is the same on every machine."""
    return scan_chunks(x, dt, A, B, C, D, ssm_state)


def _quadratic(x, dt, A, B, C, D, ssm_state, chunk_size) -> Results:
    """Compute `mamba_operators.quadratic_scan`, in plain torch that inductor compiles.

    Tokens stay before heads, as in the inputs, unlike in `devices.graphs.mamba`, and sums are scans.
    """
    (batch, length, num_heads, head_dim), n_groups = x.shape, B.shape[2]
    inputs = x.float()
    B_rows, C_rows = (values.float().transpose(1, 2).flatten(0, 1) for values in (B, C))
    groups = len(B_rows)  # of all sequences; consecutive heads share one

    # In float64 a difference of sums has all digits of a float32, even if the sums go down to -10,000.
    sums = (dt * A).double().transpose(1, 2).cumsum(-1)  # [batch, num_heads, length]
    decay = torch.exp((sums[..., None] - sums[:, :, None]).clamp(max=0.0).float())  # [batch, num_heads, to, from]
    from_start, to_end = (
        torch.exp(values.float()).transpose(1, 2)[..., None] for values in (sums, sums[..., -1:] - sums)
    )
    causal_scores = torch.bmm(C_rows, B_rows.transpose(1, 2)).tril()  # [groups, to, from]
    weights = (decay * dt.transpose(1, 2)[:, :, None]).view(groups, -1, length, length)
    weights = (weights * causal_scores[:, None]).view(-1, length, length)
    within = torch.bmm(weights, inputs.transpose(1, 2).reshape(-1, length, head_dim))
    within = within.view(batch, num_heads, length, head_dim).transpose(1, 2)
    from_before = torch.bmm(C_rows, ssm_state.reshape(groups, -1, B.shape[3]).transpose(1, 2))
    from_before = from_before.view(batch, n_groups, length, -1).transpose(1, 2)
    y = within + from_before.reshape(x.shape) * from_start + inputs * D.float()[:, None]

    at_end = (inputs * (dt[..., None] * to_end)).reshape(batch, length, n_groups, -1).transpose(1, 2).flatten(0, 1)
    added = torch.bmm(at_end.transpose(1, 2), B_rows).view(ssm_state.shape)
    return y.to(x.dtype), ssm_state * torch.exp(sums[..., -1].float())[..., None, None] + added


CHUNKED = MambaOperators(_chunked, convolve_tokens)
QUADRATIC = MambaOperators(_quadratic, convolve_tokens)
SINGLE_TOKEN = MambaOperators(_single_token, _convolve)
