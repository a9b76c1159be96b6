"""docs/cluster.md: every command line and file of it runs, with two processes here in place of two machines."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import config_from_args, parse_args

from minipar import cli
from minipar.cluster.launch import child_environment
from tests.pages import DOCS, blocks

PAGE = (DOCS / "cluster.md").read_text()
RESULT = re.compile(r"^20 steps, loss \d+\.\d+, on other rows \d+\.\d+$", re.MULTILINE)
RECORD = """
import json, os, sys
variables = {name: text for name, text in os.environ.items() if name.startswith("PET_")}
with open(f"{os.environ['RECORD']}/torchrun-{os.getpid()}.json", "w") as file:
    json.dump([sys.argv[1:], variables], file)
"""
OPTIONS = {  # of sbatch, in its manual
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "requeue", "mem", "partition",
    "account", "output", "error",
}  # fmt: skip

# What the definition of PyTorchJob, version v1 of kubeflow.org, allows at the places that the page uses.
POD = {
    "containers": [{
        "name": "pytorch", "image": str, "workingDir": str, "command": [str],
        "resources": {"limits": {"nvidia.com/gpu": int}}, "volumeMounts": [{"name": str, "mountPath": str}],
    }],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
}  # fmt: skip
JOB: dict[str, Any] = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": str},
    "spec": {
        "nprocPerNode": str,
        "elasticPolicy": {
            "rdzvBackend": str, "rdzvId": str, "rdzvPort": int, "rdzvHost": str, "minReplicas": int, "maxReplicas": int,
            "maxRestarts": int,
        },
        "runPolicy": dict,
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": int,
                "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
                "template": {"spec": POD},
            }
        },
    },
}  # fmt: skip


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def fits(value: Any, schema: Any, place: str = "") -> None:
    """Every part of a document is what the schema has at its place."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), place
        for key, part in value.items():
            assert key in schema, f"{place}.{key}"
            fits(part, schema[key], f"{place}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), place
        for part in value:
            fits(part, schema[0], f"{place}[]")
    elif isinstance(schema, set):
        assert value in schema, place
    elif isinstance(schema, type):
        assert type(value) is schema, place
    else:
        assert value == schema, place


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's script, a plan and a module; and with torchrun, srun and scontrol as commands. With the
    variable RECORD, a folder, torchrun only writes there how it was called."""
    ((_, script),) = blocks("cluster.md")
    assert script.startswith("# train.py\n")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "plan.toml").write_text("dp = 2\n")
    text = "from functools import partial\nfrom minipar import data, models\n\ndef build():\n"
    (tmp_path / "mine.py").write_text(
        text + '    return partial(models.build, "mlp-tiny"), data.for_model("mlp-tiny")\n'
    )
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "record.py").write_text(RECORD)
    python = shlex.quote(sys.executable)
    record = f'test -z "$RECORD" || exec {python} {tools / "record.py"} "$@"'
    for name, body in {
        "torchrun": f'{record}\nexec {python} -m torch.distributed.run "$@"',
        "scontrol": 'test "$*" = "show hostnames here[1-2]" && printf "localhost\\nlocalhost\\n"',
        # as srun does: the command once on each node, and the worst status of them
        "srun": 'test "$1" = --kill-on-bad-exit=1 || exit 9; shift; "$@" & first=$!; "$@"; other=$?; '
        "wait $first && exit $other",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    return tmp_path


def start(folder: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    environment = {**child_environment(), "OMP_NUM_THREADS": "1", **variables}
    environment["PATH"] = f"{folder / 'tools'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ended(*processes: subprocess.Popen[str]) -> str:
    """What processes have printed that ended well."""
    out = ""
    for process in processes:
        try:
            told, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            for one in processes:
                one.terminate()
            raise
        assert process.returncode == 0, err[-4000:]
        out += told
    return out


def meaning(words: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """What torchrun itself reads in its words and variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in (variables | {"OMP_NUM_THREADS": "1"}).items():
            patch.setenv(name, text)
        read, _, script = config_from_args(parse_args(words))
    return {
        "nodes": (read.min_nodes, read.max_nodes), "ranks": read.nproc_per_node, "backend": read.rdzv_backend,
        "endpoint": read.rdzv_endpoint, "id": read.run_id, "restarts": read.max_restarts, "script": script,
    }  # fmt: skip


def recorded(folder: Path) -> list[dict[str, Any]]:
    """What each call of torchrun means that was recorded in a folder."""
    return [meaning(*json.loads(path.read_text())) for path in folder.glob("torchrun-*.json")]


def like_several(endpoint: str, **others: Any) -> dict[str, Any]:
    """What the page's line for several machines means, which a test runs, with other values."""
    words = shlex.split(command_lines()[2].replace("HOST:29500", endpoint))
    return meaning(words[1:], {}) | others


def command_lines() -> list[str]:
    return [line for block in fenced("console") for line in block.splitlines()]


def test_the_page_has_these_command_lines() -> None:
    assert [line.split()[0] for line in command_lines()] == ["torchrun"] * 3


@pytest.mark.slow
def test_python_and_torchrun_run_the_script_and_print_the_same(folder: Path, pytestconfig: pytest.Config) -> None:
    """Python runs it, and each line tells torchrun to start it on these ranks. With --thorough torchrun does so, for
    several machines with two that share no memory; else tests/cluster/test_launched.py alone starts such launches."""
    local = ended(start(folder, [sys.executable, "train.py"]))
    assert len(RESULT.findall(local)) == 1
    lines = [shlex.split(command_lines()[k].replace("HOST:29500", f"localhost:{port()}")) for k in (0, 2)]
    for words, nodes, ranks in zip(lines, (1, 2), (2, 1), strict=True):
        ended(start(folder, words, RECORD=str(folder)))
        (told,) = recorded(folder)
        assert (told["nodes"], told["ranks"], told["script"]) == ((nodes, nodes), ranks, ["-u", "train.py"])
        (file,) = folder.glob("torchrun-*.json")
        file.unlink()
    assert told["backend"] == "c10d"
    if pytestconfig.getoption("--thorough"):
        under = ended(start(folder, lines[0]))
        several = ended(*(start(folder, lines[1], MINIPAR_HOST=name) for name in ("a", "b")))
        for out in (under, several):
            assert RESULT.findall(out) == RESULT.findall(local)  # the same numbers, printed once


@pytest.mark.slow
def test_the_command_line_runs_a_plan_of_a_file(
    folder: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What torchrun starts is run in this process, on local ranks; and with --thorough by torchrun. (A command line
    under torchrun is run by tests/cluster/test_launched.py, too.)"""
    words = shlex.split(command_lines()[1])
    if pytestconfig.getoption("--thorough"):
        out = ended(start(folder, words))
    else:
        ended(start(folder, words, RECORD=str(folder)))
        (told,) = recorded(folder)
        assert (told["nodes"], told["ranks"]) == ((1, 1), 2)
        assert told["script"][:4] == ["-u", "-m", "minipar", "run"]
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])  # as -m has it
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        assert cli.main(told["script"][3:]) == 0
        out = capsys.readouterr().out
    assert out.count("step time") == 1
    assert (folder / "runs/second/minipar.json").exists()


def test_the_batch_file_has_options_that_sbatch_knows() -> None:
    (text,) = fenced("bash")
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert len(options) == text.count("#SBATCH")
    assert {name for name, _ in options} <= OPTIONS
    assert dict(options)["ntasks-per-node"] == "1"  # torchrun starts the ranks of a node


# (Run to its end with --thorough; else it must start what the line for several machines starts.)
def test_the_batch_file_runs(folder: Path, pytestconfig: pytest.Config) -> None:
    (text,) = fenced("bash")
    (folder / "train.sbatch").write_text(text)
    free = port()
    variables = {"SLURM_JOB_NODELIST": "here[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "4711"}
    variables |= {"RANKS_PER_NODE": "1", "PORT": str(free)}
    ended(start(folder, ["bash", "train.sbatch"], RECORD=str(folder), **variables))
    assert recorded(folder) == [like_several(f"localhost:{free}", id="4711", restarts=3)] * 2
    if pytestconfig.getoption("--thorough"):
        assert len(RESULT.findall(ended(start(folder, ["bash", "train.sbatch"], **variables)))) == 1


def test_the_manifest_fits_the_definition_of_a_job() -> None:
    (text,) = fenced("yaml")
    job = yaml.safe_load(text)
    fits(job, JOB)
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


# (Run to its end with --thorough, as the batch file.)
def test_the_pods_of_the_manifest_run(folder: Path, pytestconfig: pytest.Config) -> None:
    (text,) = fenced("yaml")
    spec = yaml.safe_load(text)["spec"]
    policy, free = spec["elasticPolicy"], port()
    told = {  # as the operator tells torchrun
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}", "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_BACKEND": policy["rdzvBackend"], "PET_RDZV_ENDPOINT": f"localhost:{free}",
        "PET_RDZV_ID": policy["rdzvId"], "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }  # fmt: skip
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]

    def pods(**variables: str) -> str:
        command = container["command"]
        return ended(*(start(folder, command, MINIPAR_HOST=name, **told, **variables) for name in ("a", "b")))

    pods(RECORD=str(folder))
    assert recorded(folder) == [like_several(f"localhost:{free}", restarts=3)] * 2
    if pytestconfig.getoption("--thorough"):
        assert len(RESULT.findall(pods())) == 1
