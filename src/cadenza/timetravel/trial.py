"""Try some steps of training, then restore the state before."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from itertools import chain
from typing import Any

from torch import Tensor, nn

from cadenza.engine import boundary
from cadenza.engine.loop import Training, fit
from cadenza.engine.session import Loops, Session
from cadenza.errors import DataError
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import Callback
from cadenza.loading import num_batches
from cadenza.loading.loaders import Limited
from cadenza.loading.rng import preserve_rng_state
from cadenza.optim.parameters import parameters_of
from cadenza.run import Run
from cadenza.status.progress import Counters, Progress
from cadenza.timetravel.restore_point import RestorePoint, restore_in_place


def try_steps(session: Session, steps: int, callbacks: Sequence[Callback], *, loader: Iterable[Any] | None = None) -> Session:
    """Try the first updates of a run with other callbacks, then restore the state before. Return the session of the trial.

    The trial is a run of its own, with the model, the optimizers and the batches of `session`. A callback may stop it. Changes
    outside of these, such as a counter of your own in ``compute_loss``, are not restored. Every rank must call this.

    Args:
        session: The run. No callback of it is called, and its counters and the position in its loader do not change.
        steps: The maximum number of updates.
        callbacks: The callbacks of the trial.
        loader: The loader of the trial; None: that of the run.

    Raises:
        DataError: The loader of the run can be read only once.
        ValueError: The run is a loop of ``cadenza.attach``, which brings its own data.
    """
    if session.loop is Loops.ATTACHED:
        raise ValueError(
            "a loop of cadenza.attach(...) cannot be tried before the training: it brings its own data. Use a Trainer with a "
            "loader and compute_loss, and give what it finds to the loop."
        )
    read = apart(session.loader) if loader is None else loader
    held = RestorePoint([read], data=False)  # before it is opened: a sampler may draw then
    try:
        trial = _twin(session, steps, callbacks, read)
        with undone(session), Training(trial) as training:
            training.begin()
            fit(training)
            training.finish()
    finally:
        held.restore()
    return trial


@contextmanager
def undone(session: Session) -> Iterator[None]:
    """Restore model, optimizers, gradients, fp16 scaler and RNG state at the exit, after an error too.

    A LightningModule logs nothing meanwhile.

    The copies are on the host, so they take no memory of the device.
    """
    model = session.module
    modes = [(module, module.training) for module in session.model.modules()]
    without_effects = getattr(inspect.unwrap(session.compute), "without_effects", nullcontext)
    with preserve_rng_state(), without_effects():
        before = _Before(model, session)
        try:
            yield
        finally:
            before.restore()
            for module, training in modes:
                module.training = training


def apart(loader: Any) -> Any:
    """Return a loader that reads the same batches, and does not change the position of the given one.

    Raises:
        DataError: The loader is an iterator, which gives each batch once.
    """
    if isinstance(loader, Limited):
        return Limited(apart(loader.loader), loader.count)
    held = [one for one in getattr(loader, "__dict__", {}).values() if _is_used_up(one)]
    for once in [loader] if isinstance(loader, Iterator) else held:
        raise DataError(
            f"trying steps before the training needs a loader that can be read again; a {type(once).__name__} gives each "
            "batch once, and the training would miss those. Give a list, a DataLoader, or any iterable that starts anew."
        )
    dataset = getattr(loader, "dataset", None)
    if hasattr(dataset, "state_dict") or (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        # The loader keeps its own position. The data set may be large: without a position of its own, it is not copied.
        return deepcopy(loader, {} if dataset is None or hasattr(dataset, "state_dict") else {id(dataset): dataset})
    return loader


def _is_used_up(part: object) -> bool:
    """Return whether a part of a loader is an iterator that cannot be rewound: a generator, a ``cycle`` or the like."""
    return isinstance(part, Iterator) and type(part).__module__ in ("builtins", "itertools")


def _twin(session: Session, steps: int, callbacks: Sequence[Callback], loader: Iterable[Any]) -> Session:
    """Return a session with the same model, optimizers and driver, and with counters, records and requests of its own."""
    twin = Session(
        model=session.model,
        optimizers=session.optimizers,
        loader=loader,
        compute=session.compute,  # it is in the run's precision already, and may be so twice
        driver=session.driver,
        precision=session.precision,
        accumulate=session.step.window.size,
        step_fn=session.step_fn,
        data_seed=session.data_seed,
        hooks=Hooks(callbacks),
        progress=Progress(max_steps=steps, accumulate=session.step.window.size),
        make_run=Run,
    )
    twin.step.derived, twin.cursor.permuted = session.step.derived, session.cursor.permuted
    twin.extra_parameters = session.extra_parameters
    twin.module_flags.keeps_modes = session.module_flags.keeps_modes
    twin.state.update(deepcopy(dict(session.run.state)))
    twin.progress.begin(Counters(), num_batches(loader, session.driver.data_shard()))
    boundary.open_loader(twin)
    twin.metrics.losses.quiet = True
    return twin


class _Before:
    """A copy of the state that training changes."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        holders: list[Any] = [*model.modules(), session.precision, getattr(session.precision, "scaler", None)]
        self._attributes = [(vars(holder), dict(vars(holder))) for holder in holders if holder is not None]
        held = chain.from_iterable(attributes.values() for _, attributes in self._attributes)
        self._containers = [(one, copy(one)) for one in held if isinstance(one, dict | list | set)]
        tensors = {id(tensor): tensor for tensor in self._tensors(session)}
        self._contents = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors.values()]
        parameters = chain(model.parameters(), parameters_of(session.optimizers))
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in self._gradients:
            parameter.grad = None
        # A wrapper such as SAM or Lookahead holds another optimizer, and tensors that no state_dict contains.
        self._optimizers = RestorePoint(session.optimizers, data=True, known=tensors.values())

    def _tensors(self, session: Session) -> Iterator[Tensor]:
        """Yield parameters, buffers, and tensors that a module keeps as attributes, as metrics do."""
        attributes = [attributes for _, attributes in self._attributes]
        inner = [content.values() if isinstance(content, dict) else content for _, content in self._containers]
        for value in chain.from_iterable([*(one.values() for one in attributes), *inner]):
            if isinstance(value, Tensor):
                yield value

    def restore(self) -> None:
        restore_in_place(self._attributes, self._containers, self._contents)
        self._optimizers.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
