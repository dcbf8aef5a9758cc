"""The table of moments. Hooks, plan, checks and docs are derived from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import Field
from dis import opname
from itertools import pairwise
from types import CodeType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from cadenza.errors import CallbackError, MomentError, OrderError, nearest
from cadenza.hooks.counters import BATCH, STEP, counts
from cadenza.hooks.listener import Listener
from cadenza.hooks.order import Phase, Relation
from cadenza.hooks.schedule import brief_setting
from cadenza.status.reprs import as_call, signature_of
from cadenza.text.hints import moment_meant

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.records.record import Record
    from cadenza.run import Run

Moment = Callable[..., None]

_DECLARED: set[object] = set()


def _is_hook(name: str, value: object) -> bool:
    return name.startswith("on_") and callable(value)


class BaseCallback:
    """The base of all callbacks, also of those of other systems: a name, an order, listeners and state.

    Derive your own callbacks from `Callback`. Derive from this class only to give the hooks other names than the moments have.
    """

    name: str | None = None
    """The name in the plan, errors, faults and saved state; None takes the name of the class."""

    on_fault: Literal["raise", "disable", "retry"] = "raise"
    """The effect of an error in a hook: end the run, or report the error once and disable this callback. A `Sink` may also
    be tried again (``"retry"``)."""

    _may_retry = False

    shows_progress = False
    """Whether it shows the progress of the run on the screen. `Trainer` then adds no progress bar."""

    each_rank: bool = False
    """Whether a checkpoint holds its state of each rank; with False, that of rank 0."""

    phase: Phase | None = None
    """The work that this callback does, if others are ordered by it. See `Phase`."""

    after: Relation = ()
    """Classes and phases. Their callbacks are called before this one."""

    before: Relation = ()
    """Classes and phases. Their callbacks are called after this one."""

    decides: tuple[str, ...] = ()
    """The decisions that it takes on its own, such as ``("stopped",)``, for `Run.why_not`."""

    def waits_for(self) -> Iterable[str]:
        """Return what its next decision waits for besides schedules, such as "2 of 3 evaluations", for `Run.why_not`."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint: numbers, strings, tensors, lists, dicts.

        Called on every rank. The state of the main process is saved, and every rank loads it.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore the state that `state_dict` returned."""

    def listeners(self) -> list[Listener]:
        """Return the listeners of this callback."""
        return []

    def __repr__(self) -> str:
        return as_call(self, brief_setting)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        check_settings(cls, cls.__qualname__)
        for name, value in vars(cls).items():
            close_to = _settings_like(value)
            if name not in close_to and (meant := nearest(name, close_to, cutoff=0.75)):
                raise CallbackError(f"{cls.__qualname__}.{name} = {value!r} has no effect: callbacks have no {name!r}.{meant}")


def check_settings(holder: Any, owner: str) -> None:
    """Raise `CallbackError` or `OrderError` if a setting of a callback, or of its class, has a wrong value."""
    for name in ("after", "before"):
        classes = getattr(holder, name)
        if _is_computed(classes):
            continue
        if not isinstance(classes, tuple) or not all(isinstance(class_name, type | Phase) for class_name in classes):
            raise OrderError(
                f"{owner}.{name} must be a tuple of classes and phases, such as (Evaluate, Phase.SAVE); got {classes!r}"
            )
    if not _is_computed(holder.name) and not isinstance(holder.name, str | None):
        raise CallbackError(f"{owner}.name must be a string, or None for the name of the class; got {holder.name!r}")
    on_fault = holder.on_fault
    choices = ("raise", "disable", "retry") if holder._may_retry else ("raise", "disable")
    if not _is_computed(on_fault) and on_fault not in choices:
        only = " Only a Sink is tried again." if on_fault == "retry" else nearest(str(on_fault), choices)
        expected = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
        raise CallbackError(f"{owner}.on_fault must be {expected}; got {on_fault!r}.{only}")


def _is_computed(value: object) -> bool:
    """Return whether a class holds a property or a dataclass field, so that each instance has its own value."""
    return isinstance(value, Field) or hasattr(type(value), "__get__")


def _settings_like(value: object) -> tuple[str, ...]:
    """Return the settings of a callback that accept this value."""
    if isinstance(value, str) and value in ("raise", "disable", "disabled", "retry"):
        return ("on_fault",)
    if isinstance(value, Phase):
        return ("phase",)
    is_relation = isinstance(value, tuple) and value and all(map(_is_named_in_relations, value))
    return ("after", "before") if is_relation else ()


def _is_named_in_relations(value: object) -> bool:
    return isinstance(value, Phase) or (isinstance(value, type) and issubclass(value, BaseCallback))


class Callback(BaseCallback):
    """Runs your code at exact moments of a run. Override the hooks that you need; the others cost nothing.

    The hooks below are all moments, in the order in which they fire. A misspelled hook, or one with wrong arguments, raises an
    error when the class is defined. Hooks run on every rank, in the same order.

    To add moments of your own, declare them in a class with ``declares=True`` and fire them with ``run.fire``::

        class PruneMoments(Callback, declares=True):
            def on_prune(self, run: Run, ratio: float) -> None:
                '''Called after the smallest weights were set to zero.'''

    >>> from cadenza.testing import tiny_run
    >>> class LargestLoss(Callback):
    ...     def on_fit_start(self, run):
    ...         self.value = 0.0
    ...
    ...     def on_batch_end(self, run, batch, outputs):
    ...         self.value = max(self.value, outputs["loss"].item())
    ...
    ...     def on_epoch_end(self, run):
    ...         run.log("train/largest_loss", self.value)
    >>> tiny_run(callbacks=[LargestLoss()], losses=[1.0, 3.0, 2.0]).history["train/largest_loss"]
    [(3, 3.0)]
    """

    __moments__: ClassVar[Mapping[str, Moment]] = {}

    # -- the run -----------------------------------------------------------------------------------

    def on_setup(self, run: Run, /) -> None:
        """Called when model and optimizers are on the device, before a checkpoint is restored.

        ``run.replace_loader`` and ``run.replace_model`` can be called only here.
        """

    def on_fit_start(self, run: Run, /) -> None:
        """Called before the first epoch, after a checkpoint is restored. From here on, `on_fit_end` is always called."""

    @counts("epoch", BATCH, begun=True)
    def on_epoch_start(self, run: Run, /) -> None:
        """Called before the first fetch of an epoch, and again when a run resumes inside an epoch.

        In the second case ``run.progress.resumed_in_epoch`` is true.
        """

    @counts("batch", BATCH, begun=True)
    def on_fetch_start(self, run: Run, /) -> None:
        """Called before each ``next()`` of the loader: N+1 times for N batches."""

    @counts("batch", BATCH, begun=True)
    def on_fetch_end(self, run: Run, /) -> None:
        """Called after each ``next()`` of the loader, also when it is exhausted: N+1 times for N batches."""

    @counts("step", BATCH)
    def on_step_start(self, run: Run, /) -> None:
        """Called before the first of the ``accumulate`` batches of a step."""

    @counts("batch", BATCH)
    def on_batch_start(self, run: Run, batch: Any, /) -> None:
        """Called with the batch on the device. Changes in place reach the model. ``run.skip_batch`` drops the batch."""

    @counts("batch", BATCH)
    def on_before_backward(self, run: Run, outputs: MutableMapping[str, Any], /) -> None:
        """Called after the forward pass. ``outputs["loss"]`` is not scaled yet. Assign it to replace the loss."""

    @counts("batch", BATCH)
    def on_after_backward(self, run: Run, outputs: MutableMapping[str, Any], /) -> None:
        """Called when the gradients of this batch are added to those of the step, before any update."""

    @counts("batch", STEP)
    def on_batch_end(self, run: Run, batch: Any, outputs: MutableMapping[str, Any], /) -> None:
        """Called after ``run.progress.batch`` is raised. After an error the counter stays, and `outputs` may be incomplete."""

    @counts("step", STEP)
    def on_before_optimizer_step(self, run: Run, /) -> None:
        """Called when the gradients are complete, reduced over ranks and unscaled. Clip them here."""

    @counts("step", STEP)
    def on_after_optimizer_step(self, run: Run, /) -> None:
        """Called after the update of the weights. The gradients still exist."""

    @counts("step", STEP)
    def on_before_zero_grad(self, run: Run, /) -> None:
        """Called before the gradients are set to None."""

    @counts("step", STEP)
    def on_after_zero_grad(self, run: Run, /) -> None:
        """Called after the gradients are set to None."""

    @counts("step")
    def on_step_end(self, run: Run, /) -> None:
        """Called after ``run.progress.step`` is raised. ``run.outputs`` of the last batch is still available."""

    @counts("epoch")
    def on_epoch_end(self, run: Run, /) -> None:
        """Called after the last step of an epoch. ``run.progress.epoch`` is raised before if the epoch is complete."""

    def on_fit_end(self, run: Run, /) -> None:
        """Called last, also after an error, if `on_fit_start` was reached. ``run.outcome`` holds how the run ended."""

    def on_stop(self, run: Run, reason: str, /) -> None:
        """Called when a requested stop takes effect, before `on_epoch_end` and `on_fit_end`."""

    def on_exception(self, run: Run, error: BaseException, /) -> None:
        """Called before `on_fit_end` for every error that ends the run, including KeyboardInterrupt."""

    # -- evaluation --------------------------------------------------------------------------------

    def on_sanity_start(self, run: Run, evaluation: Evaluation, /) -> None:
        """Called before a sanity check of a few evaluation batches. No other evaluation moment fires for it."""

    def on_sanity_end(self, run: Run, evaluation: Evaluation, /) -> None:
        """Called after the sanity check. Its results reach no monitor, history or sink."""

    def on_eval_start(self, run: Run, evaluation: Evaluation, /) -> None:
        """Called before an evaluation, with the model in evaluation mode. A hook may change ``evaluation.limit``."""

    def on_eval_batch_start(self, run: Run, evaluation: Evaluation, batch: Any, /) -> None:
        """Called with the batch on the device."""

    def on_eval_batch_end(self, run: Run, evaluation: Evaluation, batch: Any, outputs: Mapping[str, Any], /) -> None:
        """Called after ``compute`` returned the `outputs` of this batch."""

    def on_eval_end(self, run: Run, evaluation: Evaluation, /) -> None:
        """Called with ``evaluation.results``, such as ``{"eval/acc": 0.93}``. After an error they are empty."""

    # -- records and checkpoints -------------------------------------------------------------------

    @counts("step", main_only=True)
    def on_log(self, run: Run, record: Record, /) -> None:
        """Called with the record of a step: all logged values as plain numbers. On the main process only."""

    def on_save(self, run: Run, checkpoint: Any, /) -> None:
        """Called after the states of callbacks are collected for a checkpoint. Nothing is written yet."""

    def on_load(self, run: Run, checkpoint: Any, /) -> None:
        """Called after a checkpoint is restored."""

    # -- not moments -------------------------------------------------------------------------------

    def listeners(self) -> list[Listener]:
        """Return a listener without a schedule for each hook that this callback overrides."""
        own, kind = vars(self), type(self)
        return [
            Listener(moment, getattr(self, name))
            for name, moment in self.__moments__.items()
            if name in own or getattr(kind, name) is not moment
        ]

    def __init_subclass__(cls, *, declares: bool = False, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        table = {name: moment for base in reversed(cls.__mro__[1:]) for name, moment in _table(base).items()}
        if declares:
            # A hook of a known moment overrides it, and declares no new one.
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
    """Return the table: every moment that a class may have a hook for, by name, in order.

    >>> list(moments_of(Callback))[:3]
    ['on_setup', 'on_fit_start', 'on_epoch_start']
    """
    return cls.__moments__


def check_declared(moment: object) -> None:
    """Raise `MomentError` unless `moment` is an entry of a table."""
    if moment in _DECLARED:
        return
    known = moments_of(Callback)
    if moment in known:
        advice = f"Write Callback.{moment}."
    elif isinstance(moment, str):
        advice = f"Write it as an attribute of Callback, without quotes.{moment_meant(moment, known)}"
    elif inspect.isfunction(moment):
        advice = "Name the moment above the function: @on(Callback.on_step_end)."
    else:
        advice = "Declare a moment of your own in a class with declares=True, and pass it as ThatClass.on_it."
    raise MomentError(f"expected a moment, such as Callback.on_step_end; got {moment!r}. {advice}")


def check_fits(function: Callable[..., Any], moment: Moment) -> None:
    """Raise `MomentError` unless `function` accepts the arguments of `moment` without ``self``."""
    wanted = list(signature_of(moment).parameters)[1:]
    check_call(function, wanted, f"{getattr(function, '__qualname__', repr(function))} cannot be called at {moment.__name__}")


def checked_arguments(moment: Moment, run: Run, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of a moment without the run. Raise `MomentError` if they do not fit the moment."""
    check_declared(moment)
    try:
        bound = signature_of(moment).bind(None, run, *arguments, **keywords)
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
    hook, wanted = getattr(cls, name), list(signature_of(moment).parameters)
    if not callable(hook):
        raise MomentError(f"{cls.__qualname__}.{name} must be a method ({', '.join(wanted)}); got {hook!r}")
    if isinstance(defined, staticmethod | classmethod) or not hasattr(type(defined), "__get__"):
        wanted = wanted[1:]  # no instance is bound to it
    check_call(hook, wanted, f"{cls.__qualname__}.{name} has the wrong signature")


