"""Acts and folders that another user, another program or an attacker may leave: none is carried out, and the run goes on."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.steering import Steering, tell
from cadenza.steering.acts import LARGEST, Act, file_of, new_act
from cadenza.steering.inbox import Inbox
from cadenza.steering.steering import _in_log
from cadenza.testing import tiny_run

RUN = "0123456789abcdef"
AT = {"step": 1, "epoch": 0}


class Folder:
    """The folder of the acts of a run, its key, and the means to write into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.inbox = Inbox(path, RUN)
        self.key = (path / "steering" / "key").read_bytes()
        self.acts = path / "steering" / "acts"

    def act(self, **changed: Any) -> Act:
        return new_act(RUN, "note", {"text": "x"}, author="ann")._replace(**changed)

    def write(self, content: bytes, name: str = "") -> None:
        (self.acts / (name or f"{self.act().id}.json")).write_bytes(content)

    def signed(self, **changed: Any) -> None:
        act = self.act(**changed)
        self.write(file_of(act, self.key), f"{act.id}.json")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def changed(folder: Folder, **fields: Any) -> bytes:
    """Return a signed act that was changed afterwards."""
    return json.dumps({**json.loads(file_of(folder.act(), folder.key)), **fields}).encode()


def nested(levels: int) -> dict[str, Any]:
    """Return objects in objects."""
    return {"a": nested(levels - 1)} if levels > 1 else {"a": 1}


def without(folder: Folder, name: str) -> bytes:
    content = json.loads(file_of(folder.act(), folder.key))
    del content[name]
    return json.dumps(content).encode()


CONTENTS: dict[str, Callable[[Folder], bytes]] = {
    "nothing": lambda folder: b"",
    "no JSON": lambda folder: b"stop",
    "bytes": lambda folder: bytes(range(256)),
    "null": lambda folder: b"null",
    "a list": lambda folder: b"[]",
    "a number": lambda folder: b"1e999",
    "deep": lambda folder: b"[" * 10_000,
    "large": lambda folder: b" " * (LARGEST + 1),
    "huge and signed": lambda folder: file_of(folder.act(arguments={"text": "x" * LARGEST}), folder.key),
    "half": lambda folder: file_of(folder.act(), folder.key)[:-20],
    "no signature": lambda folder: without(folder, "signature"),
    "no verb": lambda folder: without(folder, "verb"),
    "another field": lambda folder: changed(folder, also="this"),
    "signature null": lambda folder: changed(folder, signature=None),
    "signature empty": lambda folder: changed(folder, signature=""),
    "signature text": lambda folder: changed(folder, signature="é" * 64),
    "another key": lambda folder: file_of(folder.act(), b"0" * 64),
    "an empty key": lambda folder: file_of(folder.act(), b""),
    "another verb": lambda folder: changed(folder, verb="stop"),
    "another argument": lambda folder: changed(folder, arguments={"text": "y"}),
    "another author": lambda folder: changed(folder, author="root"),
    "another time": lambda folder: changed(folder, time=0),
    "another name": lambda folder: file_of(folder.act(), folder.key),
}

SIGNED: dict[str, dict[str, Any]] = {
    "an unknown verb": {"verb": "exec"},
    "a verb of Python": {"verb": "__class__"},
    "another run": {"run": "another"},
    "no run": {"run": ""},
    "a verb that is a number": {"verb": 1},
    "a verb that is a list": {"verb": ["stop"]},
    "arguments that are a list": {"arguments": [1]},
    "arguments that are text": {"arguments": "lr"},
    "an author that is an object": {"author": {}},
    "a reason that is null": {"reason": None},
    "nested": {"arguments": nested(900)},
    "half of a character": {"arguments": {"text": "\ud800"}},
    "half of a character in a name": {"arguments": {"\ud800": "x"}},
    "half of a character in the reason": {"reason": "\ud800"},
}


@pytest.mark.parametrize("case", CONTENTS)
def test_a_file_that_is_no_act_is_left_alone(case: str, folder: Folder) -> None:
    folder.write(CONTENTS[case](folder))
    assert folder.inbox.take(AT) == []
    assert len(folder.inbox.refused) == 1
    assert len([*folder.acts.iterdir()]) == 1
    assert folder.inbox.is_empty()  # it is read once
    assert folder.inbox.take(AT) == []
    assert len(folder.inbox.refused) == 1
    assert not (folder.path / "steering" / "log.jsonl").exists()


@pytest.mark.parametrize("case", SIGNED)
def test_a_signed_act_of_another_form_is_refused(case: str, folder: Folder) -> None:
    folder.signed(**SIGNED[case])
    assert folder.inbox.take(AT) == []
    assert len(folder.inbox.refused) == 1


