"""A test that this machine's fused kernels agree with plain torch on states in pages. Nothing here imports vLLM."""

from __future__ import annotations

from collections.abc import Callable

import torch

from granite4_neuron.ops.layer_weights import MixerWeights
from granite4_neuron.vllm.cpu.mixing import (
    DecodeRows,
    Mixer,
    Pages,
    fused_decode,
    fused_prefill,
    torch_decode,
    torch_prefill,
)

TOLERANCE = 1e-5

_HEADS, _HEAD_DIM, _D_STATE, _DRAFTS, _PAGES = 8, 32, 64, 3, 9
_CHANNELS = _HEADS * _HEAD_DIM + 2 * _D_STATE


def largest_differences() -> dict[str, float]:
    """Return the largest differences between both in results and states, in float32, for prompts, single tokens and
    verified drafts. They are relative to the largest value.
    """
    torch.manual_seed(0)
    record = MixerWeights(
        conv_weight=torch.randn(_CHANNELS, 1, 4) / 2,
        conv_bias=torch.randn(_CHANNELS),
        dt_bias=torch.randn(_HEADS),
        A_log=torch.empty(_HEADS).uniform_(0, 2.5),
        D=torch.randn(_HEADS),
        n_groups=1,
        time_step_limit=(0.0, float("inf")),
    )
    mixer = Mixer(record)
    prompt, tokens = torch.randn(90, _CHANNELS + _HEADS), torch.randn(6, _CHANNELS + _HEADS)
    table = torch.tensor([[3, 1, 4, 2], [5, 8, 6, 7]], dtype=torch.int32)
    single = DecodeRows(torch.tensor([0, 1, 2], dtype=torch.int32), table, None)
    drafts = DecodeRows(torch.tensor([0, 4, 6], dtype=torch.int32), table, torch.tensor([3, 1], dtype=torch.int32))
    return {
        "prompts": _difference(
            lambda pages: fused_prefill(mixer, prompt, pages, 5, 2),
            lambda pages: torch_prefill(mixer, prompt, pages, 5, 2),
        ),
        "single tokens": _difference(
            lambda pages: fused_decode(mixer, tokens[:2], pages, single),
            lambda pages: torch_decode(mixer, tokens[:2], pages, single),
        ),
        "verified drafts": _difference(
            lambda pages: fused_decode(mixer, tokens, pages, drafts),
            lambda pages: torch_decode(mixer, tokens, pages, drafts),
        ),
    }


def _difference(fused: Callable[[Pages], torch.Tensor], plain: Callable[[Pages], torch.Tensor]) -> float:
    conv, ssm = torch.randn(_PAGES, _CHANNELS, 3 + _DRAFTS), torch.randn(_PAGES, _HEADS, _HEAD_DIM, _D_STATE)
    results = []
    for run in (fused, plain):
        pages = Pages(conv.clone(), ssm.clone())
        results.append((run(pages), pages.conv, pages.ssm))
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(*results, strict=True))
