"""What the scripts of recipes promise, beyond the assertions that a reader sees."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza.records.reading import read_records
from cadenza.testing import launch
from tests.recipes.pages import FOLDER, blocks, executed, weights


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
