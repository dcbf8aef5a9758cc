"""`Capsule`: a step that breaks is written, named and repeated. The signs in a loss, and the cost of watching it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Capsule, Checkpoint, Evaluate, NonFinite, Recover, Spike, StopOnNonFinite
from cadenza.commands.main import main
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointMismatchError, DataError, NonFiniteError
from cadenza.testing import launch, tiny_loader, tiny_run, tiny_trainer
from cadenza.timetravel import replay_capsule
from cadenza.timetravel.capsule_files import capsules_in, facts_of_capsule
from cadenza.timetravel.loss_signs import Sign, Watch
from tests.callbacks.breaking import Root, batches
from tests.callbacks.parts import failing, own_step
from tests.distributed.parts import rank

BAD = 13


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples with random noise. One of them gets a value of which no logarithm exists."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        values = torch.rand(3) + 0.5
        return values - 9 * (index == BAD), values.sum().unsqueeze(0)


class Log(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.log()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Log(), nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def trainer_in(directory: Path | None, *callbacks: Callback, workers: int = 0) -> Trainer:
    arguments: dict[str, Any] = {
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.05),
        "loader": DataLoader(Augmented(), 4, shuffle=True, num_workers=workers),
        "driver": "single" if rank() is None else "ddp",
        "compute_loss": supervised(nn.MSELoss()),
    }
    return tiny_trainer(model=network(), seed=3, directory=directory, callbacks=callbacks, device="cpu", **arguments)


def test_on_two_ranks_with_workers_the_sample_and_the_module_are_named(tmp_path: Path) -> None:
    directory = tmp_path / "run"

    def meets(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return a loss for which the ranks exchange a number, of which only one rank is not finite."""
        mean = batch[1].mean()
        torch.distributed.all_reduce(mean)
        return nn.functional.mse_loss(model(batch[0]), batch[1] + 0 * mean)

    def train() -> list[Any]:
        run = trainer_in(directory, StopOnNonFinite(), Capsule(), workers=2).fit()
        again = trainer_in(None)
        if run.is_main:  # the other rank does not come
            assert replay_capsule(again, directory).same
        trainer = trainer_in(tmp_path / "meets", StopOnNonFinite(), Capsule())
        trainer.compute_loss = meets
        trainer.fit()
        return [(one.who, one.data["guilty_samples"]) for one in run.decisions if one.what == "capsule written"]

    decided = launch(train)
    alone = facts_of_capsule(capsules_in(tmp_path / "meets")[0])  # the second pass waits for no other rank
    assert "one rank alone does the second pass of a capsule, which calls the collective allreduce" in alone["second_pass"]
    assert BAD in alone["batches"][0]["samples"]
    (path,) = capsules_in(directory)
    facts = facts_of_capsule(path)
    assert facts["guilty_samples"] == [BAD]
    assert facts["module"] == "'0' (Log)"
    assert BAD in facts["batches"][0]["samples"]
    assert ("Capsule" if facts["rank"] == 0 else "Capsule on rank 1", [BAD]) in decided[0]

    again = replay_capsule(trainer_in(None), directory)  # in one process
    assert (again.same, again.exact, again.located.module, again.located.batch) == (True, True, "'0' (Log)", 0)
    assert again.located.rows == [facts["batches"][0]["samples"].index(BAD)]


class Third(NonFinite):
    """A sign in the loss of the third step, which is fine."""

    def __init__(self) -> None:
        self.losses = 0

    def seen_in(self, loss: float) -> str | None:
        return "chosen" if self.losses == 2 else None

    def add(self, loss: float) -> None:
        self.losses += 1


def test_the_step_is_repeated_to_the_bit_and_the_run_goes_on_as_without_a_capsule(tmp_path: Path) -> None:
    plain = trainer_in(None, StopOnNonFinite("skip")).fit()
    trainer = trainer_in(tmp_path, Capsule(when=Third(), most=1), StopOnNonFinite("skip"))
    run = trainer.fit()
    assert run.why("capsule written").endswith("chosen")
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(run.model.state_dict()[name], weight), name
    again = replay_capsule(trainer, tmp_path)
    assert (again.step, again.same, again.located.found, len(again.facts["last"])) == (3, True, False, 3)


