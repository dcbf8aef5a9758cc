"""Sums of small tensors over many ranks, along a tree: 2 log2(ranks) messages one after the other, not 2 (ranks - 1)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

Combine = Any
"""A function that combines two tensors, and writes the result into its argument ``out``."""
Send = Callable[[Tensor, int], object]
"""Sends a tensor to a rank."""
Receive = Callable[[Tensor, int], object]
"""Waits for a tensor from a rank, and writes it into the given one."""


class Tree:
    """A binary tree of all ranks. Rank r has the children 2r + 1 and 2r + 2, and rank 0 is the root.

    A thread does the sums in the order in which they were started. All ranks must start them in the same order. A sum may
    also be a maximum or a minimum. The thread ends when nothing refers to the tree any more.

    Args:
        rank: The rank of this process.
        ranks: How many there are.
        send: Sends to another rank.
        receive: Receives from another rank.
    """

    def __init__(self, rank: int, ranks: int, send: Send, receive: Receive) -> None:
        self.parent: int | None = (rank - 1) // 2 if rank else None
        self.children: list[int] = [child for child in (2 * rank + 1, 2 * rank + 2) if child < ranks]
        self._send, self._receive = send, receive
        self._started: SimpleQueue[tuple[Tree, Tensor, Combine, Future[Tensor]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def start(self, value: Tensor, combine: Combine = torch.add) -> Callable[[], Tensor]:
        """Start to sum `value` over all ranks; return a function that waits for the sum. Every rank must call this."""
        if self._thread is None:
            self._thread = Thread(target=_work, args=(self._started,), name="cadenza-tree", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._started.put, None)
        sums: Future[Tensor] = Future()
        self._started.put((self, value.clone(memory_format=torch.contiguous_format), combine, sums))

        def arrived() -> Tensor:
            return sums.result()  # not the method: the frame of this function tells that the thread waits for other ranks

        return arrived

    def sum(self, value: Tensor, combine: Combine = torch.add) -> Tensor:
        """Sum `value`, in place, over all ranks."""
        for child in self.children:
            part = value.new_empty(value.shape)
            self._receive(part, child)
            combine(value, part, out=value)
        if self.parent is not None:
            self._send(value, self.parent)
            self._receive(value, self.parent)
        for child in self.children:
            self._send(value, child)
        return value


def _work(started: SimpleQueue[tuple[Tree, Tensor, Combine, Future[Tensor]] | None]) -> None:
    while (work := started.get()) is not None:
        tree, value, combine, sums = work
        try:
            sums.set_result(tree.sum(value, combine))
        except Exception as error:
            sums.set_exception(error)  # the wait for this sum raises it
        del work, tree, value, combine, sums  # the thread does not keep the tree
