"""Rank 0 and the last rank of W, which run for real, and the ranks between, which do what the last one does.

Two processes make a trainer as on W ranks and train, evaluate, save and resume. Below them are a process group and a store that
exchange the values of these two: a sum counts the value of the last rank W - 1 times, and the store answers for each of the
ranks between with its entries. All that a rank calls there is counted.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.drivers import DdpDriver, rendezvous
from cadenza.drivers.group import Tree
from cadenza.testing import launch
from tests.waiting import until

WAIT = timedelta(seconds=60)
Untyped: Any = dist
"""Of its classes torch types some otherwise than it calls them."""


@dataclass
class Counts:
    """What one rank did in a part of a run, beside what DDP itself exchanges in the default group.

    Posts and polls in vain are left out: their number depends on the time that passes.
    """

    messages: int = 0
    """Sent and received in collectives, as gloo does them, and along the tree; and requests to the store."""
    bytes: int = 0
    """Sent and received with them."""
    keys: int = 0
    """Of the store, which this rank has made and not deleted."""
    connections: int = 0
    """Those of gloo, which connects two ranks when they first exchange a value."""
    memory: int = 0
    """The most that Python has allocated at once."""


@dataclass
class World:
    """The ranks, seen from this process."""

    ranks: int
    main: bool
    port: int
    counts: Counts = field(default_factory=Counts)
    own: threading.local = field(default_factory=threading.local)
    peers: set[tuple[str, int]] = field(default_factory=set)
    under_way: int = 0
    """Sums along the tree that have begun."""
    welcomed: int = 0
    """How many ranks the main process has welcomed: so many answer."""

    @property
    def rank(self) -> int:
        return 0 if self.main else self.ranks - 1

    def client(self) -> Any:
        """Return a client of the store of the two processes. Each thread has one, as a call that waits blocks the client."""
        if not hasattr(self.own, "client"):
            self.own.client = Untyped.TCPStore("127.0.0.1", self.port, None, False, WAIT)
        return self.own.client

    def swap(self, key: str, value: Any) -> tuple[Any, Any]:
        """Return the values of rank 0 and of the last rank."""
        client, name = self.client(), "main" if self.main else "last"
        client.set(f"{key}/{name}", pickle.dumps(value))
        other = pickle.loads(client.get(f"{key}/{'last' if self.main else 'main'}"))
        return (value, other) if self.main else (other, value)


world: World


class Group(Untyped.ProcessGroup):  # type: ignore[misc]
    """A process group of all ranks."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name, self._calls = rank, size, name, 0

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802  # the name in torch
        return "simulated"

    @property
    def group_name(self) -> str:
        return self._name

    def _all(self, tensor: Tensor, messages: int, peers: Sequence[int]) -> tuple[Tensor, Tensor]:
        self._calls += 1
        self._count(messages, tensor)
        self._connect(peers)
        return world.swap(f"group {self._name}/{self._calls}", tensor.detach().clone())

    def _ring(self) -> list[int]:
        return [(self._rank - 1) % self._size, (self._rank + 1) % self._size]

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        for tensor in tensors:
            main, last = self._all(tensor, 4 * (self._size - 1), self._ring())
            tensor.copy_(_combined(main, last, operation))
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        below = [2**level for level in range(self._size.bit_length()) if 2**level < self._size]
        for tensor in tensors:
            source = options.rootRank == self._rank
            times = len(below) if source else 1
            main, last = self._all(tensor, times, [(self._rank + step) % self._size for step in below[:times]])
            tensor.copy_(last if options.rootRank else main)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._spread(output, *self._all(tensor, 2 * (self._size - 1), self._ring()))
        return _done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Any:
        peers = [*range(1, self._size)] if self._rank == options.rootRank else [options.rootRank]
        for number, tensor in enumerate(inputs):
            both = self._all(tensor, len(peers), peers)
            if self._rank == options.rootRank:
                self._spread(outputs[number], *both)
        return _done(outputs)

    def barrier(self, options: Any = None) -> Any:
        return self.allreduce([torch.ones(1)])

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        return self._message(tensors, to)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return self._message(tensors, source)  # the value comes with the sum

    def _message(self, tensors: list[Tensor], other: int) -> Any:
        self._count(len(tensors), tensors[0])
        self._connect([other])
        return _done(tensors)

    def _count(self, messages: int, tensor: Tensor) -> None:
        if self is not dist.group.WORLD:
            world.counts.messages += messages
            world.counts.bytes += messages * tensor.nbytes

    def _connect(self, peers: Iterable[int]) -> None:
        new = [(self._name, peer) for peer in peers if (self._name, peer) not in world.peers]
        world.counts.connections += len(new)
        world.peers.update(new)

    @staticmethod
    def _spread(outputs: list[Tensor], main: Tensor, last: Tensor) -> None:
        outputs[0].copy_(main)
        for output in outputs[1:]:
            output.copy_(last)


