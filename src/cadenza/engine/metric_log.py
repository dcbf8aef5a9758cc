"""Logged values, from ``run.log`` to the history, the run directory and the sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cadenza.engine.loss_check import LossCheck
from cadenza.engine.rank_sync import Decide
from cadenza.hooks.dispatch import Hooks
from cadenza.records import media_folder
from cadenza.records.directory import RunDirectory
from cadenza.records.history import History
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.records.record import Record
from cadenza.records.writer import Writer
from cadenza.run import Run
from cadenza.status.progress import Counters

if TYPE_CHECKING:
    from cadenza.sinks.media_files import MediaFiles


class MetricLog:
    """The metric buffer, the records with numbers that are still on the device, and their readers.

    Args:
        hooks: Fires ``on_log``, on the main process.
        losses: Checks the losses in each record.
        files: The run directory of the main process; None if nothing is written.
        decide: Records a decision.
    """

    __slots__ = ("_decide", "_files", "_hooks", "_media", "_media_failed", "buffer", "history", "losses", "readers", "writer")

    def __init__(self, hooks: Hooks, losses: LossCheck, files: RunDirectory | None, decide: Decide) -> None:
        self._hooks, self._files, self._decide = hooks, files, decide
        self._media: MediaFiles | None = None
        self._media_failed = False
        self.losses: LossCheck = losses
        self.buffer: MetricBuffer = MetricBuffer()
        """The logged values that are not in a record yet."""
        self.history: History = History()
        """The numbers of every record."""
        self.writer: Writer = Writer()
        """The thread in which sinks write."""
        self.readers: list[Callable[[Run, Record], None]] = []
        """Functions of adapters. Every rank calls them with each record; ``on_log`` fires on the main process only."""

    def deliver(self, run: Run, at: Counters | None = None, *, wait: bool) -> None:
        """Pass records to their readers: those that `MetricBuffer.take` returns for `at` and `wait`."""
        for record in map(self.losses.look_at, self.buffer.take(at, wait=wait)):
            if not (record.values or record.media):
                continue
            if thinned := self.history.add(record):
                self._decide("history thinned", thinned, who="the run")
            if run.is_main:
                if self._files:
                    self._files.add_record(record)
                    self._keep_media(self._files, record)
                self._hooks.on_log(run, record)
            for reader in self.readers:
                reader(run, record)

    def close(self) -> None:
        """Write the media that wait, and end the thread in which sinks write."""
        media, self._media = self._media, None
        if media is not None:
            try:
                media.finish()
            except Exception as error:  # a medium is no reason to fail a run that is over
                self._decide("not kept", f"media cannot be written: {error!r}", who="the run")
            for remark in media.remarks:
                self._decide("not kept", remark, who="the run")
        self.writer.stop()

    def _keep_media(self, files: RunDirectory, record: Record) -> None:
        if not record.media or self._media_failed:
            return
        try:
            if self._media is None:
                from cadenza.sinks.media_files import MediaFiles  # most runs log no media

                self._media = MediaFiles(files.path / media_folder.FOLDER, self.writer)
            self._media.put(record)
        except Exception as error:  # as for a sink: the training goes on
            self._media_failed = True
            self._decide("not kept", f"media cannot be written, and no more are: {error!r}", who="the run")
