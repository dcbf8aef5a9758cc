"""Each marked line must be refused by a type checker: `# error: code of mypy`."""

from typing import Any

from cadenza import Callback, Evaluation, Hooks, Run, on


class PruneMoments(Callback, declares=True):
    def on_prune(self, run: Run, ratio: float) -> None:
        """Called after the smallest weights were set to zero."""


class WrongOverride(Callback):
    def on_step_end(self, run: Run, batch: Any) -> None: ...  # error: override

    def on_stop(self, run: Run, reason: int) -> None: ...  # error: override

    def on_epoch_end(self, run: Run) -> int:  # error: override
        return 1


def wrong_calls(hooks: Hooks, run: Run, evaluation: Evaluation) -> None:
    hooks.on_setp_end(run)  # error: attr-defined
    hooks.on_step_end()  # error: call-arg
    hooks.on_step_end(run, 3)  # error: call-arg
    hooks.on_stop(run, 3)  # error: arg-type
    hooks.on_eval_end(evaluation, run)  # error: arg-type
    hooks.on_batch_start(run)  # error: call-arg


@on(Callback.on_step_end)  # error: arg-type
def takes_too_much(run: Run, batch: Any) -> None: ...


@on(Callback.on_stop)  # error: arg-type
def takes_the_wrong_thing(run: Run, reason: int) -> None: ...


@on(Callback.on_setp_end)  # error: attr-defined
def on_a_misspelled_moment(run: Run) -> None: ...


@on("on_step_end")  # error: arg-type
def on_a_name(run: Run) -> None: ...


def wrong_firing(run: Run) -> None:
    run.fire(PruneMoments.on_prune)  # error: call-arg
    run.fire(PruneMoments.on_prune, "much")  # error: arg-type
    run.fire(PruneMoments.on_prune, 0.3, 4)  # error: call-arg
    run.fire(PruneMoments.on_prune, rate=0.3)  # error: call-arg


def wrong_reading(run: Run) -> None:
    run.progress.step = 3  # error: misc
    print(run.progres)  # noqa: T201  # error: attr-defined
    run.log("train/loss", object())  # error: arg-type
    Hooks([Callback])  # error: list-item
