"""A Mamba-2 mixer's step of one or a few tokens in one kernel: convolution, recurrence and gate."""

from typing import Optional

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch.nn import functional as F

from granite4_neuron.devices.neuron.nki.common import (
    MAX_PARTITIONS,
    PSUM_BANK,
    along,
    common_divisor,
    flat,
    identity,
    largest_divisor,
    load,
    on_all_partitions,
    program_share,
)
from granite4_neuron.devices.neuron.nki.head_factors import (
    channels_of_heads,
    exp_on_all_partitions,
    fill_output_factors,
    fill_state_factors,
    load_on_heads,
    members_of_groups,
    on_channels,
    token_scores,
)
from granite4_neuron.devices.neuron.nki.windows import (
    convolve_windows,
    load_taps,
    load_windows,
    store_windows,
    transposed,
    x_lanes,
)

MAX_TOKENS = 16
MAX_CHANNELS = 4096  # of x on one core: float32 per partition of the tiles that hold a state
# Matrix products begin at every 32nd partition, so this many sequences' tokens are side by side.
ROWS_ABREAST, PITCH = 4, 32


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
    other are computed separately, and the accepted tokens are added to the state together. With one token, accepted,
    this is decode. Without `accepted` it is a verification: no state is written. Without `z` it is a verification's
    commit: there are no outputs.

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
        taps (nl.ndarray): [channels, d_conv + 1], dtype of xBC: the convolution's weights, then its bias.
        A_D (nl.ndarray): [2, num_heads], float32: A, negative, and D.
        z (nl.ndarray): [batch, tokens, num_heads * head_dim], dtype of xBC: the gate; None for no outputs.
        accepted (nl.ndarray): [batch], int32: how many of a sequence's tokens advance its states, 0 to tokens; None for
            no new states.

    Returns:
        y (nl.ndarray): [batch, tokens, num_heads * head_dim], dtype of xBC: the gated output of every token; with z.
        new_states (nl.ndarray): like states; with accepted.
        new_conv_states (nl.ndarray): like conv_states; with accepted.

    Notes:
        - Limits: `limits.check_mamba_decode`. num_heads must be a multiple of the number of programs.
        - Arithmetic is float32. States in bfloat16 are rounded once per step, when VectorE writes them: to nearest, or
          stochastically if the runtime is set so (NEURON_RT_STOCHASTIC_ROUNDING_EN=1).
        - With one program the caller may give new_states and new_conv_states the memory of the old ones. With two it
          may not share conv_states: both programs read those of B and C, and one writes them.
        - Sequences share instructions but no arithmetic: a NaN in one does not reach another. From NeuronCore-v3
          (Trainium2) on, transposes on TensorE keep every bit.
        - DMA moves lanes of up to 128 channels. On chip the convolution and the outputs have channels on partitions,
          decays have heads, and the inputs of a state have tokens; TensorE transposes between them, and nothing goes
          through HBM.
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
    groups = heads // run
    heads_per_lane = largest_divisor(run, MAX_PARTITIONS // head_dim)
    lanes, width = heads // heads_per_lane, heads_per_lane * head_dim
    x_place = (first_head * head_dim, lanes, width)
    BC_place = (inner, n_groups, first_head // heads_per_group, groups, d_state)

    has_outputs, has_new_states = z != None, accepted != None  # noqa: E711 (`is` does not compile)
    output_factors = tokens * (1 + tokens) if has_outputs else 0
    factors = output_factors + (tokens if has_new_states else 0)
    sequences = min(
        MAX_PARTITIONS // max(lanes, 2 * groups, tokens),
        PSUM_BANK // max(lanes * tokens, heads, factors),
    )
    if has_outputs:
        y = nl.ndarray((batch, tokens, inner), dtype=xBC.dtype, buffer=nl.shared_hbm)
    if has_new_states:
        new_states = nl.ndarray((batch, d_state, num_heads, head_dim), dtype=states.dtype, buffer=nl.shared_hbm)
        new_conv_states = nl.ndarray(conv_states.shape, dtype=conv_states.dtype, buffer=nl.shared_hbm)

    A_D_sb = load_on_heads(A_D[0:2, own_heads].expand_dim(1))
    taps_sb = load_taps(taps, x_place, BC_place)
    identity_sb = identity(heads)
    channels_sb = channels_of_heads(identity_sb, head_dim)
    members_sb = members_of_groups(d_state, groups, heads)

    for start in range(0, batch, sequences):
        count = min(sequences, batch - start)
        rows = nl.ds(start, count)
        # Step 1: the convolution, with channels on partitions.
        windows_sb = load_windows(conv_states[rows], xBC[rows], x_place, BC_place)
        convolved_sb = convolve_windows(windows_sb, taps_sb)
        x_sb = convolved_sb[0:width, :, 0:lanes, :]
        B_sb = convolved_sb[0:d_state, :, lanes : lanes + groups, :]
        C_sb = convolved_sb[0:d_state, :, lanes + groups : lanes + 2 * groups, :]

        # Step 2: the tokens' factors, for each head and then for each channel. Tokens that are not accepted have dt = 0
        # for the states, and the window ends before them.
        dt_sb = load_on_heads(dt[rows, 0:tokens, own_heads].permute((1, 0, 2)))
        factors_sb = nl.ndarray((heads, factors, count), dtype=nl.float32, buffer=nl.sbuf)
        if has_outputs:
            of_outputs = factors_sb[:, 0:output_factors, :].reshape_dim(1, (tokens, 1 + tokens))
            fill_output_factors(of_outputs, dt_sb, A_D_sb, token_scores(B_sb, C_sb, members_sb))
        if has_new_states:
            accepted_row = accepted.reshape((1, batch))[0:1, rows]  # type: ignore[union-attr]  # has_new_states
            accepted_sb = on_all_partitions(load(accepted_row, nl.float32))
            store_windows(
                new_conv_states,
                start,
                windows_sb,
                accepted_sb,
                x_place,
                BC_place,
                first_head % heads_per_group == 0,
            )
            of_states = factors_sb[:, output_factors:factors, :]
            log_total_sb = nl.ndarray((heads, count), dtype=nl.float32, buffer=nl.sbuf)
            fill_state_factors(of_states, log_total_sb, dt_sb, A_D_sb, accepted_sb[0:heads, :])
            total_psum = exp_on_all_partitions(log_total_sb, identity_sb, d_state)
        on_channels_sb = on_channels(factors_sb, channels_sb, lanes)

        # Step 3: each state once. First the tokens' C read it, then the accepted tokens are added.
        if has_outputs:
            read_psum = nl.ndarray((width, count, lanes, tokens), dtype=nl.float32, buffer=nl.psum)
        for s in range(count):
            state_sb = load(states[start + s, 0:d_state, own_heads, 0:head_dim], nl.float32)
            if has_outputs:
                for lane in range(lanes):
                    own = nl.ds(lane * heads_per_lane, heads_per_lane)
                    group = lane * heads_per_lane // run
                    nisa.nc_matmul(
                        dst=read_psum[:, s, lane, :], stationary=flat(state_sb[:, own, :]), moving=C_sb[:, :, group, s]
                    )
            if has_new_states:
                place = s % ROWS_ABREAST * PITCH
                if place == 0:
                    abreast = nl.ds(s, min(ROWS_ABREAST, count - s))
                    weights = on_channels_sb[:, :, output_factors:factors, abreast].permute((0, 2, 1, 3))
                    x_by_token_sb = _by_token(x_sb[:, :, :, abreast], weights)
                    x_by_token_sb = x_by_token_sb.reshape((x_by_token_sb.shape[0], heads, head_dim))
                    B_by_token_sb = _by_token(B_sb[:, :, :, abreast], None)
                stored_sb = state_sb
                if states.dtype != nl.float32:
                    stored_sb = nl.ndarray(state_sb.shape, dtype=states.dtype, buffer=nl.sbuf)
                own_tokens = nl.ds(place, tokens)
                for group in range(groups):
                    own = nl.ds(group * run, run)
                    _advance_state(
                        stored_sb[:, own, :],
                        state_sb[:, own, :],
                        total_psum[:, s, own],
                        B_by_token_sb[own_tokens, group, :],
                        x_by_token_sb[own_tokens, own, :],
                    )
                nisa.dma_copy(dst=new_states[start + s, 0:d_state, own_heads, 0:head_dim], src=stored_sb)

        # Step 4: the outputs, and their gate.
        if has_outputs:
            of_outputs = on_channels_sb[:, :, 0:output_factors, :].reshape_dim(2, (tokens, 1 + tokens))
            y_sb = _outputs(read_psum, x_sb, of_outputs)
            own_z = x_lanes(z[rows].permute((0, 2, 1)), x_place)  # type: ignore[index]  # has_outputs
            own_y = y.ap(
                pattern=[[width, lanes], [tokens * inner, count], [inner, tokens], [1, width]],
                offset=start * tokens * inner + first_head * head_dim,
            )
            _store_gated(own_y, y_sb, own_z.permute((0, 1, 3, 2)))

    if not has_new_states:
        return (y,)
    if not has_outputs:
        return (new_states, new_conv_states)
    return (y, new_states, new_conv_states)


def _by_token(columns: nl.ndarray, factors: Optional[nl.ndarray]) -> nl.ndarray:
    """Put tokens on partitions, each row's from the next multiple of 32 on: [.., lanes, channels], float32.

    Args:
        columns: [channels, tokens, lanes, rows], up to 4 rows.
        factors: multiply the columns; None for no factors.
    """
    channels, tokens, lanes, rows = columns.shape
    spread_sb = nl.ndarray((channels, lanes, rows, PITCH), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=spread_sb, value=0.0, engine=nisa.gpsimd_engine)
    places = spread_sb[:, :, :, 0:tokens].permute((0, 3, 1, 2))
    if factors == None:  # noqa: E711 (`is` does not compile)
        nisa.tensor_copy(dst=places, src=columns, engine=nisa.scalar_engine)
    else:
        nisa.tensor_tensor(dst=places, data1=columns, data2=factors, op=nl.multiply)
    used = (rows - 1) * PITCH + tokens
    result_sb = nl.ndarray((used, lanes, channels), dtype=nl.float32, buffer=nl.sbuf)
    lanes_per_bank = PSUM_BANK // channels
    for start in range(0, lanes, lanes_per_bank):
        bank = nl.ds(start, min(lanes_per_bank, lanes - start))
        bank_psum = nl.ndarray(result_sb[:, bank, :].shape, dtype=nl.float32, buffer=nl.psum)
        for i in range(bank_psum.shape[1]):
            nisa.nc_transpose(dst=bank_psum[:, i, :], data=flat(spread_sb[:, start + i, :, :])[:, 0:used])
        nisa.tensor_copy(dst=result_sb[:, bank, :], src=bank_psum, engine=nisa.scalar_engine)
    return result_sb


def _advance_state(
    stored_sb: nl.ndarray, state_sb: nl.ndarray, total_psum: nl.ndarray, B_sb: nl.ndarray, x_sb: nl.ndarray
) -> None:
    """Compute stored = total * state + B.T @ x, for heads of one group; the state's memory holds the product in
    between.

    Args:
        stored_sb, state_sb: [d_state, heads, head_dim]; the first may be the second, or of another dtype.
        total_psum: [d_state, heads].
        B_sb: [tokens, d_state].
        x_sb: [tokens, heads, head_dim], weighted.
    """
    _, heads, head_dim = state_sb.shape
    nisa.tensor_tensor(dst=state_sb, data1=state_sb, data2=along(total_psum, head_dim), op=nl.multiply)
    heads_per_bank = PSUM_BANK // head_dim
    for start in range(0, heads, heads_per_bank):
        bank = nl.ds(start, min(heads_per_bank, heads - start))
        update_psum = nl.ndarray(state_sb[:, bank, :].shape, dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=flat(update_psum), stationary=B_sb, moving=flat(x_sb[:, bank, :]))
        nisa.tensor_tensor(dst=stored_sb[:, bank, :], data1=state_sb[:, bank, :], data2=update_psum, op=nl.add)


def _outputs(read_psum: nl.ndarray, x_sb: nl.ndarray, factors_sb: nl.ndarray) -> nl.ndarray:
    """Compute each token's output from the state and from tokens up to it: [channels, tokens, lanes, rows], float32.

    Args:
        read_psum: [channels, rows, lanes, tokens], C @ state.
        x_sb: [channels, tokens, lanes, rows].
        factors_sb: [channels, lanes, t, 1 + tokens, rows], from `fill_output_factors`.
    """
    tokens = x_sb.shape[1]
    y_sb = nl.ndarray(x_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    from_start = factors_sb[:, :, :, 0, :].permute((0, 2, 1, 3))
    nisa.tensor_tensor(dst=y_sb, data1=from_start, data2=read_psum.permute((0, 3, 2, 1)), op=nl.multiply)
    for s in range(tokens):
        later = nl.ds(s, tokens - s)
        part_sb = nl.ndarray(y_sb[:, later, :, :].shape, dtype=nl.float32, buffer=nl.sbuf)
        weights = factors_sb[:, :, later, 1 + s, :].permute((0, 2, 1, 3))
        x = x_sb[:, s : s + 1, :, :].broadcast(1, tokens - s)
        nisa.tensor_tensor(dst=part_sb, data1=weights, data2=x, op=nl.multiply)
        nisa.tensor_tensor(dst=y_sb[:, later, :, :], data1=y_sb[:, later, :, :], data2=part_sb, op=nl.add)
    return y_sb


def _store_gated(target: nl.ndarray, y_sb: nl.ndarray, z: nl.ndarray) -> None:
    """Write y * silu(z).

    Args:
        target, z: [lanes, rows, tokens, channels of a lane] in HBM.
        y_sb: [channels of a lane, tokens, lanes, rows].
    """
    width, tokens, lanes, rows = y_sb.shape
    z_sb = nl.ndarray((lanes * rows, tokens, width), dtype=z.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=z_sb, src=z)
    gate_sb = nl.ndarray(z_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=gate_sb, op=nl.silu, data=z_sb)
    gated_sb = nl.ndarray(z_sb.shape, dtype=target.dtype, buffer=nl.sbuf)
    tokens_per_bank = PSUM_BANK // width
    for start in range(0, tokens, tokens_per_bank):
        bank = nl.ds(start, min(tokens_per_bank, tokens - start))
        y_psum = nl.ndarray(gate_sb[:, bank, :].shape, dtype=nl.float32, buffer=nl.psum)
        transposed(y_psum, y_sb[:, bank, :, :])
        nisa.tensor_tensor(dst=gated_sb[:, bank, :], data1=gate_sb[:, bank, :], data2=y_psum, op=nl.multiply)
    nisa.dma_copy(dst=target, src=gated_sb)
