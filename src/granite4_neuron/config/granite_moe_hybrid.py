"""The config of GraniteMoeHybridForCausalLM, IBM Granite 4.0, and of the dense GraniteForCausalLM.

Field names are Hugging Face's. The spellings of transformers 4.57 and of 5.x are read; the published one is written.
"""

from __future__ import annotations

import dataclasses
import reprlib
from dataclasses import dataclass
from typing import Any, ClassVar

from granite4_neuron.config.aliases import ATTENTION, MAMBA, one_spelling
from granite4_neuron.config.checks import require, require_one_of, require_positive
from granite4_neuron.config.dense import DENSE_MODEL_TYPE, as_hybrid
from granite4_neuron.config.model_config import LayerParts, ModelConfig, layers_to_read
from granite4_neuron.errors import UserError

MODEL_TYPE = "granitemoehybrid"
ARCHITECTURE = "GraniteMoeHybridForCausalLM"
# By model_type: make the content of another model's config.json that of a hybrid's.
_AS_HYBRID = {DENSE_MODEL_TYPE: as_hybrid}


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(ModelConfig):
    """The config of a Granite model. Each layer has a mixer and a feed-forward part.

    layer_types: "mamba" or "attention"; empty: all "mamba", Hugging Face's default.
    position_embedding_type: "rope"; "nope" or None for no positions.
    mamba_d_head: 0 stands for mamba_expand * hidden_size / mamba_n_heads.
    mamba_chunk_size: kept for other readers of the config; results do not depend on it.
    """

    model_type: ClassVar[str] = MODEL_TYPE
    architecture: ClassVar[str] = ARCHITECTURE

    position_embedding_type: str | None = None
    mamba_expand: int = 2
    mamba_chunk_size: int = 256

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (MAMBA,) * layers_to_read(self.num_hidden_layers))
        if not self.mamba_d_head and self.mamba_n_heads > 0:
            object.__setattr__(self, "mamba_d_head", self.mamba_intermediate_size // self.mamba_n_heads)
        super().__post_init__()

    def check_family(self) -> None:
        require_positive(self, "shared_intermediate_size")
        require_one_of(self, "hidden_act", ("silu",))
        require_one_of(self, "position_embedding_type", ("rope", "nope", None))
        if ATTENTION in self.layer_types:
            heads = self.num_attention_heads
            require(
                self.hidden_size % heads == 0,
                f"hidden_size ({self.hidden_size}) is not divisible by num_attention_heads ({heads})",
            )
        if self.uses_rope and ATTENTION in self.layer_types:
            require(self.head_dim % 2 == 0, f"the head width {self.head_dim} is odd, and rope needs an even one")
            require(self.rope_theta > 0, f"rope_theta is {self.rope_theta}, and must be above 0")
        if MAMBA in self.layer_types:
            require(self.mamba_expand > 0, f"mamba_expand is {self.mamba_expand}, and must be at least 1")
            require(
                self.mamba_n_heads * self.mamba_d_head == self.mamba_intermediate_size,
                f"mamba_n_heads * mamba_d_head ({self.mamba_n_heads} * {self.mamba_d_head}) must equal "
                f"mamba_expand * hidden_size ({self.mamba_expand} * {self.hidden_size})",
            )

    @property
    def mamba_intermediate_size(self) -> int:
        """Width of the Mamba layers' x and z: d_inner in the Mamba-2 paper."""
        return self.mamba_expand * self.hidden_size

    @property
    def uses_rope(self) -> bool:
        return self.position_embedding_type == "rope"

    def parts(self, layer_type: str) -> LayerParts:
        """A layer is named by its mixer."""
        return LayerParts(layer_type, self.shared_intermediate_size, self.num_local_experts > 0)

    @classmethod
    def one_spelling(cls, values: dict[str, Any]) -> dict[str, Any]:
        model_type = values.get("model_type")
        if model_type != MODEL_TYPE and model_type not in _AS_HYBRID:
            others = ", ".join(map(repr, _AS_HYBRID))
            raise UserError(f"model_type is {reprlib.repr(model_type)}, and must be {MODEL_TYPE!r} or one of {others}.")
        return one_spelling(_AS_HYBRID.get(model_type, dict)(values))

    def to_dict(self) -> dict[str, Any]:
        """The result is for transformers 4.57 and 5.x."""
        values = dataclasses.asdict(self)
        del values["time_step_limit"]
        if isinstance(self.eos_token_id, tuple):
            values["eos_token_id"] = list(self.eos_token_id)
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            **values,
            **self.written_time_step_limit,
            "layer_types": list(self.layer_types),
        }
