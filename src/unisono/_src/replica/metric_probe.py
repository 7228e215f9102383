"""How a metric of the user's own is merged over replicas, found by feeding it.

What a step feeds a metric with on a replica's rows is noted once. Then the metric is fed with parts of these rows, each from the reset state
and all in turn, and with all of them: either the parts add up to the whole, or their means do, weighted by rows, or the metric is refused.

The rows of a first batch may tell nothing: before a model has learnt anything all predictions may be equal, and none of the rows positive. So
values are drawn in their places as well. A sum over rows is one whatever the rows hold, and so is a mean.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from unisono._src import keras_private
from unisono._src.placement import split_evenly
from unisono._src.replica.growth import ratio
from unisono._src.replica.metrics import FED_BY_HAND, unpromised

CLOSE = 1e-3
"""Two sums of the same few rows differ by rounding alone; what is no sum differs by much more."""

PARTS = 4

MOST = 2**62
"""A whole number that can be drawn."""

ROWS = 16
"""Fewer rows are taken several times: a part of one row may be like the whole."""


class Update(NamedTuple):
    """One call of a metric's `update_state`."""

    metric: Any
    arrays: list[Any]
    """Its arguments' leaves that are arrays; None for others."""
    filled: Callable[[list[Any]], tuple[Any, Any]]
    """Returns (args, kwargs) with other arrays in the places of these."""

    def has_rows(self, rows: int) -> bool:
        """Return whether something is told for each row. What is one number for a replica's rows says nothing about parts of them."""
        return any(array is not None and np.ndim(array) and len(array) == rows for array in self.arrays)

    def again(self, arrays: list[Any]) -> None:
        """Make the call with these arrays."""
        args, kwargs = self.filled(arrays)
        self.metric.update_state(*args, **kwargs)


class Other(NamedTuple):
    """What a step feeds metrics with on as many other rows."""

    updates: Sequence[Update]
    of_both: Sequence[Update]
    """On the rows and the others together."""


class Fed:
    """What a step that is run feeds metrics with."""

    def __init__(self) -> None:
        self._updates: dict[int, Update] = {}
        self._calls = 0

    def begin(self) -> None:
        """Forget what came before this run."""
        self._updates = {}

    @property
    def updates(self) -> list[Update]:
        return [self._updates[number] for number in sorted(self._updates)]

    def note(self, _: str, arrays: list[Any], of: tuple[Any, Any]) -> None:
        """Take arrays out of the trace by a callback, wherever in it they are made: in what is differentiated, too."""
        self._calls += 1
        number, places = self._calls, [place for place, array in enumerate(arrays) if array is not None]

        def received(*values: Any) -> None:
            by_place = dict(zip(places, map(np.asarray, values), strict=True))
            self._updates[number] = Update(of[0], [by_place.get(place) for place in range(len(arrays))], of[1])

        jax.debug.callback(received, *(arrays[place] for place in places))


@contextlib.contextmanager
def noted(metrics: Iterable[Any], note: Callable[[str, Any, Any], Any]) -> Iterator[None]:
    """For the block, what the metrics are fed with is noted: as "update", the arrays, and (metric, `Update.filled`)."""

    def noting(metric: Any) -> Callable[[Any], Any]:
        def wrap(update_state: Any) -> Any:
            def update(*args: Any, **kwargs: Any) -> Any:
                leaves, structure = jax.tree.flatten((args, kwargs))
                arrays = [leaf if hasattr(leaf, "dtype") else None for leaf in leaves]

                def filled(arrays: list[Any]) -> Any:
                    return jax.tree.unflatten(
                        structure, [leaf if a is None else a for a, leaf in zip(arrays, leaves, strict=True)]
                    )

                note("update", arrays, (metric, filled))
                return update_state(*args, **kwargs)

            return update

        return wrap

    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(keras_private.wrapped_method(metric, "update_state", noting(metric)))
        yield


