"""The tokenizer and chat template that a GGUF file carries."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from granite4_neuron.checkpoint.gguf.file import GGUFFile
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_KEY = "tokenizer.ggml"
_TEMPLATE = "tokenizer.chat_template"
# Types of tokens.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _granite_4() -> list[PreTokenizer]:
    return [Split(Regex(_SPLIT), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]


def _granite_3() -> list[PreTokenizer]:
    return [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]


def _gpt_2() -> list[PreTokenizer]:
    return [ByteLevel(add_prefix_space=False, use_regex=True)]


# How texts are cut into words before bytes are merged, under llama.cpp's names: Granite 4 cuts like dbrx, Granite 3
# like refact, and Nemotron 3 like pixtral. For refact and gpt-2, llama.cpp's own test texts gave llama.cpp's tokens.
WORDS = {"dbrx": _granite_4, "refact": _granite_3, "gpt-2": _gpt_2, "pixtral": _granite_4}
# With these names llama.cpp keeps a word that is a token whole, whatever the merges; and a text begins with the
# beginning-of-text token unless the file says otherwise.
AS_LLAMA_3 = ("pixtral",)


def has_tokenizer(file: GGUFFile) -> bool:
    """Return whether the file carries a tokenizer of any kind."""
    return file.get(f"{_KEY}.model") not in (None, "no_vocab")


def read_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Build the tokenizer with its special tokens and chat template.

    Raises:
        UserError: there is none, it is damaged, or of a kind that no model of this package has.
    """
    # Not at the top: the config of a checkpoint needs no transformers.
    from transformers import PreTrainedTokenizerFast

    kind, words = file.get(f"{_KEY}.model"), file.get(f"{_KEY}.pre")
    if not has_tokenizer(file):
        raise UserError(f"{file.path} carries no tokenizer; convert the model with its tokenizer.")
    if kind != "gpt2" or words not in list(WORDS):  # a file may have a list in its place
        raise UserError(
            f"the tokenizer in {file.path} is {reprlib.repr(kind)} with {reprlib.repr(words)}; those of Granite and "
            f"Nemotron 3 are 'gpt2' with {', '.join(map(repr, WORDS))}."
        )
    tokens = _list(file, "tokens", str)
    types = _list(file, "token_type", int, len(tokens))
    backend = _backend(file, tokens, types, ignore_merges=words in AS_LLAMA_3)
    steps = WORDS[words]()
    backend.pre_tokenizer = steps[0] if len(steps) == 1 else Sequence(steps)
    special = {
        name: _token(file, key, tokens)
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("pad_token", "padding_token_id"),
            ("unk_token", "unknown_token_id"),
        )
    }
    add_bos = file.get(f"{_KEY}.add_bos_token")
    if (words in AS_LLAMA_3 if add_bos is None else add_bos is True) and special["bos_token"] is not None:
        # Under another name: the token's text may contain characters of the template's syntax.
        bos = {"id": "bos", "ids": [file.get(f"{_KEY}.bos_token_id")], "tokens": [special["bos_token"]]}
        backend.post_processor = TemplateProcessing(single="bos $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_templates(file),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )


def _templates(file: GGUFFile) -> str | dict[str, str] | None:
    """Return the chat template, or several by name."""
    names = file.get(f"{_TEMPLATE}s")  # of all but the default
    others = names if isinstance(names, list) else []
    keys = {"default": _TEMPLATE, **{str(name): f"{_TEMPLATE}.{name}" for name in others}}
    templates = {name: file.get(key) for name, key in keys.items()}
    for name, template in templates.items():
        if template is not None and not isinstance(template, str):
            raise UserError(f"{file.path}: {keys[name]} is {reprlib.repr(template)}, and must be a string.")
    found = {name: template for name, template in templates.items() if template is not None}
    return found.get("default") if found.keys() <= {"default"} else found


def _backend(file: GGUFFile, tokens: list[str], types: list[int], ignore_merges: bool) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in _list(file, "merges", str)]
    vocab = {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED}
    if len(vocab) != len(tokens) - types.count(_UNUSED):
        raise UserError(f"the tokenizer in {file.path} has a token twice.")
    try:
        backend = Tokenizer(BPE(vocab, merges, ignore_merges=ignore_merges))
        backend.decoder = ByteLevelDecoder()
        backend.add_special_tokens([_added(tokens[i], True) for i, kind in enumerate(types) if kind == _CONTROL])
        backend.add_tokens([_added(tokens[i], False) for i, kind in enumerate(types) if kind == _USER_DEFINED])
    except Exception as error:  # tokenizers raises no narrower class
        raise UserError(f"the tokenizer in {file.path} cannot be read ({error}).") from None
    return backend


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _list(file: GGUFFile, name: str, kind: type, length: int | None = None) -> list[Any]:
    values = file.get(f"{_KEY}.{name}")
    is_right = isinstance(values, list) and all(type(each) is kind for each in values)
    if not is_right or length not in (None, len(values)):
        raise UserError(f"the tokenizer in {file.path} is damaged: its {name} are missing, or not what they must be.")
    return values


def _token(file: GGUFFile, name: str, tokens: list[str]) -> str | None:
    number = file.get(f"{_KEY}.{name}")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(tokens):
        raise UserError(
            f"{file.path}: {_KEY}.{name} is {reprlib.repr(number)}, and must be the number of one of {len(tokens)} "
            "tokens."
        )
    return tokens[number]
