"""A notebook steers a run in the background, and its kernel is interrupted."""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():  # jupyter_core and traitlets warn of each other
    warnings.simplefilter("ignore")
    import nbclient
    import nbformat


def test_a_notebook_steers_its_run() -> None:
    cells = [
        "import warnings; warnings.simplefilter('error')",
        "from cadenza import Callback, on\nfrom cadenza.testing import tiny_trainer\n"
        "handle = tiny_trainer(steps=1_000_000, progress=True).start()\nhandle.pause('to look')",
        "handle",
        "seen = []\nhandle.attach(on(Callback.on_step_end)(lambda run: seen.append(run.progress.step)))\n"
        "handle.step_once()\nprint(len(seen), handle)",
        "handle.stop('enough')\nprint(handle.join().outcome)",
        "import os, signal, tempfile\nfrom cadenza.callbacks import Checkpoint\nfolder = tempfile.TemporaryDirectory()\n"
        "def train(interrupt_at=None):\n"
        "    trainer = tiny_trainer(steps=20, directory=folder.name, callbacks=[Checkpoint('1 step')])\n"
        "    for step in trainer.steps(resume='auto'):\n"
        "        for inputs, _ in step:\n"
        "            step.backward(trainer.model(inputs).square().mean())\n        print(step)\n"
        "        if step.run.progress.step == interrupt_at:\n"
        "            os.kill(os.getpid(), signal.SIGINT)  # as 'Interrupt the kernel' does\n"
        "    print(trainer.run.progress.step, trainer.run.outcome.kind)\n"
        "train(interrupt_at=17)",
        "train()\nfolder.cleanup()",
    ]
    v4: Any = nbformat.v4  # typed in part only
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
    shown = [one.data["text/html"] for one in notebook.cells[2].outputs if "text/html" in one.get("data", {})]
    assert any("in the background</b> · paused" in one for one in shown)
    printed = ["".join(one.text for one in cell.outputs if one.output_type == "stream") for cell in notebook.cells]
    assert printed[3].startswith("1 <Handle: paused; ")
    assert printed[4].endswith("Outcome(kind='stopped', reason='enough')\n")
    assert "18 interrupted\n" in printed[5]
    assert printed[6].endswith("20 finished\n")
    assert "moved in the first steps" not in printed[5] + printed[6]  # names of the notebook, such as get_ipython
