"""What callbacks of other systems keep: attributes of all types, and what those of seven systems in one run continue with."""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, ClipGradients, EarlyStopping, Ema, Evaluate
from cadenza.compat import accelerated, fastnlp
from cadenza.compat.accelerated.callbacks import TrainerCallback
from cadenza.compat.adapter.attributes import plain_attributes
from cadenza.compat.adapter.packing import packed, unpacked
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo.core.callbacks import NeMoCallback
from cadenza.compat.nemo10.core import ActionCallback
from cadenza.errors import StateError
from cadenza.hooks.dispatch import hooks_of
from cadenza.status.encoding import decode, encode, first_difference
from cadenza.testing import launch, prove_resume, tiny_loader, tiny_trainer
from cadenza.testing.proof import CLOCKS, results_of, without_clocks
from tests.long import seeds

lightning: Any = pytest.importorskip("lightning", reason="callbacks are those of Lightning: pip install lightning")
transformers: Any = pytest.importorskip("transformers", reason="and of transformers: pip install transformers")
keras: Any = pytest.importorskip("keras", reason="and of Keras: pip install keras")

# -- values ------------------------------------------------------------------------------------------------


class Phase(Enum):
    WARM = "warm"
    COLD = "cold"


class Level(IntEnum):
    LOW = 1


Point = namedtuple("Point", "x y")


@dataclass
class Stats:
    count: int = 0
    values: list[float] = field(default_factory=list)


class Holder:
    """Anything with attributes."""


def through_a_checkpoint(value: Any) -> Any:
    plain, tensors = encode(packed(value))
    return decode(json.loads(json.dumps(plain)), tensors)


def described(value: Any) -> Any:
    """Return a value as text with all types in it, so that equal texts are equal values."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {value.tolist()}"
    if isinstance(value, dict):
        text = [(described(key), described(one)) for key, one in value.items()]
        return f"{type(value).__name__} {getattr(value, 'default_factory', '')} {text}"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(map(described, value))}"
    if isinstance(value, list | tuple | deque):
        return f"{type(value).__name__} {getattr(value, 'maxlen', '')} {[described(one) for one in value]}"
    if isinstance(value, Stats):
        return f"Stats {value.count} {described(value.values)}"
    return f"{type(value).__name__} {value!r}"


def hashable(rng: random.Random) -> Any:
    return rng.choice([1, "a", "a set", "$tuple", 2.5, True, None, b"x", (1, "b"), Phase.COLD, np.int64(3), frozenset({1, 2})])


def leaf(rng: random.Random) -> Any:
    makers: list[Callable[[], Any]] = [
        lambda: hashable(rng),
        lambda: rng.choice([float("inf"), -0.0, 10**40, 1j, Path("a/b"), Level.LOW, Phase.WARM, torch.float16, Point(1, "y")]),
        lambda: np.random.default_rng(rng.randrange(9)).normal(size=rng.choice([(), (0,), (2, 3)])).astype(rng.choice("fde")),
        lambda: np.asfortranarray(np.arange(6).reshape(2, 3))[::-1],
        lambda: np.array(["a", "bcd"]),
        lambda: np.array(["2026-01-01", "NaT"], dtype="M8[D]"),
        lambda: rng.choice([np.float32(0.1), np.float64(0.1), np.bool_(True), np.uint8(3)]),
        lambda: torch.arange(3, dtype=rng.choice([torch.int8, torch.bfloat16, torch.float64])),
        lambda: torch.Size([2, 3]),
        lambda: rng.choice([torch.device("cpu"), np.dtype("float32")]),
        lambda: Stats(rng.randrange(9), [0.5]),
    ]
    return rng.choice(makers)()


def tree(rng: random.Random, depth: int = 3) -> Any:
    if depth == 0 or rng.random() < 0.3:
        return leaf(rng)
    parts = [tree(rng, depth - 1) for _ in range(rng.randrange(4))]
    keys = [rng.choice(["a set", "$tuple", 1, "k", (1, 2), None]) for _ in parts]
    counted = defaultdict(list, {key: [part] for key, part in zip(keys, parts, strict=True)})
    return rng.choice(
        [
            parts,
            tuple(parts),
            dict(zip(keys, parts, strict=True)),
            OrderedDict(zip(map(str, keys), parts, strict=True)),
            deque(parts, maxlen=rng.choice([None, 5])),
            counted,
            Counter({hashable(rng): 2}),
            {hashable(rng) for _ in parts},
            Stats(1, parts),
        ]
    )


@pytest.mark.parametrize("seed", seeds(usual=60, long=300))
def test_a_value_comes_back_as_it_was(seed: int) -> None:
    value = tree(random.Random(seed))
    before = described(value)
    back = unpacked(through_a_checkpoint(value))
    assert described(back) == before
    assert described(unpacked(packed(value))) == before == described(value)


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: random.Random(1), lambda one: one.random()),
        (lambda: np.random.default_rng(1), lambda one: one.normal()),
        (lambda: np.random.Generator(np.random.MT19937(1)), lambda one: one.normal()),
        (lambda: np.random.RandomState(1), lambda one: one.normal()),
        (lambda: torch.Generator().manual_seed(1), lambda one: torch.rand(1, generator=one).item()),
    ],
)
def test_a_random_generator_goes_on_in_place(make: Callable[[], Any], draw: Callable[[Any], float]) -> None:
    one, new = make(), make()
    draw(one)
    state = through_a_checkpoint(one)
    following = [draw(one), draw(one)]
    assert unpacked(state, new) is new
    assert [draw(new), draw(new)] == following
    assert draw(unpacked(state)) == following[0]


def test_the_copy_shares_no_memory() -> None:
    tensor, array, inner = torch.zeros(2), np.zeros(2), [0]
    copy = unpacked(packed([tensor, array, inner, (inner,)]))
    tensor += 1
    array += 1
    inner.append(1)
    assert described(copy) == described([torch.zeros(2), np.zeros(2), [0], ([0],)])


def nested() -> list[Any]:
    holds_itself: list[Any] = []
    holds_itself.append(holds_itself)
    return holds_itself


class Unwilling:
    """An object of which each attribute is an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pytest asks for these
            raise AttributeError(name)
        raise ValueError(name)


