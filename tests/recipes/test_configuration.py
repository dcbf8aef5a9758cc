"""Every callback and sink with plain arguments is made from YAML, by Hydra and by jsonargparse."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.utils import instantiate
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf

from cadenza import Callback, Trainer, sinks
from cadenza.hooks.moments import BaseCallback
from tests.callbacks.parts import SHIPPED

PLAIN = """
BestWeights: {monitor: [eval/loss, min]}
Checkpoint: {every: 1 epoch, keep_best: [[eval/loss, min], [eval/acc, max]], directory: saved}
ClipGradients: {max_norm: 1.0, parameters: [weight]}
Capsule: {last: 2, weights: 100 steps}
ConfusionMatrix: {labels: [cat, dog], normalize: 'true'}
Alert: {rule: train/loss > 10, to: [console]}
ConvertSyncBatchNorm: {}
DeviceStats: {every: 20 steps, machine: true}
EarlyStopping: {monitor: eval/loss, mode: min, patience: 3, min_delta: 0.01, threshold: 0.1, restore_best: true}
Ema: {decay: 0.99, every: 2 steps, rampup: 10}
Fingerprint: {every: 100 steps}
FindLearningRate: {start: 1.0e-6, end: 1.0, steps: 50, apply: true}
Freeze: {modules: {body: 1 epoch, neck: 10 steps}}
Histograms: {every: 10 steps, parameters: [weight], gradients: true}
LearningRate: {scheduler: SCHEDULER, monitor: [eval/loss, min]}
Limit: {train: 10, evaluation: 2}
LogTraining: {every: 10 steps, outputs: [loss, acc]}
OmitFrozen: {}
Profile: {window: [2, 5], trace: false}
Recover: {back: 20 steps, skip: the guilty batch, times: 2}
ReplayCheck: {every: 100 steps, action: warn}
SampleImages: {count: 4, every: 1 epoch, mean: [0.5, 0.5, 0.5], std: 0.5}
SavePredictions: {path: predictions.csv, evaluation: test}
SlurmRequeue: {}
StopOnNonFinite: {action: skip}
Summary: {depth: 2}
Swa: {start: 0.5, lr: 0.01}
SequenceLength: {lengths: {0: 128, 1000 steps: 512}}
TimeLimit: {duration: 2 h}
Timer: {}
Warmup: {length: 100 steps, shape: linear}
Comet: {project: circle, mode: offline}
Console: {}
Csv: {path: metrics.csv}
Dvclive: {directory: live}
JsonLines: {path: metrics.jsonl}
Mlflow: {}
ProgressBar: {renderer: plain}
Swanlab: {project: circle}
TensorBoard: {}
Trackio: {project: circle}
Wandb: {project: circle, mode: offline}
"""
OBJECTS = {  # what a configuration cannot hold
    "Derive": "functions of the run",
    "Evaluate": "a loader",
    "FindBatchSize": "a function that makes a loader",
    "MoveModules": "modules",
    "OptunaPruning": "a trial",
    "ScheduleValue": "an object of the model",
    "Sink": "it is a base class",
}
HYDRA = {"SCHEDULER": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "_partial_": True, "factor": 0.5}}
JSONARGPARSE = {"SCHEDULER": {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau", "init_args": {"factor": 0.5}}}
ARGUMENTS: dict[str, dict[str, Any]] = OmegaConf.to_container(OmegaConf.create(PLAIN))  # type: ignore[assignment]


def path_of(name: str) -> str:
    return f"cadenza.{'callbacks' if name in SHIPPED else 'sinks'}.{name}"


def arguments(name: str, objects: dict[str, Any]) -> dict[str, Any]:
    return {key: objects.get(value, value) if isinstance(value, str) else value for key, value in ARGUMENTS[name].items()}


def test_every_callback_and_sink_is_in_this_file() -> None:
    assert {*SHIPPED, *sinks.__all__} - OBJECTS.keys() == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("convert", ["none", "all"])
def test_hydra_makes_it(name: str, convert: str) -> None:
    config = OmegaConf.create({"_target_": path_of(name), **arguments(name, HYDRA)})
    assert type(instantiate(config, _convert_=convert)).__name__ == name


@pytest.mark.parametrize("name", ARGUMENTS)
def test_jsonargparse_makes_it_as_one_of_the_callbacks(name: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[Callback])
    given = parser.parse_object({"callbacks": [{"class_path": path_of(name), "init_args": arguments(name, JSONARGPARSE)}]})
    (made,) = parser.instantiate(given).callbacks
    assert isinstance(made, BaseCallback)
    assert type(made).__name__ == name


def test_jsonargparse_reads_the_signature_of_the_trainer() -> None:
    parser = ArgumentParser(exit_on_error=False)
    added = parser.add_class_arguments(Trainer, "trainer", fail_untyped=True)
    assert {"trainer.callbacks", "trainer.max_epochs", "trainer.driver", "trainer.compile"} <= set(added)
