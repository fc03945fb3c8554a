"""Errors of one Mamba layer and of one attention layer over a very long context, against float64.

    python -m benchmarks.accuracy.long_context
    python -m benchmarks.accuracy.long_context --backend torch --device cuda --divide 1
    NXDI_SRC=... NXD_SRC=... python -m benchmarks.accuracy.long_context --backend nxdi

The layers have the sizes of granite-4.0-h-small, or a part of its heads with --divide, and random weights. Decay rates
and step sizes of the Mamba layer are those of Mamba-2's initialisation, and a fourth of its heads forgets so slowly
that the first token still counts at the end. At each length the last tokens are decoded one by one, and as many before
them are a piece of the prompt. All other pieces are as long as in generation.

The backend nxdi is NxD Inference's CPU mode. It returns logits of a prompt's last token only.

Errors are relative to the root mean square of the exact values, for SSM states to that of each head. The state of the
attention layer is its keys and values.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.errors import reports_errors
from benchmarks.latency.implementations import Point, random_prompts
from granite4_neuron import UserError
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.commands.options import at_least
from granite4_neuron.config import ATTENTION, MAMBA, ModelConfig, published_config
from granite4_neuron.config.choices import CPU_KERNELS
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.devices.backends import BACKENDS
from granite4_neuron.devices.cpu.runtime import CPURuntime
from granite4_neuron.devices.neuron.stand_ins import why_not_importable
from granite4_neuron.devices.options import STATE_DTYPES
from granite4_neuron.devices.torch.options import DEVICES
from granite4_neuron.model.causal_lm import HybridForCausalLM
from granite4_neuron.runtime.interface import Row, Runtime
from test.support.one_layer import REMEMBERING, Expected, expected, one_layer

_VOCABULARY = 2048


@dataclass(frozen=True)
class Error:
    """An error in units of the root mean square of the exact values."""

    rms: float
    maximum: float

    @classmethod
    def between(cls, ours: torch.Tensor, right: torch.Tensor, per_head: bool = False) -> Error:
        """Compare tensors of one shape; `per_head` compares each entry of the first axis by itself."""
        right = right.double().flatten(1 if per_head else 0)
        errors = (ours.to(right).view_as(right) - right) / right.square().mean(-1, keepdim=True).sqrt()
        return cls(errors.square().mean().sqrt().item(), errors.abs().max().item())

    def __str__(self) -> str:
        return f"{self.rms:.1e} / {self.maximum:.1e}"


@dataclass(frozen=True)
class Errors:
    """The errors after `length` tokens.

    remembering: errors of the states of heads that remember the whole context; None for attention.
    prompt, decode: errors of logits, of the prompt's last tokens (the last one, if a runtime returns no others) and of
        the tokens decoded after them.
    """

    length: int
    state: Error
    remembering: Error | None
    prompt: Error
    decode: Error


def errors(runtime: Runtime, tokens: Sequence[int], right: Sequence[Expected]) -> Iterator[Errors]:
    """Run a context on a runtime of a model of one layer; yield the errors at each length of `right`."""
    state, start = runtime.allocate(1, len(tokens)), 0
    for each in right:
        window = len(each.logits) // 2
        start = _prefill(runtime, state, tokens, start, each.length - 2 * window)
        decoded = each.length - window
        has_all = "all_logits" not in runtime.cannot
        prompt = runtime.step(state, [Row(1, start, tokens[start:decoded])], has_all)[0].view(-1, each.logits.shape[-1])
        steps = range(decoded, each.length)
        decode = torch.cat([runtime.step(state, [Row(1, at, tokens[at : at + 1])]) for at in steps])
        start = each.length
        views = {name: view.cpu() for name, view in _slot_views(runtime, state).items()}
        yield Errors(
            each.length,
            *_state_errors(views, each),
            Error.between(prompt.cpu(), each.logits[window - len(prompt) : window].cpu()),
            Error.between(decode.cpu(), each.logits[window:].cpu()),
        )


def _slot_views(runtime: Runtime, state: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the sequence by the names of `HybridState.slot_views`."""
    if state is not None:
        return state.slot_views(1)
    # NxD Inference's model keeps the state itself.
    tensors = runtime.model.models[0].model.kv_mgr.past_key_values
    names = ("conv_state", "ssm_state") if runtime.config.layer_types == (MAMBA,) else ("key", "value")
    return {f"layers.0.{name}": tensor[0] for name, tensor in zip(names, tensors, strict=True)}


def _prefill(runtime: Runtime, state: object, tokens: Sequence[int], start: int, stop: int) -> int:
    for at in range(start, stop, runtime.tokens_per_step):
        runtime.step(state, [Row(1, at, tokens[at : min(at + runtime.tokens_per_step, stop)])])
    return stop


