"""Fields that clients send besides the prompt, and fields that they read from answers."""
# ruff: noqa: E402 (importorskip comes first)

import logging
import re

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")

from granite4_neuron import generate
from granite4_neuron.generation import chat_prompt
from test.support.serving import MODEL, serving

PROMPT = "An assignment statement"
QUESTION = "What is the assert statement?"
USER = {"role": "user", "content": QUESTION}
BODY = dict(prompt=PROMPT, max_tokens=5)
COMMON = dict(
    user="me",
    metadata={"run": "1"},
    safety_identifier="x",
    service_tier="auto",
    store=False,
    cache_prompt=True,
    prompt_cache_key="k",
    use_beam_search=False,
    length_penalty=1.0,
    include_stop_str_in_output=False,
    skip_special_tokens=True,
    spaces_between_special_tokens=True,
    min_tokens=0,
    stop_token_ids=[],
)


@pytest.fixture(scope="module")
def server(tiny):
    with serving(*tiny, allowed_origins=["https://page.example"]) as server:
        yield server


@pytest.fixture
def ask(server):
    """Return a function that posts a body to a path and returns the answer's JSON."""

    def send(path, **body):
        answer = httpx.post(server.address + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return send


@pytest.fixture
def complete(ask):
    """Return a function that completes a prompt with options and returns the choice and the usage."""

    def send(prompt=PROMPT, max_tokens=12, **options):
        answer = ask("/v1/completions", prompt=prompt, max_tokens=max_tokens, **options)
        return answer["choices"][0], answer["usage"]

    return send


def content_of(answer):
    return answer["choices"][0]["message"]["content"]


class TestFieldsThatChangeNoText:
    def test_of_completions(self, complete):
        assert complete(**COMMON, best_of=1, suffix="", n=1)[0] == complete()[0]

    def test_of_chats(self, ask):
        system = {"role": "system", "content": "be brief"}
        plain = ask("/v1/chat/completions", messages=[system, USER], max_tokens=12)
        named = [{**system, "role": "developer"}, {**USER, "name": "<|end_of_text|>"}]
        chat = dict(reasoning_effort="low", modalities=["text"], verbosity="medium", add_special_tokens=False)
        answer = ask("/v1/chat/completions", messages=named, max_tokens=12, **COMMON, **chat)
        assert answer["choices"] == plain["choices"]
        assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]

    def test_continuous_usage(self, client):
        """Each event counts the tokens of its own text so far, as vLLM does. The last one counts all.

        Tokens that wait for the client come in one event.
        """
        usage = {"include_usage": True, "continuous_usage_stats": True}
        options = dict(model=MODEL, prompt=PROMPT, max_tokens=6, n=2, seed=1, temperature=1.0)
        counts = {0: [], 1: []}
        *chunks, last = client.completions.create(**options, stream=True, stream_options=usage)
        for chunk in chunks:
            counts[chunk.choices[0].index].append(chunk.usage.completion_tokens)
            assert chunk.usage.prompt_tokens == last.usage.prompt_tokens
        for of_choice in counts.values():
            assert of_choice == sorted(set(of_choice)) and of_choice[0] >= 1 and of_choice[-1] == 6
        assert last.usage.completion_tokens == 12


class TestStops:
    def test_stop_tokens(self, complete, tiny):
        whole = complete()[0]["text"]
        stop = tiny[1].encode(whole)[3]
        choice, usage = complete(stop_token_ids=[stop])
        assert choice["finish_reason"] == "stop" and usage["completion_tokens"] <= 4
        assert whole.startswith(choice["text"]) and choice["text"] != whole

    def test_min_tokens(self, complete, tiny):
        """The end-of-sequence token has the highest logit at once, and comes after 5 tokens."""
        end = {"1": 100}
        assert tiny[1].eos_token_id == 1
        assert complete(logit_bias=end)[1]["completion_tokens"] == 1
        choice, usage = complete(logit_bias=end, min_tokens=5)
        assert usage["completion_tokens"] == 6 and choice["finish_reason"] == "stop"
        assert complete(logit_bias=end, min_tokens=5, ignore_eos=True)[1]["completion_tokens"] == 12


