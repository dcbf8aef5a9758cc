"""The loaders of a LightningModule, of a LightningDataModule, or passed by the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any

from torch.utils._pytree import tree_unflatten

from cadenza.compat.adapter.view import Weak
from cadenza.compat.lightning.module.attached import Attached
from cadenza.compat.lightning.module.parts import Loaders
from cadenza.errors import DataError, DistributedError
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.loading.loaders import length_of
from cadenza.run import Run
from cadenza.sources.mixture import Mixture

STAGES: Mapping[str, str] = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""For each stage, the prefix of its ``*_dataloader`` method and its name in a mapping of loaders."""

_HOME = (".core.module", ".core.datamodule", ".core.hooks")


class ModuleLoaders(Loaders):
    """The source of a run's loaders.

    Args:
        attached: The LightningModule.
        data: A LightningDataModule; a pair of a training and a validation loader; a mapping with ``"train"`` and any of
            ``"val"``, ``"test"`` and ``"predict"``; a training loader, or a list or dict of them; or None.

    Raises:
        TypeError: `data` is a class.
        DataError: It is a tuple or a mapping of an unsupported form.
    """

    _attached: Weak[Attached] = Weak()

    def __init__(self, attached: Attached, data: Any) -> None:
        if isinstance(data, type):
            name = data.__name__
            raise TypeError(f"expected a LightningDataModule or loaders; got the class {name}. Give an instance: {name}(...)")
        super().__init__(data if callable(getattr(data, "prepare_data", None)) else None)
        self._attached = attached
        self._given: dict[str, Any] = {} if data is None or self.datamodule is not None else _by_stage(data)
        self._setup: set[str] = set()

    def setup(self, stage: str) -> None:
        """Call ``prepare_data`` once per machine and ``setup(stage)`` on each rank. Every rank must call this."""
        holders = [holder for holder in (self.datamodule, self._attached.module) if holder is not None]
        if not self._setup:
            self._prepare_data(holders)
        self._setup.add(stage)
        for holder in holders:
            holder.setup(self._attached.fn(stage))

    def _prepare_data(self, holders: list[Any]) -> None:
        driver, failed = self._attached.driver, list[BaseException]()
        try:
            for holder in holders:
                if overrides(holder, "prepare_data") and (
                    driver.local_rank == 0 if getattr(holder, "prepare_data_per_node", True) else driver.is_main
                ):
                    holder.prepare_data()
        except BaseException as error:
            failed.append(error)
        anywhere = driver.any_rank(bool(failed))  # also serves as the barrier before setup
        if failed:
            raise failed[0]
        if anywhere:
            raise DistributedError("prepare_data failed on another rank. The error of that rank says why.")

    def of(self, stage: str, given: Any = None) -> Iterable[Any] | None:
        """Return the loader of a stage; multiple loaders become a `Mixture`; None if there is none.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            given: One or more loaders that replace those of the module and its data.
        """
        name = self.method(stage)
        found = self._given.get(STAGES[stage]) if given is None else given
        if found is None:
            holder = next((each for each in (self.datamodule, self._attached.module) if overrides(each, name)), None)
            found = None if holder is None else getattr(holder, name)()
        if found is None or (isinstance(found, list | tuple | dict) and not found):
            return None
        combined_loader = self._attached.home("utilities.combined_loader").CombinedLoader
        return combined(found, combined_loader, training=stage == "fit")

    def training(self) -> Any:
        """Return the training loader, created on the first call."""
        if self.train is None:
            self.train: Any = self.of("fit")
        return self.train

    def method(self, stage: str) -> str:
        """Return the name of the method that returns the loader of a stage, such as ``"val_dataloader"``."""
        return f"{STAGES[stage]}_dataloader"


def loaders_of(attached: Attached) -> ModuleLoaders:
    """Return the loaders of a module."""
    loaders = attached.loaders
    assert isinstance(loaders, ModuleLoaders), "made with the trainer"
    return loaders


def prepare(attached: Attached) -> None:
    """Call ``prepare_data`` and ``setup("fit")`` and create the loaders. Every rank must call this.

    Raises:
        DataError: There is no training loader.
    """
    loaders = loaders_of(attached)
    loaders.setup("fit")
    if loaders.training() is None:
        raise DataError(
            f"{type(attached.module).__name__} needs a training loader; got none. Pass a loader, a pair (train, val) or a "
            "LightningDataModule to Trainer.from_lightning, or give the module a train_dataloader method."
        )
    loaders.val = loaders.of("validate")


def overrides(holder: Any, name: str) -> bool:
    """Return whether a LightningModule or LightningDataModule overrides a method."""
    if holder is None:
        return False
    classes = (base for base in type(holder).__mro__ if not base.__module__.endswith(_HOME))
    return name in vars(holder) or any(name in vars(base) for base in classes)


def _by_stage(data: Any) -> dict[str, Any]:
    """Return the loaders by stage.

    Raises:
        DataError: It is a tuple other than a pair, or a mapping with only some keys that are stages.
    """
    if isinstance(data, tuple):
        if len(data) != 2:
            raise DataError(
                f"a tuple of loaders is (train, val); got {len(data)} elements. Give "
                '{"train": ..., "val": ..., "test": ...}; several training loaders are a list or dict.'
            )
        return {"train": data[0], "val": data[1]}
    if isinstance(data, Mapping) and (stages := set(STAGES.values())) & set(data):
        others = [repr(name) for name in data if name not in stages]
        if others or "train" not in data:
            what = f"{', '.join(others)} {'is' if len(others) == 1 else 'are'} no stage" if others else "'train' is missing"
            raise DataError(
                "a mapping with stages has the keys 'train', 'val', 'test' and 'predict', of which only 'train' is needed; "
                f'got {sorted(map(str, data))}: {what}. Several training loaders: {{"train": {{...}}}}.'
            )
        return dict(data)
    return {"train": data}


