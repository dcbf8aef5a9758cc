"""The pages of the site that no file holds, and its navigation: a hook of MkDocs, named in `mkdocs.yml`.

Each public name gets a page of the reference. Files of the repository that a page links to become pages as well.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from adapter_pages import ADAPTERS, adapter_page
from crossrefs import linked
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from public_names import MODULES, ON_ONE_PAGE, all_names, homes, index_of, page_of

from cadenza import Callback
from cadenza.hooks.moments import BaseCallback

ROOT = Path(__file__).resolve().parents[1]
FIRST = ("Trainer", "Run", "Callback", "on", "supervised")
LINK = re.compile(r"\]\((?!https?://|#)(?P<file>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
SEARCH = {
    "source/": 0.1,
    "decisions/": 0.1,
    "CHANGELOG": 0.1,
    "guides/from-": 0.2,
    "tables/": 0.1,
    "callbacks": 0.5,
    "reference/compat/": 0.2,
    "reference/errors/": 0.3,
    "reference/cadenza/Trainer": 4,
    "reference/": 1,
    "recipes/": 1,
    "checkpoints": 6,
    "": 4,
}
"""How much a page counts in the search, by the start of its path: guides before reference and recipes."""
TAGS = {
    "checkpoints.md": ["save model", "continue a stopped run"],
    "evaluation.md": ["validation"],
    "learning-rates.md": ["learning rate per epoch"],
    "logging.md": ["train loss history"],
    "recipes/gan.md": ["GAN", "two optimizers"],
    "reference/cadenza/Trainer.md": ["fp16", "bf16", "mixed precision"],
    "reference/callbacks/ClipGradients.md": ["gradient clipping"],
    "reference/callbacks/FindBatchSize.md": ["CUDA out of memory"],
    "reference/callbacks/Freeze.md": ["freeze layers"],
    "troubleshooting.md": ["CUDA out of memory"],
}
"""Other terms for the subject of a page, which the search prefers to all text."""
PICTURE = re.compile(r"^!\[[^\]]*\]\((?P<file>assets/moments\.svg)\)$", re.MULTILINE)
SECOND_CELL = re.compile(r"^(\|[^|\n]*\|)([^|\n]*)", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the patterns in the navigation, and add the reference."""
    docs = Path(config.docs_dir)
    if config.docs_dir not in sys.path:
        sys.path.append(config.docs_dir)  # griffe imports docstrings.py, which imports its neighbours
    named = {entry for entry in _entries(config.nav or []) if "*" not in entry}
    config.nav = _expanded(config.nav or [], docs, named)
    return config


