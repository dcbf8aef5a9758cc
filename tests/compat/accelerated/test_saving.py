"""A15-A17: the best model, averages, checkpoints; states that a training resumes, also those that accelerate wrote."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cadenza.compat.accelerated import callbacks
from cadenza.compat.accelerated.callbacks import SaveBestModelCallback, SaveTrainingStateCallback, TrainerCallback
from cadenza.compat.accelerated.schedulers import CosineLrScheduler, WSDLrScheduler
from cadenza.compat.accelerated.tracking import LossTracker, loss_of_rank
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, CheckpointMismatchError, StateError
from tests.compat.accelerated import parts
from tests.compat.accelerated.parts import Dropping, Hooks, Noting, Rates, data, metrics_of, names, run_of, train, trainer_of

EXPONENTIAL = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


def weight_of(trainer: Trainer) -> nn.Parameter:
    return next(trainer.get_model().parameters())


def set_weight(trainer: Trainer, value: float) -> None:
    nn.init.constant_(weight_of(trainer), value)


def results(*values: float) -> TrainerCallback:
    """Return a callback that reports one result per epoch, and sets the weight to the number of the epoch."""

    def report(trainer: Trainer, **kwargs: Any) -> None:
        epoch = trainer.run_history.current_epoch
        trainer.run_history.update_metric("result", values[epoch - 1])
        set_weight(trainer, epoch)

    return Hooks(on_eval_epoch_end=report)


class Saving(Trainer):
    """Records the epochs in which a checkpoint was saved."""

    saved: tuple[int, ...] = ()

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self.saved = (*self.saved, self.run_history.current_epoch)
        super().save_checkpoint(*arguments, **keywords)


def test_a15_the_model_is_saved_when_a_metric_improves_and_loaded_at_the_end_if_this_run_saved_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "best.pt"
    save = SaveBestModelCallback(path, watch_metric="result")
    trainer: Any = train(trainer_of(Saving, [results(3, 1, 2, 1), save], lr=0.0), 4, data(1), data(1))
    assert trainer.saved == (1, 2)
    assert weight_of(trainer).item() == 2
    saved = torch.load(path, weights_only=True)
    assert set(saved) == {"model_state_dict", "optimizer_state_dict", "result", "loss"}
    assert (saved["result"], saved["loss"]) == (1.0, 1.0)
    assert (save.best_metric, save.best_metric_epoch) == (1.0, 2)
    save = SaveBestModelCallback(path, watch_metric="result", save_optimizer=False, save_scheduler=False)
    train(trainer_of(callbacks=[results(1, 2, 3), save]), 3, data(1), data(1), create_scheduler_fn=EXPONENTIAL)
    assert set(torch.load(path, weights_only=True)) == {"model_state_dict", "result", "loss"}  # the first epoch is the best

    def stop(trainer: Trainer, **kwargs: Any) -> None:
        raise callbacks.StopTrainingError("at once")

    (tmp_path / "best.pt").write_text("of an earlier run")
    save = SaveBestModelCallback(tmp_path / "best.pt")
    train(trainer_of(callbacks=[save, Hooks(on_train_epoch_start=stop)]), 1, data(1), data(1))


@pytest.mark.parametrize(("reset", "best"), [(False, 4.0), (True, 8.0)])
def test_a16_a_training_resets_the_best_value_unless_reset_on_train_is_false(reset: bool, best: float, tmp_path: Path) -> None:
    class ByEpoch(parts.Scripted):
        """One sample with another loss in each epoch."""

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ones(1), torch.tensor(next(losses))

        def __len__(self) -> int:
            return 1

    losses = iter((5.0, 4.0, 9.0, 8.0))
    save = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", reset_on_train=reset)
    trainer = trainer_of(parts.ScriptedTrainer, [save])
    for _ in range(2):
        train(trainer, 2, ByEpoch(), batch_size=1)
    assert save.best_metric == best


def test_a_checkpoint_holds_optimizer_and_a_scheduler_with_a_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = train(trainer_of(), 1, data(2), create_scheduler_fn=EXPONENTIAL)
    trainer.save_checkpoint(tmp_path / "one.pt", checkpoint_kwargs={"f1": np.float64(0.5)})
    fresh = trainer_of()
    with pytest.raises(ValueError, match="holds the state of a scheduler, but the trainer has none"):
        fresh.load_checkpoint(tmp_path / "one.pt")
    assert weight_of(fresh).item() == 0.5
    assert fresh.load_checkpoint(tmp_path / "one.pt", load_scheduler=False)["f1"] == 0.5  # a plain number
    assert weight_of(fresh).item() == weight_of(trainer).item()
    assert fresh.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)

    class Steps:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            pass

        def step(self) -> None:
            pass

    train(trainer_of(), 1, data(1), create_scheduler_fn=Steps).save_checkpoint(tmp_path / "one.pt")
    assert "scheduler_state_dict" not in torch.load(tmp_path / "one.pt")
    assert "Steps has no state_dict, so its state is not saved" in capsys.readouterr().out
    states = SaveTrainingStateCallback(tmp_path / "states")
    with pytest.raises(StateError, match="Steps has no state_dict, so a training cannot resume with it"):
        train(trainer_of(callbacks=[states]), 1, data(1), create_scheduler_fn=Steps)


def doubling() -> TrainerCallback:
    """Return a callback that sets the weight to 2 and 4 at the ends of the epochs."""
    return Hooks(on_train_epoch_end=lambda trainer, **_: set_weight(trainer, 2.0 * trainer.run_history.current_epoch))


def test_a17_the_average_of_the_first_weights_is_updated_each_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Look(TrainerCallback):
        def on_training_run_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
            seen.append((weight_of(trainer).item(), next(ema.ema_model.module.parameters()).item()))

    seen: list[tuple[float, float]] = []
    ema: Any = callbacks.ModelEmaCallback(decay=0.5, evaluate_during_training=False, save_path=tmp_path / "ema.pt")
    trainer = trainer_of(callbacks=[doubling(), ema, Look], lr=0.0)
    set_weight(trainer, 0.0)
    train(trainer, 2, data(1))
    assert seen == [(2.0, 1.0), (4.0, 2.5)]
    assert torch.load(tmp_path / "ema.pt", weights_only=True)["model_state_dict"]["weight"].item() == 2.5
    assert weight_of(trainer).item() == 4.0
    assert "Nothing was saved" not in capsys.readouterr().out


def test_a17_the_evaluation_of_the_average_calls_hooks_but_no_other_callbacks(tmp_path: Path) -> None:
    inner = Noting()
    ema = callbacks.ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt", callbacks=(inner,))
    trainer, noting = parts.noting_trainer(ema)
    train(trainer, 2, data(3), data(2), create_scheduler_fn=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=1.0))
    saved = {"model_state_dict", "scheduler_state_dict", "ema_model_eval_loss_epoch", "loss"}
    assert set(torch.load(tmp_path / "ema.pt", weights_only=True)) == saved
    counts, metrics = Counter(noting.log), metrics_of(trainer)
    assert counts["on_eval_epoch_end"] == 2
    assert counts["[eval_epoch_start]"] == counts["[eval_epoch_end]"] == 4
    assert len(metrics["eval_loss_epoch"]) == len(metrics["ema_model_eval_loss_epoch"]) == 2
    steps = {"on_eval_step_start": 4, "on_eval_step_end": 4}
    assert Counter(inner.log) == {"on_eval_epoch_start": 2, **steps, "on_eval_epoch_end": 2}
    assert ema.best_metric == min(metrics["ema_model_eval_loss_epoch"])
    assert metrics["eval_loss_epoch"][-1] < metrics["ema_model_eval_loss_epoch"][-1]  # the average is behind
    trainer.evaluate(data(2), per_device_batch_size=2, dataloader_kwargs=parts.HERE)
    assert trainer.run_history.get_metric_names() == {"evaluation_loss", "ema_model_evaluation_loss"}


def test_a17_a_stop_in_the_evaluation_of_the_average_restores_the_trainer(tmp_path: Path) -> None:
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        raise callbacks.StopTrainingError("inside")

    ema = callbacks.ModelEmaCallback(decay=0.5, save_path=tmp_path / "ema.pt", callbacks=(Hooks(on_eval_step_end=stop),))
    noting = Noting()
    trainer = trainer_of(callbacks=[doubling(), ema, noting], lr=0.0)
    handler = trainer.callback_handler
    train(trainer, 2, data(1), data(2))
    assert weight_of(trainer).item() == 2.0
    assert trainer.callback_handler is handler
    assert trainer.run_history.metric_name_prefix == ""
    assert noting.log[-2:] == ["on_stop_training_error", "on_training_run_end"]


def test_a_checkpoint_of_the_original_with_a_number_of_numpy_is_loaded_and_one_with_code_is_not(tmp_path: Path) -> None:
    class Executed:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    trainer = trainer_of()
    path = tmp_path / "one.pt"
    content = {"model_state_dict": trainer.model.state_dict(), "accuracy": np.float64(0.5), "f1": np.float32(0.25)}
    torch.save(content, path)
    loaded = trainer.load_checkpoint(path)
    assert (loaded["accuracy"], loaded["f1"]) == (0.5, 0.25)
    torch.save({**content, "extra": Executed()}, path)
    with pytest.raises(CheckpointFormatError, match=r"one.pt' cannot be read without executing code in it"):
        trainer.load_checkpoint(path)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(FileNotFoundError):
        trainer.load_checkpoint(tmp_path / "nowhere.pt")
    torch.save(trainer.model.state_dict(), path)
    with pytest.raises(CheckpointFormatError, match=r"expected the key 'model_state_dict'; got \['bias', 'weight'\]"):
        trainer.load_checkpoint(path)


# -- states to resume ---------------------------------------------------------------------------------------------


def made(folder: Path, *more: TrainerCallback) -> Trainer:
    torch.manual_seed(3)
    model = Dropping()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    best = SaveBestModelCallback(folder / "best.pt", load_saved_checkpoint=False)
    ema = callbacks.ModelEmaCallback(0.5, save_path=folder / "ema.pt")
    return Trainer(model, nn.MSELoss(), optimizer, callbacks=(best, ema, callbacks.EarlyStoppingCallback(9), *more))


def run(trainer: Trainer, **more: Any) -> list[Any]:
    """Train four epochs; return the state at their end."""
    schedule = CosineLrScheduler.create_scheduler_fn(num_warmup_epochs=1)
    order = {**parts.HERE, "shuffle": True}
    arguments = {"train_dataloader_kwargs": order, "create_scheduler_fn": schedule, "gradient_accumulation_steps": 2, **more}
    train(trainer, 4, data(5, 4), data(2, 4), 4, **arguments)
    best, _, stop, *_ = trainer.callback_handler
    states = [trainer.scheduler.state_dict(), best.state_dict(), stop.state_dict()]
    return [parts.weights_of(trainer).tolist(), metrics_of(trainer), trainer.run_history.current_epoch, *states]


def test_a_resumed_training_is_bit_identical(tmp_path: Path) -> None:
    save = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1, save_every_n_steps=2)
    whole = run(made(tmp_path, save))
    assert whole[2] == 5
    for name in ("epoch_2", "step_2", "step_8", "step_14"):
        continued = made(tmp_path, SaveTrainingStateCallback(tmp_path / "others"))
        assert run(continued, resume_from=tmp_path / "states" / name) == whole, name


def test_a_finished_training_resumes_for_more_epochs_and_a_state_is_replaced_or_one_of_the_newest(tmp_path: Path) -> None:
    trainer = train(trainer_of(callbacks=[SaveTrainingStateCallback(tmp_path)]), 2, data(3))
    assert names(tmp_path) == ["final"]
    train(trainer, 3, data(3), resume_from=tmp_path / "final")
    assert len(trainer.run_history.get_metric_values("train_loss_epoch")) == 3
    train(trainer_of(callbacks=[SaveTrainingStateCallback(tmp_path)]), 1, data(2))
    assert trainer_of().load_training_state(tmp_path / "final") == {"current_epoch": 2, "global_step": 2}
    newest = tmp_path / "newest"
    save = SaveTrainingStateCallback(newest, save_every_n_epochs=1, save_every_n_steps=3, max_checkpoints=2)
    train(trainer_of(callbacks=[save]), 3, data(3))
    assert names(newest) == ["epoch_3", "final"]


def test_a_state_of_a_step_has_the_weights_after_its_update(tmp_path: Path) -> None:
    def stop(trainer: Trainer, **kwargs: Any) -> None:
        if (tmp_path / "states").exists():
            raise callbacks.StopTrainingError("there is one")

    save = SaveTrainingStateCallback(tmp_path / "states", save_every_n_steps=1, save_at_end=False)
    trainer = train(trainer_of(callbacks=[save, Hooks(on_train_step_start=stop)]), 1, data(3))
    fresh = trainer_of()
    assert fresh.load_training_state(tmp_path / "states" / "step_1") == {"current_epoch": 1, "global_step": 1}
    assert weight_of(fresh).item() == weight_of(trainer).item() != weight_of(trainer_of()).item()


def test_checkpoint_kwargs_are_returned_and_a_folder_without_a_state_is_an_error(tmp_path: Path) -> None:
    def save(trainer: Trainer, **kwargs: Any) -> None:
        trainer.save_training_state(tmp_path / "mine", checkpoint_kwargs={"note": "the last"})

    trainer = trainer_of(callbacks=[Hooks(on_training_run_end=save)])
    with pytest.raises(RuntimeError, match="save_training_state needs a training in progress"):
        save(trainer)
    train(trainer, 1, data(1), create_scheduler_fn=partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 2]))
    assert trainer.load_training_state(tmp_path / "mine") == {"current_epoch": 2, "note": "the last"}
    with pytest.raises(FileNotFoundError, match=r"nowhere.*save_training_state"):
        train(trainer, 1, data(1), resume_from=tmp_path / "nowhere")


def test_a_resumed_training_knows_the_best_value_and_the_count_of_batches_also_of_an_earlier_cadenza(tmp_path: Path) -> None:
    def best(**more: Any) -> tuple[float | None, int | None]:
        save = SaveBestModelCallback(tmp_path / "best.pt", "train_loss_epoch", load_saved_checkpoint=False)
        states = SaveTrainingStateCallback(tmp_path / "states", save_every_n_epochs=1)
        train(trainer_of(callbacks=[save, states], lr=1.2), 3, data(3), **more)  # so fast that the loss grows
        return save.best_metric, save.best_metric_epoch

    whole = best()
    assert best(resume_from=tmp_path / "states" / "epoch_1") == whole
    assert whole[1] == 1

    class Earlier(SaveTrainingStateCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"saved": super().state_dict()["saved"]}

    train(trainer_of(callbacks=[Earlier(tmp_path / "states", save_every_n_steps=2)]), 1, data(3))
    save = SaveTrainingStateCallback(tmp_path / "then", save_every_n_steps=2)
    save.name = "Earlier"
    train(trainer_of(callbacks=[save]), 2, data(3), resume_from=tmp_path / "states" / "final")
    assert names(tmp_path / "then") == ["final", "step_4", "step_6"]


def test_on_another_number_of_processes_the_first_one_gets_the_losses_of_all() -> None:
    states = [{"last": loss, "total": 3 * loss, "count": 3} for loss in (1.0, 2.0)]
    one, other = LossTracker(), LossTracker()
    one.load_state_dict(loss_of_rank(states, 0, 1))
    other.load_state_dict(loss_of_rank(states, 1, 3))
    assert (one.total_loss, one.running_count, other.total_loss, other.running_count) == (9.0, 6, 0.0, 0)
    assert loss_of_rank(states, 1, 2) is states[1]


# -- states that accelerate wrote --------------------------------------------------------------------------

COSINE = CosineLrScheduler.create_scheduler_fn()
ADAM: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=0.01)
SGD: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def write(folder: Path, model: dict[str, Tensor], optimizer: Any, scheduler: Any = None, **metadata: Any) -> None:
    """Write the files of ``accelerate``, as one process does for pytorch-accelerated."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    for index in range(2 if scheduler is not None else 0):  # from the second state on the scheduler is in several files
        torch.save(scheduler.state_dict(), folder / f"custom_checkpoint_{index}.pkl")
    states = {"step": 0, "random_state": random.getstate(), "numpy_random_seed": np.random.get_state()}
    torch.save({**states, "torch_manual_seed": torch.get_rng_state()}, folder / "random_states_0.pkl")
    torch.save(metadata, folder / "trainer_metadata.pt")


