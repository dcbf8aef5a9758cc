"""``fastNLP.core.controllers.evaluator``: evaluate a model on one or more loaders."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from cadenza import drivers
from cadenza.compat.fastnlp import saving
from cadenza.compat.fastnlp.core.controllers import rank_batches
from cadenza.compat.fastnlp.core.controllers.loops import EvaluateBatchLoop, Loop
from cadenza.compat.fastnlp.core.controllers.utils.arguments import (
    IDLE,
    check_arity,
    check_keywords,
    named_loaders,
    of_the_driver,
)
from cadenza.compat.fastnlp.core.drivers.choose_driver import choose_driver
from cadenza.compat.fastnlp.core.drivers.driver import Driver
from cadenza.compat.fastnlp.core.utils.utils import (
    Mapped,
    Wanted,
    apply_mapping,
    as_number,
    check_mapping,
    model_function,
)
from cadenza.loading.evaluation import reduces_itself
from cadenza.loading.loaders import Limited
from cadenza.loading.rng import preserve_rng_state
from cadenza.optim.precision import precision_of

logger: logging.Logger = logging.getLogger("cadenza")

Watch = Callable[[str, Any, Mapping[str, Any] | None], object]
"""Called before and after the step of a batch: ``watch("start", batch, None)``, ``watch("end", batch, outputs)``."""

ACCEPTED = (
    *("model_use_eval_mode", "separator", "evaluate_dataloaders", "evaluate_input_mapping", "evaluate_output_mapping"),
    *("progress_bar", "check_dataloader_legality", "torch_kwargs"),
)


class Evaluator:
    """Evaluate a model on one or more loaders with one or more metrics.

    Results are named ``metric``, ``key#metric`` if a metric returns a dict, and ``key#metric#loader`` if loaders have names.

    Args:
        model: The model. Steps call its ``evaluate_step``, or its forward pass.
        dataloaders: A loader, or a dict of them.
        metrics: By name, objects with ``update``, ``get_metric`` and ``reset``, or torchmetrics. The arguments of
            ``update`` are found by name in the outputs of the model and in the batch.
        driver: As in `Trainer`; it may be ``trainer.driver``.
        device: As in `Trainer`.
        evaluate_batch_step_fn: ``evaluate_batch_step_fn(evaluator, batch)`` does the step, with `evaluate_step` and `update`.
        evaluate_fn: The name of the model's method instead.
        input_mapping: As in `Trainer`.
        output_mapping: As in `Trainer`.
        model_wo_auto_param_call: Pass batches unchanged.
        fp16: Use float16 autocast.
        verbose: Print the results, unless 0.
        kwargs: ``model_use_eval_mode=True``; ``separator="#"``; ``evaluate_dataloaders``, ``evaluate_input_mapping`` and
            ``evaluate_output_mapping``, aliases of the above; ``progress_bar``, which is ignored. Others
            are named in a warning.

    Raises:
        ValueError, TypeError: An argument is wrong.
        RuntimeError: The model has no such method.
    """

    model: nn.Module
    metrics: dict[str, Any]
    verbose: int

    def __init__(  # the signature is fastNLP's
        self,
        model: nn.Module,
        dataloaders: Any = None,
        metrics: Mapping[str, Any] | None = None,
        driver: str | Driver | drivers.Driver = "auto",
        device: Any = None,
        evaluate_batch_step_fn: Callable[[Evaluator, Any], object] | None = None,
        evaluate_fn: str | None = None,
        input_mapping: Mapped | None = None,
        output_mapping: Mapped | None = None,
        model_wo_auto_param_call: bool = False,
        fp16: bool = False,
        verbose: int = 1,
        **kwargs: Any,
    ) -> None:
        check_keywords(Evaluator, kwargs, ACCEPTED, IDLE)
        dataloaders = _either("dataloaders", dataloaders, "evaluate_dataloaders", kwargs)
        self.input_mapping: Any = _either("input_mapping", input_mapping, "evaluate_input_mapping", kwargs)
        self.output_mapping: Any = _either("output_mapping", output_mapping, "evaluate_output_mapping", kwargs)
        self.dataloaders: dict[str, Any] = named_loaders(dataloaders)
        check_mapping(self.input_mapping, "input_mapping")
        check_mapping(self.output_mapping, "output_mapping")
        if evaluate_batch_step_fn is not None:
            check_arity(evaluate_batch_step_fn, 2, "evaluate_batch_step_fn(evaluator, batch)")
        self.model, self.metrics, self.verbose = model, checked_metrics(metrics), verbose
        self.driver: Driver = choose_driver(model, driver, device, **of_the_driver(kwargs, fp16, model_wo_auto_param_call))
        self.separator: str = kwargs.get("separator", "#")
        self.uses_eval_mode: bool = kwargs.get("model_use_eval_mode", True)
        self._loop: Loop = EvaluateBatchLoop(evaluate_batch_step_fn)
        self.cur_dataloader_name: str | None = None
        """The name of the loader that is being evaluated; None if it has no name."""
        self._watch: Watch | None = None
        self._function = model_function(model, evaluate_fn, "evaluate_step", by_name=not model_wo_auto_param_call)
        self._step = precision_of("fp16" if fp16 else "fp32", self.driver.model_device.type).wrap(self._function)
        self._wanted: dict[str, Wanted] = {}
        self._said: set[str] = set()
        self._outputs: Any = None
        self._gathered = rank_batches.GatheredBatches()

    def run(self, num_eval_batch_per_dl: int = -1, *, watch: Watch | None = None) -> dict[str, Any]:
        """Evaluate the current model; return the results, tensors of one element as numbers.

        The model mode and the RNG state are restored. Every rank must call this: each reads its own shard of the batches, and
        all get the results of a single process.

        Args:
            num_eval_batch_per_dl: At most this many batches of each loader; -1: all.
            watch: Called for each batch.
        """
        assert num_eval_batch_per_dl == -1 or num_eval_batch_per_dl > 0, "num_eval_batch_per_dl must be -1 or more than 0"
        limit = None if num_eval_batch_per_dl == -1 else num_eval_batch_per_dl
        nested: dict[str, Mapping[str, Any]] = {}
        self._watch = watch
        try:
            with self._quiet():
                self.reset()
                for name, loader in self.dataloaders.items():
                    self.cur_dataloader_name = name or None
                    nested[name] = self._evaluated(loader, limit)
                    self.reset()
        finally:
            self._watch = None  # it holds the run
        results = self._flat(nested)
        if self.verbose and self.driver.is_global_zero():
            print(json.dumps(results, default=str))  # noqa: T201  # documented by fastNLP
        return results

    # -- for user-defined loops and steps --------------------------------------------------------

    @property
    def evaluate_batch_loop(self) -> Loop:
        """The loop over the batches of a loader. Replace it with an object that has a method ``run(evaluator, dataloader)``.

        ``run`` returns the results by the names of the metrics.
        """
        return self._loop

    @evaluate_batch_loop.setter
    def evaluate_batch_loop(self, loop: Loop) -> None:
        if not callable(getattr(loop, "run", None)):
            raise TypeError(f"evaluate_batch_loop must have a method run(evaluator, dataloader); got {loop!r}")
        if self.driver.is_distributed() and type(loop).run is not EvaluateBatchLoop.run:
            raise RuntimeError("a loop of your own works in one process only. Pass evaluate_batch_step_fn= to Evaluator.")
        self._loop = loop

    def move_data_to_device(self, batch: Any) -> Any:
        """Return a batch with every tensor in it on the device."""
        return self.driver.move_data_to_device(batch)

    def evaluate_step(self, batch: Any) -> Any:
        """Return the outputs of the model for a batch, after ``output_mapping``."""
        self._outputs = apply_mapping(self.output_mapping, self._step(batch))
        return self._outputs

    def update(self, batch: Any, outputs: Any) -> None:
        """Update each metric with the entries of outputs and batch that match its arguments.

        Raises:
            RuntimeError: The model returned neither a dict nor a dataclass.
            ValueError: An argument of a metric is in neither, or in both with different values.
        """
        named = _named(outputs)
        if named is None:
            raise RuntimeError(f"metrics need a dict or a dataclass from the model; got a {type(outputs).__name__}")
        given = _named(batch)
        if given is None:
            self._say_once(f"metrics get no arguments from the batches, which are not dicts but {type(batch).__name__}")
        for name, metric in self.metrics.items():
            update = metric.update if hasattr(metric, "update") else metric
            if name not in self._wanted:
                self._wanted[name] = Wanted(update)
            arguments = self._wanted[name].of(named, given or {})
            if self.driver.native.world_size == 1 or reduces_itself(metric):
                update(**arguments)
            else:
                self._gathered.add(name, arguments)

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self.metrics.values():
            metric.reset()

    def get_metric(self) -> dict[str, Any]:
        """Return each metric's result, by its name."""
        return {
            name: metric.get_metric() if hasattr(metric, "get_metric") else metric.compute()
            for name, metric in self.metrics.items()
        }

    def load_model(
        self,
        folder: saving.PathOrStream,
        only_state_dict: bool = True,
        model_load_fn: Callable[[str], object] | None = None,
        strict: bool = True,
    ) -> None:
        """Load the weights that ``Trainer.save_model`` wrote; see there."""
        saving.read_model(self.model, folder, only_state_dict=only_state_dict, load_fn=model_load_fn, strict=strict)

    def update_progress_bar(self, batch_idx: int, dataloader_name: str | None, **kwargs: Any) -> None:
        """Note the number of completed batches of a loader; an error in a loop of the user's own names it."""
        self._done = f"after {batch_idx} batches of the loader {dataloader_name!r}"

    def evaluate_batch(self, loaded: Any, step: Callable[[Any, Any], object]) -> None:
        """Apply ``input_mapping`` to a batch of a loader, move it to the device, and call ``step(evaluator, batch)``."""
        watch = self._watch
        self._outputs = None
        batch = self.driver.move_data_to_device(apply_mapping(self.input_mapping, loaded))
        self._gathered.begin()
        if watch is not None:
            watch("start", batch, None)
        try:
            step(self, batch)
        finally:
            if watch is not None:
                watch("end", batch, _named(self._outputs))

    # -- parts of run ----------------------------------------------------------------------------------

    def _evaluated(self, loader: Any, limit: int | None) -> Mapping[str, Any]:
        """Return the results of one loader, by the names of the metrics."""
        if type(self._loop).run is not EvaluateBatchLoop.run:
            return self._evaluated_by_own_loop(loader if limit is None else Limited(loader, limit))
        for batch in rank_batches.batches_of_rank(self.driver.native, self.model, loader, limit):
            self.evaluate_batch(batch, self._loop.batch_step_fn)
        self._gathered.update(self.driver.native, self.metrics)
        return self.get_metric()

    def _evaluated_by_own_loop(self, loader: Any) -> Mapping[str, Any]:
        self._done = ""
        try:
            results: Mapping[str, Any] = self._loop.run(self, loader)
        except Exception as error:
            if self._done:
                error.add_note(f"raised in the evaluate_batch_loop, {self._done}")
            raise
        return results

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        for metric in self.metrics.values():
            if hasattr(metric, "to"):
                metric.to(self.driver.model_device)
        with preserve_rng_state(), torch.no_grad():
            if self.uses_eval_mode:
                self.model.eval()
            try:
                yield
            finally:
                for module, training in modes:
                    module.training = training

    def _flat(self, nested: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return results by flat names: the innermost part first, the name of the loader last."""
        flat: dict[str, Any] = {}
        for loader, by_metric in nested.items():
            for parts, value in _leaves(by_metric):
                name = self.separator.join([*parts, *([loader] if loader else [])])
                if value is None:
                    self._say_once(f"the metric {name!r} returned None, which is omitted")
                else:
                    flat[name] = as_number(value)
        return flat

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return checked metrics.

    Raises:
        TypeError: `metrics` is not a dict, a name is not a string, or an object is not a metric.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of metrics by name; got {metrics!r}")
    for name, metric in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"metrics must have names of type str; got {name!r}")
        if isinstance(metric, type):
            raise TypeError(f"metrics[{name!r}] must be a metric; got the class {metric.__name__}: write {metric.__name__}()")
        updates = hasattr(metric, "update") or (callable(metric) and hasattr(metric, "get_metric"))
        if not (updates and hasattr(metric, "reset") and (hasattr(metric, "get_metric") or hasattr(metric, "compute"))):
            raise TypeError(f"metrics[{name!r}] must have update, reset, and get_metric or compute; got {metric!r}")
    return dict(metrics)


def _either(name: str, value: Any, alias: str, kwargs: Mapping[str, Any]) -> Any:
    if value is not None and kwargs.get(alias) is not None:
        raise ValueError(f"{name} and {alias} are aliases; got both. Pass only one of them.")
    return kwargs.get(alias) if value is None else value


def _named(value: Any) -> Mapping[str, Any] | None:
    """Return the named parts of a dict or a dataclass; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return None


def _leaves(tree: Mapping[str, Any]) -> Iterable[tuple[list[str], Any]]:
    """Yield each result with the parts of its name, the innermost first."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            for parts, leaf in _leaves(value):
                yield [*parts, name], leaf
        else:
            yield [name], value
