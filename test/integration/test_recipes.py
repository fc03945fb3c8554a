"""A copy of the package gets what docs/extending.md has recipes for, in the files that these name: a norm, a
quantisation for plain torch, a dtype of weights, a model class, a family and a backend. Options are in
test_new_option.py, a quantisation for the fused kernels in test_new_format.py.
"""

import pytest

from test.support.package_copy import PackageCopy

pytestmark = pytest.mark.slow


@pytest.fixture
def copy(tmp_path):
    return PackageCopy(tmp_path)


# Writes a random checkpoint and runs commands on it.
BEGIN = """
import sys
from pathlib import Path

import torch
import transformers

from granite4_neuron import load
from granite4_neuron.commands import cli
from test.support.checkpoints import save_byte_tokenizer, small_config

folder = Path(sys.argv[1])

def save(model, **fields):
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            scale = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if "norm" in name else 0.0, scale)
    model.config.update(fields)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
"""


def ran(copy, tmp_path, program):
    done = copy.run("-c", BEGIN + program, tmp_path / "model")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


NORM = {
    "ops/norm.py": (
        r"import functional as F\n",
        "\n\ndef layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:\n"
        "    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(weight.dtype)\n",
    ),
    "ops/operators.py": (
        r"    rms_norm: Operator = rms_norm\n",
        "    layer_norm: Operator = layer_norm\n",
    ),
    "model/norm.py": (
        r"        return self.operators.rms_norm\(hidden_states, self.weight, self.eps\)\n",
        "\n\nclass LayerNorm(RMSNorm):\n"
        "    def __init__(self, channels: int, eps: float):\n"
        "        super().__init__(channels, eps)\n"
        "        self.bias = nn.Parameter(torch.empty(channels))\n\n"
        "    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:\n"
        "        return self.operators.layer_norm(hidden_states, self.weight, self.bias, self.eps)\n",
    ),
}


def test_a_norm(copy, tmp_path):
    """A norm with a bias, which a field of the config chooses, beside transformers with PyTorch's LayerNorm."""
    for file, addition in NORM.items():
        copy.add(file, *addition)
    copy.add("ops/operators.py", r"from granite4_neuron.ops.norm import ", "layer_norm, ")
    copy.add("config/model_config.py", r"    hidden_act: str = .*\n", '    norm_type: str = "rms_norm"\n')
    copy.add(
        "model/norm.py",
        r'    """Make a norm of the residual stream.*\n',
        '    if config.norm_type == "layer_norm":\n        return LayerNorm(config.hidden_size, config.rms_norm_eps)\n',
    )
    copy.add(
        "model/parameters.py",
        r"(?=    for module in biased:\n)",
        '    if config.norm_type == "layer_norm":\n'
        '        biased += [name.removesuffix(".weight") for name in others if name.endswith("layernorm.weight")]\n',
    )
    copy.add(
        "model/parameters.py",
        r"        NORM: Parameter\(\(hidden,\)\),\n",
        '        **({"model.norm.bias": Parameter((hidden,))} if config.norm_type == "layer_norm" else {}),\n',
    )
    copy.add(
        "model/parameters.py",
        r"    found\[NORM\] = outside\[NORM\]\n",
        '    if config.norm_type == "layer_norm":\n        found["model.norm.bias"] = outside["model.norm.bias"]\n',
    )
    copy.add(
        "evaluation/layers.py", r"rms_norm=lambda x, weight, eps: x", ", layer_norm=lambda x, weight, bias, eps: x"
    )
    said = ran(
        copy,
        tmp_path,
        """
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as modeling

class LayerNorm(torch.nn.LayerNorm):
    def __init__(self, hidden_size, eps):
        super().__init__(hidden_size, eps=eps)

modeling.GraniteMoeHybridRMSNorm = LayerNorm
config = transformers.GraniteMoeHybridConfig(**small_config(vocab_size=264).to_dict())
save(transformers.GraniteMoeHybridForCausalLM(config), norm_type="layer_norm")
assert cli.main(["check", "--model", str(folder), "--layers", "--tokens", "4"]) == 0
print(load(str(folder))[0].fallbacks)
""",
    )
    assert "they compute RMS norms, and the model has a LayerNorm" in said


