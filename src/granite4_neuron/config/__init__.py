"""Describes a model: one dataclass, read from a Hugging Face ``config.json`` of class GraniteMoeHybridForCausalLM, or
of the dense GraniteForCausalLM.

Field names are Hugging Face's. The spellings of transformers 4.57 and of 5.x are read; the published one is written.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from granite4_neuron.config.aliases import ATTENTION, MAMBA, one_spelling
from granite4_neuron.config.checks import LARGEST, check
from granite4_neuron.config.dense import DENSE_MODEL_TYPE, as_hybrid
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.config.json_files import read_object
from granite4_neuron.config.quantization import quantization_in
from granite4_neuron.errors import UserError

_FAMILY = Path(__file__).parents[1] / "family"  # a config.json for each published checkpoint
MODEL_TYPE = "granitemoehybrid"
ARCHITECTURE = "GraniteMoeHybridForCausalLM"

# The names of field types in a sentence.
_TYPE_NAMES = {
    "int": "a whole number",
    "int | None": "a whole number",
    "int | tuple[int, ...] | None": "a whole number or a list of them",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "str | None": "a text",
}


@dataclass(frozen=True)
class RankDimensions:
    """One rank's share of each layer's dimensions, of `tp_degree` ranks."""

    mamba_heads: int
    mamba_groups: int
    mamba_intermediate_size: int
    mamba_conv_dim: int
    attention_heads: int
    key_value_heads: int
    shared_intermediate_size: int
    intermediate_size: int
    vocab_size: int


@dataclass(frozen=True)
class GraniteMoeHybridConfig:
    """Dimensions and constants of one checkpoint.

    Raises:
        UserError: the values contradict each other or describe something that this package does not run.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of one expert; unused when num_local_experts is 0
    shared_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_local_experts: int  # 0: a dense model, every layer has the shared MLP only
    num_experts_per_tok: int
    embedding_multiplier: float
    attention_multiplier: float  # the softmax scale itself
    residual_multiplier: float
    logits_scaling: float  # logits are divided by it
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[str, ...] = ()  # "mamba" or "attention"; empty: all "mamba", Hugging Face's default
    num_key_value_heads: int = 0  # 0: as many as num_attention_heads
    hidden_act: str = "silu"
    attention_bias: bool = False
    position_embedding_type: str | None = None  # "rope", or "nope" and None for no positions at all
    rope_theta: float = 10000.0
    mamba_n_heads: int = 0
    mamba_d_head: int = 0  # 0: mamba_expand * hidden_size / mamba_n_heads
    mamba_d_state: int = 0
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_chunk_size: int = 256  # carried along for other readers; results do not depend on it
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    tie_word_embeddings: bool = False
    torch_dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if not self.layer_types:
            layers = max(0, min(self.num_hidden_layers, LARGEST["num_hidden_layers"]))  # `check` refuses others
            object.__setattr__(self, "layer_types", (MAMBA,) * layers)
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if not self.mamba_d_head and self.mamba_n_heads > 0:
            object.__setattr__(self, "mamba_d_head", self.mamba_intermediate_size // self.mamba_n_heads)
        check(self, DTYPES)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def mamba_intermediate_size(self) -> int:
        """Width of the Mamba layers' x and z: d_inner of the Mamba-2 paper."""
        return self.mamba_expand * self.hidden_size

    @property
    def uses_rope(self) -> bool:
        return self.position_embedding_type == "rope"

    def rank_dimensions(self, tp_degree: int = 1) -> RankDimensions:
        """Return the share of one rank. Key heads and groups are replicated where there are fewer of them than ranks.

        Raises:
            UserError: the model cannot be split into `tp_degree` equal parts; the message lists the degrees that can.
        """
        if not self._divides(tp_degree):
            most = math.gcd(*self._split_sizes())
            possible = [str(degree) for degree in range(1, most + 1) if self._divides(degree)]
            raise UserError(f"tp_degree is {tp_degree}; this model can be split by {', '.join(possible)}.")
        groups = max(1, self.mamba_n_groups // tp_degree)
        width = self.mamba_intermediate_size // tp_degree
        return RankDimensions(
            mamba_heads=self.mamba_n_heads // tp_degree,
            mamba_groups=groups,
            mamba_intermediate_size=width,
            mamba_conv_dim=width + 2 * groups * self.mamba_d_state,
            attention_heads=self.num_attention_heads // tp_degree,
            key_value_heads=max(1, self.num_key_value_heads // tp_degree),
            shared_intermediate_size=self.shared_intermediate_size // tp_degree,
            intermediate_size=self.intermediate_size // tp_degree,
            vocab_size=self.vocab_size // tp_degree,
        )

    def _divides(self, tp_degree: int) -> bool:
        if type(tp_degree) is not int or tp_degree < 1 or any(size % tp_degree for size in self._split_sizes()):
            return False
        key_heads = self.num_key_value_heads
        return ATTENTION not in self.layer_types or key_heads % tp_degree == 0 or tp_degree % key_heads == 0

    def _split_sizes(self) -> list[int]:
        """Return the dimensions of which every rank has an equal part."""
        split = [self.vocab_size, self.shared_intermediate_size]
        if self.num_local_experts:
            split.append(self.intermediate_size)
        if MAMBA in self.layer_types:
            split.append(self.mamba_n_heads)
            if self.mamba_n_groups > 1:
                split.append(self.mamba_n_groups)
        if ATTENTION in self.layer_types:
            split.append(self.num_attention_heads)
        return split

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "config.json") -> GraniteMoeHybridConfig:
        """Build from the content of a ``config.json``; unknown keys are ignored.

        Args:
            values: the parsed JSON object, in the spelling of transformers 4.57 or 5.x.
            source: what to call the file in an error.

        Raises:
            UserError: not a Granite model, or a field is missing, of the wrong type, or contradicts another.
        """
        try:
            return cls(**_fields_from_json(values))
        except UserError as error:
            raise UserError(f"{source}: {error}") from None

    @classmethod
    def from_file(cls, path: str | Path) -> GraniteMoeHybridConfig:
        """Read a ``config.json``.

        Raises:
            UserError: see `from_dict`; also when the file is missing or is not JSON.
        """
        return cls.from_dict(read_object(Path(path)), source=str(path))

    @staticmethod
    def is_family_member(name: str) -> bool:
        """Return whether `from_family` knows the name."""
        return f"granite-4.0-{name.removeprefix('granite-4.0-')}" in family_names()

    @classmethod
    def from_family(cls, name: str) -> GraniteMoeHybridConfig:
        """Return the published dimensions of a member of the Granite 4.0 family, such as ``granite-4.0-h-350m`` or
        ``h-350m``.

        Raises:
            UserError: no such member; the message lists them.
        """
        file = _FAMILY / f"granite-4.0-{name.removeprefix('granite-4.0-')}.json"
        if not cls.is_family_member(name):
            raise UserError(f"there is no family member {name!r}; choose one of: {', '.join(family_names())}.")
        return cls.from_dict(json.loads(file.read_text(encoding="utf-8")), source=file.name)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a ``config.json`` in the published spelling, readable by transformers 4.57 and 5.x."""
        values = dataclasses.asdict(self)
        lower, upper = values.pop("time_step_limit")
        if (lower, upper) != (0.0, math.inf):
            values["time_step_limit"] = [lower, upper]
        if isinstance(self.eos_token_id, tuple):
            values["eos_token_id"] = list(self.eos_token_id)
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            **values,
            "layer_types": list(self.layer_types),
        }


def family_names() -> list[str]:
    """Return the names that `GraniteMoeHybridConfig.from_family` knows."""
    return sorted(file.name.removesuffix(".json") for file in _FAMILY.iterdir())


def _fields_from_json(values: dict[str, Any]) -> dict[str, Any]:
    if values.get("model_type") == DENSE_MODEL_TYPE:
        values = as_hybrid(values)
    elif values.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"model_type is {reprlib.repr(values.get('model_type'))}, and must be {MODEL_TYPE!r} (Granite 4) or "
            f"{DENSE_MODEL_TYPE!r} (dense Granite models)."
        )
    quantization_in(values)
    fields = {field.name: field for field in dataclasses.fields(GraniteMoeHybridConfig)}
    read = {name: value for name, value in one_spelling(values).items() if name in fields and value is not None}
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in read]
    if missing:
        raise UserError(f"these fields are missing: {', '.join(missing)}.")
    return {name: _typed(name, value, str(fields[name].type)) for name, value in read.items()}


def _typed(name: str, value: Any, annotation: str) -> Any:
    """Convert `value` to the type that `annotation` (the dataclass field's, a string) names."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if annotation == "float" and is_number and -sys.float_info.max <= value <= sys.float_info.max:
        return float(value)
    if annotation.startswith("int") and is_number and (isinstance(value, int) or value.is_integer()):
        return int(value)
    if annotation.startswith("tuple") and isinstance(value, tuple):
        return value
    if annotation.startswith("int | tuple") and isinstance(value, tuple):
        return tuple(_typed(name, item, "int") for item in value)
    if annotation == "bool" and isinstance(value, bool):
        return value
    if annotation.startswith("str") and isinstance(value, str):
        return value
    raise UserError(f"{name} is {reprlib.repr(value)}, and must be {_TYPE_NAMES[annotation]}.")
