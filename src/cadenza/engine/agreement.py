"""What all ranks of a run must decide alike, and what only one of them does. Every rank must call every function here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from signal import Signals
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from cadenza.drivers.base import Driver
from cadenza.engine.outputs import samples_in
from cadenza.errors import DistributedError
from cadenza.hooks.moments import Callback, Moment
from cadenza.loading.batches import as_number, length_of, quotient, widened
from cadenza.status.decisions import Decision
from cadenza.status.progress import Counters, Progress

if TYPE_CHECKING:
    from cadenza.run import Run

T = TypeVar("T")


class SharedProgress(Progress):
    """Counters of one among several ranks: the time that passed is what all agreed on before the step under way.

    So what is due every ten minutes is due on all of them at the same step.
    """

    __slots__ = ("_agreed_s",)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this fit began, as all ranks have them."""
        return self._agreed_s

    @property
    def own_s(self) -> float:
        """Seconds since this fit began on this rank."""
        return super().elapsed_s

    def agree(self, elapsed_s: float) -> None:
        """Take the time that all ranks have."""
        self._agreed_s = elapsed_s

    def begin(self, origin: Counters, batches_per_epoch: int | None) -> None:
        super().begin(origin, batches_per_epoch)
        self._agreed_s = 0.0


class Word:
    """What the ranks tell each other in a step.

    With a batch, while they compute, nobody waiting: how many samples there are, whether a stop was asked for, the time, and
    whether somebody may still ask or log before the step is over. Only if somebody may is there a second exchange, at the
    border of the step, for which they wait. If on all ranks nobody will be called for some steps, they tell each other
    nothing in these; a signal, or what is asked for against all expectation, is told when they are over.
    """

    def __init__(self) -> None:
        self.leave = self.ends = False
        """Whether all ranks know that the epoch, or the run, is to end."""
        self.settled = False
        """Whether nothing can have been asked for since they told."""
        self._quiet = self._leave = False
        self._samples = 0
        self._given: int | None = 0
        self._silent_until = 0
        self._arrived: Callable[[], Tensor] | None = None

    def give(self, run: Run, batch: Any) -> None:
        """Begin to tell the others about the batch that comes, if it is time."""
        progress = run.progress
        alike = run.source.alike_at == progress.batch_in_epoch and run.driver.rank > 0
        self._given = None if alike else run.source.size_of(batch)  # a batch that all ranks train on counts once
        self._samples += self._given or 0
        if progress.step < self._silent_until:
            return
        may_speak = _may_speak(run)
        quiet = 0 if may_speak else run.hooks.quiet_steps(progress)
        passed_ns = int(progress.own_s * 1e9) if isinstance(progress, SharedProgress) else 0
        told = [self._samples, run.requests.leave, may_speak, passed_ns, *(quiet >= steps for steps in _SILENCES)]
        self._samples = 0
        self._arrived = run.driver.reduce_later(torch.tensor(told))

    def take(self, run: Run) -> int:
        """Return the number of samples in the announced batches of all ranks.

        A number that only the outputs of a batch report is sent with the next exchange.
        """
        told = samples_in(run.outputs)
        if told is not None and self._given is not None:
            self._samples += told - self._given
        if self._arrived is None:
            self._leave, self._quiet = False, True
            return 0
        samples, leave, may_speak, passed_ns, *quiet = self._arrived().tolist()
        self._arrived = None
        self._leave, self._quiet = bool(leave), not may_speak
        ranks, progress = run.driver.world_size, run.progress
        if isinstance(progress, SharedProgress):
            progress.agree(passed_ns / ranks / 1e9)
        steps = max((steps for steps, sure in zip(_SILENCES, quiet, strict=True) if sure == ranks), default=0)
        pace_s = progress.elapsed_s / max(1, progress.step - progress.origin.step)  # the mean until now, all that came between
        self._silent_until = progress.step + 1 + steps if steps and not leave and steps * pace_s <= _SILENCE_S else 0
        return int(samples)

    def settle(self, run: Run) -> None:
        """Learn what any rank asked for or logged until now; the numbers of a record become those of all ranks."""
        quiet, self._quiet = self._quiet, False
        if quiet and not run.exhausted and not run.progress.finished:
            leave = self._leave
        else:
            told = torch.tensor([run.requests.leave, self._samples, *run.book.told()], dtype=torch.float64)
            flag, samples, *sums = run.driver.reduce(told, "sum").tolist()
            leave, self._samples = bool(flag), 0
            run.progress.add_samples(int(samples))
            run.book.reduce(run.driver, sums)
        if leave:
            _take_requests(run)
        self.leave, self.ends, self.settled = leave, leave and run.requests.ends_run, True


def leaving(run: Run) -> bool:
    """Return whether the epoch is to be left, on all ranks."""
    if not run.driver.reduces:
        return run.requests.leave
    word = run.word
    if not word.settled:
        word.settle(run)
    word.settled = word.leave  # nobody speaks before it is left
    return word.leave


def ending(run: Run) -> bool:
    """Return whether the run is to end, on all ranks."""
    if not run.driver.reduces:
        return run.requests.ends_run
    leaving(run)
    return run.word.ends


