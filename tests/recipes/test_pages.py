"""What the scripts of recipes promise, beyond the assertions that a reader sees."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Run, Trainer, on
from cadenza.records.reading import read_records
from cadenza.testing import launch
from tests.recipes.pages import FOLDER, blocks, executed, run, weights
from tests.recipes.streaming_without_torchvision import import_streaming


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_texts_do_not_change_the_training_and_depend_on_the_weights_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def texts() -> list[str]:
        lines = capsys.readouterr().out.splitlines()
        return [line.partition(": ")[2] for line in lines if line.startswith("step ")]

    names = executed("text-generation", 1)
    with_texts, written = weights(names["trainer"]), texts()
    assert len(set(written)) == len(written) == 4
    names["trainer"].evaluate(names["valid"])
    assert texts() == written[-2:]
    without = weights(executed("text-generation", 1, **{"runs/verse": "runs/without", "write_samples, ": ""})["trainer"])
    assert texts() == []
    assert all(torch.equal(with_texts[name], without[name]) for name in with_texts)


def test_the_blocks_of_the_page_about_gradient_checkpointing_are_computed_twice() -> None:
    names = executed("gradient-checkpointing", 1)
    calls = {True: 0, False: 0}
    for save_memory in calls:
        trainer = names["make"](save_memory=save_memory)

        def count(*_: object, which: bool = save_memory) -> None:
            calls[which] += 1

        trainer.model.blocks[0].register_forward_pre_hook(count)
        trainer.fit()
    assert calls[True] == 2 * calls[False] > 0


def test_the_fine_tuned_model_has_the_best_weights_and_two_groups(tmp_path: Path) -> None:
    names = executed("huggingface", 1)
    decayed, others = names["run"].optimizers[0].param_groups
    assert decayed["weight_decay"] > 0 == others["weight_decay"]
    assert all(one.ndim >= 2 for one in decayed["params"])
    assert all(one.ndim < 2 for one in others["params"])
    losses = names["run"].history["eval/loss"]
    best = names["trainer"].evaluate(names["valid"])["eval/loss"]
    assert best == pytest.approx(min(value for _, value in losses), rel=1e-6)
    assert (tmp_path / "films" / "model.safetensors").exists()
    assert len(list(read_records(tmp_path / "runs" / "films" / "metrics.jsonl"))) == len(losses)


def test_the_exported_program_takes_any_batch_size_and_has_no_dropout() -> None:
    onnx = pytest.importorskip("onnx")
    names = executed("onnx")
    graph = onnx.load("model.onnx").graph
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert not [node for node in graph.node if node.op_type == "Dropout"]
    assert isinstance(names["loaded"], nn.Module)


PAGES = [
    "gradient-checkpointing",
    "huggingface",
    "lora",
    "metric-collection",
    "text-generation",
    "timm-schedulers",
    "torchao",
    "transformers-schedulers",
]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("page", PAGES)
def test_both_ranks_end_with_the_same_weights_and_results(page: str) -> None:

    def trained() -> tuple[int, dict[str, Any], dict[str, Any]]:
        torch.set_num_threads(1)
        names = executed(page, 1)
        run = names["run"]
        assert run.faults == []
        return (
            run.driver.world_size,
            weights(names["trainer"]),
            dict(run.evaluations["eval"].results if run.evaluations else {}),
        )

    (ranks, own, results), (_, other, its_results) = launch(trained)
    assert ranks == 2
    assert results == its_results
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


OTHER_NAMES = {"sklearn": "scikit-learn", "hydra": "hydra-core", "omegaconf": "hydra-core", "streaming": "mosaicml-streaming"}
"""Distributions whose modules have another name, or that bring the module."""


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_each_package_that_a_page_imports_is_in_a_command_to_install_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = re.sub(r"cadenza\[([\w,]+)\]", r"\1", " ".join(re.findall(r"pip install ([^`\n]+)", text)))
    installed = set(re.findall(r"[\w-]+", commands))
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", "\n".join(blocks(page.stem)), re.MULTILINE))
    others = imported - sys.stdlib_module_names - {"cadenza", "torch", "training"}
    assert {OTHER_NAMES.get(name, name) for name in others} <= installed


# -- sharded data: a resume between two epochs, and on two ranks each sample once ----------------------

Points = list[tuple[float, ...]]
EPOCH = 20  # steps on one process


@pytest.fixture
def made_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Execute the first blocks of a page, which write the shards and define ``make``."""
    monkeypatch.chdir(tmp_path)

    def execute(name: str) -> dict[str, Any]:
        if name == "mosaicml-streaming":
            import_streaming()
        write, read, *_ = blocks(name)
        return run(write, write, read)  # a script that is started again writes them again

    return execute


