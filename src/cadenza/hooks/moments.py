"""The moments of a run: one table, and everything else is derived from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from cadenza.errors import CallbackError, MomentError, OrderError, nearest
from cadenza.hooks.habits import moment_meant
from cadenza.hooks.listener import Listener
from cadenza.hooks.order import Phase, Relation
from cadenza.hooks.signatures import check_call

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.records.record import Record
    from cadenza.run import Run
    from cadenza.status.progress import Unit

Moment = Callable[..., None]
Function = TypeVar("Function", bound=Moment)

_COUNTED: dict[Moment, tuple[Unit, bool, bool]] = {}
_DECLARED: set[object] = set()


def _under_way(unit: Unit) -> Callable[[Function], Function]:
    """Mark a moment whose filters count the unit under way: the 3rd step starts when 2 are complete."""
    return _counting(unit, under_way=True)


def _begun(unit: Unit) -> Callable[[Function], Function]:
    """Mark the same where the unit may never be complete: an epoch that ``max_steps`` cuts, a fetch that finds no batch."""
    return _counting(unit, under_way=True, begun=True)


def _complete(unit: Unit) -> Callable[[Function], Function]:
    """Mark a moment whose filters count complete units."""
    return _counting(unit, under_way=False)


def _counting(unit: Unit, *, under_way: bool, begun: bool = False) -> Callable[[Function], Function]:
    def mark(moment: Function) -> Function:
        _COUNTED[moment] = (unit, under_way, begun)
        return moment

    return mark


def _is_hook(name: str, value: object) -> bool:
    return name.startswith("on_") and callable(value)


class BaseCallback:
    """What every callback is, in whatever dialect: it has a name and a place, hears something, and may have state.

    Write `Callback`; only a class that hears other names than its moments, such as those of another system, starts here.
    """

    name: str | None = None
    """What plan, errors, faults and saved state call it; the class name if None."""

    on_fault: Literal["raise", "disable"] = "raise"
    """What an error in a hook does: end the run, or be reported once and disable this callback."""

    asks = True
    """Whether its hooks in a step may log, or ask the run for anything. On several ranks all wait for each other at the end of
    a step in which somebody may; with False what it asks for all the same is taken some steps later."""

    shows_progress = False
    """Whether it shows on the screen how far the run is. `Trainer` then adds no progress bar."""

    phase: Phase | None = None
    """The work that this callback does for others, if they are ordered by it. See `Phase`."""

    after: Relation = ()
    """Classes and phases. Their callbacks are called before this one."""

    before: Relation = ()
    """Classes and phases. Their callbacks are called after this one."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold for this callback: numbers, strings, tensors, lists, dicts.

        Asked for on every rank; what the main one returns is saved, and given to all.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take back what `state_dict` returned."""

    def listeners(self) -> list[Listener]:
        """Return what this callback hears."""
        return []

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in ("after", "before"):
            classes = getattr(cls, name)
            if _is_computed(classes):
                continue
            if not isinstance(classes, tuple) or not all(isinstance(one, type | Phase) for one in classes):
                raise OrderError(
                    f"{cls.__qualname__}.{name} must be a tuple of classes and phases, such as (Evaluate, Phase.SAVE); "
                    f"got {classes!r}"
                )
        check_settings(cls, cls.__qualname__)
        for name, value in vars(cls).items():
            close_to = _settings_like(value)
            if name not in close_to and (meant := nearest(name, close_to, cutoff=0.75)):
                raise CallbackError(f"{cls.__qualname__}.{name} = {value!r} has no effect: a callback has no {name!r}.{meant}")


def check_settings(holder: Any, owner: str) -> None:
    """Raise `CallbackError` if what a callback, or its class, says of itself cannot be read."""
    on_fault, asks = holder.on_fault, holder.asks
    if not _is_computed(on_fault) and on_fault not in ("raise", "disable"):
        meant = nearest(str(on_fault), ("raise", "disable"))
        raise CallbackError(f"{owner}.on_fault must be 'raise' or 'disable'; got {on_fault!r}.{meant}")
    if not _is_computed(asks) and not isinstance(asks, bool):
        raise CallbackError(f"{owner}.asks must be True or False; got {asks!r}")


def _is_computed(value: object) -> bool:
    """Return whether a class holds a property or a dataclass field instead of the setting: each instance has its own."""
    return isinstance(value, Field) or hasattr(type(value), "__get__")


def _settings_like(value: object) -> tuple[str, ...]:
    """Return the settings of a callback that may have such a value."""
    if isinstance(value, str) and value in ("raise", "disable", "disabled"):
        return ("on_fault",)
    if isinstance(value, Phase):
        return ("phase",)
    is_relation = isinstance(value, tuple) and value and all(map(_is_named_in_relations, value))
    return ("after", "before") if is_relation else ()


def _is_named_in_relations(value: object) -> bool:
    return isinstance(value, Phase) or (isinstance(value, type) and issubclass(value, BaseCallback))


class Callback(BaseCallback):
    """Your own code at exact moments of a run: override the hooks you need, the rest cost nothing.

    The hooks below are all the moments there are, in the order in which they come. A hook that is misspelled, or takes the
    wrong arguments, is an error when the class is written. Hooks run on every rank, in the same order.

    A project declares moments of its own in a class with ``declares=True`` and fires them with ``run.fire``::

        class PruneMoments(Callback, declares=True):
            def on_prune(self, run: Run, ratio: float) -> None:
                '''Called after the smallest weights were set to zero.'''
    """

    __moments__: ClassVar[Mapping[str, Moment]] = {}

    # -- the run -----------------------------------------------------------------------------------

    def on_setup(self, run: Run, /) -> None:
        """Called when the parts are built and placed on the device; nothing is restored yet.

        ``run.replace_loader`` and ``run.replace_model`` work here only.
        """

    def on_fit_start(self, run: Run, /) -> None:
        """Called before the first epoch; what was saved is restored. From here on `on_fit_end` is certain."""

    @_begun("epoch")
    def on_epoch_start(self, run: Run, /) -> None:
        """Called before the first fetch of an epoch, and again when a run continues inside one.

        Then ``run.progress.resumed_in_epoch`` is true.
        """

    @_begun("batch")
    def on_fetch_start(self, run: Run, /) -> None:
        """Called before the loader is asked for a batch; N+1 times for N batches."""

    @_begun("batch")
    def on_fetch_end(self, run: Run, /) -> None:
        """Called after the loader was asked, also when it had no more; N+1 times for N batches."""

    @_under_way("step")
    def on_step_start(self, run: Run, /) -> None:
        """Called before the first batch of a group of ``accumulate`` batches."""

    @_under_way("batch")
    def on_batch_start(self, run: Run, batch: Any, /) -> None:
        """Called with the batch on the device. Changes in place reach the model; ``run.skip_batch`` drops it."""

    @_under_way("batch")
    def on_before_backward(self, run: Run, outputs: MutableMapping[str, Any], /) -> None:
        """Called after the forward pass. ``outputs["loss"]`` is undivided; a loss put in its place is the one used."""

    @_under_way("batch")
    def on_after_backward(self, run: Run, outputs: MutableMapping[str, Any], /) -> None:
        """Called when the gradients of this batch are added; nothing is applied yet."""

    @_complete("batch")
    def on_batch_end(self, run: Run, batch: Any, outputs: MutableMapping[str, Any], /) -> None:
        """Called when ``run.progress.batch`` is raised. After an error it is not, and `outputs` holds what there is."""

    @_under_way("step")
    def on_before_optimizer_step(self, run: Run, /) -> None:
        """Called when the gradients are complete, reduced over ranks and unscaled: the place to clip them."""

    @_under_way("step")
    def on_after_optimizer_step(self, run: Run, /) -> None:
        """Called when the weights are updated; the gradients are still there."""

    @_under_way("step")
    def on_before_zero_grad(self, run: Run, /) -> None:
        """Called before the gradients are dropped."""

    @_under_way("step")
    def on_after_zero_grad(self, run: Run, /) -> None:
        """Called when the gradients are dropped."""

    @_complete("step")
    def on_step_end(self, run: Run, /) -> None:
        """Called when ``run.progress.step`` is raised. ``run.outputs`` of the last batch can still be read."""

    @_complete("epoch")
    def on_epoch_end(self, run: Run, /) -> None:
        """Called after the last step of an epoch; ``run.progress.epoch`` is raised if the epoch is whole."""

    def on_fit_end(self, run: Run, /) -> None:
        """Called last, always, once `on_fit_start` was entered; ``run.outcome`` says how the run ended."""

    def on_stop(self, run: Run, reason: str, /) -> None:
        """Called when a stop that was asked for is taken, before `on_epoch_end` or `on_fit_end`."""

    def on_exception(self, run: Run, error: BaseException, /) -> None:
        """Called before `on_fit_end` for every error that ends the run, KeyboardInterrupt too."""

    # -- evaluation --------------------------------------------------------------------------------

    def on_sanity_start(self, run: Run, evaluation: Evaluation, /) -> None:
        """Called before a trial of a few batches; no evaluation moment fires for it."""

    def on_sanity_end(self, run: Run, evaluation: Evaluation, /) -> None:
        """Called after the trial. Its results reach no monitor, history or sink."""

    def on_eval_start(self, run: Run, evaluation: Evaluation, /) -> None:
        """Called before an evaluation; the model is in evaluation mode. ``evaluation.limit`` may be changed."""

    def on_eval_batch_start(self, run: Run, evaluation: Evaluation, batch: Any, /) -> None:
        """Called with the batch on the device."""

    def on_eval_batch_end(self, run: Run, evaluation: Evaluation, batch: Any, outputs: Mapping[str, Any], /) -> None:
        """Called with what ``compute`` returned for this batch."""

    def on_eval_end(self, run: Run, evaluation: Evaluation, /) -> None:
        """Called with ``evaluation.results`` such as ``{"eval/acc": 0.93}``; empty if an error cut it short."""

    # -- records and checkpoints -------------------------------------------------------------------

    @_complete("step")
    def on_log(self, run: Run, record: Record, /) -> None:
        """Called with all that was logged in a step, as plain numbers; on the main process only."""

    def on_save(self, run: Run, checkpoint: Any, /) -> None:
        """Called when callbacks' states are being collected; nothing is written yet."""

    def on_load(self, run: Run, checkpoint: Any, /) -> None:
        """Called when everything is restored."""

    # -- not moments -------------------------------------------------------------------------------

    def listeners(self) -> list[Listener]:
        """Return what this callback hears: every hook that it overrides, unfiltered."""
        return [
            Listener(moment, getattr(self, name))
            for name, moment in self.__moments__.items()
            if getattr(getattr(self, name), "__func__", None) is not moment
        ]

    def __init_subclass__(cls, *, declares: bool = False, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        table = {name: moment for base in reversed(cls.__mro__[1:]) for name, moment in _table(base).items()}
        if declares:
            # A hook of a moment that is known already is heard, not declared anew.
            own = {name: value for name, value in vars(cls).items() if _is_hook(name, value) and name not in table}
            _DECLARED.update(own.values())
            table |= own
        cls.__moments__ = table
        for name in dir(cls):
            if name in table or (name.startswith("on_") and callable(getattr(cls, name))):
                _check_hook(cls, name)


Callback.__moments__ = {name: value for name, value in vars(Callback).items() if _is_hook(name, value)}
_DECLARED.update(Callback.__moments__.values())


def moments_of(cls: type[Callback]) -> Mapping[str, Moment]:
    """Return the table: every moment that a class may hear, by name, in order.

    >>> list(moments_of(Callback))[:3]
    ['on_setup', 'on_fit_start', 'on_epoch_start']
    """
    return cls.__moments__


def counter_of(moment: Moment) -> tuple[Unit, bool, bool] | None:
    """Return the unit that a moment's filters count, whether it is the one under way, and whether that may stay incomplete.

    None if the moment has no counter.
    """
    return _COUNTED.get(moment)


def check_declared(moment: object) -> None:
    """Raise `MomentError` unless `moment` is an entry of a table."""
    if moment not in _DECLARED:
        raise MomentError(
            f"expected a moment, such as Callback.on_step_end; got {moment!r}. A moment of your own is declared in a "
            "class with declares=True and handed over as ThatClass.on_it."
        )


def check_fits(function: Callable[..., Any], moment: Moment) -> None:
    """Raise `MomentError` unless `function` can be called as `moment` is, without its ``self``."""
    wanted = list(inspect.signature(moment).parameters)[1:]
    check_call(function, wanted, f"{getattr(function, '__qualname__', repr(function))} cannot be called at {moment.__name__}")


def checked_arguments(moment: Moment, run: Run, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all arguments of a moment that is fired, but the run; raise `MomentError` if they do not fit it."""
    check_declared(moment)
    try:
        bound = inspect.signature(moment).bind(None, run, *arguments, **keywords)
    except TypeError as error:
        raise MomentError(f"{moment.__qualname__} was fired with the wrong arguments: {error}") from None
    bound.apply_defaults()
    return bound.args[2:]


def _table(base: type) -> Mapping[str, Moment]:
    return base.__moments__ if issubclass(base, Callback) else {}


def _check_hook(cls: type[Callback], name: str) -> None:
    if name not in moments_of(cls):
        raise MomentError(
            f"{cls.__qualname__}.{name} is no moment of a run, so it would never be called."
            f"{moment_meant(name, moments_of(cls))} A method that is no hook needs a name without 'on_'; moments of your own "
            "are declared in a class with declares=True."
        )
    defined, moment = inspect.getattr_static(cls, name), moments_of(cls)[name]
    if defined is moment:
        return
    hook, wanted = getattr(cls, name), list(inspect.signature(moment).parameters)
    if not callable(hook):
        raise MomentError(f"{cls.__qualname__}.{name} must be a method ({', '.join(wanted)}); got {hook!r}")
    if isinstance(defined, staticmethod | classmethod) or not hasattr(type(defined), "__get__"):
        wanted = wanted[1:]  # no instance is bound to it
    check_call(hook, wanted, f"{cls.__qualname__}.{name} has the wrong signature")
