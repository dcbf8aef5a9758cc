"""How checkpoints are written: by a thread in memory that it uses again, once more after a failure, in time, as which bytes."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
import weakref
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, StopOnNonFinite
from cadenza.checkpoint import writer
from cadenza.checkpoint.store import Content, Saved, Store
from cadenza.checkpoint.store.content import whole_in
from cadenza.checkpoint.store.files import _DTYPES, FORMAT_ERRORS, Facts, LocalFiles, SummedFile, facts_of, pieces, read_tensors
from cadenza.checkpoint.writer import Attempts, Save
from cadenza.drivers.consensus import Meeting
from cadenza.errors import CheckpointDamagedError, StateError
from cadenza.status.encoding import same
from cadenza.status.progress import Counters
from cadenza.testing import tiny_run
from tests.callbacks.test_checkpoint import Scripted, bests, failing, manifest, names
from tests.checkpoint.store.contents import content, latest
from tests.waiting import until


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next attempts be those at the end of the run."""
    monkeypatch.setattr(writer, "PAUSES_S", (1e9,))
    monkeypatch.setattr(writer, "LAST_PAUSES_S", (0.001, 0.001))


def failing_at(keep: Checkpoint, step: int) -> Callback:
    """Return a callback after which the first write of a step fails."""
    failed: list[int] = []

    @on(Callback.on_fit_start)
    def begin(run: Run) -> None:
        write = keep.store.write

        def sometimes(content: Any) -> Any:
            if content.facts["step"] == step and not failed:
                failed.append(step)
                raise OSError("no space")
            return write(content)

        keep.store.write = sometimes  # type: ignore[method-assign]

    return begin


@pytest.mark.usefixtures("patient")
def test_after_a_lost_best_a_value_that_is_better_than_the_one_before_is_the_best(tmp_path: Path) -> None:
    keep = Checkpoint("100 steps", background=False, keep_best=("eval/acc", "max"))
    script = Scripted(acc=[0.5, 0.9, 0.7, 0.6])
    tiny_run(directory=tmp_path, steps=4, callbacks=[script, failing_at(keep, 2), keep])
    assert bests(keep) == {"eval/acc": ("step-00000003", 0.7)}


@pytest.mark.usefixtures("patient")
def test_a_state_that_could_not_be_written_is_saved_again_on_request(tmp_path: Path) -> None:
    keep = Checkpoint("3 steps", background=False)
    run = tiny_run(directory=tmp_path, steps=3, callbacks=[failing_at(keep, 3), keep])
    assert [one.why for one in run.decisions if one.what == "saved"] == ["step-00000003: the end of the run"]


def test_an_error_in_the_step_after_a_checkpoint_leaves_another_one_that_holds_the_gradients(tmp_path: Path) -> None:
    keep = Checkpoint("3 steps", keep_last=None)
    with pytest.raises(ZeroDivisionError):
        tiny_run(directory=tmp_path, steps=9, callbacks=[failing(Callback.on_after_backward, 3), keep])
    whole, cut = keep.store.saved()
    assert (whole.name, cut.name) == ("step-00000003", "step-00000003-2")
    assert [keep.store.manifest(one)["exact"] for one in (whole, cut)] == [True, False]
    assert [len(keep.store.read(one).state["gradients"]) for one in (whole, cut)] == [0, 2]


def test_a_result_that_gets_better_after_a_save_of_the_same_state_is_saved_as_the_best(tmp_path: Path) -> None:
    keep, script = Checkpoint("3 steps", keep_best=("eval/acc", "max")), Scripted(acc=[0.5, 0.4, 0.4, 0.9])
    evaluate = on(Callback.on_fit_end)(lambda run: script.report(run, 3))
    tiny_run(directory=tmp_path, steps=3, callbacks=[script, evaluate, keep])
    assert bests(keep) == {"eval/acc": ("step-00000003-2", 0.9)}


@pytest.mark.usefixtures("patient")
def test_a_late_write_of_the_best_is_the_best_and_is_not_saved_again(tmp_path: Path) -> None:
    keep, script = Checkpoint("100 steps", keep_best=("eval/acc", "max"), background=False), Scripted(acc=[0.5, 0.9])

    @on(Callback.on_fit_end)
    def again(run: Run) -> None:
        keep.writer.finish()  # the last attempts succeed
        keep.writer.save("the end")

    run = tiny_run(directory=tmp_path, steps=2, callbacks=[script, failing_at(keep, 2), again, keep])
    assert bests(keep) == {"eval/acc": ("step-00000002", 0.9)}
    assert len([one for one in run.decisions if one.what == "saved"]) == 2


