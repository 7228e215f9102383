"""The strategy of several processes that all run the same program."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Sequence

import jax
import keras
import numpy as np

from unisono._src.engine.exchange.gather_rows import get_row_gatherer
from unisono._src.engine.xla import runtime
from unisono._src.engine.xla.device_kind import DeviceKind, describe_device, has_native_kernels, list_kind_differences
from unisono._src.keras.fingerprint import fingerprint
from unisono._src.keras.ownership import WeakIdentitySet
from unisono._src.keras.private.data_adapters import get_random_seed
from unisono._src.keras.private.trainer_state import get_raw_value
from unisono._src.keras.strategy.base import Strategy
from unisono._src.keras.strategy.device_arguments import DeviceChoice, StrategyArguments, refuse_unknown_arguments
from unisono._src.keras.strategy.extended import ClusterResolver
from unisono._src.kernels.native.library import SWITCH
from unisono._src.near_names import refuses_by
from unisono._src.placement import Placement, ProcessPlacement, split_evenly
from unisono._src.processes.agreement import begin_agreement
from unisono._src.processes.environments.connect import connect_processes
from unisono._src.processes.watch.begin import begin_watch
from unisono._src.typing import Json
from unisono._src.versions import list_versions


class MultiWorkerMirroredStrategy(Strategy):
    """Replicas on all devices of all processes. Every process runs the same program.

    Args:
        coordinator: host:port at which process 0 listens. By default the address that the environment gives, as of
            `unisono launch`, TF_CONFIG, torchrun, Kubeflow, SkyPilot or Slurm; without any of them, this is the only process.
        processes: How many processes there are.
        process: The number of this process, from 0 on.
        devices: How many devices of this process to use, or which.
        replicas: R, the number of replicas. By default the number of devices of all processes.
        accumulate: R as a multiple of all devices.
        deterministic: As for all strategies.
        verify: As for all strategies, on the devices of each process; processes of one device each verify each other.
        shard: As for all strategies, over the devices of each process.
    """

    _example = "MultiWorkerMirroredStrategy(), and start the program by unisono launch or by the cluster's own tool"

    @refuses_by(refuse_unknown_arguments)
    def __init__(
        self,
        *,
        coordinator: str | None = None,
        processes: int | None = None,
        process: int | None = None,
        devices: DeviceChoice = None,
        replicas: int | None = None,
        accumulate: int | None = None,
        deterministic: bool = True,
        verify: float | None = None,
        shard: str | None = None,
    ) -> None:
        self._given = coordinator, processes, process
        self._wanted_verify = verify
        self._agreed = WeakIdentitySet()
        super().__init__(
            devices=devices, replicas=replicas, accumulate=accumulate, deterministic=deterministic, verify=verify, shard=shard
        )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """What is known of the processes."""
        return ClusterResolver(self.cluster.process, self.cluster.processes, self.cluster.coordinator)

    def _meet_others(self) -> None:
        self.cluster = connect_processes(*self._given)
        if self.cluster.processes > 1:
            begin_watch()
            self.agreement = begin_agreement(self.cluster.process, self.cluster.processes)
            set_random_state(self.agreement.of_first("the state of its generators", read_random_state))

    def _find(self, arguments: StrategyArguments) -> list[jax.Device]:
        return [device for device in super()._find(arguments) if device.process_index == jax.process_index()]

    def _place(self, devices: list[jax.Device], arguments: StrategyArguments) -> Placement:
        agreement = self.agreement
        if agreement.is_alone:
            return super()._place(devices, arguments)
        replicas = arguments.replicas
        if replicas is not None and replicas < self.cluster.processes:
            raise ValueError(
                f"MultiWorkerMirroredStrategy received replicas={replicas} in {self.cluster.processes} processes, each of which runs at least "
                f"one replica. Write replicas={self.cluster.processes} or more, or start fewer processes."
            )
        if replicas is not None and arguments.devices is None:
            devices = devices[: len(split_evenly(replicas, self.cluster.processes)[agreement.number])]
        ids_of_processes = agreement.gather_values("its devices", [device.id for device in devices])
        counts = tuple(map(len, ids_of_processes))
        agreement.check(list_common_settings(arguments, self._wanted_verify, self.shard))
        all_kinds = agreement.gather_values("the kind of its devices", describe_device(devices[0]))
        check_kernels_of_processes(all_kinds)
        if self.writes:
            warn_of_device_kinds(all_kinds)
        by_id = {device.id: device for device in jax.devices()}
        leads = tuple(by_id[ids[0]] for ids in ids_of_processes)
        processes = ProcessPlacement(agreement.number, leads, counts)
        return Placement(replicas or sum(counts) * (arguments.accumulate or 1), tuple(devices), processes)

    def agree(self, variables: list[keras.Variable]) -> None:
        """Give all processes the variables' values of process 0.

        Variables are refused if other processes have other structures.
        """
        new = list({id(variable): variable for variable in variables if variable not in self._agreed}.values())
        if self.agreement.is_alone or not self.agreement.is_true_in_any_process("new variables", bool(new)):
            return
        structure = [  # without names, which Keras numbers as it goes
            f"{tuple(variable.shape)} {variable.dtype} {'trainable' if variable.trainable else 'not trainable'}"
            for variable in new
        ]
        self.agreement.check({"the variables of the model": structure})
        prints = self.agreement.gather_values("the fingerprint of new variables", fingerprint(new))
        if len(set(prints)) > 1:
            self._take_from_first(new)
        for variable in new:
            self._agreed.add(variable)

    def _take_from_first(self, variables: list[keras.Variable]) -> None:
        """Give the variables the values of process 0."""
        if not self.agreement.is_first:
            warnings.warn(
                f"The variables of process {self.agreement.number} start from other values than those of process 0, which are taken. Where each "
                f"process sets a seed of its own, or reads weights of its own, let all do the same.",
                stacklevel=4,
            )
        of_first = get_row_gatherer(self.placement).of_first
        for variable in variables:
            mine = jax.device_put(jax.numpy.ravel(get_raw_value(variable)), self.placement.lead)
            variable.assign(of_first(mine).reshape(variable.shape))


def list_common_settings(arguments: StrategyArguments, verify: float | None, shard: str | None) -> dict[str, Json]:
    """List the settings that must be the same in all processes."""
    return {
        "replicas": arguments.replicas,
        "accumulate": arguments.accumulate,
        "verify": repr(verify),
        "shard": repr(shard),
        "the seed of keras.utils.set_random_seed": get_random_seed(),
        "the kind of devices": jax.default_backend(),
        "whether JAX has a single CPU thread": runtime.count_threads() < runtime.FEWEST_THREADS,
        "the version of Python": ".".join(map(str, sys.version_info[:2])),
    } | {f"the version of {name}": number for name, number in list_versions().items()}


def read_random_state() -> Json:
    """Read the state of the generators that seeds are drawn from.

    It is in JSON. None if the user has set a seed, which is the same in all processes.
    """
    if get_random_seed() is not None:
        return None
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), (kind, np.asarray(keys).tolist(), *rest)


def set_random_state(state: Json) -> None:
    if state is not None:
        (version, words, gauss), numpy_state = state
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(tuple(numpy_state))


def check_kernels_of_processes(kinds: Sequence[DeviceKind]) -> None:
    """Refuse processes that differ in native kernels. All must compute with them, or none."""
    for process, kind in enumerate(kinds):
        if has_native_kernels(kind) != has_native_kernels(kinds[0]):
            raise ValueError(
                f"Processes compute with different kernels: {kind['kernels']} in process {process}, {kinds[0]['kernels']} in process 0. Their "
                f"bits would differ. Start all processes with {SWITCH}=0, or install Unisono in the same way for each."
            )


def warn_of_device_kinds(kinds: Sequence[DeviceKind]) -> None:
    """Warn of processes on different kinds of devices. They may compute different bits from the same numbers."""
    for process, kind in enumerate(kinds):
        if said := list_kind_differences(kind, kinds[0], f"in process {process}", "in process 0"):
            warnings.warn(
                f"Processes run on devices of different kinds: {'; '.join(said)}. The bits of this training then depend on which process "
                f"runs which replica, and the weights of the processes may drift apart. Start all processes on machines of one kind.",
                stacklevel=7,
            )
            return
