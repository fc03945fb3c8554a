"""Options of the engine, for prefix caching and speculation, and the objects that are made from them."""

from __future__ import annotations

import argparse
import re
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.commands.options import at_least, check_folder_of, load_runtime
from granite4_neuron.devices.neuron.sdk import DRAFT_GRAPHS
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from granite4_neuron.engine import Engine, PrefixCache, PrefixFolder, SlotPrefixCache
    from granite4_neuron.engine.drafting.drafters import Drafter
    from granite4_neuron.runtime.interface import Runtime

DRAFT_TOKENS = 4
NGRAM, MTP = "ngram", "mtp"  # methods of --speculate
_SAME_TEXT = "the text stays the same on the cpu backend with its fused kernels; elsewhere rounding may change it"
_FOLDER_SIZE = "10GiB"
_MOST_BYTES = 2.0**60
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add_prefix_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix-cache",
        metavar="SIZE",
        help="memory of a prefix cache, such as 2GiB, for prompts with the same beginning; with --backend nxdi it uses "
        "spare slots of the compiled model",
    )
    parser.add_argument(
        "--prompt-cache",
        type=Path,
        metavar="FILE",
        help="for one prompt: start from the state in FILE if it exists, and write the prompt's state there",
    )


def add_prefix_folder(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--prefix-cache-dir",
        type=Path,
        metavar="FOLDER",
        help="also keep the prefix cache in files of this folder, for the next start; processes may share it",
    )
    parser.add_argument(
        "--prefix-cache-dir-size",
        metavar="SIZE",
        help=f"most bytes of these files (default: {_FOLDER_SIZE})",
    )


def add_speculation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculate",
        metavar="ngram[:K] | mtp[:K]",
        help="draft up to K tokens from the text itself (ngram), or with the model's own layers for multi-token "
        f"prediction (mtp), which few models have (default: {DRAFT_TOKENS}); {_SAME_TEXT}",
    )
    parser.add_argument(
        "--draft-model",
        metavar="FOLDER",
        help=f"draft tokens with a smaller checkpoint that has the same tokenizer; {_SAME_TEXT}",
    )
    parser.add_argument(
        "--draft-tokens",
        type=at_least(1),
        metavar="K",
        help=f"how many the draft model drafts (default: {DRAFT_TOKENS})",
    )


def check_prompt_cache(file: Path | None) -> None:
    """Check, before any work, that the file of --prompt-cache may be written; raise UserError if not."""
    if file is None:
        return
    check_folder_of(file)
    # Not at the top: --help does not need torch.
    from granite4_neuron.state.snapshot import check_place

    check_place(file)


def prefix_cache(
    options: argparse.Namespace, runtime: Runtime, num_sequences: int
) -> PrefixCache | SlotPrefixCache | None:
    """Return the prefix cache for the options of `add_prefix_cache`, with the state from the file; None without them.

    Raises:
        UserError: an option is malformed, the file is damaged or of another model, or the runtime makes no snapshots.
    """
    if options.prefix_cache is None and options.prompt_cache is None:
        return None
    # Not at the top: --help does not need torch.
    from granite4_neuron.engine import PrefixCache
    from granite4_neuron.engine.prefix.slot_cache import prefix_cache_of
    from granite4_neuron.runtime.interface import require
    from granite4_neuron.state.snapshot import Snapshot

    if options.prompt_cache is not None:
        require(runtime, "snapshot")
    cache: PrefixCache | SlotPrefixCache
    if options.prefix_cache is not None:
        cache = prefix_cache_of(runtime, num_bytes(options.prefix_cache), num_sequences)
    else:
        cache = PrefixCache(runtime, None, None)
    if options.prompt_cache is not None and options.prompt_cache.exists():
        assert isinstance(cache, PrefixCache)  # a runtime that makes snapshots keeps no slots itself
        cache.load(Snapshot.load(options.prompt_cache, runtime))
    return cache


def prefix_folder(options: argparse.Namespace, runtime: Runtime) -> PrefixFolder | None:
    """Return the folder of --prefix-cache-dir; None without the option.

    Raises:
        UserError: a size is malformed, the runtime makes no snapshots, or the folder is invalid.
    """
    max_bytes = num_bytes(options.prefix_cache_dir_size or _FOLDER_SIZE)
    if options.prefix_cache_dir is None:
        if options.prefix_cache_dir_size is not None:
            raise UserError("--prefix-cache-dir-size belongs to --prefix-cache-dir.")
        return None
    from granite4_neuron.engine import PrefixFolder
    from granite4_neuron.runtime.interface import require

    require(runtime, "snapshot")
    return PrefixFolder(options.prefix_cache_dir, max_bytes, runtime)


def save_prompt(
    options: argparse.Namespace, cache: PrefixCache | SlotPrefixCache | None, tokens: Sequence[int]
) -> None:
    """Write a prompt's state to the file of --prompt-cache; the state of its beginning if no prompt can continue from
    its end.

    Raises:
        UserError: it cannot be written, or there was no room for it in the cache.
    """
    from granite4_neuron.engine import PrefixCache

    assert isinstance(cache, PrefixCache)  # as `prefix_cache` returns it with --prompt-cache
    snapshot = cache.export_beginning(tokens)
    if snapshot is None:
        raise UserError("--prefix-cache has no room for the prompt, which --prompt-cache wants to write.")
    snapshot.save(options.prompt_cache)


