"""The growth of a text in a tokenizer: each step stays within its known factor, and ordinary tokenizers pass."""

import functools
import json
import sys
import unicodedata

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from granite4_neuron import UserError
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.tokenizer_growth import _GROWTH, check_growth, check_normalizer
from granite4_neuron.config.json_files import without_duplicates

NORMALIZERS = [
    normalizers.NFC(),
    normalizers.NFD(),
    normalizers.NFKC(),
    normalizers.NFKD(),
    normalizers.Lowercase(),
    normalizers.BertNormalizer(),
    normalizers.StripAccents(),
    normalizers.Nmt(),
    normalizers.ByteLevel(),
    normalizers.Strip(),
]
PRE_TOKENIZERS = [
    pre_tokenizers.ByteLevel(),
    pre_tokenizers.Metaspace(),
    pre_tokenizers.Split(Regex("."), "isolated"),
    pre_tokenizers.Digits(True),
    pre_tokenizers.Punctuation(),
    pre_tokenizers.Whitespace(),
    pre_tokenizers.WhitespaceSplit(),
    pre_tokenizers.BertPreTokenizer(),
    pre_tokenizers.UnicodeScripts(),
    pre_tokenizers.CharDelimiterSplit("a"),
    pre_tokenizers.FixedLength(1),
]
DECODERS = [
    decoders.ByteLevel(),
    decoders.Metaspace(),
    decoders.Fuse(),
    decoders.Strip("a", 0, 0),
    decoders.ByteFallback(),
    decoders.WordPiece(""),
    decoders.BPEDecoder(""),
    decoders.CTC("", ""),
]


def kind(step):
    return json.loads(step.__getstate__())["type"]


@functools.cache
def characters():
    """Return characters that normalizers may change, and some others."""
    numbers = [number for number in range(sys.maxunicode + 1) if not 0xD800 <= number < 0xE000]
    every = [chr(number) for number in numbers if number < 0x400 or unicodedata.decomposition(chr(number))]
    return [*every, "\u0130", *map(chr, numbers[::997])]


@pytest.mark.parametrize("step", NORMALIZERS, ids=kind)
def test_no_normalizer_exceeds_its_known_growth(step):
    assert max(len(step.normalize_str(one)) for one in characters()) <= _GROWTH[kind(step)]


@pytest.mark.parametrize("step", PRE_TOKENIZERS, ids=kind)
def test_no_pre_tokenizer_exceeds_its_known_growth(step):
    made = (sum(len(piece) for piece, _ in step.pre_tokenize_str(one)) for one in characters())
    assert max(made) <= _GROWTH[kind(step)]


@pytest.mark.parametrize("step", DECODERS, ids=kind)
def test_no_decoder_exceeds_its_known_growth(step):
    for tokens in (["a"], ["\u0120"], ["<0xE4>"], ["a", "b", "c"], ["."] * 3):
        # A byte in angle brackets becomes a replacement character, which is shorter.
        assert len(step.decode(tokens)) <= _GROWTH[kind(step)] * sum(map(len, tokens))


def test_every_known_step_is_tested():
    tried = {kind(step) for step in [*NORMALIZERS, *PRE_TOKENIZERS, *DECODERS]}
    assert _GROWTH.keys() - tried == {"BertProcessing", "RobertaProcessing"}


def tokenizer_of(normalizer=None, pre_tokenizer=None, post_processor=None, decoder=None):
    tokenizer = Tokenizer(models.BPE({"a": 0, "<s>": 1}, []))
    parts = dict(normalizer=normalizer, pre_tokenizer=pre_tokenizer, post_processor=post_processor, decoder=decoder)
    for name, part in parts.items():
        if part is not None:
            setattr(tokenizer, name, part)
    return tokenizer


SPLIT = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+"), "isolated")
TEMPLATE = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
SPACES = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
ORDINARY = {
    "nothing": tokenizer_of(),
    "as GPT-2's": tokenizer_of(None, pre_tokenizers.ByteLevel(), processors.ByteLevel(), decoders.ByteLevel()),
    "as Llama 3's": tokenizer_of(
        normalizers.NFC(),
        pre_tokenizers.Sequence([SPLIT, pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        processors.Sequence([processors.ByteLevel(), TEMPLATE]),
        decoders.ByteLevel(),
    ),
    "as Llama 2's": tokenizer_of(
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        None,
        TEMPLATE,
        decoders.Sequence(SPACES),
    ),
}


@pytest.mark.parametrize("tokenizer", ORDINARY.values(), ids=ORDINARY.keys())
def test_ordinary_tokenizers_pass(tokenizer, tmp_path):
    check_growth(tokenizer, "it")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    check_normalizer(tmp_path / "tokenizer.json")


def test_the_vocabulary_is_not_read_without_a_normalizer(monkeypatch):
    """Reading it would take a tenth of a second."""
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was read"))
    check_normalizer(bundled_checkpoint() / "tokenizer.json")


@pytest.mark.parametrize("colon", [":", " :\n\t", ": "])
def test_a_normalizer_is_found_in_any_json_spelling(tmp_path, colon):
    (tmp_path / "tokenizer.json").write_text(f'{{"normalizer"{colon}{{"type": "Prepend", "prepend": "{"x" * 200}"}}}}')
    with pytest.raises(UserError, match="make up to 201 characters of one"):
        check_normalizer(tmp_path / "tokenizer.json")


@pytest.mark.slow
def test_a_duplicate_name_among_a_million_is_found_fast():
    """A search of the list for every name would take an hour."""
    pairs = [(str(number), 0) for number in range(1_000_000)]
    with pytest.raises(ValueError, match="'999999' is in it twice"):
        without_duplicates([*pairs, pairs[-1]])