# -- how a callback declares that it holds other weights of the model, such as an average ----------


class HeldWeights(NamedTuple):
    """Where the state of a callback holds weights of the model.

    >>> HeldWeights("average").tensors_in({"average": {"weight": 1.0}, "updates": 3})
    {'weight': 1.0}
    """

    entry: str
    """The name in ``state_dict()``. Its value maps the names of the model's tensors to tensors."""
    prefix: str = ""
    """The beginning of these names that the model's names do not have; entries without it are left out."""

    def tensors_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors in a state of the callback, by the model's names."""
        found = state[self.entry].items()
        return {name.removeprefix(self.prefix): match for name, match in found if name.startswith(self.prefix)}


@runtime_checkable
class HoldsWeights(Protocol):
    """A callback that holds other weights of the model. They have a name, for ``weights=`` wherever a checkpoint is read.

    ``Evaluate(weights=...)`` and `Trainer.evaluate` take them as well. If the callback has a method ``in_place(run)``, which
    returns a context in which the model has these weights, that one is used in a run.

    >>> from cadenza import Callback
    >>> class First(Callback):
    ...     \"\"\"Holds the weights after the first step.\"\"\"
    ...     first = {}
    ...     def on_step_end(self, run):
    ...         self.first = self.first or {name: one.clone() for name, one in run.model.state_dict().items()}
    ...     def state_dict(self):
    ...         return {"first": self.first}
    ...     def held_weights(self):
    ...         return {"first": HeldWeights("first") if self.first else None}
    >>> from cadenza.callbacks import Evaluate
    >>> from cadenza.testing import tiny_loader, tiny_run
    >>> run = tiny_run(callbacks=[First(), Evaluate(tiny_loader(), "1 step", weights="first")])
    >>> len({value for _, value in run.history["eval/loss"]})
    1
    """

    def held_weights(self) -> Mapping[str, HeldWeights | None]:
        """Return, by the name of the weights, where ``state_dict()`` has them; None if there are none yet."""


