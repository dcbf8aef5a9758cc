"""Classes of transformers, trl, peft and trackers in a native list: each has the effect that it has at home."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from cadenza import Run, Trainer
from cadenza.callbacks import Checkpoint
from cadenza.compat.transformers import Arguments
from cadenza.testing import launch
from tests.adapters.transformers.scenario import Samples, TrainerCallback, at_home, compute, evaluate, here, transformers

Tags = dict[str, list[tuple[int, float]]]


def scalars(folder: Path) -> Tags:
    """Return what a TensorBoard file below a folder holds, without times."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not any(clock in tag for clock in ("runtime", "per_second"))]
    return {tag: [(one.step, round(one.value, 4)) for one in events.Scalars(tag)] for tag in tags}


def with_all(tmp_path: Path, *callbacks: Any, **arguments: Any) -> Run:
    """Train three epochs with an evaluation and a checkpoint each, and a log every two steps."""
    parts = [evaluate("1 epoch"), Checkpoint("1 epoch"), Arguments(logging_steps=2)]
    return here([*parts, *callbacks], max_epochs=2, directory=tmp_path / "run", **arguments)


def test_tensorboard_writes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    kind = transformers.integrations.TensorBoardCallback
    at_home(tmp_path, kind(), evaluation=True, num_train_epochs=2, logging_steps=2, eval_strategy="epoch")
    with_all(tmp_path, kind())
    here, there = scalars(tmp_path / "run"), scalars(tmp_path / "home")
    assert here == there
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "eval/loss", "train/epoch"} <= here.keys()


def test_wandb_gets_the_config_and_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    wandb.teardown()  # a process reads the variables once
    try:
        with_all(tmp_path, transformers.integrations.WandbCallback())
        summary, config = dict(wandb.run.summary), dict(wandb.run.config)
    finally:
        wandb.finish()
    assert summary["train/global_step"] == 12
    assert {"train/loss", "eval/loss", "train/learning_rate", "train_loss"} <= summary.keys()
    assert config["per_device_train_batch_size"] == 2
    assert config["output_dir"] == str(tmp_path / "run")


def test_dvclive_and_trackio_write_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dvclive = pytest.importorskip("dvclive", reason="dvclive is not installed")
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    from dvclive.huggingface import DVCLiveCallback  # that of dvclive itself

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVCLIVE_LOG_MODEL", "false")
    trackers = [
        transformers.integrations.DVCLiveCallback(live=dvclive.Live("theirs", save_dvc_exp=False)),
        DVCLiveCallback(live=dvclive.Live("own", save_dvc_exp=False)),
        transformers.integrations.TrackioCallback(),
    ]
    with_all(tmp_path, *trackers)
    assert trackio.__version__
    for folder in ("theirs", "own"):
        found = json.loads((tmp_path / folder / "metrics.json").read_text())
        assert found["eval"]["loss"] > 0
        assert found["train"]["loss"] > 0
        assert found["learning_rate"] == pytest.approx(0.1 / 12)


@contextmanager
def controller() -> Iterator[tuple[str, list[Any]]]:
    """A server for the status updates of Kubeflow."""
    received: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_kubeflow_gets_the_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(transformers.integrations, "KubeflowCallback"):
        pytest.skip("this release of transformers has no KubeflowCallback")
    token = tmp_path / "token"
    token.write_text("secret of a test")
    with controller() as (address, received):
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", address)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
        with_all(tmp_path, transformers.integrations.KubeflowCallback())
    assert [one["trainerStatus"]["progressPercentage"] for one in (received[0], received[-1])] == [0, 100]
    assert "eval_loss" in {one["name"] for one in received[-1]["trainerStatus"]["metrics"]}


def test_printers_and_bars_show_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = pytest.importorskip("transformers.utils.notebook", reason="IPython is not installed").NotebookProgressCallback()
    with_all(tmp_path, transformers.PrinterCallback(), transformers.ProgressCallback(), notebook)
    shown = capsys.readouterr()
    assert shown.out.count("'eval_loss'") == 4  # of each callback, in each epoch
    assert "12/12" in shown.err
    assert "HTML object" in shown.out  # its table, where no notebook shows it


def test_the_guide_names_every_class() -> None:
    guide = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "from-huggingface.md").read_text()
    integrations = transformers.integrations
    exported = {name for package in (transformers, integrations) for name in dir(package) if name.endswith("Callback")}
    assert len(exported) > 15
    assert not {name for name in exported if f"`{name}`" not in guide}


