"""The chat at /: the files that the server sends, and the page in a browser."""
# ruff: noqa: E402 (importorskip comes first)

import json
import re
import threading
import time

import pytest
import torch

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

from granite4_neuron import chat, load
from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.generation import ConversationEncoder, bundled_checkpoint
from granite4_neuron.serving.page.page import page_files
from test.support.browser import browser, executable
from test.support.kept_chats import chat_of, keep, kept
from test.support.serving import MODEL, serving
from test.support.thinking import NEMOTRON_MARKS, say, thinking_model

QUESTION = "What is the assert statement?"
KEY = "sésame"
WITH_KEY = {"Authorization": f"Bearer {KEY}".encode()}
ADAPTER = "red"
GREEDY = {"max_tokens": "12", "temperature": "0"}
LONG = {"max_tokens": "4000", "temperature": "5", "seed": "8"}  # with this seed it does not end by itself

MARKDOWN = """# <script>document.title = "run"</script>

<img src="https://elsewhere.example/a.png"> ![a picture](https://elsewhere.example/b.png) [bad](javascript:alert(1))
[a link][below]

السلام عليكم

1. one

2. two
   - nested

| a | b |
|---|--:|
| 1 | 2 |

```py
def f():
    return "<b>"
```

[below]: https://example.org/
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    peft = pytest.importorskip("test.support.adapters", reason="peft is not installed")
    folder = peft.save_adapter(bundled_checkpoint(), tmp_path_factory.mktemp("adapters") / ADAPTER)
    return load(dtype=torch.float32, adapters={ADAPTER: folder} if cpu.has_fused_kernels() else {})


@pytest.fixture(scope="module")
def server(tiny):
    with serving(*tiny, api_key=KEY, max_length=4096) as server:
        yield server


def test_files_need_no_key(server):
    """The files need no API key, and the page loads nothing else."""
    files = dict(page_files())
    texts = {}
    for path in files:
        answer = httpx.get(server.address + path)
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["trusted-types"] == policy["frame-ancestors"] == "'none'"
        assert {value for name, value in policy.items() if name.endswith("-src")} == {"'none'", "'self'"}
        assert policy["require-trusted-types-for"] == "'script'"
        texts[path] = answer.text
    assert not re.search(r'style="|\son[a-z]+=|https?:|<script(?! type="module" src=")', texts["/"])
    loaded = {f"/{path}" for path in re.findall(r'(?:src|href)="(.*?)"', texts["/"])}
    loaded |= {f"/page/{name}" for text in texts.values() for name in re.findall(r'from "\./(.*?)"', text)}
    assert loaded == files.keys() - {"/"}


def test_markdown_needs_the_key(server):
    def post(headers, text="*a*"):
        return httpx.post(f"{server.address}/page/markdown", json={"text": text}, headers=headers)

    assert post({}).status_code == 401
    assert post(WITH_KEY).json() == {"blocks": [{"line": 0, "node": ["p", {}, [["em", {}, ["a"]]]]}]}
    assert post(WITH_KEY, 1).json()["error"]["param"] == "text"
    assert post({**WITH_KEY, "Origin": "https://elsewhere.example"}).status_code == 403


def test_hosts_and_the_option(tiny, server):
    assert httpx.get(f"{server.address}/", headers={"Host": "elsewhere.example"}).status_code == 403
    assert httpx.post(f"{server.address}/", headers=WITH_KEY).status_code == 405
    assert httpx.get(f"{server.address}/page/nothing.js", headers=WITH_KEY).status_code == 404
    with serving(*tiny, has_page=False) as other:
        for path in ("/", "/page/main.js", "/page/markdown"):
            assert httpx.get(other.address + path).status_code == 404


@pytest.fixture(scope="module")
def page(server, tmp_path_factory):
    if executable() is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    with browser(tmp_path_factory.mktemp("profile")) as page:
        page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        page.resize(1000, 700)
        yield page


@pytest.fixture
def opened(server, page):
    """Open the page in a browser that keeps nothing from before, and give it the key."""
    page.open(f"{server.address}/")
    page.run("sessionStorage.clear()")  # the protocol clears everything else
    page.call("Page.navigate", url="about:blank")
    page.call("Storage.clearDataForOrigin", origin=server.address, storageTypes="all")
    page.open(f"{server.address}/")
    page.until("document.getElementById('notices').textContent.includes('needs an API key')")
    page.run("document.querySelector('.notice button').click()")
    page.until("document.activeElement.id === 'key'")
    page.type(KEY)
    page.press("Escape")
    page.until(f"document.getElementById('model').value === '{MODEL}' && !document.querySelector('.notice')")
    return page


def set_fields(page, **values):
    """Set settings to texts, with the events that typing causes."""
    for name, value in values.items():
        page.run(
            f"document.getElementById('{name}').value = {json.dumps(value)}; "
            f"document.getElementById('{name}').dispatchEvent(new Event('input', {{bubbles: true}}))"
        )


def send(page, text):
    page.run("document.getElementById('text').focus()")
    page.type(text)
    page.press("Enter")


def click(page, selector, number=0):
    page.run(f"document.querySelectorAll({json.dumps(selector)})[{number}].click()")


def ask(page, text, **settings):
    set_fields(page, **settings)
    send(page, text)
    return finished(page)


def finished(page):
    """Wait until no answer is being written; return the texts of the messages that are shown."""
    page.until("document.getElementById('stop').hidden")
    return said(page)


def shown_chat(page):
    id = page.run("location.hash.slice(1)")
    return next((chat for chat in kept(page) if chat["id"] == id), None)


def said(page):
    """Return the texts of the messages that are shown, as the browser keeps them."""
    chat, texts = shown_chat(page), []
    id = chat["leaf"] if chat else None
    while id is not None:
        message = chat["messages"][id]
        texts.insert(0, message["content"])
        id = message["parent"]
    return texts


def text_of(page, selector):
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.innerText.trim())")


def talk(*texts, system=None):
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_turns_settings_and_reload(opened, tiny):
    texts = ask(opened, QUESTION, system="be brief", **GREEDY)
    first = chat(*tiny, talk(QUESTION, system="be brief"), max_tokens=12)
    assert texts == [QUESTION, first]
    texts = ask(opened, "<b>Go on</b>", temperature="1.5", seed="3", top_k="9", min_p=" .01 ")
    options = dict(temperature=1.5, seed=3, top_k=9, min_p=0.01)
    second = chat(*tiny, talk(QUESTION, first, "<b>Go on</b>", system="be brief"), max_tokens=12, **options)
    assert texts == [QUESTION, first, "<b>Go on</b>", second]
    assert text_of(opened, ".user .content") == [QUESTION, "<b>Go on</b>"]
    # An answer that arrives in one part has no rate.
    assert re.search(rf"{MODEL}: 12 tokens(, [\d.]+ tokens/s)?, first after [\d.]+ s", text_of(opened, ".tools")[1])
    opened.type("a draft")
    opened.call("Page.reload")
    opened.until("document.querySelectorAll('.message').length === 4")
    assert said(opened) == texts
    assert opened.run("['text', 'system', 'seed'].map((id) => document.getElementById(id).value)") == [
        "a draft",
        "be brief",
        "3",
    ]
    click(opened, "#new")
    opened.until("!document.querySelector('.message')")
    assert text_of(opened, "#chats .open") == [QUESTION] and opened.run("document.getElementById('text').value") == ""


@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
def test_an_adapter(opened, tiny):
    assert opened.run("[...document.getElementById('model').options].map((each) => each.value)") == [MODEL, ADAPTER]
    opened.run(
        f"document.getElementById('model').value = '{ADAPTER}'; "
        "document.getElementById('model').dispatchEvent(new Event('change'))"
    )
    assert ask(opened, QUESTION, **GREEDY)[1] == chat(*tiny, talk(QUESTION), max_tokens=12, adapter=ADAPTER)


def test_edit_and_regenerate_lose_nothing(opened, tiny):
    ask(opened, QUESTION, **GREEDY)
    before = ask(opened, "Go on")
    click(opened, ".edit")
    opened.until("document.activeElement.ariaLabel === 'Edit the message'")
    opened.run("document.activeElement.select()")
    opened.type("What is pass?")
    opened.press("Enter")
    opened.until("document.querySelectorAll('.message').length === 2")
    edited = finished(opened)
    assert edited == ["What is pass?", chat(*tiny, talk("What is pass?"), max_tokens=12)]
    click(opened, ".regenerate")
    opened.until("document.querySelectorAll('.versions').length === 2")
    assert finished(opened) == edited  # it is greedy
    assert text_of(opened, ".versions span") == ["2/2", "2/2"]
    click(opened, ".versions button")
    opened.until("document.querySelectorAll('.message').length === 4")
    opened.until("document.activeElement.ariaLabel === 'Later version'")  # the focus stays
    assert text_of(opened, ".user .content") == [QUESTION, "Go on"]
    assert len(shown_chat(opened)["messages"]) == 7
    click(opened, ".edit", 1)
    opened.press("Escape")
    assert finished(opened) == before and opened.run("document.activeElement.className") == "edit"


def test_another_version_stays_in_view_while_an_answer_grows(opened):
    before = ask(opened, QUESTION, **GREEDY)
    click(opened, ".edit")
    opened.until("document.activeElement.ariaLabel === 'Edit the message'")
    set_fields(opened, **LONG)
    opened.run("document.querySelector('.editing .main').click()")
    opened.until("document.querySelector('.assistant')?.innerText.length > 200")
    click(opened, ".versions button")
    length = sum(len(message["content"]) for message in shown_chat(opened)["messages"].values())
    end = time.monotonic() + 60
    while sum(len(message["content"]) for message in shown_chat(opened)["messages"].values()) < length + 400:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert not opened.run("document.getElementById('stop').hidden") and said(opened) == before
    opened.press("Escape")
    assert finished(opened) == before and text_of(opened, ".versions span") == ["1/2"]


def test_stop_and_continue(opened, server):
    set_fields(opened, **LONG)
    send(opened, "List statements")
    opened.until("document.querySelector('.assistant')?.innerText.length > 200")
    opened.type("What is")
    opened.press("Enter", shift=True)
    opened.type("typed meanwhile?")
    opened.press("Enter")
    assert "still being written" in text_of(opened, "#status")[0]
    opened.press("Escape")
    texts = finished(opened)
    assert len(texts) == 2 and len(texts[1]) > 100
    assert opened.run("document.getElementById('text').value") == "What is\ntyped meanwhile?"
    end = time.monotonic() + 60
    while server.engine.num_running:
        assert time.monotonic() < end, "the server stops too"
    set_fields(opened, max_tokens="5")
    click(opened, ".continue")
    opened.until("document.querySelector('.assistant .tools').innerText.includes('limit of tokens')")
    longer = finished(opened)
    assert len(longer) == 2 and longer[1].startswith(texts[1]) and len(longer[1]) > len(texts[1])


def test_settings_are_checked(opened):
    set_fields(opened, top_k="1e")
    send(opened, QUESTION)
    opened.until("document.activeElement.id === 'top_k'")
    assert text_of(opened, "#top_k-problem") == ["Top k must be a whole number from 0 up, and is “1e”."]
    assert opened.run("document.activeElement.ariaInvalid") == "true"
    opened.press("Escape")
    assert opened.run("document.getElementById('text').value") == QUESTION and kept(opened) == []
    for name, values in {"temperature": ("-1", "1,5", "NaN"), "top_p": ("0", "1.1"), "seed": ("1.5", "9" * 17)}.items():
        for value in values:
            set_fields(opened, top_k="10", **{name: value})
            assert value in opened.run(f"document.getElementById('{name}-problem').textContent")
        set_fields(opened, **{name: ""})
    opened.press("Enter")
    assert len(finished(opened)) == 2


def test_a_refusal_of_the_server_is_shown(opened):
    too_long = "pass " * 5000
    assert ask(opened, QUESTION, system=too_long) == [QUESTION]
    assert "the prompt is too long" in text_of(opened, ".unanswered")[0]
    opened.type("typed meanwhile")
    set_fields(opened, system="", max_tokens="3")
    click(opened, "#retry")
    opened.until("document.querySelectorAll('.regenerate').length === 1")
    answered = finished(opened)
    assert len(answered) == 2 and opened.run("document.getElementById('text').value") == "typed meanwhile"
    set_fields(opened, system=too_long)
    click(opened, ".regenerate")
    opened.until("document.querySelector('.unanswered').innerText.includes('the prompt is too long')")
    assert finished(opened) == answered, "the answer of before is shown again"


def test_the_server_is_away_and_back(opened, server):
    offline = dict(latency=0, downloadThroughput=-1, uploadThroughput=-1)
    opened.call("Network.emulateNetworkConditions", offline=True, **offline)
    assert ask(opened, QUESTION, **GREEDY) == [QUESTION]
    assert "does not answer" in text_of(opened, "#notices")[0] and "Not answered." in text_of(opened, ".unanswered")[0]
    opened.type("typed meanwhile")
    opened.call("Network.emulateNetworkConditions", offline=False, **offline)
    opened.until("!document.querySelector('.notice')")
    assert text_of(opened, "#status") == ["The server is back."]
    click(opened, "#retry")
    opened.until("document.querySelectorAll('.regenerate').length === 1")
    assert opened.run("document.getElementById('text').value") == "typed meanwhile"
    set_fields(opened, **LONG)
    click(opened, ".regenerate")
    opened.until("document.querySelector('.assistant')?.innerText.length > 200")
    for connection in list(server.server_state.connections):
        connection.loop.call_soon_threadsafe(connection.transport.abort)
    cut_off = finished(opened)
    assert len(cut_off[1]) > 50 and "The connection broke." in text_of(opened, ".tools")[1]
    assert opened.run("document.getElementById('text').value") == "typed meanwhile"


def test_a_wrong_key_is_reported(opened):
    opened.run(
        "document.getElementById('key').value = 'wrong'; "
        "document.getElementById('key').dispatchEvent(new Event('change'))"
    )
    opened.until("document.getElementById('notices').textContent.includes('does not accept this API key')")
    assert ask(opened, QUESTION) == [QUESTION]


def test_markdown(opened):
    keep(opened, [chat_of("c", "A chat", "Show it", MARKDOWN)])
    opened.until("document.querySelectorAll('pre').length")
    find = "document.querySelector('.assistant .content')"
    assert opened.run("document.title") == "A chat - granite4-neuron"
    assert opened.run(f"{find}.querySelectorAll('script, img, b').length") == 0
    assert opened.run(f"{find}.querySelector('h1').textContent") == '<script>document.title = "run"</script>'
    links = opened.run(f"[...{find}.querySelectorAll('a')].map((each) => [each.href, each.rel, each.target])")
    assert links == [
        [url, "noopener noreferrer nofollow", "_blank"]
        for url in ("https://elsewhere.example/b.png", "https://example.org/")
    ]
    assert opened.run(f"getComputedStyle({find}.querySelector('pre code')).fontFamily").endswith("monospace")
    assert opened.run(f"getComputedStyle({find}.children[2]).direction") == "rtl"
    assert opened.run(f"getComputedStyle({find}.querySelector('td:last-child')).textAlign") == "right"
    click(opened, ".code-bar button")
    opened.until("document.querySelector('.code-bar button').textContent === 'Copied'")
    assert opened.run("navigator.clipboard.readText()") == 'def f():\n    return "<b>"'
    opened.run(
        "document.getElementById('answers').value = 'plain'; "
        "document.getElementById('answers').dispatchEvent(new Event('change'))"
    )
    opened.until(f"{find}.textContent === {json.dumps(MARKDOWN)}")


def test_growing_markdown_ends_as_if_rendered_at_once(opened):
    """A growing text ends as if rendered at once, keeps complete blocks, and tells each to screen readers once."""
    found = opened.run(
        """(async () => {
          const { MarkdownView } = await import("/page/markdown.js");
          const make = () => document.createElement("div");
          const text = """
        + json.dumps(MARKDOWN)
        + """, [grown, whole, told] = [make(), make(), []];
          const growing = new MarkdownView(grown, (text) => told.push(text));
          let first;
          for (let end = 0; end < text.length; end += 60) {
            growing.grow(text.slice(0, end));
            await new Promise((resolve) => setTimeout(resolve, 40));
            first ??= grown.children[1] && grown.firstChild;
          }
          const isKept = first === grown.firstChild;
          await growing.finish(text);
          await new MarkdownView(whole, () => {}).finish(text);
          return [isKept, grown.isEqualNode(whole), told.length, whole.childElementCount];
        })()"""
    )
    assert found[:2] == [True, True] and found[3] == 6
    assert found[3] <= found[2] <= found[3] + 1  # a list may be told as two if its next item comes late


def test_the_list_of_chats(opened):
    keep(opened, [chat_of(f"c{i}", f"Chat {i}", "Show it", "*An answer*", updated=i) for i in range(200)])
    assert opened.run("document.querySelectorAll('#chats li').length") == 200
    assert opened.run("document.querySelector('#chats .open').textContent") == "Chat 199"
    click(opened, ".rename")
    opened.run("document.activeElement.select()")
    opened.type("Another name")
    opened.press("Enter")
    opened.until("document.title.startsWith('Another name')")
    opened.run("document.getElementById('filter').focus()")
    opened.type("another")
    assert text_of(opened, "#chats .open") == ["Another name"]
    click(opened, ".remove")
    opened.until("location.hash === '' && !document.querySelector('.message')")
    assert len(kept(opened)) == 199
    click(opened, ".notice button")
    opened.until("location.hash === '#c199' && document.querySelectorAll('.message').length === 2")
    assert shown_chat(opened)["title"] == "Another name"


def test_two_tabs(opened, server):
    first = ask(opened, QUESTION, **GREEDY)
    opened.run("window.other = window.open(location.href); 1")
    opened.until("other.document.querySelectorAll('.regenerate').length === 1")
    assert ask(opened, "Go on")[:2] == first
    text = "document.getElementById('log').innerText"
    opened.until(f"other.document.querySelectorAll('.regenerate').length === 2 && other.{text} === {text}")
    opened.run(
        "other.document.querySelector('.rename').click(); "
        "other.document.querySelector('#chats input').value = 'New'; other.document.querySelector('#chats input')"
        ".dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}))"
    )
    opened.until("document.title.startsWith('New')")
    assert len(ask(opened, "And more")) == 6 and shown_chat(opened)["title"] == "New"
    opened.run("other.document.querySelector('.remove').click()")
    opened.until("location.hash === '' && !document.querySelector('.message')")
    opened.run("other.close()")
    assert kept(opened) == []


def test_two_tabs_that_write_at_once(opened):
    """Neither tab knows of the other's write: both new messages stay, and the third's later form and the new title."""
    keep(opened, [chat_of("c", "Old", "Show it", "An answer")])
    opened.run(
        """(async () => {
          const { Storage } = await import("/page/storage.js");
          const { add, newMessage } = await import("/page/chat.js");
          const tabs = [await Storage.open(() => {}), await Storage.open(() => {})];
          const [one, other] = [await tabs[0].load("c"), await tabs[1].load("c")];
          add(one, newMessage("user", "first", "1"));
          Object.assign(one.messages[1], { content: "An answer that grows", updated: 1 });
          add(other, newMessage("user", "second", "1"));
          await tabs[0].save(one);
          await tabs[0].rename("c", "New");
          await tabs[1].save(other);
        })()"""
    )
    [chat] = kept(opened)
    contents = sorted(message["content"] for message in chat["messages"].values())
    assert (chat["title"], contents) == ("New", ["An answer that grows", "Show it", "first", "second"])


def test_a_full_storage_is_reported(opened, server):
    opened.call("Storage.overrideQuotaForOrigin", origin=server.address, quotaSize=1)
    try:
        ask(opened, QUESTION, **GREEDY)
        opened.until("document.getElementById('notices').textContent.includes('no room')")
        assert len(text_of(opened, ".message")) == 2
    finally:
        opened.call("Storage.overrideQuotaForOrigin", origin=server.address)
    ask(opened, "Go on")
    opened.until("!document.querySelector('.notice')")
    assert len(said(opened)) == 4


def exported(page, folder):
    """Return the texts of the files that the page saves of the chat, by their kinds."""
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    texts = {}
    for number, kind in enumerate(("md", "json")):
        file = folder / f"What-is-the-assert-statement.{kind}"
        click(page, "#export button", number)
        end = time.monotonic() + 60
        while not file.is_file():
            assert time.monotonic() < end
            time.sleep(0.02)
        texts[kind] = file.read_text(encoding="utf-8")
    return texts


def test_export(opened, server, tmp_path):
    texts = ask(opened, QUESTION, system="be brief", **GREEDY)
    files = exported(opened, tmp_path)
    assert all(text.strip() in files["md"] for text in [*texts, "be brief", "**You**"])
    chat = json.loads(files["json"])
    messages = chat["messages"]
    assert chat["answers"] == [{"model": MODEL, "finish_reason": "length"}]
    again = {"messages": [*messages, {"role": "user", "content": "Go on"}], "max_tokens": 1}
    assert httpx.post(f"{server.address}/v1/chat/completions", json=again, headers=WITH_KEY).status_code == 200
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert [message["content"] for message in messages[1:]] == texts


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A server without a key, whose model thinks; and its tokenizer."""
    runtime, tokenizer = thinking_model(tmp_path_factory.mktemp("thinking"), NEMOTRON_MARKS)
    with serving(runtime, tokenizer, max_length=2048) as server:
        yield server, tokenizer


