"""Verification: now and then one replica's contribution is computed again on another device, and must have the same bits.

A contribution has the same bits on every device. So a difference is a fault of a device, and never rounding: a third run tells which device is
at fault, and the step is finished with the right contribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from unisono._src.digest import digest_array
from unisono._src.packing import PackedTree
from unisono._src.placement import Placement
from unisono._src.step.plan import BatchPlan
from unisono._src.typed_jax import device_put, jit
from unisono._src.typing import Array

RunOn: TypeAlias = Callable[[int], PackedTree]
"""Computes the contribution on a device, given by its index."""


class DeviceFaultError(RuntimeError):
    """A device computed something else than another one. The step was finished with the right values where it is known which they are."""


class VerifiedReplica(NamedTuple):
    """The replica that a step verifies, and where."""

    step: int
    replica: int
    owner: int
    """The index of the device whose contribution counts."""
    other: int
    """The index of the device that computes it again."""


class Verdict(NamedTuple):
    """What the runs of a contribution have told."""

    right: PackedTree
    """The contribution with which the step goes on."""
    faulty: int | None
    """The index of the device at fault; None where the runs cannot tell."""
    repeats: bool
    """Whether the device at fault computed something wrong once more."""


class Verification:
    """Which steps and replicas are verified: a function of the step's number, so that it is the same in a run that is resumed."""

    def __init__(self, rate: float, placement: Placement) -> None:
        """`rate` of all steps are verified."""
        self._rate = Fraction(rate).limit_denominator(10**6)
        self._placement = placement

    def steps_until_due(self, step: int) -> int:
        """Return how many steps from this one on are not verified."""
        verified = math.floor((step) * self._rate)
        return max(0, math.ceil((verified + 1) / self._rate) - 1 - step)

    def choose(self, step: int, batch_plan: BatchPlan) -> VerifiedReplica:
        """Return the replica of a step that is verified, one after another, and the devices, of which the second one changes too."""
        turn = math.floor((step + 1) * self._rate)
        shards = [
            (shard.replica, part.device) for part in batch_plan.parts for shard in batch_plan.shards if shard.leaf in part.span
        ]
        replica, owner = shards[turn % len(shards)]
        devices = len(self._placement.devices)
        others = [(owner + distance) % devices for distance in range(1, devices)]
        return VerifiedReplica(step, replica, owner, others[turn // len(shards) % len(others)] if others else owner)

    def judge(self, verified: VerifiedReplica, first: PackedTree, run_on: RunOn) -> tuple[PackedTree, DeviceFaultError | None]:
        """Return the contribution with which the step goes on, and the error to raise when it is finished."""
        second = run_on(verified.other)
        if digest_contribution(first) == digest_contribution(second):
            return first, None
        verdict = self._find_fault(verified, first, second, run_on)
        lead = self._placement.devices[verified.owner]
        return device_put(verdict.right, lead), DeviceFaultError(self._describe(verified, verdict))

    def _find_fault(self, verified: VerifiedReplica, first: PackedTree, second: PackedTree, run_on: RunOn) -> Verdict:
        owner, other = verified.owner, verified.other
        thirds = [index for index in range(len(self._placement.devices)) if index not in (owner, other)]
        by_digest = {digest_contribution(first): first, digest_contribution(second): second}
        wrong, right = digest_contribution(first), digest_contribution(second)
        faulty: int | None = None
        for judge in thirds[:1] or [owner, other]:  # two devices: that one is at fault whose second run differs from its first
            third = digest_contribution(run_on(judge))
            if third == right and judge != other:
                faulty = owner
            elif third == wrong and judge != owner:
                faulty, wrong, right = other, right, wrong
            if faulty is not None:
                repeats = judge != faulty and digest_contribution(run_on(faulty)) != right
                return Verdict(by_digest[right], faulty, repeats)
        return Verdict(first, None, repeats=True)

    def _describe(self, verified: VerifiedReplica, verdict: Verdict) -> str:
        owner, other = (self._name_device(index) for index in (verified.owner, verified.other))
        what = f"the contribution of replica {verified.replica} to step {verified.step}"
        if verdict.faulty is None:
            return (
                f"{owner} and {other} compute {what} with other bits, and each repeats its own: one of them is at fault, and two devices cannot "
                f"tell which. The step was finished with that of {owner}: do not go on from here. Run `unisono doctor` on each, and go on from "
                f"the last checkpoint without the one that parts."
            )
        right = other if verdict.faulty == verified.owner else owner
        again = (
            "It computes wrong bits again: leave this device out (devices=), and go on."
            if verdict.repeats
            else "It does not repeat there. If it comes again on this device, leave the device out (devices=)."
        )
        return (
            f"{self._name_device(verdict.faulty)} is at fault: it computed {what} with other bits than {right}, and a third run has those of "
            f"{right}. {again} The step was finished with the right contribution, so the state is whole; steps since the last verified one "
            f"were not looked at."
        )

    def _name_device(self, index: int) -> str:
        device = self._placement.devices[index]
        return f"Device {device.id} ({device}) of process {device.process_index}"


@jit
def digest_vectors(vectors: Sequence[Array]) -> list[Array]:
    return [digest_array(vector) for vector in vectors]


def digest_contribution(contribution: PackedTree) -> tuple[tuple[int, ...], ...]:
    """Return the digest of each vector, which is waited for."""
    digests: list[Array] = jax.device_get(digest_vectors([contribution[name] for name in sorted(contribution)]))
    return tuple(tuple(np.asarray(digest).tolist()) for digest in digests)
