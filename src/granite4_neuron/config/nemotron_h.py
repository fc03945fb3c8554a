"""The config of NemotronHForCausalLM, NVIDIA Nemotron 3: a layer is Mamba, attention, an MLP or experts.

It reads the spellings of transformers 5.x and of the older published files, with hybrid_override_pattern.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from granite4_neuron.config.aliases import ATTENTION, MAMBA, layer_types_in, one_spelling
from granite4_neuron.config.checks import LARGEST, require, require_one_of, require_positive
from granite4_neuron.config.model_config import EXPERT_NUMBER, NO_MTP, LayerParts, ModelConfig
from granite4_neuron.errors import UserError

NEMOTRON_MODEL_TYPE = "nemotron_h"
MLP = "mlp"
EXPERTS = "moe"

_PATTERN = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}  # of hybrid_override_pattern
_WRITTEN = {MAMBA: "linear_attention", ATTENTION: "full_attention", MLP: MLP, EXPERTS: EXPERTS}
_LAYER = re.compile(r"(model|mtp)\.layers\.(\d+)\.(.+)\.(\w+)")
# Published names by the model's own names.
_STORED_OUTSIDE = {
    "model.embed_tokens.weight": "backbone.embeddings.weight",
    "model.norm.weight": "backbone.norm_f.weight",
    **{f"mtp.{name}.weight": f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")},
}
_STORED_MODULES = {
    "input_layernorm": "norm",
    "mamba": "mixer",
    **{f"mamba.{name}": f"mixer.{name}" for name in ("in_proj", "conv1d", "norm", "out_proj")},
    **{f"self_attn.{name}_proj": f"mixer.{name}_proj" for name in "qkvo"},
    "shared_mlp.input_linear": "mixer.up_proj",
    "shared_mlp.output_linear": "mixer.down_proj",
    "block_sparse_moe.router": "mixer.gate",
    "block_sparse_moe.router.layer": "mixer.gate",
    **{f"block_sparse_moe.{name}_latent_proj": f"mixer.{name}_latent_proj" for name in ("fc1", "fc2")},
    "block_sparse_moe.input_linear": f"mixer.experts.{EXPERT_NUMBER}.up_proj",
    "block_sparse_moe.output_linear": f"mixer.experts.{EXPERT_NUMBER}.down_proj",
}
_STORED_BESIDE_EXPERTS = {
    "shared_mlp.input_linear": "mixer.shared_experts.up_proj",
    "shared_mlp.output_linear": "mixer.shared_experts.down_proj",
}
# Fields of config.json that may have one value only, and why.
_ONLY: dict[str, tuple[Any, str]] = {
    "mamba_hidden_act": ("silu", "no other activation is known here"),
    "mlp_bias": (False, "MLPs have no biases here"),
    "attention_bias": (False, "attention has no biases here"),
    "sliding_window": (None, "attention sees all tokens here"),
    "n_shared_experts": (1, "one expert is shared by all tokens here"),
}
# Defaults of transformers, by the names in config.json.
_DEFAULTS: dict[str, Any] = {
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "num_key_value_heads": 8,  # null means as many as there are heads
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "intermediate_size": 21504,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(ModelConfig):
    """The config of a Nemotron model. Each layer is a norm and one part.

    layer_types: "mamba", "attention", "mlp" or "moe".
    shared_intermediate_size: width of the expert that all tokens share.
    mlp_intermediate_size: width of the MLP of an "mlp" layer.
    moe_latent_size: `expert_latent_size`.
    n_group, topk_group, norm_topk_prob, routed_scaling_factor: the router's, see `ops.topk_sigmoid`.
    mtp_layer_types: of the layers for multi-token prediction, which are loaded only where a drafter needs them:
        "attention", "mlp" or "moe".
    time_step_limit: config.json's. Its time_step_min and time_step_max are of the initialisation of weights only.
    """

    model_type: ClassVar[str] = NEMOTRON_MODEL_TYPE
    architecture: ClassVar[str] = "NemotronHForCausalLM"
    json_names: ClassVar[Mapping[str, str]] = {
        "layer_types": "layers_block_type",
        "intermediate_size": "moe_intermediate_size",
        "shared_intermediate_size": "moe_shared_expert_intermediate_size",
        "mlp_intermediate_size": "intermediate_size",
        "num_local_experts": "n_routed_experts",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "mlp_hidden_act",
        "mamba_n_heads": "mamba_num_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_d_state": "ssm_state_size",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    }

    head_dim: int = 128
    mlp_intermediate_size: int = 0
    hidden_act: str = "relu2"
    moe_latent_size: int = 0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    mtp_layer_types: tuple[str, ...] = ()
    # Constants of the family.
    attention_bias: bool = field(default=False, init=False)
    embedding_multiplier: float = field(default=1.0, init=False)
    attention_multiplier: float = field(default=1.0, init=False)
    residual_multiplier: float = field(default=1.0, init=False)
    logits_scaling: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim > 0:
            object.__setattr__(self, "attention_multiplier", self.head_dim**-0.5)

    @property
    def has_correction_bias(self) -> bool:
        return True

    @property
    def expert_latent_size(self) -> int:
        return self.moe_latent_size

    @property
    def left_out_tensors(self) -> Mapping[str, str]:
        return {} if self.mtp_layer_types else {"mtp.": "multi-token prediction"}

    @property
    def mtp_config(self) -> NemotronHConfig | None:
        types = self.mtp_layer_types
        return replace(self.without_mtp(), layer_types=types, num_hidden_layers=len(types)) if types else None

    def with_mtp(self, values: Mapping[str, Any]) -> NemotronHConfig:
        count = values.get("num_nextn_predict_layers")
        if count in (None, 0):
            raise UserError(NO_MTP)
        if count != 1:
            raise UserError(f"num_nextn_predict_layers is {reprlib.repr(count)}, and must be 1 for drafting with it.")
        return replace(
            self, mtp_layer_types=_layer_types(values, "mtp_layers_block_type", "mtp_hybrid_override_pattern")
        )

    def without_mtp(self) -> NemotronHConfig:
        return replace(self, mtp_layer_types=())

    def stored_name(self, name: str) -> str:
        """A layer's part is its mixer, whatever it is. What is before and after the layers for multi-token prediction
        is stored with the first and the last of them.
        """
        match = _LAYER.fullmatch(name)
        if match is None:
            if name == "mtp.norm.weight":
                return f"mtp.layers.{len(self.mtp_layer_types) - 1}.final_layernorm.weight"
            return _STORED_OUTSIDE.get(name, name)
        where, number, module, ending = match.groups()
        layer_types = self.layer_types if where == "model" else self.mtp_layer_types
        has_experts = self.parts(layer_types[int(number)]).has_experts
        stored = (_STORED_BESIDE_EXPERTS if has_experts else {}).get(module, _STORED_MODULES.get(module))
        return f"{'backbone' if where == 'model' else where}.layers.{number}.{stored}.{ending}"

    def published_name(self, stored_name: str) -> str:
        """In memory transformers 5.x has another prefix, and in files of 5.3 to 5.17 the embedding has another name."""
        name = stored_name.replace("model.", "backbone.", 1) if stored_name.startswith("model.") else stored_name
        return "backbone.embeddings.weight" if name == "backbone.embedding.weight" else name

    def parts(self, layer_type: str) -> LayerParts:
        if layer_type in (MAMBA, ATTENTION):
            return LayerParts(layer_type, 0, False)
        if layer_type == MLP:
            return LayerParts(None, self.mlp_intermediate_size, False)
        return LayerParts(None, self.shared_intermediate_size, True)

    def check_family(self) -> None:
        require_one_of(self, "hidden_act", ("relu2",))
        require(
            MAMBA not in self.mtp_layer_types,
            "a layer for multi-token prediction is of the kind mamba, and must be attention, mlp or moe",
        )
        if ATTENTION in self.layer_types:
            require_positive(self, "head_dim")
        if MLP in self.layer_types:
            require_positive(self, "mlp_intermediate_size")
        if EXPERTS in self.layer_types:
            self._check_router()

    def _check_router(self) -> None:
        require_positive(self, "shared_intermediate_size", "n_group")
        latent = self.moe_latent_size
        require(latent >= 0, f"moe_latent_size is {latent}, and must be at least 1, or null")
        experts, groups = self.num_local_experts, self.n_group
        require(
            experts % groups == 0 and experts // groups >= (1 if groups == 1 else 2),
            f"n_routed_experts is {experts}, and must be a multiple of n_group ({groups}) with two or more for each",
        )
        require(
            1 <= self.topk_group <= groups,
            f"topk_group is {self.topk_group}, and must be between 1 and n_group ({groups})",
        )
        most = self.topk_group * experts // groups
        require(
            self.num_experts_per_tok <= most,
            f"num_experts_per_tok is {self.num_experts_per_tok}, and the groups of a token have {most} experts",
        )

    @classmethod
    def one_spelling(cls, values: dict[str, Any]) -> dict[str, Any]:
        if values.get("model_type") != NEMOTRON_MODEL_TYPE:
            raise UserError(
                f"model_type is {reprlib.repr(values.get('model_type'))}, and must be {NEMOTRON_MODEL_TYPE!r}."
            )
        for name, (only, why) in _ONLY.items():
            if values.get(name) not in (None, only):
                raise UserError(f"{name} is {reprlib.repr(values[name])}, and must be {json.dumps(only)}: {why}.")
        stored = _with_defaults(values)
        layer_types = _layer_types(stored, "layers_block_type", "hybrid_override_pattern", "layer_types")
        fields_by_name = {name: stored.get(json_name) for name, json_name in cls.json_names.items()}
        if EXPERTS not in layer_types:
            fields_by_name["num_local_experts"] = 0
        spelled = {
            **stored,
            "num_hidden_layers": stored.get("num_hidden_layers") or len(layer_types),
            **fields_by_name,
            "layer_types": layer_types,
            "mtp_layer_types": (),  # see `with_mtp`
        }
        return one_spelling(spelled)

    @classmethod
    def time_step_limit_in(cls, values: Mapping[str, Any]) -> tuple[float, float]:
        return super().time_step_limit_in(_with_defaults(values))

    def to_dict(self) -> dict[str, Any]:
        """The result is for transformers 5.x."""
        written = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        del written["time_step_limit"]
        written["moe_latent_size"] = self.moe_latent_size or None  # transformers would make projections to 0 numbers
        mtp_layer_types = [_WRITTEN[kind] for kind in written.pop("mtp_layer_types")]
        of_mtp = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": mtp_layer_types} if mtp_layer_types else {}
        if isinstance(self.eos_token_id, tuple):
            written["eos_token_id"] = list(self.eos_token_id)
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{name: only for name, (only, _) in _ONLY.items()},
            **{self.json_name(name): value for name, value in written.items()},
            "layers_block_type": [_WRITTEN[kind] for kind in self.layer_types],
            **self.written_time_step_limit,
            **of_mtp,
        }


def _with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``config.json`` in the present names, with transformers' defaults."""
    return {**_DEFAULTS, **{_OLDER_NAMES.get(name, name): value for name, value in values.items()}}


def _layer_types(
    values: Mapping[str, Any], list_name: str, pattern_name: str, other_name: str | None = None
) -> tuple[str, ...]:
    """Return layers' types, from their list, which may have another name too, or else from the older pattern."""
    spelled, pattern = values.get(list_name), values.get(pattern_name)
    if spelled is None and other_name is not None:
        spelled = values.get(other_name)
    if spelled is not None:
        return layer_types_in(spelled, list_name, {MLP: MLP, EXPERTS: EXPERTS})
    if pattern is None:
        raise UserError(f"these fields are missing: {list_name}.")
    if not isinstance(pattern, str) or len(pattern) > LARGEST["num_hidden_layers"] or set(pattern) - set(_PATTERN):
        raise UserError(
            f"{pattern_name} is {reprlib.repr(pattern)}, and must be a letter for each layer: "
            f"{', '.join(f'{letter} ({kind})' for letter, kind in _PATTERN.items())}."
        )
    return tuple(_PATTERN[letter] for letter in pattern)
