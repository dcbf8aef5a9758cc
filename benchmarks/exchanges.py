"""Measure one exchange of a step between many ranks: around the ring of gloo's all-reduce, and along Cadenza's tree.

    python benchmarks/exchanges.py [--ranks 4 16 32] [--times 50]

All ranks are processes of this machine, so more ranks than cores also wait for each other's turn. No gradients are exchanged.
"""

from __future__ import annotations

import argparse
import time

import torch

from cadenza.drivers import DdpDriver, group
from cadenza.testing import launch


def milliseconds(ranks: int, times: int, *, tree: bool) -> float:
    """Return the mean time on rank 0 to start an exchange of 33 numbers and wait for it."""

    def exchange() -> float:
        group._TREE_FROM = 2 if tree else ranks + 1
        driver, value = DdpDriver("cpu"), torch.zeros(33, dtype=torch.float64)
        for _ in range(5):
            driver.reduce_later(value)()
        driver.barrier()
        began = time.perf_counter()
        for _ in range(times):
            driver.reduce_later(value)()
        return (time.perf_counter() - began) / times * 1e3

    return launch(exchange, ranks)[0]


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--times", type=int, default=50)
    given = parser.parse_args()
    print("| ranks | ring, ms | tree, ms |\n|---:|---:|---:|")
    for ranks in given.ranks:
        ring, tree = (milliseconds(ranks, given.times, tree=tree) for tree in (False, True))
        print(f"| {ranks} | {ring:.2f} | {tree:.2f} |", flush=True)


if __name__ == "__main__":
    main()
