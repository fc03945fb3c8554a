"""Checkpoints in the encodings of other tools: every number is what the encoding's definition says."""

import json

import pytest
import torch
from safetensors.torch import load_file

from granite4_neuron.checkpoint.encodings import encodings
from granite4_neuron.checkpoint.encodings.fp8 import FP8
from granite4_neuron.checkpoint.encodings.mlx import Affine
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.names import StoredNames
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.stored_tensors import WEIGHTS
from granite4_neuron.commands import cli
from granite4_neuron.config.quantization import quantization_in
from granite4_neuron.errors import UserError
from granite4_neuron.ops import QuantizedWeight, as_tensor
from granite4_neuron.ops.fp8 import FORMAT as GROUPED_FP8
from test.support.checkpoints import CASES, NEMOTRON_EXPERTS, NemotronCase
from test.support.encoded import affine, fp8, mxfp4, nvfp4, write_encoded, write_mlx

GRANITE, NEMOTRON = CASES[0], NemotronCase("nemotron")


def weights_of(format, num_bits=8, strategy="channel", **more):
    numbers = dict(num_bits=num_bits, type="float", symmetric=True, strategy=strategy, dynamic=False, **more)
    return {"targets": ["Linear"], "format": format, "weights": numbers, "input_activations": {"num_bits": num_bits}}


GROUPS = [
    weights_of("float-quantized"),
    weights_of("float-quantized", strategy="tensor"),
    weights_of("float-quantized", strategy="block", block_structure=[24, 40]),
    weights_of("nvfp4-pack-quantized", 4, "tensor_group", group_size=16),
    weights_of("mxfp4-pack-quantized", 4, "group", group_size=32),
]
COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {f"group_{number}": group for number, group in enumerate(GROUPS)},
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
}
MODELOPT = {
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "quantized_layers": {"a": {"quant_algo": "fp8_pb_wo"}, "b": {"quant_algo": "NVFP4", "group_size": 16}},
}
IN_COMPRESSED_TENSORS = {
    "in_proj": fp8("weight_scale", rows=1, dtype=torch.bfloat16),
    "out_proj": fp8("weight_scale"),
    "q_proj": fp8("weight_scale", 24, 40),
    "o_proj": nvfp4("weight_packed", "weight_global_scale"),
    "shared_mlp.input": mxfp4("weight_packed"),
    "shared_mlp.output": fp8("weight_scale", 24, 40),
    "layers.0.block_sparse_moe.input": nvfp4("weight_packed", "weight_global_scale", for_all=False),
    "layers.0.block_sparse_moe.output": fp8("weight_scale", for_all=True),
    "sparse_moe.input": nvfp4("weight_packed", "weight_global_scale"),
    "sparse_moe.output": fp8("weight_scale", rows=1),
}
IN_MODELOPT = {
    "in_proj": fp8("weight_scale"),
    "out_proj": nvfp4("weight", "weight_scale_2"),
    "q_proj": fp8("weight_scale", rows=1),
    "shared_experts.up": mxfp4("weight"),
    "experts.": nvfp4("weight", "weight_scale_2"),
    "mixer.up_proj": fp8("weight_scale_inv", 128, 128),
}
# The first experts are in two encodings, scales of queries are for 40 columns, and the second of two layers with latent
# matrices has these in FP8 and experts in another encoding.
TO_STAY = {
    "in_proj": fp8("weight_scale", rows=1, dtype=torch.bfloat16),
    "out_proj": fp8("weight_scale"),
    "q_proj": fp8("weight_scale", 24, 40),
    "k_proj": fp8("weight_scale_inv", 128, 128),
    "layers.0.block_sparse_moe.input": nvfp4("weight_packed", "weight_global_scale"),
    "sparse_moe.input": fp8("weight_scale", rows=1),
    "sparse_moe.output": fp8("weight_scale", for_all=True),
    "layers.3.mixer.experts.": nvfp4("weight_packed", "weight_global_scale"),
    "experts.": fp8("weight_scale"),
    "latent_proj": fp8("weight_scale"),
}
STAY = ("in_proj", "out_proj", "k_proj", "sparse_moe.input", "sparse_moe.output", "experts.", "latent_proj")
STAY_NOT = ("layers.0.block_sparse_moe", "layers.3.mixer.experts")


