"""One training, by transformers's own trainer and by Cadenza, and a callback that records what it sees."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from cadenza import Run, Trainer
from cadenza.callbacks import ClipGradients, Evaluate, LearningRate
from cadenza.compat.transformers.flags import FLAGS
from tests.close import Close, closely

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which the trainer of transformers needs, is not installed")

TrainerCallback: Any = transformers.TrainerCallback
EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]
Act = Callable[[Any, Any, Any], object]


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 3, generator=generator)
        self.labels = self.x.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predictions = self.linear(x)
        return {"loss": nn.functional.mse_loss(predictions, labels), "logits": predictions}


def compute(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return model(**batch)


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Records each event with the numbers that it sees; `acts` does something at events."""

    def __init__(self, **acts: Act) -> None:
        self.acts = acts
        self.seen: list[tuple[Any, ...]] = []

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return closely(self.seen)

    def see(self, name: str, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        given = keywords.get("logs") or keywords.get("metrics") or {}
        clock = ("runtime", "per_second")
        numbers = {key: value for key, value in given.items() if not any(one in key for one in clock)}
        flags = [flag for flag in FLAGS if getattr(control, flag)]
        best = None if state.best_metric is None else (state.best_metric, state.best_global_step)
        limits = (state.max_steps, state.num_train_epochs, state.logging_steps, len(state.log_history))
        present = sorted(key for key, value in keywords.items() if value is not None)
        self.seen.append((name, state.global_step, state.epoch, numbers, flags, best, limits, present))
        if name in self.acts:
            self.acts[name](args, state, control)


def _event(name: str) -> Callable[..., None]:
    def hook(self: Recorder, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.see(name, args, state, control, **keywords)

    return hook


for _name in EVENTS:
    setattr(Recorder, _name, _event(_name))


def at_home(folder: Path, *callbacks: Any, samples: int = 12, evaluation: bool = False, **arguments: Any) -> Any:
    """Train with transformers; return its trainer."""
    given = transformers.TrainingArguments(
        output_dir=str(folder / "home"),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.1,
        dataloader_pin_memory=False,
        **{"save_strategy": "no", **arguments},
    )
    trainer = transformers.Trainer(
        Net(),
        given,
        train_dataset=Samples(samples, 1),
        eval_dataset=Samples(6, 2) if evaluation else None,
        callbacks=[*callbacks],
    )
    trainer._get_train_sampler = lambda *_, **__: SequentialSampler(trainer.train_dataset)
    trainer.remove_callback(transformers.PrinterCallback)
    gc.freeze()  # before each training it collects garbage, for 0.3 s in all that was imported
    trainer.train()
    return trainer


def evaluate(every: str, name: str = "eval") -> Evaluate:
    return Evaluate(DataLoader(Samples(6, 2), batch_size=2), every, name=name)


def trainer_of(callbacks: Sequence[Any], samples: int = 12, **arguments: Any) -> Trainer:
    """Return a native trainer of the same training."""

    def linear(optimizer: Any, total: int) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: max(0.0, (total - step) / total))

    return Trainer(
        Net(),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        DataLoader(Samples(samples, 1), batch_size=2),
        compute,
        callbacks=[ClipGradients(max_norm=1.0), LearningRate(linear), *callbacks],
        device="cpu",
        progress=False,
        seed=1,
        **arguments,
    )


def here(callbacks: Sequence[Any], samples: int = 12, **arguments: Any) -> Run:
    """Train the same natively."""
    return trainer_of(callbacks, samples, **arguments).fit()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what a TensorBoard file below a folder holds, without times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not any(clock in tag for clock in ("runtime", "per_second"))]
    return {tag: [(one.step, Close(one.value)) for one in events.Scalars(tag)] for tag in tags}
