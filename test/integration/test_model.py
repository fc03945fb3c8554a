"""The model of NxD Inference, at three levels, each skipped where its parts are absent:

* in NxD Inference's CPU mode: installed, or from sources that NXDI_SRC and NXD_SRC name (requirements-nxdi.txt);
* without a device, what a compiled graph is told about its state;
* on a Neuron device (test_neuron_device.py).
"""

import os
import socket

import pytest
import torch
import torch.multiprocessing

from granite4_neuron.checkpoint import load_model, rank_slice
from granite4_neuron.config import GraniteMoeHybridConfig, family_names
from granite4_neuron.errors import UserError
from granite4_neuron.random_weights import random_model
from test.integration.test_logits import NOT_IN_REFERENCE
from test.support import nxdi
from test.support.checkpoints import CASES, Case
from test.support.stepping import poisoned_state, random_tokens, reference_logits, run_cuts

TOLERANCE = 1e-4
STEPS = 16
PROMPTS = (1, 2, 3, 40, 100, nxdi.BUCKET, 200)  # the last is longer than the bucket
RAGGED = ((40, 1, 100), (2, nxdi.BUCKET, 3), (200, 1, 130), (17, 90, 64))
CASE = {case.name: case for case in CASES}


@pytest.fixture(scope="module", autouse=True)
def neuron_inference():
    """NxD Inference in CPU mode, and in this process a group of one rank that it leaves behind."""
    reason = nxdi.why_not_importable()
    if reason:
        pytest.skip(reason)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NXD_CPU_MODE", "1")
        patch.setenv("MASTER_PORT", str(free_port()))
        yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def moe_folder(random_checkpoints):
    return random_checkpoints(CASE["moe"])


@pytest.fixture(scope="module")
def moe(moe_folder):
    return nxdi.cpu_model(moe_folder)


@pytest.fixture(scope="module")
def continuous(moe_folder):
    """Three slots, filled one by one."""
    return nxdi.cpu_model(moe_folder, batch_size=3, ctx_batch_size=1, is_continuous_batching=True)


def expected_logits(folder, tokens):
    """transformers' logits; of what the installed one computes otherwise, those of this package's CPU runtime."""
    if folder.name in NOT_IN_REFERENCE:
        return run_cuts(load_model(folder, torch.float32), tokens, [tokens.shape[1]])
    return reference_logits(folder, tokens)


def difference(folder, model, prompt_lengths, seq_ids=None, seed=0):
    """The largest, over the prompts' logits and those of each decoded token."""
    tokens = random_tokens(model.config.vocab_size, len(prompt_lengths), max(prompt_lengths) + STEPS, seed=seed)
    logits = nxdi.run(model, tokens, prompt_lengths, STEPS, seq_ids)
    return (logits - nxdi.at(expected_logits(folder, tokens), prompt_lengths, STEPS)).abs().max().item()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case, random_checkpoints):
    """Prompts of all lengths one after another on the same model, so that state left over would show."""
    folder = random_checkpoints(case)
    model = nxdi.cpu_model(folder)
    for length in PROMPTS:
        assert difference(folder, model, [length], seed=length) <= TOLERANCE, length


@pytest.mark.parametrize("case", ["moe", "dense", "rope", "conv3_no_bias", "untied_head"])
def test_ragged_batch(case, random_checkpoints):
    folder = random_checkpoints(CASE[case])
    model = nxdi.cpu_model(folder, batch_size=3)
    for seed, lengths in enumerate(RAGGED):
        assert difference(folder, model, lengths, seed=seed) <= TOLERANCE, lengths