def _done(result: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return import_module("torch._C._distributed_c10d")._create_work_from_future(future)


def _combined(main: Tensor, last: Tensor, operation: Any) -> Tensor:
    if operation == ReduceOp.MAX:
        return torch.maximum(main, last)
    if operation == ReduceOp.MIN:
        return torch.minimum(main, last)
    assert operation == ReduceOp.SUM, operation
    return main + (world.ranks - 1) * last


class Store(Untyped.Store):  # type: ignore[misc]
    """The store of W ranks.

    What is read of a rank between is what the last rank has set, and what the last rank adds counts W - 1 times.
    """

    def __init__(self) -> None:
        super().__init__()
        self._limit = WAIT

    def _real(self, key: str) -> str:
        """Return the key under which the last rank has set what a key of a rank between would hold."""
        found = re.fullmatch(r"(.*[/ ])(\d+)", key) if _by_rank(key) else None
        return f"{found[1]}{world.ranks - 1}" if found is not None and int(found[2]) else key

    @staticmethod
    def _count(*content: Any) -> None:
        if any("/posts/" in str(one) for one in content[:1]):
            return
        world.counts.messages += 1
        world.counts.bytes += sum(len(one) for one in content)

    def set(self, key: str, value: Any) -> None:
        self._count(key, value)
        self._made(key)
        world.client().set(key, value)

    def get(self, key: str) -> bytes:
        found = self._found(key)
        self._count(key, found)
        return found

    def _made(self, key: str) -> None:
        world.welcomed += "/welcome " in key
        if "/posts/" not in key:
            world.counts.keys += not world.client().check([key])

    def _found(self, key: str) -> bytes:
        real = self._real(key)
        deadline = time.monotonic() + self._limit.total_seconds()
        while not world.client().check([real]):  # a call that waits in the server holds a lock of the interpreter
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"wait timeout, keys: {key}")
            time.sleep(0.002)
        return bytes(world.client().get(real))

    def add(self, key: str, value: int) -> int:
        if value:
            self._count(key)
            self._made(key)
        alone = world.main or _by_rank(key)
        total = int(world.client().add(key, value if alone else value * (world.ranks - 1)))
        return min(total, world.welcomed) if "/answered " in key and world.main else total

    def check(self, keys: list[str]) -> bool:
        there = bool(world.client().check(sorted({self._real(key) for key in keys})))
        if there:
            self._count(*keys)
        return there

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        self._count(*keys)
        for key in sorted({self._real(key) for key in keys}):
            self._found(key)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._count(key, expected, value)
        return bytes(world.client().compare_set(key, expected, value))

    def delete_key(self, key: str) -> bool:
        self._count(key)
        world.counts.keys -= 1
        return bool(world.client().delete_key(key))

    deleteKey = delete_key  # noqa: N815  # by this name the prefixed store of torch calls it

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = {key: self._found(key) for key in {self._real(key) for key in keys}}
        values = [found[self._real(key)] for key in keys]
        self._count(*keys, *values)
        return values

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self._count(*keys, *values)
        for key, value in zip(keys, values, strict=True):
            self._made(key)
            world.client().set(key, value)

    def num_keys(self) -> int:
        return int(world.client().num_keys())

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, limit: timedelta) -> None:
        self._limit = limit

    def timeout(self) -> timedelta:
        return self._limit


def _by_rank(key: str) -> bool:
    """Return whether the last part of a key is a rank, or the number of a rank's arrival."""
    return bool(re.search(r"(meetings/\d+/\d+|posts/\d+/\d+|drivers|entered|number)[/ ]\d+$", key))


# -- a run -----------------------------------------------------------------------------------------


@contextmanager
def simulated(ranks: int) -> Iterator[World]:
    """Let drivers of this process, which `launch` has started as one of two, be rank 0 or the last of many."""
    global world
    main = os.environ["RANK"] == "0"
    world = World(ranks, main, int(os.environ["MASTER_PORT"]))
    os.environ |= {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(ranks)}
    numbers = iter(range(10**6))

    def group(store: Any, rank: int, size: int, limit: timedelta) -> Group:
        return Group(rank, size, str(next(numbers)))

    def started(tree: Tree, value: Tensor, combine: Any = torch.add) -> Callable[[], Tensor]:
        world.under_way += 1
        return tree_start(tree, value, combine)

    def summed(tree: Tree, value: Tensor, combine: Any = torch.add) -> Tensor:
        main, last = world.swap(f"tree {next(sums)}", value.clone())
        result = main + (ranks - 1) * last if combine is torch.add else combine(main, last)
        tree_sum(tree, value, combine)  # the messages; what they carried here is not used
        world.under_way -= 1
        return value.copy_(result)

    store = Store()  # torch holds no reference to it
    init, new, tree_start, tree_sum = dist.init_process_group, dist.new_group, Tree.start, Tree.sum
    sums = iter(range(10**6))
    dist.Backend.register_backend("simulated", group, devices=["cpu"])
    with (
        mock.patch.object(dist, "init_process_group", lambda backend, **options: init("simulated", **options)),
        mock.patch.object(dist, "new_group", lambda *values, **options: new(*values, **options | {"backend": "simulated"})),
        mock.patch.object(rendezvous, "TCPStore", return_value=store),
        mock.patch.object(Tree, "start", started),
        mock.patch.object(Tree, "sum", summed),
    ):
        yield world


