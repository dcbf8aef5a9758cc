"""``EvaluatorCallback``, for evaluations in both versions of NeMo."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.graph import Graph, GraphModel
from cadenza.compat.neural.logs import is_main_here, logging
from cadenza.compat.neural.modules import loader_of
from cadenza.compat.neural.tensors import NmTensor, tensor_list
from cadenza.compat.neural.tracking import Tracker
from cadenza.drivers import Driver
from cadenza.engine.evaluation import evaluate
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.loading.batches import moved
from cadenza.loading.evaluation import Evaluation
from cadenza.trainer import Trainer

if TYPE_CHECKING:
    from cadenza.run import Run

IS_FROM_DIST_EVAL = "IS_FROM_DIST_EVAL"


class Values(dict[str, Any]):
    """The values of an evaluation batch: lists of tensors, one tensor per worker.

    The keys are unique names. The name of the port, or the name from ``rename``, finds the same entry.
    """

    def __init__(self, tensors: Sequence[NmTensor], workers: Sequence[Mapping[str, Any]], *, shared: bool) -> None:
        super().__init__({tensor.unique_name: [worker[tensor.unique_name] for worker in workers] for tensor in tensors})
        self[IS_FROM_DIST_EVAL] = shared
        self._unique = {tensor.name: tensor.unique_name for tensor in tensors}

    def __missing__(self, name: str) -> Any:
        if name in self._unique:
            return self[self._unique[name]]
        raise KeyError(f"no tensor {name!r} is evaluated; the evaluated ones are {list(self._unique)}")

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._unique

    def get(self, name: str, default: Any = None) -> Any:
        """Return the entry of `name`, or `default`."""
        return self[name] if name in self else default  # noqa: SIM401  # this is get


class EvaluatorCallback(ActionCallback):
    """Evaluate every `eval_step` steps, and at the end of the training.

    Args:
        eval_tensors: The tensors to compute. They must depend on one data layer.
        user_iter_callback: Called for each batch with its values and a dict of this evaluation. On several processes it is
            called on the main process only, after the last batch, with the values of one batch per process.
        user_epochs_done_callback: Called with that dict after the last batch, on the main process. Returns a dict of numbers
            to log, which all processes get, or None.
        tb_writer: A SummaryWriter.
        tb_writer_func: Called with the writer, the result of that function, and the step. None writes each number.
        eval_step: The number of steps between two evaluations.
        eval_epoch: The number of epochs between two evaluations, at the end of an epoch.
        wandb_name: The name of the wandb run.
        wandb_project: The wandb project. With a name or a project, results are sent to Weights & Biases.
        eval_at_start: Whether to evaluate after step 0 as well.

    Native callbacks see the numbers as ``"EvaluatorCallback/<key>"``; set `name` to change the first part.
    """

    def __init__(
        self,
        eval_tensors: Sequence[NmTensor],
        user_iter_callback: Callable[[dict[str, Any], dict[str, Any]], object],
        user_epochs_done_callback: Callable[[dict[str, Any]], dict[str, Any] | None],
        tb_writer: Any = None,
        tb_writer_func: Callable[[Any, Any, int], object] | None = None,
        eval_step: int | None = 1,
        eval_epoch: int | None = None,
        wandb_name: str | None = None,
        wandb_project: str | None = None,
        eval_at_start: bool = True,
    ) -> None:
        super().__init__()
        if eval_step is None and eval_epoch is None:
            raise ValueError("expected eval_step or eval_epoch; got neither")
        for name, every in (("eval_step", eval_step), ("eval_epoch", eval_epoch)):
            if every is not None and every <= 0:
                raise ValueError(f"{name} must be at least 1, or None; got {every!r}")
        for name, function in (
            ("user_iter_callback", user_iter_callback),
            ("user_epochs_done_callback", user_epochs_done_callback),
        ):
            if not callable(function):
                raise TypeError(f"{name} must be a function; got {function!r}")
        self.eval_tensors: list[NmTensor] = tensor_list("eval_tensors", eval_tensors)
        self.user_iter_callback: Callable[[dict[str, Any], dict[str, Any]], object] = user_iter_callback
        self.user_epochs_done_callback: Callable[[dict[str, Any]], dict[str, Any] | None] = user_epochs_done_callback
        self.tb_writer: Any = tb_writer
        self.tb_writer_func: Callable[[Any, Any, int], object] | None = tb_writer_func
        self.eval_step: int | None = eval_step
        self.eval_epoch: int | None = eval_epoch
        self.eval_at_start: bool = eval_at_start
        self.wandb_name: str | None = wandb_name
        self.wandb_project: str | None = wandb_project
        self.graph: Graph = Graph(self.eval_tensors)
        self._tracker = Tracker()
        self._global: dict[str, Any] = {}
        self._evaluation: Evaluation | None = None
        self._step = 0
        self._shared = False
        self._own: list[list[Any]] = []

    def listeners(self) -> list[Listener]:
        return [
            Listener(Callback.on_setup, self._announce),
            Listener(Callback.on_eval_start, self._begin),
            Listener(Callback.on_eval_end, self._finish),
            *super().listeners(),
        ]

    def on_action_start(self) -> None:
        if self.global_rank in (None, 0):
            self._start_tracking()

    def on_iteration_end(self) -> None:
        if self.eval_step is not None and self.step % self.eval_step == 0 and (self.step or self.eval_at_start):
            self.evaluate(self.action.run, self.step)

    def on_epoch_end(self) -> None:
        if self.eval_epoch is not None and (self.epoch_num + 1) % self.eval_epoch == 0:
            self.evaluate(self.action.run, self.step)

    def on_action_end(self) -> None:
        self.evaluate(self.action.run, self.step, last=True)

    def evaluate(self, run: Run, step: int, *, last: bool = False) -> None:
        """Evaluate now and log the results at this step. Every rank must call this.

        Args:
            run: The native run.
            step: The step in the logs.
            last: Whether the training has ended.
        """
        assert self._evaluation is not None, "created in on_setup"
        began = time.time()
        self._step, self._global = step, {}
        logging.info(("Final" if last else "Doing") + " Evaluation " + "." * 30)
        if self.graph.data_layer.dataset is None:  # a data_iterator may be a new iterator each time it is read
            self._evaluation.loader = loader_of(self.graph.data_layer)
        others = [part for module in self.graph.modules() if isinstance(module, nn.Module) for part in module.modules()]
        modes = [(part, part.training) for part in others]
        try:
            for part in others:  # also those that the training does not use
                part.training = False
            evaluate(session_of(run), self._evaluation)
        finally:
            for part, training in modes:
                part.training = training
        logging.info("Evaluation time: %.4f seconds", time.time() - began)

    def evaluate_alone(self, driver: Driver, precision: str) -> None:
        """Evaluate without a training and log the results at step 0."""
        self._step, self._global = 0, {}
        if is_main_here():
            self._start_tracking()
        loader = loader_of(self.graph.data_layer)
        model = GraphModel(self.graph)
        trainer = Trainer(
            model, _no_optimizer, loader, max_steps=1, driver=driver, precision=precision, callbacks=[self], progress=False
        )
        trainer.evaluate(loader, name="eval", compute=self._compute)

    def _announce(self, run: Run) -> None:
        name = hooks_of(run).name_of(self)
        self._evaluation = Evaluation(loader_of(self.graph.data_layer), name=name, compute=self._compute)
        run.evaluations[name] = self._evaluation
        for module in self.graph.modules():
            if isinstance(module, nn.Module):
                module.to(run.device)

    def _compute(self, _: nn.Module, batch: Any) -> dict[str, Any]:
        values: dict[str, Any] = self.graph.read(batch)
        self.graph.compute(values, self.eval_tensors)
        if self._shared:
            # Without names: unique names differ between processes.
            self._own.append(moved([values[tensor.unique_name] for tensor in self.eval_tensors], torch.device("cpu")))
        else:
            self.user_iter_callback(Values(self.eval_tensors, [values], shared=False), self._global)
        return {"values": values}

    def _begin(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.compute == self._compute:
            self._shared, self._own = run.driver.world_size > 1, []

    def _finish(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.compute != self._compute or not evaluation.complete:
            return
        if self._shared:
            self._call_for_all_ranks(run)
        numbers = self._results() if run.is_main else {}
        numbers = run.driver.broadcast(numbers)  # for monitors, which decide on every rank
        if numbers:
            evaluation.results.update({f"{evaluation.name}/{name}": value for name, value in numbers.items()})
            run.log(dict(evaluation.results))

    def _call_for_all_ranks(self, run: Run) -> None:
        """Call the user's function on the main process with the batches of all ranks. Every rank must call this."""
        own, self._own = self._own, []
        for index in range(max(run.driver.gather(len(own)))):  # a rank may have fewer batches
            everyone = run.driver.gather_data(own[index] if index < len(own) else None)
            if run.is_main:
                names = [tensor.unique_name for tensor in self.eval_tensors]
                present = [moved(values, run.device) for values in everyone if values is not None]
                workers = [dict(zip(names, values, strict=True)) for values in present]
                self.user_iter_callback(Values(self.eval_tensors, workers, shared=True), self._global)

    def _results(self) -> dict[str, float]:
        """Call the user's function, write its result, and return the numbers in it."""
        result = self.user_epochs_done_callback(self._global)
        if result is None:
            return {}
        if self.tb_writer is not None and self.tb_writer_func is not None:
            self.tb_writer_func(self.tb_writer, result, self._step)  # it may accept any result
        numbers: dict[str, float] = {}
        if isinstance(result, Mapping):
            numbers = self._write(result)
        elif self.tb_writer_func is None:
            raise TypeError(f"user_epochs_done_callback must return a dict of numbers, or None; got {result!r}")
        if self.tb_writer is not None:
            self.tb_writer.flush()  # the process may end after the last evaluation
        return numbers

    def _write(self, result: Mapping[str, Any]) -> dict[str, float]:
        if self.tb_writer is not None and self.tb_writer_func is None:
            for name, value in result.items():
                self.tb_writer.add_scalar(name, value, self._step)
        self._tracker.send(result, self._step)
        return {name: float(value) for name, value in result.items() if _is_number(value)}

    def _start_tracking(self) -> None:
        if self.wandb_name is not None or self.wandb_project is not None:
            self._tracker.start(self.wandb_name, self.wandb_project)


def _no_optimizer(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    return []


def _is_number(value: object) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0)