@pytest.mark.parametrize("background", [True, False])
def test_with_strict_the_error_of_a_write_ends_the_run_nothing_is_tried_again_and_what_was_there_stays(
    tmp_path: Path, background: bool
) -> None:
    keep = Checkpoint("2 steps", background=background, strict=True, on_exception=False)
    with pytest.raises(OSError, match="no space"):
        tiny_run(directory=tmp_path, steps=9, callbacks=[failing_at(keep, 4), keep])
    assert [saved.step for saved in keep.store.saved()] == [2]


def test_with_strict_a_save_that_was_due_when_the_error_arrived_is_not_made(tmp_path: Path) -> None:
    keep, arrives = Checkpoint("2 steps", strict=True, on_exception=False, keep_last=None), threading.Event()

    @on(Callback.on_fit_start)
    def begin(run: Run) -> None:
        write = keep.store.write

        def late(content: Any) -> Any:
            if content.facts["step"] == 2 and arrives.wait(60):
                raise OSError("no space")
            return write(content)

        keep.store.write = late  # type: ignore[method-assign]

    @on(Callback.on_step_end, at=4)
    def arrive(run: Run) -> None:
        arrives.set()
        keep.writer.attempts.stop()  # the thread has reported the error, and its save is due at this step boundary

    with pytest.raises(OSError, match="no space"):
        tiny_run(directory=tmp_path, steps=9, callbacks=[begin, arrive, keep])
    assert keep.store.saved() == []


# -- attempts -------------------------------------------------------------------------------------------


class Failing(Store):
    """A store that fails at its first writes."""

    def __init__(self, folder: Path, failures: int) -> None:
        super().__init__(folder, "r1")
        self.failures, self.threads = failures, list[str]()
        self.go = threading.Event()
        self.go.set()

    def write(self, content: Content) -> Saved:
        self.threads.append(threading.current_thread().name)
        self.go.wait()
        self.failures -= 1
        if self.failures >= 0:
            raise OSError(f"{self.failures} left")
        return super().write(content)


def attempted(store: Store, **options: Any) -> Attempts:
    return Attempts(store, lambda: None, lambda saved: [], lambda: None, **options)


def save(step: int, **facts: Any) -> Save:
    return Save(content(step, weights_only=False), Counters(step=step), **facts)


def test_stop_waits_for_the_first_attempt_and_allows_no_other(tmp_path: Path) -> None:
    store = Failing(tmp_path, 9)
    store.go.clear()
    writing = attempted(store)
    writing.start(save(3))
    assert writing.busy
    stopping = threading.Thread(target=writing.stop)
    stopping.start()
    until(writing._stopped.is_set)
    store.go.set()
    stopping.join()
    assert (len(store.threads), len(writing.results), writing.busy) == (1, 1, False)
    assert writing.failed is not None


def test_a_first_attempt_is_made_even_if_it_is_stopped_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = attempted(Failing(tmp_path, 0))
    writing.stop()
    monkeypatch.setattr(writing._stopped, "clear", lambda: None)
    writing.start(save(3))
    writing.stop()
    assert [result.saved for result in writing.results] == [Saved(3, 1, "step-00000003")]


@pytest.mark.usefixtures("patient")
def test_the_last_attempts_are_made_at_once_and_come_to_an_end(tmp_path: Path) -> None:
    store = Failing(tmp_path, 2)
    writing = attempted(store, background=False)
    writing.start(save(3))
    writing.stop()
    store.failures = 1
    writing.finish()
    assert (writing.failed, writing.results[-1].saved) == (None, Saved(3, 1, "step-00000003"))
    store.failures = 99
    writing.start(save(4))
    writing.stop()
    count = len(store.threads)
    writing.finish()
    assert len(store.threads) == count + len(writer.LAST_PAUSES_S)
    assert writing.failed is not None


@pytest.mark.parametrize("stopped", ["this", "other"])
def test_if_ranks_write_together_all_of_them_stop_when_one_stops(tmp_path: Path, stopped: str) -> None:
    told: list[Any] = []

    def gather(value: Any) -> list[Any]:
        told.append(value)
        return [value, (stopped == "other", True)]

    writing = attempted(Store(tmp_path, "r1"), meeting=Meeting(0, 2, gather, lambda value: value))
    if stopped == "this":
        writing._stopped.set()
    assert writing._stopped_within(0.5, together=True) is True
    assert told == [(stopped == "this", False)]


