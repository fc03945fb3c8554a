"""Loads a checkpoint into a runtime and a tokenizer."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast

from granite4_neuron import neuron_sdk
from granite4_neuron.checkpoint.adapters import read_adapter
from granite4_neuron.checkpoint.checkpoint import Checkpoint, require_folder
from granite4_neuron.checkpoint.folder import GENERATION_CONFIG, bundled_checkpoint
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.choices import (
    BACKENDS,
    CPU_KERNELS,
    DECODE_KERNELS,
    DEVICES,
    GRAPHS,
    PREFILL_SCANS,
    QUANTIZATIONS,
    STATE_DTYPES,
)
from granite4_neuron.config import DTYPES
from granite4_neuron.engine.sampling_params import SAMPLING_OPTIONS, Option, are_whole, is_list, is_whole
from granite4_neuron.errors import UserError, check_choice
from granite4_neuron.model.adapters import MERGE_INSTEAD
from granite4_neuron.ops import cpu
from granite4_neuron.ops.operators import TORCH
from granite4_neuron.runtime.cpu import CPURuntime
from granite4_neuron.runtime.interface import Runtime
from granite4_neuron.runtime.split import SplitRuntime
from granite4_neuron.runtime.torch_device import TorchRuntime


def load(
    model: str | Path | Checkpoint | None = None,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    prefill_scan: str = "chunked",
    backend: str = "cpu",
    device: str = "cpu",
    graphs: str = "layer",
    tp_degree: int = 1,
    decode_kernel: str = "torch",
    cpu_kernels: str = "fused",
    compiled: str | Path | None = None,
    quantize: str | None = None,
    state_dtype: torch.dtype | str | None = None,
    tuned_configs: str | Path | None = None,
    adapters: Mapping[str, str | Path] = {},
    progress: Callable[[int, int], None] | None = None,
    remark: Callable[[str], None] = lambda sentence: None,
) -> tuple[Runtime, PreTrainedTokenizerFast]:
    """Load a model into a runtime that is ready to run; return it and the model's tokenizer.

    Args:
        model: a checkpoint folder, a GGUF file or a Hugging Face id, or a checkpoint from `open_checkpoint`; None for
            the small checkpoint that comes with the package.
        revision: a branch, tag or commit of a Hugging Face id; None for its main branch.
        dtype: of weights and activations, such as torch.float32 or "float32"; None for that of the stored weights.
        prefill_scan, decode_kernel: how the Mamba layers advance, see `ops.select_operators`.
        backend: "cpu" for this machine's processor, "torch" for compiled graphs on a PyTorch device, "xla" for compiled
            graphs on torch_xla's device, "nxdi" for NxD Inference on a Neuron device.
        device, graphs: of the backend "torch", see `TorchRuntime`.
        tp_degree: of the backend "torch", over how many devices the model is split; see `SplitRuntime`.
        cpu_kernels, tuned_configs: of the backend "cpu", see `CPURuntime`.
        compiled: for "nxdi" only, the folder that the compile command wrote; it says dtype, scan and kernel.
        quantize: of the backend "cpu", one of `choices.QUANTIZATIONS`; see `checkpoint.load_model`.
        state_dtype: of the backend "cpu", of SSM states; None for float32. See `CPURuntime`.
        adapters: of the backend "cpu", folders that PEFT wrote, by the names that requests will use.
        progress: called with (bytes of weights in memory, bytes in all) while they are read.
        remark: called with a sentence on the weights of a GGUF file that are not kept as they are.

    Raises:
        UserError: no such checkpoint, it is not a complete Granite 4 hybrid one, or the backend is not there.
    """
    for name, value, choices in (
        ("backend", backend, BACKENDS),
        ("prefill_scan", prefill_scan, PREFILL_SCANS),
        ("decode_kernel", decode_kernel, DECODE_KERNELS),
        ("cpu_kernels", cpu_kernels, CPU_KERNELS),
        ("graphs", graphs, GRAPHS),
        ("quantize", quantize, (None, *QUANTIZATIONS)),
    ):
        check_choice(name, value, choices)
    dtype, state_dtype = _dtype("dtype", dtype, DTYPES), _dtype("state_dtype", state_dtype, STATE_DTYPES)
    _check_adapters(adapters)
    _check_default_device()
    checkpoint = open_checkpoint(model if model is not None else bundled_checkpoint(), revision)
    tokenizer = checkpoint.load_tokenizer()
    generation_config = _generation_config(checkpoint)
    stored = checkpoint.quantization
    check_backend(
        backend,
        device=device,
        graphs=graphs,
        tp_degree=tp_degree,
        cpu_kernels=cpu_kernels,
        compiled=compiled,
        quantize=quantize or (stored and stored.name),
        state_dtype=state_dtype,
        tuned_configs=tuned_configs,
        dtype=dtype,
        prefill_scan=prefill_scan,
        decode_kernel=decode_kernel,
        adapters=adapters,
    )
    if backend == "nxdi":
        return load_compiled(require_folder(checkpoint), Path(compiled), generation_config), tokenizer
    mamba_kernels = dict(prefill_scan=prefill_scan, decode_kernel=decode_kernel)
    if tp_degree != 1:
        split = dict(tp_degree=tp_degree, device=device, graphs=graphs, progress=progress, remark=remark)
        return SplitRuntime(checkpoint.path, dtype, generation_config, **split, **mamba_kernels), tokenizer
    loaded_adapters = {name: read_adapter(adapter, checkpoint.config) for name, adapter in adapters.items()}
    operators = cpu.operators(cpu_kernels) if backend == "cpu" else TORCH
    weights = load_model(
        checkpoint,
        dtype,
        quantize=quantize,
        operators=operators,
        keep_quantized=backend == "cpu",
        progress=progress,
        remark=remark,
    )
    if backend == "cpu":
        options = dict(kernels=cpu_kernels, tuned_configs=tuned_configs, state_dtype=state_dtype, **mamba_kernels)
        options["adapters"] = loaded_adapters
        return CPURuntime(weights, generation_config, **options), tokenizer
    if backend == "torch":
        return TorchRuntime(weights, generation_config, device=device, graphs=graphs, **mamba_kernels), tokenizer
    return _import_xla_runtime()(weights, generation_config, **mamba_kernels), tokenizer


def _dtype(name: str, dtype: torch.dtype | str | None, names: Collection[str]) -> torch.dtype | None:
    """Return a dtype that is given as such or by its name."""
    if not isinstance(dtype, str):
        return dtype
    check_choice(name, dtype, names)
    return getattr(torch, dtype)


def _check_adapters(adapters: object) -> None:
    """Check that there is a folder for each adapter's name."""
    if not isinstance(adapters, Mapping):
        raise UserError(f"adapters is {reprlib.repr(adapters)}; it must be a dictionary of folders by name.")
    for name, folder in adapters.items():
        if not isinstance(name, str) or not isinstance(folder, (str, os.PathLike)):
            raise UserError(
                f"adapters has {reprlib.repr(name)}: {reprlib.repr(folder)}; it must have folders by name, both text."
            )