THOUGHT, ANSWER = "So *it* is\n\nsunny <b>", "It is **sunny**."


def test_a_thought(page, thinking, monkeypatch, tmp_path):
    """It is open while it grows, closed when it has ended, kept, shown to the model's template again, and exported."""
    server, tokenizer = thinking
    seen, asked = threading.Event(), []
    encode = ConversationEncoder.encode

    def recorded(self, messages, **shown):
        asked.append(messages)
        return encode(self, messages, **shown)

    monkeypatch.setattr(ConversationEncoder, "encode", recorded)
    say(monkeypatch, tokenizer, f"{THOUGHT}\n</think>\n{ANSWER}", lambda _: seen.wait(1))
    page.open(f"{server.address}/")
    page.until(f"document.getElementById('model').value === '{MODEL}'")
    send(page, QUESTION)
    shown = "(({open, innerText}) => [open, innerText.split('\\n')[0]])(document.querySelector('.thought'))"
    grown = page.until("document.querySelector('.thought p')?.textContent")
    assert THOUGHT.startswith(grown) and page.run(shown) == [True, "Thinking…"]
    assert "Thinking" in text_of(page, "#spoken p")
    seen.set()
    assert finished(page) == [QUESTION, ANSWER]
    assert page.run(shown) == [False, "Thought"]
    page.until("document.querySelector('.assistant .content strong')?.textContent")
    page.call("Page.reload")
    page.until("document.querySelectorAll('.message').length === 2")
    assert page.run(shown) == [False, "Thought"]
    click(page, ".thought summary")
    assert page.run(shown) == [True, "Thought"] and text_of(page, ".thought p") == [THOUGHT]
    send(page, "Go on")
    assert len(finished(page)) == 4 and page.run(shown) == [True, "Thought"], "it stays as the person wants it"
    answer = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
    assert list(asked[-1]) == [*talk(QUESTION), answer, *talk("Go on")]
    files = exported(page, tmp_path)
    assert f"> So *it* is\n> \n> sunny <b>\n\n{ANSWER}\n" in files["md"]
    assert json.loads(files["json"])["messages"][1] == answer


