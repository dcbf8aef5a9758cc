"""A progress bar."""

from cadenza.moments import Callback


class ProgressBar(Callback):
    """A progress bar."""
