"""Reads the tokenizer of a checkpoint folder, which anybody may have written."""

from __future__ import annotations

import logging
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from granite4_neuron.checkpoint.folder_contents import TOKENIZER
from granite4_neuron.checkpoint.tokenizer_growth import check_growth, check_normalizer
from granite4_neuron.checkpoint.tokenizing import encode
from granite4_neuron.config.json_files import read_object
from granite4_neuron.errors import UserError
from granite4_neuron.system.sandbox.limited_process import NoProcess

_LONGEST_QUOTE = 200  # characters of another library's message
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer in a folder.

    Raises:
        UserError: there is none, it cannot be read, or it may make a text grow too much, see `tokenizer_growth`.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        raise UserError(f"{folder} has no {TOKENIZER}.")
    settings = {name: _read_settings(folder / name) for name in _SETTINGS if (folder / name).exists()}
    try:
        check_normalizer(file)
        names = _special_tokens(settings.get(_SETTINGS[0], {}))
        # A tokenizer_config.json may name another file, which has not been checked.
        with _without_warnings_of_class():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, tokenizer_file=str(file), **names)
        check_growth(tokenizer.backend_tokenizer, str(file))
        encode(tokenizer, "a")
    except (UserError, NoProcess):
        raise
    except Exception as error:  # tokenizers raises no narrower class for a file that it cannot parse
        # Without protobuf transformers hides the error behind the lack of it.
        cause = error.__context__ if isinstance(error, ImportError) else error
        raise UserError(f"the tokenizer in {folder} cannot be read ({_first_line(cause or error)}).") from None
    return tokenizer


def _special_tokens(settings: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that give transformers 4 the further special tokens of a tokenizer_config.json that transformers
    5 wrote: a list without names and an object with names, which have other places in the two.
    """
    extra = settings.get("extra_special_tokens")
    if "additional_special_tokens" not in PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES or isinstance(extra, dict):
        return {}  # this is transformers 5, or transformers 4 wrote the file
    named = settings.get("model_specific_special_tokens", {})
    return {"extra_special_tokens": named} | ({} if extra is None else {"additional_special_tokens": extra})


@contextmanager
def _without_warnings_of_class() -> Iterator[None]:
    """Leave out transformers 4's warning that another class may read texts otherwise: tokenizer.json says how they are
    read.
    """
    logger = logging.getLogger("transformers.tokenization_utils_base")

    def is_other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("The tokenizer class you load from this checkpoint")

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _read_settings(file: Path) -> dict[str, Any]:
    """Read and check the file before transformers reads it, because transformers trusts it."""
    values = read_object(file)
    longest = values.get("model_max_length")
    is_number = isinstance(longest, (int, float)) and not isinstance(longest, bool)
    if longest is not None and not (is_number and abs(longest) <= sys.float_info.max):
        raise UserError(f"{file}: model_max_length is {reprlib.repr(longest)}, and must be a number.")
    if "fast_tokenizer_files" in values:
        raise UserError(f"{file} has fast_tokenizer_files for other versions of transformers; leave them out.")
    return values


def _first_line(error: BaseException) -> str:
    line = (str(error).strip() or "no reason given").splitlines()[0]  # it may quote much of the file
    return f"{type(error).__name__}: {line if len(line) <= _LONGEST_QUOTE else f'{line[:_LONGEST_QUOTE]}...'}"
