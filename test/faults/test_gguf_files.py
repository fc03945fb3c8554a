"""GGUF files that are damaged, contradict themselves, or hold what is not supported. Each gets one sentence that helps.

To add a case, write a function that damages a good file and a part of the expected sentence.
"""

import os
import shutil

import numpy
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from test.support.gguf_files import rewritten, written

HYBRID = "granitehybrid"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return written(shutil.copytree(bundled_checkpoint(), tmp_path_factory.mktemp("good") / "model"))


def metadata(**values):
    """Damage: change metadata. In the given names _ stands for a dot, and - for _."""
    named = {key.replace("_", ".").replace("-", "_"): value for key, value in values.items()}
    return lambda good, to: rewritten(good, to, metadata=named)


def about_model(name, value):
    """Damage: change a value under the architecture's name in the metadata."""
    return lambda good, to: rewritten(good, to, metadata={f"{HYBRID}.{name}": value})


def tensor(name, change):
    """Damage: change one tensor's values; None removes it."""

    def damaged(one, values):
        values = change(values) if one == name else values
        return None if values is None else (values, Type.F32)

    return lambda good, to: rewritten(good, to, damaged)


def cut(end):
    """Damage: keep only the beginning of the file."""

    def damage(good, to):
        content = good.read_bytes()
        to.write_bytes(content[: end(len(content)) if callable(end) else end])

    return damage


def endless_list(good, to):
    """Damage: let the first list of numbers say that it has 2**60 entries."""
    content = bytearray(good.read_bytes())
    place = content.index(b"head_count_kv") + len(b"head_count_kv") + 8
    content[place : place + 8] = (2**60).to_bytes(8, "little")
    to.write_bytes(content)


def of_unknown_type(good, to):
    def change(name, values):
        return (values.astype(numpy.int8), Type.I8) if name == "output_norm.weight" else (values, Type.F32)

    rewritten(good, to, change)


def header(names, part, *values):
    """Damage: change the "shape", "type" or "offset" in the header of one tensor or of all."""

    def damage(good, to):
        content = bytearray(good.read_bytes())
        for tensor in GGUFReader(good).tensors:
            if names in (tensor.name, "all"):
                parts = dict(
                    zip(("length", "name", "dimensions", "shape", "type", "offset"), tensor.field.parts, strict=True)
                )
                before = list(parts)[: list(parts).index(part)]
                place = tensor.field.offset + sum(parts[each].nbytes for each in before)
                content[place : place + parts[part].nbytes] = numpy.array(values, parts[part].dtype).tobytes()
        to.write_bytes(content)

    return damage


