"""The probe of a user's metric: it is fed with parts of some rows, which shows how replicas merge its state.

The arrays that a step feeds a metric with, on a replica's rows, are recorded once. Then the metric is fed with parts of these rows, each from
the reset state and all in turn, and with all rows. Either the parts add up to the whole, or their means do, weighted by rows, or the metric is
refused.

The rows of a first batch may tell nothing: before a model has learnt anything, all predictions may be equal, and no row positive. So random
values are tried in their places as well. A sum over rows is a sum whatever the rows hold, and so is a mean.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

import jax
import keras
import numpy as np
from numpy.typing import ArrayLike

from unisono._src.keras_private.compiled_losses import is_class_of_keras
from unisono._src.keras_private.instances import wrap_method
from unisono._src.keras_private.masks import hide_masks
from unisono._src.keras_private.trainer_state import RecordingScope
from unisono._src.placement import split_evenly
from unisono._src.replica.growth import compute_growth_ratio
from unisono._src.replica.metrics import FED_BY_HAND, find_unproven_metrics
from unisono._src.typing import AnyArray, Arguments, Array, Keywords, PyTree, UserFunction, Values

CLOSE = 1e-3
"""The tolerance for rounding. Two sums of the same few rows differ by less, and a value that is no sum by much more."""

PARTS = 4

MOST = 2**62
"""The largest whole number that is drawn."""

ROWS = 16
"""The fewest rows of a trial. Fewer are repeated: a part of one row may look like the whole."""

FedArrays: TypeAlias = Sequence[AnyArray | None]
"""The leaves of a call's arguments that are arrays; None for other leaves."""

ArgumentFiller: TypeAlias = Callable[[FedArrays], tuple[Arguments, Keywords]]
"""Returns the (args, kwargs) of a call with other arrays in the places of the call's own arrays."""


class MetricUpdate(NamedTuple):
    """One call of a metric's `update_state`."""

    metric: keras.metrics.Metric
    arrays: FedArrays
    fill_arguments: ArgumentFiller

    def has_rows(self, rows: int) -> bool:
        """Return whether an array has a value for each row. One number for all rows tells nothing about parts of them."""
        return any(array is not None and np.ndim(array) and len(array) == rows for array in self.arrays)

    def repeat(self, arrays: FedArrays) -> None:
        """Repeat the call with these arrays."""
        args, kwargs = self.fill_arguments(arrays)
        self.metric.update_state(*args, **kwargs)


class UpdatesOnOtherRows(NamedTuple):
    """The updates of metrics by a step on as many other rows."""

    updates: Sequence[MetricUpdate]
    on_both: Sequence[MetricUpdate]
    """The updates on the rows and the other rows together."""


class UpdateRecorder:
    """A recorder of the updates of metrics by a run of a step."""

    def __init__(self) -> None:
        self._updates: dict[int, MetricUpdate] = {}
        self._calls = 0

    def begin(self) -> None:
        """Forget the updates of earlier runs."""
        self._updates = {}

    @property
    def updates(self) -> list[MetricUpdate]:
        return [self._updates[number] for number in sorted(self._updates)]

    def note(self, _: str, arrays: FedArrays, call: tuple[keras.metrics.Metric, ArgumentFiller]) -> None:
        """Record an update when the traced code runs. A callback takes the arrays out of any trace, also inside of a gradient."""
        self._calls += 1
        number = self._calls
        places = [place for place, array in enumerate(arrays) if array is not None]

        def receive(*values: AnyArray) -> None:
            by_place = dict(zip(places, map(np.asarray, values), strict=True))
            self._updates[number] = MetricUpdate(call[0], [by_place.get(place) for place in range(len(arrays))], call[1])

        jax.debug.callback(receive, *(arrays[place] for place in places))


@contextlib.contextmanager
def note_updates(
    metrics: Iterable[keras.metrics.Metric],
    note: Callable[[str, list[AnyArray | None], tuple[keras.metrics.Metric, ArgumentFiller]], object],
) -> Iterator[None]:
    """Call `note("update", arrays, (metric, fill_arguments))` for each update of these metrics in the block."""

    def make_wrapper(metric: keras.metrics.Metric) -> Callable[[UserFunction], UserFunction]:
        def wrap(update_state: UserFunction) -> UserFunction:
            def update(*args: PyTree, **kwargs: PyTree) -> object:
                leaves, structure = jax.tree.flatten((args, kwargs))
                arrays = [leaf if hasattr(leaf, "dtype") else None for leaf in leaves]

                def fill_arguments(arrays: FedArrays) -> tuple[Arguments, Keywords]:
                    return jax.tree.unflatten(
                        structure, [leaf if array is None else array for array, leaf in zip(arrays, leaves, strict=True)]
                    )

                note("update", arrays, (metric, fill_arguments))
                return update_state(*args, **kwargs)

            return update

        return wrap

    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(wrap_method(metric, "update_state", make_wrapper(metric)))
        yield


