"""The batches of an evaluation, until the loader is exhausted or a signal ends the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from cadenza.engine.due_evaluations import EvaluationInterrupted
from cadenza.engine.session import Session
from cadenza.errors import DataError
from cadenza.status.requests import Requests

if TYPE_CHECKING:
    from cadenza.drivers import Driver
    from cadenza.loading.evaluation import Evaluation

NONE: Any = object()
_AGREE_S = 0.25  # the interval at which several ranks exchange whether a signal came
_MOST_ROUNDS = 64  # and the maximum number of batches between two exchanges


def batches_of(session: Session, evaluation: Evaluation) -> Iterator[tuple[Any, bool]]:
    """Yield each batch of this rank, on the device, with True.

    If a forward pass needs all ranks, a rank without further batches gets its last batch again, with False: its forward pass
    only serves the other ranks.

    Raises:
        EvaluationInterrupted: A signal ends the run. All ranks raise it before the same batch.
    """
    driver, requests = session.driver, session.due.interrupts(session.sync.requests)
    if driver.in_step:
        yield from _in_step(session, evaluation, requests)
        return
    source = iter(evaluation.read(session.run, session.data_seed))
    if requests is not None:
        source = _agreed(driver, evaluation, source, requests) if driver.reduces else _until(requests, evaluation, source)
    for loaded in source:
        yield driver.to_device(loaded), True


def check_some(evaluation: Evaluation, driver: Driver) -> None:
    """Raise `DataError` if an evaluation had no batch on any rank. Every rank must call this."""
    if not driver.any_rank(evaluation.batch > 0):
        raise _no_batch(evaluation)


def _no_batch(evaluation: Evaluation) -> DataError:
    return DataError(f"the loader of {evaluation.name!r} gave no batch. Give one that has at least one, and can be read again.")


def _until(requests: Requests, evaluation: Evaluation, source: Iterator[Any]) -> Iterator[Any]:
    while requests.signal is None:
        if (loaded := next(source, NONE)) is NONE:
            return
        yield loaded
    raise EvaluationInterrupted(evaluation.name, evaluation.batch)


def _agreed(driver: Driver, evaluation: Evaluation, source: Iterator[Any], requests: Requests) -> Iterator[Any]:
    """Do the same on several ranks with different numbers of batches. They agree while they compute."""
    arrived, due, round_, sent_at = None, 0, 0, 0
    began = time.monotonic_ns()
    while True:
        loaded = next(source, NONE)
        if arrived is not None:
            signals, have_more, passed_ns = arrived().tolist()
            if signals:
                raise EvaluationInterrupted(evaluation.name, evaluation.batch)
            if not have_more:
                return
            round_s = passed_ns / driver.world_size / max(1, sent_at) / 1e9
            due = round_ + (max(1, min(_MOST_ROUNDS, int(_AGREE_S / max(round_s, 1e-9)))) if sent_at else 1)
            arrived = None
        elif round_ >= due:
            sent = [requests.signal is not None, loaded is not NONE, time.monotonic_ns() - began]
            arrived, sent_at = driver.reduce_later(torch.tensor(sent)), round_
        round_ += 1
        if loaded is not NONE:
            yield loaded


def _in_step(session: Session, evaluation: Evaluation, requests: Requests | None) -> Iterator[tuple[Any, bool]]:
    driver, source = session.driver, iter(evaluation.read(session.run, session.data_seed))
    batch = None
    while True:
        loaded = next(source, NONE)
        signalled = requests is not None and requests.signal is not None
        sent = torch.tensor([loaded is not NONE, signalled], dtype=torch.uint8)
        have_more, signals = driver.reduce(sent, "max").tolist()
        if signals:
            raise EvaluationInterrupted(evaluation.name, evaluation.batch)
        if not have_more:
            return
        if loaded is NONE:
            if batch is None:  # a forward pass needs a batch on each rank
                raise _no_batch(evaluation)
            yield batch, False
        else:
            batch = driver.to_device(loaded)
            yield batch, True
