"""Places for records: callbacks that show a run, or take what it logs somewhere."""

from cadenza.sinks.console import Console
from cadenza.sinks.csv import Csv
from cadenza.sinks.json_lines import JsonLines
from cadenza.sinks.mlflow import Mlflow
from cadenza.sinks.progress_bar import ProgressBar
from cadenza.sinks.sink import Sink
from cadenza.sinks.swanlab import Swanlab
from cadenza.sinks.tensorboard import TensorBoard
from cadenza.sinks.trackio import Trackio
from cadenza.sinks.wandb import Wandb

__all__ = ["Console", "Csv", "JsonLines", "Mlflow", "ProgressBar", "Sink", "Swanlab", "TensorBoard", "Trackio", "Wandb"]
