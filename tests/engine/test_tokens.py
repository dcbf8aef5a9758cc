"""Tokens: counted from the outputs of a batch or by a function, in records and checkpoints, and as the limit of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.errors import DataError, LossError
from cadenza.testing import tiny_run, tiny_trainer
from tests.engine.parts import Stream

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


def noted(**arguments: Any) -> tuple[Run, list[int]]:
    """Return a run, and the tokens at the end of each of its steps."""
    tokens: list[int] = []
    note = on(Callback.on_step_end)(lambda run: tokens.append(run.progress.tokens))
    return tiny_run(loader=sequences(), callbacks=[note], **arguments), tokens


@pytest.mark.parametrize("way", COUNTED)
def test_tokens_are_counted_after_each_step(way: str) -> None:
    run, tokens = noted(epochs=2, **COUNTED[way])
    assert tokens == [3, 8, 10, 17, 21, 24, 29, 31, 38, 42]
    assert run.progress.now().tokens == 42


@pytest.mark.parametrize("way", COUNTED)
@pytest.mark.parametrize(("limit", "steps"), [(1, 1), (8, 2), (9, 3), (21, 5), (22, 6), (40, 10)])
def test_a_run_ends_with_the_step_that_reaches_max_tokens(way: str, limit: int, steps: int) -> None:
    run, tokens = noted(max_tokens=limit, **COUNTED[way])
    assert run.progress.step == steps
    assert tokens[-1] >= limit > ([0, *tokens])[-2]
    assert run.outcome is not None
    assert run.outcome.kind == "finished"


def test_it_ends_after_whole_steps_at_the_first_limit_that_is_reached() -> None:
    def steps(**limits: Any) -> int:
        return tiny_run(loader=sequences(), compute_loss=with_tokens, **limits).progress.step

    assert steps(max_tokens=9, steps=2) == 2
    assert steps(max_tokens=9, steps=4) == 3
    assert steps(max_tokens=1000, epochs=1) == 5
    stream: Any = DataLoader(Stream(sequences()), batch_size=None)
    run = tiny_run(loader=stream, compute_loss=loss_of, tokens=torch.Tensor.numel, max_tokens=30)
    assert (run.progress.epoch, run.progress.step, run.progress.tokens) == (1, 8, 31), "without a length, too"
    run = tiny_run(loader=sequences(), compute_loss=with_tokens, max_tokens=4, accumulate=3)
    assert (run.progress.step, run.progress.batch, run.progress.tokens) == (1, 3, 10)


@pytest.mark.parametrize(("way", "cut"), [*zip(COUNTED, (1, 4, 7), strict=True)])
def test_a_resumed_run_counts_on_and_ends_at_the_same_step_with_the_same_bits(tmp_path: Path, way: str, cut: int) -> None:
    def fit(name: str, *callbacks: Callback, **limits: Any) -> Run:
        options = {**COUNTED[way], **limits, "loader": sequences(), "directory": tmp_path / name}
        return tiny_trainer(seed=1, callbacks=[Checkpoint(1), *callbacks], **options).fit(resume="auto")

    whole = fit("whole", max_tokens=37)
    fit("cut", steps=cut)
    rest = fit("cut", max_tokens=37)
    assert rest.progress.now() == whole.progress.now()
    assert all(map(torch.equal, rest.model.parameters(), whole.model.parameters()))
    assert fit("cut", max_tokens=37).progress.now() == whole.progress.now(), "it is over"
    assert fit("cut", max_tokens=39).progress.step == whole.progress.step + 1


def test_batches_that_a_hook_skips_before_their_forward_pass_have_no_outputs_that_count_nor_do_evaluations() -> None:
    skip = on(Callback.on_batch_start, at=2)(lambda run, batch: run.skip_batch("not this one"))
    evaluate = Evaluate(sequences([9, 9]), every="1 step", compute=with_tokens)
    assert tiny_run(loader=sequences(), callbacks=[skip, evaluate], **COUNTED["outputs"]).progress.tokens == 21 - 5
    assert tiny_run(loader=sequences(), callbacks=[skip, evaluate], **COUNTED["function"]).progress.tokens == 21
    assert tiny_run(loader=sequences(), callbacks=[skip], max_tokens=16, **COUNTED["outputs"]).progress.step == 5


def test_records_and_the_run_directory_have_the_tokens_if_something_counts_them(tmp_path: Path) -> None:
    run = tiny_run(loader=sequences(), compute_loss=with_tokens, directory=tmp_path / "a", callbacks=[LogTraining("2 steps")])
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [8, 17]
    assert json.loads((tmp_path / "a" / "run.json").read_text())["progress"]["tokens"] == run.progress.tokens == 21
    assert tiny_run(directory=tmp_path / "b", callbacks=[LogTraining(1)]).progress.tokens == 0
    assert '"tokens"' not in (tmp_path / "b" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("tokens", [1.5, -1, "two", torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(2, device="meta")])
def test_outputs_and_functions_that_return_no_whole_number_on_the_host_are_an_error(tokens: Any) -> None:
    with pytest.raises(
        LossError, match=r"outputs\['tokens'\] must be a whole number of at least 0, on the host; got .*tokens="
    ):
        tiny_run(loader=sequences(), compute_loss=lambda model, batch: {"loss": loss_of(model, batch), "tokens": tokens})
    for returned in (tokens, None):
        with pytest.raises(DataError, match=r"tokens=.* must return a whole number of at least 0, on the host; got"):
            tiny_run(loader=sequences(), compute_loss=loss_of, tokens=lambda batch, returned=returned: returned)


def test_two_counts_of_the_same_tokens_and_a_limit_that_nothing_counts_are_errors_at_the_first_batch() -> None:
    with pytest.raises(LossError, match=r"tokens are counted twice: by Trainer\(tokens=.*\), and by outputs\['tokens'\]"):
        tiny_run(loader=sequences(), compute_loss=with_tokens, tokens=torch.Tensor.numel)
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
