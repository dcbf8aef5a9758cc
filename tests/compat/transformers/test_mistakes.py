"""Arguments, data and functions that a trainer made of TrainingArguments cannot use: the error says what to give instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from cadenza.compat.transformers import trainer
from cadenza.errors import AdapterError, CallbackError, DataError
from tests.compat.transformers.parts import Texts, arguments, gpt2, theirs, transformers


class Made(Texts):
    """Samples that a function makes of the tokens and the index."""

    def __init__(self, make: Any) -> None:
        super().__init__(4)
        self.make = make

    def __getitem__(self, index: int) -> dict[str, Any]:
        made: dict[str, Any] = self.make(self.tokens[index], index)
        return made


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "a name for a model": (
        {"model": "gpt2"},
        {},
        TypeError,
        r"model must be a torch.nn.Module; got 'gpt2'. Give AutoModelForCausalLM.from_pretrained\('gpt2'\)",
    ),
    "a loader for data": (
        {"train_dataset": DataLoader(Texts(4))},
        {},
        TypeError,
        "train_dataset must be a data set; got a DataL",
    ),
    "a loss of a native trainer": ({"compute_loss": max}, {}, TypeError, "no argument 'compute_loss'. Give compute_loss_func"),
    "a tokenizer": ({"tokenizer": max}, {}, TypeError, "no argument 'tokenizer'. Give it as processing_class="),
    "no callback": (
        {"callbacks": ["EarlyStopping"]},
        {},
        CallbackError,
        r"callbacks\[0\] is not a callback: .*'EarlyStopping'",
    ),
    "two optimizers": (
        {"optimizers": (sgd(gpt2()), None), "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
        {},
        TypeError,
        "got both. Leave one out",
    ),
    "no metric for the best": (
        {},
        {"save_strategy": "best", "eval_strategy": "epoch"},
        TypeError,
        "save_strategy='best'.* needs metric_for_best_model",
    ),
    "metrics of all batches": (
        {"compute_metrics": lambda given: {}},
        {"eval_strategy": "epoch", "batch_eval_metrics": True},
        TypeError,
        r"compute_metrics\(prediction, compute_result\); got compute_metrics\(given\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_when_the_trainer_is_made(name: str, tmp_path: Path) -> None:
    given, fields, kind, message = MISTAKES[name]
    made = {"model": gpt2(), "train_dataset": Texts(4), "eval_dataset": Texts(4), **given}
    with pytest.raises(kind, match=message):
        trainer(args=arguments(tmp_path, **fields), **made)


def test_generated_predictions_are_refused(tmp_path: Path) -> None:
    args = transformers.Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, use_cpu=True)
    with pytest.raises(AdapterError, match=r"predict_with_generate=True\) has no effect. Evaluations compute logits"):
        trainer(gpt2(), args, Texts(4))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda tokens, index: {"text": "a", "id": index}, DataError, r"no column .* of GPT2LMHeadModel.*got \['text', 'id'\]"),
        (lambda tokens, index: {"input_ids": tokens[: 3 + index]}, RuntimeError, "equal size"),
    ],
)
def test_data_that_the_model_cannot_take_is_an_error_with_advice(make: Any, kind: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message) as error:
        trainer(gpt2(), arguments(tmp_path), Made(make)).fit()
    notes = "".join(getattr(error.value, "__notes__", []))
    assert kind is DataError or "a data_collator that pads, such as DataCollatorForLanguageModeling" in notes


def test_results_that_are_no_numbers_are_named_and_left_out(tmp_path: Path) -> None:
    def fit(results: Any) -> Any:
        args = arguments(tmp_path / type(results).__name__, eval_strategy="steps", eval_steps=1)
        return trainer(gpt2(), args, Texts(4), Texts(2), compute_metrics=lambda given: results).fit()

    with pytest.warns(UserWarning, match="compute_metrics returned 'table', a list: only numbers are results") as told:
        run = fit({"eval_half": torch.tensor(0.5), "table": [1, 2]})
    assert run.history["eval/half"] == [(1, 0.5), (2, 0.5)]
    assert len([one for one in told if "'table'" in str(one.message)]) == 1
    with pytest.raises(TypeError, match="expected a mapping of names to numbers from compute_metrics; got None"):
        fit(None)


class EvaluatesAt(transformers.TrainerCallback):  # type: ignore[misc]
    """Requests evaluations, whatever the ``eval_strategy`` is."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        control.should_evaluate = state.global_step == 3

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **keywords: Any) -> None:
        self.seen.append((state.global_step, pytest.approx(metrics["eval_loss"], abs=1e-5)))


def test_a_callback_may_request_an_evaluation_that_no_strategy_asks_for(tmp_path: Path) -> None:
    args, home, here = arguments(tmp_path, eval_on_start=True), EvaluatesAt(), EvaluatesAt()
    theirs(gpt2(), args, Texts(10), eval_dataset=Texts(4), callbacks=[home])
    made = trainer(gpt2(), args, Texts(10), Texts(4), callbacks=[here])
    run = made.fit()
    assert [step for step, _ in here.seen] == [0, 3]
    assert here.seen == [(step, loss.expected) for step, loss in home.seen]
    assert [step for step, _ in run.history["eval/loss"]] == [1, 3]
