"""Options that several commands share. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from granite4_neuron.checkpoint.checkpoint import Checkpoint
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.commands.output import ProgressBar
from granite4_neuron.config import ModelConfig, published_config
from granite4_neuron.config.published import published_name, published_names
from granite4_neuron.devices.backends import BACKENDS, all_options, check_here
from granite4_neuron.devices.neuron.sdk import KERNELS
from granite4_neuron.devices.options import ARITHMETIC, DECODE_KERNEL, DTYPE, PREFILL_SCAN
from granite4_neuron.errors import UserError, printable
from granite4_neuron.runtime.declaration import Option

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from granite4_neuron.runtime.interface import Runtime

_SHOWN_DIGITS = 40
_MOST_CHARACTERS = 2**28  # of a text: a device may have no end
_LARGEST = 2**31 - 1  # above any count, and within the integers of every library
_MOST_THREADS = 1024


def at_least(least: int, most: int = _LARGEST) -> Callable[[str], int]:
    """Return the type of an option that is a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            # Python reads some thousands of digits at most.
            number = most + 1 if text.isdecimal() else least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{_shown(text)} is not a whole number of at least {least}")
        if number > most:
            raise argparse.ArgumentTypeError(f"{_shown(text)} is more than {most}, the most that it can be")
        return number

    return parse


def number_in(least: float, most: float = math.inf, includes_least: bool = True) -> Callable[[str], float]:
    """Return the type of an option that is a finite number in a range; only the range's lower end may be excluded."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (least <= number <= most and math.isfinite(number)) or (number == least and not includes_least):
            lower = f"{'at least' if includes_least else 'above'} {least:g}"
            upper = f" and at most {most:g}" if math.isfinite(most) else ""
            raise argparse.ArgumentTypeError(f"{_shown(text)} is not a number {lower}{upper}")
        return number

    return parse


def _shown(number: str) -> str:
    return number if len(number) <= _SHOWN_DIGITS else f"{number[:_SHOWN_DIGITS]}..."


def add_model(parser: argparse._ActionsContainer, family: bool = False) -> None:
    """Add --model and --revision; with `family`, a member of the family is a model too."""
    add_model_alone(parser, family)
    add_revision(parser)


def add_model_alone(parser: argparse._ActionsContainer, family: bool = False) -> None:
    """Add --model; --revision, which few need, is to follow in a later group."""
    names = f", or one of {', '.join(published_names())}" if family else ""
    parser.add_argument(
        "--model",
        help=f"a checkpoint folder, a GGUF file or a Hugging Face id{names} (default: the small model that comes with "
        "the package)",
    )


def add_revision(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a Hugging Face id")


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """Add the options of `load_runtime` as a group; call it last, because most people need none of them."""
    group = parser.add_argument_group("weights, kernels and devices")
    add_arithmetic(group)
    add_backend(group)


def add_arithmetic(parser: argparse._ActionsContainer, *, takes_several: bool = False) -> None:
    """Add the dtype and the kernels; with `takes_several`, --kernels takes several names and is a list.

    Options of a single kernel are None if they are not given: `kernels_of` returns what --kernels means for them.
    """
    _add_option(parser, DTYPE)
    parser.add_argument(
        "--kernels",
        choices=KERNELS,
        nargs="+" if takes_several else None,
        default=["torch"] if takes_several else "torch",
        help="for Neuron devices: compute in torch, or in this package's NKI kernels wherever there is one (default: "
        "torch)",
    )
    _add_option(parser, replace(PREFILL_SCAN, default=None))
    _add_option(parser, replace(DECODE_KERNEL, default=None))


def add_backend(parser: argparse._ActionsContainer, backends: Iterable[str] = BACKENDS) -> None:
    """Add --backend, the options of these backends that `add_arithmetic` does not add, and --threads."""
    parser.add_argument("--backend", choices=list(backends), default="cpu", help="where to run (default: %(default)s)")
    declared = {option.name: option for name in backends for option in BACKENDS[name].options}
    add_declared(parser, (option for option in declared.values() if option not in ARITHMETIC))
    add_threads(parser)


def add_threads(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--threads",
        type=at_least(1, _MOST_THREADS),
        metavar="N",
        help="threads to compute with (default: one per processor core)",
    )


def add_declared(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    """Add those of a backend's options that are for the command line."""
    for option in options:
        if option.help is not None:
            _add_option(parser, option)


