"""Checkpoints that are damaged, contradict themselves, or were made to do harm. Each gets one sentence that helps.

To add a case, write a function that damages a good folder and a part of the expected sentence.
"""

import json
import math
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from granite4_neuron import UserError, chat, generate, load
from granite4_neuron.checkpoint.folder_contents import GENERATION_CONFIG
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.stored_tensors import INDEX, WEIGHTS
from granite4_neuron.checkpoint.tokenizing import encode_beside_others
from granite4_neuron.commands.cli import main
from granite4_neuron.config.choices import QUANTIZATIONS
from granite4_neuron.generation import chat_prompt
from granite4_neuron.system.sandbox.limited_process import NoProcess

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
DEEP = "[" * 200_000 + "]" * 200_000
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 680664424\n"


def text_of(name, text):
    """Damage: replace the text of the file."""
    return lambda folder: (folder / name).write_text(text)


def values_of(name, **changes):
    """Damage: change values of the JSON object in the file. Strings such as `1e400` are put in as they stand."""

    def damage(folder):
        file = folder / name
        values = json.loads(file.read_text()) if file.exists() else {}
        text = json.dumps({**values, **{key: f"<{key}>" for key in changes}})
        for key, value in changes.items():
            text = text.replace(f'"<{key}>"', value if isinstance(value, str) else json.dumps(value))
        file.write_text(text)

    return damage


def tokenizer_with(**parts):
    """Damage: change parts of tokenizer.json."""
    return values_of("tokenizer.json", **parts)


def tokenizer_text(old, new):
    """Damage: change the text of tokenizer.json in one place."""

    def damage(folder):
        file = folder / "tokenizer.json"
        text = json.dumps(json.loads(file.read_text()))
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))

    return damage


def pipe(name):
    """Damage: replace the file with a named pipe that nobody writes to."""

    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def tensors(change):
    """Damage: let `change` edit the dictionary of stored tensors."""

    def damage(folder):
        stored = load_file(folder / WEIGHTS)
        change(stored)
        save_file(stored, folder / WEIGHTS)

    return damage


def shards(change_index=None, change_folder=None):
    """Damage a checkpoint of several shards: `change_index` edits the weight_map, `change_folder` the folder."""

    def damage(folder):
        model = load_model(folder)
        shutil.rmtree(folder / "shards", ignore_errors=True)
        save_model(model, folder / "shards", max_shard_size="200KB")
        (folder / WEIGHTS).unlink()
        for file in (folder / "shards").glob("model*"):
            file.rename(folder / file.name)
        shutil.rmtree(folder / "shards")
        index = json.loads((folder / INDEX).read_text())
        if change_index is not None:
            change_index(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))
        if change_folder is not None:
            change_folder(folder)

    return damage


def in_two_shards(folder):
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    one = load_file(first)
    name = next(iter(one))
    save_file({**load_file(second), name: one[name]}, second)


def under_both_spellings(stored):
    for name in list(stored):
        if name.endswith("input_linear.weight") and "block_sparse_moe" in name:
            new = name.replace("input_linear.weight", "experts.gate_up_proj")
            stored[new] = stored[name] + 1


def in_parts(up):
    """Damage: store an MLP's first matrix as its gate and `up(rest)`. If `up` returns None, only the gate is stored."""

    def change(stored):
        gate, rest = stored.pop("model.layers.0.shared_mlp.input_linear.weight").chunk(2)
        stored["model.layers.0.mlp.gate_proj.weight"] = gate.clone()
        if (rest := up(rest)) is not None:
            stored["model.layers.0.mlp.up_proj.weight"] = rest.clone()

    return tensors(change)


def only(name, content=b"x"):
    """Damage: remove all weights and add a file of another format."""

    def damage(folder):
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(content)

    return damage


def hub_cache(folder):
    """Damage: give the folder the layout of the Hugging Face cache, with the checkpoint as its snapshot."""
    snapshot = folder / "snapshots" / "0123456789"
    snapshot.mkdir(parents=True)
    for file in list(folder.iterdir()):
        if file.is_file():
            file.rename(snapshot / file.name)


