"""Reads adapters: LoRA and activated LoRA, in the folders that PEFT writes."""

from __future__ import annotations

import math
import re
import reprlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex
import torch

from granite4_neuron.checkpoint.names import Part, StoredNames
from granite4_neuron.checkpoint.stored_tensors import open_tensors
from granite4_neuron.config import ModelConfig
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.config.json_files import read_object
from granite4_neuron.errors import UserError
from granite4_neuron.model.adapters import Adapter, LowRank
from granite4_neuron.model.parameters import HEAD, parameters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_MATRIX = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")
_PROJECTIONS = (
    "q_proj, k_proj, v_proj and o_proj of attention, in_proj and out_proj of Mamba layers, input_linear and "
    "output_linear of the shared MLP, and all routed experts together (target_parameters)"
)
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
# PEFT wraps a module once for each of its parameters that are adapted, in the order in which transformers has them.
_INNER = ".base_layer"
_PARAMETERS = ("weight", "gate_up_proj", "up_proj", "down_proj")
# Patterns come from a download; a single one can take years.
_PATTERN_SECONDS = 3
_MOST_PATTERN_CHARACTERS = 100_000
_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_scale(value: Any) -> bool:
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_right, value.values()))


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


# The fields on which an adapter's numbers depend: the default, the check, and the description of right values.
_FIELDS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "r": (8, _is_count, "a whole number of at least 1"),
    "lora_alpha": (8, _is_scale, "a number"),
    "use_rslora": (False, _is_flag, "true or false"),
    "rank_pattern": ({}, _are(_is_count), "an object of ranks by modules"),
    "alpha_pattern": ({}, _are(_is_scale), "an object of numbers by modules"),
    "target_parameters": ([], _are_names, "a list of names of parameters"),
}
# Fields about an adapter's origin and training, and fields that its tensors repeat.
_WITHOUT_EFFECT = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "ensure_weight_tying"),
}
# Ways of initialising that do not change the base model's weights; all others do.
_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def read_adapter(folder: str | Path, config: ModelConfig) -> Adapter:
    """Read an adapter of the model with this config.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors, as PEFT writes them.

    Raises:
        UserError: it is incomplete, of another model, or uses something that is not supported; the message says which.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; an adapter is a folder with {CONFIG} and {WEIGHTS}.")
    about = _read_config(folder / CONFIG)
    invocation = about.get("alora_invocation_tokens")
    if invocation is not None:
        _check_invocation(folder / CONFIG, invocation, config.vocab_size)
        invocation = tuple(invocation)
    return Adapter(_additions(folder, about, config), invocation)


def _read_config(file: Path) -> dict[str, Any]:
    """Read adapter_config.json, with the defaults of `_FIELDS`."""
    if not file.is_file():
        raise UserError(f"{file} does not exist; an adapter is a folder that PEFT wrote, with {CONFIG} and {WEIGHTS}.")
    about = read_object(file)
    if about.get("peft_type") != "LORA":
        raise UserError(f"{file} is of the type {reprlib.repr(about.get('peft_type'))}; only LORA is supported.")
    how = about.get("init_lora_weights")
    if how not in _INITIALISATIONS:
        raise UserError(
            f"{file} has init_lora_weights {reprlib.repr(how)}, which changes the base model's weights; save the "
            "adapter with PEFT's path_initial_model_for_weight_conversion."
        )
    return _with_defaults(file, about)


def _with_defaults(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    known = {*_FIELDS, *_WITHOUT_EFFECT, "init_lora_weights", "alora_invocation_tokens"}
    for name, value in about.items():
        if name not in known and value not in (None, False, "none", [], {}):
            raise UserError(f"{file} has {name} {reprlib.repr(value)}, which is not supported.")
    for name, (default, is_right, what) in _FIELDS.items():
        if about.get(name) is None:
            about[name] = default
        if not is_right(about[name]):
            raise UserError(f"{file}: {name} is {reprlib.repr(about[name])}, and must be {what}.")
    return about


def _check_invocation(file: Path, tokens: Any, vocab_size: int) -> None:
    is_right = isinstance(tokens, list) and tokens and all(type(each) is int for each in tokens)
    if not is_right or not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise UserError(
            f"{file}: alora_invocation_tokens is {reprlib.repr(tokens)}, and must be a list of token ids below "
            f"{vocab_size}."
        )


def _additions(folder: Path, about: Mapping[str, Any], config: ModelConfig) -> dict[str, LowRank]:
    """Read the tensors; return the additions by the names of the weights."""
    file = folder / WEIGHTS
    if not file.is_file():
        other = " PEFT writes it with safe_serialization." if (folder / "adapter_model.bin").exists() else ""
        raise UserError(f"{file} does not exist; an adapter is a folder with {CONFIG} and {WEIGHTS}.{other}")
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    with open_tensors(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (a handle, not a dict)
            match = _MATRIX.fullmatch(name)
            if match is None:
                raise UserError(
                    f"{file} holds {name}, which is not supported; it may hold lora_A and lora_B of projections only."
                )
            pairs.setdefault(match[1], {})[match[2]] = _checked(file, name, tensors.get_tensor(name))
    if not pairs:
        raise UserError(f"{file} holds no weights.")
    adapted = _adapted(file, list(pairs), about, config)
    keys = [one.key for one in adapted.values()]
    ranks = _by_pattern(folder / CONFIG, about, "rank_pattern", "r", keys)
    alphas = _by_pattern(folder / CONFIG, about, "alpha_pattern", "lora_alpha", keys)
    additions: dict[str, LowRank] = {}
    for module, one in sorted(adapted.items()):
        rank = ranks[one.key]
        scale = alphas[one.key] / (math.sqrt(rank) if about["use_rslora"] else rank)
        pair = pairs.get(module, {})
        _check_pair(file, module, pair, rank, one)
        addition = one.addition(pair["A"], pair["B"])
        addition = LowRank(addition.down, addition.up * scale)
        if not addition.up.isfinite().all():
            raise UserError(f"{file} has numbers in {module} that are not finite at a scale of {scale:.4g}.")
        before = additions.get(one.part.name)
        additions[one.part.name] = addition if before is None else _both(before, addition)
    return additions


@dataclass(frozen=True)
class _Adapted:
    """The weight that a pair of matrices in the file adapts.

    key: the name that patterns of ranks and scales match: the module's, or the parameter's if it is adapted by name.
    part: its place in the model's weight.
    shape: the whole weight's, [rows, columns] or [experts, rows, columns].
    """

    key: str
    part: Part
    shape: tuple[int, ...]

    def shapes(self, rank: int, is_transposed: bool) -> dict[str, list[int]]:
        """Return the right shapes of A and B."""
        *experts, rows, columns = self.shape
        if is_transposed:
            rows, columns = columns, rows
        count = math.prod(experts) * rank
        return {"A": [count, columns], "B": [rows // self.part.of, count]}

    def is_transposed(self, A: torch.Tensor) -> bool:
        """Whether this first matrix is for transposes of the experts' matrices, as PEFT 0.17, 0.18 and 0.19.0 took
        them.
        """
        *experts, rows, columns = self.shape
        return bool(experts) and A.shape[1] == rows != columns

    def addition(self, A: torch.Tensor, B: torch.Tensor) -> LowRank:
        """Return what these matrices, whose shapes are right, add to the whole weight."""
        *experts, rows, _ = self.shape
        if experts:  # in A a row is number expert * rank + i, in B a column is number i * experts + expert
            [count] = experts
            down, up = A.unflatten(0, (count, -1)), B.unflatten(1, (-1, count)).permute(2, 0, 1).contiguous()
            if self.is_transposed(A):
                down, up = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
            return LowRank(down, up)
        if self.part.of > 1:  # it covers some of the rows only
            whole = torch.zeros(rows, B.shape[1])
            whole[self.part.number * (rows // self.part.of) :][: rows // self.part.of] = B
            B = whole
        return LowRank(A, B)


def _adapted(file: Path, modules: Sequence[str], about: Mapping[str, Any], config: ModelConfig) -> dict[str, _Adapted]:
    """Return what each module in the file adapts, and what a module with adapted parameters should have beside it."""
    names = StoredNames(config)
    shapes = {name: one.shape for name, one in parameters(config).items() if _is_projection(name)}
    found: dict[str, _Adapted] = {}
    for module in modules:
        wrapped = module
        while wrapped.endswith(_INNER):
            wrapped = wrapped.removesuffix(_INNER)
        of_module = {f"{wrapped}.{name}": names.part_of(f"{wrapped}.{name}") for name in _PARAMETERS}
        targeted = [name for name in of_module if _is_targeted(name, about["target_parameters"])]
        if not targeted:
            part = of_module.get(f"{module}.weight")
            if part is None or len(shapes.get(part.name, ())) != 2:
                raise UserError(_not_of_this_model(file, module, config))
            found[module] = _Adapted(module, part, shapes[part.name])
        of_module = {name: part for name, part in of_module.items() if name in targeted and part.name in shapes}
        for depth, (name, part) in enumerate(reversed(of_module.items())):
            found[wrapped + depth * _INNER] = _Adapted(name, part, shapes[part.name])
        if module not in found:
            raise UserError(_not_of_this_model(file, module, config))
    return found


def _is_targeted(parameter: str, targets: Sequence[str]) -> bool:
    return any(parameter == target or parameter.endswith(f".{target}") for target in targets)


def _is_projection(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith(("_proj.weight", "_linear.weight"))


def _not_of_this_model(file: Path, module: str, config: ModelConfig) -> str:
    weight = StoredNames(config).part_of(f"{module}.weight").name
    if _ONE_EXPERT.search(module):
        return (
            f"{file} adapts one expert alone ({module}); train all experts of a layer together, by PEFT's "
            "target_parameters."
        )
    if ".experts" in module or ("block_sparse_moe." in weight and "router" not in weight):
        return (
            f"{file} adapts routed experts ({module}) that are not in target_parameters; adapters may change only "
            f"{_PROJECTIONS}."
        )
    if weight in parameters(config) or weight == HEAD:
        return f"{file} adapts {module}, which is not supported; adapters may change only {_PROJECTIONS}."
    return f"{file} adapts {module}, which this model does not have; the adapter is of another model."


def _checked(file: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix in float32."""
    if tensor.dtype not in _DTYPES or tensor.dim() != 2:
        raise UserError(f"{file} has {name} of shape {list(tensor.shape)} in {tensor.dtype}, which is not a matrix.")
    if not tensor.isfinite().all():
        raise UserError(f"{file} has numbers in {name} that are not finite (NaN or infinity).")
    return tensor.float()


