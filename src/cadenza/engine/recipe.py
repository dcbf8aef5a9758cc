"""The arguments of a run: the session that is made of them, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from cadenza.drivers import Driver
from cadenza.engine import accumulating, rank_checks
from cadenza.engine.arguments import absolute_folder, check_not_empty, checked_debugging
from cadenza.engine.compiling import BackwardOfGraphs, breaks_so_far, compile_model, has_graphs
from cadenza.engine.module_flags import in_evaluation_mode
from cadenza.engine.plan import LIMITS, Plan, plan_changes, plan_in
from cadenza.engine.rank_sync import SharedProgress
from cadenza.engine.session import Loops, Session
from cadenza.engine.start_checks import (
    check_computes,
    check_evaluation_loaders,
    check_schedules,
    warn_of_doubts,
    warn_of_graph_breaks,
)
from cadenza.errors import DirectoryError
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import BaseCallback
from cadenza.loading import num_batches
from cadenza.loading.loaders import check_loader
from cadenza.loading.rng import derive_seed, draw_seed, seed_all
from cadenza.loading.settings import loader_hints, with_batch_size
from cadenza.optim import optimizers as updates
from cadenza.optim.optimizers import Optimizers
from cadenza.optim.parameters import modules_of, parameters_of
from cadenza.optim.precision import precision_of
from cadenza.optim.settings import Settings
from cadenza.records.directory import RunDirectory
from cadenza.records.logs import RankLog
from cadenza.run import Run
from cadenza.status.formats import counted
from cadenza.status.progress import Counters, Progress
from cadenza.status.run_info import working_directory
from cadenza.status.shown import brief


@dataclass(kw_only=True, eq=False, repr=False)
class Recipe:
    """The arguments of a run, and the session that is made of them. `repr` and notebooks show those that are set."""

    max_epochs: int | None
    max_steps: int | None
    max_tokens: int | None
    tokens: Callable[[Any], int] | None
    accumulate: int
    model: nn.Module
    optimizer: Optimizers
    loader: Iterable[Any]
    compute_loss: Callable[[nn.Module, Any], Any]
    precision: str
    seed: int | None
    step_fn: Callable[[Run, Any], Any] | None
    directory: Path | None
    callbacks: list[BaseCallback]
    driver: Driver
    debug_ranks: bool | float
    compile: InitVar[dict[str, Any] | None]
    notes: InitVar[list[str]]
    view: InitVar[Callable[[Run], str]]
    """Returns what notebooks show of a run."""
    beforehand: InitVar[Callable[[Hooks], tuple[list[str], list[str]]]]
    """Returns lines for the plan, and warnings for the start of a run."""

    def __post_init__(
        self,
        compile: dict[str, Any] | None,
        notes: list[str],
        view: Callable[[Run], str],
        beforehand: Callable[[Hooks], tuple[list[str], list[str]]],
    ) -> None:
        self._compile, self._notes, self._view, self._home = compile, notes, view, working_directory()
        self._facts: dict[str, Any] = {}  # what an adapter adds to the arguments that sinks get
        self._beforehand = beforehand
        self._names_ranks_after_s = checked_debugging(self.debug_ranks)  # None: calls of the ranks are not compared
        self._run: Run | None = None  # that began last
        self._last_progress: Progress | None = None  # of the last run that trained

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={text}' for name, text in _arguments(self))})"

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        from cadenza.status.markup import notebook_table  # imported here: few runs are in a notebook

        return notebook_table(type(self).__name__, (), _arguments(self))

    def _hooks(self) -> Hooks:
        """Return a dispatch of the callbacks that are in the list now."""
        return Hooks(self.callbacks)

    @property
    def _own_optimizer(self) -> bool:
        """Whether the settings of the optimizers stay as they are given."""
        return not callable(self.optimizer) or updates.is_kept(self.optimizer)

    def _checked(self, optimizers: object) -> list[Optimizer]:
        return updates.checked(optimizers, self.model, own_step=self.step_fn is not None or updates.is_kept(self.optimizer))

    def _plan(self, optimizers: Sequence[Optimizer], hooks: Hooks, session: Session | None = None) -> Plan:
        compiled = None if self._compile is None else " ".join(f"{name}={value}" for name, value in self._compile.items())
        facts = {"on": self.driver.device, "in": self.precision, "compiled": compiled, "seed": self.seed}
        facts = {name: value for name, value in (*facts.items(), ("into", self.directory)) if value is not None}
        own, kind = self._own_optimizer, self.driver.device.type
        notes = [*updates.notes(optimizers, self.model, own=own, device_type=kind), *loader_hints(self.loader), *self._notes]
        notes += [*_frozen_modes(self.model, optimizers), *self._beforehand(hooks)[0]]
        limits = self._limits(self.loader if session is None else session.loader)
        return Plan(hooks, limits, self.accumulate if session is None else session.accumulate, facts, notes)

    def _compared(self, plan: Plan, since: str | PathLike[str] | None) -> Plan:
        """Return a plan with its differences from the plan of an earlier run."""
        directory = self.directory if since is None else absolute_folder(since)
        before = None if directory is None else plan_in(directory)
        if since is not None and before is None:
            raise DirectoryError(f"{str(directory)!r} holds no plan. Expected the directory of a run, with a run.json.")
        return plan if before is None else replace(plan, changes=plan_changes(before, plan.text()))

    def _new_session(
        self,
        *,
        training: bool,
        files: RunDirectory | None = None,
        replay: bool = False,
        given: Settings | None = None,
        loop: Loops = Loops.FIT,
    ) -> Session:
        given = given or Settings()
        accumulate, loader = self._in_effect(given)
        hooks, several = self._hooks(), self.driver.world_size > 1
        rank_log = RankLog.of(self.directory if training else None, self.driver.rank)  # before the main process can print
        if training:
            if several:
                facts = rank_checks.facts_of(self.model, loader) | {"override": given.shown()}
                rank_checks.check_alike(self.driver, plain(self, hooks.callbacks) | facts | {"debug_ranks": self.debug_ranks})
            if self.seed is not None:  # each rank draws its own dropout masks, for its own data
                seed_all(derive_seed(self.seed, rank) if (rank := self.driver.data_rank) else self.seed)
        model = self._prepared_model()
        optimizers = updates.made(self.optimizer, model, own_step=self.step_fn is not None) if training else []
        given.give_to(optimizers)
        if training and several:
            rank_checks.check_alike(self.driver, {"the list of optimizers": [*map(updates.described, optimizers)]})
        draws = training and loop is not Loops.ATTACHED  # what cadenza.attach trains draws as it would by hand
        return Session(
            model=model,
            optimizers=optimizers,
            loader=loader,
            compute=self.compute_loss,
            driver=self.driver,
            precision=precision_of(self.precision, self.driver.device.type),
            accumulate=accumulate,
            step_fn=self.step_fn,
            loop=loop,
            tokens=self.tokens,
            seed=self.seed,
            data_seed=self.driver.broadcast(draw_seed(keep=not draws) if self.seed is None else self.seed),
            replay=replay,
            arguments=described(self, hooks.callbacks, optimizers) | {"accumulate": accumulating.plain(accumulate)},
            given=given,
            hooks=hooks,
            progress=self._limits(loader),
            directory=self.directory if training else None,
            files=files,
            rank_log=rank_log,
            home=self._home,
            show=self._view,
        )

    def _prepared_model(self) -> nn.Module:
        model = self.driver.prepare(self.model)
        if self._compile is not None:
            compile_model(self.driver.unwrap(model), self._compile)
        for module in modules_of(self.compute_loss):
            module.to(self.driver.device)
        return model

    def _set_up(self, session: Session) -> None:
        for warning in self._beforehand(session.hooks)[1]:
            session.warn(warning)
        session.hooks.on_setup(session.run)
        check_loader(session.loader, "run.loader")
        session.extra_parameters.begin(session.run)
        session.given.check(session.run)
        session.progress.begin(Counters(), num_batches(session.loader, self.driver.data_shard()))
        session.open_loader()
        check_schedules(session)
        check_computes(session)
        check_evaluation_loaders(session)
        warn_of_doubts(session, own_optimizer=self._own_optimizer)
        if self._compile is not None:
            one_pass = self.accumulate == 1 and self.step_fn is None and session.loop is Loops.FIT  # in each step
            if has_graphs(self._compile) and not one_pass:
                session.precision.backward_pass = BackwardOfGraphs(session.module)
            session.after_step(partial(warn_of_graph_breaks, session, breaks_so_far()))

    def _in_effect(self, given: Settings) -> tuple[int, Iterable[Any]]:
        """Return the accumulation and the loader of a run, with the values that ``fit(override=...)`` gives."""
        accumulate, batch_size = given.values.get("accumulate", self.accumulate), given.values.get("batch_size")
        if "accumulate" in given.values:
            accumulate = accumulating.checked_accumulate(accumulate, self.step_fn)
            given.note("accumulate", accumulating.plain(self.accumulate), accumulating.plain(accumulate))
        if batch_size is None:
            return accumulate, self.loader
        given.note("batch_size", getattr(self.loader, "batch_size", None), batch_size)
        loader = with_batch_size(self.loader, batch_size)
        check_not_empty(loader, self.driver.data_shard())
        return accumulate, loader

    def _limits(self, loader: Iterable[Any]) -> Progress:
        kind = Progress if self.driver.world_size == 1 else SharedProgress
        batches = num_batches(loader, self.driver.data_shard())
        limits = {name: getattr(self, name) for name in LIMITS}
        has_epochs = getattr(loader, "has_epochs", True)
        return kind(**limits, batches_per_epoch=batches, has_epochs=has_epochs, accumulate=self.accumulate)


def plain(trainer: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of a trainer that must be equal on all ranks, as plain data. `names` are those of its callbacks."""
    given = {name: accumulating.plain(getattr(trainer, name)) for name in (*LIMITS, "accumulate", "precision", "seed")}
    return {"callbacks": [*names], **given}