def swapped(weight_map):
    names = sorted(set(weight_map.values()))
    for name, file in weight_map.items():
        weight_map[name] = {names[0]: names[1], names[1]: names[0]}.get(file, file)


TENFOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def times(step, count, steps="normalizers"):
    return {"type": "Sequence", steps: [step] * count}


FAULTS = {
    # Files that are something else
    "config is a pipe": (pipe(CONFIG), "is not a regular file"),
    "generation config is a pipe": (pipe(GENERATION_CONFIG), "is not a regular file"),
    "tokenizer config is a pipe": (pipe(TOKENIZER_CONFIG), "is not a regular file"),
    "tokenizer is a pipe": (pipe("tokenizer.json"), "has no tokenizer.json"),
    "weights are a pipe": (pipe(WEIGHTS), f"has no {WEIGHTS}"),
    "config is a folder": (
        lambda folder: ((folder / CONFIG).unlink(), (folder / CONFIG).mkdir()),
        "is not a regular file",
    ),
    "config is not text": (lambda folder: (folder / CONFIG).write_bytes(b"\xff\xfe\x00"), "is not valid JSON"),
    "config is a list": (text_of(CONFIG, "[]"), "holds a JSON list; it must hold an object"),
    "config is huge": (lambda folder: os.truncate(folder / CONFIG, 2**30), "too many for a file of settings"),
    # JSON that is made to do harm
    "deep config": (text_of(CONFIG, DEEP), "nested too deeply"),
    "deep generation config": (text_of(GENERATION_CONFIG, DEEP), "nested too deeply"),
    "deep tokenizer config": (text_of(TOKENIZER_CONFIG, DEEP), "nested too deeply"),
    "deep tokenizer": (text_of("tokenizer.json", DEEP), "the tokenizer in"),
    "deep index": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / INDEX).write_text(DEEP)),
        "nested too deeply",
    ),
    "an integer of 5,000 digits": (values_of(CONFIG, vocab_size="9" * 5000), "is not valid JSON"),
    "an integer of 4,000 digits": (values_of(CONFIG, vocab_size="9" * 4000), "vocab_size is 99999"),
    "vocab_size 2**62": (values_of(CONFIG, vocab_size=2**62), "vocab_size is 4611686018427387904, and can be at most"),
    "10**8 layers": (values_of(CONFIG, num_hidden_layers=10**8), "num_hidden_layers is 100000000, and can be at most"),
    "10**8 layers of the default kind": (
        values_of(CONFIG, num_hidden_layers=10**8, layer_types=None),
        "num_hidden_layers is 100000000, and can be at most",
    ),
    "-1e308 layers of the default kind": (
        values_of(CONFIG, num_hidden_layers="-1e308", layer_types=None),
        "and must be at least 1.",
    ),
    "10**9 experts": (values_of(CONFIG, num_local_experts=10**9), "num_local_experts is 1000000000"),
    "hidden_size 2**40": (values_of(CONFIG, hidden_size=2**40), "hidden_size is 1099511627776"),
    "mamba_expand 10**9": (values_of(CONFIG, mamba_expand=10**9), "mamba_expand is 1000000000"),
    "hidden_size 1e400": (values_of(CONFIG, hidden_size="1e400"), "hidden_size is inf, and must be a whole number"),
    "rms_norm_eps NaN": (values_of(CONFIG, rms_norm_eps="NaN"), "rms_norm_eps is nan, and must be a number"),
    "logits_scaling 1e400": (values_of(CONFIG, logits_scaling="1e400"), "logits_scaling is inf"),
    "hidden_size of the wrong type": (values_of(CONFIG, hidden_size="[64]"), "hidden_size is [64]"),
    "eos_token_id of the wrong type": (
        values_of(CONFIG, eos_token_id='"two"'),
        "eos_token_id is 'two', and must be a whole number or a list of them",
    ),
    "time_step_limit 10**400": (
        values_of(CONFIG, time_step_limit="[0, 1" + "0" * 400 + "]"),
        "time_step_limit is [0, 10000",
    ),
    "a kind of layer with escape sequences": (
        values_of(CONFIG, layer_types=["\x1b[2J\r\nmamba\u202e" + "x" * 10**6]),
        r"layer_types has unknown names (\x1b[2J\r\nmamba\u202exxx",
    ),
    "a long wrong value is cut": (values_of(CONFIG, hidden_act=json.dumps("x" * 10_000)), "hidden_act is 'xxxx"),
    "a dense model with biases in its MLPs": (
        values_of(CONFIG, model_type='"granite"', mlp_bias=True),
        "mlp_bias is True, and must be false",
    ),
    "a dense model with scaled positions": (
        values_of(CONFIG, model_type='"granite"', rope_scaling={"type": "linear", "factor": 2.0}),
        "rope_type must be 'default'",
    ),
    "a dense model of -1e400 layers": (
        values_of(CONFIG, model_type='"granite"', num_hidden_layers="-1e400"),
        "num_hidden_layers is -inf, and must be a whole number",
    ),
    "a dense model of 10**8 layers": (
        values_of(CONFIG, model_type='"granite"', num_hidden_layers=10**8),
        "num_hidden_layers is 100000000, and can be at most",
    ),
    # Checkpoints quantized by other tools
    "gptq": (
        values_of(CONFIG, quantization_config={"quant_method": "gptq", "bits": 4}),
        "are quantized by 'gptq', and only",
    ),
    "fp8 in blocks of one size": (
        values_of(CONFIG, quantization_config={"quant_method": "fp8", "weight_block_size": 128}),
        "blocks have the size 128, and must have a number of rows and columns",
    ),
    "compressed-tensors, and no more": (
        values_of(CONFIG, quantization_config='"compressed-tensors"'),
        "quantized by compressed-tensors with no config_groups that say how",
    ),
    "quantized by us, and no more": (
        values_of(CONFIG, quantization_config='"granite4-neuron"'),
        f"the weights' quantization_config has the format None, and must have one of {', '.join(QUANTIZATIONS)}.",
    ),
    "quantized somehow": (values_of(CONFIG, quantization_config='"yes"'), "are quantized by 'yes', and only"),
    "MLX in 6 bits": (values_of(CONFIG, quantization={"bits": 6}), "by MLX in 6 bits for groups of 64, and only"),
    "MLX in MXFP4": (values_of(CONFIG, quantization={"mode": "mxfp4"}), "by MLX in the mode 'mxfp4', and only"),
    "a tool without a name": (
        values_of(CONFIG, quantization_config={"bits": 4}),
        "are quantized by a tool that config.json does not name, and only",
    ),
    "ModelOpt": (
        values_of("hf_quant_config.json", quantization={"quant_algo": "W4A16_AWQ", "exclude_modules": ["lm_head"]}),
        "are quantized by NVIDIA's ModelOpt in 'W4A16_AWQ', and only",
    ),
    "ModelOpt, and no more": (text_of("hf_quant_config.json", "{}"), "are quantized by NVIDIA's ModelOpt, and only"),
    # Tokenizers
    "a tokenizer of a later version": (
        text_of("tokenizer.json", '{"version": "9.0", "model": {"type": "FromTheFuture"}}'),
        "the tokenizer in",
    ),
    "an empty tokenizer": (text_of("tokenizer.json", ""), "the tokenizer in"),
    "a tokenizer that is a list": (text_of("tokenizer.json", "[]"), "the tokenizer in"),
    "model_max_length is text": (
        values_of(TOKENIZER_CONFIG, model_max_length='"x"'),
        "model_max_length is 'x', and must be a number",
    ),
    "tokenizer config is a list": (text_of(TOKENIZER_CONFIG, "[]"), "holds a JSON list"),
    "a normalizer that multiplies": (
        tokenizer_with(normalizer=times(TENFOLD, 3)),
        "tokenizer.json has steps that make up to 1e+03 characters of one; at most 100 are accepted",
    ),
    "a normalizer that multiplies without end": (
        tokenizer_with(normalizer=times(times(TENFOLD, 40), 40)),
        "has steps that make up to inf characters of one",
    ),
    "a normalizer that inserts": (
        tokenizer_with(normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 50}),
        "has steps that make up to 101 characters of one",
    ),
    "a normalizer that begins": (
        tokenizer_with(normalizer={"type": "Prepend", "prepend": "x" * 100}),
        "has steps that make up to 101 characters of one",
    ),
    "a normalizer under a name that is escaped": (
        tokenizer_text('"normalizer": null', '"\\u006eormalizer": ' + json.dumps(times(TENFOLD, 3))),
        "has steps that make up to 1e+03 characters of one",
    ),
    "two normalizers": (
        tokenizer_text('"normalizer": null', '"normalizer": ' + json.dumps(times(TENFOLD, 3)) + ', "normalizer": null'),
        "'normalizer' is in it twice",
    ),
    "a normalizer that nobody knows": (
        tokenizer_with(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}),
        "has a step of type 'Precompiled', whose growth is unknown",
    ),
    "a normalizer that is text": (tokenizer_with(normalizer='"NFC"'), "has a step of type None"),
    "bytes of bytes": (
        tokenizer_with(pre_tokenizer=times(BYTES, 3, "pretokenizers")),
        "has steps that make up to 125 characters of one",
    ),
    "a normalizer and a pre-tokenizer": (
        tokenizer_with(normalizer={**TENFOLD, "content": "x" * 21}),
        "has steps that make up to 105 characters of one",
    ),
    "a post-processor that adds": (
        tokenizer_with(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                "special_tokens": {"x": {"id": "x", "ids": [1] * 200, "tokens": ["x"] * 200}},
            }
        ),
        "has steps that make up to 201 characters of one",
    ),
    "a decoder that multiplies": (
        tokenizer_with(decoder=times(TENFOLD, 3, "decoders")),
        "has steps that make up to 1e+03 characters of one",
    ),
    "tokenizers for other versions": (
        values_of(TOKENIZER_CONFIG, fast_tokenizer_files=["tokenizer.4.0.0.json"]),
        "has fast_tokenizer_files for other versions of transformers",
    ),
    "special tokens are numbers": (
        values_of(TOKENIZER_CONFIG, eos_token="17"),
        "cannot be read (TypeError: Special token eos_token has to be either str or AddedToken",
    ),
    # Sampling
    "top_p NaN": (values_of(GENERATION_CONFIG, do_sample=True, top_p="NaN"), "top_p is nan, and must be a number"),
    "temperature 1e400": (
        values_of(GENERATION_CONFIG, do_sample=True, temperature="1e400"),
        "temperature is inf, and must be a number of at least 0",
    ),
    "negative temperature": (values_of(GENERATION_CONFIG, temperature=-1), "temperature is -1"),
    "top_k is a fraction": (values_of(GENERATION_CONFIG, top_k=1.5), "top_k is 1.5, and must be a whole number"),
    "min_p above 1": (values_of(GENERATION_CONFIG, min_p=2), "min_p is 2, and must be a number from 0 to 1"),
    "repetition_penalty 0": (values_of(GENERATION_CONFIG, repetition_penalty=0), "repetition_penalty is 0"),
    "eos_token_id is text": (values_of(GENERATION_CONFIG, eos_token_id='"end"'), "eos_token_id is 'end'"),
    "generation config is a list": (text_of(GENERATION_CONFIG, "[]"), "holds a JSON list"),
    # Weights
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS} and no {INDEX}."),
    "empty weights": (text_of(WEIGHTS, ""), "is damaged or incomplete"),
    "weights of zeros": (lambda folder: (folder / WEIGHTS).write_bytes(bytes(10_000)), "is damaged or incomplete"),
    "weights cut off": (lambda folder: os.truncate(folder / WEIGHTS, 5000), "is damaged or incomplete"),
    "a pointer of Git LFS": (text_of(WEIGHTS, LFS_POINTER), "is a pointer of Git LFS; git lfs pull downloads"),
    "only GGUF": (only("granite-Q4_K_M.gguf"), "It holds GGUF files; give one of them: "),
    "only pytorch_model.bin": (only("pytorch_model.bin"), "It holds weights as pickled by torch (pytorch_model.bin)"),
    "a folder of the Hugging Face cache": (hub_cache, "snapshots/0123456789"),
    "a tensor too many": (tensors(lambda stored: stored.update(extra=torch.zeros(1))), "not of this model: extra"),
    "a tensor with escape sequences": (
        tensors(lambda stored: stored.update({"\x1b]0;title\x07\n" + "x" * 10**6: torch.zeros(1)})),
        r"not of this model: \x1b]0;title\x07\nxxx",
    ),
    "a tensor under both spellings": (tensors(under_both_spellings), "hold one tensor twice"),
    "a gate without its other half": (
        in_parts(lambda rest: None),
        "lack a part of model.layers.0.shared_mlp.input_linear.weight: they have only model.layers.0.mlp.gate_proj.wei",
    ),
    "halves of different heights": (in_parts(lambda rest: rest[1:]), "must be of the same shape and dtype, and are"),
    "halves in different dtypes": (
        in_parts(lambda rest: rest.half()),
        "must be of the same shape and dtype, and are",
    ),
    "a tensor in two shards": (shards(change_folder=in_two_shards), "hold one tensor twice"),
    # The index of shards
    "an index without weight_map": (
        lambda folder: ((folder / WEIGHTS).unlink(), (folder / INDEX).write_text("{}")),
        "is not an index of shards",
    ),
    "a shard outside": (
        shards(lambda index: index.update({next(iter(index)): "../../secret.safetensors"})),
        "names files outside of its folder (../../secret.safetensors), which are not opened",
    ),
    "a shard with escape sequences": (
        shards(lambda index: index.update({next(iter(index)): "\x1b[31m\n.safetensors"})),
        r"of its 18 shards: \x1b[31m\n.safetensors",
    ),
    "a shard at an absolute path": (
        shards(lambda index: index.update({next(iter(index)): "/etc/passwd"})),
        "names files outside of its folder (/etc/passwd)",
    ),
    "a shard on another drive": (
        shards(lambda index: index.update({next(iter(index)): "C:\\weights.safetensors"})),
        "names files outside of its folder",
    ),
    "an index that mixes up the shards": (shards(swapped), "is not the index of these shards"),
    "an index with a tensor that is nowhere": (
        shards(lambda index: index.update({"model.more": next(iter(index.values()))})),
        "model.more is in no shard",
    ),
    "an index that lacks a tensor": (
        shards(lambda index: index.pop("model.norm.weight")),
        "and by the index in none",
    ),
    "a shard that is absent": (
        shards(change_folder=lambda folder: min(folder.glob("model-*")).unlink()),
        "lacks 1 of its",
    ),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("damage, message", FAULTS.values(), ids=FAULTS.keys())
