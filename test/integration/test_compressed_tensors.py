"""Checkpoints in the compressed-tensors format are read without rounding, or refused."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from granite4_neuron import load
from granite4_neuron.checkpoint.folder import FolderCheckpoint, bundled_checkpoint
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.quantized import CompressedFormat
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.checkpoint.stored_tensors import WEIGHTS
from granite4_neuron.commands import cli
from granite4_neuron.commands.output import size
from granite4_neuron.config import GraniteMoeHybridConfig, config_from_file
from granite4_neuron.config.quantization import WeightScheme
from granite4_neuron.errors import UserError
from granite4_neuron.ops import TORCH, QuantizedWeight
from test.support.checkpoints import CASES
from test.support.compressed_tensors import Scheme, compress, dequantized
from test.support.stepping import random_tokens, run_cuts

SCHEMES = {
    "int4 in groups of 32": Scheme(4, 32),
    "int4 in groups of 64": Scheme(4, 64),
    "int4 per channel": Scheme(4),
    "int8 per channel": Scheme(8),
    "int8 not packed": Scheme(8, None, "int-quantized"),
}
INT4, INT8 = Scheme(4, 32), Scheme(8)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
MODELS = [case for case in CASES if case.name in ("moe", "untied_head", "projection_bias")]
TOLERANCE = 1e-4
RATE = ["--rate", "1", "--prompt-length", "64", "--output-length", "8"]  # of traffic, for plan
LICENSE = bundled_checkpoint() / "LICENSE.txt"


def is_projection(name, tensor):
    """Return whether the library quantizes the tensor as Linear. Its users leave out routers and the head."""
    is_left_out = any(part in name for part in ("conv1d", "block_sparse_moe", "embed_tokens", "lm_head"))
    return name.endswith(".weight") and tensor.dim() == 2 and not is_left_out


def projections(scheme):
    """Return a function that gives the scheme for each projection whose rows are whole groups."""

    def scheme_of(name, tensor):
        return scheme if is_projection(name, tensor) and not tensor.shape[-1] % (scheme.group_size or 1) else None

    return scheme_of


def write_plain(folder, to, tensors):
    """Copy the checkpoint of `folder` with `tensors`, which are not quantized, as its weights."""
    to.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / WEIGHTS)


def assert_stands_for(folder, meaning, kernels, tmp_path):
    """Check that each weight has exactly the values it was written from, and that the model computes with them."""
    for name, weight in load_model(folder, torch.float32).named_weights():
        is_whole = isinstance(weight, torch.Tensor)
        assert torch.equal(weight if is_whole else weight.dequantize(torch.float32), meaning[name]), name
    write_plain(folder, tmp_path / "plain", meaning)
    plain = load_model(tmp_path / "plain", torch.float32)
    tokens = random_tokens(plain.config.vocab_size, 2, 30)
    expected = run_cuts(plain.bind(kernels), tokens, [30])
    for operators in (TORCH, kernels):
        logits = run_cuts(load_model(folder, torch.float32, operators=operators).bind(kernels), tokens, [30])
        assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.slow_cases
@every_scheme
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_compressed_projections_are_read_exactly(case, scheme, random_checkpoints, kernels, tmp_path):
    meaning = compress(random_checkpoints(case), tmp_path / "model", projections(scheme))
    model = load_model(tmp_path / "model")
    formats = {weight.format.name for _, weight in model.named_weights() if isinstance(weight, QuantizedWeight)}
    assert formats == {f"int{scheme.num_bits}"} and model.is_quantized
    assert_stands_for(tmp_path / "model", meaning, kernels, tmp_path)


@pytest.mark.slow_cases
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_several_schemes_in_a_model_are_read_exactly(case, random_checkpoints, kernels, tmp_path):
    """The head, the embedding, the router and the experts are quantized too, and some projections are not."""
    schemes = {
        "in_proj": INT4,
        "o_proj": Scheme(8, None, "int-quantized"),
        "shared_mlp.input": Scheme(4, 64),
        "shared_mlp.output": INT8,
        "block_sparse_moe": INT8,
        "embed_tokens": INT8,
        "lm_head": INT4,
    }

    def scheme_of(name, tensor):
        chosen = [scheme for part, scheme in schemes.items() if part in name and name.endswith(".weight")]
        return chosen[0] if chosen else None

    meaning = compress(random_checkpoints(case), tmp_path / "model", scheme_of)
    assert_stands_for(tmp_path / "model", meaning, kernels, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scales_of_other_dtypes_are_read(dtype, random_checkpoints, tmp_path):
    """int8 keeps such scales; int4 rounds them to bfloat16."""
    folder = random_checkpoints(MODELS[0])
    for scheme, error in ((INT8, 0.0), (INT4, 2.0**-8)):
        to = tmp_path / str(scheme.num_bits)
        meaning = compress(folder, to, projections(scheme), dtype)
        for name, weight in load_model(to).named_weights():
            if isinstance(weight, QuantizedWeight):
                difference = (weight.dequantize(torch.float32) - meaning[name]).abs()
                assert (difference <= error * meaning[name].abs()).all() and (error == 0 or difference.any())


@pytest.mark.parametrize("size", [2**30, 2**75, 32 * 10**400], ids=["2**30", "2**75", "32 * 10**400"])
def test_a_group_wider_than_a_row_is_read(size):
    """A row is then one group, and padding takes no memory."""
    shape = torch.Size([3, 70])
    numbers, scales = Scheme(4).quantize(torch.randn(shape), torch.bfloat16)
    tensors = {f"a.{name}": tensor for name, tensor in Scheme(4).tensors(numbers, scales).items()}
    stored = SimpleNamespace(read=tensors.__getitem__, folder="folder")
    per_channel, per_group = (CompressedFormat(WeightScheme(4, group_size, True)) for group_size in (None, size))
    assert per_group.layout(shape) == per_channel.layout(shape)
    weights = [form.read("a.weight", shape, stored) for form in (per_channel, per_group)]
    assert torch.equal(weights[0].scales, weights[1].scales) and torch.equal(weights[0].values, weights[1].values)


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 66, 70])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_any_number_of_columns_is_read(num_bits, columns):
    """Columns that pad an int4 group are zeros, whatever is stored. Those that pad a word are left out."""
    scheme, shape = Scheme(num_bits), torch.Size([3, columns])
    numbers, scales = scheme.quantize(torch.randn(shape), torch.bfloat16)

    tensors = {f"a.{name}": tensor for name, tensor in scheme.tensors(numbers, scales).items()}
    form = CompressedFormat(WeightScheme(num_bits, None, is_packed=True))
    weight = form.read("a.weight", shape, SimpleNamespace(read=tensors.__getitem__))
    expected = form.format.quantize(dequantized(numbers, scales))
    assert torch.equal(weight.dequantize(torch.float32), dequantized(numbers, scales))
    assert weight.values.shape == expected.values.shape and weight.scales.shape == expected.scales.shape
    if num_bits == 4:
        absent = torch.stack([weight.values & 15, weight.values >> 4], -1).flatten(-2)[:, columns:]
        assert (absent == 8).all()


@every_scheme
def test_the_library_writes_and_reads_the_same(scheme):
    """compressed-tensors itself writes and reads the same checkpoints as these tests."""
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    quantization = library.quantization.QuantizationScheme(**scheme.config_group())
    compressor = library.compressors.BaseCompressor.get_value_from_registry(scheme.format)
    numbers, scales = scheme.quantize(torch.randn(24, 192), torch.bfloat16)
    weight = numbers.float() * scales.float().repeat_interleave(192 // scales.shape[-1], -1)
    written = compressor.compress({"weight": weight, "weight_scale": scales.float()}, quantization)
    expected = scheme.tensors(numbers, scales.float())
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert torch.equal(compressor.decompress(written, quantization)["weight"], weight)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the bundled model in four bits with its embedding unchanged."""
    folder = tmp_path_factory.mktemp("compressed") / "model"
    compress(bundled_checkpoint(), folder, projections(INT4))
    return folder


