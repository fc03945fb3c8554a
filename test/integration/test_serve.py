"""The server on the bundled model in float32, tested with OpenAI's own client and with bare HTTP."""
# ruff: noqa: E402 (importorskip comes first)

import json
import math
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection

import pytest
import torch
import transformers

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

from granite4_neuron import generate
from granite4_neuron.engine import Engine
from granite4_neuron.engine.drafting.drafters import NgramDrafter
from granite4_neuron.engine.sampling import Sampler
from granite4_neuron.engine.sampling_params import SAMPLING_OPTIONS
from granite4_neuron.generation import bundled_checkpoint, chat_prompt
from granite4_neuron.serving.apis.chat.protocol import ChatBody, CompletionBody, GenerationBody
from test.support.serving import MODEL, serving
from test.support.waiting import until

PROMPT = "An assignment statement"
QUESTION = "What is the assert statement?"
ENDLESS = dict(prompt=PROMPT, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def reference():
    return transformers.GraniteMoeHybridForCausalLM.from_pretrained(bundled_checkpoint(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(tiny):
    with serving(*tiny) as server:
        yield server


@pytest.fixture
def post(server):
    """Return a function that posts a body to a path and returns the response."""

    def send(path, body):
        return httpx.post(f"{server.address}/v1/{path}", json=body, timeout=60)

    return send


def metric(server, name):
    """Return a metric that the server reports to Prometheus."""
    text = httpx.get(f"{server.address}/metrics").text
    return float(re.search(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)[1])


class TestCompletions:
    def test_text_and_usage(self, client, tiny):
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20)
        assert answer.choices[0].text == generate(*tiny, PROMPT, max_tokens=20)
        assert answer.choices[0].finish_reason == "length" and answer.object == "text_completion"
        prompt_tokens = len(tiny[1].encode(PROMPT))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 20)
        assert answer.usage.total_tokens == prompt_tokens + 20

    @pytest.mark.parametrize("as_tokens", [False, True], ids=["texts", "token ids"])
    def test_several_prompts(self, client, tiny, as_tokens):
        texts = [PROMPT, "The import", "Lambda expressions and more of them"]
        prompts = [tiny[1].encode(text) for text in texts] if as_tokens else texts
        answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=12)
        assert [choice.text for choice in answer.choices] == generate(*tiny, texts, max_tokens=12)
        one = client.completions.create(model=MODEL, prompt=prompts[1], max_tokens=12)
        assert one.choices[0].text == answer.choices[1].text

    def test_without_a_limit_it_has_16_tokens(self, client, tiny):
        """The default limit is 16 tokens, as OpenAI's, or fewer if fewer fit."""
        assert client.completions.create(model=MODEL, prompt=PROMPT).usage.completion_tokens == 16
        near_the_end = tiny[1].encode(PROMPT) * 200
        usage = client.completions.create(model=MODEL, prompt=near_the_end[:505], extra_body={"ignore_eos": True}).usage
        assert usage.completion_tokens == 512 - 505
        with serving(*tiny, max_tokens=3) as server:
            answer = httpx.post(f"{server.address}/v1/completions", json={"prompt": PROMPT}, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3

    def test_the_end_of_a_text(self, client, tiny):
        prompt = chat_prompt(tiny[1], QUESTION)
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=400)
        assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens < 400

    def test_logprobs_are_transformers(self, client, tiny, reference):
        tokens = tiny[1].encode(PROMPT)
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, echo=True, logprobs=3)
        choice, new = answer.choices[0], tiny[1].encode(generate(*tiny, PROMPT, max_tokens=8))
        assert choice.text == PROMPT + generate(*tiny, PROMPT, max_tokens=8)
        with torch.inference_mode():
            logits = reference(torch.tensor([[*tokens, *new]])).logits[0].log_softmax(-1)
        expected = [float(row[token]) for row, token in zip(logits, [*tokens, *new][1:], strict=False)]
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        assert "".join(choice.logprobs.tokens) == choice.text
        for text, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            assert choice.text[offset:].startswith(text)
        for top, row in zip(choice.logprobs.top_logprobs[1:], logits, strict=False):
            assert sorted(top.values())[-3:] == pytest.approx(sorted(row.tolist())[-3:], abs=1e-4)

    def test_only_a_prompts_logprobs(self, client, reference, tiny):
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
        choice = answer.choices[0]
        assert choice.text == PROMPT and answer.usage.completion_tokens == 0
        assert len(choice.logprobs.tokens) == len(tiny[1].encode(PROMPT))

    def test_stop_strings(self, client):
        free = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20).choices[0].text
        for stop in (free[5:9], ["never", free[5:9]]):
            choice = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, stop=stop).choices[0]
            assert choice.text == free[: free.index(free[5:9])] and choice.finish_reason == "stop"

    def test_a_stream_is_the_same_text(self, client):
        options = dict(model=MODEL, prompt=[PROMPT, "The import"], max_tokens=15, n=2, echo=True, logprobs=1)
        whole = client.completions.create(**options)
        texts, logprobs = [""] * 4, [[] for _ in range(4)]
        for chunk in client.completions.create(**options, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                logprobs[choice.index] += choice.logprobs.text_offset
        assert texts == [choice.text for choice in whole.choices]
        assert logprobs == [choice.logprobs.text_offset for choice in whole.choices]


def error_of(answer, is_stream):
    """Return the message of an error, which is a stream's only event: its headers came before."""
    text = answer.text.removeprefix("data: ") if is_stream else answer.text
    return json.loads(text)["error"]["message"]


class TestSampling:
    def texts(self, client, **options):
        extra = {
            name: options.pop(name) for name in ("top_k", "min_p", "typical_p", "repetition_penalty") if name in options
        }
        answer = client.completions.create(model=MODEL, prompt="The", max_tokens=16, extra_body=extra, **options)
        return [choice.text for choice in answer.choices]

    def test_seeds_and_choices(self, client):
        three = self.texts(client, n=3, seed=5, temperature=1.5)
        assert three == [self.texts(client, seed=seed, temperature=1.5)[0] for seed in (5, 6, 7)]
        assert len(set(three)) == 3

    def test_options_that_leave_one_token(self, client):
        greedy = self.texts(client, temperature=0)
        assert self.texts(client, temperature=2, seed=1) != greedy
        for option in (dict(top_k=1), dict(min_p=1), dict(top_p=1e-6)):
            assert self.texts(client, temperature=2, seed=1, **option) == greedy

    def test_typical_tokens(self, client, tiny):
        options = dict(temperature=2.0, seed=1, typical_p=0.3)
        [text] = self.texts(client, **options)
        assert text == generate(*tiny, "The", max_tokens=16, **options)
        assert text != generate(*tiny, "The", max_tokens=16, temperature=2.0, seed=1)

    def test_penalties_and_biases(self, client, tiny):
        token = tiny[1].encode("x")[0]
        assert self.texts(client, logit_bias={str(token): 100}) == ["x" * 16]
        penalised = self.texts(client, logit_bias={str(token): 20}, frequency_penalty=2)
        assert penalised[0].startswith("x") and penalised != ["x" * 16]

    def test_each_option_reaches_the_engine(self, server):
        options = dict(temperature=0.5, top_k=7, top_p=0.8, min_p=0.1, typical_p=0.7, repetition_penalty=1.2)
        additions = dict(presence_penalty=0.3, frequency_penalty=-0.4, logprobs=3)
        body = CompletionBody(
            prompt="x", n=2, seed=2**63 - 1, logit_bias={"5": 1.5}, stop=["a", "b"], **options, **additions
        )
        first, second = server.service.maker.completion_requests(body).requests
        assert {name: getattr(first, name) for name in options | additions} == options | additions
        assert (first.logit_bias, first.max_tokens, first.seed, second.seed) == ({5: 1.5}, 16, 2**63 - 1, 0)
        others = {"model", "max_tokens", "n", "ignore_eos", "stream", "stream_options"}
        others |= {"response_format", "structured_outputs", "json_schema", "grammar"}  # they become `constraint`
        others |= {"bad_words", "truncate_prompt_tokens", "priority", "cache_salt"}  # see test_serve_other_fields.py
        others |= {"return_token_ids", "timings_per_token"}  # they change the answer only
        assert GenerationBody.model_fields.keys() - others <= SAMPLING_OPTIONS.keys(), "others would be ignored"
        assert first.stop == ("a", "b") and first.stop_token_ids == {1} and first.prompt_logprobs is None

    def test_minus_one_means_no_limit_and_no_seed(self, server, tiny):
        """Other servers take -1 as no limit and as no seed."""
        maker, length = server.service.maker, len(tiny[1].encode("x"))
        [request] = maker.completion_requests(CompletionBody(prompt="x", top_k=-1, seed=-1, max_tokens=-1)).requests
        assert (request.top_k, request.seed, request.max_tokens) == (0, None, 512 - length)
        for name in ("max_tokens", "max_completion_tokens"):
            [chat] = maker.chat_requests(ChatBody(messages=[{"role": "user", "content": "x"}], **{name: -1})).requests
            assert chat.max_tokens == 512 - len(chat.tokens)


class TestChat:
    MESSAGES = ({"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION})

    def test_a_conversation(self, client, tiny):
        answer = client.chat.completions.create(model=MODEL, messages=self.MESSAGES, max_completion_tokens=20)
        prompt = chat_prompt(tiny[1], QUESTION, system="be brief")
        assert answer.choices[0].message.content == generate(*tiny, prompt, max_tokens=20)
        assert answer.choices[0].message.role == "assistant" and answer.usage.prompt_tokens == len(prompt)

    def test_without_a_limit_it_ends_by_itself(self, client):
        answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": QUESTION}])
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content.startswith("Assert statements are")

    def test_a_stream(self, client):
        options = dict(model=MODEL, messages=self.MESSAGES, max_tokens=20, n=2, seed=3, temperature=1.0)
        whole = client.chat.completions.create(**options)
        usage = dict(stream=True, stream_options={"include_usage": True})
        *chunks, last = client.chat.completions.create(**options, **usage)
        texts, roles, reasons = ["", ""], [], []
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            texts[choice.index] += choice.delta.content
            roles.append(choice.delta.role)
            reasons.append(choice.finish_reason)
        assert texts == [choice.message.content for choice in whole.choices]
        assert roles.count("assistant") == 2 and reasons.count("length") == 2
        assert last.choices == [] and last.usage.completion_tokens == 40
        assert all(chunk.usage is None for chunk in chunks)

    def test_logprobs(self, client):
        options = dict(model=MODEL, messages=self.MESSAGES, max_tokens=5, logprobs=True)
        content = client.chat.completions.create(**options, top_logprobs=2).choices[0].logprobs.content
        assert len(content) == 5
        for entry in content:
            assert entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2
            assert bytes(entry.bytes).decode() == entry.token
        assert client.chat.completions.create(**options).choices[0].logprobs.content[0].top_logprobs == []

    def test_parts_of_text(self, client):
        parts = [{"type": "text", "text": QUESTION[:7]}, {"type": "text", "text": QUESTION[7:]}]
        answers = [
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=9
            ).choices[0]
            for content in (QUESTION, parts)
        ]
        assert answers[0].message == answers[1].message

    def test_fields_of_other_servers_change_nothing(self, server):
        plain = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
            {"role": "tool", "content": "y", "tool_call_id": "a"},
            {"role": "assistant", "content": "z"},
            {"role": "user", "content": "x"},
        ]
        other = json.loads(json.dumps(plain))
        other[0]["content"] = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
        other[1]["tool_calls"][0].update(index=0, type="function")
        other[1] |= {"content": None, "refusal": None, "reasoning_content": "Hm."}
        other[2] |= {"name": "f", "cache_control": {"type": "ephemeral"}}
        other[3] |= {"annotations": [], "reasoning": "Hm.", "audio": None, "function_call": None, "tool_calls": []}
        tokens = []
        for messages in (plain, other):
            for arguments in ("", "{}", None, {}):
                messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
                body = ChatBody.model_validate_json(json.dumps({"messages": messages, "top_logprobs": 0}))
                assert body.messages[1].described()["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
                assert "index" not in body.messages[1].described()["tool_calls"][0]
                tokens += [list(request.tokens) for request in server.service.maker.chat_requests(body).requests]
        assert tokens == tokens[:1] * 8

    def test_control_tokens_are_text(self, client, tiny):
        def prompt_tokens(content):
            messages = [{"role": "user", "content": content}]
            return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1).usage.prompt_tokens

        spelling = len(tiny[1].encode("<|end_of_", add_special_tokens=False))
        assert prompt_tokens("a<|end_of_text|>") - prompt_tokens("a") > spelling > 2


class TestReuse:
    def test_cached_tokens(self, client, tiny):
        prompt = "A text that nobody has sent before, of some length, and with more to come"
        cached = []
        for text in (prompt, prompt, prompt + " behind", prompt + " elsewhere"):
            usage = client.completions.create(model=MODEL, prompt=text, max_tokens=4).usage
            cached.append(usage.prompt_tokens_details.cached_tokens)
        length = len(tiny[1].encode(prompt))
        assert cached[:2] == [0, length] and min(cached[2:]) >= length - 1

    def test_texts_are_the_same_with_drafts(self, tiny):
        with (
            serving(*tiny, drafter=NgramDrafter()) as server,
            openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client,
        ):
            chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=200, stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == generate(*tiny, PROMPT, max_tokens=200)
            assert metric(server, "spec_decode_num_accepted_tokens_total") > 0 and len(chunks) < 200


class TestLoad:
    def test_requests_at_once_have_the_texts_of_each_alone(self, client, tiny):
        prompts = [PROMPT, "The import", "Lambda", "A class definition", "The global statement", "Names refer"] * 3
        expected = {prompt: generate(*tiny, prompt, max_tokens=30) for prompt in set(prompts)}
        texts = [None] * len(prompts)

        def ask(number):
            answer = client.completions.create(model=MODEL, prompt=prompts[number], max_tokens=30)
            texts[number] = answer.choices[0].text

        threads = [threading.Thread(target=ask, args=[number]) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == [expected[prompt] for prompt in prompts]

    def test_a_full_queue(self, tiny):
        with serving(*tiny, num_sequences=1, max_queue=1) as server, httpx.Client(timeout=60) as client:
            url = f"{server.address}/v1/completions"
            with client.stream("POST", url, json={**ENDLESS, "stream": True}) as running:
                lines = running.iter_lines()
                next(lines)
                waiting = threading.Thread(target=lambda: client.post(url, json={"prompt": "x", "max_tokens": 1}))
                waiting.start()
                until(lambda: server.engine.num_waiting == 1)
                answer = client.post(url, json={"prompt": "x", "max_tokens": 1})
                assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
                *_, last, _ = (line for line in lines if line)
                made = json.loads(last.removeprefix("data: "))["timings"]["predicted_n"]
                assert made == ENDLESS["max_tokens"], "the one that ran was not disturbed"
            waiting.join()
            assert client.post(url, json={"prompt": "x", "max_tokens": 1}).status_code == 200

    @pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
    def test_a_client_that_goes_away_frees_its_slots_before_the_next_step(self, server, monkeypatch, stream):
        engine, events = server.engine, []
        step, cancel = engine.step, engine.cancel

        def step_until_cancelled():
            """The first step gives out tokens. The second lasts until the cancellation waits behind it."""
            events.append("step")
            if len(events) == 2:
                until(lambda: not server.loop._inbox.empty())
            return step()

        def noted_cancel(id):
            cancel(id)
            events.append("cancel")

        monkeypatch.setattr(engine, "step", step_until_cancelled)
        monkeypatch.setattr(engine, "cancel", noted_cancel)
        with closing(HTTPConnection(server.address.removeprefix("http://"))) as connection:
            body = json.dumps({**ENDLESS, "n": 3, "stream": stream})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            until(lambda: len(events) == 2)
        until(lambda: events.count("cancel") == 3)
        assert events == ["step"] * 2 + ["cancel"] * 3
        assert not engine.has_work and server.cache.stats.in_use == 0 and not server.service.engine._live

    def test_metrics(self, server, client):
        names = ["generation_tokens_total", "time_to_first_token_seconds_count", "inter_token_latency_seconds_count"]
        before = [metric(server, name) for name in names]
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=7)
        assert [metric(server, name) - was for name, was in zip(names, before, strict=True)] == [7, 1, 6]
        assert metric(server, "num_requests_running") == metric(server, "num_requests_waiting") == 0
        assert metric(server, "prefix_cache_hits_total") > 0

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    def test_options_that_leave_no_token_fail_that_request_alone(self, client, post, tiny, stream):
        texts, option = [], {"allowed_token_ids": tiny[1].encode("the"), "bad_words": ["the"]}
        others = threading.Thread(
            target=lambda: texts.append(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=60))
        )
        others.start()
        answer = post("completions", {"prompt": PROMPT, **option, "stream": stream, "n": 2})
        assert answer.status_code == (200 if stream else 400)
        assert "options (a grammar" in error_of(answer, stream)
        others.join()
        assert texts[0].choices[0].text == generate(*tiny, PROMPT, max_tokens=60)

    def test_options_that_leave_no_token_later_end_the_stream_with_an_error(self, post, tiny):
        """The first token has been sent by then; a second one would complete a bad word."""
        options = {"allowed_token_ids": tiny[1].encode("the"), "bad_words": ["thethe"]}
        answer = post("completions", {"prompt": [5], "stream": True, "max_tokens": 5, **options})
        *_, token, error = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert answer.status_code == 200 and json.loads(token)["choices"][0]["finish_reason"] is None
        assert json.loads(error)["error"]["type"] == "invalid_request_error"
        assert "options (a grammar" in json.loads(error)["error"]["message"]

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    def test_logits_that_are_not_finite_are_a_server_error(self, tiny, stream, monkeypatch):
        ask = Sampler.ask
        monkeypatch.setattr(Sampler, "ask", lambda sampler, logits, *tokens: ask(sampler, logits * math.nan, *tokens))
        with serving(*tiny) as server:
            body = {"prompt": PROMPT, "stream": stream}
            answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)
            assert answer.status_code == (200 if stream else 500)
            assert "model's logits are not finite" in error_of(answer, stream)
            assert httpx.get(f"{server.address}/health").status_code == 200

    def test_an_engine_that_fails_ends_the_server(self, tiny, monkeypatch):
        class Failing(Engine):
            def step(self):
                raise RuntimeError("a bug")

        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        with serving(*tiny, engine_class=Failing) as server:
            answer = httpx.post(f"{server.address}/v1/completions", json={"prompt": "x"}, timeout=60)
            assert answer.status_code == 500 and "engine has stopped" in answer.json()["error"]["message"]
            until(lambda: server.should_exit and server._has_failed)

    def test_a_step_that_fails_ends_its_texts_and_only_steps_that_keep_failing_end_the_server(self, tiny, monkeypatch):
        runtime, fails = tiny[0], []
        step = runtime.step

        def failing(*arguments):
            if fails:
                raise fails.pop()
            return step(*arguments)

        monkeypatch.setattr(runtime, "step", failing)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        with serving(*tiny) as server:
            url, body = f"{server.address}/v1/completions", {"prompt": "x", "max_tokens": 2}
            fails.append(RuntimeError("out of luck"))
            answer = httpx.post(url, json=body, timeout=60)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "a step failed (RuntimeError: out of luck)."
            assert httpx.post(url, json=body, timeout=60).status_code == 200
            fails += [RuntimeError("out of luck")] * 3
            for _ in range(3):
                assert httpx.post(url, json=body, timeout=60).status_code == 500
            until(lambda: server.should_exit and server._has_failed)

    def test_a_request_that_is_encoded_while_the_engine_fails_is_answered(self, tiny, monkeypatch):
        class Failing(Engine):
            def step(self):
                raise RuntimeError("a bug")

        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        with serving(*tiny, engine_class=Failing) as server, ThreadPoolExecutor() as pool:
            encode, is_encoding = server.service.maker.completion_requests, threading.Event()

            def slow(body):
                is_encoding.set()
                until(lambda: server._has_failed)
                return encode(body)

            url = f"{server.address}/v1/completions"
            monkeypatch.setattr(server.service.maker, "completion_requests", slow)
            late = pool.submit(httpx.post, url, json={"prompt": "x"}, timeout=10)
            assert is_encoding.wait(60)
            monkeypatch.setattr(server.service.maker, "completion_requests", encode)
            assert httpx.post(url, json={"prompt": "y"}, timeout=60).status_code == 500
            answer = late.result()
            assert answer.status_code == 500 and "engine has stopped" in answer.json()["error"]["message"]

    def test_a_client_may_go_away_within_its_request(self, tiny, capfd):
        with serving(*tiny) as server:
            with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as client:
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
                    b"Content-Type: application/json\r\n\r\n{"
                )
            answered = 'http_requests_total{path="/v1/completions",status="499"} 1.0'
            until(lambda: answered in httpx.get(f"{server.address}/metrics").text, seconds=20)
        assert "Traceback" not in capfd.readouterr().err
