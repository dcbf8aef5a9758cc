"""A21 on two real processes, with the driver that a script gets under torchrun: evaluation, training, stops, files."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import TensorDataset

from cadenza.compat.accelerated.callbacks import (
    ConvertSyncBatchNormCallback,
    EarlyStoppingCallback,
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    LogMetricsCallback,
    PrintProgressCallback,
    SaveBestModelCallback,
    StopTrainingError,
    TerminateOnNaNCallback,
    TrainerCallback,
)
from cadenza.compat.accelerated.trainer import Trainer, TrainerPlaceholderValues
from cadenza.compat.accelerated.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only
from cadenza.drivers import DdpDriver
from cadenza.testing import launch
from tests.compat.accelerated.parts import HERE, Scripted, ScriptedTrainer, data, train, trainer_of

T = TypeVar("T")


def on_two(function: Callable[[], T]) -> list[T]:
    """Call a function in two processes without GPUs; return both results."""

    def one() -> T:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        warnings.filterwarnings("ignore", "The last batch", UserWarning)  # of an uneven evaluation
        return function()

    return launch(one)


def numbered(count: int = 7) -> TensorDataset:
    numbers = torch.arange(1.0, count + 1).unsqueeze(1)
    return TensorDataset(numbers, numbers)


def weights_of(trainer: Trainer) -> Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.get_model().parameters()])


class Gathering(TrainerCallback):
    """A metric of gathered values, as in pytorch-accelerated's guide: the mean absolute error."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gathered: list[float] = []
        self.errors: list[Tensor] = []
        self.written: list[str] = []

    def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.sizes.append(len(batch[0]))
        self.gathered += trainer.gather(batch[1], padding_value=0).flatten().tolist()
        self.errors.append(trainer.gather((batch_output["model_outputs"] - batch[1]).abs()))

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.run_history.update_metric("mae", float(torch.cat(self.errors).mean()))
        trainer._accelerator.wait_for_everyone()
        if trainer.run_config.is_world_process_zero:
            self.written.append("csv")


def test_a21_two_processes_evaluate_seven_samples(capfd: pytest.CaptureFixture[str]) -> None:
    def evaluated() -> dict[str, Any]:
        gathering = Gathering()
        trainer = trainer_of(callbacks=(PrintProgressCallback, gathering, LogMetricsCallback))
        trainer.evaluate(numbered(), per_device_batch_size=2, dataloader_kwargs=HERE)
        assert trainer.run_config is not None
        return {
            "driver": type(trainer._accelerator.driver),
            "sizes": gathering.sizes,
            "gathered": gathering.gathered,
            "written": gathering.written,
            "loss": trainer.run_history.get_latest_metric("evaluation_loss"),
            "mae": trainer.run_history.get_latest_metric("mae"),
            "total": trainer.run_config.eval_total_batch_size,
        }

    alone = evaluated()
    capfd.readouterr()
    zero, one = on_two(evaluated)
    shown = capfd.readouterr().out
    assert zero["driver"] == one["driver"] == DdpDriver
    assert (zero["sizes"], one["sizes"]) == ([2, 2], [2, 1])
    assert zero["gathered"] == one["gathered"] == alone["gathered"] == [1, 2, 3, 4, 5, 6, 7]
    assert zero["loss"] == one["loss"] == pytest.approx(alone["loss"])
    assert zero["mae"] == one["mae"] == pytest.approx(alone["mae"])
    assert (zero["written"], one["written"]) == (["csv"], [])
    assert (zero["total"], alone["total"]) == (4, 2)
    for line in ("Starting evaluation run", "evaluation_loss: ", "Finishing evaluation run"):
        assert shown.count(line) == 1


def test_process_decorators_work_before_there_is_a_trainer(tmp_path: Path) -> None:
    order = tmp_path / "order"

    @local_process_zero_first
    def first() -> str:
        with order.open("a") as file:
            file.write(os.environ["RANK"])
        return order.read_text()

    def decorated() -> tuple[Any, ...]:
        seen = first(), world_process_zero_only(lambda: "here")(), local_process_zero_only(lambda: "here")()
        return *seen, dist.is_initialized(), trainer_of()._accelerator.num_processes

    assert on_two(decorated) == [("0", "here", "here", True, 2), ("01", None, None, True, 2)]


def test_gather_takes_numbers_and_collections_of_tensors_of_any_length() -> None:
    def gathered() -> Any:
        accelerator = trainer_of()._accelerator
        rank = accelerator.process_index
        values = {"rows": torch.full((rank + 1, 1), float(rank)), "pair": (torch.tensor(rank), [torch.tensor([rank])])}
        together = accelerator.gather(values)
        assert trainer_of().gather(values["rows"], padding_value=1).tolist() == [[0.0]]  # the rows of the second process
        return together["rows"].tolist(), together["pair"][0].tolist(), together["pair"][1][0].tolist()

    assert on_two(gathered) == [([[0.0], [1.0], [1.0]], [0, 1], [0, 1])] * 2


