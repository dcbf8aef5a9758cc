"""A page for each adapter: the names of the other framework that it offers. For `docs/pages.py`.

``public_names.txt`` in the tests of each adapter lists the names of the original.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ADAPTERS = {"nemo": "from-nemo", "nemo10": "from-nemo", "fastnlp": "from-fastnlp", "accelerated": "from-pytorch-accelerated"}
NAMES = Path(__file__).resolve().parents[1] / "tests" / "compat"


def adapter_page(adapter: str) -> str:
    """Return the page of an adapter as Markdown: each class and function once, with the shortest module that offers it."""
    package = import_module(f"cadenza.compat.{adapter}")
    said = inspect.cleandoc(package.__doc__ or "").split("\n\n")[0].replace("docs/guides/", "").replace(".md", "")
    lines = [
        f"# {package.__name__}",
        "",
        said,
        "",
        f"The [guide](../../guides/{ADAPTERS[adapter]}.md) shows how to use it.",
        "",
    ]
    last = ""
    for module, name, value in sorted(offered(adapter), key=lambda row: row[:2]):
        if module != last:
            short = module.removeprefix(package.__name__) or module
            lines += ["", f"## {module} {{ data-toc-label='{short}' }}", "", "| name | what it does |", "|---|---|"]
        lines.append(f"| `{name}` | {_said(value)} |")
        last = module
    return "\n".join([*lines, ""])


def offered(adapter: str) -> Iterator[tuple[str, str, object]]:
    """Yield module, name and value for each class and function of the original that the adapter has."""
    seen = set()
    listed = (NAMES / adapter / "public_names.txt").read_text(encoding="utf-8").splitlines()
    modules = [line.partition(":")[::2] for line in listed if not line.startswith("#")]
    for path, names in sorted(modules, key=lambda row: (row[0].strip(".").count("."), row[0])):
        module = ".".join(filter(None, ("cadenza.compat", adapter, path.strip("."))))
        for name in names.split():
            try:
                value = getattr(import_module(module), name)
            except (ImportError, AttributeError):  # the guide lists these names with a replacement
                continue
            own = (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("cadenza.compat")
            if own and (name, id(value)) not in seen:
                seen.add((name, id(value)))
                yield module, name, value


def _said(value: object) -> str:
    text = inspect.cleandoc(vars(value).get("__doc__") or "" if inspect.isclass(value) else value.__doc__ or "")
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|").replace("[", "\\[")
