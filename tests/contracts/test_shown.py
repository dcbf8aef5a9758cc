"""What a person sees of an object: a line or HTML, never an address; and of a run: few public names, read-only."""

from __future__ import annotations

import inspect
import math
import pydoc
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza import Callback, Evaluation, History, Listener, Monitor, Record, Run, Trainer, on
from cadenza.callbacks import Capsule, Checkpoint, ClipGradients, EarlyStopping, Ema, Evaluate, LogTraining, Profile, Warmup
from cadenza.drivers import TensorParallel
from cadenza.engine.session import session_of
from cadenza.hooks import HeldWeights
from cadenza.loading import Mixture, Shard, TensorBatches, resumable
from cadenza.parallel import Mesh, Pipeline
from cadenza.sinks import Csv, Mlflow, ProgressBar
from cadenza.status.formats import counted
from cadenza.status.markup import notebook_table
from cadenza.status.reprs import brief
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer
from cadenza.text.hints import hints
from cadenza.timetravel import Difference, replay_capsule, replay_step, what_if
from tests.callbacks.shipped import CALLBACKS, SINKS, made

PACKAGES = ["callbacks", "drivers", "hooks", "loading", "parallel", "records", "sinks", "testing", "timetravel"]
TABLES = {"Calendar", "Plan", "Timings"}  # their repr is the table that print shows
NO_OBJECT = {"Callback", "HoldsWeights", "Driver", "Sink", "Phase", "Schedule", "Hooks"}  # bases and tables, shown below
OF_SEVERAL_PROCESSES = {"DdpDriver", "FsdpDriver", "Parallel", "ReplicaGroups"}


class Fragile(Callback):
    """A callback that is disabled at once."""

    on_fault = "disable"

    def on_fit_start(self, run: Run) -> None:
        raise ConnectionError("down")


@pytest.fixture(scope="module")
def run() -> Run:
    return tiny_run(callbacks=[LogTraining("1 step"), Evaluate(tiny_loader()), Profile(), Fragile()], epochs=2)


