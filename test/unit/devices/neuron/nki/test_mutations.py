"""Bugs are planted in the kernels' sources, one at a time. The kernels' comparisons must find each of them."""

import inspect
import types

import pytest

from granite4_neuron.devices.neuron.expert_blocks import combine_choices, expert_blocks
from granite4_neuron.devices.neuron.nki import (
    conv1d_prefill,
    experts_decode,
    experts_prefill,
    head_factors,
    mamba_decode,
    mamba_prefill,
    ssd_chunk_scan,
    tensor_tensor_scan,
    windows,
)
from granite4_neuron.devices.neuron.nki.launch import launch
from test.support.nki_cases import (
    conv_inputs,
    conv_oracle,
    error,
    experts_arguments,
    experts_inputs,
    experts_oracle,
    mamba_decode_inputs,
    mamba_decode_oracle,
    mamba_prefill_inputs,
    scan_inputs,
    scan_oracle,
)

emulation = pytest.importorskip("nki.emulation", reason="a simulator may do anything with a broken kernel")


def mutated(module, old, new, parts=()):
    """Return the module's kernel with one piece of source replaced, in this module or in one that it imports from."""
    (changed,) = (m for m in (module, *parts) if old in inspect.getsource(m))
    source = inspect.getsource(changed)
    assert source.count(old) == 1, f"{old!r} is in {changed.__name__} {source.count(old)} times"
    copy = types.ModuleType(module.__name__)
    exec(compile(inspect.getsource(module), module.__file__, "exec"), copy.__dict__)
    exec(compile(source.replace(old, new), changed.__file__, "exec"), copy.__dict__)
    return getattr(copy, module.__name__.rpartition(".")[2])


def check_fails(kernel, arguments, exact, programs=1):
    """Check that a result is wrong by more than the tests allow, or that the emulator refuses the kernel."""
    try:
        outputs = launch(kernel, *arguments, programs=programs)
    except emulation.NkiError:
        return
    assert max(error(output, expected) for output, expected in zip(outputs, exact, strict=True)) > 1e-5


