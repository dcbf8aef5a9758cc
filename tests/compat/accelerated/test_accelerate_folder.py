"""Training states that pytorch-accelerated wrote with ``accelerate``: resumed without executing anything in them."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cadenza.compat.accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback, WSDCheckpointCallback
from cadenza.compat.accelerated.schedulers import CosineLrScheduler, WSDLrScheduler
from cadenza.compat.accelerated.trainer import Trainer
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, CheckpointMismatchError
from tests.compat.accelerated.parts import Dropping, Hooks, Noting, Rates, data, names, on_two, run_of, train, weights_of

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
    values: list[float] = weights_of(trainer).tolist()
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
def test_a_state_of_an_epoch_continues_with_the_next_one_to_the_same_weights(
    optimizer: Any, create: Any, tmp_path: Path
) -> None:
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
    save = WSDCheckpointCallback(tmp_path / "then", initial_checkpoint=tmp_path / "epoch_2")
    again = WSDLrScheduler.create_scheduler_fn(is_continuation_from_checkpoint=True)
    trainer = trained(2, then, save, optimizer=SGD, create=again)
    assert then.seen[:6] == [0.01] * 6
    assert trainer.scheduler.get_checkpoint_steps() == [10]
    assert trainer.run_history.current_epoch == 3


def test_the_scale_of_fp16_is_restored(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    def look(trainer: Trainer, **kwargs: Any) -> None:
        seen.append(session_of(run_of(trainer)).precision.state_dict()["scale"])

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


def test_callbacks_that_save_states_continue_to_count(states: Path, tmp_path: Path) -> None:
    trained(2, SaveTrainingStateCallback(tmp_path, save_every_n_steps=4), resume_from=states / "epoch_1")
    assert names(tmp_path) == ["final", "step_8"]


def test_a_file_that_one_of_two_processes_cannot_read_is_an_error_on_both(state: Path) -> None:
    torch.save({"state": Executed(state / "executed")}, state / "random_states_1.pkl")

    def both() -> str:
        with pytest.raises(CheckpointError) as caught:
            trained(1, resume_from=state)
        return str(caught.value)

    first, second = on_two(both)
    assert first.startswith("rank 1 cannot read")
    assert "random_states_1.pkl' cannot be read without executing code" in second