NO_HEX = f"{'0' * 20}-{'g' * 16}.json"
NAMES = ("stop.json", ".hidden.json", "00000000000000000001.json", "x" * 200, NO_HEX, "new\nline.json")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_with_another_name_is_not_read(name: str, folder: Folder) -> None:
    folder.write(file_of(folder.act(), folder.key), name)
    assert folder.inbox.is_empty()
    assert folder.inbox.take(AT) == []
    assert folder.inbox.refused == []


@pytest.mark.parametrize("kind", ["link", "dangling", "loop", "fifo", "folder", "device"])
def test_a_link_a_pipe_or_a_folder_in_the_place_of_an_act_is_not_followed(kind: str, folder: Folder, tmp_path: Path) -> None:
    act = folder.act()
    name = folder.acts / f"{act.id}.json"
    outside = tmp_path / "outside.json"
    outside.write_bytes(file_of(act, folder.key))
    if kind == "fifo":
        os.mkfifo(name)
    elif kind == "folder":
        name.mkdir()
    else:
        targets = {"link": outside, "dangling": tmp_path / "nothing", "loop": name, "device": Path("/dev/zero")}
        name.symlink_to(targets[kind])
    assert folder.inbox.take(AT) == []
    assert folder.inbox.take(AT) == []
    assert outside.read_bytes() == file_of(act, folder.key)


def test_an_act_is_taken_once_however_often_its_file_comes_back(folder: Folder) -> None:
    act = folder.act()
    for _ in range(3):
        folder.write(file_of(act, folder.key), f"{act.id}.json")
        folder.inbox.take(AT)
    again = Inbox(folder.path, RUN)  # the process that continues the run
    folder.write(file_of(act, folder.key), f"{act.id}.json")
    assert again.take(AT) == []
    assert (folder.path / "steering" / "log.jsonl").read_text().count('"verb"') == 1


def test_a_folder_that_is_exchanged_is_not_used(folder: Folder, tmp_path: Path) -> None:
    """Who can write into the run directory puts a folder of his own in the way: the run keeps the one that it opened."""
    folder.acts.rename(tmp_path / "away")
    trap = tmp_path / "trap"
    trap.mkdir()
    precious = trap / f"{folder.act().id}.json"
    precious.write_text("precious")
    folder.acts.symlink_to(trap)
    assert folder.inbox.take(AT) == []
    assert precious.read_text() == "precious"
    with pytest.raises(OSError, match="must be a folder of the user of this process"):
        Inbox(folder.path, RUN)


@pytest.mark.parametrize("kind", ["short", "open", "readable", "link"])
def test_a_key_that_others_may_know_is_replaced(kind: str, tmp_path: Path) -> None:
    first = Folder(tmp_path)
    key = tmp_path / "steering" / "key"
    if kind == "short":
        key.write_bytes(b"0")
    elif kind == "open":
        key.chmod(0o666)
    elif kind == "readable":
        key.chmod(0o640)
    else:
        key.rename(tmp_path / "key")
        key.symlink_to(tmp_path / "key")
    assert Folder(tmp_path).key != first.key
    assert key.stat().st_mode & 0o777 == 0o600
    assert not key.is_symlink()


@pytest.mark.parametrize(("name", "mode"), [("steering/acts", 700), ("steering", 755)])
def test_a_folder_that_others_can_write_is_refused(name: str, mode: int, tmp_path: Path) -> None:
    (tmp_path / "steering" / "acts").mkdir(parents=True)
    (tmp_path / name).chmod(0o777)
    with pytest.raises(OSError, match=rf"can be written by other users\. Change it with: chmod {mode}"):
        Inbox(tmp_path, RUN)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_an_act_waits_while_its_log_cannot_be_written(kind: str, folder: Folder, tmp_path: Path) -> None:
    log = folder.path / "steering" / "log.jsonl"
    if kind == "link":
        log.symlink_to(tmp_path / "precious")
    elif kind == "fifo":
        os.mkfifo(log)
    else:
        log.mkdir()
    folder.signed()
    assert folder.inbox.take(AT) == []
    assert folder.inbox.problem
    assert not folder.inbox.is_empty()
    assert not (tmp_path / "precious").exists()
    log.rmdir() if kind == "folder" else log.unlink()
    assert len(folder.inbox.take(AT)) == 1


def test_the_log_of_a_folder_that_is_exchanged_is_not_used(folder: Folder, tmp_path: Path) -> None:
    (folder.path / "steering").rename(tmp_path / "away")
    (folder.path / "steering").mkdir()
    folder.inbox.note_taken(folder.act(), AT)
    assert not (folder.path / "steering" / "log.jsonl").exists()
    assert (tmp_path / "away" / "log.jsonl").exists()


