"""Reuse and speculation as a person types them: the same text, fewer tokens run, one sentence for every bad input."""

import io
import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from granite4_neuron import load
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.commands.cli import main
from granite4_neuron.commands.engine_options import num_bytes
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.engine import Engine, PrefixCache, PrefixFolder, Request
from granite4_neuron.errors import UserError
from granite4_neuron.generation.loop import shared_lengths
from test.support.checkpoints import DENSE, save_byte_tokenizer, small_config

PROMPT = "A text of some length, which says the same again: a text of some length, which says"


@pytest.fixture
def generate(capsys, texting_folder):
    """Return a function that runs `generate` and returns (status, standard output, standard error)."""

    def command(*arguments, model=texting_folder):
        arguments = ("generate", "--model", model, "--ignore-eos", "--max-tokens", 12, "--verbose", *arguments)
        return main([str(argument) for argument in arguments]), *capsys.readouterr()

    return command


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory):
    """Write another checkpoint with the tokenizer of `texting_folder`."""
    folder = tmp_path_factory.mktemp("small") / "model"
    sizes = dict(hidden_size=32, mamba_n_heads=2, mamba_d_head=32, mamba_d_state=32, max_position_embeddings=400)
    config = small_config(vocab_size=264, layer_types=("mamba", "attention"), eos_token_id=1, **DENSE, **sizes)
    save_model(random_model(config), folder)
    save_byte_tokenizer(folder)
    return folder


def test_the_text_stays_the_same(generate, texting_folder, small_folder):
    _, expected, _ = generate(PROMPT)
    for options in (
        ["--prefix-cache", "10MiB"],
        ["--speculate", "ngram"],
        ["--speculate", "ngram:2", "--prefix-cache", "10MiB"],
        ["--draft-model", texting_folder],
        ["--draft-model", small_folder, "--draft-tokens", 3],
    ):
        status, text, report = generate(PROMPT, *options)
        assert status == 0 and text == expected
    assert re.search(r"speculation: \d+% of \d+ drafts accepted, \d\.\d\d tokens per step", report)
    assert "100% of" in generate(PROMPT, "--draft-model", texting_folder)[2]


def test_a_draft_models_state_is_for_the_texts(generate, texting_folder, monkeypatch):
    """It has no slot for a text that waits, and no room for a longer one."""
    allocate, sizes = CPURuntime.allocate, []

    def recorded(self, *arguments):
        sizes.append(arguments)
        return allocate(self, *arguments)

    monkeypatch.setattr(CPURuntime, "allocate", recorded)
    assert generate(PROMPT, "Another text", "--draft-model", texting_folder)[0] == 0
    assert len(sizes) > 1 and {(count, length < 120) for count, length in sizes} == {(2, True)}


def test_a_file_saves_the_prompt(generate, tmp_path):
    file, longer = tmp_path / "prompt", PROMPT + " more"
    expected = generate(PROMPT)[1]
    for found, run in ((0, len(PROMPT)), (len(PROMPT), 0)):
        status, text, report = generate(PROMPT, "--prompt-cache", file)
        assert (status, text) == (0, expected)
        assert f"prefix cache: {found} tokens found" in report and f"prefill: {run} tokens" in report
    report = generate(longer, "--prompt-cache", file)[2]
    assert f"prefix cache: {len(PROMPT)} tokens found" in report and "prefill: 5 tokens" in report
    assert f"{len(longer)} tokens found" in generate(longer, "--prompt-cache", file)[2]


def test_prompts_that_begin_alike_share_it(generate):
    prompts = [PROMPT + end for end in (" one thing", " another", "")]
    expected = generate(*prompts)[1]
    status, texts, report = generate(*prompts, "--prefix-cache", "10MiB")
    assert (status, texts) == (0, expected)
    assert f"prefix cache: {2 * len(PROMPT)} tokens found" in report


