"""Communication between ranks for Keras callbacks: batch logs and consistency of the values that they set."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch

from cadenza.compat.keras.logs import Logs, Means
from cadenza.drivers.sharding import is_sharded
from cadenza.engine.session import Session
from cadenza.errors import AdapterError
from cadenza.records.scalars import as_number


def agreed_logs(session: Session, means: Means, names: list[str] | None) -> tuple[list[str], Logs]:
    """Return the names in the logs and the means over the batches of all ranks. Every rank must call this, after each batch.

    All ranks call their callbacks with the same numbers, so they make the same decisions. The host does not wait for the
    device.

    Args:
        session: The session of the run.
        means: The means of this rank.
        names: The names in the epoch's logs. None in the first call of an epoch, which determines them.
    """
    if names is None:
        names = [*dict.fromkeys(chain(*session.driver.gather([*means.totals])))]
    own = [*(means.totals.get(name, 0.0) for name in names), *(means.weights.get(name, 0.0) for name in names)]
    if not own:
        return names, Logs()
    sums = session.driver.reduce(torch.stack([as_number(value, session.driver.device, torch.float64) for value in own]), "sum")
    totals, weights = sums[: len(names)].unbind(), sums[len(names) :].unbind()
    logs = Logs(dict.fromkeys(names))
    logs.sums = dict(zip(names, totals, strict=True)), dict(zip(names, weights, strict=True))
    return names, logs


def check_equal(session: Session, setters: dict[str, None]) -> None:
    """Check that callbacks have set the same learning rates and weights on all ranks. Every rank must call this.

    Args:
        session: The session of the run.
        setters: The callbacks that have set values since the last check. It is cleared.

    Raises:
        AdapterError: The values of two ranks differ.
    """
    rates = [float(group["lr"]) for optimizer in session.optimizers for group in optimizer.param_groups]
    everyone = session.driver.gather((rates, [*setters]))
    setters.clear()
    names = [*dict.fromkeys(chain(*(those for _, those in everyone)))]
    if not names:
        return
    _compare("learning rates", [found for found, _ in everyone], names)
    if not any(map(is_sharded, session.module.parameters())):
        sums = [float(parameter.detach().double().sum()) for parameter in session.module.parameters()]
        _compare("weights", session.driver.gather(sums), names)


def _compare(what: str, values: list[list[float]], names: Iterable[str]) -> None:
    rank = next((rank for rank, value in enumerate(values) if repr(value) != repr(values[0])), None)
    if rank is None:
        return
    shown = f": {values[0]} on rank 0, {values[rank]} on rank {rank}" if what == "learning rates" else ""
    raise AdapterError(
        f"ranks 0 and {rank} have different {what} at the end of an epoch{shown}. {' and '.join(names)} set them. A callback "
        "must set the same values on every rank: let it decide by the logs, which are those of all ranks, or broadcast its "
        "value with torch.distributed."
    )
