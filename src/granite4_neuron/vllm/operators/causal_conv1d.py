"""`ops.causal_conv1d` over ragged batches, with windows in slots."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from granite4_neuron.ops.causal_conv1d import depthwise_convolution
from granite4_neuron.vllm.operators.arguments import (
    NULL_BLOCK_ID,
    PAD_SLOT_ID,
    check_distinct,
    check_flags,
    check_floating,
    check_integers,
    check_shape,
    check_silu,
    check_slots,
    is_padding,
    ragged,
    tokens_of,
)


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: bool | str | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    null_block_id: int | None = NULL_BLOCK_ID,
    metadata: object = None,
    validate_data: bool = False,
) -> torch.Tensor:
    """Run a causal depthwise convolution over whole sequences, or chunks of them, that lie one after another.

    Sequence b convolves its window followed by its tokens, and leaves in its slot the last d_conv - 1 inputs of both
    together, however few tokens there are. x is first rounded to the window's dtype, so that a sequence has the same
    results wherever it is cut; the arithmetic is float32. x is not changed.

    Args:
        x: [dim, tokens], any strides. Tokens after the last sequence are padding.
        weight: [dim, d_conv], the last tap multiplies the current token.
        bias: [dim] or None.
        conv_states: [slots, dim, at least d_conv - 1], updated in place: the first d_conv - 1 columns are the window,
            oldest input first, and further columns are unchanged.
        query_start_loc: [batch + 1], integers, where each sequence starts. An empty sequence leaves its slot unchanged.
        cache_indices: [batch or more], integers, each sequence's slot; None for slots 0 to batch - 1. A sequence with
            slot -1, `pad_slot_id` or `null_block_id` is padding, and touches no slot.
        has_initial_state: [batch], bool, false where the window is zeros, whatever the slot holds; None for all false.
        activation: None or False, or True, "silu" or "swish".
        metadata, validate_data: part of vLLM's signature, without effect: arguments are always checked.

    Returns:
        [dim, tokens] in x's dtype and strides; zeros where x is padding.

    Raises:
        ValueError: an argument has a wrong shape, dtype or index, or gives two sequences one slot; the message names
            it.

    Source: Dao and Gu 2024, section 8; signature and in-place rules of vLLM 0.33
    (vllm/model_executor/layers/mamba/ops/causal_conv1d.py).
    """
    check_shape("x", x, -1, -1)
    dim, total = x.shape
    history = _check_weights(x, dim, weight, bias, conv_states, "conv_states")
    silu = check_silu(activation)
    starts, lengths = ragged("query_start_loc", query_start_loc, total)
    batch = len(lengths)
    check_flags("has_initial_state", has_initial_state, batch)

    live = lengths > 0
    if cache_indices is None:
        slots = _own_slots(batch, conv_states, "conv_states")
    else:
        check_shape("cache_indices", cache_indices, max(batch, len(cache_indices)))
        slots = check_slots("cache_indices", cache_indices[:batch], len(conv_states))
        live &= ~is_padding(slots, pad_slot_id, null_block_id)
    slots, starts, lengths = slots[live], starts[live], lengths[live]
    check_distinct("cache_indices", slots)

    windows = conv_states[slots, :, :history].transpose(1, 2)
    continued = torch.zeros_like(live) if has_initial_state is None else has_initial_state
    windows = windows.where(continued[live, None, None], 0)
    rows = tokens_of(starts, lengths)
    y, inputs, first = _convolve(windows, x.T[rows].to(conv_states.dtype), lengths, weight, bias, silu)

    out = torch.zeros_like(x)
    out[:, rows] = y.T.to(x.dtype)
    last_inputs = (first + lengths)[:, None] + torch.arange(history)
    conv_states[slots, :, :history] = inputs[last_inputs].transpose(1, 2)
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = NULL_BLOCK_ID,
    validate_data: bool = False,
    out: torch.Tensor | None = None,
    *,
    block_idx_last_scheduled_token: torch.Tensor | None = None,
    initial_state_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a causal depthwise convolution over a few new tokens per sequence: a decode step, or the verify step of
    speculation.

    Let w be the d_conv - 1 inputs before a row's first token.

    * Without `num_accepted_tokens`, w is the slot's first d_conv - 1 columns, and they become the last d_conv - 1
      inputs.
    * With it, the slot still holds the inputs of the previous verify step, only num_accepted_tokens of which were
      accepted: w starts at column num_accepted_tokens - 1. The slot then receives w without its oldest input, followed
      by all new tokens, from column 0 on, so that the next step can choose its own w.

    Further columns are unchanged. All windows are read before the first is written: a slot may be one row's source and
    another's destination. As in `causal_conv1d_fn`, x is rounded to the window's dtype, and the arithmetic is float32.

    Args:
        x: [batch, dim], one token per row; or [batch, dim, tokens]; or with query_start_loc [tokens, dim].
            Overwritten by the result unless `out` is given.
        conv_state: [slots, dim, columns], updated in place. There are at least d_conv - 1 columns, and with
            `num_accepted_tokens` d_conv - 2 + the tokens of the longest row.
        weight: [dim, d_conv]; it, not conv_state, decides the convolution's width.
        bias: [dim] or None.
        activation: None or False, or True, "silu" or "swish".
        conv_state_indices: [batch], integers, each row's slot; or [batch, blocks], a block table, whose first column is
            used unless the two arguments below are given; None for slots 0 to batch - 1. A row whose slot is -1 or
            `null_block_id` is padding, and touches no slot.
        num_accepted_tokens: [batch], integers: how many tokens of the row's previous step were accepted, 1 or more
            (0 is read as 1). Entries for padding do not matter.
        query_start_loc: [batch + 1], integers, where each row starts in x. An empty row leaves its slot unchanged.
        max_query_len: with query_start_loc, the most tokens of a row; -1 for no limit.
        null_block_id: the slot that marks padding, or None.
        validate_data: part of vLLM's signature, without effect: arguments are always checked.
        out: in x's shape and dtype, receives the result; then x is not changed.
        block_idx_last_scheduled_token, initial_state_idx: [batch], integers, both or neither: the columns of the block
            table where a row's window is written and read (vLLM before 0.33). A block that is only read does not
            change. A destination of -1 or `null_block_id` is not written.

    Returns:
        `out`, or x where it is None; zeros for padding.

    Raises:
        ValueError: an argument has a wrong shape, dtype or index, or gives two rows one destination; the message names
            it.

    Source: as `causal_conv1d_fn`.
    """
    if x.dim() not in ((2, 3) if query_start_loc is None else (2,)):
        raise ValueError(f"x has shape {list(x.shape)} where [tokens, dim], [batch, dim] or [batch, dim, n] is needed")
    dim = x.shape[1]
    history = _check_weights(x, dim, weight, bias, conv_state, "conv_state")
    silu = check_silu(activation)
    if out is None:
        out = x
    check_shape("out", out, *x.shape)
    if out.dtype != x.dtype:
        raise ValueError(f"out is {out.dtype} where x's {x.dtype} is needed")

    tokens, starts, lengths = _rows(x, query_start_loc, max_query_len)
    batch = len(lengths)

    live = lengths > 0
    if conv_state_indices is None:
        sources = destinations = _own_slots(batch, conv_state, "conv_state")
        written = live
    else:
        sources, destinations = _blocks(
            conv_state_indices, batch, len(conv_state), initial_state_idx, block_idx_last_scheduled_token
        )
        live &= ~is_padding(sources, null_block_id)
        written = live & ~is_padding(destinations, null_block_id)
        check_distinct("conv_state_indices", destinations[written])
    written = written[live]
    sources, destinations, starts, lengths = (values[live] for values in (sources, destinations, starts, lengths))

    speculative = num_accepted_tokens is not None
    offsets = torch.zeros_like(lengths)
    if num_accepted_tokens is not None:
        check_shape("num_accepted_tokens", num_accepted_tokens, batch)
        furthest = conv_state.shape[2] - history + 1
        offsets = check_integers("num_accepted_tokens", num_accepted_tokens[live], 0, furthest + 1).sub(1).clamp(min=0)
    windows = conv_state[sources[:, None], :, offsets[:, None] + torch.arange(history)]
    rows = tokens_of(starts, lengths)
    y, inputs, first = _convolve(windows, tokens[rows].to(conv_state.dtype), lengths, weight, bias, silu)

    # Each slot receives [kept[b]] consecutive inputs from `kept_from[b]` on.
    kept_from = first + 1 if speculative else first + lengths
    kept = lengths + history - 1 if speculative else torch.full_like(lengths, history)
    if len(kept) and kept.max() > conv_state.shape[2]:
        raise ValueError(f"conv_state has {conv_state.shape[2]} columns where {int(kept.max())} are needed")
    kept_from, kept, destinations = kept_from[written], kept[written], destinations[written]
    columns = tokens_of(torch.zeros_like(kept), kept)
    conv_state[torch.repeat_interleave(destinations, kept), :, columns] = inputs[tokens_of(kept_from, kept)]

    result = x.new_zeros(len(tokens), dim)
    result[rows] = y.to(x.dtype)
    return out.copy_(result if x.dim() == 2 else result.view(batch, -1, dim).transpose(1, 2))


