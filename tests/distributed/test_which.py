"""which= and weights= on several ranks: every rank has the chosen weights meanwhile, and its own shard again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Trainer, load_weights
from cadenza.callbacks import Checkpoint, Ema, Evaluate
from cadenza.drivers import DdpDriver, Driver, FsdpDriver
from cadenza.drivers.sharding import local
from cadenza.testing import launch, tiny_trainer
from tests.distributed.parts import loader, network


def ddp() -> Driver:
    return DdpDriver("cpu", timeout_s=100)


def fsdp() -> Driver:
    return FsdpDriver("cpu", shard=nn.Linear, timeout_s=100)


def squared_error(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    predictions = model(batch[0])
    return {"loss": nn.functional.mse_loss(predictions, batch[1]), "predictions": predictions, "targets": batch[1]}


def evaluated(directory: Path, driver: Callable[[], Driver]) -> list[Any]:
    """Return the live results, those of the best and of its average, predictions, and whether the shards are as before."""
    data = loader(shuffle=False)
    trainer = tiny_trainer(
        model=network(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        loader=data,
        compute_loss=squared_error,
        steps=6,
        seed=1,
        directory=directory,
        driver=driver(),
        callbacks=[Ema(0.5), Evaluate(data, "2 steps"), Checkpoint("3 steps", keep_last=1, keep_best=("eval/loss", "max"))],
    )
    run = trainer.fit()
    before = {name: local(one).clone() for name, one in trainer.model.state_dict().items()}
    live, best = trainer.evaluate(data), trainer.evaluate(data, which="best")
    averaged = trainer.evaluate(data, which="best", weights="ema")
    memory, last = trainer.evaluate(data, weights="ema"), trainer.evaluate(data, which="last", weights="ema")
    predicted = trainer.predict(data, compute=lambda model, batch: model(batch[0]), which="best", weights="ema")
    problems = [problem_of(trainer, which, weights) for which, weights in (("best:eval/acc", None), ("best", "emma"))]
    same = all(torch.equal(local(one), before[name]) for name, one in trainer.model.state_dict().items())
    highest = max(run.history["eval/loss"], key=lambda point: point[1])
    results = [one["eval/loss"] for one in (live, best, averaged, memory, last)]
    return [results, highest, predicted, same and trainer.evaluate(data) == live, problems]


def problem_of(trainer: Trainer, which: str, weights: str | None) -> str:
    with pytest.raises(Exception, match=r"best|emma") as caught:
        trainer.evaluate(loader(shuffle=False), which=which, weights=weights)
    return str(caught.value)


@pytest.mark.parametrize("driver", [ddp, fsdp])
def test_every_rank_evaluates_the_chosen_weights_and_gets_its_own_back(tmp_path: Path, driver: Callable[[], Driver]) -> None:
    ranks = launch(partial(evaluated, tmp_path / "run", driver), 2)
    for (live, best, averaged, memory, last), (step, highest), _, unchanged, problems in ranks:
        assert step == 2
        assert best == highest
        assert len({live, best, averaged, memory}) == 4
        assert memory == last
        assert unchanged
        assert "is the best by 'eval/acc'" in problems[0]
        assert "holds no weights 'emma'" in problems[1]
    assert ranks[0][0] == ranks[1][0]
    model, data = network(), loader(shuffle=False)
    load_weights(tmp_path / "run", model, which="best", weights="ema")  # in one process, whatever wrote it
    expected = torch.cat([model.eval()(batch[0]) for batch in data])
    torch.testing.assert_close(ranks[0][2], expected)
    torch.testing.assert_close(ranks[1][2], expected)
    one = tiny_trainer(model=network(), loader=data, compute_loss=squared_error, directory=tmp_path / "run")
    for weights, result in ((None, ranks[0][0][1]), ("ema", ranks[0][0][2])):
        assert one.evaluate(data, which="best", weights=weights)["eval/loss"] == pytest.approx(result)