class TestControlTokens:
    TEXT = "<|end_of_text|>An assignment"

    def test_a_completions_control_tokens_are_parsed(self, complete, tiny):
        parsed = tiny[1].encode(self.TEXT)
        assert 1 in parsed
        choice, usage = complete(self.TEXT)
        assert usage["prompt_tokens"] == len(parsed) and choice["text"] == generate(*tiny, parsed, max_tokens=12)

    def test_a_template_rendered_by_the_client(self, complete, ask, tiny):
        rendered = tiny[1].apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
        chat = ask("/v1/chat/completions", messages=[USER], max_tokens=12)
        assert complete(rendered, add_special_tokens=False)[0]["text"] == content_of(chat)

    def test_a_text_may_be_taken_literally(self, complete, ask):
        tokens = ask("/tokenize", prompt=self.TEXT, split_special_tokens=True)["tokens"]
        assert 1 not in tokens and ask("/detokenize", tokens=tokens)["prompt"] == self.TEXT
        choice, usage = complete(self.TEXT, split_special_tokens=True)
        assert usage["prompt_tokens"] == len(tokens) and choice["text"] == complete(tokens)[0]["text"]

    def test_a_chats_control_tokens_stay_text(self, ask):
        for role in ("system", "user", "assistant"):
            messages = [{"role": role, "content": self.TEXT}, USER]
            plain = [{"role": role, "content": ""}, USER]
            for options in ({}, dict(messages=[USER, messages[0]], continue_final_message=True)):
                tokens = ask("/tokenize", **{"messages": messages, **options})["tokens"]
                without = ask("/tokenize", **{"messages": plain, **options})["tokens"]
                assert tokens.count(1) <= without.count(1)


