"""Deliver records to their readers, once their numbers are on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cadenza.records.directory import RunDirectory
from cadenza.records.record import Record

if TYPE_CHECKING:
    from cadenza.run import Run


def deliver(run: Run, records: Iterable[Record], directory: RunDirectory | None) -> None:
    """Pass records to the loss check and the history and, on the main process, to the directory and the sinks."""
    for record in records:
        run.losses.look_at(run, record)
        if told := run.history.add(record):
            run.decide("history thinned", told, who="the run")
        if run.is_main:
            if directory:
                directory.add_record(record)
            run.hooks.on_log(run, record)
