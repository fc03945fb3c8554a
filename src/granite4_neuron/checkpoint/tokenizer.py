"""Reads the tokenizer of a checkpoint folder, which anybody may have written."""

from __future__ import annotations

import reprlib
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from granite4_neuron.checkpoint.folder import TOKENIZER
from granite4_neuron.checkpoint.tokenizer_growth import check_growth, check_normalizer
from granite4_neuron.checkpoint.tokenizing import encode
from granite4_neuron.config.json_files import read_object
from granite4_neuron.errors import UserError


def read_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer in a folder.

    Raises:
        UserError: there is none, it cannot be read, or it may make a text grow too much, see `tokenizer_growth`.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        raise UserError(f"{folder} has no {TOKENIZER}.")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        if (folder / name).exists():
            _check_tokenizer_config(folder / name)
    try:
        check_normalizer(file)
        # A tokenizer_config.json may name another file, which has not been checked.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, tokenizer_file=str(file))
        check_growth(tokenizer.backend_tokenizer, str(file))
        encode(tokenizer, "a")
    except UserError:
        raise
    except Exception as error:  # tokenizers raises no narrower class for a file that it cannot parse
        raise UserError(f"the tokenizer in {folder} cannot be read ({_first_line(error)}).") from None
    return tokenizer


def _check_tokenizer_config(file: Path) -> None:
    """Check the file before transformers reads it, because transformers trusts it."""
    values = read_object(file)
    longest = values.get("model_max_length")
    is_number = isinstance(longest, (int, float)) and not isinstance(longest, bool)
    if longest is not None and not (is_number and abs(longest) <= sys.float_info.max):
        raise UserError(f"{file}: model_max_length is {reprlib.repr(longest)}, and must be a number.")
    if "fast_tokenizer_files" in values:
        raise UserError(f"{file} has fast_tokenizer_files for other versions of transformers; leave them out.")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
