"""Leave frozen weights out of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cadenza.checkpoint.weights import LEFT_OUT, described
from cadenza.hooks.moments import Callback
from cadenza.optim.model_state import plain_name, state_of
from cadenza.optim.parameters import parameters_of

if TYPE_CHECKING:
    from cadenza.run import Run


class OmitFrozen(Callback):
    """Leave weights out of checkpoints that are frozen when the run begins, such as those below an adapter.

    A checkpoint then holds a checksum of each such weight. A run that continues, and `load_weights`, take the weight from the
    model that you build, and raise an error if its values differ. A weight that changes during the run is saved.

    The main process computes the checksums once, in ``on_setup``: about a second per gigabyte. At each save, it computes those
    of the frozen weights that an optimizer holds, so pass only the trainable parameters to the optimizer.

    With multiple ranks: runs on the main process only and does not communicate.

    Raises:
        ValueError: No parameter is frozen, or each rank holds a shard of the weights (FSDP).

    >>> import tempfile
    >>> from cadenza.callbacks import Checkpoint
    >>> from cadenza.testing import tiny_trainer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer = tiny_trainer(directory=folder, callbacks=[OmitFrozen(), Checkpoint()])
    ...     frozen = trainer.model.bias.requires_grad_(False)
    ...     run = trainer.fit(resume="auto")
    >>> run.outcome.kind
    'finished'
    """

    def on_setup(self, run: Run) -> None:
        if run.driver.shards:
            raise ValueError("OmitFrozen needs whole weights on the main process; got a driver that shards them. Remove it.")
        named = run.model.named_parameters(remove_duplicate=False)
        frozen = {plain_name(name) for name, parameter in named if not parameter.requires_grad}
        if not frozen:
            raise ValueError("OmitFrozen leaves out frozen weights, but every parameter of the model has requires_grad=True.")
        weights = state_of(run.model) if run.is_main else {}
        self._first = {name: described(weight) for name, weight in weights.items() if name in frozen}
        self._versions = {name: _version(weights[name]) for name in self._first}

    def on_save(self, run: Run, checkpoint: Any) -> None:
        if not run.is_main:
            return
        # A fused optimizer changes a weight without a new version in autograd.
        optimized = {id(parameter) for parameter in parameters_of(run.optimizers)}
        named = run.model.named_parameters(remove_duplicate=False)
        unsure = {plain_name(name) for name, parameter in named if id(parameter) in optimized}
        unchanged = [name for name in self._first if self._is_unchanged(name, checkpoint.model[name], sure=name not in unsure)]
        checkpoint.state[LEFT_OUT] = {name: self._first[name] for name in unchanged}
        for name in unchanged:
            del checkpoint.model[name]

    def _is_unchanged(self, name: str, weight: Any, *, sure: bool) -> bool:
        if sure and _version(weight) == self._versions[name]:
            return True
        if described(weight) != self._first[name]:
            return False
        self._versions[name] = _version(weight)
        return True


def _version(weight: Any) -> tuple[int, int]:
    """Return two numbers of which one changes with each change of a tensor: its address and its version in autograd."""
    return weight.data_ptr(), weight._version
