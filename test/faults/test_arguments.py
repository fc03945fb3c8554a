"""Arguments that make no sense, given to the functions and to the command."""

import math

import pytest
import torch
import transformers

from granite4_neuron import UserError, generate, load, stream_generate
from granite4_neuron.engine import Engine, Request
from granite4_neuron.generation import bundled_checkpoint, chat_prompt

PROMPTS = {
    "None": None,
    "a number": 3.5,
    "bytes": b"abc",
    "a tensor of fractions": torch.tensor([1.0, 2.0]),
    "a tensor of booleans": torch.tensor([[True]]),
    "a tensor of one number": torch.tensor(1),
    "a mask of another length": {"input_ids": [1, 2, 3], "attention_mask": [1, 1]},
    "a mask of another number": {"input_ids": [[1, 2]], "attention_mask": [[1, 1], [1, 1]]},
    "a mask that is a number": {"input_ids": [1, 2], "attention_mask": 1},
    "nothing but padding": {"input_ids": [[1, 2]], "attention_mask": [[0, 0]]},
    "no ids": {"input_ids": None},
    "a prompt of messages and text": ["a", [{"role": "user", "content": "x"}, "b"]],
    "a role that is a number": [{"role": 3, "content": "x"}],
    "a dictionary": {1: 2},
    "fractions": [1.5],
    "nothings": [None],
    "booleans": [True],
    "tensors of one number in a list": [torch.tensor(1)],
    "bytes in a list": [b"a"],
    "text and a number": ["a", 3],
    "nothing": [],
    "an empty prompt": [[]],
    "an empty text": "",
    "lone surrogates": "a\udcff",
    "a token outside": [10**6],
    "a negative token": [-1],
    "too long": "x" * 600,
}

OPTIONS = {
    "max_tokens": (None, 2.5, "3", True, 0, -1),
    "temperature": ("hot", math.inf, math.nan, -1, True),
    "top_k": (1.5, -1, "3"),
    "top_p": (math.nan, 2, "half", -0.1),
    "min_p": (2, -1, math.nan),
    "repetition_penalty": ("2", 0, -1, math.inf),
    "seed": (1.5, "1", -1, 2**63),
    "stop": ([1], b"x", "", [""], 3),
    "stop_token_ids": (["a"], 3, [1.5], [-1], [10**30]),
    "min_tokens": (-1, 1.5, "3", True, 10**30),
    "logits_processors": (3, "x", [None], len),
}

REQUESTS = {
    "tokens": (None, {1, 2}, b"ab", "ab", 3, torch.tensor(3), torch.tensor([[1, 2]]), torch.tensor([1.5]), {1: 2}),
    "stop": (3, [1], b"x", "", [""], [None], {"x": 1}),
    "stop_token_ids": (0, ["a"], [[1]], "1", [1.5]),
    "snapshots_at": (1, ["a"], [[1]], [0]),
    "logit_bias": (3, [1], {"a": 1}, {1: "x"}, {1: 101}),
    "max_tokens": (None, 2.5, "3", True, 0),
}

ENGINES = {
    "num_sequences": (None, 0, -1, 1.5, "1", True, 10**30),
    "max_length": (0, 1, -1, 2.5, "10"),
    "memory_bytes": (-1, "1", math.nan),
    "tokenizer": ("x", 3),
    "prefix_cache": ("x", 3),
    "drafter": ("x", 3),
    "draft_tokens": (None, 0, 1.5, "4"),
}

LOADS = {
    "model": (3, b"x", "", "no-such-folder", "a/b/c", "x" * 5000, "a\0b"),
    "dtype": ("bfloat", "float64", torch.int8, torch.float64),
    "state_dtype": ("int8", "float64"),
    "adapters": ("x", ["x"], None, {"a": 3}, {1: "x"}),
    "prefill_scan": ("fast", None),
    "decode_kernel": ("fast", None),
    "experts_decode": ("fast", "all"),  # a CPU does not take "all"
    "cpu_kernels": ("fast", None),
    "backend": ("gpu", None),
    "quantize": ("int3", 8),
    "compiled": ("folder",),
    "tp_degree": (0, -3, 1.5, "2", None),
    "tuned_configs": (3, "no-such-folder"),
    "compiler": ("gcc",),
    "kv_write": ("fast", 1),
    "prefill_by_view": ("no", 1),
    "batch_invariant": ("yes", 1),
    "prefill_buckets": (128, "128", [], [0], [1.5], ["128"], [True]),
}