def weighted_by_share(
    metrics: Sequence[Any],
    variables: Sequence[Any],
    reset: Sequence[Any],
    updates: Sequence[Update],
    rows: int,
    other: Other | None,
    said: set[int],
    known: Container[int] = (),
    tolerance: float = CLOSE,
) -> dict[int, bool]:
    """Return, for the ids of variables that could be decided, whether they are means of batches.

    Such a mean is weighted by the replica's share of the rows; all else is added up.

    Args:
        metrics: The metrics.
        variables: Their variables.
        reset: The values of these after a reset.
        updates: What a step feeds the metrics with on some rows.
        rows: How many these are.
        other: What it feeds them with on other rows. It decides where a metric is fed with one number for all rows.
        said: The ids of metrics of which was said that they are neither; those of which it is said now are added.
        known: The ids of variables that were decided before. They are not looked at again, but where they are fed with one number for all rows.
        tolerance: How far numbers for all rows may be from sums and means, as a share of their size.

    Raises:
        ValueError: For a metric that is neither a sum nor a mean.
    """
    by_number = {id(update.metric) for update in updates if not update.has_rows(rows)}
    decided = {} if other is None else grown(by_number, metrics, variables, reset, updates, other, said, tolerance)
    telling = [update for update in updates if id(update.metric) not in by_number and not are_all(update.metric, known)]
    trials = trials_of(telling, rows, variables, reset)
    position = {id(v): index for index, v in enumerate(variables)}
    for metric in unpromised(metrics):
        for variable in metric.variables:
            if id(variable) in known:
                continue
            index = position[id(variable)]
            seen = [trial for trial in trials if trial.moved(index)]
            wrong = next((trial for trial in seen if not trial.is_merged(index)), None)
            kinds = {trial.is_sum(index) for trial in seen}
            if wrong is None and len(kinds) == 1:
                decided[id(variable)] = not kinds.pop()
            elif seen and not is_mean_of_keras(metric):
                raise ValueError(refusal(metric, variable, wrong or seen[0], index))
            elif seen:  # a mean over batches of what a function says of one
                warn_of_number(metric, said)
                decided[id(variable)] = True
    return decided


def grown(
    by_number: set[int],
    metrics: Sequence[Any],
    variables: Sequence[Any],
    reset: Sequence[Any],
    updates: Sequence[Update],
    other: Other,
    said: set[int],
    tolerance: float,
) -> dict[int, bool]:
    """Return what `weighted_by_share` does, of metrics that are fed with one number for all rows."""

    def state_after(state: Sequence[Any], updates: Sequence[Update]) -> list[Any]:
        mine = [update for update in updates if id(update.metric) in by_number]
        return fed(mine, [update.arrays for update in mine], variables, state)

    after = state_after(reset, updates)
    one, more = added(after, reset), added(state_after(reset, other.updates), reset)
    in_turn = added(state_after(after, other.updates), reset)
    both = added(state_after(reset, other.of_both), reset)
    decided: dict[int, bool] = {}
    for metric in (m for m in metrics if id(m) in by_number):
        for variable in metric.variables:
            index = next(i for i, v in enumerate(variables) if v is variable)
            parts, whole = one[index] + more[index], both[index]
            grows = ratio(parts / 2, whole)
            if grows is None:
                continue
            size = float(np.sum(np.abs(one[index])) + np.sum(np.abs(more[index])))  # of what may cancel
            if not is_mean_of_keras(metric) and np.max(np.abs(in_turn[index] - parts)) > tolerance * size:
                trial = Trial([0.5, 0.5], [[one[index]], [more[index]]], [in_turn[index]], [whole])
                raise ValueError(refusal(metric, variable, trial, 0))
            decided[id(variable)] = abs(grows - 1) < abs(grows - 2)
            if all(np.max(np.abs(whole - of)) > tolerance * size for of in (parts, parts / 2)):
                warn_of_number(metric, said)
    return decided


def are_all(metric: Any, known: Container[int]) -> bool:
    """Return whether all variables of a metric are among these, by their ids."""
    return all(id(variable) in known for variable in metric.variables)


def assigned_by(updates: Sequence[Update], variables: Sequence[Any], state: Sequence[Any]) -> set[int]:
    """Return the ids of the variables that these updates assign; others, as a threshold, never change."""
    mapping = list(zip(variables, state, strict=True))
    with keras_private.fresh_masks(), keras_private.RecordingScope(state_mapping=mapping) as scope:
        for update in updates:
            update.again(update.arrays)
        return set(scope.assigned)


def is_mean_of_keras(metric: Any) -> bool:
    """Return whether a metric keeps a total and a count, whatever it is fed with."""
    return isinstance(metric, FED_BY_HAND) and keras_private.is_class_of_keras(metric)


def warn_of_number(metric: Any, said: set[int]) -> None:
    """Say once of a metric that what it is fed with over all rows is not what replicas make of it."""
    if id(metric) in said:
        return
    said.add(id(metric))
    warnings.warn(
        f"The metric {metric.name!r} is fed with one number for all rows of a replica that is neither a mean over rows nor a sum, as the root of a "
        f"mean or a quotient of sums: what it shows of R replicas is not what it shows of the whole batch. Give it one value for each row, "
        f"keep sums in a metric of your own (docs/metrics.md), or write replicas=1.",
        stacklevel=2,
    )


class Trial(NamedTuple):
    """What parts of some rows add to each variable, by themselves and in turn, and what all rows add."""

    shares: list[float]
    parts: list[list[np.ndarray]]
    in_turn: list[np.ndarray]
    whole: list[np.ndarray]

    def moved(self, index: int) -> bool:
        return any(np.any(added[index]) for added in (*self.parts, self.whole))

    def is_sum(self, index: int) -> bool:
        return close(self.whole[index], sum(part[index] for part in self.parts))

    def is_mean(self, index: int) -> bool:
        return close(self.whole[index], sum(s * part[index] for s, part in zip(self.shares, self.parts, strict=True)))

    def is_merged(self, index: int) -> bool:
        """Return whether replicas can be merged: state is added to, by a sum or by a mean."""
        adds = close(self.in_turn[index], sum(part[index] for part in self.parts))
        return adds and (self.is_sum(index) or self.is_mean(index))

    @property
    def is_finite(self) -> bool:
        return all(np.all(np.isfinite(a)) for added in (*self.parts, self.in_turn, self.whole) for a in added)


