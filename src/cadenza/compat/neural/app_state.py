"""``nemo.utils.app_state``: the modules of a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from cadenza.compat.neural.defaults import placement_now
from cadenza.compat.neural.kinds import DeviceType
from cadenza.compat.neural.tensors import LIVE_MODULES, NeuralModule


class Modules:
    """The existing modules, held by weak references."""

    def __iter__(self) -> Iterator[NeuralModule]:
        return iter(sorted(LIVE_MODULES, key=lambda module: module.name))

    def __len__(self) -> int:
        return len(LIVE_MODULES)

    def __contains__(self, module: object) -> bool:
        return isinstance(module, NeuralModule) and module in LIVE_MODULES

    def __getitem__(self, name: str) -> NeuralModule:
        for module in self:
            if module.name == name:
                return module
        raise KeyError(f"there is no module {name!r}; the modules are {[module.name for module in self]}")

    def has(self, name: str) -> bool:
        """Return whether there is a module of this name."""
        return any(module.name == name for module in self)

    def summary(self) -> str:
        """Return the names and classes of the modules as a text."""
        return "\n".join(["Modules:", *(f" * {module.name} ({module})" for module in self)])


class AppState:
    """The state of a script: its modules. All objects of this class are equal in content."""

    @property
    def device(self) -> DeviceType:
        """The device of new modules."""
        return placement_now()

    @property
    def modules(self) -> Modules:
        """The existing modules."""
        return Modules()

    @property
    def active_graph(self) -> NoReturn:
        """Not available."""
        raise _no_graphs("active_graph")

    @property
    def graphs(self) -> NoReturn:
        """Not available."""
        raise _no_graphs("graphs")

    @property
    def tensor_names(self) -> NoReturn:
        """Not available."""
        raise AttributeError(
            "AppState has no tensor_names: a name belongs to a graph. Call tensor.rename(name) to set it, and "
            "state['tensors'].get_tensor(name) in a callback to read the tensor."
        )


def _no_graphs(name: str) -> AttributeError:
    return AttributeError(
        f"AppState has no {name}: there are no NeuralGraphs. Call modules with NmTensors, and pass the losses to nf.train."
    )