def find_batch_means(
    metrics: Sequence[keras.metrics.Metric],
    variables: Sequence[keras.Variable],
    reset: Sequence[Array],
    updates: Sequence[MetricUpdate],
    rows: int,
    other: UpdatesOnOtherRows | None,
    warned: set[int],
    known: Container[int] = (),
    tolerance: float = CLOSE,
) -> dict[int, bool]:
    """Return, for the ids of variables that could be decided, whether they are means of batches.

    A mean of batches is weighted by the row fraction; all else is added up.

    Args:
        metrics: The metrics.
        variables: The metrics' variables.
        reset: The values of the variables after a reset.
        updates: The updates of the metrics by a step on some rows.
        rows: The number of these rows.
        other: The updates on other rows. They decide where a metric is fed with one number for all rows.
        warned: The ids of metrics that the user was warned of. A warning of this call adds to them.
        known: The ids of variables that were decided before. They are probed again only if they are fed with one number for all rows.
        tolerance: How far numbers for all rows may be from sums and means, relative to their size.

    Raises:
        ValueError: For a metric that is neither a sum nor a mean.
    """
    by_number = {id(update.metric) for update in updates if not update.has_rows(rows)}
    decided = {} if other is None else decide_fed_numbers(by_number, metrics, variables, reset, updates, other, warned, tolerance)
    telling = [update for update in updates if id(update.metric) not in by_number and not are_all_known(update.metric, known)]
    trials = run_trials(telling, rows, variables, reset)
    position = {id(variable): index for index, variable in enumerate(variables)}
    for metric in find_unproven_metrics(metrics):
        for variable in metric.variables:
            if id(variable) in known:
                continue
            index = position[id(variable)]
            seen = [trial for trial in trials if trial.has_change(index)]
            wrong = next((trial for trial in seen if not trial.is_merged(index)), None)
            kinds = {trial.is_sum(index) for trial in seen}
            if wrong is None and len(kinds) == 1:
                decided[id(variable)] = not kinds.pop()
            elif seen and not is_mean_of_keras(metric):
                raise ValueError(describe_refusal(metric, variable, wrong or seen[0], index))
            elif seen:  # a mean over batches of a function's value on each
                warn_of_number(metric, warned)
                decided[id(variable)] = True
    return decided


def decide_fed_numbers(
    by_number: set[int],
    metrics: Sequence[keras.metrics.Metric],
    variables: Sequence[keras.Variable],
    reset: Sequence[Array],
    updates: Sequence[MetricUpdate],
    other: UpdatesOnOtherRows,
    warned: set[int],
    tolerance: float,
) -> dict[int, bool]:
    """Return the same as `find_batch_means`, for metrics that are fed with one number for all rows. `by_number` holds their ids."""

    def state_after(state: Sequence[Array], updates: Sequence[MetricUpdate]) -> list[Array]:
        number_updates = [update for update in updates if id(update.metric) in by_number]
        return feed_metrics(number_updates, [update.arrays for update in number_updates], variables, state)

    after = state_after(reset, updates)
    one = compute_changes(after, reset)
    more = compute_changes(state_after(reset, other.updates), reset)
    in_turn = compute_changes(state_after(after, other.updates), reset)
    both = compute_changes(state_after(reset, other.on_both), reset)
    decided: dict[int, bool] = {}
    for metric in (metric for metric in metrics if id(metric) in by_number):
        for variable in metric.variables:
            index = next(position for position, candidate in enumerate(variables) if candidate is variable)
            parts = one[index] + more[index]
            whole = both[index]
            growth = compute_growth_ratio(parts / 2, whole)
            if growth is None:
                continue
            size = float(np.sum(np.abs(one[index])) + np.sum(np.abs(more[index])))  # of terms that may cancel
            if not is_mean_of_keras(metric) and np.max(np.abs(in_turn[index] - parts)) > tolerance * size:
                trial = Trial([0.5, 0.5], [[one[index]], [more[index]]], [in_turn[index]], [whole])
                raise ValueError(describe_refusal(metric, variable, trial, 0))
            decided[id(variable)] = abs(growth - 1) < abs(growth - 2)
            if all(np.max(np.abs(whole - merged)) > tolerance * size for merged in (parts, parts / 2)):
                warn_of_number(metric, warned)
    return decided


def are_all_known(metric: keras.metrics.Metric, known: Container[int]) -> bool:
    """Return whether the ids of all variables of a metric are among these."""
    return all(id(variable) in known for variable in metric.variables)


def find_assigned(updates: Sequence[MetricUpdate], variables: Sequence[keras.Variable], state: Sequence[Array]) -> set[int]:
    """Return the ids of the variables that these updates assign. Other variables, as a threshold, never change."""
    mapping = list(zip(variables, state, strict=True))
    with hide_masks(), RecordingScope(state_mapping=mapping) as scope:
        for update in updates:
            update.repeat(update.arrays)
        return set(scope.assigned)


