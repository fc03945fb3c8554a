"""A Mamba-2 mixer's step of one or a few tokens in one kernel: convolution, recurrence and gate."""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch.nn import functional as F

from granite4_neuron.ops.nki.common import (
    MAX_PARTITIONS,
    PSUM_BANK,
    along,
    common_divisor,
    flat,
    for_each,
    load,
    ones,
    ones_below_diagonal,
    ones_from_diagonal,
    program_share,
    times,
)
from granite4_neuron.ops.nki.windows import convolve_windows, lanes_of, load_taps, load_windows, store_windows
from granite4_neuron.ops.nki.within_tokens import load_on_heads, token_scores, within_tokens

MAX_TOKENS = 16
MAX_ROW = 4096  # float32 per partition of each tile that holds a row of channels for several sequences


def mamba_decode_torch(
    states: torch.Tensor,
    conv_states: torch.Tensor,
    xBC: torch.Tensor,
    dt: torch.Tensor,
    taps: torch.Tensor,
    A_D: torch.Tensor,
    z: torch.Tensor | None = None,
    accepted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Define `mamba_decode` in torch: same arguments, same results."""
    batch, d_state, heads, head_dim = states.shape
    tokens, reach = xBC.shape[1], conv_states.shape[2]
    history = torch.cat([conv_states, xBC.transpose(1, 2)], dim=-1).float()
    windows = history.unfold(2, reach + 1, 1)  # [batch, channels, tokens, d_conv]
    convolved = F.silu((windows * taps[:, None, :-1].float()).sum(-1) + taps[:, None, -1].float())
    groups = (convolved.shape[1] - heads * head_dim) // (2 * d_state)
    x, B, C = convolved.split([heads * head_dim, groups * d_state, groups * d_state], dim=1)
    x = x.unflatten(1, (heads, head_dim))
    B, C = (v.unflatten(1, (groups, d_state)).repeat_interleave(heads // groups, 1) for v in (B, C))
    state, kept, outputs = states.float().permute(0, 2, 3, 1), [states.float().permute(0, 2, 3, 1)], []
    for t in range(tokens):
        decay = torch.exp(dt[:, t] * A_D[0])[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[..., t])[..., None] * B[:, :, None, :, t]
        outputs.append(((state * C[:, :, None, :, t]).sum(-1) + A_D[1, :, None] * x[..., t]).flatten(1))
        kept.append(state)
    results = []
    if z is not None:
        results.append((torch.stack(outputs, 1) * F.silu(z.float())).to(xBC.dtype))
    if accepted is not None:
        kept_index = torch.arange(batch, device=states.device), accepted.long()
        places = accepted.long()[:, None] + torch.arange(reach, device=states.device)
        windows = history.gather(2, places[:, None].expand(-1, history.shape[1], -1))
        new_states = torch.stack(kept, 1)[kept_index].permute(0, 3, 1, 2)
        results += [new_states.to(states.dtype), windows.to(conv_states.dtype)]
    return tuple(results)


@nki.jit
def mamba_decode(
    states: nl.ndarray,
    conv_states: nl.ndarray,
    xBC: nl.ndarray,
    dt: nl.ndarray,
    taps: nl.ndarray,
    A_D: nl.ndarray,
    z: Optional[nl.ndarray] = None,
    accepted: Optional[nl.ndarray] = None,
) -> tuple[nl.ndarray, ...]:
    """
    Compute outputs of a few tokens of every sequence, and the states after the accepted ones.

    A state is read from HBM once and written once, however many tokens there are: the tokens' contributions to each
    other are computed beside it, and the accepted ones enter it together. With one token, accepted, this is decode.
    Without `accepted` it is a verification: no state is written. Without `z` it is a verification's commit: there are
    no outputs.

    Dimensions:
        batch: sequences
        tokens: of each sequence, 1 to 16
        num_heads: heads on this logical core; each program (LNC) takes an equal share of them
        head_dim: 32, 64 or 128
        n_groups: groups of consecutive heads with the same B and C
        d_state: 32, 64 or 128
        channels: num_heads * head_dim of x, then n_groups * d_state of B, and of C
        d_conv: taps, 2 to 4

    Args:
        states (nl.ndarray): [batch, d_state, num_heads, head_dim], float32 or bfloat16.
        conv_states (nl.ndarray): [batch, channels, d_conv - 1], dtype of xBC: the inputs before xBC, oldest first.
        xBC (nl.ndarray): [batch, tokens, channels], float32 or bfloat16, before the convolution; all of them finite.
        dt (nl.ndarray): [batch, tokens, num_heads], float32, after softplus and limits.
        taps (nl.ndarray): [channels, d_conv + 1], dtype of xBC: the convolution's weights, and its bias behind them.
        A_D (nl.ndarray): [2, num_heads], float32: A, negative, and D.
        z (nl.ndarray): [batch, tokens, num_heads * head_dim], dtype of xBC: the gate; None for no outputs.
        accepted (nl.ndarray): [batch], int32: how many of a sequence's tokens its states take in, 0 to tokens; None for
            no new states.

    Returns:
        y (nl.ndarray): [batch, tokens, num_heads * head_dim], dtype of xBC: the gated output of every token; with z.
        new_states (nl.ndarray): like states; with accepted.
        new_conv_states (nl.ndarray): like conv_states; with accepted.

    Notes:
        - Limits: `limits.check_mamba_decode`. num_heads must be a multiple of the number of programs.
        - Arithmetic is float32. States in bfloat16 are rounded once per step, when VectorE writes them: to nearest, or
          stochastically where the runtime is told so (NEURON_RT_STOCHASTIC_ROUNDING_EN=1).
        - The caller may give new_states and new_conv_states the memory of the old ones with one program; with two,
          conv_states of B and C are read by both and written by one.
        - Sequences share instructions but no arithmetic: a NaN in one does not reach another.
        - The convolution works with channels on partitions, the rest with tokens or heads there. What it gives goes
          through HBM once, which is little beside a state.
        - Source: Dao and Gu 2024, section 6, with one chunk of all tokens.

    Pseudocode:
        for sequence:
            x, B, C = silu(convolution(conv_states, xBC))
            a = dt * A
            within[t] = sum over s <= t of (C_t . B_s) exp(a_{s+1} + ... + a_t) dt_s x_s + D x_t
            y[t] = (exp(a_1 + ... + a_t) (C_t @ state) + within[t]) * silu(z_t)
            state = exp(sum of a) state + sum over s of B_s (outer) exp(a_{s+1} + ...) dt_s x_s    # the accepted ones
    """
    batch, d_state, num_heads, head_dim = states.shape
    tokens = xBC.shape[1]
    first_head, heads = program_share(num_heads)
    own_heads = nl.ds(first_head, heads)
    inner = num_heads * head_dim
    n_groups = (xBC.shape[2] - inner) // (2 * d_state)
    heads_per_group = num_heads // n_groups
    run = common_divisor(heads, heads_per_group)  # consecutive heads of one group
    sequences = min(
        MAX_ROW // (heads * head_dim),
        PSUM_BANK // (heads * tokens),
        MAX_PARTITIONS // max(heads, tokens),
    )

    has_outputs, has_new_states = z != None, accepted != None  # noqa: E711 (`is` does not compile)
    if has_outputs:
        y = nl.ndarray((batch, tokens, inner), dtype=xBC.dtype, buffer=nl.shared_hbm)
    if has_new_states:
        new_states = nl.ndarray((batch, d_state, num_heads, head_dim), dtype=states.dtype, buffer=nl.shared_hbm)
        new_conv_states = nl.ndarray(conv_states.shape, dtype=conv_states.dtype, buffer=nl.shared_hbm)

    A_sb = load(A_D[0:1, own_heads].broadcast(0, tokens), nl.float32)
    own_taps_sb = load_taps(taps, (first_head * head_dim, heads * head_dim), inner, d_state)
    up_to = ones_from_diagonal(tokens)  # [k, t] = 1 for k <= t
    after = ones_below_diagonal(tokens)  # [k, s] = 1 for k > s
    everywhere = ones(tokens, d_state, nl.float32)

    for start in range(0, batch, sequences):
        count = min(sequences, batch - start)
        rows = nl.ds(start, count)
        # Step 1: the convolution, with channels on partitions. x and B reach other layouts through HBM.
        x_hbm = nl.ndarray((count, tokens, heads * head_dim), dtype=nl.float32, buffer=nl.private_hbm)
        B_hbm = nl.ndarray((count, tokens, n_groups, d_state), dtype=nl.float32, buffer=nl.private_hbm)
        windows_sb = load_windows(
            conv_states[rows], xBC[rows], (first_head * head_dim, heads * head_dim), inner, d_state
        )
        convolved_sb = convolve_windows(windows_sb, own_taps_sb)
        lanes, per_lane = lanes_of(heads * head_dim)
        x_by_lane = x_hbm.reshape_dim(2, (lanes, per_lane)).permute((2, 3, 0, 1))
        nisa.dma_copy(dst=x_by_lane, src=convolved_sb[0:lanes, 0:per_lane, :, :])
        B_columns = convolved_sb[0:d_state, per_lane : per_lane + n_groups, :, :]
        C_columns = convolved_sb[0:d_state, per_lane + n_groups : per_lane + 2 * n_groups, :, :]
        x_heads = x_hbm.reshape_dim(2, (heads, head_dim))
        dt_sb = load(dt[rows, 0:tokens, own_heads].permute((1, 0, 2)), nl.float32)

        # Step 2: the terms of outputs beside the state. Contributions of tokens to each other are computed with heads
        # on partitions; they come back with tokens there, as the gate does.
        if has_outputs:
            from_start_sb = _exp_of_sums(up_to, times(dt_sb, for_each(A_sb, count)))
            within_hbm = nl.ndarray((count, tokens, heads, head_dim), dtype=nl.float32, buffer=nl.private_hbm)
            nisa.dma_copy(
                dst=within_hbm.permute((0, 2, 1, 3)),
                src=within_tokens(
                    load_on_heads(x_heads.permute((0, 2, 1, 3)), (tokens, head_dim)),
                    load_on_heads(dt[rows, 0:tokens, own_heads].permute((0, 2, 1)), (tokens,)),
                    load_on_heads(A_D[0:2, own_heads].permute((1, 0)).expand_dim(0).broadcast(0, count), (2,)),
                    token_scores(B_columns, C_columns, heads, (first_head, heads_per_group)),
                ),
            )
            within_sb = load(within_hbm.permute((1, 0, 2, 3)), nl.float32)
            y_sb = nl.ndarray((tokens, count, heads, head_dim), dtype=nl.float32, buffer=nl.sbuf)

        # Step 3: the terms that enter the states. Tokens that are not accepted have dt = 0 here, and the window ends
        # before them.
        if has_new_states:
            accepted_row = accepted.reshape((1, batch))[0:1, rows]  # type: ignore[union-attr]  # has_new_states
            own_channels = (first_head * head_dim, heads * head_dim)
            store_windows(new_conv_states[rows], windows_sb, accepted_row, own_channels, inner, d_state)
            taken_dt_sb = _accepted_only(dt_sb, accepted_row)
            taken_log_decay_sb = times(taken_dt_sb, for_each(A_sb, count))
            to_end_sb = _exp_of_sums(after, taken_log_decay_sb)
            total_sb = _exp_of_sums(everywhere, taken_log_decay_sb)  # [d_state, count, heads]
            weights_sb = times(to_end_sb, taken_dt_sb)
            nisa.dma_copy(dst=B_hbm.permute((3, 2, 0, 1)), src=B_columns)
            B_sb = load(B_hbm.permute((1, 0, 2, 3)), nl.float32)
            x_sb = load(x_heads.permute((1, 0, 2, 3)), nl.float32)
            factors = weights_sb.expand_dim(3).broadcast(3, head_dim)
            nisa.tensor_tensor(dst=x_sb, data1=x_sb, data2=factors, op=nl.multiply, engine=nisa.gpsimd_engine)

        # Step 4: each state once. The tokens' C read it as it comes, then the accepted tokens enter it.
        for s in range(count):
            state_sb = load(states[start + s, 0:d_state, own_heads, 0:head_dim], nl.float32)
            stored_sb = state_sb
            if has_new_states and states.dtype != nl.float32:
                stored_sb = nl.ndarray(state_sb.shape, dtype=states.dtype, buffer=nl.sbuf)
            for run_start in range(0, heads, run):
                group = (first_head + run_start) // heads_per_group
                own = nl.ds(run_start, run)
                if has_outputs:
                    _read_state(
                        y_sb[:, s, own, :], C_columns[:, group, s, :], state_sb[:, own, :], from_start_sb[:, s, own]
                    )
                if has_new_states:
                    _advance_state(
                        stored_sb[:, own, :],
                        state_sb[:, own, :],
                        total_sb[:, s, own],
                        B_sb[:, s, group, :],
                        x_sb[:, s, own, :],
                    )
            if has_new_states:
                nisa.dma_copy(dst=new_states[start + s, 0:d_state, own_heads, 0:head_dim], src=stored_sb)

        # Step 5: the gate.
        if has_outputs:
            heads_of_z = z.reshape((batch, tokens, num_heads, head_dim))  # type: ignore[union-attr]  # has_outputs
            own_z = heads_of_z[rows, 0:tokens, own_heads, 0:head_dim]
            gate_sb = load(own_z.permute((1, 0, 2, 3)), nl.float32)
            nisa.activation(dst=gate_sb, op=nl.silu, data=gate_sb)
            nisa.tensor_tensor(dst=y_sb, data1=y_sb, data2=within_sb, op=nl.add, engine=nisa.gpsimd_engine)
            gated_sb = nl.ndarray(y_sb.shape, dtype=xBC.dtype, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=gated_sb, data1=y_sb, data2=gate_sb, op=nl.multiply, engine=nisa.gpsimd_engine)
            own_y = y.reshape((batch, tokens, num_heads, head_dim))[rows, 0:tokens, own_heads, 0:head_dim]
            nisa.dma_copy(dst=own_y.permute((1, 0, 2, 3)), src=gated_sb)

    if not has_new_states:
        return (y,)
    if not has_outputs:
        return (new_states, new_conv_states)
    return (y, new_states, new_conv_states)


def _accepted_only(dt_sb: nl.ndarray, accepted_row: nl.ndarray) -> nl.ndarray:
    """Return dt [tokens, rows, heads] with 0 for tokens that are not accepted."""
    tokens, rows, heads = dt_sb.shape
    accepted_sb = load(accepted_row.broadcast(0, tokens), nl.float32)
    numbers_sb = nl.ndarray((tokens, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=numbers_sb, pattern=[[0, rows]], channel_multiplier=1)
    nisa.tensor_tensor(dst=numbers_sb, data1=numbers_sb, data2=accepted_sb, op=nl.less)
    return times(dt_sb, along(numbers_sb, heads))


def _exp_of_sums(summands: nl.ndarray, values_sb: nl.ndarray) -> nl.ndarray:
    """Compute exp(summands.T @ values): [k, t] of ones and zeros, values [k, rows, heads]; [t, rows, heads]."""
    _, rows, heads = values_sb.shape
    shape = (summands.shape[1], rows, heads)
    sums_psum = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=flat(sums_psum), stationary=summands, moving=flat(values_sb), is_stationary_onezero=True)
    result_sb = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=result_sb, op=nl.exp, data=sums_psum)
    return result_sb


def _read_state(y_sb: nl.ndarray, C_sb: nl.ndarray, state_sb: nl.ndarray, from_start_sb: nl.ndarray) -> None:
    """Compute y = from_start * (C @ state), for heads of one group.

    Args:
        y_sb: [tokens, heads, head_dim], written.
        C_sb: [d_state, tokens].
        state_sb: [d_state, heads, head_dim].
        from_start_sb: [tokens, heads].
    """
    _, heads, head_dim = y_sb.shape
    heads_per_bank = PSUM_BANK // head_dim
    for start in range(0, heads, heads_per_bank):
        bank = nl.ds(start, min(heads_per_bank, heads - start))
        read_psum = nl.ndarray(y_sb[:, bank, :].shape, dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=flat(read_psum), stationary=C_sb, moving=flat(state_sb[:, bank, :]))
        factors = along(from_start_sb[:, bank], head_dim)
        nisa.tensor_tensor(dst=y_sb[:, bank, :], data1=factors, data2=read_psum, op=nl.multiply)


def _advance_state(
    stored_sb: nl.ndarray, state_sb: nl.ndarray, total_sb: nl.ndarray, B_sb: nl.ndarray, x_sb: nl.ndarray
) -> None:
    """Compute stored = total * state + B.T @ x, for heads of one group; the state's memory holds the product meanwhile.

    Args:
        stored_sb, state_sb: [d_state, heads, head_dim]; the first may be the second, or of another dtype.
        total_sb: [d_state, heads].
        B_sb: [tokens, d_state].
        x_sb: [tokens, heads, head_dim], weighted.
    """
    _, heads, head_dim = state_sb.shape
    nisa.tensor_tensor(dst=state_sb, data1=state_sb, data2=along(total_sb, head_dim), op=nl.multiply)
    heads_per_bank = PSUM_BANK // head_dim
    for start in range(0, heads, heads_per_bank):
        bank = nl.ds(start, min(heads_per_bank, heads - start))
        update_psum = nl.ndarray(state_sb[:, bank, :].shape, dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=flat(update_psum), stationary=B_sb, moving=flat(x_sb[:, bank, :]))
        nisa.tensor_tensor(dst=stored_sb[:, bank, :], data1=state_sb[:, bank, :], data2=update_psum, op=nl.add)