class TestCommands:
    def test_generate_and_convert(self, folder, capsys, tmp_path):
        assert cli.main(["convert", "--model", str(folder), "--output", str(tmp_path / "ours")]) == 0
        texts = []
        for model in (folder, tmp_path / "ours"):
            assert cli.main(["generate", "--model", str(model), "--max-tokens", "8", "An assignment"]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] != ""
        ours, theirs = (dict(load_model(each).named_weights()) for each in (tmp_path / "ours", folder))
        for name, weight in theirs.items():
            both = [w if isinstance(w, torch.Tensor) else w.dequantize(torch.float32) for w in (weight, ours[name])]
            assert torch.equal(*both)

    def test_info_and_plan(self, folder, capsys, tmp_path):
        """`info` counts the weights as they lie in memory. `plan` is for backends that do not run them."""
        save_model(load_model(bundled_checkpoint(), quantize="int4"), tmp_path / "ours")
        made = (folder, "compressed-tensors", "int4"), (tmp_path / "ours", "int4", "int4, int8")
        for model, stored_in, formats in made:
            assert cli.main(["info", "--model", str(model)]) == 0
            output = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
            weights = [weight for _, weight in load_model(model).named_weights()]
            in_memory = sum(one.nbytes if isinstance(one, torch.Tensor) else one.num_bytes for one in weights)
            assert f"parameters: {size(in_memory)} in {formats} and bfloat16. Each" in output
            assert f"stored in {stored_in} state" in output
            for backend, runs in (("torch", "torch on neuron runs"), ("nxdi", "nxdi runs")):
                for more in ([], ["--latency"], RATE):
                    assert cli.main(["plan", "--model", str(model), "--backend", backend, *more]) == 2
                    said = capsys.readouterr().err
                    assert f"{stored_in} weights are for the backend cpu, some for a GPU; {runs} the original" in said

    @pytest.mark.parametrize(
        "command, words",
        [
            (["check"], "are in compressed-tensors; check the original with --quantize"),
            (["generate", "A", "--quantize", "int4"], "are in compressed-tensors; int4 is made from the original"),
            (["evaluate", str(LICENSE), "--compare", "int8"], "in compressed-tensors; --compare needs the original"),
            (
                ["generate", "A", "--backend", "xla"],
                "compressed-tensors weights are for the backend cpu, some for a GPU; xla",
            ),
        ],
    )
    def test_commands_refuse_what_they_cannot_do(self, command, words, folder, capsys):
        assert cli.main([*command, "--model", str(folder)]) != 0
        assert words in capsys.readouterr().err

    def test_another_backend_refuses_them(self, folder):
        with pytest.raises(UserError, match="are in compressed-tensors, which is for the backend cpu"):
            FolderCheckpoint(folder).check_plain(config_from_file(folder / "config.json"))
        with pytest.raises(UserError, match="compressed-tensors weights are for the backend cpu"):
            load(folder, backend="xla")


