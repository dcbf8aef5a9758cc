"""How the page of callbacks and sinks groups them, and which other page explains one, for `docs/generate.py`."""

from __future__ import annotations

PURPOSES: dict[str, list[str]] = {
    "Evaluate, stop, keep the best": [
        "Evaluate", "EarlyStopping", "BestWeights", "SavePredictions", "ConfusionMatrix", "TimeLimit", "OptunaPruning",
    ],
    "Save and continue": ["Checkpoint", "OmitFrozen", "SlurmRequeue"],
    "Learning rate and gradients": ["LearningRate", "Warmup", "FindLearningRate", "ClipGradients", "ScheduleValue"],
    "Weights and modules": ["Ema", "Swa", "Freeze", "MoveModules", "ConvertSyncBatchNorm"],
    "Batches": ["FindBatchSize", "Limit", "SequenceLength", "Derive"],
    "Log and measure": [
        "LogTraining", "DeviceStats", "Timer", "Histograms", "SampleImages", "Summary", "Profile", "Alert",
    ],
    "When something breaks": ["StopOnNonFinite", "Recover", "Capsule", "ReplayCheck", "Fingerprint"],
    "Sinks: where records go": [
        "Console", "ProgressBar", "Csv", "JsonLines", "TensorBoard", "Wandb", "Mlflow", "Trackio", "Swanlab", "Comet",
        "Dvclive", "Sink",
    ],
}  # fmt: skip
"""The callbacks and sinks of each purpose, the usual ones first."""

EXPLAINED: dict[str, str] = {
    "Alert": "[alerts](logging.md#alerts)",
    "Capsule": "[when a step breaks](capsule.md)",
    "Checkpoint": "[checkpoints](checkpoints.md)",
    "Fingerprint": "[compare runs](compare-runs.md)",
    "OptunaPruning": "[search hyperparameters with Optuna](recipes/optuna.md)",
    "Profile": "[profile](profile.md)",
    "Recover": "[recover from a broken loss](recover.md)",
    "ReplayCheck": "[check the machine](check-the-machine.md)",
    "SequenceLength": "[length of sequences](changes.md#length-of-sequences)",
    "Console": "[console](sinks.md#console)",
    "ProgressBar": "[progress bar](sinks.md#progress-bar)",
    "Csv": "[Csv](sinks.md#csv)",
    "TensorBoard": "[TensorBoard](sinks.md#tensorboard)",
    "Wandb": "[Weights & Biases](sinks.md#weights--biases)",
    "Mlflow": "[MLflow](sinks.md#mlflow)",
    "Trackio": "[Trackio](sinks.md#trackio)",
    "Swanlab": "[SwanLab](sinks.md#swanlab)",
    "Comet": "[Comet](sinks.md#comet)",
    "Dvclive": "[DVCLive](sinks.md#dvclive)",
    "Sink": "[your own sink](sinks.md#your-own-sink) and [when a tracker fails](sinks.md#when-a-tracker-fails)",
}
"""Pages with an example and the whole behaviour."""

RELATED: dict[str, str] = {
    "BestWeights": "[test the best weights](evaluation.md#test-the-best-weights)",
    "EarlyStopping": "[monitors](evaluation.md#monitors)",
    "Ema": "[averaged weights](evaluation.md#averaged-weights)",
    "Evaluate": "[evaluation](evaluation.md)",
    "LearningRate": "[a schedule in a longer run](changes.md#a-schedule-in-a-longer-run)",
    "LogTraining": "[tokens and throughput](logging.md#tokens-and-throughput)",
    "OmitFrozen": "[fine-tune with LoRA](recipes/lora.md)",
    "SavePredictions": "[predictions in a file](evaluation.md#predictions-in-a-file)",
    "SlurmRequeue": "[preemption signals](checkpoints.md#ctrl-c-and-preemption-signals)",
    "StopOnNonFinite": "[losses that are not finite](logging.md#losses-that-are-not-finite)",
    "Swa": "[averaged weights](evaluation.md#averaged-weights)",
}
"""Pages with further examples."""