def fitted(accumulate: int = 1, batch_size: int = 2, **more: Any) -> tuple[Tensor, dict[str, list[float]], int]:
    trainer = trainer_of(callbacks=more.pop("callbacks", ()))
    train(trainer, 2, data(4), numbered(7), batch_size=batch_size, gradient_accumulation_steps=accumulate, **more)
    history, run = trainer.run_history, trainer.native_run
    assert run is not None
    return (
        weights_of(trainer),
        {name: history.get_metric_values(name) for name in history.get_metric_names()},
        run.progress.step,
    )


def test_two_processes_train_like_one_with_two_accumulated_batches_or_one_large_batch() -> None:
    """The training loss is the mean over the same samples under the same weights, so it is equal too."""
    zero, one = on_two(fitted)
    assert torch.equal(zero[0], one[0])
    assert zero[1] == one[1]
    for weights, history, steps in (fitted(accumulate=2), fitted(batch_size=4)):
        assert torch.allclose(zero[0], weights, atol=1e-6)
        assert zero[1].keys() == history.keys() == {"train_loss_epoch", "eval_loss_epoch"}
        for name, values in history.items():
            assert zero[1][name] == pytest.approx(values, rel=1e-5)
        assert zero[2] == steps == 4


def test_two_processes_that_accumulate_train_like_one_process() -> None:
    weights = fitted(batch_size=8)[0]
    for got, _, steps in on_two(lambda: fitted(accumulate=2)):
        assert torch.allclose(got, weights, atol=1e-6)
        assert steps == 2


def test_run_config_and_placeholders_count_per_process() -> None:
    made: list[tuple[Any, ...]] = []

    def scheduled() -> Any:
        def create(optimizer: Any, **counts: Any) -> Any:
            made.append(tuple(counts.values()))
            return torch.optim.lr_scheduler.StepLR(optimizer, 1)

        names = ("NUM_UPDATE_STEPS_PER_EPOCH", "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH", "TRAIN_DATALOADER_LEN")
        placeholders = {f"n{i}": getattr(TrainerPlaceholderValues, name) for i, name in enumerate(names)}
        trainer = trainer_of()
        train(trainer, 5, data(8), create_scheduler_fn=partial(create, **placeholders), max_num_train_steps=6)
        config, run = trainer.run_config, trainer.native_run
        assert config is not None
        assert run is not None
        return (
            *made[0],
            config.num_epochs,
            config.num_local_update_steps_per_epoch,
            config.max_num_train_steps,
            config.train_total_batch_size,
            config.num_processes,
            config.is_distributed,
            run.progress.step,
        )

    assert on_two(scheduled) == [(4, 4, 4, 2, 4, 6, 4, 2, True, 6)] * 2


def test_every_sample_is_read_once_per_epoch_with_different_seeds_per_process() -> None:
    def seen() -> list[list[float]]:
        epochs: list[list[float]] = []

        class See(TrainerCallback):
            def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
                epochs.append([])

            def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
                epochs[-1] += batch[1].flatten().tolist()

        torch.manual_seed(int(os.environ["RANK"]))
        train(trainer_of(callbacks=(See(),), lr=0.001), 2, numbered(11), train_dataloader_kwargs={**HERE, "shuffle": True})
        return epochs

    zero, one = on_two(seen)
    for epoch in range(2):
        assert Counter(zero[epoch] + one[epoch]) == dict.fromkeys(range(1, 12), 1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


def test_an_uneven_evaluation_works_with_buffers() -> None:
    def evaluated() -> float:
        model = Normed()
        trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=())
        train(trainer, 1, data(4), numbered(9))
        trainer.evaluate(numbered(9), 2, HERE)
        return float(trainer.run_history.get_latest_metric("evaluation_loss"))

    zero, one = on_two(evaluated)
    assert zero == one


def test_in_an_uneven_evaluation_values_can_be_gathered_at_its_end() -> None:
    class Late(TrainerCallback):
        def __init__(self) -> None:
            self.parts: list[Tensor] = []

        def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            self.parts.append(batch[1])

        def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
            self.parts = [trainer.gather(torch.cat(self.parts))]

    def gathered() -> tuple[int, list[float]]:
        late = Late()
        trainer_of(callbacks=(late,)).evaluate(numbered(9), 2, HERE)
        return len(late.parts), sorted(late.parts[0].flatten().tolist())

    assert on_two(gathered) == [(1, [1, 2, 3, 4, 5, 6, 7, 8, 9])] * 2


