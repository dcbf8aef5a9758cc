"""What every sink with files or a database must do. Their real packages write; there is no account and no network."""

from __future__ import annotations

import html
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cadenza import Callback, Run, on
from cadenza.callbacks import Evaluate, LogTraining
from cadenza.errors import DirectoryError, MissingExtraError
from cadenza.sinks import Comet, Dvclive, JsonLines, Mlflow, Swanlab, TensorBoard, Trackio, Wandb
from cadenza.testing import check_sink, tiny_loader, tiny_run
from cadenza.trackers import comet
from tests.sinks.readers import ALL, COMET, DVCLIVE, MLFLOW, SWANLAB, TENSORBOARD, TRACKERS, TRACKIO, WANDB, Reader, services
from tests.sinks.samples import EMPTY, MEDIA, check_bright, check_tone, check_whole, failing, logging, metrics_of


@pytest.fixture(scope="module", autouse=True)
def on_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """See that nothing stays behind."""
    import trackio.utils

    assert TRACKIO.database.parent == trackio.utils.TRACKIO_DIR, "conftest.py keeps it away from the user's own runs"
    before = set(threading.enumerate())
    with pytest.MonkeyPatch.context() as patch, services(tmp_path_factory.mktemp("mlflow")):
        streamer = comet._imported().streamer.offline.OfflineStreamer
        patch.setattr(streamer, "queue_timeout", property(lambda self: 0.01, lambda self, _: None), raising=False)  # else 1 s
        yield
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert [child for child in alive if child.name() == "wandb-core"] == []
    left = {thread for thread in threading.enumerate() if thread not in before}
    assert {thread.name for thread in left if type(thread).__name__ != "InotifyFD"} == set()  # SwanLab never ends that one


@pytest.mark.parametrize("reader", ALL, ids=str)
def test_it_meets_the_requirements_on_sinks(reader: Reader) -> None:
    check_sink(reader.make, reader.values)


@pytest.mark.parametrize("reader", TRACKERS, ids=str)
def test_every_value_of_a_long_run_stands_at_its_step(reader: Reader, tmp_path: Path) -> None:
    log = LogTraining(every="2 steps", throughput=False)
    many = logging({"x": 0.1, "nan": float("nan"), "low": float("-inf")})
    run = tiny_run(callbacks=[log, many, Evaluate(tiny_loader()), reader.make()], epochs=60, directory=tmp_path)
    assert run.faults == []
    found = reader.values(run.info)
    for name in ("train/loss", "eval/loss", "x"):
        assert found[name] == run.history[name]
    assert (len(found["x"]), len(found["eval/loss"])) == (300, 60)  # more than one block of wandb, and one request of MLflow
    assert [step for step, _ in found["nan"]] == [*range(1, 301)]
    assert all(value != value for _, value in found["nan"])
    assert found["low"] == [(step, reader.lowest) for step in range(1, 301)]


@pytest.mark.parametrize("reader", [TENSORBOARD, WANDB, MLFLOW], ids=str)
def test_every_value_has_the_time_of_its_record(reader: Reader, tmp_path: Path) -> None:
    run = tiny_run(callbacks=[logging({"x": 0.1}), reader.make()], steps=4, directory=tmp_path)
    assert reader.times(run.info) == pytest.approx([line["time"] for line in metrics_of(tmp_path)], abs=0.001)


KEPT = {
    TENSORBOARD: {"whole", "bright", "tone", "w", "note"},
    WANDB: {"whole", "bright", "tone", "w", "note"},
    SWANLAB: {"whole", "bright", "note"},
    COMET: {"whole", "bright", "tone", "w", "note"},
    TRACKIO: {"whole", "bright", "tone", "w", "note"},
    MLFLOW: {"whole", "bright", "note"},
    DVCLIVE: {"whole", "bright"},
}


@pytest.mark.parametrize("reader", KEPT, ids=str)
def test_media_come_back_as_they_were(reader: Reader, tmp_path: Path) -> None:
    run = tiny_run(callbacks=[logging(MEDIA), reader.make()], steps=1, directory=tmp_path)
    found = reader.media(run.info)
    assert found.keys() == KEPT[reader]
    check_whole(found["whole"])
    check_bright(found["bright"])
    if "tone" in found:
        check_tone(found["tone"])
    assert found.get("w", reader.counts) == reader.counts
    assert "1 < 2" in html.unescape(found.get("note", b"1 < 2").decode())


