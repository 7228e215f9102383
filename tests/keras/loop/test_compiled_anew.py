"""What is compiled again for each step is said, and what is the same function is compiled once."""

import functools
import warnings

import numpy as np
import pytest
from keras import ops

import unisono as un
from loops import Loop
from sizes import slow
from trainings import on
from unisono._src.keras.loop.runs import make_function_key


@pytest.fixture
def loop():
    return Loop(on(1, 4))


class Step:
    def __init__(self, loop):
        self.loop = loop

    def __call__(self, batch):
        return ops.sum(self.loop.model(batch[0]))


def make_steps(loop, number):
    loop.run(lambda batch, number=number: ops.ones(()) * number)


ANEW = {
    "a function": (make_steps, r"compiled '<lambda>' .*3 times.*make it once"),
    "a callable": (
        lambda loop, number: loop.run(Step(loop)), r"compiled 'Step' \(.*loop/test_compiled_anew.py:\d+\) 3 times",
    ),
    "a compiled function": (
        lambda loop, number: un.function(lambda x: x * loop.optimizer.learning_rate)(np.float32(number)),
        r"un.function has compiled '<lambda>' \(.*:\d+\) in 3 functions that were made anew",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ANEW)
def test_what_is_made_anew_for_every_step_is_named(loop, what):
    step, said = ANEW[what]
    with pytest.warns(UserWarning, match=said):
        [step(loop, number) for number in range(3)]


def test_a_number_of_pythons_that_changes_is_named():
    step = un.function(lambda x, rate: x * rate)
    with pytest.warns(UserWarning, match=r"compiled '<lambda>' 3 times(.|\n)*np.float32\(value\)"):
        results = [float(step(np.float32(2), rate)) for rate in (1, True, 1.5, 2.5)]
    assert results == [2, 2, 3, 5]


def test_the_step_of_another_model_is_another_step():
    """Several trainings by one function are no mistake."""
    strategy = on(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            loop = Loop(strategy)
            loop.run(lambda batch, loop=loop: loop.model(batch[0]))


def test_a_partial_that_is_made_anew_is_compiled_once(loop):
    calls = []

    def code(batch, factor, more=0):
        calls.append(factor)
        return ops.sum(batch[0]) * factor + more

    total = lambda more: float(loop.strategy.reduce("SUM", loop.run(functools.partial(code, factor=2.0, more=more))))
    one, traced = total(0), len(calls)
    assert (total(0), len(calls)) == (one, traced)
    np.testing.assert_allclose(total(1), one + 4, rtol=1e-6)


@pytest.mark.parametrize("pair", [(1, True), *slow(((0, False),), ((1, 1.0),))])
def test_arguments_that_are_equal_and_no_less_different(loop, pair):
    """What is compiled for one is not taken for the other."""
    code = lambda flag: ops.convert_to_tensor(isinstance(flag, bool | float))
    seen = [loop.strategy.local_results(loop.strategy.run(code, args=(of,)))[0] for of in (*pair, pair[0])]
    assert list(map(bool, seen)) == [False, True, False]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (functools.partial(max, (1, 2)), functools.partial(max, 1, 2)),
        (functools.partial(max, 1), functools.partial(max, True)),
        (functools.partial(max, 0.0), functools.partial(max, -0.0)),
        (functools.partial(max, 1), functools.partial(max, default=1)),
    ],
)
def test_arguments_that_are_not_the_same_are_no_one_function(one, other):
    assert make_function_key(one) != make_function_key(other)
    assert make_function_key(one) == make_function_key(functools.partial(one.func, *one.args, **one.keywords))
