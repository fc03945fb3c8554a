"""`nki.isa`: signatures of NKI 0.6, arithmetic in float32, limits of a NeuronCore-v3 or v4."""

from nki.isa import options as constants
from nki.isa.data_movement import dma_copy, dma_transpose, memset, nc_stream_shuffle, tensor_copy
from nki.isa.elementwise import (
    activation,
    activation_reduce,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_tensor,
)
from nki.isa.options import (
    dge_mode,
    dma_engine,
    engine,
    get_nc_version,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
)
from nki.isa.products import nc_matmul, nc_transpose
from nki.isa.reductions import (
    bn_aggr,
    bn_stats,
    tensor_partition_reduce,
    tensor_reduce,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)
from nki.isa.registers import core_barrier, register_alloc, register_load, sendrecv
from nki.isa.selection import (
    affine_select,
    iota,
    max8,
    nc_find_index8,
    nc_match_replace8,
    nc_n_gather,
    nonzero_with_count,
    range_select,
)

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown

__all__ = [
    "activation",
    "activation_reduce",
    "affine_select",
    "bn_aggr",
    "bn_stats",
    "constants",
    "core_barrier",
    "dge_mode",
    "dma_copy",
    "dma_engine",
    "dma_transpose",
    "engine",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "nonzero_with_count",
    "oob_mode",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "scalar_engine",
    "scalar_tensor_tensor",
    "sendrecv",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "unknown_engine",
    "vector_engine",
]