def test_a_damaged_checkpoint_is_refused(folder, refuses, damage, message):
    damage(folder)
    said = refuses("generate", "--model", folder, "--max-tokens", 1, "x")
    assert message in said
    assert len(said) < 2000 and said.isprintable()


BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


class TestATokenizerThatGivesUp:
    """Its regular expression takes more steps than the library allows, which then panics: no Exception in Python."""

    TEXT = "x" * 60
    SENTENCE = "the tokenizer fails at this text"

    @pytest.fixture
    def model(self, folder):
        tokenizer_with(pre_tokenizer=BACKTRACKING)(folder)
        return folder

    def test_a_panic_for_want_of_a_thread_says_so(self):
        class PanicException(BaseException):
            pass

        def encode(*_, **__):
            raise PanicException("The global thread pool has not been initialized.: ThreadPoolBuildError { kind: x }")

        with pytest.raises(NoProcess, match=r"no further process or thread can be started; raise the limit"):
            encode_beside_others(SimpleNamespace(encode_batch_fast=encode), "x", False)

    @pytest.mark.slow_cases
    @pytest.mark.parametrize("command", ["generate", "generate --chat", "check", "evaluate"])
    def test_commands_refuse_the_text(self, model, refuses, tmp_path, command):
        (tmp_path / "text").write_text(self.TEXT)
        words = {"check": ("--prompt", self.TEXT), "evaluate": (tmp_path / "text",)}
        name, *options = command.split()
        assert self.SENTENCE in refuses(name, *options, "--model", model, *words.get(name, (self.TEXT,)))

    def test_functions_refuse_the_text(self, model):
        runtime, tokenizer = load(model)
        messages = [{"role": "user", "content": self.TEXT}]
        hidden = [{"role": "user", "content": self.TEXT + "<|bos|>"}]  # text with a control token is encoded in parts
        for prompt in (self.TEXT, messages, hidden):
            with pytest.raises(UserError, match=self.SENTENCE):
                generate(runtime, tokenizer, prompt, max_tokens=1)
        other, failed = generate(runtime, tokenizer, ["a", self.TEXT], max_tokens=1)
        assert other.error is None and self.SENTENCE in failed.error
        for ask in (chat, chat_prompt):
            with pytest.raises(UserError, match=self.SENTENCE):
                ask(*((runtime, tokenizer, messages) if ask is chat else (tokenizer, self.TEXT)))
        assert generate(runtime, tokenizer, "a", max_tokens=1) is not None, "it still works"

    def test_the_server_refuses_the_text(self, model):
        pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
        httpx = pytest.importorskip("httpx", reason="httpx is not installed")
        from test.support.serving import serving

        messages = [{"role": "user", "content": self.TEXT}]
        with serving(*load(model)) as server:
            for path, body in (
                ("v1/completions", {"prompt": self.TEXT}),
                ("v1/completions", {"prompt": self.TEXT, "split_special_tokens": True}),
                ("v1/chat/completions", {"messages": messages}),
                ("tokenize", {"prompt": self.TEXT}),
            ):
                answer = httpx.post(f"{server.address}/{path}", json=body, timeout=60)
                assert answer.status_code == 400 and self.SENTENCE in answer.json()["error"]["message"]
            assert httpx.post(f"{server.address}/v1/completions", json={"prompt": "a"}, timeout=60).status_code == 200