@pytest.mark.slow
def test_refusals(generate, texting_folder, small_folder, tmp_path):
    file = tmp_path / "prompt"
    generate(PROMPT, "--prompt-cache", file)
    whole = file.read_bytes()
    (tmp_path / "short").write_bytes(whole[:1000])
    other = shutil.copytree(small_folder, tmp_path / "other")
    save_byte_tokenizer(other)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8").replace("<|bos|>", "<|begin|>"), encoding="utf-8")
    for options, message in (
        (["--prefix-cache", "much"], "'much' is not a size; write it like 500MiB or 2GiB"),
        (["--prompt-cache", tmp_path / "none" / "file"], "there is no such folder"),
        (["--prompt-cache", tmp_path / "short"], "damaged or incomplete"),
        (["--prompt-cache", file, "--dtype", "bfloat16"], "made in torch.float32 and the model runs in torch.bfloat16"),
        (["--prompt-cache", file, "--prefix-cache", "1KiB"], "no room for the prompt"),
        (["another", "--prompt-cache", file], "takes one prompt"),
        (["--speculate", "eagle"], "must be ngram, ngram:K, mtp or mtp:K"),
        (["--speculate", "ngram:0"], "draft_tokens is 0, and must be a whole number of at least 1"),
        (["--draft-tokens", 3], "--draft-tokens belongs to --draft-model"),
        (["--speculate", "ngram", "--draft-model", small_folder], "not both"),
        (["--draft-model", other], "has another tokenizer"),
        (["--draft-model", tmp_path / "none"], "none"),
    ):
        status, _, report = generate(PROMPT, *options)
        assert status == 2 and message in report, report
    status, _, report = generate(PROMPT, "--prompt-cache", file, model=small_folder)
    assert status == 2 and "another checkpoint" in report
    assert file.read_bytes() == whole


@pytest.fixture
def changed_folder(texting_folder, tmp_path):
    """Return a copy of a checkpoint with half of every in_proj, its columns with odd numbers, times 3."""
    folder = shutil.copytree(texting_folder, tmp_path / "changed")
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith("in_proj.weight"):
            weights[name][:, 1::2] *= 3
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def test_another_checkpoints_state_is_refused(generate, changed_folder, texting_folder, tmp_path):
    file = tmp_path / "prompt"
    _, expected, _ = generate(PROMPT, "--prompt-cache", file)
    status, text, report = generate(PROMPT, "--prompt-cache", file, model=changed_folder)
    assert status == 2 and not text and "was made with another checkpoint" in report
    assert generate(PROMPT, model=changed_folder)[1] != expected
    # The layout of the weights differs too.
    status, text, report = generate(PROMPT, "--prompt-cache", file, "--cpu-kernels", "torch")
    assert status == 2 and not text and "was made with other kernels" in report
    status, text, report = generate(PROMPT, "--prompt-cache", file)
    assert (status, text) == (0, expected) and f"{len(PROMPT)} tokens found" in report


def test_another_checkpoints_conversation_is_refused(changed_folder, texting_folder, tmp_path, monkeypatch, capsys):
    for folder, lines, status in ((texting_folder, "Hello\n/save FILE", 0), (changed_folder, "/load FILE", 2)):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines.replace("FILE", str(tmp_path / "saved"))))
        assert main(["chat", "--model", str(folder), "--max-tokens", "3"]) == status
    assert "was made with another checkpoint" in capsys.readouterr().err


def test_another_checkpoints_prefixes_are_not_found(changed_folder, texting_folder, tmp_path):
    tokens = load(texting_folder)[1].encode(PROMPT)
    hits = []
    for folder in (texting_folder, changed_folder, texting_folder):
        runtime = load(folder)[0]
        kept = PrefixFolder(tmp_path / "kept", 2**30, runtime)
        cache = PrefixCache(runtime, None, None, folder=kept)
        engine = Engine(runtime, 1, prefix_cache=cache)
        engine.add(Request(tokens, 1))
        engine.step()
        kept.close()
        hits.append(cache.stats.hit_tokens)
    assert hits == [0, 0, len(tokens)]


def test_sizes():
    assert [num_bytes(text) for text in ("100", "1KiB", "1.5 MiB", "2GiB")] == [100, 1024, 3 * 2**19, 2**31]
    for text in ("", "GiB", "-1MiB", "2GB", "1e3"):
        with pytest.raises(UserError, match="is not a size"):
            num_bytes(text)


def test_where_prompts_of_a_batch_are_cut():
    """Prompts are cut where several begin alike, by 16 tokens or more beyond the last such place."""
    a, b = list(range(40)), [7] * 30
    prompts = [[*a, 1, 2], b, [*a[:20], 3], [*a, 1, 5, 6], [*a[:20], *b], a[:10]]
    assert list(map(sorted, shared_lengths(prompts))) == [[20, 41], [], [20], [20, 41], [20], []]
    assert shared_lengths([a]) == [frozenset()] and shared_lengths([a, a]) == [frozenset([40])] * 2
