"""`granite4-neuron vllm-check`: check that vLLM runs on this machine's CPU with this package and gives right text."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from granite4_neuron.commands.options import add_model, at_least, model_checkpoint
from granite4_neuron.commands.output import print_table, write
from granite4_neuron.errors import UserError
from granite4_neuron.system.terminal import bars_of_tqdm
from granite4_neuron.vllm.cpu import DISTRIBUTION

if TYPE_CHECKING:
    from torch import nn

EXIT_CHECK_FAILED = 1
PROMPTS = ("An assignment statement", "The import statement", "Lambda expressions")


def add_parser(commands: argparse._SubParsersAction) -> None:
    check = commands.add_parser(
        "vllm-check",
        help="try vLLM on this machine's CPU",
        description="Compare this machine's kernels with plain torch, generate three texts through vLLM with drafts "
        "and prefix caching, in float32, and compare them with this package's own. Prints what is used.",
    )
    add_model(check)
    check.add_argument("--max-tokens", type=at_least(1), default=32, help="tokens of each text (default: %(default)s)")
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(f"vLLM is not installed; install it with: pip install '{DISTRIBUTION}'.")
    # vLLM reads this when it is imported. In this process its model can be asked what it uses.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    folder = model_checkpoint(options).path
    _import_vllm()
    # Not at the top: these imports take seconds, and --help does not need them.
    from granite4_neuron.devices.cpu import operators as cpu
    from granite4_neuron.vllm import cpu as vllm_cpu
    from granite4_neuron.vllm.cpu import self_test

    reason = vllm_cpu.why_not()
    if reason is not None:
        raise UserError(f"vLLM does not run with this package here: {reason}")
    facts, passed = {}, True
    if cpu.has_fused_kernels():
        for what, difference in self_test.largest_differences().items():
            facts[f"kernels beside plain torch, {what}"] = f"{difference:.1e}"
            passed = passed and difference <= self_test.TOLERANCE
    with bars_of_tqdm():
        texts, used = _through_vllm(folder, options.max_tokens)
    own_texts = _by_this_package(folder, options.max_tokens)
    _print_facts({**used, **facts})
    for prompt, text, own_text in zip(PROMPTS, texts, own_texts, strict=True):
        write(f"{prompt}{text}")
        if text != own_text:
            write(f"  but this package alone says: {own_text}")
    passed = passed and texts == own_texts
    write("passed" if passed else "FAILED")
    return 0 if passed else EXIT_CHECK_FAILED


def _import_vllm() -> None:
    try:
        import vllm  # noqa: F401
    except RuntimeError as error:
        if "torchvision" not in str(error):
            raise
        raise UserError(
            f"vLLM cannot be imported ({error}), as torchvision is built for another torch; it is not needed here: "
            "pip uninstall torchvision torchaudio torchcodec."
        ) from None


def _through_vllm(folder: Path, max_tokens: int) -> tuple[list[str], dict[str, str]]:
    """Generate the texts through vLLM; return them, and the versions, model class and kernels that made them."""
    from vllm import LLM, SamplingParams

    drafts = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3)
    llm = LLM(
        str(folder),
        dtype="float32",
        max_model_len=512,
        enable_prefix_caching=True,
        speculative_config=drafts,
        kv_cache_memory_bytes=2**29,
    )
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    texts = [output.outputs[0].text for output in llm.generate(list(PROMPTS), sampling, use_tqdm=False)]
    return texts, llm.apply_model(_used)[0]


def _used(model: nn.Module) -> dict[str, str]:
    from vllm import __version__

    from granite4_neuron.devices.cpu.build import load_kernels
    from granite4_neuron.vllm.cpu.mixer import Granite4MambaMixer2

    mixers = [module for module in model.modules() if isinstance(module, Granite4MambaMixer2)]
    reason = load_kernels()
    return {
        "vLLM": __version__,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "Mamba layers": f"{len(mixers)} of this package",
        "kernels": "fused" if reason is None else f"plain torch, which is slow: {reason}",
    }


def _by_this_package(folder: Path, max_tokens: int) -> list[str]:
    import torch

    from granite4_neuron.generation import generate, load

    runtime, tokenizer = load(folder, dtype=torch.float32)
    return list(generate(runtime, tokenizer, list(PROMPTS), max_tokens=max_tokens))


def _print_facts(facts: dict[str, str]) -> None:
    from rich.table import Table

    table = Table(show_header=False)
    for name, fact in facts.items():
        table.add_row(name, fact)
    print_table(table)
