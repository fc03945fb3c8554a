"""Take the pictures of the server's page in docs/, in a headless Chromium: python -m scripts.page_pictures

The chats in them are examples; no model has written them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from granite4_neuron import load
from test.support.browser import browser
from test.support.kept_chats import chat_of, keep
from test.support.serving import serving

DOCS = Path(__file__).parents[1] / "docs"
ANSWER = """A **generator** is a function with `yield`. It gives one value at a time, and goes on where it was:

```python
def squares(most):
    for i in range(most):
        yield i * i

print(sum(squares(1_000_000)))
```

| | list | generator |
|---|---|---|
| memory | all values | one value |
| may be read | any number of times | once |

See the [tutorial](https://docs.python.org/3/tutorial/classes.html#generators).
"""
QUESTIONS = ["Plan a week in Rome", "Why is the sky blue?", "A regular expression for dates", "What is a generator?"]
CHATS = [chat_of(str(i), question, question, ANSWER, updated=i) for i, question in enumerate(QUESTIONS)]
# Name, width, height and colours.
PICTURES = [("page.png", 1000, 680, "light"), ("page-phone.png", 390, 760, "dark")]


def main() -> None:
    with serving(*load()) as server, tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
        page.open(f"{server.address}/")
        page.until("!document.getElementById('model').disabled")
        keep(page, CHATS)
        page.until("document.querySelectorAll('pre').length")
        for name, width, height, colours in PICTURES:
            page.resize(width, height)
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": colours}])
            page.until("!document.getAnimations().length")
            page.screenshot(DOCS / name)


if __name__ == "__main__":
    main()
