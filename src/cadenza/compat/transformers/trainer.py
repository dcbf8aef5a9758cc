"""Creates a native trainer from the arguments of ``transformers.Trainer``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from cadenza.callbacks import BestWeights, Checkpoint, Evaluate, LogTraining, OmitFrozen
from cadenza.checkpoint.keep_rules import Best, KeepRule
from cadenza.compat.adapter.foreign import listed
from cadenza.compat.transformers.data import Data
from cadenza.compat.transformers.evaluation import ComputeMetrics, Predict, check_metrics
from cadenza.compat.transformers.fields import check_fields
from cadenza.compat.transformers.fixed_arguments import FixedArguments
from cadenza.compat.transformers.loss import ModelLoss, base_model, count_tokens
from cadenza.compat.transformers.optimization import optimizer_for, schedule_for
from cadenza.compat.transformers.originals import original
from cadenza.compat.transformers.preparing import (
    ClipModelGradients,
    EvaluateOnRequest,
    EvaluateOnStart,
    Modes,
    Neftune,
    driver_for,
    model_of,
    seeded,
)
from cadenza.compat.transformers.save_pretrained import SavePretrained
from cadenza.compat.transformers.schedules import (
    Limits,
    evaluation_schedule,
    limits_of,
    logging_schedule,
    saving_schedule,
)
from cadenza.engine.monitor import Mode
from cadenza.hooks.dispatch import checked
from cadenza.hooks.schedule import Last
from cadenza.loading import num_batches
from cadenza.loops.foreign_callbacks import AnyCallback, adapted
from cadenza.trainer import Trainer

_MADE: Mapping[str, str] = {
    "tokenizer": "Give it as processing_class=, as to transformers.Trainer.",
    "compute_loss": "Give compute_loss_func(outputs, labels, num_items_in_batch), or call cadenza.Trainer itself.",
    "optimizer": "Give optimizers=(optimizer, scheduler).",
    "loader": "Give train_dataset, or call cadenza.Trainer itself.",
}
"""Arguments that `trainer` sets itself, and how to specify them."""


def trainer(
    model: nn.Module | None = None,
    args: Any = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    *,
    data_collator: Callable[[Any], Any] | None = None,
    processing_class: Any = None,
    model_init: Callable[[], nn.Module] | None = None,
    compute_loss_func: Callable[..., Any] | None = None,
    compute_metrics: Callable[..., Mapping[str, Any]] | None = None,
    callbacks: Iterable[AnyCallback | type[Any]] | None = None,
    optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    **native: Any,
) -> Trainer:
    """Return a native `Trainer` that trains like ``transformers.Trainer`` with the same arguments.

    Call ``.fit(resume="auto")`` on the result. The guide lists the handling of each field of ``TrainingArguments``. The loss of
    a step is the mean over the labels of all its batches and ranks. Each checkpoint has a folder ``pretrained``; see
    `SavePretrained`. Results have native names, such as ``eval/accuracy``; callbacks of transformers see ``eval_accuracy``.

    Args:
        model: A model of transformers or peft.
        args: The ``TrainingArguments``. Callbacks of transformers receive this object.
        train_dataset: A data set of the package datasets or of torch; also one without a length.
        eval_dataset: A data set, or several by name, such as ``{"a": ..., "b": ...}`` for ``eval_a/loss`` and ``eval_b/loss``.
        data_collator: Collates samples into a batch. None takes transformers' default, which pads if `processing_class` is a
            tokenizer.
        processing_class: The tokenizer or processor.
        model_init: A function that returns the model, called after the generators are seeded. Instead of `model`.
        compute_loss_func: ``compute_loss_func(outputs, labels, num_items_in_batch=...)`` returns the loss of a batch.
        compute_metrics: ``compute_metrics(EvalPrediction)`` returns results by name, for the predictions of all ranks.
        callbacks: Callbacks of transformers, native ones, and those of other systems.
        optimizers: An optimizer and a scheduler, instead of those of `args`. Each may be None.
        optimizer_cls_and_kwargs: The class of the optimizer and its options, instead of those of `args`.
        preprocess_logits_for_metrics: ``preprocess_logits_for_metrics(logits, labels)`` returns the predictions for
            `compute_metrics`.
        **native: Arguments of `Trainer`, such as ``max_tokens``, ``driver`` or ``directory``. They replace those of `args`.

    Raises:
        AdapterError: `args` has a field that would change the results, and that has no counterpart; the message names each.
        TypeError: `args` are no ``TrainingArguments``, or there are no training data.
    """
    _check(args, train_dataset, eval_dataset)
    _check_native(native)
    check_metrics(args, compute_metrics)
    if None not in (optimizers[0], optimizer_cls_and_kwargs):
        raise TypeError("expected optimizers=(optimizer, scheduler) or optimizer_cls_and_kwargs; got both. Leave one out.")
    check_fields(args)
    seeded(args)
    found = model_of(model, model_init, args, processing_class)
    data = Data(args, found, data_collator, processing_class)
    loader = data.training(train_dataset)
    driver = driver_for(args, native.pop("driver", "auto"), native.pop("device", None), found)
    limits = limits_of(args, num_batches(loader, driver.data_shard()))
    loss = ModelLoss(found, label_smoothing=args.label_smoothing_factor, compute_loss_func=compute_loss_func)
    predict = Predict(args, found, loss, data.label_names, preprocess_logits_for_metrics)
    parts = [
        FixedArguments(args, processing_class),
        Modes(),
        *_updates(args, limits, optimizers[1], eval_dataset),
        *_evaluations(args, limits, data, eval_dataset, predict, compute_metrics),
        *_saves(args, limits, found, processing_class, eval_dataset, shards=driver.shards),
        *(make() for make in original("integrations.get_reporting_integration_callbacks")(args.report_to)),
        *_instances(callbacks),
    ]
    optimizer = optimizer_for(args, found, optimizers[0], optimizer_cls_and_kwargs)
    limited = {"max_epochs", "max_steps"} & native.keys()
    options = {**_options(args, found), **({} if limited else limits.arguments), **native}
    return Trainer(found, optimizer, loader, loss, callbacks=parts, driver=driver, **options)


def _check(args: Any, train_dataset: Any, eval_dataset: Any) -> None:
    if not isinstance(args, original("TrainingArguments")):
        raise TypeError(f"args must be TrainingArguments of transformers; got {args!r}")
    if train_dataset is None:
        raise TypeError("trainer(...) needs train_dataset; got None. Give a data set of the package datasets or of torch.")
    given = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    if name := next((name for name, value in given.items() if isinstance(value, DataLoader)), None):
        raise TypeError(
            f"{name} must be a data set; got a DataLoader. Give its data set, the batch size as per_device_..._batch_size of "
            "TrainingArguments, and its collate_fn as data_collator."
        )
    if eval_dataset is None and args.eval_strategy != "no":
        raise TypeError(
            f"TrainingArguments(eval_strategy={args.eval_strategy.value!r}) needs eval_dataset; got None. Give one."
        )
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise TypeError(
            "TrainingArguments(save_strategy='best') needs metric_for_best_model; got None. Give one, such as 'loss'."
        )


def _check_native(native: Mapping[str, Any]) -> None:
    """Check that no argument of the native trainer is one that `trainer` makes itself."""
    for name in native.keys() & _MADE.keys():
        raise TypeError(f"trainer has no argument {name!r}. {_MADE[name]}")


def _options(args: Any, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of the native trainer that do not depend on the length of the run."""
    compiled = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    options: dict[str, Any] = {
        "accumulate": args.gradient_accumulation_steps,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "seed": args.seed,
        "directory": args.output_dir,
        "progress": not args.disable_tqdm,
        "compile": {name: value for name, value in compiled.items() if value is not None} if args.torch_compile else False,
    }
    if getattr(model, "main_input_name", None) == "input_ids":
        options["tokens"] = partial(count_tokens, padding=args.include_num_input_tokens_seen != "non_padding")
    return options