def test_a_thought_that_is_stopped(page, thinking, monkeypatch):
    """It is an answer without a text, and goes on with one."""
    server, tokenizer = thinking
    stopped = threading.Event()
    say(monkeypatch, tokenizer, f"{THOUGHT}\n</think>\n{ANSWER}", lambda _: stopped.wait(1))
    page.open(f"{server.address}/")
    page.until(f"document.getElementById('model').value === '{MODEL}'")
    send(page, QUESTION)
    page.until("document.querySelector('.thought p')?.textContent")
    page.press("Escape")
    assert finished(page) == [QUESTION, ""]
    stopped.set()
    assert "Stopped." in text_of(page, ".tools")[1] and page.run("document.querySelector('.thought').open") is False
    thought = page.run("document.querySelector('.thought p').textContent")
    say(monkeypatch, tokenizer, ANSWER, thought=thought)
    click(page, ".continue")
    page.until("document.querySelector('.assistant .content strong')?.textContent")
    assert finished(page) == [QUESTION, ANSWER] and text_of(page, ".thought summary") == ["Thought"]


ANIMATION = """(() => {
  const waiting = document.body.appendChild(document.createElement("span"));
  waiting.className = "waiting";
  const name = getComputedStyle(waiting.appendChild(document.createElement("i"))).animationName;
  waiting.remove();
  return name;
})()"""


