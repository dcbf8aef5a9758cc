"""`cadenza report` writes one page, whole or not at all."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cadenza.commands.main import main
from cadenza.testing import tiny_run


def test_it_writes_one_file_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run(directory=tmp_path / "first")
    output = tmp_path / "new" / "page.html"
    assert main(["report", str(tmp_path / "first"), "--output", str(output)]) == 0
    assert re.fullmatch(rf"{re.escape(str(output))}: 1 run, \d+.* kB; open it in a browser\n", capsys.readouterr().out)
    assert "<h1>first</h1>" in output.read_text(encoding="utf-8")
    assert list(output.parent.iterdir()) == [output]


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 1
    assert "is not a run directory: expected a run.json or a metrics.jsonl in it" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on the size of a file")
def test_a_full_disk_leaves_the_older_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import resource

    tiny_run(directory=tmp_path / "first")
    output = tmp_path / "page.html"
    output.write_text("older", encoding="utf-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        assert main(["report", str(tmp_path / "first"), "--output", str(output)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the report cannot be written to" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"first", "page.html"}
    assert output.read_text(encoding="utf-8") == "older"


def test_an_output_that_is_a_folder_is_named_and_a_link_or_a_device_is_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run(directory=tmp_path / "first")
    assert main(["report", str(tmp_path / "first"), "--output", str(tmp_path)]) == 1
    assert "the report cannot be written to" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    assert main(["report", str(tmp_path / "first"), "--output", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").stat().st_size > 10_000
    if Path("/dev/full").exists():
        assert main(["report", str(tmp_path / "first"), "--output", "/dev/full"]) == 1
        assert "No space left on device" in capsys.readouterr().err