SSD = {
    "decay dropped": ("nisa.activation(dst=decay_sb, op=nl.exp, data=sums_psum)", "nisa.memset(decay_sb, 1.0)"),
    "segments begin with the chunk": (
        "after = ones_below_diagonal(CHUNK_SIZE)",
        "after = ones(CHUNK_SIZE, CHUNK_SIZE, nl.float32)",
    ),
    "segments end with the chunk": (
        "data1=for_each(up_to[0:rows, 0:rows], count)",
        "data1=for_each(ones(rows, rows, nl.float32), count)",
    ),
    "scores not masked": ("data2=up_to[0:rows, 0:rows], op", "data2=ones(rows, rows, nl.float32), op"),
    "boundary decays swapped": ("summands = (up_to, after, everywhere)", "summands = (after, up_to, everywhere)"),
    "state not carried": (
        "nisa.tensor_tensor(dst=state_sb, data1=state_sb, data2=update_psum, op=nl.add)",
        "nisa.tensor_copy(dst=state_sb, src=update_psum)",
    ),
    "state not advanced": ("nisa.tensor_tensor(dst=state_sb, data1=state_sb, data2=update_psum, op=nl.add)", "pass"),
    "state not decayed": (
        "dst=state_sb, data1=state_sb, data2=factors, op=nl.multiply",
        "dst=state_sb, data1=state_sb, data2=factors, op=nl.maximum",
    ),
    "state not read": (
        "nisa.tensor_tensor(dst=sum_sb, data1=sum_sb, data2=within_psum, op=nl.add)",
        "nisa.tensor_copy(dst=sum_sb, src=within_psum)",
    ),
    "state read without its decay": (", scale=from_start_sb[:, h : h + 1]", ""),
    "D x dropped": ("data1=sum_sb, data2=D_x_sb, op=nl.add", "data1=sum_sb, data2=D_x_sb, op=nl.maximum"),
    "dt dropped": ("dt_x_sb = _times_per_head(x_sb, dt_sb,", "dt_x_sb = _times_per_head(x_sb, D_sb[0:rows, 0:heads],"),
    "uninitialised tile": (
        "nisa.tensor_copy(dst=transposed_sb, src=transposed_psum, engine=nisa.scalar_engine)",
        "pass",
    ),
    "one group for all heads": ("group = (first_head + run_start) // heads_per_group", "group = 0"),
    "only the first batch row": ("initial_states[b, 0:d_state", "initial_states[0, 0:d_state"),
    "last token forgotten": ("min(CHUNK_SIZE, length - start)", "min(CHUNK_SIZE, max(1, length - start - 1))"),
}
SCAN = {
    "decay dropped": (
        "nisa.activation(dst=one_channel_sb, op=nl.exp, data=sums_psum)",
        "nisa.memset(one_channel_sb, 1.0)",
    ),
    "channels run into each other": ("nisa.memset(dst=decay_sb[:, :, 0:1], value=0.0)", "pass"),
    "uninitialised inputs": (
        "nisa.tensor_copy(dst=inputs_sb[own_partitions, block, :], src=inputs_psum, engine=nisa.scalar_engine)",
        "pass",
    ),
    "state not decayed at a tile's first token": ("operand0=first_decay_sb,", "operand0=1.0,"),
    "state not carried": ("src=states_sb[:, :, rows - 1]", "src=states_sb[:, :, 0]"),
    "uninitialised tile": (
        "nisa.tensor_copy(dst=decay_sb, src=for_each(one_channel_sb, channels), engine=nisa.gpsimd_engine)",
        "pass",
    ),
    "one group for all heads": ("group = (first_head + run_start) // heads_per_group", "group = 0"),
    "parts of the channels swapped": (
        "members_sb[p * d_state : (p + 1) * d_state, p : p + 1]",
        "members_sb[p * d_state : (p + 1) * d_state, parts - 1 - p : parts - p]",
    ),
    "last token forgotten": ("min(TOKENS, length - start)", "min(TOKENS, max(1, length - start - 1))"),
}
CONV = {
    "accumulate flag lost": ("accumulate=True,", "accumulate=False,"),
    "taps reversed": (
        "inputs_sb[:, first + i, tap : tap + rows]",
        "inputs_sb[:, first + i, d_conv - 1 - tap : d_conv - 1 - tap + rows]",
    ),
    "window not carried": ("previous_sb = inputs_sb[:, :, rows : rows + reach]", "pass"),
    "window summed over the last block only": ("accumulate=start > 0,", "accumulate=False,"),
    "window summed onto what was never written": ("accumulate=start > 0,", "accumulate=True,"),
    "window one token late": ("pattern=[[-1, reach]], offset=reach,", "pattern=[[-1, reach]], offset=reach - 1,"),
    "old window forgotten": ("for length in range(reach):", "for length in range(0):"),
    "uninitialised tile": ("nisa.tensor_copy(dst=inputs_sb[:, :, 0:reach], src=previous_sb)", "pass"),
}
PREFILL = {
    "window not carried": ("(xBC_sb, previous_sb, width)", "(xBC_sb, old_window_sb, width)"),
    "B and C swapped": (
        "(first_B, own_B), (first_B + n_groups * d_state, own_B)",
        "(first_B, own_B), (first_B, own_B)",
    ),
    "gate left out": ("op=nl.silu, data=load(z", "op=nl.copy, data=load(z"),
    "gate of other channels": ("own_y = nl.ds(first_head * head_dim, own_x)", "own_y = nl.ds(0, own_x)"),
    "D for A": ("load(A_D[0:1, own_heads]", "load(A_D[1:2, own_heads]"),
    "bias of other channels": ("data=tiles_sb[:, first + i, :]", "data=tiles_sb[:, first, :]"),
    "only the first batch row's state": ("load(states[b, 0:d_state", "load(states[0, 0:d_state"),
    "only the first batch row's window": ("_load_tiles(conv_states[b],", "_load_tiles(conv_states[0],"),
    "window of B and C not written": ("written = 3 if first_head % heads_per_group == 0 else 1", "written = 1"),
    "gate of the first chunk": ("load(z[b, tokens, own_y]", "load(z[b, 0:rows, own_y]"),
    "the scan's state not carried": (
        "nisa.tensor_tensor(dst=state_sb, data1=state_sb, data2=update_psum, op=nl.add)",
        "nisa.tensor_copy(dst=state_sb, src=update_psum)",
    ),
}
EXPERTS = {
    "memory not zeroed before the first expert": (
        "nisa.memset(dst=tile_sb[:, half : shape[1], :].view(nl.float32), value=0.0, engine=nisa.vector_engine)",
        "pass",
    ),
    "half of the memory not zeroed": (
        "nisa.memset(dst=tile_sb[:, 0:half, :].view(nl.float32), value=0.0, engine=nisa.gpsimd_engine)",
        "pass",
    ),
    "only gate and up zeroed": (
        "down_sbs = _zeros(buffers, (rows, width // rows, hidden), dtype)",
        "down_sbs = [nl.ndarray((rows, width // rows, hidden), dtype, nl.sbuf) for _ in range(buffers)]",
    ),
    "slots without an expert not skipped": ("oob_mode=nisa.oob_mode.skip", "oob_mode=nisa.oob_mode.error"),
    "gate and up of the next expert": (
        "load_expert(gate_up_sb, gate_up_proj, ids_sb[:, slot : slot + 1]",
        "load_expert(gate_up_sb, gate_up_proj, ids_sb[:, slot + 1 : slot + 2]",
    ),
    "down of the expert before": (
        "load_expert(down_sb, down_proj, ids_sb[:, slot : slot + 1]",
        "load_expert(down_sb, down_proj, ids_sb[:, max(slot, 1) - 1 : max(slot, 1)]",
    ),
    "weights of another slot": ("combine_sb[:, slot : slot + 1]", "combine_sb[:, slots - 1 - slot : slots - slot]"),
    "not weighted": ("operand0=weights,", "operand0=1.0,"),
    "gate and up swapped": ("gate, up = both[:, 0:width], both[:, width", "up, gate = both[:, 0:width], both[:, width"),
    "silu dropped": ("op=nl.silu", "op=nl.copy"),
    "sum over hidden not carried": ("accumulate=column > 0,", "accumulate=False,"),
    "sum over experts not carried": ("accumulate=not (is_first and block == 0)", "accumulate=block > 0"),
    "sum begins again with every block": ("accumulate=not (is_first and block == 0)", "accumulate=not is_first"),
    "rows of weights in another order than tokens": ("slot + 1], columns, 1)", "slot + 1], 1, MAX_PARTITIONS)"),
    "blocks of the width in another order": ("slot + 1], 1, rows)", "slot + 1], width // rows, 1)"),
    "one part for both": ("_store(outputs[part], y_psums)", "_store(outputs[0], y_psums)"),
    "uninitialised tile": (
        "nisa.tensor_copy(dst=columns_sb[:, block, :], src=columns_psum, engine=nisa.scalar_engine)",
        "pass",
    ),
}
EXPERTS_PREFILL = {
    "tokens of the next block": ("tokens_sb[:, block : block + 1]", "tokens_sb[:, block + 1 : block + 2]"),
    "places of another block": ("choices_sb[:, block : block + 1]", "choices_sb[:, block - 1 : block]"),
    "gate and up of the next block": (
        "load_expert(gate_up_sb, gate_up_proj, load_id",
        "load_expert(gate_up_sb, gate_up_proj, loads_sb[:, block + 1 : block + 2]",
    ),
    "down of the first block": (
        "load_expert(down_sb, down_proj, load_id",
        "load_expert(down_sb, down_proj, loads_sb[:, 0:1]",
    ),
    "rows of weights in another order than tokens": ("load_id, columns, 1)", "load_id, 1, MAX_PARTITIONS)"),
    "blocks of the width in another order": ("load_id, 1, rows)", "load_id, width // rows, 1)"),
    "elements of tokens in another order": (
        "rows_sb.reshape((count, MAX_PARTITIONS, columns))",
        "rows_sb.reshape((count, columns, MAX_PARTITIONS)).permute((0, 2, 1))",
    ),
    "rows without a token not skipped": (
        "nisa.dma_copy(dst=rows_sb, src=source, oob_mode=nisa.oob_mode.skip)",
        "nisa.dma_copy(dst=rows_sb, src=source)",
    ),
    "rows without a place not skipped": (
        "nisa.dma_copy(dst=target, src=rows_sb, oob_mode=nisa.oob_mode.skip)",
        "nisa.dma_copy(dst=target, src=rows_sb)",
    ),
    "sum over the width not carried": ("accumulate=block > 0", "accumulate=False"),
    "the first bank for all": ("moving=down_sb[:, block, bank]", "moving=down_sb[:, block, 0 : y_psum.shape[1]]"),
    "uninitialised tile": ("nisa.tensor_copy(dst=y_sb[:, bank], src=y_psum, engine=nisa.vector_engine)", "pass"),
}
MAMBA_DECODE = {
    "drafts not accepted enter the state": (
        "nisa.tensor_tensor(dst=taken_dt_sb, data1=taken_dt_sb, data2=accepted, op=nl.less)",
        "nisa.memset(dst=taken_dt_sb, value=1.0)",
    ),
    "one token too many is accepted": ("data2=accepted, op=nl.less", "data2=accepted, op=nl.less_equal"),
    "decay to the end from the token itself": (
        "data1=after, data2=log_decay_sb[:, s, :], op=nl.add",
        "data1=after, data2=log_decay_sb[:, s - 1, :], op=nl.add",
    ),
    "the state's decay leaves out the first token": (
        "nisa.tensor_tensor(dst=total_sb, data1=factors_sb[:, 0, :], data2=log_decay_sb[:, 0, :], op=nl.add)",
        "nisa.tensor_copy(dst=total_sb, src=factors_sb[:, 0, :])",
    ),
    "decays of heads mixed": ("moving=flat(own_sb)", "moving=flat(own_sb.permute((0, 1, 2))[:, :, ::-1])"),
    "decays of the next head": (
        "own_heads = nl.ds((start + i) * heads_per_lane, heads_per_lane)",
        "own_heads = nl.ds((lanes - 1 - start - i) * heads_per_lane, heads_per_lane)",
    ),
    "outputs see the state decay by later tokens": (
        "own = log_decay_sb[:, t : t + 1, :]",
        "own = log_decay_sb[:, 0:1, :]",
    ),
    "D dropped": ("nisa.tensor_scalar(dst=itself, data=itself, op0=nl.add, operand0=A_D_sb[:, 1, :])", "pass"),
    "scores of all groups in all heads": (
        "nisa.memset(dst=members_sb, value=0.0)",
        "nisa.memset(dst=members_sb, value=1.0)",
    ),
    "B and C exchanged in the scores": (
        "data1=C_sb[:, :, group, :].expand_dim(2)",
        "data1=B_sb[:, :, group, :].expand_dim(2)",
    ),
    "C of the first group": ("moving=C_sb[:, :, group, s]", "moving=C_sb[:, :, 0, s]"),
    "C of the first sequence": ("moving=C_sb[:, :, group, s]", "moving=C_sb[:, :, group, 0]"),
    "B of the first group": ("B_by_token_sb[own_tokens, group, :]", "B_by_token_sb[own_tokens, 0, :]"),
    "B and x of the first sequence": ("own_tokens = nl.ds(place, tokens)", "own_tokens = nl.ds(0, tokens)"),
    "x not weighted": (
        "x_by_token_sb = _by_token(x_sb[:, :, :, abreast], weights)",
        "x_by_token_sb = _by_token(x_sb[:, :, :, abreast], None)",
    ),
    "gate dropped": ("nisa.activation(dst=gate_sb, op=nl.silu, data=z_sb)", "nisa.memset(gate_sb, 1.0)"),
    "what tokens say to each other dropped": (
        "data1=y_sb[:, later, :, :], data2=part_sb, op=nl.add",
        "data1=y_sb[:, later, :, :], data2=part_sb, op=nl.maximum",
    ),
    "state not decayed": ("op=nl.multiply)\n    heads_per_bank", "op=nl.maximum)\n    heads_per_bank"),
    "state of the first sequence": ("load(states[start + s,", "load(states[start,"),
    "taps reversed": (
        "data1=windows_sb[:, tap : tap + tokens, :, :]",
        "data1=windows_sb[:, d_conv - 1 - tap : d_conv - 1 - tap + tokens, :, :]",
    ),
    "bias dropped": ("data1=sum_sb, data2=bias, op=nl.add", "data1=sum_sb, data2=bias, op=nl.maximum"),
    "windows one token late": (
        "window = windows_sb[:, count : count + reach, :, :]",
        "window = windows_sb[:, max(count, 1) - 1 : max(count, 1) - 1 + reach, :, :]",
    ),
    "windows of B and C not written": ("if has_first_heads:", "if not has_first_heads:"),
}
MAMBA_DECODE_BANKS = {
    "factors": ("dst=result_sb[:, bank, :, :], src=bank_psum", "dst=result_sb[:, 0:1, :, :], src=bank_psum"),
    "outputs": ("transposed(y_psum, y_sb[:, bank, :, :])", "transposed(y_psum, y_sb[:, 0 : y_psum.shape[1], :, :])"),
    "tokens that enter states": (
        "data=flat(spread_sb[:, start + i, :, :])[:, 0:used]",
        "data=flat(spread_sb[:, i, :, :])[:, 0:used]",
    ),
}


