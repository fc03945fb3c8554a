"""The experts of many tokens, block by block: rows and weights are read in place."""

import nki
import nki.isa as nisa
import nki.language as nl
import torch
from torch.nn import functional as F

from granite4_neuron.devices.neuron.nki.common import MAX_PARTITIONS, PSUM_BANK, largest_divisor, load, program_share
from granite4_neuron.devices.neuron.nki.experts_decode import SBUF_BYTES, activated_columns, load_expert
from granite4_neuron.errors import UserError


def experts_prefill_torch(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    loads: torch.Tensor,
    tokens: torch.Tensor,
    choices: torch.Tensor,
) -> tuple[torch.Tensor]:
    """Define `experts_prefill` in torch: same arguments, same results, and zeros in rows that are not written."""
    y = torch.zeros(choices.numel(), x.shape[1], dtype=x.dtype)
    expert = 0
    for block, load_id in enumerate(loads.tolist()):
        expert = load_id if load_id < len(down_proj) else expert
        is_row = tokens[:, block] < len(x)
        rows = x[tokens[is_row, block]].to(gate_up_proj.dtype)
        gate, up = (rows @ gate_up_proj[expert]).float().chunk(2, dim=-1)
        y[choices[is_row, block]] = ((F.silu(gate) * up).to(down_proj.dtype) @ down_proj[expert]).to(x.dtype)
    return (y,)


