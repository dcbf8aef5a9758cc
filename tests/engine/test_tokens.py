"""Tokens: counted from the outputs of a batch or by a function, in records and checkpoints, and as the limit of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.errors import DataError, LossError
from cadenza.testing import tiny_run, tiny_trainer

LENGTHS = [3, 5, 2, 7, 4]


def sequences(lengths: list[int] | None = None) -> list[Tensor]:
    """Return batches of one sequence each; their values are not all positive."""
    return [torch.linspace(-1, 1, length).unsqueeze(1) for length in lengths or LENGTHS]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def with_tokens(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    return {"loss": loss_of(model, batch), "tokens": batch.numel()}


COUNTED: dict[str, dict[str, Any]] = {
    "outputs": {"compute_loss": with_tokens},
    "function": {"compute_loss": loss_of, "tokens": torch.Tensor.numel},
    "step_fn": {"step_fn": lambda run, batch: step_of(run, batch)},
}


def step_of(run: Run, batch: Tensor) -> dict[str, Any]:
    loss = loss_of(run.model, batch)
    run.backward(loss)
    run.update()
    return {"loss": loss, "tokens": torch.tensor(batch.numel())}  # a tensor on the host will do, too


class Noted(Callback):
    """Notes the counters at the end of each step."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_step_end(self, run: Run) -> None:
        self.tokens.append(run.progress.tokens)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield from sequences()


@pytest.mark.parametrize("way", COUNTED)
def test_tokens_are_counted_after_each_step(way: str) -> None:
    noted = Noted()
    run = tiny_run(loader=sequences(), epochs=2, callbacks=[noted], **COUNTED[way])
    assert noted.tokens == [3, 8, 10, 17, 21, 24, 29, 31, 38, 42]
    assert run.progress.now().tokens == 42


def test_tokens_that_nothing_counts_are_zero_and_not_in_records(tmp_path: Path) -> None:
    run = tiny_run(directory=tmp_path, callbacks=[LogTraining(1)])
    assert run.progress.tokens == 0
    assert '"tokens"' not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("way", COUNTED)
@pytest.mark.parametrize(("limit", "steps"), [(1, 1), (8, 2), (9, 3), (21, 5), (22, 6), (40, 10)])
def test_a_run_ends_with_the_step_that_reaches_max_tokens(way: str, limit: int, steps: int) -> None:
    noted = Noted()
    run = tiny_run(loader=sequences(), max_tokens=limit, callbacks=[noted], **COUNTED[way])
    assert run.progress.step == steps
    assert noted.tokens[-1] >= limit > ([0, *noted.tokens])[-2]
    assert run.outcome is not None
    assert run.outcome.kind == "finished"


def test_it_ends_after_whole_steps_with_accumulation() -> None:
    run = tiny_run(loader=sequences(), compute_loss=with_tokens, max_tokens=4, accumulate=3)
    assert (run.progress.step, run.progress.batch, run.progress.tokens) == (1, 3, 10)


def test_the_first_limit_that_is_reached_ends_the_run() -> None:
    def steps(**limits: Any) -> int:
        return tiny_run(loader=sequences(), compute_loss=with_tokens, **limits).progress.step

    assert steps(max_tokens=9, steps=2) == 2
    assert steps(max_tokens=9, steps=4) == 3
    assert steps(max_tokens=1000, epochs=1) == 5


def test_loaders_without_length_end_as_well() -> None:
    loader: Any = torch.utils.data.DataLoader(Stream(), batch_size=None)
    run = tiny_run(loader=loader, compute_loss=loss_of, tokens=torch.Tensor.numel, max_tokens=30)
    assert (run.progress.epoch, run.progress.step, run.progress.tokens) == (1, 8, 31)