@pytest.fixture
def granite(random_checkpoints, tmp_path):
    """Write a Granite model as compressed-tensors does; return its folder and meaning."""
    more = {f"model.layers.1.self_attn.{which}_scale": torch.ones(1) for which in ("k", "v")}
    in_proj = "model.layers.0.mamba.in_proj"
    more |= {f"{in_proj}.{which}_scale": torch.ones(1) for which in ("input", "input_global", "output")}
    folder, about = tmp_path / "granite", {"quantization_config": COMPRESSED_TENSORS}
    return folder, write_encoded(random_checkpoints(GRANITE), folder, IN_COMPRESSED_TENSORS, about, more)


@pytest.fixture
def nemotron(random_checkpoints, tmp_path):
    """Write a Nemotron model as ModelOpt does, with a file of its own beside config.json."""
    folder = tmp_path / "nemotron"
    more = {"backbone.layers.3.mixer.k_proj.k_scale": torch.ones(())}
    meaning = write_encoded(random_checkpoints(NEMOTRON), folder, IN_MODELOPT, {}, more)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": MODELOPT}))
    return folder, meaning


def read(folder, **options):
    """Return the tensors that are loaded, by published name."""
    model = load_model(folder, **options)
    names = StoredNames(model.config)
    return {name: each for key, weight in model.named_weights() for name, each in names.stored(key, weight)}


@pytest.mark.parametrize("family", ["granite", "nemotron"])
def test_every_number_is_read(family, request):
    folder, meaning = request.getfixturevalue(family)
    remarks = []
    loaded = read(folder, dtype=torch.float32, remark=remarks.append)
    assert all_equal(loaded, meaning)
    assert "has weights in FP8, MXFP4, NVFP4, which are kept in float32 here, with the same values." in remarks[0]
    unused = {
        "granite": "3 scales of activations and 2 scales of the KV cache are not used",
        "nemotron": "1 scale of the KV cache is not used",
    }
    assert unused[family] in remarks[0]


def all_equal(loaded, meaning):
    return all(torch.equal(loaded[name].view(tensor.shape).float(), tensor.float()) for name, tensor in meaning.items())


@pytest.mark.parametrize(
    ("case", "others"),
    [(GRANITE, "FP8, NVFP4"), (NEMOTRON, "FP8"), (NEMOTRON_EXPERTS[1], "FP8, NVFP4")],
    ids=["granite", "nemotron", "latent"],
)
def test_weights_stay_in_fp8(case, others, random_checkpoints, tmp_path):
    """Those with other scales do not, nor experts whose second matrix does not: a line says so. The latent matrices
    beside experts do, whatever these do.
    """
    folder, about, remarks = tmp_path / "model", {"quantization_config": COMPRESSED_TENSORS}, []
    meaning = write_encoded(random_checkpoints(case), folder, TO_STAY, about)
    model = load_model(folder, torch.float32, keep_quantized=["fp8"], remark=remarks.append)
    assert f"has weights in {others}, which are kept in float32 here" in remarks[0]
    loaded, staying, names = {}, set(), StoredNames(model.config)
    for key, weight in model.named_weights():
        tensors = dict(names.stored(key, as_tensor(weight, torch.float32)))
        loaded |= tensors
        staying |= tensors.keys() if isinstance(weight, QuantizedWeight) else set()
    assert all_equal(loaded, meaning)
    are_to_stay = {name for name in meaning if any(part in name for part in STAY) and name.endswith("weight")}
    assert staying == {name for name in are_to_stay if not any(part in name for part in STAY_NOT)}


