"""The config that all families share; the rest of the package knows a model by it."""

from __future__ import annotations

import math
import reprlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from granite4_neuron.config.aliases import ATTENTION, MAMBA, time_step_limit_in
from granite4_neuron.config.checks import LARGEST, require, require_one_of, require_positive
from granite4_neuron.config.dtypes import DTYPES
from granite4_neuron.config.quantization import quantization_in
from granite4_neuron.errors import UserError

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

NO_MTP = "the model has no layers for multi-token prediction (mtp.*); draft with n-grams or with a draft model."
EXPERT_NUMBER = "{expert}"  # in a tensor's name, if each expert has a tensor of its own
# The names of field types in a sentence.
_TYPE_NAMES = {
    "int": "a whole number",
    "int | None": "a whole number",
    "int | tuple[int, ...] | None": "a whole number or a list of them",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "str | None": "a string",
}


@dataclass(frozen=True)
class RankDimensions:
    """The share that one of `tp_degree` ranks has of each layer's dimensions."""

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
class LayerParts:
    """The parts of a layer: a mixer, then a feed-forward part, or only one of them.

    mixer: MAMBA or ATTENTION; None for a layer without a mixer, which has no state.
    mlp_width: width of the MLP that all tokens share; 0 for a layer without a feed-forward part.
    has_experts: whether the feed-forward part has experts besides the MLP.
    """

    mixer: str | None
    mlp_width: int
    has_experts: bool

    @property
    def count(self) -> int:
        """The number of parts. Each adds its output to the residual stream."""
        return (self.mixer is not None) + (self.mlp_width > 0)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """Dimensions and constants of one checkpoint. Names are as in GraniteMoeHybridForCausalLM's config.json.

    A family that has others lists them.

    json_names: the names in config.json, by field, where they differ from the field's.

    Raises:
        UserError: the values contradict each other or describe something that this package does not run.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    json_names: ClassVar[Mapping[str, str]] = {}

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of one expert; unused when num_local_experts is 0
    shared_intermediate_size: int  # width of the MLP, with or without experts beside it
    num_hidden_layers: int
    num_attention_heads: int
    num_local_experts: int  # 0: a dense model, no layer has experts
    num_experts_per_tok: int
    embedding_multiplier: float
    attention_multiplier: float  # the softmax scale itself
    residual_multiplier: float
    logits_scaling: float  # logits are divided by it
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[str, ...] = ()
    num_key_value_heads: int = 0  # 0: as many as num_attention_heads
    hidden_act: str = "silu"  # of MLP and experts: "silu" with a gate, "relu2" (squared ReLU) without one
    attention_bias: bool = False
    rope_theta: float = 10000.0
    mamba_n_heads: int = 0
    mamba_d_head: int = 0
    mamba_d_state: int = 0
    mamba_n_groups: int = 1
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    tie_word_embeddings: bool = False
    torch_dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        _check(self)

    @abstractmethod
    def check_family(self) -> None:
        """Check this family's own fields; sizes are already within limits.

        Raises:
            UserError: the values describe no model that can be built.
        """

    @abstractmethod
    def parts(self, layer_type: str) -> LayerParts:
        """Return the parts of a layer of a type, one of `layer_types`."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the content of a ``config.json`` in the published spelling, which transformers reads."""

    @classmethod
    @abstractmethod
    def one_spelling(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a ``config.json`` with this class's names and values of its fields; other keys may
        remain.

        Raises:
            UserError: it describes something that this package does not run.
        """

    @classmethod
    def time_step_limit_in(cls, values: Mapping[str, Any]) -> tuple[float, float]:
        """Return the lowest and the highest time step of the Mamba layers that a ``config.json`` describes.

        Raises:
            UserError: they are not numbers.
        """
        limit = values.get("time_step_limit")
        return cls.time_step_limit if limit is None else time_step_limit_in(limit)

    @property
    def written_time_step_limit(self) -> dict[str, list[float]]:
        """What a ``config.json`` has of `time_step_limit`: nothing for the default, because JSON has no infinity."""
        is_default = self.time_step_limit == type(self).time_step_limit
        return {} if is_default else {"time_step_limit": list(self.time_step_limit)}

    def stored_name(self, name: str) -> str:
        """Return the published name of a parameter of the model, which may have an EXPERT_NUMBER."""
        return name

    def published_name(self, stored_name: str) -> str:
        """Return the published spelling of a stored tensor's name."""
        return stored_name

    @property
    def left_out_tensors(self) -> Mapping[str, str]:
        """The purpose of a checkpoint's tensors that are not loaded, by the beginnings of their names."""
        return {}

    @property
    def mtp_config(self) -> ModelConfig | None:
        """The config of the layers for multi-token prediction (see `model.mtp`), as of a model that has only these;
        None if they are not loaded.
        """
        return None

    def with_mtp(self, values: Mapping[str, Any]) -> ModelConfig:
        """Return this config with the layers for multi-token prediction that the ``config.json`` it was read from
        describes.

        Raises:
            UserError: it has none, or others than this package runs.
        """
        raise UserError(NO_MTP)

    def without_mtp(self) -> ModelConfig:
        """Return this config without layers for multi-token prediction."""
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def mamba_intermediate_size(self) -> int:
        """Width of the Mamba layers' x and z: d_inner in the Mamba-2 paper."""
        return self.mamba_n_heads * self.mamba_d_head

    @property
    def uses_rope(self) -> bool:
        return False

    @property
    def expert_latent_size(self) -> int:
        """Width of the space in which routed experts compute, between two projections; 0 for that of hidden states."""
        return 0

    @property
    def expert_hidden_size(self) -> int:
        """Width of the vectors that routed experts take and return."""
        return self.expert_latent_size or self.hidden_size

    @property
    def has_gated_mlp(self) -> bool:
        """Whether MLP and experts have a gate, silu(gate) * up, and so two input matrices."""
        return self.hidden_act == "silu"

    @property
    def has_correction_bias(self) -> bool:
        """Whether the router has a bias that affects the choice of experts only; see `ops.topk_sigmoid`."""
        return False

    def layers_with(self, mixer: str) -> int:
        """Return the number of layers with MAMBA or ATTENTION."""
        return sum(self.parts(kind).mixer == mixer for kind in self.layer_types)

    @property
    def num_parts(self) -> int:
        """The number of mixers and feed-forward parts in all layers."""
        return sum(self.parts(kind).count for kind in self.layer_types)

    def rank_dimensions(self, tp_degree: int = 1) -> RankDimensions:
        """Return one rank's share. Key heads and groups are replicated if there are fewer of them than ranks.

        Raises:
            UserError: the model cannot be split into `tp_degree` equal parts; the message lists the degrees that can.
        """
        if not self._divides(tp_degree):
            possible = ", ".join(map(str, self.tp_degrees()))
            raise UserError(f"tp_degree is {tp_degree}; this model can be split by {possible}.")
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

    def tp_degrees(self) -> list[int]:
        """Return the numbers of ranks that the model can be split over, ascending."""
        most = math.gcd(*self._split_sizes())
        return [degree for degree in range(1, most + 1) if self._divides(degree)]

    def has_collective_for_norms(self, tp_degree: int) -> bool:
        """Whether ranks that share a group of a Mamba layer's gated norm, one of several, add up its squares first."""
        return tp_degree > self.mamba_n_groups > 1

    def _divides(self, tp_degree: int) -> bool:
        if type(tp_degree) is not int or tp_degree < 1 or any(size % tp_degree for size in self._split_sizes()):
            return False
        groups = self.mamba_n_groups
        if self.layers_with(MAMBA) and groups % tp_degree and tp_degree % groups:
            return False
        key_heads = self.num_key_value_heads
        return not self.layers_with(ATTENTION) or key_heads % tp_degree == 0 or tp_degree % key_heads == 0

    def _split_sizes(self) -> list[int]:
        """Return the dimensions that are split equally over ranks."""
        all_parts = [self.parts(kind) for kind in dict.fromkeys(self.layer_types)]
        split = [self.vocab_size, *(one.mlp_width for one in all_parts if one.mlp_width)]
        if any(one.has_experts for one in all_parts):
            split.append(self.intermediate_size)
        if self.layers_with(MAMBA):
            split.append(self.mamba_n_heads)
        if self.layers_with(ATTENTION):
            split.append(self.num_attention_heads)
        return split

    @classmethod
    def json_name(cls, field: str) -> str:
        """Return the name of a field in config.json."""
        return cls.json_names.get(field, field)

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "config.json") -> Self:
        """Build from the content of a ``config.json`` of this family, and refuse others; see `config_from_dict`."""
        try:
            return cls(**cls._fields_from_json(values))
        except UserError as error:
            raise UserError(f"{source}: {error}") from None

    @classmethod
    def _fields_from_json(cls, values: dict[str, Any]) -> dict[str, Any]:
        values = cls.one_spelling(values) | {"time_step_limit": cls.time_step_limit_in(values)}
        quantization_in(values)
        known = {field.name: field for field in fields(cls) if field.init}
        read = {name: value for name, value in values.items() if name in known and value is not None}
        missing = [name for name, field in known.items() if field.default is MISSING and name not in read]
        if missing:
            raise UserError(f"these fields are missing: {', '.join(map(cls.json_name, missing))}.")
        return {name: _typed(cls.json_name(name), value, str(known[name].type)) for name, value in read.items()}


