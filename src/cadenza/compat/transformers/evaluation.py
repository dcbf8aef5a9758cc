"""Evaluations of a trainer of transformers: their outputs, and ``compute_metrics`` as a metric."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from cadenza.compat.transformers.loss import ModelLoss, base_model, parts_of
from cadenza.compat.transformers.originals import original


def check_metrics(arguments: Any, compute_metrics: Callable[..., Any] | None) -> None:
    """Check that `compute_metrics` accepts the arguments that `TrainingArguments` requires.

    Raises:
        TypeError: It does not.
    """
    if compute_metrics is None or not arguments.batch_eval_metrics:
        return
    names = inspect.signature(compute_metrics).parameters
    if "compute_result" not in names and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()):
        raise TypeError(
            "TrainingArguments(batch_eval_metrics=True) needs compute_metrics(prediction, compute_result); got "
            f"compute_metrics{inspect.signature(compute_metrics)}. Add the argument: it is True for the last batch."
        )


class Predict:
    """Compute the loss, the predictions and the labels of a batch, like transformers' ``prediction_step``.

    Args:
        arguments: The ``TrainingArguments``.
        model: The model.
        loss: The loss of the training.
        label_names: The names of the labels in a batch.
        preprocess: ``preprocess(logits, labels)`` returns the predictions for `compute_metrics`.
    """

    def __init__(
        self,
        arguments: Any,
        model: nn.Module,
        loss: ModelLoss,
        label_names: list[str],
        preprocess: Callable[[Any, Any], Any] | None,
    ) -> None:
        self.loss: ModelLoss = loss
        self.label_names: list[str] = label_names
        self._loss_only = arguments.prediction_loss_only
        self._preprocess = preprocess
        self._has_own_loss = not label_names and original("utils.can_return_loss")(type(base_model(model)))
        self._inputs = getattr(model, "main_input_name", "input_ids") if "inputs" in arguments.include_for_metrics else None
        config = getattr(model, "config", None)
        self._ignored = {"loss", "weight", *(getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"])}

    def __repr__(self) -> str:
        return "the outputs of the model"

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        labels: Any = tuple(batch.get(name) for name in self.label_names)
        labelled = bool(self.label_names) and all(label is not None for label in labels)
        if labelled or self._has_own_loss:
            outputs = self.loss(model, batch)
        else:
            outputs = parts_of(model(**batch))
            outputs.pop("loss", None)
        found = {} if outputs.get("loss") is None else {"loss": outputs["loss"].detach().mean()}
        if self._loss_only:
            return found
        predictions: Any = tuple(output for name, output in outputs.items() if name not in self._ignored and output is not None)
        predictions = predictions[0] if len(predictions) == 1 else predictions
        labels = (labels[0] if len(labels) == 1 else labels) if labelled else None
        if self._preprocess is not None:
            predictions = self._preprocess(predictions, labels)
        return {
            **found,
            "predictions": predictions,
            "targets": labels,
            "_inputs": None if self._inputs is None else batch.get(self._inputs),
            "_losses": found.get("loss"),
        }


class ComputeMetrics:
    """A ``compute_metrics`` of transformers as a metric over the predictions and labels of all batches and ranks.

    Its results are those of the evaluation, such as ``eval/accuracy``.

    Args:
        compute_metrics: ``compute_metrics(EvalPrediction)`` returns results by name.
        arguments: The ``TrainingArguments``.
        name: The name of the evaluation.
    """

    flat: bool = True
    inputs: tuple[str, ...] = ("predictions", "targets", "_inputs", "_losses")
    """The names of the outputs that `update` receives."""

    def __init__(self, compute_metrics: Callable[..., Mapping[str, Any]], arguments: Any, name: str) -> None:
        self.function: Callable[..., Mapping[str, Any]] = compute_metrics
        self._name = name
        self._concatenates, self._to_host_every = arguments.eval_do_concat_batches, arguments.eval_accumulation_steps
        self._by_batch = arguments.batch_eval_metrics
        self._extras = {"inputs": "inputs" in arguments.include_for_metrics, "losses": "loss" in arguments.include_for_metrics}
        self._warned_of: set[str] = set()
        self.reset()

    def __repr__(self) -> str:
        return f"ComputeMetrics({getattr(self.function, '__name__', self.function)})"

    def reset(self) -> None:
        """Drop all batches."""
        self._held: dict[str, Any] = {}
        self._batches = 0
        self._last: Any = None

    def update(self, predictions: Any, targets: Any, inputs: Any, loss: Any) -> None:
        """Add the predictions and labels of a batch. Batches without labels are skipped."""
        if targets is None or predictions is None:
            return
        losses = loss.repeat(_size_of(targets)) if isinstance(loss, Tensor) else None
        given = {"predictions": predictions, "label_ids": targets, "inputs": inputs, "losses": losses}
        detached, container = original("trainer_pt_utils.nested_detach"), original("trainer_pt_utils.EvalLoopContainer")
        used = {key: detached(value) for key, value in given.items() if value is not None and self._extras.get(key, True)}
        if self._by_batch:
            if self._last is not None:
                self.function(self._last, compute_result=False)
            self._last = _prediction(used)
            return
        self._batches += 1
        for key, value in used.items():
            held = self._held.setdefault(key, container(self._concatenates, padding_index=-100))
            held.add(value)
            if self._to_host_every is not None and self._batches % self._to_host_every == 0:
                held.to_cpu_and_numpy()

    def compute(self) -> dict[str, Any]:
        """Return the results of `compute_metrics`, without the prefix ``eval_``."""
        if self._by_batch:
            results = {} if self._last is None else self.function(self._last, compute_result=True)
        elif not self._held:
            results = {}
        else:
            results = self.function(_prediction({key: held.get_arrays() for key, held in self._held.items()}))
        if not isinstance(results, Mapping):
            raise TypeError(
                f"{self!r}: expected a mapping of names to numbers from compute_metrics; got {results!r}. Return one."
            )
        plain = original("trainer_utils.denumpify_detensorize")(dict(results))
        return {name.removeprefix(f"{self._name}_"): value for name, value in plain.items() if self._is_number(name, value)}

    def _is_number(self, name: str, value: Any) -> bool:
        """Return whether a result is a number. Warn once about other values, which transformers' trackers drop as well."""
        if isinstance(value, int | float):
            return True
        if name not in self._warned_of:
            self._warned_of.add(name)
            warnings.warn(
                f"compute_metrics returned {name!r}, a {type(value).__name__}: only numbers are results, so it is left out. "
                "Return numbers, or write it to a file.",
                stacklevel=2,
            )
        return False


def _prediction(parts: dict[str, Any]) -> Any:
    return original("EvalPrediction")(**parts)


def _size_of(labels: Any) -> int:
    first = labels[0] if isinstance(labels, tuple | list) else labels
    return int(first.shape[0])
