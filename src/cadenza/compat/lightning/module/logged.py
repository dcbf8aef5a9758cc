"""The values of ``self.log`` by hook and name, reduced over batches by Lightning's rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cadenza.drivers import Driver

WAYS: Mapping[Any, str] = {
    **dict.fromkeys(("mean", "avg", torch.mean), "mean"),
    **dict.fromkeys(("sum", torch.sum, sum), "sum"),
    **dict.fromkeys(("min", torch.min, min), "min"),
    **dict.fromkeys(("max", torch.max, max), "max"),
}
_STARTS = {"mean": 0.0, "sum": 0.0, "max": float("-inf"), "min": float("inf")}
_TORCH: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"max": torch.max, "min": torch.min}


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of ``self.log`` that must be equal in all calls with the same name."""

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    reduce_fx: str
    enable_graph: bool
    add_dataloader_idx: bool
    dataloader_idx: int | None
    metric_attribute: str | None
    sync: bool
    rank_zero_only: bool
    group: Any = field(default=None, repr=False)

    def shown(self, *, on_step: bool) -> tuple[str, str]:
        """Return the name, and the name with ``_step`` or ``_epoch`` if both are logged."""
        both = self.on_step and self.on_epoch
        suffix = f"/dataloader_idx_{self.dataloader_idx}" if self.add_dataloader_idx and self.dataloader_idx is not None else ""
        forked = f"{self.name}_{'step' if on_step else 'epoch'}" if both else self.name
        return self.name + suffix, forked + suffix


class Logged:
    """The values of a name: the last one and the reduction since the start of the epoch.

    Args:
        arguments: The arguments of ``self.log``.
        driver: Reduces over ranks.
        device: The device of the values.
        metric: The torchmetrics metric, if that was logged.
    """

    def __init__(self, arguments: Arguments, driver: Driver, device: torch.device, metric: Any = None) -> None:
        self.arguments: Arguments = arguments
        self.metric: Any = metric
        self.restored: bool = False
        """Whether it was restored from a checkpoint and has not been logged since."""
        self.dropped: bool = False
        """Whether it was reset and has not been logged since."""
        self._driver, self._device = driver, device
        self._start()

    def _start(self) -> None:
        self.last: Any = None
        """The value of the current batch; None if it has none."""
        self._result: Any = None
        dtype = _dtype()
        self.total: Tensor = torch.tensor(_STARTS[self.arguments.reduce_fx], dtype=dtype, device=self._device)
        self.weight: Tensor = torch.tensor(0, device=self._device)

    def add(self, value: Any, batch_size: int) -> None:
        """Add the value of a batch."""
        self.dropped, self._result = False, None
        if self.metric is not None:
            self.metric, self.last = value, value._forward_cache
            return
        arguments = self.arguments
        if value.dtype not in (torch.float32, torch.float64):
            value = value.to(_dtype())
        if arguments.on_step:
            self.last = self._synced(value)
            if not arguments.on_epoch:
                return
        with torch.set_grad_enabled(torch.is_grad_enabled() and not arguments.enable_graph):
            if arguments.reduce_fx == "mean":
                self.total = self.total + value * batch_size
                self.weight = self.weight + batch_size
            elif arguments.reduce_fx == "sum":
                self.total = self.total + value
            else:
                self.total = _TORCH[arguments.reduce_fx](self.total, value)

    def result(self) -> Any:
        """Return the reduction over the epoch. Ranks communicate if the name is logged with ``sync_dist``, or is a metric."""
        if self._result is None:
            if self.metric is not None:
                self._result = self.metric.compute()
            else:
                total = self._synced(self.total)
                mean = self.arguments.reduce_fx == "mean"
                self._result = total / self._synced(self.weight.to(total.dtype)) if mean else total
        return self._result

    def current(self, *, on_step: bool) -> Any:
        """Return the value of the batch or the epoch; None if there is none."""
        arguments = self.arguments
        value = self.last if on_step and arguments.on_step else None
        if not on_step and arguments.on_epoch:
            value = self.result()
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(
                f"The `.compute()` return of the metric logged as {arguments.name!r} must be a tensor. Found {value}"
            )
        return value if value is None or arguments.enable_graph else value.detach()

    def reset(self) -> None:
        """Reset for a new epoch."""
        self._start()
        if self.metric is not None:
            self.metric.reset()
        self.dropped = True

    def _synced(self, value: Tensor) -> Tensor:
        arguments = self.arguments
        if not arguments.sync or arguments.rank_zero_only or self._driver.world_size == 1:
            return value.clone()
        how: Any = arguments.reduce_fx
        if arguments.group is None:
            return self._driver.reduce(value.detach().clone(), how)
        value, mean = value.detach().clone(), how == "mean"
        op = getattr(torch.distributed.ReduceOp, "SUM" if mean else how.upper())
        torch.distributed.all_reduce(value, op=op, group=arguments.group)
        return value / torch.distributed.get_world_size(arguments.group) if mean else value

    # -- over all ranks, and in checkpoints ----------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        own = asdict(replace(self.arguments, group=None))
        last = self.last.detach() if isinstance(self.last, Tensor) else None
        state = {"total": self.total.detach(), "weight": self.weight, "last": last, "dropped": self.dropped}
        return {"arguments": own, "is_metric": self.metric is not None, **state}

    def put(self, state: Mapping[str, Any]) -> None:
        """Merge the state of another instance or of an earlier process."""
        total, weight = state["total"].to(self._device), state["weight"].to(self._device)
        way = self.arguments.reduce_fx
        self.total = _TORCH[way](self.total, total) if way in _TORCH else self.total + total
        self.weight, self.restored, self.dropped = self.weight + weight, True, state["dropped"]
        self.last = None if state["last"] is None else state["last"].to(self._device)

    def summary(self) -> tuple[str, float, float] | None:
        """Return reduction, value and weight, which `reduced` combines over all ranks."""
        arguments = self.arguments
        if arguments.rank_zero_only and not self._driver.is_main:
            return None
        result = self.result()
        if self.metric is not None or arguments.sync or arguments.rank_zero_only:
            return ("same", float(result), 1.0)
        weight = float(self.weight) if arguments.reduce_fx == "mean" else 1.0
        return (arguments.reduce_fx, float(result), weight)


