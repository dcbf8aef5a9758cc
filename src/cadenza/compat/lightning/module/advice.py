"""Advice for arguments of Lightning's ``Trainer`` passed to `Trainer.from_lightning`. The guide has the same table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza.compat.absent import facts_of

ADVICE: Mapping[str, str] = facts_of("lightning", "advice.toml")["arguments"]
"""Replacements of arguments of Lightning's trainer, and of native arguments that the module replaces."""

_PRECISIONS: Mapping[Any, str] = {
    **dict.fromkeys(("bf16-mixed",), 'Use precision="bf16".'),
    **dict.fromkeys(("16-mixed", "16", 16), 'Use precision="fp16".'),
    **dict.fromkeys(("32-true", "32", 32), "Leave it out: this is the default."),
    **dict.fromkeys(("64-true", "64", 64), "Call module.double(), and give data in float64."),
    **dict.fromkeys(("bf16-true", "16-true"), "Call module.bfloat16() or module.half(), and give data of this type."),
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise an error for arguments that exist only in Lightning's trainer or that a LightningModule replaces.

    Raises:
        TypeError: The module or native arguments replace some; the message names all of them.
        ValueError: A value is one of Lightning's trainer, or the model is to be compiled.
    """
    wrong = [name for name in given if name in ADVICE]
    if len(wrong) == 1:
        raise TypeError(f"Trainer.from_lightning has no argument {wrong[0]!r}. {ADVICE[wrong[0]]}")
    if wrong:
        lines = "\n".join(f"  {name}: {ADVICE[name]}" for name in wrong)
        raise TypeError(f"Trainer.from_lightning does not have these arguments:\n{lines}")
    precision = given.get("precision")
    if isinstance(precision, int | str) and precision in _PRECISIONS:
        raise ValueError(f"precision must be 'fp32', 'bf16' or 'fp16'; got {precision!r}. {_PRECISIONS[precision]}")
    if given.get("compile"):
        raise ValueError(
            f"compile={given['compile']!r} compiles the forward of a model, and a LightningModule computes its loss in "
            "training_step. Compile layers in the module, such as self.net.compile() in configure_model."
        )