def _updates(args: Any, limits: Limits, scheduler: LRScheduler | None, eval_dataset: Any) -> list[Any]:
    """Return the callbacks for gradients, learning rate and logging."""
    log = logging_schedule(args, limits)
    parts: list[Any] = []
    if args.max_grad_norm > 0 or log is not None:  # the norm is logged also if nothing is clipped, as there
        named: dict[str, Any] = {} if log is None else {"log": "train/grad_norm", "log_every": log}
        parts.append(ClipModelGradients(args.max_grad_norm if args.max_grad_norm > 0 else math.inf, **named))
    if args.neftune_noise_alpha is not None:
        parts.append(Neftune(args.neftune_noise_alpha))
    pair = _monitor(args, eval_dataset)
    parts.append(schedule_for(args, scheduler, None if pair is None else pair[0]))
    return parts if log is None else [*parts, LogTraining(log)]


def _evaluations(
    args: Any,
    limits: Limits,
    data: Data,
    eval_dataset: Any,
    predict: Predict,
    compute_metrics: Callable[..., Mapping[str, Any]] | None,
) -> list[Any]:
    """Return an `Evaluate` for each data set."""
    every = evaluation_schedule(args, limits)
    kind = EvaluateOnRequest if every is None else partial(Evaluate, every=every)
    found: list[Any] = []
    for name, dataset in _named(eval_dataset).items():
        used = compute_metrics if not args.prediction_loss_only else None
        metrics = {} if used is None else {"compute_metrics": (metric := ComputeMetrics(used, args, name), *metric.inputs)}
        found.append(kind(data.evaluation(dataset), metrics=metrics, name=name, compute=predict))
    return [*found, *([EvaluateOnStart()] if args.eval_on_start else [])]