def test_screen_readers_and_motion(opened):
    ask(opened, QUESTION, max_tokens="60", temperature="0")
    texts = "[...document.querySelector('{}').children].map((each) => each.textContent)"
    blocks, spoken = texts.format(".assistant .content"), texts.format("#spoken")
    told_all = f"JSON.stringify(['Waiting for the answer', ...{blocks}]) === JSON.stringify({spoken})"
    opened.until(f"{blocks}.length > 2 && {told_all}")
    nameless = (
        "[...document.querySelectorAll('button, input, select, textarea')].filter((each) => "
        "!each.textContent.trim() && !each.ariaLabel && !each.labels?.length).map((each) => each.outerHTML)"
    )
    assert opened.run(nameless) == []
    found = []
    for value in ("no-preference", "reduce"):
        opened.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": value}])
        found.append(opened.run(ANIMATION))
    assert found == ["wait", "none"]


def test_the_page_fits_a_telephone(opened):
    opened.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    wide = "| wide " * 40 + "|\n" + "|---" * 40 + "|\n\n" + "long" * 200
    keep(opened, [chat_of("c", "A chat", "Show it", MARKDOWN + wide)])
    opened.resize(360, 640)
    try:
        opened.until("document.querySelectorAll('.assistant pre').length")
        beyond = "[...document.querySelectorAll('html, #log')].map((each) => each.scrollWidth - each.clientWidth)"
        assert opened.run(beyond) == [0, 0]
        assert opened.run("document.getElementById('send').getBoundingClientRect().bottom") < 640
        hidden = "getComputedStyle(document.getElementById('sidebar')).visibility"
        assert opened.run(hidden) == "hidden"
        click(opened, "#open-sidebar")
        assert opened.run(hidden) == "visible"
        opened.press("Escape")
        assert opened.run(hidden) == "hidden" and opened.run("document.activeElement.id") == "open-sidebar"
    finally:
        opened.resize(1000, 700)


