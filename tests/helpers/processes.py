"""Fresh processes, as a user's would be: nothing of the test process' settings in them."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import quick_compiling

LAUNCH = (sys.executable, "-m", "unisono", "launch")
HERE = pathlib.Path(__file__).parent
FULL = "full" in (os.environ.get("UNISONO_MATRIX"), os.environ.get("UNISONO_SOAK"))
LIMIT = 3600.0 if FULL else 300.0
"""Seconds for a process; the long runs may be on a slow or loaded machine."""


LEFT_OUT = [] if importlib.util.find_spec("tensorflow") else [str(HERE / "left_out")]
"""Modules in it are not found: scikit-learn, matplotlib and requests. Keras imports them where they are, in two fifths of the start of a process.
TensorFlow needs requests."""


FOR_USERS = {"XLA_FLAGS": ""}
"""For the environment of a process that compiles as a user's does, also in `make test`."""


def environment(**extra: str) -> dict[str, str]:
    """The environment without what the test process has set for itself. XLA compiles quickly if it does so in the test process."""
    ours = ("PJRT_NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTEST_CURRENT_TEST", "UNISONO_TRACEBACK")
    path = os.pathsep.join([*LEFT_OUT, *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    flags = {"XLA_FLAGS": quick_compiling.format_flags()} if quick_compiling.is_wanted() else {}
    return kept | flags | {"KERAS_BACKEND": "jax", "PYTHONPATH": path} | extra


def kept_in(folder: pathlib.Path) -> dict[str, str]:
    """For an environment: processes load what earlier ones have compiled. Not for tests of whether code that is compiled again is the same."""
    return {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def python(*args: str, timeout: float = LIMIT, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a fresh process and waits for it."""
    return subprocess.run(
        [sys.executable, *args], env=environment(**extra), capture_output=True, text=True, timeout=timeout, cwd=HERE, check=False
    )


def user_python(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python as `python` does, finds all modules, and compiles as users do: for examples, and for other programs of users."""
    return python(*args, PYTHONPATH=os.environ.get("PYTHONPATH", ""), **{**FOR_USERS, **options})


def train(devices: int, replicas: int, families: list[str], **options: Any) -> dict[str, Any]:
    """Trains families in a fresh process with so many devices; the fingerprints and histories by family."""
    spec = {"devices": devices, "replicas": replicas, "families": families, **options}
    done = python(str(HERE / "train_and_print.py"), json.dumps(spec))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def wait_for_all(processes: Sequence[subprocess.Popen[str]], limit: float) -> list[tuple[str, str]]:
    """Wait until all processes end, and return what each has written: (output, errors). None is left."""
    try:
        return [process.communicate(timeout=limit) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return a port of the loopback that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def are_gone(pids: Iterable[int]) -> bool:
    """Return whether all processes end within seconds: a killed process takes a moment."""
    end = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(is_alive, pids))
