"""A model split over processes gives the logits of the whole model. The processes talk through gloo."""

import os
import socket

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from transformers import GenerationConfig

from granite4_neuron.checkpoint.loading import load_model, save_model
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.config import GraniteMoeHybridConfig, family_names
from granite4_neuron.errors import UserError
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.model.parallel import Parallel
from granite4_neuron.model.state import HybridState
from granite4_neuron.runtime.cpu import CPURuntime
from granite4_neuron.runtime.torch_device import TorchRuntime
from test.support.checkpoints import DENSE, small_config
from test.support.graph_contract import BUCKETS, FEW_LAYERS, STEPS, run_steps
from test.support.stepping import random_tokens, run_cuts

CUTS = [40, 1, 7, 1, 1, 30]
MODELS = {
    "moe, 2 ranks": (2, {}),
    "kv heads replicated, 4 ranks": (4, {}),
    "groups split, biases, rope": (
        2,
        dict(mamba_n_groups=2, mamba_proj_bias=True, attention_bias=True, position_embedding_type="rope"),
    ),
    "untied dense": (2, dict(tie_word_embeddings=False, **DENSE)),
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_rank(rank, degree, folder, port, results):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=degree)
    model = load_model(folder, torch.float32, parallel=Parallel(rank, degree, torch.distributed.group.WORLD))
    logits = run_cuts(model, random_tokens(model.config.vocab_size, 2, sum(CUTS)), CUTS)
    torch.save(logits, f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("degree, changes", MODELS.values(), ids=MODELS.keys())
def test_every_rank_has_the_whole_models_logits(tmp_path, degree, changes):
    model = random_model(small_config(**changes))
    save_model(model, tmp_path / "model")
    arguments = (degree, tmp_path / "model", free_port(), str(tmp_path))
    torch.multiprocessing.start_processes(run_rank, args=arguments, nprocs=degree, start_method="spawn")
    expected = run_cuts(model, random_tokens(model.config.vocab_size, 2, sum(CUTS)), CUTS)
    for rank in range(degree):
        assert (torch.load(tmp_path / f"{rank}.pt") - expected).abs().max() <= 1e-5


def run_graphs(rank, degree, folder, port, results, kind):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = f"{kind}:{rank}" if kind == "cuda" else kind
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=degree)
    model = load_model(folder, torch.float32, parallel=Parallel(rank, degree, torch.distributed.group.WORLD))
    compiler = "aot_eager" if kind == "cpu" else None
    runtime = TorchRuntime(model, GenerationConfig(), BUCKETS, device=device, compiler=compiler)
    torch.save(run_steps(runtime, STEPS, 5, 200), f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds no 2 GPUs")),
    ],
)
def test_graphs_of_two_ranks_have_the_whole_models_logits(tmp_path, kind):
    model = random_model(small_config(**FEW_LAYERS))
    save_model(model, tmp_path / "model")
    arguments = (2, tmp_path / "model", free_port(), str(tmp_path), kind)
    torch.multiprocessing.start_processes(run_graphs, args=arguments, nprocs=2, start_method="spawn")
    expected_logits = run_steps(CPURuntime(model, GenerationConfig()), STEPS, 5, 200)
    for rank in range(2):
        for expected, logits in zip(expected_logits, torch.load(tmp_path / f"{rank}.pt"), strict=True):
            assert (logits - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", family_names())
@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_holds_its_share(name, degree):
    """Parameters and state of a rank, for every family member at its real size, are counted without allocating them."""
    config = GraniteMoeHybridConfig.from_family(name)
    with torch.device("meta"):
        whole = GraniteMoeHybridForCausalLM(config)
        part = GraniteMoeHybridForCausalLM(config, parallel=Parallel(1, degree))
        state = HybridState.allocate(config, 1, 64, torch.bfloat16, "meta", degree)
        whole_state = HybridState.allocate(config, 1, 64, torch.bfloat16, "meta")

    def size(tensors):
        return sum(tensor.numel() for tensor in tensors)

    # These are not split: B and C of the one group, the router, the norms.
    assert 1 / degree <= size(part.parameters()) / size(whole.parameters()) <= 1.05 / degree
    assert 1 / degree <= size(state.tensors()) / size(whole_state.tensors()) <= 1.02 / degree


def test_degrees_that_do_not_divide_are_refused():
    config = GraniteMoeHybridConfig.from_family("granite-4.0-h-350m")
    with pytest.raises(UserError, match=r"tp_degree is 5; this model can be split by 1, 2, 4\."):
        GraniteMoeHybridForCausalLM(config, parallel=Parallel(0, 5))
    with pytest.raises(UserError, match="tp_degree is 0"):
        config.rank_dimensions(0)