def test_colours(opened):
    background = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for theme in ("light", "dark", ""):
        opened.run(
            f"document.getElementById('theme').value = '{theme}'; "
            "document.getElementById('theme').dispatchEvent(new Event('change'))"
        )
        seen.append(opened.run(background))
    for system in ("light", "dark"):
        opened.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": system}])
        seen.append(opened.run(background))
    assert seen[:2] == seen[3:] and seen[0] != seen[1]


def test_the_page_requests_and_stores_nothing_else(opened, server, thinking):
    """All tests of the page are covered."""
    asked = {each["request"]["url"] for kind, each in opened.events if kind == "Network.requestWillBeSent"}
    own = server.address, thinking[0].address, "about:", "blob:"
    assert asked and all(url.startswith(own) for url in asked)
    entries = [each["entry"] for kind, each in opened.events if kind == "Log.entryAdded"]
    assert not [entry for entry in entries if entry["source"] == "security"], "the policy allows what the page does"
    assert not [each for kind, each in opened.events if kind == "Runtime.exceptionThrown"]
    ask(opened, QUESTION, **GREEDY)
    assert KEY in opened.run("JSON.stringify(sessionStorage)"), "it ends with the tab"
    assert KEY not in opened.run("JSON.stringify(localStorage) + document.cookie") + str(kept(opened))
