"""Checkpoints in compressed-tensors' format, and the tensors that they stand for, written in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from granite4_neuron.checkpoint.stored_tensors import WEIGHTS


@dataclass(frozen=True)
class Scheme:
    """A scheme of the library: num_bits, group_size (None for a scale per channel), and how numbers are stored."""

    num_bits: int
    group_size: int | None = None
    format: str = "pack-quantized"

    def config_group(self) -> dict:
        """Return the scheme as the library writes it into config.json."""
        strategy = "channel" if self.group_size is None else "group"
        weights = dict(num_bits=self.num_bits, type="int", symmetric=True, strategy=strategy, dynamic=False)
        return {
            "targets": ["Linear"],
            "weights": {**weights, "group_size": self.group_size},
            "input_activations": None,
            "output_activations": None,
            "format": self.format,
        }

    def quantize(self, weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize to numbers [..., rows, columns] in int8 and scales [..., rows, groups], rounded to nearest."""
        groups = weight.double().unflatten(-1, (-1, self.group_size or weight.shape[-1]))
        largest = 2 ** (self.num_bits - 1)
        scales = (groups.abs().amax(-1) / (largest - 0.5)).to(scale_dtype)
        numbers = (groups / scales.double()[..., None]).round().clamp(-largest, largest - 1)
        return numbers.flatten(-2).to(torch.int8), scales

    def tensors(self, numbers: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a module, by the names of its parameters."""
        if self.format == "int-quantized":
            return {"weight": numbers, "weight_scale": scales}
        shape = torch.tensor(numbers.shape)
        return {"weight_packed": packed(numbers, self.num_bits), "weight_scale": scales, "weight_shape": shape}


def packed(numbers: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Pack [..., columns] into int32, as many columns per word as fit, the first lowest. The least number becomes 0."""
    in_word = 32 // num_bits
    words = numbers.long() + 2 ** (num_bits - 1)
    words = torch.nn.functional.pad(words, (0, -numbers.shape[-1] % in_word)).unflatten(-1, (-1, in_word))
    return (words << num_bits * torch.arange(in_word)).sum(-1).to(torch.int32)


def dequantized(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply numbers by scales in float32, where each product is exact."""
    groups = numbers.float().unflatten(-1, (scales.shape[-1], -1))
    return (groups * scales.float()[..., None]).flatten(-2)


def compress(
    folder: Path,
    to: Path,
    scheme_of: Callable[[str, torch.Tensor], Scheme | None],
    scale_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint of float weights as a compressed one.

    Args:
        scheme_of: takes a weight's name and values; returns None for a tensor that stays as it is.

    Returns:
        The tensors that the checkpoint stands for, by name. Those that are quantized are in float32.
    """
    tensors, meaning, schemes = {}, {}, []
    for name, tensor in load_file(folder / WEIGHTS).items():
        scheme = scheme_of(name, tensor)
        if scheme is None:
            tensors[name] = meaning[name] = tensor
            continue
        schemes.append(scheme)
        numbers, scales = scheme.quantize(tensor, scale_dtype)
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{parameter}": value for parameter, value in scheme.tensors(numbers, scales).items()}
        meaning[name] = dequantized(numbers, scales)
    groups = {f"group_{i}": scheme.config_group() for i, scheme in enumerate(dict.fromkeys(schemes))}
    formats = {scheme.format for scheme in schemes}
    about = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }
    to.mkdir(parents=True)
    for file in folder.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    save_file(tensors, to / WEIGHTS, metadata={"format": "pt"})
    return meaning
