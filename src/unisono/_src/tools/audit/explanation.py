"""The explanation of a difference.

It says where two runs part, why, and what to write instead. What differs is read from records. Why is shown by the runs that
differ and those that do not: the same placement with the same seed of `hash()`, with another one, other devices, other processes.
What the code looks like decides nothing.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from unisono._src.tools.audit.audit_report import EXIT, Cause, Difference, Place
from unisono._src.tools.audit.difference_place import CALLBACKS, NOWHERE, find_place
from unisono._src.tools.audit.script_run import FinishedRun, find_last_lines
from unisono._src.tools.records import ENTRY, MADE_BY_STEP, ROWS, RecordDifference, list_fact_differences

CALLBACK, DRAWS, START = "callback", "draws", "start"


class CauseWords(NamedTuple):
    """The text of a cause."""

    cause: str
    instead: str


WORDS = {
    Cause.EACH_RUN: CauseWords(
        "Each run differs, on the same placement too: numbers are drawn without a seed, a clock is read, results are taken in the order in which "
        "threads finish, or objects in the order of a set.",
        "Give each generator a seed, as in np.random.default_rng(0), and call keras.utils.set_random_seed before the first number is drawn. Count "
        "steps in place of seconds. Take results of threads in the order in which they were asked for: pool.map(...). Keep objects in a list.",
    ),
    Cause.HASH_ORDER: CauseWords(
        "A value or an order comes from hash(), and with it the order of a set: runs with the same PYTHONHASHSEED have the same bits.",
        "Take sorted(...) of the set, a list, or a dict; in place of hash(text) take zlib.crc32(text.encode()).",
    ),
    Cause.EARLIER_RUN: CauseWords(
        "The first run differs from all later ones: it has left something behind that they read, as a file.",
        "Name the file as an input of the training and let no run write it, or compute the values anew in each run.",
    ),
    Cause.DEVICES: CauseWords(
        "A number, a shape or a sum comes from the count of devices: runs on the same devices have the same bits.",
        "Take strategy.num_replicas_in_sync, which is the same on every placement, or a number, in place of jax.device_count(). Compute sums over "
        "data from the whole data, without collectives.",
    ),
    Cause.PROCESS: CauseWords(
        "A value depends on the process: on its number, on how many there are, on what only one of them does, or on a sum over processes.",
        "Do the same in every process, and ask strategy.writes only before printing and writing files. Let a layer keep its state in variables: how "
        "often Python runs its code is another number in each process.",
    ),
    Cause.VERSIONS: CauseWords(
        "The two runs have other versions, another kind of device, or other kernels.",
        "Install the versions of the recorded run, and compare on the same kind of device.",
    ),
    Cause.SCRIPT: CauseWords(
        "The script or its data are other ones than in the recorded run: the versions and the kernels are the same.",
        "Look at what was changed since. Leave out --against to see whether the script differs from itself.",
    ),
}

INSTEAD = {
    (Cause.EACH_RUN, START): (
        "Call keras.utils.set_random_seed(0) before the model is made, and let the seeds of its layers and initializers be the same in each run."
    ),
    (Cause.EACH_RUN, DRAWS): (
        "Make self.seed_generator = keras.random.SeedGenerator(0) in the layer's __init__, and draw by keras.random.normal(shape, "
        "seed=self.seed_generator) in its call."
    ),
    (Cause.EACH_RUN, CALLBACK): (
        "The step calls Python back, which draws or keeps state for itself. Draw by keras.random with seed=self.seed_generator in the step, and "
        "keep state in variables: self.add_weight(..., trainable=False)."
    ),
    (Cause.PROCESS, CALLBACK): (
        "The step calls Python back, which keeps state for itself. Each process calls it for its own replicas. Make it a variable, "
        "self.add_weight(..., trainable=False), and assign it in call."
    ),
    (Cause.PROCESS, ROWS): (
        "Read all rows in every process: each takes those of its replicas. Where each replica has a pipeline of its own, write "
        "strategy.distribute_datasets_from_function."
    ),
}
"""What to write where more is known than the cause: what differs."""

FAILED = "Do what the error says."

SAME_PROGRAM = (
    "Rows, state and program of the step are the same, so what differs is an argument of strategy.run, or what a device computes."
)


def explain_difference(
    one: FinishedRun, other: FinishedRun, difference: RecordDifference, process: int, cause: Cause
) -> Difference:
    """Add place, cause and advice to a difference. `process` is the process of the other run that differs first."""
    others = sorted(range(len(other.records)), key=lambda number: number != process)
    has_both = one.records and other.records
    place = find_place(one.records[0], [other.records[number] for number in others], difference) if has_both else NOWHERE
    said, instead = choose_words(one, other, difference, place, cause)
    return Difference(
        **{field.name: getattr(place, field.name) for field in dataclasses.fields(Place)},
        runs=(one.plan.name, other.plan.name),
        step=difference.step + (difference.kind != ENTRY or difference.step > 0),
        kind=difference.kind,
        variable=next(iter(difference.variables), None),
        cause=cause,
        cause_words=said,
        what_to_write=instead,
        differing=difference.variables,
    )


def choose_words(one: FinishedRun, other: FinishedRun, difference: RecordDifference, place: Place, cause: Cause) -> CauseWords:
    """Choose the text of a cause, made more exact by the difference."""
    words = WORDS[cause]
    if difference.kind == EXIT:
        last = (find_last_lines(other.output).splitlines() or ["it wrote nothing"])[-1]
        said = f"{other.plan.name!r} ended with exit code {other.exit_code}: {last.removesuffix('.')}."
        return CauseWords(f"{said} {words.cause}", FAILED)
    if cause is Cause.VERSIONS:
        facts = list_fact_differences(one.steps[0].program.facts, other.steps[0].program.facts)
        return CauseWords(f"{words.cause} {'; '.join(facts)}.", words.instead)
    if difference.kind in MADE_BY_STEP and place == NOWHERE and one.has_details and other.has_details:
        return CauseWords(f"{words.cause} {SAME_PROGRAM}", words.instead)
    return CauseWords(words.cause, INSTEAD.get((cause, name_detail(difference, place)), words.instead))


def name_detail(difference: RecordDifference, place: Place) -> str:
    """Name the detail that the text depends on. It is the rows, the start, or what an equation does."""
    if difference.kind == ENTRY and difference.step == 0 and place.layer is not None:
        return START
    primitive = (place.equation or "").partition("(")[0]
    if primitive in CALLBACKS:
        return CALLBACK
    return DRAWS if primitive.startswith(("random_", "threefry")) else difference.kind


def name_cause_of_record(recorded: FinishedRun, run: FinishedRun) -> Cause:
    """Name why a run differs from a recorded one. It is the versions if facts differ, and else the script."""
    facts = list_fact_differences(recorded.steps[0].program.facts, run.steps[0].program.facts)
    return Cause.VERSIONS if facts else Cause.SCRIPT