@pytest.fixture(scope="module")
def objects(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One object of each public class that is no callback."""
    trainer = tiny_trainer(callbacks=[Evaluate(tiny_loader())])
    plan = trainer.plan()
    values = torch.zeros(3, 8, 8)
    return {
        **of_time_travel(tmp_path_factory.mktemp("run")),
        "AlertMessage": cadenza.callbacks.AlertMessage("the loss is high", "warning", 3, "Rule", "Alert"),
        "LowerRate": cadenza.callbacks.LowerRate(0.5, "10 steps"),
        "NonFinite": cadenza.callbacks.NonFinite(),
        "Spike": cadenza.callbacks.Spike(),
        "Audio": cadenza.Audio(torch.zeros(100), 8000),
        "At": cadenza.At("3 epochs"),
        "Between": cadenza.Between("1 epoch", "50%"),
        "Best": cadenza.Best("eval/acc", 3, mode="max"),
        "Every": cadenza.Every("0.5 epoch"),
        "First": cadenza.First("10 steps"),
        "Last": cadenza.Last("1 epoch"),
        "Schedule": cadenza.Schedule.parse("0.5 epoch") & ~cadenza.First(3) | cadenza.At("10 min"),
        "When": cadenza.When(bool),
        "Calendar": tiny_trainer(callbacks=[LogTraining()]).calendar(),
        "Counters": run.progress.now(),
        "Decision": run.decisions[-1],
        "Evaluation": Evaluation(tiny_loader(), compute=lambda model, batch: 1),
        "Fault": run.faults[0],
        "Figure": cadenza.Figure(__import__("matplotlib.figure").figure.Figure()),
        "Histogram": cadenza.Histogram(values),
        "History": run.history,
        "Hooks": plan.hooks,
        "Image": cadenza.Image(values),
        "Listener": next(iter(plan.hooks.by_moment.values()))[0],
        "Monitor": Monitor(lambda results: 1.0, "max", owner="a test"),
        "Outcome": run.outcome,
        "Outputs": run.outputs,
        "Pipeline": Pipeline(["0", "1"], torch.nn.functional.mse_loss, microbatches=2),
        "Plan": plan,
        "Progress": run.progress,
        "Record": Record(run.progress.now(), 0.0, {"a": 1.0}, {"picture": cadenza.Image(values)}),
        "Recorder": Recorder(Callback.on_step_end),
        "ResumableLoader": resumable(tiny_loader(), 0),
        "Run": run,
        "Seen": cadenza.testing.Seen("on_step_end", run.progress.now()),
        "Shard": Shard(),
        "SingleDriver": run.driver,
        "HeldWeights": HeldWeights("average"),
        "Handle": cadenza.Handle(),
        "Loop": cadenza.attach(trainer.model, trainer.optimizer, max_steps=1),
        "Step": next(steps := tiny_trainer().steps()),
        "Steps": steps,
        "Mesh": Mesh(),
        "Mixture": Mixture({"a": [1]}, "cycle"),
        "TensorBatches": TensorBatches(values, batch_size=2),
        "TensorParallel": TensorParallel({}, ranks=2),
        "Text": cadenza.Text("*done*"),
        "Timings": run.profile,
        "Trainer": trainer,
        "supervised": cadenza.supervised(nn.MSELoss()),
    }


def of_time_travel(directory: Path) -> dict[str, Any]:
    loader = tiny_loader()
    loader[3][0][1] = math.nan
    trainer = tiny_trainer(
        loader=loader, seed=1, directory=directory, callbacks=[Capsule(), Checkpoint("2 steps", keep_last=None)]
    )
    trainer.fit()
    with replay_step(trainer, directory, 3) as again:
        return {
            "Answer": what_if(directory, [Checkpoint("1 step")]),
            "Answers": what_if(directory, lambda last: [Checkpoint("1 step", keep_last=last)], last=[1, 2]),
            "Difference": Difference(3, "train/loss", 0.5, 0.25),
            "RepeatedStep": replay_capsule(trainer, directory),
            "Replay": again,
        }


def public_classes() -> set[str]:
    rooms = [cadenza, *(getattr(cadenza, name) for name in PACKAGES)]
    return {name for room in rooms for name in room.__all__ if inspect.isclass(getattr(room, name))}


def callbacks_and_sinks() -> dict[str, Callable[[], object]]:
    return {name: partial(made, name) for name in (CALLBACKS | SINKS).keys() - NO_OBJECT}


def test_no_object_shows_an_address(objects: dict[str, Any]) -> None:
    made = objects | {name: make() for name, make in callbacks_and_sinks().items()}
    missing = public_classes() - made.keys() - NO_OBJECT - OF_SEVERAL_PROCESSES
    assert missing == set(), "a new public class: show an object of it here"
    for name, one in made.items():
        shown = repr(one)
        assert " at 0x" not in shown, name
        assert shown, name
        assert "\n" not in shown or name in TABLES, name
        assert len(shown) < 320 or name in TABLES, name


def test_nothing_that_a_hook_reads_of_a_run_shows_an_address(run: Run) -> None:
    names = [name for name in dir(run) if not name.startswith("_")]
    shown = {name: repr(getattr(run, name)) for name in names}
    assert [name for name, text in shown.items() if " at 0x" in text] == []


@pytest.mark.parametrize(
    ("one", "shown"),
    [
        (LogTraining(), "LogTraining()"),
        (LogTraining(10, lr=False), "LogTraining(every='10 steps', lr=False)"),
        (EarlyStopping("eval/loss", mode="min", patience=2), "EarlyStopping(monitor=Monitor('eval/loss', 'min'), patience=2)"),
        (Evaluate([1, 2], name="test", every="2 epochs"), "Evaluate(every='2 epochs', name='test')"),
        (Evaluate([1, 2], when_better=("eval/acc", "max")), "Evaluate(when_better=('eval/acc', 'max'))"),
        (ClipGradients(max_norm=1.0), "ClipGradients(max_norm=1.0)"),
        (Ema(0.5), "Ema(decay=0.5)"),
        (Warmup("1 epoch"), "Warmup(length='1 epoch')"),
        (Csv("table.csv"), "Csv(path='table.csv')"),
        (ProgressBar("plain", interval_s=2), "ProgressBar(renderer='plain', interval_s=2)"),
        (Mlflow(tags={"a": "b"}), "Mlflow(tags={'a': 'b'})"),
    ],
)
def test_a_callback_is_shown_as_the_call_that_makes_it(one: object, shown: str) -> None:
    assert repr(one) == shown


def test_a_callback_of_a_user_is_shown_too_and_its_properties_are_not_read() -> None:
    class Fading(Callback):
        def __init__(self, factor: float, model: nn.Module, call: Any = None, *more: int, **rest: int) -> None:
            self.factor, self.model, self.call = factor, model, call

        @property
        def late(self) -> float:
            raise RuntimeError("this must not be read")

    assert repr(Fading(0.5, nn.Linear(2, 2), print)) == "Fading(factor=0.5, model=Linear, call=print)"

    class Wrong:
        def __repr__(self) -> str:
            raise RuntimeError("no text for you")

    assert "call=<Wrong>" in repr(Fading(0.5, nn.Linear(2, 2), Wrong()))


def test_a_function_on_a_moment_is_shown_with_its_schedule() -> None:
    @on(Callback.on_step_end, when=lambda run: True)
    def check(run: Run) -> None: ...

    assert repr(check) == "check: on_step_end (when <lambda>)"
    assert repr(Listener(Callback.on_step_end, print)) == "<Listener: on_step_end calls print>"


def test_a_trainer_shows_its_arguments() -> None:
    model = nn.Linear(2, 1)
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        tiny_loader(3),
        max_epochs=2,
        device="cpu",
        callbacks=[Ema(0.5)],
        progress=False,
        compute_loss=lambda model, batch: model(batch),
    )
    assert repr(trainer) == (
        "Trainer(model=Linear of 3 parameters, optimizer=AdamW(lr=0.01), loader=list of 3 batches, max_epochs=2, "
        "precision=fp32, driver=SingleDriver('cpu'), callbacks=[LogTraining('1 epoch'), Ema(decay=0.5)])"
    )
    assert "Linear of 3 parameters" in trainer._repr_html_()


def test_plan_and_profile_show_in_a_prompt_what_print_shows(run: Run) -> None:
    plan = tiny_trainer().plan()
    assert repr(plan) == str(plan)
    assert repr(run.profile) == str(run.profile)


def test_a_history_is_a_line_and_a_table() -> None:
    history = History()
    assert repr(history) == "<History: empty>"
    assert "no values" in history._repr_html_()
    counters = cadenza.Counters
    for step in (1, 5):
        history.add(Record(counters(step=step), 0.0, {f"<name {index}>": math.nan if index else step for index in range(6)}))
    assert repr(history) == "<History: steps 1 to 5: <name 0>, <name 1>, <name 2>, <name 3> and 2 more>"
    shown = history._repr_html_()
    assert shown.count("<tr") == 7
    assert re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", shown)[5:10] == ["&lt;name 0&gt;", "5", "1", "5", "2"]
    assert "nan" in shown


def test_the_views_of_a_notebook_are_small_escaped_and_take_the_colours_of_the_page(run: Run) -> None:
    def alert(run: Run) -> None: ...

    alert.__name__ = "<script>alert()</script>"
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(50)))
    trainer = tiny_trainer(callbacks=[Recorder(), on(Callback.on_step_end)(alert)], model=model)
    views = [one._repr_html_() for one in (trainer, trainer.plan(), run.history, run.profile) if one is not None]
    assert len(views) == 4
    for view in views:
        assert "<script" not in view
        assert len(view) < 9_000
        assert not re.search(r"background:(?!none)", view)
        assert set(re.findall(r"[;\"]color:([^;\"]+)", view)) <= {"inherit", "#c4320a"}
    assert "&lt;script&gt;" in views[1]


def test_a_warning_of_the_plan_is_coloured() -> None:
    plan = tiny_trainer(callbacks=[LogTraining("1000 steps")]).plan()
    assert re.search(r'<span style="color:#\w+">! LogTraining .*never fires', plan._repr_html_())


def test_a_table_needs_no_head() -> None:
    assert "<th scope" not in notebook_table("title", (), [("a", 1)]).replace('<th scope="row"', "")


def test_a_brief_text_has_no_numbers_of_tensors() -> None:
    assert brief({"batch": torch.zeros(1000, 2)}) == "{'batch': Tensor(1000, 2)}"
    assert len(brief("x" * 1000)) < 70


# -- counts --------------------------------------------------------------------------------------------


def test_a_count_agrees_with_its_noun() -> None:
    texts = [counted(*given) for given in ((0, "batch"), (1, "batch"), (2, "epoch"), (1, "entry"), (3, "entry"))]
    assert texts == ["0 batches", "1 batch", "2 epochs", "1 entry", "3 entries"]


def test_no_sentence_of_the_package_makes_a_plural_of_its_own() -> None:
    nouns = "batch|step|epoch|sample|value|record|run|rank|parameter|evaluation|listener|checkpoint|callback|file|time"
    own_plural = re.compile(rf"{{[^{{}}:=]*}} (?:{nouns})(?:es|s)\b")
    always_many = {
        "compat/lightning/before_fit.py",  # a point of the run: a text for a program
        "callbacks/swa.py",  # a cadence: a text for a program
        "report/commands/watch.py",  # a speed
        "steering/server.py",  # a speed
        "drivers/fsdp.py",
        "drivers/sharding.py",  # a shape
        "report/chart.py",
        "report/curves.py",
        "sinks/progress_bar.py",  # a speed
        "testing/launcher.py",
        "loops/argument_texts.py",  # in run.json, where a comma would be new
    }
    source = Path(cadenza.__file__).parent
    own = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if "compat" not in path.parts and own_plural.search(path.read_text(encoding="utf-8"))
    }
    assert own - always_many == set(), "use counted(count, noun) of cadenza.status.formats"


# -- the face of a run -------------------------------------------------------------------------------


PROPERTIES = """
batch decisions device driver evaluations faults history info is_main loader loss model optimizers outcome outputs profile
progress state window
"""
VERBS = """
after_step at_end backward block_saves end_epoch fire log print replace_loader replace_model save skip_batch stop update warn
why why_not
"""
NAMES = sorted([*PROPERTIES.split(), *VERBS.split()])


def test_the_public_names_of_a_run_are_these_and_at_most_37() -> None:
    seen: list[list[str]] = []
    look = on(Callback.on_step_end)(lambda run: seen.append([name for name in dir(run) if not name.startswith("_")]))
    tiny_run(callbacks=[look], steps=1)
    assert seen == [NAMES]
    assert len(NAMES) <= 37


def test_each_name_that_dir_help_and_completion_list_can_be_read(objects: dict[str, Any]) -> None:
    waits, need_a_run = {("Handle", "run"), ("Profile", "table")}, {("Trainer", "run"), ("Loop", "run")}
    several = {**objects, **{name: row.cases[0]() for name, row in CALLBACKS.items() if row.cases}}
    listed = {(kind, name) for kind, one in several.items() for name in {*dir(one), *dir(type(one))}} - waits
    assert {(kind, name) for kind, name in listed if not hasattr(several[kind], name)} == need_a_run
    for kind in (Run, Trainer):
        assert "should_stop" not in pydoc.plain(pydoc.render_doc(kind))


ANY_NUMBER = {  # functions that do take any number of arguments
    "Derive": "values",
    "Parallel": "options",
    "MoveModules": "modules",
    "Recorder": "only",
    "TensorBatches": "tensors",
    "what_if": "grid",
    "freeze": "modules",
    "unfreeze": "modules",
    "tiny_run": "arguments",
    "tiny_trainer": "arguments",
}


def test_signatures_of_public_classes_and_functions_are_the_real_ones() -> None:
    packages = [cadenza, *(getattr(cadenza, name) for name in PACKAGES)]
    public = {name: getattr(package, name) for package in packages for name in package.__all__}
    public |= {f"Trainer.{name}": getattr(Trainer, name) for name in ("fit", "start", "steps", "evaluate", "predict", "plan")}
    kinds = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    checked = {
        name: [one.name for one in inspect.signature(call).parameters.values() if one.kind in kinds]
        for name, call in public.items()
        if callable(call) and name not in ("Outputs", "Consumed", "HoldsWeights")  # a dict, a type and a protocol
    }
    assert {name: ", ".join(found) for name, found in checked.items() if found} == ANY_NUMBER


@pytest.mark.parametrize("name", [*NAMES, *hints("run"), "prgress", "mine"])
def test_assigning_to_any_attribute_is_an_error_that_says_what_to_do(name: str) -> None:
    run = tiny_run(steps=1)
    with pytest.raises(AttributeError, match=r"call |read |set an entry|change |add |give |[Kk]eep |evaluates|the run writes"):
        setattr(run, name, None)
    with pytest.raises(AttributeError):
        delattr(run, name)


def test_the_error_of_an_assignment_names_the_nearest_verb() -> None:
    run = tiny_run(steps=1)
    for name, verb in {"should_stop": "stop(reason)", "model": "replace_model", "loader": "replace_loader"}.items():
        with pytest.raises(AttributeError, match=rf"{name}.*call run\.{verb.replace('(', '.').replace(')', '.')}"):
            setattr(run, name, None)
    with pytest.raises(AttributeError, match=r"no 'modl' and takes no new attributes\. Did you mean 'model'\?"):
        run.modl = None
    assert set(hints("run-settings")) == set(PROPERTIES.split())


def test_reading_every_attribute_of_a_run_changes_nothing() -> None:
    def look(run: Run) -> None:
        session = session_of(run)
        session.sync.requests.preempt(15)  # a signal is recorded when it is taken, and not when somebody looks
        before = list(run.decisions)
        assert inspect.getmembers(run)
        assert repr(run)
        assert run._repr_html_()
        assert run.decisions == before
        session.sync.requests.signal, session.sync.requests.leave = None, False

    tiny_run(callbacks=[on(Callback.on_step_end, at=2)(look)])


def test_the_model_and_the_loader_are_replaced_in_on_setup_only() -> None:
    trainer = tiny_trainer(steps=1)

    def replace(run: Run) -> None:
        run.replace_loader(list(run.loader)[:1])
        with pytest.raises(ValueError, match="the optimizers hold 2 parameters of the present model that the new one does not"):
            run.replace_model(nn.Linear(1, 1))
        wrapped = nn.Sequential(run.model)
        run.replace_model(wrapped)
        assert run.model is wrapped

    trainer.callbacks.append(on(Callback.on_setup)(replace))
    run = trainer.fit()
    assert (run.progress.step, len(list(run.loader))) == (1, 1)
    with pytest.raises(RuntimeError, match=r"run\.replace_loader\(\.\.\.\) must be called in on_setup"):
        run.replace_loader([])
