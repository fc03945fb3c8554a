"""Options of commands that compile or plan graphs. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from granite4_neuron.commands.options import at_least, checkpoint_unless_published, config_and_dtype_in
from granite4_neuron.config.choices import EXPERTS_DECODE
from granite4_neuron.devices.neuron.sdk import COMPILED_STATE_DTYPES, EXPERT_PATHS
from granite4_neuron.devices.options import QUANTIZE
from granite4_neuron.devices.torch.options import check_format
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from granite4_neuron.config import ModelConfig


def add_expert_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--expert-path",
        choices=EXPERT_PATHS,
        help="how NxD Inference multiplies with the experts' weights: in torch, with this package's NKI kernels, or "
        "with NxD's kernels (default: that of --kernels)",
    )


def add_experts_decode(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--experts-decode",
        choices=EXPERTS_DECODE,
        help="how decoded tokens' experts are computed where --expert-path is torch or nki: with an NKI kernel that "
        "reads each chosen expert once (kernel), all experts for every token (all), or with weights fetched by index "
        "(gather) (default: kernel with NKI kernels; otherwise gather for one or two tokens whose experts are less "
        "than all, and all for more)",
    )


def add_buckets(parser: argparse.ArgumentParser) -> None:
    """Add the lengths that NxD Inference compiles graphs for, as `context_buckets` and `token_buckets`: lists of ints,
    or None for the default ones, see `GraphOptions`.
    """
    parser.add_argument(
        "--context-buckets",
        type=at_least(2),
        nargs="+",
        metavar="N",
        help="lengths of prompts, each with its own graph (default: 128, 512 and powers of two from there, up to "
        "--max-context-length)",
    )
    parser.add_argument(
        "--token-buckets",
        type=at_least(2),
        nargs="+",
        metavar="N",
        help="lengths of the cache, each with its own graph, for all steps after the first (default: powers of two "
        "from 128)",
    )


def add_compiled_state_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dtype",
        choices=COMPILED_STATE_DTYPES,
        default=COMPILED_STATE_DTYPES[0],
        help="dtype of SSM states; 16 bits need --decode-kernel nki, and the hardware rounds them stochastically "
        "(default: %(default)s)",
    )


def add_ranks_and_sequences(parser: argparse.ArgumentParser, tp_degree: int) -> None:
    parser.add_argument(
        "--tp-degree",
        type=at_least(1),
        default=tp_degree,
        metavar="T",
        help=f"tensor-parallel ranks (default: {tp_degree})",
    )
    parser.add_argument(
        "--batch-size", type=at_least(1), default=1, metavar="B", help="sequences at a time (default: 1)"
    )


def config_and_dtype_on_neuron(name: str, backend: str) -> tuple[ModelConfig, str]:
    """Return config and dtype as `commands.options.config_and_dtype`, for torch on a Neuron device or nxdi.

    Raises:
        UserError: the backend does not run the weights as they are stored.
    """
    checkpoint = checkpoint_unless_published(name)
    if checkpoint is not None and checkpoint.quantization is not None:
        stored = checkpoint.quantization.name
        if backend == "torch":
            check_format(stored, "neuron")
        else:
            assert QUANTIZE.refusal is not None
            raise UserError(QUANTIZE.refusal.format(value=stored, backend=backend))
    return config_and_dtype_in(checkpoint, name)