def is_mean_of_keras(metric: keras.metrics.Metric) -> bool:
    """Return whether a metric is a Mean or Sum of Keras, which keeps a total whatever it is fed with."""
    return isinstance(metric, FED_BY_HAND) and is_class_of_keras(metric)


def warn_of_number(metric: keras.metrics.Metric, warned: set[int]) -> None:
    """Warn once of a metric that is fed with a number for all rows which does not follow from the numbers of replicas."""
    if id(metric) in warned:
        return
    warned.add(id(metric))
    warnings.warn(
        f"The metric {metric.name!r} is fed with one number for all rows of a replica that is neither a mean over rows nor a sum, as the root of a "
        f"mean or a quotient of sums: what it shows of R replicas is not what it shows of the whole batch. Give it one value for each row, "
        f"keep sums in a metric of your own (docs/metrics.md), or write replicas=1.",
        stacklevel=2,
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


def run_trial(
    updates: Sequence[MetricUpdate],
    values: Sequence[FedArrays],
    rows: int,
    variables: Sequence[keras.Variable],
    reset: Sequence[Array],
) -> Trial | None:
    """Return the trial of the metrics on these values of `rows` rows; None where its numbers are not finite."""
    cut = split_evenly(rows, PARTS)

    def state_after(state: Sequence[Array], part: range) -> list[Array]:
        cut_values = [
            [array[part.start : part.stop] if is_of_rows(array, rows) else array for array in arrays] for arrays in values
        ]
        return feed_metrics(updates, cut_values, variables, state)

    in_turn = reset
    for part in cut:
        in_turn = state_after(in_turn, part)
    parts = [compute_changes(state_after(reset, part), reset) for part in cut]
    whole = compute_changes(state_after(reset, range(rows)), reset)
    trial = Trial([len(part) / rows for part in cut], parts, compute_changes(in_turn, reset), whole)
    return trial if trial.is_finite else None


def feed_metrics(
    updates: Sequence[MetricUpdate], values: Sequence[FedArrays], variables: Sequence[keras.Variable], state: Sequence[Array]
) -> Values:
    """Return the values of the metrics' variables after these updates with these values."""
    mapping = list(zip(variables, state, strict=True))
    with hide_masks(), RecordingScope(state_mapping=mapping) as scope:
        for update, arrays in zip(updates, values, strict=True):
            update.repeat(arrays)
        return [scope.get_current_value(variable) for variable in variables]


def compute_changes(after: Sequence[AnyArray], before: Sequence[AnyArray]) -> list[np.ndarray]:
    """Return the change of each variable."""
    return [np.asarray(new, "float64") - np.asarray(old, "float64") for new, old in zip(after, before, strict=True)]


def run_trials(
    updates: Sequence[MetricUpdate], rows: int, variables: Sequence[keras.Variable], reset: Sequence[Array]
) -> list[Trial]:
    """Return trials of the metrics on the values that were recorded, and on random values where the metrics accept them."""
    if not updates:
        return []
    times = -(-ROWS // rows)
    values: list[FedArrays] = [
        [np.repeat(array, times, axis=0) if is_of_rows(array, rows) else array for array in update.arrays] for update in updates
    ]
    rows *= times
    trials = [run_trial(updates, values, rows, variables, reset)]
    for of_equal in ("numbers", "bits"):
        rng = np.random.default_rng(0)
        drawn: list[FedArrays] = [
            [draw_like(array, rng, of_equal) if is_of_rows(array, rows) else array for array in arrays] for arrays in values
        ]
        with contextlib.suppress(Exception):  # a metric may check its values, and refuse some
            trials.append(run_trial(updates, drawn, rows, variables, reset))
    return [trial for trial in trials if trial is not None]


def draw_like(array: AnyArray, rng: np.random.Generator, of_equal: str) -> AnyArray:
    """Return random values in place of these: whole numbers for whole numbers, probabilities for probabilities, weights for weights.

    `of_equal` is the kind of values to draw where all values of the array are equal: "numbers" or "bits".
    """
    like = np.asarray(array)
    values = like.astype("float64")
    if not np.all(np.isfinite(values)):
        return array
    low = values.min(initial=0)
    high = values.max(initial=0)
    is_whole = bool(np.all(values == np.round(values)))
    if low == high and like.dtype.kind not in "iub":
        is_whole = of_equal == "bits"
    if is_whole:
        drawn = rng.integers(int(max(low, -MOST)), int(min(max(high, 1), MOST)) + 1, like.shape)
    elif low >= 0:
        drawn = rng.uniform(0, max(high, 1), like.shape)
        drawn = drawn / drawn.sum(-1, keepdims=True) if like.ndim > 1 and np.allclose(values.sum(-1), 1, atol=1e-3) else drawn
    else:
        drawn = values + (values.std() or 1) * rng.standard_normal(like.shape)
    return np.asarray(drawn).astype(like.dtype)


def is_of_rows(array: AnyArray | None, rows: int) -> TypeGuard[AnyArray]:
    """Return whether the array has a value for each row."""
    return array is not None and bool(np.ndim(array)) and len(array) == rows


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