@pytest.mark.parametrize(
    "value",
    [
        Lock(), lambda: 1, nn.Linear(1, 1), nested(), object(), Unwilling(), [Unwilling()], {"a": Lock()}, np.array([None]),
        type, json,
        torch.ones(2, 2).to_sparse(), {frozenset({object()}): 1}, defaultdict(list, {"a": [Lock()]}), range(3), iter([1]),
    ],
)  # fmt: skip
def test_what_cannot_be_saved_is_left_out(value: Any) -> None:
    kept = Holder()
    vars(kept).update(value=value, count=3)
    assert plain_attributes(kept) == {"count": 3}


def test_a_class_that_is_gone_is_named() -> None:
    with pytest.raises(StateError, match=r"an object of the class gone:Phase, which is not there. Import its module"):
        unpacked({"an enumeration": ("gone:Phase", "WARM")})
    with pytest.raises(StateError, match=r"the class builtins:dict, which is not there"):
        unpacked({"an enumeration": ("builtins:dict", "WARM")})


# -- runs --------------------------------------------------------------------------------------------------


class Kept:
    """Attributes as third-party callbacks have them."""

    def prepare(self) -> None:
        self.draws, self.noise = random.Random(3), np.random.default_rng(3)
        self.stats = Stats()
        self.window: deque[float] = deque(maxlen=3)
        self.by_kind: defaultdict[str, list[int]] = defaultdict(list)
        self.mean, self.scale = np.zeros(2), np.float32(1)
        self.best = torch.tensor(float("inf"))
        self.loss: Any = None
        self.score: Any = lambda value: value * 2
        self.lock, self.network, self.itself = Lock(), None, self

    def act(self, model: Any) -> None:
        with self.lock:
            self.network = model
            drawn = self.draws.random() + float(self.noise.normal())
            self.stats.count += 1
            self.stats.values.append(self.score(drawn))
            self.window.append(drawn)
            self.by_kind["even" if self.stats.count % 2 else "odd"].append(self.stats.count)
            self.mean += np.array([drawn, 1.0])
            self.scale *= np.float32(0.9)
            self.loss = sum(one.sum() for one in model.parameters())  # with its graph
            self.best = torch.minimum(self.best, self.loss.detach())

    def result(self) -> list[str]:
        seen = (self.stats, self.window, self.by_kind, self.mean, self.scale, self.best, float(self.loss.detach()))
        return [repr(one) for one in seen]