def layers_to_read(num_hidden_layers: int) -> int:
    """Return how many layer types to read for a number of layers that `check` has not seen yet."""
    return max(0, min(num_hidden_layers, LARGEST["num_hidden_layers"]))


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


def _check(config: ModelConfig) -> None:
    """Check that a config of any family describes a model that can be built.

    Raises:
        UserError: it does not; the message names the field, its value, and the right values.
    """
    require_positive(config, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    _check_magnitudes(config)
    called = config.json_name
    require(
        len(config.layer_types) == config.num_hidden_layers,
        f"{called('layer_types')} names {len(config.layer_types)} layers, but num_hidden_layers is "
        f"{config.num_hidden_layers}",
    )
    require_one_of(config, "torch_dtype", DTYPES)
    experts = config.num_local_experts
    require(experts >= 0, f"{called('num_local_experts')} is {experts}, and must be 0 (a dense model) or more")
    for name in ("logits_scaling", "rms_norm_eps", "max_position_embeddings"):
        require(getattr(config, name) > 0, f"{called(name)} is {getattr(config, name)}, and must be above 0")
    all_parts = [config.parts(kind) for kind in dict.fromkeys(config.layer_types)]
    mixers = {one.mixer for one in all_parts}
    if MAMBA in mixers:
        require_positive(config, "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups")
    config.check_family()
    if any(one.has_experts for one in all_parts):
        _check_experts(config)
    if ATTENTION in mixers:
        _check_attention(config)
    if MAMBA in mixers:
        _check_mamba(config)


def _check_magnitudes(config: ModelConfig) -> None:
    """Refuse numbers for which reading a model would take minutes, or sizes would not fit in 64 bits."""
    for name, most in LARGEST.items():
        value = getattr(config, name, 0)  # some belong to one family only
        require(value <= most, f"{config.json_name(name)} is {reprlib.repr(value)}, and can be at most {most:,}")


def _check_experts(config: ModelConfig) -> None:
    experts, chosen, called = config.num_local_experts, config.num_experts_per_tok, config.json_name
    require(
        1 <= chosen <= experts,
        f"{called('num_experts_per_tok')} is {chosen}, and must be between 1 and {called('num_local_experts')} "
        f"({experts})",
    )
    require_positive(config, "intermediate_size")


def _check_attention(config: ModelConfig) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    require(
        kv_heads > 0 and heads % kv_heads == 0,
        f"num_attention_heads ({heads}) is not divisible by num_key_value_heads ({kv_heads})",
    )


def _check_mamba(config: ModelConfig) -> None:
    called = config.json_name
    require(config.mamba_d_conv >= 2, f"{called('mamba_d_conv')} is {config.mamba_d_conv}, and must be at least 2")
    require(
        config.mamba_n_heads % config.mamba_n_groups == 0,
        f"{called('mamba_n_heads')} ({config.mamba_n_heads}) is not divisible by {called('mamba_n_groups')} "
        f"({config.mamba_n_groups})",
    )
    lower, upper = config.time_step_limit
    require(0.0 <= lower < upper, f"time_step_limit is [{lower}, {upper}], and must satisfy 0 <= lower < upper")
