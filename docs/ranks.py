"""What each callback and sink does on several ranks, for `docs/generate.py`. A test sees that none is missing.

`tests/distributed` shows it of each. "Talks" means: to the other ranks, so that it must stand in the list of every rank, and no
rank may leave it out.
"""

from __future__ import annotations

_MAIN = "the main one alone does it; it does not talk to the others."
_ALIKE = "each does the same by itself; it does not talk to the others."
_SINK = "the main one alone opens, writes and closes."

RANKS: dict[str, str] = {
    "BestWeights": "each keeps a copy of its own and puts it back, by results that all have; it does not talk to the others.",
    "Checkpoint": "talks whenever it saves, so `run.save` must be called on every rank. The main one writes.",
    "ClipGradients": "gradients are reduced before, so each scales by the same norm; it does not talk to the others.",
    "ConfusionMatrix": "talks at the end of the evaluation: each gets the counts of all. The main one logs the figure.",
    "ConvertSyncBatchNorm": "each converts its own model; the layers then talk in every forward pass of training.",
    "Derive": "each computes from its own batch; your function may talk to the others if every rank asks for the value.",
    "DeviceStats": "of the main one's device, process and machine alone; it does not talk to the others.",
    "EarlyStopping": "each decides by results that all have, so alike; it does not talk to the others.",
    "Ema": "each keeps the same average; the statistics of BatchNorm in it are the main one's where it is judged.",
    "Evaluate": "talks: each judges its part, and all get the results of one process. `evaluate` must be called on every rank.",
    "FindBatchSize": "is an error: it is for one process.",
    "FindLearningRate": "talks in each step of its test: all find the same rate.",
    "Freeze": "talks when parameters are frozen or let go, as what reduces gradients is then made anew.",
    "Histograms": "the main one logs its own weights and gradients, which are those of all; it does not talk to the others.",
    "LearningRate": _ALIKE,
    "Limit": "in training of each rank, in an evaluation of all together; it does not talk to the others.",
    "LogTraining": "talks where it logs the loss, which is that of all; `log` must be called on every rank.",
    "MoveModules": "talks: all begin with the main one's weights, and gradients of what learns are averaged before an update.",
    "Profile": "each measures itself, in its own `run.profile`; the main one prints and writes its own. It does not talk.",
    "SampleImages": "the main one shows images of its own batches; it does not talk to the others.",
    "SavePredictions": "talks at the end of the evaluation: the main one writes the rows of all, in the order of the loader.",
    "ScheduleValue": _ALIKE,
    "SlurmRequeue": "the main one puts the job back, when all have saved; it does not talk to the others.",
    "StopOnNonFinite": "talks in each batch: what is not finite on one rank is dropped, or raised, on all.",
    "Summary": _MAIN,
    "Swa": "talks when the statistics of BatchNorm are taken anew: each reads its part of the data, and all get the mean. "
    "`put_in_place` must be called on every rank.",
    "TimeLimit": "by the time on which all agree before each step, so all stop at the same one; it does not talk by itself.",
    "Warmup": _ALIKE,
    "Console": _SINK,
    "Csv": _SINK,
    "JsonLines": _SINK,
    "Mlflow": _SINK,
    "ProgressBar": "the main one alone draws, with its own loss and the samples of all.",
    "Sink": "`open`, `write` and `close` are called on the main one alone, so they must not talk to the others.",
    "Swanlab": _SINK,
    "TensorBoard": _SINK,
    "Trackio": _SINK,
    "Wandb": _SINK,
}
