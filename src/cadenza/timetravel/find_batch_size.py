"""Find the largest batch that fits into memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from cadenza.engine.memory import is_out_of_memory
from cadenza.engine.session import session_of
from cadenza.errors import DataError
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least, at_least_or_none
from cadenza.hooks.order import Phase, Relation
from cadenza.loading.loaders import check_loader, length_of
from cadenza.loading.rng import preserve_rng_state
from cadenza.status.decisions import decide
from cadenza.status.formats import counted
from cadenza.text.hints import renamed
from cadenza.timetravel.trial import try_steps

if TYPE_CHECKING:
    from cadenza.run import Run

STEPS = 2  # from the second step on, the state of the optimizer takes memory as well


class FindBatchSize(Callback):
    """Double the batch size until memory runs out, then train with the largest size that fits.

    Before the training, each size is tried with two whole updates, which are then undone. A run that continues takes the size
    of its first start, and tries nothing. The learning rate does not change, although a larger batch often needs a larger
    rate. The result is printed, and ``size`` holds it. This works in one process only.

    With multiple ranks: raises `ValueError`, because it needs a single process.

    Args:
        make_loader: A function of the batch size that returns a loader. The trainer's own loader is not used.
        start: The first size to try.
        max_size: The largest size to try. Optional on an accelerator. On the CPU it is required, because the system often kills
            a process that runs out of memory, without a message.

    Raises:
        ValueError: An argument is wrong, `max_size` is needed, or there are several processes.
        DataError: The loader that `make_loader` returns is empty.
        torch.OutOfMemoryError: Not even `start` fits.

    >>> from cadenza.testing import tiny_loader, tiny_run
    >>> find = FindBatchSize(lambda size: tiny_loader(batches=64 // size, batch_size=size), start=2, max_size=16)
    >>> run = tiny_run(callbacks=[find])
    FindBatchSize: 16: max_size fits
    >>> find.size, run.progress.batch
    (16, 4)
    """

    before: Relation = (Phase.LENGTH, Phase.SCHEDULE)  # it changes the number of steps

    @renamed(limit="max_size")
    def __init__(self, make_loader: Callable[[int], Iterable[Any]], *, start: int = 1, max_size: int | None = None) -> None:
        if not callable(make_loader):
            raise TypeError(f"make_loader must be a function (batch_size) -> loader; got {make_loader!r}")
        start, max_size = at_least(1, "start", start), at_least_or_none(1, "max_size", max_size)
        if max_size is not None and max_size < start:
            raise ValueError(f"max_size must be at least start, {start}; got {max_size}")
        self.make_loader: Callable[[int], Iterable[Any]] = make_loader
        self.start: int = start
        self.max_size: int | None = max_size
        self.size: int | None = None
        """The size that was found; None before the first run."""

    def on_setup(self, run: Run) -> None:
        restored = session_of(run).restored.callback_states.get(hooks_of(run).name_of(self))
        if restored is not None:
            size, why = int(restored["size"]), "as in the run that is continued"
        else:
            self._check(run)
            size, why = self._search(run)
        self.size = size
        run.replace_loader(self._made(size))
        decide(run, "batch size found", f"{size}: {why}", data={"batch_size": size})
        run.print(f"{hooks_of(run).name_of(self)}: {size}: {why}")

    def _check(self, run: Run) -> None:
        if run.driver.world_size > 1:
            raise ValueError(
                f"FindBatchSize works in one process; got {run.driver.world_size}. If one ran out of memory, the others would "
                "wait for it. Find the size with one process, and give it to the loader."
            )
        if self.max_size is None and run.device.type == "cpu":
            raise ValueError(
                "FindBatchSize needs max_size= on the CPU, because the system often kills a process that runs out of memory, "
                "without an error that could be caught. Give a size that fits surely."
            )

    def _search(self, run: Run) -> tuple[int, str]:
        """Return the largest size that fits, and why no larger size does."""
        fitted, size = 0, self.start
        while True:
            failed = self._failure(run, size)
            if failed is not None:
                return fitted, f"{size} is too large: {failed}"
            fitted = size
            if size == self.max_size:
                return size, "max_size fits"
            size = 2 * size if self.max_size is None else min(2 * size, self.max_size)

    def _failure(self, run: Run, size: int) -> str | None:
        """Try a size; return why it is too large, or None."""
        first = size == self.start
        loader, seen = self._made(size), _Sizes()
        if length_of(loader) == 0:
            if first:
                raise DataError(f"make_loader({size}) returned an empty loader. Lower start=, or set drop_last=False.")
            return "the loader has no such batch"
        short = None
        try:
            try_steps(session_of(run), STEPS, [seen], loader=loader)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if first:
                error.add_note(f"raised while FindBatchSize tried start={size}, which does not fit. Lower it.")
                raise
            short = f"out of memory ({type(error).__name__})"
            session_of(run).driver.renew(session_of(run).model)  # DDP refuses another batch after half a backward pass
        # The error held references to the tensors computed so far.
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        return short if short or first or seen.largest >= size else f"the largest batch has {counted(seen.largest, 'sample')}"

    def _made(self, size: int) -> Iterable[Any]:
        with preserve_rng_state():  # a run that continues makes one loader, this run several
            loader = self.make_loader(size)
        check_loader(loader, f"make_loader({size})")
        return loader

    def state_dict(self) -> dict[str, Any]:
        return {} if self.size is None else {"size": self.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.size = state.get("size", self.size)


class _Sizes(Callback):
    """Record the size of the largest batch."""

    largest = 0

    def on_batch_start(self, run: Run, batch: Any) -> None:
        self.largest = max(self.largest, session_of(run).cursor.source.size_of(batch))
