"""Greedy texts of NxD Inference's fused speculation, in its CPU mode, are those of plain decode."""

from dataclasses import replace

import pytest
import torch

from granite4_neuron import load
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint
from granite4_neuron.checkpoint.random_weights import random_model
from granite4_neuron.checkpoint.saving import save_model
from granite4_neuron.config import ATTENTION, config_from_file
from granite4_neuron.errors import UserError
from granite4_neuron.generation import bundled_checkpoint
from test.integration.test_model import cpu_mode  # noqa: F401 (a fixture)
from test.support import nxdi

TOKENS, NEW = 4, 48
PROMPTS = ("An assignment statement", "The import statement", "A class", "Lambda expressions", "A", "The try statement")
SLOTS = dict(batch_size=3, ctx_batch_size=1, is_continuous_batching=True)

pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("cpu_mode")]


@pytest.fixture(scope="module")
def tokenizer():
    folder = bundled_checkpoint()
    return open_checkpoint(folder).load_tokenizer()


@pytest.fixture(scope="module")
def texts(tokenizer):
    """Return the tokens that plain decode of this package's CPU runtime gives for each prompt."""
    ours, _ = load(dtype=torch.float32)
    expected = []
    for prompt in prompts_of(tokenizer):
        state, tokens = ours.allocate(1, 256), list(prompt)
        from granite4_neuron.runtime.interface import Row

        done = 0
        for _ in range(NEW):
            logits = ours.step(state, [Row(1, done, tokens[done:])])
            done = len(tokens)
            tokens.append(int(logits[0].argmax()))
        expected.append(tokens[len(prompt) :])
    return expected


def prompts_of(tokenizer):
    return [tokenizer(text).input_ids for text in (*PROMPTS[:-1], PROMPTS[-1] * 30)]  # the last is beyond the bucket


def noisy(folder, share):
    """Write the bundled checkpoint with noise in its weights, so that only some of its drafts are right."""
    model, generator = load_model(bundled_checkpoint(), torch.float32), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += share * weight.std() * torch.randn(weight.shape, generator=generator)
    save_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return noisy(tmp_path_factory.mktemp("draft") / "model", 0.15)


def fused_model(draft, kernels=None, **options):
    options = dict(on_device_sampling_config=dict(do_sample=False), **options)
    model = application(draft, nxdi.make_config(draft, kernels, **options), kernels, **options)
    model.to_cpu()
    return model


def application(draft, draft_config, kernels=None, **options):
    """Return the application of the bundled model with a draft model of that folder and config."""
    from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig

    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM
    from granite4_neuron.devices.neuron.nxdi.speculative_model import SpeculativeModel

    speculation = dict(speculation_length=TOKENS, enable_fused_speculation=True)
    config = nxdi.make_config(bundled_checkpoint(), kernels, **speculation, **options)
    config.fused_spec_config = FusedSpecNeuronConfig(SpeculativeModel, draft_config, str(draft))
    return NeuronGraniteMoeHybridForCausalLM(str(bundled_checkpoint()), config)


@torch.inference_mode()
def start(model, prompts, seq_ids=None):
    """Run the prompts and return the first new token of each."""
    longest = max(map(len, prompts))
    mask = torch.arange(longest) < torch.tensor([len(prompt) for prompt in prompts])[:, None]
    output = model(
        input_ids=torch.tensor([[*prompt, *[3] * (longest - len(prompt))] for prompt in prompts]),
        attention_mask=mask.long(),
        position_ids=torch.arange(longest).where(mask, 1),
        seq_ids=torch.tensor(seq_ids or range(len(prompts))),
    )
    return [[int(token)] for token in output.fused_outputs[0][:, 0]]


@torch.inference_mode()
def go_on(model, prompts, new, seq_ids=None):
    """Run one step: add the accepted tokens to `new`, and return their number for each row."""
    lengths = torch.tensor([len(prompt) + len(tokens) - 1 for prompt, tokens in zip(prompts, new, strict=True)])
    output = model(
        input_ids=torch.tensor([tokens[-1:] for tokens in new]),
        attention_mask=(torch.arange(int(lengths.max())) < lengths[:, None]).long(),
        position_ids=lengths[:, None],
        seq_ids=torch.tensor(seq_ids or range(len(prompts))),
    )
    accepted = [[int(token) for token in row if token >= 0] for row in output.fused_outputs[0]]
    for tokens, more in zip(new, accepted, strict=True):
        tokens.extend(more)
    return [len(more) for more in accepted]