MODELS = {
    "h-350m": "did you mean ibm-granite/granite-4.0-h-350m?",
    "granite-4.0-h-small": "did you mean ibm-granite/granite-4.0-h-small?",
    "https://huggingface.co/ibm-granite/granite-4.0-h-350m": "did you mean ibm-granite/granite-4.0-h-350m?",
    "huggingface.co/ibm-granite/granite-4.0-h-1b/tree/main": "did you mean ibm-granite/granite-4.0-h-1b?",
    "./nothing/here": "is not a folder; give the folder of a checkpoint, a GGUF file or a Hugging Face id",
    "": "'' is not a folder",
}


def each(table):
    return [pytest.param(name, value, id=f"{name}={str(value)[:20]!r}") for name in table for value in table[name]]


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_a_bad_prompt_is_refused(texting, prompt):
    with pytest.raises(UserError, match=r"prompt.*\.$"):
        list(stream_generate(*texting, prompt))


@pytest.mark.parametrize("name, value", each(OPTIONS))
def test_a_bad_sampling_option_is_refused(texting, name, value):
    with pytest.raises(UserError, match=rf"{name.removeprefix('repetition_')}.*\.$"):
        generate(*texting, "A", **{name: value})


@pytest.mark.parametrize("name, value", each(REQUESTS))
def test_a_bad_request_is_refused(texting, name, value):
    runtime, tokenizer = texting
    engine = Engine(runtime, 1, tokenizer=tokenizer)
    with pytest.raises(UserError, match=rf"({name}|the prompt|snapshots) .*\.$"):
        engine.add(Request(**{"tokens": [1], name: value}))
    assert not engine.has_work


@pytest.mark.parametrize("name, value", each(ENGINES))
def test_a_bad_argument_of_the_engine_is_refused(texting, name, value):
    with pytest.raises(UserError, match=r"\.$") as error:
        Engine(texting[0], **{"num_sequences": 1, name: value})
    assert name in str(error.value) or "of 1,000,000,000,000" in str(error.value)


@pytest.mark.parametrize("id", ["x", None, 1.5, []], ids=repr)
def test_an_unknown_id_is_refused(texting, id):
    engine = Engine(texting[0], 1)
    for method in (engine.cancel, engine.finish):
        with pytest.raises(UserError, match=r"^id is .*\.$"):
            method(id)
    with pytest.raises(UserError, match="id is 7, and must be that of a sequence that runs"):
        engine.finish(7)


@pytest.mark.parametrize("name, value", each(LOADS))
def test_a_bad_argument_of_load_is_refused(texting_folder, name, value):
    with pytest.raises(UserError, match=r"\.$"):
        load(**{"model": texting_folder, name: value})


def test_a_dtype_may_be_given_by_name(texting_folder):
    runtime, _ = load(texting_folder, dtype="bfloat16", state_dtype="float16")
    assert (runtime.dtype, runtime.state_dtype) == (torch.bfloat16, torch.float16)
    with pytest.raises(UserError, match=r"dtype is 'half'; it must be one of .*bfloat16"):
        load(texting_folder, dtype="half")


def test_another_default_device_is_refused(texting_folder):
    with torch.device("meta"), pytest.raises(UserError, match="torch's default device is meta; set it to cpu"):
        load(texting_folder)


def test_a_long_text_is_refused_by_us_alone(texting_folder, caplog):
    """transformers says that it "will result in indexing errors"."""
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    try:
        runtime, tokenizer = load(texting_folder)
        tokenizer.model_max_length = 500
        with pytest.raises(UserError, match="the prompt has 700 tokens"):
            generate(runtime, tokenizer, "x" * 700)
    finally:
        transformers.logging.disable_propagation()
        transformers.logging.set_verbosity_error()
    assert "indexing errors" not in caplog.text


@pytest.mark.parametrize("name", ["tools", "documents"])
@pytest.mark.parametrize("levels", [150, 500, 900, 100_000])
def test_deeply_nested_json_is_refused(refuses, folder, tmp_path, name, levels):
    (tmp_path / "file").write_text("[" + '{"a": ' * levels + "1" + "}" * levels + "]")
    said = refuses("chat", "--model", folder, f"--{name}", tmp_path / "file")
    assert f"{name} are nested more than 100 levels deep" in said or "is not JSON" in said