@pytest.mark.parametrize("shape", [(200, 320), (3, 200, 320)], ids=str)
def test_scales_of_fp8_become_those_of_groups(shape):
    encoding = FP8("weight_scale", [(128, 128), (64, 256), (24, 40)])

    def drawn(*block, columns=320, **more):
        tensors, meaning = fp8("weight_scale", *block, **more)(torch.Size([*shape[:-1], columns]))
        return tensors, {ending: tuple(tensor.shape) for ending, tensor in tensors.items()}, meaning

    for block, more in (((), {}), ((), {"for_all": True}), ((1,), {}), ((128, 128), {}), ((64, 256), {})):
        tensors, shapes, meaning = drawn(*block, **more)
        assert encoding.may_stay(shapes)
        weight = QuantizedWeight(GROUPED_FP8, *encoding.parts(tensors), torch.Size(shape))
        assert {"": weight.values.shape, "_scale": weight.scales.shape} == {
            ending: size for ending, (size, _) in GROUPED_FP8.layout(weight.shape).items()
        }
        assert torch.equal(weight.dequantize(torch.float32), meaning)
    assert not encoding.may_stay(drawn(24, 40)[1]) and not encoding.may_stay(drawn(columns=322)[1])


def test_fp8_that_is_not_a_number_does_not_stay(random_checkpoints, tmp_path):
    def encode(shape):
        tensors, meaning = fp8("weight_scale")(shape)
        tensors["weight"].view(torch.uint8)[1, 2] = 0xFF
        return tensors, meaning

    about = {"quantization_config": COMPRESSED_TENSORS}
    write_encoded(random_checkpoints(GRANITE), tmp_path / "model", {"in_proj": encode}, about)
    with pytest.raises(UserError, match=r"in_proj.weight in .* has numbers that are not finite \(NaN\), which no"):
        load_model(tmp_path / "model", keep_quantized=["fp8"])


@pytest.mark.parametrize("case", [GRANITE, *NEMOTRON_EXPERTS], ids=lambda case: case.name)
def test_files_of_mlx_are_read(case, random_checkpoints, tmp_path):
    """In a file of 4 bits mlx-lm gives a router 8. Its names and axes are others than the published ones."""
    routers = [f"model.layers.{number}.block_sparse_moe.router.layer" for number in range(6)]
    eight = {"group_size": 32, "bits": 8}

    def encode_of(name):
        if "norm" in name or not name.endswith(".weight") or "conv1d" in name or "mixer.gate" in name:
            return None
        return affine(8, 32) if "router" in name else affine(4, 8)

    about = {"quantization": {"group_size": 8, "bits": 4, "mode": "affine"} | dict.fromkeys(routers, eight)}
    about["quantization_config"] = about["quantization"]
    folder = random_checkpoints(case)
    meaning = write_mlx(folder, tmp_path / "quantized", encode_of, about)
    assert all_equal(read(tmp_path / "quantized", dtype=torch.float32), meaning)
    checkpoint = open_checkpoint(tmp_path / "quantized")
    assert checkpoint.stored_in[0] == "MLX's 4 bits" and checkpoint.dtype == "bfloat16"
    assert quantization_in({"quantization": {}}).affine == {"": (4, 64)}, "MLX's defaults"
    meaning = write_mlx(folder, tmp_path / "plain", lambda name: None, {})
    assert all_equal(read(tmp_path / "plain"), meaning)
    assert open_checkpoint(tmp_path / "plain").stored_in == ["MLX's layout"]


def test_commands_treat_them_as_floats(granite, capsys, tmp_path):
    """`info` names the encodings, and `convert` writes a checkpoint of ours."""
    folder, meaning = granite
    assert cli.main(["info", "--model", str(folder)]) == 0
    assert "FP8, MXFP4, NVFP4" in capsys.readouterr().out
    ours = tmp_path / "ours"
    assert cli.main(["convert", "--model", str(folder), "--dtype", "bfloat16", "--output", str(ours)]) == 0
    assert "which are kept in bfloat16 here and rounded" in capsys.readouterr().err
    assert open_checkpoint(folder).folder is None and open_checkpoint(ours).folder == ours
    written = load_file(ours / WEIGHTS)
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in meaning.items())
    model = load_model(folder, quantize="int8")
    assert model.is_quantized


