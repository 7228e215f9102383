"""Ways to break the engine on purpose, each of which a test must see.

`pytest --break NAME` runs any tests over an engine that is broken so: some must fail. What `promise/test_breakages.py` breaks in one training, a
comparison of fingerprints sees; the other places have tests of their own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono._src.engine import reduction_tree
from unisono._src.engine.exchange import collectives, on_lead
from unisono._src.engine.global_batch import BatchArray, is_batch_array
from unisono._src.engine.packing import pack_tree
from unisono._src.engine.phases import draws, run
from unisono._src.engine.step import running_sums
from unisono._src.keras.checkpoint.object_state import KerasState
from unisono._src.keras.data import keras_source, source
from unisono._src.keras.data import row_order as order_of_rows
from unisono._src.keras.loop import gradients
from unisono._src.keras.private import trainer_state
from unisono._src.keras.replica import random_keys
from unisono._src.keras.replica.user_function import UserStep
from unisono._src.kernels.convolution import pooling
from unisono._src.tools.export import model_variables


def tree_order(patch: pytest.MonkeyPatch) -> None:
    """Sums from right to left."""
    patch.setattr(
        reduction_tree, "split_span", lambda span: (range(span.start, span.start + 1), range(span.start + 1, span.stop))
    )


def order_within_a_device(patch: pytest.MonkeyPatch) -> None:
    """Sums one after another within a device."""

    def pushed(held, before, value):
        there = running_sums.get_place(held)
        return running_sums.set_place(held, 0, {n: jnp.where(before > 0, there[n] + new, new) for n, new in value.items()})

    patch.setattr(running_sums, "push_value", pushed)
    patch.setattr(running_sums, "push_tree", lambda held, before, tree: pushed(held, before, pack_tree(tree)))
    patch.setattr(running_sums, "fold_sums", lambda held, count: held)


def key_rule(patch: pytest.MonkeyPatch) -> None:
    """Random numbers of the first rows for all rows: every replica draws the same."""
    for name in ("random_bits", "random_split"):
        draw = draws.DRAWS[name]
        patch.setitem(draws.DRAWS, name, lambda eqn, operands, start, shape, draw=draw: draw(eqn, operands, start * 0, shape))


def row_order(patch: pytest.MonkeyPatch) -> None:
    """Every pass has the order of the first."""
    patch.setattr(order_of_rows.RowOrder, "permute_pass", lambda self, pass_, count: self.random(0).permutation(count))


def weighting(patch: pytest.MonkeyPatch) -> None:
    """Sums over rows as if every replica had the rows of the first."""
    spread = run.PhasedStep.spread

    def spread_alike(self, number, size, result, place):
        parts = spread(self, number, size, result, place)
        return [part * (self.sizes[0] / size) if part.dtype == "float32" else part for part in parts]

    patch.setattr(run.PhasedStep, "spread", spread_alike)


def statistics(patch: pytest.MonkeyPatch) -> None:
    """Moving statistics weighted as if every replica had as many rows."""
    spread = run.PhasedStep.spread

    def spread_alike(self, number, size, result, place):
        parts = spread(self, number, size, result, place)
        count = len(self.phases[number].left)
        alike = sum(self.sizes) / size / len(self.sizes)
        is_averaged = [not self.analysis.left[variable] for variable in self.phases[number].left]
        left = [
            part * alike if averaged else part for part, averaged in zip(parts[len(parts) - count :], is_averaged, strict=True)
        ]
        return [*parts[: len(parts) - count], *left]

    patch.setattr(run.PhasedStep, "spread", spread_alike)


def rows_of_replicas(patch: pytest.MonkeyPatch) -> None:
    """Rows dealt out like cards, one after another."""
    held = keras_source.wrap_arrays

    def dealt(batch, *args, **options):
        like_cards = lambda rows: BatchArray(np.concatenate([rows.array[r::8] for r in range(8)]), rows.position)
        return jax.tree.map(like_cards, held(batch, *args, **options), is_leaf=is_batch_array)

    patch.setattr(keras_source, "wrap_arrays", dealt)


BREAKAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    f.__name__: f for f in (tree_order, order_within_a_device, key_rule, row_order, weighting, statistics, rows_of_replicas)
}


def sums_by_device(patch: pytest.MonkeyPatch) -> None:
    """Each device sums what it has, then the devices are summed: what mirrored training with accumulation often does."""

    def total(self, sums, description):
        return functools.reduce(on_lead.add_vectors, [value for value in sums.values() if value is not None])

    patch.setattr(reduction_tree, "list_subtrees", lambda block, span: [block])
    patch.setattr(on_lead.LeadExchange, "total_on_lead", total)


def masked_divisor(patch: pytest.MonkeyPatch) -> None:
    """Masked losses of a loop divided by all elements, masked ones too."""
    divisor = gradients.compute_mean_divisor
    patch.setattr(gradients, "compute_mean_divisor", lambda values, weight, mask: divisor(values, weight, None))


def gathered_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows that are gathered lie at their replica's number in place of their first row."""
    put = run.put_part
    patch.setattr(run, "put_part", lambda part, layout, rows, start: put(part, layout, rows, start // 2))


def largest_of_replicas(patch: pytest.MonkeyPatch) -> None:
    """A maximum over rows is that of the first replica."""
    patch.setattr(run, "combine", lambda operation, parts: parts[0])


def metric_fed_twice(patch: pytest.MonkeyPatch) -> None:
    """What a step of a loop adds to metrics is added twice."""
    finish = UserStep.finish

    def finish_twice(self, state, run, totals):
        (*others, metrics), logs = finish(self, state, run, totals)
        return (*others, [new + new - old for old, new in zip(state[3], metrics, strict=True)]), logs

    patch.setattr(UserStep, "finish", finish_twice)


def position_after_resume(patch: pytest.MonkeyPatch) -> None:
    """A resume in the middle of a pass leaves one batch out."""
    indexed = source.resume_indexed

    def late(place, begin, skip, size):
        batches = indexed(place, begin, skip, size)
        return itertools.islice(batches, 1, None) if place.position[1] > 0 else batches

    patch.setattr(source, "resume_indexed", late)


def neighbours_in_the_exchange(patch: pytest.MonkeyPatch) -> None:
    """Two sums of as many replicas, which are not added to each other next, change places."""
    total_on_lead = on_lead.LeadExchange.total_on_lead

    def swapped(self, sums, description):
        here = dict(sums)
        pairs = [(a, b) for a in here for b in here if a.start + 2 * len(a) == b.start and len(a) == len(b)]
        for a, b in pairs[:1]:
            here[a], here[b] = here[b], here[a]
        return total_on_lead(self, here, description)

    patch.setattr(on_lead.LeadExchange, "total_on_lead", swapped)


def ties_of_a_pool(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a maximum goes to the last of equal elements."""
    max_gradient = pooling.compute_max_gradient

    class Last:
        name = "ge"
        bind = staticmethod(jax.lax.gt)

    def last(dy, x, pool, padding, keeps, is_cheap):
        return max_gradient(dy, x, pool, padding, Last() if keeps.name == "ge" else keeps, is_cheap)

    patch.setattr(pooling, "compute_max_gradient", last)


def checkpoint_without_seeds(patch: pytest.MonkeyPatch) -> None:
    """A restored model goes on with the random state that it has."""
    put = KerasState.put

    def forgetful(self, *args, **options):
        mine = [
            (variable, np.array(variable.value)) for variable in self.variables.values() if random_keys.is_seed_state(variable)
        ]
        put(self, *args, **options)
        for variable, value in mine:
            variable.assign(value)

    patch.setattr(KerasState, "put", forgetful)


def order_of_a_collective(patch: pytest.MonkeyPatch) -> None:
    """What devices hand on is added one after another."""

    def total(leaves, schedule, pieces):
        found = [pieces[d, slot] for d, nodes in enumerate(schedule) for slot, (_, there) in enumerate(nodes) if there]
        return functools.reduce(jnp.add, reversed(found))

    patch.setattr(collectives, "sum_slices", total)


def stale_callbacks(patch: pytest.MonkeyPatch) -> None:
    """What looks at a model while it is trained sees it as the look before did."""
    held_state, seen = trainer_state.get_held_state, {}

    def stale(model):
        now = held_state(model)
        before = seen.get(id(model), now)
        if now:
            seen[id(model)] = jax.tree.map(np.array, now)
        return before if now else now

    patch.setattr(trainer_state, "get_held_state", stale)


def export_without_moving_means(patch: pytest.MonkeyPatch) -> None:
    """Moving means are zeros in a file."""
    values = model_variables.read_values

    def dropped(model, those):
        found = values(model, those)
        return [value * 0 if variable.name == "moving_mean" else value for variable, value in zip(those, found, strict=True)]

    patch.setattr(model_variables, "read_values", dropped)


OTHERS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    f.__name__: f
    for f in (
        masked_divisor, gathered_rows, largest_of_replicas, metric_fed_twice, position_after_resume,
        neighbours_in_the_exchange, ties_of_a_pool, checkpoint_without_seeds,
        order_of_a_collective, stale_callbacks, export_without_moving_means, sums_by_device,
    )
}  # fmt: skip
"""Those that other tests see."""