def parts(ranks: int, folder: Path, *, make: Callable[[], Any] = lambda: DdpDriver("cpu", timeout_s=60)) -> dict[str, Counts]:
    """Train, and resume; return what this rank did in each part."""
    found: dict[str, Counts] = {}
    with simulated(ranks):
        tracemalloc.start()

        def part(name: str) -> None:
            until(lambda: not world.under_way)
            world.counts.memory = tracemalloc.get_traced_memory()[1]
            found[name], world.counts = world.counts, Counts()
            tracemalloc.reset_peak()

        tracemalloc.reset_peak()
        driver = make()
        trained(driver, folder, 13, part)
        part("end")
        trained(driver, folder, 14, part, resume=True)
    return found


STEPS = {0: "start", 5: "step", 7: "record", 9: "evaluation", 11: "save"}


def trained(driver: Any, folder: Path, steps: int, part: Callable[[str], None], *, resume: bool = False) -> None:
    torch.manual_seed(0)
    rows = TensorDataset(torch.ones(driver.world_size * 40, 4), torch.ones(driver.world_size * 40, 1))
    few = TensorDataset(torch.ones(driver.world_size * 4, 4), torch.ones(driver.world_size * 4, 1))

    @on(Callback.on_step_start)
    def begins(run: Run) -> None:
        part("resume" if resume else STEPS.get(run.progress.step, f"after step {run.progress.step}"))

    Trainer(
        nn.Linear(4, 1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        DataLoader(rows, 2, shuffle=True),
        supervised(nn.MSELoss()),
        max_steps=steps,
        driver=driver,
        directory=folder,
        progress=False,
        callbacks=[
            begins,
            LogTraining("7 steps"),
            Evaluate(DataLoader(few, 2), "9 steps"),
            Checkpoint("11 steps", background=False),
        ],
    ).fit(resume="auto" if resume else False)


# -- the table ----------------------------------------------------------------------------------------

SIZES = (16, 1024, 4096)
PARTS = ("start", "step", "record", "evaluation", "save", "resume")
NAMES = {
    "start": "start",
    "step": "step",
    "record": "step with a record",
    "evaluation": "with an evaluation",
    "save": "with a save",
    "resume": "resume",
}
GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/scale.md"
HEAD = f"| messages/KiB | {' | '.join(f'{size:,} ranks' for size in SIZES)} |\n|---|{'---:|' * len(SIZES)}\n"


def measured(ranks: int) -> tuple[dict[str, Counts], dict[str, Counts]]:
    """Return what the main process did in the parts of a run, and what the last rank did."""
    with TemporaryDirectory() as folder:
        main, last = launch(lambda: parts(ranks, Path(folder)))
    return main, last


def column(main: dict[str, Counts], last: dict[str, Counts]) -> list[str]:
    """Return the cells of one size: the main process, then the last rank."""
    exchanges = [
        "; ".join(f"{counts.messages}/{counts.bytes / 1024:.0f}" for counts in (main[part], last[part])) for part in PARTS
    ]
    connections = [sum(counts.connections for counts in one.values()) for one in (main, last)]
    keys = [max(one["start"].keys, sum(counts.keys for counts in one.values())) for one in (main, last)]
    memory = [max(counts.memory for counts in one.values()) / 2**20 for one in (main, last)]
    return [*exchanges, *("; ".join(map(str, both)) for both in (connections, keys)), "; ".join(f"{one:.0f}" for one in memory)]


def rows() -> list[str]:
    """Return the first cells of the rows."""
    return [*(NAMES[part] for part in PARTS), "connections", "keys in the store", "memory of Python, MiB"]


if __name__ == "__main__":
    columns = [column(*measured(size)) for size in SIZES]
    table = HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in zip(rows(), *columns, strict=True))
    before, after = GUIDE.read_text(encoding="utf-8").split(HEAD)
    GUIDE.write_text(before + table + after[after.index("\n\n") + 1 :], encoding="utf-8")
