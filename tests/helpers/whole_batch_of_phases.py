"""A step in phases beside the same step on the whole batch, in one process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from keras import layers as L  # noqa: N812

from unisono._src.engine.phases.analysis import Analysis
from unisono._src.engine.phases.interpreter import list_outputs, run_shards
from unisono._src.engine.phases.kinds import Everywhere, Layout, Rows
from unisono._src.engine.phases.run import PhasedStep
from unisono._src.engine.phases.sizes import resize_twins
from unisono._src.engine.phases.twins import pair, trace
from whole_batch_losses import CLASSES

SIZES = (3, 3, 2, 2)
"""Rows of the shards; two programs."""
CLOSE = 2e-6
"""Of the change of all state."""
ROWS = sum(SIZES)


def make_batch(model, rng):
    shape = model.input_shape[1:]
    is_tokens = len(shape) == 1 and any(isinstance(layer, L.Embedding) for layer in model.layers)
    x = rng.integers(0, 20, (ROWS, *shape)) if is_tokens else rng.normal(size=(ROWS, *shape))
    return x.astype("int32" if is_tokens else "float32"), rng.integers(0, CLASSES, ROWS).astype("int32")


def make_step(model):
    """(the train_step of the model, its state)."""
    groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables)
    return model.train_step, tuple([variable.value for variable in group] for group in groups)


def analyse(step, state, batch, sizes=SIZES, local="batch_norm", traced=(), frozen=(), cut=(), calls=None):
    """The step in phases, for shards of these sizes; of their programs those that are not traced follow from one that is.

    Of the state's arrays some may be frozen or lie cut. `calls` read them.
    """

    def describe(rows):
        of_state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
        return of_state, jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), batch)

    rows = sum(sizes)
    whole, _ = trace(step, describe(rows))
    twins = [pair(whole, trace(step, describe(size))[0], rows, size) for size in traced or sorted(set(sizes), reverse=True)]
    inputs = [Everywhere()] * len(jax.tree.leaves(state)) + [Rows(Layout(0))] * len(jax.tree.leaves(batch))
    analysis = Analysis(twins[0], inputs, len(sizes), lambda scopes: local in scopes, frozen, cut, calls)
    if traced:
        twins = [resize_twins(twins[0], size, analysis.list_in_shards()) for size in set(sizes)]
    return PhasedStep(analysis, twins, sizes)


def run_phased(phased, state, batch):
    """The outputs of the step, run phase by phase on shards."""
    run = run_shards(phased, jax.tree.leaves(state), jax.tree.leaves(batch))
    return list_outputs(phased, run)


def norm(arrays):
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(a, "float64"))) for a in arrays)))


def compare(step, state, batch, sizes=SIZES, local="batch_norm", jit=jax.jit, traced=()):
    """(the difference of the floats of the new state, relative to their change on the whole batch; the step in phases)."""
    phased = analyse(step, state, batch, sizes, local, traced)
    got = jit(lambda state, batch: run_phased(phased, state, batch))(state, batch)
    want = jax.tree.leaves(jit(step)(state, batch))
    old = jax.tree.leaves(state)
    floats = [place for place, array in enumerate(want[: len(old)]) if jnp.issubdtype(array.dtype, jnp.floating)]
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        if place not in floats and place < len(old):
            np.testing.assert_array_equal(one, other)
    change = norm(np.asarray(want[p], "float64") - np.asarray(old[p], "float64") for p in floats)
    difference = norm(np.asarray(want[p], "float64") - np.asarray(got[p], "float64") for p in floats)
    return difference / max(change, 1e-3), phased  # a loss may be a constant, but for rounding