def _entries(nav: Iterable[Any]) -> Iterable[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [value] if isinstance(value, str) else _entries(value)


def _expanded(nav: Iterable[Any], docs: Path, named: set[str]) -> list[Any]:
    shown: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            if inner == "reference/":
                inner = _reference_nav()
            elif not isinstance(inner, str):
                inner = _expanded(inner, docs, named)
            shown += [{title: inner}] if inner else []
        elif "*" in entry:
            found = sorted(page.relative_to(docs).as_posix() for page in docs.glob(entry))
            shown += [page for page in found if page not in named]
        else:
            shown.append(entry)
    return shown


def _reference_nav() -> list[Any]:
    nav: list[Any] = ["reference/index.md", "callbacks.md"]
    for module in sorted(MODULES, key=lambda module: (module != "cadenza", module)):
        pages = {page_of(full): full.rpartition(".")[2] for full in _shown_with(module)}
        pages.pop(index_of(module), None)
        nav.append({module: [index_of(module), *({name: page} for page, name in pages.items())]})
    return [*nav, {"cadenza.compat": [{name: f"reference/compat/{name}.md"} for name in ADAPTERS]}]


def _shown_with(module: str) -> list[str]:
    """Return the full names that have their page with this module: the names that everybody needs come first."""
    found = [full for full, home in homes().items() if full == home and full.rpartition(".")[0] == module]
    first = {f"cadenza.{name}": at for at, name in enumerate(FIRST)}
    return sorted(found, key=lambda full: first.get(full, len(FIRST)))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference, the changes, and the files of the repository that pages link to."""
    linked_files = {path for page in files.documentation_pages() for path in _outside(page, config)}
    for uri, text in _reference_pages().items():
        files.append(File.generated(config, uri, content=text))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "CHANGELOG.md", content=changes))
    for path in sorted(linked_files):
        code = (ROOT / path).read_text(encoding="utf-8")
        text = f"# {path}\n\n```{Path(path).suffix.removeprefix('.').replace('py', 'python')}\n{code}```\n"
        files.append(File.generated(config, f"source/{path}.md", content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def _outside(page: File, config: MkDocsConfig) -> Iterable[str]:
    """Yield the files of the repository, outside of docs, that a page links to."""
    for match in LINK.finditer(page.content_string):
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.src_uri), match["file"]))
        if not path.startswith("docs") and path not in ("README.md", "CHANGELOG.md") and (ROOT / path).is_file():
            yield path


def _reference_pages() -> dict[str, str]:
    names = all_names()
    pages = {"reference/index.md": _overview(names)}
    pages |= {f"reference/compat/{adapter}.md": adapter_page(adapter) for adapter in ADAPTERS}
    aliases: dict[str, list[str]] = {}
    for full, home in homes().items():
        aliases.setdefault(home, []).extend([full] if full != home else [])
    for module in names:
        text = f"# {module}\n\n{linked(inspect.cleandoc(import_module(module).__doc__ or ''))}\n\n"
        if module in ON_ONE_PAGE:
            pages[index_of(module)] = text + "\n\n".join(
                f"::: {full}\n    options: {{heading_level: 2}}" for full in _shown_with(module)
            )
            continue
        pages[index_of(module)] = text + _table(module, names[module])
        for full in _shown_with(module):
            anchors = "".join(f"[](){{#{alias}}}\n" for alias in aliases[full])
            pages[page_of(full)] = f"{anchors}\n::: {full}\n    options: {{inherited_members: {_inherited(full)}}}\n"
    return pages


def _inherited(full: str) -> list[str] | str:
    """Return which inherited members a page shows: those of `Callback` stand on its own page, and on no other."""
    module, _, name = full.rpartition(".")
    value = getattr(import_module(module), name)
    if not inspect.isclass(value) or not issubclass(value, BaseCallback) or value in (BaseCallback, Callback):
        return "true"
    return sorted(one for one in dir(value) if one[0] != "_" and one not in dir(Callback))


def _overview(names: dict[str, list[str]]) -> str:
    said = "Every public name, with its signature, arguments, errors and an example. All text comes from the docstrings."
    parts = [f"# Reference\n\n{said}\n"]
    for module in sorted(names, key=lambda module: (module != "cadenza", module)):
        first = inspect.cleandoc(import_module(module).__doc__ or "").split("\n\n")[0]
        shown = ", ".join(_link(f"{module}.{name}") for name in names[module])
        parts.append(
            f"## [{module}]({posixpath.relpath(index_of(module), 'reference')})\n\n{' '.join(first.split())}\n\n{shown}\n"
        )
    return "\n".join(parts)


def _table(module: str, names: list[str]) -> str:
    rows = ["| name | |", "|---|---|"]
    for name in names:
        value = getattr(import_module(module), name)
        said = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("|", "\\|")
        rows.append(f"| {_link(f'{module}.{name}')} | {linked(said)} |")
    return "\n".join(rows) + "\n"


def _link(full: str) -> str:
    return f"[`{full.rpartition('.')[2]}`][{homes()[full]}]"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages of the site, and link code in prose to the reference."""
    uri = page.file.src_uri
    page.meta["tags"] = TAGS.get(uri, [])
    page.meta["search"] = {"boost": next(weight for start, weight in SEARCH.items() if uri.startswith(start))}
    if uri.startswith(("reference/", "source/")):
        return markdown
    markdown = PICTURE.sub(lambda match: _inline(Path(config.docs_dir, match["file"])), markdown)
    markdown = LINK.sub(lambda match: f"]({_in_site(match, uri)})", markdown)
    if uri == "coming-from.md":  # the other columns hold names of other frameworks
        return SECOND_CELL.sub(lambda cell: cell[1] + linked(cell[2]), markdown)
    return markdown if uri.startswith(("guides/from-", "tables/", "CHANGELOG")) else linked(markdown)


def _in_site(match: re.Match[str], uri: str) -> str:
    here = posixpath.dirname(uri)
    path = posixpath.normpath(posixpath.join("docs", here, match["file"]))
    if path.startswith("docs/"):
        return match[0][2:-1]
    inside = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"}.get(path, f"source/{path}.md")
    return posixpath.relpath(inside, here or ".")


def _inline(picture: Path) -> str:
    """Return a picture as part of the page, so that its colours follow the page."""
    svg = re.sub(r"<style>.*?</style>\n", "", picture.read_text(encoding="utf-8"), flags=re.DOTALL)
    return f"<div class='picture'>{svg}</div>"
