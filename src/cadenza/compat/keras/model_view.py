"""``model`` of Keras's callbacks: a view of a run and its module."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from cadenza.compat.adapter.view import View, refuse
from cadenza.compat.keras import inference, saving
from cadenza.compat.keras.directions import directed_metrics
from cadenza.compat.keras.optimizer_view import OptimizerView, optimizer_view
from cadenza.compat.keras.variables import Variable, arrays, assign_all
from cadenza.engine.session import weakly
from cadenza.hooks.dispatch import hooks_of

if TYPE_CHECKING:
    from cadenza.run import Run

_LOADER = "A native run reads loaders. Give the loader to Evaluate(...), or call trainer.evaluate(loader) after the run."
_FREEZE = "Set requires_grad of the parameters, or add Freeze(...) to callbacks."
_KERAS = "It belongs to a model of Keras; the model of this run is a plain nn.Module."


class _Weights(View):
    """The common part of a model and its layers: weights by name."""

    def __init__(self, run: Run, module: nn.Module) -> None:
        super().__init__(run)
        self._module: nn.Module = module
        self._repeats: bool = False
        """Whether a resumed run repeats an event that preceded the checkpoint. Weights and rates then keep their values."""
        self._setters: dict[str, None] = {}
        """The callbacks that have set weights or rates since the ranks last compared them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in type(self).absent or not hasattr(self._module, name):
            return super().__getattr__(name)
        return getattr(self._module, name)

    def __call__(self, *inputs: Any, training: bool | None = None, **keywords: Any) -> Any:
        """Call the user's module, with ``training=True`` in its current mode, otherwise in evaluation mode, as in Keras."""
        given = [inference.placed(self._run, tensor) for tensor in inputs]
        with nullcontext() if training else inference.evaluation_mode(self._module):
            return self._module(*given, **keywords)

    def _may_set(self) -> bool:
        """Return whether weights and rates can be set now. The calling callback is recorded as a setter."""
        if not self._repeats:
            self._setters[hooks_of(self._run).current_owner() or "the script"] = None
        return not self._repeats

    def _tensors(self) -> dict[str, Tensor]:
        found = self._module.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}

    @property
    def name(self) -> str:
        """The name of the module's class in snake case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self._module).__name__).lower()

    @property
    def weights(self) -> list[Any]:
        """The tensors of ``state_dict()``, each with ``name``, ``path``, ``shape``, ``numpy()`` and ``assign(value)``."""
        return [Variable(name, tensor, self._may_set) for name, tensor in self._tensors().items()]

    @property
    def variables(self) -> list[Any]:
        """The same as `weights`."""
        return self.weights

    @property
    def trainable_variables(self) -> list[Any]:
        """The `weights` that require a gradient."""
        return [weight for weight in self.weights if weight.trainable]

    @property
    def trainable_weights(self) -> list[Any]:
        """The same as `trainable_variables`."""
        return self.trainable_variables

    @property
    def non_trainable_variables(self) -> list[Any]:
        """The `weights` without a gradient, such as the statistics of BatchNorm."""
        return [weight for weight in self.weights if not weight.trainable]

    @property
    def non_trainable_weights(self) -> list[Any]:
        """The same as `non_trainable_variables`."""
        return self.non_trainable_variables

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires a gradient."""
        return any(parameter.requires_grad for parameter in self._module.parameters())

    @property
    def dtype(self) -> str:
        """The dtype of the weights, such as ``float32``."""
        return next((weight.dtype for weight in self.weights), "float32")

    @property
    def built(self) -> bool:
        """Always true."""
        return True

    def get_weights(self) -> list[Any]:
        """Return the tensors of ``state_dict()`` as arrays of NumPy, in its order. Every rank must call this if sharded."""
        return arrays(self._tensors().values())

    def set_weights(self, weights: Iterable[Any]) -> None:
        """Copy arrays, in the order of `get_weights`, into the module. Every rank must call this."""
        if self._may_set():
            found = self._tensors()
            assign_all([*found], [*found.values()], weights, f"{type(self).title}.set_weights")

    def count_params(self) -> int:
        """Return the number of all weights: parameters and buffers."""
        return sum(tensor.numel() for tensor in self._tensors().values())


class LayerView(_Weights):
    """A child of the model, as a layer. Other attributes are those of the module."""

    title: ClassVar[str] = "layer"
    absent: ClassVar[Mapping[str, str]] = {
        "get_config": _KERAS,
        "output": _KERAS,
        "trainable": _FREEZE,
        "input": _KERAS,
        "kernel": "The weights of a torch layer are layer.weight and layer.bias.",
    }

    def __init__(self, run: Run, name: str, module: nn.Module, model: ModelView) -> None:
        super().__init__(run, module)
        self._path: str = name
        self._model: ModelView = model

    @property
    def name(self) -> str:
        """The name of the child in its module."""
        return self._path

    def _may_set(self) -> bool:
        return self._model._may_set()


