"""Reports of audits as tests need them: made by hand, for whoever reads or draws reports."""

from __future__ import annotations

import dataclasses
from typing import Any

from unisono._src.tools.audit.audit_report import AuditedRun, AuditReport, Cause, Difference, Divergence, Source

LAYERS = ("stem/conv", "block/attention/query", "head")
DIGEST, OTHER_DIGEST = "9f3c51e07ab24d68", "01be77d2c4490a3f"


def sample_run(name: str, losses: tuple[float | None, ...], digest: str = DIGEST, **changes: Any) -> AuditedRun:
    return dataclasses.replace(AuditedRun(name, 1, 1, len(losses), 0, losses, digest, 8.4), **changes)


def equal_report(runs: int = 3, steps: int = 4) -> AuditReport:
    losses = tuple(2.0 / step for step in range(1, steps + 1))
    names = [f"{run + 1} devices" for run in range(runs)]
    same = tuple(
        Divergence((names[0], name), LAYERS, tuple(range(1, steps + 1)), ((0.0,) * steps,) * len(LAYERS)) for name in names[1:]
    )
    audited = tuple(sample_run(name, losses) for name in names)
    return AuditReport("train.py", ("unisono", "audit", "train.py"), {"jax": "0.10.2"}, 8, audited, None, same, ())


def parted_report(file: str = "train.py") -> AuditReport:
    """Two runs of four steps that part at step 2, in the attention of a block, with all that a report may say."""
    runs = (sample_run("1 device", (2.0, 1.5, 1.2, 1.0)), sample_run("8 devices", (2.0, 1.5, 1.3, 1.25), OTHER_DIGEST))
    difference = Difference(
        layer=LAYERS[1], replica=3, row=7, array="[0]", equation="add(f32[4], f32[4]) -> f32[4]", values=("0.25", "0.5"),
        source=Source(file, 3, "noise = numpy.random.normal()", "call"), runs=("1 device", "8 devices"), step=2, kind="gradient",
        variable="block/attention/query/kernel", cause=Cause.DEVICES, cause_words="A number comes from the count of devices.",
        what_to_write="Take num_replicas_in_sync.", differing=("block/attention/query/kernel", "head/kernel"),
    )  # fmt: skip
    fractions = ((0.0, 0.0, 0.0, 0.5), (0.0, 0.5, 1.0, 1.0), (0.0, 0.0, 0.2, 1.0))
    return AuditReport(
        "train.py", ("unisono", "audit", "train.py", "--name", "a b"), {"jax": "0.10.2"}, 8, runs, difference,
        (Divergence(("1 device", "8 devices"), LAYERS, (1, 2, 3, 4), fractions),), ("The clock is read.",),
    )  # fmt: skip


def replace_texts(value: Any, replace: Any) -> Any:
    """Return a report in which each text is another one. Causes are no texts of users."""
    if isinstance(value, Cause):
        return value
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, tuple):
        return tuple(replace_texts(item, replace) for item in value)
    if isinstance(value, dict):
        return {replace_texts(key, replace): replace_texts(item, replace) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: item if name == "kind" else replace_texts(item, replace) for name, item in fields}
        )
    return value