def _state_errors(views: dict[str, torch.Tensor], right: Expected) -> tuple[Error, Error | None]:
    if "layers.0.ssm_state" not in views:
        ours, expected_ones = (
            torch.cat([tensors[f"layers.0.{name}"][:, : right.length].cpu().double() for name in ("key", "value")])
            for tensors in (views, right.state)
        )
        return Error.between(ours, expected_ones, per_head=True), None
    ours, expected_ones = views["layers.0.ssm_state"], right.state["layers.0.ssm_state"].cpu()
    remembering = slice(None, None, REMEMBERING)
    return (
        Error.between(ours, expected_ones, per_head=True),
        Error.between(ours[remembering], expected_ones[remembering], per_head=True),
    )


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    options = _parser().parse_args(arguments)
    lengths = sorted(options.lengths)
    if lengths[0] < 2 * options.window:
        raise UserError(f"--lengths has {lengths[0]}; the shortest is twice the window, {2 * options.window}.")
    if options.backend not in ("cpu", "torch") and options.state_dtype != STATE_DTYPES[0]:
        raise UserError("--state-dtype belongs to the backends cpu and torch; the others keep SSM states in float32.")
    config = _part(published_config(options.model), options.divide)
    [tokens] = random_prompts(config.vocab_size, Point(1, lengths[-1], output_length=0))
    print("Errors against float64, root mean square / largest:")
    _print_row("layer", "dtype", "tokens", "state", "of remembering heads", "logits, prompt", "logits, decode")
    for kind in options.layers:
        model = one_layer(config, kind, lengths[-1])
        oracle_device = "cuda" if options.device.startswith("cuda") else "cpu"
        right = list(expected(model, tokens, lengths, 2 * options.window, oracle_device))
        for dtype in options.dtype:
            runtime = _runtime(options, model.to(getattr(torch, dtype)))
            for each in errors(runtime, tokens, right):
                remembering = "" if each.remembering is None else str(each.remembering)
                _print_row(kind, dtype, f"{each.length:,}", each.state, remembering, each.prompt, each.decode)
    return 0


def _print_row(kind: str, dtype: str, length: str, *cells: object) -> None:
    # Flushed, because the next row may take minutes.
    print(f"{kind:9} {dtype:8} {length:>9} ", *(f"{cell!s:>20}" for cell in cells), flush=True)


def _part(config: ModelConfig, divisor: int) -> ModelConfig:
    """Return a config with a part of the heads, which are as wide as before."""
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "mamba_n_heads")
    if any(getattr(config, name) % divisor for name in sizes):
        raise UserError(f"--divide is {divisor}, which does not divide the numbers of heads.")
    return replace(config, vocab_size=_VOCABULARY, **{name: getattr(config, name) // divisor for name in sizes})


def _runtime(options: argparse.Namespace, model: HybridForCausalLM) -> Runtime:
    defaults = GenerationConfig()
    if options.backend == "nxdi":
        return _cpu_mode(model, options.buckets)
    state_dtype = getattr(torch, options.state_dtype)
    if options.backend == "cpu":
        return CPURuntime(model, defaults, cpu_kernels=options.cpu_kernels, state_dtype=state_dtype)
    # Imported here, because backends import whole frameworks.
    if options.backend == "torch":
        from granite4_neuron.devices.torch.runtime import TorchRuntime

        choices = dict(device=options.device, compiler=options.compiler, state_dtype=state_dtype)
        return TorchRuntime(model, defaults, options.buckets, **choices)
    from granite4_neuron.devices.xla.runtime import XLARuntime

    return XLARuntime(model, defaults, options.buckets)


def _cpu_mode(model: HybridForCausalLM, buckets: Sequence[int]) -> Runtime:
    """Return NxD Inference's runtime of a model in its CPU mode, a process group of one rank.

    Raises:
        UserError: NxD Inference cannot be imported.
    """
    if reason := why_not_importable():
        raise UserError(f"--backend nxdi cannot run: {reason}.")
    os.environ |= {"NXD_CPU_MODE": "1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29511")}
    # Imported here, because these import whole frameworks.
    from granite4_neuron.devices.neuron.nxdi import NeuronRuntime
    from test.support.nxdi import cpu_model

    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder))
        application = cpu_model(
            Path(folder),
            max_context_length=max(buckets),
            seq_len=model.config.max_position_embeddings,
            ctx_batch_size=1,
            is_continuous_batching=True,
            torch_dtype=str(model.dtype).removeprefix("torch."),
        )
    return NeuronRuntime(application, GenerationConfig())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="granite-4.0-h-small", metavar="NAME", help="default: %(default)s")
    parser.add_argument(
        "--divide", type=at_least(1), default=8, metavar="N", help="one of N heads (default: %(default)s)"
    )
    parser.add_argument(
        "--lengths",
        type=at_least(1),
        nargs="+",
        default=[1024, 16384, 131072],
        metavar="N",
        help="default: 1024 16384 131072",
    )
    parser.add_argument(
        "--window", type=at_least(1), default=128, metavar="N", help="last tokens to decode (default: %(default)s)"
    )
    kinds = (MAMBA, ATTENTION)
    parser.add_argument("--layers", choices=kinds, nargs="+", default=kinds, help="default: both")
    parser.add_argument(
        "--dtype", choices=DTYPES, nargs="+", default=["float32", "bfloat16"], help="default: float32 bfloat16"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="default: %(default)s")
    parser.add_argument("--cpu-kernels", choices=CPU_KERNELS, default=CPU_KERNELS[0], help="default: %(default)s")
    parser.add_argument(
        "--state-dtype",
        choices=STATE_DTYPES,
        default=STATE_DTYPES[0],
        help="for --backend cpu and torch (default: %(default)s)",
    )
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="default: %(default)s")
    parser.add_argument("--compiler", metavar="NAME", help="a backend of torch.compile (default: the device's)")
    parser.add_argument(
        "--buckets", type=at_least(1), nargs="+", default=[128, 512], metavar="N", help="default: 128 512"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
