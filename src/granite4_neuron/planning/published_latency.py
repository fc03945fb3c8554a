"""Published times on Trainium2, `latency`'s predictions beside them, and the range that its predictions have by them.

Models of other families are predicted from their configs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from granite4_neuron.config import ModelConfig, published_config
from granite4_neuron.config.published import published_name
from granite4_neuron.planning.analysis.live_set import LiveSet, Product, live_set_of
from granite4_neuron.planning.latency import (
    PARTS_OF_LAYER,
    Latency,
    Work,
    latency,
    link_bytes,
    num_collectives,
    step_work,
)

BYTES = 2  # all of them ran in bfloat16


class Predicted(Protocol):
    """A model whose steps can be predicted. experts: how many a layer has; 0 for a dense model."""

    @property
    def experts(self) -> int: ...

    def step(self, tp_degree: int, tokens: int, context: int) -> Latency: ...


@dataclass(frozen=True)
class OwnModel:
    """A model of this package by its name, with the form of its experts in decode that the figures are of."""

    name: str
    experts_decode: str = "gather"

    @property
    def config(self) -> ModelConfig:
        return published_config(self.name)

    @property
    def experts(self) -> int:
        return self.config.num_local_experts

    def step(self, tp_degree: int, tokens: int, context: int) -> Latency:
        """Return one sequence's step of `tokens` tokens, on one of `tp_degree` ranks."""
        sizes = (self.config, tp_degree, torch.bfloat16, 1, tokens, context)
        return latency(step_work(*sizes, experts_decode=self.experts_decode if tokens == 1 else "kernel"))


