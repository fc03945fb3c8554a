"""Markdown as nodes, compared with the HTML of the parser's own renderer."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from granite4_neuron.system.sandbox import markdown
from granite4_neuron.system.sandbox.markdown import MarkdownFailed, MarkdownProcess, answer

DOCS = Path(__file__).parents[4] / "docs"


def nodes(text):
    return [block["node"] for block in answer({"text": text})["blocks"]]


class Events(HTMLParser):
    """The tags and texts of HTML in order, without space between elements."""

    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs).get("href")))
        if tag in ("br", "hr"):
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        self.found.append(tag)

    def handle_data(self, data):
        if data.strip():
            self.found.append(data.strip())


def events(node):
    if isinstance(node, str):
        return [node.strip()] if node.strip() else []
    tag, attributes, children = node
    within = [event for child in children for event in events(child)]
    if tag == "pre":
        within = [("code", None), *within, "code"]
    return [(tag, attributes.get("href")), *within, tag]


@pytest.mark.parametrize("file", [DOCS / "http-api.md", DOCS / "architecture.md"], ids=lambda file: file.name)
def test_nodes_agree_with_the_renderer(file):
    text = file.read_text(encoding="utf-8").replace("![", "[")
    parser = MarkdownIt("js-default", {"html": False, "breaks": True})
    parser.validateLink = lambda url: url.startswith("https://")
    expected = Events(parser.render(text)).found
    assert len(expected) > 500
    assert [event for node in nodes(text) for event in events(node)] == expected


def test_html_is_text_and_links_lead_to_other_sites():
    [[tag, _, within]] = nodes("<script>alert(1)</script> <b onclick=x>")
    assert (tag, within) == ("p", ["<script>alert(1)</script> <b onclick=x>"])
    for bad in (
        "javascript:alert(1)",
        "data:text/html,x",
        "file:///etc/passwd",
        "/health",
        "vbscript:x",
        "JaVaScRiPt:x",
    ):
        assert nodes(f"[a]({bad})") == [["p", {}, [f"[a]({bad})"]]]
    link = ["a", {"href": "https://example.org/a"}, ["a"]]
    assert nodes("[a](https://example.org/a)") == nodes("![a](https://example.org/a)") == [["p", {}, [link]]]


def test_blocks_say_where_they_begin():
    text = "one\ntwo\n\n- a\n- b\n\n```py\nx\n```\n\n|a|b|\n|-|-:|\n|1|2|\n\n3. c"
    blocks = answer({"text": text})["blocks"]
    assert [block["line"] for block in blocks] == [0, 3, 6, 10, 14]
    assert blocks[2]["node"] == ["pre", {"language": "py"}, ["x\n"]]
    assert blocks[3]["node"][2][1] == [
        "tbody",
        {},
        [["tr", {}, [["td", {}, ["1"]], ["td", {"align": "right"}, ["2"]]]]],
    ]
    assert blocks[4]["node"][1] == {"start": 3}


def test_deeply_nested_markdown_becomes_flat():
    def depth(node):
        return 0 if isinstance(node, str) else 1 + max(map(depth, node[2]), default=0)

    text = "*a **b " * 2000 + " b** a*" * 2000
    assert 50 < max(map(depth, nodes(text))) < 300
    assert max(map(depth, nodes(">" * 5000 + "a"))) < 300


@pytest.mark.slow
def test_a_text_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(markdown, "_SECONDS", 1)
    process = MarkdownProcess()
    try:
        with pytest.raises(MarkdownFailed, match="more than 1 seconds"):
            process.blocks("[" * 100_000)
        assert process.blocks("a") == [{"line": 0, "node": ["p", {}, ["a"]]}]
    finally:
        process.close()
