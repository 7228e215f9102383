"""The divergence of two runs, by layer and step. It is how much of each layer differs."""

from __future__ import annotations

from unisono._src.tools.audit.audit_report import Divergence
from unisono._src.tools.records.record_comparison import OPTIMIZER
from unisono._src.tools.records.run_record import RecordedStep, RunRecord, Variable


def measure_divergence(names: tuple[str, str], one: RunRecord, other: RunRecord) -> Divergence:
    """Measure the fraction of digests that differ, by layer and step."""
    common = sorted(one.steps.keys() & other.steps.keys())
    pairs = [(one.steps[number], other.steps[number]) for number in common]
    layers = list(dict.fromkeys(name_layer(variable) for mine, _ in pairs for variable in mine.program.variables))
    columns = [measure_step(mine, its) for mine, its in pairs]
    fractions = tuple(tuple(column.get(layer, 0.0) for column in columns) for layer in layers)
    return Divergence(names, tuple(layers), tuple(number + 1 for number in common), fractions)


def measure_step(one: RecordedStep, other: RecordedStep) -> dict[str, float]:
    """Measure the fraction of digests that differ, by layer."""
    counts: dict[str, list[int]] = {}
    ours, theirs = ([(variable.kind, variable.shape) for variable in step.program.variables] for step in (one, other))
    for place, variable in enumerate(one.program.variables):
        differs = ours != theirs or one.digests[place] != other.digests[place]
        counts.setdefault(name_layer(variable), []).append(differs)
    return {layer: sum(differ) / len(differ) for layer, differ in counts.items()}


def name_layer(variable: Variable) -> str:
    """Cut a variable's layer from its path. The optimizer's own variables have "optimizer"."""
    if variable.kind == OPTIMIZER:
        return "optimizer"
    return variable.path.rpartition("/")[0] or variable.path