def _check_default_device() -> None:
    """Check that tensors are made where this package expects those that it names no device for."""
    if torch.get_default_device().type != "cpu":
        raise UserError(
            f"torch's default device is {torch.get_default_device()}; set it to cpu with torch.set_default_device, and "
            "give load the backend and the device to run on."
        )


def check_backend(
    backend: str,
    *,
    device: str,
    graphs: str,
    tp_degree: int,
    cpu_kernels: str,
    compiled: str | Path | None,
    quantize: str | None,
    state_dtype: torch.dtype | None,
    tuned_configs: str | Path | None,
    dtype: torch.dtype | None,
    prefill_scan: str = PREFILL_SCANS[0],
    decode_kernel: str = DECODE_KERNELS[0],
    adapters: Mapping[str, str | Path] = {},
) -> None:
    """Check that a backend has the options that are given; arguments are those of `load`.

    Raises:
        UserError: it does not.
    """
    if backend == "nxdi" and compiled is None:
        raise UserError("the backend nxdi needs a folder of compiled graphs, which the compile command writes.")
    if backend != "nxdi" and compiled is not None:
        raise UserError(f"compiled graphs are for the backend nxdi; the backend here is {backend}.")
    chosen_before = (dtype, state_dtype, prefill_scan, decode_kernel)
    if backend == "nxdi" and chosen_before != (None, None, PREFILL_SCANS[0], DECODE_KERNELS[0]):
        raise UserError("dtypes, scan and kernel of compiled graphs were chosen when they were compiled.")
    if quantize and backend != "cpu":
        raise UserError(f"{quantize} weights are for the backend cpu; {backend} runs the original in its dtype.")
    if state_dtype not in (None, torch.float32) and backend not in ("cpu", "nxdi"):
        raise UserError(f"SSM states in 16 bits are for the backends cpu and nxdi; {backend} has them in float32.")
    if backend != "cpu" and (tuned_configs is not None or cpu_kernels != CPU_KERNELS[0]):
        raise UserError("tuned launch parameters and CPU kernels belong to the backend cpu; the others have none.")
    if adapters and backend != "cpu":
        raise UserError(f"adapters run on the backend cpu only, and the backend here is {backend}; {MERGE_INSTEAD}.")
    if backend != "torch" and (device, graphs, tp_degree) != (DEVICES[0], GRAPHS[0], 1):
        raise UserError(f"device, graphs and tp_degree belong to the backend torch; the backend here is {backend}.")


def load_compiled(folder: Path, compiled: Path, generation_config: GenerationConfig) -> Runtime:
    """Load a `NeuronRuntime`; see `neuron.nxdi.loading.load_compiled`.

    Raises:
        UserError: as there; also when the Neuron SDK is not installed.
    """
    neuron_sdk.require()
    # Not at the top: only this backend needs NxD Inference.
    from granite4_neuron.neuron.nxdi import loading

    return loading.load_compiled(folder, compiled, generation_config)


def _import_xla_runtime() -> type:
    # Not at the top: importing torch_xla takes seconds and starts its client.
    from granite4_neuron.runtime.xla import XLARuntime

    return XLARuntime


def _generation_config(checkpoint: Checkpoint) -> GenerationConfig:
    """Return a checkpoint's defaults for sampling and stopping; other fields of its generation config are not used.

    Raises:
        UserError: a field is outside its range.
    """
    stored = checkpoint.generation_config()
    generation_config = GenerationConfig()
    for name, rule in _GENERATION_FIELDS.items():
        value = stored.get(name)
        if value is not None:
            rule.check(f"{checkpoint.path / GENERATION_CONFIG}: {name}", value)
        # Also where it is None: transformers 4.57 would sample among 50 tokens by default.
        setattr(generation_config, name, value)
    if generation_config.eos_token_id is None:
        generation_config.eos_token_id = checkpoint.config.eos_token_id
    return generation_config


_GENERATION_FIELDS = {
    "do_sample": Option(lambda value: isinstance(value, bool), "true or false"),
    "eos_token_id": Option(
        lambda value: is_whole(value) or (is_list(value) and are_whole(value)), "a token id or a list of them"
    ),
    **{name: rule for name, rule in SAMPLING_OPTIONS.items() if rule.from_checkpoint},
}
