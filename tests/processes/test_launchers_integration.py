"""Launchers of others, really started: two processes of each have the bits of one. Where a launcher is not installed, its test is skipped."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from processes import HERE, environment, free_port
from train_under_launcher import check_bits

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SCRIPT = str(HERE / "train_under_launcher.py")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "processes.md"
LIMIT = 240.0
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
"""Where Debian has daemons."""


def need(package: str, *commands: str) -> list[str]:
    """Return the paths of the commands of a package of Debian; skip the test where it is not installed."""
    found = [shutil.which(command, path=PATH) for command in commands]
    if None in found:
        pytest.skip(f"{commands[found.index(None)]} is not installed: apt-get install --no-install-recommends {package}")
    return [path for path in found if path]


def run(*command: str, folder: pathlib.Path, **extra: str) -> str:
    """Run a command to its end, and return what it has printed."""
    env = environment(JAX_PLATFORMS="cpu", **extra)
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.compat
def test_torchrun(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed, which has torchrun")
    check_bits(
        run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, folder=tmp_path)
    )


def test_open_mpi(tmp_path):
    (mpirun,) = need("openmpi-bin", "mpirun")
    check_bits(run(mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, SCRIPT, folder=tmp_path))


CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
MpiDefault=none
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
KillWait=2
SelectType=select/cons_tres
SlurmdParameters=config_overrides
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=localhost Default=YES
"""


@contextlib.contextmanager
def running(folder: pathlib.Path, *command: str) -> Iterator[None]:
    """Run a daemon in the foreground, as a child of this process."""
    with (folder / f"{pathlib.Path(command[0]).name}.txt").open("w") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def wait_for(answer: str, *command: str, folder: pathlib.Path, limit: float = 30, **env: str) -> None:
    """Wait until a command says something."""
    end = time.monotonic() + limit
    while True:
        said = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
        if re.search(answer, said.stdout):
            return
        logs = [path.read_text()[-500:] for path in folder.glob("*.txt")]
        assert time.monotonic() < end, "\n".join([said.stdout, said.stderr, *logs])
        time.sleep(0.5)


@pytest.fixture
def slurm_conf(tmp_path) -> Iterator[str]:
    """The configuration of a cluster of one node, which belongs to the test."""
    munged, munge = need("munge", "munged", "munge")
    slurmctld, slurmd, sinfo, squeue, scancel = need("slurm-wlm", "slurmctld", "slurmd", "sinfo", "squeue", "scancel")
    folder = tmp_path / "slurm"
    for made in (folder, folder / "state", folder / "spool"):
        made.mkdir(mode=0o755)
    key, socket = folder / "munge.key", folder / "munge.socket"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(controller_port=free_port(), node_port=free_port(), user=getpass.getuser(), folder=folder))
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    with (
        running(folder, munged, "--foreground", "--force", f"--socket={socket}", *files),
        running(folder, slurmctld, "-D", "-f", str(conf)),
        running(folder, slurmd, "-D", "-f", str(conf), "-N", "localhost"),
    ):
        wait_for("MUNGE:", munge, f"--socket={socket}", "--no-input", folder=folder)
        wait_for("idle", sinfo, "--noheader", "--format=%T", folder=folder, SLURM_CONF=str(conf))
        yield str(conf)
        subprocess.run([scancel, f"--user={getpass.getuser()}"], env=os.environ | {"SLURM_CONF": str(conf)}, check=False)
        # Daemons that end leave the processes of a job behind.
        wait_for(r"\A\Z", squeue, "--noheader", folder=folder, SLURM_CONF=str(conf))


def test_slurm(tmp_path, slurm_conf):
    """The script of the page. The first run leaves by a signal, and the script puts the job into the queue again."""
    script = re.findall(r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    for there, instead in (
        ("--nodes=2", "--nodes=1"),
        ("--ntasks-per-node=4", "--ntasks-per-node=2"),
        ("#SBATCH --gpus-per-node=4\n", ""),
        (".venv/bin/python train.py", f"{sys.executable} {SCRIPT} backup"),
    ):
        assert there in script
        script = script.replace(there, instead)
    (tmp_path / "train.sbatch").write_text(script)
    sbatch, scontrol = need("slurm-wlm", "sbatch", "scontrol")
    job = run(sbatch, "--parsable", "--output=printed.txt", "train.sbatch", folder=tmp_path, SLURM_CONF=slurm_conf).strip()
    wait_for("JobState=(COMPLETED|FAILED)", scontrol, "show", "job", job, folder=tmp_path, limit=LIMIT, SLURM_CONF=slurm_conf)
    check_bits((tmp_path / "printed.txt").read_text(), restarts="1")
