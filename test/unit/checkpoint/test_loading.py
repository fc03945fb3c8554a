import json
import subprocess
import sys
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM as Reference

from granite4_neuron import load
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.names import OTHER_NAMES
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.sharding import rank_slices
from granite4_neuron.checkpoint.stored_tensors import INDEX, WEIGHTS
from granite4_neuron.config import json_files
from granite4_neuron.errors import UserError
from granite4_neuron.model.parameters import parameter
from granite4_neuron.ops import as_tensor
from test.support.checkpoints import CASES, large_config, small_config

pytestmark = pytest.mark.versions

MOE = CASES[0]


@pytest.fixture
def saved(tmp_path):
    """Return a small MoE checkpoint in one file: (folder, its model)."""
    model = random_model(small_config())
    save_model(model, tmp_path / "model")
    return tmp_path / "model", model


def assert_same_weights(model, other):
    expected = dict(other.named_weights())
    assert dict(model.named_weights()).keys() == expected.keys()
    for name, weight in model.named_weights():
        assert torch.equal(weight, as_tensor(expected[name], model.dtype)), name


def change_weights(folder, change):
    """Let `change` edit the dictionary of tensors of model.safetensors, and rewrite the file."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.slow_cases
def test_a_written_checkpoint_is_read_back(case_folder, case_model, tmp_path):
    save_model(case_model, tmp_path / "again")
    assert_same_weights(load_model(tmp_path / "again"), case_model)
    assert load_model(tmp_path / "again").config == load_model(case_folder).config
    assert (tmp_path / "again" / WEIGHTS).stat().st_mode & 0o777 == 0o644


def test_shards(saved, tmp_path):
    folder, model = saved
    save_model(model, tmp_path / "shards", max_shard_size="100KB")
    assert not (tmp_path / "shards" / WEIGHTS).exists()
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert_same_weights(load_model(tmp_path / "shards"), model)
    assert (
        Reference.from_pretrained(tmp_path / "shards").num_parameters()
        == Reference.from_pretrained(folder).num_parameters()
    )


@pytest.mark.slow_cases
def test_a_checkpoint_of_transformers_is_read(case_folder, case_model, tmp_path):
    family = json.loads((case_folder / "config.json").read_text())["model_type"]
    pytest.importorskip(f"transformers.models.{family}", reason="this transformers has no such models")
    Reference.from_pretrained(case_folder, dtype=torch.float32).save_pretrained(tmp_path)
    assert_same_weights(load_model(tmp_path), case_model)


def test_names_that_transformers_5_uses_in_memory(saved):
    folder, model = saved
    new_names = {name: others[0] for name, others in OTHER_NAMES.items() if "block_sparse_moe" in name}

    def rename(tensors):
        for name in list(tensors):
            for published, ending in new_names.items():
                if name.endswith(published):
                    tensors[name.removesuffix(published) + ending] = tensors.pop(name)

    change_weights(folder, rename)
    assert any("experts.gate_up_proj" in name for name in load_file(folder / WEIGHTS))
    assert_same_weights(load_model(folder), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_is_kept_or_converted(tmp_path, dtype):
    save_model(random_model(small_config(), dtype=dtype), tmp_path / "model")
    assert {parameter.dtype for parameter in load_model(tmp_path / "model").parameters()} == {dtype}
    assert {parameter.dtype for parameter in load_model(tmp_path / "model", torch.float32).parameters()} == {
        torch.float32
    }
    assert json.loads((tmp_path / "model" / "config.json").read_text())["torch_dtype"] == str(dtype)[len("torch.") :]


def test_the_dtype_is_that_of_the_embedding(saved):
    folder, _ = saved

    def halve(tensors):
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16()

    change_weights(folder, halve)
    assert {parameter.dtype for parameter in load_model(folder).parameters()} == {torch.bfloat16}
    assert open_checkpoint(folder).dtype == "bfloat16"


def test_a_file_is_read_once(texting_folder, monkeypatch):
    """config.json is opened once while a model is loaded."""
    names, original = Counter(), json_files.read_bytes
    monkeypatch.setattr(json_files, "read_bytes", lambda path: names.update([path.name]) or original(path))
    load(texting_folder)
    assert names["config.json"] == 1 and set(names.values()) == {1}


def test_an_open_checkpoint_does_not_change(saved):
    folder, model = saved
    checkpoint = open_checkpoint(folder)
    (folder / "config.json").unlink()
    assert open_checkpoint(checkpoint) is checkpoint
    assert_same_weights(load_model(checkpoint), model)


def test_a_tied_head_may_be_stored_too(saved):
    folder, model = saved
    change_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0}))
    assert_same_weights(load_model(folder), model)


def test_names_and_shapes_that_do_not_fit_are_listed(saved):
    folder, _ = saved

    def damage(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mamba.extra"] = torch.zeros(1)
        tensors["model.layers.0.mamba.D"] = torch.zeros(3)

    change_weights(folder, damage)
    with pytest.raises(UserError) as error:
        load_model(folder)
    message = str(error.value)
    assert "missing: model.norm.weight" in message
    assert "not of this model: model.layers.0.mamba.extra" in message
    assert "of another shape: model.layers.0.mamba.D is [3] instead of [8]" in message


def test_a_long_list_is_cut(saved):
    folder, _ = saved
    change_weights(folder, lambda tensors: [tensors.pop(name) for name in list(tensors)[:20]])
    with pytest.raises(UserError, match="and 12 more"):
        load_model(folder)


def test_truncated_file(saved):
    folder, _ = saved
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged or incomplete"):
        load_model(folder)


def test_missing_shard(saved, tmp_path):
    save_model(saved[1], tmp_path / "shards", max_shard_size="100KB")
    lost = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UserError, match=f"lacks 1 of its .* shards: {lost.name}"):
        load_model(tmp_path / "shards")


def test_an_invalid_index_is_refused(saved):
    folder, _ = saved
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match=r"has no model\.safetensors and no"):
        load_model(folder)
    for content in ("{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}'):
        (folder / INDEX).write_text(content)
        with pytest.raises(UserError, match="is not an index of shards"):
            load_model(folder)


def test_no_such_folder_and_no_download(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="is not a folder"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match="no-one/no-model is not a folder, and cannot be loaded from Hugging Face"):
        open_checkpoint("no-one/no-model")


def test_a_folder_in_use_is_not_written_to(saved):
    folder, model = saved
    before = sorted(file.name for file in folder.iterdir())
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        save_model(model, folder)
    assert sorted(file.name for file in folder.iterdir()) == before


@pytest.mark.slow
def test_a_write_that_fails_leaves_nothing(tmp_path):
    """Files may not grow past 100 kB here. The write fails in the middle, as with a full disk."""
    program = f"""
