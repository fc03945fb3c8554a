"""The graphs that a Trainium would get, traced from NxD Inference's device code path at real sizes. Nothing is run."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch

from granite4_neuron.commands.cli import main
from granite4_neuron.config import ATTENTION, MAMBA, published_config
from granite4_neuron.devices.graphs.moe import MOST_GATHERED
from granite4_neuron.devices.neuron.sdk import KERNELS
from granite4_neuron.planning.analysis.hlo_cost import parameter_numbers
from granite4_neuron.planning.analysis.hlo_lint import findings, instructions
from test.support import nxdi

pytestmark = pytest.mark.versions

# Family members, each cut to one layer of every kind it has, and the parts that tell them apart.
MODELS = {"h-small": "experts", "h-micro": "dense", "micro": "attention only"}
CONTEXT_BUCKETS, CACHE_BUCKETS = [128, 512], [1024, 2048]
FLASH_ATTENTION = "attention_cte"


@pytest.fixture(scope="module", autouse=True)
def device_code_path():
    nxdi.skip_unless_importable()
    before = os.environ.get("NXD_CPU_MODE")
    os.environ.pop("NXD_CPU_MODE", None)
    # torch_xla reads this once, at its first collective; `compile` sets it from neuron_config.disable_numeric_cc_token.
    os.environ["DISABLE_NUMERIC_CC_TOKEN"] = "1"
    yield
    if before is not None:
        os.environ["NXD_CPU_MODE"] = before


def one_layer_of_each_kind(name, folder):
    values = published_config(name).to_dict()
    values["layer_types"] = [kind for kind in (MAMBA, ATTENTION) if kind in values["layer_types"]]
    values["num_hidden_layers"] = len(values["layer_types"])
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def application(folder, tp_degree=4, batch_size=1, config_options=None, **options):
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

    config = config_of(folder, tp_degree, batch_size, config_options, **options)
    return NeuronGraniteMoeHybridForCausalLM(str(folder), config)


def config_of(folder, tp_degree, batch_size, config_options=None, **options):
    values = dict(
        tp_degree=tp_degree,
        batch_size=batch_size,
        ctx_batch_size=1,
        is_continuous_batching=batch_size > 1,
        max_context_length=CONTEXT_BUCKETS[-1],
        seq_len=CACHE_BUCKETS[-1],
        torch_dtype="bfloat16",
        on_cpu=False,
        enable_bucketing=True,
        context_encoding_buckets=CONTEXT_BUCKETS,
        token_generation_buckets=CACHE_BUCKETS,
        logical_nc_config=2,
    )
    return nxdi.make_config(folder, config_options, **{**values, **options})


def fused_application(name, draft, folder, tp_degree, batch_size):
    from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig

    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM
    from granite4_neuron.devices.neuron.nxdi.speculative_model import SpeculativeModel

    options = dict(on_device_sampling_config=dict(do_sample=False))
    configs = []
    for each, speculation in ((draft, {}), (name, dict(speculation_length=4, enable_fused_speculation=True))):
        (folder / each).mkdir()
        one = one_layer_of_each_kind(each, folder / each)
        configs.append(config_of(one, tp_degree, batch_size, **options, **speculation))
    draft_config, config = configs
    config.fused_spec_config = FusedSpecNeuronConfig(SpeculativeModel, draft_config, str(folder / draft))
    return NeuronGraniteMoeHybridForCausalLM(str(folder / name), config)


def trace(app, kind, bucket):
    from granite4_neuron.devices.neuron.nxdi.trace import trace

    return trace(app, getattr(app, kind), bucket)


def hlo_text(traced):
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo(traced.outputs)


def sdk_custom_calls(text):
    """Return the names of custom calls that only the Neuron SDK has."""
    calls = [instruction for instruction in instructions(text).values() if instruction.opcode == "custom-call"]
    return sorted(call.attributes.split('custom_call_target="')[1].split('"')[0] for call in calls)


def check_state(traced, expected_to_pass=0):
    """Check that the aliases given to the compiler pair each state tensor with its own new value.

    The pairs are compared with the graph itself: the new value has the old one's shape and dtype and depends on it. It
    may depend on other state too, but the path on which every tensor is as large as the state leads to the old value.
    """
    # Placeholders have no values for pytest to print, so the comparison uses printable ones.
    first, count = len(traced.results), len(traced.states)
    aliases, total = traced.aliases, len(traced.outputs)
    assert aliases == list(range(first, first + count))
    assert total == first + count
    before = [(tuple(state.shape), state.dtype) for state in traced.states]
    after = [(tuple(traced.outputs[output].shape), traced.outputs[output].dtype) for output in aliases]
    assert before == after
    module = instructions(hlo_text(traced))
    root = next(instruction for instruction in reversed(module.values()) if instruction.opcode == "tuple")
    passed_through = sum(module[root.operands[output]].opcode == "parameter" for output in aliases)
    assert passed_through == expected_to_pass
    parameters = parameter_numbers(traced.outputs, traced.states)
    for parameter, output in zip(parameters, aliases, strict=True):
        name = root.operands[output]
        assert parameter in parameters_of(module, name)
        assert not parameters_of(module, name, math.prod(module[name].shapes[0][1])) & (set(parameters) - {parameter})


def parameters_of(module, name, size=None):
    """Return the numbers of the parameters that a value is made of; with `size`, through tensors of that size only."""
    names, found = [name], {name}
    while names:
        for operand in module[names.pop()].operands:
            sizes = [math.prod(dimensions) for _, dimensions in module[operand].shapes]
            if operand not in found and (size is None or size in sizes):
                found.add(operand)
                names.append(operand)
    return {module[each].parameter for each in found} - {None}


GRAPHS = [
    ("context_encoding_model", 128),
    ("context_encoding_model", 512),
    ("prefill_continuation_model", 1024),
    ("prefill_continuation_model", 2048),
    ("token_generation_model", 1024),
    ("token_generation_model", 2048),
]


@pytest.mark.parametrize(("kind", "bucket"), GRAPHS)
@pytest.mark.parametrize(("tp_degree", "batch_size"), [(1, 1), (4, 1), (4, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_graph(name, tp_degree, batch_size, kind, bucket, tmp_path):
    app = application(one_layer_of_each_kind(name, tmp_path), tp_degree, batch_size)
    traced = trace(app, kind, bucket)
    check_state(traced)
    text = hlo_text(traced)
    layers = app.config.granite.layer_types.count(ATTENTION)
    reads_all = kind == "token_generation_model" and batch_size > MOST_GATHERED
    found = findings(text, num_experts=app.config.granite.num_local_experts if reads_all else 0)
    assert all("(reduce) is arithmetic on integers of 64 bits" in finding for finding in found)
    # NxD Inference's attention counts the earlier tokens of a continuation.
    assert len(found) == (layers if kind == "prefill_continuation_model" else 0)
    is_flash = kind == "prefill_continuation_model" or (kind, bucket) == ("context_encoding_model", 512)
    assert sdk_custom_calls(text) == [FLASH_ATTENTION] * (layers if is_flash else 0)


@pytest.mark.parametrize("kind", ["context_encoding_model", "token_generation_model"])
def test_swapped_aliases_are_seen(kind, tmp_path):
    app = application(one_layer_of_each_kind("h-micro", tmp_path))
    traced = trace(app, kind, 128 if kind == "context_encoding_model" else 1024)
    check_state(traced)
    *others, key, value = traced.states
    with pytest.raises(AssertionError):
        check_state(replace(traced, states=[*others, value, key]))


@pytest.mark.parametrize(("tp_degree", "batch_size"), [(1, 2), (4, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_graphs_of_slots(name, tp_degree, batch_size, tmp_path):
    """Verification leaves recurrent state as it is, commit has no caches, and a copy writes the whole state."""
    app = application(one_layer_of_each_kind(name, tmp_path), tp_degree, batch_size, speculation_length=4)
    layer_types = app.config.granite.layer_types
    mamba, layers = layer_types.count(MAMBA), len(layer_types)
    for kind, bucket, results, states, unchanged in (
        ("verification_model", 1024, 1 + mamba, 2 * layers, 2 * mamba),
        ("verification_model", 2048, 1 + mamba, 2 * layers, 2 * mamba),
        ("commit_model", 2048, 1, 2 * mamba, 0),
        ("copy_model", 2048, 1, 2 * layers, 0),
    ):
        if kind == "commit_model" and not mamba:
            assert app.commit_model is None
            continue
        traced = trace(app, kind, bucket)
        check_state(traced, unchanged)
        assert (len(traced.results), len(traced.states)) == (results, states)
        text = hlo_text(traced)
        assert findings(text) == [] and sdk_custom_calls(text) == []


@pytest.mark.parametrize(("tp_degree", "batch_size"), [(1, 1), (4, 4)])
@pytest.mark.parametrize(("name", "draft"), [("h-small", "h-350m"), ("h-micro", "350m")])
def test_fused_speculation(name, draft, tp_degree, batch_size, tmp_path):
    """Both models' states have their own outputs, the draft's first. Accepted tokens are found without cumsum or sort.

    NxD finds the largest logit on each rank and then picks one rank's by a gather. The draft's output after its last
    token is not needed. On several ranks it stays in the graph, because collectives have an order.
    """
    app = fused_application(name, draft, tmp_path, tp_degree, batch_size)
    configs = (app.config.fused_spec_config.draft_config.granite, app.config.granite)
    states = sum(2 * len(config.layer_types) for config in configs)
    for kind, bucket, choices, unasked in (
        ("context_encoding_model", 128, 1, 0),
        ("prefill_continuation_model", 1024, 1, 0),
        ("fused_spec_model", 1024, 3 + 1, 1),
        ("fused_spec_model", 2048, 3 + 1, 1),
    ):
        traced = trace(app, kind, bucket)
        check_state(traced)
        assert (len(traced.results), len(traced.states)) == (4, states)
        text = hlo_text(traced)
        # NxD Inference counts tokens, and finds a rank's place among all, in 64 bits.
        found = [finding for finding in findings(text) if "64 bits" not in finding]
        assert len(found) == (choices if tp_degree > 1 else 0)
        assert all("is a gather at places in a sequence" in finding for finding in found)
        choosing = [operator for operator in sdk_custom_calls(text) if operator != FLASH_ATTENTION]
        across_ranks = choices + unasked if tp_degree > 1 else 0
        assert choosing == ["argmax"] * choices + ["cascaded_max"] * across_ranks


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("name", ["h-1b"])
def test_a_verification_costs_little_more_than_decode(name, batch_size):
    """Verifying three drafts costs little more than decode in a dense model. More tokens would read more experts."""
    from granite4_neuron.planning.analysis.nxdi_graphs import report

    config = published_config(name)
    reports = report(config, torch.bfloat16, 4, batch_size, [128], 2048, verified_tokens=4)
    of = {graph.graph.split()[0].rstrip(","): graph.cost.bytes_accessed for graph in reports}
    assert of["verify"] <= 1.5 * of["decode"]
    assert of["commit"] <= 0.6 * of["decode"]


@pytest.mark.parametrize(
    ("do_sample", "expected"), [(False, ["argmax", "cascaded_max"]), (True, ["cumsum"] * 2 + ["topk"] * 2)]
)
def test_sampling_on_the_device(do_sample, expected, tmp_path):
    folder = one_layer_of_each_kind("h-350m", tmp_path)
    app = application(
        folder, on_device_sampling_config=dict(do_sample=do_sample, dynamic=do_sample, deterministic=False)
    )
    traced = trace(app, "token_generation_model", 1024)
    check_state(traced)
    assert sdk_custom_calls(hlo_text(traced)) == expected


def test_kernels_of_this_package(tmp_path):
    kernels = dict(prefill_scan="ssd", decode_kernel="nki", expert_path="nki")
    folder = one_layer_of_each_kind("h-small", tmp_path)
    app = application(folder, batch_size=4, config_options=kernels, speculation_length=4)
    for kind, bucket, expected in (
        ("context_encoding_model", 128, ["experts_decode", "experts_decode", "mamba_prefill"]),
        ("context_encoding_model", 512, [FLASH_ATTENTION, "experts_prefill", "experts_prefill", "mamba_prefill"]),
        ("token_generation_model", 1024, ["experts_decode", "experts_decode", "mamba_decode"]),
        ("verification_model", 1024, ["experts_decode", "experts_decode", "mamba_decode"]),
        ("commit_model", 2048, ["mamba_decode"]),
    ):
        traced = trace(app, kind, bucket)
        check_state(traced, expected_to_pass=2 if kind == "verification_model" else 0)
        text = hlo_text(traced)
        assert findings(text) == []
        assert sdk_custom_calls(text) == expected


def test_the_kernel_moves_states_no_more_than_necessary():
    """Verifying four tokens writes no state and moves no more than decoding one. A commit moves little but states."""
    from granite4_neuron.planning.analysis.nxdi_graphs import report

    config = published_config("h-1b")
    config = replace(config, layer_types=(MAMBA,) * 2, num_hidden_layers=2)
    kernels = dict(prefill_scan="ssd", decode_kernel="nki")
    mixers, states = [], []
    for state_dtype in ("float32", "bfloat16"):
        graphs = report(
            config, torch.bfloat16, 4, 8, [128], 256, dict(kernels, state_dtype=state_dtype), verified_tokens=4
        )
        of = {graph.graph.split()[0].rstrip(","): graph for graph in graphs}
        mixers.append({name: of[name].components[MAMBA].bytes_accessed for name in ("decode", "verify")})
        states.append(of["decode"].state_bytes)
        assert of["commit"].bytes_ratio < 1.1
    assert mixers[0]["verify"] <= mixers[0]["decode"]
    saved = states[0] - states[1]
    assert mixers[0]["decode"] - mixers[1]["decode"] == pytest.approx(2 * saved)
    assert mixers[0]["verify"] - mixers[1]["verify"] == pytest.approx(saved)


EXPERT_KERNELS = {
    "blockwise_mm_baseline_shard_intermediate_hybrid": dict(
        use_shard_on_intermediate_dynamic_while=True, block_size=256
    ),
    "bwmm_shard_on_block": dict(use_shard_on_block_dynamic_while=True, block_sharding_strategy="PING_PONG"),
}


@pytest.mark.parametrize("kernel", EXPERT_KERNELS)
def test_expert_kernels_of_nxd(kernel, tmp_path):
    folder = one_layer_of_each_kind("h-small", tmp_path)
    app = application(folder, config_options={"expert_path": "nxd"}, blockwise_matmul_config=EXPERT_KERNELS[kernel])
    traced = trace(app, "context_encoding_model", 128)
    check_state(traced)
    assert sdk_custom_calls(hlo_text(traced)) == [kernel] * 2


def test_expert_path_nxd_needs_no_further_option(tmp_path, monkeypatch):
    """This package chooses a kernel that the SDK has. NxD's default is not in the SDK."""
    from granite4_neuron.devices.neuron.nxdi import config

    folder = one_layer_of_each_kind("h-small", tmp_path)
    options = dict(max_context_length=2048, context_encoding_buckets=[2048], token_generation_buckets=[4096])
    options |= dict(config_options={"expert_path": "nxd"}, seq_len=4096)
    traced = trace(application(folder, **options), "context_encoding_model", 2048)
    kernels = [call for call in sdk_custom_calls(hlo_text(traced)) if call != FLASH_ATTENTION]
    assert kernels == ["blockwise_mm_baseline_shard_intermediate_hybrid"] * 2
    monkeypatch.setattr(config, "_choose_kernel_of_nxd", lambda neuron_config: None)
    with pytest.raises(NotImplementedError, match="_call_shard_hidden_kernel is not available"):
        trace(application(folder, **options), "context_encoding_model", 2048)