@pytest.mark.parametrize("levels", [500, 900, 100_000])
def test_a_deeply_nested_schema_is_refused(refuses, folder, tmp_path, levels):
    (tmp_path / "file").write_text('{"not": ' * levels + "{}" + "}" * levels)
    assert "the JSON schema" in refuses("generate", "--model", folder, "--json-schema", tmp_path / "file", "x")


@pytest.mark.parametrize("message", [None, 3, b"x", "a\udcff"], ids=repr)
def test_a_message_that_is_not_text_is_refused(texting, message):
    with pytest.raises(UserError, match="the message is"):
        chat_prompt(texting[1], message)


@pytest.mark.parametrize("name, answer", MODELS.items(), ids=MODELS.keys())
def test_a_wrong_model_name_is_refused_with_a_hint(refuses, name, answer):
    assert answer in refuses("generate", "--model", name, "x")


@pytest.mark.parametrize("command", [("generate", "--file"), ("evaluate",)], ids=["generate", "evaluate"])
def test_an_endless_text_is_refused(refuses, folder, monkeypatch, command):
    monkeypatch.setattr("granite4_neuron.commands.options._MOST_CHARACTERS", 10_000)
    said = refuses(*command, "/dev/zero", "--model", folder)
    assert said == "/dev/zero has more than 10,000 characters, the most that are read."


@pytest.mark.parametrize("text", ["print(1)\n", '{"a": 1}\n', "[1]", "\n", '{"custom_id": "1"}'])
def test_an_output_that_is_no_batch_result_is_refused(refuses, tmp_path, text):
    (tmp_path / "in").write_text('{"prompt": "x"}\n')
    (tmp_path / "out").write_text(text)
    said = refuses("batch", tmp_path / "in", tmp_path / "out")
    assert "is there already, and there is no out.record that says that batch wrote it" in said
    assert (tmp_path / "out").read_text() == text


def test_escape_sequences_in_a_name_are_escaped(refuses):
    said = refuses("generate", "--model", "./\x1b[2J\nx\u202e", "x")
    assert r"\x1b[2J\nx\u202e" in said and said.isprintable()


def test_messages_are_one_line_of_limited_length():
    for message in ("x" * 10**6 + ".", "\0" * 10**6 + ".", "a\nb\r\x9b."):
        said = str(UserError(message))
        assert said.isprintable() and said.endswith(".") and len(said) <= 1600
        assert str(UserError(said)) == said
    assert str(UserError("\N{LATIN SMALL LETTER E WITH ACUTE} is a letter.")).startswith("\xe9 is")


