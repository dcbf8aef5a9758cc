"""Sinks: callbacks that show a run, or write its records to files and trackers."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.sinks.console import Console as Console
    from cadenza.sinks.csv import Csv as Csv
    from cadenza.sinks.json_lines import JsonLines as JsonLines
    from cadenza.sinks.progress_bar import ProgressBar as ProgressBar
    from cadenza.sinks.sink import Sink as Sink
    from cadenza.sinks.tensorboard import TensorBoard as TensorBoard
    from cadenza.trackers.comet import Comet as Comet
    from cadenza.trackers.dvclive import Dvclive as Dvclive
    from cadenza.trackers.mlflow import Mlflow as Mlflow
    from cadenza.trackers.swanlab import Swanlab as Swanlab
    from cadenza.trackers.trackio import Trackio as Trackio
    from cadenza.trackers.wandb import Wandb as Wandb

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
