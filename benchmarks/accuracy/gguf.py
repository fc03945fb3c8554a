"""Compares log-probabilities with those of llama.cpp, on the same GGUF file and after the same tokens.

    python -m benchmarks.accuracy.gguf --model FILE.gguf --llama-cpp FOLDER

If weights have 16 bits or fewer, llama.cpp rounds activations too, to as many bits or to 8. So llama.cpp also runs the
file converted to float32 by llama-quantize. Against that, only the order of sums differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.errors import Failed, reports_errors
from benchmarks.other_engines.llama_cpp import convert
from benchmarks.other_engines.llama_server import SERVER, complete, running
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.commands.options import dtype_of, print_remark
from granite4_neuron.commands.output import print_table
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.errors import UserError
from granite4_neuron.generation import load
from granite4_neuron.runtime.interface import Row, Runtime

_TEXT = (
    "An assignment statement evaluates the expression list and assigns the single resulting object to each target. "
    "Deletion of a target list recursively deletes each target, from left to right. "
)
_POSITIONS = 16
_SMALLEST = -80.0  # below it llama.cpp's probability is too small for float32


def our_log_probabilities(runtime: Runtime, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return our log-probabilities after each number of first tokens: [lengths, vocab_size] in float32."""
    state = runtime.allocate(1, max_length=len(tokens))
    logits = [runtime.step(state, [Row(1, 0, tokens[:length])])[0] for length in lengths]
    return torch.stack(logits).float().log_softmax(-1)


def their_log_probabilities(
    programs: Path, file: Path, tokens: Sequence[int], lengths: Sequence[int], vocab_size: int
) -> torch.Tensor:
    """Return llama-server's log-probabilities in the same form.

    It gives none if its own next token ends within a character. All are then minus infinity.

    Raises:
        UserError: llama-server does not run the file.
    """
    found = torch.full((len(lengths), vocab_size), -torch.inf)
    # Keys and values in float32 too, and no kernel that rounds them.
    options = dict(c=len(tokens) + 1, np=1, t=torch.get_num_threads(), ctk="f32", ctv="f32", fa="off")
    arguments = [word for name, value in options.items() for word in (f"-{name}", str(value))]
    try:
        with running(programs, file, arguments) as server:
            for row, length in zip(found, lengths, strict=True):
                body = dict(prompt=[tokens[:length]], n_predict=1, n_probs=vocab_size, temperature=0.0)
                (answer,) = complete(server, body)
                for first in answer.get("completion_probabilities", []):
                    for one in first["top_logprobs"]:
                        row[one["id"]] = one["logprob"]
    except Failed as error:
        raise UserError(f"{SERVER} does not run {file}: {error}") from None
    return found


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="FOLDER", help="the folder of llama-server")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["float32"], help="ours (default: float32)")
    options = parser.parse_args(arguments)
    file = open_checkpoint(options.model).path
    table = Table("ours in", "llama.cpp with", "largest difference", "mean", "same top token", title=str(file))
    with tempfile.TemporaryDirectory() as folder:
        dequantized = Path(folder) / "float32.gguf"
        convert(options.llama_cpp, file, dequantized, "F32", "--allow-requantize")
        theirs: dict[str, torch.Tensor] = {}
        for dtype in options.dtype:
            runtime, tokenizer = load(file, dtype=dtype_of(dtype), remark=print_remark)
            tokens = tokenizer.encode(_TEXT)
            lengths = sorted({1 + number * (len(tokens) - 1) // (_POSITIONS - 1) for number in range(_POSITIONS)})
            ours = our_log_probabilities(runtime, tokens, lengths)
            for name, path in {"the file": file, "it in float32": dequantized}.items():
                if name not in theirs:
                    vocab_size = runtime.config.vocab_size
                    theirs[name] = their_log_probabilities(options.llama_cpp, path, tokens, lengths, vocab_size)
                difference = (ours - theirs[name]).abs()[theirs[name] > _SMALLEST]
                known = theirs[name].isfinite().any(-1)
                same = (ours.argmax(-1) == theirs[name].argmax(-1))[known].sum()
                numbers = f"{difference.max():.1e}", f"{difference.mean():.1e}", f"{same} of {known.sum()}"
                table.add_row(dtype, name, *numbers)
    print_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
