"""``model`` of Keras's callbacks: a view of a run and its module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from cadenza.adapters.keras import saving
from cadenza.adapters.keras.directions import directed_metrics
from cadenza.adapters.keras.optimizer_view import OptimizerView, optimizer_view
from cadenza.adapters.keras.variables import Variable, arrays, assign_all
from cadenza.adapters.view import View
from cadenza.hooks.dispatch import hooks_of

if TYPE_CHECKING:
    from cadenza.run import Run

_LOADER = "A native run reads loaders. Give the loader to Evaluate(...), or call trainer.evaluate(loader) after the run."
_KERAS = "It belongs to a model of Keras; the model of this run is a plain nn.Module."


class _Weights(View):
    """What a model and its layers have in common: weights by name."""

    def __init__(self, run: Run, module: nn.Module) -> None:
        super().__init__(run)
        self._module: nn.Module = module
        self._repeats: bool = False
        """Whether a resumed run repeats an event that the checkpoint has behind it: then weights and rates stay."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in type(self).absent or not hasattr(self._module, name):
            return super().__getattr__(name)
        return getattr(self._module, name)

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the user's own module. ``training=`` is for Keras: the module has its own mode."""
        keywords.pop("training", None)
        return self._module(*inputs, **keywords)

    def _may_set(self) -> bool:
        return not self._repeats

    def _tensors(self) -> dict[str, Tensor]:
        found = self._module.state_dict(keep_vars=True)
        return {name: one for name, one in found.items() if isinstance(one, Tensor)}

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
        """Those of the `weights` that get a gradient."""
        return [one for one in self.weights if one.trainable]

    @property
    def trainable_weights(self) -> list[Any]:
        """The same as `trainable_variables`."""
        return self.trainable_variables

    @property
    def non_trainable_variables(self) -> list[Any]:
        """Those of the `weights` that get no gradient, such as the statistics of BatchNorm."""
        return [one for one in self.weights if not one.trainable]

    @property
    def non_trainable_weights(self) -> list[Any]:
        """The same as `non_trainable_variables`."""
        return self.non_trainable_variables

    @property
    def built(self) -> bool:
        """Always true."""
        return True

    def get_weights(self) -> list[Any]:
        """Return the tensors of ``state_dict()`` as arrays of NumPy, in its order. Every rank must call this if sharded."""
        return arrays(self._tensors().values())

    def set_weights(self, weights: Iterable[Any]) -> None:
        """Copy arrays, in the order of `get_weights`, into the module. Every rank must call this."""
        if not self._repeats:
            found = self._tensors()
            assign_all([*found], [*found.values()], weights, f"{type(self).title}.set_weights")

    def count_params(self) -> int:
        """Return the number of all weights: parameters and buffers."""
        return sum(one.numel() for one in self._tensors().values())


