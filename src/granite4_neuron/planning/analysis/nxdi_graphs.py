"""The cost of the graphs that NxD Inference compiles for a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig
from granite4_neuron.devices.neuron.nxdi.application import NeuronGraniteMoeHybridForCausalLM
from granite4_neuron.devices.neuron.nxdi.config import GraniteMoeHybridInferenceConfig
from granite4_neuron.devices.neuron.nxdi.trace import Trace, trace
from granite4_neuron.devices.neuron.sdk import LOGICAL_CORE_SIZE
from granite4_neuron.planning.analysis.graphs import (
    EMBEDDING,
    EXPERTS,
    HEAD,
    SHARED_MLP,
    GraphReport,
    Traced,
    graph_report,
)
from granite4_neuron.planning.analysis.hlo_cost import hlo_proto, parameter_numbers
from granite4_neuron.planning.analysis.roofline import Minimum, minimum, minimum_of_commit, minimum_of_copy

# Modules of the traced model, with the names of their components.
_COMPONENTS = {
    "mamba": MAMBA,
    "self_attn": ATTENTION,
    "block_sparse_moe": EXPERTS,
    "shared_mlp": SHARED_MLP,
    "embed_tokens": EMBEDDING,
    "lm_head": HEAD,
}


def report(
    config: ModelConfig,
    dtype: torch.dtype,
    tp_degree: int,
    batch_size: int,
    buckets: Sequence[int],
    max_length: int,
    choices: Mapping[str, str] = {},
    verified_tokens: int | None = None,
) -> Iterator[GraphReport]:
    """Report context encoding of one prompt per bucket, its continuation over the whole cache, and decode of all rows.

    With speculation also verification of all rows and its commit; with several rows the copy of a slot.

    Args:
        config, dtype: the model.
        tp_degree: ranks; the graphs are those of one of them.
        batch_size: sequences that decode takes.
        buckets: tokens of the context encoding graphs, ascending.
        max_length: of the cache.
        choices: prefill_scan, decode_kernel, expert_path and state_dtype, see `GraniteMoeHybridInferenceConfig`.
        verified_tokens: tokens of each sequence in a verification, the last one and drafts; None for no such graphs.

    Raises:
        ToolsMissing: jax is not installed.
        UserError: tp_degree does not divide the model.
    """
    state_dtype = getattr(torch, choices.get("state_dtype", "float32"))
    neuron_config = dict(
        tp_degree=tp_degree,
        batch_size=batch_size,
        ctx_batch_size=1,
        is_continuous_batching=batch_size > 1 or verified_tokens is not None,
        speculation_length=verified_tokens or 0,
        max_context_length=buckets[-1],
        seq_len=max_length,
        torch_dtype=dtype,
        enable_bucketing=True,
        context_encoding_buckets=list(buckets),
        token_generation_buckets=[max_length],
        logical_nc_config=LOGICAL_CORE_SIZE,
    )

    def graph(name: str, kind: str, bucket: int, rows: int, tokens: int, least: Minimum | None = None) -> GraphReport:
        def traced(layer_types: Sequence[str]) -> Traced:
            layers = replace(config, layer_types=tuple(layer_types), num_hidden_layers=len(layer_types))
            application = _application(layers, neuron_config, choices)
            return _traced(trace(application, getattr(application, kind), bucket, with_components=True), layer_types)

        if least is not None:
            return graph_report(name, config, traced, least)
        verifies = kind == "verification_model"
        context = bucket - tokens
        least = minimum(config, tp_degree, dtype, rows, tokens, context, verifies=verifies, state_dtype=state_dtype)
        experts = config.num_local_experts if kind == "token_generation_model" else 0
        reported = graph_report(name, config, traced, least, experts)
        is_of_prompt = kind in ("context_encoding_model", "prefill_continuation_model")
        return replace(
            reported,
            notes=(*application.config.notes(rows * tokens), *reported.notes),
            prompt_tokens=rows * tokens if is_of_prompt else None,
        )

    application = _application(config, neuron_config, choices)
    for bucket in buckets:
        yield graph(f"context {bucket}", "context_encoding_model", bucket, 1, bucket)
    if application.prefill_continuation_model is not None:
        tokens = application.prefill_continuation_model.neuron_config.n_active_tokens
        yield graph(f"continuation {tokens}", "prefill_continuation_model", max_length, 1, tokens)
    yield graph(f"decode, batch {batch_size}", "token_generation_model", max_length, batch_size, 1)
    where = f"batch {batch_size}"
    if verified_tokens is not None:
        name = f"verify {verified_tokens}, {where}"
        yield graph(name, "verification_model", max_length, batch_size, verified_tokens)
        if application.commit_model is not None:
            least = minimum_of_commit(config, tp_degree, dtype, batch_size, verified_tokens, state_dtype=state_dtype)
            yield graph(f"commit {verified_tokens}, {where}", "commit_model", max_length, batch_size, 0, least)
    if application.copy_model is not None:
        least = minimum_of_copy(config, tp_degree, dtype, max_length, state_dtype=state_dtype)
        yield graph(f"copy of a slot, {where}", "copy_model", max_length, 1, 0, least)


def _application(
    config: ModelConfig, neuron_config: Mapping[str, object], choices: Mapping[str, str]
) -> NeuronGraniteMoeHybridForCausalLM:
    """Make an application without a checkpoint: a graph has no weights."""
    config_class = GraniteMoeHybridInferenceConfig
    options = config_class.get_neuron_config_cls()(**neuron_config)
    return NeuronGraniteMoeHybridForCausalLM("", config_class(options, **config.to_dict(), **choices))


def _traced(traced: Trace, layer_types: Sequence[str]) -> Traced:
    donated = zip(parameter_numbers(traced.outputs, traced.states), traced.aliases, strict=True)
    components: dict[tuple[str, str | None], bytes] = {}
    for name, outputs in traced.components.items():
        layer, _, module = name.rpartition(".")  # such as layers.0; none outside of layers
        layer_type = layer_types[int(layer.removeprefix("layers."))] if layer else None
        components.setdefault((_COMPONENTS[module], layer_type), hlo_proto(outputs))
    return Traced(
        hlo_proto(traced.outputs),
        donated=dict(donated),
        components=components,
        weight_bytes=traced.weight_bytes,
        state_bytes=sum(state.nbytes for state in traced.states),
    )