def command_line(options: Iterable[Option], values: Mapping[str, Any]) -> list[str]:
    """Return the arguments that give a backend's options these values; those with their default are left out."""
    arguments: list[str] = []
    for option in options:
        value, name = values[option.name], option.name.replace("_", "-")
        if value == option.default:
            continue
        if option.is_flag:
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", *map(str, value if option.is_list else [value])]
    return arguments


def _add_option(parser: argparse._ActionsContainer, option: Option) -> None:
    name = f"--{option.name.replace('_', '-')}"
    if option.is_flag:
        parser.add_argument(name, action=argparse.BooleanOptionalAction, default=option.default, help=option.help)
        return
    parser.add_argument(
        name,
        type=_type_of(option),
        nargs="+" if option.is_list else None,
        choices=option.choices,
        default=option.default,
        metavar=option.metavar,
        help=option.help,
    )


def _type_of(option: Option) -> Callable[[str], Any]:
    if option.between is not None:
        return number_in(*option.between)
    return str if option.least is None else at_least(option.least)


def backend_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of backends among a command's options, by their names in `generation.load`."""
    declared = all_options()
    return {name: value for name, value in vars(options).items() if name in declared}


def runtime_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of backends as `generation.load` gets them."""
    return backend_options(options) | kernels_of(options, options.kernels)


def add_drawing(parser: argparse._ActionsContainer) -> None:
    """Add the options of sampling that most requests have."""
    parser.add_argument("--temperature", type=number_in(0), metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=at_least(0), metavar="K", help="choose among the K likeliest tokens")
    parser.add_argument(
        "--top-p",
        type=number_in(0, 1, includes_least=False),
        metavar="P",
        help="choose among the likeliest tokens whose probabilities add up to P",
    )


def drawing_options(options: argparse.Namespace) -> dict[str, float]:
    """Return those of `add_drawing` that a measurement is given, greedy if it has no temperature.

    Raises:
        UserError: they say how to sample a greedy text.
    """
    given = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    if not options.temperature and (options.top_k or options.top_p):
        raise UserError("--top-k and --top-p need --temperature; without one the texts are greedy.")
    return {"temperature": 0} | {name: value for name, value in given.items() if value is not None}


def sampling_in_words(options: Mapping[str, float]) -> str:
    """Return how texts with these options are called in a title."""
    if not options["temperature"]:
        return "greedy texts"
    return "texts with " + ", ".join(f"{name} {value:g}" for name, value in options.items())


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options of the generated text, named as in `engine.SamplingParams`."""
    sampling = parser.add_argument_group(
        "sampling", "defaults are those of the checkpoint's generation_config.json, mostly greedy"
    )
    add_drawing(sampling)
    sampling.add_argument(
        "--min-p",
        type=number_in(0, 1),
        metavar="P",
        help="choose among tokens at least P times as likely as the likeliest",
    )
    sampling.add_argument(
        "--typical-p",
        type=number_in(0, 1, includes_least=False),
        metavar="P",
        help="choose among the tokens nearest to the expected surprise whose probabilities add up to P",
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=number_in(0, includes_least=False),
        metavar="R",
        help="above 1 discourages repetition",
    )
    sampling.add_argument(
        "--seed", type=at_least(0, 2**63 - 1), metavar="N", help="seed of the random numbers, for repeatable texts"
    )
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before it; may be repeated")


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options among a command's options, by their names in `engine.SamplingParams`."""
    # Not at the top: it imports torch.
    from granite4_neuron.engine.sampling_params import SAMPLING_OPTIONS

    return {name: value for name, value in vars(options).items() if name in SAMPLING_OPTIONS}


def kernels_of(options: argparse.Namespace, kernels: str) -> dict[str, str]:
    """Return the kernels that --kernels means, see `sdk.KERNELS`. The options of single kernels come first:
    prefill_scan, decode_kernel and, if the command has it, expert_path.
    """
    chosen = KERNELS[kernels]
    return {name: getattr(options, name) or chosen[name] for name in chosen if hasattr(options, name)}


