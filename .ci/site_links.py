"""A hook of mkdocs: what the documents link outside of docs/ gets a page of its own, so that one link is good on GitHub and on the site.

``[the model](../examples/model.py)`` leads to a page that shows the file. A folder gets a page that lists its files, Markdown is a page as it is.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
FOLDER = "project"
"""The pages made here stand in this folder of the site; a file keeps its path below it."""
IN_NAV = ("CHANGELOG.md", "CONTRIBUTING.md")
SHOWN = {".py", ".toml", ".yml"}
"""What is shown of a folder."""
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
OUTSIDE = re.compile(r"(?<=\]\()\.\./(?P<path>[^)#\s]+)")
INTO_DOCS = re.compile(r"(?<=\]\()docs/")
FOLDERS = re.compile(r"(?<=\]\()(?P<path>[\w/.-]+)(?=\))")
FAILURE = re.compile(r"(?<=<code>)E       nnx invariant broken: .*?(?=</code>)", re.DOTALL)
ROW = re.compile(r"^E {7}(?: {2})?(?P<name>\w+).*(?:\n?^E {12,}.*)*", re.MULTILINE)
BROKEN = {"nnx", "tracers", "memory", "donation", "parity", "recompilation", "finite"}
"""The first words of the rows that are red."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version of the plugin at the foot of every page."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    config.copyright = f"pytest-nnxcheck {version}. {config.copyright}"
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file outside of docs/ that a page links, and for each file of a folder that is linked."""
    links = (match["path"] for page in files.documentation_pages() for match in OUTSIDE.finditer(page.content_string))
    linked = {path for path in links if (ROOT / path).exists()}
    below = {inner for path in linked for inner in files_below(path)}
    for path in sorted({*IN_NAV, *linked, *below}):
        page = File.generated(config, page_of(path), content=text_of(path))
        if path not in IN_NAV:
            page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs passes them by name
    """Lead links out of docs/ to the pages made here, and links of those back into docs/."""
    if page.file.src_uri.startswith(f"{FOLDER}/"):
        return FOLDERS.sub(index_of, INTO_DOCS.sub("../", markdown))
    return OUTSIDE.sub(lambda match: page_of(match["path"]), markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs passes them by name
    """Colour the rows of failures as a terminal does: what is broken, and the hint."""
    return FAILURE.sub(lambda failure: ROW.sub(coloured, failure[0]), html)


def coloured(row: re.Match[str]) -> str:
    """A row of a failure, with its further lines, inside a span of its colour; a row without a colour as it is."""
    kind = "hint" if row["name"] == "hint" else "broken" if row["name"] in BROKEN else ""
    return f'<span class="{kind}">{row[0]}</span>' if kind else row[0]


def index_of(link: re.Match[str]) -> str:
    """The page of a folder that the changelog, or another file of the project, links; every other link as it is."""
    return f"{link['path']}/index.md" if (ROOT / link["path"]).is_dir() else link["path"]


def page_of(path: str) -> str:
    """The name of the page that shows a file or a folder. For one that is not there no page is made, and mkdocs warns of the link."""
    if (ROOT / path).is_dir():
        return f"{FOLDER}/{path}/index.md"
    return f"{FOLDER}/{path}" if path.endswith(".md") else f"{FOLDER}/{path}.md"


def files_below(path: str) -> list[str]:
    """The files of a folder, and of those in it; none of a file."""
    return [str(file.relative_to(ROOT)) for file in sorted((ROOT / path).rglob("*")) if file.suffix in SHOWN]


def text_of(path: str) -> str:
    """The Markdown of a page. The search finds documents, and no source."""
    source = ROOT / path
    if source.is_dir():
        rows = [f"* [{inner}]({Path(inner).relative_to(path)}.md){about(ROOT / inner)}" for inner in files_below(path)]
        return "\n".join([f"{UNSEARCHED}# {path}", "", *rows, ""])
    text = source.read_text()
    if path.endswith(".md"):
        return text
    return f"{UNSEARCHED}# {path}\n\n~~~~{source.suffix.removeprefix('.')}\n{text}~~~~\n"


def about(source: Path) -> str:
    """What a file of Python says of itself, behind a colon: the first paragraph of its docstring."""
    text = (source.suffix == ".py" and ast.get_docstring(ast.parse(source.read_text()))) or ""
    summary = " ".join(text.partition("\n\n")[0].split())
    return f": {summary}" if summary else ""
