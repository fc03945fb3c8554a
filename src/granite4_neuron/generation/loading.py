"""Loads a checkpoint into a runtime and a tokenizer."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from granite4_neuron.checkpoint.checkpoint import Checkpoint
from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.devices.backends import BACKENDS, all_options, check_backend, check_here, check_values
from granite4_neuron.errors import UserError
from granite4_neuron.generation.defaults import generation_config
from granite4_neuron.runtime.declaration import Option
from granite4_neuron.runtime.interface import Runtime


def load(
    model: str | Path | Checkpoint | None = None,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    prefill_scan: str = "chunked",
    backend: str = "cpu",
    device: str = "cpu",
    graphs: str | int | None = None,
    tp_degree: int = 1,
    decode_kernel: str = "torch",
    cpu_kernels: str = "fused",
    compiled: str | Path | None = None,
    quantize: str | None = None,
    state_dtype: torch.dtype | str | None = None,
    tuned_configs: str | Path | None = None,
    mtp: bool = False,
    adapters: Mapping[str, str | Path] = {},
    progress: Callable[[int, int], None] | None = None,
    remark: Callable[[str], None] = lambda sentence: None,
    **others: Any,
) -> tuple[Runtime, PreTrainedTokenizerFast]:
    """Load a model into a runtime that is ready to run; return it and the model's tokenizer.

    Args:
        model: a checkpoint folder, a GGUF file or a Hugging Face id, or a checkpoint from `open_checkpoint`; None for
            the small checkpoint that comes with the package.
        revision: a branch, tag or commit of a Hugging Face id; None for its main branch.
        dtype: of weights and activations, such as torch.float32 or "float32"; None for that of the stored weights.
        prefill_scan, decode_kernel: how the Mamba layers advance, see `devices.selection`.
        backend: "cpu" for this machine's processor, "torch" for compiled graphs on a PyTorch device, "xla" for compiled
            graphs on torch_xla's device, "nxdi" for NxD Inference on a Neuron device.
        device, graphs: of the backend "torch", see `TorchRuntime`.
        tp_degree: of the backend "torch", over how many devices the model is split; see `SplitRuntime`.
        cpu_kernels, tuned_configs: of the backend "cpu", see `CPURuntime`.
        compiled: for "nxdi" only, the folder that the compile command wrote; it fixes dtype, scan and kernel.
        quantize: of the backend "cpu", one of `choices.QUANTIZATIONS`; see `checkpoint.loading.load_model`.
        state_dtype: of the backends "cpu" and "torch", of SSM states; None for float32. See `CPURuntime`.
        mtp: of the backend "cpu", also load the model's layers for multi-token prediction, for `engine.MTPDrafter`.
        adapters: of the backend "cpu", folders that PEFT wrote, by the names that requests will use.
        progress: called with (bytes of weights in memory, bytes in all) while they are read.
        remark: called with a sentence on the weights of a GGUF file that are not kept as they are, and with one on
            settings of generation_config.json that are not used.
        others: further options of the backend, as its declaration names them; see `backends`.

    Raises:
        UserError: no such checkpoint, it is not a complete Granite 4 hybrid one, or the backend is not there.
        TypeError: no backend has an option of this name.
    """
    given = others | dict(
        dtype=dtype,
        prefill_scan=prefill_scan,
        decode_kernel=decode_kernel,
        cpu_kernels=cpu_kernels,
        tuned_configs=tuned_configs,
        quantize=quantize,
        state_dtype=state_dtype,
        mtp=mtp,
        adapters=adapters,
        device=device,
        graphs=graphs,
        tp_degree=tp_degree,
        compiled=compiled,
    )
    if unknown := given.keys() - all_options().keys():
        near = difflib.get_close_matches(min(unknown), all_options(), 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"load() got an unexpected keyword argument {min(unknown)!r}{meant}")
    check_values(backend, given)
    _check_adapters(adapters)
    check_backend(backend, given)
    _check_default_device()
    name = model if model is not None else bundled_checkpoint()
    checkpoint = open_checkpoint(name, revision, lambda: check_here(backend, given))
    check_here(backend, given, checkpoint.quantization)
    tokenizer = checkpoint.load_tokenizer()
    declared = BACKENDS[backend]
    options = {each.name: _as_torch(each, given.get(each.name, each.default)) for each in declared.options}
    runtime = declared.load(
        checkpoint, generation_config(checkpoint, remark), progress=progress, remark=remark, **options
    )
    return runtime, tokenizer


def _as_torch(option: Option, value: Any) -> Any:
    """Return an option's value with torch's dtype for the name of one."""
    return getattr(torch, value) if option.is_dtype and isinstance(value, str) else value


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
    """Check that torch's default device is the CPU: this package names no device for tensors on it."""
    if torch.get_default_device().type != "cpu":
        raise UserError(
            f"torch's default device is {torch.get_default_device()}; set it to cpu with torch.set_default_device, and "
            "give load the backend and the device to run on."
        )
