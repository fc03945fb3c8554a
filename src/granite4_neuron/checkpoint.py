"""Where weights come from: safetensors checkpoints, read and written under Hugging Face's names."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download, snapshot_download, split_torch_state_dict_into_shards
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.layers.parallel import Parallel
from granite4_neuron.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.ops import QUANTIZATIONS, quantize_per_channel
from granite4_neuron.weight_memory import WeightMemory

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
GENERATION_CONFIG = "generation_config.json"

# transformers 5.x keeps experts under other names in memory than in the files it writes; both are read.
_PUBLISHED_NAMES = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LISTED_NAMES = 8
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by their names in safetensors


def find(model: str | Path) -> Path:
    """The folder of a checkpoint: `model` itself, or the local copy of that Hugging Face id, downloaded if need be.

    Raises:
        UserError: no such folder, or the id cannot be downloaded or is not a Granite 4 hybrid.
    """
    if os.path.isdir(model):
        return Path(model)
    if os.path.exists(model) or not _HUB_ID.fullmatch(str(model)):
        raise UserError(f"{model} is not a folder; give the folder of a checkpoint or a Hugging Face id (owner/name).")
    try:
        # The config first: a model that this package does not run is not worth the download of its weights.
        GraniteMoeHybridConfig.from_file(hf_hub_download(str(model), "config.json"))
        patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
        return Path(snapshot_download(str(model), allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"{model} is not a folder, and cannot be had from Hugging Face ({reason}).") from None


def load_model(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    parallel: Parallel = Parallel(),  # noqa: B008
    quantize: str | None = None,
) -> GraniteMoeHybridForCausalLM:
    """Read a checkpoint folder into a model, tensor by tensor: peak memory is the model and one tensor.

    With `quantize` the weights of all projections, experts and the head are int8, see `ops.quantize_per_channel`; a
    head that was the embedding is so no longer. Embedding, routers, convolutions, norms and biases are as without.

    Args:
        folder: holds config.json and model.safetensors, or shards with model.safetensors.index.json.
        dtype: of the weights in memory; None for the dtype that the embedding is stored in.
        parallel: the rank whose part is read.
        quantize: "int8" or None; not for a part of a model.

    Raises:
        UserError: the folder is not a complete Granite 4 hybrid checkpoint; the message lists what is wrong.
    """
    if quantize not in (None, *QUANTIZATIONS):
        raise UserError(f"quantize is {quantize!r}; it must be {' or '.join(QUANTIZATIONS)}.")
    if quantize is not None and parallel.degree > 1:
        raise UserError(f"{quantize} weights cannot be split over {parallel.degree} ranks; quantize runs on one.")
    folder = Path(folder)
    config = GraniteMoeHybridConfig.from_file(folder / "config.json")
    with torch.device("meta"):
        model = GraniteMoeHybridForCausalLM(config, parallel)
    stored = _StoredTensors(folder)
    stored.check(config)
    dtype = dtype or stored.dtype()
    if dtype not in _DTYPES.values():
        raise UserError(f"the dtype is {dtype}; it must be one of {', '.join(map(str, _DTYPES.values()))}.")
    quantized = _quantizable(model) if quantize is not None else set()
    parameters = dict(model.named_parameters(remove_duplicate=not quantized))
    weights = [(parameter.shape, torch.int8 if name in quantized else dtype) for name, parameter in parameters.items()]
    scales = [(parameters[name].shape[:-1], torch.float32) for name in quantized]
    memory = WeightMemory(weights + scales)
    for name, (shape, in_memory) in zip(parameters, weights, strict=True):
        source = _EMBEDDING if name == _HEAD and config.tie_word_embeddings else name
        tensor = rank_slice(name, stored.read(source), config, parallel.rank, parallel.degree)
        if name in quantized:
            tensor, scale = quantize_per_channel(tensor)
            set_parameter(model, f"{name}_scale", memory.empty(scale.shape, torch.float32).copy_(scale))
        set_parameter(model, name, memory.empty(shape, in_memory).copy_(tensor))
    model.tie_weights()
    return model.eval()


def _quantizable(model: GraniteMoeHybridForCausalLM) -> set[str]:
    """The names of the weights that may have a scale."""
    return {f"{name}.weight" for name, module in model.named_modules() if hasattr(module, "weight_scale")}


def check_weights(folder: Path, config: GraniteMoeHybridConfig) -> None:
    """Look at the names, shapes and dtypes of a checkpoint's tensors, not at the tensors.

    Raises:
        UserError: they are not those of the model; the message lists what is wrong.
    """
    _StoredTensors(folder).check(config)


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that a checkpoint's embedding, and with it the model, is stored in."""
    return _StoredTensors(folder).dtype()


