"""Fields of requests and answers that vLLM and llama-server have beside OpenAI's."""
# ruff: noqa: E402 (importorskip comes first)

import itertools
import json
from importlib import metadata

import pytest
import torch
import transformers

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron import generate
from granite4_neuron.generation import bundled_checkpoint

PROMPT = "An assignment statement"
CHAT = {"messages": [{"role": "user", "content": "What is the assert statement?"}]}
COMPLETION = {"prompt": PROMPT, "max_tokens": 8}


@pytest.fixture
def post(server):
    """Return a function that posts a body and returns the answer, or the list of a stream's events."""

    def send(**body):
        path = "completions" if "prompt" in body else "chat/completions"
        answer = httpx.post(f"{server.address}/v1/{path}", json={"max_tokens": 8, **body}, timeout=60)
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            return answer.json()
        *events, end = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert end == "[DONE]"
        return [json.loads(event) for event in events]

    return send


class TestTokens:
    def test_of_completions(self, post, tiny):
        """Each choice has its prompt's tokens and its own."""
        body = dict(prompt=[PROMPT, "The import"], max_tokens=8, return_token_ids=True)
        prompts = [tiny[1].encode(text) for text in body["prompt"]]
        choices = post(**body)["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == prompts
        assert [tiny[1].decode(choice["token_ids"]) for choice in choices] == [choice["text"] for choice in choices]
        streamed = [[], []]
        for event in post(**body, stream=True):
            [choice] = event["choices"]
            assert choice.get("prompt_token_ids") == (None if streamed[choice["index"]] else prompts[choice["index"]])
            streamed[choice["index"]] += choice["token_ids"]
        assert streamed == [choice["token_ids"] for choice in choices]
        assert "token_ids" not in post(**COMPLETION)["choices"][0]
        prompt_only = post(prompt=PROMPT, max_tokens=0, echo=True, return_token_ids=True)["choices"][0]
        assert prompt_only["token_ids"] == [] and prompt_only["prompt_token_ids"] == prompts[0]

    def test_of_chats(self, post, tiny):
        """The answer has the prompt's tokens. In a stream the first events have them."""
        whole = post(**CHAT, return_token_ids=True)
        [choice] = whole["choices"]
        assert tiny[1].decode(choice["token_ids"]) == choice["message"]["content"]
        assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
        first, *others = post(**CHAT, return_token_ids=True, stream=True)
        assert first["prompt_token_ids"] == whole["prompt_token_ids"]
        assert not any("prompt_token_ids" in event for event in others)
        streamed = [event["choices"][0]["token_ids"] for event in (first, *others)]
        assert list(itertools.chain(*streamed)) == choice["token_ids"]

    def test_log_probabilities_of_a_prompt(self, post, tiny):
        reference = transformers.GraniteMoeHybridForCausalLM.from_pretrained(bundled_checkpoint(), dtype=torch.float32)
        chat = post(**CHAT, prompt_logprobs=2, return_token_ids=True)
        [completion] = post(**COMPLETION, prompt_logprobs=2, return_token_ids=True)["choices"]
        for answer in (chat, completion):
            tokens = answer["prompt_token_ids"]
            with torch.inference_mode():
                logprobs = reference.eval()(torch.tensor([tokens])).logits[0].log_softmax(-1)
            none, *found = answer["prompt_logprobs"]
            assert none is None and len(found) == len(tokens) - 1
            for token, row, entries in zip(tokens[1:], logprobs, found, strict=False):
                order = row.argsort(descending=True).tolist()
                assert entries.keys() == {str(each) for each in (token, *order[:2])} and str(token) == next(
                    iter(entries)
                )
                for each, entry in entries.items():
                    assert entry["logprob"] == pytest.approx(float(row[int(each)]), abs=1e-4)
                    assert entry["rank"] == order.index(int(each)) + 1
                    assert entry["decoded_token"] == tiny[1].decode([int(each)])


class TestChoiceOfTokens:
    def test_allowed_tokens(self, post, tiny):
        allowed = tiny[1].encode(" the name of an")
        choice = post(**COMPLETION, allowed_token_ids=allowed, return_token_ids=True)["choices"][0]
        assert set(choice["token_ids"]) <= set(allowed) and choice["finish_reason"] == "length"

    def test_bad_words(self, post, server, tiny):
        """A word is avoided at the beginning of a text and after a space."""
        plain = post(**COMPLETION)["choices"][0]["text"]
        word = max(plain.split(), key=len)
        assert word not in post(**COMPLETION, bad_words=[word])["choices"][0]["text"]
        maker = server.service.maker
        both = ("the", " the", "lambda", " lambda")
        assert maker._bad_words(["the", " lambda"]) == [tiny[1].encode(text) for text in both]
        assert maker._bad_words(["import"]) == [tiny[1].encode("import")], "it has fewer tokens after a space"


class TestPrompts:
    @pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
    def test_truncation_leaves_the_last_tokens(self, post, body):
        whole = post(**body, return_token_ids=True)
        tokens = (whole if body is CHAT else whole["choices"][0])["prompt_token_ids"]
        cut = post(**body, truncate_prompt_tokens=4)
        text = post(prompt=tokens[-4:])["choices"][0]["text"]
        assert cut["usage"]["prompt_tokens"] == 4
        choice = cut["choices"][0]
        assert (choice["message"]["content"] if body is CHAT else choice["text"]) == text
        assert post(**body, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == len(tokens)

    def test_truncation_to_what_fits(self, post, tiny):
        long = tiny[1].encode(PROMPT) * 200
        assert post(prompt=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 512 - 8

    def test_only_requests_with_the_same_salt_find_each_others(self, post):
        body = dict(prompt="A prompt that only this test sends, and that is a little longer than others", max_tokens=1)
        cached = [
            post(**body, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
            for salt in ("mine", "yours", None, "mine")
        ]
        assert cached[:3] == [0, 0, 0] and cached[3] > 8

    def test_priority_and_the_other_options_reach_the_engine(self, server, monkeypatch):
        from granite4_neuron.serving.apis.chat.protocol import ChatBody

        options = dict(priority=-3, cache_salt="mine", allowed_token_ids=[5, 6], prompt_logprobs=1)
        [request] = server.service.maker.chat_requests(ChatBody(**CHAT, **options)).requests
        assert {name: getattr(request, name) for name in options} == options


class TestLlamaServer:
    def test_structures(self, post):
        choice = post(**CHAT, json_schema={"type": "boolean"}, max_tokens=40)["choices"][0]
        assert json.loads(choice["message"]["content"]) in (True, False)
        assert post(**COMPLETION, grammar='root ::= "yes" | "no"')["choices"][0]["text"] in ("yes", "no")
        assert post(**COMPLETION, grammar="")["choices"] == post(**COMPLETION)["choices"]

    def test_timings(self, post, tiny):
        body = dict(prompt="Another prompt that nobody else sends", max_tokens=6)
        length = len(tiny[1].encode(body["prompt"]))
        first, again = post(**body)["timings"], post(**body)["timings"]
        assert (first["cache_n"], first["prompt_n"], first["predicted_n"]) == (0, length, 6)
        assert (again["cache_n"], again["prompt_n"]) == (length, 0)
        assert first["prompt_ms"] > 0
        # Tokens that arrive together have no rate.
        milliseconds = first["predicted_ms"]
        assert first["predicted_per_second"] * milliseconds == pytest.approx(6000 if milliseconds else 0)
        assert first["prompt_per_token_ms"] * length == pytest.approx(first["prompt_ms"])
        *others, last = post(**body, stream=True)
        assert not any("timings" in event for event in others) and last["timings"]["predicted_n"] == 6
        timed = post(**body, stream=True, timings_per_token=True, stream_options={"include_usage": True})
        *counts, total = [event["timings"]["predicted_n"] for event in timed]
        # Tokens that wait for the client come in one event.
        assert counts == sorted(set(counts)) and counts[0] >= 1 and counts[-1] == total == 6

    def test_texts_stay_the_same(self, post, tiny):
        text = generate(*tiny, PROMPT, max_tokens=8)
        off = dict(top_n_sigma=-1, xtc_probability=0, mirostat=0, dry_multiplier=0.0, repeat_penalty=1.0, id_slot=3)
        assert post(**COMPLETION, **off, request_id="a", truncation_side="left")["choices"][0]["text"] == text


def test_paths_of_vllm(server):
    def get(path):
        answer = httpx.get(f"{server.address}{path}")
        assert answer.status_code == 200
        return answer.json()

    assert get("/ping") == get("/health") == httpx.post(f"{server.address}/ping").json()
    assert get("/version") == {"version": metadata.version("granite4-neuron")}
    assert get("/load") == {"server_load": 0}
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 2}
    with httpx.stream("POST", f"{server.address}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # keeps the connection open
        next(lines)
        assert get("/load") == {"server_load": 1}