def mutations(kernel_mutations):
    return pytest.mark.parametrize(("old", "new"), kernel_mutations.values(), ids=kernel_mutations.keys())


# Two groups, two rows and two chunks, the last one shorter, so that no bug can hide.
SCAN_INPUTS = scan_inputs(2, 135, heads=4, head_dim=32, groups=2, d_state=64)
MAMBA_DECODE_INPUTS = mamba_decode_inputs(2, 3, heads=4, head_dim=32, groups=2, d_state=64, accepted=[1, 2])
MAMBA_DECODE_BANKS_INPUTS = mamba_decode_inputs(9, 5, heads=16, head_dim=128, d_state=32)  # several banks of each kind
# One group that two programs share, and a shorter second chunk.
MAMBA_PREFILL_INPUTS = mamba_prefill_inputs(2, 135, heads=4, head_dim=32, d_state=64, lengths=[135, 135])
CONV_INPUTS = conv_inputs(3, 135, 64, lengths=[135, 130, 1])
# Fewer distinct experts than there is memory for, and a width of two blocks.
EXPERTS_INPUTS = experts_inputs(4, width=192, top_k=2, idle=(1, 3))
# Experts with several blocks, blocks without rows, and a hidden size of more than a bank.
PREFILL_INPUTS = experts_inputs(300, 4, hidden=640, width=192, top_k=2, idle=(0, 299))