@pytest.mark.parametrize("way", COUNTED)
@pytest.mark.parametrize("cut", [1, 4, 7])
def test_a_resumed_run_counts_on_and_ends_at_the_same_step_with_the_same_bits(tmp_path: Path, way: str, cut: int) -> None:
    def fit(name: str, *callbacks: Callback, **limits: Any) -> Run:
        trainer = tiny_trainer(
            **COUNTED[way],
            **limits,
            loader=sequences(),
            seed=1,
            directory=tmp_path / name,
            callbacks=[Checkpoint(1), *callbacks],
        )
        return trainer.fit(resume="auto")

    whole = fit("whole", max_tokens=37)
    fit("cut", steps=cut)
    rest = fit("cut", max_tokens=37)
    assert rest.progress.now() == whole.progress.now()
    assert all(map(torch.equal, rest.model.parameters(), whole.model.parameters()))
    assert fit("cut", max_tokens=37).progress.now() == whole.progress.now(), "it is over"
    assert fit("cut", max_tokens=39).progress.step == whole.progress.step + 1


def test_batches_that_a_hook_skips_before_their_forward_pass_have_no_outputs_that_count() -> None:
    @on(Callback.on_batch_start, at=2)
    def skip(run: Run, batch: Tensor) -> None:
        run.skip_batch("not this one")

    assert tiny_run(loader=sequences(), callbacks=[skip], **COUNTED["outputs"]).progress.tokens == 21 - 5
    assert tiny_run(loader=sequences(), callbacks=[skip], **COUNTED["function"]).progress.tokens == 21
    assert tiny_run(loader=sequences(), callbacks=[skip], max_tokens=16, **COUNTED["outputs"]).progress.step == 5


def test_evaluations_do_not_count() -> None:
    for way in ("outputs", "function"):
        evaluate = Evaluate(sequences([9, 9]), every="1 step", compute=with_tokens)
        assert tiny_run(loader=sequences(), callbacks=[evaluate], **COUNTED[way]).progress.tokens == 21


def test_records_and_the_run_directory_have_the_tokens(tmp_path: Path) -> None:
    run = tiny_run(loader=sequences(), compute_loss=with_tokens, directory=tmp_path, callbacks=[LogTraining("2 steps")])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [8, 17]
    assert json.loads((tmp_path / "run.json").read_text())["progress"]["tokens"] == run.progress.tokens == 21


@pytest.mark.parametrize("tokens", [1.5, -1, "two", torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(2, device="meta")])
def test_outputs_that_are_no_whole_number_on_the_host_are_an_error(tokens: Any) -> None:
    with pytest.raises(
        LossError, match=r"outputs\['tokens'\] must be a whole number of at least 0, on the host; got .*tokens="
    ):
        tiny_run(loader=sequences(), compute_loss=lambda model, batch: {"loss": loss_of(model, batch), "tokens": tokens})


@pytest.mark.parametrize("tokens", [1.5, -1, None, torch.tensor([1, 2]), torch.tensor(2, device="meta")])
def test_functions_that_return_no_whole_number_are_an_error(tokens: Any) -> None:
    with pytest.raises(DataError, match=r"tokens=.* must return a whole number of at least 0, on the host; got"):
        tiny_run(loader=sequences(), compute_loss=loss_of, tokens=lambda batch: tokens)


def test_two_counts_of_the_same_tokens_are_an_error() -> None:
    with pytest.raises(LossError, match=r"tokens are counted twice: by Trainer\(tokens=.*\), and by outputs\['tokens'\]"):
        tiny_run(loader=sequences(), compute_loss=with_tokens, tokens=torch.Tensor.numel)


def test_a_limit_that_nothing_counts_is_an_error_at_the_first_batch() -> None:
    trainer = tiny_trainer(loader=sequences(), compute_loss=loss_of, max_tokens=9)
    with pytest.raises(LossError, match=r"max_tokens=9 needs the number of tokens in each batch: expected outputs\['tokens'\]"):
        trainer.fit()
    assert trainer._last_progress is not None
    assert trainer._last_progress.step == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number; got 1.5"),
        (
            {"tokens": 1000},
            r"tokens must be a function \(batch\) -> int .*; got 1000. Set the length of the run with max_tokens=",
        ),
    ],
)
def test_wrong_arguments_are_errors_when_the_trainer_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        tiny_trainer(**arguments)


def test_the_plan_says_how_many_tokens_the_run_has() -> None:
    plan = tiny_trainer(max_tokens=500).plan()
    assert plan.headline().startswith("fit: 5 batches an epoch, 500 tokens, on cpu")
    assert plan.to_dict()["max_tokens"] == 500
