import argparse
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers import GraniteMoeHybridForCausalLM as Reference

from granite4_neuron import GenerationError, UserError, chat, generate, stream_generate
from granite4_neuron.commands.options import add_sampling, sampling_options
from granite4_neuron.engine import Engine, GenerationStats, slots
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.engine.sampling import Sampler
from granite4_neuron.engine.sampling_params import SamplingParams
from granite4_neuron.engine.text import TextStream
from granite4_neuron.generation import chat_prompt, end_of_sequence_tokens, loop
from granite4_neuron.runtime import bound_model
from test.support.tool_template import TOOL_TEMPLATE

pytestmark = pytest.mark.versions

PROMPTS = ["The quick brown fox", "x", "A much longer prompt, " * 12, "né 😀"]

REFUSED = {
    "empty": (dict(prompt=""), "the prompt is empty"),
    "none": (dict(prompt=[]), "there is no prompt"),
    "all empty": (dict(prompt=["", ""]), "2 of 2 prompts failed; the first: prompt 1 is empty"),
    "of nothing": (dict(prompt=[[]]), "the prompt is empty"),
    "a set": (dict(prompt={"a", "b"}), "the prompt is of type set"),
    "no prefix cache": (dict(prefix_cache=5), "prefix_cache is of type int, which has no match_prefix and no insert"),
    "no drafter": (dict(drafter=5), "drafter is of type int"),
    "a number": (dict(prompt=3), "the prompt is of type int; give a string"),
    "three axes": (dict(prompt=torch.zeros(1, 1, 1)), "the prompt has 3 axes"),
    "numbers": (dict(prompt=torch.zeros(3)), "the prompt has 0.0 among its token ids"),
    "no ids": (dict(prompt={"role": "user", "content": "x"}), "a conversation is a list of messages"),
    "batches": (dict(prompt=["a", ["b", "c"]]), "prompt 2 has several prompts; lists of prompts cannot be nested"),
    "half a conversation": (dict(prompt=[{"role": "user", "content": "x"}, "y"]), "each message must be"),
    "no content": (dict(prompt=[{"role": "user"}]), "the message is of type NoneType"),
    "too long": (dict(prompt=[1] * 600), "the prompt has 600 tokens; .* at most 599"),
    "token id": (dict(prompt=[264]), "outside the vocabulary"),
    "negative token id": (dict(prompt=[-1]), "outside the vocabulary"),
    "max_tokens": (dict(max_tokens=0), "max_tokens is 0"),
    "temperature": (dict(temperature=-1.0), "temperature"),
    "top_k": (dict(top_k=-1), "top_k"),
    "top_p": (dict(top_p=1.5), "top_p"),
    "min_p": (dict(min_p=-0.1), "min_p"),
    "repetition_penalty": (dict(repetition_penalty=0.0), "penalty"),
    "stop": (dict(stop=["a", ""]), "stop is .* none of them empty"),
    "seed": (dict(seed=2**64, temperature=1.0), "seed"),
    "min_tokens": (dict(min_tokens=9, max_tokens=8), "min_tokens is 9, and must be at most max_tokens, 8"),
    "a huge stop token": (dict(stop_token_ids=[10**30]), "stop_token_ids is .* token ids"),
    "no processors": (dict(logits_processors=["x"]), "logits_processors is .* a list of functions"),
}


def tokens_of(runtime, prompt, **options):
    """Return the new token ids of each prompt."""
    found = [[] for _ in (prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt])]
    for response in stream_generate(runtime, None, prompt, **options):
        found[response.index].append(response.token)
    return found


@pytest.fixture(scope="module")
def ids(texting):
    return [texting[1].encode(text) for text in PROMPTS]


