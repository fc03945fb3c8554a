"""Random weights that exercise a model as trained ones do, for tests and for measuring without a download."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch

from granite4_neuron.config import ModelConfig
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.families import model_of

# Larger parameters are drawn in pieces of this many values, on all cores.
_PIECE = 2**20


def random_model(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, max_A: float = 16.0
) -> HybridForCausalLM:
    """Make a model in which every part matters to the output.

    Decay rates are uniform in (1, max_A) and dt_bias in (-4, 1), so that some heads forget at once and others hardly at
    all; norm weights are near 1, biases and D are not zero, projections keep the scale of their input.
    """
    with torch.device("meta"):
        model = model_of(config)
    model.to_empty(device="cpu").to(dtype)
    for name in model.float32_weights():
        weight = model.get_parameter(name)
        weight.data = weight.data.float()
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, generator, config, max_A)
    return model.requires_grad_(False).eval()


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator, config: ModelConfig, max_A: float) -> None:
    if name.endswith("dt_bias"):
        parameter.uniform_(-4.0, 1.0, generator=generator)
    elif name.endswith("A_log"):
        parameter.uniform_(1.0, max_A, generator=generator).log_()
    elif name.endswith(".D") or "norm" in name:
        parameter.normal_(1.0, 0.2, generator=generator)
    elif name.endswith("embed_tokens.weight"):
        _fill_normally(parameter, 1.0 / config.embedding_multiplier, generator)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.2, generator=generator)
    else:
        _fill_normally(parameter, 1.0 / math.sqrt(parameter.shape[-1]), generator)


def _fill_normally(parameter: torch.Tensor, std: float, generator: torch.Generator) -> None:
    pieces = parameter.detach().view(-1).split(_PIECE)
    if len(pieces) == 1:
        _draw(parameter, std, generator)
        return
    # Each piece has its own generator, so that the values do not depend on the number of threads.
    seeds = torch.randint(2**62, (len(pieces),), generator=generator).tolist()

    def fill(piece: torch.Tensor, seed: int) -> None:
        _draw(piece, std, torch.Generator().manual_seed(seed))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, pieces, seeds))


def _draw(to: torch.Tensor, std: float, generator: torch.Generator) -> None:
    # In float32: in 16 bits torch 2.11 draws far too many numbers near 0.
    to.copy_(torch.empty(to.shape).normal_(0.0, std, generator=generator))