@pytest.mark.parametrize("reader", KEPT, ids=str)
def test_media_that_cannot_be_shown_are_left_out_with_one_remark(reader: Reader, tmp_path: Path) -> None:
    run = tiny_run(callbacks=[logging(EMPTY), reader.make()], steps=3, directory=tmp_path)
    assert run.faults == []
    assert reader.values(run.info)["a"] == [(1, 1), (2, 1), (3, 1)]
    name = type(reader.make()).__name__
    assert (tmp_path / "console.log").read_text().splitlines() == [f"{name}: {remark}" for remark in reader.remarks]


OUTCOMES = {
    WANDB: ("0", "1"),
    SWANLAB: ("1 ", "2 ArithmeticError('on purpose')"),
    COMET: ("finished: the limit is reached", "failed: ArithmeticError('on purpose')"),
    MLFLOW: ("FINISHED", "FAILED"),
    DVCLIVE: ("finished", "failed"),
}


@pytest.mark.parametrize("reader", OUTCOMES, ids=str)
def test_the_tracker_gets_the_outcome_of_the_run(reader: Reader, tmp_path: Path) -> None:
    good = tiny_run(callbacks=[logging({"a": 1}), reader.make()], steps=1, directory=tmp_path / "good")
    failed: list[Any] = []
    keep = on(Callback.on_fit_start)(lambda run: failed.append(run.info))
    fail = failing(2, ArithmeticError("on purpose"))
    with pytest.raises(ArithmeticError):
        tiny_run(callbacks=[keep, logging({"a": 1}), reader.make(), fail], directory=tmp_path / "bad")
    assert (reader.outcome(good.info), reader.outcome(failed[0])) == OUTCOMES[reader]
    assert reader.values(failed[0])["a"] == [(1, 1), (2, 1)]


# -- trouble -------------------------------------------------------------------------------------------

EXTRAS = {
    TensorBoard: "tensorboard",
    Wandb: "wandb",
    Swanlab: "swanlab",
    Comet: "comet",
    Trackio: "trackio",
    Mlflow: "mlflow",
    Dvclive: "dvclive",
}


@pytest.mark.parametrize(("kind", "extra"), EXTRAS.items(), ids=EXTRAS.values())
def test_a_missing_package_is_an_error_at_construction(kind: Any, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml" if extra == "comet" else extra, None)
    with pytest.raises(MissingExtraError, match=rf"{kind.__name__} needs .*pip install 'cadenza\[{extra}\]'"):
        kind()


@pytest.mark.parametrize(
    ("kind", "modes"),
    [
        (Wandb, "'online', 'offline', 'disabled' or None"),
        (Swanlab, "'online', 'offline', 'local', 'disabled' or None"),
        (Comet, "'online', 'offline' or None"),
    ],
)
def test_a_wrong_mode_is_an_error_at_construction(kind: Any, modes: str) -> None:
    with pytest.raises(ValueError, match=f"mode must be {modes}; got 'off'"):
        kind(mode="off")


IN_PLACE = "where files can be made"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda inner: WANDB.make(directory=inner), f"Wandb cannot write to .*Give a directory {IN_PLACE}"),
        (lambda inner: SWANLAB.make(directory=inner), f"Swanlab cannot write to .*Give a directory {IN_PLACE}"),
        (lambda inner: COMET.make(directory=inner), f"Comet cannot write to .*Give a directory {IN_PLACE}"),
        (lambda inner: Mlflow(f"sqlite:///{inner}/x.db"), f"Mlflow cannot write to .*Give a directory {IN_PLACE}"),
        (TensorBoard, f"TensorBoard cannot write to .*Give a directory {IN_PLACE}"),
        (JsonLines, f"JsonLines cannot write .*: .*Give a path {IN_PLACE}"),
        (lambda _: TensorBoard(), r"TensorBoard has no directory to write to\. Give Trainer\(directory=...\)"),
        (lambda _: Dvclive(), "Dvclive has no directory to write to"),
        (lambda _: Mlflow(), r"Mlflow has neither a URI nor a directory .* Give Trainer\(directory=...\)"),
        (lambda _: JsonLines(), r"JsonLines\(\) without a path .* but the run has no directory\. Give Trainer"),
    ],
)
def test_without_a_directory_or_with_one_that_cannot_be_made_the_run_does_not_start(
    make: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=message):
        tiny_run(callbacks=[make(tmp_path / "file" / "inner")])