def load_runtime(
    options: argparse.Namespace, checkpoint: Checkpoint, adapters: Mapping[str, Path] = {}, mtp: bool = False
) -> tuple[Runtime, PreTrainedTokenizerFast]:
    """Call `load` with the options of `add_runtime`, and show a progress bar and `print_time`.

    Args:
        checkpoint: from `model_checkpoint` or `open_checkpoint`.
        adapters: folders by name, from `commands.adapters`.
        mtp: whether to load the layers for multi-token prediction too; from `engine_options.drafts_with_mtp`.

    Raises:
        UserError: as `load`.
    """
    chosen = runtime_options(options)
    check_here(options.backend, chosen, checkpoint.quantization)
    # Not at the top: it takes seconds to import, and so it waits until the checkpoint is open.
    from granite4_neuron.generation import load

    use_threads(options)
    started = time.perf_counter()
    with ProgressBar("weights", "bytes") as progress:
        loaded = load(
            checkpoint,
            backend=options.backend,
            **chosen,
            mtp=mtp,
            adapters=adapters,
            progress=progress,
            remark=print_remark,
        )
    print_time(options, "load", started)
    return loaded


def print_time(options: argparse.Namespace, what: str, started: float) -> None:
    """Print how long it took since `time.perf_counter()` was `started`: with --verbose, and for any backend but cpu."""
    if getattr(options, "verbose", False) or options.backend != "cpu":
        print(f"{what}: {time.perf_counter() - started:.1f} s", file=sys.stderr)


def print_remark(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr)


def use_threads(options: argparse.Namespace) -> None:
    """Apply --threads to torch and the kernels."""
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)


def model_or_bundled(options: argparse.Namespace) -> str | Path:
    if options.model is not None:
        return options.model
    print("Using the small model that comes with the package; --model chooses another.", file=sys.stderr)
    return bundled_checkpoint()


def model_checkpoint(options: argparse.Namespace) -> Checkpoint:
    """Open the checkpoint of --model and --revision, or the bundled one; see `open_checkpoint`.

    A backend that is not here, or that does not take the options, is refused before a model is downloaded.
    """
    has_backend = hasattr(options, "backend")
    check = (lambda: check_here(options.backend, runtime_options(options))) if has_backend else (lambda: None)
    return open_checkpoint(model_or_bundled(options), options.revision, check)


def config_and_dtype(name: str, revision: str | None = None) -> tuple[ModelConfig, str]:
    """Return config and dtype of a checkpoint, or of a family member if no folder has that name; the dtype is one of
    DTYPES. It is the config's where there are no weights.
    """
    return config_and_dtype_in(checkpoint_unless_published(name, revision), name)


def config_and_dtype_in(checkpoint: Checkpoint | None, name: str) -> tuple[ModelConfig, str]:
    """Return config and dtype as `config_and_dtype`, of what `checkpoint_unless_published` returns for the name."""
    if checkpoint is None:
        config = published_config(name)
        return config, config.torch_dtype
    return checkpoint.config, checkpoint.dtype if checkpoint.has_weights else checkpoint.config.torch_dtype


def checkpoint_unless_published(name: str, revision: str | None = None) -> Checkpoint | None:
    """Open a checkpoint; None for a family member if no folder has that name."""
    is_published = not os.path.isdir(name) and published_name(name) is not None
    return None if is_published else open_checkpoint(name, revision)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name."""
    import torch

    return getattr(torch, name)


def read_text(file: str | None, nothing: str) -> str:
    """Read the text in a file, or on standard input if the file is None or "-".

    Raises:
        UserError: it cannot be read, is not text, or has no end; with the message `nothing` if standard input is
            closed, or is a terminal and the user did not ask for it.
    """
    path = None if file == "-" else file
    name = "standard input" if path is None else path
    if path is None and (sys.stdin is None or (file is None and sys.stdin.isatty())):
        raise UserError(nothing)
    try:
        with nullcontext(sys.stdin) if path is None else open(path, encoding="utf-8") as source:
            text = source.read(_MOST_CHARACTERS + 1)
        text.encode("utf-8")  # in the C locale Python takes any bytes from standard input, as lone surrogates
    except OSError as error:
        raise UserError(f"{name} cannot be read ({error.strerror}).") from None
    except UnicodeError:
        raise UserError(f"{name} is not text in UTF-8.") from None
    if len(text) > _MOST_CHARACTERS:
        raise UserError(f"{name} has more than {_MOST_CHARACTERS:,} characters, the most that are read.")
    return text


def check_folder_of(file: Path | None) -> None:
    """Check, before any work, that the folder of `file` exists; raise UserError if not."""
    if file and not os.path.isdir(file.absolute().parent):
        raise UserError(f"{file} cannot be written: there is no such folder.")