class Tiny(nn.Module):
    """A model with what trl needs of a model of transformers."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = config
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.linear(x), labels)}

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(folder) / "weights.pt")

    def update_and_allocate(self, step: int) -> None:
        self.allocated = [*getattr(self, "allocated", []), step]

    @property
    def base_model(self) -> nn.Module:
        return self


def train_tiny(folder: Path, *callbacks: Any, resume: bool | str = False, dies_at: int = 0) -> Tiny:
    class Die(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            if state.global_step == dies_at and dies_at:
                raise KeyError("of a test")

    model = Tiny()
    arguments = Arguments(ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)
    Trainer(
        model,
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        DataLoader(Samples(12, 1), batch_size=2),
        compute,
        callbacks=[Checkpoint("2 steps", on_exception=False), arguments, Die(), *callbacks],
        max_epochs=1,
        device="cpu",
        progress=False,
        directory=folder,
    ).fit(resume=resume)
    return model


def test_callbacks_of_trl_and_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = pytest.importorskip("trl.trainer.callbacks", reason="trl is not installed")
    adamss = pytest.importorskip("peft.tuners.adamss.asa_callback", reason="peft has no AdamssAsaCallback")
    reference = Tiny()
    accelerate: Any = pytest.importorskip("accelerate")

    accelerate.state.AcceleratorState(cpu=True)  # which the trainers of trl make
    bema = callbacks.BEMACallback(update_freq=2)
    added = [
        bema,
        callbacks.SyncRefModelCallback(reference, None),
        callbacks.RichProgressCallback(),
        adamss.AdamssAsaCallback(),
    ]
    model = train_tiny(tmp_path / "run", *added)
    weights = torch.load(tmp_path / "run" / "bema" / "weights.pt")
    assert weights.keys() == model.state_dict().keys()
    assert not torch.equal(weights["linear.weight"], model.linear.weight)
    assert not torch.equal(reference.linear.weight, Tiny().linear.weight)  # it follows the model
    assert model.allocated == [1, 2, 3, 4, 5, 6] or model.allocated == [0, 1, 2, 3, 4, 5]
    assert "Training" in capsys.readouterr().out


def test_lists_that_on_train_begin_fills_are_not_filled_twice_after_a_resume(tmp_path: Path) -> None:
    callbacks = pytest.importorskip("trl.trainer.callbacks", reason="trl is not installed")
    with pytest.raises(KeyError):
        train_tiny(tmp_path / "cut", callbacks.BEMACallback(update_freq=1), dies_at=3)
    again = callbacks.BEMACallback(update_freq=1)
    train_tiny(tmp_path / "cut", again, resume="auto")
    whole = callbacks.BEMACallback(update_freq=1)
    train_tiny(tmp_path / "whole", whole)
    assert len(again.ema_params) == len(whole.ema_params) == 2
    assert all(map(torch.equal, again.ema_params, whole.ema_params))


def on_two_processes(folder: Path) -> dict[str, Any]:
    os.environ["DVCLIVE_LOG_MODEL"] = "false"
    seen: list[tuple[str, int, bool]] = []

    class Sees(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
            seen.append(("on_log", state.global_step, "loss" in logs))
            assert (args.world_size, args.process_index) == (2, int(os.environ["RANK"]))
            assert state.is_world_process_zero is (args.process_index == 0)

        def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            seen.append(("on_save", state.global_step, os.path.isdir(f"{args.output_dir}/checkpoint-{state.global_step}")))

    class StopsOnOneRank(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            control.should_training_stop = args.process_index == 1 and state.global_step == 8

    stopping = transformers.EarlyStoppingCallback(9)
    shown = [transformers.integrations.TensorBoardCallback(), transformers.ProgressCallback(), transformers.PrinterCallback()]
    parts = [evaluate("3 steps"), Checkpoint("3 steps", keep_best=("eval/loss", "min")), Arguments(logging_steps=2)]
    run = here([*parts, *shown, stopping, StopsOnOneRank(), Sees()], samples=24, max_epochs=3, directory=folder)
    state = run._session.adapters["transformers"].state  # type: ignore[attr-defined]
    losses = [row["loss"] for row in state.log_history if "loss" in row]
    return {"step": run.progress.step, "seen": seen, "losses": losses, "best": state.best_model_checkpoint}


def test_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    first, second = launch(lambda: on_two_processes(tmp_path / "run"))
    assert first == second
    assert first["step"] == 8
    assert [one for one in first["seen"] if one[0] == "on_save"] == [
        ("on_save", 3, True),
        ("on_save", 6, True),
        ("on_save", 8, True),
    ]
    assert [one[1] for one in first["seen"] if one[0] == "on_log" and one[2]] == [2, 4, 6, 8]
    assert first["best"].startswith(str(tmp_path / "run" / "checkpoints" / "step-"))
    assert [step for step, _ in scalars(tmp_path / "run")["train/loss"]] == [2, 4, 6, 8]  # one file, of the main process