@runtime_checkable
class ReplacesWeights(Protocol):
    """A callback that puts other weights into the model when a run ends, after the last save, such as the best ones."""

    def put_in_place_again(self, run: Run, state: Mapping[str, Any]) -> None:
        """Put them into the model of a run that is over, from the state in its checkpoint. Every rank must call this."""


# -- checks that a function can be a hook: its parameters, and that it returns None ----------------


def check_call(function: Callable[..., Any], wanted: list[str], problem: str) -> None:
    """Raise `MomentError` unless `function` accepts the arguments `wanted`, by position.

    A parameter may have any name except that of another argument of this moment, or one that only hooks of other trainers have.
    The engine ignores return values, so a function that returns a constant, a truth value or a new container is an error. The
    result of a call or the value of a variable is not checked.
    """
    expected = ", ".join(wanted)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise MomentError(f"{problem}: it is async or a generator, so it would never run. Write a plain function ({expected}).")
    signature = _signature(function)
    if signature is None:
        return
    try:
        bound = signature.bind(*wanted)
    except TypeError:
        advice = _habit(signature)
        if next(iter(signature.parameters), "") == "self" and "self" not in wanted:
            advice = " A method needs no @on: in a subclass of Callback, it has the name of its moment. See also listeners()."
        if hasattr(function, "__wrapped__"):
            advice += f" If its decorator gives other arguments, write the parameters ({expected}) in the decorator's function."
        raise MomentError(f"{problem}: expected ({expected}), got {signature}.{advice}") from None
    for name, parameter in signature.parameters.items():
        if name in PARAMETERS and name not in bound.arguments and parameter.default is None:
            raise MomentError(
                f"{problem}: {name!r} would always be None. Expected ({expected}), got {signature}.{_habit(signature)}"
            )
    for name, gets in bound.arguments.items():
        if not isinstance(gets, str) or name == gets:  # a tuple for *arguments
            continue
        if name in wanted or (name in PARAMETERS and gets in _OURS):
            raise MomentError(
                f"{problem}: {name!r} would get the {gets}. Expected ({expected}), got {signature}.{_habit(signature)}"
            )
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is not None and code.co_name != "<lambda>" and (value := _returned(code)):
        raise MomentError(
            f"{problem}: it returns {value}, but the return value of a hook is ignored. Return None; to control the run call "
            " run.stop(reason), run.end_epoch(reason) or run.skip_batch(reason)."
        )


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return what a function takes; None if that is not known.

    A decorated function takes what its wrapper takes, which may add or leave out arguments. A wrapper with ``*args`` and at
    most one parameter besides passes them on.
    """
    for through_wrappers in (False, True):
        try:
            signature = signature_of(function, follow_wrapped=through_wrappers)
        except ValueError:  # some builtins have none
            continue
        kinds = [parameter.kind for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        if len(kinds) > 2 or inspect.Parameter.VAR_POSITIONAL not in kinds or through_wrappers:
            return signature
    return None


PARAMETERS = {
    *("epoch", "logs", "trainer", "pl_module", "state", "control", "batch_idx", "batch_index", "dataloader_idx"),
    *("learn", "learner", "engine", "runner"),
}
"""Names of parameters that only hooks of other trainers have."""
_OURS = {"run", "batch", "outputs", "evaluation", "record", "reason", "error"}
"""Arguments that no name of `PARAMETERS` fits; a checkpoint may be called a state, and moments of a project have their own."""


def _habit(signature: inspect.Signature) -> str:
    names = signature.parameters.keys()
    if "pl_module" in names or "batch_idx" in names:
        return " Counters are in run.progress, and the model is run.model."
    if "control" in names:
        return " Counters are in run.progress; in place of control call run.stop(reason) or run.save(reason)."
    if "logs" in names:
        return " The epoch is run.progress.epoch, and logged numbers are in run.history.latest."
    return " Counters are in run.progress." if names & PARAMETERS else ""


_TRUTH = ("COMPARE_OP", "IS_OP", "CONTAINS_OP", "UNARY_NOT")


def _returned(code: CodeType) -> str:
    """Describe a return value that is visible in the bytecode; empty if none is, or with too many constants for one byte."""
    constants, steps = code.co_consts, zip(code.co_code[::2], code.co_code[1::2], strict=True)
    named = [(name, argument) for operation, argument in steps if (name := opname[operation]) != "CACHE"]
    for (before, index), (last, own) in pairwise(named if len(constants) <= 256 else ()):
        if last == "RETURN_CONST":  # in Python 3.12 and 3.13
            before, index = "LOAD_CONST", own
        elif last != "RETURN_VALUE":
            continue
        if before in _TRUTH:
            return "a truth value"
        if before.startswith("BUILD_") or before == "LOAD_SMALL_INT":
            return "a new value"
        if before == "LOAD_CONST" and constants[index] is not None:
            return repr(constants[index])
    return ""
