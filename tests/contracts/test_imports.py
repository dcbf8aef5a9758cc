"""Each name in the docs is where the docs say, whichever module was imported before."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
IMPORT = re.compile(r"^(?:>>> )?from (cadenza[\w.]*) import (?:\(([^)]*)\)|([^\n#(]+))", re.MULTILINE)
DOTTED = re.compile(r"`(cadenza(?:\.\w+)+)\b[^`]*`")

CHECK = """
import importlib, pkgutil, sys, types, warnings
import cadenza.callbacks, cadenza.sinks, cadenza.loading, cadenza.hooks, cadenza.drivers, cadenza.testing
for package in (cadenza.callbacks, cadenza.sinks, cadenza.loading, cadenza.hooks, cadenza.drivers, cadenza.testing):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)  # which sets an attribute of its package
warnings.simplefilter("ignore")  # of names that go in the next release
for line in sys.stdin.read().split():
    home, _, name = line.partition(":")
    value = importlib.import_module(home)
    for part in name.split("."):
        if hasattr(value, "__path__") and not hasattr(value, part):
            importlib.import_module(f"{value.__name__}.{part}")  # a module of an adapter
        value = getattr(value, part)
    if isinstance(value, types.ModuleType) and hasattr(value, part):
        print(line, "is a module that hides its own function or class of this name")
"""


def documented() -> set[str]:
    """Return the names that the pages import or mention, as ``module:name``."""
    names = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for home, listed, plain in IMPORT.findall(text):
            found = [one.partition(" as ")[0].strip() for one in (listed or plain).split(",")]
            names |= {f"{home}:{one}" for one in found if one.isidentifier()}
        for dotted in DOTTED.findall(text):
            names.add(f"cadenza:{dotted.removeprefix('cadenza.')}")
    return names


def test_every_name_in_the_docs_can_be_imported_from_there() -> None:
    names = documented() - {"cadenza:run_id", "cadenza:reading"}  # a key in a tracker; a name that goes in 0.3
    assert {"cadenza.callbacks:Evaluate", "cadenza:callbacks.freeze"} <= names
    done = subprocess.run([sys.executable, "-c", CHECK], input="\n".join(names), capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")
