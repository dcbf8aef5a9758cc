"""The author of a decision is the callback whose hook runs: in nested runs, other threads, and loops that take turns."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Loop, Run, Trainer, attach, on
from cadenza.engine.session import session_of
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer


def decide(run: Run, what: str) -> None:
    session_of(run).decide(what, "a test")


def authors(run: Run) -> dict[str, str]:
    return {decision.what: decision.who for decision in run.decisions if decision.why == "a test"}


class Hook(Callback):
    """Decides something in each step. A subclass does so in a run of another name."""

    def on_step_end(self, run: Run) -> None:
        decide(run, f"step {run.progress.step}")


class Inner(Hook): ...


def test_a_fit_in_a_hook_has_authors_of_its_own_and_leaves_those_of_the_outer_fit() -> None:
    class Training(Callback):
        def on_step_end(self, run: Run) -> None:
            decide(run, "before")
            inner = tiny_run(callbacks=[Inner(), on(Callback.on_step_end)(lambda inner: decide(run, "inside"))], steps=2)
            decide(inner, "of the inner run")
            decide(run, "after")
            seen.update(authors(inner))

    seen: dict[str, str] = {}
    run = tiny_run(callbacks=[Training()], steps=1)
    assert seen == {"step 1": "Inner", "step 2": "Inner", "of the inner run": "the script"}
    assert authors(run) == dict.fromkeys(("before", "inside", "after"), "Training")


def test_an_evaluation_in_a_hook_has_authors_of_its_own() -> None:
    class Evaluating(Callback):
        def on_step_end(self, run: Run) -> None:
            trainer.evaluate(tiny_loader())
            decide(run, "after")

    @on(Callback.on_eval_end)
    def within(run: Run, evaluation: Any) -> None:
        decide(run, "within")
        decide(trainer.run, "of the fit")
        seen.update(authors(run))

    seen: dict[str, str] = {}
    trainer = tiny_trainer(callbacks=[Evaluating(), within], steps=1)
    assert authors(trainer.fit()) == dict.fromkeys(("of the fit", "after"), "Evaluating")
    assert seen == {"within": "within"}


def test_in_a_background_run_hooks_are_authors_and_the_thread_that_asks_meanwhile_is_the_script() -> None:
    inside, asked = threading.Event(), threading.Event()

    class Waiting(Hook):
        def on_step_end(self, run: Run) -> None:
            inside.set()
            assert asked.wait(60)
            super().on_step_end(run)

    handle = tiny_trainer(callbacks=[Waiting()], steps=1).start()
    assert inside.wait(60)
    decide(handle.run, "meanwhile")
    handle.stop("meanwhile, too")
    asked.set()
    run = handle.join()
    assert authors(run) == {"meanwhile": "the script", "step 1": "Waiting"}
    assert [one.who for one in run.decisions if one.what == "stopped"] == ["the script"]


@pytest.mark.parametrize("copies", [False, True], ids=["a new context", "a copy of the context"])
def test_a_thread_that_a_hook_starts_is_the_script_whatever_context_it_has(copies: bool) -> None:
    class Starting(Callback):
        def on_step_end(self, run: Run) -> None:
            context = contextvars.copy_context() if copies else contextvars.Context()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(context.run, decide, run, "in the thread").result()

        def on_fit_end(self, run: Run) -> None:
            asyncio.run(asyncio.to_thread(decide, run, "of asyncio"))

    run = tiny_run(callbacks=[Starting()], steps=1)
    assert authors(run) == {"in the thread": "the script", "of asyncio": "the script"}


class Declared(Callback, declares=True):
    def on_observed(self, run: Run) -> None: ...


def test_threads_of_a_moment_that_a_thread_fires_are_the_script_again() -> None:
    class Observing(Declared):
        def on_step_end(self, run: Run) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(run.fire, Declared.on_observed).result()

        def on_observed(self, run: Run) -> None:
            decide(run, "in the moment")
            asyncio.run(asyncio.to_thread(decide, run, "in a third thread"))
            other = tiny_run(callbacks=[Inner()], steps=1)
            seen.update(authors(other))
            decide(run, "after a fit in it")

    seen: dict[str, str] = {}
    run = tiny_run(callbacks=[Observing()], steps=1)
    assert authors(run) == {
        "in the moment": "Observing",
        "in a third thread": "the script",
        "after a fit in it": "Observing",
    }
    assert seen == {"step 1": "Inner"}


def attached(*callbacks: Callback) -> Loop:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return attach(model, optimizer, callbacks=callbacks, max_steps=2, progress=False)


def step(loop: Loop) -> None:
    with loop.step():
        loop.backward(loop.run.model(torch.ones(1, 2)).mean())
        loop.update()


def test_of_two_attached_loops_that_take_turns_each_has_its_own_authors() -> None:
    class Critic(Hook): ...

    class Generator(Hook):
        def on_step_end(self, run: Run) -> None:
            super().on_step_end(run)
            decide(critic.run, f"by the generator in step {run.progress.step}")

    with attached(Generator()) as generator, attached(Critic()) as critic:
        while not (generator.over() | critic.over()):
            step(critic)
            decide(critic.run, f"between {critic.run.progress.step}")
            step(generator)
    assert authors(generator.run) == {"step 1": "Generator", "step 2": "Generator"}
    others = (f"{when} {number}" for when in ("between", "by the generator in step") for number in (1, 2))
    assert authors(critic.run) == {"step 1": "Critic", "step 2": "Critic", **dict.fromkeys(others, "the script")}


def in_new_threads(*acts: Any) -> list[Any]:
    """Call each function in a thread of its own, one after the other. All threads live until the last one is done."""
    pools = [ThreadPoolExecutor(1) for _ in acts]
    try:
        return [pool.submit(act).result() for pool, act in zip(pools, acts, strict=True)]
    finally:
        for pool in pools:
            pool.shutdown()


def own_loop(trainer: Trainer) -> list[Any]:
    steps = trainer.steps()
    return [lambda: next(steps), lambda: next(steps), lambda: next(steps, None)]


def attached_loop(loop: Loop) -> list[Any]:
    def next_step() -> None:
        assert not loop.over()
        step(loop)

    return [loop.__enter__, next_step, next_step, loop.over]


@pytest.mark.parametrize("kind", ["steps", "attach"])
def test_a_loop_that_continues_in_another_thread_keeps_its_authors(kind: str) -> None:
    class Failing(Hook):
        def on_fit_end(self, run: Run) -> None:
            decide(run, "end")

    one: Any = tiny_trainer(callbacks=[Failing()], steps=2) if kind == "steps" else attached(Failing())
    in_new_threads(*(own_loop(one) if kind == "steps" else attached_loop(one)))
    assert one.run.outcome.kind == "finished"
    assert authors(one.run) == dict.fromkeys(("step 1", "step 2", "end"), "Failing")


def test_a_loop_that_another_thread_leaves_with_an_error_notes_what_fails_at_its_end() -> None:
    class Failing(Callback):
        def on_fit_end(self, run: Run) -> None:
            decide(run, "end")
            raise OSError("the disk is full")

    trainer = tiny_trainer(callbacks=[Failing()], steps=2)
    steps = trainer.steps()

    def leave() -> None:
        with pytest.raises(ArithmeticError) as raised, steps:
            raise ArithmeticError("of the loop")
        assert any("Failing.on_fit_end failed as well" in note for note in raised.value.__notes__)

    in_new_threads(lambda: next(steps), leave)
    assert authors(trainer.run) == {"end": "Failing"}


def test_a_run_of_another_thread_keeps_a_trainer_busy() -> None:
    trainer = tiny_trainer(steps=2)
    steps = trainer.steps()
    in_new_threads(lambda: next(steps))
    with pytest.raises(RuntimeError, match="this trainer has a run that is not over"):
        trainer.fit()
    steps.close()
    assert trainer.fit().progress.step == 2