def _saves(args: Any, limits: Limits, model: nn.Module, processing_class: Any, eval_dataset: Any, *, shards: bool) -> list[Any]:
    """Return the callbacks that write checkpoints and keep the best weights."""
    pair, every = _monitor(args, eval_dataset), saving_schedule(args, limits)
    found: list[Any] = []
    if every is not None:
        rules = _kept(args, pair)
        kept: dict[str, Any] = {"keep_last": None} if rules is None else {"keep": rules}
        found.append(Checkpoint(every, weights_only=args.save_only_model, **kept))
        found += [SavePretrained(processing_class)] if hasattr(model, "save_pretrained") else []
        adapts = base_model(model) is not model and not all(parameter.requires_grad for parameter in model.parameters())
        found += [OmitFrozen()] if adapts and not shards else []
    return [*found, *([BestWeights(pair)] if args.load_best_model_at_end and pair is not None else [])]


def _kept(args: Any, pair: tuple[str, Mode] | None) -> list[KeepRule] | None:
    """Return the keep rules; None keeps all checkpoints."""
    limit = args.save_total_limit if args.save_total_limit and args.save_total_limit > 0 else None
    if args.save_strategy == "best" and pair is not None:
        return [Best(pair[0], limit or 1, mode=pair[1])]
    if limit is None:
        return None
    if pair is not None and args.eval_strategy != "no":  # also without load_best_model_at_end, as there
        return [Last(max(1, limit - 1)), Best(pair[0], mode=pair[1])]
    return [Last(limit)]


def _monitor(args: Any, eval_dataset: Any) -> tuple[str, Mode] | None:
    """Return the native name of ``metric_for_best_model``, and its mode."""
    name = args.metric_for_best_model
    if name is None:
        return None
    whole = name if name.startswith("eval_") else f"eval_{name}"
    evaluations = sorted(_named(eval_dataset), key=len, reverse=True)
    prefix = next((evaluation for evaluation in evaluations if whole.startswith(f"{evaluation}_")), "eval")
    return f"{prefix}/{whole.removeprefix(f'{prefix}_')}", "max" if args.greater_is_better else "min"


def _named(eval_dataset: Any) -> dict[str, Any]:
    """Return the data sets by the names of their evaluations."""
    if isinstance(eval_dataset, dict):
        return {f"eval_{name}": value for name, value in eval_dataset.items()}
    return {} if eval_dataset is None else {"eval": eval_dataset}


def _instances(callbacks: Iterable[AnyCallback | type[Any]] | None) -> list[Any]:
    """Return the given callbacks, each class as an instance, after a check of them: their indices are those of the caller."""
    found = [callback() if isinstance(callback, type) else callback for callback in listed(callbacks or ())]
    checked(adapted(found))
    return found


class _Module(ModuleType):
    """This module. An import of it by its path sets ``cadenza.compat.transformers.trainer`` to it, so it is callable, too."""

    __call__ = staticmethod(trainer)


sys.modules[__name__].__class__ = _Module