def test_components_are_traced_alone(tmp_path):
    from granite4_neuron.devices.neuron.nxdi.trace import trace

    app = application(one_layer_of_each_kind("h-small", tmp_path))
    traced = trace(app, app.token_generation_model, 1024, with_components=True)
    names = set(traced.components)
    assert names == {
        "embed_tokens",
        "layers.0.mamba",
        "layers.1.self_attn",
        *(f"layers.{layer}.{part}" for layer in (0, 1) for part in ("block_sparse_moe", "shared_mlp")),
        "lm_head",
    }
    dtypes = [tensor.dtype for tensor in traced.components["layers.0.mamba"]]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]  # the layer's output, conv_state, ssm_state


def test_command(tmp_path, capsys):
    file = tmp_path / "graphs.json"
    arguments = [
        "--model",
        "h-350m",
        "--tp-degree",
        "4",
        "--buckets",
        "128",
        "--max-length",
        "256",
        "--kernels",
        "torch",
        "nki",
        "--json",
        str(file),
    ]
    assert main(["graphs", "--backend", "nxdi", *arguments]) == 0
    assert "context 128" in capsys.readouterr().out
    reports = json.loads(file.read_text())
    context, continuation, decode = reports[:3]
    assert [report["kernels"] for report in reports] == [KERNELS[name] for name in ("torch", "nki") for _ in range(3)]
    assert all(ours["graph"] == torchs["graph"] for torchs, ours in zip(reports[:3], reports[3:], strict=True))
    assert reports[5]["cost"]["instructions"] < decode["cost"]["instructions"]
    assert [graph["graph"] for graph in (context, continuation, decode)] == [
        "context 128",
        "continuation 128",
        "decode, batch 1",
    ]
    for graph in (context, continuation, decode):
        parts = graph["components"].values()
        assert sum(part["bytes_accessed"] for part in parts) == pytest.approx(graph["cost"]["bytes_accessed"])
        assert graph["minimum"]["flops"] < graph["cost"]["flops"] < 1.2 * graph["minimum"]["flops"]
        assert graph["temporary_bytes"] > 0 and graph["findings"] == []
