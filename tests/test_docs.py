"""The pages: what they claim, name, show and link to is what the project has. Their examples run as tests themselves."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import importlib.util
import inspect
import io
import json
import os
import pickle
import pty
import re
import struct
import subprocess
import sys
import termios
import tomllib
from collections import OrderedDict
from collections.abc import Callable as Function
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cadenza import Callback, Run, Trainer, callbacks, sinks, supervised
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, StopOnNonFinite
from cadenza.loading import TensorBatches
from cadenza.testing import tiny_loader, tiny_run
from tests import forked
from tests.claims import CHECKED_BY
from tests.compat.nemo.graphs import OFFLINE

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from counterparts import COUNTERPARTS  # noqa: E402  # the page and its test read the same table

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = " ".join(README.split())
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PICTURES = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TESTS = {
    name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def test_(\w+)\(", file.read_text("utf-8"))
}
ABOUT_RUNS = {
    f"{name}.md"
    for name in (
        "callbacks", "checkpoints", "evaluation", "logging", "moments", "profile", "reliability", "sinks", "start",
        "writing-a-callback",
    )
}  # fmt: skip


# -- all pages ----------------------------------------------------------------------------------------


def test_what_is_generated_from_the_code_is_up_to_date(tmp_path: Path) -> None:
    forked.run(ROOT / "docs" / "generate.py", "--check", folder=tmp_path)


def test_the_pages_say_what_every_rank_must_call() -> None:
    pages = [page for page in PAGES if page.name in ABOUT_RUNS or page.parent.name == "guides"]
    assert {page.name for page in pages} > ABOUT_RUNS
    words = re.compile(r"[Ee]very\s+rank\s+must|every\s+method\s+of\s+a\s+driver")
    assert [page.name for page in pages if not words.search(page.read_text(encoding="utf-8"))] == []


def test_a_star_import_has_all_that_the_pages_import() -> None:
    blocks = [block for page in PAGES for block in re.findall(r"(?ms)^```python\n(.*?)^```", page.read_text(encoding="utf-8"))]
    imports = [node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    named = {(node.module or "", one.name) for node in imports for one in node.names if one.name != "*"}
    public = {module: getattr(import_module(module), "__all__", None) for module, _ in named if module.startswith("cadenza")}
    assert {pair for pair in named if pair[1] not in (public.get(pair[0]) or [pair[1]])} == set()


def without_blocks(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def prose_of(page: Path) -> str:
    return " ".join(without_blocks(page).split())


def headings(page: Path) -> set[str]:
    """Return the anchors of a page: its headings in lower case, without punctuation, with hyphens for spaces."""
    prose = without_blocks(page)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
    targets = [(page.parent / file if file else page, heading) for file, heading in links]
    missing = [(target, heading) for target, heading in targets if not target.exists()]
    missing += [(target, heading) for target, heading in targets if heading and heading not in headings(target)]
    assert not missing


def test_each_argument_that_coming_from_names_exists() -> None:
    rows = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8").split("## ")[0].splitlines()
    column = " ".join(row.split("|")[2] for row in rows if row.startswith("| "))
    calls = [node for code in re.findall(r"`([A-Z]\w+\(.*?\))`", column) for node in ast.walk(ast.parse(code))]
    named = {
        one.func.id: [word.arg for word in one.keywords]
        for one in calls
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)
    }
    assert len(named) > 10
    for name, words in named.items():
        known = inspect.signature(getattr(callbacks, name, None) or getattr(sinks, name)).parameters
        assert [word for word in words if word not in known] == [], name
    for word in re.findall(r"`(\w+)=[^`]*`", column):
        assert word in inspect.signature(Trainer).parameters


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/install.md"])
def test_every_named_command_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)\b", text)) <= targets
    for extras in re.findall(r"\[([\w,]+)\]'", text):
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


# -- README and installation --------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "claim"), [(page, claim) for page, claims in CHECKED_BY.items() for claim in claims])
def test_each_claim_about_behaviour_stands_in_the_page_and_has_a_test(page: str, claim: str) -> None:
    assert claim in " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert CHECKED_BY[page][claim] in TESTS


# Decisions hold reasons, and the page of performance a record.
PROMISING = [page for page in PAGES if page.parent.name != "decisions" and page.name != "performance.md"]
ABSOLUTE = re.compile(
    r"\b(never|always|any instant|no row|exactly|bit-(identical|equal|exact)\w*|bit for bit|same bits|to the bit"
    r"|(whole|complete) or not|executes (nothing|only|content|pickled)|(costs?|pays?) nothing)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", PROMISING, ids=lambda page: page.name)
def test_each_absolute_of_a_page_is_a_claim_with_a_test(page: Path) -> None:
    prose = prose_of(page)
    for claim in CHECKED_BY.get(page.relative_to(ROOT).as_posix(), ()):
        prose = prose.replace(claim, "")
    assert [prose[max(0, one.start() - 60) : one.end() + 60] for one in ABSOLUTE.finditer(prose)] == []


def test_the_dependencies_versions_and_extras_are_those_of_the_metadata() -> None:
    named = re.search(r"The core depends on ([\w, ]+?) and (\w+)\.", PROSE)
    assert named is not None
    packages = {re.split(r"[<>=\[; ]", one)[0] for one in PROJECT["dependencies"]}
    assert {*named[1].split(", "), named[2]} == packages

    found = re.search(r"needs Python ([\d.]+) or newer and PyTorch ([\d.]+) or newer", PROSE)
    assert found is not None
    assert PROJECT["requires-python"] == f">={found[1]}"
    assert f"torch>={found[2]}" in PROJECT["dependencies"]
    versions = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert f"| Python | {', '.join(versions)} |" in INSTALL

    table = INSTALL.partition("## What each extra adds")[2].partition("##")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == PROJECT["optional-dependencies"].keys()


def test_the_speed_the_kills_and_the_length_of_the_loop_are_the_measured_ones() -> None:
    rows = json.loads((ROOT / "docs" / "performance.json").read_text(encoding="utf-8"))["rows"]
    assert f"({rows['Cadenza']['sgd']['ratio']:.2f} times, with SGD)" in PROSE
    assert "500 kills, no difference" in PROSE
    assert "reached 500 kills" in (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.search(r"one file of fewer than (\d+) lines: \[`([\w/.]+)`\]", PROSE)
    assert named is not None
    assert len((ROOT / named[2]).read_text(encoding="utf-8").splitlines()) < int(named[1])


def test_the_console_lines_are_those_that_the_script_prints() -> None:
    script = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    shown = re.search(r"```text\n(epoch.*?)```", README, re.DOTALL)
    assert script is not None
    assert shown is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script[1], "README.md", "exec"), {"__name__": "readme"})
    lines = {_without_numbers(line) for line in printed.getvalue().splitlines()}
    assert {_without_numbers(line) for line in shown[1].splitlines() if line != "..."} <= lines


def _without_numbers(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", line)


# -- pictures -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_a_terminal(code: str, columns: int, folder: Path, show: str) -> None:
    """Run code in a terminal of its own and a folder; print what it shows there."""
    child, terminal = pty.fork()
    if not child:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 60, columns, 0, 0))
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)
        os.chdir(folder)
        sys.argv, sys.stdout, sys.stderr = ["-c", "run", "0.01", show], open(1, "w"), open(2, "w")  # noqa: SIM115
        exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    with suppress(OSError):  # Linux raises this when the other end is closed
        while part := os.read(terminal, 4096):
            os.write(1, part)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.parametrize("show", ["plan", "terminal"])
def test_a_picture_shows_what_the_program_prints_today(script: Any, show: str, tmp_path: Path) -> None:
    kept = script.lines_of((PICTURES / f"{show}.svg").read_text(encoding="utf-8"))
    process = forked.start(in_a_terminal, script.SCRIPT, script.COLUMNS, tmp_path, show, output=tmp_path / "shown")
    assert process.ended() == 0, process.said()
    shown = process.said().replace("\r\n", "\n").rstrip()
    today = script.lines_of(script.drawn(kept[0], shown))
    assert kept == today, "run: python docs/pictures.py"


def test_the_picture_of_a_kill_shows_that_the_weights_are_equal(script: Any, tmp_path: Path) -> None:
    kept = script.lines_of((PICTURES / "kill.svg").read_text(encoding="utf-8"))
    first, text = script.killed(tmp_path)
    sums = re.findall(r"sha256 of the weights: (\w+)", text)
    assert len(sums) == 2
    assert sums[0] == sums[1]
    today = script.lines_of(script.drawn(first, text))
    # The number of lines depends on the moment of the kill.
    assert {line for line in today if "sha" not in line} == {line for line in kept if "sha" not in line}, (
        "run: python docs/pictures.py"
    )


def test_the_pictures_are_small_and_readme_shows_each_with_a_text() -> None:
    for picture in sorted(PICTURES.iterdir()):
        assert picture.stat().st_size < 100_000
        assert f"](docs/pictures/{picture.name})" in README
        assert f"![](docs/pictures/{picture.name})" not in README


# -- what make says -----------------------------------------------------------------------------------


def test_make_says_how_long_the_tests_take_before_and_after() -> None:
    for target, words in (("test", r"about \d+ minutes"), ("test-quick", r"under \d+ seconds")):
        recipe = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        said, done = re.search(rf"echo .*{words}", recipe), recipe.find(f'echo "make {target} took ')
        tests = re.search(r"tests/suite\.py|-m pytest", recipe)
        assert said is not None
        assert tests is not None
        assert said.start() < recipe.index("ruff check") < tests.start() < done


def test_a_failure_is_shown_when_it_happens(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("def test_a():\n    assert 1 == 2\n\ndef test_b():\n    print('x')\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-v", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert 0 < done.stdout.find("assert 1 == 2") < done.stdout.index("test_b PASSED"), done.stdout + done.stderr


# -- Troubleshooting: each message on the page is one that a run raises ----------------------------------


INPUTS, LABELS = torch.ones(8, 2), torch.zeros(8, dtype=torch.int64)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trainer(loader: Any = None, loss: Any = None, model: nn.Module | None = None, **arguments: Any) -> Trainer:
    loader = TensorBatches(INPUTS, LABELS, batch_size=4) if loader is None else loader
    loss = supervised(cross_entropy) if loss is None else loss
    optimizer = arguments.pop("optimizer", sgd)
    given = {"max_epochs": 1, "progress": False, **arguments}
    return Trainer(nn.Linear(2, 3) if model is None else model, optimizer, loader, loss, **given)


def misspelled() -> None:
    class Mine(Callback):
        def on_setp_end(self, run: Run) -> None: ...


def without_run() -> None:
    class Mine(Callback):
        def on_step_end(self) -> None: ...  # type: ignore[override]


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.change: Function[[Any], Any] = lambda sample: sample["missing"]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.change({})


def held_back(folder: Path, **arguments: Any) -> Trainer:
    trainer(directory=folder, callbacks=[Checkpoint(every="1 epoch")]).fit()
    return trainer(directory=folder, max_epochs=2, **arguments)


def recurrent() -> Function[[nn.Module, Any], Tensor]:
    hidden = nn.Linear(2, 3)(INPUTS)
    return lambda model, batch: (hidden * hidden).sum() + model(batch[0]).sum()


def elsewhere(model: nn.Module, batch: Any) -> Tensor:
    outputs: Tensor = model(batch[0].to("meta"))
    return outputs.sum()


def out_of_memory(model: nn.Module, batch: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Sent:
    """A loader that pickles its data set, as a worker of a DataLoader needs it where processes are not forked."""

    def __iter__(self) -> Any:
        pickle.dumps(Samples())


EXAMPLES: dict[str, Function[[Path], object]] = {
    "... is no moment of a run ... Did you mean 'on_step_end'?": lambda _: misspelled(),
    "... has the wrong signature: expected (self, run), got (self)": lambda _: without_run(),
    "callbacks[0] is the class ...; expected an instance": lambda _: trainer(callbacks=[StopOnNonFinite]),
    "Trainer has no argument 'gradient_clip_val'": lambda _: trainer(gradient_clip_val=1.0),
    "a run needs an end": lambda _: trainer(max_epochs=None),
    "compute_loss must be a function (model, batch) -> loss; got the loss module": (
        lambda _: trainer(loss=nn.CrossEntropyLoss()).fit()
    ),
    "SGD holds none of the model's parameters": lambda _: trainer(optimizer=sgd(nn.Linear(2, 3).parameters())).fit(),
    "device 'cuda' does not exist; this machine has ['cpu']": lambda _: trainer(device="cuda").fit(),
    "the training loader is empty": (
        lambda _: trainer(DataLoader(TensorDataset(INPUTS, LABELS), batch_size=9, drop_last=True)).fit()
    ),
    "model is wrapped in ...; expected the module in it": lambda _: trainer(model=nn.DataParallel(nn.Linear(2, 3))),
    "the function of the optimizer gets the list of the model's parameters": (
        lambda _: trainer(optimizer=lambda model: sgd(model.head)).fit()
    ),
    "directory ... already holds a run": lambda folder: held_back(folder).fit(),
    "does not fit this trainer; nothing was restored": lambda path: held_back(path, model=nn.Linear(2, 5)).fit(resume="auto"),
    "Checkpoint needs a folder": lambda _: trainer(callbacks=[Checkpoint(every="1 epoch")]).fit(),
    "'500 stps' is no schedule": lambda _: Checkpoint(every="500 stps"),
    "... watches 'eval/los', but ... will report only ['eval/loss']": (
        lambda _: trainer(callbacks=[Evaluate([(INPUTS, LABELS)]), EarlyStopping("eval/los", "min")]).fit()
    ),
    "forward() takes 2 positional arguments but 3 were given": (
        lambda _: Trainer(nn.Linear(2, 3), sgd, [(INPUTS, LABELS)], max_epochs=1, progress=False).fit()
    ),
    "supervised(...) expects batches (inputs, targets); got a mapping": lambda _: trainer([{"inputs": INPUTS}]).fit(),
    "cross_entropy_loss(): argument 'input' ... must be Tensor, not tuple": (
        lambda _: trainer(loss=lambda net, batch: cross_entropy((net(batch[0]),), batch[1])).fit()  # type: ignore[arg-type]
    ),
    "tuple indices must be integers or slices, not tuple": (
        lambda _: trainer([(INPUTS,)], loss=lambda net, batch: net(batch[:, 0])).fit()
    ),
    "mat1 and mat2 shapes cannot be multiplied": lambda _: trainer([(torch.ones(8, 5), LABELS)]).fit(),
    "The size of tensor a (4) must match the size of tensor b (8)": (
        lambda _: trainer([(INPUTS, torch.ones(4))], lambda model, batch: (batch[1] - model(batch[0])[:, 0]).sum()).fit()
    ),
    "expected target dtype to be Long or Byte, but got Float": lambda _: trainer([(INPUTS, LABELS.float())]).fit(),
    "Target 4 is out of bounds": lambda _: trainer([(INPUTS, LABELS + 4)]).fit(),
    "the loss must be a tensor of shape () that has a gradient": lambda _: trainer(loss=lambda net, batch: net(batch[0])).fit(),
    "is not on the expected device": lambda _: trainer(loss=elsewhere).fit(),
    "Can't pickle local object": lambda _: trainer(Sent()).fit(),
    "backward through the graph a second time": lambda _: trainer(loss=recurrent()).fit(),
    "out of memory": lambda _: trainer(loss=out_of_memory).fit(),
    "the training loader gave no batch in epoch 2": lambda _: trainer(iter([(INPUTS, LABELS)]), max_epochs=2).fit(),
}


ELSEWHERE = {"Caught KeyError in DataLoader worker process"}  # in tests/engine/test_error_context.py, with a worker


def messages() -> list[str]:
    """Return the messages in the tables of errors: a row with alternatives has its first one here."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables = page[page.index("## Errors before") : page.index("## During the training")]
    return [found for found in re.findall(r"^\| `(.+?)`.* \|$", tables, re.MULTILINE) if not found.endswith("Error")]


