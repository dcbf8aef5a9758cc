"""Under SLURM: two nodes of this machine, on which jobs are preempted, requeued at a time limit, and continue.

``apt-get install slurmd slurmctld munge`` installs the daemons. The tests start them with files in a folder of their own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, SlurmRequeue
from cadenza.testing import launch
from tests.distributed.parts import loader, trainer, weights_of
from tests.ports import free_port
from tests.waiting import until

ROOT = Path(__file__).parents[2]
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
MISSING = [name for name in DAEMONS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; apt-get install slurmd slurmctld munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts jobs as root alone"),
]
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=60
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=1 RealMemory=500
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n[1-2] PriorityTier=2 PreemptMode=OFF
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Two nodes; return a function that runs a command of SLURM and returns what it prints."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    first = free_port()
    ports = [free_port(), first, first + 1]
    text = CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    daemons = [munge, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in ("n1", "n2"))]
    started: list[subprocess.Popen[bytes]] = []

    def call(*command: str) -> str:
        return subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout

    def ready() -> bool:
        with suppress(subprocess.CalledProcessError):
            return call("sinfo", "--noheader", "--format=%D %t", "--partition=low").strip() == "2 idle"
        return False

    try:
        for command in daemons:
            with (folder / f"{command[0]}-{command[-1]}.log".replace("/", "_")).open("wb") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            until((folder / "socket").exists)
        until(ready)
        yield call
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def train(folder: Path, *, steps: int, pause_s: float) -> None:
    """Train on two nodes; write the weights, and at which steps it began."""

    @on(Callback.on_step_end)
    def slowly(run: Run) -> None:
        (folder / "begun").touch()
        time.sleep(pause_s)

    callbacks = [slowly, Checkpoint("1000 steps"), SlurmRequeue()]
    one = trainer(loader(), max_epochs=None, max_steps=steps, directory=folder / "run", driver="auto", callbacks=callbacks)
    run = one.fit(resume="auto")
    torch.save(
        (weights_of(one), [decision.when.step for decision in run.decisions if decision.what == "resumed"]), folder / "end"
    )


def script(folder: Path, *lines: str, pause_s: float) -> str:
    """Write a batch script, as that of the guide, and return its path."""
    here = "import pathlib; from tests.distributed.test_slurm import train; "
    here += f"train(pathlib.Path({str(folder)!r}), steps=30, pause_s={pause_s})"
    text = [
        "#!/bin/bash",
        "#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append",
        f"#SBATCH --output={folder}/out",
    ]
    text += [*lines, "export MASTER_ADDR=127.0.0.1", f'srun {sys.executable} -c "{here}"']
    folder.mkdir(exist_ok=True)
    (folder / "job.sh").write_text("\n".join(text))
    return str(folder / "job.sh")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Return the weights of the run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    launch(lambda: train(folder, steps=30, pause_s=0.0))
    weights: torch.Tensor = torch.load(folder / "end")[0]
    return weights


def ended(folder: Path, whole: torch.Tensor) -> list[int]:
    """Wait for the end of a job, compare its weights with those of the whole run, and return the steps at which it resumed."""
    until(lambda: (folder / "end").exists(), timeout_s=300)
    weights, resumed = torch.load(folder / "end")
    assert torch.equal(weights, whole)
    return list(resumed)


def test_a_job_that_another_preempts_saves_and_continues_when_it_gets_its_nodes_again(
    slurm: Callable[..., str], whole: torch.Tensor, tmp_path: Path
) -> None:
    job = slurm("sbatch", "--parsable", script(tmp_path / "low", pause_s=0.5)).strip()
    until((tmp_path / "low/begun").exists)
    slurm("sbatch", "--partition=high", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
    (step,) = ended(tmp_path / "low", whole)
    assert 0 < step < 30
    until(lambda: f"JobId={job}" in slurm("scontrol", "show", "job", job))
    assert "Restarts=1" in slurm("scontrol", "show", "job", job)


def test_a_signal_before_the_time_limit_saves_and_the_callback_requeues_the_job(
    slurm: Callable[..., str], whole: torch.Tensor, tmp_path: Path
) -> None:
    job = slurm("sbatch", "--parsable", script(tmp_path / "job", pause_s=0.5)).strip()
    until((tmp_path / "job/begun").exists)  # before, no handler stands, and the signal ends the process
    slurm("scancel", "--signal=USR1", f"{job}.0")  # as --signal=USR1@120 does
    (step,) = ended(tmp_path / "job", whole)
    assert 0 < step < 30
    assert "Restarts=1" in slurm("scontrol", "show", "job", job)
