"""Records, files and counted tokens of multiple ranks: they are alike on all, and the main process writes each once."""

from __future__ import annotations

import csv
import json
import logging
import math
import sqlite3
import sys
import zipfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza import Callback, Run, new_directory, on, sinks
from cadenza.callbacks import Checkpoint, Ema, LogTraining, SequenceLength
from cadenza.engine.session import session_of
from cadenza.records.record import Text
from cadenza.testing import launch
from tests.distributed.parts import Stream, loader, squared_error, trainer, weights_of
from tests.distributed.parts import own_rank as rank
from tests.distributed.standing import on_ranks


def test_records_hold_the_mean_over_all_ranks_and_are_written_once(tmp_path: Path) -> None:
    def logging() -> dict[str, Any]:
        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            run.log({"rank": rank(), "loss": torch.tensor(float(rank())), "alike": 0.1, "count": 7})

        run = trainer(max_epochs=1, directory=tmp_path, callbacks=[log]).fit()
        return {name: run.history[name] for name in run.history.names}

    first, second = on_ranks(logging, ranks=3)[:2]
    assert first == second
    assert first["rank"] == [(1, 1.0), (2, 1.0)]
    assert first["loss"] == [(1, 1.0), (2, 1.0)]
    assert first["alike"] == [(1, 0.1), (2, 0.1)]  # though 0.1 + 0.1 + 0.1 is no 3 times 0.1
    assert first["count"] == [(1, 7), (2, 7)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_new_directory_is_named_by_the_main_process_and_all_ranks_have_it(tmp_path: Path) -> None:
    def named() -> str:
        one = trainer(max_epochs=1, directory=new_directory(tmp_path / f"parent of rank {rank()}", "a"))
        one.fit()
        return str(one.directory)

    assert on_ranks(named) == [str(tmp_path / "parent of rank 0" / "a-1")] * 2
    assert [one.name for one in tmp_path.iterdir()] == ["parent of rank 0"]


def test_the_outcome_names_the_first_step_of_all_ranks_with_a_loss_that_is_not_finite() -> None:
    def reason() -> str:
        batches = count(1)

        def compute(model: nn.Module, batch: Any) -> Tensor:
            return squared_error(model, batch) * (math.nan if next(batches) == 2 and rank() == 1 else 1.0)

        run = trainer(max_epochs=1, compute_loss=compute).fit()
        assert run.outcome is not None
        return run.outcome.reason

    assert on_ranks(reason) == ["the limit is reached; the loss on rank 1 was not finite from step 2 on"] * 2


@pytest.mark.parametrize("on_device", [False, True], ids=["weights on the host", "weights on a device"])
def test_a_step_has_no_loss_if_no_rank_has_a_weight(on_device: bool) -> None:
    def logged() -> tuple[list[tuple[int, float]], str, list[Any]]:
        weights = iter([[1, 0, 0], [0, 0, 3]][rank()])

        def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
            weight = next(weights)
            scale = 1.0 if weight else math.nan
            return {"loss": sum(one.sum() for one in model.parameters()) * 0 + scale, "weight": torch.tensor(weight)}

        with pytest.MonkeyPatch.context() as patch:
            for module in ("step_state", "metric_log", "rank_sync") if on_device else ():
                patch.setattr(f"cadenza.engine.{module}.number_on_host", lambda weight: None)
            run = trainer(max_epochs=1, compute_loss=compute, callbacks=[LogTraining("1 step")]).fit()
        assert run.outcome is not None
        return run.history["train/loss"], run.outcome.reason, [one for one in run.decisions if one.what == "loss not finite"]

    assert on_ranks(logged) == [([(1, 1.0), (3, 1.0)], "the limit is reached", [])] * 2


STEPS = range(1, 5)
LOGGED: dict[str, tuple[Callable[[Run], dict[str, float]], dict[str, list[tuple[int, float]]]]] = {
    "of one rank, also in the last step": (
        lambda run: {"a": float(run.progress.step)} if rank() == 1 else {},
        {"a": [(step, float(step)) for step in STEPS]},
    ),
    "of all ranks": (lambda run: {"a": run.progress.step + float(rank())}, {"a": [(step, step + 0.5) for step in STEPS]}),
    "with different names": (
        lambda run: {"ab"[rank()]: 1.0, **({"c": 2.0} if run.progress.step % 2 == rank() else {}), "both": float(rank())},
        {
            **{name: [(step, 1.0) for step in STEPS] for name in "ab"},
            "c": [(step, 2.0) for step in STEPS],
            "both": [(step, 0.5) for step in STEPS],
        },
    ),
}


LOGGED["with names that joined are alike"] = (
    lambda run: dict.fromkeys((("x", "y\nz"), ("x\ny", "z"))[rank()], 1.0),
    {name: [(step, 1.0) for step in STEPS] for name in ("x", "x\ny", "y\nz", "z")},
)
for names in (1, 24, 25, 80):
    LOGGED[f"with {names} names"] = (
        lambda run, names=names: {str(number): float(number * rank()) for number in range(names)},  # type: ignore[misc]
        {str(number): [(step, number / 2) for step in STEPS] for number in range(names)},
    )


@pytest.mark.parametrize("name", LOGGED)
def test_numbers_are_in_the_record_of_their_step_and_the_mean_of_those_ranks_that_logged_them(name: str) -> None:
    values, expected = LOGGED[name]

    def logging() -> dict[str, list[tuple[int, float]]]:
        log = on(Callback.on_step_end)(lambda run: run.log(values(run)))
        history = trainer(loader(4 * 2 * 4), max_epochs=1, callbacks=[log]).fit().history
        return {name: history[name] for name in history}

    assert on_ranks(logging) == [expected] * 2


MOMENTS: dict[str, tuple[int, ...]] = {  # the means of what the first, second, ... call on each rank logs
    **dict.fromkeys(("on_epoch_start", "on_epoch_end", "on_fit_end"), (1,)),
    **dict.fromkeys(("on_before_backward", "on_after_backward", "on_batch_start", "on_batch_end"), (4, 6)),
    **dict.fromkeys(("on_after_zero_grad", "on_step_end"), (1, 2)),
    "on_fetch_end": (4, 7),  # one more fetch finds the loader exhausted
}


@pytest.mark.parametrize("name", MOMENTS)
def test_values_logged_at_a_moment_without_other_listeners_are_reduced(name: str) -> None:
    """Also before a batch, after the last one, and outside of steps."""

    def logged() -> list[float]:
        times: list[None] = []

        def log(run: Run, *_: Any) -> None:
            times.append(None)
            run.log("a", len(times) + 10.0 * rank())

        run = trainer(loader(48), max_epochs=1, accumulate=4, callbacks=[on(getattr(Callback, name))(log)]).fit()
        return [value for _, value in run.history["a"]]

    assert on_ranks(logged) == [[number + 5.0 for number in MOMENTS[name]]] * 2


def test_numbers_of_one_rank_in_the_last_step_of_a_stream_are_in_their_record_before_the_end_of_the_epoch() -> None:
    def seen() -> list[Any]:
        at_end: list[Any] = []

        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            if rank() == 1:
                run.log("a", float(run.progress.step))

        note = on(Callback.on_epoch_end)(lambda run: at_end.append(run.history["a"]))
        trainer(Stream(4 * 2 * 4), max_epochs=1, callbacks=[log, note]).fit()
        return at_end[0]  # type: ignore[no-any-return]

    assert on_ranks(seen) == [[(step, float(step)) for step in range(1, 5)]] * 2


def test_an_error_of_one_rank_ends_all_and_keeps_the_numbers_that_it_logged() -> None:
    def failing() -> tuple[str, list[tuple[int, float]]]:
        runs: list[Run] = []

        @on(Callback.on_step_end)
        def fail(run: Run) -> None:
            runs.append(run)
            if rank() == 1:
                run.log("a", float(run.progress.step))
            if rank() == 1 and run.progress.step == 3:
                raise ValueError("fails on one rank")

        with pytest.raises(Exception, match="fails on one rank") as raised:
            trainer(loader(96), callbacks=[fail]).fit()
        return type(raised.value).__name__, runs[-1].history["a"]

    (first, before), (second, history) = launch(failing)
    assert (first, second) == ("DistributedError", "ValueError")
    assert history == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert before == history[: len(before)]


@pytest.mark.parametrize("speaks", ["ends epochs", "logs", "logs, then all save"])
def test_a_run_with_requests_or_numbers_of_one_rank_resumes_to_the_same_bits(speaks: str, tmp_path: Path) -> None:
    def trained(folder: str, steps: int | None) -> tuple[Tensor, dict[str, Any]]:
        @on(Callback.on_step_end)
        def speak(run: Run) -> None:
            if rank() == 1 and "logs" in speaks:
                run.log("a", float(run.progress.step))
            if rank() == 1 and speaks == "ends epochs" and run.progress.step in (3, 8):
                run.end_epoch("one rank alone")
            if speaks == "logs, then all save" and run.progress.step == 5:
                run.save("all ranks")

        callbacks = [speak, Checkpoint("4 steps"), Ema(0.9)]
        one = trainer(loader(96), max_steps=steps, max_epochs=2, directory=tmp_path / folder, callbacks=callbacks)
        run = one.fit(resume="auto")
        return weights_of(one), {name: run.history[name] for name in run.history}

    def whole_and_cut() -> Any:
        trained("cut", 7)
        return trained("whole", None), trained("cut", None)

    for (weights, history), (again, others) in on_ranks(whole_and_cut):
        assert torch.equal(weights, again)
        assert history == others


def test_a_value_that_is_not_finite_on_one_rank_is_not_in_the_mean() -> None:
    def logging() -> str:
        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            run.log({"nan": float("nan") if rank() else 1.0, "inf": float("inf") if rank() else 1.0, "fine": 2.0})

        return repr(trainer(max_steps=1, callbacks=[log]).fit().history.latest)

    assert on_ranks(logging) == ["{'nan': nan, 'inf': inf, 'fine': 2.0}"] * 2


def test_pictures_and_texts_are_those_of_the_main_process() -> None:
    def logging() -> list[str]:
        heard: list[str] = []

        class Log(Callback):
            def on_step_end(self, run: Run) -> None:
                run.log({"text": Text(f"rank {rank()}"), "number": 1.0})

            def on_log(self, run: Run, record: Any) -> None:
                heard.append(record.media["text"].text)

        trainer(max_steps=1, callbacks=[Log()]).fit()
        return heard

    assert on_ranks(logging) == [["rank 0"], []]


@pytest.mark.parametrize("number_format", [torch.float32, torch.bfloat16, torch.float64])
def test_the_loss_in_a_record_has_the_bits_of_the_mean_over_ranks(number_format: torch.dtype) -> None:
    """As a replay computes it."""

    def losses() -> tuple[list[float], list[float]]:
        seen: list[float] = []

        @on(Callback.on_step_end)
        def see(run: Run) -> None:
            mean = session_of(run).sync.mean_loss()
            assert mean is not None
            seen.append(mean.item())

        def compute(model: Any, batch: Any) -> Tensor:
            return squared_error(model, batch).to(number_format) * 10.0 ** rank()

        run = trainer(loader(4 * 3 * 6), max_epochs=1, compute_loss=compute, callbacks=[LogTraining(1), see]).fit()
        return [value for _, value in run.history["train/loss"]], seen

    (logged, seen), *others = on_ranks(losses, ranks=3)
    assert len(set(logged)) == 6
    assert logged == seen
    assert [(logged, seen)] * 2 == others


# -- who writes what

QUIET = {"silent": True, "x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False}


def sinks_of_files() -> list[Callback]:
    """Return one of each kind that writes to the screen or to files."""
    bar = sinks.ProgressBar("plain", interval_s=60)
    to_files = [sinks.Csv("train.csv"), sinks.JsonLines("train.jsonl"), sinks.TensorBoard(), sinks.Dvclive()]
    return [sinks.Console(), bar, *to_files]


def sinks_of_services(project: str) -> list[Callback]:
    """Return one of each kind that would send to a service, which write to files here."""
    return [
        sinks.Mlflow(),
        sinks.Wandb(project, mode="offline", settings=QUIET),
        sinks.Swanlab(project, mode="offline"),
        sinks.Trackio(project),
        sinks.Comet(project, mode="offline"),
    ]


def train_with(directory: Path, some: list[Callback]) -> list[str]:
    """Return the faults of a run with these sinks."""
    callbacks = [LogTraining("1 step", throughput=False), *some]
    run = trainer(directory=directory, callbacks=callbacks).fit()  # others wait while the main one begins to talk to services
    if rank() == 0 and (wandb := sys.modules.get("wandb")) is not None:
        wandb.teardown()  # a forked process ends without what is to be done at its exit
    return [f"{fault.callback}: {fault.error!r}" for fault in run.faults]


ALL_STEPS = [1, 2, 3, 4, 5, 6]


def steps_in(path: Path, delimiter: str = ",") -> list[int]:
    with path.open() as file:
        return [int(row["step"]) for row in csv.DictReader(file, delimiter=delimiter)]


def test_sinks_write_each_record_once_from_the_main_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    assert launch(lambda: train_with(tmp_path, sinks_of_files())) == [[], []]
    shown = capfd.readouterr().out
    assert shown.count("finished after 2 epochs, 6 steps") == 1
    assert shown.count("step 3 ") == 1
    for name in ("metrics.jsonl", "train.jsonl"):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == ALL_STEPS
    assert steps_in(tmp_path / "train.csv") == ALL_STEPS
    assert steps_in(tmp_path / "dvclive" / "plots" / "metrics" / "train" / "loss.tsv", "\t") == ALL_STEPS
    [events] = tmp_path.rglob("events.out.tfevents*")
    tags = [value.tag for event in EventFileLoader(str(events)).Load() for value in event.summary.value]
    assert tags.count("train/loss") == 6


@pytest.mark.long
def test_sinks_of_services_write_each_record_once_from_the_main_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trackio.utils

    def rows(database: Path, query: str) -> list[Any]:
        with closing(sqlite3.connect(database)) as connection:
            return connection.execute(query).fetchall()

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    assert launch(lambda: train_with(tmp_path, sinks_of_services(tmp_path.name))) == [[], []]
    of_mlflow = "SELECT run_uuid, step FROM metrics WHERE key = 'train/loss' ORDER BY step"
    of_trackio = Path(trackio.utils.TRACKIO_DIR, f"{tmp_path.name}.db")
    for found in (rows(tmp_path / "mlflow.db", of_mlflow), rows(of_trackio, "SELECT run_id, step FROM metrics ORDER BY step")):
        assert len({run for run, _ in found}) == 1
        assert [step for _, step in found] == ALL_STEPS
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == len(list(tmp_path.glob("swanlog/run-*"))) == 1
    [archive] = (tmp_path / "comet").glob("*.zip")
    assert zipfile.Path(archive, "messages.json").read_text().count('"metricName":"train/loss"') == 6


say = on(Callback.on_step_end)(lambda run: run.print(f"rank {run.driver.rank} says {run.progress.step}"))


warn = on(Callback.on_fit_end)(lambda run: run.warn(f"rank {run.driver.rank} warns"))


def test_each_rank_keeps_what_it_says_in_a_log_of_its_own_and_goes_on_in_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def saying(steps: int) -> None:
        trainer(directory=tmp_path, max_epochs=None, max_steps=steps, callbacks=[say, warn, Checkpoint("1 step")]).fit("auto")

    launch(lambda: saying(2))
    launch(lambda: saying(3))
    said = capfd.readouterr()
    assert [line for line in said.out.splitlines() if " says " in line] == [f"rank 0 says {step}" for step in (1, 2, 3)]
    for number, name in enumerate(("console.log", "console.rank1.log")):
        steps = [f"rank {number} says {step}" for step in (1, 2, 3)]
        own = [line for line in (tmp_path / name).read_text().splitlines() if line.startswith("rank ")]
        assert own == [*steps[:2], f"rank {number} warns", steps[2], f"rank {number} warns"]
    assert sorted(path.name for path in tmp_path.glob("console*")) == ["console.log", "console.rank1.log"]


def test_a_rank_writes_no_line_that_the_main_process_writes_too(tmp_path: Path) -> None:
    @on(Callback.on_step_end)
    def say_alike(run: Run) -> None:
        run.print(f"{run.progress.step} steps are complete")
        if run.driver.rank == 1 and run.progress.step == 2:
            run.warn("the disk of rank 1 is slow")

    warn_alike = on(Callback.on_fit_end)(lambda run: run.warn("the end\nof all ranks"))

    def warning() -> None:
        trainer(directory=tmp_path / "one", callbacks=[say_alike, warn_alike]).fit()
        trainer(directory=tmp_path / "two", callbacks=[warn_alike]).fit()

    on_ranks(warning)
    assert (tmp_path / "one" / "console.rank1.log").read_text() == "the disk of rank 1 is slow\n"
    assert not (tmp_path / "two" / "console.rank1.log").exists()


def test_without_a_directory_a_warning_of_another_rank_is_shown_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    def warning() -> list[str]:
        with caplog.at_level(logging.WARNING, "cadenza"):
            trainer(callbacks=[warn]).fit()
        return [record.getMessage() for record in caplog.records if "warns" in record.getMessage()]

    assert launch(warning) == [["rank 0 warns"], ["rank 1: rank 1 warns"]]


def test_the_directory_belongs_to_the_main_process_and_all_know_where_it_is(tmp_path: Path) -> None:
    def known() -> tuple[Path | None, str, bool, int]:
        callbacks = [say, LogTraining("1 step", throughput=False), sinks.JsonLines("train.jsonl")]
        run = trainer(directory=tmp_path / "run", callbacks=callbacks).fit()
        return run.info.directory, run.info.id, run.is_main, len(run.history["train/loss"])

    first, second = on_ranks(known)
    assert first[0] == second[0] == tmp_path / "run"
    assert (first[2], second[2]) == (True, False)
    assert first[1]
    assert first[3] == second[3] == 6
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["console.log", "console.rank1.log", "metrics.jsonl", "ranks.json", "run.json", "run.lock", "train.jsonl"]
    for name in ("metrics.jsonl", "train.jsonl"):
        assert len((tmp_path / "run" / name).read_text().splitlines()) == 6


def test_on_a_machine_without_the_main_ones_disks_the_log_is_kept_there(tmp_path: Path) -> None:
    def elsewhere() -> None:
        place = tmp_path / ("here" if rank() == 0 else "there") / "run"  # what is the same path on disks of their own
        trainer(directory=place, callbacks=[say]).fit()

    on_ranks(elsewhere)
    assert sorted(path.name for path in (tmp_path / "there" / "run").iterdir()) == ["console.rank1.log"]


# -- tokens: their sum is the same on all ranks after every step on which something depends ------------

LENGTHS = [3, 5, 2, 7, 4, 6, 1, 8, 9, 2, 5, 3]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def with_tokens(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    return {"loss": loss_of(model, batch), "tokens": batch.numel()}


def step_of_tokens(run: Run, batch: Tensor) -> dict[str, Any]:
    loss = loss_of(run.model, batch)
    run.backward(loss)
    run.update()
    return {"loss": loss, "tokens": batch.numel()}


WAYS: dict[str, dict[str, Any]] = {
    "outputs": {"compute_loss": with_tokens},
    "function": {"compute_loss": loss_of, "tokens": torch.Tensor.numel},
    "step_fn": {"step_fn": step_of_tokens},
}


def fit(*callbacks: Callback, resume: Any = False, **arguments: Any) -> Run:
    torch.manual_seed(0)
    batches = [torch.linspace(-1, 1, length).unsqueeze(1) for length in LENGTHS]
    arguments = {
        "max_epochs": None,
        "seed": 1,
        "optimizer": partial(torch.optim.SGD, lr=0.01),
        "compute_loss": None,
        **arguments,
    }
    return trainer(batches, model=nn.Linear(1, 1), callbacks=callbacks, **arguments).fit(resume=resume)


def in_steps(ranks: int) -> list[int]:
    """Return the tokens after each step of an epoch."""
    return [*accumulate(sum(LENGTHS[first : first + ranks]) for first in range(0, len(LENGTHS), ranks))]


class Noted(Callback):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_step_end(self, run: Run) -> None:
        self.tokens.append(run.progress.tokens)


def ended(way: str) -> list[tuple[int, int, list[int]]]:
    found = []
    for limit in (9, 21, 40, 60):
        noted = Noted()
        run = fit(noted, max_tokens=limit, **WAYS[way])
        found.append((run.progress.step, run.progress.tokens, noted.tokens))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_end_with_the_step_that_reaches_max_tokens(ranks: int) -> None:
    epoch = in_steps(ranks)
    after = [*epoch, *(tokens + epoch[-1] for tokens in epoch)]
    expected = []
    for limit in (9, 21, 40, 60):
        steps = next(index for index, tokens in enumerate(after, 1) if tokens >= limit)
        expected.append((steps, after[steps - 1], after[:steps]))
    for seen in on_ranks(lambda: [ended(way) for way in WAYS], ranks) if ranks > 1 else [[ended(way) for way in WAYS]]:
        assert seen == [expected] * len(WAYS)


def test_tokens_are_summed_over_ranks() -> None:
    """Without a limit the ranks may leave exchanges out."""

    def counts(way: str) -> tuple[int, int]:
        whole = fit(max_epochs=2, **WAYS[way]).progress.tokens
        return whole, whole if way == "step_fn" else fit(max_epochs=2, accumulate=2, **WAYS[way]).progress.tokens

    assert on_ranks(lambda: [counts(way) for way in WAYS]) == [[(2 * sum(LENGTHS),) * 2] * 3] * 2


def test_a_batch_that_all_ranks_train_on_counts_once() -> None:
    def whole() -> int:
        rows: Any = [torch.ones(4) for _ in range(3)]
        data: Any = DataLoader(rows, batch_size=1)  # 3 samples for 2 ranks
        model = nn.Linear(4, 1)
        return trainer(data, model=model, compute_loss=loss_of, max_epochs=1, tokens=Tensor.numel).fit().progress.tokens

    assert on_ranks(whole) == [12] * 2


def test_a_run_that_resumes_on_several_ranks_ends_where_the_whole_run_does(tmp_path: Path) -> None:
    def runs() -> list[Any]:
        found: list[Any] = []
        for way in ("outputs", "function"):
            whole = fit(max_tokens=50, **WAYS[way])
            fit(Checkpoint(1), max_steps=3, directory=tmp_path / way, **WAYS[way])
            rest = fit(Checkpoint(1), max_tokens=50, directory=tmp_path / way, resume="auto", **WAYS[way])
            found += [
                rest.progress.now() == whole.progress.now(),
                all(map(torch.equal, rest.model.parameters(), whole.model.parameters())),
            ]
        return found

    assert on_ranks(runs, 2) == [[True] * 4] * 2


def test_the_error_of_a_rank_that_does_not_count_ends_all() -> None:
    def partly(model: nn.Module, batch: Tensor) -> Any:
        return with_tokens(model, batch) if batch.numel() != LENGTHS[3] else loss_of(model, batch)

    with pytest.raises(BaseExceptionGroup) as caught:
        launch(lambda: fit(compute_loss=partly, max_tokens=40) and None, 2)
    assert "max_tokens=40 needs the number of tokens in each batch" in repr(caught.value.exceptions[0])


def test_schedules_of_tokens_are_due_at_the_step_that_reaches_them() -> None:
    def due(way: str) -> list[int]:
        steps: list[int] = []
        note = on(Callback.on_step_end, every="10 tokens")(lambda run: steps.append(run.progress.step))
        fit(note, max_epochs=1, **WAYS[way])
        return steps

    after = [0, *in_steps(2)]
    expected = [step for step in range(1, len(after)) if after[step] // 10 > after[step - 1] // 10]
    assert on_ranks(lambda: [due(way) for way in WAYS], 2) == [[expected] * len(WAYS)] * 2


def test_points_in_samples_and_tokens_are_reached_in_time_although_no_callback_is_due_for_many_steps() -> None:
    def reached(point: str, **arguments: Any) -> list[int]:
        data = [torch.ones(2, 1)] * 200  # 4 samples and 4 tokens a step
        run = trainer(data, model=nn.Linear(1, 1), compute_loss=with_tokens, max_epochs=1, **arguments).fit()
        return [one.when.step for one in run.decisions if one.what in ("accumulation changed", "sequence length changed")]

    def all_reached() -> list[list[int]]:
        points = ("200 samples", "200 tokens")
        changed = [reached(point, accumulate={0: 1, point: 2}) for point in points]
        return changed + [reached(point, callbacks=[SequenceLength({0: 2, point: 1})]) for point in points]

    assert on_ranks(all_reached, 2) == [[[50]] * 4] * 2
