"""The experts of a few tokens: the weights of each distinct chosen expert are read once, in place."""

from collections.abc import Sequence
from typing import Union

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch.nn import functional as F

from granite4_neuron.devices.neuron.nki.common import MAX_PARTITIONS, PSUM_BANK, largest_divisor, load, program_share
from granite4_neuron.errors import UserError

PARTS = 2  # even and odd slots, for two cores
MAX_HIDDEN = 8 * PSUM_BANK  # the result is in PSUM while the experts are added up
MAX_BUFFERS = 3  # experts on chip at a time: one in use, two being loaded
SBUF_BYTES = 204 * 1024  # per partition of a NeuronCore-v3, for all tiles of the kernel; a v4 has more


def experts_decode_torch(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    expert_ids: torch.Tensor,
    combine_weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Define `experts_decode` in torch: same arguments, same results."""
    num_experts = gate_up_proj.shape[0]
    is_expert = (expert_ids < num_experts)[:, None, None]
    ids = expert_ids.clamp(max=num_experts - 1)
    gate, up = (x.to(gate_up_proj.dtype) @ gate_up_proj[ids]).chunk(2, dim=-1)  # [slots, tokens, width]
    weighted = (F.silu(gate.float()) * up.float() * combine_weights.T[..., None]).to(down_proj.dtype)
    y = torch.where(is_expert, (weighted @ down_proj[ids]).float(), 0.0)
    return y[0::PARTS].sum(0), y[1::PARTS].sum(0)


def check_experts_decode(tokens: int, slots: int, hidden_size: int, width: int, itemsize: int) -> None:
    """Check that `experts_decode` takes these dimensions; itemsize is the weights'.

    Raises:
        UserError: it does not.
    """
    takes_hidden = hidden_size % MAX_PARTITIONS == 0 and hidden_size <= MAX_HIDDEN
    if not (tokens <= MAX_PARTITIONS and takes_hidden and _buffers(tokens, slots, hidden_size, width, itemsize) > 0):
        raise UserError(
            f"The NKI kernel for experts takes up to {MAX_PARTITIONS} tokens, a hidden size that is a multiple of "
            f"{MAX_PARTITIONS} up to {MAX_HIDDEN}, and experts of which one fits on chip; here are {tokens} tokens, "
            f"hidden size {hidden_size} and width {width} in {itemsize} bytes per weight. Use more ranks, or the "
            f"experts in torch."
        )


@nki.jit
def experts_decode(
    x: nl.ndarray,
    gate_up_proj: nl.ndarray,
    down_proj: nl.ndarray,
    expert_ids: nl.ndarray,
    combine_weights: nl.ndarray,
) -> tuple[nl.ndarray, nl.ndarray]:
    """
    For every token, sum weight * down_proj[e] (silu(gate) * up) over slots, where e is the slot's expert.

    The weights of a slot's expert are read from HBM once, by DMA at the expert's index; no others are read, and none
    for slots without an expert. The two cores (LNC) take alternate slots, so no weight is read twice.

    Dimensions:
        tokens: 1 to 128
        hidden: a multiple of 128 up to 4096
        width: a rank's share of the experts' width; a multiple of a number not far below 128 is best
        slots: 2 or more; see `expert_slots`

    Args:
        x (nl.ndarray): [tokens, hidden], float32 or bfloat16.
        gate_up_proj (nl.ndarray): [num_experts, hidden, 2 * width], gate first, float32 or bfloat16.
        down_proj (nl.ndarray): [num_experts, width, hidden], dtype of gate_up_proj.
        expert_ids (nl.ndarray): [slots], int32; num_experts where a slot has no expert.
        combine_weights (nl.ndarray): [tokens, slots], float32; 0 where a token did not choose the slot's expert, and
            for slots without an expert.

    Returns:
        y_even (nl.ndarray): [tokens, hidden], float32: the sum over slots 0, 2, 4 and so on.
        y_odd (nl.ndarray): the sum over the other slots. The result is y_even + y_odd.

    Notes:
        - Limits: `check_experts_decode`. Up to three experts are on chip at a time, as space allows.
        - Products are in the weights' dtype and add up in float32. silu and the weighting are in float32.
        - Tokens share instructions but no arithmetic: a NaN in one does not reach another.
        - A slot without an expert computes with the expert that was in its memory before, or with zeros, and weights
          the result 0. Its memory must have been written: otherwise it could hold NaN, and 0 times NaN is NaN.
        - A core reads 3 * hidden * width elements per expert: for h-small at 4 ranks 13 us at the documented 362 GB/s,
          beside 8.5 us of TensorE by its documented rate. Neither has been timed.
        - Source: Granite 4.0's block_sparse_moe, in transformers GraniteMoeHybridMoE.

    Pseudocode:
        for slot:
            weights = gate_up_proj[expert_ids[slot]]                # skipped if out of range
            gate, up = x @ weights                                  # tokens on partitions
            activated[slot] = transpose(silu(gate) * combine_weights[slot] * up)
        for slot:
            y += activated[slot].T @ down_proj[expert_ids[slot]]    # in PSUM
    """
    tokens, hidden = x.shape
    slots = expert_ids.shape[0]
    width = down_proj.shape[1]
    dtype = gate_up_proj.dtype
    columns = hidden // MAX_PARTITIONS
    rows = largest_divisor(width, MAX_PARTITIONS)
    buffers = _buffers(tokens, slots, hidden, width, 4 if dtype == nl.float32 else 2)

    y_even = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.shared_hbm)
    y_odd = nl.ndarray((tokens, hidden), dtype=nl.float32, buffer=nl.shared_hbm)
    outputs = (y_even, y_odd)

    ids_sb = load(expert_ids.reshape((1, slots)), nl.int32)
    # Element h of a token is on partition h // columns, so that a partition's weights are contiguous in HBM.
    x_sb = load(x.reshape_dim(1, (MAX_PARTITIONS, columns)).permute((1, 0, 2)), dtype).permute((0, 2, 1))
    combine_sb = load(combine_weights, nl.float32)
    gate_up_sbs = _zeros(buffers, (MAX_PARTITIONS, columns, 2 * width), dtype)
    down_sbs = _zeros(buffers, (rows, width // rows, hidden), dtype)

    first_part, parts = program_share(PARTS)
    for part in range(first_part, first_part + parts):
        # Step 1: gate and up of each expert, by DMA at its number, and their products with the tokens.
        activated_sbs = []
        for slot in range(part, slots, PARTS):
            gate_up_sb = gate_up_sbs[slot // PARTS % buffers]
            load_expert(gate_up_sb, gate_up_proj, ids_sb[:, slot : slot + 1], columns, 1)
            activated_sbs.append(activated_columns(x_sb, gate_up_sb, combine_sb[:, slot : slot + 1], rows))

        # Step 2: down of each expert; the sum over experts stays in PSUM.
        y_psums = []
        for start in range(0, hidden, PSUM_BANK):
            size = min(PSUM_BANK, hidden - start)
            y_psums.append(nl.ndarray((tokens, size), dtype=nl.float32, buffer=nl.psum))
        for slot in range(part, slots, PARTS):
            down_sb = down_sbs[slot // PARTS % buffers]
            load_expert(down_sb, down_proj, ids_sb[:, slot : slot + 1], 1, rows)
            _add_down(y_psums, activated_sbs[slot // PARTS], down_sb, slot == part)
        _store(outputs[part], y_psums)
    return y_even, y_odd


def _buffers(tokens: int, slots: int, hidden: int, width: int, itemsize: int) -> int:
    """Return the number of experts whose weights are on chip at a time."""
    blocks = width // largest_divisor(width, MAX_PARTITIONS)
    slots_per_part = (slots + PARTS - 1) // PARTS
    columns = hidden // MAX_PARTITIONS
    one_expert = (columns * 2 * width + blocks * hidden) * itemsize
    tokens_bytes = (columns + slots_per_part * blocks) * tokens * itemsize  # inputs of both products
    rows_bytes = 4 * (hidden + 2 * width + slots)
    return min(MAX_BUFFERS, slots_per_part, (SBUF_BYTES - tokens_bytes - rows_bytes) // one_expert)


def _zeros(count: int, shape: tuple[int, ...], dtype: str) -> list[nl.ndarray]:
    """Return tiles of zeros. Two engines write the halves of each, four bytes at a time."""
    tiles = []
    half = shape[1] // 2
    for _ in range(count):
        tile_sb = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        if half > 0:
            nisa.memset(dst=tile_sb[:, 0:half, :].view(nl.float32), value=0.0, engine=nisa.gpsimd_engine)
        nisa.memset(dst=tile_sb[:, half : shape[1], :].view(nl.float32), value=0.0, engine=nisa.vector_engine)
        tiles.append(tile_sb)
    return tiles


def load_expert(
    weights_sb: nl.ndarray, weights: nl.ndarray, expert_id: nl.ndarray, partition_step: int, run_step: int
) -> None:
    """Read one expert's weights, if there is such an expert: row r of partition p is p * partition_step + r * run_step.

    Args:
        weights_sb: [partitions, rows, columns].
        weights: [num_experts, partitions * rows, columns] in HBM.
        expert_id: [1, 1], int32.
    """
    partitions, rows, columns = weights_sb.shape
    source = weights.ap(
        pattern=[[partition_step * columns, partitions], [run_step * columns, rows], [1, columns]],
        offset=0,
        scalar_offset=expert_id,
        indirect_dim=0,
    )
    nisa.dma_copy(dst=weights_sb, src=source, oob_mode=nisa.oob_mode.skip)


def activated_columns(
    x_sb: nl.ndarray, gate_up_sb: nl.ndarray, weights: Union[nl.ndarray, float], rows: int
) -> nl.ndarray:
    """Compute silu(gate) * weight * up of one expert, as columns [rows, width // rows, tokens].

    Args:
        x_sb: [128, hidden // 128, tokens].
        gate_up_sb: [128, hidden // 128, 2 * width], dtype of x_sb.
        weights: [tokens, 1] in float32, or one for all.
    """
    tokens = x_sb.shape[2]
    width = gate_up_sb.shape[2] // 2
    activated_sb = nl.ndarray((tokens, width), dtype=gate_up_sb.dtype, buffer=nl.sbuf)
    size = largest_divisor(width, PSUM_BANK)
    for start in range(0, width, size):
        if 2 * width <= PSUM_BANK:
            both = _product(x_sb, gate_up_sb, 0, 2 * width)
            gate, up = both[:, 0:width], both[:, width : 2 * width]
        else:
            gate, up = _product(x_sb, gate_up_sb, start, size), _product(x_sb, gate_up_sb, width + start, size)
        silu_sb = nl.ndarray((tokens, size), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=silu_sb, op=nl.silu, data=gate)
        nisa.scalar_tensor_tensor(
            dst=activated_sb[:, start : start + size],
            data=silu_sb,
            op0=nl.multiply,
            operand0=weights,
            op1=nl.multiply,
            operand1=up,
        )

    columns_sb = nl.ndarray((rows, width // rows, tokens), dtype=gate_up_sb.dtype, buffer=nl.sbuf)
    for block in range(width // rows):
        columns_psum = nl.ndarray((rows, tokens), dtype=gate_up_sb.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=columns_psum, data=activated_sb[:, block * rows : (block + 1) * rows])
        nisa.tensor_copy(dst=columns_sb[:, block, :], src=columns_psum, engine=nisa.scalar_engine)
    return columns_sb


def _product(x_sb: nl.ndarray, weights_sb: nl.ndarray, first: int, count: int) -> nl.ndarray:
    """Compute x @ weights[:, first : first + count] as [tokens, count] in a PSUM bank."""
    _, columns, tokens = x_sb.shape
    product_psum = nl.ndarray((tokens, count), dtype=nl.float32, buffer=nl.psum)
    for column in range(columns):
        nisa.nc_matmul(
            dst=product_psum,
            stationary=x_sb[:, column, :],
            moving=weights_sb[:, column, first : first + count],
            accumulate=column > 0,
        )
    return product_psum


def _add_down(y_psums: Sequence[nl.ndarray], activated_sb: nl.ndarray, down_sb: nl.ndarray, is_first: bool) -> None:
    """Compute y += activated.T @ down for one expert.

    Args:
        y_psums: [tokens, columns of a bank] each, all of hidden together.
        activated_sb: [rows, width // rows, tokens].
        down_sb: [rows, width // rows, hidden].
        is_first: whether the sum begins with this expert.
    """
    for block in range(activated_sb.shape[1]):
        for bank in range(len(y_psums)):
            start = bank * PSUM_BANK
            nisa.nc_matmul(
                dst=y_psums[bank],
                stationary=activated_sb[:, block, :],
                moving=down_sb[:, block, start : start + y_psums[bank].shape[1]],
                accumulate=not (is_first and block == 0),
            )


def _store(y: nl.ndarray, y_psums: Sequence[nl.ndarray]) -> None:
    """Write y [tokens, hidden] to HBM."""
    y_sb = nl.ndarray(y.shape, dtype=nl.float32, buffer=nl.sbuf)
    for bank in range(len(y_psums)):
        start = bank * PSUM_BANK
        nisa.tensor_copy(dst=y_sb[:, start : start + y_psums[bank].shape[1]], src=y_psums[bank])
    nisa.dma_copy(dst=y, src=y_sb)
