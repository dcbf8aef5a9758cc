"""Checkpoints in the memory of each machine: a restart uses the newest that all ranks can read, here or in the shared folder.

A machine is a working directory: ``/proc/self/cwd`` leads each process to its own.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.drivers import Driver
from cadenza.parallel import local
from cadenza.testing import launch
from tests.distributed.drivers import ddp, fsdp
from tests.distributed.parts import adamw, flip_last_byte, loader, own_rank, trainer, weights_of

HERE, RANKS = "/proc/self/cwd/local", 3
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/cwd"), reason="machines are working directories, by /proc")


def trained(
    folder: Path,
    steps: int = 16,
    *,
    ranks: int = RANKS,
    machines: int = RANKS,
    driver: Callable[[], Driver] = ddp,
    callbacks: Sequence[Callback] = (),
    instead: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Train on machines; return of each rank the weights, and the step at which the run resumed. `instead` is called before."""

    def train() -> tuple[Tensor, int | None]:
        machine = folder / f"machine {own_rank() * machines // ranks}"
        machine.mkdir(parents=True, exist_ok=True)
        os.chdir(machine)
        instead()
        saves = [
            Checkpoint("2 steps", local=HERE, keep_last=1, background=False),
            Checkpoint("5 steps", keep_last=2, background=False),
        ]
        one = trainer(
            loader(4 * 4 * 18),
            optimizer=adamw,
            accumulate=4 // ranks,
            max_steps=steps,
            driver=driver(),
            directory=folder / "shared",
            callbacks=[*saves, *callbacks],
        )
        run = one.fit(resume="auto")
        return weights_of(one), None if run.progress.origin is None else run.progress.origin.step

    return launch(train, ranks)


@on(Callback.on_step_start, at=13)
def power_cut(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def cut(folder: Path, **arguments: Any) -> None:
    """Train until all ranks are killed after step 12."""
    with pytest.raises(ExceptionGroup):
        trained(folder, callbacks=[power_cut], **arguments)


def in_memory(folder: Path, machine: int) -> Path:
    """Return the newest checkpoint of a machine. One that the main process has deleted goes with the next save."""
    return max((folder / f"machine {machine}" / "local").glob("step-*"))


def lose(folder: Path, machine: int) -> None:
    shutil.rmtree(folder / f"machine {machine}")


def resumed_at(folder: Path, expected: int, whole: Sequence[Any], **arguments: Any) -> None:
    """Assert that a restart continues after a step, and ends with the bits of the run that was not cut."""
    for (weights, origin), (others, _) in zip(trained(folder, **arguments), whole, strict=True):
        assert origin == expected
        assert torch.equal(weights, others)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return trained(tmp_path_factory.mktemp("whole"))


def files_in(folder: Path, machine: int) -> set[str]:
    return {path.name for path in in_memory(folder, machine).iterdir()}


def test_a_restart_uses_the_memory_of_the_machines_and_a_new_one_gets_its_part_from_the_others(
    tmp_path: Path, whole: list[Any]
) -> None:
    cut(tmp_path)
    shared = [saved.name for saved in (tmp_path / "shared/checkpoints").glob("step-*")]
    assert sorted(shared) == ["step-00000005", "step-00000010"]
    for machine in range(RANKS):
        parts = {int(name[5:10]) - 1 for name in files_in(tmp_path, machine) if name.startswith("rank-")}
        assert parts == {machine, (machine - 1) % RANKS} - {0}
        assert len([*(tmp_path / f"machine {machine}/local").iterdir()]) <= 3  # a second checkpoint, and a link
    lose(tmp_path, 0)
    resumed_at(tmp_path, 12, whole)
    assert in_memory(tmp_path, 0).name == in_memory(tmp_path, 1).name == "step-00000016"


def test_shards_of_a_machine_that_is_gone_come_from_its_neighbour(tmp_path: Path) -> None:
    expected = trained(tmp_path / "whole", driver=fsdp)
    cut(tmp_path / "cut", driver=fsdp)
    lose(tmp_path / "cut", 1)
    resumed_at(tmp_path / "cut", 12, expected, driver=fsdp)


def test_if_a_machine_and_its_neighbour_are_gone_the_shared_folder_is_used(tmp_path: Path, whole: list[Any]) -> None:
    cut(tmp_path)
    for machine in (1, 2):
        lose(tmp_path, machine)
    resumed_at(tmp_path, 10, whole)
    assert in_memory(tmp_path, 2).name == "step-00000016"


def test_a_part_that_has_changed_is_found_and_the_shared_folder_is_used(tmp_path: Path, whole: list[Any]) -> None:
    cut(tmp_path)
    flip_last_byte(in_memory(tmp_path, 2) / "rank-00003-of-00003.safetensors")
    resumed_at(tmp_path, 10, whole)


@pytest.mark.parametrize(("method", "step"), [("_spread", 10), ("_appear", 12)])  # then the others have all parts
def test_a_kill_while_the_machines_exchange_files_leaves_a_checkpoint_that_all_can_read(
    tmp_path: Path, whole: list[Any], method: str, step: int
) -> None:
    def die() -> None:
        act, saves = getattr(local.LocalStore, method), itertools.count(1)

        def acting(self: local.LocalStore, *values: Any) -> None:
            if next(saves) == 6:  # that of step 12
                if own_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()  # as torchrun does
            act(self, *values)

        setattr(local.LocalStore, method, acting)

    with pytest.raises(ExceptionGroup):
        trained(tmp_path, instead=die)
    resumed_at(tmp_path, step, whole)


@on(Callback.on_fit_end)
def unsaved(run: Run) -> None:
    Path("unsaved").write_text("".join(one.why for one in run.decisions if one.what == "not saved"))


def in_the_way(rank: int, name: str, save: int) -> None:
    """Let a rank find a folder in place of a file, which it can neither read nor write, while machines exchange one save."""
    spread, saves = local.LocalStore._spread, itertools.count(1)

    def spreading(self: local.LocalStore, at: Path, common: list[str]) -> None:
        if next(saves) == save and own_rank() == rank:
            (at / name).unlink(missing_ok=True)
            (at / name).mkdir()
        spread(self, at, common)

    local.LocalStore._spread = spreading  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        (1, "rank-00002-of-00003.safetensors"),  # read, for the next machine
        (2, "rank-00002-of-00003.safetensors"),  # written, from the one before
        (0, "state.safetensors"),  # read, for all
        (1, "state.safetensors"),  # written
    ],
)
def test_if_a_machine_cannot_read_or_write_a_file_the_save_fails_on_all_and_the_training_goes_on(
    tmp_path: Path, whole: list[Any], rank: int, name: str
) -> None:
    done = trained(tmp_path, instead=lambda: in_the_way(rank, name, save=3), callbacks=[unsaved])
    for (weights, _), (others, _) in zip(done, whole, strict=True):
        assert torch.equal(weights, others)
    assert {in_memory(tmp_path, machine).name for machine in range(RANKS)} == {"step-00000016"}
    why = (tmp_path / "machine 0/unsaved").read_text()
    assert why.startswith("step 6: ")
    assert (f"rank {rank} could not exchange or write" if rank else "Is a directory") in why


