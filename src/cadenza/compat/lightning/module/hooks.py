"""Calls the module's hooks in a native run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.compat.adapter.gradients import Gradients, reads_gradients
from cadenza.compat.lightning.changing import CHANGING
from cadenza.compat.lightning.conductor import Conductor
from cadenza.compat.lightning.module import updates
from cadenza.compat.lightning.module.run_trainer import attach
from cadenza.compat.lightning.moments import LightningMoments
from cadenza.compat.lightning.saving import content_of
from cadenza.compat.lightning.trainer_view import trainer_view
from cadenza.engine.session import session_of
from cadenza.engine.weight_update import drop_gradients
from cadenza.hooks.dispatch import unwinding
from cadenza.hooks.listener import Listener, inner
from cadenza.hooks.moments import BaseCallback, Callback, Moment

if TYPE_CHECKING:
    from cadenza.compat.lightning.module.attached import Attached
    from cadenza.run import Run


class ModuleStart(BaseCallback):
    """Attach the module to the run, before the callbacks of the list."""

    def __init__(self, attached: Attached) -> None:
        self.attached: Attached = attached
        self.name: str | None = "LightningModule"

    def __repr__(self) -> str:
        return type(self.attached.module).__name__

    def listeners(self) -> list[Listener]:
        found = inner([Listener(Callback.on_setup, self._attach)])
        if self.attached.automatic:
            found.append(Listener(Callback.on_before_backward, self._skip_if_none))
        if self.attached.overrides("on_before_optimizer_step"):
            found.append(Listener(Callback.on_before_optimizer_step, self._before_optimizer_step))
        return found

    def _attach(self, run: Run) -> None:
        attach(self.attached, run)
        session_of(run).module_flags.keeps_modes = True
        updates.install(self.attached, run)
        for text in self.attached.doubts if run.is_main else ():
            run.warn(text)

    def _skip_if_none(self, run: Run, outputs: Mapping[str, Any]) -> None:
        if self.attached.output is None:
            run.skip_batch("training_step returned None")

    def _before_optimizer_step(self, run: Run) -> None:
        for optimizer in session_of(run).step.updating:
            self.attached.call("on_before_optimizer_step", optimizer)


class ModuleHooks(Conductor):
    """Call the hooks of the module, after the callbacks of the list."""

    def __init__(self, attached: Attached) -> None:
        self.attached: Attached = attached
        self.name: str | None = "LightningModule hooks"
        self._ended = True  # whether on_train_batch_end was called for the current batch
        self._entries: dict[str, Any] = {}  # of on_save_checkpoint
        reads = attached.automatic and reads_gradients(attached.module, attached.base)
        self._gradients: Gradients | None = Gradients() if reads else None

    def __repr__(self) -> str:
        return f"hooks of {type(self.attached.module).__name__}"

    def listeners(self) -> list[Listener]:
        moments = LightningMoments
        table: list[tuple[tuple[str, ...], Moment, Callable[..., Any]]] = [
            (("on_fit_start",), moments.on_fit_begin, self._calls("on_fit_start")),
            (("on_train_start",), moments.on_train_start, self._calls("on_train_start")),
            (("on_train_epoch_start",), Callback.on_epoch_start, self._epoch_start),
            (("on_train_batch_start",), Callback.on_batch_start, self._batch_start),
            (("on_after_backward",), Callback.on_after_backward, self._calls("on_after_backward")),
            (("on_train_batch_end",), Callback.on_batch_end, self._batch_end),
            (("on_train_batch_end",), Callback.on_step_end, self._step_end),
            (("on_train_epoch_end",), moments.on_train_epoch_end, self._epoch_end),
            (("on_train_end",), moments.on_train_end, self._calls("on_train_end")),
            (("on_fit_end",), moments.on_fit_finish, self._calls("on_fit_end")),
            (("on_load_checkpoint",), Callback.on_load, self._load),
        ]
        before = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")
        if self.attached.automatic:
            table.append((before, Callback.on_before_backward, self._before_backward))
            table.append((("configure_gradient_clipping",), Callback.on_before_optimizer_step, self._clip))
        else:
            table.append((before[2:], Callback.on_before_backward, self._before_backward))
        found = [Listener(moment, function) for names, moment, function in table if any(map(self.attached.overrides, names))]
        keep = [] if self._gradients is None else self._gradients.listeners()
        own = [Listener(moments.on_stage_teardown, self._teardown)]
        if any(map(self.attached.overrides, CHANGING)):
            own.append(Listener(Callback.on_epoch_start, self._renew))
        return [*self.conducting(), *keep, *found, *inner(own)]

    def _calls(self, name: str) -> Callable[..., None]:
        call = self.attached.call

        def hook(run: Run, *_: object) -> None:
            call(name)

        return hook

    # -- the run and its epochs --------------------------------------------------------------------

    def _epoch_start(self, run: Run) -> None:
        if not run.progress.resumed_in_epoch:
            self.attached.call("on_train_epoch_start")

    def _renew(self, run: Run) -> None:
        """Adapt the driver to parameters frozen by the module's hooks."""
        trainer_view(run)._changes.renew()

    def _epoch_end(self, run: Run) -> None:
        call = self.attached.call if self._gradients is None else self._gradients.shown(self.attached.call)
        call("on_train_epoch_end")

    def _teardown(self, run: Run, stage: str) -> None:
        self.attached.tear_down(stage)

    # -- checkpoints -------------------------------------------------------------------------------

    def _load(self, run: Run, checkpoint: object) -> None:
        self.attached.call("on_load_checkpoint", {**content_of(run, trainer_view(run)), **self._entries})

    def state_dict(self) -> dict[str, Any]:
        return {"checkpoint": self._added(), "optimizer_steps": self.attached.manual.count}

    def _added(self) -> dict[str, Any]:
        """Return the entries that ``on_save_checkpoint`` adds to a checkpoint."""
        if self.attached.run is None or not self.attached.overrides("on_save_checkpoint"):
            return {}
        entries = content_of(self.attached.run, trainer_view(self.attached.run))
        before = dict(entries)
        self.attached.call("on_save_checkpoint", entries)
        return {name: entry for name, entry in entries.items() if name not in before or entry is not before[name]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entries, self.attached.manual.count = dict(state["checkpoint"]), state["optimizer_steps"]

    # -- a batch -----------------------------------------------------------------------------------

    def _batch_start(self, run: Run, batch: Any) -> None:
        self._ended = False
        if self.attached.leaves:  # the rest of an accumulation window
            run.skip_batch("on_train_batch_start ended the epoch")
        elif self.attached.call("on_train_batch_start", batch, self.attached.batch_idx) == -1:
            self._leave(run)

    def _leave(self, run: Run) -> None:
        """End the epoch. In automatic optimization, the gradients of an incomplete step are dropped, as in Lightning."""
        session = session_of(run)
        self.attached.left = run.progress.epoch
        if self.attached.automatic:
            session.step.window.losses.clear()
            drop_gradients(session.optimizers)
        run.skip_batch("on_train_batch_start returned -1")
        run.end_epoch("on_train_batch_start returned -1")

    def _before_backward(self, run: Run, outputs: MutableMapping[str, Any]) -> None:
        attached = self.attached
        if attached.automatic and not session_of(run).step.window.losses:
            epoch, index = run.progress.epoch, attached.batch_idx
            for optimizer in attached.optimizers:
                attached.call("on_before_zero_grad", optimizer)
                attached.call("optimizer_zero_grad", epoch, index, optimizer)
        if not session_of(run).step.skipping:
            attached.call("on_before_backward", outputs["loss"] / attached.accumulate)

    def _clip(self, run: Run) -> None:
        for optimizer in session_of(run).step.updating:
            self.attached.call("configure_gradient_clipping", optimizer, *self.attached.clip)

    def _batch_end(self, run: Run, batch: Any, outputs: Mapping[str, Any]) -> None:
        self._ended = False
        window = session_of(run).step.window
        if unwinding(run) is None and window.seen < window.size and not (self.attached.last_batch or self.attached.leaves):
            self._end_of_batch(run)

    def _step_end(self, run: Run) -> None:
        if unwinding(run) is None and not self._ended and not self.attached.leaves:
            self._end_of_batch(run)

    def _end_of_batch(self, run: Run) -> None:
        self._ended = True
        attached, output = self.attached, self.attached.output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        parts: dict[str, Any] = dict(output) if isinstance(output, Mapping) else {}
        if isinstance(loss, Tensor):
            parts["loss"] = loss.detach() / attached.accumulate if attached.automatic else loss.detach()
        call = attached.call if self._gradients is None else self._gradients.shown(attached.call)
        call("on_train_batch_end", parts, run.batch, attached.batch_idx - 1)
