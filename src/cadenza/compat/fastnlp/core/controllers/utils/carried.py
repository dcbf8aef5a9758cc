"""The state from which a training continues, in addition to fastNLP's counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.compat.fastnlp.core.callbacks.managed import ManagedCallback
from cadenza.engine.session import session_of
from cadenza.engine.step_state import AccumulationWindow
from cadenza.loading.rng import RNGState
from cadenza.optim.parameters import parameters_of

if TYPE_CHECKING:
    from cadenza.run import Run


@dataclass
class Carried:
    """The state from a checkpoint or an earlier training, in addition to fastNLP's counters."""

    steps: int = 0
    samples: int = 0
    data_seed: int | None = None
    evaluated: bool = False
    """Whether the evaluation at the end of the current epoch has run."""
    streams: dict[str, Any] | None = None
    loader: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    """The states of native callbacks, by name."""
    losses: list[Tensor] = field(default_factory=list)
    """The losses of the accumulation window that awaits its update."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """The gradients of these batches, by the index of the parameter among those of the optimizers."""

    @classmethod
    def of(
        cls, run: Run, group: AccumulationWindow | None = None, *, evaluated: bool = False, streams: RNGState | None = None
    ) -> Carried:
        """Return the values of a run.

        Args:
            run: The native run.
            group: The batches of an incomplete accumulation window.
            evaluated: Whether the current epoch was evaluated at its end.
            streams: The RNG states of the training; None: the current ones.
        """
        session = session_of(run)
        # A batch that failed before its gradients were added is seen, but has no loss.
        begun = group is not None and 0 < len(group.losses) < group.size
        parameters = enumerate(parameters_of(run.optimizers)) if begun else ()
        native = {
            name: each.state_dict() for name, each in session.hooks.callbacks.items() if not isinstance(each, ManagedCallback)
        }
        return cls(
            steps=run.progress.step,
            samples=run.progress.samples,
            data_seed=session.data_seed,
            evaluated=evaluated,
            streams=(streams or RNGState.capture()).to_plain(),
            loader=session.cursor.source.state_dict() if hasattr(session.cursor, "source") else {},
            scaler=session.precision.state_dict(),
            callbacks={name: state for name, state in native.items() if state},
            losses=[loss.detach() for loss in group.losses] if group is not None and begun else [],
            gradients={index: parameter.grad for index, parameter in parameters if parameter.grad is not None},
        )