@pytest.mark.slow
@mutations(SSD)
def test_ssd_chunk_scan(old, new):
    check_fails(mutated(ssd_chunk_scan, old, new), SCAN_INPUTS.values(), scan_oracle(SCAN_INPUTS))


@pytest.mark.slow
@mutations(SCAN)
def test_tensor_tensor_scan(old, new):
    check_fails(mutated(tensor_tensor_scan, old, new), SCAN_INPUTS.values(), scan_oracle(SCAN_INPUTS))


@pytest.mark.slow
@mutations(MAMBA_DECODE)
def test_mamba_decode(old, new):
    kernel = mutated(mamba_decode, old, new, parts=(head_factors, windows))
    check_fails(kernel, MAMBA_DECODE_INPUTS.values(), mamba_decode_oracle(MAMBA_DECODE_INPUTS))


@pytest.mark.slow
@mutations(MAMBA_DECODE_BANKS)
def test_banks_of_mamba_decode(old, new):
    kernel = mutated(mamba_decode, old, new, parts=(head_factors, windows))
    check_fails(kernel, MAMBA_DECODE_BANKS_INPUTS.values(), mamba_decode_oracle(MAMBA_DECODE_BANKS_INPUTS))


@pytest.mark.slow
@mutations(PREFILL)
def test_mamba_prefill(old, new):
    kernel = mutated(mamba_prefill, old, new, parts=(conv1d_prefill, ssd_chunk_scan))
    check_fails(kernel, MAMBA_PREFILL_INPUTS.values(), mamba_decode_oracle(MAMBA_PREFILL_INPUTS), programs=2)