def _check_pair(file: Path, module: str, pair: Mapping[str, torch.Tensor], rank: int, adapted: _Adapted) -> None:
    """Check that both matrices are there, of this rank and of the right shapes."""
    for which in "AB":
        if which not in pair:
            raise UserError(f"{file} lacks lora_{which} of {module}.")
    matrices = math.prod(adapted.shape[:-2])
    for which, shape in adapted.shapes(rank, adapted.is_transposed(pair["A"])).items():
        name = f"lora_{which} of {module}"
        its_shape = list(pair[which].shape)
        rank_axis = "AB".index(which)
        if its_shape[rank_axis] != shape[rank_axis]:
            its_rank = its_shape[rank_axis] / matrices
            raise UserError(f"{file} has {name} of rank {its_rank:g}, but {CONFIG} says rank {rank}.")
        if its_shape != shape:
            raise UserError(
                f"{file} has {name} of shape {its_shape} instead of {shape}; the adapter is of another model."
            )


def _by_pattern(
    file: Path, about: Mapping[str, Any], patterns: str, default: str, modules: Sequence[str]
) -> dict[str, Any]:
    """Return each module's value: from the first pattern that matches its name, or the default."""
    values = about[patterns]
    try:
        matches = _first_matches(list(values), modules)
    except _PatternsFailed as error:
        raise UserError(f"{file}: {patterns} cannot be matched with modules ({error}).") from None
    return {
        module: about[default] if key is None else values[key] for module, key in zip(modules, matches, strict=True)
    }


