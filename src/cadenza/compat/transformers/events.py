"""The table that maps the events of Hugging Face's transformers to native moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cadenza.compat.adapter.event import Event
from cadenza.hooks.moments import Callback
from cadenza.status.progress import Progress

if TYPE_CHECKING:
    from cadenza.run import Run

Hook = Callable[..., Any]

POSITION = Progress.position_reader()
"""Returns a position with a single call."""


class Events(Callback, declares=True):
    """The events without a native moment at the same point of the run. The adapter fires them."""

    def on_logs(self, run: Run, logs: dict[str, Any], /) -> None:
        """Called on every rank with values under the names of transformers.

        Records have native names and exist only on the main process.
        """

    def on_evaluated(self, run: Run, metrics: dict[str, Any], /) -> None:
        """Called after the results of an evaluation were logged."""

    def on_predicted(self, run: Run, metrics: dict[str, Any], /) -> None:
        """Called after `Trainer.predict`."""

    def on_saved(self, run: Run, /) -> None:
        """Called on every rank when a checkpoint is written. ``Callback.on_save`` comes before it is written."""

    def on_trained(self, run: Run, /) -> None:
        """Called when a run has ended without an error, after its last checkpoint."""


OWN = (Events.on_logs, Events.on_evaluated, Events.on_predicted, Events.on_saved, Events.on_trained)


def _plain(adapter: Any, hook: Hook) -> Hook:
    flow = adapter.flow

    def call(run: Run, *_: Any) -> None:
        if flow.scene.unwinding is None:
            returned = hook(flow.args, flow.state, flow.control, **flow.keywords)
            if returned is not None and returned is not flow.control:
                flow.replace_control(adapter, returned)
            if flow.control.__dict__ != flow.seen:
                flow.note_flags(adapter)

    return call


def _with(name: str) -> Callable[[Any, Hook], Hook]:
    def make(adapter: Any, hook: Hook) -> Hook:
        flow = adapter.flow

        def call(run: Run, values: dict[str, Any]) -> None:
            returned = hook(flow.args, flow.state, flow.control, **flow.keywords, **{name: values})
            if returned is not None and returned is not flow.control:
                flow.replace_control(adapter, returned)
            if flow.control.__dict__ != flow.seen:
                flow.note_flags(adapter)

        return call

    return make


def _substep(adapter: Any, hook: Hook) -> Hook:
    flow = adapter.flow

    def call(run: Run, batch: Any, outputs: Any) -> None:
        window = flow.step.window
        if window.seen < window.size and flow.scene.unwinding is None:
            _, _, done, batches = POSITION(run.progress)
            if done != batches:
                returned = hook(flow.args, flow.state, flow.control, **flow.keywords)
                if returned is not None and returned is not flow.control:
                    flow.replace_control(adapter, returned)
                if flow.control.__dict__ != flow.seen:
                    flow.note_flags(adapter)

    return call


def _epoch_end(adapter: Any, hook: Hook) -> Hook:
    flow, plain = adapter.flow, _plain(adapter, hook)

    def call(run: Run) -> None:
        if flow.goes_on():
            plain(run)

    return call


_AFTER_A_STOP = "A stop is carried out at the end of the step; transformers also leaves an accumulation window."

EVENTS: Mapping[str, Event] = {
    "on_init_end": Event(Callback.on_setup, _plain, "The model is on its device. optimizer and lr_scheduler are None."),
    "on_train_begin": Event(Callback.on_fit_start, _plain),
    "on_epoch_begin": Event(Callback.on_epoch_start, _plain),
    "on_step_begin": Event(Callback.on_step_start, _plain),
    "on_pre_optimizer_step": Event(Callback.on_before_optimizer_step, _plain, "After ClipGradients."),
    "on_optimizer_step": Event(Callback.on_after_optimizer_step, _plain, "Before LearningRate."),
    "on_substep_end": Event(
        Callback.on_batch_end,
        _substep,
        "Not after the last batch of a step. If the loader has no length, also after the last batch of a short step.",
    ),
    "on_step_end": Event(Callback.on_step_end, _plain, _AFTER_A_STOP),
    "on_epoch_end": Event(Callback.on_epoch_end, _epoch_end, "Also after a stop; not after an error or a signal."),
    "on_prediction_step": Event(Callback.on_eval_batch_end, _plain),
    "on_log": Event(Events.on_logs, _with("logs"), "On every rank."),
    "on_evaluate": Event(Events.on_evaluated, _with("metrics"), "Once for each Evaluate."),
    "on_predict": Event(Events.on_predicted, _with("metrics")),
    "on_save": Event(Events.on_saved, _plain, "On every rank, when the checkpoint is written."),
    "on_train_end": Event(Events.on_trained, _plain, "Not after an error or a signal."),
    "on_push_begin": Event(None, None, "a native run pushes nothing to the Hub"),
}
"""The 16 events by name, in the order of a run."""
