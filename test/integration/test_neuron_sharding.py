"""Each rank's weights from NxD: shapes at the family's real sizes, values of small checkpoints. Nothing is run."""

import json
from pathlib import Path

import pytest
import torch

from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig, config_from_file, published_config
from granite4_neuron.errors import UserError
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.model.families import model_of
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.state.hybrid_state import HybridState
from test.support import nxdi
from test.support.checkpoints import CASES, granite_names, small_config

pytestmark = pytest.mark.versions

DEGREES = (1, 2, 4, 8, 16, 32, 64)
NEURON_NAMES = {  # our name: (NxD Inference's name, whether it stores the weight transposed)
    "self_attn.q_proj": ("self_attn.qkv_proj.q_proj", False),
    "self_attn.k_proj": ("self_attn.qkv_proj.k_proj", False),
    "self_attn.v_proj": ("self_attn.qkv_proj.v_proj", False),
    "self_attn.o_proj": ("self_attn.o_proj.o_proj", False),
    "block_sparse_moe.input_linear": ("block_sparse_moe.expert_mlps.mlp_op.gate_up_proj", True),
    "block_sparse_moe.output_linear": ("block_sparse_moe.expert_mlps.mlp_op.down_proj", True),
}


@pytest.fixture(scope="module", autouse=True)
def nxd_inference():
    nxdi.skip_unless_importable()


def neuron_name(name: str) -> tuple[str, bool]:
    """Return NxD Inference's name of our parameter, and whether it stores the weight transposed."""
    name = name.removeprefix("model.")
    for ours, (theirs, is_transposed) in NEURON_NAMES.items():
        if f".{ours}." in name:
            return name.replace(ours, theirs), is_transposed
    return name, False


def compared(parallel_model: HybridForCausalLM, theirs: dict[str, torch.Tensor]):
    """Yield (name, a rank's parameter of ours, NxD's) for all except the embedding, which NxD splits by columns."""
    for name, parameter in parallel_model.named_parameters():
        if name != "model.embed_tokens.weight":
            their_name, is_transposed = neuron_name(name)
            yield name, parameter.transpose(1, 2) if is_transposed else parameter, theirs[their_name]


def one_layer_of_each_kind(name: str, folder: Path) -> ModelConfig:
    """Write a family member's config to a folder, with only its first Mamba and its first attention layer."""
    values = published_config(name).to_dict()
    values["layer_types"] = [kind for kind in (MAMBA, ATTENTION) if kind in values["layer_types"]]
    values["num_hidden_layers"] = len(values["layer_types"])
    (folder / "config.json").write_text(json.dumps(values))
    return config_from_file(folder / "config.json")


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", granite_names())
def test_shapes_of_a_rank(name, degree, tmp_path):
    """Shapes of weights and state match, or one sentence names the degrees that do divide the model."""
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

    granite = one_layer_of_each_kind(name, tmp_path)
    try:
        granite.rank_dimensions(degree)
    except UserError as refusal:
        assert degree not in (1, 2)
        with pytest.raises(UserError, match="this model can be split by 1, 2") as refused:
            nxdi.make_config(tmp_path, tp_degree=degree)
        assert str(refused.value) == str(refusal)
        return
    config = nxdi.make_config(tmp_path, tp_degree=degree, torch_dtype="bfloat16", on_cpu=False, batch_size=2)
    application = NeuronGraniteMoeHybridForCausalLM(str(tmp_path), config)
    with nxdi.simulated_ranks(degree):
        instance = application.token_generation_model.get_model_instance()
        instance.load_module()
        module, _ = instance.get(0)
    with torch.device("meta"):
        ours = model_of(granite, parallel=Parallel(0, degree))
        state = HybridState.allocate(granite, 2, nxdi.MAX_LENGTH, torch.bfloat16, "meta", degree)

    theirs = dict(module.named_parameters())
    for parameter_name, parameter, their_parameter in compared(ours, theirs):
        assert their_parameter.shape == parameter.shape, parameter_name
        assert their_parameter.dtype == torch.bfloat16, parameter_name
    vocab_rows, columns = theirs["embed_tokens.weight"].shape
    assert (vocab_rows, columns * degree) == (granite.vocab_size, granite.hidden_size)
    for tensor, expected in zip(module.kv_mgr.past_key_values, state.tensors(), strict=True):
        assert tensor.shape == (2, *expected.shape[1:])  # no null slot
        assert tensor.dtype == expected.dtype


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_of_every_rank(case, degree, random_checkpoints):
    check_values(random_checkpoints(case), degree)


def test_sharding_needs_no_second_copy(tmp_path):
    """The converted checkpoint and all ranks' weights refer to at most 1.1 times its bytes: they are views of its
    tensors."""
    granite = small_config(vocab_size=128, num_local_experts=32, intermediate_size=64)
    save_model(random_model(granite), tmp_path)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    checkpoint, ranks = _sharded_by_nxd(tmp_path, 2)
    storages = [tensor.untyped_storage() for part in (checkpoint, *ranks) for tensor in part.values()]
    total = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert 0.5 * stored <= total <= 1.1 * stored


def test_values_with_fused_projections(random_checkpoints):
    """Keys and values are in one weight with the queries, and so are biases."""
    (case,) = [case for case in CASES if case.name == "projection_bias"]
    check_values(random_checkpoints(case), 2, fused_qkv=True)


def check_values(folder: Path, degree: int, fused_qkv: bool = False) -> None:
    """Check that NxD's sharder gives each rank what this package's own backends load."""
    try:
        config_from_file(folder / "config.json").rank_dimensions(degree)
    except UserError:
        pytest.skip(f"this checkpoint cannot be split by {degree}")
    for rank, theirs in enumerate(_sharded_by_nxd(folder, degree, fused_qkv)[1]):
        ours = load_model(folder, torch.float32, parallel=Parallel(rank, degree))
        if fused_qkv:
            _split_qkv(theirs, ours)
        for name, parameter, their_parameter in compared(ours, theirs):
            assert torch.equal(their_parameter, parameter), name
        assert theirs["rank_util.rank"].item() == rank


def _sharded_by_nxd(
    folder: Path, degree: int, fused_qkv: bool = False
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return the converted checkpoint, and each rank's weights by NxD's names, from its sharder."""
    from neuronx_distributed.trace.trace import get_sharded_checkpoint

    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

    config = nxdi.make_config(folder, tp_degree=degree, on_cpu=False, fused_qkv=fused_qkv)
    application = NeuronGraniteMoeHybridForCausalLM(str(folder), config)
    checkpoint, ranks = application.checkpoint_loader_fn(), []
    with nxdi.simulated_ranks(degree):
        instance = application.token_generation_model.get_model_instance()
        instance.load_module()
        for rank in range(degree):
            ranks.append(dict(checkpoint))
            get_sharded_checkpoint(ranks[-1], instance.module, rank, degree)
    return checkpoint, ranks


def _split_qkv(theirs: dict[str, torch.Tensor], ours: HybridForCausalLM) -> None:
    for name in [name for name in theirs if ".Wqkv." in name]:
        layer, _, leaf = name.partition(".self_attn.qkv_proj.Wqkv.")
        start = 0
        for part in ("q_proj", "k_proj", "v_proj"):
            rows = len(ours.get_parameter(f"model.{layer}.self_attn.{part}.{leaf}"))
            theirs[f"{layer}.self_attn.qkv_proj.{part}.{leaf}"] = theirs[name][start : start + rows]
            start += rows