class _PatternsFailed(Exception):
    """The patterns cannot be matched; the message says why."""


def _first_matches(patterns: Sequence[str], modules: Sequence[str]) -> list[str | None]:
    """Return the first pattern that matches each module, as in PEFT's `get_pattern_key`: its whole name, or the end of
    its name from a dot on. None for a module that no pattern matches.

    Raises:
        _PatternsFailed: one is not a regular expression, or they are too long or take more than 3 seconds.
    """
    if sum(map(len, patterns)) > _MOST_PATTERN_CHARACTERS:
        raise _PatternsFailed(f"they have more than {_MOST_PATTERN_CHARACTERS:,} characters")
    expressions = {}
    for pattern in patterns:
        try:
            expressions[pattern] = regex.compile(rf"(.*\.)?({pattern})$")
        except (regex.error, RecursionError, OverflowError) as error:
            raise _PatternsFailed(f"{pattern!r} is not a regular expression: {error}") from None
    until = time.thread_time() + _PATTERN_SECONDS

    def matches(pattern: str, module: str) -> bool:
        left = max(until - time.thread_time(), 0.001)
        return expressions[pattern].match(module, timeout=left, concurrent=True) is not None

    try:
        return [next((each for each in patterns if matches(each, module)), None) for module in modules]
    except TimeoutError:
        raise _PatternsFailed(f"it takes more than {_PATTERN_SECONDS} seconds") from None


def _both(one: LowRank, other: LowRank) -> LowRank:
    return LowRank(torch.cat([one.down, other.down], dim=-2), torch.cat([one.up, other.up], dim=-1))
