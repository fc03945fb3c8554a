"""Requests and settings that the server refuses, and its messages."""
# ruff: noqa: E402 (importorskip comes first)

import json
import re

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("openai", reason="OpenAI's client is not installed; it knows all of OpenAI's fields")

from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from granite4_neuron.errors import UserError
from granite4_neuron.serving.apis.chat.protocol import ChatBody, CompletionBody
from granite4_neuron.serving.apis.endpoints import BY_PATH
from granite4_neuron.serving.http import app
from test.support.serving import named_events, serving
from test.support.waiting import until

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def post(server):
    """Return a function that posts a body to a path and returns the response."""

    def send(path, body):
        content = body if isinstance(body, bytes) else json.dumps(body)
        return httpx.post(f"{server.address}/v1/{path}", content=content, headers=JSON, timeout=60)

    return send


@pytest.mark.parametrize("path, params", [("completions", CompletionParams), ("chat/completions", ChatParams)])
def test_every_field_of_openais_is_known_or_named(post, path, params):
    body = CompletionBody if path == "completions" else ChatBody
    known, unsupported = body.model_fields, body.unsupported
    required = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    unknown = [name for name in params.__annotations__ if name not in known]
    assert known.keys() > {"logit_bias"} and unsupported.keys() & set(unknown)
    for name in unknown:
        answer = post(path, {**required, name: "x", "max_tokens": 1})
        if name in unsupported:
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name
            assert name in answer.json()["error"]["message"]
        else:
            assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == name
        assert post(path, {**required, name: None, "max_tokens": 1}).status_code == 200, "null is nothing"


