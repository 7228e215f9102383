"""The memory of a script's training. The script runs in a fresh process, up to its first step."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from unisono._src.processes import names

INSPECTOR = "unisono._src.tools.memory.inspector"
"""The module that inspects the step, in the script's process."""


class ScriptError(Exception):
    """A script without a step whose memory can be told."""


def ask_script(program: Sequence[str], replicas: Sequence[int]) -> dict[str, Any]:
    """Run a script up to its first step, and give the report of its memory with its table."""
    with tempfile.TemporaryDirectory(prefix="unisono-memory-") as folder:
        path = pathlib.Path(folder) / "report.json"
        ours = {
            names.INSPECTOR: INSPECTOR,
            names.MEMORY_REPORT: str(path),
            names.MEMORY_REPLICAS: ",".join(map(str, replicas)),
        }
        code = subprocess.run([sys.executable, *program], env={**os.environ, **ours}, stdout=sys.stderr, check=False).returncode
        if not path.exists():
            raise ScriptError(
                f"the script ended with exit code {code} before the first step of a fit or train_on_batch of a model that was made in the scope "
                f"of a strategy. unisono memory tells the memory of such a step."
            )
        return json.loads(path.read_text(encoding="utf-8"))
