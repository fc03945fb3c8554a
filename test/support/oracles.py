"""Definitions of the operators, token by token in float64. They are slow, short, and independent of the package."""

from __future__ import annotations

import torch


def ssm_recurrence(x, dt, A, B, C, D, state):
    """S_t = exp(dt_t A) S_{t-1} + dt_t x_t (outer) B_t;  y_t = S_t C_t + D x_t.

    x [batch, length, heads, head_dim], dt [batch, length, heads], A and D [heads], B and C [batch, length, groups,
    d_state], state [batch, heads, head_dim, d_state]. Returns (y, final state) in float64.
    """
    x, dt, A, B, C, D, state = (tensor.double() for tensor in (x, dt, A, B, C, D, state))
    per_group = x.shape[2] // B.shape[2]
    outputs = []
    for t in range(x.shape[1]):
        b = B[:, t].repeat_interleave(per_group, 1)
        c = C[:, t].repeat_interleave(per_group, 1)
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, :, None]
        outputs.append((state * c[:, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1), state


def causal_conv(history, weight, bias):
    """Apply SiLU to the depthwise convolution of one sequence [tokens, channels], with zeros before it, in float64."""
    history, weight = history.double(), weight.double()
    width = weight.shape[1]
    outputs = []
    for t in range(len(history)):
        total = torch.zeros(history.shape[1], dtype=torch.float64)
        for tap in range(width):
            source = t - (width - 1) + tap
            if source >= 0:
                total += weight[:, tap] * history[source]
        total += 0 if bias is None else bias.double()
        outputs.append(total * torch.sigmoid(total))
    return torch.stack(outputs)


def attention(query, keys, values, scale):
    """Compute attention of one query [heads, head_dim] over keys and values [tokens, kv_heads, head_dim] in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    per_kv_head = len(query) // keys.shape[1]
    outputs = []
    for head, q in enumerate(query):
        weights = torch.softmax(keys[:, head // per_kv_head] @ q * scale, dim=0)
        outputs.append(weights @ values[:, head // per_kv_head])
    return torch.stack(outputs)


def mixture_of_experts(x, router, w1, w2, top_k):
    """Compute one token after another and one expert after another; x [tokens, hidden]; in float64."""
    x, router, w1, w2 = (tensor.double() for tensor in (x, router, w1, w2))
    outputs = []
    for token in x:
        top = (router @ token).topk(top_k)
        weights = torch.softmax(top.values, 0)
        total = torch.zeros_like(token)
        for weight, expert in zip(weights, top.indices.tolist(), strict=True):
            gate, up = (w1[expert] @ token).chunk(2)
            total += weight * (w2[expert] @ (gate * torch.sigmoid(gate) * up))
        outputs.append(total)
    return torch.stack(outputs)


def relative_error(value, exact):
    """Return the largest difference relative to the largest exact value."""
    return ((value.double() - exact).abs().max() / exact.abs().max()).item()