def test_an_exception_leaves_a_capsule_that_raises_it_again(tmp_path: Path) -> None:
    def too_large(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if batch[0].min() > 0.5:
            raise ValueError("too large")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = tiny_trainer(compute_loss=too_large, directory=tmp_path, callbacks=[Capsule()])
    with pytest.raises(ValueError, match="too large"):
        trainer.fit()
    facts = facts_of_capsule(capsules_in(tmp_path)[0])
    assert (facts["kind"], facts["step"], facts["error"]["type"]) == ("exception", 5, "ValueError")
    with pytest.raises(ValueError, match="too large"):
        replay_capsule(trainer, tmp_path)


@pytest.mark.parametrize(("accumulate", "text"), [(2, "same losses"), (1, "no losses to compare")])
def test_losses_are_compared_as_far_as_both_are_known(tmp_path: Path, accumulate: int, text: str) -> None:
    fails = failing(Callback.on_before_backward, at=4)
    trainer = tiny_trainer(directory=tmp_path, accumulate=accumulate, callbacks=[fails, Capsule()])
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    again = replay_capsule(trainer, tmp_path)
    assert again.same
    assert text in repr(again)


def test_an_error_between_two_steps_or_before_the_batch_is_seen_is_not_that_of_the_step_before(tmp_path: Path) -> None:
    def compute(model: nn.Module, batch: Any) -> Any:
        raise ZeroDivisionError

    before = [failing(Callback.on_batch_start, at=3), Capsule()]
    between = [Capsule(), Evaluate(tiny_loader(), compute=compute, every="2 steps")]
    for name, callbacks in {"before": before, "between": between}.items():
        with pytest.raises(ZeroDivisionError):
            tiny_run(directory=tmp_path / name, callbacks=callbacks)
        assert not capsules_in(tmp_path / name)


class Incomplete(Augmented):
    """One of the samples cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == BAD:
            raise KeyError("a file is missing")
        return super().__getitem__(index)


class FromWorker(Incomplete):
    """It raises errors as a process of a DataLoader passes them on, without the time that such a process takes to end."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        try:
            return super().__getitem__(index)
        except KeyError:
            passed_on = ExceptionWrapper(where="in DataLoader worker process 0")
        passed_on.reraise()
        raise AssertionError


def test_an_error_of_a_worker_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(FromWorker(), 4)
    with pytest.raises(KeyError):
        tiny_run(model=network(), loader=loader, seed=3, directory=tmp_path, callbacks=[Capsule()])
    main(["capsule", str(tmp_path)])
    told = capsys.readouterr().out
    assert told.splitlines()[0].endswith(": KeyError: 'a file is missing'")
    assert "not known: the step ended before" in told


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_error_of_the_loader_names_the_samples_that_it_could_not_load(
    tmp_path: Path, accumulate: int, capsys: pytest.CaptureFixture[str]
) -> None:
    loader, loss = DataLoader(Incomplete(), 4, shuffle=True), supervised(nn.MSELoss())
    arguments: dict[str, Any] = {"seed": 3, "accumulate": accumulate, "compute_loss": loss, "directory": tmp_path}
    trainer = tiny_trainer(model=network(), loader=loader, callbacks=[Capsule()], **arguments)
    with pytest.raises(KeyError):
        trainer.fit()
    (path,) = capsules_in(tmp_path)
    facts, done = facts_of_capsule(path), trainer.run.progress
    assert (facts["step"], len(facts["batches"])) == (done.step + 1, done.batch - accumulate * done.step)
    assert facts["not_loaded"]["batch_in_epoch"] == done.batch
    assert BAD in facts["not_loaded"]["samples"]
    main(["capsule", str(tmp_path)])
    assert f"not loaded  epoch 1, batch {done.batch + 1}: samples" in capsys.readouterr().out
    if not facts["batches"]:
        with pytest.raises(DataError, match="the loader failed with the first batch of the step"):
            replay_capsule(trainer, tmp_path)


def test_a_gradient_that_breaks_the_weights_is_found_with_copies_of_each_step(tmp_path: Path) -> None:
    def run_with(weights: str | None, directory: Path) -> dict[str, Any]:
        model = nn.Sequential(Root(), nn.Linear(1, 1))
        tiny_run(model=model, loader=batches(6, broken=2), directory=directory, callbacks=[Capsule(weights=weights)])
        return facts_of_capsule(capsules_in(directory)[0])

    facts = run_with("1 step", tmp_path / "each")
    assert (facts["step"], facts["seen_at_step"], facts["parameter"]) == (3, 4, "0.scale")
    assert facts["module"] == "the backward pass of '0' (Root)"
    assert facts["weights_exact"]
    late = run_with(None, tmp_path / "late")
    assert (late["step"], late["parameter"]) == (4, "'0.scale' is nan, first at index (0)")
    usual = run_with("1000 steps", tmp_path / "usual")
    assert (usual["parameter"], usual["weights_exact"]) == ("'0.scale' is nan, first at index (0)", False)
    for name in ("each", "late", "usual"):
        assert len(capsules_in(tmp_path / name)) == 1  # the steps after it tell nothing new


def test_a_model_that_changes_its_batch_is_reported_and_no_sample_is_named(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0].sub_(2.0).log()), batch[1])

    loader = [(torch.full((2, 1), 5.0 - number), torch.ones(2, 1)) for number in range(4)]
    tiny_run(compute_loss=loss, loader=loader, directory=tmp_path, callbacks=[Capsule(), StopOnNonFinite()])
    facts = facts_of_capsule(capsules_in(tmp_path)[0])
    assert "changes its batch in place" in facts["second_pass"]
    assert facts["guilty_samples"] == []