def _may_speak(run: Run) -> bool:
    """Return whether somebody may still ask for something, or log, in this step."""
    return run.step_fn is not None or run.book.holds_numbers or run.hooks.may_ask(run.progress)


_SILENCES = (2, 8, 32, 128)  # steps for which ranks may agree to tell each other nothing
_SILENCE_S = 0.25  # but no longer than this, as a signal waits for so long


def skip(run: Run, moment: Moment) -> None:
    """Skip the batch under way on all ranks if a hook of `moment` did on one; the others would wait for its gradients."""
    if run.hooks.heard.get(moment) and run.driver.any_rank(run.skipping):
        run.skipping = True


def may_hold_back(run: Run) -> bool:
    """Return whether gradients may be left on each rank until the last batch of the group, by the rule that all ranks share.

    Where they are reduced in the backward pass only, it must be sure that the last batch has one: the length of the epoch is
    known, and nobody hears the moments in which a batch can be skipped.
    """
    if run.driver.reduces_later:
        return True
    heard = run.hooks.heard
    may_skip = heard.get(Callback.on_batch_start) or heard.get(Callback.on_before_backward)
    return run.progress.batches_per_epoch is not None and not may_skip


def loss(run: Run) -> Tensor | None:
    """Return the (weighted) mean loss of the last step's batches of all ranks; None before the first."""
    own, reduce = run.loss, run.driver.reduce
    if own is None or run.driver.world_size == 1:
        return own
    own, weights = widened(own), run.last_group.weights
    weight = as_number(sum(weights) if weights else 1.0, own.device, own.dtype)
    total = reduce(torch.stack([own * weight, weight]), "sum")
    return quotient(total[0], total[1])


def together(run: Run) -> bool:
    """Return whether there are other ranks, and they take part: not after an error, which they may not know of yet."""
    return run.driver.reduces and (run.outcome is None or run.outcome.kind != "failed")


def main_only(driver: Driver, act: Callable[[], T]) -> T | None:
    """Call `act` on the main process, and return there what it returned; an error in it is an error on all."""
    result, error = None, None
    try:
        result = act() if driver.is_main else None
    except Exception as raised:
        error = raised
    told = driver.broadcast(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if told is not None:
        raise DistributedError(f"the main process cannot begin, and so does rank {driver.rank} not: {told}")
    return result


def check_alike(driver: Driver, facts: Mapping[str, Any]) -> None:
    """Raise `DistributedError` if ranks were given different things, naming all of them."""
    everyone = driver.gather(dict(facts))
    first = everyone[0]
    differences = [
        f"{name} is {own.get(name)!r} on rank {rank} and {first.get(name)!r} on rank 0"
        for rank, own in enumerate(everyone)
        for name in {**first, **own}
        if own.get(name) != first.get(name)
    ]
    if differences:
        raise DistributedError(
            f"all ranks must be given the same, and differ in {len(differences)}: {'; '.join(differences)}. Let all run "
            "the same script with the same arguments."
        )


def facts_of(model: nn.Module, loader: Any) -> dict[str, Any]:
    """Return what must be alike of a model and a loader, by what it is called."""
    weights = [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    learning = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    seed_of = getattr(getattr(loader, "generator", None), "initial_seed", lambda: None)
    return {
        "the number of batches": length_of(loader),
        "the seed of the loader's generator": seed_of(),
        "the number of parameters that require a gradient": sum(learning.values()),
        **{f"whether {name} requires a gradient": value for name, value in learning.items()},
        **{f"the shape of {name}": tuple(value.shape) for name, value in weights},
        **{f"the type of {name}": str(value.dtype) for name, value in weights},
    }


def take_requests(run: Run) -> None:
    """Exchange the requests of all ranks now. Call it only if all ranks know that one has a request."""
    if run.driver.reduces:
        _take_requests(run)
        run.word.leave = run.word.settled = True
        run.word.ends = run.requests.ends_run


def _take_requests(run: Run) -> None:
    requests = run.requests
    if requests.signal is not None and requests.stop is None and requests.signalled is None:
        requests.signalled = stopped_by_signal(run, requests.signal)
    everyone = run.driver.gather((requests.stop, requests.end_epoch, requests.signalled, requests.signal))
    stops, ends, signalled, signals = zip(*everyone, strict=True)
    requests.stop, requests.end_epoch = _first(run, stops), _first(run, ends)
    requests.signalled = _first(run, signalled)
    requests.signal = next((signal for signal in signals if signal is not None), None)
    requests.leave = True


def stopped_by_signal(run: Run, number: int) -> Decision:
    """Record that a signal ends the run. Not a collective: each rank records its own signal."""
    name = Signals(number).name
    return run.decide("stopped", f"signal {name}", who="the system", data={"signal": name, "kind": run.requests.kind})


def _first(run: Run, decisions: Sequence[Decision | None]) -> Decision | None:
    """Return the first rank's decision; where it was made elsewhere, note that it is taken here."""
    for rank, decision in enumerate(decisions):
        if decision is not None:
            if rank != run.driver.rank and " on rank " not in decision.who:
                who, own = f"{decision.who} on rank {rank}", decisions[run.driver.rank]
                if own is not None and own.who == who:
                    return own
                return run.decide(decision.what, decision.why, who=who, data=decision.data)
            return replace(decision)
    return None
