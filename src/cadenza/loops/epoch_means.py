"""The mean loss of each epoch, in a run without a `LogTraining`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from cadenza.engine.interval_means import IntervalMeans
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import checked, hooks_of
from cadenza.hooks.listener import Listener, inner
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.status.outputs import Outputs

if TYPE_CHECKING:
    from cadenza.run import Run


class EpochMeans(Callback):
    """Log the means of the loss and of all other numbers in the outputs, at the end of each epoch and of the run.

    A name under which a hook logs numbers is left out. If the run ends inside of an epoch and continues later, the next means
    are those of the whole epoch.
    """

    _reads_totals = False
    each_rank: bool = True
    name: str | None = "LogTraining"

    logs_training = True

    def __init__(self) -> None:
        self._means: IntervalMeans | None = None
        self._replaced: set[str] = set()

    def __repr__(self) -> str:
        return "LogTraining('1 epoch')"

    def listeners(self) -> list[Listener]:
        own = [Listener(Callback.on_setup, self._begin), Listener(Callback.on_load, self._take_over)]
        own += [Listener(Callback.on_batch_end, self._add_batch, asks=False)]
        # All ranks are there, and a save at the last step can wait for this record.
        return [*inner(own), Listener(Callback.on_epoch_end, self._end_epoch, note="every epoch, added", asks=False)]

    def _begin(self, run: Run) -> None:
        self._means, self._replaced = IntervalMeans(session_of(run), ["loss"]), set()

    def _add_batch(self, run: Run, batch: Any, outputs: Outputs) -> None:
        if len(outputs) > 1 and self._means is not None:  # else it is the loss
            self._means.add_all(session_of(run), outputs, run.progress.step + 1)

    def _end_epoch(self, run: Run) -> None:
        session, means = session_of(run), self._means
        if means is None or session.hooks.unwinding is not None or session.sync.requests.back is not None:
            return
        self._replaced.update(means.logged_by_hooks("train"))
        if session.sync.together:
            self._replaced.update(chain(*session.driver.gather(sorted(self._replaced))))
        means.log(session, "train", self._replaced)
        if not run.progress.batch_in_epoch:  # else the run ends here, and may continue in this epoch
            means.begin(run.progress.step)

    def _take_over(self, run: Run, checkpoint: Any) -> None:
        if self._means is not None:
            self._means.take_over(session_of(run), hooks_of(run).name_of(self), checkpoint)

    def state_dict(self) -> dict[str, Any]:
        if self._means is None:
            return {}
        replaced = self._replaced.union(self._means.logged_by_hooks("train"))
        state = self._means.state_dict()
        return state | ({"replaced": sorted(replaced)} if replaced else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._replaced = {*state.get("replaced", ())}
        if self._means is not None:
            self._means.load_state_dict(state)


def with_epoch_means(callbacks: Sequence[BaseCallback], loader: object) -> list[BaseCallback]:
    """Return the callbacks, with the means of each epoch before them unless one of them logs the training.

    A loop of ``cadenza.attach`` has no epochs.
    """
    given = checked(callbacks)  # before their positions change
    logged = any(getattr(one, "logs_training", False) for one in given)
    return given if logged or not getattr(loader, "has_epochs", True) else [EpochMeans(), *given]