def reduced(driver: Driver, own: Mapping[str, tuple[str, float, float]]) -> dict[str, float]:
    """Return the results over all ranks, by name. Every rank must call this.

    Args:
        driver: Gathers.
        own: The `Logged.summary` of this rank, by name.
    """
    everyone = [dict(own)] if driver.world_size == 1 else driver.gather_data(dict(own))
    names = dict.fromkeys(name for values in everyone for name in values)
    return {name: _reduced([values[name] for values in everyone if name in values]) for name in names}


def _reduced(parts: list[tuple[str, float, float]]) -> float:
    way, first, _ = parts[0]
    if way == "same" or len(parts) == 1:
        return first
    values = [value for _, value, _ in parts]
    if way == "mean":
        weight = sum(weight for _, _, weight in parts)
        return sum(value * weight for _, value, weight in parts) / weight
    return sum(values) if way == "sum" else min(values) if way == "min" else max(values)


class LoggedValues(dict[str, Logged]):
    """All values of a stage, under the keys of Lightning: the hook, the name and the index of the loader.

    ``LightningModule.log`` calls `log` and `reset`, after it checked its arguments.

    Args:
        training: Whether the stage is the training.
        driver: Reduces over ranks.
        error: The class of errors of Lightning.
        batch_size: Returns the size of a batch.
    """

    def __init__(self, *, training: bool, driver: Driver, error: type[Exception], batch_size: Callable[[Any], int]) -> None:
        super().__init__()
        self.training = training
        self.batch: Any = None
        self.batch_size: int | None = None
        self.dataloader_idx: int | None = None
        self.muted: bool = False
        """Whether values are dropped, because another rank counts the batch."""
        self._driver, self._error, self._size_of = driver, error, batch_size

    def log(
        self, fx: str, name: str, value: Any, *, batch_size: int | None = None, sync_dist_fn: object = None, **given: Any
    ) -> None:
        """Add a value. See ``LightningModule.log``."""
        if self.muted:
            return
        if given["on_step"] is False and given["on_epoch"] is False:
            raise self._error("`self.log(on_step=False, on_epoch=False)` is not useful.")
        is_metric = not isinstance(value, Tensor)
        index = self.dataloader_idx
        suffix = f".{index}" if given["add_dataloader_idx"] and index is not None else ""
        sync, group = given.pop("sync_dist"), given.pop("sync_dist_group")
        given["reduce_fx"] = self._way(given["reduce_fx"])
        arguments = Arguments(fx=fx + suffix, name=name, dataloader_idx=index, sync=bool(sync), group=group, **given)
        key = f"{fx}.{name}{suffix}"
        logged = self.get(key)
        if logged is None:
            device = value.device
            logged = self[key] = Logged(arguments, self._driver, device, value if is_metric else None)
        elif logged.restored:
            logged.arguments, logged.restored = arguments, False
        elif arguments != logged.arguments:
            raise self._error(
                f"You called `self.log({name}, ...)` twice in `{fx}` with different arguments. This is not allowed"
            )
        if not is_metric and not arguments.enable_graph:
            value = value.detach()
        logged.add(value, self._weight(arguments, batch_size, is_metric=is_metric))

    def _way(self, reduce_fx: Any) -> str:
        way = WAYS.get(reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx)
        if way is None:
            raise self._error(
                "Only `self.log(..., reduce_fx={min,max,mean,sum})` are supported. If you need a custom reduction, please log "
                f"a `torchmetrics.Metric` instance instead. Found: {reduce_fx}"
            )
        return way

    def _weight(self, arguments: Arguments, batch_size: int | None, *, is_metric: bool) -> int:
        size = self.batch_size if batch_size is None else batch_size
        if size is not None:
            return size
        if self.batch is None or is_metric or not arguments.on_epoch or arguments.reduce_fx != "mean":
            return 1
        self.batch_size = self._size_of(self.batch)
        return self.batch_size

    def current(self) -> Iterator[Logged]:
        """Yield the values of this epoch, and of this loader."""
        index = self.dataloader_idx
        return (logged for logged in self.values() if not logged.dropped and logged.arguments.dataloader_idx == index)

    def metrics(self, *, on_step: bool) -> dict[str, dict[str, Any]]:
        """Return values by name, for ``callback``, ``log`` and ``pbar``."""
        found: dict[str, dict[str, Any]] = {"callback": {}, "log": {}, "pbar": {}}
        for logged in self.current():
            value, arguments = logged.current(on_step=on_step), logged.arguments
            if not isinstance(value, Tensor):
                continue
            name, forked = arguments.shown(on_step=on_step)
            if arguments.logger:
                found["log"][forked] = value
            if self.training or (arguments.on_epoch and not on_step):
                found["callback"][name] = found["callback"][forked] = value
            if arguments.prog_bar:
                found["pbar"][forked] = value.item() if value.numel() == 1 else value.tolist()
        return found

    def summaries(self, *, logger: bool) -> dict[str, tuple[str, float, float]]:
        """Return the summaries of the epoch, of all loaders, by name. Metrics of several numbers are left out.

        Args:
            logger: Only names with ``logger=True``.
        """
        found = {}
        for logged in self.current():
            arguments = logged.arguments
            if not arguments.on_epoch or (logger and not arguments.logger):
                continue
            value = logged.current(on_step=False)
            if isinstance(value, Tensor) and value.numel() == 1 and (summary := logged.summary()) is not None:
                name, forked = arguments.shown(on_step=False)
                found[forked] = summary
                if not logger:
                    found[name] = summary
        return found

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Reset the values; ``metrics`` True: only metrics, False: only others; ``fx``: only those of this hook."""
        if self.muted:
            return
        for logged in self.values():
            if metrics in (None, logged.metric is not None) and fx in (None, logged.arguments.fx):
                logged.reset()


def _dtype() -> torch.dtype:
    """Return the type of sums: torch's default, but not below float32."""
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32
