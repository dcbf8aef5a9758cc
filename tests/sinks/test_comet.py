"""Comet: its own offline archive is read back, message by message; there is no account and no network."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run, on
from cadenza.commands.main import main
from cadenza.errors import DirectoryError, MissingExtraError
from cadenza.sinks import Comet, comet
from cadenza.status.run_info import RunInfo
from cadenza.testing import check_sink, tiny_run
from tests.sinks.samples import EMPTY, MEDIA, check_bright, check_tone, check_whole, logging, metrics_of
from tests.sinks.trackers import check_left_as_it_was


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    streamer = comet._imported().streamer.offline.OfflineStreamer
    monkeypatch.setattr(streamer, "queue_timeout", property(lambda self: 0.01, lambda self, _: None), raising=False)  # else 1 s


def offline(**arguments: Any) -> Comet:
    return Comet("tests", mode="offline", **arguments)


class Archive:
    """One archive of an experiment."""

    def __init__(self, path: Path) -> None:
        self.zip = zipfile.ZipFile(path)
        self.experiment = json.loads(self.zip.read("experiment.json"))
        messages = [json.loads(line) for line in self.zip.read("messages.json").splitlines()]
        self.messages = [(message["type"], message["payload"]) for message in messages]

    @property
    def values(self) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for kind, payload in self.messages:
            if kind == "metric_msg" and payload["metric"]["metricName"] != "process duration":
                metric = payload["metric"]
                found.setdefault(metric["metricName"], []).append((metric["step"], float(metric["metricValue"])))
        return found

    @property
    def others(self) -> dict[str, Any]:
        return {payload["key"]: payload["value"] for kind, payload in self.messages if kind == "log_other"}

    @property
    def parameters(self) -> dict[str, Any]:
        params = [payload.get("param") or payload["params"] for kind, payload in self.messages if kind == "parameter_msg"]
        return {one["paramName"]: one["paramValue"] for one in params if one["source"] == "manual"}

    @property
    def files(self) -> dict[tuple[str, str], bytes]:
        """The content of each file, by its type and name."""
        found = {}
        for kind, payload in self.messages:
            if kind == "file_upload":
                extra = payload["additional_params"]
                name = (payload["metadata"] or {}).get("name") or extra.get("figName") or extra.get("fileName")
                found[payload["upload_type"], name] = self.zip.read(payload["file_path"])
        return found


def archives(directory: Path) -> list[Archive]:
    files = sorted((directory / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime_ns)
    return [Archive(file) for file in files]


def read(info: RunInfo) -> dict[str, list[tuple[int, float]]]:
    assert info.directory is not None
    found: dict[str, list[tuple[int, float]]] = {}
    for archive in archives(info.directory):
        assert archive.experiment["offline_id"] == info.id
        for name, pairs in archive.values.items():
            found.setdefault(name, []).extend(pairs)
    return found


def test_it_keeps_the_contract_of_sinks() -> None:
    check_sink(offline, read)


def test_the_arguments_names_and_tags_arrive(tmp_path: Path) -> None:
    sink = offline(config={"seed": "mine"}, tags=["a", "b"], workspace="team")
    run = tiny_run(
        callbacks=[sink, logging({"nan": float("nan"), "inf": float("-inf")})], steps=1, directory=tmp_path / "small"
    )
    [archive] = archives(tmp_path / "small")
    assert archive.parameters["seed"] == "mine"
    assert archive.parameters["model"] == run.info.arguments["model"]
    assert archive.experiment["project_name"] == "tests"
    assert archive.experiment["workspace"] == "team"
    assert sorted(archive.experiment["tags"]) == ["a", "b"]
    assert archive.others["Name"] == "small"
    assert str(archive.values) == str({"nan": [(1, float("nan"))], "inf": [(1, float("-inf"))]})


def test_media_come_back_as_they_were(tmp_path: Path) -> None:
    tiny_run(callbacks=[logging(MEDIA), offline()], steps=1, directory=tmp_path)
    [archive] = archives(tmp_path)
    files = archive.files
    check_whole(files["visualization", "whole"])
    check_bright(files["visualization", "bright"])
    check_tone(files["audio", "tone.wav"])
    assert files["text-sample", "note"] == b"1 < 2"
    assert sum(count for _, count in json.loads(files["histogram3d", "w"])["index_values"]) == 3


def test_media_that_cannot_be_shown_are_left_out_with_one_remark(tmp_path: Path) -> None:
    run = tiny_run(callbacks=[logging(EMPTY), offline()], steps=3, directory=tmp_path)
    assert run.faults == []
    assert (tmp_path / "console.log").read_text().splitlines() == [
        "Comet: 'w' of step 1 has no values to show, and is left out",
        "Comet: 'tone' of step 1 has no values to show, and is left out",
    ]


def test_the_outcome_arrives(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        tiny_run(callbacks=[logging({"a": 1}), offline(), fail], directory=tmp_path)
    [archive] = archives(tmp_path)
    assert archive.others["outcome"] == "failed"
    assert "on purpose" in archive.others["reason"]
    assert archive.values == {"a": [(1, 1), (2, 1)]}


def test_an_experiment_of_your_own_goes_on_and_the_sink_is_disabled(tmp_path: Path) -> None:
    import comet_ml

    own = comet_ml.OfflineExperiment(offline_directory=str(tmp_path / "own"), log_env_details=False)
    try:
        run = tiny_run(callbacks=[logging({"a": 1}), offline()], steps=2, directory=tmp_path)
        assert own.alive
    finally:
        own.end()
    assert "another one is active" in str(run.faults[0].error)
    assert len(metrics_of(tmp_path)) == 2


def test_an_experiment_that_is_ended_by_others_disables_it_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import comet_ml

    @on(Callback.on_step_end, at=5)
    def end(run: Run) -> None:
        comet_ml.end()

    run = tiny_run(callbacks=[logging({"a": 1}), end, offline()], steps=20, directory=tmp_path)
    assert [str(fault.error) for fault in run.faults] == ["the experiment was ended by other code"]
    assert caplog.text.count("Comet failed in") == 1
    assert len(metrics_of(tmp_path)) == 20


def test_wrong_arguments_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="mode must be 'online', 'offline' or None; got 'off'"):
        Comet(mode="off")  # type: ignore[arg-type]  # the mistake under test
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match=r"Comet cannot write to .*Give a directory where files can be made"):
        tiny_run(callbacks=[offline(directory=tmp_path / "file" / "w")])
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(MissingExtraError, match=r"Comet needs .*pip install 'cadenza\[comet\]'"):
        Comet()


def test_offline_the_process_the_home_and_the_network_are_left_as_they_were(tmp_path: Path) -> None:
    check_left_as_it_was("Comet('p', mode='offline')", tmp_path)
    assert list((tmp_path / "work").iterdir()) == []


def test_without_an_api_key_it_is_disabled_and_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    run = tiny_run(callbacks=[logging({"a": 1}), Comet("tests")], steps=2, directory=tmp_path / "run")
    [fault] = run.faults
    assert str(fault.error) == "Comet has no API key. Set COMET_API_KEY, or write an archive with Comet(mode='offline')."
    assert len(metrics_of(tmp_path / "run")) == 2


def test_replay_makes_an_archive_offline_and_needs_an_api_key_online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run(callbacks=[logging({"a": 0.5})], steps=3, directory=tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    assert main(["replay", str(tmp_path), "--to", "comet"]) == 1
    assert "Comet has no API key. Set COMET_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    assert main(["replay", str(tmp_path), "--to", "comet"]) == 0
    [archive] = archives(tmp_path)
    assert archive.values == {"a": [(1, 0.5), (2, 0.5), (3, 0.5)]}
    assert archive.others["outcome"] == "finished"