NF4 = '''
"""Weights as NormalFloat4: a scale for each 64 columns, and 16 levels (Dettmers and others 2023, appendix E)."""

import torch
import torch.nn.functional as F

from granite4_neuron.ops.weight import Format, QuantizedWeight

BLOCK = 64
LEVELS = torch.tensor(
    [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]
    + [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1]
)


class NF4(Format):
    def layout(self, shape):
        *rows, columns = shape
        blocks = -(-columns // BLOCK)
        values = torch.Size([*rows, blocks * BLOCK // 2])
        return {"": (values, torch.uint8), "_scale": (torch.Size([*rows, blocks]), torch.float32)}

    def quantize(self, weight):
        blocks = F.pad(weight.float(), (0, -weight.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1)
        scales.masked_fill_(scales < torch.finfo(torch.float32).tiny, 1.0)
        levels = torch.bucketize(blocks / scales[..., None], (LEVELS[1:] + LEVELS[:-1]) / 2).flatten(-2).byte()
        return QuantizedWeight(self, levels[..., ::2] | levels[..., 1::2] << 4, scales, weight.shape)

    def dequantize(self, weight, dtype):
        levels = torch.stack((weight.values & 15, weight.values >> 4), -1).flatten(-2).int()
        blocks = LEVELS[levels].unflatten(-1, (-1, BLOCK)) * weight.scales[..., None]
        return blocks.flatten(-2)[..., : weight.shape[-1]].to(dtype)


FORMAT = NF4()
'''