class KeepsHandles:
    """Has a list of objects that cannot be saved."""

    def prepare(self) -> None:
        self.handles: list[Any] = []

    def act(self, model: Any) -> None:
        self.handles.append(Lock())


def of_lightning(base: type[Any]) -> Any:
    def on_train_batch_end(self: Any, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.trainer = trainer
        self.act(pl_module)

    return type("OfLightning", (lightning.Callback, base), {"on_train_batch_end": on_train_batch_end})()


def of_transformers(base: type[Any]) -> Any:
    def on_step_end(self: Any, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.args = args
        self.act(keywords["model"])

    return type("OfTransformers", (transformers.TrainerCallback, base), {"on_step_end": on_step_end})()


def of_keras(base: type[Any]) -> Any:
    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        self.act(self.model)

    return type("OfKeras", (keras.callbacks.Callback, base), {"on_train_batch_end": on_train_batch_end})()


SYSTEMS = [of_lightning, of_transformers, of_keras]


def trained(callback: Any, directory: Path, *, epochs: int, resume: Any = False) -> list[Any]:
    callback.prepare()
    trainer = tiny_trainer(callbacks=[callback, Checkpoint("1 epoch")], directory=directory, epochs=epochs, seed=1)
    trainer.fit(resume=resume)
    return list(callback.result())


@pytest.mark.parametrize("of", SYSTEMS)
def test_a_resumed_run_ends_as_one_that_was_not_cut(of: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = trained(of(Kept), tmp_path / "whole", epochs=2)
        trained(of(Kept), tmp_path / "cut", epochs=1)
        assert trained(of(Kept), tmp_path / "cut", epochs=2, resume="auto") == whole


@pytest.mark.parametrize("of", SYSTEMS)
def test_a_list_that_cannot_be_saved_is_named_once(of: Any, tmp_path: Path) -> None:
    callback = of(KeepsHandles)
    callback.prepare()
    with pytest.warns(UserWarning, match="leave out") as told:
        tiny_trainer(callbacks=[callback, Checkpoint("1 step")], directory=tmp_path).fit()
    name = f"{type(callback).__name__}.handles"
    assert [str(one.message) for one in told] == [
        f"checkpoints leave out {name}, which changed in the run: it holds objects that cannot be saved. "
        "After a resume the attribute is that of a new instance."
    ]


# -- callbacks of all seven systems in one run -------------------------------------------------------------

NAMES = ("OfNemo10", "OfNemo", "OfFastnlp", "OfAccelerated", "OfTransformers", "OfLightning", "OfKeras")
IGNORED = (*CLOCKS, "time_elapsed")  # of Lightning's Timer


class Seen:
    """Notes events with the numbers that they see; the notes of a run that continues go on after those of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[float]]] = []

    def note(self, event: str, *numbers: Any) -> None:
        self.seen.append((event, [float(torch.as_tensor(number).detach()) for number in numbers]))


class WithState(Seen):
    """Has the methods of native callbacks for its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.seen = list(state["seen"])


class OfNemo10(WithState, ActionCallback):
    def on_iteration_end(self) -> None:
        self.note("iteration", self.step)

    def on_epoch_end(self) -> None:
        self.note("epoch", self.epoch_num)


class OfNemo(WithState, NeMoCallback):
    def on_step_end(self, state: State) -> None:
        self.note("step", state["step"], state["tensors"].get_tensor("loss"))

    def on_epoch_end(self, state: State) -> None:
        self.note("epoch", state["epoch"])


class OfFastnlp(Seen, fastnlp.Callback):
    def on_train_batch_end(self, trainer: Any) -> None:
        self.note("batch", trainer.global_forward_batches)

    def on_evaluate_end(self, trainer: Any, results: dict[str, Any]) -> None:
        self.note("evaluate", *results.values())

    def on_save_checkpoint(self, trainer: Any) -> dict[str, Any]:
        return {"seen": self.seen}

    def on_load_checkpoint(self, trainer: Any, states: dict[str, Any] | None) -> None:
        assert states is not None
        self.seen = states["seen"]


class OfAccelerated(WithState, TrainerCallback):
    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.note("train epoch", trainer.run_history.get_latest_metric("train_loss_epoch"))

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.note("epoch", trainer.run_history.current_epoch)


class OfTransformers(Seen, transformers.TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note("step", state.global_step, state.epoch)
        control.should_log = state.global_step % 4 == 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        names = ("loss", "train_loss", "grad_norm", "learning_rate", "eval_loss")
        self.note("log", *(logs[name] for name in names if name in logs))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.note("evaluate", *(value for name, value in metrics.items() if name.endswith("_loss")))


class OfLightning(Seen, lightning.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("batch", trainer.global_step, batch_idx, outputs["loss"], pl_module.weight.sum())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = dict(sorted(trainer.callback_metrics.items()))
        self.note(f"validation {' '.join(metrics)}", *metrics.values(), trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.note("epoch", trainer.current_epoch)


class OfKeras(Seen, keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("batch", batch, logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note("epoch", epoch, logs["loss"], logs.get("val_loss", -1.0), float(self.model.optimizer.learning_rate))


def make(directory: Path, **arguments: Any) -> Trainer:
    """Return a trainer with callbacks of all systems, those that the other systems bring along among them."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    callbacks = [
        OfTransformers(),
        OfNemo10(),
        Ema(0.9),
        OfLightning(),
        Evaluate(tiny_loader(4)),
        Evaluate(tiny_loader(3), every="4 steps", name="often"),
        lightning.pytorch.callbacks.EarlyStopping("val_loss", patience=20),
        OfKeras(),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0),
        keras.callbacks.EarlyStopping("val_loss", patience=20),
        OfFastnlp(),
        EarlyStopping("eval/loss", mode="min", patience=20),
        OfNemo(),
        ClipGradients(max_norm=1.0),
        OfAccelerated(),
        accelerated.callbacks.EarlyStoppingCallback(early_stopping_patience=20),
        transformers.PrinterCallback(),
        lightning.pytorch.callbacks.Timer(),
        Checkpoint(every="1 epoch"),
    ]
    defaults: dict[str, Any] = {"max_epochs": 3, "accumulate": 2, "seed": 7, "driver": "single", "device": "cpu"}
    return Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        tiny_loader(9),
        supervised(nn.functional.mse_loss),
        directory=directory,
        callbacks=callbacks,
        progress=False,
        **{**defaults, **arguments},
    )


def test_each_system_gets_its_events(tmp_path: Path) -> None:
    run = make(tmp_path).fit()
    assert run.outcome is not None
    assert run.outcome.kind == "finished"
    assert run.progress.step == 15
    by_name: dict[str, Any] = dict(hooks_of(run).callbacks)
    kinds = {
        name: {event.partition(" ")[0] for event, _ in getattr(by_name[name], "callback", by_name[name]).seen} for name in NAMES
    }
    assert kinds == {
        "OfNemo10": {"iteration", "epoch"},
        "OfNemo": {"step", "epoch"},
        "OfFastnlp": {"batch", "evaluate"},
        "OfAccelerated": {"train", "epoch"},
        "OfTransformers": {"step", "log", "evaluate"},
        "OfLightning": {"batch", "validation", "epoch"},
        "OfKeras": {"batch", "epoch"},
    }


def test_it_resumes_bit_for_bit_on_one_process() -> None:
    prove_resume(make, at=[1, 5, 7], ignore=IGNORED, in_process=True)


def _on_two(folder: Path, steps: list[int]) -> list[Any]:
    """Return the results of a whole run, and those of runs that were cut and continued."""

    def end() -> None:
        raise KeyboardInterrupt

    @on(Callback.on_step_end)
    def cut(run: Run) -> None:
        if run.progress.step == step:
            run.save("the run is cut here")
            run.after_step(end)

    results = []
    for step in (0, *steps):
        directory = folder / f"cut-{step}"
        if step:
            trainer = make(directory, driver="ddp", device=None)
            trainer.callbacks.append(cut)
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
        trainer = make(directory, driver="ddp", device=None)
        run = trainer.fit(resume="auto")
        found = without_clocks(results_of(trainer, run, (Checkpoint,)), IGNORED)
        del found["records"]
        if not run.is_main:  # callbacks may see the values of their rank; those of the main process are saved
            del found["states"]["callbacks"]
        results.append(found)
    return results


def test_it_resumes_bit_for_bit_on_two_processes(tmp_path: Path) -> None:
    for found in launch(lambda: _on_two(tmp_path, [1, 5])):
        whole, *others = found
        for other in others:
            assert first_difference(whole, other, "") is None
