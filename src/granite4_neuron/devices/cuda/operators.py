"""The operators of graphs on a GPU: Triton kernels for prompts and for one token per sequence; the rest is as on XLA.

Each file has whole operators: definition, shapes, launch and kernels (`operator.py`). `token_operators.py` lists
the operators for decode and verification of few sequences; the others are for any number of sequences.
"""

from dataclasses import replace

from granite4_neuron.devices.cuda import (
    attention,
    experts,
    fused_moe,
    head,
    linear,
    mamba,
    norms,
    products,
    sampling,
    token_many,
)
from granite4_neuron.devices.cuda.forms import TokenLayer
from granite4_neuron.devices.cuda.token_operators import (
    InvariantOperators,
    ManyRowsOperators,
    OneRowOperators,
    TokenOperators,
)
from granite4_neuron.devices.graphs.operators import XLA

GPU = replace(
    XLA,
    linear=linear.linear,
    rms_norm=norms.rms_norm,
    rms_norm_gated=norms.rms_norm_gated,
    mlp=linear.mlp,
    router_logits=experts.router_logits,
    topk_softmax=experts.topk_softmax,
    fused_experts=experts.fused_experts,
    cached_attention=attention.cached_attention,
    mamba_prefill=mamba.CHUNKED,
    mamba_quadratic=mamba.QUADRATIC,
    mamba_decode=mamba.SINGLE_TOKEN,
    logits=head.logits,
    choose=sampling.choose_tokens,
    token_operators=TokenOperators(),
    one_row_operators=OneRowOperators(),
    many_rows_operators=ManyRowsOperators(),
    decode_logits=token_many.logits,
    layer_form=TokenLayer,
)

# One token has the same bits as one of any number.
GPU_BATCH_INVARIANT = replace(
    GPU,
    linear=products.linear,
    mlp=products.mlp,
    fused_experts=fused_moe.fused_experts,
    token_operators=InvariantOperators(),
    one_row_operators=None,
    many_rows_operators=None,
    decode_logits=None,
)

__all__ = ["GPU", "GPU_BATCH_INVARIANT"]