BAD = {
    "no JSON": (b"nonsense", "not a request in JSON"),
    "nothing": (b"", "not a request in JSON"),
    "a list": ([], "not a request in JSON"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not a request in JSON"),
    "half a character": (b'{"prompt": "\\ud800"}', "not a request in JSON"),
    "a field of half a character": (b'{"prompt": "x", "\\ud800": 1}', "not a request in JSON"),
    "deep": (b"[" * 10_000, "not a request in JSON"),
    "no prompt": ({}, "prompt: field required"),
    "an empty prompt": ({"prompt": ""}, "prompt: it must be"),
    "no prompts": ({"prompt": []}, "prompt: it must be"),
    "booleans": ({"prompt": [True]}, "prompt: it must be"),
    "tokens outside": ({"prompt": [10**30]}, "prompt has a token id outside the vocabulary"),
    "a long prompt": ({"prompt": [5] * 512}, "prompt has 512 tokens > 511, and at least one new one must fit; this"),
    "a limit below -1": ({"max_tokens": -2}, "max_tokens: input should be greater than or equal to -1"),
    "top_k below -1": ({"top_k": -2}, "top_k is -2, and must be"),
    "a seed below -1": ({"seed": -2}, "seed is -2, and must be"),
    "no tokens": ({"max_tokens": 0}, "max_tokens: it may be 0 only with echo"),
    "temperature": ({"temperature": -1}, "temperature is -1.0, and must be"),
    "NaN": (b'{"prompt": "x", "temperature": NaN}', "the body is not JSON (NaN and Infinity are not"),
    "Infinity": (b'{"prompt": "NaN \\" I", "x": [-Infinity]}', "the body is not JSON (NaN and Infinity are not"),
    "a number as text": ({"top_k": "3"}, "top_k: input should be a valid integer"),
    "top_p": ({"top_p": 0}, "top_p is 0.0, and must be"),
    "min_p": ({"min_p": 2}, "min_p is 2.0, and must be"),
    "seed": ({"seed": 2**63}, "seed is 9223372036854775808, and must be"),
    "presence": ({"presence_penalty": 3}, "presence_penalty is 3.0, and must be"),
    "bias": ({"logit_bias": {"5": 101}}, "logit_bias is {5: 101}, and must be"),
    "a huge bias": ({"logit_bias": {"5": 10**400}}, "logit_bias is {5: 1000"),
    "a huge temperature": ({"temperature": 10**400}, "temperature: input should be a"),
    "a huge n": ({"n": 10**400}, "n: input should be less than or equal to 128"),
    "a huge token": ({"prompt": [10**400]}, "prompt has a token id outside the vocabulary"),
    "a bias of a long number": (
        {"logit_bias": {"9" * 5000: 1}},
        "logit_bias: it must be an object of numbers by token",
    ),
    "bias outside": ({"logit_bias": {"99999": 1}}, "logit_bias has a token id outside the vocabulary"),
    "bias of a word": ({"logit_bias": {"a": 1}}, "logit_bias: it must be an object of numbers by token id"),
    "n": ({"n": 0}, "n: input should be greater than or equal to 1"),
    "more than can wait": ({"n": 100}, "asks for 100 texts; this server takes 20 at most"),
    "stop": ({"stop": [""]}, "stop: it must be a string or a list"),
    "logprobs": ({"logprobs": True}, "logprobs: input should be a valid integer"),
    "best_of": ({"n": 2, "best_of": 3}, "best_of: it must be equal to n"),
    "suffix": ({"suffix": "x"}, "suffix: this server does not support it"),
    "many stop tokens": ({"stop_token_ids": [1] * 129}, "stop_token_ids: list should have at most 128"),
    "a huge stop token": ({"stop_token_ids": [10**30]}, "stop_token_ids is [10000"),
    "min_tokens": ({"max_tokens": 8, "min_tokens": 9}, "min_tokens is 9, and must be at most max_tokens, 8"),
    "no allowed token": ({"allowed_token_ids": []}, "allowed_token_ids is [], and must be"),
    "an allowed token outside": ({"allowed_token_ids": [10**6]}, "allowed_token_ids has a token id outside the voc"),
    "a bad word that is none": ({"bad_words": [""]}, "bad_words.0: string should have at least 1 character"),
    "a bad word of spaces": ({"bad_words": ["  "]}, "bad_words has '  ', which is no token"),
    "many bad words": ({"bad_words": ["x"] * 129}, "bad_words: list should have at most 128"),
    "nothing left of a prompt": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens: it must be a number of"),
    "a text as priority": ({"priority": "high"}, "priority: input should be a valid integer"),
    "an empty salt": ({"cache_salt": ""}, "cache_salt: string should have at least 1 character"),
    "all log-probabilities of a prompt": ({"prompt_logprobs": -1}, "prompt_logprobs is -1, and must be"),
    "those of a prompt in a stream": (
        {"prompt_logprobs": 1, "stream": True},
        "prompt_logprobs: it is not for stream: true",
    ),
    "two structures": (
        {"json_schema": {"type": "object"}, "grammar": 'root ::= "a"'},
        "json_schema and grammar exclude each other",
    ),
    "a sampler of llama-server": ({"mirostat": 2}, "mirostat: this server supports only 0"),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("body, message", BAD.values(), ids=BAD.keys())
def test_bad_bodies_are_refused(post, body, message):
    has_prompt = not isinstance(body, dict) or not body or "prompt" in body
    answer = post("completions", body if has_prompt else {"prompt": "x", **body})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_bad_conversations_are_refused(post):
    user = {"role": "user", "content": "x"}
    for body, message in (
        ({"messages": []}, "messages: list should have at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: input should be 'system', 'user', "),
        ({"messages": [{"role": "user"}]}, "messages.0: a message of the role user must have a content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            'no part of the type "image_url", because its',
        ),
        ({"messages": [user, {**user, "prefix": True}]}, "messages.1.prefix: this server does not support it"),
        ({"messages": [user], "skip_special_tokens": 1}, "skip_special_tokens: this server supports only true"),
        ({"messages": [user], "modalities": ["text", "audio"]}, 'modalities: this server supports only ["text"]'),
        (
            {"messages": [user], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message: it goes on with the last message",
        ),
        ({"messages": [user], "top_logprobs": 1}, "top_logprobs: it is only for logprobs: true"),
    ):
        answer = post("chat/completions", body)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_other_paths_methods_and_models(post, server):
    assert post("completions", {"prompt": "x", "model": "gpt"}).status_code == 404
    assert post("embeddings", {}).status_code == 404
    answer = httpx.get(f"{server.address}/v1/completions")
    assert answer.status_code == 405 and "/v1/completions" in answer.json()["error"]["message"]


def test_a_trailing_slash_is_not_redirected(server):
    answer = httpx.get(f"{server.address}/v1/models/", headers={"Host": "localhost"})
    assert answer.status_code == 404 and "Location" not in answer.headers


def test_very_long_names_are_cut(post):
    answer = post("completions", {"prompt": "x", "model": "m" * 10**6})
    assert answer.status_code == 404 and len(answer.content) < 2000
    assert "mmm...mmm" in answer.json()["error"]["message"]
    answer = post("completions", {"prompt": "x", "m" * 10**6: 1, "max_tokens": 1})
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers


def test_other_hosts_are_refused(server):
    """A page whose name resolves to this server can send requests with its own name as their host."""
    port = server.address.rpartition(":")[2]
    for host in ("localhost", "LocalHost", "127.0.0.1", "[::1]"):
        for suffix in ("", f":{port}", ":80"):
            assert httpx.get(f"{server.address}/health", headers={"Host": host + suffix}).status_code == 200
    for host in (
        "elsewhere.example",
        f"elsewhere.example:{port}",
        "localhost.example",
        "[::2]",
        "127.0.0.1.example:80",
    ):
        for path in ("/health", "/v1/models", "/nothing"):
            answer = httpx.get(server.address + path, headers={"Host": host})
            assert answer.status_code == 403
            assert re.search(
                f"host is {re.escape(host)}, and must be .*--allowed-hosts", answer.json()["error"]["message"]
            )


def page(server, origin, site=None):
    """Return the headers of a browser's request for a page of this origin."""
    headers = {"Origin": origin.replace("PORT", server.address.rpartition(":")[2])} if origin else {}
    return headers | ({"Sec-Fetch-Site": site} if site else {})


FOREIGN = [
    ("https://elsewhere.example", None),
    ("http://127.0.0.1:1", None),
    ("http://localhost:PORT", None),
    ("http://127.0.0.1", None),
    ("null", None),
    ("https://elsewhere.example", "cross-site"),
    ("http://127.0.0.1:PORT", "cross-site"),
    ("http://127.0.0.1:1", "same-site"),
    (None, "cross-site"),
    (None, "same-site"),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize("origin, site", FOREIGN)
def test_pages_of_other_origins_are_refused(server, origin, site):
    """A browser sends such requests without asking the server, and a page need not read the answer to do harm."""
    headers = page(server, origin, site)
    for kind in ("application/json", "text/plain"):
        for path in ("v1/completions", "v1/chat/completions", "tokenize", "detokenize"):
            every = {**headers, "Content-Type": kind}
            answer = httpx.post(f"{server.address}/{path}", content=b'{"prompt": "x"}', headers=every)
            assert answer.status_code == 403 and "--allowed-origins" in answer.json()["error"]["message"]
    assert httpx.get(f"{server.address}/", headers=headers).status_code == 200, "a link leads to the page"


@pytest.mark.parametrize(
    "origin, site",
    [
        (None, None),
        ("http://127.0.0.1:PORT", None),
        ("http://127.0.0.1:PORT", "same-origin"),
        ("https://chat.example", "same-origin"),  # through a proxy that replaces Host
        (None, "none"),
    ],
)
def test_the_servers_own_page_and_other_programs_are_served(server, origin, site):
    body = {"prompt": "x", "max_tokens": 1}
    answer = httpx.post(f"{server.address}/v1/completions", json=body, headers=page(server, origin, site), timeout=60)
    assert answer.status_code == 200


def test_pages_of_allowed_origins_are_served(tiny):
    body = {"prompt": "x", "max_tokens": 1}
    for allowed, statuses in ((["https://chat.example", "null"], [200, 200, 403]), (["*"], [200, 200, 200])):
        with serving(*tiny, allowed_origins=allowed) as server:
            url = f"{server.address}/v1/completions"
            for origin, status in zip(("https://chat.example", "null", "https://other.example"), statuses, strict=True):
                headers = page(server, origin, "cross-site")
                assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == status
                plain = {**headers, "Content-Type": "text/plain"}
                answer = httpx.post(url, content=json.dumps(body), headers=plain)
                assert answer.status_code == (415 if status == 200 else 403)


def test_a_server_that_is_shutting_down_is_not_healthy(server, post, monkeypatch):
    assert httpx.get(f"{server.address}/health").status_code == 200
    monkeypatch.setattr(server.service, "is_ending", True)
    answer = httpx.get(f"{server.address}/health")
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "the server is ending."
    assert post("completions", {"prompt": "x", "max_tokens": 1}).status_code == 503


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 60}
ASKED = {
    "completions": {"prompt": "x", "max_tokens": 60},
    "chat/completions": CHAT,
    "messages": CHAT,
    "responses": {"input": "x", "max_output_tokens": 60},
}


def last_error(path, text):
    """Return the type and the message of the error that ends a stream, and how many events are before it."""
    if path == "responses":
        *before, last = named_events(text)
        events = [*before, last]
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        return last["response"]["error"]["code"], last["response"]["error"]["message"], len(before) - 2
    if path == "messages":
        *before, last = named_events(text)
        assert last["type"] == "error"
    else:
        *before, last = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    return last["error"]["type"], last["error"]["message"], len(before)


@pytest.mark.parametrize("path", ASKED)
def test_what_the_engine_refuses_is_the_requests_fault(server, post, path, monkeypatch, caplog):
    def refuse(_):
        raise UserError("there is no room for it.")

    with monkeypatch.context() as patched:
        patched.setattr(server.engine, "add", refuse)
        whole = post(path, ASKED[path])
        streamed = post(path, {**ASKED[path], "stream": True})
    assert whole.status_code == 400 and whole.json()["error"]["message"] == "there is no room for it."
    kind = "invalid_prompt" if path == "responses" else "invalid_request_error"
    assert streamed.status_code == 200 and last_error(path, streamed.text) == (kind, "there is no room for it.", 0)
    assert not caplog.records and not server.service.engine._live
    assert post(path, ASKED[path]).status_code == 200


@pytest.mark.parametrize("where", ["engine", "tokens", "first event", "last event"])
@pytest.mark.parametrize("path", ASKED)
def test_a_stream_that_fails_here_says_so(server, post, path, where, monkeypatch, caplog):
    def fail(*_):
        raise KeyError("x")

    owner, name = {
        "engine": (server.engine, "add"),
        "tokens": (app._EventStream, "_take"),
        "first event": (app, "_text"),
        "last event": (BY_PATH[f"/v1/{path}"].answer, "last_events"),
    }[where]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        answer = post(path, {**ASKED[path], "stream": True})
    kind, message, num_before = last_error(path, answer.text)
    assert answer.status_code == 200 and message == "the server failed at this request; its log says why."
    assert kind == {"messages": "api_error"}.get(path, "server_error")
    assert where == "tokens" or (num_before > 0) == (where == "last event")
    assert [record.exc_info[0] for record in caplog.records] == [KeyError]
    until(lambda: not server.service.engine._live)
    assert post(path, ASKED[path]).status_code == 200


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_a_body_that_is_not_declared_as_json_is_refused(server, kind):
    """A page of another origin may send such a body without a preflight request."""
    headers = {} if kind is None else {"Content-Type": kind}
    answer = httpx.post(f"{server.address}/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415 and "it must be application/json" in answer.json()["error"]["message"]
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        headers = {"Content-Type": kind}
        answer = httpx.post(f"{server.address}/v1/completions", content=b'{"max_tokens": 0}', headers=headers)
        assert answer.status_code == 400


def test_half_a_character_from_a_chat_template_is_refused(server, post, monkeypatch, capfd):
    monkeypatch.setattr(server.service.maker._encoder._tokenizer, "chat_template", r"{{ '\ud800' }}")
    answer = post("chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 400 and "half a character" in answer.json()["error"]["message"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_too_long_body_is_refused(post):
    answer = post("completions", b'"' + b"x" * 2**20)
    assert answer.status_code == 413 and "--max-body" in answer.text

    def pieces():
        for _ in range(40):
            yield b"x" * 2**15

    assert httpx.post(str(post("completions", {}).request.url), content=pieces(), headers=JSON).status_code == 413


def test_a_text_that_cannot_fit_is_not_encoded(post, server, monkeypatch):
    text = "x" * 500_000
    with monkeypatch.context() as patch:
        patch.setattr(server.service.maker, "_encoder", None)
        messages = [{"role": "user", "content": text}]
        for path, body in (("completions", {"prompt": ["x", text]}), ("chat/completions", {"messages": messages})):
            answer = post(path, body)
            assert answer.status_code == 400
            assert re.search(
                "has 5000[0-9]{2} characters, which are more tokens than fit; this model's maximum", answer.text
            )
            assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_only_the_right_key_is_accepted(tiny):
    with serving(*tiny, api_key="sésame") as server:
        for key, status in ((None, 401), ("wrong", 401), ("sésame", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}".encode()}
            for path in ("/v1/models", "/metrics"):
                assert httpx.get(server.address + path, headers=headers).status_code == status
        for scheme, status in (("bearer", 200), ("BEARER ", 200), ("Basic", 401), ("BearerX", 401)):
            headers = {"Authorization": f"{scheme} sésame".encode()}
            assert httpx.get(f"{server.address}/v1/models", headers=headers).status_code == status
        assert httpx.get(f"{server.address}/health").status_code == 200
