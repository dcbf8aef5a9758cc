"""The API of fastNLP 1.0 and its tutorial, run as a script. Code for 0.5 is refused, with what became of it."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import cadenza
from cadenza import supervised
from cadenza.callbacks import Checkpoint
from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import Callback, EarlyStopCallback, Trainer
from cadenza.compat.fastnlp.api_of_0_5 import ARGUMENTS, HOOKS, PROPERTIES
from cadenza.compat.fastnlp.translation import EVENTS
from cadenza.testing import tiny_loader, tiny_model
from tests import forked
from tests.compat.fastnlp.toy import Scribe, Toy, loader, rows, toy_trainer

WANTED = (Path(__file__).parent / "signatures.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: wanted.partition("(")[0])
def test_a_class_or_method_has_the_signature_of_fastnlp(wanted: str) -> None:
    taken: Any = fastnlp
    for part in wanted.partition("(")[0].split("."):
        taken = getattr(taken, part)
    parameters = inspect.signature(taken).parameters
    named = [one for one in parameters.values() if one.name != "self" and one.kind is one.POSITIONAL_OR_KEYWORD]
    assert f"({', '.join(map(written, named))})" == wanted[wanted.index("(") :]


def written(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is parameter.empty:
        return parameter.name
    return f"{parameter.name}={default.__name__ if isinstance(default, type) else repr(default)}"


@pytest.mark.parametrize("name", ["RichCallback", "TqdmCallback"])
def test_all_progress_callbacks_have_the_same_signature(name: str) -> None:
    bar = getattr(fastnlp, name)(2, 3, "acc", False, False, "extra")
    values = (bar.print_every, bar.loss_round_ndigit, bar.monitor, bar.larger_better, bar.format_json, bar.extra.keys)
    assert values == (2, 3, "acc", False, False, ["extra"])


# -- code for 0.5 ----------------------------------------------------------------------------------------


def of_0_5(hook: str) -> Callback:
    """Return a callback with one hook, written as in `HOOKS`."""
    name, _, arguments = hook.rstrip(")").partition("(")
    space: dict[str, Any] = {}
    exec(f"def {name}({arguments}): raise AssertionError", space)
    kind: type[Callback] = type("Old", (Callback,), {name: space[name]})
    return kind()


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_of_0_5_is_an_error_in_both_trainers_that_says_what_to_write(hook: str) -> None:
    said = re.escape(f"Old.{hook}  ->  {HOOKS[hook].replace('`', '')}")
    with pytest.raises(TypeError, match=said):
        toy_trainer(callbacks=of_0_5(hook))
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match=said):
        cadenza.Trainer(model, optimizer, tiny_loader(), supervised(nn.MSELoss()), max_epochs=1, callbacks=[of_0_5(hook)])


@pytest.mark.parametrize("new", HOOKS.values())
def test_each_hook_that_the_table_names_exists_with_these_arguments(new: str) -> None:
    for name, arguments in re.findall(r"(on_\w+)\(self, ([^)]*)\)", new):
        assert [*inspect.signature(getattr(Callback, name)).parameters][1:] == arguments.split(", ")
        assert name in EVENTS


@pytest.mark.parametrize("new", ARGUMENTS.values())
def test_each_argument_that_the_table_names_exists(new: str) -> None:
    given = {*inspect.signature(Trainer.__init__).parameters, "progress_bar", "num_eval_sanity_batch"}
    named = re.findall(r"`(\w+)=", new)
    assert set(named) <= given
    assert named or "(" in new or "train_step" in new


def test_one_error_lists_all_callbacks_and_arguments_also_of_a_subclass() -> None:
    class Mine(Trainer):
        def __init__(self, train_data: Any, model: Any, loss: Any) -> None:
            super().__init__(train_data, model, torch.optim.SGD(model.parameters(), 0.1), loss)

    hooks = ["on_batch_begin(self, batch_x, batch_y, indices)", "on_train_begin(self)"]
    begin = of_0_5(hooks[1])
    callbacks = [of_0_5(hooks[0]), begin, type(begin)()]
    arguments: dict[str, Any] = {"loss": None, "dev_data": rows(4), "metric_key": "-loss"}
    with pytest.raises(TypeError) as caught:
        Trainer(rows(4), Toy(), callbacks=callbacks, **arguments)  # type: ignore[arg-type]
    first, *lines, last = str(caught.value).splitlines()
    assert first == "this is code for fastNLP 0.5; expected that of 1.0, which has other hooks and arguments. Write instead:"
    refused = [*(f"Old.{hook}" for hook in hooks), *(f"Trainer({name}=)" for name in ("train_data", *arguments))]
    assert [line.partition("  ->")[0].strip() for line in lines] == refused
    assert last == "See docs/guides/from-fastnlp.md."
    made: list[Callable[[], object]] = [lambda: Mine(rows(4), Toy(), None), lambda: Trainer(rows(4), model=Toy(), loss=None)]  # type: ignore[call-arg, misc, arg-type]
    for make in made:
        both = r"Trainer\(train_data=\)  ->  train_dataloader=(.|\n)*Trainer\(loss=\)  ->  train_step"
        with pytest.raises(TypeError, match=both):
            make()


def test_hooks_of_an_alpha_version_are_named_so_and_a_private_name_has_advice() -> None:
    with pytest.raises(TypeError, match=r"(?s)code for an alpha version of fastNLP 1\.0; .*on_evaluate_end\(self, trainer"):
        toy_trainer(callbacks=of_0_5("on_validate_end(self, trainer, results)"))
    with pytest.raises(ImportError, match=r"importlib\.util\.find_spec"):
        from cadenza.compat.fastnlp.envs import _module_available  # type: ignore[attr-defined]  # noqa: F401


def test_code_for_1_0_is_not_taken_for_code_for_0_5(caplog: pytest.LogCaptureFixture) -> None:
    class New(Callback):
        def on_train_begin(self, trainer: Any) -> None: ...

        def on_exception(self, trainer: Any) -> None: ...  # type: ignore[override]  # wrong, and not of 0.5

        def on_train_end(self, *arguments: Any) -> None: ...

    class Mine(Trainer):
        def __init__(self, loss: Any, **options: Any) -> None:
            model = Toy()
            super().__init__(model, loader(4), torch.optim.SGD(model.parameters(), 0.1), progress_bar=None, **options)

    Mine(loss=3, callbacks=[New(), Scribe(), Checkpoint("1 epoch")])
    toy_trainer(batch_size=4)  # fastNLP 1.0 accepts what it does not know
    assert "ignores the unknown argument batch_size=. In fastNLP 1.0 use prepare_dataloader(..., batch_size=)." in caplog.text


def test_methods_with_names_of_0_5_that_take_the_trainer_belong_to_the_user(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    class New(Callback):
        on_valid_begin = None

        def on_epoch_end(self, trainer: Any) -> None:
            called.append("on_epoch_end")

        @staticmethod
        def on_batch_end(trainer: Any) -> None:
            called.append("on_batch_end")

        def on_train_epoch_end(self, trainer: Any) -> None:
            self.on_epoch_end(trainer)

    toy_trainer(callbacks=New(), n_epochs=1).run()
    assert called == ["on_epoch_end"]
    assert "New.on_epoch_end is not an event, and is never called by a training" in caplog.text


@pytest.mark.parametrize(("name", "now"), PROPERTIES.items())
def test_each_property_of_0_5_is_an_error_that_says_what_to_use_and_another_error_is_unchanged(name: str, now: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"had. Use {now.replace('`', '')}")):
        getattr(Callback(), name.removeprefix("self."))
    assert not hasattr(Callback(), "other")

    class Broken(Callback):
        @property
        def rate(self) -> Any:
            return self.missing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'missing'"):
        _ = Broken().rate


def test_the_patience_of_0_5_is_an_error_that_says_what_to_write() -> None:
    said = r"In fastNLP 0.5 the first argument was patience: write EarlyStopCallback\(patience=5\)"
    with pytest.raises(TypeError, match=said):
        EarlyStopCallback(5)  # type: ignore[arg-type]


# -- the tutorial ------------------------------------------------------------------------------------------


LISTING = Path(__file__).parent / "listings" / "t7.py"
SHARED = Path(__file__).resolve().parents[4] / "shared"
DATA = SHARED / "data" / "sst2"
TUTORIAL = SHARED / "seeds" / "002_8dfaeb90ea727427.txt"

INDICES = [50, 5, 19, 66, 53, 9, 64, 36, 20, 11, 13, 52, 8, 65, 16, 74]  # of the first batch, as the tutorial recorded them


def run_seeded(folder: Path) -> None:
    """Run the cells in a folder. The tutorial has no seed of its own: it splits the data at random."""
    os.environ["HF_HOME"] = str(folder / "huggingface")
    os.chdir(folder)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    numpy.random.seed(0)
    torch.manual_seed(0)
    sys.argv = [str(LISTING), str(folder)]
    runpy.run_path(str(LISTING), run_name="__main__")


def test_all_fourteen_cells_are_the_tutorials_but_for_imports_and_the_datas_path() -> None:
    if not TUTORIAL.exists():
        pytest.skip(f"the tutorial is not in {TUTORIAL}")
    tutorial = TUTORIAL.read_text()
    starts = list(re.finditer(r"^In \[(\d+)\]:?\n+", tutorial, re.MULTILINE))
    assert [int(start[1]) for start in starts] == list(range(1, 15))
    cells = re.split(r"^# In \[\d+\]\n", LISTING.read_text(), flags=re.MULTILINE)[1:]
    for start, cell in zip(starts, cells, strict=True):
        wanted = cell.rstrip().replace("cadenza.compat.fastnlp", "fastNLP")
        if start[1] == "1":  # it loads the data
            assert tutorial[start.end() :].startswith("from datasets import load_dataset\n\n# sst-2 数据集\nsst2data = ")
            assert "from datasets import load_dataset\n\n# sst-2 数据集\nsst2data = " in wanted
        else:
            assert tutorial[start.end() :].startswith(f"{wanted}\n"), f"cell {start[1]} is another one"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not DATA.exists():
        pytest.skip(f"the data are not in {DATA}")
    folder = tmp_path_factory.mktemp("tutorial")
    with (DATA / "train.tsv").open(encoding="utf-8") as rows:  # the tutorial takes the first hundred
        (folder / "train.tsv").write_text("".join(islice(rows, 201)), encoding="utf-8")
    process = forked.start(run_seeded, folder, output=folder / "said")
    assert process.ended() == 0, process.said()
    return process.said()


def lines(shown: str, start: str) -> list[str]:
    return [line for line in shown.splitlines() if line.startswith(start)]


def test_the_data_set_is_printed_as_in_the_tutorial(shown: str) -> None:
    table = [*lines(shown, "+"), *lines(shown, "|")]
    assert table[:3] == ["+------------------------------+--------+---------+"] * 3
    assert table[3] == "| words                        | target | seq_len |"
    assert len(table) == 3 + 1 + 12 + 1
    assert table[-1] == "| ...                          | ...    | ...     |"
    row = re.compile(r"\| \[[\d, ]+(\]|\.\.\.|\]\.\.\.) * \| [01] {6}\| \d+ +\|")
    assert all(row.fullmatch(line) for line in table[4:-1])


def test_the_first_callback_prints_five_batches(shown: str) -> None:
    told = shown[shown.index("Now start training...") : shown.index("Quit training process.")]
    assert "Epoch 1/1\n" in told
    assert lines(told, "Training Batch") == [f"Training Batch {number}/5..." for number in range(1, 6)]
    first, *_ = lines(told, "Batch Words: ")
    assert first.endswith(f"Indices: {INDICES}")
    losses = [float(line.removeprefix("Loss: ")) for line in lines(told, "Loss: ")]
    ending = re.search(r"End Epoch 1, Average Loss ([\d.]+)\n", told)
    assert ending is not None
    assert float(ending[1]) == pytest.approx(sum(losses) / 5)


def test_the_monitored_accuracy_is_printed_after_10_20_30_and_40_epochs(shown: str) -> None:
    told = [re.fullmatch(r"Epoch: (\d+/40), 'acc' is (not )?better: ([\d.]+)", line) for line in lines(shown, "Epoch: ")]
    assert [match[1] for match in told if match] == ["10/40", "20/40", "30/40", "40/40"]
    assert all("acc#acc" in line for line in lines(shown, "{"))
    assert "Eval. results on Epoch:9, Batch:5" in shown  # as the tutorial recorded it
    values = [(match[2] is None, float(match[3])) for match in told if match]
    best = 0.0
    for better, value in values:
        assert better == (value > best)
        best = max(best, value)


def test_functions_at_events_print_all_batches_each_second_one_and_the_second(shown: str) -> None:
    batches = [int(match[1]) for match in re.finditer(r"^Total Batches (\d+)/10 Loss [\d.]+$", shown, re.MULTILINE)]
    assert batches == [*range(1, 11), *range(2, 11, 2), 2, *range(2, 11, 2)]
