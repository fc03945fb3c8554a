"""The chat at /: what the server sends, and what a browser makes of it."""
# ruff: noqa: E402 (what may not be installed comes first)

import base64
import hashlib
import json
import re
import time

import pytest
import torch

pytest.importorskip("fastapi", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron import chat, load
from test.support.browser import browser, executable
from test.support.serving import MODEL, serving

QUESTION = "What is the assert statement?"
KEY = "sésame"


@pytest.fixture(scope="module")
def tiny():
    return load(dtype=torch.float32)


@pytest.fixture(scope="module")
def server(tiny):
    with serving(*tiny, api_key=KEY, max_length=4096) as server:
        yield server


def test_it_is_one_file_that_loads_nothing(server):
    answer = httpx.get(f"{server.address}/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.findall(r"""\bsrc=|https?:|//[a-z]|@import|url\(|style="|\son[a-z]+=""", answer.text)
    assert re.findall(r'href="(.*?)"', answer.text) == ["data:,"]
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        [text] = re.findall(rf"<{kind}>(.*?)</{kind}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"


def test_hosts_and_the_option(tiny, server):
    assert httpx.get(f"{server.address}/", headers={"Host": "elsewhere.example"}).status_code == 403
    assert httpx.post(f"{server.address}/").status_code == 405
    with serving(*tiny, has_page=False) as other:
        assert httpx.get(f"{other.address}/").status_code == 404


@pytest.fixture(scope="module")
def page(server, tmp_path_factory):
    if executable() is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def opened(server, page):
    """Open the page, give it the key, and return functions to fill a field, to ask, and to wait for the answer."""
    page.open(f"{server.address}/")
    page.until("document.getElementById('status').textContent.includes('API key')")
    fill(page, key=KEY)
    page.until(f"document.getElementById('model').textContent === '{MODEL}'")
    return page


def fill(page, **fields):
    for name, value in fields.items():
        target = f"document.getElementById({json.dumps(name)})"
        page.run(f"{target}.value = {json.dumps(str(value))}; {target}.dispatchEvent(new Event('change')); 1")


def ask(page, text, **fields):
    fill(page, text=text, **fields)
    page.run("document.getElementById('send').click()")


def texts(page):
    return page.run("[...document.querySelectorAll('.message')].map((each) => each.textContent)")


def wait(page):
    page.until("!document.getElementById('send').hidden")
    return page.run("document.getElementById('status').textContent")


def test_turns_and_options(opened, tiny):
    ask(opened, QUESTION, system="be brief", max_tokens=12, temperature=0)
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}]
    assert re.fullmatch(r"12 tokens, [\d.]+ tokens/s, first after [\d.]+ s", wait(opened))
    first = chat(*tiny, talk, max_tokens=12)
    assert texts(opened) == [QUESTION, first]
    ask(opened, "<b>Go on</b>", temperature=1.5, seed=3, top_k=9)
    wait(opened)
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "<b>Go on</b>"}]
    second = chat(*tiny, talk, max_tokens=12, temperature=1.5, seed=3, top_k=9)
    assert texts(opened) == [QUESTION, first, "<b>Go on</b>", second]
    opened.run("document.getElementById('new').click()")
    assert texts(opened) == []


def test_stop(opened, server):
    ask(opened, "List statements", max_tokens=4000, temperature=2, seed=1)
    opened.until("document.querySelectorAll('.message')[1]?.textContent.length > 20")
    opened.run("document.getElementById('stop').click()")
    wait(opened)
    assert len(texts(opened)[1]) > 20
    end = time.monotonic() + 60
    while server.engine.num_running:
        assert time.monotonic() < end, "the server stops too"
    ask(opened, "And now?", max_tokens=3)
    wait(opened)
    assert len(texts(opened)) == 4, "the conversation goes on"


def test_errors(opened):
    ask(opened, QUESTION, max_tokens=5000)
    assert "max_tokens is 5000" in wait(opened)
    assert texts(opened) == [] and opened.run("document.getElementById('text').value") == QUESTION
    ask(opened, QUESTION, max_tokens=3, key="wrong")
    wait(opened)
    opened.until("document.getElementById('status').textContent.includes('API key')")
    assert texts(opened) == []


def test_colours(opened):
    background = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for theme in ("light", "dark"):
        fill(opened, theme=theme)
        seen.append(opened.run(background))
    fill(opened, theme="")
    for system in ("light", "dark"):
        opened.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": system}])
        seen.append(opened.run(background))
    assert seen[:2] == seen[2:] and seen[0] != seen[1]


def test_nothing_else_is_asked_or_stored(opened, server):
    """Over all tests of the page."""
    asked = {each["request"]["url"] for kind, each in opened.events if kind == "Network.requestWillBeSent"}
    assert asked and all(url.startswith((server.address, "data:")) for url in asked)
    entries = [each["entry"] for kind, each in opened.events if kind == "Log.entryAdded"]
    assert not [entry for entry in entries if entry["source"] == "security"], "the policy allows what the page does"
    assert opened.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
