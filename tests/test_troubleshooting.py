"""The page Troubleshooting: each message on it is one that a run raises."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable as Function
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cadenza import Callback, Run, Trainer, supervised
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, StopOnNonFinite
from cadenza.loading import TensorBatches

PAGE = Path(__file__).resolve().parents[1] / "docs" / "troubleshooting.md"
INPUTS, LABELS = torch.ones(8, 2), torch.zeros(8, dtype=torch.int64)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trainer(loader: Any = None, loss: Any = None, model: nn.Module | None = None, **arguments: Any) -> Trainer:
    loader = TensorBatches(INPUTS, LABELS, batch_size=4) if loader is None else loader
    loss = supervised(cross_entropy) if loss is None else loss
    optimizer = arguments.pop("optimizer", sgd)
    given = {"max_epochs": 1, "progress": False, **arguments}
    return Trainer(nn.Linear(2, 3) if model is None else model, optimizer, loader, loss, **given)


def misspelled() -> None:
    class Mine(Callback):
        def on_setp_end(self, run: Run) -> None: ...


def without_run() -> None:
    class Mine(Callback):
        def on_step_end(self) -> None: ...  # type: ignore[override]


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.change: Function[[Any], Any] = lambda sample: sample["missing"]

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.change({})


def held_back(folder: Path, **arguments: Any) -> Trainer:
    trainer(directory=folder, callbacks=[Checkpoint(every="1 epoch")]).fit()
    return trainer(directory=folder, max_epochs=2, **arguments)


def recurrent() -> Function[[nn.Module, Any], Tensor]:
    hidden = nn.Linear(2, 3)(INPUTS)
    return lambda model, batch: (hidden * hidden).sum() + model(batch[0]).sum()


def elsewhere(model: nn.Module, batch: Any) -> Tensor:
    outputs: Tensor = model(batch[0].to("meta"))
    return outputs.sum()


def out_of_memory(model: nn.Module, batch: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Sent:
    """A loader that pickles its data set, as a worker of a DataLoader needs it where processes are not forked."""

    def __iter__(self) -> Any:
        pickle.dumps(Samples())


EXAMPLES: dict[str, Function[[Path], object]] = {
    "... is no moment of a run ... Did you mean 'on_step_end'?": lambda _: misspelled(),
    "... has the wrong signature: expected (self, run), got (self)": lambda _: without_run(),
    "callbacks[0] is the class ...; expected an instance": lambda _: trainer(callbacks=[StopOnNonFinite]),
    "Trainer has no argument 'gradient_clip_val'": lambda _: trainer(gradient_clip_val=1.0),
    "a run needs an end": lambda _: trainer(max_epochs=None),
    "compute_loss must be a function (model, batch) -> loss; got the loss module": (
        lambda _: trainer(loss=nn.CrossEntropyLoss()).fit()
    ),
    "SGD holds none of the model's parameters": lambda _: trainer(optimizer=sgd(nn.Linear(2, 3).parameters())).fit(),
    "device 'cuda' does not exist; this machine has ['cpu']": lambda _: trainer(device="cuda").fit(),
    "the training loader is empty": (
        lambda _: trainer(DataLoader(TensorDataset(INPUTS, LABELS), batch_size=9, drop_last=True)).fit()
    ),
    "directory ... already holds a run": lambda folder: held_back(folder).fit(),
    "does not fit this trainer; nothing was restored": lambda folder: held_back(folder, model=nn.Linear(2, 5)).fit(
        resume="auto"
    ),
    "Checkpoint needs a folder": lambda _: trainer(callbacks=[Checkpoint(every="1 epoch")]).fit(),
    "'500 stps' is no schedule": lambda _: Checkpoint(every="500 stps"),
    "... watches 'eval/los', but ... will report only ['eval/loss']": (
        lambda _: trainer(callbacks=[Evaluate([(INPUTS, LABELS)]), EarlyStopping("eval/los", "min")]).fit()
    ),
    "forward() takes 2 positional arguments but 3 were given": (
        lambda _: Trainer(nn.Linear(2, 3), sgd, [(INPUTS, LABELS)], max_epochs=1, progress=False).fit()
    ),
    "supervised(...) expects batches (inputs, targets); got a mapping": lambda _: trainer([{"inputs": INPUTS}]).fit(),
    "mat1 and mat2 shapes cannot be multiplied": lambda _: trainer([(torch.ones(8, 5), LABELS)]).fit(),
    "The size of tensor a (4) must match the size of tensor b (8)": (
        lambda _: trainer([(INPUTS, torch.ones(4))], lambda model, batch: (batch[1] - model(batch[0])[:, 0]).sum()).fit()
    ),
    "expected target dtype to be Long or Byte, but got Float": lambda _: trainer([(INPUTS, LABELS.float())]).fit(),
    "Target 4 is out of bounds": lambda _: trainer([(INPUTS, LABELS + 4)]).fit(),
    "the loss must be a tensor of shape () that has a gradient": lambda _: trainer(
        loss=lambda model, batch: model(batch[0])
    ).fit(),
    "is not on the expected device": lambda _: trainer(loss=elsewhere).fit(),
    "Can't pickle local object": lambda _: trainer(Sent()).fit(),
    "backward through the graph a second time": lambda _: trainer(loss=recurrent()).fit(),
    "out of memory": lambda _: trainer(loss=out_of_memory).fit(),
    "the training loader gave no batch in epoch 2": lambda _: trainer(iter([(INPUTS, LABELS)]), max_epochs=2).fit(),
}


ELSEWHERE = {"Caught KeyError in DataLoader worker process"}  # in tests/engine/test_error_context.py, with a worker


def messages() -> list[str]:
    """Return the messages in the tables of errors: a row with alternatives has its first one here."""
    page = PAGE.read_text(encoding="utf-8")
    tables = page[page.index("## Errors before") : page.index("## During the training")]
    return [found for found in re.findall(r"^\| `(.+?)`.* \|$", tables, re.MULTILINE) if not found.endswith("Error")]


def test_each_message_of_the_page_has_an_example() -> None:
    assert sorted(messages()) == sorted({*EXAMPLES, *ELSEWHERE})


@pytest.mark.parametrize("message", EXAMPLES)
def test_a_message_of_the_page_is_one_that_is_raised(message: str, tmp_path: Path) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # each of these is another
        EXAMPLES[message](tmp_path)
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert "pickle" not in message or "likely cure: the workers of a loader get copies" in said
    assert "size of tensor" not in message or "predictions and targets need one shape" in said
    parts = [re.escape(part.strip()) for part in message.split("...")]
    assert re.search(".*".join(parts), said, re.DOTALL), said