class Write(TrainerCallback):
    """Writes a folder of the original at the end of each epoch, and after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def save(self, trainer: Trainer, name: str) -> None:
        metadata = {"current_epoch": trainer.run_history.current_epoch, "global_step": self.count}
        write(self.folder / name, trainer.get_model().state_dict(), trainer.optimizer, trainer.scheduler, **metadata)

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.count += 1
        self.save(trainer, f"step_{self.count}")

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.save(trainer, f"epoch_{trainer.run_history.current_epoch}")

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self.save(trainer, "final")


def trained(epochs: int, *callbacks: TrainerCallback, optimizer: Any = ADAM, create: Any = COSINE, **more: Any) -> Trainer:
    model: nn.Module = more.pop("model", None) or Dropping()
    trainer = Trainer(model, nn.MSELoss(), optimizer(model.parameters()), callbacks=callbacks)
    return train(trainer, epochs, data(5), data(2), create_scheduler_fn=create, **more)


def weights(trainer: Trainer) -> list[float]:
    values: list[float] = parts.weights_of(trainer).tolist()
    return values


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with states of a training of three epochs."""
    folder = tmp_path_factory.mktemp("states")
    torch.manual_seed(0)
    trained(3, Write(folder))
    return folder


@pytest.fixture
def state(states: Path, tmp_path: Path) -> Path:
    """A copy of the state after the first epoch."""
    return Path(shutil.copytree(states / "epoch_1", tmp_path / "state"))


