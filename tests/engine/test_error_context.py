"""An error in the user's code says where in the run it was raised, on which batch, and what the likely cure is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Evaluate
from cadenza.engine.error_context import InUse, cure_of
from cadenza.errors import DataError
from cadenza.loading import TensorBatches
from cadenza.loading.rng import RNGState
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer
from cadenza.timetravel.second_pass import locate
from tests.callbacks.breaking import Root

WRONG = 7  # the sample that is wrong


class Samples(Dataset[tuple[Tensor, int]]):
    """Twenty samples of three features and a label of four; one of them may be wrong."""

    def __init__(self, wrong: Callable[[], tuple[Tensor, int]] = lambda: (torch.ones(3), 3)) -> None:
        self.wrong = wrong

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.wrong() if index == WRONG else (torch.ones(3), index % 4)


def corrupt() -> tuple[Tensor, int]:
    raise ValueError("a corrupt file")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        return outputs


def note_of(fit: Callable[[], object]) -> list[str]:
    """Return the lines of the one note that says where an error was raised."""
    with pytest.raises(Exception) as raised:  # noqa: PT011  # each of these is another
        fit()
    notes = [note for note in getattr(raised.value, "__notes__", ()) if note.startswith("context: ")]
    assert len(notes) == 1
    return [line.strip() for line in notes[0].removeprefix("context: ").splitlines()]


def trainer(loader: Any, compute_loss: Any = None, **arguments: Any) -> Trainer:
    compute_loss = supervised(functional.cross_entropy) if compute_loss is None else compute_loss
    return tiny_trainer(loader=loader, compute_loss=compute_loss, seed=1, **{"model": Net(), **arguments})


# -- where and on what -------------------------------------------------------------------------------


def test_a_label_out_of_range_names_the_batch_its_samples_and_the_range() -> None:
    loader = DataLoader(Samples(lambda: (torch.ones(3), 10)), batch_size=4)
    where, *lines = note_of(lambda: trainer(loader, accumulate=2).fit())
    assert where == "loss function cross_entropy, in batch 2 of epoch 1, step 1"
    assert lines[:-1] == [
        "batch: [float32[4, 3], int64[4]] on cpu",
        "predictions: float32[4, 4] on cpu",
        "targets: int64[4] on cpu",
        "samples: 4, 5, 6, 7",
    ]
    assert lines[-1].startswith("likely cure: labels must be at least 0 and at most 3, as the predictions have 4 classes; ")
    assert "those in the batch range from 0 to 10" in lines[-1]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_names_the_sample(workers: int) -> None:
    loader = DataLoader(Samples(corrupt), batch_size=4, shuffle=True, num_workers=workers)
    with pytest.raises(ValueError, match="a corrupt file") as raised:
        trainer(loader).fit()
    told = f"raised by the data set for index {WRONG}"
    assert told in (str(raised.value) if workers else raised.value.__notes__[0])
    where, samples = raised.value.__notes__[-1].splitlines()
    assert where.startswith("context: the training loader, in batch ")
    assert str(WRONG) in samples.removeprefix("  samples: ").split(", ")


@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_in_memory_are_named_too(shuffle: bool) -> None:
    labels = torch.arange(20) % 4
    labels[WRONG] = 4
    lines = note_of(lambda: trainer(TensorBatches(torch.ones(20, 3), labels, batch_size=4, shuffle=shuffle)).fit())
    (samples,) = [line for line in lines if line.startswith("samples: ")]
    assert str(WRONG) in samples.removeprefix("samples: ").split(", ")


class Keeper(Callback):
    """Holds a copy of the weights, a batch, and the run."""

    def on_step_end(self, run: Run) -> None:
        self.run = run
        self.kept = [{"weights": [one.detach().clone() for one in run.model.parameters()]}, torch.ones(2000)]


def test_an_error_for_lack_of_memory_names_what_holds_it_the_largest_first() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if model.training and model.weight.grad is None and steps:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        steps.append(1)
        return torch.as_tensor(model(batch)).sum()

    steps: list[int] = []
    model = nn.Linear(1000, 2, bias=False)
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(torch.OutOfMemoryError) as raised:
        Trainer(model, adam, [torch.ones(4, 1000)] * 3, loss, callbacks=[Keeper()], max_epochs=1, device="cpu").fit()
    (memory,) = [line for note in raised.value.__notes__ for line in note.split("\n") if "memory: " in line]
    assert memory.endswith("memory: state of Adam 16 kB, Keeper 16 kB, weights 8 kB")


class Whim(Sampler[list[int]]):
    """A sampler that may draw otherwise each time."""

    def __init__(self, steady: bool) -> None:
        self.steady, self.asked = steady, 0

    def __iter__(self) -> Iterator[list[int]]:
        self.asked += 1
        return iter([[8, 9], [WRONG, 0 if self.steady else self.asked]])

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("steady", [True, False])
def test_a_sampler_that_draws_otherwise_each_time_names_no_samples(steady: bool) -> None:
    loader = DataLoader(Samples(lambda: (torch.ones(3), 10)), batch_sampler=Whim(steady))
    where, *lines = note_of(lambda: trainer(loader).fit())
    assert where.endswith("in batch 2 of epoch 1, step 2")
    assert ("samples: 7, 0" in lines) == steady


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.ones(3), 0
        raise OSError("the connection is gone")


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError


def cut_off(run: Run, batch: Any) -> Any:
    """Compute a step whose second pass has no feature."""
    run.backward(run.model(batch[0]).sum())
    return run.model(batch[0][:, :0])


IMAGES: DataLoader[Any] = DataLoader(
    [(torch.ones(3, 8, 8), index % 4) for index in range(8)],  # type: ignore[arg-type]  # torch names a list no data set
    batch_size=4,
    collate_fn=lambda samples: [image for image, _ in samples],
)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*given: object) -> Any:
        raise error

    return fail


PAD = "cut or pad them in the data set, or give the DataLoader a collate_fn that pads."
PLACES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "the module as the model knows it": (
        lambda: trainer([{"x": torch.ones(4, 5)}], lambda model, batch: model(batch["x"]).sum()).fit(),
        ["the forward pass of 'body.0' (Linear), in batch 1 of epoch 1, step 1", "batch: {x: float32[4, 5]} on cpu"],
    ),
    "a stream": (lambda: trainer(DataLoader(Stream(), 1)).fit(), ["the training loader, in batch 2 of epoch 1, step 2"]),
    "samples that do not fit together": (
        lambda: trainer(DataLoader(Samples(lambda: (torch.ones(4), 0)), batch_size=4)).fit(),
        [
            "the training loader, in batch 2 of epoch 1, step 2",
            "samples: 4, 5, 6, 7",
            f"likely cure: the samples of a batch differ in shape: {PAD}",
        ],
    ),
    "an optimizer": (lambda: tiny_run(optimizer=partial(Broken, lr=0.1)), ["the update of the weights, in epoch 1, step 1"]),
    "a step_fn": (
        lambda: tiny_run(compute_loss=None, step_fn=cut_off),
        ["the forward pass of the model (Linear), in batch 1 of epoch 1, step 1"],
    ),
    "a loss without gradient": (
        lambda: tiny_run(compute_loss=lambda model, batch: torch.zeros(())),
        ["the loss that compute_loss returned, in batch 1 of epoch 1, step 1"],
    ),
    "predict": (
        lambda: trainer(tiny_loader()).predict([torch.ones(2, 3), torch.ones(2, 5)]),
        ["the forward pass of 'body.0' (Linear), in batch 2 of predict"],
    ),
    "the loader of an evaluation": (
        lambda: trainer(tiny_loader()).evaluate(DataLoader(Samples(corrupt), batch_size=4)),
        ["the loader, in batch 2 of evaluation 'eval'", "samples: 4, 5, 6, 7"],
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_note_says_where_and_on_what(place: str) -> None:
    act, lines = PLACES[place]
    note = note_of(act)
    assert note[: len(lines)] == lines
    assert place != "a loss without gradient" or not any("cure" in line for line in note)  # the error says what to do


def test_the_samples_of_a_batch_that_is_a_list_of_images_are_named() -> None:
    assert "samples: 0, 1, 2, 3" in note_of(lambda: tiny_run(loader=IMAGES, compute_loss=raising(ValueError("wrong"))))


def test_a_compiled_model_is_named_too() -> None:
    batches = [(torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))]
    where, *_, cure = note_of(lambda: trainer(batches, compile={"backend": "eager"}).fit())
    assert where.startswith("the forward pass of the model (Net), in batch 1")
    assert cure.startswith("likely cure: the input is double and the weights are float: convert the input")


# -- evaluations ---------------------------------------------------------------------------------------


class Odd:
    """A metric that fails."""

    def __init__(self, where: str) -> None:
        self.where = where

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        assert self.where != "update"

    def compute(self) -> float:
        return 1 / (self.where != "compute")

    def reset(self) -> None: ...


@pytest.mark.parametrize("act", ["fit", "sanity", "evaluate"])
def test_a_metric_is_named_by_its_key(act: str) -> None:
    loader, metrics = tiny_loader(2), {"fine": Odd(""), "odd": Odd("update")}
    evaluate = Evaluate(loader, metrics=metrics, sanity_batches=2 * (act == "sanity"))
    made = tiny_trainer(callbacks=[evaluate], compute_loss=supervised(functional.mse_loss))
    where, *shapes = note_of(made.fit if act != "evaluate" else lambda: made.evaluate(loader, metrics=metrics))
    after = " after step 5" if act == "fit" else ""
    assert where == f"metric 'odd', in batch 1 of evaluation 'eval'{after}"
    assert shapes[1:] == ["predictions: float32[2, 1] on cpu", "targets: float32[2, 1] on cpu"]


def test_an_evaluation_in_a_run_names_the_callback_once_and_the_batch_once() -> None:
    evaluate = Evaluate(tiny_loader(2), metrics={"odd": Odd("compute")})
    with pytest.raises(ZeroDivisionError) as raised:
        tiny_run(callbacks=[evaluate], compute_loss=supervised(functional.mse_loss))
    assert raised.value.__notes__ == [
        "context: metric 'odd', in evaluation 'eval' after step 5",
        "raised in Evaluate.on_epoch_end (callback 1 of 1) at epoch 1, step 5, batch 5",
    ]


def test_an_error_of_a_callback_has_its_own_note_and_the_cure() -> None:
    with pytest.raises(RuntimeError) as raised:
        tiny_run(callbacks=[on(Callback.on_batch_end)(lambda run, batch, outputs: run.model(batch[0].double()))])
    hook, context = raised.value.__notes__
    assert hook == "raised in <lambda>.on_batch_end (callback 1 of 1) at epoch 1, step 0, batch 1"
    where, cure = context.splitlines()
    assert where == "context: the forward pass of the model (Linear)"
    assert cure.startswith("  likely cure: the input is double")


# -- cures -------------------------------------------------------------------------------------------


def classes(**changed: Any) -> tuple[Tensor, Tensor]:
    return changed.get("inputs", torch.ones(4, 3)), changed.get("targets", torch.zeros(4, dtype=torch.int64))


def again(kept: list[Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        kept.append(model(batch[0]).sum() + sum(kept[-1:]))
        return kept[-1]

    return compute


def inplace(model: nn.Module, batch: Any) -> Tensor:
    outputs: Tensor = model(batch[0]).exp()
    outputs += 1
    return outputs.sum()


def through(layer: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: layer(torch.ones(shape, dtype=dtype)).sum() + model(batch[0]).sum()


def binary(targets: Tensor) -> tuple[Any, Any]:
    return classes(targets=targets), supervised(functional.binary_cross_entropy_with_logits)


CURES: dict[str, tuple[Any, Any, str]] = {
    "float labels": (classes(targets=torch.zeros(4)), None, r"targets with \.long\(\)"),
    "labels (B, 1)": (classes(targets=torch.zeros(4, 1, dtype=torch.int64)), None, r"targets\.squeeze\(1\)"),
    "fewer labels": (classes(targets=torch.zeros(3, dtype=torch.int64)), None, "one target for each row"),
    "negative label": (classes(targets=torch.full((4,), -1)), None, "range from -1 to -1"),
    "images of uint8": (classes(), through(nn.Conv2d(3, 4, 3), 1, 3, 8, 8, dtype=torch.uint8), "input is unsigned char"),
    "an LSTM": (classes(), through(nn.LSTM(3, 4), 2, 5, 3, dtype=torch.float64), "input is float64 and the weights are"),
    "channels last": (classes(), through(nn.Conv2d(3, 4, 3), 1, 8, 8, 3), r"inputs\.permute\(0, 3, 1, 2\)"),
    "other channels": (classes(), through(nn.Conv2d(3, 4, 3), 1, 1, 8, 8), "in_channels=1"),
    "no channels": (classes(), through(nn.Conv2d(3, 4, 3), 8, 8), "dimension for the channels"),
    "norm of images": (classes(), through(nn.BatchNorm2d(3), 8, 3), "dimension for the channels"),
    "features": (classes(inputs=torch.ones(4, 5)), None, r"takes 3 features and the input has 5: .*in_features=5"),
    "one sample": (classes(), through(nn.BatchNorm1d(3), 1, 3), "drop_last=True"),
    "embedding": (classes(), through(nn.Embedding(1, 2), 2, dtype=torch.int64), "num_embeddings=1, so indices must be 0 to 0"),
    "embedding of floats": (classes(), through(nn.Embedding(3, 2), 2), r"indices with \.long\(\)"),
    "other device": (classes(), through(nn.Linear(3, 4, device="meta"), 2, 3), "model and each batch are on cpu"),
    "binary, of integers": (*binary(torch.ones(4, 4, dtype=torch.int64)), r"targets\.float\(\)"),
    "binary, of shape": (*binary(torch.ones(4)), r"targets\.unsqueeze\(1\)"),
    "a list": (classes(inputs=[1]), None, r"model\(batch\[0\]\)"),
    "in place": (classes(), inplace, "x = x \\+ y"),
    "a loss of torch alone": (classes(), functional.mse_loss, r"supervised\(loss_fn\)"),
    "numpy": (classes(), lambda model, batch: model(batch[0]).numpy().sum(), "detach"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CURES)
def test_the_likely_cure_is_named(kind: str) -> None:
    batch, compute, cure = CURES[kind]
    *_, last = note_of(lambda: trainer([batch], compute).fit())
    assert last.startswith("likely cure: ")
    assert re.search(cure, last), last


def test_a_graph_that_is_kept_is_named_with_its_second_batch() -> None:
    where, *_, cure = note_of(lambda: trainer([classes()] * 2, again([])).fit())
    assert where == "the backward pass, in batch 2 of epoch 1, step 2"
    assert "hidden = hidden.detach()" in cure


class Sly:
    @property
    def shape(self) -> None:
        raise OSError("not now")


def test_a_description_that_fails_does_not_replace_the_error_and_an_interrupt_has_no_note() -> None:
    with pytest.raises(KeyError, match="mine") as raised:
        tiny_run(loader=[[Sly()]], compute_loss=raising(KeyError("mine")))
    assert raised.value.__notes__ == ["context: it could not be described: OSError('not now')"]
    with pytest.raises(KeyboardInterrupt) as interrupted:
        tiny_run(compute_loss=raising(KeyboardInterrupt()))
    assert not hasattr(interrupted.value, "__notes__")


class RefusingError(Exception):
    """One that takes no attribute, so no note either."""

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("no attributes")


class StrangeError(Exception):
    """One whose notes are no list of texts."""

    def __init__(self, notes: object) -> None:
        self.__notes__ = notes  # type: ignore[assignment]


@pytest.mark.parametrize(
    "make", [RefusingError, lambda: StrangeError(None), lambda: StrangeError(("a",)), lambda: StrangeError([1])]
)
@pytest.mark.parametrize("where", ["model", "data set", "hook"])
def test_an_error_that_takes_no_note_stays_the_one_that_is_raised(make: Callable[[], Exception], where: str) -> None:
    fail = raising(error := make())
    loader = DataLoader(Samples(fail) if where == "data set" else Samples(), batch_size=4)
    hooks = [on(Callback.on_step_end)(lambda run: fail())] if where == "hook" else []
    made = trainer(loader, fail if where == "model" else None, callbacks=hooks)
    with pytest.raises(type(error)) as raised:
        made.fit()
    assert raised.value is error


def test_a_loader_that_is_used_up_has_no_batch_to_describe() -> None:
    used_up = iter([torch.zeros(2, 1)])
    with pytest.raises(DataError, match="gave no batch in epoch 2") as raised:
        tiny_run(loader=used_up, compute_loss=lambda model, batch: model(batch).mean(), epochs=2, steps=None)
    assert "batch: " not in raised.value.__notes__[0]


TOKENS, LABELS = torch.full((2, 3), 59), torch.tensor([1, 9])


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"input_ids": TOKENS, "labels": LABELS}, "; those in the batch range from 1 to 9. "),
        ((torch.ones(2), LABELS), "; those in the batch range from 1 to 9. "),
        ({"ids": TOKENS, "classes": LABELS}, "dimension 1 of the predictions. "),
        ((TOKENS, LABELS), "dimension 1 of the predictions. "),
    ],
)
def test_the_range_of_labels_is_not_that_of_the_tokens_beside_them(batch: Any, told: str) -> None:
    cure = cure_of(IndexError("Target 9 is out of bounds."), InUse(torch.device("cpu"), batch=batch))
    assert told in (cure or "")


@pytest.mark.parametrize("inner", [Root, lambda: nn.Linear(1, 1)])
@pytest.mark.parametrize("value", [0.0, math.nan])
def test_a_pass_that_leaves_the_gradients_alone_finds_the_same(inner: type[nn.Module], value: float) -> None:
    def compute(module: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = module(batch).square().sum()
        return loss

    model, batch = nn.Sequential(inner(), nn.Linear(1, 1)), torch.tensor([[value], [1.0]])
    called: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(called.append)
    given = model, compute, [batch], [RNGState.capture()]
    alone = locate(*given, accumulates=False)
    assert not called
    assert all(one.grad is None for one in model.parameters())
    again = locate(*given)
    assert alone.found == (value != 0 or inner is Root)
    assert (alone.parameter, alone.module, alone.rows) == (again.parameter, again.module, again.rows)


# -- StopIteration ends nothing in silence ------------------------------------------------------------


MOMENTS = "on_eval_batch_start on_eval_batch_end on_fetch_start on_fetch_end on_batch_start on_step_end"


@pytest.mark.parametrize("moment", MOMENTS.split())
def test_a_stop_iteration_of_a_hook_stays_what_it_is(moment: str) -> None:
    """A ``next`` without a default raises it."""
    end, loss = on(getattr(Callback, moment))(raising(StopIteration("no more colours"))), supervised(functional.mse_loss)
    acts: list[Callable[[], object]] = [lambda: tiny_run(compute_loss=loss, callbacks=[Evaluate(tiny_loader()), end])]
    if moment.startswith("on_eval"):
        made = tiny_trainer(compute_loss=loss, callbacks=[end])
        acts += [lambda: made.evaluate(tiny_loader()), lambda: made.predict(tiny_loader())]
    for act in acts:
        with pytest.raises(StopIteration, match="no more colours"):
            act()


@pytest.mark.parametrize(
    ("loader", "what"),
    [
        (DataLoader(Samples(raising(StopIteration())), batch_size=2), r"the data set raised StopIteration for index \[6, 7\]"),
        (DataLoader(Samples(), batch_size=1, collate_fn=lambda samples: next(iter([]))), "collate_fn raised StopIteration"),
    ],
)
def test_a_stop_iteration_of_a_data_set_does_not_end_the_epoch(loader: Any, what: str) -> None:
    with pytest.raises(DataError, match=what):
        trainer(loader).fit()