def test_an_undamaged_sharded_checkpoint_loads(folder, capsys):
    """The sharded checkpoint loads before it is damaged."""
    shards()(folder)
    load_model(folder)


def test_the_folders_own_tokenizer_is_loaded(folder, tmp_path):
    """The configuration may name a tokenizer file that no check has read. The folder's own is loaded."""
    text = (folder / "tokenizer.json").read_text().replace("<|bos|>", "<|begin|>")
    (tmp_path / "tokenizer.json").write_text(text)
    values_of(TOKENIZER_CONFIG, tokenizer_file=json.dumps(str(tmp_path / "tokenizer.json")))(folder)
    tokenizer = open_checkpoint(folder).load_tokenizer()
    assert "<|bos|>" in tokenizer.get_vocab() and "<|begin|>" not in tokenizer.get_vocab()


def test_an_incomplete_download_is_refused(folder, refuses):
    """The Hugging Face cache is as a stopped download leaves it."""
    cache = folder / "models--somebody--model"
    snapshot = cache / "snapshots" / "0123456789"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "0a1b2c.incomplete").write_bytes(b"")
    for name in (CONFIG, "tokenizer.json", TOKENIZER_CONFIG):
        shutil.copy(folder / name, snapshot / name)
    said = refuses("generate", "--model", snapshot, "x")
    assert "download that was not completed; give the Hugging Face id again" in said