@pytest.mark.parametrize("optimizer", [ADAM, SGD])
@pytest.mark.parametrize("create", [COSINE, None])
def test_a_state_of_an_epoch_continues_with_the_next_to_the_same_weights(optimizer: Any, create: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rates = Rates()
    whole = trained(3, Write(tmp_path), rates, optimizer=optimizer, create=create)
    for name, batches in (("epoch_1", 10), ("epoch_2", 5)):
        rest, noting = Rates(), Noting()
        continued = trained(3, rest, noting, optimizer=optimizer, create=create, resume_from=tmp_path / name)
        assert weights(continued) == weights(whole)
        assert len(rest.seen) == batches
        assert rest.seen == rates.seen[-batches:]
        assert continued.run_history.current_epoch == 4
        assert noting.log.count("on_eval_epoch_end") == batches // 5
        assert (run_of(continued).progress.epoch, run_of(continued).progress.step) == (3, 15)


@pytest.mark.parametrize(("name", "batches"), [("step_6", 10), ("step_8", 10), ("step_10", 10), ("final", 0), ("step_1", 15)])
def test_a_state_from_inside_an_epoch_repeats_it_and_a_final_one_is_over(name: str, batches: int, states: Path) -> None:
    rates = Rates()
    trainer = trained(3, rates, resume_from=states / name)
    assert len(rates.seen) == batches
    assert trainer.run_history.current_epoch == 4


@pytest.mark.parametrize("form", ["sharded", "torch", "sharded torch", "of DDP", "compiled"])
def test_all_forms_of_the_weights_are_read(form: str, state: Path) -> None:
    expected = weights(trained(3, resume_from=state))
    whole = state / "model.safetensors"
    model = load_file(whole)
    whole.unlink()
    prefix = {"of DDP": "module.", "compiled": "module._orig_mod."}.get(form, "")
    model = {prefix + name: weight for name, weight in model.items()}
    save: Any = torch.save if "torch" in form else save_file
    stem = "pytorch_model{}.bin" if "torch" in form else "model{}.safetensors"
    if "sharded" in form:
        parts = [dict(list(model.items())[:3]), dict(list(model.items())[3:])]
        shards = {stem.format(f"-{index + 1:05}-of-00002"): part for index, part in enumerate(parts)}
        for file, part in shards.items():
            save(part, state / file)
        index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
        (state / (stem.format("") + ".index.json")).write_text(json.dumps(index))
    else:
        save(model, state / stem.format(""))
    assert weights(trained(3, resume_from=state)) == expected


def test_tied_weights_are_in_the_file_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(1, 1), nn.Linear(1, 1)
            self.last.weight = self.first.weight

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.last(self.first(inputs))
            return outputs

    model = Tied()
    saved = {"first.weight": torch.full((1, 1), 3.0), "first.bias": torch.ones(1), "last.bias": torch.ones(1)}
    write(tmp_path / "state", saved, ADAM(model.parameters()), current_epoch=1)
    trainer = Trainer(model, nn.MSELoss(), ADAM(model.parameters()), callbacks=())
    assert trainer.load_training_state(tmp_path / "state") == {"current_epoch": 1}
    assert model.last.weight is model.first.weight
    assert model.last.weight.item() == 3.0


class Executed:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "name", ["optimizer.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl", "trainer_metadata.pt", "scaler.pt"]
)
def test_a_file_with_code_is_an_error_before_anything_runs(name: str, state: Path) -> None:
    class Fails(Trainer):
        def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
            raise AssertionError("the folder is read before")

    torch.save({"state": Executed(state / "executed")}, state / name)
    model = Dropping()
    trainer = Fails(model, nn.MSELoss(), ADAM(model.parameters()), callbacks=())
    with pytest.raises(CheckpointFormatError, match=rf"{name}' cannot be read without executing code.*holds .*pathlib"):
        trainer.train(data(5), 3, resume_from=state)
    assert not (state / "executed").exists()