def run(model, prompts, seq_ids=None):
    """Run all prompts in one batch; return the new tokens of each and the numbers accepted in each step."""
    model.reset()
    new, counts = start(model, prompts, seq_ids), []
    while min(map(len, new)) < NEW:
        counts += go_on(model, prompts, new, seq_ids)
    return [tokens[:NEW] for tokens in new], counts


def one_by_one(model, prompts):
    runs = [run(model, [prompt]) for prompt in prompts]
    return [new[0] for new, _ in runs], [count for _, counts in runs for count in counts]


def test_texts_are_right_for_every_count_of_accepted_tokens(draft, tokenizer, texts):
    new, counts = one_by_one(fused_model(draft), prompts_of(tokenizer))
    assert new == texts
    assert set(counts) == set(range(1, TOKENS + 1))


def test_the_nki_kernel(draft, tokenizer, texts):
    """The kernel drafts, verifies and commits in both models. Prompts are scanned in torch, in its state layout."""
    new, counts = one_by_one(fused_model(draft, dict(decode_kernel="nki")), prompts_of(tokenizer)[:3])
    assert new == texts[:3] and len(set(counts)) > 2


def test_a_draft_without_mamba_layers(tokenizer, texts, tmp_path):
    config = config_from_file(bundled_checkpoint() / "config.json")
    few = replace(config, layer_types=(ATTENTION,) * 2, num_hidden_layers=2)
    save_model(random_model(few), tmp_path / "draft")
    new, _ = one_by_one(fused_model(tmp_path / "draft"), prompts_of(tokenizer)[-2:])
    assert new == texts[-2:]


def test_ragged_batches(draft, tokenizer, texts):
    """Rows have different lengths and accept different numbers of tokens."""
    prompts = prompts_of(tokenizer)
    new, counts = run(fused_model(draft, batch_size=len(prompts)), prompts)
    assert new == texts and len(set(counts)) == TOKENS


def test_continuous_batching(draft, tokenizer, texts):
    """Slots are in any order, rows are fewer than slots, sequences come and go, and a slot is used again."""
    prompts, model = prompts_of(tokenizer), fused_model(draft, **SLOTS)
    slot, new = {}, {}

    def begin(number, seq_id):
        slot[number] = seq_id
        (new[number],) = start(model, [prompts[number]], [seq_id])

    def steps(count, *numbers):
        for _ in range(count):
            rows = [new[number] for number in numbers]
            go_on(model, [prompts[number] for number in numbers], rows, [slot[number] for number in numbers])

    begin(0, 2)
    steps(2, 0)
    begin(1, 0)
    steps(3, 0, 1)
    steps(2, 1)
    begin(5, 1)
    steps(3, 5, 0, 1)
    begin(2, 0)
    steps(6, 2, 0, 5)
    for number, tokens in new.items():
        assert len(tokens) > 6 and tokens[:NEW] == texts[number][: len(tokens)]
    two, _ = run(model, prompts[3:6], [1, 2, 0])
    assert two == texts[3:6]


def test_generate_of_nxd_inference(draft, tokenizer, texts):
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
    from transformers import GenerationConfig

    prompt = torch.tensor([prompts_of(tokenizer)[0]])
    options = GenerationConfig(max_new_tokens=40, do_sample=False, top_k=1, eos_token_id=-1, pad_token_id=0)
    options.prompt_lookup_num_tokens = TOKENS  # this tells the adapter to look for several tokens in a step
    adapter = HuggingFaceGenerationAdapter(fused_model(draft))
    output = adapter.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=options)
    tokens = output[0, prompt.shape[1] :].tolist()
    assert len(tokens) > 30 and tokens == texts[0][: len(tokens)]


def test_its_prefix_of_weights_is_not_left_on_the_class(draft):
    """NxD Inference sets the prefix on the class, and every later model would have it."""
    model = fused_model(draft)
    assert "_FUSED_PREFIX" not in vars(type(model)) and model._FUSED_PREFIX == ""
    assert "lm_head.weight" in nxdi.cpu_model(draft).checkpoint_loader_fn()


def commit_of_all_drafts(patch):
    from granite4_neuron.devices.neuron.nxdi.speculative_model import SpeculativeModel as Model

    correct = Model.advance
    patch.setattr(Model, "advance", lambda self, kept, at, accepted: correct(self, kept, at, 0 * accepted + TOKENS))


