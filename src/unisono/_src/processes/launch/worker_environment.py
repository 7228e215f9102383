"""The environment of each worker: its rank and its devices."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping

from unisono._src.placement import split_evenly
from unisono._src.processes import names
from unisono._src.processes.environments.precedence import AGREEING_VARIABLES

LOOPBACK = "127.0.0.1"
GPUS = pathlib.Path("/proc/driver/nvidia/gpus")
GPU_PREFIXES = ("GPU-", "MIG-")
"""The beginnings of GPU names that are not numbers."""
FORCED_COUNT = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(frozen=True)
class WorkerDevices:
    """The devices that every process gets."""

    per_process: int | None
    """None leaves CPU devices to the program, and divides all GPUs."""
    cpu: bool
    """JAX runs on CPU, even if it would find other devices."""
    gpus: tuple[str, ...] = ()
    """The names of the GPUs of this machine, as CUDA_VISIBLE_DEVICES spells them."""

    def make_variables(self, process: int, processes: int) -> dict[str, str]:
        """Build the variables by which JAX finds one process' devices."""
        if self.gpus and not self.cpu:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self._select_gpus(process, processes))}
        variables = {} if self.per_process is None else {"JAX_NUM_CPU_DEVICES": str(self.per_process)}
        return variables | ({"JAX_PLATFORMS": "cpu"} if self.cpu else {})

    def _select_gpus(self, process: int, processes: int) -> tuple[str, ...]:
        """Choose the contiguous GPUs of one process. If they cannot be divided evenly, the first processes have one more."""
        count = len(self.gpus)
        if self.per_process is not None and processes * self.per_process > count:
            raise ValueError(
                f"{processes} processes with {self.per_process} devices each need {processes * self.per_process} GPUs, and there are "
                f"{count}: {','.join(self.gpus)}. Write fewer, or --cpu."
            )
        if processes > count:
            raise ValueError(
                f"{processes} processes cannot share {count} GPUs: {','.join(self.gpus)}. Write --processes {count} or fewer, or --cpu."
            )
        positions = split_evenly(count if self.per_process is None else processes * self.per_process, processes)[process]
        return self.gpus[positions.start : positions.stop]


def list_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """List the GPUs that the environment leaves visible.

    Without CUDA_VISIBLE_DEVICES, these are all that NVIDIA's driver lists. Nothing is started on them.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    there = len(list(GPUS.iterdir())) if GPUS.is_dir() else None
    return tuple(map(str, range(there or 0))) if visible is None else parse_visible_gpus(visible, there)


def parse_visible_gpus(visible: str, there: int | None) -> tuple[str, ...]:
    """Split CUDA_VISIBLE_DEVICES into the names that CUDA sees.

    These are the names before the first invalid one, and none if one is repeated. `there` is the number of GPUs of this machine; None if
    unknown.

    >>> parse_visible_gpus("0,-1,1", None), parse_visible_gpus("1,0,2", 2), parse_visible_gpus("0,0", None)
    (('0',), ('1', '0'), ())
    """
    names = [name.strip() for name in visible.split(",")]
    seen = tuple(itertools.takewhile(lambda name: is_gpu_name(name, there), names))
    return seen if len(set(seen)) == len(seen) else ()


def is_gpu_name(name: str, there: int | None) -> bool:
    return name.startswith(GPU_PREFIXES) or (name.isdecimal() and (there is None or int(name) < there))


def make_worker_environment(
    base: Mapping[str, str], process: int, processes: int, port: int, devices: WorkerDevices, restarts: int, bound: float
) -> dict[str, str]:
    """Build the whole environment of one process."""
    coordinator = f"{LOOPBACK}:{port}"
    device_variables = devices.make_variables(process, processes)
    variables = {
        name: value for name, value in base.items() if name not in AGREEING_VARIABLES
    }  # they name other processes than the launched ones
    if "JAX_NUM_CPU_DEVICES" in device_variables and FORCED_COUNT in variables.get("XLA_FLAGS", ""):
        variables["XLA_FLAGS"] = " ".join(flag for flag in variables["XLA_FLAGS"].split() if not flag.startswith(FORCED_COUNT))
    if any(
        base.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")
    ):  # gRPC would look for the coordinator behind it
        exceptions = base.get("no_grpc_proxy") or base.get("no_proxy")
        variables["no_grpc_proxy"] = f"{exceptions},{LOOPBACK}" if exceptions else LOOPBACK
        variables["JAX_CHECK_PROXY_ENVS"] = "0"  # or JAX would warn of it
    return variables | device_variables | {
        "KERAS_BACKEND": "jax",
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # JAX listens on all interfaces otherwise
        names.COORDINATOR: coordinator,
        names.PROCESSES: str(processes),
        names.PROCESS: str(process),
        names.RESTARTS: str(restarts),
        names.BOUND: f"{bound:g}",
    }  # fmt: skip