class LayerView(_Weights):
    """A child of the model, as a layer. Other attributes are those of the module."""

    title: ClassVar[str] = "layer"
    absent: ClassVar[Mapping[str, str]] = {
        "get_config": _KERAS,
        "output": _KERAS,
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
        return not self._model._repeats


class ModelView(_Weights):
    """``model`` of a callback. An attribute that is not listed here is that of the user's own module, if it has one."""

    title: ClassVar[str] = "model"
    absent: ClassVar[Mapping[str, str]] = {
        "fit": "The run trains already. Call trainer.fit() for another one.",
        "evaluate": _LOADER,
        "train_on_batch": "Give Trainer(step_fn=...) for steps of your own.",
        "test_on_batch": _LOADER,
        "predict_on_batch": "Call model.predict(inputs), or model(inputs).",
        "compile": "Give the optimizer and compute_loss to Trainer(...), metrics to Evaluate(metrics=...).",
        "compute_loss": "Give compute_loss to Trainer(...).",
        "loss": "Give compute_loss to Trainer(...).",
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

    def __init__(self, run: Run, names: Callable[[], list[str]]) -> None:
        super().__init__(run, run.model)
        self._names = names
        self._optimizer: OptimizerView = optimizer_view(run, self._may_set)
        self._stops: bool = False
        self._history: Any = None
        self._start_epoch: Callable[[int], None] | None = None

    # -- the run ------------------------------------------------------------------------------------------

    @property
    def stop_training(self) -> bool:
        """Whether a callback has set it. Setting it is ``run.stop`` with the callback as its author."""
        return self._stops

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        if value and not self._stops:
            self._stops = True
            self._run.stop(f"{hooks_of(self._run).current_owner() or 'the script'} set model.stop_training")
        elif self._stops and not value:
            self._run.warn("model.stop_training = False comes too late: a stop that was requested is not withdrawn")

    @property
    def optimizer(self) -> Any:
        """A view of the optimizer, with ``learning_rate`` and ``iterations``; of several, with ``optimizers``."""
        return self._optimizer

    @property
    def history(self) -> Any:
        """The callback `keras.callbacks.History` of the list; it sets this itself."""
        return self._history

    @history.setter
    def history(self, value: Any) -> None:
        self._history = value

    @property
    def metrics_names(self) -> list[str]:
        """The names in the logs of batches: ``loss`` first."""
        return [*dict.fromkeys(["loss", *self._names()])]

    @property
    def metrics(self) -> list[Any]:
        """The names of metrics and whether larger is better, for ``mode="auto"`` of Keras's callbacks."""
        return directed_metrics(self._run, self._names())

    @property
    def run_eagerly(self) -> bool:
        """Always true."""
        return True

    @property
    def _initial_epoch(self) -> int:
        """The epoch from 0 in which the run begins. `keras.callbacks.BackupAndRestore` sets it."""
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
        found = [one for one in layers if one.name == name]
        if not found:
            raise ValueError(f"no layer is named {name!r}; the children of the module are {[one.name for one in layers]}")
        return found[0]

    def predict(self, x: Any, batch_size: int | None = None, verbose: Any = 0, **others: Any) -> Any:
        """Return the outputs for arrays or tensors as an array of NumPy: in evaluation mode, on this rank alone."""
        inputs = torch.as_tensor(x)
        modes = [(module, module.training) for module in self._module.modules()]
        self._module.eval()
        try:
            with torch.no_grad():
                parts = [self._module(part.to(self._run.device)) for part in inputs.split(batch_size or 32)]
        finally:
            for module, training in modes:
                module.training = training
        return torch.cat([part.detach().float().cpu() for part in parts]).numpy()

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
        if not self._repeats:
            saving.load(self._run, filepath)


class KerasModelView(ModelView):
    """``model`` of a callback if the run trains a model of Keras with the torch backend.

    Weights, layers, files and other attributes are those of that model. The training, ``optimizer`` and ``metrics`` are those
    of the run.
    """

    absent: ClassVar[Mapping[str, str]] = {
        name: advice
        for name, advice in ModelView.absent.items()
        if name not in ("get_config", "to_json", "get_state_tree", "inputs", "outputs", "input_shape", "output_shape", "export")
    }

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        return self._module(*inputs, **keywords)

    @property
    def name(self) -> str:
        return str(self._module.name)

    @property
    def weights(self) -> list[Any]:
        return list(self._keras.weights)

    @property
    def trainable_variables(self) -> list[Any]:
        return list(self._keras.trainable_variables)

    @property
    def non_trainable_variables(self) -> list[Any]:
        return list(self._keras.non_trainable_variables)

    @property
    def layers(self) -> list[Any]:
        return list(self._keras.layers)

    def get_layer(self, name: str | None = None, index: int | None = None) -> Any:
        return self._keras.get_layer(name, index)

    def get_weights(self) -> list[Any]:
        return [array.copy() for array in self._keras.get_weights()]  # those of Keras share memory with the weights

    def set_weights(self, weights: Iterable[Any]) -> None:
        if not self._repeats:
            with torch.no_grad():
                self._keras.set_weights(list(weights))

    def count_params(self) -> int:
        return int(self._keras.count_params())

    def predict(self, x: Any, batch_size: int | None = None, verbose: Any = 0, **others: Any) -> Any:
        inputs = torch.as_tensor(x).to(self._run.device)
        with torch.no_grad():
            parts = [self._module(part, training=False) for part in inputs.split(batch_size or 32)]
        return torch.cat([part.detach().float().cpu() for part in parts]).numpy()

    def summary(self, *, print_fn: Callable[[str], object] | None = None, **others: Any) -> None:
        self._keras.summary(print_fn=print_fn or self._run.print, **others)

    def save(self, filepath: Any, overwrite: bool = True, **others: Any) -> None:
        """Write the file of Keras: architecture and weights. The state of the run's optimizer is in its checkpoints."""
        if self._run.is_main:
            self._keras.save(filepath, overwrite=overwrite, **others)

    def save_weights(self, filepath: Any, overwrite: bool = True, **others: Any) -> None:
        """Write the weights as Keras does."""
        if self._run.is_main:
            self._keras.save_weights(filepath, overwrite=overwrite, **others)

    def load_weights(self, filepath: Any, **others: Any) -> None:
        if not self._repeats:
            with torch.no_grad():
                self._keras.load_weights(filepath, **others)

    @property
    def _keras(self) -> Any:
        return self._module


def model_view(run: Run, names: Callable[[], list[str]]) -> ModelView:
    """Return the view for a run: of its module, or of its model of Keras."""
    is_keras = any(f"{one.__module__.partition('.')[0]}.{one.__name__}" == "keras.Model" for one in type(run.model).__mro__)
    return (KerasModelView if is_keras else ModelView)(run, names)