NORM, AFTER_IT = "blk.0.attn_norm.weight", "blk.0.ssm_conv1d.weight"  # [128] in F32
IN_PROJ = "blk.0.ssm_in.weight"
CASES = {
    "empty": (lambda good, to: to.write_bytes(b""), "is not a GGUF file, whose first four bytes are GGUF."),
    "another file": (lambda good, to: to.write_bytes(b"PK" * 500), "is not a GGUF file"),
    "only the first bytes": (cut(4), "is damaged or incomplete (it ends after 4 bytes, before its contents do)"),
    "cut in the header": (cut(20), "is damaged or incomplete"),
    "cut in the vocabulary": (cut(4000), "is damaged or incomplete (it ends after 4,000 bytes"),
    "cut in the weights": (cut(lambda size: size - 1000), "is damaged or incomplete (it ends after"),
    "a list without end": (endless_list, "is damaged or incomplete (it ends after"),
    "another version": (
        lambda good, to: to.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(100)),
        "is damaged or incomplete (Sorry, file appears to be version 99",
    ),
    "of another byte order": (
        lambda good, to: to.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16)),
        "is in the byte order of other processors",
    ),
    "one of several parts": (metadata(split_count=3), "is one of 3 parts of a model; join them with llama-gguf-split"),
    "another architecture": (
        metadata(general_architecture="llama"),
        "is a model of the architecture 'llama'; only those of Granite and Nemotron 3 are run: granitehybrid,",
    ),
    "no size": (about_model("embedding_length", None), "lacks granitehybrid.embedding_length."),
    "a size is text": (
        about_model("embedding_length", "128"),
        "is '128', and must be a whole number.",
    ),
    "no heads": (about_model("attention.head_count", 0), "attention.head_count is 0, and must be at least 1."),
    "too few key heads": (about_model("attention.head_count_kv", [0, 2]), "head_count_kv is [0, 2], and must be a"),
    "different key heads": (about_model("attention.head_count_kv", [0, 2, 0, 1]), "is [0, 2, 0, 1], and must be a"),
    "too many layers": (about_model("block_count", 2**30), "block_count is 1073741824, and can be at most 4,096."),
    "a head width that is none": (about_model("ssm.time_step_rank", 7), "ssm.inner_size is 256, and must be divisible"),
    "no group": (about_model("ssm.group_count", 0), "mamba_n_groups is 0, and must be at least 1."),
    "epsilon is text": (about_model("attention.layer_norm_rms_epsilon", "x"), "and must be a number."),
    "scaled positions": (
        lambda good, to: rewritten(
            good, to, metadata={f"{HYBRID}.rope.scaling.finetuned": True, f"{HYBRID}.rope.scaling.type": "yarn"}
        ),
        "rope.scaling.type is 'yarn', which is not supported; it must be none.",
    ),
    "a tensor is missing": (
        tensor("blk.0.ssm_in.weight", lambda values: None),
        "do not fit its metadata; missing: blk.0.ssm_in.weight.",
    ),
    "no embedding": (tensor("token_embd.weight", lambda values: None), "it lacks token_embd.weight."),
    "a tensor is of another shape": (
        tensor("blk.0.ssm_in.weight", lambda values: values[:-1]),
        "of another shape: blk.0.ssm_in.weight is [583, 128] instead of [584, 128].",
    ),
    "a tensor too many": (
        lambda good, to: (
            rewritten(good, to, lambda name, values: (values, Type.F32), {f"{HYBRID}.block_count": 3})
            and rewritten(to, to, metadata={f"{HYBRID}.attention.head_count_kv": [0, 2, 0]})
        ),
        "not of this model: blk.3.",
    ),
    "a tensor in the place of another": (
        header(IN_PROJ, "offset", 0),
        f"is damaged or incomplete (its tensor {IN_PROJ} is at 0, where those before it end at 262,144); download or",
    ),
    "all tensors in one place": (header("all", "offset", 0), "is at 0, where those before it end at"),
    "a tensor behind a gap": (header(NORM, "offset", 2**20 + 2**18), "is at 1,310,720, where those before it end at"),
    "a tensor far beyond the end": (header(NORM, "offset", 2**64 - 32), "is at 18,446,744,073,709,551,584, where"),
    "a tensor at an odd place": (header("token_embd.weight", "offset", 1), "token_embd.weight is at 1, where those"),
    "a tensor larger than the file": (header(NORM, "shape", 2**62), "is damaged or incomplete (it ends after"),
    "a tensor of 2**64 numbers": (header(IN_PROJ, "shape", 2**32, 2**32), "is damaged or incomplete (it ends after"),
    "a tensor in another type": (header(NORM, "type", Type.BF16), f"its tensor {AFTER_IT} is at"),
    "a tensor in a type of larger blocks": (
        header(NORM, "type", Type.Q6_K),
        "has rows of 128, and Q6_K has blocks of 256",
    ),
    "a tensor in a type that nobody knows": (header(NORM, "type", 999), "999 is not a valid GGMLQuantizationType"),
    "two tensors of one name": (
        lambda good, to: to.write_bytes(good.read_bytes().replace(b"blk.0.ssm_d", b"blk.0.ssm_a")),
        "it has two tensors blk.0.ssm_a",
    ),
    "tensors aligned to text": (metadata(general_alignment="32"), "Bad type for general.alignment field"),
    "a type that is not supported": (
        of_unknown_type,
        "has tensors of types that are not supported: output_norm.weight is I8; supported are F32, F16, BF16, Q8_0,",
    ),
    "another tokenizer": (metadata(tokenizer_ggml_pre="qwen2"), "is 'gpt2' with 'qwen2'; those of Granite and"),
    "no tokenizer": (metadata(tokenizer_ggml_model="no_vocab"), "carries no tokenizer"),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("damage, message", CASES.values(), ids=CASES.keys())
def test_a_damaged_file_is_refused(tmp_path, good, refuses, damage, message):
    file = tmp_path / "damaged.gguf"
    damage(good, file)
    assert message in refuses("generate", "--model", file, "x")


def test_a_pipe_is_refused(tmp_path, refuses):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is not a folder but a file" in refuses("generate", "--model", tmp_path / "pipe.gguf", "x")


def test_a_revision_of_a_file_is_refused(good, refuses):
    assert "is a file; only a Hugging Face id has a revision" in refuses(
        "generate", "--model", good, "--revision", "main", "x"
    )


def test_weights_that_are_not_finite_are_not_converted(tmp_path, good, refuses):
    file = rewritten(good, tmp_path / "nan.gguf", lambda name, values: (values * numpy.float32("nan"), Type.F32))
    said = refuses("convert", "--model", file, "--output", tmp_path / "new")
    assert "holds numbers that are not finite (NaN or infinity)" in said
    assert not (tmp_path / "new").exists()