REFUSED = {
    "float8": (dict(format="float-quantized"), "with weights of type 'int'; only symmetric weights are read"),
    "the format of a group": (dict(group=dict(format="mxfp8-quantized")), "the format 'mxfp8-quantized'"),
    "dense": (dict(format="dense"), "with the format 'dense'"),
    "no format": (dict(format=None), "with the format None"),
    "floating weights": (dict(weights=dict(type="float")), "with weights of type 'float'"),
    "activations": (dict(group=dict(input_activations=dict(num_bits=8))), "with quantized activations"),
    "outputs": (dict(group=dict(output_activations=dict(num_bits=8))), "with quantized activations"),
    "a zero point": (dict(weights=dict(symmetric=False)), "with weights that are not symmetric"),
    "another order": (dict(weights=dict(actorder="group")), "with columns in another order (actorder 'group')"),
    "small groups": (dict(weights=dict(group_size=16)), "with 4 bits, strategy 'group', group_size 16, in pack"),
    "groups of text": (dict(weights=dict(group_size="32")), "group_size '32'"),
    "int8 in groups": (dict(weights=dict(num_bits=8)), "with 8 bits, strategy 'group', group_size 32"),
    "three bits": (dict(weights=dict(num_bits=3, strategy="channel")), "with 3 bits, strategy 'channel'"),
    "floats in large groups": (
        dict(format="mxfp4-pack-quantized", weights=dict(type="float", group_size=64)),
        "with 4 bits, strategy 'group', group_size 64, in mxfp4-pack-quantized",
    ),
    "one scale": (dict(weights=dict(strategy="tensor")), "with 4 bits, strategy 'tensor'"),
    "int4 not packed": (dict(format="int-quantized"), "with 4 bits, strategy 'group', group_size 32, in int-quantized"),
    "rotations": (dict(transform_config=dict(config_groups={"u": {}})), "with a transform_config"),
    "sparsity": (dict(sparsity_config=dict(format="sparse-24-bitmask")), "with a sparsity_config"),
    "no groups": (dict(config_groups={}), "with no config_groups that say how"),
    "a preset": (dict(config_groups={"W4A16": ["Linear"]}), "with no config_groups that say how"),
    "groups of the wrong type": (dict(config_groups=[1]), "with no config_groups that say how"),
}


