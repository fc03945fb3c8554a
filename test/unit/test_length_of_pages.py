"""Pages stay short enough to be read."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
SECTIONS = dict(re.findall(r"^  - ([\w ]+):\n((?:    .*\n)+)", NAVIGATION, re.MULTILINE))
# Files of the repository that the site shows too. The reference in docs/api is made of docstrings.
NOT_COUNTED = ("contributing", "security", "changelog", "api/")


def words_of(section):
    """Return the number of words on a section's pages, without blocks of code."""
    names = re.findall(r"- (\S+)\.md$", SECTIONS[section].replace("- index.md", "- ../README.md"), re.MULTILINE)
    texts = [
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in names if not name.startswith(NOT_COUNTED)
    ]
    assert len(texts) > 3
    return sum(len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) for text in texts)


@pytest.mark.parametrize("sections, most", [(["Use"], 9500), (["Trainium", "How it works"], 15_000)], ids=str)
def test_length_of_pages(sections, most):
    """Measurements may be long."""
    assert SECTIONS.keys() == {"Use", "Trainium", "How it works", "Measurements"}
    assert sum(map(words_of, sections)) < most
