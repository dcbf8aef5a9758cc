"""Cost of the data order on many ranks: time, memory and indices, as rank W // 2 of W. Prints a markdown table.

python benchmarks/order.py [--samples 1000000 100000000 1000000000] [--ranks 1 1024 4096] [--batches 200]

Each row runs in a separate process. "First" is the time from the start of an epoch to the first batch of indices, "middle"
the same for a resume in the middle of the epoch, "MB" the growth of the process until then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from itertools import islice

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from cadenza.loading import Shard
from cadenza.loading.seeded import ResumableSampler


def measured(samples: int, ranks: int, size: int, batches: int, shuffle: bool) -> str:
    """Read indices as one rank, and return a row of the table."""
    torch.set_num_threads(1)
    data = range(samples)

    def reader(skip: int) -> ResumableSampler:
        inner = RandomSampler(data) if shuffle else SequentialSampler(data)
        sampler = ResumableSampler(BatchSampler(inner, size, False), 1, Shard(ranks // 2, ranks))
        sampler.skip = skip
        return sampler

    next(iter(ResumableSampler(BatchSampler(RandomSampler(range(100)), 10, False), 1)))  # modules that torch loads on first use
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    reading = iter(reader(0))
    next(reading)
    first = time.perf_counter() - begin
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
    rounds = samples // size // ranks
    takes = []
    for _ in range(5):
        begin = time.perf_counter()
        count = sum(1 for _ in islice(reading, min(batches, rounds // 6)))
        takes.append((time.perf_counter() - begin) / max(count, 1))
    begin = time.perf_counter()
    next(iter(reader(rounds // 2)))
    middle = time.perf_counter() - begin
    order = "shuffled" if shuffle else "in order"
    each = statistics.median(takes) * 1e6
    return f"| {order} | {samples:.0e} | {ranks} | {first * 1e3:.2f} | {middle * 1e3:.2f} | {each:.1f} | {grown / 1e3:.1f} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**8, 10**9])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 1024, 4096])
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=200)
    arguments = parser.parse_args()
    print("| order | samples | ranks | first, ms | middle, ms | a batch, us | MB |\n|---|---:|---:|---:|---:|---:|---:|")
    for shuffle in (True, False):
        for samples in arguments.samples:
            for ranks in arguments.ranks:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.apply(measured, (samples, ranks, arguments.size, arguments.batches, shuffle)), flush=True)


if __name__ == "__main__":
    main()
