"""Dates and times of day as the report shows them."""

from __future__ import annotations

import time
from datetime import datetime


def local(seconds: float) -> str:
    """Return a time in seconds since 1970 as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def shown(text: object) -> str:
    """Return a time of ``run.json`` as date, time and zone; a text of another form does not change."""
    instant = parsed(text)
    return str(text) if instant is None else instant.strftime("%Y-%m-%d %H:%M:%S %z")


def parsed(text: object) -> datetime | None:
    """Return a time of ``run.json``; None for a text of another form."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        return None
