"""What each callback and sink does on several ranks, for `docs/generate.py`. A test checks that none is missing.

`tests/distributed` tests each sentence. A callback that "communicates" with the other ranks must be in the list of every rank.
"""

from __future__ import annotations

_MAIN = "runs on the main process only and does not communicate."
_ALIKE = "each rank does the same; it does not communicate."
_SINK = "only the main process opens, writes and closes it."

RANKS: dict[str, str] = {
    "Alert": "the main process applies the rule to the means over all ranks, and sends one alert; it does not communicate.",
    "BestWeights": "each rank keeps and restores its own copy, based on results that are equal on all ranks; it does not "
    "communicate.",
    "Capsule": "each rank watches its own loss, and writes capsules of its own. It communicates once, at the end of the run.",
    "Checkpoint": "communicates in each save, so every rank must call `run.save`. The main process writes.",
    "ClipGradients": "gradients are already reduced, so each rank scales by the same norm; it does not communicate.",
    "ConfusionMatrix": "communicates at the end of the evaluation: each rank gets the counts of all. The main process logs "
    "the figure.",
    "ConvertSyncBatchNorm": "each rank converts its own model; the layers then communicate in every forward pass of the "
    "training.",
    "Derive": "each rank computes from its own batch; your function may communicate if every rank reads the value.",
    "DeviceStats": "measures only the device, process and machine of the main process; it does not communicate.",
    "EarlyStopping": "each rank decides by results that are equal on all ranks; it does not communicate.",
    "Ema": "each rank keeps the same average; an evaluation uses the BatchNorm statistics of the main process. It does not "
    "communicate.",
    "Evaluate": "communicates: each rank evaluates its own shard, and all get the results of one process. Every rank must "
    "call `evaluate`.",
    "FindBatchSize": "is an error: it needs a single process.",
    "FindLearningRate": "communicates in each step of its test: all ranks find the same rate.",
    "Fingerprint": "the main process writes checksums of its own tensors, which are equal on all ranks; with FSDP, every rank "
    "sends those of its shards.",
    "Freeze": "communicates when parameters are frozen or unfrozen, because the reduction of gradients is set up again.",
    "Histograms": "the main process logs its own weights and gradients, which are equal on all ranks; it does not communicate.",
    "LearningRate": _ALIKE,
    "Limit": "limits the batches of each rank in training, and of all ranks together in an evaluation; it does not "
    "communicate.",
    "LogTraining": "communicates when it logs the loss, which is the mean over all ranks; every rank must call `log`.",
    "MoveModules": "communicates: all ranks start with the weights of the main process, and gradients are averaged before an "
    "update.",
    "OmitFrozen": _MAIN,
    "OptunaPruning": "communicates at the setup. Only the main process reports to the trial; its request stops all ranks.",
    "Profile": "each rank measures itself, in its own `run.profile`; the main process prints and writes its own. It does not "
    "communicate.",
    "Recover": "communicates: the mean loss of each step is reduced over the ranks, and all ranks go back together and leave "
    "out the same rounds.",
    "ReplayCheck": "communicates in the steps that it checks: every rank repeats the step, and with DDP they compare weights "
    "and gradients. The first step of a process is not checked.",
    "SampleImages": "the main process shows images of its own batches; it does not communicate.",
    "SavePredictions": "communicates at the end of the evaluation: the main process writes all rows in the order of the "
    "loader.",
    "ScheduleValue": _ALIKE,
    "SequenceLength": _ALIKE,
    "SlurmRequeue": "the main process requeues the job when all ranks have saved; it does not communicate.",
    "StopOnNonFinite": "a rank drops its batch alone, and the others learn it with what ranks exchange anyway; all act on it "
    "at the same step. With FSDP, a `step_fn` or `cadenza.attach` it communicates in each batch, and all ranks drop theirs.",
    "Summary": _MAIN,
    "Swa": "communicates when the BatchNorm statistics are computed again: each rank reads its shard of the data, and all get "
    "the mean. Every rank must call `put_in_place`.",
    "TimeLimit": "uses the time that all ranks agree on before each step, so all stop at the same step; it does not "
    "communicate.",
    "Timer": "each rank measures its own times; what it logs is the mean over the ranks. It does not communicate otherwise.",
    "Warmup": _ALIKE,
    "Comet": _SINK,
    "Console": _SINK,
    "Csv": _SINK,
    "Dvclive": _SINK,
    "JsonLines": _SINK,
    "Mlflow": _SINK,
    "ProgressBar": "only the main process draws, with its own loss and the samples of all ranks.",
    "Sink": "`open`, `write` and `close` are called on the main process only, so they must not communicate.",
    "Swanlab": _SINK,
    "TensorBoard": _SINK,
    "Trackio": _SINK,
    "Wandb": _SINK,
}
