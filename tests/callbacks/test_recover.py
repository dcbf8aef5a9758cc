"""`Recover`: a run goes back, leaves out the batches that broke it, and ends with the same bits after a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Capsule, Checkpoint, LogTraining, LowerRate, NonFinite, Recover, Spike, Warmup
from cadenza.engine.session import session_of
from cadenza.testing import launch, tiny_loader, tiny_run, tiny_trainer
from cadenza.timetravel.capsule_files import capsules_in, facts_of_capsule
from tests.callbacks.breaking import Root, batches
from tests.distributed.parts import rank

SAMPLES, BATCH = 512, 8


def data(bad: dict[int, float]) -> TensorDataset:
    """Return samples of a linear function. The factors in `bad` spoil the targets of some."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 3, generator=generator)
    targets = inputs.sum(1, keepdim=True) + torch.randn(SAMPLES, 1, generator=generator)
    for index, factor in bad.items():
        targets[index] = targets[index].sign() * factor
    return TensorDataset(inputs, targets)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))


def trainer_in(directory: Path, bad: dict[int, float], *callbacks: Callback, epochs: int = 2, **arguments: Any) -> Trainer:
    own = [one for one in callbacks if isinstance(one, Recover)] or [Recover()]
    others = [*(one for one in callbacks if one not in own), LogTraining("1 step", throughput=False)]
    given: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        "loader": DataLoader(data(bad), BATCH, shuffle=True),
        "compute_loss": supervised(nn.MSELoss()),
        "callbacks": [*own, Checkpoint("20 steps"), *others],
        "driver": "single" if rank() is None else "ddp",
        "device": "cpu",
    }
    return tiny_trainer(model=network(), epochs=epochs, seed=1, directory=directory, **given, **arguments)


def decided(run: Run, what: str) -> list[dict[str, Any]]:
    return [dict(one.data) for one in run.decisions if one.what == what]


def recorded(run: Run, what: str) -> list[dict[str, Any]]:
    """Return the data of the decisions of all parts of a run."""
    assert run.info.directory is not None
    lines = (run.info.directory / "decisions.jsonl").read_text().splitlines()
    return [one["data"] for one in map(json.loads, lines) if one["what"] == what]


def left_out(run: Run) -> list[int]:
    """Return the samples that were left out, over all ranks."""
    return sorted({sample for data in recorded(run, "batch left out") for own in data["samples"] for sample in own})


