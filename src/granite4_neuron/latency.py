"""How long a step takes a Trainium2 at least, and what it is predicted to take. Nothing here is a measurement.

A step's bound is a roofline: HBM, TensorE, VectorE and the links between cores work at the same time, each at its full
rate, and the one with most to do decides. A device does not keep that up. What it loses grows with the number of
layers: each has its collectives, kernels and waits. That loss is one number here, taken from a published figure of
another model (`LAYER_SECONDS`); bound and loss together are the prediction.

Rates are of one logical core, which is two physical ones (LNC=2) and a quarter of a chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from granite4_neuron.config import MAMBA, GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.minimum import minimum

# A chip has 2.9 TB/s of HBM, 667 TFLOPS in bfloat16 and 1.28 TB/s of NeuronLink: "Trainium2 architecture" in the Neuron
# SDK's documentation (about-neuron/arch/neuron-hardware/trainium2). A logical core has a quarter.
HBM_BYTES_PER_SECOND = 2.9e12 / 4
TENSOR_FLOPS_PER_SECOND = 667e12 / 4
LINK_BYTES_PER_SECOND = 1.28e12 / 4
# VectorE, of each of the two physical cores: 0.96 GHz, an element of each of 128 partitions in a cycle: "Trainium2
# architecture guide for NKI" (nki/guides/architecture/trainium2_arch).
VECTOR_ELEMENTS_PER_SECOND = 2 * 128 * 0.96e9
# What a layer takes beside its bound: collectives' latency, launches and waits. The published 4.00 ms per token of
# Qwen3.5-2B on eight logical cores (contrib/models/Qwen3.5-2B of NxD Inference, trn2.48xlarge) less its bound, by its
# 24 layers; `benchmarks/predicted_latency.py` works it out, and compares it with the other figures.
LAYER_SECONDS = 139e-6

ALL_REDUCES_PER_LAYER = 2
CHUNK = 128  # tokens that the prefill kernel takes at a time


@dataclass(frozen=True)
class Work:
    """What one rank does in one step.

    flops: of matrix products. bytes_accessed: of HBM. vector_elements: that VectorE visits in Mamba layers' kernels.
    link_bytes: sent to other ranks. layers: of the model.
    """

    flops: float
    bytes_accessed: float
    vector_elements: float
    link_bytes: float
    layers: int


@dataclass(frozen=True)
class Latency:
    """Seconds of one step: of each unit by itself, and of the layers' losses."""

    units: dict[str, float]
    overhead: float

    @property
    def bound(self) -> float:
        """The least: what the busiest unit takes."""
        return max(self.units.values())

    @property
    def predicted(self) -> float:
        return self.bound + self.overhead

    @property
    def limit(self) -> str:
        """What most of the prediction is: a unit's name, or "layers" for what each layer loses."""
        busiest = max(self.units, key=self.units.__getitem__)
        return busiest if self.bound >= self.overhead else "layers"


def latency(work: Work) -> Latency:
    """The roofline of a step."""
    units = {
        "HBM": work.bytes_accessed / HBM_BYTES_PER_SECOND,
        "TensorE": work.flops / TENSOR_FLOPS_PER_SECOND,
        "VectorE": work.vector_elements / VECTOR_ELEMENTS_PER_SECOND,
        "links": work.link_bytes / LINK_BYTES_PER_SECOND,
    }
    return Latency(units, work.layers * LAYER_SECONDS)


def link_bytes(layers: int, tokens: int, hidden_size: int, tp_degree: int, itemsize: int) -> float:
    """What a rank sends in a step: an all-reduce of the hidden states after mixer and after MLP, as a ring does it."""
    ring = 2 * (tp_degree - 1) / tp_degree
    return ALL_REDUCES_PER_LAYER * layers * tokens * hidden_size * itemsize * ring


def step_work(
    config: GraniteMoeHybridConfig, tp_degree: int, dtype: torch.dtype, batch_size: int, tokens: int, context: int
) -> Work:
    """The work of a step, from `minimum` and the NKI kernels.

    VectorE's share is what the kernels of this package have it do: in decode the decay and the update of every entry of
    the state; in prefill, for each head and 128 tokens, the weights of 128 pairs, and three passes over the head.

    Raises:
        UserError: tp_degree does not divide the model.
    """
    least = minimum(config, tp_degree, dtype, batch_size, tokens, context)
    rank, layers = config.rank_dimensions(tp_degree), len(config.layer_types)
    if tokens == 1:
        per_layer = 2 * batch_size * rank.mamba_heads * config.mamba_d_head * config.mamba_d_state
    else:
        chunks = batch_size * -(-tokens // CHUNK)
        per_layer = chunks * rank.mamba_heads * CHUNK * (CHUNK + 3 * config.mamba_d_head)
    return Work(
        flops=least.flops,
        bytes_accessed=least.bytes_accessed,
        vector_elements=config.layer_types.count(MAMBA) * per_layer,
        link_bytes=link_bytes(layers, batch_size * tokens, config.hidden_size, tp_degree, dtype.itemsize),
        layers=layers,
    )


@dataclass(frozen=True)
class Prediction:
    """One line of a prediction. tokens: that a step gives to each sequence on average."""

    step: str
    batch_size: int
    latency: Latency
    tokens: float = 1.0

    @property
    def seconds_per_token(self) -> float:
        return self.latency.predicted / self.tokens

    @property
    def tokens_per_second(self) -> float:
        return self.batch_size / self.seconds_per_token


def tokens_per_verification(drafted: int, acceptance: float) -> float:
    """Tokens that a verification of `drafted` drafts gives, each being accepted with the same probability if those
    before it are: the accepted ones, and the one that the verification itself finds.

    Source: Leviathan, Kalman and Matias 2023, equation 1.
    """
    return sum(acceptance**i for i in range(drafted + 1))


def predictions(
    config: GraniteMoeHybridConfig,
    tp_degree: int,
    dtype: torch.dtype,
    prompt: int,
    context: int,
    batch_sizes: Sequence[int],
    drafted: int = 0,
    acceptance: float = 0.0,
) -> list[Prediction]:
    """The first token of a prompt, then a token at each batch size, without and with drafts from the text itself.

    Args:
        tp_degree: ranks, one per logical core.
        prompt: tokens of the prompt, which is one step.
        context: tokens of each sequence while it is continued.
        drafted, acceptance: tokens verified beside the certain one, and how probable it is that one of them holds; 0
            drafted tokens for no such lines. Drafts cost nothing here: n-grams are looked up on the host.

    Raises:
        UserError: tp_degree does not divide the model, or a number is out of range.
    """
    if not 0 <= acceptance <= 1:
        raise UserError(f"the acceptance is {acceptance}; it is a probability, from 0 to 1.")

    def of(name: str, batch_size: int, tokens: int, before: int, gives: float = 1.0) -> Prediction:
        work = step_work(config, tp_degree, dtype, batch_size, tokens, before)
        return Prediction(name, batch_size, latency(work), gives)

    lines = [of(f"first token, prompt of {prompt:,}", 1, prompt, 0)]
    lines += [of("token", batch_size, 1, context) for batch_size in batch_sizes]
    if drafted:
        gives = tokens_per_verification(drafted, acceptance)
        name = f"token, {drafted} drafted"
        lines += [of(name, batch_size, drafted + 1, context, gives) for batch_size in batch_sizes]
    return lines