class TestLoop:
    def test_greedy_equals_transformers(self, texting, texting_folder, ids):
        reference = Reference.from_pretrained(texting_folder).eval()
        for prompt, new in zip(ids, tokens_of(texting[0], ids, max_tokens=20, ignore_eos=True), strict=True):
            tokens = torch.tensor([prompt])
            for _ in range(20):
                with torch.inference_mode():
                    tokens = torch.cat([tokens, reference(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
            assert tokens[0, len(prompt) :].tolist() == new

    @pytest.mark.parametrize("options", [{}, dict(temperature=0.9, seed=5), dict(repetition_penalty=1.3)])
    def test_each_prompt_of_a_batch_gets_the_text_it_gets_alone(self, texting, ids, options):
        batch = tokens_of(texting[0], ids, max_tokens=16, ignore_eos=True, **options)
        for index, prompt in enumerate(ids):
            alone = dict(options, seed=options["seed"] + index) if "seed" in options else options
            assert tokens_of(texting[0], prompt, max_tokens=16, ignore_eos=True, **alone) == [batch[index]]

    def test_chunked_prefill_equals_one_step(self, texting, monkeypatch, ids):
        expected = tokens_of(texting[0], ids, max_tokens=8, ignore_eos=True)
        seen = []
        monkeypatch.setattr(texting[0].__class__, "tokens_per_step", 14)
        monkeypatch.setattr(texting[0].__class__, "rows_per_step", 2)
        chunked = tokens_of(
            texting[0], ids, max_tokens=8, ignore_eos=True, progress=lambda done, total: seen.append((done, total))
        )
        assert chunked == expected
        total = sum(map(len, ids))
        assert len(seen) >= total // 14 and seen[-1] == (total, total)
        assert all(before < after for (before, _), (after, _) in itertools.pairwise(seen))

    def test_finish_reasons_and_counts(self, texting, ids):
        *_, last = stream_generate(texting[0], texting[1], ids[0], max_tokens=5, ignore_eos=True)
        assert last.finish_reason == "length"
        assert (last.stats.prompt_tokens, last.stats.generated_tokens) == (len(ids[0]), 5)
        assert last.stats.decode_tokens == 4 and last.stats.decode_tokens_per_second > 0

    def test_stop_tokens_end_one_sequence_and_not_the_others(self, texting, ids):
        free = tokens_of(texting[0], ids, max_tokens=12, ignore_eos=True)
        stop = free[0][3]
        stopped = tokens_of(texting[0], ids, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
        for with_stop, without in zip(stopped, free, strict=True):
            end = without.index(stop) + 1 if stop in without else len(without)
            assert with_stop == without[:end]

    def test_eos_comes_from_the_checkpoint(self, texting, ids, monkeypatch):
        token = tokens_of(texting[0], ids[0], max_tokens=3, ignore_eos=True)[0][2]
        monkeypatch.setattr(texting[0].generation_config, "eos_token_id", [token, 1])
        responses = list(stream_generate(texting[0], texting[1], ids[0], max_tokens=9))
        assert responses[-1].token == token and responses[-1].finish_reason == "stop"
        before = [response.token for response in responses[:-1]]
        text = "".join(response.text for response in responses)
        assert text == texting[1].decode(before, skip_special_tokens=True), "the stop token has no text"
        assert len(tokens_of(texting[0], ids[0], max_tokens=9, ignore_eos=True)[0]) == 9

    def test_eos_of_the_tokenizer_counts_beside_the_checkpoints(self, texting):
        config = GenerationConfig(eos_token_id=[7, 8])
        assert end_of_sequence_tokens(texting[1], config) == {7, 8, texting[1].eos_token_id}
        assert end_of_sequence_tokens(texting[1], GenerationConfig(eos_token_id=7)) == {7, texting[1].eos_token_id}
        assert end_of_sequence_tokens(texting[1], GenerationConfig()) == {texting[1].eos_token_id}

    def test_the_limit_of_the_model(self, texting):
        limit = texting[0].config.max_position_embeddings
        prompt = [9] * (limit - 3)
        assert len(tokens_of(texting[0], prompt, max_tokens=50, ignore_eos=True)[0]) == 3

    def test_text_and_lists(self, texting):
        runtime, tokenizer = texting
        options = dict(max_tokens=10, ignore_eos=True)
        several = generate(runtime, tokenizer, PROMPTS, **options)
        assert several == [generate(runtime, tokenizer, prompt, **options) for prompt in PROMPTS]
        assert generate(runtime, tokenizer, tokenizer.encode(PROMPTS[0]), **options) == several[0]
        new = tokens_of(runtime, tokenizer.encode(PROMPTS[0]), **options)[0]
        assert tokenizer.decode(new, skip_special_tokens=True) == several[0]

    def test_tensors_and_outputs_of_tokenizers(self, texting):
        runtime, tokenizer = texting
        options = dict(max_tokens=6, ignore_eos=True)
        several = [generate(runtime, tokenizer, prompt, **options) for prompt in PROMPTS]
        ids = tokenizer.encode(PROMPTS[0])
        for one in (torch.tensor(ids), np.array(ids), tokenizer(PROMPTS[0])):
            assert generate(runtime, tokenizer, one, **options) == several[0]
        for side in ("left", "right"):
            padded = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side=side)
            assert generate(runtime, tokenizer, padded, **options) == several
        assert generate(runtime, tokenizer, tokenizer(PROMPTS), **options) == several
        assert generate(runtime, tokenizer, torch.tensor([ids, ids]), **options) == [several[0]] * 2
        mixed = [PROMPTS[1], torch.tensor([ids]), tokenizer(PROMPTS[2]), tokenizer.encode(PROMPTS[3])]
        assert generate(runtime, tokenizer, mixed, **options) == [several[1], several[0], *several[2:]]

    def test_conversations(self, texting):
        runtime, tokenizer = texting
        options = dict(max_tokens=6, ignore_eos=True)
        talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi<|end|>"}]
        expected = generate(runtime, tokenizer, chat_prompt(tokenizer, "hi<|end|>", "be brief"), **options)
        assert generate(runtime, tokenizer, talk, **options) == expected
        assert chat(runtime, tokenizer, talk, **options) == expected
        answers = chat(runtime, tokenizer, [talk, "hi"], **options)
        assert answers == [expected, generate(runtime, tokenizer, chat_prompt(tokenizer, "hi"), **options)]
        templated = tokenizer.apply_chat_template(talk[1:], add_generation_prompt=True)
        assert chat(runtime, tokenizer, templated, **options) == generate(runtime, tokenizer, templated, **options)

    def test_tools_and_documents(self, texting, monkeypatch):
        runtime, tokenizer = texting
        monkeypatch.setattr(tokenizer, "chat_template", TOOL_TEMPLATE)
        messages = [{"role": "user", "content": "Hi"}]
        shown = dict(tools=[{"type": "function", "function": {"name": "f"}}], documents=[{"text": "x"}])
        prompt = tokenizer.apply_chat_template(messages, **shown, add_generation_prompt=True, return_dict=False)
        options = dict(max_tokens=5, ignore_eos=True)
        assert chat(runtime, tokenizer, messages, **shown, **options) == generate(runtime, tokenizer, prompt, **options)
        with pytest.raises(UserError, match="must be a dictionary"):
            chat(runtime, tokenizer, [*messages, 3], **shown)

    def test_logits_and_hidden_states_as_documented(self, texting, texting_folder, ids, monkeypatch):
        page = (Path(__file__).parents[3] / "docs/engine.md").read_text()
        [code] = re.findall(r"```python\n(from granite4_neuron.runtime.*?)```", page, re.DOTALL)
        monkeypatch.setattr(texting[0].__class__, "tokens_per_step", 100)
        names = dict(torch=torch, runtime=texting[0], tokens=ids[2])
        exec(code, names)
        with torch.inference_mode():
            reference = Reference.from_pretrained(texting_folder).eval()
            expected = reference(torch.tensor([ids[2]]), use_cache=False, output_hidden_states=True)
        assert len(ids[2]) > 200
        for found, wanted in ((names["logits"], expected.logits), (names["hidden_states"], expected.hidden_states[-1])):
            assert found.shape == wanted[0].shape and (found - wanted[0]).abs().max() < 1e-4

    def test_iterables_of_prompts(self, texting):
        options = dict(max_tokens=5, ignore_eos=True)
        expected = generate(*texting, PROMPTS, **options)
        assert generate(*texting, dict(enumerate(PROMPTS)).values(), **options) == expected
        found = [response.text for response in stream_generate(*texting, (text for text in PROMPTS[:1]), **options)]
        assert "".join(found) == expected[0]

    @pytest.mark.parametrize("adapter", [None, [None, None, None, None]])
    def test_a_prompt_that_fails_leaves_the_others_their_texts(self, texting, adapter, caplog):
        """Each keeps its own seed."""
        options = dict(max_tokens=5, ignore_eos=True, temperature=1.0, seed=3, adapter=adapter)
        expected = generate(*texting, PROMPTS, **options)
        prompts = [PROMPTS[0], "", "x" * 700, PROMPTS[3]]
        with pytest.raises(GenerationError, match=r"^2 of 4 prompts failed; the first: prompt 2 is empty") as raised:
            list(stream_generate(*texting, prompts, **options))
        assert list(raised.value.errors) == [1, 2]
        texts = generate(*texting, prompts, **options)
        assert texts == [expected[0], "", "", expected[3]]
        assert [text.finish_reason for text in texts] == ["length", "error", "error", "length"]
        assert texts[0].error is None and "prompt 3 has 700 tokens" in texts[2].error
        assert caplog.messages == [str(raised.value)]
        conversations = [[dict(role="user", content="x")], [dict(role="nobody")]]
        texts = chat(*texting, conversations, max_tokens=5, ignore_eos=True)
        assert len(texts[0]) > 1 and texts[0].error is None and texts[1].error is not None

    def test_a_text_that_fails_leaves_the_others_theirs(self, texting):
        expected = generate(*texting, PROMPTS[:3], max_tokens=5, ignore_eos=True)

        def failing(tokens, scores):
            if tokens.shape[1] == len(texting[1].encode(PROMPTS[1])) + 2:
                raise ZeroDivisionError("no")
            return scores

        options = dict(max_tokens=5, ignore_eos=True, logits_processors=[failing])
        with pytest.raises(
            GenerationError, match=r"^prompt 2: the request's logits processor .*\(ZeroDivisionError: no"
        ):
            responses = []
            for response in stream_generate(*texting, PROMPTS[:3], **options):
                responses.append(response)
        assert [sum(response.index == index for response in responses) for index in range(3)] == [5, 2, 5]
        for texts in (
            generate(*texting, PROMPTS[:3], **options),
            list(generate(*texting, iter(PROMPTS[:3]), **options)),
        ):
            assert texts[::2] == expected[::2] and expected[1].startswith(texts[1])
            assert texts[1].finish_reason == "error" and texts[1].error.startswith(
                "prompt 2: the request's logits proc"
            )

    def test_many_prompts_queue(self, texting, monkeypatch):
        """They run in as many slots as memory has room for, and each text is that of its prompt alone."""
        runtime, _ = texting
        made = []

        class Recorded(Engine):
            def __init__(self, runtime, num_sequences, **options):
                made.append(num_sequences)
                super().__init__(runtime, num_sequences, **options)

        monkeypatch.setattr(loop, "Engine", Recorded)
        options = dict(max_tokens=4, ignore_eos=True, temperature=1.0, seed=3)
        prompts = [[number % 200 + 5, 7, 9] for number in range(2000)]
        state = runtime.allocate(1, 7)
        needed = sum(tensor.nbytes for tensor in state.slot_views(1).values())
        assert sum(map(len, tokens_of(runtime, prompts, **{**options, "max_tokens": 1}))) == 2000
        monkeypatch.setattr(bound_model, "available_bytes", lambda: 2 * 3 * needed + 1)
        texts = tokens_of(runtime, prompts[:20], **options)
        monkeypatch.undo()
        assert made == [loop.MOST_SEQUENCES, 3]
        assert texts == tokens_of(runtime, prompts[:20], **options)

    def test_slots_of_a_model_that_keeps_its_own_state(self):
        runtime = SimpleNamespace(sequences_that_fit=lambda max_length: 5)
        assert [slots.slots_that_fit(runtime, most, 9) for most in (3, 8)] == [3, 5]
        assert slots.slots_that_fit(runtime, 8, 9, set_aside=(4, 5)) == 3

    @pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED.keys())
    def test_bad_input_is_refused_before_anything_runs(self, texting, arguments, message):
        with pytest.raises(UserError, match=message) as error:
            stream_generate(*texting, **{"prompt": "text", **arguments})
        assert "\n" not in str(error.value) and str(error.value).endswith(".")


class TestSampling:
    @pytest.mark.slow
    def test_equals_transformers_processors(self):
        """The distribution of drawn tokens equals the one from transformers' processors, applied by hand."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(50, generator=generator)
        sequence = [3, 3, 7, 11]
        options = dict(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.4)
        processors = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(1.4),
                TemperatureLogitsWarper(0.7),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.02),
            ]
        )
        expected = processors(torch.tensor([sequence]), logits[None].clone()).softmax(-1)[0]
        counts = torch.zeros(50)
        for seed in range(4000):
            counts[Sampler(SamplingParams(**options, seed=seed), 0)(logits, sequence)] += 1
        assert ((counts > 0) <= (expected > 0)).all()
        assert (counts / 4000 - expected).abs().max() < 0.03
        assert 1 < (expected > 0).sum() < 20

    @pytest.mark.parametrize("speculates", [False, True])
    def test_no_stop_before_min_tokens(self, texting, ids, speculates):
        """Only stop tokens are banned. The expected text comes from transformers' processor."""
        runtime, _ = texting
        drafter = NgramDrafter() if speculates else None
        free = tokens_of(runtime, ids[0], max_tokens=12, ignore_eos=True)[0]
        options = dict(max_tokens=12, ignore_eos=True, stop_token_ids=set(free[:6]), drafter=drafter)
        assert tokens_of(runtime, ids[0], **options)[0] == free[:1]
        late = tokens_of(runtime, ids[0], min_tokens=5, **options)[0]
        by_hand = [MinNewTokensLengthLogitsProcessor(len(ids[0]), 5, list(set(free[:6])))]
        expected = tokens_of(runtime, ids[0], logits_processors=by_hand, **options)[0]
        assert late == expected and not set(late[:5]) & set(free[:6])

    def test_no_stop_string_before_min_tokens(self, texting, ids):
        runtime, tokenizer = texting
        options = dict(max_tokens=16, ignore_eos=True)
        free = generate(runtime, tokenizer, ids[0], **options)
        stop = free.strip()[0]
        assert generate(runtime, tokenizer, ids[0], stop=stop, **options) == free[: free.index(stop)]
        assert generate(runtime, tokenizer, ids[0], stop=stop, min_tokens=16, **options) == free

    def test_processors_of_transformers(self, texting, ids):
        """They get the tokens and scores that transformers would give them, and change only the choice of tokens."""
        runtime, _ = texting
        free = list(stream_generate(runtime, None, ids[0], max_tokens=6, ignore_eos=True, logprobs=3))
        seen = []

        def in_place(input_ids, scores):
            seen.append((input_ids.tolist(), scores.shape, scores.dtype))
            scores[:, free[0].token] = -math.inf
            return scores

        processors = [in_place, NoBadWordsLogitsProcessor([[free[0].logprob.top[1][0]]], eos_token_id=1)]
        new = list(
            stream_generate(
                runtime, None, ids[0], max_tokens=6, ignore_eos=True, logprobs=3, logits_processors=processors
            )
        )
        assert new[0].token == free[0].logprob.top[2][0] and new[0].logprob.top == free[0].logprob.top
        assert seen[1] == ([[*ids[0], new[0].token]], (1, runtime.config.vocab_size), torch.float32)

    def test_processors_come_before_the_temperature(self):
        logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
        keep = lambda _, scores: scores.masked_fill(torch.arange(50) % 2 == 0, -math.inf)  # noqa: E731
        params = SamplingParams(top_k=5, temperature=2.0, seed=1, logits_processors=[keep])
        sampler = Sampler(params, 0)
        odd = (logits.masked_fill(torch.arange(50) % 2 == 0, -math.inf)).topk(5).indices.tolist()
        assert {sampler(logits, [1] * place) for place in range(1, 200)} == set(odd)

    def test_which_options_mean_sampling(self):
        def temperature(checkpoint, **options):
            return SamplingParams(**options).with_defaults(GenerationConfig(**checkpoint)).temperature

        for checkpoint in ({}, dict(do_sample=False), dict(do_sample=False, temperature=0.6)):
            assert temperature(checkpoint) == temperature(checkpoint, repetition_penalty=1.2, seed=1) == 0
            assert temperature(checkpoint, temperature=1.0) == 1
        for option in (dict(top_k=0), dict(top_p=0.9), dict(min_p=0.0)):
            assert temperature(dict(do_sample=False, temperature=0.6), **option) == 0.6
        sampled = dict(do_sample=True, temperature=0.6)
        assert temperature(sampled) == 0.6 and temperature(sampled, temperature=0, top_p=0.5) == 0

    def test_the_checkpoint_gives_options_that_the_caller_does_not(self):
        stored = dict(temperature=0.6, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
        stored |= dict(typical_p=0.8, no_repeat_ngram_size=3)  # transformers 4 has defaults for these
        given = dict(top_k=0, repetition_penalty=1.0, presence_penalty=0.5, stop="x", seed=3)
        merged = SamplingParams(**given).with_defaults(GenerationConfig(do_sample=True, **stored))
        assert merged == SamplingParams(**stored | given)

    def test_commands_have_only_known_options(self):
        """`sampling_options` passes on only options that it knows by name."""
        parser = argparse.ArgumentParser()
        add_sampling(parser)
        options = parser.parse_args(["--top-k", "3", "--stop", "x"])
        assert sampling_options(options) == vars(options)

    def test_seeds(self):
        logits = torch.zeros(1000)

        def draw(seed):
            sampler = Sampler(SamplingParams(seed=seed), 0)
            return [sampler(logits, [0] * place) for place in range(8)]

        assert draw(3) == draw(3) != draw(4)
        assert draw(None) != draw(None)


class TestText:
    def stream(self, tokenizer, text, stop=()):
        """Stream the tokens of `text`; return the pieces of text, and whether a stop string ended it."""
        stream = TextStream(tokenizer, stop)
        pieces = []
        for token in tokenizer.encode(text):
            pieces.append(stream.add(token))
            if stream.stopped:
                break
        return [*pieces, stream.finish()], stream.stopped

    def test_pieces_make_the_text(self, texting):
        text = "Zwölf 😀 naïve\n  chars"
        pieces, stopped = self.stream(texting[1], text)
        assert "".join(pieces) == text and not stopped
        assert all("\ufffd" not in piece for piece in pieces)

    @pytest.mark.parametrize(
        "text, stop, expected",
        [
            ("one two three", ["two"], "one "),
            ("one two three", ["three", "two"], "one "),
            ("aaab", ["aab"], "a"),
            ("abcabd", ["abd"], "abc"),
            ("one", ["on", "one"], ""),
            ("no stop here", ["xyz"], "no stop here"),
            ("ends with a beginning: xy", ["xyz"], "ends with a beginning: xy"),
            ("one 😀 two", ["😀"], "one "),
        ],
    )
    def test_stop_strings(self, texting, text, stop, expected):
        pieces, stopped = self.stream(texting[1], text, stop)
        assert "".join(pieces) == expected
        assert stopped == (expected != text)

    def test_no_part_of_a_stop_string_is_given_out(self, texting):
        stream, given = TextStream(texting[1], ["STOP"]), ""
        for token in texting[1].encode("go STOP"):
            given += stream.add(token)
            assert "S" not in given


class TestChat:
    def test_template(self, texting):
        tokens = chat_prompt(texting[1], "hi", system="be brief")
        assert texting[1].decode(tokens) == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
        assert texting[1].decode(chat_prompt(texting[1], "hi")) == "<|user|>hi<|end|><|assistant|>"

    def test_no_template(self, texting, monkeypatch):
        monkeypatch.setattr(texting[1], "chat_template", None)
        with pytest.raises(UserError, match="no chat template"):
            chat_prompt(texting[1], "hi")


def test_rates_are_tokens_per_second():
    stats = GenerationStats(
        prompt_tokens=30, prompt_seconds=2.0, generated_tokens=14, decode_tokens=12, decode_seconds=3.0
    )
    assert (stats.prompt_tokens_per_second, stats.decode_tokens_per_second) == (15, 4)
    assert GenerationStats().decode_tokens_per_second == 0


def test_an_unknown_option_is_named_with_the_nearest(texting):
    for options, message in (
        (dict(max_token=5), "there is no option 'max_token'; did you mean max_tokens?"),
        (dict(temprature=1), "there is no option 'temprature'; did you mean temperature?"),
        (dict(zzz=1), "there is no option 'zzz'$"),
    ):
        for prompts in ("A", iter(["A"])):
            with pytest.raises(TypeError, match=re.escape(message).replace(r"\$", "$")):
                generate(*texting, prompts, **options)