@pytest.mark.parametrize("kind", ["steering", "acts", "key"])
def test_an_act_is_not_sent_through_a_link_or_into_a_folder_that_others_can_write(kind: str, tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = []

    def exchange(run: Run) -> None:
        path = tmp_path / "run" / "steering" / ("" if kind == "steering" else kind)
        path.chmod(0o777)
        answers.append(tell(tmp_path / "run", "stop"))
        path.chmod(0o700)
        path.rename(tmp_path / "away")
        path.symlink_to(tmp_path / "away")
        answers.append(tell(tmp_path / "run", "stop"))

    tiny_run(directory=tmp_path / "run", callbacks=[Steering(), on(Callback.on_step_end, at=2)(exchange)])
    assert ["and be no link" in answer["why"] for answer in answers] == [True, True]


def test_many_files_hide_no_act(folder: Folder) -> None:
    for number in range(300):
        folder.write(b"junk", f"{number:020}-{number:016x}.json")
    assert folder.inbox.take(AT) == []
    folder.signed()
    assert len(folder.inbox.take(AT)) == 1


def test_the_run_says_which_files_it_refused_and_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    answers: list[dict[str, Any]] = []
    sender = threading.Thread(target=lambda: answers.append(tell(directory, "note", {"text": "x" * 100}, wait_s=60)))

    def attack(run: Run) -> None:
        if run.progress.step == 2:
            for number in range(40):
                (directory / "steering" / "acts" / f"{number:020}-{number:016x}.json").write_bytes(b"\x1b[2J" * number)
            sender.start()
        if run.progress.step > 2 and not answers:
            threading.Event().wait(0.005)
        if answers:
            run.stop("the act is done")

    run = tiny_run(directory=directory, epochs=2000, callbacks=[Steering(), on(Callback.on_step_end)(attack)])
    sender.join()
    assert answers[0]["state"] == "done"
    refused = [one.why for one in run.decisions if one.what == "not steered"]
    assert len(refused) == 20  # the others are not listed
    assert refused[0].endswith("is not an act of this run: it is no JSON")


UNCLEAR: dict[str, tuple[dict[str, Any], str]] = {
    "nested": (nested(900), "an act has at most 8 levels of objects and lists; this one has more"),
    "nested lists": ({"lr": [[[[[[[1]]]]]]]}, "an act has at most 8 levels of objects and lists; this one has more"),
    "half of a character": ({"text": "\ud800"}, "the texts of an act must be Unicode; one has half of a surrogate pair"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_an_act_that_cannot_be_shown_is_refused_and_the_run_goes_on(case: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    arguments, why = UNCLEAR[case]
    answers: list[dict[str, Any]] = []

    @on(Callback.on_step_end, at=2)
    def attack(run: Run) -> None:
        answers.append(tell(directory, "set", arguments, wait_s=0))
        act = new_act(run.info.id, "set", arguments)
        content = file_of(act, (directory / "steering" / "key").read_bytes())
        (directory / "steering" / "acts" / f"{act.id}.json").write_bytes(content)

    wait = on(Callback.on_step_end)(lambda run: run.stop("it is refused") if "not steered" in whats(run) else time.sleep(0.005))
    run = tiny_run(directory=directory, epochs=2000, callbacks=[Steering(), attack, wait])
    assert (answers[0]["state"], answers[0]["why"]) == ("refused", why)
    assert json.dumps(answers[0], ensure_ascii=False).encode()
    assert run.outcome is not None
    assert run.outcome.reason == "it is refused"
    assert run.why("not steered").endswith(f"is not an act of this run: {why}")


def whats(run: Run) -> list[str]:
    return [decision.what for decision in run.decisions]


def test_a_log_that_was_damaged_does_not_keep_a_run_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "steering").mkdir()
    rows = [b"\xff\xfe", b"{}", b'{"id": 1}', b'{"id": "a", "verb": "stop", "step": "x"}', b'{"id": "b", "st']
    (tmp_path / "steering" / "log.jsonl").write_bytes(b"\n".join(rows))
    run = tiny_run(directory=tmp_path, callbacks=[Steering()])
    assert run.progress.step == 5


def test_rows_of_other_runs_of_other_types_and_of_acts_after_the_end_are_not_repeated(folder: Folder) -> None:
    kept, late = folder.act(), folder.act()
    folder.inbox.note_taken(kept, AT)
    folder.inbox.note_taken(late, AT)
    folder.inbox.note_result(late, AT, refused="the run is over", over=True)
    row = {**folder.act().plain(), **AT}
    wrong: list[dict[str, Any]] = [
        {"run": "another"},
        {"verb": []},
        {"step": "1"},
        {"epoch": None},
        {"arguments": 1},
        {"arguments": nested(900)},
        {"author": {}},
        {"step": 1.5},
    ]
    with (folder.path / "steering" / "log.jsonl").open("a") as log:
        log.writelines(json.dumps({**row, **one}) + "\n" for one in wrong)
    assert [act for _, act in _in_log(folder.path, RUN)] == [kept]
