"""Checkpoints whose matrices are encoded as other tools encode them, and the matrices that they stand for.

Numbers and scales are random bits, so that each code occurs. The meaning follows from the formats' definitions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file, save_file

from granite4_neuron.checkpoint.stored_tensors import INDEX, WEIGHTS

# Draws a matrix of a shape: returns its tensors by the endings of their names, and its meaning.
Encode = Callable[[torch.Size], tuple[dict[str, torch.Tensor], torch.Tensor]]


def fp8(
    scales: str,
    rows: int | None = None,
    columns: int | None = None,
    dtype: torch.dtype = torch.float32,
    for_all: bool = False,
) -> Encode:
    """Encode with a scale for each block of so many rows and columns; None for all of them. With `for_all` all experts
    share one.
    """

    def encode(shape: torch.Size) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        *outer, all_rows, all_columns = shape
        bits = torch.randint(0, 127, shape, dtype=torch.uint8) | torch.randint(0, 2, shape, dtype=torch.uint8) << 7
        block = rows or all_rows, columns or all_columns
        of_blocks = (0.001 + torch.rand(*outer, -(-all_rows // block[0]), -(-all_columns // block[1])) / 2000).to(dtype)
        if rows is None and (for_all or not outer):
            of_blocks = of_blocks.flatten()[0]
        row, column = torch.arange(all_rows) // block[0], torch.arange(all_columns) // block[1]
        of_each = of_blocks if of_blocks.dim() == 0 else of_blocks[..., row, :][..., column]
        tensors = {"weight": bits.view(torch.float8_e4m3fn), scales: of_blocks}
        return tensors, (_e4m3(bits) * of_each.double()).float()

    return encode


def nvfp4(numbers: str, of_matrix: str, for_all: bool = True) -> Encode:
    """Encode as ModelOpt does, or as compressed-tensors, whose scale of the matrix is a divisor. Experts share one
    such scale, or each has its own.
    """

    def encode(shape: torch.Size) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        codes, scales = _codes(shape), torch.randint(40, 80, (*shape[:-1], shape[-1] // 16), dtype=torch.uint8)
        whole = torch.rand((1,) if for_all else (*shape[:-2], 1, 1)) + 0.5
        whole = whole / 50 if of_matrix == "weight_scale_2" else whole * 50
        float_scales = _e4m3(scales).float()
        product = float_scales / whole if of_matrix == "weight_global_scale" else float_scales * whole
        tensors = {numbers: _pairs(codes), "weight_scale": scales.view(torch.float8_e4m3fn), of_matrix: whole}
        return tensors, _e2m1(codes).float() * product.repeat_interleave(16, -1)

    return encode


def mxfp4(numbers: str) -> Encode:
    def encode(shape: torch.Size) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        codes, scales = _codes(shape), torch.randint(120, 126, (*shape[:-1], -(-shape[-1] // 32)), dtype=torch.uint8)
        powers = (2.0 ** (scales.double() - 127)).repeat_interleave(32, -1)[..., : shape[-1]]
        return {numbers: _pairs(codes), "weight_scale": scales}, (_e2m1(codes) * powers).float()

    return encode


def affine(bits: int, columns: int) -> Encode:
    """Encode as MLX does: the first number is in the lowest bits of a word."""

    def encode(shape: torch.Size) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        numbers, in_word = torch.randint(0, 2**bits, shape), 32 // bits
        words = (numbers.unflatten(-1, (-1, in_word)) << bits * torch.arange(in_word)).sum(-1)
        grid = (*shape[:-1], shape[-1] // columns)
        scales, biases = ((torch.rand(grid) / 2**bits).bfloat16(), (torch.rand(grid) - 0.5).bfloat16())
        each = [one.double().repeat_interleave(columns, -1) for one in (scales, biases)]
        return {"weight": words.to(torch.uint32), "scales": scales, "biases": biases}, (
            numbers * each[0] + each[1]
        ).float()

    return encode


def write_mlx(folder: Path, to: Path, encode_of: Callable[[str], Encode | None], about: Mapping[str, object]) -> dict:
    """Write a checkpoint as mlx-lm's `sanitize` arranges it, with the tensors of `encode_of` by MLX's names; see
    `write_encoded`.
    """
    weights, experts = {}, {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        if (match := re.fullmatch(r"(.+\.)experts\.(\d+)\.(up|down)_proj\.weight", name)) is not None:
            fused = f"{match[1]}switch_mlp.fc{dict(up=1, down=2)[match[3]]}.weight"
            experts.setdefault(fused, {})[int(match[2])] = name, tensor
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = tensor.chunk(2, dim=1)
            prefix = name.replace("input_linear.weight", "switch_mlp")
            weights |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        else:
            of_mlx = name.replace("sparse_moe.output_linear", "sparse_moe.switch_mlp.down_proj")
            weights[of_mlx] = tensor.movedim(2, 1) if "conv1d.weight" in name else tensor
    weights |= {name: torch.stack([each[one][1] for one in sorted(each)]) for name, each in experts.items()}
    stored, meaning = {}, {}
    for name, tensor in weights.items():
        if (encode := encode_of(name)) is None:
            stored[name] = tensor = tensor.bfloat16()
        else:
            tensors, tensor = encode(tensor.shape)
            stored |= {name.removesuffix("weight") + ending: each for ending, each in tensors.items()}
        if name in experts:
            meaning |= {published: tensor[number] for number, (published, _) in experts[name].items()}
        elif "switch_mlp.gate_proj" in name:
            meaning[name.replace("switch_mlp.gate_proj", "input_linear")] = tensor
        elif "switch_mlp.up_proj" in name:
            joined = name.replace("switch_mlp.up_proj", "input_linear")
            meaning[joined] = torch.cat([meaning[joined], tensor], dim=1)
        else:
            published = name.replace("switch_mlp.down_proj", "output_linear")
            meaning[published] = tensor.movedim(1, 2) if "conv1d.weight" in name else tensor
    _write(to, folder, stored, about, "mlx")
    return meaning


def write_encoded(
    folder: Path,
    to: Path,
    encodings: Mapping[str, Encode],
    about: Mapping[str, object],
    more: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint of random numbers in the place of another's.

    Args:
        encodings: by a part of the weights' names; other weights stay as they are.
        about: more values of config.json.
        more: other tensors, by name.

    Returns:
        The tensors that the checkpoint stands for, by name.
    """
    stored, meaning = dict(more or {}), {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        encode = next((one for part, one in encodings.items() if part in name and name.endswith(".weight")), None)
        if encode is None:
            stored[name] = meaning[name] = tensor
            continue
        tensors, meaning[name] = encode(tensor.shape)
        stored |= {name.removesuffix("weight") + ending: each for ending, each in tensors.items()}
    _write(to, folder, stored, about, "pt")
    return meaning


def _write(
    to: Path, folder: Path, stored: Mapping[str, torch.Tensor], about: Mapping[str, object], format: str
) -> None:
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **about}))
    weight_map = {}
    for number, names in enumerate((list(stored)[::2], list(stored)[1::2])):  # tensors of a matrix are in two files
        file = f"model-{number}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        # MLX says so in one of them.
        metadata = {"format": format} if number == 0 else None
        save_file({name: stored[name].contiguous() for name in names}, to / file, metadata)
    (to / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _codes(shape: torch.Size) -> torch.Tensor:
    return torch.randint(0, 16, shape, dtype=torch.uint8)


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """The first of two codes is in the lower half of a byte."""
    return codes[..., 0::2] + 16 * codes[..., 1::2]


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    return _number(codes.numpy(), exponent_bits=2, mantissa_bits=1, bias=1)


def _e4m3(bits: torch.Tensor) -> torch.Tensor:
    return _number(bits.numpy(), exponent_bits=4, mantissa_bits=3, bias=7)


def _number(bits: numpy.ndarray, exponent_bits: int, mantissa_bits: int, bias: int) -> torch.Tensor:
    """Return what a small float means, in float64."""
    bits = bits.astype(numpy.int64)
    exponent = bits >> mantissa_bits & 2**exponent_bits - 1
    fraction = (bits & 2**mantissa_bits - 1) / 2**mantissa_bits
    size = numpy.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
    return torch.from_numpy(numpy.where(bits >> exponent_bits + mantissa_bits, -size, size))