@pytest.mark.parametrize(
    "of_weights, of_scales, said",
    [
        (..., slice(1, None), r"in_proj.weight is \[296, 64\] and .*is \[295, 1\]"),
        ((0, 0), ..., r"in_proj.weight is \[\] and"),
    ],
    ids=["scales", "weights"],
)
def test_weights_that_do_not_fit_their_scales_are_refused(random_checkpoints, tmp_path, of_weights, of_scales, said):
    def encode(shape):
        tensors, meaning = fp8("weight_scale", rows=1)(shape)
        weight, scales = tensors["weight"][of_weights].clone(), tensors["weight_scale"][of_scales]
        return tensors | {"weight": weight, "weight_scale": scales}, meaning

    about = {"quantization_config": COMPRESSED_TENSORS}
    write_encoded(random_checkpoints(GRANITE), tmp_path / "model", {"in_proj": encode}, about)
    with pytest.raises(UserError, match=f"not fit their format, FP8: .*{said}"):
        load_model(tmp_path / "model")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group['format']}-{group['weights']['strategy']}")
def test_the_library_reads_the_same(group):
    """compressed-tensors itself writes a matrix, and reads the same as this package."""
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    scheme = library.quantization.QuantizationScheme(**{**group, "input_activations": None})
    compressor = library.compressors.BaseCompressor.get_value_from_registry(group["format"])
    weight = torch.randn(72, 160)
    args = scheme.weights
    size = {"channel": (1, 160), "tensor": (72, 160), "block": (24, 40)}.get(args.strategy, (1, args.group_size))
    scale = weight.abs().unflatten(0, (-1, size[0])).unflatten(-1, (-1, size[1])).amax((1, 3)) / (
        6 if args.num_bits == 4 else 448
    )
    module = {"weight": weight, "weight_scale": scale.reshape(1) if args.strategy == "tensor" else scale}
    if args.strategy == "tensor_group":
        module |= {"weight_scale": scale * 100, "weight_global_scale": torch.tensor([100.0])}
    written = compressor.compress(module, scheme)
    expected = compressor.decompress(dict(written), scheme)["weight"]
    about = quantization_in({"quantization_config": COMPRESSED_TENSORS})
    dtypes = {
        ending: {"torch.uint8": "U8", "torch.float8_e4m3fn": "F8_E4M3"}.get(str(tensor.dtype), "F32")
        for ending, tensor in written.items()
    }
    [encoding] = [
        one
        for one in encodings("", about, is_mlx=False)
        if one.tensors.keys() == dtypes.keys() and all(dtypes[ending] in among for ending, among in one.tensors.items())
    ]
    assert encoding.shape({ending: tuple(tensor.shape) for ending, tensor in written.items()}) == (72, 160)
    assert torch.equal(encoding.decode(written).to(expected.dtype), expected) and (expected - weight).abs().max() < 2


@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_reads_the_same(bits):
    """With scales in float32. With others MLX rounds the product and the sum to their dtype."""
    mlx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    weight = torch.randn(3, 40, 128)
    written = mlx.quantize(mlx.array(weight.numpy()), group_size=64, bits=bits)
    expected = torch.tensor(mlx.dequantize(*written, group_size=64, bits=bits).tolist())
    tensors = [
        torch.tensor(one.tolist(), dtype=getattr(torch, str(one.dtype).removeprefix("mlx.core."))) for one in written
    ]
    decoded = Affine(bits, 64).decode(dict(zip(("weight", "scales", "biases"), tensors, strict=True)))
    assert torch.equal(decoded, expected) and (expected - weight).abs().max() < 1