@pytest.mark.parametrize("seq_ids", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_continuous_batching(moe_folder, continuous, seq_ids):
    """A slot for each sequence, in any order."""
    for seed, lengths in enumerate(RAGGED):
        assert difference(moe_folder, continuous, lengths, seq_ids, seed) <= TOLERANCE, lengths


def test_sequences_come_and_go(moe_folder, continuous):
    """Prefill while other sequences are in the middle of decode; fewer rows than slots; a slot used again."""
    tokens = random_tokens(continuous.config.vocab_size, 4, 230)
    expected = reference_logits(moe_folder, tokens)
    slot, done = {}, {}

    def check(logits, rows):
        for row, output in zip(rows, logits, strict=True):
            assert (output - expected[row, done[row] - 1]).abs().max() <= TOLERANCE

    def start(row, length, seq_id):
        slot[row], done[row] = seq_id, length
        check(nxdi.prefill(continuous, [tokens[row, :length]], [seq_id]), [row])

    def decode(*rows):
        lengths = [done[row] for row in rows]
        logits = nxdi.decode(
            continuous, [int(tokens[row, done[row]]) for row in rows], lengths, [slot[row] for row in rows]
        )
        for row in rows:
            done[row] += 1
        check(logits, rows)

    start(0, 40, seq_id=2)
    decode(0)
    start(1, 1, seq_id=0)
    decode(0, 1)
    decode(1)
    start(2, 200, seq_id=1)
    decode(2, 0, 1)
    decode(0, 2)
    start(3, 7, seq_id=0)  # in the place of sequence 1
    for _ in range(3):
        decode(0, 2, 3)
    decode(3)
    decode(3, 0)


def state_of(model):
    return model.token_generation_model.model.kv_mgr.past_key_values


@pytest.mark.parametrize("length", [20, 200])
def test_prefill_leaves_other_slots_alone(continuous, length):
    tokens = random_tokens(continuous.config.vocab_size, 3, 200)
    nxdi.prefill(continuous, [row[:30] for row in tokens], [0, 1, 2])
    before = [tensor.clone() for tensor in state_of(continuous)]
    nxdi.prefill(continuous, [tokens[0, :length].flip(0)], [1])
    for old, new in zip(before, state_of(continuous), strict=True):
        assert torch.equal(old[[0, 2]], new[[0, 2]])
        assert not torch.equal(old[1], new[1])


def test_decode_leaves_slots_without_a_row_alone(continuous):
    tokens = random_tokens(continuous.config.vocab_size, 3, 40)
    nxdi.prefill(continuous, [row[:30] for row in tokens], [0, 1, 2])
    before = [tensor.clone() for tensor in state_of(continuous)]
    nxdi.decode(continuous, [5], [30], [1])
    length = continuous.neuron_config.max_length  # beyond it lies what no sequence reads
    for old, new in zip(before, state_of(continuous), strict=True):
        assert torch.equal(old[[0, 2], :, :length], new[[0, 2], :, :length])
        assert not torch.equal(old[1], new[1])


def test_generation_equals_transformers(moe_folder):
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
    from transformers import GenerationConfig, GraniteMoeHybridForCausalLM

    model = nxdi.cpu_model(moe_folder, batch_size=3)
    lengths, options = torch.tensor([40, 150, 9]), dict(max_new_tokens=STEPS, do_sample=False, eos_token_id=None)
    prompts = random_tokens(model.config.vocab_size, 3, 150)
    mask = torch.arange(150) < lengths[:, None]
    ours = HuggingFaceGenerationAdapter(model).generate(
        prompts,
        attention_mask=mask.long(),
        generation_config=GenerationConfig(**options, pad_token_id=0, top_k=1),
    )
    reference = GraniteMoeHybridForCausalLM.from_pretrained(moe_folder).eval()
    for row, length in enumerate(lengths):
        theirs = reference.generate(prompts[row : row + 1, :length], pad_token_id=0, **options)
        assert torch.equal(ours[row, 150:], theirs[0, length:])


def test_tokens_and_logits_from_the_graph(moe_folder):
    """On-device sampling, which returns tokens, and with output_logits also what they were chosen from."""
    sampling = dict(on_device_sampling_config={"top_k": 1, "do_sample": False}, output_logits=True, batch_size=2)
    model = nxdi.cpu_model(moe_folder, **sampling)
    for lengths in ((30, 3), (200, 90)):
        tokens = random_tokens(model.config.vocab_size, 2, 210)
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        positions = torch.arange(max(lengths)).where(mask, 1)
        with torch.inference_mode():
            output = model(input_ids=tokens[:, : max(lengths)], attention_mask=mask.long(), position_ids=positions)
        expected = nxdi.at(reference_logits(moe_folder, tokens), lengths, 0)[:, 0]
        assert (output.logits[:, -1] - expected).abs().max() <= TOLERANCE
        assert torch.equal(output.tokens.view(-1), expected.argmax(-1))


def test_buckets(moe_folder):
    """Of context encoding, of token generation and of continuations; a small one pads less and gives the same."""
    model = nxdi.cpu_model(
        moe_folder,
        batch_size=2,
        enable_bucketing=True,
        context_encoding_buckets=[32, 64],
        token_generation_buckets=[64, 160, 256],
    )
    assert model.prefill_continuation_model.neuron_config.buckets == [160, 256]
    assert model.prefill_continuation_model.neuron_config.n_active_tokens == 64
    for lengths in ((5, 20), (33, 63), (64, 1), (65, 3), (240, 129)):
        assert difference(moe_folder, model, lengths) <= TOLERANCE, lengths


def test_bfloat16(random_checkpoints):
    """The SSM states stay in float32, and the error is not above that of transformers in bfloat16."""
    case = CASE["moe"]
    folder = random_checkpoints(Case("moe_bf16", case.changes, case.max_A), dtype=torch.bfloat16)
    model = nxdi.cpu_model(folder, torch_dtype="bfloat16")
    for idx, tensor in enumerate(state_of(model)):
        is_ssm_state = idx % 2 and model.config.granite.layer_types[idx // 2] == "mamba"
        assert tensor.dtype == (torch.float32 if is_ssm_state else torch.bfloat16)
    ours, theirs = [], []
    for seed in range(4):
        tokens = random_tokens(model.config.vocab_size, 1, 100 + STEPS, seed=seed)
        exact = nxdi.at(reference_logits(folder, tokens), [100], STEPS)
        ours.append((nxdi.run(model, tokens, [100], STEPS) - exact).abs().mean())
        rounded = nxdi.at(reference_logits(folder, tokens, torch.bfloat16), [100], STEPS)
        theirs.append((rounded - exact).abs().mean())
    assert sum(ours) <= sum(theirs)


# Two ranks.

TP_CASES = ("moe", "dense", "rope", "conv3_no_bias", "untied_head", "two_groups", "one_expert_per_token")


def run_rank(rank, folders, port, results):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["NXD_CPU_MODE"] = "1"
    torch.set_num_threads(1)
    assert nxdi.why_not_importable() is None
    logits = []
    for number, folder in enumerate(folders):
        if number:
            del os.environ["WORLD_SIZE"]  # or NxD Inference would start the group again
        model = nxdi.cpu_model(folder, tp_degree=2, batch_size=3)
        tokens = random_tokens(model.config.vocab_size, 3, 200 + STEPS)
        logits.append([nxdi.run(model, tokens, lengths, STEPS) for lengths in RAGGED[:3]])
        os.environ["WORLD_SIZE"] = "2"
    torch.save(logits, f"{results}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(random_checkpoints, tmp_path_factory):
    """What each of two ranks gives for each of TP_CASES and of the first ragged batches."""
    results = tmp_path_factory.mktemp("two_ranks")
    folders = [random_checkpoints(CASE[name]) for name in TP_CASES]
    arguments = (folders, free_port(), str(results))
    torch.multiprocessing.start_processes(run_rank, args=arguments, nprocs=2, start_method="spawn")
    return [torch.load(results / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", TP_CASES)
def test_two_ranks(name, two_ranks, random_checkpoints):
    folder = random_checkpoints(CASE[name])
    tokens = random_tokens(GraniteMoeHybridConfig.from_file(folder / "config.json").vocab_size, 3, 200 + STEPS)
    expected = expected_logits(folder, tokens)
    for rank in two_ranks:
        for logits, lengths in zip(rank[TP_CASES.index(name)], RAGGED, strict=False):
            assert (logits - nxdi.at(expected, lengths, STEPS)).abs().max() <= TOLERANCE