class Own:
    """A batch of a type that checkpoints cannot hold."""

    values = torch.ones(1)


def test_the_command_says_what_the_capsule_lacks_in_lines_that_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(model: nn.Module, batch: Own) -> Tensor:
        raise ValueError("the labels are wrong.")

    with pytest.raises(ValueError, match="labels"):
        tiny_run(loader=[Own()], compute_loss=fails, directory=tmp_path, callbacks=[Capsule()])
    assert "the labels are wrong. Written to" in caplog.text
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["capsule", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines()[2:])
    assert "batches left out  batches[0] cannot be saved: expected None, bool" in shown


def test_the_command_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = tiny_loader()
    loader[3][0][1] = math.nan
    with pytest.raises(NonFiniteError):
        tiny_run(loader=loader, directory=tmp_path, callbacks=[StopOnNonFinite("raise"), Capsule()])
    assert main(["capsule", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "step-00000004: NonFiniteError: the loss is nan in batch 4" in shown[0]
    rows = ["step", "batch", "loss", "module", "parameter", "tensor", "not", "weights"]
    assert [line.split()[0] for line in shown[1:]] == rows
    assert main(["capsule", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["guilty_samples"] == [1]
    damaged = tmp_path / "capsules/step-00000001"
    damaged.mkdir()
    (damaged / "capsule.json").write_text("{")
    assert main(["capsule", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert told.out.splitlines() == shown
    assert "step-00000001' is damaged" in told.err
    assert main(["capsule", str(tmp_path / "none")]) == 1
    assert "there is no capsule" in capsys.readouterr().err


def test_what_is_no_capsule_of_this_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no capsule"):
        replay_capsule(tiny_trainer(), tmp_path)
    with pytest.raises(TypeError, match="takes a Trainer first; got a Linear"):
        replay_capsule(nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]  # wrong on purpose
    tiny_run(losses=[1.0, math.nan], directory=tmp_path, callbacks=[Capsule()])
    assert facts_of_capsule(capsules_in(tmp_path)[0])["second_pass"] == "StopIteration: "  # the losses were read once
    larger = tiny_trainer()
    larger.model.extra = nn.Linear(1, 1)
    for other in (trainer_in(None), larger):
        with pytest.raises(CheckpointMismatchError, match="belongs to another model: it has no "):
            replay_capsule(other, tmp_path)
    tensors = capsules_in(tmp_path)[0] / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointDamagedError, match=r"tensors.safetensors has .*crc32"):
        replay_capsule(tiny_trainer(), tmp_path)


def test_a_layer_in_evaluation_mode_stays_in_it_when_the_step_is_repeated(tmp_path: Path) -> None:
    model = network()
    norm: Any = model[2]
    freeze = on(Callback.on_step_start)(lambda run: norm.eval())

    @on(Callback.on_step_end, at=2)
    def plant(run: Run) -> None:
        norm.running_mean[1] = math.nan  # only a layer in evaluation mode reads it

    loader = [(torch.rand(4, 3) + 1, torch.ones(4, 1)) for _ in range(4)]
    trainer = tiny_trainer(model=model, loader=loader, directory=tmp_path, callbacks=[freeze, plant, Capsule()])
    trainer.fit()
    again = replay_capsule(trainer, capsules_in(tmp_path)[0])
    assert (again.step, again.same, again.located.module) == (3, True, "'2' (BatchNorm1d)")
    assert again.located.weight == "'2.running_mean' is nan, first at index (1)"


def test_no_more_capsules_than_asked_for_are_written_and_a_disk_that_rejects_them_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = [1.0 + 0.01 * (number % 5) for number in range(20)]
    losses[12] = losses[14] = losses[16] = 50.0  # of steps 13, 15 and 17
    tiny_run(losses=losses, directory=tmp_path / "two", callbacks=[Capsule(most=2, last=1)])
    assert [facts_of_capsule(path)["step"] for path in capsules_in(tmp_path / "two")] == [13, 15]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "capsules").write_text("a file")
    assert tiny_run(losses=losses, directory=tmp_path / "full", callbacks=[Capsule(most=2)]).progress.step == 20
    assert caplog.text.count("could not be written") == 2


def test_a_step_fn_has_no_second_pass_and_the_batch_is_searched_all_the_same(tmp_path: Path) -> None:
    loader = tiny_loader()
    loader[3][1][1] = math.inf
    tiny_run(step_fn=own_step, loader=loader, directory=tmp_path, callbacks=[Capsule()])
    facts = facts_of_capsule(capsules_in(tmp_path)[0])
    assert (facts["step"], facts["tensor"], facts["guilty_samples"]) == (4, "batch[1] is inf, first at index (1, 0)", [1])
    assert facts["module"] is None


# -- the signs in a loss ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [NonFinite, Spike, lambda: NonFinite() | Spike(window=7), lambda: Spike(ratio=1.1, window=4)])
def test_a_watched_sign_sees_what_it_sees_in_each_loss_alone(make: type[Sign]) -> None:
    draw = random.Random(1)
    sign, watch, seen = make(), Watch(make()), 0
    for _ in range(3000):
        loss = draw.choice([draw.gauss(1, 0.1)] * 40 + [draw.gauss(0, 3), 9.0, math.nan, math.inf, -math.inf, 1e308])
        expected = sign.seen_in(loss)
        if expected is None:
            sign.add(loss)
        assert watch.look(loss) == expected
        seen += expected is not None
    assert seen > 50


def test_a_sign_of_a_user_gets_each_loss() -> None:
    class Rising(NonFinite):
        last = math.inf

        def seen_in(self, loss: float) -> str | None:
            return "it rose" if loss > self.last else None

        def add(self, loss: float) -> None:
            self.last = loss

    watch = Watch(Rising() | Spike())
    assert [watch.look(loss) for loss in (3.0, 2.0, 2.5, 2.0)] == [None, None, "it rose", None]


def squared(draw: random.Random, count: int) -> float:
    return sum(draw.gauss(0, 1) ** 2 for _ in range(count)) / count


def entropy(draw: random.Random, count: int) -> float:
    """Return the mean cross entropy of samples that a model knows well, of which 3 % have a wrong label."""
    margins = [draw.gauss(4, 2) * (-1 if draw.random() < 0.03 else 1) for _ in range(count)]
    return sum(math.log1p(math.exp(-margin)) for margin in margins) / count


@pytest.mark.parametrize(
    ("loss", "count"), [(squared, 1), (squared, 2), (squared, 16), (entropy, 16)], ids=["one", "two", "many", "labels"]
)
def test_losses_of_small_batches_and_wrong_labels_are_no_spikes_and_a_broken_batch_is_one(loss: Any, count: int) -> None:
    draw, spike = random.Random(3), Spike()
    for number in range(3000):
        if number % 500 == 499:
            assert spike.seen_in(400 * max(1.0, *(loss(draw, count) for _ in range(50)))) is not None
        value = loss(draw, count)
        assert spike.seen_in(value) is None, (number, value)
        spike.add(value)
    for tiny in (5e-324, 1e308, 5e-324, 1e308) * 20:
        spike.add(tiny)
    assert spike.seen_in(1.0) is None


def mean_target(model: Any, batch: Any) -> Any:
    return model(batch[0]).sum() * 0 + batch[1].mean()


def seen_after_a_resume(path: Path, before: Callback, after: Callback) -> list[tuple[str, int]]:
    """Return what is decided after a resume at step 12, five steps before a spike."""
    loader = [(torch.ones(2, 1), torch.full((2, 1), 1 + number % 3 / 10 + 50 * (number == 16))) for number in range(20)]
    for steps, callback in ((12, before), (20, after)):
        callbacks = [callback, Checkpoint("4 steps")]
        made = tiny_trainer(steps=steps, loader=loader, directory=path, compute_loss=mean_target, callbacks=callbacks)
        run = made.fit(resume="auto")
    return [(one.what, one.when.step) for one in run.decisions if one.what in ("capsule written", "rolled back")]


@pytest.mark.parametrize("after", [Spike(), NonFinite() | Spike(), Spike(window=12), Spike(ratio=2) | Spike(window=90)])
@pytest.mark.parametrize(("callback", "what"), [(Capsule, "capsule written"), (Recover, "rolled back")])
def test_a_continued_run_goes_on_with_the_losses_of_its_checkpoint(
    callback: Any, what: str, after: Sign, tmp_path: Path
) -> None:
    for before in (Spike(), NonFinite() | Spike(window=30)):
        assert seen_after_a_resume(tmp_path / repr(before), callback(when=before), callback(when=after)) == [(what, 16)]
    # A sign that the checkpoint does not have begins without losses.
    assert seen_after_a_resume(tmp_path / "none", callback(when=NonFinite()), callback(when=Spike())) == []


def test_on_two_ranks_each_goes_on_with_its_own_losses(tmp_path: Path) -> None:
    loader = [(torch.ones(2, 1), torch.full((2, 1), float(number))) for number in range(1, 25)]

    def losses(steps: int) -> list[float]:
        capsule = Capsule(when=Spike())
        arguments: dict[str, Any] = {"loader": loader, "compute_loss": mean_target, "driver": "auto", "directory": tmp_path}
        tiny_trainer(steps=steps, callbacks=[capsule, Checkpoint("2 steps")], **arguments).fit(resume="auto")
        kept: list[float] = capsule.state_dict()["Spike 1"]["losses"]
        return kept

    for own, kept in enumerate(launch(lambda: [losses(6), losses(9), losses(9)])):
        seen = [float(number) for number in range(1 + own, 19, 2)]
        assert kept == [seen[:6], seen, seen]


def test_callbacks_with_the_same_sign_do_not_see_the_losses_of_each_other() -> None:
    sign = NonFinite() | Spike(window=4)
    capsule, recover = Capsule(when=sign), Recover(when=sign)
    for _ in range(4):
        capsule.when.add(1.0)
    assert capsule.when.seen_in(9.0) is not None
    assert recover.when.seen_in(9.0) is None
    assert sign.seen_in(9.0) is None
