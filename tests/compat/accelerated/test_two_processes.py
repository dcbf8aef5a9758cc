"""A21 on two real processes, with the driver that a script gets under torchrun: evaluation, training, stops, files.

Most cases run one after the other in the same two processes; each test asserts what one of them returned there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import TensorDataset

from cadenza.compat.accelerated import callbacks
from cadenza.compat.accelerated.callbacks import StopTrainingError, TrainerCallback
from cadenza.compat.accelerated.schedulers import WSDLrScheduler
from cadenza.compat.accelerated.trainer import Trainer, TrainerPlaceholderValues
from cadenza.compat.accelerated.utils import local_process_zero_first, local_process_zero_only, world_process_zero_only
from cadenza.drivers import DdpDriver
from tests.compat.accelerated import parts
from tests.compat.accelerated.parts import HERE, Hooks, config_of, data, metrics_of, run_of, train, trainer_of, weights_of

Case = Callable[[Path], Any]

CASES: list[Case] = []


def on_both(case: Case) -> Case:
    """Let a function of a folder run on both ranks."""
    CASES.append(case)
    return case


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Any, Any]]:
    """What each case returned on rank 0 and on rank 1."""
    folders = [tmp_path_factory.mktemp(case.__name__) for case in CASES]
    zero, one = parts.on_two(lambda: [case(folder) for case, folder in zip(CASES, folders, strict=True)])
    return dict(zip(CASES, zip(zero, one, strict=True), strict=True))


Ranks = dict[Case, tuple[Any, Any]]


def numbered(count: int = 7) -> TensorDataset:
    numbers = torch.arange(1.0, count + 1).unsqueeze(1)
    return TensorDataset(numbers, numbers)


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


def evaluated() -> dict[str, Any]:
    gathering = Gathering()
    trainer = trainer_of(callbacks=(callbacks.PrintProgressCallback, gathering, callbacks.LogMetricsCallback))
    trainer.evaluate(numbered(), per_device_batch_size=2, dataloader_kwargs=HERE)
    return {
        "driver": type(trainer._accelerator.driver),
        "sizes": gathering.sizes,
        "gathered": gathering.gathered,
        "written": gathering.written,
        "loss": trainer.run_history.get_latest_metric("evaluation_loss"),
        "mae": trainer.run_history.get_latest_metric("mae"),
        "total": config_of(trainer).eval_total_batch_size,
    }


def test_a21_two_processes_evaluate_seven_samples_and_decorators_need_no_trainer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    order = tmp_path / "order"

    @local_process_zero_first
    def first() -> str:
        with order.open("a") as file:
            file.write(os.environ["RANK"])
        return order.read_text()

    def decorated_and_evaluated() -> tuple[Any, ...]:
        seen = first(), world_process_zero_only(lambda: "here")(), local_process_zero_only(lambda: "here")()
        return (*seen, dist.is_initialized(), trainer_of()._accelerator.num_processes), evaluated()

    alone = evaluated()
    capfd.readouterr()
    (of_zero, zero), (of_one, one) = parts.on_two(decorated_and_evaluated)
    shown = capfd.readouterr().out
    assert (of_zero, of_one) == (("0", "here", "here", True, 2), ("01", None, None, True, 2))
    assert zero["driver"] == one["driver"] == DdpDriver
    assert (zero["sizes"], one["sizes"]) == ([2, 2], [2, 1])
    assert zero["gathered"] == one["gathered"] == alone["gathered"] == [1, 2, 3, 4, 5, 6, 7]
    assert zero["loss"] == one["loss"] == pytest.approx(alone["loss"])
    assert zero["mae"] == one["mae"] == pytest.approx(alone["mae"])
    assert (zero["written"], one["written"]) == (["csv"], [])
    assert (zero["total"], alone["total"]) == (4, 2)
    for line in ("Starting evaluation run", "evaluation_loss: ", "Finishing evaluation run"):
        assert shown.count(line) == 1


@on_both
def gathered(folder: Path) -> Any:
    accelerator = trainer_of()._accelerator
    rank = accelerator.process_index
    values = {"rows": torch.full((rank + 1, 1), float(rank)), "pair": (torch.tensor(rank), [torch.tensor([rank])])}
    together = accelerator.gather(values)
    assert trainer_of().gather(values["rows"], padding_value=1).tolist() == [[0.0]]  # the rows of the second process
    return together["rows"].tolist(), together["pair"][0].tolist(), together["pair"][1][0].tolist()


class Normed(nn.Module):
    """Has buffers, which are broadcast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


