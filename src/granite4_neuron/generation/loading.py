"""From a checkpoint to something that generates."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from granite4_neuron import checkpoint, neuron_sdk
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.runtime.cpu import CPURuntime

BACKENDS = ("cpu", "xla", "nxdi")


def bundled_checkpoint() -> Path:
    """The small trained checkpoint that comes with the package; its README.md says what it is."""
    return Path(str(resources.files("granite4_neuron") / "data" / "tiny"))


def load(
    model: str | Path | None = None,
    dtype: torch.dtype | None = None,
    prefill_scan: str = "chunked",
    backend: str = "cpu",
    decode_kernel: str = "torch",
    cpu_kernels: str = "fused",
    compiled: str | Path | None = None,
    quantize: str | None = None,
    tuned_configs: str | Path | None = None,
) -> tuple[CPURuntime, PreTrainedTokenizerFast]:
    """A model ready to run, and its tokenizer.

    Args:
        model: a checkpoint folder or a Hugging Face id; None for the small checkpoint that comes with the package.
        dtype: of weights and activations; None for that of the stored weights.
        prefill_scan, decode_kernel: how the Mamba layers advance, see `ops.select_operators`.
        backend: "cpu" for this machine's processor, "xla" for compiled graphs on torch_xla's device, "nxdi" for NxD
            Inference on a Neuron device.
        cpu_kernels, tuned_configs: of the backend "cpu", see `CPURuntime`.
        compiled: for "nxdi" only, the folder that the compile command wrote; it says dtype, scan and kernel.
        quantize: of the backend "cpu", "int8" for weights in int8; see `checkpoint.load_model`.

    Raises:
        UserError: no such checkpoint, it is not a complete Granite 4 hybrid one, or the backend is not there.
    """
    folder = checkpoint.find(model if model is not None else bundled_checkpoint())
    config = GraniteMoeHybridConfig.from_file(folder / "config.json")
    tokenizer = load_tokenizer(folder, config)
    generation_config = _generation_config(folder, config)
    if backend not in BACKENDS:
        raise UserError(f"the backend is {backend!r}; it must be one of {', '.join(BACKENDS)}.")
    if (backend == "nxdi") != (compiled is not None):
        raise UserError("a folder of compiled graphs belongs to the backend nxdi, and that backend needs one.")
    if quantize is not None and backend != "cpu":
        raise UserError(f"{quantize} weights are for the backend cpu; {backend} runs them in the checkpoint's dtype.")
    if tuned_configs is not None and backend != "cpu":
        raise UserError("tuned launch parameters belong to the backend cpu; the others have none.")
    if backend == "nxdi":
        if dtype is not None or (prefill_scan, decode_kernel) != ("chunked", "torch"):
            raise UserError("dtype, scan and kernel of compiled graphs were chosen when they were compiled.")
        return load_compiled(folder, Path(compiled), generation_config), tokenizer
    weights = checkpoint.load_model(folder, dtype, quantize=quantize)
    mamba_kernels = dict(prefill_scan=prefill_scan, decode_kernel=decode_kernel)
    if backend == "cpu":
        return CPURuntime(weights, generation_config, cpu_kernels, tuned_configs, **mamba_kernels), tokenizer
    return _xla_runtime()(weights, generation_config, **mamba_kernels), tokenizer


def load_compiled(folder: Path, compiled: Path, generation_config: GenerationConfig):
    """A `NeuronRuntime`; see `nxdi.loading.load_compiled`.

    Raises:
        UserError: as there; also when the Neuron SDK is not installed.
    """
    neuron_sdk.require()
    # Not at the top: only this backend needs NxD Inference.
    from granite4_neuron.nxdi import loading

    return loading.load_compiled(folder, compiled, generation_config)


def load_tokenizer(folder: Path, config: GraniteMoeHybridConfig) -> PreTrainedTokenizerFast:
    """The checkpoint's tokenizer.

    Raises:
        UserError: there is none, or it has more entries than the model's vocabulary.
    """
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder} has no tokenizer.json.")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be read ({_first_line(error)}).") from None
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer in {folder} has {len(tokenizer)} entries and the model only {config.vocab_size}; "
            "they are not of the same checkpoint."
        )
    return tokenizer


def _xla_runtime() -> type:
    # Not at the top: importing torch_xla takes seconds and starts its client.
    from granite4_neuron.runtime.xla import XLARuntime

    return XLARuntime


def _generation_config(folder: Path, config: GraniteMoeHybridConfig) -> GenerationConfig:
    """What generation_config.json says about sampling and stopping; its other fields are not used."""
    eos = list(config.eos_token_id) if isinstance(config.eos_token_id, tuple) else config.eos_token_id
    # transformers 4.57 would sample among 50 tokens where a checkpoint says nothing, 5.x among all.
    values = {"do_sample": False, "eos_token_id": eos, "top_k": None}
    file = folder / checkpoint.GENERATION_CONFIG
    if file.is_file():
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            values |= {name: stored[name] for name in _GENERATION_FIELDS if stored.get(name) is not None}
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"{file} cannot be read ({_first_line(error)}).") from None
    for name, value in values.items():
        if value is not None and not _GENERATION_FIELDS[name](value):
            raise UserError(f"{file}: {name} is {value!r}, which is not of the right type.")
    generation_config = GenerationConfig()
    for name, value in values.items():
        setattr(generation_config, name, value)
    return generation_config


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_GENERATION_FIELDS = {
    "do_sample": lambda value: isinstance(value, bool),
    "temperature": _is_number,
    "top_k": _is_token_id,
    "top_p": _is_number,
    "min_p": _is_number,
    "repetition_penalty": _is_number,
    "eos_token_id": lambda value: all(map(_is_token_id, value)) if isinstance(value, list) else _is_token_id(value),
}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