def weights_of(run: Run) -> list[Tensor]:
    return [weight.detach().clone() for weight in run.model.state_dict().values()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("factor", [math.nan, 1e4], ids=["not finite", "spike"])
def test_the_guilty_batch_is_left_out_and_no_other(tmp_path: Path, factor: float) -> None:
    clean = trainer_in(tmp_path / "clean", {}).fit()
    assert not decided(clean, "rollback requested")
    assert not left_out(clean)
    run = trainer_in(tmp_path / "bad", {100: factor}).fit()
    assert (run.outcome.kind, run.progress.epoch, run.progress.step) == ("finished", 2, 128)  # type: ignore[union-attr]
    out = recorded(run, "batch left out")
    assert len(out) == 2  # once in each epoch
    assert all(100 in one["samples"][0] for one in out)
    assert run.history["train/loss"][-1][1] == pytest.approx(clean.history["train/loss"][-1][1], rel=0.5)
    info = json.loads((tmp_path / "bad" / "run.json").read_text())
    assert info["branch"]["recovery"]["count"] == len(list((tmp_path / "bad").glob("metrics.branch-*.jsonl"))) == 2
    assert [one["times"] for one in recorded(run, "went back")] == [1, 2]


def test_with_fp16_a_gradient_that_overflows_leaves_out_no_batch(tmp_path: Path) -> None:
    run = trainer_in(tmp_path, {100: math.nan, 300: 1e4}, epochs=1, precision="fp16").fit()
    out = [one["samples"][0] for one in recorded(run, "batch left out")]
    assert len(out) == 2  # a gradient of one of the repeated steps overflows, too
    assert 300 in out[0]
    assert 100 in out[1]


def test_a_guilty_batch_in_the_first_step_is_left_out(tmp_path: Path) -> None:
    clean = trainer_in(tmp_path / "clean", {}, epochs=1, accumulate=2).fit()
    bad = clean.info.samples(1).batches[1].indices
    assert bad is not None
    run = trainer_in(tmp_path / "bad", {bad[3]: math.nan}, epochs=1, accumulate=2).fit()
    (out,) = recorded(run, "batch left out")
    assert (out["epoch"], out["batch_in_epoch"], out["samples"]) == (0, 1, [bad])
    assert not recorded(run, "went back")
    assert (run.outcome.kind, run.progress.step) == ("finished", 32)  # type: ignore[union-attr]
    assert not any(one.owner == "Recover" for one in session_of(run).hooks.by_moment.get(Callback.on_batch_start, ()))


class First(Capsule):
    """It stands before `Recover`, so its second pass is made with the batches that are left out."""

    before = (Recover,)


def test_on_two_ranks_all_do_the_same_beside_a_capsule_of_one_rank(tmp_path: Path) -> None:
    def train() -> tuple[list[Tensor], list[int], list[Any]]:
        run = trainer_in(tmp_path, {100: math.nan}, First(), epochs=1).fit()
        (out,) = decided(run, "batch left out")
        return weights_of(run), left_out(run), [out["rank"], 100 in out["samples"][out["rank"]]]

    (weights, samples, (guilty, there)), other = launch(train)
    assert there
    assert len(samples) == 2 * BATCH
    assert equal(weights[:2], other[0][:2])
    assert (samples, [guilty, there]) == other[1:]
    (capsule,) = capsules_in(tmp_path)
    assert facts_of_capsule(capsule)["guilty_samples"] == [100]


def test_all_batches_since_the_checkpoint_are_left_out(tmp_path: Path) -> None:
    run = trainer_in(tmp_path, {100: math.nan}, Recover(when=NonFinite(), skip="batches of the steps since"), epochs=1).fit()
    (went,) = decided(run, "went back")
    out = [one["batch_in_epoch"] for one in decided(run, "batch left out")]
    assert out == [*range(went["to"], went["step"])]
    assert all(weight.isfinite().all() for weight in weights_of(run))


def test_further_back_and_with_a_lower_rate(tmp_path: Path) -> None:
    rates: list[float] = []
    look = on(Callback.on_before_optimizer_step)(lambda run: rates.append(run.optimizers[0].param_groups[0]["lr"]))
    recover = Recover(back="25 steps", then=LowerRate(0.1, "10 steps"), skip=None, when=Spike(), times=1)
    run = trainer_in(tmp_path, {100: 1e4}, recover, Warmup("5 steps", start=0.5), look, epochs=1).fit()
    (went,) = decided(run, "went back")
    assert went["to"] <= went["step"] - 25
    assert "after 1 rollback" in run.why("stopped")  # the batch was not left out, so the sign came again
    again = rates[went["step"] :]
    assert again[5:] == pytest.approx([1e-3] * len(again[5:]))
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2)


def test_a_gradient_that_is_not_finite_is_found_by_repeating(tmp_path: Path) -> None:
    loader = batches(20, broken=12)
    model = nn.Sequential(Root(), nn.Linear(1, 1))
    run = tiny_run(model=model, loader=loader, directory=tmp_path, callbacks=[Recover(when=NonFinite()), Checkpoint("1 step")])
    out = decided(run, "batch left out")
    assert [(one["batch_in_epoch"], one["why"]) for one in out] == [(12, "a gradient of its step is not finite")]
    assert decided(run, "went back")[0]["to"] == 12
    assert run.progress.step == 20


def test_a_run_that_breaks_each_time_stops(tmp_path: Path) -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(batch[0]).sum() * (math.nan if calls else 1.0)
        calls.append(1)
        return loss

    calls: list[int] = []
    run = tiny_run(compute_loss=broken, directory=tmp_path, callbacks=[Recover(times=2), Checkpoint("1 step")], batches=4)
    assert "the loss is nan at step 4, after 2 rollbacks" in run.why("stopped")