import resource, signal, sys
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.errors import UserError
from granite4_neuron.model.parameters import parameter
from granite4_neuron.ops import as_tensor
from granite4_neuron.checkpoint.random_weights import random_model
from test.support.checkpoints import small_config
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    save_model(random_model(small_config()), {str(tmp_path / "model")!r})
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "could not be written" in done.stdout and "nothing was left behind" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_slices_of_all_ranks_in_order():
    """Key heads that several ranks share appear once for each of these ranks."""
    config = small_config(num_attention_heads=8)  # 2 key heads of 8 columns
    key = torch.arange(16)[:, None].expand(-1, 64)
    name = "model.layers.1.self_attn.k_proj.weight"
    assert parameter(name, config).split_axis == 0
    slices = rank_slices(name, key, config, 4)
    assert slices[:, 0].tolist() == [*range(8), *range(8), *range(8, 16), *range(8, 16)]
    assert parameter("model.layers.1.input_layernorm.weight", config).split_axis is None
    assert rank_slices("model.layers.1.input_layernorm.weight", key, config, 4) is key


@pytest.mark.slow
def test_peak_memory_is_near_the_size_of_the_model(tmp_path):
    """The peak is near the model's size also if the checkpoint is converted to float32 while it is read."""
    save_model(random_model(large_config(), dtype=torch.bfloat16), tmp_path / "model")
    size = (tmp_path / "model" / WEIGHTS).stat().st_size
    assert size > 150e6
    program = f"""
import resource, torch
from granite4_neuron.checkpoint.loading import load_model
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
model = load_model({str(tmp_path / "model")!r}, {{dtype}})
print(peak() - before)
"""

    def peak(dtype):
        command = [sys.executable, "-c", program.format(dtype=dtype)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    slack = 30e6
    assert peak("None") <= size + slack
    assert peak("torch.float32") <= 2 * size + slack
