"""Bounds on how many characters a tokenizer makes from one.

A tokenizer came with a download and may replace each character by many, step after step, until memory runs out. So an
upper bound of each step's growth is computed here, and a tokenizer whose steps together could exceed `MOST` is refused
before it reads a text. The time of regular expressions is not bounded.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from granite4_neuron.config.json_files import without_duplicates
from granite4_neuron.errors import UserError
from granite4_neuron.system.regular_files import read_bytes

MOST = 100

_NORMALIZER = re.compile(rb'"normalizer"\s*:\s*(?!\s|null)')
_SPELLED_OTHERWISE = (rb"\u006", rb"\u007")  # escapes of letters in the name
# The most characters (or, after the model, tokens) that a step of this type makes from one.
_GROWTH = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 12,  # NFD, and spaces on both sides
    "StripAccents": 1,
    "Nmt": 1,
    "ByteLevel": 5,  # four bytes and a space
    "Metaspace": 2,
    "Split": 1,
    "Digits": 1,
    "Punctuation": 1,
    "Whitespace": 1,
    "WhitespaceSplit": 1,
    "BertPreTokenizer": 1,
    "UnicodeScripts": 1,
    "CharDelimiterSplit": 1,
    "FixedLength": 1,
    "BertProcessing": 3,
    "RobertaProcessing": 3,
    "Strip": 1,
    "Fuse": 1,
    "ByteFallback": 3,
    "WordPiece": 2,
    "BPEDecoder": 4,
    "CTC": 4,
}
_STEPS = ("normalizers", "pretokenizers", "processors", "decoders")  # of a Sequence


def check_normalizer(file: Path) -> None:
    """Check how much the normalizer in a tokenizer.json lets a text grow. This must come before the tokenizer is built,
    because building already normalizes the added tokens.

    Raises:
        UserError: it may be too much, or cannot be told.
        ValueError: the file is not JSON.
        OSError: it cannot be read.
    """
    content = read_bytes(file)
    if not _NORMALIZER.search(content) and not any(spelling in content for spelling in _SPELLED_OTHERWISE):
        return  # reading the whole vocabulary would take longer than everything else here
    values = json.loads(content.decode("utf-8"), object_pairs_hook=without_duplicates)
    if isinstance(values, dict):
        _check(str(file), values.get("normalizer"))


def check_growth(tokenizer: Tokenizer, source: str) -> None:
    """Check how much each part of a tokenizer lets its input grow; errors call the tokenizer `source`.

    Raises:
        UserError: it may be too much, or cannot be told.
    """
    _check(source, _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer))
    _check(source, _state(tokenizer.post_processor))
    _check(source, _state(tokenizer.decoder))


def _state(part: Any) -> dict[str, Any] | None:
    """Return a part of a tokenizer in tokenizer.json's form."""
    return None if part is None else json.loads(part.__getstate__())


def _check(source: str, *parts: Any) -> None:
    growth = math.prod(1 if part is None else _growth(part, source) for part in parts)
    if growth > MOST:
        raise UserError(
            f"{source} has steps that make up to {growth:.3g} characters of one; at most {MOST} are accepted."
        )


def _growth(part: Any, source: str) -> float:
    kind: Any = part.get("type") if isinstance(part, dict) else None
    try:
        if kind == "Sequence":
            return math.prod(_growth(step, source) for name in _STEPS for step in part.get(name, ()))
        if kind == "Replace":
            return _replacement_growth(part["pattern"], part["content"])
        if kind == "Prepend":
            return 1.0 + len(part["prepend"])
        if kind == "TemplateProcessing":
            return float(sum(_tokens(piece, part["special_tokens"]) for piece in part["single"]))
        return float(_GROWTH[str(kind)])
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{source} has a step of type {kind!r}, whose growth is unknown.") from None


def _replacement_growth(pattern: dict[str, str], content: str) -> float:
    if pattern.get("String"):
        return max(1.0, len(content) / len(pattern["String"]))
    return 1.0 + 2 * len(content)  # an empty match occurs on both sides of a character


def _tokens(piece: dict[str, Any], special_tokens: dict[str, Any]) -> int:
    return 1 if "Sequence" in piece else len(special_tokens[piece["SpecialToken"]["id"]]["ids"])
