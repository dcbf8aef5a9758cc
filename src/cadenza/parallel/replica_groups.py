"""Replica groups that leave and join a run while it goes on: torchft's Manager, driven by a callback in each group."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # where torch documents it

from cadenza.checkpoint.snapshot import Snapshot, collected, restore
from cadenza.checkpoint.store import Loaded
from cadenza.drivers.group import check_above_zero, exchange_flat
from cadenza.engine import boundary
from cadenza.engine.session import Loops, Session, session_of
from cadenza.errors import DistributedError, MissingExtraError
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least as whole_number
from cadenza.hooks.order import Phase, Relation
from cadenza.loading import Consumed, num_batches
from cadenza.loading.loaders import length_of
from cadenza.loading.rng import derive_seed, seed_all
from cadenza.optim.parameters import parameters_of
from cadenza.records.history import write_again
from cadenza.status.encoding import decode, encode
from cadenza.status.formats import counted

if TYPE_CHECKING:
    from cadenza.run import Run

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""The variable with the address of torchft's lighthouse."""
_MOST_LOST = 20  # lost steps in a row, after which the run fails
_OWN = ("requests", "streams")  # parts of a checkpoint that a group does not take from another one


class ReplicaGroups(Callback):
    """Train with other replica groups, which may fail, leave and join while the run goes on.

    Each replica group is a job of its own, such as a ``torchrun`` on one machine, with this callback in its script. Its driver
    connects the processes in it. The groups find each other through a server of torchft, ``torchft_lighthouse``.

    Before each step the groups that are there form a quorum. A group that is behind, or has just started, takes weights,
    optimizer states, counters, schedules, history and the position in the data from another one. The batches of an epoch are
    split over the groups of the quorum. Before the update, gradients are averaged over the groups, weighted as batches are, and
    statistics such as those of BatchNorm become those of the first group. If a group fails before this is complete, the
    step is lost for the others: it updates nothing, counts as a step, and its batches are read again. So each sample is in one
    update of an epoch; a lost step computes its samples once more. Weights are equal in all groups after each step that is
    not lost.

    Evaluations, records and checkpoints are those of the group, and so are stops and skipped batches, counts of samples and
    tokens, and losses. Give one group a directory and `Checkpoint`. To resume the job, ``fit(resume="auto")`` in
    this group suffices, as the others take its state.

    With multiple ranks: in each group, every process communicates with those of the same rank in other groups.

    Args:
        at_least: The number of groups below which no step is taken.
        lighthouse: The address of the lighthouse, such as ``"http://host:29510"``. None: that of ``TORCHFT_LIGHTHOUSE``.
        host: The name or address under which other groups reach this machine. None: its host name.
        timeout_s: Seconds to wait for other groups inside of a step. A killed group may cost the others so much time.
        quorum_timeout_s: Seconds to wait for them before a step. It must be longer than an evaluation or a save.

    Raises:
        MissingExtraError: The package torchft is not installed.
        TypeError, ValueError: An argument is wrong. When a run starts: there is no address of a lighthouse, or the run has
            shards, fp16, a ``step_fn``, a loop of its own, or data that cannot be continued inside an epoch.
        DistributedError: In a run: the lighthouse is not reached, there are too few groups, or 20 steps in a row are lost.

    Example::

        Trainer(model, optimizer, loader, loss_fn, callbacks=[ReplicaGroups(at_least=2)]).fit()
    """

    decides: tuple[str, ...] = ("groups changed", "step lost", "caught up")

    # Gradients are bounded, and weights evaluated and saved, as the groups have agreed on them.
    before: Relation = (Phase.CLIP, Phase.SCHEDULE, Phase.EVALUATE, Phase.SAVE)

    def __init__(
        self,
        at_least: int = 1,
        *,
        lighthouse: str | None = None,
        host: str | None = None,
        timeout_s: float = 60.0,
        quorum_timeout_s: float = 600.0,
    ) -> None:
        check_above_zero("timeout_s", timeout_s, "seconds")
        check_above_zero("quorum_timeout_s", quorum_timeout_s, "seconds")
        if find_spec("torchft") is None:
            raise MissingExtraError("torchft", needed_by="ReplicaGroups", extra="torchft")
        self.at_least: int = whole_number(1, "at_least", at_least)
        self.lighthouse: str | None = lighthouse
        self.host: str | None = host
        self.timeout_s: float = timeout_s
        self.quorum_timeout_s: float = quorum_timeout_s
        self._commits = 0  # updates on which the groups have agreed
        self._reset()

    def _reset(self) -> None:
        self._manager: Any = None
        self._store: Any = None
        self._members: tuple[int, int] | None = None  # the index of this group, and how many there are
        self._past: Consumed = ()  # the rounds of the present epoch, up to `_opened`
        self._epoch, self._opened = -1, 0  # the epoch, and the batches in it, at which the loader was opened
        self._quorum = self._lost = self._stale = False
        self._arrived: Mapping[str, Any] | None = None
        self._length: int | None = None  # of the loader, in batches of one group

    def listeners(self) -> list[Listener]:
        return silent(super().listeners())  # they make no requests, and log nothing

    # -- the run -----------------------------------------------------------------------------------

    def on_setup(self, run: Run) -> None:
        session = session_of(run)
        self._commits = 0
        self._reset()
        refused = {
            "a loop of its own": session.loop is not Loops.FIT,
            "a step_fn": session.step_fn is not None,
            "fp16": session.precision.name == "fp16",
            "shards of the model (FSDP, tensor parallel)": run.driver.shards,
            "max_tokens": run.progress.max_tokens is not None,
            "loaders with share_data=False": not run.driver.data_shard().share_data,
        }
        for what in (name for name, there in refused.items() if there):
            raise ValueError(f"ReplicaGroups does not work with {what}: use fit() with a whole model in float32 or bf16")
        if (self.lighthouse or os.environ.get(LIGHTHOUSE)) is None:
            raise ValueError(
                f"ReplicaGroups needs the address of a lighthouse: start torchft_lighthouse --min_replicas 1, and set "
                f"{LIGHTHOUSE} or lighthouse= to its address, such as http://host:29510"
            )

    def on_fit_start(self, run: Run) -> None:
        session = session_of(run)
        if (obstacle := session.cursor.source.obstacle) is not None:
            raise ValueError(f"ReplicaGroups continues inside of epochs, but {obstacle}")
        self._length = session.progress.batches_said
        self._take_position(session)
        self._manager = self._new_manager(run)

    def _new_manager(self, run: Run) -> Any:
        from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

        driver, limit = run.driver, timedelta(seconds=self.timeout_s)
        host = self.host or socket.gethostname()
        if driver.is_main:  # a store of its own: that of torchrun outlives a restart, with the address of the manager before
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port = driver.broadcast(self._store.port if driver.is_main else None)
        address = driver.broadcast(host)
        try:
            return Manager(
                (ProcessGroupNCCL if driver.device.type == "cuda" else ProcessGroupGloo)(timeout=limit),
                self._receive,
                lambda: self._state_of(session_of(run)),
                self.at_least,
                use_async_quorum=False,
                timeout=limit,
                quorum_timeout=timedelta(seconds=self.quorum_timeout_s),
                connect_timeout=limit,
                rank=driver.rank,
                world_size=driver.world_size,
                store_addr=address,
                store_port=port,
                lighthouse_addr=self.lighthouse,
                hostname=host,
                init_sync=False,  # it would give the ranks of a group the weights of different groups
                max_retries=_MOST_LOST,
            )
        except Exception as error:
            where = self.lighthouse or os.environ.get(LIGHTHOUSE)
            raise DistributedError(
                f"torchft did not start with the lighthouse at {where!r}: {error}. Start torchft_lighthouse, and give its "
                "address with http://"
            ) from error

    def on_fetch_start(self, run: Run) -> None:
        if self._quorum:  # it holds for all batches of a step
            return
        self._agree(run, shrink_only=False)
        members = self._manager.participating_rank() or 0, self._manager.num_participants()
        if members != self._members or self._stale:
            self._past = self._rounds_at(run.progress.batch_in_epoch, run)
            if members != self._members:
                self._tell(run, members)
            self._members = members
            self._open(run)
        if not self._commits:  # each group has drawn its own weights
            drawn = [*parameters_of(run.optimizers), *run.model.parameters(), *run.model.buffers()]
            self._take_from_first(dict.fromkeys(drawn))

    def on_before_optimizer_step(self, run: Run) -> None:
        session = session_of(run)
        self._reduce(session)
        try:
            self._lost = not self._manager.should_commit()
        except Exception as error:  # torchft has a class for each cause
            raise DistributedError(
                f"the vote of the replica groups on step {run.progress.step + 1} failed: {error}. The last error in this "
                f"group: {self._error()}. Look at the other groups and the lighthouse"
            ) from error
        if self._lost:
            for parameter in parameters_of(session.optimizers):
                parameter.grad = None
        else:
            self._commits += 1

    def on_after_optimizer_step(self, run: Run) -> None:
        if self._lost:
            session_of(run).step.undo_update()

    def on_step_end(self, run: Run) -> None:
        session = session_of(run)
        if not session.step.last_window.losses:
            raise DistributedError("all batches of a step were left out in this group, and the others wait for its gradients")
        self._quorum = False
        if not self._lost:
            return
        self._lost, self._stale, session.cursor.exhausted = False, True, False  # the epoch has these batches still
        seen, done = session.step.last_window.seen, run.progress.batch_in_epoch
        self._past, self._opened = (*self._rounds_at(done - seen, run), (0, seen)), done
        session.decide("step lost", self._error(), data={"step": run.progress.step})

    def _error(self) -> str:
        error = self._manager.errored()
        return str(error.original_exception).partition("\n")[0] if error else "another group failed"

    def on_epoch_end(self, run: Run) -> None:
        """Wait for the others at the end of the run: one of them may have lost the last step."""
        self._quorum = False
        while run.progress.finished and self._manager is not None:
            self._agree(run, shrink_only=True)
            self._manager.allreduce(torch.zeros(1, device=run.driver.device), reduce_op=dist.ReduceOp.SUM).wait()
            if self._manager.should_commit():
                return

    def on_fit_end(self, run: Run) -> None:
        manager = self._manager
        self._reset()
        if manager is not None:
            manager.shutdown(wait=False)

    # -- the state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"commits": self._commits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._commits = state["commits"]

    def on_save(self, run: Run, snapshot: Snapshot) -> None:
        self._describe(session_of(run), snapshot.state)

    def _describe(self, session: Session, state: dict[str, Any]) -> None:
        """Write to a state which batches of the epoch the groups have consumed."""
        rounds = self._rounds_at(session.progress.batch_in_epoch, session.run)
        state["data"] = {"dealt": True, "batches": length_of(session.loader), "past": [list(turns) for turns in rounds]}
        state["batches_found"] = None

    def _state_of(self, session: Session) -> dict[str, Any]:
        """Return the state for a group that is behind. torchft calls it in its thread, while this group waits in `_agree`."""
        present = collected(session, "another replica group is behind")
        self._describe(session, present.state)
        plain, tensors = encode({"model": present.model, "state": {**present.state, "extra": {}}})
        return {"plain": plain, "tensors": tensors}

    def _receive(self, state: Mapping[str, Any]) -> None:
        self._arrived = state

    def _agree(self, run: Run, *, shrink_only: bool) -> None:
        """Form a quorum with the other groups, and take the state of one of them if this group is behind."""
        self._quorum, self._arrived = True, None
        # Behind is a group with fewer common updates or, after a lost step, with fewer steps.
        position = self._commits << 32 | run.progress.step
        self._manager.load_state_dict({"step": position, "batches_committed": 0})
        end = time.monotonic() + self.quorum_timeout_s
        try:
            self._manager.start_quorum(shrink_only=shrink_only)
            while not shrink_only and self._manager.num_participants() < self.at_least and time.monotonic() < end:
                time.sleep(0.05)
                self._manager.start_quorum()
        except Exception as error:  # torchft has a class for each cause
            raise DistributedError(self._alone(str(error))) from error
        if not shrink_only and (there := self._manager.num_participants()) < self.at_least:
            raise DistributedError(self._alone(f"there {'is' if there == 1 else 'are'} {there}"))
        if self._arrived is not None:
            self._restore(run, decode(self._arrived["plain"], self._arrived["tensors"]))

    def _alone(self, why: str) -> str:
        return (
            f"no quorum of {counted(self.at_least, 'replica group')} within {self.quorum_timeout_s:g} s: {why}. Look at the "
            "lighthouse, and start the missing groups"
        )

    def _restore(self, run: Run, arrived: Mapping[str, Any]) -> None:
        session, before = session_of(run), run.progress.step
        state = {name: part for name, part in arrived["state"].items() if name not in _OWN}
        for part, each_rank in (("callbacks", False), ("callbacks of the rank", True)):
            held, own = state.get(part, {}), {}
            for name, callback in session.hooks.callbacks.items():
                if callback.each_rank is each_rank and (present := callback.state_dict()):
                    # What a callback has saved on this machine is its own.
                    own[name] = present if callback.phase is Phase.SAVE else held.get(name, present)
            state[part] = own
        if self._length is not None:
            session.progress.correct(self._length)  # that of one group, with which the state was saved
        name = "the state of another replica group"
        ranks = [state] * run.driver.data_world_size
        restore(session, Loaded(name, {"run": "", "step": state["progress"]["step"]}, arrived["model"], state, ranks))
        session.module_flags.begin(session.driver, session.model, session.decide)
        session.hooks.refresh_schedules(session.progress)
        if session.files is not None:
            write_again(session.files.path / "metrics.jsonl", session.metrics.history)
        self._take_position(session)
        at = run.progress.step
        session.decide("caught up", f"from step {before} to step {at}", data={"before": before, "step": at})

    # -- gradients ---------------------------------------------------------------------------------

    def _reduce(self, session: Session) -> None:
        """Average the gradients over the groups, by the weights of their batches; take the statistics of the first group.

        A parameter that has no gradient in any group keeps None.
        """
        weight = float(session.step.window.total)
        parameters = list(dict.fromkeys(parameters_of(session.optimizers)))
        device = session.driver.device
        there = torch.tensor([weight, *(parameter.grad is not None for parameter in parameters)], device=device)
        gradients = []
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
        if weight != 1:
            torch._foreach_mul_(gradients, weight)
        exchange_flat([*gradients, there], self._sum)
        total, *holders = there.tolist()
        for gradient in gradients:
            gradient.div_(total or 1.0)
        for parameter, count in zip(parameters, holders, strict=True):
            parameter.grad = parameter.grad if count else None
        self._take_from_first(session.module.buffers())

    def _take_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of the first group into tensors, unless there is an error."""
        held = [tensor.detach() for tensor in tensors if tensor.dtype is not torch.bool]
        first = self._members is not None and self._members[0] == 0
        shared = [tensor.clone() if first else torch.zeros_like(tensor) for tensor in held]
        exchange_flat(shared, self._sum)
        if self._manager.errored() is None:
            for tensor, value in zip(held, shared, strict=True):
                tensor.copy_(value)

    def _sum(self, flat: Tensor) -> None:
        self._manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM).wait()

    # -- the data ----------------------------------------------------------------------------------

    def _take_position(self, session: Session) -> None:
        """Take the consumed part of the epoch from the loader of a run that begins or was restored."""
        progress, driver = session.progress, session.driver
        consumed = session.cursor.source.shard.consumed if progress.batch_in_epoch else ()
        own = progress.batch_in_epoch - sum(rounds for _, rounds in consumed)
        self._past = (*consumed, (driver.data_world_size, own)) if own else consumed
        self._epoch, self._opened, self._stale = progress.epoch, progress.batch_in_epoch, True

    def _rounds_at(self, batch: int, run: Run) -> Consumed:
        """Return the consumed part of the epoch up to a batch."""
        if run.progress.epoch != self._epoch:
            self._epoch, self._past, self._opened = run.progress.epoch, (), 0
        groups = self._members[1] if self._members else 1
        own = batch - self._opened
        return (*self._past, (groups * run.driver.data_world_size, own)) if own else self._past

    def _open(self, run: Run) -> None:
        """Open the loader for the rest of the epoch, for the groups that are there now."""
        session, progress, driver = session_of(run), run.progress, run.driver
        assert self._members is not None, "set by the quorum"
        index, groups = self._members
        self._opened, self._stale = progress.batch_in_epoch, False
        each = driver.data_world_size
        shard = replace(driver.data_shard(), rank=index * each + driver.data_rank, world_size=groups * each)
        cursor = session.cursor
        cursor.close()
        boundary.open_loader(session, self._past, shard)
        if (whole := num_batches(session.loader, shard)) is not None:
            progress.correct(whole)
        progress.take_over(num_batches(session.loader, shard.resumed(self._past)))
        cursor.batches = cursor.source.batches(progress.epoch, progress.batch_in_epoch)
        boundary.begin(session)
        seed_all(derive_seed(session.data_seed, shard.rank, progress.step))  # groups draw their own numbers

    def _tell(self, run: Run, members: tuple[int, int]) -> None:
        groups = members[1]
        before = self._members[1] if self._members else None
        why = f"{counted(groups, 'group')} from step {run.progress.step + 1} on{'' if before is None else f', {before} before'}"
        session_of(run).decide("groups changed", why, data={"step": run.progress.step, "groups": groups, "before": before})