def test_files_of_old_and_other_formats_are_read_or_an_error_without_executing_code(state: Path) -> None:
    expected = weights(trained(3, resume_from=state))
    optimizer, code = state / "optimizer.bin", {"state": Executed(state / "executed")}
    original = optimizer.read_bytes()
    torch.save(torch.load(optimizer), optimizer, _use_new_zipfile_serialization=False)
    assert weights(trained(3, resume_from=state)) == expected
    torch.save(code, optimizer, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointFormatError, match=r"optimizer.bin' cannot be read without.*getattr"):
        trained(3, resume_from=state)
    optimizer.write_bytes(original)
    for protocol in (2, 5):
        (state / "random_states_0.pkl").write_bytes(pickle.dumps(code, protocol))
        with pytest.raises(
            CheckpointFormatError, match=r"random_states_0.pkl'.*a pickle that torch.save did not.*convert it: load"
        ):
            trained(3, resume_from=state)
    assert not (state / "executed").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
def test_a_damaged_file_is_named(name: str, state: Path) -> None:
    (state / name).write_bytes((state / name).read_bytes()[:100])
    with pytest.raises(CheckpointDamagedError, match=name):
        trained(3, resume_from=state)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ('{"weight_map": {"weight": "../other.safetensors"}}', CheckpointFormatError, "files outside of its folder"),
        ("[]", CheckpointDamagedError, "not an index of weights"),
    ],
)
def test_an_index_cannot_name_files_elsewhere(index: str, error: type[Exception], message: str, state: Path) -> None:
    (state / "model.safetensors").unlink()
    (state / "model.safetensors.index.json").write_text(index)
    with pytest.raises(error, match=message):
        trained(3, resume_from=state)