def test_ranks_that_write_together_wait_until_the_pause_of_all_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_SLICE_S", 0.01)
    others, begin = iter([False] * 9 + [True] * 99), time.monotonic()
    meeting = Meeting(0, 2, lambda value: [value, (False, next(others))], lambda value: value)
    writing = attempted(Store(tmp_path, "r1"), meeting=meeting)
    assert writing._stopped_within(0.03, together=True) is False
    assert time.monotonic() - begin >= 0.03
    assert next(others) is True

    def gone(value: Any) -> list[Any]:
        raise RuntimeError("a rank is gone")

    assert attempted(Store(tmp_path, "r1"), meeting=Meeting(0, 2, gone, gone))._stopped_within(0.0, together=True) is True


# content(step).nbytes is 36: the assumed rate below makes a write take 36 s
@pytest.mark.parametrize(
    ("grace_s", "signalled_s_ago", "weights_first"),
    [
        (math.inf, 0.0, False),
        (60.0, None, False),
        (60.0, 0.0, False),
        (60.0, 50.0, True),
        (30.0, 0.0, True),
        (30.0, None, False),
    ],
)
def test_if_the_time_may_be_too_short_the_weights_are_written_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float, signalled_s_ago: float | None, weights_first: bool
) -> None:
    monkeypatch.setattr(writer, "_BYTES_PER_S", 1.0)
    store = Store(tmp_path, "r1")
    writing = attempted(store, background=False, grace_s=grace_s)
    at = None if signalled_s_ago is None else time.monotonic() - signalled_s_ago
    writing.start(save(3, signalled_at=at))
    written = [store.manifest(saved) for saved in store.saved()]
    assert [(one["weights_only"], one["reason"]) for one in written] == [(True, "a test, weights first")] * weights_first + [
        (False, "a test")
    ]
    assert content(3).nbytes == 36
    assert writing._bytes_per_s > 1.0  # measured now


# -- memory ---------------------------------------------------------------------------------------------