def config_with(changes):
    """Return the config of a compressed checkpoint with `changes`; "group" and "weights" change its only group."""
    changes = dict(changes)
    group = {**INT4.config_group(), "format": None, **changes.pop("group", {})}
    group["weights"] = {**group["weights"], **changes.pop("weights", {})}
    about = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return {**CASES[0].config().to_dict(), "quantization_config": {**about, **changes}}


@pytest.mark.parametrize("changes, words", REFUSED.values(), ids=REFUSED)
def test_other_schemes_are_refused(changes, words):
    GraniteMoeHybridConfig.from_dict(config_with({}))
    with pytest.raises(UserError) as error:
        GraniteMoeHybridConfig.from_dict(config_with(changes))
    message = str(error.value)
    assert words in message and "4 bits per channel or per group of 32, 64, 96... columns (pack-quantized)" in message


@pytest.mark.parametrize(
    "changes",
    [
        dict(weights=dict(actorder="static")),
        dict(sparsity_config=dict(format="dense")),
        dict(quantization_status="x"),
        dict(kv_cache_scheme=dict(num_bits=8)),
    ],
)
def test_settings_without_effect_are_accepted(changes):
    GraniteMoeHybridConfig.from_dict(config_with(changes))


class TestTensorsThatDoNotFit:
    MODULE = "model.layers.0.mamba.in_proj"

    @pytest.fixture
    def change(self, random_checkpoints, tmp_path):
        """Return a function that changes the tensors of a compressed checkpoint and loads it."""

        def load_changed(change, scheme_of=projections(INT4)):  # noqa: B008
            compress(random_checkpoints(MODELS[0]), tmp_path / "model", scheme_of)
            tensors = load_file(tmp_path / "model" / WEIGHTS)
            change(tensors)
            save_file(tensors, tmp_path / "model" / WEIGHTS)
            load_model(tmp_path / "model")

        return load_changed

    @pytest.mark.parametrize("parameter", ["weight_scale", "weight_shape"])
    def test_a_missing_tensor_is_named(self, change, parameter):
        with pytest.raises(UserError, match=f"missing: {self.MODULE}.{parameter}"):
            change(lambda tensors: tensors.pop(f"{self.MODULE}.{parameter}"))

    def test_an_extra_tensor_is_named(self, change):
        index = {f"{self.MODULE}.weight_g_idx": torch.arange(64, dtype=torch.int32)}
        with pytest.raises(UserError, match=f"not of this model: {self.MODULE}.weight_g_idx"):
            change(lambda tensors: tensors.update(index))

    def test_scales_of_another_group_size_are_refused(self, change):
        name = f"{self.MODULE}.weight_scale"
        with pytest.raises(UserError, match=rf"{name} is \[296, 1\] instead of \[296, 2\]"):
            change(lambda tensors: tensors.update({name: tensors[name][:, :1].contiguous()}))

    def test_a_wrong_stored_shape_is_refused(self, change):
        name = f"{self.MODULE}.weight_shape"
        with pytest.raises(UserError, match=rf"{name} says \[296, 63\] instead of \[296, 64\]"):
            change(lambda tensors: tensors.update({name: torch.tensor([296, 63])}))

    def test_experts_of_two_formats_are_refused(self, change):
        with pytest.raises(UserError, match=r"two formats in the experts of model\.layers\.0; both matrices must"):
            change(lambda _: None, lambda name, _: INT8 if "block_sparse_moe.input" in name else None)


def test_plain_weights_under_a_quantized_config_are_refused(tmp_path):
    """The config announces quantized weights, but no weight is quantized."""
    save_model(random_model(CASES[0].config()), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    about = {"quant_method": "granite4-neuron", "format": "int8"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": about}))
    with pytest.raises(UserError, match="which says that they are int8"):
        load_model(tmp_path / "model")