def own_run_of_swanlab(directory: Path) -> Callable[[], None]:
    import swanlab

    own = swanlab.init(mode="disabled", project="own")

    def end() -> None:
        assert own.alive
        own.finish()

    return end


def own_run_of_comet(directory: Path) -> Callable[[], None]:
    import comet_ml

    own = comet_ml.OfflineExperiment(offline_directory=str(directory / "own"), log_env_details=False)

    def end() -> None:
        assert own.alive
        own.end()

    return end


def blocked_database(directory: Path) -> Callable[[], None]:
    TRACKIO.database.with_name("file.db").mkdir(parents=True)
    return lambda: None


def nothing(directory: Path) -> Callable[[], None]:
    return lambda: None


@pytest.mark.parametrize(
    ("make", "prepare", "error"),
    [
        pytest.param(lambda: Mlflow("http://127.0.0.1:9"), nothing, "Connection refused", id="server away"),
        pytest.param(lambda: Mlflow("nonsense://x"), nothing, "nonsense", id="no such scheme"),
        pytest.param(lambda: Mlflow("/proc/no/such"), nothing, "", id="no such folder"),
        pytest.param(
            lambda: Comet("tests"),
            nothing,
            "Comet has no API key. Set COMET_API_KEY, or write an archive with Comet(mode='offline').",
            id="no key",
        ),
        pytest.param(COMET.make, own_run_of_comet, "another one is active", id="own run of Comet"),
        pytest.param(SWANLAB.make, own_run_of_swanlab, "requires an inactive Run", id="own run of SwanLab"),
        pytest.param(lambda: Trackio("file"), blocked_database, "", id="database"),
    ],
)
def test_a_tracker_that_cannot_begin_is_disabled_with_one_report_and_the_run_goes_on(
    make: Callable[[], Any],
    prepare: Callable[[Path], Callable[[], None]],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    end, sink = prepare(tmp_path), make()
    try:
        run = tiny_run(callbacks=[logging({"a": 1}), sink], steps=3, directory=tmp_path / "run")
    finally:
        end()
    [fault] = run.faults
    assert fault.callback == type(sink).__name__
    assert error in str(fault.error)
    assert caplog.text.count(f"{fault.callback} failed in") == 1
    assert (run.outcome and run.outcome.kind) == "finished"
    assert len(metrics_of(tmp_path / "run")) == 3


def end_swanlab(run: Run) -> None:
    import swanlab

    threading.Thread(target=swanlab.finish).run()


def end_comet(run: Run) -> None:
    import comet_ml

    comet_ml.end()


def block_dvclive(run: Run) -> None:
    folder = run.info.base / "dvclive" / "plots" / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "late").write_text("a file, and DVCLive needs a folder")
    run.log("late/value", 1)


@pytest.mark.parametrize(
    ("make", "spoil", "error"),
    [
        (SWANLAB.make, end_swanlab, "requires an active Run"),
        (COMET.make, end_comet, "the experiment was ended by other code"),
        (DVCLIVE.make, block_dvclive, ""),
    ],
)
def test_a_tracker_that_is_spoiled_in_the_middle_is_disabled_with_one_report_and_the_run_goes_on(
    make: Callable[[], Any], spoil: Callable[[Run], None], error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil_it = on(Callback.on_step_end, at=5)(spoil)
    sink = make()
    run = tiny_run(callbacks=[logging({"a": 1}), spoil_it, sink], steps=20, directory=tmp_path)
    [fault] = run.faults
    assert fault.callback == type(sink).__name__
    assert error in str(fault.error)
    assert caplog.text.count(f"{fault.callback} failed in") == 1
    assert (run.outcome and run.outcome.kind) == "finished"
    assert len(metrics_of(tmp_path)) == 20
