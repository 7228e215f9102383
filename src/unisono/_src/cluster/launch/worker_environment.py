"""What the environment says to each of the processes: who it is, and which devices are its own."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from unisono._src.placement import split_evenly
from unisono._src.processes import names

LOOPBACK = "127.0.0.1"
GPUS = pathlib.Path("/proc/driver/nvidia/gpus")
FORCED_COUNT = "--xla_force_host_platform_device_count"
OF_OTHERS = ("TF_CONFIG",)
"""They name other processes than those that are launched."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """What every process is to have.

    Args:
        per_process: How many devices; None leaves CPU devices to the program, and divides all GPUs.
        cpu: Whether JAX is to run on CPU where it would find something else.
        gpus: The names of the GPUs of this machine, as CUDA_VISIBLE_DEVICES has them.
    """

    per_process: int | None
    cpu: bool
    gpus: tuple[str, ...] = ()

    def of(self, process: int, processes: int) -> dict[str, str]:
        """The variables by which JAX finds the devices of one process."""
        if self.cpu or not self.gpus:
            made = {} if self.per_process is None else {"JAX_NUM_CPU_DEVICES": str(self.per_process)}
            return made | ({"JAX_PLATFORMS": "cpu"} if self.cpu else {})
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._share(process, processes))}

    def _share(self, process: int, processes: int) -> tuple[str, ...]:
        """A contiguous one; of GPUs that cannot be divided evenly, the first processes have one more."""
        if self.per_process is not None:
            needed = processes * self.per_process
            if needed > len(self.gpus):
                raise ValueError(
                    f"{processes} processes with {self.per_process} devices each need {needed} GPUs, and there are {len(self.gpus)}: "
                    f"{','.join(self.gpus)}. Write fewer, or --cpu."
                )
            return self.gpus[process * self.per_process : (process + 1) * self.per_process]
        if processes > len(self.gpus):
            raise ValueError(
                f"{processes} processes cannot share {len(self.gpus)} GPUs: {','.join(self.gpus)}. Write --processes {len(self.gpus)} or "
                f"fewer, or --cpu."
            )
        share = split_evenly(len(self.gpus), processes)[process]
        return self.gpus[share.start : share.stop]


def gpus_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Those that the environment leaves visible, or all that NVIDIA's driver has; asking starts nothing on them."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    return tuple(str(number) for number in range(len(list(GPUS.iterdir())))) if GPUS.is_dir() else ()


def environment_of(
    base: Mapping[str, str], process: int, processes: int, port: int, devices: Devices, restarts: int, bound: float
) -> dict[str, str]:
    """The whole environment of one process."""
    coordinator = f"{LOOPBACK}:{port}"
    kept = {name: value for name, value in base.items() if name not in OF_OTHERS}
    own_devices = devices.of(process, processes)
    if "JAX_NUM_CPU_DEVICES" in own_devices and FORCED_COUNT in kept.get("XLA_FLAGS", ""):
        kept["XLA_FLAGS"] = " ".join(flag for flag in kept["XLA_FLAGS"].split() if not flag.startswith(FORCED_COUNT))
    return (
        kept
        | without_proxies(kept)
        | own_devices
        | {
            "KERAS_BACKEND": "jax",
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_COORDINATOR_BIND_ADDRESS": coordinator,  # JAX listens on all interfaces otherwise
            names.COORDINATOR: coordinator,
            names.PROCESSES: str(processes),
            names.PROCESS: str(process),
            names.RESTARTS: str(restarts),
            names.BOUND: f"{bound:g}",
        }
    )


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """gRPC would look for the coordinator behind a proxy, and JAX warn of that."""
    if not any(environment.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        return {}
    already = environment.get("no_grpc_proxy") or environment.get("no_proxy")
    return {"no_grpc_proxy": f"{already},{LOOPBACK}" if already else LOOPBACK, "JAX_CHECK_PROXY_ENVS": "0"}
