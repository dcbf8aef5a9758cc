"""Records, their history, the run directory that holds them, and functions that read a run directory."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.records.directory import read_info as read_info
    from cadenza.records.reading import read_decisions as read_decisions
    from cadenza.records.reading import read_records as read_records

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