def save_model(
    model: GraniteMoeHybridForCausalLM, folder: str | Path, files_from: Path | None = None, max_shard_size: str = "5GB"
) -> None:
    """Write a checkpoint that transformers 4.57 and 5.x read: all of it, or nothing.

    Args:
        model: its parameters are written in their dtype.
        folder: must not exist, or be empty.
        files_from: a checkpoint folder whose tokenizer and generation config are copied along.
        max_shard_size: larger checkpoints are split into files of at most this size.

    Raises:
        UserError: the folder is in use, writing failed (no space, no permission), or the model is quantized.
    """
    if model.is_quantized:
        raise UserError("a quantized model cannot be written; write the checkpoint that it was made from.")
    weights = dict(model.named_parameters())
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    plan = split_torch_state_dict_into_shards(weights, max_shard_size=max_shard_size)
    with complete_or_absent(Path(folder)) as partial:
        for file, names in plan.filename_to_tensors.items():
            save_file({name: weights[name].detach() for name in names}, partial / file, metadata={"format": "pt"})
        if plan.is_sharded:
            _write_json(partial / INDEX, {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename})
        _write_json(partial / "config.json", {**model.config.to_dict(), "torch_dtype": dtype})
        for name in (*TOKENIZER_FILES, GENERATION_CONFIG) if files_from else ():
            if (files_from / name).is_file():
                shutil.copyfile(files_from / name, partial / name)


