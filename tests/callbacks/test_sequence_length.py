"""`SequenceLength`: each batch has the length of its own step, with any number of workers, after a resume and on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cadenza import Callback, Run
from cadenza.callbacks import Checkpoint, Evaluate, SequenceLength
from cadenza.errors import DataError
from cadenza.records import read_decisions
from cadenza.testing import launch, tiny_trainer


class Texts(Dataset[Any]):
    """24 samples of 16 tokens, and a label."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": torch.rand(16) + index, "mask": torch.ones(16), "label": torch.tensor(float(index))}


class Lengths(Callback):
    """Keeps the lengths of the batches."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_batch_start(self, run: Run, batch: Any) -> None:
        self.seen.append((batch["ids"].shape[1], batch["mask"].shape[1]))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = (model(batch["ids"].mean(1, keepdim=True) / 24).squeeze(1) - batch["label"] / 24).square().mean()
    return loss


SCHEDULE: dict[int | str, int] = {0: 4, "3 steps": 8, "1 epoch": 16}


def trainer(directory: Path | None, callbacks: list[Any], *, workers: int = 0, **arguments: Any) -> Any:
    loader = DataLoader(Texts(), 4, shuffle=True, num_workers=workers)
    options = {"epochs": 2, "seed": 3, "compute_loss": loss_of, **arguments}
    return tiny_trainer(loader=loader, callbacks=callbacks, directory=directory, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_has_the_length_of_its_step(workers: int) -> None:
    run = trainer(None, [SequenceLength(SCHEDULE, ("ids", "mask")), look := Lengths()], workers=workers).fit()
    assert look.seen == [(4, 4)] * 3 + [(8, 8)] * 3 + [(16, 16)] * 6
    told = [(one.when.step, dict(one.data)) for one in run.decisions if one.what == "sequence length changed"]
    assert told == [(3, {"before": 4, "length": 8}), (6, {"before": 8, "length": 16})]


def test_only_the_given_keys_are_cut_and_evaluations_see_everything() -> None:
    seen: list[int] = []

    class Look(Callback):
        def on_eval_batch_start(self, run: Run, evaluation: Any, batch: Any) -> None:
            seen.append(batch["ids"].shape[1])

    look = Lengths()
    evaluate = Evaluate(DataLoader(Texts(), 12))
    trainer(None, [SequenceLength(4, ["ids"]), look, evaluate, Look()], epochs=1).fit()
    assert ({*look.seen}, seen) == ({(4, 16)}, [16, 16])


def test_a_key_that_a_batch_does_not_have_is_an_error_with_the_nearest() -> None:
    with pytest.raises(DataError, match=r"cuts 'idz', which a batch does not have\. Did you mean 'ids'"):
        trainer(None, [SequenceLength(4, ("idz",))]).fit()


WRONG: list[tuple[Any, str]] = [
    ({0: 0}, r"lengths\[0\] must be at least 1"),
    ({0: 1, "3 stps": 2}, "Did you mean 'steps'"),
    ({"3 steps": 2}, "the length at the start"),
]


@pytest.mark.parametrize(("lengths", "message"), WRONG)
def test_wrong_lengths_are_errors_when_it_is_made(lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceLength(lengths)


class Kill(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_killed_ends_with_the_same_bits_and_decisions(workers: int, tmp_path: Path) -> None:
    ends = []
    for kill in (0, 3, 4, 5, 7, 8) if not workers else (0, 5):
        directory = tmp_path / str(kill)
        look = [Lengths(), Lengths()]
        for one in look if kill else look[:1]:
            saver = Checkpoint("1 step", keep_last=None)
            made = trainer(
                directory, [SequenceLength(SCHEDULE), one, saver, Kill(kill if one is look[0] else 0)], workers=workers
            )
            try:
                run = made.fit(resume="auto")
            except KeyboardInterrupt:
                continue
        seen = look[0].seen if not kill else look[0].seen[: kill - 1] + look[1].seen
        told = [one for one in read_decisions(directory / "decisions.jsonl") if one.what == "sequence length changed"]
        ends.append(
            (seen, [(one.when.step, one.data["length"]) for one in told], str(made.model.state_dict()), run.progress.now())
        )
    assert ends == [ends[0]] * len(ends)
    assert ends[0][1] == [(3, 8), (6, 16)]


def test_two_ranks_have_the_same_lengths() -> None:
    def rank() -> Any:
        look = Lengths()
        arguments: dict[str, Any] = {"driver": "ddp", "device": "cpu", "accumulate": {0: 1, "2 steps": 2}}
        trainer(None, [SequenceLength({0: 4, "40%": 8}), look], **arguments).fit()
        return look.seen

    first, second = launch(rank, 2)
    assert first == second
    assert [one for one, _ in first] == [4, 4, 4, 8, 8, 8]
