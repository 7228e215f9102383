"""The certificates of docs/processes.md, on loopback: processes that show them train together, and others are kept out."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from processes import HERE, environment, free_port, wait_for_all
from sizes import slow
from train_under_launcher import check_bits
from unisono._src.processes.environments.connect import has_certificates

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not has_certificates(), reason="JAX 0.12 or newer connects processes by certificates"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]
PAGE = HERE.parents[1] / "docs/processes.md"
LIMIT = 180.0
SECONDS = "6"
CONNECT = """
import sys
from unisono._src.processes.environments.connect import connect_processes
connect_processes(*map(eval, sys.argv[1:4]), timeout=int(sys.argv[4]))
print("connected")
"""


def run_commands(folder: pathlib.Path, launches: bool) -> str:
    """Runs the commands of the page, and returns what they print: with the last one that of a training, else the variables."""
    (commands,) = re.findall(r"```bash\n(openssl .*?)```", PAGE.read_text(), re.DOTALL)
    before, launch, after = commands.partition("unisono launch")
    script = f"{before}{sys.executable} -m {launch}{after}" if launches else f"{before}env"
    done = subprocess.run(
        ["bash", "-euc", script], cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def make_certificates(folder: pathlib.Path) -> dict[str, str]:
    printed = run_commands(folder, launches=False)
    return dict(line.split("=", 1) for line in printed.splitlines() if line.startswith("JAX_MTLS_"))


def test_processes_with_certificates_train_together(tmp_path):
    (tmp_path / "train.py").symlink_to(HERE / "train_under_launcher.py")
    check_bits(run_commands(tmp_path, launches=True))


def start(port: int, process: int, certificates: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONNECT, f"'127.0.0.1:{port}'", "2", str(process), SECONDS]
    env = environment(JAX_PLATFORMS="cpu", **certificates)
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("shown", ["nothing", *slow("a certificate of another authority")])
def test_a_process_without_a_certificate_is_kept_out(tmp_path, shown):
    """Neither can do anything without the other, and each says so. The first one says that it expects certificates."""
    folders = [tmp_path / "ours", tmp_path / "theirs"]
    for folder in folders:
        os.mkdir(folder)
    port, ours = free_port(), make_certificates(folders[0])
    theirs = {} if shown == "nothing" else make_certificates(folders[1])
    processes = [start(port, process, certificates) for process, certificates in enumerate([ours, theirs])]
    done = wait_for_all(processes, LIMIT)
    assert [process.returncode for process in processes] == [1, 1]
    assert [out for out, _ in done] == ["", ""]
    lines = [err.splitlines()[-1] for _, err in done]
    waited = "unisono: process {} of 2 waited 6 seconds for the others at 127.0.0.1:{} (the program said so). "
    for process, line in enumerate(lines):
        assert line.startswith(waited.format(process, port))
    assert lines[0].endswith(
        "Not all have come. This process talks only to processes that show a certificate: each needs JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE "
        "and JAX_MTLS_CA_FILE of one authority, and that of process 0 must name this address."
    )
