"""Callbacks with attributes of all kinds continue after a resume as they were, and say what they could not keep."""

from __future__ import annotations

import random
import warnings
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch

from cadenza.callbacks import Checkpoint
from cadenza.testing import tiny_trainer

lightning = pytest.importorskip("lightning", reason="the callbacks are those of Lightning: pip install lightning")
transformers = pytest.importorskip("transformers", reason="and of transformers: pip install transformers")
keras = pytest.importorskip("keras", reason="and of Keras: pip install keras")


@dataclass
class Stats:
    """What a callback counts."""

    steps: int = 0
    values: list[float] = field(default_factory=list)


class Kept:
    """Attributes as third-party callbacks have them."""

    def prepare(self) -> None:
        self.draws = random.Random(3)
        self.noise = np.random.default_rng(3)
        self.stats = Stats()
        self.window: deque[float] = deque(maxlen=3)
        self.by_kind: defaultdict[str, list[int]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self.mean = np.zeros(2)
        self.scale = np.float32(1)
        self.best = torch.tensor(float("inf"))
        self.loss: Any = None
        self.lock = Lock()
        self.score: Any = lambda value: value * 2
        self.file = StringIO()
        self.model: Any = None
        self.itself = self

    def count(self, model: Any) -> None:
        with self.lock:
            self.model = model
            drawn = self.draws.random() + float(self.noise.normal())
            self.stats.steps += 1
            self.stats.values.append(self.score(drawn))
            self.window.append(drawn)
            self.by_kind["even" if self.stats.steps % 2 else "odd"].append(self.stats.steps)
            self.counts["step"] += 1
            self.mean += np.array([drawn, 1.0])
            self.scale *= np.float32(0.9)
            self.loss = sum(one.sum() for one in model.parameters())  # with its graph
            self.best = torch.minimum(self.best, self.loss.detach())

    def result(self) -> list[Any]:
        seen = [
            self.stats,
            self.window,
            self.by_kind,
            self.counts,
            self.mean.tolist(),
            self.scale,
            self.best,
            float(self.loss.detach()),
        ]
        return [repr(one) for one in seen]


class OfLightning(lightning.Callback, Kept):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        self.prepare()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.trainer = trainer
        self.count(pl_module)


class OfTransformers(transformers.TrainerCallback, Kept):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        self.prepare()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.args = args
        self.count(kwargs["model"])


class OfKeras(keras.callbacks.Callback):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        for name, value in vars(made()).items():
            setattr(self, f"own_{name}", value)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        own = Kept()
        vars(own).update({name.removeprefix("own_"): one for name, one in vars(self).items() if name.startswith("own_")})
        own.count(self.model)
        for name, value in vars(own).items():
            setattr(self, f"own_{name}", value)

    def result(self) -> list[Any]:
        own = Kept()
        vars(own).update({name.removeprefix("own_"): one for name, one in vars(self).items() if name.startswith("own_")})
        return own.result()


def made() -> Kept:
    kept = Kept()
    kept.prepare()
    return kept


def trained(callback: Any, directory: Path, *, epochs: int, resume: bool = False) -> list[Any]:
    trainer = tiny_trainer(callbacks=[callback, Checkpoint("1 epoch")], directory=directory, epochs=epochs, seed=1)
    trainer.fit(resume="auto" if resume else False)
    result: list[Any] = callback.result()
    return result


@pytest.mark.parametrize("kind", [OfLightning, OfTransformers, OfKeras])
def test_a_resumed_run_ends_as_one_that_was_not_cut(kind: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = trained(kind(), tmp_path / "whole", epochs=2)
        trained(kind(), tmp_path / "cut", epochs=1)
        assert trained(kind(), tmp_path / "cut", epochs=2, resume=True) == whole


class KeepsHandles(lightning.Callback):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        self.handles: list[Any] = []
        self.models: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.handles.append(Lock())


class KeepsHandlesToo(transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        self.handles: list[Any] = []

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        self.handles.append(Lock())


class KeepsHandlesAsWell(keras.callbacks.Callback):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.handles: list[Any] = []

    def on_train_batch_end(self, *_: Any, **kwargs: Any) -> None:
        self.handles.append(Lock())


@pytest.mark.parametrize("kind", [KeepsHandles, KeepsHandlesToo, KeepsHandlesAsWell])
def test_a_list_that_cannot_be_saved_is_named_once(kind: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="leave out") as told:
        tiny_trainer(callbacks=[kind(), Checkpoint("1 step")], directory=tmp_path).fit()
    assert [str(one.message) for one in told] == [
        f"checkpoints leave out {kind.__name__}.handles, which changed in the run: it holds objects that cannot be saved. "
        "After a resume the attribute is that of a new instance."
    ]


class HasOwnState(lightning.Callback):  # type: ignore[name-defined, misc]
    """Lightning pickles what ``state_dict`` and ``on_save_checkpoint`` return."""

    def __init__(self) -> None:
        self.seen: list[Any] = [np.zeros(2), {1, 2}, deque([1.0], maxlen=2), Path("a")]
        self.entry: Any = None

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen[0] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["entry"] = {"kinds": {1, 2}, "mean": np.ones(1)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.entry = checkpoint["entry"]

    def result(self) -> list[Any]:
        return list(map(repr, self.seen))


def test_a_state_of_lightning_may_hold_what_it_pickles(tmp_path: Path) -> None:
    whole = trained(HasOwnState(), tmp_path / "whole", epochs=2)
    trained(HasOwnState(), tmp_path / "cut", epochs=1)
    resumed = HasOwnState()
    assert trained(resumed, tmp_path / "cut", epochs=2, resume=True) == whole
    assert repr(resumed.entry) == repr({"kinds": {1, 2}, "mean": np.ones(1)})
