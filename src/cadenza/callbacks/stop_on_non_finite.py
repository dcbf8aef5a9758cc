"""Detect a loss or a gradient that is NaN or infinite, before it reaches the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from cadenza.engine.module_state import Statistics
from cadenza.engine.objective import checked_loss
from cadenza.engine.session import session_of
from cadenza.errors import NonFiniteError
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase, Relation
from cadenza.optim.non_finite import all_finite, first_not_finite, tensors_at
from cadenza.optim.settings import Compared
from cadenza.status.decisions import decide

if TYPE_CHECKING:
    from cadenza.run import Run


class StopOnNonFinite(Callback, Compared):
    """Drop a batch if its loss is not finite, so that it never reaches the weights; then stop, raise or continue.

    With DDP, only the rank with this loss drops its batch. The step is the mean over the other batches, as in
    one process with gradient accumulation. With FSDP, a ``step_fn``, ``cadenza.attach`` or ``DdpDriver(static_graph=True)``,
    all ranks drop their batches.

    The message names the first other output, the first weight and the first tensor of the batch that is not finite, each with
    its index. The forward pass has already changed the statistics of layers such as BatchNorm: they are restored to their
    values before the batch. The loss of a batch with weight 0 is not checked.

    The check of the loss waits for the device once a batch. `gradients` waits once more a step.

    With multiple ranks: a rank drops its batch alone, and the others learn it with what ranks exchange anyway; all act on it at
    the same step. With FSDP, a ``step_fn`` or ``cadenza.attach`` it communicates in each batch, and all ranks drop theirs.

    Args:
        action: ``"stop"`` requests the end of the run, ``"raise"`` raises `NonFiniteError`, ``"skip"`` only drops the batch.
        gradients: Check the complete gradients as well, before they are clipped. If one is not finite, all gradients of the
            step are dropped before the optimizers are called. An optimizer of torch does not change a parameter without
            gradient, nor its state: no momentum, no weight decay. A custom optimizer must do the same. The step counts, and
            `LearningRate` does not step its scheduler.

    Raises:
        ValueError: `action` is none of the three, or `gradients` is True in fp16, where the scaler checks them.

    >>> from cadenza.testing import tiny_run
    >>> tiny_run(callbacks=[StopOnNonFinite()], losses=[1.0, float("nan")]).outcome
    Outcome(kind='stopped', reason='the loss is nan')
    """

    decides: tuple[str, ...] = ("stopped",)

    # Clipping by norm spreads one NaN to all gradients, and a schedule depends on whether there was an update.
    before: Relation = (Phase.CLIP, Phase.SCHEDULE)

    def __init__(self, action: Literal["stop", "raise", "skip"] = "stop", *, gradients: bool = False) -> None:
        if action not in ("stop", "raise", "skip"):
            raise ValueError(f"action must be 'stop', 'raise' or 'skip'; got {action!r}")
        self.action = action
        self.gradients: bool = gradients
        self._dropped = False
        self._alone = self._agrees = False
        self._found: tuple[str, list[str | None]] | None = None

    def listeners(self) -> list[Listener]:
        own = silent(super().listeners())  # requests are exchanged with those of the next one
        own.append(Listener(Callback.on_batch_end, self._tell_of_dropped, inner=True))
        looking = [
            Listener(Callback.on_before_optimizer_step, self._look_at_gradients),
            Listener(Callback.on_after_optimizer_step, self._tell_there_was_no_update),
        ]
        return [*own, *(looking if self.gradients else ())]

    def on_setup(self, run: Run) -> None:
        self._dropped = False
        if self.gradients and session_of(run).precision.name == "fp16":
            raise ValueError(
                "in fp16 the scaler already skips updates with gradients that overflow, which is normal; expected "
                "StopOnNonFinite(gradients=False), got True. Leave out gradients=."
            )

    def on_fit_start(self, run: Run) -> None:
        session, self._found = session_of(run), None
        several = session.sync.several
        self._alone = several and run.driver.adds_nothing and session.step_fn is None
        self._agrees = several and not self._alone
        if self._alone:
            session.sync.expect_drops()
        elif not several:
            session.hooks.remove(Callback.on_batch_end, self._tell_of_dropped)
        # Not in on_setup, where another callback may replace layers.
        self._statistics = Statistics(run.model)
        if self.action == "skip":
            session.step.guard = math.inf

    def on_batch_start(self, run: Run, batch: Any) -> None:
        self._statistics.keep()

    def on_before_backward(self, run: Run, outputs: MutableMapping[str, Any]) -> None:
        loss = float(checked_loss(outputs["loss"]).detach())
        finite = math.isfinite(loss) or _weighs_nothing(outputs)
        if not (run.driver.any_rank(not finite) if self._agrees else not finite):
            return
        self._statistics.restore()
        what = "the loss of another rank is not finite" if finite else f"the loss is {loss}"
        others = {name: value for name, value in outputs.items() if name != "loss"}
        causes = [first_not_finite(tensors_at(others, "outputs")), *_broken_weights(run)]
        causes.append(first_not_finite(tensors_at(run.batch, "batch")))
        if self._alone:  # all ranks act when they know, which takes the time of the backward pass
            session_of(run).step.drop(undone=self.action == "skip")
            self._found = what, causes
        else:
            self._act(run, what, f"batch {run.progress.batch + 1}", causes, partial(self._skip, run))

    def _skip(self, run: Run, reason: str) -> None:
        decide(run, "batch skipped", reason)
        session_of(run).step.skip(undone=self.action == "skip")

    def _tell_of_dropped(self, run: Run, batch: Any, outputs: MutableMapping[str, Any]) -> None:
        if session_of(run).step.drops:
            (what, causes), self._found = self._found or ("the loss of another rank is not finite", []), None
            self._act(run, what, f"batch {run.progress.batch}", causes, partial(decide, run, "batch skipped"))

    def _look_at_gradients(self, run: Run) -> None:
        held = [parameter for parameter in run.window.parameters if parameter.grad is not None]
        finite = all_finite(parameter.grad for parameter in held if parameter.grad is not None)
        # Without shards the gradients were reduced, and are the same on all ranks.
        if not (run.driver.any_rank(not finite) if run.driver.shards else not finite):
            return
        named = {id(parameter): name for name, parameter in run.model.named_parameters()}

        def gradients() -> Iterable[tuple[str, Tensor]]:
            for parameter in held:
                name = named.get(id(parameter))
                owner = "a parameter outside of the model" if name is None else repr(name)
                if parameter.grad is not None:
                    yield f"the gradient of {owner}", parameter.grad

        def drop(reason: str) -> None:
            decide(run, "step skipped", reason)
            for parameter in held:
                parameter.grad = None
            self._dropped = True

        what = first_not_finite(gradients()) or "a gradient of another rank is not finite"
        self._act(run, what, f"step {run.progress.step + 1}", _broken_weights(run), drop)

    def _tell_there_was_no_update(self, run: Run) -> None:
        if self._dropped:
            self._dropped = False
            session_of(run).step.undo_update()

    def _act(self, run: Run, what: str, where: str, causes: Iterable[str | None], drop: Callable[[str], object]) -> None:
        found = "".join(f"; {cause}" for cause in causes if cause)
        if self.action == "raise":
            raise NonFiniteError(f"{what} in {where}{found}. Lower the learning rate, clip gradients, or inspect this batch.")
        drop(what + found)
        if self.action == "stop":
            session_of(run).metrics.losses.quiet = True  # it would warn that training goes on
            run.stop(what + found)


def _weighs_nothing(outputs: MutableMapping[str, Any]) -> bool:
    """Return whether a batch has weight 0, such as a batch of padding: the mean over no tokens is NaN."""
    weight = outputs.get("weight")
    return weight is not None and float(weight) == 0


def _broken_weights(run: Run) -> list[str]:
    """Return a list with the first weight or buffer that was not finite before, or an empty list."""
    model = run.model
    named = chain(model.named_parameters(), model.named_buffers())
    found = first_not_finite((f"the weight {name!r}", tensor) for name, tensor in named)
    return [f"{found}, already"] if found else []
