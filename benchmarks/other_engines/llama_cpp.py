"""llama.cpp in a latency benchmark: llama-bench on the same weights, one process for each run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from benchmarks.gguf_checkpoint import write_gguf
from granite4_neuron import UserError

BENCH, QUANTIZE = "llama-bench", "llama-quantize"
# The nearest GGUF type to each quantization format and dtype of this package.
GGUF_TYPES = {"int8": "Q8_0", "int4": "Q4_0", "float32": "F32", "bfloat16": "BF16"}


class LlamaCpp:
    """llama-bench on a GGUF file.

    Args:
        programs: the folder of llama-bench.
        file: the weights.
        device: "cuda" or "cuda:N" for that GPU, which llama-bench refuses if it is built without CUDA; any other for
            the CPU.
    """

    def __init__(self, programs: Path, file: Path, threads: int, device: str):
        self._command = [str(programs / BENCH), "-m", str(file), "-t", str(threads), "-dev", _device(device)]
        self._command += ["-r", "1", "-o", "json"]
        self.weight_bytes = file.stat().st_size

    def run(self, prompts: list[list[int]], output_length: int) -> list[float]:
        """Run one prompt of random tokens, as `Ours.run`. Each step of decode gets the mean time, because llama-bench
        reports only that.
        """
        (prompt,) = prompts
        first = self._seconds("-p", len(prompt), "-n", 0)
        steps = output_length - 1
        if not steps:
            return [first]
        step = self._seconds("-p", 0, "-n", steps, "-d", len(prompt)) / steps
        return [first + step * number for number in range(output_length)]

    def _seconds(self, *arguments: str | int) -> float:
        (test,) = json.loads(_run([*self._command, *map(str, arguments)]))
        return test["samples_ns"][0] / 1e9


def _device(device: str) -> str:
    """Return llama.cpp's name of a PyTorch device."""
    kind, _, number = device.partition(":")
    return f"CUDA{number or 0}" if kind == "cuda" else "none"


def gguf_of(folder: Path, quantize: str | None, programs: Path, into: Path) -> Path:
    """Write the GGUF file of a checkpoint, as stored or in one of `GGUF_TYPES`, to the folder `into`; return its path.

    Raises:
        UserError: that failed; the message says why.
    """
    file = into / "model.gguf"
    write_gguf(folder, file)
    if quantize is None:
        return file
    quantized = into / f"model-{quantize}.gguf"
    convert(programs, file, quantized, GGUF_TYPES[quantize])
    file.unlink()
    return quantized


def convert(programs: Path, file: Path, to: Path, gguf_type: str, *options: str) -> None:
    """Write a GGUF file with another type of weights by llama-quantize, in the folder `programs`.

    Raises:
        UserError: that failed; the message says why.
    """
    _run([str(programs / QUANTIZE), *options, str(file), str(to), gguf_type])


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run ({error.strerror}).") from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no reason given"]
        # A page of help may follow the reason.
        reason = next((line for line in lines if line.startswith("error:")), lines[-1])
        raise UserError(f"{' '.join(command)} failed: {reason}") from None
