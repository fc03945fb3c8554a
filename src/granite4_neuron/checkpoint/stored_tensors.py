"""The tensors of a checkpoint folder: safetensors, one file or shards. Names, shapes and dtypes need no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

from granite4_neuron.checkpoint.encodings import Encoding, encodings, unused_purpose
from granite4_neuron.checkpoint.encodings.fp8 import FP8
from granite4_neuron.checkpoint.folder_contents import what_else_is_in
from granite4_neuron.checkpoint.names import Part, StoredNames
from granite4_neuron.config import ModelConfig
from granite4_neuron.config.dtypes import STORED_DTYPES
from granite4_neuron.config.json_files import read_object
from granite4_neuron.config.quantization import StoredQuantization
from granite4_neuron.errors import UserError, listed
from granite4_neuron.model.parameters import EMBEDDING, HEAD, NORM, parameters
from granite4_neuron.system import available_memory

if TYPE_CHECKING:
    import torch

    # Shapes and dtypes by the endings of names; a dtype of None stands for any floating one.
    Layout = Mapping[str, tuple[torch.Size, torch.dtype | None]]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
_QUANTIZED_DTYPES = {**STORED_DTYPES, **_FLOAT8, "I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"}
_SHAPE = ".weight_shape"  # a packed weight's shape, as compressed-tensors stores it
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class _InFile(NamedTuple):
    """A tensor in a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Stored:
    """What is stored for a tensor of the model or for a part of it.

    tensors: in files; for an encoded matrix by the endings of their names, otherwise one.
    shape, dtype: once read.
    encoding: makes one tensor of several; None for a tensor that is stored as it is.
    """

    part: Part
    tensors: Mapping[str, _InFile]
    shape: tuple[int, ...]
    dtype: str
    encoding: Encoding | None = None

    @property
    def first(self) -> _InFile:
        return next(iter(self.tensors.values()))


