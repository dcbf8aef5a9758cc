"""``model`` of Keras's callbacks if the run trains a Keras model, and the choice between the two views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from cadenza.compat.keras.model_view import ModelView

if TYPE_CHECKING:
    from cadenza.run import Run


class KerasModelView(ModelView):
    """``model`` of a callback if the run trains a Keras model with the torch backend.

    Weights, layers, files and other attributes are those of that model. The training state, ``optimizer`` and ``metrics`` are
    those of the run.
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
        return [array.copy() for array in self._keras.get_weights()]  # Keras's arrays share memory with the weights

    def set_weights(self, weights: Iterable[Any]) -> None:
        if self._may_set():
            with torch.no_grad():
                self._keras.set_weights(list(weights))

    def count_params(self) -> int:
        return int(self._keras.count_params())

    def summary(self, *, print_fn: Callable[[str], object] | None = None, **others: Any) -> None:
        self._keras.summary(print_fn=print_fn or self._run.print, **others)

    def save(self, filepath: Any, overwrite: bool = True, **others: Any) -> None:
        """Write Keras's file of architecture and weights. The optimizer state is in the run's checkpoints."""
        if self._run.is_main:
            self._keras.save(filepath, overwrite=overwrite, **others)

    def save_weights(self, filepath: Any, overwrite: bool = True, **others: Any) -> None:
        """Write the weights as Keras does."""
        if self._run.is_main:
            self._keras.save_weights(filepath, overwrite=overwrite, **others)

    def load_weights(self, filepath: Any, **others: Any) -> None:
        if self._may_set():
            with torch.no_grad():
                self._keras.load_weights(filepath, **others)

    @property
    def _keras(self) -> Any:
        return self._module


def model_view(run: Run, means: Callable[[], dict[str, Any]]) -> ModelView:
    """Return the view for a run, of its module or of its Keras model."""
    is_keras = any(f"{base.__module__.partition('.')[0]}.{base.__name__}" == "keras.Model" for base in type(run.model).__mro__)
    return (KerasModelView if is_keras else ModelView)(run, means)
