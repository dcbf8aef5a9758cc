"""Files with a right checksum that no save wrote: the error names the file and the field, and "auto" takes the save before."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import MultiStepLR

from cadenza import Trainer, supervised
from cadenza.callbacks import (
    BestWeights,
    Checkpoint,
    EarlyStopping,
    Ema,
    Evaluate,
    LearningRate,
    LogTraining,
    Recover,
    Timer,
)
from cadenza.checkpoint.parts import PARTS
from cadenza.checkpoint.store.files import facts_of
from cadenza.checkpoint.store.manifest import canonical
from cadenza.checkpoint.store.reading import _RANK, _WHOLE
from cadenza.errors import CadenzaError, CheckpointError, CheckpointMismatchError
from cadenza.loading import Mixture
from cadenza.run import Run
from cadenza.testing import tiny_loader, tiny_model, tiny_trainer
from tests.long import seeds

NEWEST, BEFORE = "step-00000004", "step-00000002"


def fitted(folder: Path, steps: int, resume: Any = "auto") -> Run:
    saves = Checkpoint("2 steps", keep_last=None, background=False, on_exception=False)
    rate = LearningRate(lambda optimizer: MultiStepLR(optimizer, [2, 9]))
    listed = [Ema(0.9), LogTraining("1 step"), Evaluate(tiny_loader(2), "2 steps"), EarlyStopping("eval/loss", "min")]
    return Trainer(
        tiny_model(),
        lambda parameters: torch.optim.Adam(parameters, 0.01),
        tiny_loader(8),
        supervised(mse_loss),
        max_steps=steps,
        seed=1,
        directory=folder,
        device="cpu",
        progress=False,
        callbacks=[rate, *listed, saves],
    ).fit(resume=resume)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    fitted(folder, 4)
    return folder


def forge(folder: Path, file: str, content: bytes) -> None:
    """Replace a file of the newest checkpoint, with a right checksum."""
    checkpoint = folder / "checkpoints" / NEWEST
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["crc32"]
    (checkpoint / file).write_bytes(content)
    manifest["files"][file] = facts_of(content)
    (checkpoint / "manifest.json").write_bytes(canonical(manifest))


def state_in(folder: Path) -> Any:
    return json.loads((folder / "checkpoints" / NEWEST / "state.json").read_text())


def put(tree: Any, path: tuple[Any, ...], value: object) -> Any:
    """Return a tree with another value at a path; without the entry for `GONE`."""
    if not path:
        return value
    first, *rest = path
    changed = put(tree[first], tuple(rest), value)
    if isinstance(tree, dict):
        return {key: changed if key == first else one for key, one in tree.items() if key != first or changed is not GONE}
    return [changed if index == first else one for index, one in enumerate(tree) if index != first or changed is not GONE]


GONE = object()
WRONG: dict[str, tuple[tuple[Any, ...], object]] = {
    "progress.step": (("progress", "step"), None),
    "progress.batch": (("progress", "batch"), 2**70),
    "in_epoch": (("in_epoch",), "word"),
    "config": (("config",), []),
    "config.accumulate": (("config", "accumulate"), {}),
    "optimizers": (("optimizers",), {}),
    "given.optimizers": (("given", "optimizers"), []),
    "optimizers[0].param_groups": (("optimizers", 0, "param_groups"), []),
    "optimizers[0].param_groups[0].betas": (("optimizers", 0, "param_groups", 0, "betas"), [0.9]),
    "optimizers[0].param_groups[0].lr": (("optimizers", 0, "param_groups", 0, "lr"), GONE),
    "optimizers[0].state.0.exp_avg": (("optimizers", 0, "state", "$dict", 0, 1, "exp_avg"), None),
    "callbacks.LearningRate.planned": (("callbacks", "LearningRate"), {"scheduler": {}, "planned": "word"}),
    "callbacks.LearningRate.scheduler.last_epoch": (("callbacks", "LearningRate", "scheduler", "last_epoch"), None),
    "history.train/loss": (("history", "train/loss", "$tuple", 3), GONE),
    "rows": (("rows", "times", "$tensor"), "history.eval/loss[1]"),
    "course[0].points[0]": (("course", 0, "points", 0), [1]),
    "offsets.metrics.jsonl": (("offsets", "metrics.jsonl"), -1),
    "callbacks.Ema": (("callbacks", "Ema"), True),
    "streams": (("streams", "torch", "$tensor"), "history.eval/loss[1]"),
    "evaluations due": (("evaluations due",), 5),
    "losses": (("losses",), [[]]),
    "losses.first": (("losses", "first"), "word"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_field_of_another_kind_is_named_and_the_save_before_is_taken(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    run = shutil.copytree(written, tmp_path / "run", symlinks=True)
    forge(run, "state.json", json.dumps(put(state_in(run), *WRONG[field])).encode())
    said = f"{NEWEST}: state.json does not have the format that cadenza writes (the field {field!r} must "
    with pytest.raises(CheckpointError) as caught:
        fitted(run, 6, resume=run / "checkpoints" / NEWEST)
    assert said in str(caught.value)
    with caplog.at_level(logging.WARNING, "cadenza"):
        done = fitted(run, 6)
    assert f"skipped a checkpoint: {said}" in caplog.text
    assert [one.why for one in done.decisions if one.what == "resumed"][-1:] == [f"at {BEFORE}"]


IN_LOADER: dict[str, tuple[tuple[Any, ...], object]] = {
    "loader": ((), 5),
    "loader.ranks": (("ranks",), 0),
    "loader.source": (("source",), GONE),
    "loader.loaders.list": (("loaders", "list"), [1]),
    "loader.loaders.list.passes": (("loaders", "list", "passes"), [[]]),
    "loader.loaders.inner.consumed[0]": (("loaders", "inner", "consumed"), [1]),
    "loader.loaders.inner.state.loaders.a.read": (("loaders", "inner", "state", "loaders", "a", "read"), "word"),
}


@pytest.mark.parametrize("field", IN_LOADER)
def test_a_field_of_a_position_in_a_mixture_is_named(tmp_path: Path, field: str) -> None:
    inner = Mixture({"a": tiny_loader(4), "b": tiny_loader(4)}, "cycle")
    loader = Mixture({"list": tiny_loader(5), "inner": inner}, "cycle")
    saves = Checkpoint("2 steps", background=False)
    tiny_trainer(loader=loader, steps=4, directory=tmp_path, callbacks=[saves]).fit()
    changed = put(state_in(tmp_path), ("loader", *IN_LOADER[field][0]), IN_LOADER[field][1])
    forge(tmp_path, "state.json", json.dumps(changed).encode())
    with pytest.raises(CheckpointError, match=re.escape(f"the field {field!r} must ")):
        tiny_trainer(loader=loader, steps=6, directory=tmp_path, callbacks=[saves]).fit(resume=NEWEST)


OF_PARAMETER = ("optimizers", 0, "state", "$dict", 0)
REFUSED: list[tuple[str, tuple[Any, ...], object]] = [
    ("optimizers[0]", (*OF_PARAMETER, 0), 7),
    ("optimizers[0]", (*OF_PARAMETER, 1, "exp_avg"), GONE),
    ("optimizers[0]", (*OF_PARAMETER, 1, "exp_avg", "$tensor"), "optimizers[0].state.1.exp_avg"),
    ("callbacks.LearningRate", ("callbacks", "LearningRate", "scheduler", "gamma"), None),
    ("callbacks.EarlyStopping", ("callbacks", "EarlyStopping"), {"word": 1}),
    ("callbacks.EarlyStopping", ("callbacks", "EarlyStopping", "best"), "word"),
]


@pytest.mark.parametrize(("field", "path", "value"), REFUSED)
def test_a_state_that_an_object_of_the_run_refuses_is_named(
    written: Path, tmp_path: Path, field: str, path: tuple[Any, ...], value: object
) -> None:
    """The save before is not taken: if the object has changed since, "auto" would skip good saves up to an old one."""
    run = shutil.copytree(written, tmp_path / "run", symlinks=True)
    forge(run, "state.json", json.dumps(put(state_in(run), path, value)).encode())
    with pytest.raises(CheckpointMismatchError, match=re.escape(f"{NEWEST}: the field {field!r} of state.json cannot be rest")):
        fitted(run, 6)


@pytest.mark.parametrize(
    ("make", "path", "value"),
    [
        (Timer, ("time/saves",), None),
        (Timer, ("time/elapsed_s", "epoch"), "word"),
        (lambda: BestWeights("eval/loss", "min"), ("best",), "word"),
        (Recover, ("when", "Spike 1", "since"), []),
    ],
)
def test_a_callback_refuses_a_value_of_another_kind_when_it_is_loaded_and_not_in_a_later_step(
    make: Callable[[], Any], path: tuple[Any, ...], value: object, tmp_path: Path
) -> None:
    callback = make()
    listed = [Evaluate(tiny_loader(2), "2 steps"), Checkpoint("2 steps", background=False), callback]
    tiny_trainer(steps=4, directory=tmp_path, callbacks=listed).fit()
    state = callback.state_dict()
    make().load_state_dict(state)
    with pytest.raises((TypeError, ValueError)):
        make().load_state_dict(put(state, path, value))


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    for key, value in entries:
        yield from paths(value, (*path, key))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", seeds(3, 100))
def test_any_change_of_a_state_is_an_error_that_names_the_checkpoint_or_a_run_that_goes_on(
    written: Path, tmp_path: Path, seed: int
) -> None:
    dice, state = random.Random(seed), state_in(written)
    everywhere = sorted(paths(state), key=str)
    for number in range(6):
        run = shutil.copytree(written, tmp_path / str(number), symlinks=True)
        path, value = dice.choice(everywhere), dice.choice([None, "word", -1, 2**70, [], {}, {"$float": "nan"}, GONE])
        forge(run, "state.json", json.dumps(put(state, path, None if value is GONE and not path else value)).encode())
        try:
            told = f"{NEWEST}, or {BEFORE}: done at {fitted(run, 6).progress.step}"
        except CadenzaError as error:
            told = str(error)
        assert NEWEST in told, (path, value)


SHAPES: dict[str, Callable[[dict[str, Any]], object]] = {
    "strides beyond 64 bits": lambda entry: entry.update(shape=[0, 2**62, 8], data_offsets=[0, 0]),
    "more numbers than bytes": lambda entry: entry.update(shape=[10**12]),
    "thousands of dimensions": lambda entry: entry.update(shape=[1] * 100_000),
}


@pytest.mark.parametrize("change", SHAPES.values(), ids=SHAPES)
def test_an_invented_shape_is_named_and_the_save_before_is_taken(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], object]
) -> None:
    run = shutil.copytree(written, tmp_path / "run", symlinks=True)
    content = (run / "checkpoints" / NEWEST / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    change(next(entry for name, entry in entries.items() if name != "__metadata__"))
    header = json.dumps(entries).encode()
    forge(run, "model.safetensors", len(header).to_bytes(8, "little") + header + content[8 + length :])
    with caplog.at_level(logging.WARNING, "cadenza"):
        done = fitted(run, 6)
    assert f"skipped a checkpoint: {NEWEST}: model.safetensors does not have the format" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 1000
    assert [one.why for one in done.decisions if one.what == "resumed"][-1:] == [f"at {BEFORE}"]


def test_each_part_has_a_kind_and_each_kind_a_part() -> None:
    checked = {name.removesuffix("?") for name in (*_WHOLE, *_RANK)}
    of_the_model = {"config", "model_extra", "left_out"}  # saved and loaded with the weights
    assert {part.name for part in PARTS} == checked - of_the_model - {"ranks"}  # which format 2 wrote
