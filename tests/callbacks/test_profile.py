"""A profile you can trust: every nanosecond is counted once, where it belongs, and the run does what it does unwatched."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.callbacks.profile import Profile
from cadenza.hooks.dispatch import hooks_of
from cadenza.profiling.timings import Timings
from cadenza.status.decisions import decide
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.parts import failing

NAP_S = 0.02  # a bound from below: sleep never returns earlier, and load can only make it longer


def nap(*_: Any) -> None:
    time.sleep(NAP_S)


def timings(run: Run) -> Timings:
    """Return the run's profile; the rows sum to the wall time, always."""
    assert run.profile is not None
    profile = run.profile
    rows = [row.seconds for row in profile.rows]
    assert sum(rows) == pytest.approx(profile.wall_s, abs=1e-6)
    assert all(seconds >= 0 for seconds in rows)
    return profile


def phases(run: Run) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in timings(run).phases}


def calls(run: Run) -> dict[str, int]:
    return {phase.name: phase.calls for phase in timings(run).phases}


def callbacks(run: Run) -> dict[tuple[str, str], tuple[int, float]]:
    return {(one.callback, one.moment): (one.calls, one.seconds) for one in timings(run).callbacks}


class PruneMoments(Callback, declares=True):
    def on_prune(self, run: Run, ratio: float) -> None:
        """Called after the smallest weights were set to zero."""


