"""Freeze parts of the model, for a part of the run or all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from cadenza.drivers.name_patterns import named_matches
from cadenza.engine.module_state import module_flags_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import At
from cadenza.hooks.subscription import point
from cadenza.optim.parameters import parameters_of
from cadenza.status.decisions import decide
from cadenza.status.formats import counted

if TYPE_CHECKING:
    from cadenza.run import Run

Part = nn.Module | nn.Parameter
Pick = Callable[[nn.Module], Part | Iterable[Part]]


class Freeze(Callback):
    """Freeze parts of the model until a point of the run, then unfreeze them.

    A frozen parameter has ``requires_grad=False`` and gets no gradient. The optimizers of torch then skip it, without weight
    decay or momentum. Its momentum starts at zero when it is unfrozen. The optimizer must hold the parameter from the start:
    make it of all parameters. Parameters that require no gradient when the run is set up do not change, nor do layers in
    evaluation mode in a model in training mode. The end of the run restores ``requires_grad`` and the modes of all layers.

    With multiple ranks: communicates when parameters are frozen or unfrozen, because the reduction of gradients is set
    up again.

    Args:
        modules: The modules or parameters to freeze: a name or pattern such as ``"backbone.*"`` (a star matches dots too), a
            sequence of them, or a function of the model that returns modules or parameters. A module includes all modules
            inside it. A mapping of names to points unfreezes them one after the other; a part that several names match
            belongs to the first.
        until: A point such as ``"3 epochs"``, ``"500 steps"``, ``"10%"`` or an `At`. None freezes for the whole run.
        batch_norm: Whether to freeze layers with running statistics, such as BatchNorm. True: their parameters are frozen, and
            they stay in evaluation mode, so that their statistics do not change. False: parameters and statistics are trained.

    Raises:
        TypeError, ScheduleError: An argument is wrong.
        ValueError: A name matches nothing in the model, or no parameter is left to train.

    >>> from torch import nn
    >>> from cadenza.testing import tiny_run
    >>> freeze = Freeze("0", until="1 epoch")
    >>> run = tiny_run(model=nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)), callbacks=[freeze], epochs=2)
    >>> run.why("unfrozen")
    "unfrozen by Freeze at epoch 1, step 5, batch 5: '0', 4 parameters, at epoch 1"
    """

    def __init__(
        self,
        modules: str | Sequence[str] | Pick | Mapping[str, str | At],
        until: str | At | None = None,
        *,
        batch_norm: bool = True,
    ) -> None:
        if isinstance(modules, Mapping) and until is not None:
            raise TypeError(f"modules is a mapping, which has a point for each name. Leave out until={until!r}.")
        self.batch_norm = batch_norm
        self.groups: list[_Group] = _groups(modules, until)
        """The groups of parameters, each with the point at which it is unfrozen."""

    def listeners(self) -> list[Listener]:
        points = dict.fromkeys(group.until for group in self.groups if group.until is not None)
        own = [Listener(_moment(until), partial(self._let_go, until), until) for until in points]
        return silent([*super().listeners(), *own])

    def on_setup(self, run: Run) -> None:
        model = run.model
        taken: set[int] = set()
        for group in self.groups:
            learning, norms = _inside(group.pick(model), batch_norm=self.batch_norm)
            group.parameters = [parameter for parameter in learning if parameter.requires_grad and id(parameter) not in taken]
            # In a model in training mode, a layer that the user put into evaluation mode stays in it.
            group.norms = [norm for norm in norms if id(norm) not in taken and (norm.training or not model.training)]
            group.held = False
            taken |= {id(parameter) for parameter in (*group.parameters, *group.norms)}

    def on_fit_start(self, run: Run) -> None:
        run.at_end(partial(self._release, run, self.groups))
        for group in self.groups:
            if group.until is None or not group.until.reached(run.progress):
                group.hold()
                module_flags_of(run).expect(group.parts(), on=False)
                decide(run, "frozen", str(group), data=group.data())
        if not any(parameter.requires_grad for parameter in parameters_of(run.optimizers)):
            names = ", ".join(group.what for group in self.groups)
            raise ValueError(f"nothing is left to learn: {names} freezes every parameter of the optimizers. Freeze fewer.")
        run.driver.renew(run.model)

    def _let_go(self, until: At, run: Run) -> None:
        due = [group for group in self.groups if group.until == until and group.held]
        self._release(run, due)
        if due:
            run.driver.renew(run.model)
        for group in due:
            decide(run, "unfrozen", str(group), data=group.data())

    def _release(self, run: Run, groups: Sequence[_Group]) -> None:
        for group in groups:
            group.held = False
        others = [callback for callback in hooks_of(run).callbacks.values() if isinstance(callback, Freeze)]
        still = {id(part) for other in others for group in other.groups if group.held for part in group.parts()}
        for group in groups:
            module_flags_of(run).expect(group.release(still), on=True)


def freeze(*modules: Part, batch_norm: bool = True) -> list[nn.Parameter]:
    """Freeze the parameters in `modules` now. Use it in scripts without a run; in a run, use `Freeze`.

    Args:
        modules: Modules, with all modules inside them, or parameters.
        batch_norm: As for `Freeze`.

    Returns:
        The parameters that required a gradient until now.

    >>> layer = nn.Linear(2, 3)
    >>> len(freeze(layer)), layer.weight.requires_grad, len(unfreeze(layer))
    (2, False, 2)
    """
    return _switched(modules, batch_norm=batch_norm, learn=False)


def unfreeze(*modules: Part, batch_norm: bool = True) -> list[nn.Parameter]:
    """Unfreeze the parameters in `modules`, and put layers with running statistics into training mode.

    Returns:
        The parameters that required no gradient until now, for example to add them to an optimizer.
    """
    return _switched(modules, batch_norm=batch_norm, learn=True)


@dataclass(eq=False)
class _Group:
    """Parameters that are frozen and unfrozen together."""

    what: str
    pick: Pick
    until: At | None
    parameters: list[nn.Parameter] = field(default_factory=list)
    norms: list[nn.Module] = field(default_factory=list)
    held: bool = False

    def parts(self) -> list[Part]:
        return [*self.parameters, *self.norms]

    def hold(self) -> None:
        self.held = True
        _switch(self.parameters, self.norms, learn=False)

    def release(self, still: set[int]) -> list[Part]:
        """Unfreeze all but `still`, the ids of parts that other groups hold. Return the unfrozen parts."""
        parameters = [parameter for parameter in self.parameters if id(parameter) not in still]
        norms = [norm for norm in self.norms if id(norm) not in still]
        _switch(parameters, norms, learn=True)
        return [*parameters, *norms]

    def data(self) -> dict[str, Any]:
        """Return the data of a decision about these modules."""
        numbers = sum(parameter.numel() for parameter in self.parameters)
        return {"modules": self.what, "parameters": numbers, "until": None if self.until is None else str(self.until)}

    def __str__(self) -> str:
        data = self.data()
        return f"{data['modules']}, {counted(data['parameters'], 'parameter')}, {data['until'] or 'for the whole run'}"


def _groups(modules: object, until: str | At | None) -> list[_Group]:
    if isinstance(modules, Mapping):
        return [_group(name, point) for name, point in modules.items()]
    if isinstance(modules, Sequence) and not isinstance(modules, str):
        return [_group(name, until) for name in modules]
    return [_group(modules, until)]


def _group(modules: object, until: object) -> _Group:
    if until is not None and not isinstance(until, str | At):
        raise TypeError(f'until must be a point of the run such as "3 epochs", or None for the whole run; got {until!r}')
    ends = None if until is None else point(until)
    if isinstance(modules, str):
        return _Group(repr(modules), partial(_named, modules), ends)
    if callable(modules) and not isinstance(modules, nn.Module):
        return _Group(getattr(modules, "__name__", repr(modules)), modules, ends)
    raise TypeError(
        'modules must be a name or pattern such as "backbone.*", a sequence of them, a mapping of them to points, or a '
        f"function of the model such as lambda model: model.backbone; got {type(modules).__name__}"
    )


def _named(pattern: str, model: nn.Module) -> Iterable[Part]:
    parts: dict[str, Part] = {**dict(model.named_modules()), **dict(model.named_parameters())}
    return named_matches(pattern, parts, argument="Freeze", kind="module or parameter").values()


def _inside(parts: Part | Iterable[Part], *, batch_norm: bool) -> tuple[list[nn.Parameter], list[nn.Module]]:
    """Return the parameters in `parts`, and the layers with running statistics, which `batch_norm=False` leaves out."""
    parameters: dict[int, nn.Parameter] = {}
    norms: dict[int, nn.Module] = {}
    for part in [parts] if isinstance(parts, Part) else parts:
        if isinstance(part, nn.Parameter):
            parameters[id(part)] = part
            continue
        if not isinstance(part, nn.Module):
            raise TypeError(f"expected modules or parameters to freeze; got {part!r}")
        for module in part.modules():
            has_statistics = hasattr(module, "running_mean")
            if has_statistics and not batch_norm:
                continue
            norms |= {id(module): module} if has_statistics else {}
            parameters |= {id(parameter): parameter for parameter in module.parameters(recurse=False)}
    return list(parameters.values()), list(norms.values())


def _switched(modules: Iterable[Part], *, batch_norm: bool, learn: bool) -> list[nn.Parameter]:
    parameters, norms = _inside(modules, batch_norm=batch_norm)
    changed = [parameter for parameter in parameters if parameter.requires_grad != learn]
    _switch(changed, norms, learn=learn)
    return changed


def _switch(parameters: Iterable[nn.Parameter], norms: Iterable[nn.Module], *, learn: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad = learn
    for norm in norms:
        norm.training = learn


def _moment(until: At) -> Callable[..., None]:
    return Callback.on_epoch_end if until.only_epochs else Callback.on_step_end
