"""Measure how long a run takes: its fits, epochs, steps and evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from cadenza.errors import nearest
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.hooks.subscription import periodic

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

STAGES = ("fit", "train", "epoch", "step", "evaluation", "save")


class Timer(Callback):
    """Measure the seconds of a run, over all its fits: a resumed run goes on counting.

    It logs ``time/step_s``, the mean of the steps since the last time, with the time that they waited for data;
    ``time/epoch_s`` at the end of each whole epoch; ``time/NAME_s`` for each evaluation ``NAME``; and ``time/fit_s`` with every
    ``time/step_s``, the time since the run began. On a GPU, a step ends when its work is queued, so a single time may be short;
    the mean of some steps is right. `TimeLimit` ends a run by its time, `Profile` says which part took it.

    With multiple ranks: each rank measures its own times; what it logs is the mean over the ranks. It does not communicate
    otherwise.

    Args:
        every: The interval of ``time/step_s``: ``50`` (steps), ``"1 epoch"``, ``"30 s"``.
        prefix: The prefix of the names.

    >>> from cadenza.testing import tiny_run
    >>> timer = Timer(every="2 steps")
    >>> run = tiny_run(callbacks=[timer], steps=4)
    >>> run.history.names, [step for step, _ in run.history["time/step_s"]]
    (['time/step_s', 'time/fit_s'], [2, 4])
    >>> timer.count("step"), timer.elapsed_s("fit") >= timer.elapsed_s("train") >= timer.elapsed_s("step") > 0
    (4, True)

    It measures a block of other code as well:

    >>> with timer.measure("export"):
    ...     size = sum(weight.numel() for weight in run.model.parameters())
    >>> timer.count("export")
    1
    """

    def __init__(self, every: Interval = "50 steps", *, prefix: str = "time") -> None:
        self.every: Schedule = Schedule.parse(every)
        self.prefix: str = prefix
        self._totals: dict[str, tuple[int, float]] = {}
        self._began: dict[str, float] = {}
        self._logged = (0, 0.0)
        self._evaluations = 0

    # -- what it knows -----------------------------------------------------------------------------

    def elapsed_s(self, stage: str = "fit") -> float:
        """Return the seconds of a stage, over all fits and with the one under way.

        Args:
            stage: ``"fit"``, ``"train"`` (without evaluations and saves), ``"epoch"``, ``"step"``, ``"evaluation"``,
                ``"save"``, or the name of a block of `measure`.

        Raises:
            ValueError: There is no such stage.
        """
        if stage == "train":
            return self.elapsed_s("fit") - self.elapsed_s("evaluation") - self.elapsed_s("save")
        self._check(stage)
        under_way = perf_counter() - self._began[stage] if stage in self._began else 0.0
        return self._totals.get(stage, (0, 0.0))[1] + under_way

    def count(self, stage: str = "step") -> int:
        """Return how many of a stage were complete, over all fits.

        Raises:
            ValueError: There is no such stage.
        """
        self._check(stage)
        return self._totals.get("fit" if stage == "train" else stage, (0, 0.0))[0]

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the block under a name of your own, which `elapsed_s` and `count` then take.

        Raises:
            ValueError: `name` is that of a stage, which the callback measures, or of a block around this one.
        """
        if name in STAGES or name in self._began:
            raise ValueError(f"Timer measures {name!r} already: give the block another name")
        self._begin(name)
        try:
            yield
        finally:
            self._end(name)

    def _check(self, stage: str) -> None:
        known = list(dict.fromkeys([*STAGES, *self._totals, *self._began]))
        if stage not in known:
            raise ValueError(f"Timer has no {stage!r}; it has {', '.join(map(repr, known))}.{nearest(stage, known)}")

    def __repr__(self) -> str:
        times = ", ".join(f"{name} {seconds:.3g} s" for name, (_, seconds) in self._totals.items())
        return f"Timer({times})"

    # -- hooks -------------------------------------------------------------------------------------

    def listeners(self) -> list[Listener]:
        return [
            *silent(super().listeners()),
            periodic(self.every, self._log),
            Listener(Callback.on_epoch_end, self._end_epoch),
            Listener(Callback.on_sanity_start, self._begin_evaluation),
            Listener(Callback.on_sanity_end, self._end_evaluation),
            Listener(Callback.on_eval_start, self._begin_evaluation),
            Listener(Callback.on_eval_end, self._log_evaluation),
        ]

    def on_setup(self, run: Run) -> None:
        self._totals, self._began, self._evaluations = {}, {}, 0

    def on_fit_start(self, run: Run) -> None:
        self._logged = self._totals.get("step", (0, 0.0))
        self._begin("fit")

    def on_epoch_start(self, run: Run) -> None:
        self._begin("epoch")

    def on_fetch_start(self, run: Run) -> None:
        self._began.setdefault("step", perf_counter())  # a step waits for its data before on_step_start

    def on_step_end(self, run: Run) -> None:
        self._end("step")

    def on_save(self, run: Run, checkpoint: object) -> None:
        if "save" not in self._began:
            self._begin("save")
            run.after_step(lambda: self._end("save"))  # which is called after the saves

    def on_fit_end(self, run: Run) -> None:
        for stage in [*self._began]:
            self._end(stage, complete=stage == "fit")

    def _end_epoch(self, run: Run) -> None:
        self._began.pop("step", None)  # the fetch that found no batch
        whole = run.progress.has_epochs and not run.progress.batch_in_epoch  # else a limit or a stop ends it
        passed_s = self._end("epoch", complete=whole)
        if whole:
            run.log(f"{self.prefix}/epoch_s", passed_s)

    def _begin_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        self._evaluations += 1
        if self._evaluations == 1:
            self._begin("evaluation")

    def _end_evaluation(self, run: Run, evaluation: Evaluation) -> float:
        self._evaluations -= 1
        return 0.0 if self._evaluations else self._end("evaluation")

    def _log_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        if passed_s := self._end_evaluation(run, evaluation):
            run.log(f"{self.prefix}/{evaluation.name}_s", passed_s)

    def state_dict(self) -> dict[str, Any]:
        stages = dict.fromkeys([*self._totals, *self._began])
        counts = {stage: self._totals.get(stage, (0, 0.0))[0] for stage in stages}
        saves = counts.pop("save", 0)  # as a time: it depends on how often the run was interrupted
        return {"counts": counts, "time/saves": saves, "time/elapsed_s": {stage: self.elapsed_s(stage) for stage in stages}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        seconds = state["time/elapsed_s"]
        counts = {**state["counts"], "save": state["time/saves"]}
        self._totals = {stage: (int(counts[stage]), float(passed_s)) for stage, passed_s in seconds.items()}

    # -- parts -------------------------------------------------------------------------------------

    def _log(self, run: Run) -> None:
        (steps, seconds), (steps_before, before) = self._totals.get("step", (0, 0.0)), self._logged
        self._logged = steps, seconds
        if steps > steps_before:
            mean = (seconds - before) / (steps - steps_before)
            run.log({f"{self.prefix}/step_s": mean, f"{self.prefix}/fit_s": self.elapsed_s("fit")})

    def _begin(self, stage: str) -> None:
        self._began[stage] = perf_counter()

    def _end(self, stage: str, *, complete: bool = True) -> float:
        """Add the time of a stage, and return it."""
        began = self._began.pop(stage, None)
        if began is None:
            return 0.0
        passed_s = perf_counter() - began
        count, seconds = self._totals.get(stage, (0, 0.0))
        self._totals[stage] = count + complete, seconds + passed_s
        return passed_s