def test_sync_batch_norm_replaces_the_layers_on_two_processes_and_leaves_one_alone() -> None:
    """torch trains such layers on GPUs only, and says so; in evaluation mode they work on CPUs."""

    def converted() -> tuple[str, str, bool]:
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = Trainer(model, nn.MSELoss(), optimizer, callbacks=(ConvertSyncBatchNormCallback, _Kinds))
        said = ""
        try:
            train(trainer, 1, data(4))
        except ValueError as error:
            said = str(error)
        kind = type(model.layers[1]).__name__
        assert model.eval()(torch.ones(3, 1)).shape == (3, 1)
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        return kind, said, held == {id(one) for one in model.parameters()}

    class _Kinds(TrainerCallback):
        def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
            assert isinstance(trainer.get_model().layers[1], nn.BatchNorm1d) == (trainer._accelerator.num_processes == 1)

    assert converted() == ("BatchNorm1d", "", True)
    for kind, said, same in on_two(converted):
        assert kind == "SyncBatchNorm"
        assert "GPU" in said
        assert same


def test_a_nan_on_one_process_ends_the_training_on_all() -> None:
    def ended() -> tuple[list[str], int]:
        trainer = trainer_of(ScriptedTrainer, (TerminateOnNaNCallback, EarlyStoppingCallback(3)))
        seen: list[str] = []
        try:
            train(trainer, 3, Scripted(1.0, 1.0, 1.0, float("nan"), 1.0, 1.0), Scripted(1.0, 1.0), batch_size=1)
        except SystemExit as end:
            seen.append(str(end))
        assert trainer.native_run is not None
        return seen, trainer.native_run.progress.step

    zero, one = on_two(ended)
    assert zero == ([], 3)  # a stop that one process requests takes effect one step later
    assert one[0][0].startswith("The training was ended: ")
    assert one[1] == 3


@pytest.mark.parametrize(
    "event",
    ["on_train_epoch_end", "on_eval_step_start", "on_eval_step_end", "on_eval_epoch_end", "on_training_run_epoch_end"],
)
def test_a_stop_on_one_process_stops_all(event: str) -> None:
    class Stop(TrainerCallback):
        pass

    def stop(self: TrainerCallback, trainer: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == "1":
            raise StopTrainingError("enough")

    setattr(Stop, event, stop)

    def stopped() -> int:
        model = Normed()  # buffers are broadcast
        trainer = Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=(Stop(),))
        train(trainer, 3, data(4), numbered(9))
        assert trainer.native_run is not None
        return trainer.native_run.progress.epoch

    zero, one = on_two(stopped)
    assert zero == one == 1


def test_all_processes_load_the_best_model(tmp_path: Path) -> None:
    def saved() -> Tensor:
        trainer = trainer_of(callbacks=(SaveBestModelCallback(tmp_path / "best.pt"),))
        train(trainer, 2, data(4), data(4))
        return weights_of(trainer)

    zero, one = on_two(saved)
    assert torch.equal(zero, one)
    written = torch.load(tmp_path / "best.pt", weights_only=True)["model_state_dict"]
    assert torch.equal(torch.cat([value.flatten() for value in written.values()]), zero)
    assert [path.name for path in tmp_path.iterdir()] == ["best.pt"]


@pytest.mark.parametrize("limit", [LimitEvalStepsCallback(4, limit_intermediate_only=False), LimitBatchesCallback(2)])
def test_limits_of_evaluations_count_steps_over_all_processes_or_per_process(limit: TrainerCallback) -> None:
    def steps() -> int:
        gathering = Gathering()
        train(trainer_of(callbacks=(gathering, limit)), 1, data(4), data(8))
        return len(gathering.sizes)

    assert on_two(steps) == [2, 2]


class OwnPass(Trainer):
    """A trainer with a forward and backward pass of its own."""

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        super()._perform_forward_and_backward_passes(batch, step)


def test_an_overridden_pass_trains_like_the_trainer_and_a_stop_in_it_on_one_process_stops_all() -> None:
    class Stop(TrainerCallback):
        def on_train_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
            if os.environ["RANK"] == "1" and trainer.run_history.current_epoch == 2:
                raise StopTrainingError("enough")  # after the forward pass of both, before the backward pass of this one

    def trained() -> list[Any]:
        results: list[Any] = []
        for kind in (Trainer, OwnPass):
            for accumulate in (1, 2):
                trainer = trainer_of(kind, [Stop])
                train(trainer, 3, data(6), gradient_accumulation_steps=accumulate)
                assert trainer.native_run is not None
                results.append((weights_of(trainer).tolist(), trainer.native_run.progress.epoch))
        return results

    zero, one = on_two(trained)
    assert zero == one
    for plain, own in zip(zero[:2], zero[2:], strict=True):
        assert own == (pytest.approx(plain[0]), plain[1])
        assert own[1] == 1
