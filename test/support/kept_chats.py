"""Chats in a browser, as the server's page keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from test.support.browser import Page

_KEEP = """(chats) => new Promise((done) => {
  const opening = indexedDB.open("granite4-neuron");
  opening.onsuccess = () => {
    const transaction = opening.result.transaction("chats", "readwrite");
    for (const chat of chats) transaction.objectStore("chats").put(chat);
    transaction.oncomplete = done;
  };
})"""
_KEPT = """new Promise((done) => {
  const opening = indexedDB.open("granite4-neuron");
  opening.onsuccess = () => {
    opening.result.transaction("chats").objectStore("chats").getAll().onsuccess = (event) => done(event.target.result);
  };
})"""


def chat_of(id: str, title: str, *texts: str, updated: int = 0) -> dict[str, Any]:
    """Return a chat of questions and answers in turn."""
    messages: dict[str, Any] = {}
    for i, text in enumerate(texts):
        message = {"id": str(i), "parent": str(i - 1) if i else None, "content": text, "updated": 0}
        messages[str(i)] = {**message, **({"role": "assistant", "end": "stop"} if i % 2 else {"role": "user"})}
    return dict(id=id, title=title, updated=updated, leaf=str(len(texts) - 1), messages=messages, settings={})


def keep(page: Page, chats: Sequence[dict[str, Any]]) -> None:
    """Put chats into the browser, and open the last one."""
    page.run(f"({_KEEP})({json.dumps(list(chats))})")
    page.run(f"location.hash = '{chats[-1]['id']}'")
    page.call("Page.reload")
    page.until(f"document.querySelectorAll('.message').length === {len(chats[-1]['messages'])}")


def kept(page: Page) -> list[dict[str, Any]]:
    """Return all chats that the browser keeps."""
    return page.run(_KEPT)
