"""Memory that loaded graphs take besides tensors: a core's microcode, and each graph's code, rings and collectives.

The Neuron SDK's page on device memory (neuron-runtime/explore/device-memory) names these parts, and says how many bytes
microcode takes. It has no figures for language models. So a graph's figures are estimates from reports of the Neuron
runtime for other models on a Trainium2, summed over the two physical cores of a logical one:

* Qwen3-8B in bfloat16 on one rank, with 15.1 GB of weights (github.com/omersajid9/trn2-rl-rollout, "Per NEFF memory
  usage breakdown" in the logs). A graph for one token has 126 MiB of code, 4 of constants and the runtime's data, and
  12 of rings. 53 graphs for prompts have 20 to 97 MiB of code, and 8 to 100 of rings, but four of them 289 to 620.
* GLM-5.3-Flash, which has experts, on 64 ranks, with 45 layers (github.com/jinhuang12/vllm-neuron,
  test/vllm_neuron/worker). A graph for 1,024 tokens of a prompt has 165 MiB of code and constants, and 49 of rings. One
  for one token has 71 KiB for collectives.

Temporaries are not included: all graphs share one scratchpad, as large as the largest that any of them needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from granite4_neuron.config import ModelConfig
from granite4_neuron.devices.neuron.compiled_graphs import (
    COMMIT,
    CONTEXT,
    CONTINUATION,
    COPY,
    DRAW,
    EMBEDDING,
    HEAD,
    LAYER,
    CompiledGraph,
)
from granite4_neuron.devices.neuron.sdk import LOGICAL_CORE_SIZE

_MEBIBYTE = 2**20  # the runtime prints it as MB

# "A micro-code overhead of 96MB per physical Neuron Core (this overhead is subject to future improvements)": the page
# on device memory. It is at most that: in the first of the logs it is 2 MiB.
MICROCODE_BYTES = LOGICAL_CORE_SIZE * 96 * _MEBIBYTE
# Bytes for a step, per byte of a rank's weights, and for some tokens of a prompt, per mixer or feed-forward part. A
# layer of GLM has both.
_STEP_CODE, _STEP_RINGS = ((126 + 4) * _MEBIBYTE / 15.1e9, 12 * _MEBIBYTE / 15.1e9)
_PROMPT_CODE, _PROMPT_RINGS = (165 * _MEBIBYTE / 90, 49 * _MEBIBYTE / 90)
_COLLECTIVES = 71 * 2**10
# Upper limit for all graphs of a model, as a multiple of the estimate. In the first of the logs, graphs for prompts
# would take 1.4 times the estimate if each had the largest figures given there. Each other graph has one report.
GRAPHS_AT_MOST = 2


@dataclass(frozen=True)
class GraphMemory:
    """Bytes that a graph's NEFF takes on a logical core: its code with constants, its rings of DMA descriptors, and
    what its collectives need.
    """

    graph: CompiledGraph
    code: int
    dma_rings: int
    collectives: int

    @property
    def total(self) -> int:
        return self.code + self.dma_rings + self.collectives


def graph_memory(graph: CompiledGraph, config: ModelConfig, weights: int, tp_degree: int) -> GraphMemory:
    """Estimate the memory of a graph.

    Args:
        config: the model's.
        weights: bytes on a rank that the graph reads. A graph that reads no layer's weights has hardly any code.
    """
    if graph.kind in (COMMIT, COPY, EMBEDDING, HEAD, DRAW):
        return GraphMemory(graph, 0, round(weights * _STEP_RINGS), 0)
    collectives = _COLLECTIVES if tp_degree > 1 else 0
    if graph.kind in (CONTEXT, CONTINUATION, LAYER):
        parts = config.num_parts if graph.layer_type is None else config.parts(graph.layer_type).count
        return GraphMemory(graph, round(parts * _PROMPT_CODE), round(parts * _PROMPT_RINGS), collectives)
    return GraphMemory(graph, round(weights * _STEP_CODE), round(weights * _STEP_RINGS), collectives)