def test_the_state_of_an_earlier_version_is_loaded() -> None:
    older, again = Recover().state_dict(), Recover()
    del older["plan"]["idle"], older["plan"]["trained"]
    again.load_state_dict(older)
    assert again.state_dict() == Recover().state_dict()


def test_without_a_checkpoint_to_go_back_to_the_run_stops_and_says_what_is_missing(tmp_path: Path) -> None:
    def reason(name: str, *callbacks: Callback, bad: int) -> str:
        return tiny_run(loader=bad_at(bad, of=8), directory=tmp_path / name, callbacks=callbacks).why("stopped")

    missing = "the loss is nan at step 2, and there is no checkpoint to go back to: add Checkpoint(...) to callbacks"
    assert reason("without", Recover(), bad=1).endswith(missing)
    pruned = reason("pruned", Recover(back="3 steps"), Checkpoint("1 step", keep_last=1), bad=6)
    assert "no checkpoint with finite weights at step 4 or before: keep more checkpoints" in pruned
    kept = [one.name for one in (tmp_path / "pruned" / "checkpoints").glob("step-*")]
    assert kept == ["step-00000006"]  # the broken state replaces no checkpoint
    early = reason("early", Recover(back="9 steps"), Checkpoint(), bad=3)
    assert "at step 4, and there is no checkpoint to go back to: the first one is that of step 1" in early


def bad_at(number: int | None, of: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches, of which one has a target that is NaN."""
    found = tiny_loader(of)
    if number is not None:
        found[number][1][0] = math.nan
    return found


def test_messages_tell_of_the_rollback_and_of_capsules_once_and_not_that_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_run(loader=bad_at(6, of=8), directory=tmp_path / "plain", callbacks=[Recover(), Checkpoint("2 steps")])
    assert caplog.messages == [
        "the loss is nan at step 7: back to step 6 (rollback 1, the most is 3)",
        "left out batch 7 of epoch 1: the loss is nan",
    ]
    caplog.clear()
    trainer_in(tmp_path / "capsule", {100: math.nan}, Capsule(), epochs=1).fit()
    parts = ["Written to", "back to step 40", "left out batch"]
    assert [next(part for part in parts if part in one) for one in caplog.messages] == parts


@pytest.mark.parametrize("saved", ["1 step", "1 epoch"])
def test_a_loader_that_starts_at_the_beginning_of_an_epoch_goes_back_to_one(tmp_path: Path, saved: str) -> None:
    class Stream:
        """Batches without positions, of which one is bad in the second epoch."""

        epoch = -1

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(bad_at(3 if self.epoch == 1 else None, of=6))

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    run = tiny_run(loader=Stream(), directory=tmp_path, epochs=3, seed=1, callbacks=[Recover(), Checkpoint(saved, keep_last=1)])
    if saved == "1 epoch":
        assert [one["to"] for one in decided(run, "went back")] == [6]
        assert [one["batch_in_epoch"] for one in decided(run, "batch left out")] == [3]
        assert run.progress.step == 18
    else:
        assert "that ends an epoch: a Stream can only start at the beginning of an epoch" in run.why("stopped")


def test_a_checkpoint_of_broken_weights_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flips = iter([True])

    def flip(run: Run) -> None:
        """Break a weight once, after the update of step 40: the checkpoint of this step holds it."""
        if run.progress.step == 39 and next(flips, False):
            with torch.no_grad():
                run.model[4].bias += 100  # type: ignore[index]  # a Sequential

    flipping = on(Callback.on_after_optimizer_step)(flip)
    run = trainer_in(tmp_path, {}, Recover(), flipping, epochs=1).fit()
    assert (run.outcome.kind, run.progress.step) == ("finished", 64)  # type: ignore[union-attr]
    assert [(one["times"], one["to"]) for one in recorded(run, "went back")] == [(3, 20)]  # twice to step 40 before
    assert len(recorded(run, "batch left out")) == 23
    told = [record.message for record in caplog.records if "since the checkpoint" in record.message]
    assert told == ["left out batch 21 of epoch 1 and all after it up to step 43: they are the batches since the checkpoint"]
    assert max(loss for _, loss in run.history["train/loss"]) < 100