Weights = dict[str, Tensor]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Note, for each checkpoint that is about to be written, weak references to its tensors by name, and their addresses."""
    noted: list[dict[str, Any]] = []
    write = Store.write

    def noting(self: Store, content: Content) -> Saved:
        tensors = whole_in({**content.model, **content.tensors})
        noted.append({name: (weakref.ref(one), one.data_ptr()) for name, one in tensors.items()})
        return write(self, content)

    monkeypatch.setattr(Store, "write", noting)
    return noted


def addresses(noted: dict[str, Any]) -> set[int]:
    return {address for _, address in noted.values()}


def noting_weights(weights: dict[int, Weights]) -> Callback:
    @on(Callback.on_step_end)
    def note(run: Run) -> None:
        weights[run.progress.step] = {name: value.clone() for name, value in run.model.state_dict().items()}

    return note


def assert_as_they_were(folder: Path, weights: dict[int, Weights], *steps: int) -> None:
    store = Store(folder / "checkpoints")
    assert [saved.step for saved in store.saved()] == [*steps]
    assert all(same(store.read(saved).model, weights[saved.step]) for saved in store.saved())


class FullDisk(LocalFiles):
    """Files of tensors of which one, by its number, cannot be written."""

    def __init__(self, root: Path, fails_at: int) -> None:
        super().__init__(root)
        self.files, self.fails_at = 0, fails_at

    def write_tensors(self, path: str, *arguments: Any) -> Facts:
        self.files += 1
        if self.files == self.fails_at:
            raise OSError("the disk is full")
        return super().write_tensors(path, *arguments)


def full_at(saves: Checkpoint, fails_at: int) -> Callback:
    """Return a callback that lets one file of the checkpoints fail."""

    @on(Callback.on_fit_start)
    def fill(run: Run) -> None:
        saves.store.files = FullDisk(Path(str(saves.store.files)), fails_at)

    return fill


def test_each_save_has_the_memory_of_the_one_before_and_the_end_of_the_run_gives_it_back(
    tmp_path: Path, written: list[dict[str, Any]]
) -> None:
    weights: dict[int, Weights] = {}
    run = tiny_run(directory=tmp_path, steps=4, callbacks=[noting_weights(weights), Checkpoint("1 step", keep_last=None)])
    first, *others = map(addresses, written)
    assert len(others) == 3
    assert all(len(one & first) >= len(first) - 1 for one in others)  # the loader's and the generators' states may grow
    assert_as_they_were(tmp_path, weights, 1, 2, 3, 4)
    gc.collect()
    assert run.progress.step == 4
    assert not [name for noted in written for name, (one, _) in noted.items() if one() is not None]


@pytest.mark.usefixtures("patient")
def test_what_could_not_be_written_keeps_its_memory_until_a_newer_save_is_whole(
    tmp_path: Path, written: list[dict[str, Any]]
) -> None:
    weights: dict[int, Weights] = {}

    class Unsavable(Callback):
        broken = False

        def state_dict(self) -> dict[str, Any]:
            return {"tensor": torch.ones(3), "object": object() if self.broken else None}

        def on_step_end(self, run: Run) -> None:
            self.broken = run.progress.step >= 6

    saves = Checkpoint("2 steps", keep_last=None)
    full = full_at(saves, 3)  # the first file of step 4
    with pytest.raises(StateError):  # the save of step 6 copies the weights, and then finds a state that it cannot save
        tiny_run(directory=tmp_path, steps=8, callbacks=[noting_weights(weights), Unsavable(), full, saves])
    assert not addresses(written[1]) - addresses(written[2])  # step 4 is written at the end, after a failure
    assert_as_they_were(tmp_path, weights, 2, 4)


@pytest.mark.usefixtures("patient")
def test_a_blocking_save_that_fails_is_repeated_with_the_weights_of_its_step(tmp_path: Path) -> None:
    weights: dict[int, Weights] = {}

    @on(Callback.on_step_end, at=3)
    def power_cut(run: Run) -> None:
        raise KeyboardInterrupt

    saves = Checkpoint("2 steps", background=False, on_exception=False)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(directory=tmp_path, steps=5, callbacks=[noting_weights(weights), full_at(saves, 1), power_cut, saves])
    assert_as_they_were(tmp_path, weights, 2)


# -- whether the weights are finite ---------------------------------------------------------------------------


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the threads that read the weights."""
    threads: list[str] = []
    look = Content.is_finite

    def noting(self: Content) -> bool:
        if self.finite is None:
            threads.append(threading.current_thread().name)
        return look(self)

    monkeypatch.setattr(Content, "is_finite", noting)
    return threads


@pytest.mark.parametrize("background", [True, False])
def test_weights_that_are_not_finite_are_the_last_and_never_the_best(
    tmp_path: Path, looked: list[str], background: bool
) -> None:
    script = Scripted(acc=[0.1, 0.9, 0.5, 0.2, 0.95])
    script.poisoned_at = 5
    keep = Checkpoint("1 step", keep_last=2, keep_best=("eval/acc", "max"), background=background)
    tiny_run(directory=tmp_path, steps=5, callbacks=[script, keep])
    assert [manifest(tmp_path, step)["finite"] for step in names(tmp_path)] == [True, True, False]
    assert names(tmp_path) == ["02", "04", "05"]
    assert {link: (tmp_path / "checkpoints" / link).resolve().name[-2:] for link in ("last", "best")} == {
        "last": "05",
        "best": "02",
    }
    assert {*looked} == {"MainThread"}
    assert latest(Store(tmp_path / "checkpoints"))[0] == Saved(5, 1, "step-00000005")  # a resume takes it, and says nothing


def test_without_a_result_the_thread_that_writes_reads_the_weights(tmp_path: Path, looked: list[str]) -> None:
    script = Scripted()
    script.poisoned_at = 2
    tiny_run(directory=tmp_path, steps=3, callbacks=[script, Checkpoint("1 step", keep_last=None)])
    assert [manifest(tmp_path, step)["finite"] for step in names(tmp_path)] == [True, False, True]
    assert looked == ["cadenza-checkpoint"] * 3


def test_a_run_that_stops_at_weights_that_are_not_finite_saves_them_flagged(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=3)
    def poison(run: Run) -> None:
        with torch.no_grad():
            next(run.model.parameters()).fill_(math.nan)

    callbacks = [poison, StopOnNonFinite(), Checkpoint("1 step", keep_last=None)]
    run = tiny_run(directory=tmp_path, steps=6, callbacks=callbacks)
    assert (run.outcome and run.outcome.kind) == "stopped"
    assert [manifest(tmp_path, step)["finite"] for step in names(tmp_path)][2:3] == [False]
    assert names(tmp_path)[:3] == ["01", "02", "03"]