# -- several loaders -----------------------------------------------------------------------------------


class CombinedBatches(Mixture):
    """Multiple loaders in the order of a ``CombinedLoader``, with batches in the user's structure.

    Args:
        combined: A ``CombinedLoader`` with the mode ``"min_size"``, ``"max_size_cycle"`` or ``"sequential"``.
    """

    def __init__(self, combined: Any) -> None:
        loaders = _named(combined)
        if combined._mode == "sequential":
            super().__init__(loaders, "sequential")
        else:
            super().__init__(loaders, "zip", stop="shortest" if combined._mode == "min_size" else "longest")
        self._spec = combined._spec

    def batch_of(self, given: Mapping[int, Any]) -> Any:
        """Return a combined batch in the structure of the loaders."""
        return tree_unflatten([*given.values()], self._spec) if self.mode == "zip" else super().batch_of(given)

    def parts_of(self, batch: Any) -> Mapping[str, Any]:
        """Return the batches of all loaders by name."""
        return dict(zip(self.loaders, self._spec.flatten_up_to(batch), strict=True))


class PaddedBatches:
    """Multiple loaders in the mode ``"max_size"``: an exhausted loader gives None. A run cannot resume inside an epoch.

    Args:
        combined: A ``CombinedLoader``.
    """

    def __init__(self, combined: Any) -> None:
        self._loaders, self._spec = list(combined.flattened), combined._spec

    def __len__(self) -> int:
        lengths = [length_of(loader) for loader in self._loaders]
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            raise TypeError("a loader without a length has none here either")
        return max(known)

    def __iter__(self) -> Iterator[Any]:
        iterators: list[Iterator[Any] | None] = [iter(loader) for loader in self._loaders]
        while True:
            batches = list[Any]()
            for index, iterator in enumerate(iterators):
                batch = None if iterator is None else next(iterator, None)
                if batch is None:
                    iterators[index] = None
                batches.append(batch)
            if not any(iterators):
                return
            yield tree_unflatten(batches, self._spec)


def combined(loaders: Any, combined_loader: type[Any], *, training: bool) -> Iterable[Any]:
    """Combine the result of a ``*_dataloader`` method into one loader.

    Args:
        loaders: A loader, a list or dict of loaders, or a ``CombinedLoader``.
        combined_loader: The class ``CombinedLoader``.
        training: Whether a list or dict of loaders is read in parallel, as in training, or one after another.
    """
    given = loaders
    if not isinstance(given, combined_loader):
        if not isinstance(given, list | tuple | dict) or not _are_loaders(combined_loader(given).flattened):
            loader: Iterable[Any] = given
            return loader
        given = combined_loader(given, "max_size_cycle" if training else "sequential")
    flat = given.flattened
    if len(flat) == 1 and given._mode == "sequential":
        only: Iterable[Any] = flat[0]
        return only
    return PaddedBatches(given) if given._mode == "max_size" else CombinedBatches(given)


def _are_loaders(leaves: list[Any]) -> bool:
    """Return whether these are loaders rather than the batches of a list of batches."""
    return all(hasattr(leaf, "__iter__") and not hasattr(leaf, "shape") and not isinstance(leaf, str) for leaf in leaves)


def _named(combined: Any) -> dict[str, Any]:
    """Return the loaders by name: the keys of a dict, or numbers. An object that occurs twice is copied."""
    given, flat = combined.iterables, combined.flattened
    plain = isinstance(given, dict) and len(given) == len(flat) and all(isinstance(key, str) and key for key in given)
    names = [name.replace("/", "_") for name in given] if plain else [str(index) for index in range(len(flat))]
    if len(set(names)) < len(names):
        names = [str(index) for index in range(len(flat))]
    found: dict[str, Any] = {}
    for name, loader in zip(names, flat, strict=True):
        found[name] = copy(loader) if any(loader is other for other in found.values()) else loader
    return found


# -- during the run ------------------------------------------------------------------------------------


class ModuleData(BaseCallback):
    """The state of a LightningDataModule."""

    name: str | None = "data of the LightningModule"

    def __init__(self, attached: Attached) -> None:
        self.attached: Attached = attached

    def __repr__(self) -> str:
        return f"data of {type(self.attached.module).__name__}"

    def listeners(self) -> list[Listener]:
        if not overrides(self.attached.loaders.datamodule, "on_exception"):
            return []
        return [Listener(Callback.on_exception, self._interrupt)]

    def _interrupt(self, run: Run, error: BaseException) -> None:
        self.attached.loaders.datamodule.on_exception(error)

    def state_dict(self) -> dict[str, Any]:
        data = self.attached.loaders.datamodule
        return {"datamodule": data.state_dict()} if overrides(data, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "datamodule" in state and self.attached.loaders.datamodule is not None:
            self.attached.loaders.datamodule.load_state_dict(state["datamodule"])