def test_a_quantisation(copy, tmp_path):
    """Without a header the fused kernels refuse it, and the tests of all formats that need none pass."""
    copy.write("ops/formats/nf4.py", NF4)
    said = ran(copy, tmp_path, 'assert cli.main(["generate", "--quantize", "nf4", "The"]) == 2')
    assert "the fused kernels have no format nf4; choose plain torch for it (--cpu-kernels torch)." in said
    tests = "test/unit/ops/test_quantization.py", "test/integration/test_quantized_checkpoints.py::test_convert"
    done = copy.run("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "", "-k", "nf4", *tests)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr


def test_a_dtype_of_weights(copy, tmp_path):
    copy.add("config/dtypes.py", r"_TABLE = \{", '"float64": _Dtype(8, "F64"), ')
    said = ran(
        copy,
        tmp_path,
        """
from safetensors import safe_open

assert cli.main(["convert", "--dtype", "float64", "--output", str(folder)]) == 0
with safe_open(folder / "model.safetensors", "pt") as file:
    print({file.get_slice(name).get_dtype() for name in file.keys()})
assert load(str(folder), cpu_kernels="torch")[0].dtype == torch.float64
assert cli.main(["generate", "--model", str(folder), "--cpu-kernels", "torch", "--max-tokens", "9", "The"]) == 0
""",
    )
    assert "'F64'" in said


FAMILY = '''
"""Reads configs of GraniteMoeSharedForCausalLM: attention in all layers, with experts and an MLP for all tokens."""

from granite4_neuron.config.aliases import ATTENTION

SHARED_MODEL_TYPE = "granitemoeshared"


def shared_as_hybrid(values):
    return {
        **values,
        "layer_types": [ATTENTION] * values["num_hidden_layers"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 1,
    }
'''


def test_a_model_class(copy, tmp_path):
    """GraniteMoeSharedForCausalLM, whose mathematics is that of Granite 4's attention layers, beside transformers."""
    copy.write("config/moe_shared.py", FAMILY)
    imports = r"from granite4_neuron.config.model_config import .*\n"
    line = "from granite4_neuron.config.moe_shared import SHARED_MODEL_TYPE, shared_as_hybrid\n"
    for file in ("config/__init__.py", "config/granite_moe_hybrid.py"):
        copy.add(file, imports, line)
    copy.add(
        "config/__init__.py",
        r"    DENSE_MODEL_TYPE: .*\n",
        '    SHARED_MODEL_TYPE: (GraniteMoeHybridConfig, "Granite models with experts and no Mamba layers"),\n',
    )
    copy.add("config/granite_moe_hybrid.py", r"_AS_HYBRID = \{", "SHARED_MODEL_TYPE: shared_as_hybrid, ")
    said = ran(
        copy,
        tmp_path,
        """
values = small_config(vocab_size=264).to_dict()
for name in ("layer_types", "model_type", "architectures"):
    del values[name]
config = transformers.GraniteMoeSharedConfig(**values | {"num_hidden_layers": 3})
save(transformers.GraniteMoeSharedForCausalLM(config))
assert cli.main(["check", "--model", str(folder), "--layers", "--tokens", "4"]) == 0
print(load(str(folder))[0].config.layer_types)
""",
    )
    assert "('attention', 'attention', 'attention')" in said


ARCEE_CONFIG = '''
"""The config of ArceeForCausalLM: attention with rotary positions, and an MLP without a gate."""

from dataclasses import dataclass, fields
from typing import ClassVar

from granite4_neuron.config.aliases import ATTENTION, one_spelling
from granite4_neuron.config.checks import require_one_of
from granite4_neuron.config.model_config import LayerParts, ModelConfig

ARCEE_MODEL_TYPE = "arcee"
_STORED = {"shared_mlp.input_linear": "mlp.up_proj", "shared_mlp.output_linear": "mlp.down_proj"}
_CONSTANTS = dict(
    intermediate_size=0,
    num_local_experts=0,
    num_experts_per_tok=0,
    embedding_multiplier=1.0,
    residual_multiplier=1.0,
    logits_scaling=1.0,
)


@dataclass(frozen=True, kw_only=True)
class ArceeConfig(ModelConfig):
    model_type: ClassVar[str] = ARCEE_MODEL_TYPE
    architecture: ClassVar[str] = "ArceeForCausalLM"
    json_names: ClassVar[dict[str, str]] = {"shared_intermediate_size": "intermediate_size"}

    uses_rope: ClassVar[bool] = True

    def parts(self, layer_type):
        return LayerParts(ATTENTION, self.shared_intermediate_size, False)

    def stored_name(self, name):
        for ours, published in _STORED.items():
            name = name.replace(ours, published)
        return name

    def check_family(self):
        require_one_of(self, "hidden_act", ("relu2",))

    @classmethod
    def one_spelling(cls, values):
        spelled = {
            **values,
            **_CONSTANTS,
            "shared_intermediate_size": values["intermediate_size"],
            "attention_multiplier": (values["hidden_size"] // values["num_attention_heads"]) ** -0.5,
            "layer_types": (ATTENTION,) * values["num_hidden_layers"],
            "position_embedding_type": "rope",
        }
        return one_spelling(spelled)

    def to_dict(self):
        left_out = {*_CONSTANTS, "attention_multiplier", "layer_types", "time_step_limit"}
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        named = {self.json_name(name): value for name, value in kept.items()}
        return {"architectures": [self.architecture], "model_type": self.model_type, **named}
'''
ARCEE_MODEL = '''
"""ArceeForCausalLM: Granite's model, whose multipliers are 1, with other layers."""

from granite4_neuron.model.attention import Attention
from granite4_neuron.model.decoder_layer import DecoderLayer
from granite4_neuron.model.modeling_granite_moe_hybrid import GraniteMoeHybridForCausalLM
from granite4_neuron.model.moe import SharedMLP


class ArceeForCausalLM(GraniteMoeHybridForCausalLM):
    @staticmethod
    def make_layer(config, number, parallel):
        mlp = SharedMLP(config, parallel, config.shared_intermediate_size)
        return DecoderLayer(config, parallel, Attention(config, parallel), mlp, None)
'''


def test_a_family(copy, tmp_path):
    """ArceeForCausalLM, whose MLP has no gate and other names, beside transformers; its tensors have their names in
    converted files too.
    """
    copy.write("config/arcee.py", ARCEE_CONFIG)
    copy.add(
        "config/__init__.py",
        r"from granite4_neuron.config.aliases import .*\n",
        "from granite4_neuron.config.arcee import ARCEE_MODEL_TYPE, ArceeConfig\n",
    )
    copy.add("config/__init__.py", r"    DENSE_MODEL_TYPE: .*\n", '    ARCEE_MODEL_TYPE: (ArceeConfig, "Arcee"),\n')
    copy.write("model/modeling_arcee.py", ARCEE_MODEL)
    copy.add(
        "model/families.py",
        r"from granite4_neuron.model.causal_lm import .*\n",
        "from granite4_neuron.model.modeling_arcee import ArceeForCausalLM\n",
    )
    copy.add("model/families.py", r"for each in \(", "ArceeForCausalLM, ")
    ran(
        copy,
        tmp_path,
        """
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
config = transformers.ArceeConfig(vocab_size=264, **sizes, bos_token_id=1, eos_token_id=2)
save(transformers.ArceeForCausalLM(config))
model = "--model", str(folder)
for kernels in ("fused", "torch"):
    assert cli.main(["check", *model, "--layers", "--tokens", "4", "--cpu-kernels", kernels]) == 0
assert cli.main(["generate", *model, "--speculate", "ngram:4", "--max-tokens", "9", "The"]) == 0
assert cli.main(["convert", *model, "--dtype", "bfloat16", "--output", str(folder / "converted")]) == 0
assert cli.main(["check", "--model", str(folder / "converted"), "--dtype", "float32", "--tokens", "4"]) == 0
""",
    )


BACKEND = {
    "options.py": '''
"""Options of the backend mps."""

from granite4_neuron.devices.options import DTYPE

OPTIONS = (DTYPE,)
''',
    "backend.py": '''
"""The backend mps: a Mac's GPU, or plain torch on a machine without one."""

from granite4_neuron.devices.mps.options import OPTIONS
from granite4_neuron.runtime.declaration import Backend


def load(checkpoint, generation_config, *, dtype, progress, remark, **options):
    from granite4_neuron.checkpoint.loading import load_model
    from granite4_neuron.devices.mps.runtime import MPSRuntime

    return MPSRuntime(load_model(checkpoint, dtype, progress=progress, remark=remark), generation_config, **options)


BACKEND = Backend("mps", OPTIONS, load)
''',
    "runtime.py": '''
"""Runs steps with the definitions in plain torch, on a Mac's GPU."""

from functools import partial

import torch

from granite4_neuron.devices.mps.options import OPTIONS
from granite4_neuron.model.step import step_of
from granite4_neuron.ops.operators import TORCH
from granite4_neuron.runtime.bound_model import BoundModel, digest_of_weights
from granite4_neuron.runtime.declaration import numbers_of
from granite4_neuron.runtime.interface import step_inputs
from granite4_neuron.runtime.prompt_cuts import Anywhere
from granite4_neuron.state.hybrid_state import HybridState

DEVICE = torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class MPSRuntime(BoundModel):
    cannot = BoundModel.cannot | {
        ability: f"the backend mps has no {ability} yet." for ability in ("verify", "copy", "snapshot")
    }
    state_dtype = torch.float32
    tokens_per_step, rows_per_step, tokens_per_verification = 256, 4, 1
    prompt_cuts = Anywhere(is_exact=False)

    def __init__(self, model, generation_config):
        self.numerics = "mps", str(DEVICE), numbers_of(OPTIONS, locals())
        self.model = model.bind(TORCH, device=DEVICE)
        self.generation_config = generation_config
        self.weights_digest = partial(digest_of_weights, self.model)

    def allocate(self, num_sequences, max_length):
        return HybridState.allocate(self.config, num_sequences, max_length, self.dtype, DEVICE)

    @torch.inference_mode()
    def step(self, state, rows, all_logits=False):
        longest = max(len(row.tokens) for row in rows)
        ids, *where = (each.to(DEVICE) for each in step_inputs(rows, longest))
        return self.model(ids, step_of(*where, state), state, all_logits=all_logits).cpu()
''',
}


def test_a_backend(copy, tmp_path):
    for file, text in BACKEND.items():
        copy.write(f"devices/mps/{file}", text)
    copy.write("devices/mps/__init__.py", "")
    copy.add(
        "devices/backends.py",
        r"from granite4_neuron.devices.cpu import backend as cpu\n",
        "from granite4_neuron.devices.mps import backend as mps\n",
    )
    copy.add("devices/backends.py", r"for each in \(", "mps.BACKEND, ")
    said = ran(
        copy,
        tmp_path,
        """
backend = "--backend", "mps"
assert cli.main(["check", *backend, "--dtype", "float32", "--layers", "--tokens", "4"]) == 0
assert cli.main(["generate", *backend, "--temperature", "1", "--seed", "3", "--max-tokens", "9", "The", "An"]) == 0
assert cli.main(["generate", *backend, "--speculate", "ngram:4", "The"]) == 2
assert cli.main(["generate", *backend, "--cpu-kernels", "torch", "The"]) == 2
""",
    )
    assert "the backend mps has no verify yet." in said
    assert "CPU kernels belong to the backend cpu" in said
