"""Cut the sequences of training batches to a length that grows during the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cadenza.engine.arguments import check_changes, checked_numbers, units_of_changes
from cadenza.engine.session import session_of
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least
from cadenza.loading.resumable_base import cut_to
from cadenza.optim.settings import Compared
from cadenza.status.decisions import decide
from cadenza.status.progress import Accumulation

if TYPE_CHECKING:
    from cadenza.run import Run


class SequenceLength(Callback, Compared):
    """Cut each training batch to a length that changes at points of the run: ``{0: 128, "1000 steps": 512}``.

    Batches are cut when the training takes them from the loader, in the main process, before they are moved to the device. So
    each batch has the length of its own step, with any number of workers, after a resume, and on all ranks. The workers still
    prepare whole sequences. Evaluations see whole sequences. Each change is a decision.

    With multiple ranks: each rank does the same; it does not communicate.

    Args:
        lengths: The length, or lengths by points of the run: a number of steps, or a text in steps, batches, epochs, samples,
            tokens or ``"50%"``, as ``Trainer(accumulate=...)`` takes them. A change holds from the next batch on.
        keys: The keys of the tensors to cut in a batch that is a mapping, or their indices in a tuple or list. None:
            each tensor with a dimension `dim`.
        dim: The dimension of the tokens: 1 for tensors of shape (batch, tokens, ...).

    Raises:
        TypeError, ValueError: An argument is wrong.
        DataError: A batch has no entry of `keys`.

    >>> from cadenza.testing import tiny_run
    >>> import torch
    >>> from cadenza import Callback, on
    >>> seen = []
    >>> look = on(Callback.on_batch_start)(lambda run, batch: seen.append(batch[0].shape[1]))
    >>> loader, model = [(torch.ones(2, 8), torch.ones(2, 8))] * 4, torch.nn.LazyLinear(1)
    >>> run = tiny_run(loader=loader, losses=[1.0] * 4, step_fn=lambda run, batch: torch.zeros(()),
    ...                callbacks=[SequenceLength({0: 2, "2 steps": 6}), look])
    >>> seen
    [2, 2, 6, 6]
    """

    def __init__(
        self, lengths: int | Mapping[int | str, int], keys: Sequence[str | int] | None = None, *, dim: int = 1
    ) -> None:
        if isinstance(lengths, Mapping) and not {0, "0"} & {*lengths}:
            raise ValueError(f"lengths must say the length at the start, such as {{0: 128, ...}}; got {dict(lengths)}")
        self.lengths: int = checked_numbers("lengths", lengths)
        self.keys: tuple[str | int, ...] | None = None if keys is None else tuple(keys)
        if isinstance(keys, str):
            raise TypeError(f"keys must be a list of keys, such as ({keys!r},); got {keys!r}")
        self.dim: int = at_least(0, "dim", dim)
        self.now: int | None = None
        """The length of the last batch."""

    def on_setup(self, run: Run) -> None:
        check_changes("SequenceLength", self.lengths, run.progress)
        session_of(run).sync.depends_on(units_of_changes(self.lengths, run.progress))
        self.now = None

        def cut(batch: Any) -> Any:
            lengths = self.lengths
            length = lengths.batches(run.progress, run.progress) if isinstance(lengths, Accumulation) else lengths
            if length != self.now:
                before, self.now = self.now, length
                if before is not None:
                    why = f"from batch {run.progress.batch + 1} on, sequences have at most {length} tokens instead of {before}"
                    data = {"before": before, "length": length}
                    decide(run, "sequence length changed", why, who=type(self).__name__, data=data)
            return cut_to(batch, length, self.keys, self.dim)

        session_of(run).cursor.change = cut

    def state_dict(self) -> dict[str, Any]:
        return {} if self.now is None else {"now": self.now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.now = state.get("now")
