"""The two callbacks shared by the transformers callbacks in a list: one before them and one after all others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cadenza.compat.transformers.flags import IDLE
from cadenza.compat.transformers.flow import Flow
from cadenza.hooks.listener import Listener, inner, silent
from cadenza.hooks.moments import BaseCallback, Callback

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class State(BaseCallback):
    """Updates ``state``, ``control`` and the other event arguments. It comes first in the list.

    Args:
        flow: What the callbacks share.
    """

    name: str | None = "transformers.state"

    def __init__(self, flow: Flow) -> None:
        self.flow: Flow = flow
        self._outer: dict[str, Any] = {}

    def listeners(self) -> list[Listener]:
        listeners = [
            Listener(Callback.on_setup, self.flow.open),
            Listener(Callback.on_fit_start, self.flow.begin),
            Listener(Callback.on_epoch_start, self.flow.begin_epoch),
            Listener(Callback.on_batch_end, self.flow.count_tokens),
            Listener(Callback.on_step_end, self.flow.end_step),
            Listener(Callback.on_epoch_end, self._end_epoch),
            Listener(Callback.on_eval_start, self._begin_evaluation),
            Listener(Callback.on_eval_end, self._end_evaluation),
            Listener(Callback.on_save, self.flow.save),
        ]
        return inner(silent(listeners))

    def _end_epoch(self, run: Run) -> None:
        if self.flow.logs_epochs and self.flow.goes_on():
            self.flow.control.should_log = True
        if self.flow.reads and self.flow.goes_on():
            self.flow.show_scheduled(Callback.on_epoch_end)

    def _begin_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        flow = self.flow
        if not flow.is_of(run):  # Trainer.evaluate or Trainer.predict, which create a separate run
            self._outer = dict(vars(flow)) if flow.opened else {}
            flow.open(run, alone=True)
        flow.keywords["eval_dataloader"] = evaluation.loader
        flow.evaluating_since = time.time()
        if flow.several:
            flow.agree()
        if flow.control.should_log:
            flow.log_training()

    def _end_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        if self.flow.scene.unwinding is None and evaluation.complete:
            self.flow.end_evaluation(evaluation)
        vars(self.flow).update(self._outer)
        self._outer = {}

    def state_dict(self) -> dict[str, Any]:
        return self.flow.state_dict() if self.flow.opened else {}  # missing in a run that is already complete

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.flow.load_state_dict(state)


class Control(BaseCallback):
    """Turns flags of ``control`` into requests. It comes last in the list.

    Args:
        flow: What the callbacks share.
    """

    name: str | None = "transformers.control"

    def __init__(self, flow: Flow) -> None:
        self.flow: Flow = flow

    def listeners(self) -> list[Listener]:
        listeners = [
            Listener(Callback.on_step_end, self._end_step, silent=not self.flow.asks),
            Listener(Callback.on_epoch_end, self._end_epoch, silent=True),
            Listener(Callback.on_fit_end, self._end),
        ]
        return inner(listeners)

    def _end_step(self, run: Run) -> None:
        flow = self.flow
        if flow.several and flow.scene.unwinding is None:
            flow.agree()
        if flow.control.__dict__ != IDLE and flow.scene.unwinding is None:
            flow.carry_out()
        flow.rate = flow.rates["lr"]  # of the next step

    def _end_epoch(self, run: Run) -> None:
        flow = self.flow
        if flow.several and flow.goes_on():
            flow.agree()
        if flow.control.__dict__ != IDLE and flow.goes_on():
            flow.carry_out()

    def _end(self, run: Run) -> None:
        if self.flow.goes_on():
            self.flow.end()
