"""The model of NxD Inference at three levels. Each is skipped where its parts are absent:

* TestCpuMode: logits, in NxD Inference's CPU mode. It comes with the Neuron SDK; elsewhere NXDI_SRC and NXD_SRC name
  checkouts of neuronx-distributed-inference and neuronx-distributed (requirements/nxdi.txt).
* TestGraphs: the state aliases of a compiled graph and the graph that its compiler sees, without a device.
* TestNeuronDevice: the compiled model on a Neuron device.
"""

import math
import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from transformers import GenerationConfig

from granite4_neuron import generate, load
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.config import config_from_file
from granite4_neuron.devices.neuron import compiled_graphs
from granite4_neuron.devices.neuron.compiled_graphs import GraphOptions
from granite4_neuron.engine import Engine
from granite4_neuron.errors import UserError
from granite4_neuron.evaluation import accuracy
from granite4_neuron.evaluation.accuracy import Difference
from granite4_neuron.generation import bundled_checkpoint
from granite4_neuron.model.step import step_of
from granite4_neuron.planning.analysis.hlo_lint import findings
from granite4_neuron.runtime.interface import Row, require
from granite4_neuron.state.hybrid_state import HybridState, input_output_aliases
from test.integration.test_bundled import PROMPTS as TEXTS
from test.integration.test_logits import NOT_IN_REFERENCE
from test.support import nxdi
from test.support.checkpoints import CASES, DENSE, Case, small_config
from test.support.stepping import random_tokens, reference_logits, run_cuts

pytestmark = pytest.mark.versions

TOLERANCE = 1e-4
STEPS = 16
PROMPTS = (1, 2, 3, 40, 100, nxdi.BUCKET, 200)  # the last is longer than the bucket
RAGGED = ((40, 1, 100), (2, nxdi.BUCKET, 3), (200, 1, 130), (17, 90, 64))
CASE = {case.name: case for case in CASES}
# The logical cores of a trn2.3xlarge. A program gets one of them or all.
TP_DEGREE = 4
TP_CASES = ("moe", "rope", "conv3_no_bias", "untied_head", "two_groups", "one_expert_per_token")


@pytest.fixture(scope="class")
def cpu_mode():
    """Let NxD Inference compute with plain torch in this process, as a group of one rank."""
    nxdi.skip_unless_importable()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NXD_CPU_MODE", "1")
        patch.setenv("MASTER_PORT", str(free_port()))
        yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        from neuronx_distributed.parallel_layers import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state._SPECULATIVE_DRAFT_GROUP = None  # destroy_model_parallel does not destroy this group
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def moe_folder(random_checkpoints):
    return random_checkpoints(CASE["moe"])


@pytest.fixture(scope="class")
def continuous(cpu_mode, moe_folder):
    """Load a model with three slots that are filled one by one."""
    return nxdi.cpu_model(moe_folder, batch_size=3, ctx_batch_size=1, is_continuous_batching=True)


@pytest.fixture(scope="class")
def two_ranks(cpu_mode, random_checkpoints, tmp_path_factory):
    """Return the results of each of two ranks for each of TP_CASES and of the first ragged batches."""
    results = tmp_path_factory.mktemp("two_ranks")
    folders = [random_checkpoints(CASE[name]) for name in TP_CASES]
    arguments = (folders, free_port(), results)
    torch.multiprocessing.start_processes(run_rank, args=arguments, nprocs=2, start_method="spawn")
    return [torch.load(results / f"{rank}.pt") for rank in range(2)]


def run_rank(rank: int, folders: list[Path], port: int, results: Path) -> None:
    """Run a rank's process with the environment that torchrun would give it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NXD_CPU_MODE="1")
    torch.set_num_threads(1)
    assert nxdi.why_not_importable() is None
    logits = []
    for folder in folders:
        model = nxdi.cpu_model(folder, tp_degree=2, batch_size=3)
        os.environ.pop("WORLD_SIZE", None)  # if it is set, NxD Inference starts a group for each model
        tokens = random_tokens(model.config.vocab_size, 3, 200 + STEPS)
        logits.append([nxdi.run(model, tokens, lengths, STEPS) for lengths in RAGGED[:3]])
    one = nxdi.cpu_model(folders[0], tp_degree=2)
    slots = nxdi.cpu_model(folders[0], tp_degree=2, batch_size=3, ctx_batch_size=1, is_continuous_batching=True)
    tokens = random_tokens(one.config.vocab_size, 3, 200 + STEPS)
    alone = [nxdi.run(one, tokens[:1], [length], STEPS) for length in PROMPTS]
    by_slot = [nxdi.run(slots, tokens, lengths, STEPS, (2, 0, 1)) for lengths in RAGGED[:3]]
    torch.save(dict(ragged=logits, alone=alone, by_slot=by_slot), results / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def expected_logits(folder, tokens):
    """Return transformers' logits, or those of this package's CPU runtime where the installed transformers differs."""
    if folder.name in NOT_IN_REFERENCE:
        return run_cuts(load_model(folder, torch.float32), tokens, [tokens.shape[1]])
    return reference_logits(folder, tokens)


def difference(folder, model, prompt_lengths, seq_ids=None, seed=0):
    """Return the largest difference over the prompts' logits and those of each decoded token."""
    tokens = random_tokens(model.config.vocab_size, len(prompt_lengths), max(prompt_lengths) + STEPS, seed=seed)
    logits = nxdi.run(model, tokens, prompt_lengths, STEPS, seq_ids)
    return (logits - nxdi.at(expected_logits(folder, tokens), prompt_lengths, STEPS)).abs().max().item()


