"""The Triton kernels compile for a GPU at real sizes, on machines without one too. The interpreter accepts more."""

import os
import re
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonTensorDescriptor  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from granite4_neuron.config import published_config  # noqa: E402
from granite4_neuron.devices.cuda import (  # noqa: E402
    attention,
    choices,
    head,
    hopper_attention,
    launch,
    linear,
    mamba,
    products,
    sampling,
    token_many,
    weights,
)
from granite4_neuron.devices.cuda.causal_conv1d import convolve_tokens  # noqa: E402
from granite4_neuron.devices.cuda.experts import choose_experts  # noqa: E402
from granite4_neuron.devices.cuda.flash_attention import attend_prompt  # noqa: E402
from granite4_neuron.devices.cuda.fused_moe import multiply_by_experts  # noqa: E402
from granite4_neuron.devices.cuda.norms import add_and_normalize, normalize  # noqa: E402
from granite4_neuron.devices.cuda.operator import LAUNCHES  # noqa: E402
from granite4_neuron.devices.cuda.prompt_mixer import convolve_prompt, scan_prompt  # noqa: E402
from granite4_neuron.devices.cuda.ssd_chunk_scan import scan_chunks  # noqa: E402
from granite4_neuron.devices.cuda.token_operators import ManyRowsOperators, OneRowOperators, TokenOperators  # noqa: E402
from test.support.ptx import reads_before_wait, sums_of_two_products  # noqa: E402
from test.support.quantizing import GPU_FORMATS  # noqa: E402
from test.support.sass import names_with_waits, overwritten_operands, reads_of_unwritten_registers, spills  # noqa: E402

pytestmark = [
    pytest.mark.versions,
    pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="Triton interprets all kernels"),
]
HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
EPS = 1e-5
# Weights, and arguments that no other kernel of a step writes.
WEIGHTS = ["weight", "norm_weight", "conv_weight", "conv_bias", "dt_bias", "A_log", "D"]
FIXED_IN_A_STEP = [*WEIGHTS, "query", "key", "value", "w2", "conv_state", "ssm_state", "lengths", "slots"]


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def float32(*shape):
    return empty(*shape, dtype=torch.float32)


def int32(*shape):
    return empty(*shape, dtype=torch.int32)


def int64(*shape):
    return empty(*shape, dtype=torch.int64)


def kind(argument):
    if isinstance(argument, tuple):
        return tuple(map(kind, argument))
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{TYPES[argument.base.dtype][1:]}{argument.block_shape}>"
    if isinstance(argument, GluonTensorDescriptor):
        return f"tensordesc<{TYPES[argument.base.dtype][1:]}{argument.block_shape},{argument.layout!r}>"
    return {int: "i32", float: "fp32"}[type(argument)]


