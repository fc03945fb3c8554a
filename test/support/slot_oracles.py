"""The operators on state in slots, one row and one token after another in float64, and their known mistakes.

Each function has the name, the arguments and the in-place rules of the operator it defines. States are float64. With
`mistake` it makes one mistake that was found in an implementation in use. A test must be able to tell the difference.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional as F

from test.support import oracles


def causal_conv1d_fn(
    x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, activation="silu",
    null_block_id=0, mistake=None
):  # fmt: skip
    x, weight = x.double(), weight.double()
    history = conv_states.shape[2] if mistake == "width from the state" else weight.shape[1] - 1
    out = torch.zeros_like(x)
    for row, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        slot = row if cache_indices is None else int(cache_indices[row])
        is_padding = cache_indices is not None and slot in (-1, null_block_id)
        if start == end or (is_padding and mistake != "padding is computed"):
            continue
        continued = has_initial_state is not None and bool(has_initial_state[row])
        if mistake == "leftovers of the last sequence":
            continued = True
        window = conv_states[slot, :, :history].clone() if continued else x.new_zeros(len(x), history)
        for t in range(start, end):
            window = torch.cat([window, x[:, t : t + 1]], 1)
            out[:, t] = _conv_output(window[:, -weight.shape[1] :], weight, bias, activation)
        if mistake == "shifted twice":
            window = torch.cat([window[:, -history:], x[:, start:end]], 1)
        conv_states[slot, :, :history] = window[:, -history:]
    if mistake == "dead output":
        out[:, int(query_start_loc[-1]) :] = torch.nan
    return out


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None,
    query_start_loc=None, null_block_id=0, block_idx_last_scheduled_token=None, initial_state_idx=None, mistake=None
):  # fmt: skip
    """Update windows in place. x is [tokens, dim], and query_start_loc must be given."""
    x, weight, before = x.double(), weight.double(), conv_state.clone()
    history = weight.shape[1] - 1
    out = torch.zeros_like(x)
    for row, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        blocks = conv_state_indices[row].reshape(-1).tolist()
        source = blocks[0 if initial_state_idx is None else int(initial_state_idx[row])]
        destination = blocks[0 if block_idx_last_scheduled_token is None else int(block_idx_last_scheduled_token[row])]
        if mistake == "one index to read and write":
            source = destination
        if start == end or (source in (-1, null_block_id) and mistake != "padding is computed"):
            continue
        offset = 0 if num_accepted_tokens is None else max(int(num_accepted_tokens[row]) - 1, 0)
        if mistake == "accepted tokens ignored":
            offset = 0
        if mistake == "width from the state":
            offset = conv_state.shape[2] - history
        window = (conv_state if mistake == "read after write" else before)[source, :, offset : offset + history]
        tokens = x[start:end].T
        inputs = torch.cat([window, tokens], 1)
        for t in range(end - start):
            out[start + t] = _conv_output(inputs[:, t : t + history + 1], weight, bias, activation)
        if mistake == "shifted twice":
            inputs = torch.cat([inputs[:, -history:], tokens], 1)
        kept = inputs[:, 1:] if num_accepted_tokens is not None else inputs[:, -history:]
        if destination not in (-1, null_block_id) or mistake == "padding is computed":
            conv_state[destination, :, : kept.shape[1]] = kept
            if (
                mistake == "shift smears"
            ):  # columns moved left from the right end: each overwrites the next one's source
                for column in reversed(range(history - 1)):
                    conv_state[destination, :, column] = conv_state[destination, :, column + 1]
        if mistake == "source is written":
            conv_state[source, :, : kept.shape[1]] = kept
    return out


def _conv_output(window, weight, bias, activation):
    y = (window * weight).sum(1) + (0 if bias is None else bias.double())
    return F.silu(y) if activation else y


def selective_state_update(
    state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None,
    dst_state_batch_indices=None, null_block_id=0, num_accepted_tokens=None, cu_seqlens=None, mistake=None
):  # fmt: skip
    x, dt, A, B, C, D, dt_bias = (tensor.double() for tensor in (x, dt, A, B, C, D, dt_bias))
    per_group = x.shape[1] // B.shape[1]
    before = state.clone()
    dst_state_batch_indices = state_batch_indices if dst_state_batch_indices is None else dst_state_batch_indices
    out = torch.zeros_like(x)
    for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        accepted = 1 if num_accepted_tokens is None else max(int(num_accepted_tokens[row]), 1)
        source = int(state_batch_indices[row, 0 if mistake == "accepted tokens ignored" else accepted - 1])
        if start == end or (source in (-1, null_block_id) and mistake != "padding is computed"):
            continue
        committed = h = (state if mistake == "read after write" else before)[source].clone()
        for t in range(start, end):
            step = dt[t] + dt_bias
            step = F.softplus(step) if dt_softplus else step
            b, c = (values[t].repeat_interleave(per_group, 0)[:, None] for values in (B, C))
            if mistake == "every token reads the committed state":
                h = committed
            h = torch.exp(step[..., None] * A) * h + (step * x[t])[..., None] * b
            y = (h * c).sum(-1) + D * x[t]
            out[t] = y if z is None else y * F.silu(z[t].double())
            column = t - start if num_accepted_tokens is not None else 0
            is_stored = num_accepted_tokens is not None or t == end - 1
            if mistake == "one state per row":
                is_stored = t == end - 1
            if mistake == "first column only":
                column = 0
            destination = int(dst_state_batch_indices[row, column])
            if is_stored and (destination not in (-1, null_block_id) or mistake == "padding is computed"):
                state[destination] = h
        if mistake == "source is written":
            state[source] = h
    if mistake == "dead output":
        out[int(cu_seqlens[-1]) :] = torch.nan
    return out


def mamba_chunk_scan_combined_varlen(
    x, dt, A, B, C, chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx, D, initial_states,
    mistake=None, **_
):  # fmt: skip
    """Scan without z, with dt unchanged. Return (y, the state after each chunk, the state after each sequence)."""
    y, after_chunk, after_sequence = torch.zeros_like(x, dtype=torch.float64), [], initial_states.double().clone()
    for chunk, (start, end) in enumerate(pairwise(cu_chunk_seqlens.tolist())):
        sequence = int(seq_idx[chunk])
        state = after_sequence[sequence]
        if mistake == "state of the sequence before" and chunk:
            state = after_chunk[-1]
        if mistake == "every chunk starts from the initial state":
            state = initial_states[sequence]
        here = slice(start, end)
        y_here, state = oracles.ssm_recurrence(
            x[None, here], dt[None, here], A, B[None, here], C[None, here], D, state[None]
        )
        y[here], after_sequence[sequence] = y_here[0], state[0]
        after_chunk.append(state[0])
    if mistake == "final states by last chunk":
        after_sequence = torch.stack(after_chunk)[last_chunk_indices.long()]
    return y, after_chunk, after_sequence


def selective_scan_fn(
    u, ssm_states, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, query_start_loc=None,
    cache_indices=None, has_initial_state=None, null_block_id=0, mistake=None
):  # fmt: skip
    """Scan ragged sequences only. Return (y before the gate, y)."""
    u, dt, A, B, C = (tensor.double() for tensor in (u, delta, A, B, C))
    dt = dt if delta_bias is None else dt + delta_bias.double()[:, None]
    dt = F.softplus(dt) if delta_softplus else dt
    per_group = len(u) // len(B)
    y, gated = torch.zeros_like(u), torch.zeros_like(u)
    for row, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        slot = int(cache_indices[row])
        if start == end or (slot in (-1, null_block_id) and mistake != "padding is computed"):
            continue
        continued = bool(has_initial_state[row]) or mistake == "leftovers of the last sequence"
        h = ssm_states[slot].clone() if continued else torch.zeros_like(ssm_states[slot])
        for t in range(start, end):
            b, c = (values[:, :, t].repeat_interleave(per_group, 0) for values in (B, C))
            h = torch.exp(dt[:, t, None] * A) * h + (dt[:, t] * u[:, t])[:, None] * b
            y[:, t] = (h * c).sum(-1) + (0 if D is None else D.double() * u[:, t])
            gated[:, t] = y[:, t] if z is None else y[:, t] * F.silu(z[:, t].double())
        ssm_states[slot] = h
    if mistake == "dead output":
        y[:, int(query_start_loc[-1]) :] = gated[:, int(query_start_loc[-1]) :] = torch.nan
    return y, gated
