"""The native equivalents of other systems' built-in callbacks. A test runs every example.

Each row: the built-in callback, and a list of native callbacks that does the same. The examples may use these names, created by
`tests/test_docs.py`: ``loader``, ``loss_module``, ``torch``.
"""

from __future__ import annotations

COUNTERPARTS: dict[str, dict[str, str]] = {
    "NeMo 0.10": {
        "SimpleLossLoggerCallback": 'LogTraining(every="25 steps"), Console(), TensorBoard()',
        "CheckpointCallback": 'Checkpoint(every="500 steps", keep_last=4)',
        "EvaluatorCallback": 'Evaluate(loader, every="100 steps")',
        "WandbCallback": 'LogTraining(every="25 steps"), Wandb(mode="offline")',
        "ModuleSaverCallback": 'Checkpoint(every="1000 steps", weights_only=True, keep_last=4)',
        "ValueSetterCallback": 'ScheduleValue(lambda run: run.model.dropout, "p", {0: 0.5, 100: 0.1})',
        "UnfreezeCallback": 'Freeze("body", until="1 epoch")',
    },
    "NeMo 0.11": {
        "SimpleLogger": 'LogTraining(every="100 steps"), Console()',
        "TensorboardLogger": 'LogTraining(every="100 steps"), TensorBoard()',
        "WandBLogger": 'LogTraining(every="100 steps"), Wandb(mode="offline")',
        "CheckpointCallback": 'Checkpoint(every="1 epoch", keep_last=4)',
    },
    "fastNLP": {
        "CheckpointCallback": 'Evaluate(loader), Checkpoint(every="1 epoch", keep_best=("eval/loss", "min"))',
        "TopkSaver": 'Evaluate(loader), Checkpoint(keep_last=1, keep_best=("eval/loss", "min"))',
        "RichCallback": 'ProgressBar("rich")',
        "TqdmCallback": 'ProgressBar("tqdm")',
        "RawTextCallback": 'ProgressBar("plain")',
        "LRSchedCallback": "LearningRate(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99))",
        "LoadBestModelCallback": 'Evaluate(loader), BestWeights("eval/loss", "min")',
        "EarlyStopCallback": 'Evaluate(loader), EarlyStopping("eval/loss", mode="min", patience=10)',
        "MoreEvaluateCallback": 'Evaluate(loader), Evaluate(loader, name="more", when_better=("eval/loss", "min"))',
        "FitlogCallback": 'LogTraining(), Trackio(project="mine")',
        "TimerCallback": "Profile()",
        "TorchWarmupCallback": 'Warmup(0.1, shape="linear")',
        "TorchGradClipCallback": "ClipGradients(max_norm=1.0)",
        "HasMonitorCallback, ResultsMonitor": 'Evaluate(loader), EarlyStopping("eval/loss", mode="min")',
        "ExecuteOnceBetterMonitor": 'Evaluate(loader), Evaluate(loader, name="once", when_better=("eval/loss", "min"))',
    },
    "pytorch-accelerated": {
        "TerminateOnNaNCallback": "StopOnNonFinite()",
        "LogMetricsCallback": "Evaluate(loader), Console()",
        "PrintProgressCallback": "Console(epochs=True)",
        "ProgressBarCallback": "ProgressBar()",
        "SaveBestModelCallback": 'Evaluate(loader), Checkpoint(keep_last=1, keep_best=("eval/loss", "min"))',
        "EarlyStoppingCallback": 'Evaluate(loader), EarlyStopping("eval/loss", mode="min", min_delta=0.01, patience=1)',
        "MoveModulesToDeviceCallback": "MoveModules(loss_module)",
        "ModelEmaCallback": 'Ema(0.99), Evaluate(loader, weights="ema")',
        "LimitBatchesCallback, LimitBatches": "Limit(train=2, evaluation=1)",
        "LimitEvalSteps": "Evaluate(loader, limit=1)",
        "StepBasedEvaluation": 'Evaluate(loader, every="2 steps")',
        "ConvertSyncBatchNormCallback": "ConvertSyncBatchNorm()",
        "SaveTrainingState": 'Checkpoint(every="1 epoch")',
        "CosineLrScheduler": (
            "Warmup(0.1), LearningRate(lambda optimizer, total: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total))"
        ),
        "WSDLrScheduler": (
            "LearningRate(lambda optimizer, total: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: "
            "min(1.0, 10 * (1 - step / total))))"
        ),
        "WSDCheckpointCallback": "Checkpoint(every=lambda run: run.progress.step in (90, 100))",
        "ModelFreezer": 'Freeze("body", until="2 epochs")',
    },
}
