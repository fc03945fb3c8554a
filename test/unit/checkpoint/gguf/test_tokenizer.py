"""The tokenizer of a GGUF file is the one that the file was written with."""

import json

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from benchmarks.gguf_checkpoint import write_gguf
from granite4_neuron.checkpoint.gguf.file import open_gguf
from granite4_neuron.checkpoint.gguf.tokenizer import read_tokenizer
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.errors import UserError
from test.support.checkpoints import CHAT_TEMPLATE, DENSE, small_config
from test.support.gguf_files import rewritten

pytestmark = pytest.mark.versions

# As in tokenizer.json of Granite 4.
GRANITE_4 = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
CUTS = {
    "dbrx": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GRANITE_4), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "refact": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
}
CUTS["pixtral"] = CUTS["dbrx"]
NAMED = {"default": CHAT_TEMPLATE, "tool_use": "{{ tools }}"}
TEMPLATES = {"dbrx": CHAT_TEMPLATE, "refact": NAMED, "gpt-2": {"rag": "{{ documents }}"}, "pixtral": None}
SPECIAL = ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|pad|>"]
TEXTS = [
    "",
    " ",
    "\n\n\n \t\t x  y   z\r\n",
    "Don't, WE'LL, i'M, 'Twas; don\u2019t",
    "1 12 123 1234 12345678 3.14159 0x1F \u0663\u0664",
    "na\xefve caf\xe9, \u0417\u0434\u0440\u0430\u0432\u0441, \u4f60\u597d\u4e16\u754c, \U0001f680\U0001f999",
    "<|start_of_role|>user<|end_of_role|>Hello<|end_of_text|>\n<tool_call> <|end_of_text |>",
    "def f(x):\n    return x**2  # ======-------\n",
]


@pytest.fixture(scope="module", params=CUTS)
def written(request, tmp_path_factory):
    """Return a tokenizer and the GGUF file that was written with it."""
    tokenizer = Tokenizer(BPE(ignore_merges=request.param == "pixtral"))
    tokenizer.pre_tokenizer, tokenizer.decoder = CUTS[request.param], ByteLevelDecoder()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 5 + ["the quick brown fox 2024 2025 " * 9], trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    names = dict(bos_token=SPECIAL[0], eos_token=SPECIAL[0], pad_token=SPECIAL[3])
    original = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATES[request.param], **names)
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    ids = dict(bos_token_id=0, eos_token_id=0, pad_token_id=3)
    save_model(random_model(small_config(vocab_size=512, layer_types=("mamba",), **ids, **DENSE)), folder)
    original.save_pretrained(folder)
    write_gguf(folder, folder.parent / "model.gguf")
    return original, folder.parent / "model.gguf", request.param


def test_it_is_the_original(written):
    original, file, cut = written
    tokenizer = read_tokenizer(open_gguf(file))
    assert open_gguf(file).get("tokenizer.ggml.pre") == cut
    about, expected = (json.loads(one.backend_tokenizer.to_str()) for one in (tokenizer, original))
    assert about["added_tokens"] == expected["added_tokens"]
    assert tokenizer.get_vocab() == original.get_vocab()
    assert len(tokenizer) == len(original) and tokenizer.chat_template == TEMPLATES[cut]
    assert tokenizer.special_tokens_map == {**original.special_tokens_map}
    assert tokenizer.all_special_ids == original.all_special_ids


@pytest.mark.slow_cases
@given(st.sampled_from(TEXTS) | st.text(max_size=60), st.text(alphabet="aAzZ01 9\n\r\t'sST.,-=", max_size=40))
def test_texts_have_the_same_tokens(written, one, other):
    original, file, _ = written
    tokenizer, text = read_tokenizer(open_gguf(file)), one + other
    tokens = original.encode(text)
    assert tokenizer.encode(text) == tokens
    for skips in (False, True):
        assert tokenizer.decode(tokens, skip_special_tokens=skips) == original.decode(tokens, skip_special_tokens=skips)


@pytest.mark.parametrize("text", ["$A:1 x", "$0", "a:1", "::", "bos", " "])
def test_a_first_token_of_any_text(written, tmp_path, text):
    """The text may have another meaning in the templates of tokenizers."""
    original, file, _ = written
    tokens = list(open_gguf(file).get("tokenizer.ggml.tokens"))
    tokens[original.bos_token_id] = text
    metadata = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.tokens": tokens}
    tokenizer = read_tokenizer(open_gguf(rewritten(file, tmp_path / "bos.gguf", metadata=metadata)))
    assert tokenizer.bos_token == text
    assert tokenizer.encode("no") == [original.bos_token_id, *original.encode("no")]


def test_a_first_token_that_the_file_asks_for(written, tmp_path):
    original, file, _ = written
    added = rewritten(file, tmp_path / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    tokenizer = read_tokenizer(open_gguf(added))
    assert tokenizer.encode("a text") == [original.bos_token_id, *original.encode("a text")]
    assert tokenizer.encode("a text", add_special_tokens=False) == original.encode("a text")


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"tokenizer.ggml.model": None}, "carries no tokenizer"),
        ({"tokenizer.ggml.model": "llama"}, "the tokenizer in .* is 'llama' with '"),
        ({"tokenizer.ggml.pre": ["dbrx"]}, r"is 'gpt2' with \['dbrx'\]; those of Granite and"),
        ({"tokenizer.ggml.pre": "qwen2"}, "Nemotron 3 are 'gpt2' with 'dbrx', 'refact', 'gpt-2', 'pixtral'"),
        ({"tokenizer.ggml.merges": None}, "its merges are missing"),
        ({"tokenizer.ggml.merges": ["no such"]}, "the tokenizer in .* cannot be read"),
        ({"tokenizer.ggml.merges": ["abc"]}, "the tokenizer in .* cannot be read"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "its tokens are missing, or not what they must be"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "its token_type are missing, or not what they must be"),
        ({"tokenizer.ggml.tokens": ["a"] * 512}, "has a token twice"),
        ({"tokenizer.ggml.eos_token_id": 512}, "eos_token_id is 512, and must be the number of one of 512 tokens"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template is 1, and must be a string"),
    ],
)
def test_unsupported_tokenizers_are_refused(written, tmp_path, metadata, message):
    file = rewritten(written[1], tmp_path / "other.gguf", metadata=metadata)
    with pytest.raises(UserError, match=message):
        read_tokenizer(open_gguf(file))


def test_nemotrons_special_words_stay_whole(written, tmp_path):
    _, file, _ = written
    tokens, types = (list(open_gguf(file).get(f"tokenizer.ggml.{name}")) for name in ("tokens", "token_type"))
    tokens[511], types[511] = "qzq", gguf.TokenType.NORMAL
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": list(map(int, types))}

    def encoded(text, **others):
        changed = metadata | {f"tokenizer.ggml.{name}": value for name, value in others.items()}
        return read_tokenizer(open_gguf(rewritten(file, tmp_path / "other.gguf", metadata=changed))).encode(text)

    assert encoded("qzq", pre="pixtral", add_bos_token=None) == [0, 511]
    assert encoded("qzq", pre="pixtral", add_bos_token=False) == [511]
    assert len(encoded("qzq", pre="dbrx", add_bos_token=False)) > 1


def test_the_names_of_types_are_those_of_gguf():
    from granite4_neuron.checkpoint.gguf import tokenizer

    types = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED
    assert types == (tokenizer._CONTROL, tokenizer._USER_DEFINED, tokenizer._UNUSED)
