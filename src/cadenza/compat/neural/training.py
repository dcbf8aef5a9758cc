"""The native training behind ``nf.train``: a model of the graph, and callbacks for arguments of ``nf.train``."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.compat.neural.adapted import AdaptedRun
from cadenza.compat.neural.graph import Graph, GraphModel
from cadenza.compat.neural.logs import logging
from cadenza.compat.neural.policies import Policy
from cadenza.compat.neural.tensors import NmTensor
from cadenza.engine.session import session_of
from cadenza.hooks.moments import Callback
from cadenza.loading.rng import draw_seed

if TYPE_CHECKING:
    from cadenza.run import Run

Pair = tuple[Optimizer, Sequence[NmTensor]]


class Attach(Callback):
    """Makes the graph, and the current one of several optimizers, available to the callbacks of a run."""

    logs_training = True

    def __init__(self, graph: Graph, pairs: Sequence[Pair] = ()) -> None:
        self.graph: Graph = graph
        self.pairs: Sequence[Pair] = pairs

    def on_setup(self, run: Run) -> None:
        AdaptedRun(run, self.graph).attach()
        session_of(run).advises = False
        for tensor in self.graph.tensors.values():  # also modules that are only used on demand
            if isinstance(tensor.producer, nn.Module):
                tensor.producer.to(run.device)

    def on_step_start(self, run: Run) -> None:
        if self.pairs:
            AdaptedRun.of(run).current = _turn(self.pairs, run)[0]


class SetRate(Callback):
    """Sets the learning rate before each batch, by a policy.

    Args:
        policy: Called with the initial rate, the step and the epoch, both from 0.
        initial_lr: The rate of ``optimization_params``.
        pairs: Optimizers that alternate: the rate of the next one is set. Empty for one optimizer.
    """

    def __init__(self, policy: Policy, initial_lr: float, pairs: Sequence[Pair]) -> None:
        self.policy: Policy = policy
        self.initial_lr: float = initial_lr
        self.pairs: Sequence[Pair] = pairs

    def on_batch_start(self, run: Run, batch: Any) -> None:
        rate = self.policy(self.initial_lr, run.progress.step, run.progress.epoch)
        optimizer = _turn(self.pairs, run)[0] if self.pairs else run.optimizers[0]
        for group in optimizer.param_groups:
            group["lr"] = rate


class DrawNumbers(Callback):
    """Draws as many numbers as NeMo's loop, so that dropout gets NeMo's numbers.

    A DataLoader draws one number per epoch; the trainer has drawn that of the first epoch. Another iterable draws none.

    Args:
        per_epoch: Whether the batches come from a DataLoader.
    """

    def __init__(self, per_epoch: bool) -> None:
        self.per_epoch: bool = per_epoch
        self._before = torch.default_generator.get_state()

    def on_setup(self, run: Run) -> None:
        if not self.per_epoch:
            torch.default_generator.set_state(self._before)  # the trainer has drawn its seed

    def on_epoch_start(self, run: Run) -> None:
        if self.per_epoch and run.progress.epoch > 0 and run.progress.batch_in_epoch == 0:
            draw_seed()


class NanGuard(Callback):
    """Raises for a loss that is not finite, or skips its batch with a warning.

    Args:
        stop: Whether to raise.

    Raises:
        ValueError: The loss is not finite, before it reaches the weights.
    """

    def __init__(self, stop: bool) -> None:
        self.stop = stop

    def on_before_backward(self, run: Run, outputs: MutableMapping[str, Any]) -> None:
        loss = float(outputs["loss"].detach())
        if not run.driver.any_rank(not math.isfinite(loss)):  # a batch is skipped on all ranks or on none
            return
        which = "that of another process" if math.isfinite(loss) else f"it is {loss}"
        found = f"{which} at step {run.progress.step}"
        if self.stop:
            raise ValueError(f"Loss is NaN or inf: {found}, and stop_on_nan_loss=True")
        logging.warning("Loss is NaN or inf: %s; the batch is skipped", found)
        run.skip_batch("the loss of another rank is not finite" if math.isfinite(loss) else f"the loss is {loss}")


class Alternate:
    """The step of a training with several optimizers: each step uses the next optimizer and its own losses.

    Args:
        pairs: Optimizers, and the losses of each, which are summed.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs

    def __call__(self, run: Run, batch: Any) -> Mapping[str, Any]:
        optimizer, tensors = _turn(self.pairs, run)
        optimizer.zero_grad()  # drops gradients of the losses of other optimizers
        values: dict[str, Any] = run.model(batch, tensors)
        run.outputs.update(values)  # before backward, which calls the hooks at the end of the batch
        run.backward(values["loss"])
        if not session_of(run).step.skipping:
            run.update(optimizer)
        return values


def _turn(pairs: Sequence[Pair], run: Run) -> Pair:
    """Return the pair of the step in progress."""
    return pairs[run.progress.step % len(pairs)]


class Together:
    """The loss of a training with one optimizer, and all intermediate values.

    Args:
        tensors: The losses, which are summed.
    """

    def __init__(self, tensors: Sequence[NmTensor]) -> None:
        self.tensors = tensors

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        values: dict[str, Tensor] = model(batch, self.tensors)
        return values


def model_of(tensors: Sequence[NmTensor]) -> GraphModel:
    """Return the trainable modules on which these tensors depend, as one model."""
    return GraphModel(Graph(tensors))


def in_order(pairs: Sequence[Pair], created: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers of the pairs, each once: those of `created` in its order, as in NeMo's files, then the others."""
    used = dict.fromkeys(optimizer for optimizer, _ in pairs)
    return [tensor for tensor in dict.fromkeys([*created, *used]) if tensor in used]


def pairs_of(tensors: Sequence[Any]) -> list[Pair]:
    """Return the pairs of optimizers and losses in ``tensors_to_optimize``; none if it is a list of losses.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(tensors, NmTensor | str) or not tensors:
        raise TypeError(f"tensors_to_optimize must be a list of losses; got {tensors!r}")
    if all(isinstance(tensor, NmTensor) for tensor in tensors):
        return []
    pairs: list[Pair] = []
    for tensor in tensors:
        match tensor:
            case (Optimizer() as optimizer, [*losses]) if losses and all(isinstance(loss, NmTensor) for loss in losses):
                pairs.append((optimizer, losses))
            case _:
                raise TypeError(
                    f"tensors_to_optimize must be a list of losses, or of pairs (optimizer, [loss, ...]) with an optimizer of "
                    f"nf.create_optimizer; got {tensor!r} in it"
                )
    return pairs
