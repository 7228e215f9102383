"""The probe of a user's metric: it is fed with parts of some rows, which shows how replicas merge its state.

The arrays that a step feeds a metric with, on a replica's rows, are recorded once. Then the metric is fed with parts of these rows, each from
the reset state and all in turn, and with all rows. Either the parts add up to the whole, or their means do, weighted by rows, or the metric is
refused.

The rows of a first batch may tell nothing: before a model has learnt anything, all predictions may be equal, and no row positive. So random
values are tried in their places as well. A sum over rows is a sum whatever the rows hold, and so is a mean.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

import keras
import numpy as np
from numpy.typing import ArrayLike

from unisono._src.keras_private.compiled_losses import is_class_of_keras
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.trainer_state import RecordingScope, list_scope_values
from unisono._src.placement import split_evenly
from unisono._src.replica.drawn_values import draw_fed_values_like
from unisono._src.replica.fixed_draws import hold_draws
from unisono._src.replica.growth import compute_growth_ratio
from unisono._src.replica.metric_updates import FedArrays, MetricUpdate, UpdatesOnOtherRows, pair_with_both
from unisono._src.replica.metrics import FED_BY_HAND
from unisono._src.replica.mismatches import Mismatches
from unisono._src.typing import Array, Values

CLOSE = 1e-3
"""The tolerance for rounding. Two sums of the same few rows differ by less, and a value that is no sum by much more."""

PARTS = 4

ROWS = 16
"""The fewest rows of a trial. Fewer are repeated: a part of one row may look like the whole."""


class MetricDecisions:
    """The decisions about the metrics of a step, from all rows on which they were measured."""

    def __init__(self, metrics: Sequence[keras.metrics.Metric], mismatches: Mismatches) -> None:
        """`metrics` are the metrics that may be no sums. `mismatches` notes those that are neither sums nor means, and not refused."""
        self._metrics = metrics
        self._mismatches = mismatches
        self.batch_means: dict[int, bool] = {}
        """For the ids of the variables that are decided, whether they are means of batches."""
        self.are_open = False
        """Whether a variable that was assigned is not decided."""
        self._warned: set[int] = set()

    def decide(
        self,
        variables: Sequence[keras.Variable],
        reset: Sequence[Array],
        updates: Sequence[MetricUpdate],
        rows: int,
        other: UpdatesOnOtherRows | None,
        tolerance: float,
        means: dict[int, bool] | None = None,
    ) -> None:
        """Decide by one more measurement: see `find_batch_means`. `means` are decided without it."""
        known = self.batch_means
        decided = find_batch_means(
            self._metrics, variables, reset, updates, rows, other, self._note_number, known, max(CLOSE, tolerance)
        )
        self.batch_means = decided | known | (means or {})
        assigned = set(MetricBench(variables, reset).feed(updates, reset).assigned)  # others, as a threshold, never change
        self.are_open = not self.batch_means.keys() >= assigned & set(map(id, variables))

    def _note_number(self, metric: keras.metrics.Metric) -> None:
        if id(metric) not in self._warned:
            self._warned.add(id(metric))
            self._mismatches.note(f"the metric {metric.name!r}", describe_number(metric))


def find_batch_means(
    metrics: Sequence[keras.metrics.Metric],
    variables: Sequence[keras.Variable],
    reset: Sequence[Array],
    updates: Sequence[MetricUpdate],
    rows: int,
    other: UpdatesOnOtherRows | None,
    note_number: Callable[[keras.metrics.Metric], None],
    known: Container[int],
    tolerance: float,
) -> dict[int, bool]:
    """Return, for the ids of variables that could be decided, whether they are means of batches.

    A mean of batches is weighted by the row fraction; all else is added up. A metric that is neither a sum nor a mean is refused.

    Args:
        metrics: The metrics that may be no sums.
        variables: The variables of all metrics.
        reset: The values of the variables after a reset.
        updates: The updates of the metrics by a step on some rows.
        rows: The number of these rows.
        other: The updates on other rows. They decide where a metric is fed with one number for all rows.
        note_number: Called with a metric that is fed with a number which does not follow from the numbers of replicas.
        known: The ids of variables that were decided before. They are probed again only if they are fed with one number for all rows.
        tolerance: How far numbers for all rows may be from sums and means, relative to their size.
    """
    bench = MetricBench(variables, reset)
    by_number = {id(update.metric) for update, on_both in pair_with_both(updates, other) if not update.has_rows(rows, on_both)}
    decided: dict[int, bool] = {}
    if other is not None:
        parts = [[update for update in noted if id(update.metric) in by_number] for noted in (updates, *other)]
        fed = [metric for metric in metrics if id(metric) in by_number]
        decided = decide_fed_numbers(fed, bench, bench.run_trial([0.5, 0.5], parts[:2], parts[2]), note_number, tolerance)
    open_metrics = {id(metric) for metric in metrics if any(id(variable) not in known for variable in metric.variables)}
    trials = bench.run_trials([update for update in updates if id(update.metric) in open_metrics - by_number], rows)
    for metric, variable, index in bench.locate(metrics):
        if id(variable) in known:
            continue
        seen = [trial for trial in trials if trial.has_change(index)]
        wrong = next((trial for trial in seen if not trial.is_merged(index)), None)
        kinds = {trial.is_sum(index) for trial in seen}
        if wrong is None and len(kinds) == 1:
            decided[id(variable)] = not kinds.pop()
        elif seen and not is_mean_of_keras(metric):
            raise ValueError(describe_refusal(metric, variable, wrong or seen[0], index))
        elif seen:  # a mean over batches of a function's value on each
            note_number(metric)
            decided[id(variable)] = True
    return decided


def decide_fed_numbers(
    metrics: Sequence[keras.metrics.Metric],
    bench: MetricBench,
    trial: Trial,
    note_number: Callable[[keras.metrics.Metric], None],
    tolerance: float,
) -> dict[int, bool]:
    """Return the same as `find_batch_means`, for metrics that are fed with one number for all rows, from a trial on two equal parts."""
    decided: dict[int, bool] = {}
    for metric, variable, index in bench.locate(metrics):
        one, more = (part[index] for part in trial.parts)
        total = one + more
        whole = trial.whole[index]
        growth = compute_growth_ratio(total / 2, whole)
        if growth is None:
            continue
        size = float(np.sum(np.abs(one)) + np.sum(np.abs(more)))  # of terms that may cancel
        if not is_mean_of_keras(metric) and np.max(np.abs(trial.in_turn[index] - total)) > tolerance * size:
            raise ValueError(describe_refusal(metric, variable, trial, index))
        decided[id(variable)] = abs(growth - 1) < abs(growth - 2)
        if all(np.max(np.abs(whole - merged)) > tolerance * size for merged in (total, total / 2)):
            note_number(metric)
    return decided


def is_mean_of_keras(metric: keras.metrics.Metric) -> bool:
    """Return whether a metric is a Mean or Sum of Keras, which keeps a total whatever it is fed with."""
    return isinstance(metric, FED_BY_HAND) and is_class_of_keras(metric)


def describe_number(metric: keras.metrics.Metric) -> str:
    return (
        f"The metric {metric.name!r} is fed with one number for all rows of a replica that is neither a mean over rows nor a sum, as the root of a "
        f"mean or a quotient of sums: what it shows of R replicas is not what it shows of the whole batch. Give it one value for each row, "
        f"keep sums in a metric of your own (docs/metrics.md), or write replicas=1."
    )


class Trial(NamedTuple):
    """The changes of each variable by parts of some rows, from the reset state and in turn, and by all rows."""

    fractions: list[float]
    """The rows of each part over all rows."""
    parts: list[list[np.ndarray]]
    in_turn: list[np.ndarray]
    whole: list[np.ndarray]

    def has_change(self, index: int) -> bool:
        return any(np.any(changes[index]) for changes in (*self.parts, self.whole))

    def is_sum(self, index: int) -> bool:
        return are_nearly_equal(self.whole[index], sum(part[index] for part in self.parts))

    def is_mean(self, index: int) -> bool:
        weighted = (fraction * part[index] for fraction, part in zip(self.fractions, self.parts, strict=True))
        return are_nearly_equal(self.whole[index], sum(weighted))

    def is_merged(self, index: int) -> bool:
        """Return whether replicas can be merged: updates add to the state, by a sum or by a mean."""
        adds = are_nearly_equal(self.in_turn[index], sum(part[index] for part in self.parts))
        return adds and (self.is_sum(index) or self.is_mean(index))

    @property
    def is_finite(self) -> bool:
        return all(np.all(np.isfinite(change)) for changes in (*self.parts, self.in_turn, self.whole) for change in changes)


class MetricBench(NamedTuple):
    """The variables of all metrics and their values after a reset, on which metrics are tried."""

    variables: Sequence[keras.Variable]
    reset: Sequence[Array]

    def locate(self, metrics: Iterable[keras.metrics.Metric]) -> Iterator[tuple[keras.metrics.Metric, keras.Variable, int]]:
        """Yield (metric, variable, the variable's position) for all variables of these metrics."""
        position = {id(variable): index for index, variable in enumerate(self.variables)}
        for metric in metrics:
            yield from ((metric, variable, position[id(variable)]) for variable in metric.variables)

    def feed(self, updates: Sequence[MetricUpdate], state: Sequence[Array]) -> RecordingScope:
        """Return a scope with the values that these updates leave in the variables, where they find this state."""
        with hide_masks(), RecordingScope(state_mapping=list(zip(self.variables, state, strict=True))) as scope:
            for update in updates:
                args, kwargs = update.fill_arguments(update.arrays)
                update.metric.update_state(*args, **kwargs)
        return scope

    def run_trial(self, fractions: list[float], parts: Sequence[Sequence[MetricUpdate]], whole: Sequence[MetricUpdate]) -> Trial:
        """Return the trial of the metrics on parts of some rows, which are these fractions, and on the whole.

        Random numbers, by which metrics break ties, would hide a sum: a trial that finds something else is run again with fixed draws.
        """
        trial = self._run_trial(fractions, parts, whole, has_fixed_draws=False)
        if all(map(trial.is_merged, range(len(self.variables)))):
            return trial
        return self._run_trial(fractions, parts, whole, has_fixed_draws=True)

    def _run_trial(
        self,
        fractions: list[float],
        parts: Sequence[Sequence[MetricUpdate]],
        whole: Sequence[MetricUpdate],
        has_fixed_draws: bool,
    ) -> Trial:
        def values_after(updates: Sequence[MetricUpdate], state: Sequence[Array]) -> Values:
            def compute_values(fed: Sequence[FedArrays], state: Sequence[Array]) -> Values:
                refilled = [update._replace(arrays=arrays) for update, arrays in zip(updates, fed, strict=True)]
                return list_scope_values(self.feed(refilled, state), self.variables)

            compute = hold_draws(compute_values) if has_fixed_draws else compute_values
            return compute([update.arrays for update in updates], state)

        def compute_changes(after: Sequence[Array]) -> list[np.ndarray]:
            return [np.asarray(new, "float64") - np.asarray(old, "float64") for new, old in zip(after, self.reset, strict=True)]

        after_parts = [values_after(part, self.reset) for part in parts]
        in_turn = after_parts[0]
        for part in parts[1:]:
            in_turn = values_after(part, in_turn)
        after = values_after(whole, self.reset)
        return Trial(fractions, list(map(compute_changes, after_parts)), compute_changes(in_turn), compute_changes(after))

    def run_trials(self, updates: Sequence[MetricUpdate], rows: int) -> list[Trial]:
        """Return trials of the metrics on the values that were recorded, and on random values where the metrics accept them. A trial whose
        numbers are not finite is left out."""
        if not updates:
            return []
        times = -(-ROWS // rows)
        repeated = [update.change_rows(rows, lambda array: np.repeat(array, times, axis=0)) for update in updates]
        rows *= times
        cut = split_evenly(rows, PARTS)

        def try_values(updates: Sequence[MetricUpdate]) -> Trial:
            slices = [operator.itemgetter(slice(part.start, part.stop)) for part in cut]
            parts = [[update.change_rows(rows, select) for update in updates] for select in slices]
            return self.run_trial([len(part) / rows for part in cut], parts, updates)

        trials = [try_values(repeated)]
        for zeros_as in ("numbers", "bits"):
            draw = functools.partial(draw_fed_values_like, np.random.default_rng(0), zeros_as=zeros_as)
            drawn = [update.change_rows(rows, draw) for update in repeated]
            # A metric of the user's may check its values, and refuse drawn ones in any way. It has taken the real ones above.
            with contextlib.suppress(Exception):
                trials.append(try_values(drawn))
        return [trial for trial in trials if trial.is_finite]


def describe_refusal(metric: keras.metrics.Metric, variable: keras.Variable, trial: Trial, index: int) -> str:
    parts = ", ".join(str(part[index]) for part in trial.parts)
    return (
        f"The metric {metric.name!r} ({type(metric).__name__}) cannot be merged over replicas: parts of a batch add "
        f"{parts} to its variable {variable.path!r}, one after another {trial.in_turn[index]}, and the whole batch {trial.whole[index]}. "
        f"Its state must be made of sums over rows, as keras.metrics.Mean keeps a total and a count. Rewrite its update_state with "
        f"assign_add of sums, or write replicas=1."
    )


def are_nearly_equal(value: ArrayLike, expected: ArrayLike) -> bool:
    largest = float(np.max(np.abs(expected), initial=0.0))
    return bool(np.allclose(value, expected, rtol=CLOSE, atol=CLOSE * (1e-6 + largest)))
