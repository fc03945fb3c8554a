"""Inputs of the NKI kernels, their definitions token by token, and the distance between two results."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from granite4_neuron.devices.neuron.expert_slots import expert_slots
from test.support import oracles


def scan_inputs(
    batch: int = 1,
    length: int = 128,
    heads: int = 4,
    head_dim: int = 64,
    groups: int = 1,
    d_state: int = 128,
    dtype: torch.dtype = torch.float32,
    max_A: float = 16.0,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Return arguments of the scans, with steps from 0.001 to 0.5 as trained models have them."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    return dict(
        x=normal(batch, length, heads, head_dim).to(dtype),
        dt=torch.exp(torch.empty(batch, length, heads).uniform_(math.log(1e-3), math.log(0.5), generator=g)),
        A=-torch.empty(heads).uniform_(1, max_A, generator=g),
        B=normal(batch, length, groups, d_state).to(dtype),
        C=normal(batch, length, groups, d_state).to(dtype),
        D=normal(heads),
        initial_states=normal(batch, d_state, heads, head_dim),
    )


def scan_oracle(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and final states of the recurrence in float64, in the kernels' layout."""
    x, dt, A, B, C, D, states = inputs.values()
    y, states = oracles.ssm_recurrence(x, dt, A, B, C, D, states.permute(0, 2, 3, 1))
    return y, states.permute(0, 3, 1, 2)


def conv_inputs(
    batch: int = 2,
    length: int = 130,
    channels: int = 256,
    d_conv: int = 4,
    dtype: torch.dtype = torch.float32,
    lengths: list[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Return arguments of conv1d_prefill."""
    g = torch.Generator().manual_seed(0)
    shapes = dict(
        x=(batch, length, channels),
        conv_states=(batch, channels, d_conv - 1),
        weight=(channels, d_conv),
        bias=(channels,),
    )
    tensors = {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}
    return dict(**tensors, lengths=torch.tensor(lengths or [length] * batch, dtype=torch.int32))


def conv_oracle(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y in float64, and the windows, which are the last inputs up to each row's last real token."""
    x, states, weight, bias, lengths = inputs.values()
    reach = weight.shape[1] - 1
    y, windows = [], []
    for row, state, length in zip(x, states, lengths.tolist(), strict=True):
        history = torch.cat([state.T, row])
        y.append(oracles.causal_conv(history, weight, bias)[reach:])
        windows.append(history[length : length + reach].T)
    return torch.stack(y), torch.stack(windows)


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference relative to the range of the exact values, or infinity if a value is not finite."""
    if not value.isfinite().all():
        return math.inf
    return ((value.double() - exact.double()).abs().max() / exact.double().abs().max()).item()


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def experts_inputs(
    tokens: int = 4,
    num_experts: int = 8,
    hidden: int = 256,
    width: int = 96,
    top_k: int = 3,
    dtype: torch.dtype = torch.float32,
    idle: tuple[int, ...] = (),
) -> dict[str, torch.Tensor]:
    """Return tokens, the experts' weights, and each token's choice. Tokens in `idle` choose nothing."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    gate_up_proj = (torch.randn(num_experts, hidden, 2 * width, generator=g) / hidden**0.5).to(dtype)
    down_proj = (torch.randn(num_experts, width, hidden, generator=g) / width**0.5).to(dtype)
    logits, topk_ids = torch.randn(tokens, num_experts, generator=g).topk(top_k)
    topk_ids[list(idle)] = num_experts
    return dict(x=x, gate_up_proj=gate_up_proj, down_proj=down_proj, topk_ids=topk_ids, topk_weights=logits.softmax(-1))


def experts_arguments(inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return arguments of experts_decode."""
    x, gate_up_proj, down_proj, topk_ids, topk_weights = inputs.values()
    return [x, gate_up_proj, down_proj, *expert_slots(topk_ids, topk_weights, len(down_proj))]


def experts_oracle(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weighted sums in float64: of the first, third, fifth... distinct expert, and of the other ones."""
    x, gate_up_proj, down_proj, topk_ids, topk_weights = inputs.values()
    distinct = sorted(set(topk_ids.flatten().tolist()) - {len(down_proj)})
    y = torch.zeros(2, *x.shape, dtype=torch.float64)
    for slot, expert in enumerate(distinct):
        gate_up, down = gate_up_proj[expert].double(), down_proj[expert].double()
        for token, choice in (topk_ids == expert).nonzero().tolist():
            gate, up = (x[token].double() @ gate_up).chunk(2)
            y[slot % 2, token] += topk_weights[token, choice].double() * (F.silu(gate) * up @ down)
    return y[0], y[1]


def mamba_decode_inputs(
    batch=3,
    tokens=4,
    heads=4,
    head_dim=64,
    groups=1,
    d_state=128,
    d_conv=4,
    dtype=torch.float32,
    accepted=None,
    max_A=16.0,
):
    g = torch.Generator().manual_seed(0)
    channels = heads * head_dim + 2 * groups * d_state

    def normal(*shape):
        return torch.randn(shape, generator=g)

    return dict(
        states=normal(batch, d_state, heads, head_dim),
        conv_states=normal(batch, channels, d_conv - 1).to(dtype),
        xBC=normal(batch, tokens, channels).to(dtype),
        dt=torch.exp(torch.empty(batch, tokens, heads).uniform_(math.log(1e-3), math.log(0.5), generator=g)),
        taps=(normal(channels, d_conv + 1) / 2).to(dtype),
        A_D=torch.stack([-torch.empty(heads).uniform_(1, max_A, generator=g), normal(heads)]),
        z=normal(batch, tokens, heads * head_dim).to(dtype),
        accepted=torch.tensor(accepted or [tokens] * batch, dtype=torch.int32),
    )


def mamba_decode_oracle(case):
    """Return the outputs of all tokens, and the states and windows after the accepted ones, in float64."""
    states, conv_states, xBC, dt, taps, A_D, z, accepted = case.values()
    batch, d_state, heads, head_dim = states.shape
    tokens, reach = xBC.shape[1], conv_states.shape[2]
    groups = (xBC.shape[2] - heads * head_dim) // (2 * d_state)
    outputs, new_states, windows = [], [], []
    for b in range(batch):
        history = torch.cat([conv_states[b].T, xBC[b]]).double()
        y = oracles.causal_conv(history, taps[:, :-1], taps[:, -1])[reach:].double()
        x, B, C = y.split([heads * head_dim, groups * d_state, groups * d_state], dim=-1)
        x, B, C = x.unflatten(-1, (heads, head_dim)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
        count = int(accepted[b])

        def scan(n, x=x, B=B, C=C, b=b):
            initial = states[b : b + 1].permute(0, 2, 3, 1)
            return oracles.ssm_recurrence(
                x[None, :n], dt[b : b + 1, :n], A_D[0], B[None, :n], C[None, :n], A_D[1], initial
            )

        outputs.append(scan(tokens)[0][0].flatten(1) * F.silu(z[b].double()))
        state = scan(count)[1][0] if count else states[b].permute(1, 2, 0).double()
        new_states.append(state.permute(2, 0, 1))
        windows.append(history[count : count + reach].T)
    return torch.stack(outputs), torch.stack(new_states), torch.stack(windows)


def mamba_prefill_inputs(batch=1, length=150, *shape, lengths=None, **options):
    """Return arguments of mamba_prefill: those of mamba_decode, with dt = 0 for padding. Both have one oracle."""
    case = mamba_decode_inputs(batch, length, *shape, accepted=lengths, **options)
    case["dt"].masked_fill_((torch.arange(length) >= case["accepted"][:, None])[..., None], 0.0)
    return case
