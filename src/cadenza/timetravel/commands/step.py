"""``cadenza step``: the samples that each rank read in a step."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from cadenza.commands.output import add_json, clean, print_json, say, say_folded
from cadenza.errors import CadenzaError
from cadenza.records.directory import read_info
from cadenza.status.run_info import StepSamples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Name the samples that each rank read in a step, from run.json alone: run.info.samples(step) in Python. The run may be "
        "over, killed or going on, and may have been resumed on other numbers of ranks. For loaders without indices, the "
        "position is printed, and the reason."
    )
    parser.epilog = "examples:\n  cadenza step runs/first 8120\n  cadenza step runs/first 8120 --rank 3 --json"
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("step", type=int, metavar="STEP", help="the number of the step, from 1")
    parser.add_argument("--rank", type=int, help="only the samples of this rank")
    add_json(parser)
    parser.set_defaults(command=name_samples)


def name_samples(arguments: argparse.Namespace) -> None:
    """Print the samples.

    Raises:
        DirectoryError: The directory holds no run.
        CadenzaError: The run has no such step or rank, or was written by an earlier version.
    """
    info = read_info(arguments.run)
    try:
        named = info.samples(arguments.step)
    except ValueError as error:
        raise CadenzaError(f"{arguments.run}: {error}") from None
    if arguments.rank is not None:
        named = _of_rank(named, arguments.rank)
    if arguments.json:
        print_json(asdict(named))
    else:
        first, *batches = str(named).splitlines()
        say(first)
        for line in batches:
            say_folded(f"  {clean(line.strip())}", " ", "    ")


def _of_rank(named: StepSamples, rank: int) -> StepSamples:
    if not 0 <= rank < named.ranks:
        raise CadenzaError(f"step {named.step} has no rank {rank}: expected a rank from 0 to {named.ranks - 1}.")
    return StepSamples(named.step, named.epoch, named.ranks, tuple(batch for batch in named.batches if batch.rank == rank))
