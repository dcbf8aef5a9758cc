"""Code for fastNLP 0.5 is refused when the trainer is built, with what became of each hook and argument."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

import cadenza
from cadenza import supervised
from cadenza.callbacks import Checkpoint
from cadenza.compat.fastnlp import Callback, EarlyStopCallback, Trainer
from cadenza.compat.fastnlp.api_of_0_5 import ARGUMENTS, HOOKS, PROPERTIES
from cadenza.compat.fastnlp.translation import EVENTS
from cadenza.testing import tiny_loader, tiny_model
from tests.compat.fastnlp.toy import Scribe, Toy, loader, rows, toy_trainer


def of_0_5(hook: str) -> Callback:
    """Return a callback with one hook, written as in `HOOKS`."""
    name, _, arguments = hook.rstrip(")").partition("(")
    space: dict[str, Any] = {}
    exec(f"def {name}({arguments}): raise AssertionError", space)
    kind: type[Callback] = type("Old", (Callback,), {name: space[name]})
    return kind()


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_of_0_5_is_an_error_in_both_trainers_that_says_what_to_write(hook: str) -> None:
    said = re.escape(f"Old.{hook}  ->  {HOOKS[hook].replace('`', '')}")
    with pytest.raises(TypeError, match=said):
        toy_trainer(callbacks=of_0_5(hook))
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match=said):
        cadenza.Trainer(model, optimizer, tiny_loader(), supervised(nn.MSELoss()), max_epochs=1, callbacks=[of_0_5(hook)])


@pytest.mark.parametrize("new", HOOKS.values())
def test_each_hook_that_the_table_names_exists_with_these_arguments(new: str) -> None:
    for name, arguments in re.findall(r"(on_\w+)\(self, ([^)]*)\)", new):
        assert [*inspect.signature(getattr(Callback, name)).parameters][1:] == arguments.split(", ")
        assert name in EVENTS


@pytest.mark.parametrize("new", ARGUMENTS.values())
def test_each_argument_that_the_table_names_exists(new: str) -> None:
    given = {*inspect.signature(Trainer.__init__).parameters, "progress_bar", "num_eval_sanity_batch"}
    named = re.findall(r"`(\w+)=", new)
    assert set(named) <= given
    assert named or "(" in new or "train_step" in new


def test_one_error_lists_all_callbacks_and_arguments() -> None:
    class Old(Callback):
        def on_batch_begin(self, batch_x: Any, batch_y: Any, indices: Any) -> None: ...

        def on_valid_end(self, eval_result: Any, metric_key: Any, optimizer: Any, is_better_eval: Any) -> None: ...

    class Other(Callback):
        def on_train_begin(self) -> None: ...  # type: ignore[override]  # as in 0.5

    model, callbacks = Toy(), [Old(), Other(), Other()]
    with pytest.raises(TypeError) as caught:
        Trainer(rows(4), model, loss=None, dev_data=rows(4), metric_key="-loss", callbacks=callbacks)  # type: ignore[call-arg, arg-type]
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "this is code for fastNLP 0.5; expected that of 1.0, which has other hooks and arguments. Write instead:"
    )
    assert [line.partition("  ->")[0].strip() for line in lines[1:-1]] == [
        "Old.on_batch_begin(self, batch_x, batch_y, indices)",
        "Old.on_valid_end(self, eval_result, metric_key, optimizer, is_better_eval)",
        "Other.on_train_begin(self)",
        "Trainer(train_data=)",
        "Trainer(loss=)",
        "Trainer(dev_data=)",
        "Trainer(metric_key=)",
    ]
    assert lines[-1] == "See docs/guides/from-fastnlp.md."


def test_the_argument_order_of_0_5_is_recognized_in_a_subclass_too() -> None:
    class Mine(Trainer):
        def __init__(self, train_data: Any, model: Any, loss: Any) -> None:
            super().__init__(train_data, model, torch.optim.SGD(model.parameters(), 0.1), loss)

    with pytest.raises(
        TypeError, match=r"Trainer\(train_data=\)  ->  train_dataloader=(.|\n)*Trainer\(loss=\)  ->  train_step"
    ):
        Mine(rows(4), Toy(), None)
    assert [*inspect.signature(Trainer).parameters][:3] == ["model", "train_dataloader", "optimizers"]


def test_code_for_1_0_is_not_taken_for_code_for_0_5(caplog: pytest.LogCaptureFixture) -> None:
    class New(Callback):
        def on_train_begin(self, trainer: Any) -> None: ...

        def on_exception(self, trainer: Any) -> None: ...  # type: ignore[override]  # wrong, and not of 0.5

        def on_train_end(self, *arguments: Any) -> None: ...

    class Mine(Trainer):
        def __init__(self, loss: Any, **options: Any) -> None:
            model = Toy()
            super().__init__(model, loader(4), torch.optim.SGD(model.parameters(), 0.1), progress_bar=None, **options)

    Mine(loss=3, callbacks=[New(), Scribe(), Checkpoint("1 epoch")])
    toy_trainer(batch_size=4)  # fastNLP 1.0 accepts what it does not know
    assert "ignores the unknown argument batch_size=. In fastNLP 1.0 use prepare_dataloader(..., batch_size=)." in caplog.text


def test_methods_with_names_of_0_5_that_take_the_trainer_belong_to_the_user(caplog: pytest.LogCaptureFixture) -> None:
    called: list[str] = []

    class New(Callback):
        on_valid_begin = None

        def on_epoch_end(self, trainer: Any) -> None:
            called.append("on_epoch_end")

        @staticmethod
        def on_batch_end(trainer: Any) -> None:
            called.append("on_batch_end")

        def on_train_epoch_end(self, trainer: Any) -> None:
            self.on_epoch_end(trainer)

    toy_trainer(callbacks=New(), n_epochs=1).run()
    assert called == ["on_epoch_end"]
    assert "New.on_epoch_end is not an event, and is never called by a training" in caplog.text


def test_the_data_of_0_5_is_recognized_before_a_model_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"Trainer\(train_data=\)  ->  train_dataloader=(.|\n)*Trainer\(loss=\)  ->  train_step"
    ):
        Trainer(rows(4), model=Toy(), loss=None)  # type: ignore[call-arg, misc, arg-type]


@pytest.mark.parametrize(("name", "now"), PROPERTIES.items())
def test_each_property_of_0_5_is_an_error_that_says_what_to_use(name: str, now: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"had. Use {now.replace('`', '')}")):
        getattr(Callback(), name.removeprefix("self."))
    assert not hasattr(Callback(), "other")


def test_an_attribute_error_in_a_property_of_a_callback_is_raised_unchanged() -> None:
    class Broken(Callback):
        @property
        def rate(self) -> Any:
            return self.missing  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'missing'"):
        _ = Broken().rate


def test_the_patience_of_0_5_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(
        TypeError, match=r"In fastNLP 0.5 the first argument was patience: write EarlyStopCallback\(patience=5\)"
    ):
        EarlyStopCallback(5)  # type: ignore[arg-type]
