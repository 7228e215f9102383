"""What reads frozen weights is one program wherever they lie: rows beside them, and what is made of them, are held."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono._src.engine.phases.assembly import FrozenCalls
from unisono._src.engine.phases.run import ShardPlace
from whole_batch_of_phases import analyse

CALLS = FrozenCalls(lambda stand_in, like, after: stand_in, lambda array, after: jax.lax.optimization_barrier(array))
"""As where all weights lie whole, so that programs can be compared."""

SIZE, ROWS, WIDTH = 4, 8, 16
FIRST, SECOND = 0, 1
STATE = [np.ones((WIDTH, WIDTH), "float32"), np.ones((WIDTH, WIDTH), "float32"), np.ones((WIDTH, 2), "float32")]
BATCH = (np.ones((ROWS, WIDTH), "float32"),)


def step(state, batch):
    """The last array is an adapter of the second."""

    def loss(adapter):
        x = jnp.tanh(batch[0] * adapter[:, 0] + 1)
        x = jnp.tanh(x @ state[FIRST]) * 2 + x
        return jnp.sum(jnp.square(x @ (state[SECOND] + adapter @ adapter.T)))

    return [*state[:2], state[2] - jax.grad(loss)(state[2])], ()


def describe_shard(cut):
    """The program of a shard, and that of what comes before all shards."""
    phased = analyse(step, STATE, BATCH, (SIZE, SIZE), frozen=(FIRST, SECOND), cut=cut, calls=CALLS)
    known = phased.find_start(STATE)

    def run(row):
        values = known | phased.compute_everywhere(0, known, [])
        reads = [values[variable] for variable in phased.phases[0].reads]
        return phased.run_shard(0, SIZE, reads, [BATCH[0][:SIZE]], [], ShardPlace(row, row, row))

    return jax.make_jaxpr(run)(0)


def list_sums(program):
    """The equations that add the adapter's product to the weight."""
    return [equation for equation in program.eqns if equation.primitive.name == "add" and is_weight(equation.outvars[0])]


def is_weight(atom):
    return atom.aval.shape == (WIDTH, WIDTH)


@pytest.mark.parametrize(("cut", "times"), [((), 1), ((FIRST,), 1), ((FIRST, SECOND), 2)])
def test_what_reads_a_weight_and_what_is_made_of_it_is_held(cut, times):
    program = describe_shard(cut)
    made_by = {variable: equation for equation in program.eqns for variable in equation.outvars}

    def is_held(atom):
        return atom in made_by and made_by[atom].primitive.name == "optimization_barrier"

    readers = [
        equation
        for equation in program.eqns
        if equation.primitive.name == "dot_general" and any(is_weight(atom) for atom in equation.invars)
    ]
    readers = [equation for equation in readers if equation.outvars[0].aval.shape == (SIZE, WIDTH)]
    assert len(readers) == 4
    assert all(is_held(equation.invars[0]) for equation in readers)
    sums = list_sums(program)
    assert len(sums) == times  # once before all shards, or for each reader
    assert all(is_held(equation.invars[1]) for equation in sums)
    used = [atom for equation in program.eqns if equation.primitive.name == "dot_general" for atom in equation.invars]
    assert not any(equation.outvars[0] in used for equation in sums)


def test_a_shard_has_one_program_wherever_a_weight_lies():
    assert str(describe_shard((FIRST,))) == str(describe_shard(()))
