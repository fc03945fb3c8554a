"""Hooks of mkdocs.yml: pages link by relative paths, as on GitHub, and the site contains the files that they link to.

Pages at the root of the repository (README.md) become pages of the site. Other files outside docs/ that a page links to
become pages that show their lines. A link of the form [`name`](../src/file.py) leads to the line that defines the name;
a name that the file does not define fails the build.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".json": "json", ".toml": "toml", ".jinja": "jinja"}
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?P<target>[^()#\s:]+)(?P<anchor>#[^()\s]+)?\)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that lie outside docs/: those of PAGES, and the files that a page links to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, content=_text(path)))
    waiting = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if file.generated_by is None)]
    for page in waiting:  # the list grows within the loop
        for path in _linked_files(page):
            uri = _uri(path)
            if files.get_file_from_path(uri) is None:
                file = File.generated(config, uri, content=_text(path) if path.endswith(".md") else _listing(path))
                file.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(file)
                if path.endswith(".md"):
                    waiting.append(path)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links that fit the site."""
    path = _path(page.file.src_uri)
    return markdown if path is None else LINK.sub(lambda link: _link_of_site(link, path), markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Let links to a line of a listing pass MkDocs' check of anchors, which does not know anchors in code."""
    if page.file.src_uri.startswith("source/") and page.present_anchor_ids is not None:
        page.present_anchor_ids.update(re.findall(r'id="(__codelineno-[^"]+)"', html))


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _uri(path: str) -> str:
    """Return the site's page for a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _path(uri: str) -> str | None:
    """Return the Markdown file of the repository behind a page of the site; None for a listing."""
    if not uri.startswith("source/"):
        return {page: path for path, page in PAGES.items()}.get(uri, f"docs/{uri}")
    path = uri.removeprefix("source/")
    return path if (ROOT / path).is_file() else None


def _target(link: re.Match[str], page: str) -> str | None:
    """Return the file of the repository that a link of a page leads to, or None if there is none."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link["target"]))
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def _linked_files(page: str) -> Iterator[str]:
    for link in LINK.finditer(_text(page)):
        path = _target(link, page)
        if path is not None and path not in PAGES and not path.startswith("docs/"):
            yield path


def _listing(path: str) -> str:
    """Return a page with the lines of a file; search leaves it out."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n~~~~~~{language}\n{_text(path).rstrip()}\n~~~~~~\n"


def _link_of_site(link: re.Match[str], page: str) -> str:
    path = _target(link, page)
    if path is None:
        return link[0]
    uri = posixpath.relpath(_uri(path), posixpath.dirname(_uri(page)) or ".")
    return f"[{link['text']}]({uri}{_anchor(link, path)})"


def _anchor(link: re.Match[str], path: str) -> str:
    """Return the anchor of a link: the line that its text or #L12 names, or the anchor unchanged."""
    line = re.fullmatch(r"#L(\d+).*", link["anchor"] or "")
    if line:
        return f"#__codelineno-0-{line[1]}"
    name = re.fullmatch(r"`([A-Za-z_][\w.]*)(?:\(\))?`", link["text"])
    if path.endswith(".py") and name and not name[1].endswith(".py"):
        return f"#__codelineno-0-{_line_of(name[1], path)}"
    return link["anchor"] or ""


def _line_of(name: str, path: str) -> int:
    """Return the line on which a file defines `function`, `CONSTANT`, `Class` or `Class.method`."""
    position, text = 0, _text(path)
    for part in name.split("."):
        found = re.compile(rf"^\s*(?:(?:async )?def {part}\b|class {part}\b|{part}\b\s*[:=])", re.MULTILINE).search(
            text, position
        )
        if found is None:
            raise PluginError(f"{path} does not define {name}, to which a page links")
        position = found.end()
    return text.count("\n", 0, position) + 1