def tried(
    updates: Sequence[Update], values: Sequence[list[Any]], rows: int, variables: Sequence[Any], reset: Sequence[Any]
) -> Trial | None:
    """Return what the metrics make of these values, of this number of rows; None where that is not finite."""
    cut = split_evenly(rows, PARTS)

    def after(state: Sequence[Any], part: range) -> list[Any]:
        cut_values = [[a[part.start : part.stop] if has_length(a, rows) else a for a in arrays] for arrays in values]
        return fed(updates, cut_values, variables, state)

    in_turn = reset
    for part in cut:
        in_turn = after(in_turn, part)
    parts = [added(after(reset, part), reset) for part in cut]
    whole = added(after(reset, range(rows)), reset)
    trial = Trial([len(part) / rows for part in cut], parts, added(in_turn, reset), whole)
    return trial if trial.is_finite else None


def fed(updates: Sequence[Update], values: Sequence[list[Any]], variables: Sequence[Any], state: Sequence[Any]) -> list[Any]:
    """Return the state of the metrics' variables after these updates with these values."""
    mapping = list(zip(variables, state, strict=True))
    with keras_private.fresh_masks(), keras_private.RecordingScope(state_mapping=mapping) as scope:
        for update, arrays in zip(updates, values, strict=True):
            update.again(arrays)
        return [scope.get_current_value(v) for v in variables]


def added(after: Sequence[Any], before: Sequence[Any]) -> list[np.ndarray]:
    """Return by how much each variable has changed."""
    return [np.asarray(new, "float64") - np.asarray(old, "float64") for new, old in zip(after, before, strict=True)]


def trials_of(updates: Sequence[Update], rows: int, variables: Sequence[Any], reset: Sequence[Any]) -> list[Trial]:
    """Return what the metrics make of the values that were noted, and of drawn ones, where these can be fed to them."""
    if not updates:
        return []
    times = -(-ROWS // rows)
    values = [[np.repeat(a, times, axis=0) if has_length(a, rows) else a for a in update.arrays] for update in updates]
    rows *= times
    found = [tried(updates, values, rows, variables, reset)]
    for of_equal in ("numbers", "bits"):
        rng = np.random.default_rng(0)
        drawn = [[like(a, rng, of_equal) if has_length(a, rows) else a for a in arrays] for arrays in values]
        with contextlib.suppress(Exception):  # a metric may look at its values, and refuse some
            found.append(tried(updates, drawn, rows, variables, reset))
    return [trial for trial in found if trial is not None]


def like(array: Any, rng: np.random.Generator, of_equal: str) -> Any:
    """Return values that could stand in this array's place: whole numbers for such, probabilities for such, weights for such.

    `of_equal` says what is drawn where all are one number.
    """
    a = np.asarray(array)
    values = a.astype("float64")
    if not np.all(np.isfinite(values)):
        return array
    low, high = values.min(initial=0), values.max(initial=0)
    is_whole = bool(np.all(values == np.round(values)))
    if low == high and a.dtype.kind not in "iub":
        is_whole = of_equal == "bits"
    if is_whole:
        drawn = rng.integers(int(max(low, -MOST)), int(min(max(high, 1), MOST)) + 1, a.shape)
    elif low >= 0:
        drawn = rng.uniform(0, max(high, 1), a.shape)
        drawn = drawn / drawn.sum(-1, keepdims=True) if a.ndim > 1 and np.allclose(values.sum(-1), 1, atol=1e-3) else drawn
    else:
        drawn = values + (values.std() or 1) * rng.standard_normal(a.shape)
    return np.asarray(drawn).astype(a.dtype)


def has_length(array: Any, rows: int) -> bool:
    return array is not None and bool(np.ndim(array)) and len(array) == rows


def refusal(metric: Any, variable: Any, trial: Trial, index: int) -> str:
    parts = ", ".join(str(part[index]) for part in trial.parts)
    return (
        f"The metric {metric.name!r} ({type(metric).__name__}) cannot be merged over replicas: parts of a batch add "
        f"{parts} to its variable {variable.path!r}, one after another {trial.in_turn[index]}, and the whole batch {trial.whole[index]}. "
        f"Its state must be made of sums over rows, as keras.metrics.Mean keeps a total and a count. Rewrite its update_state with "
        f"assign_add of sums, or write replicas=1."
    )


def close(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=CLOSE, atol=CLOSE * (1e-6 + float(np.max(np.abs(b), initial=0.0)))))
