"""The launch commands of the guide to several processes: torchrun accepts each of them, and their parts fit together.

Here no cluster is at hand; tests/distributed/test_slurm.py starts one of SLURM. The shell commands are executed in bash, with
programs in place of ``srun``, ``scontrol``, ``torchrun`` and ``python`` that start nothing. torchrun itself then parses the
arguments that it would get.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args

yaml = pytest.importorskip("yaml")  # it comes with the tools of the site
pytestmark = pytest.mark.skipif(
    not hasattr(LaunchConfig, "shutdown_timeout"), reason="the torchrun of this version of torch has no --shutdown-timeout"
)
GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
GUIDE = "\n".join((GUIDES / page).read_text(encoding="utf-8") for page in ("scale.md", "clusters.md"))
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
COMMANDS = [block for kind, block in BLOCKS if kind == "" and re.search(r"^(srun |torchrun )", block, re.MULTILINE)]
DOCUMENTS: dict[str, Any] = {
    document.get("kind", "SkyPilot"): document
    for kind, block in BLOCKS
    if kind == "yaml"
    for document in yaml.safe_load_all(block)
}
SET_BY_SLURM = {"SLURM_JOB_ID": "70123", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
SET_BY_KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}
SET_BY_SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NODE_RANK": "1",
}
PROGRAMS = {
    "srun": 'exec "$@"',
    "scontrol": '[ "$1 $2 $3" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"',
    "torchrun": "printf '%s\\n' torchrun \"$@\"",
    "python": 'echo "python $*"',
}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Return a folder of programs that print what they get."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def printed(commands: str, programs: Path, variables: dict[str, str]) -> list[str]:
    """Execute commands, of which none may fail; return the lines."""
    environment = {"PATH": f"{programs}:/usr/bin:/bin", **variables}
    done = subprocess.run(["bash", "-euc", commands], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def parsed(arguments: list[str], monkeypatch: pytest.MonkeyPatch, **variables: str) -> LaunchConfig:
    """Return what torchrun makes of arguments; an unknown one is an error. It starts ``train.py`` with none of its own."""
    for name, value in {"OMP_NUM_THREADS": "1", **variables}.items():
        monkeypatch.setenv(name, value)
    given = parse_args(arguments)
    assert (given.training_script, given.training_script_args) == ("train.py", [])
    config, _, _ = config_from_args(given)
    return config


def meeting(config: LaunchConfig) -> tuple[int, int, int, str, str, int | None]:
    """Return machines, processes on each, restarts, backend and address of the rendezvous, and the seconds for a shutdown."""
    assert config.min_nodes == config.max_nodes
    return (
        config.max_nodes,
        config.nproc_per_node,
        config.max_restarts,
        config.rdzv_backend,
        config.rdzv_endpoint if config.rdzv_backend == "c10d" else "",
        config.shutdown_timeout,
    )


def test_torchrun_accepts_the_commands_of_the_guide(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [printed(block, programs, SET_BY_SLURM) for block in COMMANDS]
    started = [lines[lines.index("torchrun") + 1 :] for lines in found if "torchrun" in lines]
    assert [meeting(parsed(arguments, monkeypatch)) for arguments in started] == [
        (1, 4, 0, "static", "", 30),
        (1, 4, 3, "static", "", 30),
        (2, 8, 3, "c10d", "HOST:29500", 30),
        (2, 8, 3, "c10d", "node1:29500", 90),
    ]
    assert ["python train.py"] in found


def test_the_signal_of_slurm_leaves_torchrun_more_time_than_its_shutdown(programs: Path) -> None:
    [header] = [block for block in COMMANDS if "#SBATCH --signal" in block]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", header, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"].startswith("TERM@")
    assert int(options["signal"].removeprefix("TERM@")) > 90


def test_the_parts_of_the_kubernetes_job_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    service, job = DOCUMENTS["Service"], DOCUMENTS["Job"]
    name, pod = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None"  # headless: pods have names in the network
    assert pod["subdomain"] == service["metadata"]["name"]
    [container] = pod["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}

    config = parsed(container["command"][1:], monkeypatch)
    pods, gpus = job["spec"]["completions"], container["resources"]["limits"]["nvidia.com/gpu"]
    assert job["spec"]["parallelism"] == pods
    assert meeting(config) == (pods, gpus, 3, "c10d", f"{name}-0.{pod['subdomain']}:29500", 90)
    assert config.shutdown_timeout < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("kind", ["Service", "Job"])
def test_the_manifests_have_the_schema_of_kubernetes(kind: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate brings the schemas")
    schemas.validate(DOCUMENTS[kind], "1.29", strict=True)
    with pytest.raises(schemas.ValidationError):
        schemas.validate({**DOCUMENTS[kind], "specification": {}}, "1.29", strict=True)


def test_the_variables_of_a_train_job_reach_torchrun(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = DOCUMENTS["TrainJob"]["spec"]["trainer"]
    assert trainer["command"] == ["sh", "-c"]
    [script] = trainer["args"]
    [_, *arguments] = printed(script, programs, SET_BY_KUBEFLOW)
    config = parsed(arguments, monkeypatch, **SET_BY_KUBEFLOW)
    nodes, processes = trainer["numNodes"], trainer["numProcPerNode"]
    assert processes == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert meeting(config) == (nodes, processes, 3, "c10d", "train-node-0-0.train:29500", 90)


def test_the_variables_of_skypilot_reach_torchrun(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = DOCUMENTS["SkyPilot"]
    [_, *arguments] = printed(task["run"], programs, SET_BY_SKYPILOT)
    processes = int(task["resources"]["accelerators"].partition(":")[2])
    assert meeting(parsed(arguments, monkeypatch)) == (task["num_nodes"], processes, 3, "c10d", "10.0.0.1:29500", 90)


def test_each_recipe_that_was_not_run_says_so() -> None:
    sections = dict(part.split("\n", 1) for part in GUIDE.split("\n### ")[1:])
    assert [name for name, text in sections.items() if "Not run here" in text] == [
        "Kubernetes",
        "Kubeflow",
        "SkyPilot",
    ]
