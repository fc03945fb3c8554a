"""What a GPU's memory must hold, beside a model and a state that are made."""

import pytest
import torch

from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.commands import cli
from granite4_neuron.config import published_config
from granite4_neuron.devices.cuda.torch_device import CUDA
from granite4_neuron.errors import UserError
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.planning.gpu import gpu_plan
from granite4_neuron.state.hybrid_state import HybridState
from test.support.encoded import fp8, write_encoded


def size(weight):
    return weight.nbytes if isinstance(weight, torch.Tensor) else weight.num_bytes


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_weights_and_states_are_exact(quantize):
    model = load_model(bundled_checkpoint(), quantize=quantize)
    planned = gpu_plan(model.config, model.dtype, quantize, batch_size=3, context=1000)
    assert planned.weights == sum(size(weight) for _, weight in model.named_weights())
    state = HybridState.allocate(model.config, 3, 1024, model.dtype, "meta", has_null_slot=False)
    recurrent = {id(tensor) for layer in state.layers for name, tensor in vars(layer).items() if "state" in name}
    sizes = [(tensor.nbytes, id(tensor) in recurrent) for tensor in state.tensors()]
    assert planned.states == sum(nbytes for nbytes, is_state in sizes if is_state)
    assert planned.cache == sum(nbytes for nbytes, is_state in sizes if not is_state)
    # Of each token of the vocabulary two numbers and two bits, and the token chosen last.
    assert planned.choices == 3 * (model.config.vocab_size * (4 + 4 + 2 / 8) + 4)


def test_a_checkpoint_is_planned_as_it_is_loaded(tmp_path, capsys):
    folder, about = tmp_path / "model", {"quantization_config": {"quant_method": "fp8"}}
    write_encoded(bundled_checkpoint(), folder, {part: fp8("weight_scale") for part in ("_proj", "_linear")}, about)
    model, checkpoint = load_model(folder, keep_quantized=CUDA.formats), open_checkpoint(folder)
    planned = gpu_plan(model.config, model.dtype, None, batch_size=3, context=1000, checkpoint=checkpoint)
    assert planned.weights == sum(size(weight) for _, weight in model.named_weights())
    assert planned.weights < 0.8 * gpu_plan(model.config, model.dtype, None, batch_size=3, context=1000).weights
    assert cli.main(["plan", "--model", str(folder), "--gpu-memory", "24"]) == 0
    assert f"{folder.name} in fp8" in capsys.readouterr().out.replace("\n", "")


def test_h_small_in_four_bits_fits_a_gpu_of_24_gib(capsys):
    """Its 32.2 billion weights take 4.5 bits each."""
    planned = gpu_plan(published_config("h-small"), torch.bfloat16, "int4", batch_size=1, context=32_768)
    assert planned.weights == pytest.approx(32.2e9 * 4.5 / 8, rel=0.02)
    command = ["plan", "--model", "h-small", "--context", "32768", "--batch-size", "1", "--gpu-memory", "24"]
    assert cli.main([*command, "--quantize", "int4"]) == 0
    assert "It fits" in capsys.readouterr().out
    assert cli.main(command) == 1
    assert "It does not fit" in capsys.readouterr().out


def test_what_cannot_be_planned_is_refused(capsys, tmp_path):
    config = published_config("h-350m")
    with pytest.raises(UserError, match="lossless12 weights do not run on a GPU, which computes with fp8, int4, int8"):
        gpu_plan(config, torch.bfloat16, "lossless12", batch_size=1, context=100)
    with pytest.raises(UserError, match="the context is 1000000; the model's longest is 32768"):
        gpu_plan(config, torch.bfloat16, None, batch_size=1, context=10**6)
    save_model(load_model(bundled_checkpoint(), quantize="int4"), tmp_path / "int4")
    model = ["--model", "h-350m"]
    refusals = [
        ([], "needs --model"),
        ([*model, "--latency"], "leave out --latency"),
        (["--model", tmp_path / "int4", "--quantize", "int8"], "are in int4; int8 is made from the original"),
    ]
    of_cores = {
        "--backend": ["nxdi"],
        "--instance": ["trn2.3xlarge"],
        "--tp-degree": ["4"],
        "--max-context-length": ["512"],
        "--context-buckets": ["128", "512"],
        "--token-buckets": ["512"],
        "--verify": ["4"],
        "--draft-model": ["350m"],
    }
    refusals += [
        ([*model, name, *values], f"{name} is for plans of Neuron cores; leave it out with --gpu-memory.")
        for name, values in of_cores.items()
    ]
    for others, sentence in refusals:
        assert cli.main(["plan", "--gpu-memory", "24", *map(str, others)]) == 2, sentence
        assert sentence in capsys.readouterr().err
    assert cli.main(["plan", "--gpu-memory", "24", "--model", str(tmp_path / "int4"), "--quantize", "int4"]) == 0