def test_a_file_of_weights_is_not_a_model(refuses, folder):
    assert "is not a folder but a file" in refuses("generate", "--model", folder / "model.safetensors", "x")


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "arguments, message",
    [
        (("sing",), "invalid choice: 'sing'"),
        (("generate", "--max-tokens", "0", "x"), "argument --max-tokens: 0 is not a whole number of at least 1"),
        (("generate", "--temperature", "inf", "x"), "argument --temperature: inf is not a number at least 0"),
        (("generate", "--threads", "0", "x"), "argument --threads: 0 is not a whole number of at least 1"),
        (("generate", "--threads", "2147483648", "x"), "argument --threads: 2147483648 is more than 1024, the most"),
        (("generate", "--threads", "9" * 5000, "x"), f"{'9' * 40}... is more than 1024, the most that it can be"),
        (("generate", "--threads", "x" * 5000, "x"), f"{'x' * 40}... is not a whole number of at least 1"),
        (("generate", "--max-tokens", "9" * 400, "x"), "... is more than 2147483647, the most that it can be"),
        (
            ("plan", "--model", "h-350m", "--rate", "1", "--prompt-length", "9" * 400, "--output-length", "8"),
            "is too long; a length is at most",
        ),
        (
            (
                "plan",
                "--model",
                "h-350m",
                "--rate",
                "1",
                "--prompt-length",
                "8",
                "--output-length",
                f"uniform:1:{2**25}",
            ),
            "is too long; a length",
        ),
        (("generate", "--seed", str(2**63), "x"), "is more than 9223372036854775807, the most that it can be"),
        (("generate", "--temperature", "9" * 5000, "x"), "... is not a number at least 0"),
        (("generate", "--prefix-cache", "9" * 400, "x"), "is more memory than there is anywhere"),
        (("generate", "--prefix-cache", "9" * 5000 + "GiB", "x"), "is more memory than there is anywhere"),
        (("generate", "--speculate", "ngram:" + "9" * 5000, "x"), "... is more than 2147483647, the most that it can"),
        (("chat", "--prefix-cache", "9" * 400), "is more memory than there is anywhere"),
        (("chat", "--max-length", "9" * 5000), "is more than 2147483647"),
        (("tune", "--threads", "4096", "--output", "x"), "argument --threads: 4096 is more than 1024"),
        (("plan", "--latency", "--drafted", "2147483647"), "2147483647 is more than 1024, the most that it can be"),
        (("plan", "--context", "9" * 5000), "... is more than 2147483647, the most that it can be"),
        (("plan", "--rate", "0"), "argument --rate: 0 is not a number above 0"),
        (("plan", "--rate", "1"), "--rate needs --prompt-length and --output-length"),
        (("plan", "--rate", "1", "--prompt-length", "9", "--output-length", "9"), "give --steps FILE, which"),
        (("plan", "--traffic", "x", "--seed", "1"), "--seed belongs to --rate; leave it out with --traffic"),
        (("plan", "--price", "1"), "--price belongs to --traffic or --rate"),
        (("plan", "--traffic", "x", "--latency"), "cannot be combined"),
        (
            ("serve", "--model", str(bundled_checkpoint()), "--cpu-kernels", "torch", "--allow-runtime-lora-updating"),
            "adapters run on the backend cpu only, with its fused kernels",
        ),
        (("plan", "--plot", "x.png"), "--plot belongs to --latency, --traffic or --rate"),
        (("tune", "--output", "x", "--plot", "/no/such/folder/x.png"), "there is no such folder"),
        (("evaluate", "--plot", "x.docx"), "x.docx cannot be drawn; the name must end in one of"),
        (("plan", "--traffic", "x", "--steps", "/no/such/place"), "does not exist; granite4-neuron measure writes"),
        (("plan", "--traffic", "/no/such/place", "--model", "h-350m"), "/no/such/place cannot be read (No such file"),
        (("measure", "--output", "/no/such/place/x"), "there is no such folder"),
        (("measure", "--output", "x", "--top-p", "0.9"), "--top-k and --top-p need --temperature"),
        (("serve", "--port", "65536"), "argument --port: 65536 is more than 65535, the most that it can be"),
        (("serve", "--allowed-origins", "example.org"), "'example.org' is not an origin, such as https://"),
        (
            ("batch", "no-such-file", "x"),
            "no-such-file is not a file; give one with a request or a prompt",
        ),
        (("batch", "x" * 5000, "x"), "File name too long"),
        (("batch", __file__, "/no/such/place/x"), "there is no such folder"),
        (("batch", __file__, "."), "is not a regular file"),
        (("batch", __file__, "x.parquet"), "x.parquet cannot be the output; give another file, which gets JSON lines"),
        (("batch", __file__, __file__), "cannot be the output; give another file"),
        (("batch", __file__, "x", "--workers", "2"), "--workers belongs to --ray"),
        (("batch", __file__, "x", "--system", "y"), "--system is part of a conversation; give --chat too"),
        (("batch", __file__, "x", "--chat", "--chat-template-kwargs", "{"), "--chat-template-kwargs is not JSON"),
        (("batch", __file__, "x", "--model", "no/such"), "no/such is not a folder"),
        (("check", "--tokens", "100000"), "a prompt and its new tokens are 100,"),
        (("generate", "--file", "x" * 5000), "cannot be read (File name too long)"),
        (("generate", "--file", "."), "cannot be read (Is a directory)"),
        (("generate", "--tuned-configs", "x" * 5000, "x"), "which is not a folder"),
        (("convert", "--output", "x" * 5000), "could not be written (File name too long)"),
        (("convert", "--output", "/no/such/place/x"), "there is no folder /no/such/place"),
        (("graphs", "--json", "/no/such/place/x"), "there is no such folder"),
        (("graphs", "--json", "x" * 5000 + "/y"), "there is no such folder"),
        (("graphs", "--buckets", "4096"), "--max-length must be at least as large"),
        (("graphs", "--model", "h-350m", "--experts-decode", "kernel"), "counted with --backend nxdi"),
        (("--log-level", "loud", "info"), "argument --log-level: invalid choice: 'loud'"),
        (("--print-completion", "cmd"), "argument --print-completion: invalid choice: 'cmd'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_a_bad_command_line_is_refused(refuses, folder, arguments, message):
    model = ("--model", folder) if arguments and arguments[0] in ("generate", "convert", "check") else ()
    assert message in refuses(*arguments, *model)
