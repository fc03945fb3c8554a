"""The operators of graphs on a GPU: Triton kernels for a token of each sequence; the rest is as on XLA."""

from dataclasses import replace

from granite4_neuron.ops.gpu import functions, token_layer
from granite4_neuron.ops.xla import XLA

GPU = replace(
    XLA,
    linear=functions.linear,
    mlp=functions.mlp,
    router_logits=functions.router_logits,
    topk_softmax=functions.topk_softmax,
    fused_experts=functions.fused_experts,
    cached_attention=functions.cached_attention,
    mamba_prefill=functions.CHUNKED,
    mamba_quadratic=functions.QUADRATIC,
    mamba_decode=functions.SINGLE_TOKEN,
    token_layer=token_layer,
)

__all__ = ["GPU"]