def set_parameter(model: nn.Module, name: str, weight: torch.Tensor) -> None:
    """Put a weight where `model` has the parameter of that name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Parameter(weight, requires_grad=False))


def rank_slice(name: str, tensor: torch.Tensor, config: GraniteMoeHybridConfig, rank: int, degree: int) -> torch.Tensor:
    """What one of `degree` ranks loads of a stored tensor."""
    if degree == 1:
        return tensor
    axis, segments = _segments(name, config, degree)
    pieces, start = [], 0
    for size, parts in segments:
        length = size // parts
        pieces.append(tensor.narrow(axis, start + rank * parts // degree * length, length))
        start += size
    return torch.cat(pieces, dim=axis) if pieces else tensor


def rank_slices(name: str, tensor: torch.Tensor, config: GraniteMoeHybridConfig, degree: int) -> torch.Tensor:
    """Every rank's slice, one rank after another: for a framework that gives each rank an equal run of a tensor.

    It is longer than `tensor` where ranks share a part.
    """
    axis = split_axis(name, config)
    if axis is None:
        return tensor
    return torch.cat([rank_slice(name, tensor, config, rank, degree) for rank in range(degree)], dim=axis)


def split_axis(name: str, config: GraniteMoeHybridConfig) -> int | None:
    """The axis along which a tensor is split over ranks; None if every rank takes the whole of it."""
    axis, segments = _segments(name, config, degree=1)
    return axis if segments else None


def _segments(name: str, config: GraniteMoeHybridConfig, degree: int) -> tuple[int, list[tuple[int, int]]]:
    """How a tensor is split over ranks: along which axis, and what lies there one after another: (size, parts).

    Every rank takes one part of each segment; with fewer parts than ranks, neighbours take the same one. No segments:
    every rank takes the whole tensor. This is the only place that says so, for every backend.
    """
    inner = (config.mamba_intermediate_size, degree)
    groups = (config.mamba_n_groups * config.mamba_d_state, min(degree, config.mamba_n_groups))
    heads = (config.mamba_n_heads, degree)
    query = (config.num_attention_heads * config.head_dim, degree)
    key = (config.num_key_value_heads * config.head_dim, min(degree, config.num_key_value_heads))
    shared = (config.shared_intermediate_size, degree)
    expert = (config.intermediate_size, degree)
    vocabulary = (config.vocab_size, degree)
    table = {
        "mamba.in_proj.weight": (0, [inner, inner, groups, groups, heads]),  # z, x, B, C, dt
        "mamba.in_proj.bias": (0, [inner, inner, groups, groups, heads]),
        "mamba.conv1d.weight": (0, [inner, groups, groups]),  # x, B, C
        "mamba.conv1d.bias": (0, [inner, groups, groups]),
        "mamba.A_log": (0, [heads]),
        "mamba.D": (0, [heads]),
        "mamba.dt_bias": (0, [heads]),
        "mamba.norm.weight": (0, [inner]),
        "mamba.out_proj.weight": (1, [inner]),
        "self_attn.q_proj.weight": (0, [query]),
        "self_attn.q_proj.bias": (0, [query]),
        "self_attn.k_proj.weight": (0, [key]),
        "self_attn.k_proj.bias": (0, [key]),
        "self_attn.v_proj.weight": (0, [key]),
        "self_attn.v_proj.bias": (0, [key]),
        "self_attn.o_proj.weight": (1, [query]),
        "shared_mlp.input_linear.weight": (0, [shared, shared]),  # gate, up
        "shared_mlp.output_linear.weight": (1, [shared]),
        "block_sparse_moe.input_linear.weight": (1, [expert, expert]),  # gate, up
        "block_sparse_moe.output_linear.weight": (2, [expert]),
        "model.embed_tokens.weight": (0, [vocabulary]),
        "lm_head.weight": (0, [vocabulary]),
    }
    return table.get(re.sub(r"^model\.layers\.\d+\.", "", name), (0, []))


class _StoredTensors:
    """The tensors of a checkpoint folder, by published name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, Path] = {}
        self._stored_names: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for file in _weight_files(folder):
            with _open(file) as tensors:
                for stored_name in tensors.keys():  # noqa: SIM118 (a handle, not a dict)
                    name = published_name(stored_name)
                    self._files[name] = file
                    self._stored_names[name] = stored_name
                    self._shapes[name] = tuple(tensors.get_slice(stored_name).get_shape())
                    self._dtypes[name] = tensors.get_slice(stored_name).get_dtype()

    def read(self, name: str) -> torch.Tensor:
        """One tensor. The file is opened anew each time, so that what was read before is not kept mapped in memory."""
        with _open(self._files[name]) as tensors:
            return tensors.get_tensor(self._stored_names[name])

    def dtype(self) -> torch.dtype:
        if self._dtypes.get(_EMBEDDING) not in _DTYPES:
            raise UserError(f"the weights in {self.folder} have no {_EMBEDDING} of dtype {', '.join(_DTYPES)}.")
        return _DTYPES[self._dtypes[_EMBEDDING]]

    def check(self, config: GraniteMoeHybridConfig) -> None:
        """Compare names and shapes with those of the whole model.

        Raises:
            UserError: lists what is missing, surplus or of the wrong shape.
        """
        with torch.device("meta"):
            expected = dict(GraniteMoeHybridForCausalLM(config).named_parameters())
        may_be_there = {_HEAD} if config.tie_word_embeddings else set()
        strange = [f"{name} is {dtype}" for name, dtype in self._dtypes.items() if dtype not in _DTYPES]
        missing = sorted(expected.keys() - self._shapes.keys())
        surplus = sorted(self._shapes.keys() - expected.keys() - may_be_there)
        wrong = [
            f"{name} is {list(self._shapes[name])} instead of {list(parameter.shape)}"
            for name, parameter in expected.items()
            if name in self._shapes and self._shapes[name] != tuple(parameter.shape)
        ]
        faults = [
            f"{what}: {_listed(names)}"
            for what, names in (
                ("missing", missing),
                ("not of this model", surplus),
                ("of another shape", wrong),
                ("of a dtype that is not supported", strange),
            )
            if names
        ]
        if faults:
            raise UserError(f"the weights in {self.folder} do not fit its config.json; {'; '.join(faults)}.")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise UserError(f"{folder} has no {WEIGHTS} and no {INDEX}.")
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(weight_map.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / INDEX} is not an index of shards: it has no object named weight_map.") from None
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UserError(f"{folder} lacks {len(absent)} of its {len(files)} shards: {_listed(absent)}.")
    return files


@contextmanager
def _open(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error}).") from None
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or incomplete ({error}); download or copy it again.") from None


def published_name(name: str) -> str:
    """The name under which a tensor is published, of that or of transformers 5.x's name in memory."""
    for ending, published in _PUBLISHED_NAMES.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + published
    return name


@contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write to; it becomes `folder` when all went well, and is removed otherwise."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; choose another place to write to.")
    partial = None
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        yield partial
        # mkdtemp and safetensors make private files; a checkpoint is as readable as anything else its owner writes.
        mask = os.umask(0)
        os.umask(mask)
        for path in (partial, *partial.iterdir()):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        partial.replace(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} could not be written ({error}); nothing was left behind.") from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _write_json(file: Path, values: dict) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else ""
    return ", ".join(names[:_LISTED_NAMES]) + more