def _rows(
    x: torch.Tensor, query_start_loc: torch.Tensor | None, max_query_len: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (tokens, starts, lengths) of the rows in x of `causal_conv1d_update`: [tokens, dim], [batch], [batch]."""
    if query_start_loc is None:
        tokens = x if x.dim() == 2 else x.transpose(1, 2).flatten(0, 1)
        lengths = torch.full((len(x),), 1 if x.dim() == 2 else x.shape[2])
        return tokens, lengths.cumsum(0) - lengths, lengths
    starts, lengths = ragged("query_start_loc", query_start_loc, len(x))
    if len(lengths) and 0 <= max_query_len < lengths.max():
        raise ValueError(f"max_query_len is {max_query_len} where a row has {int(lengths.max())} tokens")
    return x, starts, lengths


def _convolve(
    windows: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolve dense tensors, for both operators.

    Args:
        windows: [sequences, d_conv - 1, dim], the inputs before each sequence, oldest first.
        tokens: [tokens, dim], sequence after sequence.
        lengths: [sequences].

    Returns:
        (y, inputs, first): y is [tokens, dim] in float32; inputs is every window followed by its sequence's tokens,
        one sequence after another; first is [sequences], where each sequence's window begins in inputs.
    """
    sequences, history, dim = windows.shape
    first = (lengths + history).cumsum(0) - (lengths + history)
    in_window = first[:, None] + torch.arange(history)
    is_token = torch.ones(len(tokens) + sequences * history, dtype=torch.bool)
    is_token[in_window] = False
    inputs = tokens.new_empty(len(is_token), dim)
    inputs[in_window] = windows
    inputs[is_token] = tokens
    if len(tokens) == 0:
        return tokens.float(), inputs, first
    # The first outputs over a sequence's window reach back into the previous sequence; nobody reads them.
    y = depthwise_convolution(inputs[None], weight, bias)[0, is_token[history:]]
    return F.silu(y) if silu else y, inputs, first


def _check_weights(
    x: torch.Tensor, dim: int, weight: torch.Tensor, bias: torch.Tensor | None, conv_state: torch.Tensor, name: str
) -> int:
    """Check weight and bias; return d_conv - 1. `name` is conv_state's."""
    check_shape("weight", weight, dim, -1)
    check_shape("bias", bias, dim)
    check_shape(name, conv_state, -1, dim, -1)
    check_floating(x=x, weight=weight, bias=bias, **{name: conv_state})
    history = weight.shape[1] - 1
    if history < 1:
        raise ValueError("weight is one tap wide where two or more are needed")
    if conv_state.shape[2] < history:
        raise ValueError(f"{name} has {conv_state.shape[2]} columns where {history} or more are needed")
    return history


def _own_slots(batch: int, conv_state: torch.Tensor, name: str) -> torch.Tensor:
    """Return the slots of rows without a table: row b is in slot b."""
    if len(conv_state) < batch:
        raise ValueError(f"{name} has {len(conv_state)} slots where {batch} are needed")
    return torch.arange(batch)


def _blocks(
    table: torch.Tensor, batch: int, num_slots: int, read: torch.Tensor | None, write: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sources, destinations), each [batch], from conv_state_indices."""
    check_shape("conv_state_indices", table, *((batch,) if table.dim() == 1 else (batch, -1)))
    table = check_slots("conv_state_indices", table if table.dim() == 2 else table[:, None], num_slots)
    if read is None and write is None:
        return table[:, 0], table[:, 0]
    columns = []
    for name, column in (("initial_state_idx", read), ("block_idx_last_scheduled_token", write)):
        if column is None:
            raise ValueError(f"{name} is None where both it and its counterpart are needed")
        check_shape(name, column, batch)
        columns.append(table.gather(1, check_integers(name, column, 0, table.shape[1])[:, None])[:, 0])
    return columns[0], columns[1]