def normed(*callbacks: Any) -> Trainer:
    model = Normed()
    return Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01), callbacks=callbacks)


@on_both
def uneven(folder: Path) -> tuple[float, int, list[float]]:
    def gather(trainer: Any, **kwargs: Any) -> None:
        rows[:] = [trainer.gather(torch.cat(rows))]

    rows: list[Tensor] = []
    late = Hooks(on_eval_step_end=lambda trainer, batch, **_: rows.append(batch[1]), on_eval_epoch_end=gather)
    trainer = train(normed(), 1, data(4), numbered(9))
    trainer.callback_handler.add_callback(late)
    trainer.evaluate(numbered(9), 2, HERE)
    loss = float(trainer.run_history.get_latest_metric("evaluation_loss"))
    return loss, len(rows), sorted(rows[0].flatten().tolist())


def test_values_of_any_length_can_be_gathered_also_at_the_end_of_an_uneven_evaluation_with_buffers(ranks: Ranks) -> None:
    zero, one = ranks[uneven]
    assert zero == one
    assert zero[1:] == (1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert ranks[gathered] == (([[0.0], [1.0], [1.0]], [0, 1], [0, 1]),) * 2


@on_both
def limited(folder: Path) -> list[int]:
    sizes = []
    for limit in (callbacks.LimitEvalStepsCallback(4, limit_intermediate_only=False), callbacks.LimitBatchesCallback(2)):
        gathering = Gathering()
        train(trainer_of(callbacks=(gathering, limit)), 1, data(4), data(8))
        sizes.append(len(gathering.sizes))
    return sizes


def test_limits_of_evaluations_count_steps_over_all_processes_or_per_process(ranks: Ranks) -> None:
    assert ranks[limited] == ([2, 2], [2, 2])


# -- trainings --------------------------------------------------------------------------------------------------------


def fitted(accumulate: int = 1, batch_size: int = 2) -> tuple[Tensor, dict[str, list[float]], int]:
    more = {"batch_size": batch_size, "gradient_accumulation_steps": accumulate}
    trainer = train(trainer_of(), 2, data(4), numbered(7), **more)
    return weights_of(trainer), metrics_of(trainer), run_of(trainer).progress.step


@on_both
def trained(folder: Path) -> list[Any]:
    return [fitted(), fitted(accumulate=2)]


def test_two_processes_train_like_one_with_two_accumulated_batches_or_one_large_batch(ranks: Ranks) -> None:
    """The training loss is the mean over the same samples under the same weights, so it is equal too."""
    (zero, accumulated), (one, also_accumulated) = ranks[trained]
    assert torch.equal(zero[0], one[0])
    assert zero[1] == one[1]
    for weights, history, steps in (fitted(accumulate=2), fitted(batch_size=4)):
        assert torch.allclose(zero[0], weights, atol=1e-6)
        assert zero[1].keys() == history.keys() == {"train_loss_epoch", "eval_loss_epoch"}
        for name, values in history.items():
            assert zero[1][name] == pytest.approx(values, rel=1e-5)
        assert zero[2] == steps == 4
    weights = fitted(batch_size=8)[0]
    for got, _, steps in (accumulated, also_accumulated):
        assert torch.allclose(got, weights, atol=1e-6)
        assert steps == 2


@on_both
def scheduled(folder: Path) -> Any:
    made: list[tuple[Any, ...]] = []

    def create(optimizer: Any, **counts: Any) -> Any:
        made.append(tuple(counts.values()))
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)

    fields = ("NUM_UPDATE_STEPS_PER_EPOCH", "PER_PROCESS_NUM_UPDATE_STEPS_PER_EPOCH", "TRAIN_DATALOADER_LEN")
    placeholders = {f"n{i}": getattr(TrainerPlaceholderValues, name) for i, name in enumerate(fields)}
    trainer = train(trainer_of(), 5, data(8), create_scheduler_fn=partial(create, **placeholders), max_num_train_steps=6)
    config = config_of(trainer)
    lengths = (config.num_epochs, config.num_local_update_steps_per_epoch, config.max_num_train_steps)
    sizes = (config.train_total_batch_size, config.num_processes, config.is_distributed)
    return *made[0], *lengths, *sizes, run_of(trainer).progress.step


