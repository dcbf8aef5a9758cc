"""The house: imports go down, public names are known, and importing does no work."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import cadenza

SOURCE = Path(cadenza.__file__).parent

FLOORS = {  # on a floor, too, a room imports only rooms that stand before it
    0: "errors lazy version",
    1: "text status files profiling",
    2: "loading records hooks reading",
    3: "drivers optim sinks",
    4: "engine run",
    5: "checkpoint",
    6: "callbacks loops trainer attaching",
    7: "testing commands sources parallel compiled compat trackers report steering timetravel __main__",
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names.split()}
ORDER = list(FLOOR_OF)


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package but ``__init__``, by its name inside it: ``callbacks.evaluate``."""
    paths = {path.relative_to(SOURCE): path for path in SOURCE.rglob("*.py")}
    named = {".".join(inner.with_suffix("").parts).removesuffix(".__init__"): path for inner, path in paths.items()}
    del named["__init__"]
    return named


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those below ``if TYPE_CHECKING``."""
    todo = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
                yield node
                todo.append(node)


@cache
def imported_by(path: Path) -> set[str]:
    """Return the full names of what a module imports at run time, inside of functions too."""
    names: set[str] = set()
    for node in at_run_time(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def named_by(path: Path) -> set[str]:
    """Return what a module imports anywhere: in functions and for types, too; but not `Run`, which any floor may name.

    An ``__init__`` is a table of contents, which may list names of higher floors; it imports them when they are read.
    """
    if path.name == "__init__.py":
        return {one for name in imported_by(path) if (one := inside(name))}
    nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    return {one for name in names - {"cadenza.run.Run"} if (one := inside(name))} | {
        one for name in imported_by(path) if (one := inside(name))
    }


def inside(name: str) -> str | None:
    """Return the module of this package that holds an imported name; None if it is another package."""
    if not name.startswith("cadenza."):
        return None
    parts = name.removeprefix("cadenza.").split(".")
    while parts and ".".join(parts) not in modules():
        parts.pop()
    return ".".join(parts) or None


def floor_of(module: str) -> int:
    return FLOOR_OF[module.split(".")[0]]


def test_imports_go_down_never_up() -> None:
    def room(module: str) -> int:
        return ORDER.index(module.split(".")[0])

    assert [
        (module, other) for module, path in modules().items() for other in named_by(path) if room(other) > room(module)
    ] == []


def test_the_map_in_contributing_has_each_folder_on_its_floor_in_the_order_of_imports() -> None:
    page = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (`.*?`) \|", page, re.MULTILINE)
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    known = {floor: [name for name in names.split() if name in folders] for floor, names in FLOORS.items()}
    assert {int(floor): re.findall(r"`(\w+)`", names) for floor, names in rows} == {
        floor: names for floor, names in known.items() if names
    }
    assert folders == {name for names in known.values() for name in names}


def test_the_page_of_the_architecture_names_files_that_exist_and_six_to_read_first() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b([a-z_]+(?:/[a-z_]+)*\.py)\b", page))
    assert len(named) > 20
    assert {name for name in named if not any(SOURCE.rglob(name.rpartition("/")[2]))} == set()
    assert {name for name in named if "/" in name and not (SOURCE / name).exists()} == set()
    first = re.findall(r"^\| `([\w/.]+)` \|", page, re.MULTILINE)
    assert len(first) == 6
    assert sum(len((SOURCE / name).read_text(encoding="utf-8").splitlines()) for name in first) < 2000


def test_the_ground_floor_knows_no_torch() -> None:
    ground = [name for name in modules() if floor_of(name) == 0 or name.startswith(("files", "hooks", "status.progress"))]
    imported = [(module, name) for module in ground for name in imported_by(modules()[module])]
    assert [(module, name) for module, name in imported if name.split(".")[0] == "torch"] == []


SYSTEMS = {  # folders of `compat`, each with the folders that it may import; all may import what adapters share
    **{name: {name} for name in ("fastnlp", "accelerated", "transformers", "lightning", "keras", "neural")},
    **{name: {name, "neural"} for name in ("nemo", "nemo10")},
}
SHARED = {"absent", "adapter"}


def test_no_adapter_imports_another() -> None:
    parts = [name.split(".") for name in modules() if name.startswith("compat.") and name != "compat.command"]
    assert {names[1] for names in parts} == SYSTEMS.keys() | SHARED
    for names in parts:
        found = {inside(name) or "" for name in imported_by(modules()[".".join(names)])}
        used = {name.split(".")[1] for name in found if name.startswith("compat.")}
        assert used <= SYSTEMS.get(names[1], set()) | SHARED, names


HELPERS = {  # they hold no callback
    f"callbacks.{name}" for name in ("best",)
}


def test_no_callback_imports_another() -> None:
    """They are ordered by phases, and find each other by protocols of lower floors."""
    callbacks = {name for name in modules() if name.startswith("callbacks.")} - HELPERS
    for module in callbacks:
        used = {one for name in imported_by(modules()[module]) if (one := inside(name))}
        assert not used & (callbacks | {"callbacks"}), module


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports in functions and for types count, except of `Run` for types."""
    graph = {name: named_by(path) for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for other in graph[name] - {name}:
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_loop_knows_no_callback_by_name() -> None:
    floors_below = [path for name, path in modules().items() if floor_of(name) < 5]
    text = "\n".join(path.read_text(encoding="utf-8") for path in floors_below)
    assert "cadenza.callbacks." not in text.replace("``cadenza.callbacks", "").replace("`cadenza.callbacks`", "")


PUBLIC = """
At Audio Best Between Calendar Callback Counters Decision Derive Driver Evaluation Every Fault Figure First Handle Histogram
History Hooks Image Last Listener Loop Monitor Outcome Outputs Plan Progress Record Run Schedule SingleDriver Step Steps Text
Trainer When __version__ attach export_weights load_weights new_directory on read_run save_weights supervised
"""


def test_the_public_names_are_these() -> None:
    assert cadenza.__all__ == PUBLIC.split()
    assert all(hasattr(cadenza, name) for name in cadenza.__all__)


PACKAGES = [
    cadenza,
    cadenza.callbacks,
    cadenza.drivers,
    cadenza.parallel,
    cadenza.records,
    cadenza.sinks,
    cadenza.steering,
    cadenza.timetravel,
]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_are_told_the_same_names_as_the_running_program(package: ModuleType) -> None:
    told = {
        (f"{node.module}.{alias.name}", alias.asname)
        for node in ast.walk(ast.parse(Path(package.__file__ or "").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module != "typing" and node.module != "cadenza.lazy"
        for alias in node.names
        if node.module != "cadenza"  # a package that is found by attribute
    }
    assert sorted(name for _, name in told if name) == sorted(package.__all__)
    for place, name in told:
        module, _, inner = place.rpartition(".")
        assert getattr(import_module(module), inner) is getattr(package, name or inner)


def test_a_name_that_a_package_does_not_have_is_an_error() -> None:
    assert "Trainer" in dir(cadenza)
    with pytest.raises(AttributeError, match="module 'cadenza' has no attribute 'Trainr'"):
        _ = cadenza.Trainr  # type: ignore[attr-defined]  # wrong on purpose


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("Trainr", "Did you mean 'Trainer'?"),
        ("EarlyStopping", "Write cadenza.callbacks.EarlyStopping."),
        ("TensorBatches", "Write cadenza.loading.TensorBatches."),
        ("ModelCheckpoint", "Add Checkpoint(...) to callbacks, and give directory=."),
        ("seed_everything", "Give Trainer(seed=...)."),
        ("_private", "has no attribute '_private'"),
    ],
)
def test_a_name_that_stands_elsewhere_or_that_other_trainers_have_is_answered(name: str, answer: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(cadenza, name)
    assert str(caught.value).endswith(answer)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("from cadenza.callbacks import ModelCheckpoint", "Add Checkpoint(...) to callbacks, and give directory=."),
        ("from cadenza import seed_everything", "Give Trainer(seed=...)."),
        ("from cadenza.sinks import EarlyStopping", "Write cadenza.callbacks.EarlyStopping."),
        ("from cadenza.sinks import TensorBoards", "Did you mean 'TensorBoard'?"),
        ("import cadenza.nothing", "No module named 'cadenza.nothing'"),
        ("import cadenza.callbacks.NotHere", "No module named 'cadenza.callbacks.NotHere'"),
        ("from cadenza.callbacks import _nothing", r"cannot import name '_nothing' from 'cadenza.callbacks'"),
    ],
)
def test_an_import_of_a_name_that_stands_elsewhere_or_that_other_trainers_have_is_answered(line: str, answer: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(line, {})
    assert answer in str(caught.value)
    assert not hasattr(cadenza.callbacks, "ModelCheckpoint")


def test_a_look_for_a_module_that_a_package_does_not_have_finds_none() -> None:
    for name in ("NotHere", "not_here"):
        assert find_spec(f"cadenza.callbacks.{name}") is None
        with pytest.raises(ModuleNotFoundError, match=f"No module named 'cadenza.callbacks.{name}'"):
            import_module(f"cadenza.callbacks.{name}")
    with pytest.raises(ModuleNotFoundError, match=r"Add Checkpoint\(...\) to callbacks"):
        import_module("cadenza.callbacks.ModelCheckpoint")


TRAINER = "from cadenza import Callback, Trainer, on, supervised"
PACKAGE, SINKS_ROOM = "import cadenza", "import cadenza; cadenza.sinks"
README = f"""{TRAINER}
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.sinks import Console
"""
LINES = (PACKAGE, SINKS_ROOM, TRAINER, README)
IMPORTING = """
import json, os, sys, torch
before = set(sys.modules)
for line in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(line, {})
        print(json.dumps([line, sorted(set(sys.modules) - before)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, line
"""


@cache
def newly_imported() -> dict[str, set[str]]:
    """Return the modules that each of the lines brings, after torch, in a process of its own."""
    command = [sys.executable, "-c", IMPORTING, json.dumps(LINES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line: set(brought) for line, brought in map(json.loads, done.stdout.splitlines())}


def test_importing_the_package_imports_a_table_of_contents() -> None:
    assert newly_imported()[PACKAGE] == {"cadenza", "cadenza.lazy"}


def test_a_trainer_brings_no_callback_but_the_one_that_it_must_know_no_sink_and_no_report() -> None:
    brought = newly_imported()[TRAINER]
    folders = {
        name for name in brought if name.startswith(("cadenza.callbacks.", "cadenza.sinks", "cadenza.report", "cadenza.compat"))
    }
    assert folders == {"cadenza.callbacks.checkpoint"}
    assert not brought & {"html", "sqlite3", "wave", "urllib.request", "safetensors.torch", "fsspec"}


INNER = "callbacks compat drivers errors hooks loading parallel records sinks steering testing timetravel"


def test_packages_are_found_by_attribute_and_imported_then() -> None:
    assert newly_imported()[SINKS_ROOM] == {"cadenza", "cadenza.lazy", "cadenza.sinks"}
    everything = "; ".join(f"assert cadenza.{name} is sys.modules['cadenza.{name}']" for name in INNER.split())
    code = f"import sys, cadenza; assert {INNER.split()} == sorted(set(dir(cadenza)) & set({INNER.split()})); {everything}"
    subprocess.run([sys.executable, "-c", code], check=True)
    told = {
        alias.asname
        for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "cadenza"
        for alias in node.names
    }
    assert told == set(INNER.split())  # type checkers know them too


LARGE = [
    *("torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.run"),
    *("torch._dynamo", "torch._inductor", "torch.onnx", "torch.profiler", "torch.utils.tensorboard", "torch.testing"),
    *("fractions", "html", "sqlite3", "wave", "http", "urllib.request", "xml", "asyncio", "importlib.metadata", "ctypes"),
]


def test_what_the_readme_imports_brings_nothing_large_and_no_driver_of_many_processes() -> None:
    brought = newly_imported()[README]
    assert {"cadenza.trainer", "cadenza.callbacks.checkpoint", "cadenza.sinks.console"} <= brought
    assert not brought & {*LARGE, "cadenza.drivers.group", "cadenza.drivers.ddp", "cadenza.drivers.fsdp"}
    assert {name.split(".")[0] for name in brought} == {"cadenza"}  # all else came with torch


OPTIONAL = [
    *("rich", "tqdm", "tensorboard", "torchmetrics", "pandas", "matplotlib", "IPython", "datasets", "sklearn", "psutil"),
    *("wandb", "mlflow", "trackio", "swanlab", "comet_ml", "dvclive"),
]

WIDELY = "cadenza, cadenza.callbacks, cadenza.sinks, cadenza.testing, cadenza.compat.nemo, cadenza.compat.nemo10"
IMPORTED_WIDELY = f"""
import json, logging, signal, sys, threading
import torch
before, seed, state = set(sys.modules), torch.initial_seed(), torch.get_rng_state()
import {WIDELY}
print(json.dumps({{
    "new": sorted({{name.split(".")[0] for name in set(sys.modules) - before}}),
    "threads": [thread.name for thread in threading.enumerate()],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "random": seed == torch.initial_seed() and torch.equal(state, torch.get_rng_state()),
    "handlers": len(logging.getLogger("cadenza").handlers),
}}))
"""


def test_importing_brings_no_optional_package_starts_nothing_says_nothing_and_draws_nothing() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTED_WIDELY], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    new = set(facts.pop("new"))
    assert "cadenza" in new
    assert not new & {*OPTIONAL, "numpy"}  # numpy comes with torch, or not at all
    assert facts == {"threads": ["MainThread"], "interrupt": True, "random": True, "handlers": 0}