def new_engine(
    options: argparse.Namespace,
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerFast,
    num_sequences: int,
    max_length: int | None,
    cache: PrefixCache | SlotPrefixCache | None,
    max_gap: float | None = None,
) -> Engine:
    """Return an engine with the drafter of `add_speculation`; a draft model gets a prefix cache as large as `cache`.

    Raises:
        UserError: as `drafter` and `Engine`.
    """
    from granite4_neuron.engine import Engine

    drafts, draft_tokens = drafter(options, runtime, tokenizer, num_sequences, max_length, cache)
    return Engine(
        runtime,
        num_sequences,
        max_length=max_length,
        tokenizer=tokenizer,
        prefix_cache=cache,
        drafter=drafts,
        draft_tokens=draft_tokens,
        max_gap=max_gap,
    )


def drafter(
    options: argparse.Namespace,
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerFast,
    num_sequences: int,
    max_length: int | None = None,
    cache: PrefixCache | SlotPrefixCache | None = None,
) -> tuple[Drafter | None, int]:
    """Return the drafter for the options of `add_speculation`, or None, and the most tokens that it drafts.

    Raises:
        UserError: options exclude one another, the draft model has another vocabulary, or the runtime cannot verify.
    """
    if options.draft_tokens is not None and options.draft_model is None:
        raise UserError("--draft-tokens belongs to --draft-model; with --speculate write ngram:K or mtp:K.")
    if options.speculate is None and options.draft_model is None:
        return None, DRAFT_TOKENS
    if options.speculate is not None and options.draft_model is not None:
        raise UserError("give either --speculate or --draft-model, not both.")
    from granite4_neuron.engine import DraftModel, MTPDrafter, PrefixCache
    from granite4_neuron.engine.drafting.drafters import NgramDrafter
    from granite4_neuron.runtime.interface import require

    require(runtime, "verify")
    longest = runtime.max_length if max_length is None else max_length
    if options.speculate is not None:
        method, draft_tokens = speculation(options.speculate)
        return MTPDrafter(runtime, num_sequences, longest) if method == MTP else NgramDrafter(), draft_tokens
    # It is small enough for one device.
    of_draft = argparse.Namespace(**{**vars(options), "tp_degree": 1, "compiled": _compiled_draft(options)})
    draft_runtime, draft_tokenizer = load_runtime(of_draft, open_checkpoint(options.draft_model))
    if draft_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise UserError(f"{options.draft_model} has another tokenizer than the model; they must have the same.")
    # A runtime that keeps its state itself makes no snapshots, and neither does its draft model's.
    draft_cache = PrefixCache(draft_runtime, cache.max_bytes, None) if isinstance(cache, PrefixCache) else None
    draft_tokens = DRAFT_TOKENS if options.draft_tokens is None else options.draft_tokens
    return DraftModel(draft_runtime, runtime.config.vocab_size, num_sequences, longest, draft_cache), draft_tokens


def _compiled_draft(options: argparse.Namespace) -> Path | None:
    """Return the folder of a draft model's compiled graphs; None if the model is not compiled.

    Raises:
        UserError: it was compiled without a draft model.
    """
    if options.compiled is None:
        return None
    folder = Path(options.compiled) / DRAFT_GRAPHS
    if not folder.is_dir():
        raise UserError(f"{options.compiled} has no graphs of a draft model; compile it with --draft-model.")
    return folder


def num_bytes(text: str) -> int:
    """Return the number of bytes of a size such as 500MiB; raise UserError if it is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(|KiB|MiB|GiB)", text)
    if match is None:
        raise UserError(f"{reprlib.repr(text)} is not a size; write it like 500MiB or 2GiB.")
    size = float(match[1]) * _UNITS[match[2]]
    if size > _MOST_BYTES:
        raise UserError(f"{reprlib.repr(text)} is more memory than there is anywhere; write it like 500MiB or 2GiB.")
    return int(size)


def speculation(text: str) -> tuple[str, int]:
    """Return the method of --speculate, NGRAM or MTP, and how many tokens it drafts.

    Raises:
        UserError: it is malformed.
    """
    match = re.fullmatch(rf"({NGRAM}|{MTP})(?::(\d+))?", text)
    if match is None:
        raise UserError(f"--speculate is {reprlib.repr(text)}; it must be ngram, ngram:K, mtp or mtp:K.")
    method, number = match.groups()
    try:
        return method, DRAFT_TOKENS if number is None else at_least(0)(number)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--speculate {method}:K: {error}.") from None


def drafts_with_mtp(options: argparse.Namespace) -> bool:
    """Return whether the options of `add_speculation` need the model's layers for multi-token prediction.

    Raises:
        UserError: --speculate is malformed.
    """
    return options.speculate is not None and speculation(options.speculate)[0] == MTP