class StoredTensors:
    """The tensors of a checkpoint folder, by the model's names. A tensor that is stored in parts is read as one, and an
    encoded one is read in float32.

    left_out: the number of tensors that the model does not have, by their purpose.
    unused: the number of scales that no weight has, by their purpose.

    Args:
        quantization: from the config.

    Raises:
        UserError: there are none, a file is damaged, a tensor is stored twice or lacks a part, or the index contradicts
            the files.
    """

    def __init__(self, folder: Path, config: ModelConfig, quantization: StoredQuantization | None = None):
        self.folder = folder
        self.left_out: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()
        self._names = StoredNames(config)
        self._quantization = quantization
        self._is_mlx = False
        self._files: dict[str, _InFile] = {}  # by name
        self._parts: dict[str, list[_Stored]] = {}
        index = None if (folder / WEIGHTS).is_file() else _read_index(folder)
        for file in [folder / WEIGHTS] if index is None else _shards(folder, index):
            self._add(file)
        if index is not None:
            self._compare(index)
        self._place()
        for name, parts in self._parts.items():
            parts.sort(key=lambda one: one.part.number)
            self._check_parts(name, parts)
        self._shapes = {name: _joined_shape(name, parts) for name, parts in self._parts.items()}
        self._dtypes = {name: parts[0].dtype for name, parts in self._parts.items()}

    def encoded_in(self, besides: Collection[str] = ()) -> list[str]:
        """Return the names of the encodings of all tensors but some."""
        parts = (one for name, parts in self._parts.items() if name not in besides for one in parts)
        return sorted({one.encoding.name for one in parts if one.encoding is not None})

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor. Files are opened for each read, so that earlier reads do not stay mapped in memory."""
        parts = self._parts[name]
        is_expert = parts[0].part.is_expert
        with _opened(parts) as files:
            if is_expert and not name.endswith(_SHAPE):
                return self._read_experts(name, files)
            tensors = [_read(one, files) for one in parts]
        return tensors[0] if len(tensors) == 1 else _joined(name, tensors, is_expert)

    def _read_experts(self, name: str, files: Mapping[Path, safe_open]) -> torch.Tensor:
        """Read a tensor that is stored expert by expert, each expert into its place."""
        # Not at the top: names and shapes need no torch.
        import torch

        stacked = torch.empty(self._shapes[name], dtype=getattr(torch, _QUANTIZED_DTYPES[self._dtypes[name]]))
        for one in self._parts[name]:
            stacked[one.part.number] = _read(one, files)
        return stacked

    def may_stay_in_fp8(self, name: str) -> bool:
        """Return whether there is a matrix of this name, in FP8 that `ops.fp8` represents."""
        shapes = [
            ({ending: each.shape for ending, each in one.tensors.items()}, one.encoding)
            for one in self._parts.get(name, ())
        ]
        return bool(shapes) and all(isinstance(encoding, FP8) and encoding.may_stay(each) for each, encoding in shapes)

    def read_fp8(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Read values and scales of `ops.fp8`, for a matrix that may stay in it."""
        # Not at the top: names and shapes need no torch.
        import torch

        parts = self._parts[name]
        with _opened(parts) as files:
            read = [one.encoding.parts(_tensors(one, files)) for one in parts if isinstance(one.encoding, FP8)]
        values, scales = ([each[number] for each in read] for number in range(2))
        if parts[0].part.is_expert:
            return torch.stack(values), torch.stack(scales)
        return torch.cat(values, -2), torch.cat(scales, -2)

    def has(self, name: str, shape: torch.Size, dtype: torch.dtype | None) -> bool:
        """Return whether there is a tensor of this name, shape and dtype; None for any floating dtype."""
        return self._shapes.get(name) == tuple(shape) and _is_of(self._dtypes[name], dtype)

    def dtype(self) -> str:
        """Return the dtype of the embedding, and so of the model: one of `config.dtypes.DTYPES`. If the embedding is
        quantized or encoded, return the final norm's dtype.
        """
        is_encoded = any(one.encoding is not None for one in self._parts.get(EMBEDDING, ()))
        name = NORM if is_encoded or f"{EMBEDDING}_scale" in self._dtypes else EMBEDDING
        if self._dtypes.get(name) not in STORED_DTYPES:
            raise UserError(f"the weights in {self.folder} have no {name} of dtype {', '.join(STORED_DTYPES)}.")
        return STORED_DTYPES[self._dtypes[name]]

    def check(self, config: ModelConfig, layouts: Mapping[str, Layout] | None = None) -> None:
        """Compare names and shapes with the whole model's.

        layouts: of weights that are stored quantized: the endings that their tensors' names add, with shapes and
            dtypes.

        Raises:
            UserError: tensors are missing, surplus or of the wrong shape; the message lists them.
        """
        expected = {name: one.shape for name, one in parameters(config).items()}
        dtypes: dict[str, torch.dtype | None] = {}
        for name, layout in (layouts or {}).items():
            expected.pop(name, None)
            expected |= {f"{name}{ending}": tuple(shape) for ending, (shape, _) in layout.items()}
            dtypes |= {f"{name}{ending}": dtype for ending, (_, dtype) in layout.items()}
        may_be_there = {HEAD} if config.tie_word_embeddings and HEAD not in (layouts or {}) else set()
        strange = [f"{name} is {dtype}" for name, dtype in self._dtypes.items() if not _is_of(dtype, dtypes.get(name))]
        found = {
            "missing": sorted(map(self._names.published, expected.keys() - self._shapes.keys())),
            "not of this model": self._stored_names(self._shapes.keys() - expected.keys() - may_be_there),
            "of another shape": self._of_another_shape(expected),
            "of a dtype that is not supported": strange,
        }
        faults = [f"{what}: {listed(names)}" for what, names in found.items() if names]
        if faults:
            raise UserError(f"the weights in {self.folder} do not fit its config.json; {'; '.join(faults)}.")

    def _stored_names(self, names: Iterable[str]) -> list[str]:
        """Return the stored names of the tensors that make up weights, sorted."""
        return sorted(tensor.name for name in names for one in self._parts[name] for tensor in one.tensors.values())

    def _of_another_shape(self, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
        return [
            f"{self._names.published(name)} is {list(self._shapes[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in self._shapes and self._shapes[name] != shape
        ]

    def _add(self, file: Path) -> None:
        with open_tensors(file, framework="np") as tensors:
            self._is_mlx |= (tensors.metadata() or {}).get("format") == "mlx"
            for name in tensors.keys():  # noqa: SIM118 (a handle, not a dict)
                about = tensors.get_slice(name)
                one = _InFile(name, file, tuple(about.get_shape()), about.get_dtype())
                if name in self._files:
                    raise self._twice(self._files[name], one)
                self._files[name] = one

    def _place(self) -> None:
        """Find the place in the model of everything that is stored."""
        placed: set[str] = set()
        for name, tensor in self._files.items():
            if (purpose := self._names.purpose_of_left_out(name)) is not None:
                self.left_out[purpose] += 1
                placed.add(name)
            elif (purpose := unused_purpose(name, self._quantization)) is not None:
                self.unused[purpose] += 1
                placed.add(name)
            elif (one := self._encoded(tensor)) is not None:
                self._add_part(one)
                placed.update(each.name for each in one.tensors.values())
        for name, tensor in self._files.items():
            if name not in placed:
                self._add_part(_Stored(self._names.part_of(name), {"": tensor}, tensor.shape, tensor.dtype))

    def _encoded(self, numbers: _InFile) -> _Stored | None:
        """Return the encoded matrix that these are the numbers of; None if they are not."""
        module, _, ending = numbers.name.rpartition(".")
        for encoding in encodings(module, self._quantization, self._is_mlx):
            if ending != next(iter(encoding.tensors)):
                continue
            there = {part: self._files.get(f"{module}.{part}") for part in encoding.tensors}
            tensors = {part: one for part, one in there.items() if one and one.dtype in encoding.tensors[part]}
            if len(tensors) < len(encoding.tensors):
                continue
            shapes = {part: one.shape for part, one in tensors.items()}
            shape = encoding.shape(shapes) if len(numbers.shape) >= 2 else None
            if shape is None:
                listed = " and ".join(f"{one.name} is {list(one.shape)}" for one in tensors.values())
                raise UserError(f"the weights in {self.folder} do not fit their format, {encoding.name}: {listed}.")
            return _Stored(self._names.part_of(f"{module}.weight"), tensors, shape, "F32", encoding)
        return None

    def _add_part(self, new: _Stored) -> None:
        parts = self._parts.setdefault(new.part.name, [])
        twin = next((one for one in parts if one.part.number == new.part.number), None)
        if twin is not None:
            raise self._twice(twin.first, new.first)
        parts.append(new)

    def _twice(self, first: _InFile, second: _InFile) -> UserError:
        return UserError(
            f"the weights in {self.folder} hold one tensor twice: as {first.name} in {first.file.name} and as "
            f"{second.name} in {second.file.name}."
        )

    def _check_parts(self, name: str, parts: Sequence[_Stored]) -> None:
        there = listed(one.first.name for one in parts)
        if any(one.part.of != len(parts) for one in parts):
            raise UserError(f"the weights in {self.folder} lack a part of {name}: they have only {there}.")
        if len({(one.shape, one.dtype) for one in parts}) > 1:
            raise UserError(
                f"the weights in {self.folder} have {there}, which must be of the same shape and dtype, and are not."
            )

    def _compare(self, index: dict[str, str]) -> None:
        stored = {name: one.file.relative_to(self.folder) for name, one in self._files.items()}
        wrong = [
            f"{name} is in {stored.get(name, 'no shard')}, and by the index in {index.get(name, 'none')}"
            for name in sorted(index.keys() | stored.keys())
            if name not in index or Path(index[name]) != stored.get(name)
        ]
        if wrong:
            raise UserError(f"{self.folder / INDEX} is not the index of these shards; {listed(wrong, 3)}.")


def _is_of(stored: str, dtype: torch.dtype | None) -> bool:
    """Return whether safetensors' name of a dtype means `dtype`; None stands for any floating dtype."""
    return (
        stored in STORED_DTYPES if dtype is None else _QUANTIZED_DTYPES.get(stored) == str(dtype).removeprefix("torch.")
    )


@contextmanager
def _opened(parts: Iterable[_Stored]) -> Iterator[Mapping[Path, safe_open]]:
    """Open the files of some tensors."""
    with ExitStack() as stack:
        paths = dict.fromkeys(tensor.file for one in parts for tensor in one.tensors.values())
        yield {path: stack.enter_context(open_tensors(path, framework="pt")) for path in paths}


def _tensors(one: _Stored, files: Mapping[Path, safe_open]) -> dict[str, torch.Tensor]:
    return {ending: files[tensor.file].get_tensor(tensor.name) for ending, tensor in one.tensors.items()}


def _read(one: _Stored, files: Mapping[Path, safe_open]) -> torch.Tensor:
    tensors = _tensors(one, files)
    return one.encoding.decode(tensors) if one.encoding is not None else tensors[""]


def _joined_shape(name: str, parts: Sequence[_Stored]) -> tuple[int, ...]:
    shape = parts[0].shape
    if name.endswith(_SHAPE):
        return (shape[0] + 1,) if parts[0].part.is_expert and shape else shape
    if parts[0].part.is_expert:
        return (len(parts), *shape)
    if not shape:
        return shape
    rows = _rows_axis(len(shape))
    return (*shape[:rows], len(parts) * shape[rows], *shape[rows + 1 :])


def _rows_axis(dimensions: int) -> int:
    """Return the axis of a vector's or a matrix's rows, where the matrix may be one of several."""
    return max(dimensions - 2, 0)


def _joined(name: str, tensors: list[torch.Tensor], are_experts: bool) -> torch.Tensor:
    """Join the parts of a tensor."""
    # Not at the top: names and shapes need no torch.
    import torch

    if name.endswith(_SHAPE) and all(torch.equal(tensor, tensors[0]) for tensor in tensors):
        if are_experts:
            return torch.cat([tensors[0].new_tensor([len(tensors)]), tensors[0]])
        return tensors[0] * torch.tensor([len(tensors), 1])
    return torch.cat(tensors, _rows_axis(tensors[0].dim()))


def _read_index(folder: Path) -> dict[str, str]:
    """Read the file of each tensor from model.safetensors.index.json."""
    file = folder / INDEX
    if not file.exists():
        raise UserError(f"{folder} has no {WEIGHTS} and no {INDEX}.{what_else_is_in(folder)}")
    weight_map = read_object(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(n, str) for n in weight_map.values()):
        raise UserError(f"{file} is not an index of shards: it must have an object weight_map of file names.")
    outside = sorted({name for name in weight_map.values() if _leaves_folder(name)})
    if outside:
        raise UserError(f"{file} names files outside of its folder ({listed(outside)}), which are not opened.")
    return weight_map


def _leaves_folder(name: str) -> bool:
    return any(
        not name or path.is_absolute() or path.drive or ".." in path.parts
        for path in (PurePosixPath(name), PureWindowsPath(name))
    )


def _shards(folder: Path, index: dict[str, str]) -> list[Path]:
    files = [folder / name for name in sorted(set(index.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise UserError(
            f"{folder} lacks {len(absent)} of its {len(files)} shards: {listed(absent)}.{what_else_is_in(folder)}"
        )
    return files


@contextmanager
def open_tensors(file: Path, framework: str) -> Iterator[safe_open]:
    """Open a safetensors file.

    Raises:
        UserError: it cannot be read, is not a safetensors file, or there is not enough memory for it.
    """
    try:
        with safe_open(file, framework=framework) as tensors:
            yield tensors
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error}).") from None
    except (MemoryError, RuntimeError) as error:
        if not available_memory.is_exhausted(error):
            raise
        # It is mapped twice, by safetensors and by torch. That takes address space, but no memory.
        needed, available = 2 * file.stat().st_size / 1e9, (available_memory.available_bytes() or 0) / 1e9
        raise UserError(
            f"there is not enough memory to map {file}, which takes {needed:.2f} GB of addresses, and this process may "
            f"have {available:.2f} GB more; raise its limit (ulimit -v), or store the weights in smaller shards."
        ) from None
    except SafetensorError as error:
        with open(file, "rb") as start:
            is_pointer = start.read(len(_LFS_POINTER)) == _LFS_POINTER
        if is_pointer:
            raise UserError(f"{file} is a pointer of Git LFS; git lfs pull downloads the file.") from None
        raise UserError(f"{file} is damaged or incomplete ({error}); download or copy it again.") from None
