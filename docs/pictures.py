"""Make the pictures of the README from real runs: a kill, the terminal, the plan and the report.

Run ``python docs/pictures.py`` after a change of what they show. The terminal and the plan are SVG text of one real run in a
real terminal of 92 columns. The report is a screenshot in Chromium of two such runs. Times and speeds differ between machines;
a test compares the text without numbers with what the script prints today.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PICTURES = Path(__file__).with_name("pictures")
COLUMNS = 92
SCRIPT = """
import sys
import torch
from torch import nn

from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, LearningRate, LogTraining
from cadenza.loading import TensorBatches
from cadenza.sinks import Console

directory, rate, show = sys.argv[1], float(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
torch.set_num_threads(1)
points = torch.randn(1000, 2)
inside = (points.norm(dim=1) < 1).long()
model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
trainer = Trainer(
    model,
    lambda parameters: torch.optim.AdamW(parameters, lr=rate),
    TensorBatches(points[:800], inside[:800], batch_size=32, shuffle=True),
    supervised(nn.CrossEntropyLoss()),
    max_epochs=8,
    seed=1,
    device="cpu",
    directory=None if show == "plan" else directory,
    callbacks=[
        LogTraining(every="25 steps", throughput=False),
        Evaluate(TensorBatches(points[800:], inside[800:], batch_size=100)),
        EarlyStopping("eval/loss", mode="min", patience=2),
        Checkpoint(keep_best=("eval/loss", "min"), directory="checkpoints" if show == "plan" else None),
        Console(every="1 epoch"),
    ],
)
if show == "plan":
    print(trainer.plan())
else:
    trainer.fit()
"""
KILLED = Path(__file__).resolve().parents[1] / "examples" / "circle.py"
STYLE = """
  .back { fill: #f6f8fa; stroke: #d0d7de; } text { fill: #1f2328; white-space: pre;
  font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
  @media (prefers-color-scheme: dark) { .back { fill: #161b22; stroke: #30363d; } text { fill: #e6edf3; } }
"""


def main() -> None:
    """Make all pictures anew."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for show in ("plan", "terminal"):
            text = printed(folder / "run", show)
            (PICTURES / f"{show}.svg").write_text(drawn("$ python train.py", text), encoding="utf-8")
        (PICTURES / "kill.svg").write_text(drawn(*killed(folder)), encoding="utf-8")
        printed(folder / "lr-0.003", "terminal", rate=0.003)
        (folder / "run").rename(folder / "lr-0.01")
        photographed([folder / "lr-0.01", folder / "lr-0.003"], PICTURES / "report.png")


def killed(folder: Path) -> tuple[str, str]:
    """Return the first line and the rest of a terminal: a training is killed in its third epoch, goes on, and is compared."""
    command = [sys.executable, str(KILLED), "--epochs", "4", "--directory"]
    first = in_terminal([*command, "runs/a"], folder, until="epoch 2")
    rest, whole = in_terminal([*command, "runs/a"], folder), in_terminal([*command, "runs/b"], folder)
    typed = "$ python examples/circle.py --epochs 4 --directory runs"
    lines = [first, "Killed", f"{typed}/a", rest, f"{typed}/b   # not killed", "..."]
    return f"{typed}/a", "\n".join([*lines, *whole.splitlines()[-2:]])


def printed(directory: Path, show: str, rate: float = 0.01) -> str:
    """Return what the script prints into a real terminal."""
    return in_terminal([sys.executable, "-c", SCRIPT, directory.name, str(rate), show], directory.parent)


def in_terminal(command: list[str], folder: Path, until: str | None = None) -> str:
    """Return what a command prints into a real terminal. With `until`, it is killed when it has printed this text."""
    ours, theirs = pty.openpty()
    import fcntl
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    for part in _parts(ours):
        written += part
        if until is not None and until in written.decode(errors="ignore"):
            process.kill()
    os.close(ours)
    if process.wait() and until is None:
        raise RuntimeError(f"the script failed: {written.decode()}")
    return written.decode().replace("\r\n", "\n").rstrip()


def _parts(terminal: int) -> Iterator[bytes]:
    try:
        while part := os.read(terminal, 4096):
            yield part
    except OSError:  # Linux raises this when the other end is closed
        return


def drawn(command: str, text: str) -> str:
    """Return a picture of a terminal as SVG, with its lines as text."""
    from xml.sax.saxutils import escape

    whole = [command, *text.split("\n")]
    lines = [line[at : at + COLUMNS] for line in whole for at in range(0, len(line) or 1, COLUMNS)]  # as a terminal wraps
    height = 18 * len(lines) + 24
    rows = "\n".join(f'<text x="16" y="{28 + 18 * row}">{escape(line)}</text>' for row, line in enumerate(lines) if line)
    width = 800
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="back" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n{rows}\n</svg>\n'
    )


def lines_of(picture: str) -> list[str]:
    """Return the lines of a drawn terminal, without the numbers, which differ between machines."""
    from html import unescape

    return [without_numbers(unescape(line)) for line in re.findall(r"<text[^>]*>([^<]*)</text>", picture)]


def without_numbers(line: str) -> str:
    """Return a line with ``#`` for each number and single spaces."""
    return re.sub(r" +", " ", re.sub(r"\d[\d.:e+-]*", "#", line)).strip()


def photographed(runs: list[Path], picture: Path) -> None:
    """Take a screenshot of the report over `runs`: twice the pixels, for sharp screens, and as small as 255 colours make it."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    page_file = runs[0].parent / "report.html"
    command = [sys.executable, "-m", "cadenza", "report", *map(str, runs), "--output", str(page_file)]
    subprocess.run(command, check=True, capture_output=True)
    names = ("chromium", "chromium-browser", "google-chrome")
    browser_file = next(path for name in names if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_file, args=["--no-sandbox", "--headless"])
        page = browser.new_page(viewport={"width": 900, "height": 972}, device_scale_factor=2, color_scheme="light")
        page.goto(page_file.as_uri())
        page.screenshot(path=str(picture))
        browser.close()
    with Image.open(picture) as shot:
        shot.convert("RGB").quantize(255).save(picture, optimize=True)


if __name__ == "__main__":
    main()