def check_experts_prefill(hidden_size: int, width: int, itemsize: int) -> None:
    """Check that `experts_prefill` takes these dimensions; itemsize is the weights'.

    Raises:
        UserError: it does not.
    """
    blocks = width // largest_divisor(width, MAX_PARTITIONS)
    one_expert = (hidden_size // MAX_PARTITIONS * 2 * width + blocks * hidden_size) * itemsize
    rows = 2 * (hidden_size + width) * itemsize + 4 * (hidden_size + width)  # inputs, their transposes, and results
    if hidden_size % MAX_PARTITIONS or one_expert + rows > SBUF_BYTES:
        raise UserError(
            f"The NKI kernel for experts takes a hidden size that is a multiple of {MAX_PARTITIONS}, and experts of "
            f"which one fits on chip; here are hidden size {hidden_size} and width {width} in {itemsize} bytes per "
            f"weight. Use more ranks, or the experts in torch."
        )


@nki.jit
def experts_prefill(
    x: nl.ndarray,
    gate_up_proj: nl.ndarray,
    down_proj: nl.ndarray,
    loads: nl.ndarray,
    tokens: nl.ndarray,
    choices: nl.ndarray,
) -> tuple[nl.ndarray]:
    """
    Compute down_proj[e] (silu(gate) * up) for every choice of an expert e by a token, unweighted.

    Rows are in blocks with one expert each. `expert_blocks` returns the last three arguments, and `combine_choices`
    takes the result. A token's row is read from HBM for each of its choices, and each choice's row is written once. An
    expert's weights are read once by each core that has blocks of it. That is one core, except for at most one expert.

    Dimensions:
        rows: of a block, up to 128
        blocks: half of them are for each core (LNC)
        hidden: a multiple of 128
        width: a rank's share of the experts' width; a multiple of a number not far below 128 is best

    Args:
        x (nl.ndarray): [num_tokens, hidden], float32 or bfloat16.
        gate_up_proj (nl.ndarray): [num_experts, hidden, 2 * width], gate first, float32 or bfloat16.
        down_proj (nl.ndarray): [num_experts, width, hidden], dtype of gate_up_proj.
        loads (nl.ndarray): [blocks], int32: the expert to load before a block; num_experts for none.
        tokens (nl.ndarray): [rows, blocks], int32: the token of each row; num_tokens for none.
        choices (nl.ndarray): [rows, blocks], int32: where a row's result goes; rows * blocks for nowhere.

    Returns:
        y (nl.ndarray): [rows * blocks, hidden], dtype of x. Rows that are not written are undefined.

    Notes:
        - Limits: `check_experts_prefill`.
        - Products are in the weights' dtype and add up in float32; silu is in float32.
        - Rows share instructions but no arithmetic, so a row without a token, which holds arbitrary memory, affects no
          other row. Nor does a block without rows, which is computed like any other.
        - Weights have one place on chip. Gate and up can be loaded while the previous block is multiplied by down, and
          the other way around.
        - h-small at 4 ranks in bfloat16: 102 instructions per block. By the documented rates TensorE is busy for 10.2
          us, an expert's weights take 13 us at 362 GB/s, and a block's rows 5.8 us. None of this has been timed.
        - Up to 128 tokens, `experts_decode` reads no less and needs no blocks.

    Pseudocode:
        for block:
            weights = gate_up_proj[loads[block]]                    # if out of range, the previous ones stay
            gate, up = x[tokens[:, block]] @ weights
            y[choices[:, block]] = (silu(gate) * up) @ down_proj[loads[block]]
    """
    hidden = x.shape[1]
    block_rows, blocks = tokens.shape
    width = down_proj.shape[1]
    dtype = gate_up_proj.dtype
    columns = hidden // MAX_PARTITIONS
    rows = largest_divisor(width, MAX_PARTITIONS)

    y = nl.ndarray((block_rows * blocks, hidden), dtype=x.dtype, buffer=nl.shared_hbm)

    first_block, own_blocks = program_share(blocks)
    own = nl.ds(first_block, own_blocks)
    loads_sb = load(loads.reshape((1, blocks))[0:1, own], nl.int32)
    tokens_sb = load(tokens[0:block_rows, own], nl.int32)
    choices_sb = load(choices[0:block_rows, own], nl.int32)
    gate_up_sb = nl.ndarray((MAX_PARTITIONS, columns, 2 * width), dtype=dtype, buffer=nl.sbuf)
    down_sb = nl.ndarray((rows, width // rows, hidden), dtype=dtype, buffer=nl.sbuf)

    for block in range(own_blocks):
        # A block's expert is fetched if it is not the previous block's; tokens are gathered, and results scattered.
        load_id = loads_sb[:, block : block + 1]
        load_expert(gate_up_sb, gate_up_proj, load_id, columns, 1)
        x_sb = _gathered(x, tokens_sb[:, block : block + 1], dtype)
        activated_sb = activated_columns(_columns(x_sb), gate_up_sb, 1.0, rows)
        load_expert(down_sb, down_proj, load_id, 1, rows)
        _write(y, _down(activated_sb, down_sb, y.dtype), choices_sb[:, block : block + 1])
    return (y,)


def _gathered(x: nl.ndarray, tokens: nl.ndarray, dtype: str) -> nl.ndarray:
    """Gather rows of x at tokens [rows, 1], as [rows, hidden]; rows without a token keep arbitrary memory."""
    hidden, count = x.shape[1], tokens.shape[0]
    rows_sb = nl.ndarray((count, hidden), dtype=dtype, buffer=nl.sbuf)
    source = x.ap(pattern=[[hidden, count], [1, hidden]], offset=0, vector_offset=tokens, indirect_dim=0)
    nisa.dma_copy(dst=rows_sb, src=source, oob_mode=nisa.oob_mode.skip)
    return rows_sb


def _columns(rows_sb: nl.ndarray) -> nl.ndarray:
    """Transpose [rows, hidden] to [128, hidden // 128, rows]: element h on partition h // (hidden // 128)."""
    count, hidden = rows_sb.shape
    columns = hidden // MAX_PARTITIONS
    by_partition = rows_sb.reshape((count, MAX_PARTITIONS, columns))
    columns_sb = nl.ndarray((MAX_PARTITIONS, columns, count), dtype=rows_sb.dtype, buffer=nl.sbuf)
    per_bank = PSUM_BANK // MAX_PARTITIONS if rows_sb.dtype == nl.float32 else 2 * PSUM_BANK // MAX_PARTITIONS
    for start in range(0, columns, per_bank):
        size = min(per_bank, columns - start)
        bank_psum = nl.ndarray((MAX_PARTITIONS, size, count), dtype=rows_sb.dtype, buffer=nl.psum)
        for i in range(size):
            nisa.nc_transpose(dst=bank_psum[:, i, :], data=by_partition[:, :, start + i])
        nisa.tensor_copy(dst=columns_sb[:, start : start + size, :], src=bank_psum, engine=nisa.scalar_engine)
    return columns_sb


def _down(activated_sb: nl.ndarray, down_sb: nl.ndarray, dtype: str) -> nl.ndarray:
    """Compute activated.T @ down as [rows, hidden].

    Args:
        activated_sb: [partitions, width // partitions, rows].
        down_sb: [partitions, width // partitions, hidden].
    """
    _, blocks, count = activated_sb.shape
    hidden = down_sb.shape[2]
    y_sb = nl.ndarray((count, hidden), dtype=dtype, buffer=nl.sbuf)
    for start in range(0, hidden, PSUM_BANK):
        bank = nl.ds(start, min(PSUM_BANK, hidden - start))
        y_psum = nl.ndarray((count, min(PSUM_BANK, hidden - start)), dtype=nl.float32, buffer=nl.psum)
        for block in range(blocks):
            nisa.nc_matmul(
                dst=y_psum,
                stationary=activated_sb[:, block, :],
                moving=down_sb[:, block, bank],
                accumulate=block > 0,
            )
        nisa.tensor_copy(dst=y_sb[:, bank], src=y_psum, engine=nisa.vector_engine)
    return y_sb


def _write(y: nl.ndarray, rows_sb: nl.ndarray, places: nl.ndarray) -> None:
    """Write rows [rows, hidden] to y at places [rows, 1]; skip rows without a place."""
    count, hidden = rows_sb.shape
    target = y.ap(pattern=[[hidden, count], [1, hidden]], offset=0, vector_offset=places, indirect_dim=0)
    nisa.dma_copy(dst=target, src=rows_sb, oob_mode=nisa.oob_mode.skip)
