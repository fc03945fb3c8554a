"""Kernels of AWS's nki-library, their inputs, and AWS's own references for them.

Import only within `nki_library.provided_library`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import torch

from test.support.nki_library import member

BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Case:
    """One launch of a kernel.

    kernel: "module:name" below `nkilib`, or a function that calls a kernel that works on chip.
    inputs: by the names of the kernel's arguments. An output's input is memory to write to.
    reference: the expected outputs, in the kernel's order, from the same inputs.
    written: names of inputs that hold the outputs, if the kernel does not return them.
    tolerance: the largest difference allowed, relative to the largest value.
    """

    kernel: str | Callable
    inputs: dict[str, Any]
    reference: Callable[..., Any]
    written: tuple[str, ...] = ()
    programs: int = 1
    tolerance: float = 1e-5
    options: dict[str, Any] = field(default_factory=dict)  # of the kernel alone


def to_torch(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == BF16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(value.copy())


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yield (name, function that makes the case). A family that the library lacks leaves out only its own cases."""
    for family, make, variants in FAMILIES:
        for variant in variants:
            values = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in variant.items())
            yield f"{family}[{values}]", lambda m=make, v=variant: m(**v)


def _random(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _cumsum(rows: int, columns: int, dtype: Any) -> Case:
    tolerance = 1e-5 if dtype is np.float32 else 1e-2
    inputs = dict(x=_random(rows, columns, dtype=dtype))
    return Case(
        "core.cumsum.cumsum:cumsum", inputs, member("core.cumsum.cumsum_torch:cumsum_torch_ref"), (), 1, tolerance
    )


def _rope(d_head: int, contiguous_layout: bool, relayout_in_sbuf: bool) -> Case:
    inputs = dict(
        x_in=_random(d_head, 2, 4, 16, dtype=BF16),
        cos=_random(d_head // 2, 2, 16, dtype=BF16, seed=1),
        sin=_random(d_head // 2, 2, 16, dtype=BF16, seed=2),
        contiguous_layout=contiguous_layout,
        relayout_in_sbuf=relayout_in_sbuf,
    )
    return Case(
        "core.embeddings.rope:RoPE", inputs, member("core.embeddings.rope_torch:rope_torch_ref"), tolerance=2e-2
    )


def _rope_hf(backward: bool) -> Case:
    q, k = _random(1, 4, 128, 64), _random(1, 2, 128, 64, seed=1)
    inputs = dict(
        q=q,
        k=k,
        q_out=np.zeros_like(q),
        k_out=np.zeros_like(k),
        cos=_random(1, 128, 64, seed=2),
        sin=_random(1, 128, 64, seed=3),
        backward=backward,
    )
    return Case("core.embeddings.rope_hf:rope_hf", inputs, member("core.embeddings.rope_hf_torch:rope_hf_torch_ref"))


def _norm(name: str, programs: int, hidden: int, tokens: int) -> Case:
    inputs = dict(
        input=_random(1, tokens, hidden, dtype=np.float16),
        gamma=_random(1, hidden, dtype=np.float16, seed=1),
        output=np.zeros((128, tokens, hidden // 128), np.float16),
    )
    suffix = "_lnc1" if programs == 1 else ""
    reference = member(f"core.subkernels.{name}_torch:{name}_tkg_torch_ref{suffix}")
    kernel = f"core.subkernels.{name}_tkg:{name}_tkg"
    return Case(kernel, inputs, reference, ("output",), programs, 5e-3)


def _find_nonzero(dtype: Any) -> Case:
    chosen = np.random.default_rng(0).random((512, 8)) < 0.1
    inputs = dict(input_tensor=chosen.astype(dtype), chunk_size=512)
    reference = member("core.subkernels.find_nonzero_indices_torch:find_nonzero_indices_torch_ref")
    return Case("core.subkernels.find_nonzero_indices:find_nonzero_indices", inputs, reference, programs=2)


def _cascaded_max(batch: int, columns: int, programs: int) -> Case:
    inputs = dict(input_tensor=_random(batch, 1, columns))
    reference = member("core.max.cascaded_max_torch:cascaded_max_torch_ref")
    return Case("core.max.cascaded_max:cascaded_max", inputs, reference, programs=programs)


def _depthwise(channels: int, taps: int, padding: int, stride: int) -> Case:
    inputs = dict(img_ref=_random(1, channels, 1, 256), filter_ref=_random(channels, 1, 1, taps, seed=1))
    options = dict(padding=((0, 0), (padding, padding)), stride=(1, stride), feature_group_count=channels)

    def reference(img_ref: torch.Tensor, filter_ref: torch.Tensor) -> torch.Tensor:
        conv = torch.nn.functional.conv2d
        return conv(img_ref, filter_ref, stride=(1, stride), padding=(0, padding), groups=channels)

    kernel = "experimental.conv.depthwise_conv1d:depthwise_conv1d_implicit_gemm"
    return Case(kernel, inputs, reference, options=options)


def _conv1d(stride: int, dilation: int, has_bias: bool) -> Case:
    inputs = dict(
        x_in=_random(2, 128, 64),
        filters=_random(3, 128, 128, seed=1),
        bias=_random(128, seed=2) if has_bias else None,
        stride=stride,
        padding=(2, 2),
        dilation=dilation,
    )
    return Case("experimental.conv.conv1d:conv1d", inputs, member("experimental.conv.conv1d_torch:conv1d_torch_ref"))


def _cross_entropy(vocabulary: int) -> Case:
    targets = np.random.default_rng(1).integers(0, vocabulary, 64).astype(np.int32)
    inputs = dict(logits_hbm=_random(64, vocabulary), targets_hbm=targets)
    reference = member("experimental.loss.cross_entropy_torch:cross_entropy_forward_torch_ref")
    options = dict(positions_per_batch=32, chunk_size=256, dtype="float32")
    kernel = "experimental.loss.cross_entropy:cross_entropy_forward"
    return Case(
        kernel, inputs, lambda logits_hbm, targets_hbm: reference(logits_hbm, targets_hbm.long()), options=options
    )


def _dynamic_add() -> Case:
    inputs = dict(input_a=_random(256, 512), input_b=_random(256, 512, seed=1))
    reference = member("experimental.dynamic_shapes.dynamic_elementwise_add_torch:dynamic_elementwise_add_torch_ref")
    options = dict(num_m_tiles=np.array([[2]], np.int32))
    kernel = "experimental.dynamic_shapes.dynamic_elementwise_add:dynamic_elementwise_add"
    return Case(kernel, inputs, reference, options=options)


def _router(act_fn: str, router_pre_norm: bool, norm_topk_prob: bool) -> Case:
    tokens, hidden, experts, chosen = 4, 256, 16, 4
    inputs = dict(
        x=_random(hidden, tokens),
        w=_random(hidden, experts, seed=1) / 16,
        w_bias=None,
        router_logits=np.zeros((tokens, experts), np.float32),
        expert_affinities=np.zeros((tokens, experts), np.float32),
        expert_index=np.zeros((tokens, chosen), np.uint32),
        act_fn=getattr(member("core.utils.common_types:RouterActFnType"), act_fn),
        k=chosen,
        x_hbm_layout=0,
        x_sb_layout=0,
        router_pre_norm=router_pre_norm,
        norm_topk_prob=norm_topk_prob,
    )
    reference = member("core.router_topk.router_topk_torch:router_topk_torch_ref")

    def in_order(**arguments: Any) -> tuple[Any, ...]:
        results = reference(**arguments)
        return results["router_logits"], results["expert_affinities"], results["expert_index"]

    written = ("router_logits", "expert_affinities", "expert_index")
    return Case("core.router_topk.router_topk:router_topk", inputs, in_order, written, tolerance=1e-4)


def _attention_cte(tokens: int, is_causal: bool, prior: int, sliding_window: int) -> Case:
    heads, size = 2, 64
    inputs = dict(
        q=_random(heads, tokens, size) / 8,
        k=_random(heads, size, tokens, seed=1),
        v=_random(heads, tokens, size, seed=2),
        scale=1.0,
        causal_mask=is_causal,
        sliding_window=sliding_window,
    )
    if prior:
        inputs |= dict(
            k_prior=_random(heads, size, prior, seed=3),
            v_prior=_random(heads, prior, size, seed=4),
            prior_used_len=np.array([prior - 100], np.int32),
        )
    reference = member("core.attention.attention_cte_torch:attention_cte_torch_ref")
    return Case("core.attention.attention_cte:attention_cte", inputs, reference, tolerance=1e-2)


def _attention_bwd(is_causal: bool) -> Case:
    module = "core.attention.attention_bwd_torch"
    q, k, v, dy = (_random(1, 2, 64, 512, seed=seed) for seed in range(4))
    forward = member(f"{module}:compute_o_lse")
    o, lse = (np.asarray(t) for t in forward(*map(to_torch, (q, k, v)), use_causal_mask=is_causal)[:2])
    inputs = dict(q_ref=q, k_ref=k, v_ref=v, o_ref=o, dy_ref=dy, lse_ref=lse, use_causal_mask=is_causal)
    reference = member(f"{module}:attention_bwd_torch_ref")
    return Case("core.attention.attention_bwd:attention_bwd", inputs, reference, tolerance=1e-2)


def _output_projection_tkg(heads: int, has_bias: bool) -> Case:
    inputs = dict(
        attention=_random(128, 2, heads, 1, dtype=BF16),
        weight=_random(heads * 128, 1024, dtype=BF16, seed=1),
        bias=_random(1, 1024, dtype=BF16, seed=2) if has_bias else None,
    )
    module = "core.output_projection.output_projection_tkg"
    return Case(
        f"{module}:output_projection_tkg",
        inputs,
        member(f"{module}_torch:output_projection_tkg_torch_ref"),
        (),
        1,
        1e-2,
    )


def _output_projection_cte(heads: int) -> Case:
    inputs = dict(
        attention=_random(1, heads, 128, 256, dtype=BF16), weight=_random(heads * 128, 1024, dtype=BF16, seed=1)
    )
    module = "core.output_projection.output_projection_cte.output_projection_cte"
    reference = member(f"{module}_torch:output_projection_cte_torch_ref")
    return Case(f"{module}:output_projection_cte", inputs, reference, tolerance=1e-2)


def _rmsnorm_quant(lower_bound: float) -> Case:
    """Return a case with rows of float8 followed by their scale. As in AWS's test, the definition is the reference."""
    hidden = 256
    x, gamma = _random(1, 128, hidden, dtype=BF16), _random(1, hidden, dtype=BF16, seed=1)
    arguments = member("core.rmsnorm.rmsnorm_quant:RmsNormQuantKernelArgs")(lower_bound=lower_bound)

    def reference(hidden: torch.Tensor, ln_w: torch.Tensor) -> np.ndarray:
        x, weight = hidden.float(), ln_w.float()
        norm = x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6) * weight
        if lower_bound:
            norm = norm.clamp(-lower_bound, lower_bound)
        scale = norm.abs().amax(-1, keepdim=True) / 240
        return (norm / scale).numpy().astype(ml_dtypes.float8_e4m3).astype(np.float32)

    return Case(
        "core.rmsnorm.rmsnorm_quant:rmsnorm_quant_kernel",
        dict(hidden=x, ln_w=gamma),
        reference,
        tolerance=7e-2,
        options=dict(kargs=arguments),
    )


def _qkv(tokens: int, is_normed: bool) -> Case:
    hidden, d_head = 512, 64
    norm = member("core.utils.common_types:NormType")
    inputs = dict(
        input=_random(1, tokens, hidden, dtype=BF16),
        fused_qkv_weights=_random(hidden, 4 * d_head, dtype=BF16, seed=1),
    )
    options = dict(d_head=d_head, num_q_heads=2, num_kv_heads=1)
    gamma = _random(1, hidden, dtype=BF16, seed=2)
    if is_normed:
        options |= dict(fused_norm_type=norm.RMS_NORM, gamma_norm_weights=gamma)

    def reference(input: torch.Tensor, fused_qkv_weights: torch.Tensor) -> torch.Tensor:
        x = input.float()
        if is_normed:
            x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * to_torch(gamma).float()
        return x @ fused_qkv_weights.float()

    return Case("core.qkv.qkv:qkv", inputs, reference, tolerance=2e-2, options=options)


def _cross_partition_copy(count: int) -> Case:
    from test.support.nki_bodies import loaded, stored, tile

    def kernel(src: Any) -> Any:
        dst = tile(128, 48, value=0.0)
        member("core.utils.cross_partition_copy:cross_partition_copy")(loaded(src), dst, 3, 7, count, 48)
        return stored(dst)

    def reference(src: torch.Tensor) -> torch.Tensor:
        dst = torch.zeros(128, 48)
        dst[7 : 7 + count] = src[3 : 3 + count]
        return dst

    return Case(kernel, dict(src=_random(128, 48)), reference)


FAMILIES: tuple[tuple[str, Callable[..., Case], tuple[dict[str, Any], ...]], ...] = (
    ("cumsum", _cumsum, (dict(rows=130, columns=300, dtype=np.float32), dict(rows=64, columns=2100, dtype=BF16))),
    (
        "rope",
        _rope,
        (
            dict(d_head=64, contiguous_layout=True, relayout_in_sbuf=False),
            dict(d_head=128, contiguous_layout=True, relayout_in_sbuf=True),
            dict(d_head=128, contiguous_layout=False, relayout_in_sbuf=True),
        ),
    ),
    ("rope_hf", _rope_hf, (dict(backward=False), dict(backward=True))),
    (
        "rmsnorm_tkg",
        lambda **dims: _norm("rmsnorm", **dims),
        (dict(programs=1, hidden=2048, tokens=4), dict(programs=2, hidden=2048, tokens=16)),
    ),
    (
        "layernorm_tkg",
        lambda **dims: _norm("layernorm", **dims),
        (dict(programs=1, hidden=2048, tokens=4), dict(programs=2, hidden=2048, tokens=16)),
    ),
    ("find_nonzero_indices", _find_nonzero, (dict(dtype=np.float32), dict(dtype=np.int32))),
    ("cascaded_max", _cascaded_max, (dict(batch=8, columns=4058, programs=1), dict(batch=5, columns=3168, programs=2))),
    (
        "depthwise_conv1d",
        _depthwise,
        (dict(channels=16, taps=3, padding=2, stride=1), dict(channels=16, taps=8, padding=0, stride=2)),
    ),
    ("conv1d", _conv1d, (dict(stride=1, dilation=1, has_bias=False), dict(stride=2, dilation=2, has_bias=True))),
    ("cross_entropy", _cross_entropy, (dict(vocabulary=1000),)),
    ("dynamic_elementwise_add", _dynamic_add, ({},)),
    (
        "router_topk",
        _router,
        (
            dict(act_fn="SOFTMAX", router_pre_norm=True, norm_topk_prob=False),
            dict(act_fn="SIGMOID", router_pre_norm=True, norm_topk_prob=True),
            dict(act_fn="SOFTMAX", router_pre_norm=False, norm_topk_prob=False),
        ),
    ),
    (
        "attention_cte",
        _attention_cte,
        (
            dict(tokens=512, is_causal=True, prior=0, sliding_window=0),
            dict(tokens=256, is_causal=False, prior=0, sliding_window=0),
            dict(tokens=256, is_causal=True, prior=512, sliding_window=0),
            dict(tokens=512, is_causal=True, prior=0, sliding_window=100),
        ),
    ),
    ("attention_bwd", _attention_bwd, (dict(is_causal=True), dict(is_causal=False))),
    ("output_projection_tkg", _output_projection_tkg, (dict(heads=2, has_bias=False), dict(heads=4, has_bias=True))),
    ("output_projection_cte", _output_projection_cte, (dict(heads=4),)),
    ("rmsnorm_quant", _rmsnorm_quant, (dict(lower_bound=0.0), dict(lower_bound=1.5))),
    ("cross_partition_copy", _cross_partition_copy, (dict(count=5), dict(count=60))),
    ("qkv", _qkv, (dict(tokens=256, is_normed=False), dict(tokens=4, is_normed=True))),
)
