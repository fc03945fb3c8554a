"""Copies Mamba states between blocks of vLLM's cache. Prefix caching with speculation needs this, and vLLM has it as
Triton kernels only.

Each function has the name and arguments of the Triton kernel that it replaces (vllm/v1/worker/mamba_utils.py), and does
the work of all its programs. On a CPU, addresses of tensors are addresses of memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _States:
    """The places of all layers' states, in vLLM's form: each tensor has one entry per state."""

    block_table_ptrs: torch.Tensor  # per group
    block_table_stride: int  # elements from request to request
    base_addrs: torch.Tensor
    block_strides: torch.Tensor  # bytes
    elem_sizes: torch.Tensor  # bytes
    inner_sizes: torch.Tensor  # elements of a temporal state, or of one column of a window
    conv_widths: torch.Tensor  # columns of a window; 0 for temporal states
    group_indices: torch.Tensor
    dim_row_count: torch.Tensor  # channels of a window whose columns are contiguous
    dim_row_stride: torch.Tensor  # bytes
    conv_is_dim_first: bool

    def copy(self, request: int, source: int, destination: int, bias: int) -> None:
        """Copy the states of all layers after `bias` more tokens from one column of a request's block table to another.

        The temporal state `bias` tokens later is `bias` columns further on; a window is shifted by `bias` columns.
        """
        for state in range(len(self.base_addrs)):
            self._copy_one(state, request, source, destination, bias)

    def _copy_one(self, state: int, request: int, source: int, destination: int, bias: int) -> None:
        elem_size, inner_size = int(self.elem_sizes[state]), int(self.inner_sizes[state])
        width = int(self.conv_widths[state])
        is_window = width > 0
        to = self._address(state, request, destination)
        origin = self._address(state, request, source if is_window else source + bias)
        if not is_window:
            ctypes.memmove(to, origin, inner_size * elem_size)
        elif self.conv_is_dim_first:
            stride = int(self.dim_row_stride[state])
            for channel in range(int(self.dim_row_count[state])):
                start = channel * stride
                ctypes.memmove(to + start, origin + start + bias * elem_size, (width - bias) * elem_size)
        else:
            column = inner_size * elem_size
            ctypes.memmove(to, origin + bias * column, (width - bias) * column)

    def _address(self, state: int, request: int, column: int) -> int:
        """Return the address of a state's block."""
        table = _unsigned(self.block_table_ptrs[int(self.group_indices[state])])
        entry = table + (request * self.block_table_stride + column) * ctypes.sizeof(ctypes.c_int32)
        block = ctypes.c_int32.from_address(entry).value
        return _unsigned(self.base_addrs[state]) + block * int(self.block_strides[state])


def _unsigned(address: torch.Tensor) -> int:
    return int(address) & (2**64 - 1)


def precopy_mamba_align_fused_kernel(
    mamba_state_idx_ptr, src_col_ptr, token_bias_ptr, block_table_ptrs_ptr, block_table_stride_req,
    state_base_addrs_ptr, state_block_strides_ptr, state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr,
    state_group_indices_ptr, state_dim_row_count_ptr, state_dim_row_stride_ptr, idx_mapping_ptr, num_reqs,
    COPY_BLOCK_SIZE, CONV_STATE_DIM_FIRST, HAS_IDX_MAPPING=True, TEMPORAL_TILES=1,
) -> None:  # fmt: skip
    """Before a step, copy the state of each request that enters a new block to that block."""
    states = _States(
        block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr,
        state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
        state_dim_row_count_ptr, state_dim_row_stride_ptr, CONV_STATE_DIM_FIRST,
    )  # fmt: skip
    for request in _requests(num_reqs, idx_mapping_ptr if HAS_IDX_MAPPING else None):
        source, destination = int(src_col_ptr[request]), int(mamba_state_idx_ptr[request])
        if 0 <= source != destination:
            states.copy(request, source, destination, int(token_bias_ptr[request]))


def postprocess_mamba_fused_kernel(
    num_accepted_tokens_ptr, mamba_state_idx_ptr, num_scheduled_tokens_ptr, num_computed_tokens_ptr,
    num_draft_tokens_ptr, block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr,
    state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
    state_dim_row_count_ptr, state_dim_row_stride_ptr, num_accepted_tokens_out_ptr, idx_mapping_ptr, num_reqs,
    block_size, COPY_BLOCK_SIZE, CONV_STATE_DIM_FIRST, HAS_IDX_MAPPING=False, PRECOMPUTED_NEW_COMPUTED=False,
    TEMPORAL_TILES=1,
) -> None:  # fmt: skip
    """After a step, copy the state at the end of each block that accepted tokens have filled to that block."""
    states = _States(
        block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr,
        state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
        state_dim_row_count_ptr, state_dim_row_stride_ptr, CONV_STATE_DIM_FIRST,
    )  # fmt: skip
    for request in _requests(num_reqs, idx_mapping_ptr if HAS_IDX_MAPPING else None):
        accepted, source = int(num_accepted_tokens_ptr[request]), int(mamba_state_idx_ptr[request])
        computed = int(num_computed_tokens_ptr[request])
        if PRECOMPUTED_NEW_COMPUTED:
            running = computed - accepted + 1
        else:
            running = computed + int(num_scheduled_tokens_ptr[request]) - int(num_draft_tokens_ptr[request])
        filled = (running + accepted - 1) // block_size * block_size
        if filled < running:
            continue
        destination, bias = filled // block_size - 1, filled - running
        if source == destination:
            num_accepted_tokens_out_ptr[request] = 1
        if source != destination or bias:
            states.copy(request, source, destination, bias)


def _requests(num_reqs: int, idx_mapping: torch.Tensor | None) -> list[int]:
    if idx_mapping is None:
        return list(range(num_reqs))
    return [request for request in idx_mapping[:num_reqs].tolist() if request >= 0]


def register() -> None:
    """Replace vLLM's kernels, unless Triton is available."""
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import register_kernels

    if not HAS_TRITON:
        module = "vllm.v1.worker.mamba_utils"
        kernels = (precopy_mamba_align_fused_kernel, postprocess_mamba_fused_kernel)
        register_kernels({f"{module}.{kernel.__name__}": kernel for kernel in kernels})