@dataclass(frozen=True)
class Model:
    """A transformer's dimensions, by the names of its config.

    linear_layers: the number of `layers` with a recurrence of `value_heads` times head_dim x head_dim float32 entries.
    dense: width of the MLP of layers without experts, and the number of these layers. expert, shared: width of one
    expert, and of the MLP that all tokens take besides. gated: attention's query projection has a gate of its own size.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    linear_layers: int = 0
    key_heads: int = 16
    value_heads: int = 0
    linear_head_dim: int = 128
    dense: int = 0
    dense_layers: int | None = None
    experts: int = 0
    top_k: int = 0
    expert: int = 0
    shared: int = 0
    gated: bool = False

    def weights(self, tokens: int) -> tuple[float, float]:
        """Return the entries of all matrices that multiply a token, except the head's, and the entries that a step
        reads.
        """
        full = self.layers - self.linear_layers
        query = self.heads * self.head_dim
        attention = self.hidden * ((3 if self.gated else 2) * query + 2 * self.kv_heads * self.head_dim)
        inner = self.value_heads * self.linear_head_dim
        linear = self.hidden * (2 * self.key_heads * self.linear_head_dim + 3 * inner)
        dense_layers = self.layers if self.dense_layers is None else self.dense_layers
        expert_layers = self.layers - dense_layers if self.experts else 0
        always = full * attention + self.linear_layers * linear + dense_layers * 3 * self.hidden * self.dense
        always += expert_layers * self.hidden * (3 * self.shared + self.experts)
        expert = 3 * self.hidden * self.expert
        chosen = self.experts * (1 - (1 - self.top_k / self.experts) ** tokens) if self.experts else 0
        return always + expert_layers * self.top_k * expert, always + expert_layers * chosen * expert

    def live_set(self, tp_degree: int, tokens: int) -> LiveSet:
        """Estimate the live set of a prompt's graph on one rank."""
        full = self.layers - self.linear_layers
        query, keys = self.heads * self.head_dim, self.key_heads * self.linear_head_dim
        inner = self.value_heads * self.linear_head_dim
        dense_layers = self.layers if self.dense_layers is None else self.dense_layers
        # Each has an operand, a result, and a number of layers. An operand of hidden states is not split.
        first = {
            "attention": ((2 if self.gated else 1) * query + 2 * self.kv_heads * self.head_dim, query, full),
            "recurrence": (2 * keys + 2 * inner, inner, self.linear_layers),
            "MLP": (2 * self.dense, self.dense, dense_layers),
            "shared expert": (2 * self.shared, self.shared, self.layers - dense_layers),
        }
        products = []
        for name, (result, width, layers) in first.items():
            if result and layers:
                result, width = -(-result // tp_degree), -(-width // tp_degree)
                products.append(Product(f"{name}'s first", self.hidden, result, result, layers))
                products.append(Product(f"{name}'s last", width, self.hidden, self.hidden, layers))
        if self.experts:
            width = 2 * self.expert // tp_degree
            layers = self.layers - dense_layers
            products.append(Product("experts' first", self.hidden, width + self.hidden, self.top_k * width, layers))
        return live_set_of(products, self.hidden, BYTES, tokens)

    def step(self, tp_degree: int, tokens: int, context: int) -> Latency:
        """Return one sequence's step of `tokens` tokens, on one of `tp_degree` ranks."""
        multiplied, read = self.weights(tokens)
        parts = PARTS_OF_LAYER * self.layers
        head = self.hidden * self.vocabulary
        state = self.linear_layers * self.value_heads * self.linear_head_dim**2 * 4
        key_values = (self.layers - self.linear_layers) * 2 * self.kv_heads * self.head_dim * BYTES
        seen = tokens * context + tokens * (tokens + 1) / 2
        scores = 4 * (self.layers - self.linear_layers) * seen * self.heads * self.head_dim
        return latency(
            Work(
                flops=(2 * tokens * multiplied + 2 * head + scores) / tp_degree,
                bytes_accessed=((read + head) * BYTES + 2 * state) / tp_degree
                + key_values * (context + tokens) / min(tp_degree, self.kv_heads)
                + self.live_set(tp_degree, tokens).moved,
                vector_elements=0.0,
                link_bytes=link_bytes(parts, tokens, self.hidden, tp_degree, BYTES),
                collectives=num_collectives(parts, tp_degree),
                layers=self.layers,
            )
        )


@dataclass(frozen=True)
class Source:
    """Where a figure is published. date: the day of its branch or page, as far as known, and else of reading it."""

    where: str
    date: str

    def __str__(self) -> str:
        return f"{self.where}, {self.date}"


@dataclass(frozen=True)
class Published:
    """A figure in milliseconds.

    tokens: tokens of the step, padded to a prompt's bucket; 1 for a token of the continuation. context: tokens before
    them.
    """

    name: str
    model: Predicted
    tp_degree: int
    tokens: int
    milliseconds: float
    source: Source
    context: int = 0

    def step(self) -> Latency:
        return self.model.step(self.tp_degree, self.tokens, self.context)

    @property
    def ratio(self) -> float:
        """The predicted time, as a multiple of the published one."""
        return self.step().predicted * 1000 / self.milliseconds


def _qwen35(layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, **mlp: int) -> Model:
    return Model(
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim=256,
        vocabulary=248320,
        linear_layers=layers * 3 // 4,
        value_heads=value_heads,
        gated=True,
        **mlp,
    )


QWEN35_2B = _qwen35(24, 2048, 8, 2, 16, dense=6144)
QWEN35_4B = _qwen35(32, 2560, 16, 4, 32, dense=9216)
QWEN35_9B = _qwen35(32, 4096, 16, 4, 32, dense=12288)
QWEN35_27B = _qwen35(64, 5120, 24, 4, 48, dense=17408)
QWEN35_35B = _qwen35(40, 2048, 16, 2, 32, dense_layers=0, experts=256, top_k=8, expert=512, shared=512)
CODER_NEXT = Model(
    48, 2048, 16, 2, 256, 151936, 36, value_heads=32, gated=True,
    dense_layers=0, experts=512, top_k=10, expert=512, shared=512,
)  # fmt: skip
TRINITY_NANO = Model(
    56, 1024, 8, 2, 128, 200192, gated=True, dense=3072, dense_layers=2, experts=128, top_k=8, expert=256, shared=256
)
TRINITY_MINI = Model(
    32, 2048, 32, 4, 128, 200192, gated=True, dense=6144, dense_layers=2, experts=128, top_k=8, expert=1024, shared=1024
)
# Mamba-2 layers: 128 heads of 64 x 128 entries, counted as 64 heads of 128 x 128.
H_SMALL = Model(
    40, 4096, 32, 8, 128, 100352, 36, key_heads=1, value_heads=64,
    dense_layers=0, experts=72, top_k=10, expert=768, shared=1536,
)  # fmt: skip

NEMOTRON_NANO = OwnModel("nemotron-3-nano-30b-a3b")
NEMOTRON_NANO_ALL = OwnModel("nemotron-3-nano-30b-a3b", experts_decode="all")

# The models' dimensions, as published.
LLAMA_70B = Model(80, 8192, 64, 8, 128, 128256, dense=28672)
LLAMA_405B = Model(126, 16384, 128, 8, 128, 128256, dense=53248)
QWEN3_32B = Model(64, 5120, 64, 8, 128, 151936, dense=25600)

NXDI = "https://github.com/aws-neuron/neuronx-distributed-inference"
QWEN35 = Source(f"{NXDI}, contrib/models/Qwen3.5-35B-A3B", "read 2026-11-22")
TRINITY = Source(f"{NXDI}, contrib/models/Trinity", "read 2026-11-22")
NEMOTRON = Source(f"{NXDI}, contrib model of Nemotron 3 Nano, SDK 2.29", "2026-04-12")
NEMOTRON_ALL = Source(f"{NXDI}, contrib model of Nemotron 3 Nano, SDK 2.28", "2026-04-12")
H_SMALL_PORT = Source(f"{NXDI}/pull/69, SDK 2.28", "2026-04-14")
CODER_NEXT_PORT = Source(f"{NXDI}/pull/170", "read 2026-11-22")
PLUGIN = Source("https://github.com/vllm-project/vllm-neuron, examples/vllm_neuron/models/qwen3_5", "read 2026-11-28")


def _tutorial(name: str) -> Source:
    return Source(f"https://awsdocs-neuron.readthedocs-hosted.com, tutorial {name}", "read 2026-11-22")


FIGURES = (
    Published("Qwen3.5-2B", QWEN35_2B, 8, 1, 4.00, QWEN35),
    Published("Qwen3.5-4B", QWEN35_4B, 8, 1, 5.68, QWEN35),
    Published("Qwen3.5-9B", QWEN35_9B, 8, 1, 6.89, QWEN35),
    Published("Qwen3.5-27B", QWEN35_27B, 8, 1, 21.58, QWEN35),
    Published("Qwen3.5-35B-A3B", QWEN35_35B, 8, 1, 7.4, QWEN35),
    Published("Qwen3-Coder-Next 80B-A3B", CODER_NEXT, 8, 1, 13.0, CODER_NEXT_PORT),
    Published("Trinity-Nano", TRINITY_NANO, 4, 1, 9.2, TRINITY),
    Published("Trinity-Mini", TRINITY_MINI, 4, 1, 11.8, TRINITY),
    Published("granite-4.0-h-small", H_SMALL, 4, 1, 50.3, H_SMALL_PORT),
    Published("Llama-3.3-70B", LLAMA_70B, 64, 1, 19.8, _tutorial("trn2-llama3.3-70b"), 10_000),
    Published("Llama-3.1-405B", LLAMA_405B, 64, 1, 37.9, _tutorial("trn2-llama3.1-405b-speculative"), 10_000),
    # 102.3 tokens per second, counting all tokens of a request.
    Published("Qwen3-32B", QWEN3_32B, 64, 1, 9.8, _tutorial("sd-inference"), 400),
    Published("Qwen3.5-2B", QWEN35_2B, 4, 1, 3.88, PLUGIN),
    Published("Qwen3.5-35B-A3B", QWEN35_35B, 4, 1, 36.2, PLUGIN),
    Published("nemotron-3-nano-30b-a3b", NEMOTRON_NANO, 4, 1, 13.5, NEMOTRON),
    Published("nemotron-3-nano-30b-a3b, all experts", NEMOTRON_NANO_ALL, 4, 1, 57.5, NEMOTRON_ALL),
    Published("Qwen3.5-2B", QWEN35_2B, 8, 512, 17.6, QWEN35),
    Published("Qwen3.5-4B", QWEN35_4B, 8, 512, 34.6, QWEN35),
    Published("Qwen3.5-9B", QWEN35_9B, 8, 512, 42.9, QWEN35),
    Published("Qwen3.5-27B", QWEN35_27B, 8, 512, 118.6, QWEN35),
    Published("Qwen3.5-35B-A3B", QWEN35_35B, 8, 512, 480.0, QWEN35),
    Published("Qwen3.5-27B", QWEN35_27B, 4, 512, 255.9 / 2, PLUGIN),
    Published("Qwen3.5-27B", QWEN35_27B, 4, 1024, 249.5, PLUGIN),
    Published("Qwen3.5-27B", QWEN35_27B, 4, 2048, 789.0, PLUGIN),
    Published("Qwen3-Coder-Next 80B-A3B", CODER_NEXT, 8, 128, 1235.0, CODER_NEXT_PORT),
    Published("Qwen3-Coder-Next 80B-A3B", CODER_NEXT, 8, 512, 3471.0, CODER_NEXT_PORT),
    Published("Qwen3.5-2B", QWEN35_2B, 4, 1024, 145.0, PLUGIN),
    Published("nemotron-3-nano-30b-a3b", NEMOTRON_NANO, 4, 128, 211.0, NEMOTRON),
    Published("nemotron-3-nano-30b-a3b", NEMOTRON_NANO, 4, 512, 608.0, NEMOTRON),
    Published("granite-4.0-h-small", H_SMALL, 4, 128, 717.0, H_SMALL_PORT),
    Published("Llama-3.3-70B", LLAMA_70B, 64, 10_240, 575.6, _tutorial("trn2-llama3.3-70b")),
    Published("Llama-3.1-405B", LLAMA_405B, 64, 10_240, 2442.0, _tutorial("trn2-llama3.1-405b-speculative")),
    Published("Qwen3-32B", QWEN3_32B, 64, 128, 48.3, _tutorial("sd-inference")),
)
TOKENS = tuple(figure for figure in FIGURES if figure.tokens == 1)
FIRST_TOKENS = tuple(figure for figure in FIGURES if figure.tokens > 1)


def of_model(config: ModelConfig) -> tuple[Published, ...]:
    """Return the figures of a model of this package."""
    names = {figure.name: published_name(figure.name.partition(",")[0]) for figure in FIGURES}
    own = {name for name, whole in names.items() if whole is not None and published_config(whole) == config}
    return tuple(figure for figure in FIGURES if figure.name in own)


@dataclass(frozen=True)
class Range:
    """The least and the largest published time, as multiples of the predicted one."""

    least: float
    most: float

    def of(self, seconds: float) -> str:
        """Return the range around a prediction, in milliseconds."""
        return f"{_rounded(seconds * 1e3 * self.least)} to {_rounded(seconds * 1e3 * self.most)}"

    def __str__(self) -> str:
        return f"{self.least:.1f} to {_rounded(self.most)} times"


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def held(config: ModelConfig, figures: Sequence[Published]) -> Range:
    """Return the range that has held for predictions of such models: of those with experts, or of those without."""
    has_experts = bool(config.num_local_experts)
    multiples = [1 / figure.ratio for figure in figures if bool(figure.model.experts) == has_experts]
    return Range(min(multiples), max(multiples))


def beside(config: ModelConfig) -> str:
    """Return what published times of such models are beside their predictions."""
    kind = "with experts" if config.num_local_experts else "without experts"
    of_first, of_tokens = held(config, FIRST_TOKENS), held(config, TOKENS)
    return (
        f"published times of models {kind} are {of_first} the prediction to the first token and {of_tokens} per token"
    )
