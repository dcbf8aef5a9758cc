"""Places for records: callbacks that show a run, or take what it logs somewhere."""

from cadenza.sinks.console import Console
from cadenza.sinks.json_lines import JsonLines
from cadenza.sinks.progress_bar import ProgressBar
from cadenza.sinks.tensorboard import TensorBoard

__all__ = ["Console", "JsonLines", "ProgressBar", "TensorBoard"]