def commit_without_the_window(patch):
    from granite4_neuron.devices.neuron.nxdi.fused_speculation import FusedSpeculationModel as Fused

    correct = Fused._commit

    def commit(model, inputs, position_ids, accepted, outputs, first):
        before = list(outputs)
        correct(model, inputs, position_ids, accepted, outputs, first)
        for idx, _ in model.mamba_layers():
            outputs[first + 2 * idx] = before[first + 2 * idx]

    patch.setattr(Fused, "_commit", staticmethod(commit))


def no_commit(patch):
    from granite4_neuron.devices.neuron.nxdi.fused_speculation import FusedSpeculationModel as Fused

    patch.setattr(Fused, "_commit", staticmethod(lambda *args: None))


@pytest.mark.parametrize("bug", [commit_of_all_drafts, commit_without_the_window, no_commit])
def test_a_bug_is_seen(bug, draft, tokenizer, texts, monkeypatch):
    bug(monkeypatch)
    new, _ = one_by_one(fused_model(draft), prompts_of(tokenizer)[:3])
    assert new != texts[:3]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(on_device_sampling_config=dict(do_sample=True)), "needs on_device_sampling_config with do_sample=False"),
        (dict(on_device_sampling_config=dict(dynamic=True)), "and dynamic=False"),  # as vLLM's plugin asks for it
        (dict(on_device_sampling_config=dict(do_sample=False), output_logits=True), "output_logits is set"),
    ],
)
def test_unsupported_sampling_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        nxdi.make_config(bundled_checkpoint(), speculation_length=TOKENS, enable_fused_speculation=True, **options)


def test_without_a_draft_model():
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM

    options = dict(on_device_sampling_config=dict(do_sample=False), enable_fused_speculation=True, speculation_length=4)
    with pytest.raises(UserError, match="with a draft model"):
        NeuronGraniteMoeHybridForCausalLM("", nxdi.make_config(bundled_checkpoint(), **options))


GREEDY = dict(on_device_sampling_config=dict(do_sample=False))
OTHER = {
    "batch_size": (dict(batch_size=2), "max_batch_size is 3 and the draft model's is 2"),
    "shorter": (dict(seq_len=192), "seq_len is 256 and the draft model's is 192"),
    "longer": (dict(seq_len=512), "seq_len is 256 and the draft model's is 512"),
    "prompts": (dict(max_context_length=64), "max_context_length is 128 and the draft model's is 64"),
    "batching": (dict(is_continuous_batching=False), "is_continuous_batching is True and the draft model's is False"),
    "ranks": (dict(tp_degree=2), "tp_degree is 1 and the draft model's is 2"),
    "sampling": (dict(on_device_sampling_config=None), "the draft model needs on_device_sampling_config"),
    "verification": (
        dict(speculation_length=TOKENS, enable_fused_speculation=True),
        "the draft model needs on_device_sampling_config, and no speculation_length",
    ),
}


@pytest.mark.parametrize(("changes", "message"), OTHER.values(), ids=OTHER)
def test_a_draft_model_of_other_sizes_is_refused(changes, message):
    draft = bundled_checkpoint()
    with pytest.raises(UserError, match=message):
        application(draft, nxdi.make_config(draft, **{**GREEDY, **SLOTS, **changes}), **GREEDY, **SLOTS)


def test_models_that_cannot_verify_are_refused():
    from granite4_neuron.devices.neuron.nxdi import NeuronGraniteMoeHybridForCausalLM
    from granite4_neuron.devices.neuron.nxdi.modeling import NeuronGraniteMoeHybridModel

    draft = bundled_checkpoint()
    config = application(draft, nxdi.make_config(draft, **GREEDY), **GREEDY).config
    config.fused_spec_config.worker_cls = NeuronGraniteMoeHybridModel
    with pytest.raises(UserError, match="is NeuronGraniteMoeHybridModel; it must be SpeculativeModel"):
        NeuronGraniteMoeHybridForCausalLM(str(draft), config)


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path):
    config = config_from_file(bundled_checkpoint() / "config.json")
    save_model(random_model(replace(config, vocab_size=config.vocab_size + 1)), tmp_path / "draft")
    with pytest.raises(UserError, match="they must have the same"):
        application(tmp_path / "draft", nxdi.make_config(tmp_path / "draft", **GREEDY), **GREEDY)
