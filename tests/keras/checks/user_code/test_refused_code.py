"""Lines that lose people days elsewhere, and what they are told here."""

import collections
import re

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from loops import CLASSES, Loop, data, policy
from trainings import distance, on

X, Y = data("dense", 24)


@pytest.fixture
def loop():
    return Loop(on(1, 4))


def whole(loop, code):
    """Compile the code as a whole, on arrays in place of a distributed batch."""
    return un.function(code)((X, Y))


def run(loop, code):
    return loop.run(code)


WAYS = {"replica code": run, "a function": whole}


class Result:
    def __init__(self, loss):
        self.loss = loss


def apply_twice(loop, batch):
    _, gradients = loop.differentiate(batch)
    loop.apply(gradients)
    loop.apply(gradients)


def apply_under_a_condition(loop, batch):
    value, gradients = loop.differentiate(batch)
    ops.cond(value > 1e9, lambda: loop.apply(gradients), lambda: None)


def update_and_ask(name):
    def code(loop, batch):
        loop.accuracy.update_state(batch[1], loop.model(batch[0]))
        getattr(loop.accuracy, name)()

    return code


AS_NO_VARIABLE = r"after it was updated(.|\n)*strategy.run\(update(.|\n)*strategy.run\(read_what_was_updated"
NOBODY = r"one after another: they have nobody to talk to.*strategy.reduce"
REFUSED = {
    "a weight is read after its update": (
        lambda loop, batch: (loop.step(batch), loop.model(batch[0]))[1], ValueError, rf"kernel' {AS_NO_VARIABLE}",
    ),
    "two updates of an optimizer": (apply_twice, ValueError, "applies the optimizer 'adam.*' twice.*call strategy.run twice"),
    "an update under a condition of JAX": (
        apply_under_a_condition, ValueError, r"inside of a function that JAX traces by itself(.|\n)*gradients times ops.cast",
    ),
    "a weight is assigned": (
        lambda loop, batch: loop.model.trainable_variables[0].assign(0 * loop.model.trainable_variables[0]),
        ValueError, "assigns 'sequential.*kernel', a trainable variable",
    ),
    "stateless_apply": (
        lambda loop, batch: loop.optimizer.stateless_apply([], [], []),
        ValueError, r"stateless_apply.*optimizer.apply\(gradients, variables\)",
    ),
    "psum": (lambda loop, batch: jax.lax.psum(ops.sum(batch[0]), "replicas"), ValueError, NOBODY),
    "axis_index": (lambda loop, batch: jax.lax.axis_index("i"), ValueError, NOBODY),
    "all_reduce": (
        lambda loop, batch: un.get_replica_context().all_reduce("SUM", batch[0]), RuntimeError, "strategy.reduce",
    ),
    "a metric's result": (
        update_and_ask("result"), ValueError, r"calls sparse_categorical_accuracy.*\.result\(\).*after strategy.run",
    ),
    "a metric is reset": (
        update_and_ask("reset_state"), ValueError, r"calls sparse_categorical_accuracy.*\.reset_state\(\).*after strategy.run",
    ),
    "a metric is reset by the older name": (
        update_and_ask("reset_states"), ValueError, r"calls sparse_categorical_accuracy.*\.reset_state\(\).*after strategy.run",
    ),
    "layers are made": (lambda loop, batch: layers.Dense(2)(ops.ones((1, 2))), ValueError, "makes variables anew"),
    "an error where layers are made": (
        lambda loop, batch: (layers.Dense(2)(batch[0]), {}["of the user's"]), KeyError, "of the user's",
    ),
    "an object with arrays in it": (
        lambda loop, batch: Result(ops.sum(batch[0])), ValueError, r"returns a Result with arrays in it(.|\n)*a named tuple",
    ),
    "run": (
        lambda loop, batch: loop.strategy.run(lambda: batch[0]),
        RuntimeError, "Replica code calls strategy.run, but a replica knows",
    ),
    "reduce": (
        lambda loop, batch: loop.strategy.reduce("MEAN", batch[0]),
        RuntimeError, "Replica code calls strategy.reduce, but a replica knows",
    ),
    "gather": (
        lambda loop, batch: loop.strategy.gather(batch[0], axis=0),
        RuntimeError, "Replica code calls strategy.gather, but a replica knows",
    ),
    "local_results": (
        lambda loop, batch: loop.strategy.local_results(batch[0]),
        RuntimeError, "Replica code calls strategy.local_results, but a replica knows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_replica_code_must_not_do_is_refused_and_changes_nothing(loop, what):
    code, error, said = REFUSED[what]
    before = un.fingerprint(loop.model)
    with pytest.raises(error, match=said):
        loop.run(lambda batch: code(loop, batch))
    assert un.fingerprint(loop.model) == before


NOT_COMPILED = {
    "float": (lambda batch: float(ops.sum(batch[0])), r"'<lambda>' could not .*neither float\(\), \.numpy\(\) nor if on them"),
    "numpy": (lambda batch: ops.sum(batch[0]).numpy(), r"neither float\(\), \.numpy\(\) nor if on them"),
    "a variable": (
        lambda batch: ops.sum(keras.Variable(1.0) * batch[0]),
        r"'<lambda>' makes a variable where it is compiled(.|\n)*build\(input_shape\)",
    ),
}


@pytest.mark.parametrize("what", NOT_COMPILED)
@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_compiled_is_named(loop, what, way):
    code, said = NOT_COMPILED[what]
    with pytest.raises(ValueError, match=said):
        WAYS[way](loop, code)


# Things of somebody else's, and values of replicas.


def test_what_was_made_outside_of_the_scope_is_refused(loop):
    model, metric, loop.optimizer = keras.Sequential([layers.Input((6,)), layers.Dense(CLASSES)]), keras.metrics.Mean(), None
    with pytest.raises(ValueError, match=r"2 variables that were not made in its scope(.|\n)*with strategy.scope\(\):"):
        loop.run(lambda batch: model(batch[0]))
    with pytest.raises(ValueError, match="not made in its scope"):
        loop.run(lambda batch: metric.update_state(loop.model(batch[0])))
    loop.optimizer = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="not made in its scope"):
        loop.one(loop.first())


def test_a_step_of_one_strategy_under_another_is_refused(loop):
    other = on(2, 4)
    batch = next(iter(other.distribute_dataset((X, Y), batch_size=12)))
    with pytest.raises(ValueError, match="not made in its scope"):
        other.run(loop.step, args=(batch,))
    with other.scope(), pytest.raises(ValueError, match="A step belongs to one strategy"):
        loop.run(loop.step)


def test_values_of_replicas_are_not_one_array(loop):
    value = loop.run(lambda batch: loop.model(batch[0]))
    for use in (np.asarray, jax.numpy.asarray, float, lambda v: v + 1, lambda v: 2 * v, lambda v: v[0], lambda v: v.shape, list):
        with pytest.raises(ValueError, match=r"one value for each replica, and is used as one array.*strategy.reduce"):
            use(value)
    loop.optimizer.build(loop.model.trainable_variables)
    rows, weights = loop.first()[0], loop.model.trainable_variables
    for use in (lambda: loop.optimizer.apply([value, value], weights), lambda: loop.model(rows), lambda: rows.numpy()):
        with pytest.raises(ValueError, match="one value for each replica"):
            use()


def test_losses_are_for_replica_code():
    with pytest.raises(RuntimeError, match="un.compute_average_loss is for replica code"):
        un.compute_average_loss(np.ones(3, "float32"))
    with pytest.raises(RuntimeError, match="un.scale_regularization_loss is for replica code"):
        un.scale_regularization_loss(1.0)


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_a_variable_of_ones_own_says_how_it_is_merged(loop, kind):
    with loop.strategy.scope():
        total = keras.Variable(0, dtype=kind, trainable=False, name="total")
    with pytest.raises(
        ValueError, match=r'assigns .total., a variable of your own(.|\n)*aggregation="sum"(.|\n)*keras.metrics.Sum'
    ):
        loop.run(lambda batch: total.assign_add(ops.cast(ops.size(batch[1]), kind)))
    assert float(total.value) == 0


# Optimizers.


def test_a_dead_attribute_of_an_optimizer_is_refused(loop):
    loop.one(loop.first())
    loop.optimizer.lr = 0.01
    with pytest.raises(AttributeError, match=r"optimizer.lr was set, but Adam has no such.*optimizer.learning_rate = "):
        loop.one(loop.first())
    del loop.optimizer.lr
    loop.optimizer.learning_rate = 0.01
    loop.one(loop.first())
    loop.model.compile(keras.optimizers.SGD(), "mse")
    loop.model.optimizer.momentun = 0.9
    with pytest.raises(AttributeError, match=r"optimizer.momentun was set, but SGD"):
        loop.model.fit(X, np.zeros((24, CLASSES)), verbose=0)


def test_a_dead_attribute_is_refused_outside_of_replica_code(loop):
    weights = loop.model.trainable_variables
    gradients = loop.strategy.reduce("SUM", loop.run(lambda batch: loop.differentiate(batch)[1]), axis=None)
    loop.optimizer.lr = 0.01
    for apply in (loop.optimizer.apply, un.function(lambda g, w: loop.optimizer.apply(g, w))):
        with pytest.raises(AttributeError, match=r"optimizer.lr was set(.|\n)*optimizer.learning_rate = \.\.\."):
            apply(gradients, weights)
    del loop.optimizer.lr
    before = un.fingerprint(weights)
    loop.optimizer.apply(gradients, weights)
    assert un.fingerprint(weights) != before


def test_older_names_work(loop):
    """In a scope, and in replica code outside of every scope, where they stay."""
    with loop.strategy.scope():
        metric = keras.metrics.Mean()

    def code(batch):
        values = keras.losses.MeanSquaredError(reduction=keras.losses.Reduction.NONE)(batch[0], batch[0] + 2)
        metric(values)
        return values

    np.testing.assert_allclose(loop.strategy.gather(loop.run(code), axis=0), 4, rtol=1e-6)
    assert not hasattr(keras.losses, "Reduction")
    with loop.strategy.scope():
        keras.losses.MeanSquaredError(reduction=keras.losses.Reduction.NONE)
        assert metric.result().numpy() == pytest.approx(4)
        metric.reset_states()
        with loop.strategy.scope():
            assert metric.result().numpy() == 0
        assert metric.result().numpy() == 0
    assert not hasattr(keras.losses, "Reduction")
    assert not hasattr(metric.result(), "numpy")


class Accumulating:
    """Gradients that several runs add up, in the form of TensorFlow's programs."""

    def __init__(self, devices=1):
        self.loop = Loop(on(devices, 4), optimizer=lambda: keras.optimizers.SGD(0.1))
        with self.loop.strategy.scope():
            zeros = [ops.zeros(v.shape) for v in self.loop.model.trainable_variables]
            self.sums = [keras.Variable(value, trainable=False, aggregation="sum") for value in zeros]

    def accumulate(self, batch):
        for total, gradient in zip(self.sums, self.loop.differentiate(batch)[1], strict=True):
            total.assign_add(gradient)

    def apply(self):
        self.loop.apply([total / 2 for total in self.sums])

    def accumulate_and_apply(self, batch):
        self.accumulate(batch)
        self.apply()

    def train(self, apply):
        for batch in self.loop.strategy.distribute_dataset((X, Y), batch_size=12):
            self.loop.strategy.run(self.accumulate, args=(batch,))
        apply()
        for total in self.sums:
            total.assign(ops.zeros(total.shape))
        return un.fingerprint(self.loop.model, self.sums)


def test_accumulated_gradients_are_applied_outside_of_replica_code():
    """The update is that of all rows at once, on any devices; in replica code it would be made R times."""
    one, inside = Accumulating(), Accumulating()
    with pytest.raises(
        ValueError, match=r"'sgd.*' in which nothing comes from the replica's rows[\s\S]*4 times too large[\s\S]*outside"
    ):
        inside.train(lambda: inside.loop.strategy.run(inside.apply))
    with pytest.raises(ValueError, match=r"in which the variable '.*' stands[\s\S]*count 4 times[\s\S]*outside"):
        inside.loop.run(inside.accumulate_and_apply)
    two = Accumulating(devices=2)
    assert two.train(two.apply) == one.train(one.apply)
    plain = Loop(on(1, 1), optimizer=lambda: keras.optimizers.SGD(0.1))
    plain.strategy.run(plain.step, args=((X, Y),))
    assert distance(one.loop.model, plain.model) < 1e-6


def test_what_apply_gradients_returns_may_be_returned():
    """The optimizer's variable of its updates, as in Keras; its value is the one after the update."""
    loop = Loop(on(2, 4))
    for count in (1, 2):
        returned = loop.run(lambda batch: loop.apply(loop.differentiate(batch)[1]))
        assert returned is loop.optimizer.iterations
        assert int(returned.value) == count


def test_gradients_that_an_earlier_run_returned_are_applied_in_replica_code(loop):
    before = un.fingerprint(loop.model)
    gradients = loop.run(lambda batch: loop.differentiate(batch)[1])
    loop.strategy.run(lambda gradients: loop.optimizer.apply(gradients, loop.model.trainable_variables), args=(gradients,))
    assert un.fingerprint(loop.model) != before


def test_an_optimizer_with_a_loss_scale_is_applied_in_replica_code():
    """Elsewhere Keras cannot apply it, and would leave traced values in the weights."""
    loop = Loop(on(1, 4), optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    total = loop.strategy.reduce("SUM", loop.run(lambda batch: loop.differentiate(batch)[1]))
    before = un.fingerprint(loop.model)
    with pytest.raises(ValueError, match=r"has a loss scale and is applied outside of replica code"):
        loop.optimizer.apply(total, loop.model.trainable_variables)
    assert un.fingerprint(loop.model) == before


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_double_precision_is_refused(loop):
    loop.model.weights[0]._dtype = "float64"
    with pytest.raises(ValueError, match=r"Replica code uses variables of dtype float64 \('.*kernel' among them\)"):
        loop.one(loop.first())


def test_float16_without_a_loss_scale_is_warned_about():
    with policy("mixed_float16"):
        loop = Loop(on(1, 2))
        with pytest.warns(UserWarning, match=r"'adam.*', which scales no loss.*LossScaleOptimizer\(optimizer\)"):
            loop.one(loop.first())


# Traced values that are kept, and arguments that are changed.


class Kept:
    last = None


def keep_in_attribute(x, kept):
    kept.last = ops.sum(x)
    return x


def append(x, kept):
    kept.append(ops.sum(x))
    return x


def keep_in_dict(x, kept):
    kept["x"] = ops.sum(x)
    return x


def keep_by_setattr(kept):
    def code(x):
        setattr(kept, "last", ops.sum(x))  # noqa: B010
        return x

    return code


AROUND = {
    "an attribute by its name": (keep_by_setattr, Kept, "kept.last"),
    "a deque": (lambda kept: lambda x: append(x, kept), collections.deque, "kept"),
    "a list": (lambda kept: lambda x: append(x, kept), list, "kept"),
    "a dict": (lambda kept: lambda x: keep_in_dict(x, kept), dict, "kept"),
}
IN_ARGUMENT = {"an attribute": (keep_in_attribute, Kept, "kept.last"), "a deque": (append, collections.deque, "kept")}


@pytest.mark.parametrize("where", AROUND)
def test_a_traced_value_that_is_kept_around_is_named(loop, where):
    find, make, place = AROUND[where]
    for run_code in (lambda code: loop.strategy.run(code, args=(loop.first()[0],)), lambda code: un.function(code)(X)):
        with pytest.raises(ValueError, match=rf"keeps a traced value in '{place}'.*Return the value"):
            run_code(find(make()))


@pytest.mark.parametrize("where", IN_ARGUMENT)
def test_a_traced_value_that_is_kept_in_an_argument_is_named(loop, where):
    code, make, place = IN_ARGUMENT[where]
    for call in (lambda kept: loop.strategy.run(code, args=(loop.first()[0], kept)), lambda kept: un.function(code)(X, kept)):
        with pytest.raises(ValueError, match=rf"keeps a traced value in '{place}'.*Return the value"):
            call(make())


def replace_item(x, kept):
    kept["losses"][0] = ops.sum(x)


def replace_number(*them):
    them[1]["losses"][0] += 1


def test_what_is_put_into_an_argument_is_named(loop):
    with pytest.raises(ValueError, match=r"'keep_in_dict' puts something into an argument"):
        loop.strategy.run(keep_in_dict, args=(loop.first()[0], {}))
    with pytest.raises(ValueError, match=r"puts something into an argument"):
        un.function(append)(np.float32(1), [])


@pytest.mark.parametrize(("code", "place"), [(replace_item, "kept['losses'][0]"), (replace_number, "args[1]['losses'][0]")])
def test_what_replaces_an_item_of_an_argument_is_named(loop, code, place):
    kept, (x, _) = {"losses": [0, 1]}, loop.first()
    said = re.escape(
        f"The function {code.__name__!r} puts another value into {place}, where nobody will find it when the function is compiled. Return "
        f"it instead; what only the function needs, it puts into a copy: list(argument), dict(argument)."
    )
    runs = [lambda: loop.strategy.run(code, args=(x, kept)), lambda: un.function(code)(np.float32(1), kept)]
    if code is replace_item:
        runs.append(lambda: loop.strategy.run(code, args=(x,), kwargs={"kept": kept}))
    for call in runs:
        with pytest.raises(ValueError, match=said):
            call()
    assert kept == {"losses": [0, 1]}


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_an_argument_may_be_changed(loop, way):
    def code(batch):
        batch = dict(enumerate(batch))
        batch[0] = batch[0] / 2
        batch.pop(1)
        return ops.sum(batch[0])

    total = WAYS[way](loop, code)
    half = loop.strategy.reduce("SUM", total) if way == "replica code" else total
    np.testing.assert_allclose(half, X[: 12 if way == "replica code" else 24].sum() / 2, rtol=1e-5)
