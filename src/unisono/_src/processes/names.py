"""Environment variables and exit codes. By them the commands and the processes that they start speak to each other."""

from __future__ import annotations

import os

COORDINATOR = "UNISONO_COORDINATOR"
"""host:port at which process 0 listens."""

PROCESSES = "UNISONO_PROCESSES"
"""The number of processes."""

PROCESS = "UNISONO_PROCESS"
"""The number of this process, counted from 0."""

RESTARTS = "UNISONO_RESTARTS"
"""How often the launcher has started the program again; 0 at first."""

BOUND = "UNISONO_BOUND"
"""Seconds within which a lost process is named and the others end."""

DEVICES = "UNISONO_DEVICES"
"""The number of devices of each process. It overrides the strategies' own."""

REPLICAS = "UNISONO_REPLICAS"
"""R. It overrides the strategies' own."""

SHARED_MEMORY = "UNISONO_SHARED_MEMORY"
"""0: processes of one machine send their sums as messages too."""

OTHER_PROGRAMS = "UNISONO_OTHER_PROGRAMS"
"""Whether processes may trace different programs. An audit or a replay records what it runs, and an audit shows the line."""

REPLAY_STEP = "UNISONO_REPLAY_STEP"
"""The step that the process replays, counted from 0."""

INSPECTOR = "UNISONO_INSPECTOR"
"""The module whose `make_inspector(strategy, function)` makes the inspector of the process."""

REPLAY_REPORT = "UNISONO_REPLAY_REPORT"
"""The file for what the inspector of a replay sees."""

REPLAY_PROMPT = "UNISONO_REPLAY_PROMPT"
"""Whether the inspector of a replay opens a prompt before the step is run."""

MEMORY_REPORT = "UNISONO_MEMORY_REPORT"
"""The file for the report of `unisono memory`."""

MEMORY_REPLICAS = "UNISONO_MEMORY_REPLICAS"
"""The numbers of replicas that `unisono memory` asks for, with commas between them; empty for its default."""

DEFAULT_BOUND = 30.0

LEFT_ON_REQUEST = 75
"""The exit code of a training that was asked to stop and saved itself."""

LOST = 76
"""The exit code of a process that ended because it lost another one."""

STUCK = 70
"""The exit code of a process that was stuck or stopped. It learns that the others have given it up."""


def get_replayed_step() -> int | None:
    """Read the replayed step, counted from 0. None if this process replays none."""
    text = os.environ.get(REPLAY_STEP, "")
    return int(text) if text else None