def graph_lengths(model, monkeypatch):
    """Return a list that gets the number of tokens of each graph that runs."""
    lengths = []
    for module in dict.fromkeys(graph.model for graph in model.models):  # graphs may share a module

        def call(*args, wrapped=module.get_model_output, **kwargs):
            lengths.append((args[0] if args else kwargs["input_ids"]).shape[1])
            return wrapped(*args, **kwargs)

        monkeypatch.setattr(module, "get_model_output", call)
    return lengths


def state_of(model):
    return model.token_generation_model.model.kv_mgr.past_key_values


CAPTURE = dict(
    on_device_sampling_config={"do_sample": False},
    tensor_capture_config=dict(
        modules_to_capture=["layers.1", "layers.3"], capture_inputs=True, max_intermediate_tensors=1
    ),
)


def reference_hidden_states(folder, tokens):
    """Return transformers' states before each layer, [layers, batch, tokens, hidden_size]; the embedding is first."""
    from transformers import GraniteMoeHybridForCausalLM

    reference = GraniteMoeHybridForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.stack(reference(tokens, use_cache=False, output_hidden_states=True).hidden_states[:-1])


def check_captured(output, num_tokens, expected):
    """Check the outputs and inputs of the layers in CAPTURE, for a step's first tokens. The unused tensor is NaN."""
    *hidden_states, nothing = output.captured_tensors
    assert nothing.isnan().all()
    for captured, index in zip(hidden_states, (2, 1, 4, 3), strict=True):
        assert (captured[:, :num_tokens] - expected[index]).abs().max() <= TOLERANCE


def reference_texts(folder, tokenizer, texts, new_tokens):
    """Return transformers' greedy continuations, as token ids."""
    from transformers import GraniteMoeHybridForCausalLM

    reference = GraniteMoeHybridForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    for text in texts:
        prompt = tokenizer(text, return_tensors="pt").input_ids
        options = dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        outputs.append(reference.generate(prompt, **options)[0, prompt.shape[1] :])
    return torch.stack(outputs)


def generated_texts(model, tokenizer, texts, new_tokens):
    """Return the greedy continuations from NxD Inference's generate, as one ragged batch."""
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
    from transformers import GenerationConfig

    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, top_k=1, eos_token_id=None, pad_token_id=0)
    output = HuggingFaceGenerationAdapter(model).generate(
        batch.input_ids, attention_mask=batch.attention_mask, generation_config=options
    )
    return output[:, batch.input_ids.shape[1] :]