TEMPLATES = {
    "divides by zero": ("{{ 1 / 0 }}", "division by zero"),
    "adds text to a number": ("{{ 'a' + 1 }}", "can only concatenate str"),
    "calls what is not there": ("{{ nothing() }}", "'nothing' is undefined"),
    "does not parse": ("{% for %}", "Expected an expression"),
    "reaches into Python": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "recurses": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 3 seconds"),
    "fills the memory": ("{{ 'x' * 10**11 }}", "MemoryError"),
    "pads a text to a gigabyte": ("{{ '%99999999999d' | format(1) }}", "MemoryError"),
    "makes a huge text": ("{{ 'x' * 10**8 }}", "it makes a text of 100,000,000 characters"),
    "wants a huge range": ("{{ range(10**9) | list }}", "Range too big"),
    "raises": ("{{ raise_exception('no system message, please') }}", "no system message, please"),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("template, message", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_harmful_chat_template_is_refused(folder, refuses, template, message):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    values_of(TOKENIZER_CONFIG, chat_template=json.dumps(template))(folder)
    said = refuses("generate", "--model", folder, "--chat", "hello")
    assert "this checkpoint's chat template does not render the conversation" in said and message in said


def with_number(name, number):
    """Damage: change one number of a tensor."""

    def change(stored):
        stored[name].view(-1)[-1] = number

    return tensors(change)


EMBEDDING = "model.embed_tokens.weight"
IN_PROJ = "model.layers.0.mamba.in_proj.weight"
NUMBERS = {
    "NaN": (IN_PROJ, math.nan, ()),
    "NaN in another dtype": (IN_PROJ, math.nan, ("--dtype", "bfloat16")),
    "NaN in int8": (IN_PROJ, math.nan, ("--quantize", "int8")),
    "infinity in int4": (IN_PROJ, math.inf, ("--quantize", "int4")),
    "minus infinity in the embedding": (EMBEDDING, -math.inf, ("--quantize", "int4")),
    "NaN in a norm": ("model.norm.weight", math.nan, ("--quantize", "int8")),
    "NaN in the convolution": ("model.layers.0.mamba.conv1d.weight", math.nan, ()),
}


@pytest.mark.parametrize("name, number, options", NUMBERS.values(), ids=NUMBERS.keys())
def test_weights_that_are_not_finite_are_not_converted(folder, refuses, name, number, options):
    with_number(name, number)(folder)
    said = refuses("convert", "--model", folder, "--output", folder.parent / "new", *options)
    assert f"{name} in {folder} holds numbers that are not finite (NaN or infinity)" in said
    assert not list(folder.parent.glob("*new*"))


def test_weights_outside_a_dtypes_range_are_not_converted(folder, refuses):
    with_number(IN_PROJ, -1e6)(folder)
    said = refuses("convert", "--model", folder, "--output", folder.parent / "new", "--dtype", "float16")
    assert f"{IN_PROJ} in {folder} holds 1e+06, and torch.float16 ends at 6.55e+04; choose another dtype." in said


def test_scales_that_are_not_finite_are_not_converted(folder, refuses, capsys):
    quantized = folder.parent / "int8"
    assert main(["convert", "--model", str(folder), "--quantize", "int8", "--output", str(quantized)]) == 0
    capsys.readouterr()
    with_number(f"{IN_PROJ}_scale", math.nan)(quantized)
    assert f"{IN_PROJ} in" in refuses("convert", "--model", quantized, "--output", folder.parent / "new")


def first_row(*values):
    """Damage: overwrite the first bytes of a row's scales: least exponent, number of other values, and those values."""
    return lambda stored: stored[f"{IN_PROJ}_scale"][0, : len(values)].copy_(torch.tensor(values))


def first_codes(value):
    """Damage: change the codes of a matrix's first row."""
    return lambda stored: stored[IN_PROJ][0, 64:].fill_(value)


NO_QUANTIZED_WEIGHTS = {
    "an int8 scale of infinity": ("int8", lambda stored: stored[f"{IN_PROJ}_scale"].fill_(math.inf), "not finite"),
    "an int4 scale that is NaN": ("int4", lambda stored: stored[f"{IN_PROJ}_scale"][-1].fill_(math.nan), "not finite"),
    "more others than any row has": ("lossless12", first_row(100, 255), "than there is room for"),
    "more others than there is room for": ("lossless12", first_row(100, 9), "than there is room for"),
    "others that no code refers to": ("lossless12", first_row(100, 8), "another number of values without a code"),
    "codes for others in place of all": ("lossless12", first_codes(255), "another number of values without a code"),
    "codes for others in lower halves": ("lossless12", first_codes(15), "another number of values without a code"),
    "codes for others in upper halves": ("lossless12", first_codes(240), "another number of values without a code"),
    "exponents that do not exist": ("lossless12", first_row(242), "codes beyond the exponents of bfloat16"),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("format, change, message", NO_QUANTIZED_WEIGHTS.values(), ids=NO_QUANTIZED_WEIGHTS.keys())
def test_weights_outside_their_format_are_refused(folder, refuses, format, change, message):
    quantized = folder.parent / format
    save_model(load_model(folder, torch.bfloat16, quantize=format), quantized, files_from=folder)
    load_model(quantized)
    tensors(change)(quantized)
    said = refuses("generate", "--model", quantized, "--max-tokens", 1, "x")
    assert f"{IN_PROJ} in {quantized} has " in said and message in said
    assert said.endswith(f"which no weight in {format} has; download or convert it again.")