STEPS = partial(torch.optim.lr_scheduler.StepLR, step_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"create": None}, "holds the state of a scheduler, but the trainer has none"),
        ({"create": STEPS}, r"no state of a StepLR: expected the keys \['_get_lr"),
        ({"model": nn.Linear(1, 1)}, r"another model.*weight: saved nothing, now \(1, 1\)"),
    ],
)
def test_a_state_of_other_parts_is_an_error(options: Any, message: str, states: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=message):
        trained(3, resume_from=states / "epoch_1", **options)


def test_a_folder_without_readable_weights_or_with_several_models_is_an_error(state: Path, tmp_path: Path) -> None:
    (state / "optimizer_1.bin").touch()
    with pytest.raises(CheckpointFormatError, match=r"several models or optimizers.*optimizer_1.bin"):
        trained(3, resume_from=state)
    (state / "optimizer_1.bin").unlink()
    (state / "model.safetensors").rename(state / "pytorch_model_fsdp.bin")
    with pytest.raises(CheckpointFormatError, match=r"no weights that can be read.*got \['pytorch_model_fsdp.bin'\]"):
        trained(3, resume_from=state)
    with pytest.raises(FileNotFoundError, match="holds no training state"):
        trained(3, resume_from=tmp_path)


def test_a_wsd_training_of_the_original_resumes_inside_its_decay_or_begins_another_training(tmp_path: Path) -> None:
    class Original(WSDLrScheduler):
        """Leaves out its counter, like the original."""

        def state_dict(self) -> dict[str, Any]:
            return {name: value for name, value in super().state_dict().items() if name != "num_updates"}

    whole, rest, then = Rates(), Rates(), Rates()
    settings: dict[str, Any] = {"decay_phase_ratio": 0.5}
    trained(4, Write(tmp_path), whole, optimizer=SGD, create=Original.create_scheduler_fn(**settings))
    metadata = {"current_epoch": 3, "step": 10, "checkpoint_type": "wsd_pre_decay"}
    torch.save(metadata, tmp_path / "epoch_2" / "trainer_metadata.pt")
    trained(4, rest, optimizer=SGD, create=WSDLrScheduler.create_scheduler_fn(**settings), resume_from=tmp_path / "epoch_2")
    assert rest.seen == whole.seen[10:]
    save = callbacks.WSDCheckpointCallback(tmp_path / "then", initial_checkpoint=tmp_path / "epoch_2")
    again = WSDLrScheduler.create_scheduler_fn(is_continuation_from_checkpoint=True)
    trainer = trained(2, then, save, optimizer=SGD, create=again)
    assert then.seen[:6] == [0.01] * 6
    assert trainer.scheduler.get_checkpoint_steps() == [10]
    assert trainer.run_history.current_epoch == 3


