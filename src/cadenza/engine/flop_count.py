"""Count the floating point operations of a training batch, once, with torch's FlopCounterMode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cadenza.engine.session import Loops, Session
from cadenza.status.outputs import Outputs


class FlopCount:
    """Counts the forward and the backward pass of one batch while the run trains on it. Results do not change.

    A multiplication and an addition count as two. Recomputed activations count too. Every operation of the batch passes through
    Python, which takes some microseconds more for each. `torch.compile` gives up a function for good that it meets in such a
    mode, so nothing is compiled in this batch; a compiled model is counted by `traced` instead.
    """

    def __init__(self, session: Session) -> None:
        self._session: Session = proxy(session)  # which holds the callback that counts
        self.total: int = 0
        """The operations counted so far."""
        self._own: tuple[Any, Any] | None = None
        self._whole = ExitStack()  # in a loop of the user's own: the forward pass is outside of the engine

    def begin(self) -> None:
        """Count from now on what the loop computes."""
        session = self._session
        if session.loop is not Loops.FIT:
            self._whole.callback(self._add, self._whole.enter_context(_counting()))
        elif self._own is None:
            self._own = session.compute, session.step_fn
            if session.step_fn is not None:
                session.step_fn = self._counted(session.step_fn)
            else:
                session.compute = self._counted(session.compute)
                vars(session.precision)["backward"] = self._counted(session.precision.backward)

    def end(self) -> int:
        """Count no more, and return the operations."""
        self._whole.close()
        if self._own is not None:
            self._session.compute, self._session.step_fn = self._own
            vars(self._session.precision).pop("backward", None)
            self._own = None
        return self.total

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            with _counting() as counter:
                result = function(*arguments)
            self._add(counter)
            return result

        return counted

    def _add(self, counter: Any) -> None:
        self.total += counter.get_total_flops()


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` was asked to compile a module, or a part of it."""
    return any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in module.modules())


def traced(session: Session, batch: Any) -> int:
    """Return the operations of a batch from the shapes of its tensors alone: nothing is computed, and nothing changes.

    For a compiled model, in which operations are fused and cannot be counted.

    Raises:
        Exception: The loss depends on values of tensors, which are not there.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # here, as it takes time to import

    model, fake = session.module, FakeTensorMode(allow_non_fake_inputs=True)
    held = {name: fake.from_tensor(one) for name, one in model.named_buffers(remove_duplicate=False)}
    weights = {name: fake.from_tensor(one) for name, one in model.named_parameters(remove_duplicate=False)}
    with fake, _counting() as counter, nn.utils.stateless._reparametrize_module(model, {**held, **weights}):
        outputs = Outputs()
        outputs.take(session.compute(model, pytree.tree_map_only(Tensor, fake.from_tensor, batch)))
        trained = [one for one in weights.values() if one.requires_grad]
        torch.autograd.grad(outputs["loss"], trained, allow_unused=True)
    return int(counter.get_total_flops())


@contextmanager
def _counting() -> Iterator[Any]:
    from torch.utils.flop_counter import FlopCounterMode

    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with eager, FlopCounterMode(display=False) as counter:
        yield counter