@pytest.mark.usefixtures("cpu_mode")
class TestCpuMode:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_logits_equal_transformers(self, case, random_checkpoints):
        """Prompts of all lengths run one after another on the same model, so that leftover state would show."""
        folder = random_checkpoints(case)
        model = nxdi.cpu_model(folder)
        for length in PROMPTS:
            assert difference(folder, model, [length], seed=length) <= TOLERANCE, length

    @pytest.mark.parametrize("case", ["moe", "dense", "rope", "conv3_no_bias", "untied_head"])
    def test_ragged_batch(self, case, random_checkpoints):
        folder = random_checkpoints(CASE[case])
        model = nxdi.cpu_model(folder, batch_size=3)
        for seed, lengths in enumerate(RAGGED):
            assert difference(folder, model, lengths, seed=seed) <= TOLERANCE, lengths

    @pytest.mark.parametrize(
        "options", [{}, dict(ctx_batch_size=1, is_continuous_batching=True)], ids=["rows", "slots"]
    )
    def test_nki_kernels(self, options, random_checkpoints):
        """The kernels run in NKI's simulator, or in this package's emulator if there is none."""
        sizes = dict(layer_types=("mamba", "attention", "mamba"), mamba_n_heads=4, mamba_d_head=32, mamba_d_state=64)
        folder = random_checkpoints(Case("kernels", sizes))
        kernels = dict(prefill_scan="ssd", decode_kernel="nki")
        model = nxdi.cpu_model(folder, kernels, batch_size=3, **options)
        assert state_of(model)[1].shape == (3, 64, 4, 32)
        for seed, lengths in enumerate(RAGGED[:3]):
            assert difference(folder, model, lengths, seed=seed) <= TOLERANCE, lengths

    @pytest.mark.parametrize(
        "options", [{}, dict(ctx_batch_size=1, is_continuous_batching=True)], ids=["rows", "slots"]
    )
    def test_nki_kernel_for_experts(self, options, random_checkpoints, monkeypatch):
        """The kernel runs in context encoding, and in decode with a sequence in every row or in some rows only."""
        from granite4_neuron.devices.neuron.nxdi import feed_forward

        sizes = dict(hidden_size=128, mamba_n_heads=16, mamba_d_head=16, num_local_experts=8)
        folder = random_checkpoints(Case("kernel_for_experts", sizes))
        model = nxdi.cpu_model(folder, {"expert_path": "nki"}, batch_size=3, **options)
        launches = []
        launch = feed_forward.launch
        monkeypatch.setattr(feed_forward, "launch", lambda *a, **k: launches.append(a) or launch(*a, **k))
        for seed, lengths in enumerate(RAGGED[:3]):
            assert difference(folder, model, lengths, seed=seed) <= TOLERANCE, lengths
        kernels = {kernel.function.__name__ for kernel, *_ in launches}
        assert kernels == ({"experts_decode"} if options else {"experts_decode", "experts_prefill"})
        if options:
            assert difference(folder, model, [50], [1]) <= TOLERANCE
            _, x, *_, slots, _ = launches[-1]
            assert len(x) == 3 and (slots < 8).sum() <= model.config.granite.num_experts_per_tok

    @pytest.mark.parametrize("form", ["kernel", "gather"])
    def test_each_form_of_experts_gives_the_logits(self, form, random_checkpoints):
        """Logits are right in these forms, as in the default, all experts at once. Short prompts use the form too."""
        sizes = dict(layer_types=("attention",), hidden_size=128, mamba_n_heads=16, num_local_experts=24)
        folder = random_checkpoints(Case("forms_of_experts", sizes))
        model = nxdi.cpu_model(folder, {"experts_decode": form})
        assert difference(folder, model, [5]) <= TOLERANCE

    def test_experts_by_nxd(self, moe_folder):
        """NxD's own module multiplies block by block in torch in CPU mode."""
        model = nxdi.cpu_model(moe_folder, {"expert_path": "nxd"})
        for length in (3, 40, 128, 200):
            assert difference(moe_folder, model, [length]) <= TOLERANCE, length

    @pytest.mark.parametrize("seq_ids", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
    def test_continuous_batching(self, moe_folder, continuous, seq_ids):
        """Each sequence has a slot, in any order."""
        for seed, lengths in enumerate(RAGGED):
            assert difference(moe_folder, continuous, lengths, seq_ids, seed) <= TOLERANCE, lengths

    def test_sequences_come_and_go(self, moe_folder, continuous):
        """Sequences are prefilled while others decode, a step has fewer rows than slots, and a slot is used again."""
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

    @torch.inference_mode()
    def test_what_is_not_used_may_be_infinite(self, moe_folder):
        """Embeddings of padding, and the end of a broken sequence that had the slot before."""
        model = nxdi.cpu_model(moe_folder, batch_size=3, ctx_batch_size=1, is_continuous_batching=True)
        tokens = random_tokens(model.config.vocab_size // 2, 1, 124) + model.config.vocab_size // 4
        used = tokens.unique()
        for part in model.models:
            weight = part.model.embed_tokens.weight
            weight.copy_(torch.full_like(weight, torch.inf).index_copy(0, used, weight[used]))
        nxdi.prefill(model, [tokens[0, :120]], [1])
        for length in range(120, nxdi.BUCKET + 4):
            nxdi.decode(model, [0], [length], [1])
        logits = [nxdi.prefill(model, [tokens[0, :120]], [1])]
        logits += [nxdi.decode(model, [int(tokens[0, length])], [length], [1]) for length in range(120, 124)]
        expected = reference_logits(moe_folder, tokens)[0, 119:]
        assert (torch.cat(logits) - expected)[:, used].abs().max() <= TOLERANCE

    @torch.inference_mode()
    @pytest.mark.parametrize("length", PROMPTS)
    def test_positions_replace_an_attention_mask(self, moe_folder, continuous, length):
        """As in vLLM, positions alone tell how long a prompt is and how many tokens precede a decoded one."""
        tokens = random_tokens(continuous.config.vocab_size, 1, length + STEPS, seed=length)
        positions = torch.arange(length + STEPS)[None]
        logits = []
        for start, end in [(0, length), *((step, step + 1) for step in range(length, length + STEPS))]:
            output = continuous(
                input_ids=tokens[:, start:end], position_ids=positions[:, start:end], seq_ids=torch.tensor([1])
            )
            logits.append(output.logits[:, -1])
        expected = nxdi.at(reference_logits(moe_folder, tokens), [length], STEPS)
        assert (torch.stack(logits, dim=1) - expected).abs().max() <= TOLERANCE

    @pytest.mark.parametrize("length", [20, 200])
    def test_prefill_leaves_other_slots_alone(self, continuous, length):
        tokens = random_tokens(continuous.config.vocab_size, 3, 200)
        nxdi.prefill(continuous, [row[:30] for row in tokens], [0, 1, 2])
        before = [tensor.clone() for tensor in state_of(continuous)]
        nxdi.prefill(continuous, [tokens[0, :length].flip(0)], [1])
        for old, new in zip(before, state_of(continuous), strict=True):
            assert torch.equal(old[[0, 2]], new[[0, 2]])
            assert not torch.equal(old[1], new[1])

    def test_decode_leaves_slots_without_a_row_alone(self, continuous):
        tokens = random_tokens(continuous.config.vocab_size, 3, 40)
        nxdi.prefill(continuous, [row[:30] for row in tokens], [0, 1, 2])
        before = [tensor.clone() for tensor in state_of(continuous)]
        nxdi.decode(continuous, [5], [30], [1])
        length = continuous.neuron_config.max_length - 1  # no later token reads the last position
        for old, new in zip(before, state_of(continuous), strict=True):
            assert torch.equal(old[[0, 2], :, :length], new[[0, 2], :, :length])
            assert not torch.equal(old[1], new[1])

    def test_generates_the_reference_texts(self):
        """NxD Inference's generate runs the small trained checkpoint, whose tokens change with a wrong state."""
        folder = bundled_checkpoint()
        tokenizer = open_checkpoint(folder).load_tokenizer()
        texts = [*TEXTS, "A"]  # "A" is one token
        model = nxdi.cpu_model(folder, batch_size=len(texts), enable_bucketing=True, context_encoding_buckets=[16])
        expected = reference_texts(folder, tokenizer, texts, 48)
        assert torch.equal(generated_texts(model, tokenizer, texts, 48), expected)

    def test_runtime_generates_the_texts_of_the_cpu_runtime(self):
        """The package's own generation runs over the model of NxD Inference."""
        from granite4_neuron.devices.neuron.nxdi import NeuronRuntime

        ours, tokenizer = load(dtype=torch.float32)
        slots = dict(batch_size=3, ctx_batch_size=1, is_continuous_batching=True)
        runtime = NeuronRuntime(nxdi.cpu_model(bundled_checkpoint(), **slots), ours.generation_config)
        # One more than there are slots: it waits.
        prompts, options = [TEXTS[0], "A", TEXTS[1] * 8, "B"], dict(max_tokens=40, temperature=0)
        assert generate(runtime, tokenizer, prompts, **options) == generate(ours, tokenizer, prompts, **options)
        with pytest.raises(UserError, match="compiled for 3 sequences of 256 tokens, and 4 of"):
            Engine(runtime, 4)
        with pytest.raises(UserError, match="must be compiled with is_continuous_batching"):
            NeuronRuntime(nxdi.cpu_model(bundled_checkpoint()), ours.generation_config)

    def test_runtime_is_as_accurate_as_the_others(self):
        """The check command compares them. Logits of a prompt are those of its last token only."""
        from granite4_neuron.devices.neuron.nxdi import NeuronRuntime

        slots = dict(batch_size=3, ctx_batch_size=1, is_continuous_batching=True)
        runtime = NeuronRuntime(nxdi.cpu_model(bundled_checkpoint(), **slots), GenerationConfig())
        _, tokenizer = load()
        report = accuracy.measure(bundled_checkpoint(), [tokenizer.encode(text) for text in TEXTS[:3]], 8, runtime)
        assert report.passed() and report.overall().tokens == 3 * 9
        assert report.phase(prefill=True).tokens == 3 and report.positions(0, 1) is None

    def test_runtime_names_unsupported_calls(self, continuous):
        from granite4_neuron.devices.neuron.nxdi import NeuronRuntime

        runtime, row = NeuronRuntime(continuous, GenerationConfig()), Row(1, 0, [1, 2])
        attempts = {
            "all_logits": lambda: runtime.step(None, [row], all_logits=True),
            "verify": lambda: runtime.verify(None, [row]),
            "snapshot": lambda: runtime.snapshot(None, 1, 3),
            "decode": lambda: runtime.decode(None, [Row(1, 2, [3])]),
            "adapters": lambda: runtime.unload_adapter("a"),
            "hidden_states": lambda: runtime.step_with_hidden_states(None, [row]),
        }
        assert attempts.keys() == runtime.cannot.keys()
        for ability, attempt in attempts.items():
            for refused in (attempt, lambda ability=ability: require(runtime, ability)):
                with pytest.raises(UserError) as error:
                    refused()
                assert str(error.value) == runtime.cannot[ability]

    def test_tokens_and_logits_from_the_graph(self, moe_folder):
        """On-device sampling returns tokens and, with output_logits, also the logits that they were chosen from."""
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

    @torch.inference_mode()
    def test_captured_tensors(self, moe_folder, monkeypatch):
        """Hidden states of every step are captured. A prompt longer than the bucket returns the last step's."""
        monkeypatch.setattr(compiled_graphs, "CONTINUATION_TOKENS", 64)
        model = nxdi.cpu_model(moe_folder, batch_size=2, **CAPTURE)
        tokens = random_tokens(model.config.vocab_size, 2, 202)
        expected = reference_hidden_states(moe_folder, tokens)
        step = dict(input_ids=tokens[:, :40], position_ids=torch.arange(40).expand(2, -1))
        check_captured(model(**step), 40, expected[:, :, :40])
        for length in (40, 41):
            step = dict(input_ids=tokens[:, length, None], position_ids=torch.full((2, 1), length))
            check_captured(model(**step), 1, expected[:, :, length, None])
        step = dict(input_ids=tokens[:, :200], position_ids=torch.arange(200).expand(2, -1))
        check_captured(model(**step), 200 - 192, expected[:, :, 192:200])

    @torch.inference_mode()
    def test_captured_tensors_have_the_order_of_the_rows(self, moe_folder):
        slots = dict(batch_size=2, ctx_batch_size=1, is_continuous_batching=True)
        model = nxdi.cpu_model(moe_folder, **slots, **CAPTURE)
        tokens, seq_ids = random_tokens(model.config.vocab_size, 2, 31), torch.tensor([1, 0])
        for row, slot in zip(tokens[:, None, :30], seq_ids, strict=True):
            model(input_ids=row, position_ids=torch.arange(30)[None], seq_ids=slot[None])
        output = model(input_ids=tokens[:, 30:], position_ids=torch.full((2, 1), 30), seq_ids=seq_ids)
        check_captured(output, 1, reference_hidden_states(moe_folder, tokens)[:, :, 30:])

    def test_buckets(self, moe_folder):
        """Buckets of context encoding, token generation and continuations: a small one pads less and gives the same."""
        model = nxdi.cpu_model(
            moe_folder,
            batch_size=2,
            enable_bucketing=True,
            context_encoding_buckets=[32, 64],
            token_generation_buckets=[64, 160, 256],
        )
        assert model.prefill_continuation_model.neuron_config.buckets == [160, 256]
        assert model.prefill_continuation_model.neuron_config.n_active_tokens == 64
        for lengths in ((5, 20), (32, 7), (33, 63), (64, 1), (65, 3), (160, 2), (240, 129)):
            assert difference(moe_folder, model, lengths) <= TOLERANCE, lengths

    def test_a_prompt_that_fills_a_bucket_runs_in_it(self, moe_folder, monkeypatch):
        model = nxdi.cpu_model(moe_folder, enable_bucketing=True, context_encoding_buckets=[32, 64, 128])
        seen = graph_lengths(model, monkeypatch)
        for length in (31, 32, 33, 64, 65, 128):
            nxdi.run(model, random_tokens(model.config.vocab_size, 1, length), [length], 0)
        assert seen == [32, 32, 64, 64, 128, 128]

    @pytest.mark.parametrize(
        ("buckets", "longest", "rows"),
        [
            ([32, 64, 128], 256, [(0, 31), (0, 128), (0, 129), (0, 192), (0, 256), (20, 50), (70, 210)]),
            ([32], 256, [(0, 100)]),
            ([32, 64], 64, [(0, 64), (20, 23)]),  # without graphs that continue a prompt
        ],
    )
    def test_pieces_of_prompts_are_those_that_plan_expects(self, buckets, longest, rows, moe_folder, monkeypatch):
        from granite4_neuron.devices.neuron.nxdi import NeuronRuntime

        monkeypatch.setattr(compiled_graphs, "CONTINUATION_TOKENS", 64)
        slots = dict(batch_size=2, ctx_batch_size=1, is_continuous_batching=True)
        sizes = dict(max_context_length=buckets[-1], seq_len=longest)
        model = nxdi.cpu_model(moe_folder, enable_bucketing=True, context_encoding_buckets=buckets, **slots, **sizes)
        runtime, seen = NeuronRuntime(model, GenerationConfig()), graph_lengths(model, monkeypatch)
        for start, stop in rows:
            seen.clear()
            runtime.step(None, [Row(1, start, [5] * (stop - start))])
            assert seen == GraphOptions(context_buckets=buckets).prompt_pieces(start, stop, longest), (start, stop)

    @pytest.mark.parametrize("context_length", [nxdi.BUCKET, nxdi.MAX_LENGTH])
    def test_longest_prompts(self, context_length, moe_folder):
        """Prompts may be as long as the cache, with and without continuations. A refused prompt leaves no state."""
        model = nxdi.cpu_model(moe_folder, batch_size=2, max_context_length=context_length)
        assert (model.prefill_continuation_model is None) == (context_length == nxdi.MAX_LENGTH)
        tokens, lengths = random_tokens(model.config.vocab_size, 2, nxdi.MAX_LENGTH + 1), (nxdi.MAX_LENGTH, 130)
        expected = nxdi.at(reference_logits(moe_folder, tokens[:, : nxdi.MAX_LENGTH]), lengths, 0)
        assert (nxdi.run(model, tokens, lengths, 0) - expected).abs().max() <= TOLERANCE
        with pytest.raises(ValueError, match=f"Input len {nxdi.MAX_LENGTH + 1} exceeds largest bucket"):
            nxdi.run(model, tokens, (3, nxdi.MAX_LENGTH + 1), 0)
        assert difference(moe_folder, model, (33, 120)) <= TOLERANCE

    def test_bfloat16(self, random_checkpoints):
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
            logits = nxdi.run(model, tokens, [100], STEPS)
            ours.append((logits - exact).abs().mean())
            rounded = nxdi.at(reference_logits(folder, tokens, torch.bfloat16), [100], STEPS)
            theirs.append((rounded - exact).abs().mean())
        assert sum(ours) <= sum(theirs)
        products = logits * model.config.granite.logits_scaling
        assert (products - products.bfloat16()).abs().max() < 1e-5, "they are rounded once, before they are divided"

    @pytest.mark.parametrize("name", TP_CASES)
    def test_two_ranks(self, name, two_ranks, random_checkpoints):
        folder = random_checkpoints(CASE[name])
        tokens = random_tokens(config_from_file(folder / "config.json").vocab_size, 3, 200 + STEPS)
        expected = expected_logits(folder, tokens)
        for rank in two_ranks:
            for logits, lengths in zip(rank["ragged"][TP_CASES.index(name)], RAGGED, strict=False):
                assert (logits - nxdi.at(expected, lengths, STEPS)).abs().max() <= TOLERANCE

    def test_two_ranks_alone_and_by_slot(self, two_ranks, random_checkpoints):
        """One sequence runs with prompts of all lengths, and sequences run in slots out of order."""
        folder = random_checkpoints(CASE[TP_CASES[0]])
        tokens = random_tokens(config_from_file(folder / "config.json").vocab_size, 3, 200 + STEPS)
        expected = expected_logits(folder, tokens)
        for rank in two_ranks:
            for logits, length in zip(rank["alone"], PROMPTS, strict=True):
                assert (logits - nxdi.at(expected[:1], [length], STEPS)).abs().max() <= TOLERANCE, length
            for logits, lengths in zip(rank["by_slot"], RAGGED, strict=False):
                assert (logits - nxdi.at(expected, lengths, STEPS)).abs().max() <= TOLERANCE, lengths


def scaled_attention_output(model, patch):
    """Compute attention with the softmax scale 1 / sqrt(head_dim), and multiply its output by attention_multiplier."""
    granite = model.config.granite
    for layer in model.token_generation_model.model.layers:
        if not layer.is_mamba:
            patch.setattr(layer.self_attn, "softmax_scale", math.sqrt(granite.head_dim))
            weight = layer.self_attn.o_proj.o_proj.weight
            patch.setattr(weight, "data", weight.data * granite.attention_multiplier)


def padding_where_positions_are_zero(model, patch):
    from granite4_neuron.devices.neuron.nxdi import modeling

    correct = modeling._positions

    def positions(input_ids, attention_mask, position_ids, seq_ids):
        if input_ids.shape[1] == 1:
            return correct(input_ids, attention_mask, position_ids, seq_ids)
        return position_ids.where(position_ids > 0, -1)

    patch.setattr(modeling, "_positions", positions)


def state_in_bfloat16(model, patch):
    from granite4_neuron.devices.neuron.nxdi.state import NeuronStep

    correct = NeuronStep.write
    patch.setattr(NeuronStep, "write", lambda self, state, rows: correct(self, state, rows.bfloat16().to(rows.dtype)))


def state_not_reset(model, patch):
    from granite4_neuron.devices.neuron.nxdi.state import NeuronStep

    patch.setattr(NeuronStep, "read", lambda self, state: self.rows_of(state).clone())


def router_softmax_over_all_experts(model, patch):
    from granite4_neuron.devices.neuron.nxdi import feed_forward

    def over_all(logits, top_k):
        weights, chosen = logits.softmax(-1).topk(top_k)
        return weights, chosen

    patch.setattr(feed_forward, "topk_softmax", over_all)


BUGS = (
    scaled_attention_output,
    padding_where_positions_are_zero,
    state_in_bfloat16,
    state_not_reset,
    router_softmax_over_all_experts,
)


@pytest.mark.usefixtures("cpu_mode")
class TestBugsAreSeen:
    """Each of these planted bugs fails the comparison of TestCpuMode."""

    @pytest.fixture(scope="class")
    def model(self, cpu_mode, moe_folder):
        return nxdi.cpu_model(moe_folder)

    @pytest.mark.parametrize("bug", BUGS)
    def test_a_planted_bug_fails(self, bug, model, moe_folder, monkeypatch):
        assert difference(moe_folder, model, [40]) <= TOLERANCE
        bug(model, monkeypatch)
        assert difference(moe_folder, model, [40]) > 3 * TOLERANCE


GRAPHS = ("context_encoding_model", "token_generation_model", "prefill_continuation_model")
RESULTS = {
    "logits": dict(batch_size=2),
    "tokens": dict(on_device_sampling_config={"do_sample": False}, batch_size=2),
    "tokens and logits": dict(on_device_sampling_config={"do_sample": False}, output_logits=True, batch_size=2),
    "captured tensors": dict(**CAPTURE, batch_size=2),
    "continuous batching": dict(batch_size=3, ctx_batch_size=1, is_continuous_batching=True),
}


def check_aliases(wrapper):
    """Check that each state tensor has its own output after the tokens, logits and captured tensors, in order."""
    instance = wrapper.get_model_instance()
    instance.load_module()
    module, aliases = instance.get(0)
    states, capture = list(module.kv_mgr.past_key_values), wrapper.neuron_config.tensor_capture_config
    first = (2 if wrapper.neuron_config.output_logits else 1) + (capture.get_offset() if capture else 0)
    assert len(states) == 2 * wrapper.config.num_hidden_layers == len(aliases)
    assert aliases == input_output_aliases(states, first)
    with torch.inference_mode():
        outputs = module(*wrapper.input_generator()[0])
    assert len(outputs) == first + len(states)
    for state, output in zip(states, outputs[first:], strict=True):
        assert output.shape == state.shape and output.dtype == state.dtype


def dropped_alias(get):
    def get_without_the_last(self, *args, **kwargs):
        module, aliases = get(self, *args, **kwargs)
        return module, dict(list(aliases.items())[:-1])

    return get_without_the_last


@pytest.mark.usefixtures("cpu_mode")
class TestGraphs:
    """A graph's outputs alias its state inputs by index, so the state stays on the device."""

    @pytest.fixture(scope="class", params=RESULTS.values(), ids=RESULTS.keys())
    def model(self, request, cpu_mode, moe_folder):
        return nxdi.cpu_model(moe_folder, **request.param)

    @pytest.mark.parametrize("graph", GRAPHS)
    def test_each_state_tensor_has_its_output(self, graph, model):
        check_aliases(getattr(model, graph))

    def test_a_dropped_alias_is_seen(self, model, monkeypatch):
        from neuronx_distributed_inference.models.model_wrapper import DecoderModelInstance

        monkeypatch.setattr(DecoderModelInstance, "get", dropped_alias(DecoderModelInstance.get))
        with pytest.raises(AssertionError):
            check_aliases(model.token_generation_model)

    @torch.inference_mode()
    def test_the_order_is_that_of_hybrid_state(self, cpu_mode, moe_folder):
        """The state equals the CPU runtime's, index by index, after context encoding, continuation and decode."""
        model, ours = nxdi.cpu_model(moe_folder), load_model(moe_folder, torch.float32)
        tokens = random_tokens(model.config.vocab_size, 1, 202)
        nxdi.run(model, tokens, [200], 2)
        state = HybridState.allocate(ours.config, 1, 202, torch.float32)
        ours(tokens, step_of(torch.arange(202)[None], torch.tensor([202]), torch.tensor([1]), state), state)
        for index, (tensor, expected) in enumerate(zip(state_of(model), state.tensors(), strict=True)):
            if ours.config.layer_types[index // 2] == "attention":
                tensor = tensor[:, :, :202]
            assert (tensor - expected[1:]).abs().max() <= 1e-5

    @pytest.mark.parametrize("graph", GRAPHS)
    def test_mamba_layers_have_no_findings(self, graph, cpu_mode, tmp_path):
        """The graph is traced from a model in CPU mode."""
        import torch_xla

        config = small_config(layer_types=("mamba",) * 2, mamba_n_groups=2, **DENSE)
        save_model(random_model(config), tmp_path / "model")
        options = dict(batch_size=3, ctx_batch_size=1, is_continuous_batching=True)
        wrapper = getattr(nxdi.cpu_model(tmp_path / "model", **options), graph)
        model = wrapper.model_cls(wrapper.config).eval().to(torch_xla.device())
        inputs = [tensor.to(torch_xla.device()) for tensor in wrapper.input_generator()[0]]
        torch_xla.sync()
        with torch.no_grad():
            outputs = model(*inputs)
        assert findings(torch_xla._XLAC._get_xla_tensors_hlo(outputs)) == []


NEURON_DEVICE = Path("/dev/neuron0")


@pytest.mark.skipif(not NEURON_DEVICE.exists(), reason=f"no Neuron device here ({NEURON_DEVICE})")
class TestNeuronDevice:
    """The model is compiled by the Neuron SDK and runs on a device."""

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory):
        from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

        folder, compiled = bundled_checkpoint(), str(tmp_path_factory.mktemp("compiled"))
        config = nxdi.make_config(folder, tp_degree=TP_DEGREE, batch_size=len(TEXTS), on_cpu=False)
        model = NeuronGraniteMoeHybridForCausalLM(str(folder), config)
        model.compile(compiled)
        model.load(compiled)
        return model

    def test_logits(self, model):
        """Logits equal transformers' for prompts in and beyond the bucket, and a second run starts from nothing."""
        for lengths in ((1, 2, 3, 40, 100, nxdi.BUCKET, 17, 64), (200, 1, 130, 128, 129, 5, 90, 33)):
            tokens = random_tokens(model.config.vocab_size, len(lengths), max(lengths) + STEPS)
            logits = nxdi.run(model, tokens, lengths, STEPS)
            expected = nxdi.at(reference_logits(bundled_checkpoint(), tokens), lengths, STEPS)
            found = Difference.between(logits.flatten(0, 1), expected.flatten(0, 1))
            assert found.maximum <= 1e-2 and found.top1_agreement >= 0.99, found

    @torch.inference_mode()
    def test_hidden_states(self, tmp_path):
        """Hidden states after each layer except the last, in prefill and decode, show which layer is wrong."""
        from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

        folder = bundled_checkpoint()
        layers = [f"layers.{index}" for index in range(config_from_file(folder / "config.json").num_hidden_layers - 1)]
        capture = dict(CAPTURE, tensor_capture_config=dict(modules_to_capture=layers))
        config = nxdi.make_config(folder, tp_degree=TP_DEGREE, on_cpu=False, **capture)
        model = NeuronGraniteMoeHybridForCausalLM(str(folder), config)
        model.compile(str(tmp_path))
        model.load(str(tmp_path))
        tokens = random_tokens(config.vocab_size, 1, 41)
        expected = reference_hidden_states(folder, tokens)[1:]
        positions = torch.arange(41)[None]
        for name, step in (("prefill", slice(0, 40)), ("decode", slice(40, 41))):
            output = model(input_ids=tokens[:, step], position_ids=positions[:, step])
            found = [captured[:, : step.stop - step.start].cpu() for captured in output.captured_tensors]
            errors = [
                ((ours - theirs).norm() / theirs.norm()).item()
                for ours, theirs in zip(found, expected[:, :, step], strict=True)
            ]
            print(name, ", ".join(f"{layer}: {error:.1e}" for layer, error in zip(layers, errors, strict=True)))
            assert max(errors) <= 1e-2

    def test_logits_pass_the_check_of_nxd_inference(self, model):
        """The check is in a package of the SDK. It raises where a logit is off by more than 2 %."""
        from neuronx_distributed_inference.utils.accuracy import check_accuracy_logits_v2, generate_expected_logits
        from transformers import GenerationConfig

        input_ids = random_tokens(model.config.vocab_size, len(TEXTS), 40)
        mask = torch.ones_like(input_ids)
        options = GenerationConfig(do_sample=False, top_k=1, eos_token_id=None, pad_token_id=0)
        expected = generate_expected_logits(model, input_ids, mask, options, num_tokens=STEPS)
        check_accuracy_logits_v2(
            model, expected, input_ids, mask, options, tol_map={"all": (1e-5, 0.02)}, num_tokens_to_check=STEPS
        )

    def test_generates_the_reference_texts(self, model):
        tokenizer = open_checkpoint(bundled_checkpoint()).load_tokenizer()
        expected = reference_texts(bundled_checkpoint(), tokenizer, TEXTS, 48)
        texts = generated_texts(model, tokenizer, list(TEXTS), 48)
        assert (texts == expected).double().mean() >= 0.95
        print(tokenizer.batch_decode(texts))

    def test_throughput(self, model, record_property):
        """Throughput is measured and reported, not judged."""
        lengths = [nxdi.BUCKET] * len(TEXTS)
        tokens = random_tokens(model.config.vocab_size, len(TEXTS), nxdi.BUCKET + 64)
        nxdi.run(model, tokens, lengths, 4)
        start = time.perf_counter()
        nxdi.run(model, tokens, lengths, 64)
        rate = 64 * len(TEXTS) / (time.perf_counter() - start)
        record_property("tokens_per_second", rate)
        print(f"{rate:.0f} tokens/s with {len(TEXTS)} sequences, prefill of {nxdi.BUCKET} tokens included")
