"""The keywords of events: the model, the optimizer and the loaders of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cadenza.callbacks.clip_gradients import ClipGradients
from cadenza.compat.transformers.given import given_in
from cadenza.hooks.dispatch import hooks_of
from cadenza.optim.rates import SetsRates

if TYPE_CHECKING:
    from cadenza.run import Run


def keywords_of(run: Run, *, alone: bool = False) -> dict[str, Any]:
    """Return the keywords that each event gets. With `alone`, nothing is trained yet."""
    keywords = {
        "model": run.model,
        "processing_class": _processing_class(run),
        "optimizer": None,
        "lr_scheduler": None,
        "train_dataloader": None,
        "eval_dataloader": None,
    }
    if alone:
        return keywords
    optimizer = run.optimizers[0]
    schedulers = [one for one in hooks_of(run).callbacks.values() if isinstance(one, SetsRates) and one.drives(optimizer)]
    keywords.update(
        optimizer=optimizer,
        lr_scheduler=getattr(schedulers[0], "scheduler", None) if schedulers else None,
        train_dataloader=run.loader,
    )
    return keywords


def gradient_norm(run: Run) -> float | None:
    """Return the norm of the gradients in the last step before they were clipped; None if no `ClipGradients` knows it."""
    for one in hooks_of(run).callbacks.values():
        if isinstance(one, ClipGradients) and one.norm is not None:
            return float(one.norm)
    return None


def _processing_class(run: Run) -> Any:
    given = given_in(run)
    own = None if given is None else given.processing_class
    return getattr(getattr(run.loader, "collate_fn", None), "tokenizer", None) if own is None else own