def test_each_message_of_the_page_has_an_example() -> None:
    assert sorted(messages()) == sorted({*EXAMPLES, *ELSEWHERE})


@pytest.mark.parametrize("message", EXAMPLES)
def test_a_message_of_the_page_is_one_that_is_raised(message: str, tmp_path: Path) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # each of these is another
        EXAMPLES[message](tmp_path)
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert "pickle" not in message or "likely cure: the workers of a loader get copies" in said
    assert "size of tensor" not in message or "predictions and targets need one shape" in said
    parts = [re.escape(part.strip()) for part in message.split("...")]
    assert re.search(".*".join(parts), said, re.DOTALL), said


# -- the table of other systems' built-ins: what it says to write here is written and run ----------


ROWS = [(system, name, native) for system, table in COUNTERPARTS.items() for name, native in table.items()]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    library = {name: getattr(module, name) for module in (callbacks, sinks) for name in module.__all__}
    return {**library, "torch": torch, "loader": tiny_loader(2), "loss_module": nn.CrossEntropyLoss()}


@pytest.mark.parametrize(("system", "name", "native"), ROWS, ids=[f"{system}-{name}" for system, name, _ in ROWS])
def test_what_the_table_says_runs(system: str, name: str, native: str, names: dict[str, Any], tmp_path: Path) -> None:
    listed: list[Callback] = eval(f"[{native}]", names)
    torch.manual_seed(0)  # the weights decide whether a callback of the table stops the run
    parts = {"body": nn.Linear(1, 1), "dropout": nn.Dropout(0.5), "head": nn.Linear(1, 1)}  # those that the examples name
    run = tiny_run(model=nn.Sequential(OrderedDict(parts)), callbacks=listed, epochs=2, directory=tmp_path / "run")
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert run.faults == []
