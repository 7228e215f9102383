"""Steps that are whole in one call, which takes several of them. Several devices add up inside of it."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

from unisono._src.engine.device_mesh import DeviceMesh
from unisono._src.engine.exchange.in_program import DeviceGroups
from unisono._src.engine.global_batch import GlobalBatch
from unisono._src.engine.step.call_inputs import CallOrders, Orders
from unisono._src.engine.step.parted_steps import CallOutcome, take_logs
from unisono._src.engine.step.plan import BatchPlan, Round
from unisono._src.engine.step.program_calls import ProgramCalls
from unisono._src.engine.step.run_outputs import RunOutput


class WholeSteps:
    """Whole steps on the devices of a placement."""

    def __init__(self, mesh: DeviceMesh, call: ProgramCalls) -> None:
        self._mesh = mesh
        self._call = call
        self._groups = DeviceGroups()
        self._rounds: dict[Hashable, Round | None] = {}

    def decide(self, batch: GlobalBatch, batch_plan: BatchPlan) -> Round | None:
        """Decide by which call whole steps of such batches are run. None if a step needs several.

        It is decided before steps begin: it selects a kind of steps, and a step that is open would end by the program of this kind.
        """
        key = batch.rows, batch.sizes, batch.signature
        if key not in self._rounds:
            whole = batch_plan.whole
            fits = whole is not None and len(whole.runs) == self._mesh.size  # a device that is named twice has two subtrees
            self._rounds[key] = whole if fits and self._call.adds_up(batch, batch_plan) else None
        return self._rounds[key]

    def run(self, group: Sequence[GlobalBatch], batch_plan: BatchPlan, whole: Round) -> CallOutcome:
        """Run the steps of a group in one call."""
        phases = self._call.prepare(group[0], batch_plan)
        devices = self._groups.find(batch_plan.leaves, batch_plan.layers[0].nodes)
        done = self._call(group, whole, order_whole(whole, len(group), phases, devices))
        return CallOutcome(take_logs(self._mesh, done), [RunOutput(self._mesh, whole.runs, done.outputs)], done.digests)


@functools.lru_cache(maxsize=256)
def order_whole(round_: Round, steps: int, phases: int, group: int) -> Orders:
    """Build each device's orders for whole steps. The devices add up in `group`."""
    return tuple(
        (
            CallOrders(
                steps,
                first=run.first,
                replicas=run.count,
                place=place,
                row=run.rows.start,
                end=phases,
                summing=1,
                finishing=1,
                group=group,
                device=device,
            ),
        )
        for device, (run, place) in enumerate(zip(round_.runs, round_.places, strict=True))
        if run is not None
    )