def places_of_tensors(arguments):
    """Return the place of each tensor among arguments, which may be tuples."""
    for place, argument in enumerate(arguments):
        if isinstance(argument, tuple):
            yield from ((place, *within) for within in places_of_tensors(argument))
        elif isinstance(argument, torch.Tensor):
            yield (place,)


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Have launches bind arguments and compile kernels, and not run them. Return the list of compiled kernels, which
    have to fit into a GPU's shared memory. Those with wgmma have to write a register before they read it, and to wait
    for a product before they write registers of its left operand.
    """
    compiled = []

    def compile_for_gpu(kernel, *arguments, **options):
        given = {name: options.pop(name) for name in kernel.arg_names if name in options}
        create_function_from_signature(kernel.signature, kernel.params, make_backend(HOPPER))
        bound = kernel.signature.bind(*arguments, **given).arguments
        is_constant = {each.name: each.is_constexpr for each in kernel.params}
        constants = {name: value for name, value in bound.items() if is_constant[name] or value is None}
        signature = {name: "constexpr" if name in constants else kind(value) for name, value in bound.items()}
        places = list(bound)
        by_place = {(places.index(name),): value for name, value in constants.items()}
        specialized = {each.name for each in kernel.params if not each.do_not_specialize}
        aligned = [
            name
            for name, value in bound.items()
            if isinstance(value, torch.Tensor)
            or (name in specialized and not is_constant[name] and isinstance(value, int) and value % 16 == 0)
        ]
        whole = [(places.index(name),) for name in aligned]
        in_tuples = places_of_tensors(bound.values())
        attributes = {place: [["tt.divisibility", 16]] for place in (*whole, *in_tuples)}
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, by_place, attributes)
        compiled.append(triton.compile(source, target=HOPPER, options=options))

    monkeypatch.setattr(triton.JITFunction, "__getitem__", lambda kernel, grid: partial(compile_for_gpu, kernel))
    monkeypatch.setattr(launch, "supports_gdc", lambda x: True)
    monkeypatch.setattr(weights, "supports_gdc", lambda x: True)
    monkeypatch.setattr(token_many, "supports_gdc", lambda x: True)
    yield compiled
    assert not [each.metadata.name for each in compiled if each.metadata.shared > 227 * 1024]
    for each in compiled:
        if "wgmma.mma" in each.asm["ptx"]:
            assert not reads_of_unwritten_registers(each.asm["cubin"], tmp_path), each.metadata.name
            assert not overwritten_operands(each.asm["cubin"], tmp_path), each.metadata.name


@pytest.fixture(params=["h-350m", "h-tiny", "h-small"])
def config(request):
    return published_config(request.param)


@pytest.mark.parametrize(
    ("batch", "operators", "kernels"),
    [
        (1, OneRowOperators, 6),
        (8, TokenOperators, 10),
        (32, TokenOperators, 10),
        (128, TokenOperators, 10),
        (128, ManyRowsOperators, 22),
    ],
    ids=str,
)
def test_decode(batch, operators, kernels, config, compiled, tmp_path):
    """128 rows look up their state, which has 16 bits."""
    hidden, shared = config.hidden_size, config.shared_intermediate_size
    heads, head_dim, d_state = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
    inner = heads * head_dim
    channels = inner + 2 * config.mamba_n_groups * d_state
    x, norm, lengths = float32(batch, hidden), empty(hidden), int32(batch)
    slots = int32(batch) if batch == 128 else None
    convolution = empty(channels, 4), empty(channels), empty(batch, channels, 3), lengths, slots
    sizes = dict(num_heads=heads, eps=EPS)
    inputs = LAUNCHES[operators.mixer_inputs](x, norm, empty(inner + channels + heads, hidden), *convolution, **sizes)
    head_params = [empty(heads) for _ in range(3)]
    state = empty(batch, heads, head_dim, d_state, dtype=torch.float32 if slots is None else torch.bfloat16)
    rounding = (slots, None, None) if slots is None else (slots, int32(batch), int64())
    y = LAUNCHES[operators.advance_mixer](inputs, *head_params, state, lengths, 0.0, float("inf"), *rounding)
    LAUNCHES[operators.add_product](x, y, empty(inner), empty(hidden, inner), 0.22, EPS)
    LAUNCHES[operators.add_product](x, empty(batch, inner), None, empty(hidden, inner), 0.22, EPS)
    key_rows = config.num_key_value_heads * config.head_dim
    LAUNCHES[operators.project_heads](
        x, norm, empty(hidden, hidden), empty(key_rows, hidden), empty(key_rows, hidden), EPS
    )
    LAUNCHES[operators.activate](x, norm, empty(2 * shared, hidden), EPS)
    if operators is ManyRowsOperators:
        mlp = empty(hidden), empty(2 * shared, hidden), empty(hidden, shared)
        LAUNCHES[operators.add_product_and_mlp](x, y, empty(inner), empty(hidden, inner), *mlp, 0.22, EPS)
        LAUNCHES[token_many.score_tokens](empty(batch, hidden), empty(config.vocab_size, hidden), 6.0)
    if experts := config.num_local_experts:
        width, top_k = config.intermediate_size, config.num_experts_per_tok
        normed, logits = LAUNCHES[operators.route](x, norm, empty(experts, hidden), EPS)
        w1, w2 = empty(experts, 2 * width, hidden), empty(experts, hidden, width)
        first, second = empty(2 * shared, hidden), empty(hidden, shared)
        activated, expert_activated = LAUNCHES[operators.activate_experts](normed, first, w1, logits, lengths, top_k)
        LAUNCHES[operators.add_feed_forward](x, activated, second, expert_activated, w2, logits, lengths, 0.22)
        kernels += 3 if batch == 1 else 4
    assert len(compiled) == kernels
    of_many = [each for each in compiled if each.metadata.name == "_multiply_kernel"]
    assert bool(of_many) == (operators is ManyRowsOperators)
    assert all("wgmma.mma" in each.asm["ptx"] and not spills(each.asm["cubin"], tmp_path) for each in of_many)
    assert all("griddepcontrol.wait" in each.asm["ptx"] for each in compiled)
    reads = reads_before_waiting(compiled)
    names = {name for name, _ in reads}
    assert {"conv_state", "ssm_state", "lengths"} <= names <= {*FIXED_IN_A_STEP, "router_logits"}
    # A multiprocessor's own cache may hold an earlier layer's values of these.
    assert all(".cg" in instruction for name, instruction in reads if name == "router_logits")


def reads_before_waiting(compiled):
    """Return the (argument, instruction) pairs that kernels may read before earlier kernels have ended."""
    return {(name, instruction) for name, _, instruction in reads_of_tensors(compiled)}


def reads_of_tensors(compiled):
    """Return (argument, place in a tuple, instruction) of the same reads."""
    found = set()
    for each in compiled:
        listed = [(name, kind if isinstance(kind, tuple) else (kind,)) for name, kind in each.src.signature.items()]
        kinds = [
            (name, place, kind)
            for name, parts in listed
            for place, kind in enumerate(parts)
            for _ in range(number_of_parameters(kind))
        ]
        reads = [(*kinds[number], instruction) for number, instruction in reads_before_wait(each.asm["ptx"])]
        reads = [read for read in reads if read[2].startswith(("*", "tensordesc"))]  # not strides
        found |= {(name, place, instruction) for name, place, _, instruction in reads}
    return found


def number_of_parameters(kind):
    """Return how many parameters of a compiled kernel an argument is: a tensor descriptor has sizes and strides too."""
    if kind.startswith("tensordesc"):
        return 1 + 2 * (kind.count(",") + 1)
    return 0 if kind == "constexpr" else 1


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("format", GPU_FORMATS)
def test_quantized_weights(format, batch, config, compiled, tmp_path):
    """A program of one row reads 16 bytes at a time, and multiplies them where they are: threads exchange no more than
    sums and numbers of pieces. Numbers of FP8 without a leading bit are not taken for 0. For prompts tensor cores take
    weights of experts from the registers in which they are dequantized.
    """

    def weight(*shape):
        return [empty(*size, dtype=dtype) for size, dtype in GPU_FORMATS[format].layout(torch.Size(shape)).values()]

    operators = OneRowOperators if batch == 1 else TokenOperators
    hidden, shared, key_rows = config.hidden_size, config.shared_intermediate_size, 2 * config.head_dim
    x, norm, lengths = float32(batch, hidden), empty(hidden), int32(batch)
    values, scales = weight(3 * hidden, hidden)
    convolution = empty(hidden, 4), empty(hidden), empty(batch, hidden, 3), lengths
    LAUNCHES[operators.mixer_inputs](x, norm, values, *convolution, None, scales, num_heads=8, eps=EPS)
    values, scales = weight(hidden, hidden)
    LAUNCHES[operators.add_product](x, x, norm, values, 0.22, EPS, scales)
    (query, query_scales), (key, key_scales) = weight(hidden, hidden), weight(key_rows, hidden)
    LAUNCHES[operators.project_heads](x, norm, query, key, key, EPS, query_scales, key_scales, key_scales)
    first, second = weight(2 * shared, hidden), weight(hidden, shared)
    LAUNCHES[operators.activate](x, norm, first[0], EPS, first[1])
    if experts := config.num_local_experts:
        width, top_k = config.intermediate_size, config.num_experts_per_tok
        w1, w2, logits = weight(experts, 2 * width, hidden), weight(experts, hidden, width), float32(batch, experts)
        given = empty(batch, hidden), first[0], w1[0], logits, lengths, top_k, first[1], w1[1]
        activated, chosen = LAUNCHES[operators.activate_experts](*given)
        given = x, activated, second[0], chosen, w2[0], logits, lengths, 0.22, second[1], w2[1]
        LAUNCHES[operators.add_feed_forward](*given)
        chosen = float32(512, top_k), int32(512, top_k)
        LAUNCHES[multiply_by_experts](empty(512, hidden), w1[0], w2[0], *chosen, w1[1], w2[1])
    LAUNCHES[products.multiply_tokens](empty(512, hidden), first[0], None, True, False, first[1])
    of_prompts = [each for each in compiled if each.metadata.name == "_multiply_codes_kernel"]
    assert len(of_prompts) == (2 if experts else 0)
    for each in of_prompts:
        operands = re.findall(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*(\{|%)", each.asm["ptx"])
        assert operands and set(operands) == {"{"}
        if not (format == "int8" and triton.__version__.startswith("3.5.")):  # which keeps more in registers
            assert not spills(each.asm["cubin"], tmp_path)
        assert not re.search(r"cvt\.rn\.f32\.s", each.asm["ptx"])  # a quarter as fast as other instructions
        assert len(re.findall(r"sub\.rn\.bf16x2|fma\.rn\.bf16x2", each.asm["ptx"])) >= 64
    if batch == 1:
        of_one = [each for each in compiled if "_of_one" in each.metadata.name]
        assert len(of_one) == (6 if experts else 4)
        assert all(re.search(r"ld\.global\S*\.v4\.b32", each.asm["ptx"]) for each in of_one)
        moved = re.compile(r"convert_layout.*: tensor<\d+x\d+x4x[if]32")  # words, from thread to thread
        names = {each.metadata.name for each in of_one if moved.search(each.asm["ttgir"])}
        assert names <= {"_add_quantized_of_one_kernel"}  # the shared MLP's, which are few
        assert len([each for each in compiled if "_prepare" in each.metadata.name]) == len(of_one)
        reads = reads_before_waiting(each for each in compiled if "griddepcontrol.wait" in each.asm["ptx"])
        assert {name for name, _ in reads} <= {*FIXED_IN_A_STEP, "router_logits"}
        assert all(".cg" in instruction for name, instruction in reads if name == "router_logits")
        is_fp8 = ["cvt.rn.f16x2.e4m3x2" in each.asm["ptx"] for each in of_one]
        assert set(is_fp8) == {format == "fp8"}
    if format == "fp8":
        assert not any(re.search(r"(mul|fma)\S*\.ftz", each.asm["ptx"]) for each in compiled)


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_rows_that_are_no_whole_pieces(format, compiled):
    """Rows of 104 bytes begin at multiples of 8, where a GPU cannot read 16 bytes at a time."""
    layout = GPU_FORMATS[format].layout(torch.Size((64, 104)))
    values, scales = (empty(*size, dtype=dtype) for size, dtype in layout.values())
    x, norm = float32(1, 104), empty(104)
    LAUNCHES[OneRowOperators.add_product](float32(1, 64), x, norm, values, 0.22, EPS, scales)
    reads = [instruction for *tensor, instruction in reads_of_tensors(compiled) if tensor == ["weight", 0]]
    assert reads and not any(".v4." in each for each in reads)


@pytest.mark.parametrize("tokens", [4, 16])
def test_verification(tokens, config, compiled):
    batch, hidden, d_state = 8, config.hidden_size, config.mamba_d_state
    heads, head_dim = config.mamba_n_heads, config.mamba_d_head
    inner = heads * head_dim
    channels = inner + 2 * config.mamba_n_groups * d_state
    columns, where = inner + channels + heads, [int32(batch), int32(batch)]
    projected = LAUNCHES[TokenOperators.project](
        float32(batch * tokens, hidden), empty(hidden), empty(columns, hidden), EPS
    )
    convolution = empty(channels, 4), empty(channels)
    conv_state, ssm_state = empty(batch, channels, 3), float32(batch, heads, head_dim, d_state)
    head_params, limits = [empty(heads) for _ in range(3)], (0.0, float("inf"))
    projected = projected.view(batch, tokens, columns)
    inputs = LAUNCHES[TokenOperators.convolve_verified](projected, *convolution, conv_state, where[0], heads)
    LAUNCHES[TokenOperators.scan_verified](inputs, *head_params, ssm_state, *where, *limits)
    kept = projected[..., inner:]
    LAUNCHES[TokenOperators.advance_verified](kept, *convolution, *head_params, conv_state, ssm_state, *where, *limits)
    caches = [empty(batch + 1, config.num_key_value_heads, 1024, config.head_dim) for _ in range(2)]
    query = empty(batch, tokens, config.num_attention_heads, config.head_dim)
    LAUNCHES[attention.attend_tokens](query, *caches, int32(batch, tokens), where[1], None, 0.1, 1024)
    LAUNCHES[head.score_tokens](empty(batch * tokens, hidden), empty(config.vocab_size, hidden), 3.0)
    assert len(compiled) == 9
    assert {name for name, _ in reads_before_waiting(compiled)} <= {*FIXED_IN_A_STEP, "starts"}


@pytest.mark.parametrize("rows", [1, 3, 8, 32, 128])
def test_all_numbers_of_rows_use_one_instruction(rows, config, compiled):
    """It must be mma.sync, because wgmma adds in another order."""
    x = empty(rows, config.hidden_size)
    for outputs in (config.hidden_size, 2 * config.shared_intermediate_size, config.vocab_size):
        LAUNCHES[head.score_tokens](x, empty(outputs, config.hidden_size), 3.0)
        LAUNCHES[TokenOperators.activate](
            float32(*x.shape), empty(config.hidden_size), empty(2 * outputs, x.shape[1]), EPS
        )
    instructions = {found for each in compiled for found in re.findall(r"w?g?mma\.\S+", each.asm["ptx"])}
    assert instructions == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [3, 8, 32])
def test_sequences_are_rounded_alike(batch, dtype, compiled):
    """All sequences of a program get equal instructions. No two products are added: a compiler may round either."""
    hidden, heads, channels, experts = 64, 8, 160, 6
    x, norm, lengths = float32(batch, hidden), empty(hidden, dtype=dtype), int32(batch)
    convolution = [empty(*shape, dtype=dtype) for shape in ((channels, 4), (channels,), (batch, channels, 3))]
    weight = empty(128 + channels + heads, hidden, dtype=dtype)
    LAUNCHES[TokenOperators.mixer_inputs](x, norm, weight, *convolution, lengths, num_heads=heads, eps=EPS)
    heads_of = [empty(rows, hidden, dtype=dtype) for rows in (64, 32, 32)]
    LAUNCHES[TokenOperators.project_heads](x, norm, *heads_of, EPS)
    LAUNCHES[TokenOperators.add_product](
        x, empty(batch, 128, dtype=dtype), None, empty(hidden, 128, dtype=dtype), 0.22, EPS
    )
    first, second = empty(160, hidden, dtype=dtype), empty(hidden, 80, dtype=dtype)
    LAUNCHES[TokenOperators.activate](x, norm, first, EPS)
    w1, w2 = empty(experts, 96, hidden, dtype=dtype), empty(experts, hidden, 48, dtype=dtype)
    logits = float32(batch, experts)
    normed = empty(batch, hidden, dtype=dtype)
    activated, expert_activated = LAUNCHES[TokenOperators.activate_experts](normed, first, w1, logits, lengths, 3)
    LAUNCHES[TokenOperators.add_feed_forward](x, activated, second, expert_activated, w2, logits, lengths, 0.22)
    joint = [each for each in compiled if each.metadata.name not in ("_rms_norm_kernel", "_add_outputs_kernel")]
    assert len(joint) == 6
    assert not [each.metadata.name for each in joint if sums_of_two_products(each.asm["ptx"])]


def test_tokens_of_several_sequences(config, compiled):
    batch, heads, head_dim, d_state = 8, config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
    channels = heads * head_dim + 2 * d_state
    lengths = int32(batch)
    convolution = empty(batch, channels, 3), empty(channels, 4), empty(channels), lengths
    LAUNCHES[mamba.convolve_token](empty(batch, 1, channels), *convolution)
    groups = [float32(batch, 1, d_state) for _ in range(2)]
    steps = [float32(batch, heads) for _ in range(2)]
    state = float32(batch, heads, head_dim, d_state)
    LAUNCHES[mamba.advance_token](empty(batch, heads, head_dim), *steps, *groups, empty(heads), state)
    caches = [empty(batch + 1, config.num_key_value_heads, 1024, config.head_dim) for _ in range(2)]
    query = empty(batch, 1, config.num_attention_heads, config.head_dim)
    LAUNCHES[attention.attend_tokens](query, *caches, int32(batch, 1), lengths, None, 0.1, 1024)
    x = empty(batch, config.hidden_size)
    LAUNCHES[linear.multiply_rows](x, empty(100, config.hidden_size), None, False)
    if experts := config.num_local_experts:
        LAUNCHES[choose_experts](float32(batch, experts), config.num_experts_per_tok)
        w1 = empty(experts, 2 * config.intermediate_size, config.hidden_size)
        LAUNCHES[linear.multiply_rows](x, w1, int32(batch * config.num_experts_per_tok), True)
    assert len(compiled) == (7 if experts else 5)
    overlapping = [each for each in compiled if "griddepcontrol.wait" in each.asm["ptx"]]
    assert len(overlapping) == 2 and not reads_before_waiting(overlapping)


def test_chosen_tokens(compiled):
    """No product is fused with a sum: the tokens would not be the definition's."""
    rows, vocab_size = 8, 100_352
    options = empty(rows, choices.COLUMNS, dtype=torch.float64)
    bits = empty(rows, 2, vocab_size // 8, dtype=torch.uint8)
    tables = choices.Tables(empty(rows, vocab_size, dtype=torch.int32), float32(rows, vocab_size), bits, int32(rows))
    LAUNCHES[sampling.choose_tokens](options, float32(rows, vocab_size), int32(rows), *tables, int32(rows))
    assert len(compiled) == 7 and not [each for each in compiled if "fma." in each.asm["ptx"]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize("tokens", [128, pytest.param(2048, marks=pytest.mark.exhaustive)])
def test_prompts(tokens, dtype, config, compiled):
    """Kernels of the scan read several numbers of a token at once."""
    hidden, heads, head_dim = config.hidden_size, config.mamba_n_heads, config.mamba_d_head
    inner, groups, d_state = heads * head_dim, config.mamba_n_groups, config.mamba_d_state
    channels = inner + 2 * groups * d_state
    projected = empty(1, tokens, inner + channels + heads, dtype=dtype)[..., inner : inner + channels]
    convolution = empty(1, channels, 3, dtype=dtype), empty(channels, 4, dtype=dtype), empty(channels, dtype=dtype)
    convolved, _ = LAUNCHES[convolve_tokens](projected, *convolution, int32(1))
    x = convolved[..., :inner].unflatten(-1, (heads, head_dim))
    B, C = (part.unflatten(-1, (groups, d_state)) for part in convolved[..., inner:].chunk(2, -1))
    step, A, D, state = float32(1, tokens, heads), float32(heads), empty(heads), float32(1, heads, head_dim, d_state)
    LAUNCHES[scan_chunks](x, step, A, B, C, D, state)
    scan = compiled[1:]
    assert len(scan) == 5
    # In place, with the time steps.
    states, index = (
        (convolution[0], empty(1, heads, head_dim, d_state, dtype=torch.float32)),
        (int32(1), int32(1), int32(1)),
    )
    convolved = LAUNCHES[convolve_prompt](projected, *convolution[1:], states[0], *index)
    raw = empty(1, tokens, inner + channels + heads, dtype=dtype)[..., inner + channels :]
    LAUNCHES[scan_prompt](convolved, raw, *[empty(heads) for _ in range(3)], states[1], *index, 0.0, float("inf"))
    caches = [empty(2, config.num_key_value_heads, 4096, config.head_dim, dtype=dtype) for _ in range(2)]
    query = empty(1, tokens, config.num_attention_heads, config.head_dim, dtype=dtype)
    LAUNCHES[attend_prompt](query, *caches, int32(1, tokens), int32(1), int32(1), 0.1)
    LAUNCHES[normalize](empty(tokens, inner, dtype=dtype), empty(tokens, inner, dtype=dtype), empty(inner), 1e-5, 1)
    LAUNCHES[add_and_normalize](float32(tokens, hidden), empty(tokens, hidden, dtype=dtype), 0.22, empty(hidden), 1e-5)
    LAUNCHES[products.multiply_tokens](
        empty(tokens, hidden, dtype=dtype), empty(256, hidden, dtype=dtype), None, True, False
    )
    if experts := config.num_local_experts:
        width, top_k = config.intermediate_size, config.num_experts_per_tok
        w1, w2 = empty(experts, 2 * width, hidden, dtype=dtype), empty(experts, hidden, width, dtype=dtype)
        chosen = float32(tokens, top_k), int32(tokens, top_k)
        LAUNCHES[multiply_by_experts](empty(tokens, hidden, dtype=dtype), w1, w2, *chosen)
    if dtype == torch.bfloat16:
        assert sum(each.asm["ptx"].count("ld.global.b16") for each in scan) == 1  # a head's D


@pytest.mark.skipif(
    not triton.__version__.startswith(hopper_attention.TRITON_VERSIONS), reason="not a version whose Gluon it is for"
)
@pytest.mark.parametrize(("head_dim", "tokens"), [(64, 256), (64, 4096), (128, 256)])
def test_attention_computes_its_softmax_beside_a_product(head_dim, tokens, compiled, tmp_path):
    """In each loop. One warp copies tiles; it has few registers, so that the others have many."""
    caches = [empty(2, 4, 4096, head_dim) for _ in range(2)]
    LAUNCHES[attend_prompt](empty(1, tokens, 12, head_dim), *caches, int32(1, tokens), int32(1), int32(1), 0.1)
    [kernel] = compiled
    assert not spills(kernel.asm["cubin"], tmp_path)
    code = " ".join(names_with_waits(kernel.asm["cubin"], tmp_path))
    loops = 2 * hopper_attention._sizes(head_dim, 12, tokens).groups  # with masks and without
    beside = [part.split("wait 0")[0] for part in code.split("wait 1")[1:]]
    assert len(beside) == loops and all(part.count("MUFU.EX2") >= 64 and "HGMMA" not in part for part in beside)
    assert code.count("wait 0") == 2 * loops  # also for the first scores and the last values
    ptx = kernel.asm["ptx"]
    assert "setmaxnreg.dec.sync.aligned.u32 \t24" in ptx and "cp.async.bulk.tensor" in ptx


@pytest.mark.parametrize(("head_dim", "d_state"), [(16, 128), (24, 40), (32, 64), (32, 128)])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("tokens", [40, 150])
def test_scan_of_small_heads(tokens, heads, head_dim, d_state, compiled):
    """With tiles as narrow as these heads, the assembler of CUDA 12.8 reads registers that nothing has written."""
    x, groups = empty(1, tokens, heads, head_dim), [empty(1, tokens, 2, d_state) for _ in range(2)]
    rates = float32(1, tokens, heads), float32(heads)
    LAUNCHES[scan_chunks](x, *rates, *groups, empty(heads), float32(1, heads, head_dim, d_state))
    assert len(compiled) == 5


def tiles_of_products():
    """Return all tiles for 16-bit numbers as parameters. Those between the largest and the smallest are marked slow."""
    largest, *others, smallest = products._TILES
    return [largest, smallest, *(pytest.param(tile, marks=pytest.mark.exhaustive) for tile in others)]


@pytest.mark.parametrize("columns", [768, 772], ids=["by descriptors", "by pointers"])
@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("tile", tiles_of_products(), ids=str)
def test_products_of_prompts_use_one_instruction(tile, is_gated, columns, compiled, monkeypatch):
    """All tiles use wgmma, which adds 16 columns in the same order for any number of rows and outputs."""
    monkeypatch.setattr(products, "_TILES", (tile,))
    weight = empty(3376 * (1 + is_gated), columns)
    LAUNCHES[products.multiply_tokens](empty(512, columns), weight, None, is_gated, False)
    [kernel] = compiled
    assert ("cp.async.bulk.tensor" in kernel.asm["ptx"]) == (columns == 768)
    instructions = re.findall(r"mma[._a-z]*sync\.aligned\.(m\d+n\d+k\d+\.\S+?)[\s;]", kernel.asm["ptx"])
    [instruction] = set(instructions)
    assert re.fullmatch(r"m64n\d+k16\.f32\.bf16\.bf16", instruction)
    assert len(instructions) % 4 == 0  # four instructions for 64 columns