def described(trainer: Any, names: Iterable[str], optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """Return all arguments of a trainer as plain data: of the model its class and size, of the optimizers their settings."""
    model = f"{type(trainer.model).__name__}, {sum(one.numel() for one in trainer.model.parameters())} parameters"
    return {"model": model, "optimizer": [*map(updates.described, optimizers)], **plain(trainer, names), **trainer._facts}


def _frozen_modes(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[str]:
    """Yield a line for the plan with the modules that stay in evaluation mode and train no parameters."""
    modules = in_evaluation_mode(model, {*map(id, parameters_of(optimizers))}) if model.training else {}
    if names := [name for name, trains in modules.items() if not trains]:
        yield f"stay in evaluation mode: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def _arguments(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each argument of the trainer that is set."""
    yield "model", _model(trainer.model)
    yield "optimizer", _optimizers(trainer.optimizer)
    yield "loader", _loader(trainer.loader)
    plain = {name: getattr(trainer, name) for name in (*LIMITS, "seed", "directory")}
    yield from ((name, str(value)) for name, value in plain.items() if value is not None)
    if trainer.accumulate != 1:
        yield "accumulate", str(trainer.accumulate)
    yield "precision", trainer.precision
    yield "driver", brief(trainer.driver)
    yield "callbacks", f"[{', '.join(map(brief, trainer.callbacks))}]"


def _model(model: nn.Module) -> str:
    return f"{type(model).__name__} of {counted(sum(one.numel() for one in model.parameters()), 'parameter')}"


def _loader(loader: Any) -> str:
    return f"{type(loader).__name__} of {counted(len(loader), 'batch')}" if isinstance(loader, list | tuple) else brief(loader)


def _optimizers(optimizer: object) -> str:
    if isinstance(optimizer, Optimizer):
        rates = dict.fromkeys(f"{float(group['lr']):g}" for group in optimizer.param_groups if "lr" in group)
        return f"{type(optimizer).__name__}({', '.join(f'lr={rate}' for rate in rates)})"
    if isinstance(optimizer, Sequence):
        return f"[{', '.join(map(_optimizers, optimizer))}]"
    name = brief(optimizer)
    return "a function" if name == "<lambda>" else name