class ModelView(_Weights):
    """``model`` of a callback. Other attributes are those of the user's module."""

    title: ClassVar[str] = "model"
    absent: ClassVar[Mapping[str, str]] = {
        "fit": "The run trains already. Call trainer.fit() for another one.",
        "train_on_batch": "Give Trainer(step_fn=...) for steps of your own.",
        "test_on_batch": "Call model.evaluate(inputs, targets).",
        "compile": "Give the optimizer and compute_loss to Trainer(...), metrics to Evaluate(metrics=...).",
        "compute_loss": "Give compute_loss to Trainer(...).",
        "loss": "Give compute_loss to Trainer(...).",
        "trainable": _FREEZE,
        "losses": "Add penalties to the loss in compute_loss.",
        "stop_evaluating": "Evaluate(limit=...) ends an evaluation after so many batches.",
        "stop_predicting": "trainer.predict(limit=...) ends after so many batches.",
        "reset_metrics": "Means begin anew in each epoch.",
        "train_function": "A native run has no compiled function; Trainer(compile=True) compiles the model.",
        "test_function": "A native run has no compiled function; Trainer(compile=True) compiles the model.",
        "get_config": _KERAS,
        "to_json": _KERAS,
        "get_state_tree": _KERAS,
        "export": "Use torch.export, or torch.onnx.export, with the module.",
        "inputs": _KERAS,
        "outputs": _KERAS,
        "input_shape": _KERAS,
        "output_shape": _KERAS,
        "distribute_strategy": "Give Trainer(driver=...); callbacks run on every rank.",
    }

    def __init__(self, run: Run, means: Callable[[], dict[str, Any]]) -> None:
        super().__init__(run, run.model)
        self._means = means
        self._optimizer: OptimizerView = optimizer_view(run, weakly(self._may_set))
        self._stops: bool = False
        self._request_stop: Callable[[], None] = lambda: None
        self._withdraw_stop: Callable[[], bool] = lambda: True
        self._history: Callable[[], Any] = lambda: None
        self._start_epoch: Callable[[int], None] | None = None

    # -- the run ------------------------------------------------------------------------------------------

    @property
    def stop_training(self) -> bool:
        """Whether a callback has set it. Setting it calls ``run.stop`` after the batch, with the callback as author."""
        return self._stops

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value and not self._stops:
            self._stops = True
            self._request_stop()
        elif self._stops and not value:
            self._stops = not self._withdraw_stop()
            if self._stops:
                self._run.warn("model.stop_training = False comes too late: the stop has taken effect")

    @property
    def optimizer(self) -> Any:
        """A view of the optimizer with ``learning_rate`` and ``iterations``, or of multiple ones with ``optimizers``."""
        return self._optimizer

    @property
    def history(self) -> Any:
        """The `keras.callbacks.History` in the list, or a History added by the run, as ``fit`` does."""
        return self._history()

    @history.setter
    def history(self, value: Any) -> None:
        if value is not self._history():
            self._history = lambda: value

    @property
    def metrics_names(self) -> list[str]:
        """The names in the logs of batches: ``loss`` first."""
        return [*dict.fromkeys(["loss", *self._means()])]

    @property
    def metrics(self) -> list[Any]:
        """The names and directions of metrics, for ``mode="auto"`` of Keras's callbacks."""
        return directed_metrics(self._run, self._means())

    @property
    def compiled(self) -> bool:
        """Always true: the run has an optimizer and a loss."""
        return True

    @property
    def run_eagerly(self) -> bool:
        """Always true."""
        return True

    @property
    def _initial_epoch(self) -> int:
        """The epoch in which the run begins, from 0. `keras.callbacks.BackupAndRestore` sets it."""
        return self._run.progress.epoch

    @_initial_epoch.setter
    def _initial_epoch(self, epoch: int) -> None:
        if self._start_epoch is not None and not self._repeats:
            self._start_epoch(int(epoch))

    # -- the module ---------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[Any]:
        """A view of each child of the module."""
        return [LayerView(self._run, name, child, self) for name, child in self._module.named_children()]

    def get_layer(self, name: str | None = None, index: int | None = None) -> Any:
        """Return the view of a child by its name or its index."""
        layers = self.layers
        if index is not None:
            return layers[index]
        found = [layer for layer in layers if layer.name == name]
        if not found:
            raise ValueError(f"no layer is named {name!r}; the children of the module are {[layer.name for layer in layers]}")
        return found[0]

    def predict(self, x: Any, batch_size: int | None = None, verbose: Any = 0, steps: int | None = None, **others: Any) -> Any:
        """Return the outputs for arrays, tensors or a loader as arrays of NumPy: in evaluation mode, on this rank only."""
        return inference.predict(self._run, self, x, batch_size, steps)

    def predict_on_batch(self, x: Any) -> Any:
        """Return the outputs for one batch."""
        return inference.predict(self._run, self, x, batch_size=sys.maxsize)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = 0,
        *,
        steps: int | None = None,
        return_dict: bool = False,
        **others: Any,
    ) -> Any:
        """Return the loss for inputs and targets, or for a loader, on this rank only; with more results, a list or a dict.

        It uses the metrics of the `Evaluate` with ``val_`` names. No event is called.
        """
        if others.get("sample_weight") is not None:
            refuse(self._run, self, "evaluate(sample_weight=...)", "calls", advice=_LOADER)
        results = inference.evaluate(self._run, x, y, batch_size, steps)
        if return_dict:
            return results
        return [*results.values()] if len(results) > 1 else results["loss"]

    def get_metrics_result(self) -> dict[str, Any]:
        """Return the running means of the epoch, as in the logs of the last batch."""
        return self._means()

    def summary(self, *, print_fn: Callable[[str], object] | None = None, **others: Any) -> None:
        """Show the module and the number of its weights."""
        (print_fn or self._run.print)(f"{self._module}\nTotal params: {self.count_params():,}")

    def save(self, filepath: Any, overwrite: bool = True, **others: Any) -> None:
        """Write weights and optimizer states with ``torch.save``, under exactly this name."""
        saving.save(self._run, filepath, overwrite=overwrite)

    def save_weights(self, filepath: Any, overwrite: bool = True, **others: Any) -> None:
        """Write the same file as `save`."""
        saving.save(self._run, filepath, overwrite=overwrite)

    def load_weights(self, filepath: Any, **others: Any) -> None:
        """Read a file of `save`, or a state dict. Every rank must call this."""
        if self._may_set():
            saving.load(self._run, filepath)
