"""Names that a loop of the user's own may look for on its step or on its loop, and where they are."""

from __future__ import annotations

_OF_THE_RUN = (
    *("log", "print", "warn", "stop", "save", "end_epoch", "fire", "state", "model", "optimizers", "device", "is_main"),
    *("progress", "history", "outcome", "decisions", "loss", "outputs"),
)

STEP: dict[str, str] = {
    **{name: f"it belongs to the run: step.run.{name}" for name in _OF_THE_RUN},
    "zero_grad": "leave it out: the end of the step drops the gradients",
    "keep": "call steps.keep(name, object) before the loop",
}
"""Of a step of ``trainer.steps()``."""

STEPS: dict[str, str] = {
    **{name: f"call step.{name}(...) in `for step in steps:`" for name in ("backward", "update", "forward", "precision")},
    "run": "read trainer.run, or step.run in the loop",
}
"""Of what ``trainer.steps()`` returns."""

LOOP: dict[str, str] = {
    **{name: f"it belongs to the run: loop.run.{name}" for name in _OF_THE_RUN},
    "zero_grad": "leave it out: loop.update() drops the gradients",
    "forward": "compute it in `with loop.precision():`",
}
"""Of a loop of ``cadenza.attach``."""