def seen(trainer: Trainer) -> tuple[Run, Points]:
    """Train; return the run and the inputs of all samples that this rank trained on."""
    points: Points = []
    keep = on(Callback.on_batch_start)(lambda run, batch: points.extend(map(tuple, batch[0].tolist())))
    trainer.callbacks.append(keep)
    return trainer.fit(resume="auto"), points


@pytest.mark.parametrize("name", ["webdataset", "mosaicml-streaming"])
def test_a_new_process_continues_with_the_order_of_the_next_epoch(name: str, made_by: Callable[[str], dict[str, Any]]) -> None:
    make = made_by(name)["make"]
    _, whole = seen(make("one/whole"))
    make("one/cut", max_steps=EPOCH).fit()
    run, second = seen(make("one/cut"))
    assert run.progress.origin.epoch == 1
    assert second == whole[len(whole) // 2 :]
    assert sorted(second) == sorted(whole[: len(whole) // 2])
    assert second != whole[: len(whole) // 2]  # another order


@pytest.mark.parametrize(("name", "batches", "least"), [("webdataset", 9, 480), ("mosaicml-streaming", 10, 640)])
def test_each_of_two_ranks_trains_on_all_batches_of_its_own_shards(
    name: str, batches: int, least: int, made_by: Callable[[str], dict[str, Any]]
) -> None:
    make = made_by(name)["make"]

    def train() -> tuple[int, Points]:
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
        trainer = make("two")
        trainer.callbacks.clear()
        run, points = seen(trainer)
        return run.progress.step, points

    (steps, first), (_, second) = launch(train)
    assert steps == 2 * batches  # two epochs; WebDataset's rank 1 has three of seven shards
    times = Counter([*first, *second])
    assert len(times) >= least
    assert max(times.values()) == 2
    assert not {*first} & {*second} or name == "mosaicml-streaming"  # which deals the samples anew in each epoch


# -- the Dockerfile, as far as it can be checked without an engine -------------------------------------

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


ENTRYPOINT: list[str] = json.loads(dict(instructions())["ENTRYPOINT"])
"""The command of a container. tests/alone/test_commands.py starts it, ends it with SIGTERM and starts it again."""


def test_the_page_shows_the_file_its_user_is_not_root_and_its_command_has_the_exec_form() -> None:
    assert f"```dockerfile\n{FILE.read_text(encoding='utf-8')}```" in (FOLDER / "docker.md").read_text(encoding="utf-8")
    found = dict(instructions())
    assert (found["USER"], found["VOLUME"]) == ("trainer", "/runs")
    assert ENTRYPOINT[-1].startswith("/runs/")


def test_every_copied_path_exists_and_what_the_build_of_the_package_reads_is_copied() -> None:
    copied = {path for name, rest in instructions() if name == "COPY" for path in rest.split()[:-1]}
    assert [path for path in copied if not (ROOT / path).exists()] == []
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    readme = [part["path"] for part in whole["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]]
    assert {"pyproject.toml", *readme, *whole["project"]["license-files"], "src"} <= copied


def test_pip_installs_as_the_page_of_the_installation_does_with_extras_that_exist() -> None:
    (command,) = (rest for name, rest in instructions() if name == "RUN" and "pip" in rest)
    assert command in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = re.findall(r"\w+", command.partition("[")[2])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extras
    assert set(extras) <= project["optional-dependencies"].keys()