class TestContinuing:
    def test_the_answer_goes_on_with_the_message(self, ask, tiny):
        whole = content_of(ask("/v1/chat/completions", messages=[USER], max_tokens=20))
        start = whole[: whole.index(" ", len(whole) // 2)]  # between two words' tokens
        messages = [USER, {"role": "assistant", "content": start}]
        rest = ask("/v1/chat/completions", messages=messages, continue_final_message=True, add_generation_prompt=False)
        assert content_of(rest).startswith(whole[len(start) :])
        tokens = ask("/tokenize", messages=messages, continue_final_message=True)["tokens"]
        assert tiny[1].decode(tokens) == tiny[1].decode(chat_prompt(tiny[1], QUESTION)) + start

    def test_the_prompt_is_transformers_text(self, ask, tiny):
        for content in ("The answer", " spaces \n", "ends <|end_of_text|> in one"):
            messages = [USER, {"role": "assistant", "content": content}]
            expected = tiny[1].apply_chat_template(messages, tokenize=False, continue_final_message=True)
            tokens = ask("/tokenize", messages=messages, continue_final_message=True)["tokens"]
            assert tiny[1].decode(tokens) == expected

    def test_a_template_that_strips(self, ask, server, monkeypatch):
        tokenizer = server.service.maker._encoder._tokenizer
        template = "{% for message in messages %}[{{ message.content.strip() }}]{% endfor %}"
        monkeypatch.setattr(tokenizer, "chat_template", template)
        tokens = ask("/tokenize", messages=[{"role": "user", "content": " a b \n"}], continue_final_message=True)[
            "tokens"
        ]
        assert tokenizer.decode(tokens) == "[a b"

    def test_a_conversation_without_a_begun_answer_is_refused(self, ask, tiny):
        tokens = ask("/tokenize", messages=[USER], add_generation_prompt=False)["tokens"]
        expected = tiny[1].apply_chat_template([USER], tokenize=False, add_generation_prompt=False)
        assert tiny[1].decode(tokens) == expected


class TestTokens:
    def test_a_text(self, ask, tiny):
        answer = ask("/tokenize", prompt=PROMPT, model=MODEL, return_token_strs=True)
        tokens = tiny[1].encode(PROMPT)
        names = tiny[1].convert_ids_to_tokens(tokens)
        assert answer == {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": names}
        assert ask("/detokenize", tokens=tokens) == {"prompt": PROMPT}

    def test_a_conversation(self, ask, tiny):
        tokens = ask("/tokenize", messages=[{"role": "system", "content": "be brief"}, USER])["tokens"]
        assert tokens == chat_prompt(tiny[1], QUESTION, system="be brief")

    @pytest.mark.parametrize(
        "path, body, message",
        [
            ("tokenize", {}, "prompt: give either a prompt or messages"),
            ("tokenize", {"prompt": "x", "messages": [USER]}, "prompt: give either a prompt or messages"),
            ("tokenize", {"prompt": "x" * 10**6}, "prompt has 1000000 characters, which are more tokens than fit"),
            ("detokenize", {"tokens": [10**20]}, "tokens has a token id outside the vocabulary"),
            ("detokenize", {"tokens": [5] * 513}, "tokens has 513 token ids; this model's maximum"),
            ("detokenize", {"tokens": [True]}, "tokens.0: input should be a valid integer"),
        ],
    )
    def test_refusals(self, server, path, body, message):
        answer = httpx.post(f"{server.address}/{path}", json=body)
        assert answer.status_code in (400, 413) and message in answer.json()["error"]["message"]


class TestErrors:
    def test_codes(self, client):
        long = [{"role": "user", "content": "x " * 600}]
        with pytest.raises(openai.BadRequestError, match="--max-model-len") as error:
            client.chat.completions.create(model=MODEL, messages=long)
        assert error.value.code == "context_length_exceeded"
        assert "This model's maximum context length is 512 tokens".lower() in error.value.message.lower()
        # langchain-openai finds these words where openai's exceptions do not show the code.
        assert "prompt is too long" in error.value.message
        with pytest.raises(openai.NotFoundError) as error:
            client.completions.create(model="gpt", prompt="x")
        assert error.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model=MODEL, prompt="x", suffix="red")
        assert error.value.param == "suffix"

    def test_the_servers_own_limit_of_new_tokens(self, tiny):
        with serving(*tiny, max_tokens=10) as server:
            body = {"prompt": "x", "max_tokens": 11, "ignore_eos": True}
            answer = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60).json()
            assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (10, "length")

    def test_the_model(self, client):
        assert client.models.retrieve(MODEL).id == MODEL
        with pytest.raises(openai.NotFoundError, match="there is no model other/name"):
            client.models.retrieve("other/name")


def test_langchain(server):
    langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    options = dict(model=MODEL, base_url=f"{server.address}/v1", api_key="none", max_retries=0, stream_usage=True)
    chat = langchain_openai.ChatOpenAI(**options, temperature=0, max_tokens=9, metadata={"run": "1"})
    text = chat.invoke([{"role": "developer", "content": "be brief"}, {**USER, "name": "me"}]).content
    parts = list(chat.stream([{"role": "system", "content": "be brief"}, USER]))
    assert "".join(part.content for part in parts) == text
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == 9
    with pytest.raises(openai.BadRequestError) as error:
        chat.invoke("long " * 600)
    assert error.value.code == "context_length_exceeded"


class TestBrowsers:
    def test_origins(self, server):
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, status in (("https://page.example", 200), ("https://other.example", 400)):
            answer = httpx.options(f"{server.address}/v1/completions", headers={"Origin": origin, **asked})
            assert answer.status_code == status
            answer = httpx.get(f"{server.address}/nothing", headers={"Origin": origin})
            allowed = answer.headers.get("Access-Control-Allow-Origin")
            assert answer.status_code == 404 and allowed == (origin if status == 200 else None)

    def test_without_the_option_no_page_reads_an_answer(self, tiny):
        with serving(*tiny, api_key="key") as server:
            answer = httpx.get(f"{server.address}/health", headers={"Origin": "https://page.example"})
            assert not [name for name in answer.headers if name.startswith("access-control")]
        with serving(*tiny, api_key="key", allowed_origins=["*"]) as server:
            answer = httpx.get(f"{server.address}/v1/models", headers={"Origin": "https://page.example"})
            assert answer.status_code == 401 and answer.headers["Access-Control-Allow-Origin"] == "*"


class TestLog:
    def test_ids(self, server):
        def id_of(**headers):
            return httpx.get(f"{server.address}/health", headers=headers).headers["x-request-id"]

        assert id_of(**{"X-Request-Id": "mine-1"}) == "mine-1"
        for none in ({}, {"X-Request-Id": "x" * 129}, {"X-Request-Id": b"a\xe9"}, {"X-Request-Id": "a 200"}):
            assert re.fullmatch("[0-9a-f]{32}", id_of(**none))
        assert id_of() != id_of()
        assert httpx.get(f"{server.address}/nothing").headers["x-request-id"]

    def test_a_line_for_each_request(self, server, caplog):
        headers = {"X-Request-Id": "mine-2"}
        with caplog.at_level(logging.INFO, "granite4_neuron"):
            httpx.post(f"{server.address}/v1/completions", json=BODY, headers=headers)
            httpx.post(f"{server.address}/v1/completions", json={**BODY, "stream": True, "n": 2, "seed": 1})
            httpx.post(f"{server.address}/v1/completions", json={"prompt": PROMPT, "max_tokens": -2})
            while len(caplog.records) < 3:  # a line may be logged after its answer is sent
                httpx.get(f"{server.address}/health")
        first, second, third = (record.getMessage() for record in caplog.records)
        tokens = r"prompt_tokens=\d+ cached_tokens=\d+ completion_tokens"
        times = r"first_token=\d+\.\d{3}s, \d+\.\d{3} s"
        assert re.fullmatch(rf"mine-2 /v1/completions 200 {tokens}=5 finish_reason=length {times}", first)
        assert re.fullmatch(rf"[0-9a-f]{{32}} /v1/completions 200 {tokens}=10 finish_reason=length {times}", second)
        assert re.fullmatch(r"[0-9a-f]{32} /v1/completions 400, \d+\.\d{3} s", third)
        assert not any(PROMPT in line for line in (first, second, third))

    def test_a_client_that_went_away(self, server, caplog):
        with caplog.at_level(logging.INFO, "granite4_neuron"):
            body = {**BODY, "max_tokens": 400, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{server.address}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
            while not caplog.records:
                httpx.get(f"{server.address}/health")
        assert "finish_reason=cancelled" in caplog.records[0].getMessage()