def test_run_config_counts_per_process_and_every_sample_is_read_once_per_epoch_with_different_seeds(ranks: Ranks) -> None:
    assert ranks[scheduled] == ((4, 4, 4, 2, 4, 6, 4, 2, True, 6),) * 2
    for zero, one in zip(*ranks[shuffled], strict=True):
        assert Counter(zero + one) == dict.fromkeys(range(1, 12), 1)


@on_both
def shuffled(folder: Path) -> list[list[float]]:
    epochs: list[list[float]] = []
    see = Hooks(
        on_train_epoch_start=lambda trainer, **_: epochs.append([]),
        on_train_step_end=lambda trainer, batch, **_: epochs[-1].extend(batch[1].flatten().tolist()),
    )
    torch.manual_seed(int(os.environ["RANK"]))
    train(trainer_of(callbacks=[see], lr=0.001), 2, numbered(11), train_dataloader_kwargs={**HERE, "shuffle": True})
    return epochs


@on_both
def converted(folder: Path) -> tuple[str, str, bool]:
    def look(trainer: Any, **kwargs: Any) -> None:
        assert isinstance(trainer.get_model().layers[1], nn.BatchNorm1d) == (trainer._accelerator.num_processes == 1)

    trainer = normed(callbacks.ConvertSyncBatchNormCallback, Hooks(on_train_epoch_start=look))
    model: Any = trainer.model
    said = ""
    try:
        train(trainer, 1, data(4))
    except ValueError as error:
        said = str(error)
    kind = type(model.layers[1]).__name__
    assert model.eval()(torch.ones(3, 1)).shape == (3, 1)
    held = {id(one) for group in trainer.optimizer.param_groups for one in group["params"]}
    return kind, said, held == {id(one) for one in model.parameters()}


def test_sync_batch_norm_replaces_the_layers_on_two_processes_and_leaves_one_alone(ranks: Ranks, tmp_path: Path) -> None:
    """torch trains such layers on GPUs only, and says so; in evaluation mode they work on CPUs."""
    assert converted(tmp_path) == ("BatchNorm1d", "", True)
    for kind, said, same in ranks[converted]:
        assert kind == "SyncBatchNorm"
        assert "GPU" in said
        assert same


# -- stops ------------------------------------------------------------------------------------------------------------


@on_both
def ended(folder: Path) -> tuple[list[str], int]:
    trainer = trainer_of(parts.ScriptedTrainer, (callbacks.TerminateOnNaNCallback, callbacks.EarlyStoppingCallback(3)))
    seen: list[str] = []
    try:
        train(trainer, 3, parts.Scripted(1.0, 1.0, 1.0, float("nan"), 1.0, 1.0), parts.Scripted(1.0, 1.0), batch_size=1)
    except SystemExit as end:
        seen.append(str(end))
    return seen, run_of(trainer).progress.step


def test_a_stop_or_a_nan_on_one_process_ends_the_training_on_all(ranks: Ranks) -> None:
    zero, one = ranks[ended]
    assert zero == ([], 3)  # a stop that one process requests takes effect one step later
    assert one[0][0].startswith("The training was ended: ")
    assert one[1] == 3
    assert ranks[stopped] == (dict.fromkeys(EVENTS, 1),) * 2


EVENTS = ["on_train_epoch_end", "on_eval_step_start", "on_eval_step_end", "on_eval_epoch_end", "on_training_run_epoch_end"]