@pytest.mark.slow
@mutations(CONV)
def test_conv1d_prefill(old, new):
    check_fails(mutated(conv1d_prefill, old, new), CONV_INPUTS.values(), conv_oracle(CONV_INPUTS))


@pytest.mark.slow
@mutations(EXPERTS)
def test_experts_decode(old, new):
    check_fails(mutated(experts_decode, old, new), experts_arguments(EXPERTS_INPUTS), experts_oracle(EXPERTS_INPUTS))


@pytest.mark.slow
@mutations(EXPERTS_PREFILL)
def test_experts_prefill(old, new):
    x, gate_up_proj, down_proj, topk_ids, weights = PREFILL_INPUTS.values()
    kernel = mutated(experts_prefill, old, new)
    try:
        (y,) = launch(kernel, x, gate_up_proj, down_proj, *expert_blocks(topk_ids, 4), programs=1)
    except emulation.NkiError:
        return
    assert error(combine_choices(y, topk_ids, weights, 4), sum(experts_oracle(PREFILL_INPUTS))) > 1e-5


@pytest.mark.slow
def test_an_expert_that_is_read_twice():
    """The result is right, but the traffic is not: the budgets limit it to 1.05."""
    arguments = experts_arguments(EXPERTS_INPUTS)
    bytes_read = []
    load = "load_expert(down_sb, down_proj, ids_sb[:, slot : slot + 1], 1, rows)"
    for new in (load, f"{load}; {load}"):
        outputs = launch(mutated(experts_decode, load, new), *arguments, programs=1)
        assert error(sum(outputs), sum(experts_oracle(EXPERTS_INPUTS))) <= 1e-5
        bytes_read.append(emulation.last_launch().hbm_bytes)
    assert bytes_read[1] > 1.3 * bytes_read[0]


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["trn2", "trn3"])
def test_the_unchanged_sources_pass(platform, monkeypatch):
    """They go through the same steps and comparisons, with the limits of either generation of cores."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", platform)
    for module, arguments, exact in (
        (ssd_chunk_scan, SCAN_INPUTS.values(), scan_oracle(SCAN_INPUTS)),
        (tensor_tensor_scan, SCAN_INPUTS.values(), scan_oracle(SCAN_INPUTS)),
        (mamba_decode, MAMBA_DECODE_INPUTS.values(), mamba_decode_oracle(MAMBA_DECODE_INPUTS)),
        (mamba_prefill, MAMBA_PREFILL_INPUTS.values(), mamba_decode_oracle(MAMBA_PREFILL_INPUTS)),
        (conv1d_prefill, CONV_INPUTS.values(), conv_oracle(CONV_INPUTS)),
        (experts_decode, experts_arguments(EXPERTS_INPUTS), experts_oracle(EXPERTS_INPUTS)),
    ):
        outputs = launch(mutated(module, "@nki.jit", "@nki.jit"), *arguments, programs=1)
        for output, expected in zip(outputs, exact, strict=True):
            assert error(output, expected) <= 1e-5