class Backward(torch.autograd.Function):
    """Takes its time on the way back."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        nap()
        return gradients[0]


class Moved:
    """A batch that takes its time on the way to the device."""

    def to(self, *_: Any, **__: Any) -> Tensor:
        nap()
        return torch.ones(2, 1)


def test_time_goes_to_the_phase_in_which_it_passes() -> None:
    def slow_batches() -> Iterator[Moved]:
        for _ in range(4):
            nap()
            yield Moved()

    def slow_loss(model: nn.Module, batch: Tensor) -> Tensor:
        nap()
        loss: Tensor = Backward.apply(model(batch).sum())  # type: ignore[no-untyped-call]  # torch has no types there
        return loss

    class SlowSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nap()
            return super().step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            nap()
            super().zero_grad(set_to_none)

    slow: dict[str, Any] = {"optimizer": lambda parameters: SlowSGD(parameters, lr=0.0), "compute_loss": slow_loss}
    spent = phases(tiny_run(callbacks=[Profile()], loader=slow_batches(), accumulate=2, **slow))
    for name, times in {"fetch": 4, "transfer": 4, "forward": 4, "backward": 4, "optimizer": 2, "zero_grad": 2}.items():
        assert spent[name] >= times * NAP_S, name


def test_calls_are_those_of_the_loop() -> None:
    run = tiny_run(callbacks=[Profile()], batches=5, accumulate=2, epochs=2)
    batches = dict.fromkeys(("transfer", "forward", "backward"), 10)
    assert calls(run) == {"setup": 1, "fetch": 12, **batches, "optimizer": 6, "zero_grad": 6, "loop": 6}
    assert timings(run).steps == 6


def test_each_evaluation_has_its_name_and_a_sanity_check_as_well() -> None:
    class SlowMetric:
        def update(self, predictions: Tensor, targets: Tensor) -> None:
            nap()

        def compute(self) -> float:
            return 0.0

        def reset(self) -> None: ...

    def compute(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"predictions": model(batch[0]), "targets": batch[1]}

    judges = [
        Evaluate(tiny_loader(2), metrics={"a": SlowMetric()}, compute=compute, every="1 epoch", sanity_batches=1),
        Evaluate(tiny_loader(3), metrics={"a": SlowMetric()}, compute=compute, every="1 epoch", name="other"),
    ]
    run = tiny_run(callbacks=[Profile(), *judges], epochs=2)
    spent, counted = phases(run), calls(run)
    assert spent["evaluation eval"] >= 4 * NAP_S
    assert spent["evaluation other"] >= 6 * NAP_S
    assert spent["sanity eval"] >= NAP_S
    assert (counted["evaluation eval"], counted["evaluation other"], counted["sanity eval"]) == (2, 2, 1)


def test_saving_is_what_the_training_waits_for(tmp_path: Path) -> None:
    slow = on(Callback.on_save)(nap)
    run = tiny_run(callbacks=[Profile(), Checkpoint("2 steps", background=False), slow], steps=4, directory=tmp_path)
    counted = calls(run)["saving"]
    assert counted >= 2  # and the wait for the last at the end
    assert callbacks(run)["nap", "on_save"][1] >= 2 * NAP_S  # the callback's own time, not the saving's


@pytest.mark.parametrize("by", ["verbs", "hand"])
def test_a_step_fn_has_its_phases_and_what_it_does_itself_a_row(by: str) -> None:
    def step(run: Run, batch: Any) -> Tensor:
        loss: Tensor = run.model(batch[0]).sum() * 0.0
        if by == "verbs":
            nap()
            run.backward(loss)
            run.update()
            nap()
            loss = run.model(batch[0]).sum() * 0.0
            run.backward(loss)
            run.update()
        nap()
        return loss

    run = tiny_run(callbacks=[Profile()], step_fn=step, steps=2)
    spent, counted = phases(run), calls(run)
    assert spent["step_fn"] >= 2 * NAP_S
    assert counted["step_fn"] == 2
    if by == "verbs":
        assert spent["forward"] >= 4 * NAP_S
        assert (counted["forward"], counted["backward"], counted["optimizer"]) == (4, 4, 4)
    else:
        assert "forward" not in spent


def test_each_callback_at_each_moment_has_its_own_time() -> None:
    class Slow(Callback):
        def on_batch_start(self, run: Run, batch: Any) -> None:
            nap()

        def on_step_end(self, run: Run) -> None:
            nap()

    second = Slow()
    second.name = "second"
    filtered, closing = on(Callback.on_step_end, every=2)(nap), on(Callback.on_fit_start)(lambda run: run.at_end(nap))
    spent = callbacks(tiny_run(callbacks=[Profile(), Slow(), second, filtered, closing], steps=5))
    expected = {(who, moment): 5 for who in ("Slow", "second") for moment in ("on_batch_start", "on_step_end")}
    expected |= {("nap", "on_step_end"): 2, ("<lambda>", "at_end"): 1}
    for who_and_moment, count in expected.items():
        assert spent[who_and_moment][0] == count, who_and_moment
        assert spent[who_and_moment][1] >= count * NAP_S, who_and_moment


class Pruned(PruneMoments):
    def on_prune(self, run: Run, ratio: float) -> None:
        nap()


def test_what_happens_inside_of_a_callback_is_not_counted_twice() -> None:
    outer = on(Callback.on_step_end)(lambda run: run.fire(PruneMoments.on_prune, 0.1))
    run = tiny_run(callbacks=[Profile(), outer, Pruned()], steps=3)
    spent = callbacks(run)
    assert spent["Pruned", "on_prune"] >= (3, 3 * NAP_S)
    inside = sum(seconds for _, seconds in spent.values()) + sum(phases(run).values())
    assert inside == pytest.approx(timings(run).wall_s, abs=1e-6)


def test_a_moment_inside_of_the_forward_pass_does_not_end_it() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        nap()
        live[0].fire(PruneMoments.on_prune, 0.1)
        nap()
        summed: Tensor = model(batch[0]).sum()
        return summed

    live: list[Run] = []
    take = on(Callback.on_fit_start)(live.append)
    run = tiny_run(callbacks=[Profile(), Pruned(), take], steps=2, compute_loss=loss)
    assert phases(run)["forward"] >= 4 * NAP_S
    assert callbacks(run)["Pruned", "on_prune"] >= (2, 2 * NAP_S)


def test_two_in_one_list_are_both_right_and_write_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Profile(window=(0, 1)), Profile(window=(1, 1))
    tiny_run(callbacks=[first, second, on(Callback.on_step_end)(nap)], steps=3, directory=tmp_path)
    for profile in (first, second):
        assert sum(row.seconds for row in profile.table.rows) == pytest.approx(profile.table.wall_s, abs=1e-6)
        assert {one.callback for one in profile.table.callbacks} >= {"nap"}
    assert capsys.readouterr().out.count("profile: ") == 2
    written = {"profile.json", "profile-2.json", "trace.json", "trace-2.json"}
    assert {path.name for path in tmp_path.glob("*.json")} >= written


def test_each_fit_is_measured_anew_also_one_that_continues(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        return tiny_trainer(callbacks=[Profile(), Checkpoint(), on(Callback.on_load)(nap)], steps=steps, directory=tmp_path)

    assert timings(trainer(2).fit()).steps == 2
    resumed = trainer(5).fit(resume="auto")
    assert timings(resumed).steps == 3
    assert calls(resumed)["backward"] == 3
    assert callbacks(resumed)["nap", "on_load"] >= (1, NAP_S)


def test_the_table_shows_every_row_and_can_be_read_while_the_run_goes_on_but_not_before() -> None:
    profile, shown = Profile(), []
    with pytest.raises(RuntimeError, match="no table before its run is set up"):
        _ = profile.table
    look = on(Callback.on_step_end, at=2)(lambda run: shown.append(str(profile.table)))
    run = tiny_run(callbacks=[profile, look], steps=3)
    assert shown[0].startswith("profile: ")
    assert "2 steps" in shown[0]
    assert all(f"\n{phase.name} " in str(run.profile) for phase in timings(run).phases)
    assert "\n<lambda>, on_step_end " in str(run.profile)


# -- a run that is watched does what it does unwatched ------------------------------------------------


def test_moments_counters_and_weights_are_the_same() -> None:
    plain, watched = Recorder(), Recorder()
    before = tiny_run(callbacks=[plain, Evaluate(tiny_loader(2))], epochs=2, accumulate=2, seed=1)
    after = tiny_run(callbacks=[Profile(), watched, Evaluate(tiny_loader(2))], epochs=2, accumulate=2, seed=1)
    assert watched.seen == plain.seen
    assert all(map(torch.equal, before.model.parameters(), after.model.parameters()))


def test_the_profile_of_a_run_that_failed_is_complete_and_errors_are_named_as_ever() -> None:
    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        nap()
        decide(run, "noticed", "just so")
        raise ValueError("broken")

    profile, live = Profile(), list[Run]()
    with pytest.raises(ValueError, match="broken") as caught:
        tiny_run(callbacks=[profile, on(Callback.on_fit_start)(live.append), fail])
    assert caught.value.__notes__ == ["raised in fail.on_step_end (callback 3 of 3) at epoch 0, step 2, batch 2"]
    assert callbacks(live[0])["fail", "on_step_end"] >= (1, NAP_S)
    assert profile.table == live[0].profile


def test_a_callback_that_is_disabled_is_called_no_more_and_keeps_its_row(caplog: pytest.LogCaptureFixture) -> None:
    class Fragile(Callback):
        on_fault = "disable"

        def on_step_end(self, run: Run) -> None:
            nap()
            raise OSError("tracker down")

        def on_fit_end(self, run: Run) -> None:
            raise AssertionError("called though it is disabled")

    after = Recorder(Callback.on_step_end)
    with caplog.at_level(logging.CRITICAL, logger="cadenza"):
        run = tiny_run(callbacks=[Profile(), Fragile(), after], steps=4)
    assert len(run.faults) == 1
    assert len(after.names) == 4
    count, seconds = callbacks(run)["Fragile", "on_step_end"]
    assert count == 1
    assert seconds >= NAP_S
    assert ("Fragile", "on_fit_end") not in callbacks(run)


def test_an_end_moment_reaches_all_though_one_failed() -> None:
    after = Recorder(Callback.on_fit_end)
    with pytest.raises(ZeroDivisionError):
        tiny_run(callbacks=[Profile(), failing(Callback.on_fit_end, at=1), after], steps=1)
    assert after.names == ["on_fit_end"]


def test_an_evaluation_that_fails_ends_its_span() -> None:
    def compute(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("broken")

    judge = Evaluate(tiny_loader(2), compute=compute)

    @on(Callback.on_step_end)
    def careful(run: Run) -> None:
        with pytest.raises(ValueError, match="broken"):
            judge.evaluate(run)
        nap()

    run = tiny_run(callbacks=[Profile(), careful], steps=2)
    assert callbacks(run)["careful", "on_step_end"] >= (2, 2 * NAP_S)


def test_when_the_run_is_over_its_hooks_are_no_longer_measured() -> None:
    run = tiny_run(callbacks=[Profile(), Callback()], steps=1)
    assert hooks_of(run).profiler is None
    assert hooks_of(run).on_step_start.__func__ is Callback.on_step_start  # type: ignore[attr-defined]  # a method again