def test_if_a_machine_cannot_write_what_it_gets_all_ranks_say_which(tmp_path: Path) -> None:
    cut(tmp_path)
    lose(tmp_path, 1)
    (tmp_path / "machine 1/local").mkdir(parents=True)
    (tmp_path / "machine 1/local/step-00000012").touch()
    with pytest.raises(ExceptionGroup) as raised:
        trained(tmp_path)
    assert len(raised.value.exceptions) == RANKS
    text = "rank 1 could not exchange or write its part of the local checkpoints"
    assert any(text in str(error) for error in raised.value.exceptions)


def test_if_a_machine_cannot_make_the_folder_the_others_name_it(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        trained(tmp_path, instead=lambda: Path("local").touch() if own_rank() == 1 else None)
    assert any(f"rank 1 cannot use the local folder {HERE}" in str(error) for error in raised.value.exceptions)


@on(Callback.on_step_start, at=11)
def power_cut_before_a_save(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_only_absent_machines_could_complete_is_left_until_they_are_back(tmp_path: Path) -> None:
    cut(tmp_path, ranks=4, machines=4, driver=fsdp)
    with pytest.raises(ExceptionGroup):
        trained(tmp_path, ranks=2, machines=2, driver=fsdp, callbacks=[power_cut_before_a_save])
    for _, origin in trained(tmp_path, ranks=4, machines=4, driver=fsdp):
        assert origin == 12


def test_a_machine_that_is_new_gets_its_part_for_an_evaluation_too(tmp_path: Path) -> None:
    cut(tmp_path)
    lose(tmp_path, 1)
    shutil.rmtree(tmp_path / "shared/checkpoints")

    def evaluate() -> float:
        machine = tmp_path / f"machine {own_rank()}"
        machine.mkdir(exist_ok=True)
        os.chdir(machine)
        saves = Checkpoint("2 steps", local=HERE)
        return trainer(driver=ddp(), directory=tmp_path / "shared", callbacks=[saves]).evaluate(loader(), which="last")[
            "eval/loss"
        ]

    first, *others = launch(evaluate, RANKS)
    assert others == [first] * (RANKS - 1)


def test_on_another_number_of_ranks_each_machine_gets_all_files(tmp_path: Path) -> None:
    cut(tmp_path, ranks=4, machines=2)
    for _, origin in trained(tmp_path, ranks=2, machines=2):
        assert origin == 12


def test_a_folder_that_all_ranks_see_is_as_any_other(tmp_path: Path, whole: list[Any]) -> None:
    cut(tmp_path, machines=1)
    assert len(files_in(tmp_path, 0)) == len({*files_in(tmp_path, 0)}) == 8
    resumed_at(tmp_path, 12, whole, machines=1)


def test_a_local_folder_holds_whole_runs_and_stands_alone() -> None:
    for arguments in ({"directory": "there"}, {"weights_only": True}, {"local": "s3://bucket/runs"}):
        with pytest.raises(ValueError, match="local must be a folder that each machine has for itself"):
            Checkpoint(**{"local": "here", **arguments})  # type: ignore[arg-type]
    assert repr(Checkpoint(local="/machine/memory")) == "Checkpoint(keep=Last(2), local='/machine/memory')"


def test_one_process_saves_in_the_local_folder_and_resumes_at_its_newest(tmp_path: Path) -> None:
    def one(steps: int) -> Run:
        saves = [Checkpoint("2 steps", local=tmp_path / "local", keep_last=1), Checkpoint("5 steps", on_exception=False)]
        return trainer(loader(), max_steps=steps, directory=tmp_path / "run", callbacks=saves).fit(resume="auto")

    one(4)
    shutil.rmtree(tmp_path / "run/checkpoints")
    run = one(6)
    assert run.progress.origin is not None
    assert run.progress.origin.step == 4