# -- the checksum -------------------------------------------------------------------------------------------


def test_the_checksum_of_a_large_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    tensors = {name: torch.randn(700_000) for name in "abc"}
    facts = LocalFiles(tmp_path).write_tensors("large", tensors)
    content = (tmp_path / "large").read_bytes()
    assert facts == {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    assert len(content) > 8 << 20


def test_a_checksum_that_fails_beside_the_write_is_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> int:
        raise MemoryError("no memory left")

    monkeypatch.setattr(zlib, "crc32", fail)
    with pytest.raises(MemoryError, match="no memory left"):
        LocalFiles(tmp_path).write_tensors("large", {"a": torch.zeros(2_000_000)})


def test_the_checksum_of_a_large_file_is_verified_while_it_is_read_and_its_thread_ends(tmp_path: Path) -> None:
    store = Store(tmp_path, "r1")
    saved = store.write(Content.of({"a": torch.randn(2_000_000)}, {}, {"step": 1, "reason": "a test", "exact": True}))
    assert store.read(saved).model["a"].shape == (2_000_000,)
    file = tmp_path / saved.name / "model.safetensors"
    for at, message in ((5_000_000, "has changed since it was written"), (9, "has changed since it was written")):
        content = bytearray(file.read_bytes())
        content[at] ^= 1
        file.write_bytes(content)
        with pytest.raises(CheckpointDamagedError, match=message):
            store.read(saved)
    assert not [thread for thread in threading.enumerate() if thread.name == "cadenza-checksum"]


# -- safetensors files, written and read in one pass: the bytes are those of the safetensors package ---


def every_format() -> dict[str, Tensor]:
    """Return tensors of each number format, of no, one and several dimensions, and empty ones."""
    numbers = torch.arange(24)
    filled = {f"a.{dtype}": numbers.to(dtype).reshape(2, 3, 4) for dtype in _DTYPES.values()}
    return {**filled, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "ümläut": torch.ones(1, dtype=torch.bool)}


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("header", [None, {"format": "pt", "text": '{"a": [1]}'}])
def test_the_bytes_are_those_of_the_package(header: dict[str, str] | None) -> None:
    tensors = every_format()
    written = b"".join(pieces(tensors, header))
    found = safetensors.torch.load(written)
    assert found.keys() == tensors.keys()
    assert all(bits(one).equal(bits(tensors[name])) and one.dtype == tensors[name].dtype for name, one in found.items())
    if header is None:
        assert b"".join(pieces({"w": torch.arange(3.0)})) == safetensors.torch.save({"w": torch.arange(3.0)})
    assert b"".join(pieces({})) == safetensors.torch.save({})


def test_what_is_read_has_the_same_bits_its_own_aligned_memory_and_the_checksum_of_the_file() -> None:
    for whole in (b"".join(pieces(every_format(), {"a": "b"})), safetensors.torch.save(every_format())):
        file = SummedFile(BytesIO(whole))
        found = read_tensors(file, len(whole))
        for name, one in every_format().items():
            assert (found[name].dtype, found[name].shape) == (one.dtype, one.shape)
            assert bits(found[name]).equal(bits(one))
            assert found[name].data_ptr() % 64 == 0
        assert file.rest() == facts_of(whole)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
        [],
        None,
    ],
)
def test_a_header_cannot_ask_for_any_amount_of_memory(entry: Any) -> None:
    text = json.dumps({"w": entry}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(FORMAT_ERRORS):
        read_tensors(SummedFile(BytesIO(content)), len(content))


def test_a_format_that_the_file_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the tensor 'w' has the number format torch\.complex128"):
        LocalFiles(tmp_path).write_tensors("one", {"w": torch.ones(1, dtype=torch.complex128)})


@pytest.mark.parametrize("linked", [True, False])
def test_a_file_that_joins_is_linked_or_copied_and_its_checksum_is_that_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    source, files = tmp_path / "config.json", LocalFiles(tmp_path / "there")
    source.write_bytes(b"text" * 700_000)
    files.make("step")

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    if not linked:
        monkeypatch.setattr("os.link", refuse)
    assert files.add("step/a/config.json", source) == facts_of(source.read_bytes())
    assert (source.stat().st_nlink == 2) is linked