def test_the_count_of_steps_and_the_scale_of_fp16_are_restored(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    def look(trainer: Trainer, **kwargs: Any) -> None:
        seen.append(session_of(run_of(trainer)).precision.state_dict()["scale"])

    trained(2, SaveTrainingStateCallback(state / "counted", save_every_n_steps=4), resume_from=state)
    assert names(state / "counted") == ["final", "step_8"]
    seen: list[float] = []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    torch.save({**torch.amp.GradScaler("cpu").state_dict(), "scale": 64.0}, state / "scaler.pt")
    trained(1, Hooks(on_training_run_start=look), resume_from=state)
    assert seen == [64.0]


@pytest.mark.parametrize("counted", ["scheduler", "optimizer"])
def test_the_updates_of_an_earlier_training_do_not_count(counted: str, tmp_path: Path) -> None:
    model = Dropping()
    optimizer = ADAM(model.parameters())
    scheduler = CosineLrScheduler(optimizer, 9, 5) if counted == "scheduler" else None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(7):  # a training before, with the same optimizer and scheduler; then two steps
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    write(tmp_path, model.state_dict(), optimizer, scheduler, current_epoch=1, global_step=2)
    rates = Rates()
    trained(2, rates, create=COSINE if scheduler is not None else None, resume_from=tmp_path)
    assert len(rates.seen) == 10  # the first epoch was not complete


def test_a_file_that_one_of_two_processes_cannot_read_is_an_error_on_both(state: Path) -> None:
    torch.save({"state": Executed(state / "executed")}, state / "random_states_1.pkl")

    def both() -> str:
        with pytest.raises(CheckpointError) as caught:
            trained(1, resume_from=state)
        return str(caught.value)

    first, second = parts.on_two(both)
    assert first.startswith("rank 1 cannot read")
    assert "random_states_1.pkl' cannot be read without executing code" in second
