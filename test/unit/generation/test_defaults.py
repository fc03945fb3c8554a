"""A checkpoint's defaults choose the tokens that they choose in transformers, and what is not used is named."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.gguf_checkpoint import write_gguf
from granite4_neuron import UserError, load
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.folder_contents import GENERATION_CONFIG
from granite4_neuron.commands.cli import main
from granite4_neuron.engine import Engine, Request
from test.support.engines import generate_one
from test.support.gguf_files import rewritten

pytestmark = pytest.mark.versions

PROMPT, COUNT = list(range(20, 60)), 24


@pytest.fixture
def folder(texting_folder, tmp_path):
    return shutil.copytree(texting_folder, tmp_path / "model")


def loaded(folder, stored, **options):
    """Load a checkpoint with this generation_config.json: the runtime, and what was said about it."""
    (folder / GENERATION_CONFIG).write_text(json.dumps(stored))
    said = []
    runtime, _ = load(folder, dtype="float32", remark=said.append, **options)
    return runtime, said


def tokens_of(runtime, **options):
    request = Request(PROMPT, COUNT, stop_token_ids={runtime.generation_config.eos_token_id}, **options)
    return generate_one(Engine(runtime, 1), request)


@pytest.mark.slow
def test_they_choose_the_tokens_of_transformers(folder):
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    greedy = tokens_of(loaded(folder, {})[0])
    first, second, third = greedy[:3]
    changes = [
        {"bad_words_ids": [[first], [7, 8]]},
        {"bad_words_ids": [[first, second], [1]]},
        {"suppress_tokens": [second, third], "bad_words_ids": [[first]]},
        {"begin_suppress_tokens": [first]},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 5, "eos_token_id": first},
        {"repetition_penalty": 3.0, "suppress_tokens": [first]},
    ]
    for change in changes:
        runtime, said = loaded(folder, {"eos_token_id": 1, **change})
        reference.generation_config = type(reference.generation_config).from_pretrained(folder)
        whole = reference.generate(torch.tensor([PROMPT]), max_new_tokens=COUNT, pad_token_id=0, do_sample=False)
        expected = whole[0, len(PROMPT) :].tolist()
        assert tokens_of(runtime) == expected != greedy and not said, change


def test_a_request_goes_first(folder):
    greedy = tokens_of(loaded(folder, {})[0])
    runtime, _ = loaded(folder, {"bad_words_ids": [[greedy[0]]], "no_repeat_ngram_size": 1})
    assert tokens_of(runtime, bad_words_ids=[], no_repeat_ngram_size=0) == greedy


def test_what_is_not_used_is_named_once(folder):
    without_effect = {"use_cache": True, "num_beams": 1, "eta_cutoff": 0.0, "forced_eos_token_id": None}
    others = {"eta_cutoff": 0.9, "epsilon_cutoff": 3e-4, "sequence_bias": [[[5], -10.0]], "forced_eos_token_id": 0}
    assert loaded(folder, without_effect)[1] == []
    assert loaded(folder, without_effect | others)[1] == [
        f"{folder / GENERATION_CONFIG} has settings that are not used here: eta_cutoff 0.9, forced_eos_token_id 0, "
        "epsilon_cutoff 0.0003, sequence_bias [[[5], -10.0]]."
    ]


@pytest.mark.parametrize(
    "stored, message",
    [
        ({"suppress_tokens": [264]}, "suppress_tokens has a token id outside the vocabulary, which is 0 to 263"),
        ({"bad_words_ids": [[]]}, "bad_words_ids is .*, and must be a list of lists of token ids, none of them empty"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1, and must be a whole number of at least 0"),
    ],
    ids=str,
)
def test_a_wrong_default_is_refused(folder, stored, message):
    with pytest.raises(UserError, match=f"{GENERATION_CONFIG}: {message}"):
        loaded(folder, stored)


SAMPLING = {"temp": 1.0, "top_p": 0.95, "top_k": 40, "min_p": 0.05, "penalty_repeat": 1.05}
RIGHT = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.05, "do_sample": True}
OF_GGUF = {
    "all": (SAMPLING, RIGHT, []),
    "none": ({}, {"do_sample": None, "temperature": None, "top_k": None}, []),
    "greedy": ({"temp": 0.0, "top_k": 0, "xtc_probability": 0.0}, {"temperature": 0.0, "top_k": 0}, []),
    "others": ({"mirostat": 2, "penalty_last_n": 64}, {"do_sample": None}, ["mirostat 2", "penalty_last_n 64"]),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("sampling, right, named", OF_GGUF.values(), ids=OF_GGUF)
def test_the_sampling_of_a_gguf_file(tmp_path, sampling, right, named):
    write_gguf(bundled_checkpoint(), tmp_path / "plain.gguf")
    metadata = {f"general.sampling.{name}": value for name, value in sampling.items()}
    file, said = rewritten(tmp_path / "plain.gguf", tmp_path / "model.gguf", metadata=metadata), []
    found = load(file, remark=said.append)[0].generation_config
    assert {name: getattr(found, name) for name in right} == right
    named = ", ".join(f"general.sampling.{each}" for each in named)
    assert said == ([f"{file} has settings that are not used here: {named}."] if named else [])
    assert main(["convert", "--model", str(file), "--output", str(tmp_path / "converted")]) == 0
    found = load(tmp_path / "converted")[0].generation_config
    assert {name: getattr(found, name) for name in right} == right