@on_both
def stopped(folder: Path) -> dict[str, int]:
    def stop(trainer: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == "1":
            raise StopTrainingError("enough")

    return {event: run_of(train(normed(Hooks(**{event: stop})), 3, data(4), numbered(9))).progress.epoch for event in EVENTS}


class OwnPass(Trainer):
    """A trainer with a forward and backward pass of its own."""

    def _perform_forward_and_backward_passes(self, batch: Any, step: int) -> None:
        super()._perform_forward_and_backward_passes(batch, step)


@on_both
def passed(folder: Path) -> list[Any]:
    def stop(trainer: Any, **kwargs: Any) -> None:
        if os.environ["RANK"] == "1" and trainer.run_history.current_epoch == 2:
            raise StopTrainingError("enough")  # after the forward pass of both, before the backward pass of this one

    results: list[Any] = []
    for kind in (Trainer, OwnPass):
        for accumulate in (1, 2):
            trainer = trainer_of(kind, [Hooks(on_train_step_end=stop)])
            train(trainer, 3, data(6), gradient_accumulation_steps=accumulate)
            results.append((weights_of(trainer).tolist(), run_of(trainer).progress.epoch))
    return results


def test_an_overridden_pass_trains_like_the_trainer_and_a_stop_in_it_on_one_process_stops_all(ranks: Ranks) -> None:
    zero, one = ranks[passed]
    assert zero == one
    for plain, own in zip(zero[:2], zero[2:], strict=True):
        assert own == (pytest.approx(plain[0]), plain[1])
        assert own[1] == 1


@on_both
def saved(folder: Path) -> Any:
    trainer = train(trainer_of(callbacks=(callbacks.SaveBestModelCallback(folder / "best.pt"),)), 2, data(4), data(4))
    written = torch.load(folder / "best.pt", weights_only=True)["model_state_dict"]
    return weights_of(trainer).tolist(), [value.item() for value in written.values()], parts.names(folder)


def test_all_processes_load_the_best_model_and_a_training_continues_with_the_losses_of_each(ranks: Ranks) -> None:
    zero, one = ranks[saved]
    assert zero == one
    weights, written, files = zero
    assert weights == written
    assert files == ["best.pt"]
    for whole, *others in ranks[continued]:
        assert others == [whole, whole]


@on_both
def continued(folder: Path) -> list[list[Any]]:
    """Return the results of a whole training, and of those that continue inside an epoch and after one."""

    def save(trainer: Any, step: int | None = None, **kwargs: Any) -> None:
        epoch = trainer.run_history.current_epoch
        if step is None or (epoch, step) == (2, 1):
            trainer.save_training_state(folder / (f"epoch_{epoch}" if step is None else "inside"))

    def results(*more: TrainerCallback, **resume: Any) -> list[Any]:
        order = {**HERE, "shuffle": True}
        trainer = train(trainer_of(callbacks=more), 3, data(7), data(4), train_dataloader_kwargs=order, **resume)
        return [metrics_of(trainer), weights_of(trainer).tolist()]

    whole = results(Hooks(on_train_step_end=save, on_train_epoch_end=save))
    return [whole, *(results(resume_from=folder / name) for name in ("inside", "epoch_1"))]


@on_both
def decayed(folder: Path) -> tuple[list[float], list[float], bool, list[str]]:
    def trained(name: str, *more: TrainerCallback, initial: Any = None, create: Any, **resume: Any) -> Trainer:
        save = callbacks.WSDCheckpointCallback(folder / name, initial_checkpoint=initial)
        return train(trainer_of(callbacks=[save, *more], lr=0.01), 2, data(8), create_scheduler_fn=create, **resume)

    half = WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.5)
    again = WSDLrScheduler.create_scheduler_fn(decay_phase_ratio=0.25, is_continuation_from_checkpoint=True)
    checkpoint = folder / "whole" / "checkpoint_4_wsd_pre_decay"
    rates, then = parts.Rates(), parts.Rates()
    whole = trained("whole", create=half)
    rest = trained("rest", rates, create=half, resume_from=checkpoint)
    trained("then", then, initial=checkpoint, create=again)
    return rates.seen, then.seen[:6], torch.equal(weights_of(whole), weights_of(rest)), parts.names(folder / "then")


def test_two_processes_save_once_and_resume_inside_the_decay(ranks: Ranks) -> None:
    for rates, then, equal, files in ranks[decayed]:
        assert equal
        assert rates == pytest.approx([0.01, 0.01, 0.005000005, 0.002928939])
        assert then == [0.01] * 6
        assert files == ["checkpoint_4_wsd_pre_decay", "checkpoint_8_wsd_post_decay.pt"]
