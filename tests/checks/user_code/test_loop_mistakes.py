"""Lines that lose people days elsewhere, and what they are told here. And correct lines, which must never raise."""

import collections
import functools
import re
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from loops import CLASSES, Loop, crossentropy, data, policy
from sizes import mostly_slow, slow
from trainings import distance, on
from unisono._src.loop.runs import make_function_key

X, Y = data("dense", 24)


@pytest.fixture
def loop():
    return Loop(on(1, 4))


def first(loop):
    return next(iter(loop.strategy.distribute_dataset((X, Y), batch_size=12)))


# 1. Arrays that are not distributed.


def test_a_batch_that_is_not_distributed_is_refused(loop):
    replicas = loop.strategy.num_replicas_in_sync
    with pytest.raises(
        ValueError, match=rf"shape \(24, 6\).*every one of the {replicas} replicas.*same 24 rows(.|\n)*un.replicate"
    ):
        loop.strategy.run(loop.step, args=((X, Y),))
    with pytest.raises(ValueError, match="as an argument and is not distributed"):
        loop.strategy.run(loop.step, kwargs={"batch": (ops.convert_to_tensor(X), Y)})


def test_an_array_in_a_closure_is_refused(loop):
    x = X[:8]
    with pytest.raises(ValueError, match=r"by the name 'x' and is not distributed"):
        loop.strategy.run(lambda: ops.sum(loop.model(x)))
    x = jax.numpy.asarray(x)
    with pytest.raises(ValueError, match=r"by the name 'x' and is not distributed"):
        loop.strategy.run(lambda: ops.sum(x))


def test_a_global_array_some_rows_of_it_and_a_function_that_has_it_are_refused(loop):
    def inner():
        return ops.sum(loop.model(X[3:9]))

    for code in (lambda: ops.sum(loop.model(X)), inner, lambda: inner() + 1, functools.partial(lambda x: ops.sum(x), X)):
        with pytest.raises(ValueError, match="is not distributed"):
            loop.strategy.run(code)


class Slotted:
    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = rows


HELD = Slotted(X)
QUEUE = collections.deque([X])
ONE_ROW, EQUAL_ROWS = X[:1], np.ones((24, 6), "float32")
COMPUTED = {
    "divided": lambda: X / 2,
    "chosen": lambda: X[[3, 1, 2]],
    "labels": lambda: Y + 1,
    "a product": lambda: X.T @ X,
    "a queue's": lambda: QUEUE[0],
    "an object's with slots": lambda: HELD.rows,
    "one row": lambda: ONE_ROW,
    "equal rows": lambda: EQUAL_ROWS,
    "computed equal rows": lambda: EQUAL_ROWS / 2,
}


def trained_on(rows, loop):
    """Code that gives a model rows of its own, beside those of the batch."""
    return lambda batch: ops.sum(loop.model(ops.reshape(ops.cast(rows(), "float32"), (-1, 6)))) * ops.sum(batch[0])


@pytest.mark.parametrize("how", COMPUTED)
def test_what_is_computed_from_an_array_around_is_refused(loop, how):
    rows = COMPUTED[how]
    with pytest.raises(ValueError, match=r"by the name '\w+(\.rows)?' and is not distributed(.|\n)*un.replicate"):
        loop.strategy.run(trained_on(rows, loop), args=(first(loop),))


BUNCH = type("Bunch", (dict,), {})(data=X)
ROWS = [X[i] for i in range(24)]
MORE_COMPUTED = {
    "columns": lambda: X[:, :-1],
    "reshaped": lambda: X.reshape(-1, 2, 3),
    "of a dict of its own kind": lambda: BUNCH["data"],
    "stacked": lambda: np.stack(ROWS),
}


@pytest.mark.parametrize("how", MORE_COMPUTED)
def test_more_that_is_computed_from_an_array_around_is_refused(loop, how):
    rows = MORE_COMPUTED[how]
    with pytest.raises(ValueError, match=r"by the name '\w+' and is not distributed"):
        loop.strategy.run(trained_on(rows, loop), args=(first(loop),))


def test_a_size_and_what_a_layer_or_a_metric_has_pass(loop):
    """Whatever shapes are alike."""
    labels = np.zeros(24, "float32")
    labels[3] = 1

    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.betas = np.linspace(0.1, 1, 6, dtype="float32")

        def add_noise(self, x):
            return x + self.betas

        def call(self, x):
            return x * self.betas

    class Weighted(keras.metrics.Sum):
        def __init__(self):
            super().__init__()
            self.w = np.linspace(0, 1, CLASSES, dtype="float32")

        def update_state(self, values):
            super().update_state(ops.sum(values * self.w, axis=-1))

    with loop.strategy.scope():
        noise, weighted, embedding = Noise(), Weighted(), layers.Embedding(6, 4)

    def code(batch):
        weighted.update_state(loop.model(batch[0]))
        smoothed = ops.one_hot(batch[1], CLASSES) @ (0.9 * np.eye(CLASSES, dtype="float32") + 0.02)
        here = noise.add_noise(batch[0]) + noise(batch[0]) + np.eye(6, dtype="float32")[0]
        return len(labels) + X.shape[0] + ops.sum(here) + ops.sum(smoothed) + ops.sum(embedding(np.arange(6)))

    loop.strategy.run(code, args=(first(loop),))


def test_replicated_arrays_are_given_to_layers_and_losses(loop):
    whole, parts = un.replicate(X[:3]), un.replicate([X[:3], Y[:3]])

    def code(batch):
        given = loop.loss(parts[1], loop.model(parts[0])) + loop.loss(Y_MEANT, loop.model(whole))
        return ops.sum(given) + 0 * ops.sum(batch[0])

    found = loop.strategy.reduce("MEAN", loop.strategy.run(code, args=(first(loop),)))
    np.testing.assert_allclose(found, 2 * ops.sum(crossentropy(None)(Y[:3], loop.model(X[:3]))), rtol=1e-5)


Y_MEANT = un.replicate(Y[:3])
WEIGHING = np.float32([0.1, 0.2, 0.7])
MEANT = un.replicate(WEIGHING)


def test_arrays_that_are_made_inside_or_held_by_a_layer_pass(loop):
    """Beside one of which only the size is used."""

    class Scaled(layers.Layer):
        scales = np.linspace(0, 1, 6, dtype="float32") * np.ones((24, 1), "float32")

        def call(self, x):
            return x * ops.sum(self.scales, axis=0)

    with loop.strategy.scope():
        scaled, auc = Scaled(), keras.metrics.AUC(num_thresholds=24)

    def code(batch):
        auc.update_state(ops.cast(batch[1] > 0, "float32"), ops.sigmoid(batch[0][:, 0]))
        own = np.float32([[1, 2], [3, 4]]) @ ops.ones((2, 1))
        return ops.sum(scaled(batch[0])) / X.shape[0] + ops.sum(own) + ops.sum(MEANT * 2) + len(Y)

    loop.strategy.run(code, args=(first(loop),))


def pick(_, array):
    return array[:12]


def last_of(array, by=len):
    return array[by(array) - 12 :]


@pytest.mark.parametrize("find", [lambda: pick(len, X), lambda: last_of(X), lambda: (len(X), X)[1][: X.shape[0] // 2]])
def test_code_that_asks_for_a_size_too_bypasses_nothing(loop, find):
    with pytest.raises(ValueError, match="is not distributed"):
        loop.strategy.run(lambda batch: ops.sum(loop.model(find())) + ops.sum(batch[0]), args=(first(loop),))


MEAN, STD = X.mean(0), X.std(0)
CLASS_WEIGHTS, IDENTITY = np.linspace(0.5, 2, CLASSES).astype("float32"), np.eye(CLASSES, dtype="float32")
TABLE = np.random.default_rng(1).standard_normal((100, 6)).astype("float32")
TABLES = {
    "mean and deviation": lambda x, y: ((x - MEAN) / STD, 1.0),
    "class weights": lambda x, y: (x, ops.take(CLASS_WEIGHTS, y)),
    "class weights of numbers": lambda x, y: (x, ops.convert_to_tensor(CLASS_WEIGHTS)[y]),
    "an identity": lambda x, y: (x, ops.sum(ops.matmul(ops.one_hot(y, CLASSES), IDENTITY), axis=-1)),
    "some rows of a table": lambda x, y: (x + TABLE[:1] + ops.matmul(x, TABLE[:6]), 1.0),
    "rows that the batch chooses": lambda x, y: (ops.take(TABLE, y, axis=0), 1.0),
    "a product of all rows": lambda x, y: (ops.matmul(x, X.T @ X / 24), 1.0),
}


@pytest.mark.parametrize("how", mostly_slow(TABLES, "rows that the batch chooses"))
def test_tables_are_no_rows(how):
    """Also where a replica has six rows, and a row six numbers."""
    loop = Loop(on(1, 4))

    def code(batch):
        x, y = batch

        def loss():
            given, weights = TABLES[how](x, y)
            return loop.loss(y, loop.model(given)) * weights

        value, gradients = un.value_and_grad(loss, loop.model.trainable_variables)
        loop.optimizer.apply(gradients, loop.model.trainable_variables)
        return value

    for batch in loop.strategy.distribute_dataset((X, Y), batch_size=24):
        found = loop.strategy.reduce("SUM", loop.strategy.run(code, args=(batch,)))
    x, weights = TABLES[how](X, Y)
    again = Loop(on(1, 1)).model(x)
    np.testing.assert_allclose(found, np.mean(loop.loss(Y, again) * weights), rtol=1e-5)


ROW_WEIGHTS = np.linspace(0, 1, 24).astype("float32")
AS_ROWS = {
    "weights": lambda loop, x, y: loop.loss(y, loop.model(x)) * ROW_WEIGHTS[:3],
    "as many weights as rows": lambda loop, x, y: loop.loss(y, loop.model(x)) * ROW_WEIGHTS[: len(x)],
    "weights of all": lambda loop, x, y: loop.loss(y, loop.model(x)) * ops.convert_to_tensor(ROW_WEIGHTS)[: len(x)],
    "a table's rows": lambda loop, x, y: loop.loss(y, loop.model(x + TABLE[: len(x)])),
    "weights in a compiled function": lambda loop, x, y: jax.jit(
        lambda losses: losses * ops.convert_to_tensor(ROW_WEIGHTS)[: len(x)]
    )(loop.loss(y, loop.model(x))),
    "labels by hand": lambda loop, x, y: ops.sum(ops.square(loop.model(x) - np.eye(CLASSES, dtype="float32")[Y[:3]]), axis=-1),
    "labels": lambda loop, x, y: loop.loss(Y[: len(x)], loop.model(x)),
    "weights of a loss": lambda loop, x, y: loop.loss(y, loop.model(x), ROW_WEIGHTS[: len(x)]),
    "rows": lambda loop, x, y: loop.loss(y, loop.model(X[: len(x)])),
    "rows by hand": lambda loop, x, y: ops.sum(ops.square(ops.matmul(X[:3], loop.model.trainable_variables[0])), axis=-1),
}


@pytest.mark.parametrize("how", AS_ROWS)
def test_what_meets_the_rows_of_a_replica_is_refused(loop, how):
    def code(batch):
        value, gradients = un.value_and_grad(lambda: AS_ROWS[how](loop, *batch), loop.model.trainable_variables)
        loop.optimizer.apply([g for g in gradients if g is not None], loop.model.trainable_variables)
        return value

    with pytest.raises(ValueError, match="is not distributed"):
        loop.strategy.run(code, args=(first(loop),))


@pytest.mark.filterwarnings("error:Explicitly requested dtype")  # also where the labels are int64, which JAX has as int32
def test_one_replica_may_have_its_arrays_where_it_wants():
    loop = Loop(on(1, 1))

    def code(x, y):
        value, gradients = un.value_and_grad(lambda: loop.loss(y, loop.model(x)), loop.model.trainable_variables)
        loop.optimizer.apply(gradients, loop.model.trainable_variables)
        return value

    found = [
        loop.strategy.run(code, args=(X, Y)),
        loop.strategy.run(lambda: code(X, Y)),
        loop.strategy.run(loop.step, args=((X, Y),)),
    ]
    assert [value.values[0] for value in found] == sorted((float(value.values[0]) for value in found), reverse=True)


def test_an_attribute_of_an_object_is_refused(loop):
    class Trainer:
        def __init__(self):
            self.rows = X

        def step(self):
            return ops.sum(loop.model(self.rows))

    with pytest.raises(ValueError, match=r"by the name 'self.rows'"):
        loop.strategy.run(Trainer().step)


class Settings:
    """An object that is given as an argument."""

    rows = None
    last = None


def test_an_attribute_of_an_argument_is_refused(loop):
    settings = Settings()
    settings.rows = X
    with pytest.raises(ValueError, match=r"by the name 'settings.rows'"):
        loop.strategy.run(lambda settings: ops.sum(loop.model(settings.rows)), args=(settings,))


class WithSlots:
    __slots__ = ("rows",)


def hidden(how, x):
    """Ways by which an array gets into code that no name leads to, or in other form."""
    held = WithSlots()
    held.rows = x
    if how == "computed":
        return lambda: x / 2.0
    if how == "chosen":
        return lambda: x[[3, 1, 2]]
    if how == "an object with slots":
        return lambda: held.rows
    if how == "an iterator":
        batches = iter([x])
        return lambda: next(batches)
    if how == "in a dict":
        return lambda table={"f": lambda: x}: table["f"]()
    return functools.partial(lambda rows=x: rows)


@pytest.mark.parametrize("how", ["computed", "chosen", "an object with slots", "an iterator", "in a dict", "a default"])
def test_a_layer_or_a_loss_gets_no_array_that_is_the_same_for_all(loop, how):
    for array, call in ((X, loop.model), (np.arange(24) % CLASSES, lambda y: loop.loss(y, ops.zeros((len(y), CLASSES))))):
        find = hidden(how, array)
        with pytest.raises(ValueError, match=r"is not distributed: every one of"):
            loop.strategy.run(lambda find=find, call=call: ops.sum(call(find())))


def test_arrays_that_are_no_rows_pass(loop):
    """Labels that are all the same, weights, a few numbers that stand in the data too."""
    labels = np.ones(12, "int64")

    def code(batch):
        assert len(Y) == 24
        predictions = loop.model(batch[0])
        weight = loop.model.trainable_variables[0].value
        few = ops.take(predictions, np.array([1, 0]), axis=1)
        return ops.sum(loop.loss(labels[: len(predictions)], predictions)) + ops.sum(few) + ops.sum(ops.relu(weight))

    loop.strategy.run(code, args=(first(loop),))


def test_replicate_says_that_it_is_meant(loop):
    weights = un.replicate(np.arange(CLASSES, dtype="float32"))
    of_all = loop.strategy.run(lambda x, w: ops.sum(ops.convert_to_tensor(x)) + ops.sum(w), args=(un.replicate(X), weights))
    for value in loop.strategy.local_results(of_all):
        np.testing.assert_allclose(value, X.sum() + 10, rtol=1e-5)
    in_closure = loop.strategy.run(lambda: ops.sum(ops.convert_to_tensor(weights)))
    assert [float(v) for v in loop.strategy.local_results(in_closure)] == [10] * loop.strategy.num_replicas_in_sync


NUMBERS = np.array([1.0, 3.0, 2.0], "float32")
USES = {
    "arithmetic": lambda w: (w + 1) * (2 - w) / w - 1 / (w // 2 + 1) ** 2 + abs(-w) + w % 2,
    "comparisons": lambda w: ops.where((w > 1) & (w != 2) | ~(w >= 3) ^ (w == 3), w, 0),
    "methods": lambda w: w @ w[:, None] + w.sum() + w[1:].mean() + len(w),
    "parts": lambda w: sum(w, start=0.0) + np.float32(2) * w.shape[0],
}


@pytest.mark.parametrize("use", mostly_slow(USES, "comparisons", "methods", "parts"))
def test_a_replicated_array_is_used_like_the_array(loop, use):
    """In code that finds it by its name."""
    w = un.replicate(NUMBERS)
    (value, *_) = loop.strategy.local_results(loop.strategy.run(lambda: USES[use](w)))
    np.testing.assert_allclose(value, USES[use](ops.convert_to_tensor(NUMBERS)), rtol=1e-6)


def test_replicated_trees_are_taken_apart_like_the_tree(loop):
    both, named = un.replicate((NUMBERS, 2 * NUMBERS)), un.replicate({"a": NUMBERS})

    def code():
        first, second = both
        return ops.sum(first) + ops.sum(second) + sum(ops.sum(named[name]) for name in named) + len(both)

    assert float(loop.strategy.local_results(loop.strategy.run(code))[0]) == 26


@pytest.mark.parametrize("pair", [(1, True), (0, False), (1, 1.0)])
def test_arguments_that_are_equal_and_no_less_different(loop, pair):
    """What is compiled for one is not taken for the other."""
    seen = [
        loop.strategy.run(lambda flag: ops.convert_to_tensor(isinstance(flag, bool | float)), args=(of,))
        for of in (*pair, pair[0])
    ]
    assert [bool(loop.strategy.local_results(of)[0]) for of in seen] == [False, True, False]


def test_pipelines_that_all_give_the_same_rows_are_refused():
    strategy = on(1, 4)
    batches = [(X[i : i + 3], Y[i : i + 3]) for i in range(0, 24, 3)]
    dataset = strategy.distribute_datasets_from_function(lambda _: batches)
    with pytest.raises(ValueError, match=r"each of 4 replicas the same rows(.|\n)*context.num_input_pipelines"):
        next(iter(dataset))
    own = strategy.distribute_datasets_from_function(lambda c: batches[c.input_pipeline_id :: c.num_input_pipelines])
    assert len(list(own)) == 2
    constant = strategy.distribute_datasets_from_function(lambda _: [np.zeros((3, 6), "float32")])
    assert len(list(constant)) == 1


def test_an_iterator_around_what_is_compiled_is_refused(loop):
    rows = iter([np.float32(1), np.float32(2)])
    said = r"finds the iterator 'rows' by its name(.|\n)*as an argument: next\(rows\)"
    with pytest.raises(ValueError, match=said):
        loop.strategy.run(lambda: next(rows) * ops.ones(()))
    with pytest.raises(ValueError, match=said):
        un.function(lambda: next(rows) * ops.ones(()))()
    rows = iter([np.float32(1), np.float32(2)])
    assert [float(loop.strategy.reduce("MEAN", loop.strategy.run(lambda x: x * 1, args=(x,)))) for x in rows] == [1, 2]


def test_a_batch_of_a_distributed_dataset_is_trained_on_by_keras_too(loop):
    """By train_on_batch, to what the arrays give."""
    results = []
    for rows in ((X[:12], Y[:12]), first(loop)):
        model = Loop(on(1, 4)).model
        model.compile("sgd", crossentropy())
        results.append((model.train_on_batch(*rows), model.test_on_batch(x=rows[0], y=rows[1]), un.fingerprint(model)))
    assert results[0] == results[1]


def test_numbers_variables_and_python_values_pass(loop):
    scale, unused = np.float32(2), X  # noqa: F841

    def code(batch, factor, name, option=None, variable=None):
        assert name == "name"
        assert option == {"a": [1, 2]}
        assert X.shape == (24, 6)  # looked at, and not computed with
        return ops.sum(batch[0]) * factor * scale + variable

    value = loop.strategy.run(
        code, args=(first(loop), 3.0, "name"), kwargs={"option": {"a": [1, 2]}, "variable": loop.optimizer.learning_rate}
    )
    total = loop.strategy.reduce("SUM", value)
    replicas = loop.strategy.num_replicas_in_sync
    np.testing.assert_allclose(total, 6 * X[:12].sum() + replicas * 0.001, rtol=1e-5)


# 2. Distributed twice.


def test_a_distributed_dataset_is_not_distributed_again(loop):
    dataset = loop.strategy.distribute_dataset((X, Y), batch_size=12)
    with pytest.raises(ValueError, match="is distributed already: iterate over it, or give it to fit"):
        loop.strategy.distribute_dataset(dataset)
    with pytest.raises(ValueError, match="batches of a distributed dataset, which are distributed already"):
        loop.strategy.distribute_dataset(list(dataset))
    with pytest.raises(ValueError, match="is distributed already"):
        loop.strategy.distribute_dataset(iter(dataset))
    for wrapped in ((batch for batch in dataset), zip(dataset, [0, 1], strict=True)):
        with pytest.raises(ValueError, match="batches of a distributed dataset, which are distributed already"):
            next(iter(loop.strategy.distribute_dataset(wrapped)))


@pytest.mark.parametrize("size", [0, -3])
def test_a_batch_of_no_rows(loop, size):
    with pytest.raises(ValueError, match=f"batch_size={size}. It is the rows of a global batch, 1 or more"):
        loop.strategy.distribute_dataset((X, Y), batch_size=size)


def test_what_replicas_have_returned_is_asked_of_their_strategy(loop):
    other = on(1, 3)
    value = loop.strategy.run(lambda batch: ops.sum(batch[0]), args=(first(loop),))
    for call in (lambda: other.reduce("SUM", value), lambda: other.gather(value, 0), lambda: other.local_results(value)):
        with pytest.raises(ValueError, match=r"replicas>, and the strategy has 3. Ask the strategy that ran"):
            call()


# 3. Losses that take a mean of a replica's rows.


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight"])
def test_a_loss_with_a_mean_is_refused(loop, reduction):
    loss_fn = crossentropy(reduction)
    rows = 12 // loop.strategy.num_replicas_in_sync
    with pytest.raises(ValueError, match=rf"reduction='{reduction}'.* the {rows} rows of a replica(.|\n)*reduction=None"):
        loop.strategy.run(lambda batch: loss_fn(batch[1], loop.model(batch[0])), args=(first(loop),))


@pytest.mark.parametrize("reduction", [None, *slow("none", "sum")])
def test_a_loss_without_a_mean_is_right(loop, reduction):
    loss_fn = crossentropy(reduction)

    def code(batch):
        return ops.sum(loss_fn(batch[1], loop.model(batch[0]))) / 12

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = loop.strategy.reduce("SUM", loop.strategy.run(code, args=(first(loop),)))
    np.testing.assert_allclose(value, crossentropy()(Y[:12], loop.model(X[:12])), rtol=1e-5)


# 4. A mean of shares.


@jax.custom_jvp
def unchanged(x):
    return x * 1.0


unchanged.defjvp(lambda primals, tangents: (unchanged(*primals), tangents[0]))
FEEDS = {
    "by hand": lambda losses: ops.sum(losses) / 12,
    "in a checkpoint": lambda losses: jax.checkpoint(lambda losses: ops.sum(losses) / 12)(losses),
    "behind a gradient of its own": lambda losses: unchanged(un.compute_average_loss(losses)),
    "by a factor": lambda losses: ops.sum(losses) * np.float32(1 / 12),
    "the losses divided": lambda losses: ops.sum(losses / 12),
    "in a list": lambda losses: [un.compute_average_loss(losses)],
    "with a dimension": lambda losses: ops.expand_dims(un.compute_average_loss(losses), 0),
    "stacked": lambda losses: ops.stack([un.compute_average_loss(losses), un.compute_average_loss(2 * losses)]),
    "in two halves": lambda losses: 0.5 * un.compute_average_loss(losses) + un.compute_average_loss(losses) / 2,
}


@pytest.mark.parametrize("how", [*slow(*(how for how in FEEDS if how not in ("by hand", "stacked"))), "by hand", "stacked"])
def test_a_mean_that_is_fed_with_a_share_of_the_loss_is_that_of_the_loss(how):
    """In every dress: metrics are of all rows, on which a share is the loss."""
    loop = Loop(on(1, 4))
    with loop.strategy.scope():
        mean = keras.metrics.Mean(name="train_loss")
    loop.strategy.run(lambda batch: mean.update_state(FEEDS[how](loop.loss(batch[1], loop.model(batch[0])))), args=(first(loop),))
    loss = crossentropy()(Y[:12], loop.model(X[:12])) * (1.5 if how == "stacked" else 1)
    np.testing.assert_allclose(mean.result(), loss, rtol=1e-5)


def test_a_share_that_an_earlier_run_returned_is_that_of_its_replica():
    loop = Loop(on(1, 4))
    with loop.strategy.scope():
        mean = keras.metrics.Mean(name="train_loss")
    losses = lambda batch: loop.loss(batch[1], loop.model(batch[0]))
    rows, share = loop.strategy.run(
        lambda batch: (losses(batch), un.compute_average_loss(losses(batch)) + 0.0), args=(first(loop),)
    )
    with pytest.raises(
        ValueError, match=r"'train_loss' is a mean, and is fed with a replica's share of a loss, which an earlier run"
    ):
        loop.strategy.run(mean.update_state, args=(share,))
    loop.strategy.run(mean.update_state, args=(rows,))
    np.testing.assert_allclose(mean.result(), loop.strategy.reduce("SUM", share), rtol=1e-6)


@pytest.mark.parametrize("metric", [keras.metrics.Mean, keras.metrics.BinaryCrossentropy, *slow(keras.metrics.MeanSquaredError)])
def test_as_many_features_as_rows_are_no_share(metric):
    """Twelve of each."""
    strategy, wide = on(1, 4), np.random.default_rng(0).uniform(size=(12, 12)).astype("float32")
    with strategy.scope():
        mean = metric()
    pair = (lambda x: (ops.mean(x, axis=-1),)) if metric is keras.metrics.Mean else lambda x: (x, x / 2)
    (batch,) = strategy.distribute_dataset([wide])
    strategy.run(lambda x: mean.update_state(*pair(x)), args=(batch,))
    alone = metric()
    alone.update_state(*pair(wide))
    np.testing.assert_allclose(mean.result(), alone.result(), rtol=1e-5)


MEANS_OF_A_REPLICA = {
    "a mean": ops.mean,
    "of a stack": lambda losses: ops.mean(ops.stack([losses, losses])),
}
OF_A_REPLICA = {
    "a sum that is divided by 3, the rows of one replica": lambda losses: ops.sum(losses) / 3,
    "a share of a loss times 4, the number of replicas": lambda losses: un.compute_average_loss(losses) * 4,
}


@pytest.mark.parametrize("what", OF_A_REPLICA)
def test_a_mean_metric_that_is_fed_with_a_number_of_a_replica_is_refused(what):
    loop = Loop(on(1, 4))
    with loop.strategy.scope():
        mean = keras.metrics.Mean(name="train_loss")
    with pytest.raises(ValueError, match=rf"'train_loss' is a mean, and is fed with {what}(.|\n)*ops.mean"):
        loop.strategy.run(
            lambda batch: mean.update_state(OF_A_REPLICA[what](loop.loss(batch[1], loop.model(batch[0])))), args=(first(loop),)
        )


@pytest.mark.parametrize("how", mostly_slow(MEANS_OF_A_REPLICA, "a mean"))
def test_a_mean_of_a_replicas_rows_is_no_share(how):
    loop = Loop(on(1, 4))
    with loop.strategy.scope():
        mean = keras.metrics.Mean()
    code = lambda batch: mean.update_state(MEANS_OF_A_REPLICA[how](loop.loss(batch[1], loop.model(batch[0]))))
    loop.strategy.run(code, args=(first(loop),))
    np.testing.assert_allclose(mean.result(), crossentropy()(Y[:12], loop.model(X[:12])), rtol=1e-5)


@pytest.mark.parametrize("how", ["in evaluation", "inside", "from value_and_grad"])
def test_a_mean_metric_that_is_fed_with_a_sum_of_shares_is_that_of_the_sum(how):
    """Program 2's loss: the average over the global batch and its part of the regularization."""
    loop = Loop(on(1, 4))
    with loop.strategy.scope():
        mean = keras.metrics.Mean(name="test_loss")

    def loss(batch):
        losses = loop.loss(batch[1], loop.model(batch[0]))
        value = un.compute_average_loss(losses, global_batch_size=12) + un.scale_regularization_loss([ops.ones(())])
        if how == "inside":
            mean.update_state(value)
        return value

    def code(batch):
        if how == "in evaluation":
            mean.update_state(loss(batch))
            return
        value, _ = un.value_and_grad(lambda: loss(batch), loop.model.trainable_variables)
        if how == "from value_and_grad":
            mean.update_state(value)

    loop.strategy.run(code, args=(first(loop),))
    np.testing.assert_allclose(mean.result(), crossentropy()(Y[:12], loop.model(X[:12])) + 1, rtol=1e-5)


def test_a_mean_metric_of_values_of_examples_is_right(loop):
    with loop.strategy.scope():
        mean = keras.metrics.Mean()
    loop.strategy.run(lambda batch: mean.update_state(loop.loss(batch[1], loop.model(batch[0]))), args=(first(loop),))
    np.testing.assert_allclose(mean.result(), crossentropy()(Y[:12], loop.model(X[:12])), rtol=1e-5)


# 5. Things of somebody else's.


def test_what_was_made_outside_of_the_scope_is_refused():
    strategy = on(1, 4)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(CLASSES)])
    batch = next(iter(strategy.distribute_dataset((X, Y), batch_size=12)))
    with pytest.raises(ValueError, match=r"2 variables that were not made in its scope(.|\n)*with strategy.scope\(\):"):
        strategy.run(lambda batch: model(batch[0]), args=(batch,))
    loop, metric = Loop(strategy), keras.metrics.Mean()
    with pytest.raises(ValueError, match="not made in its scope"):
        loop.strategy.run(lambda batch: metric.update_state(loop.model(batch[0])), args=(batch,))
    loop.optimizer = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="not made in its scope"):
        loop.one(batch)


def test_a_step_of_one_strategy_under_another_is_refused():
    loop, other = Loop(on(1, 4)), on(2, 4)
    batch = next(iter(other.distribute_dataset((X, Y), batch_size=12)))
    with pytest.raises(ValueError, match="not made in its scope"):
        other.run(loop.step, args=(batch,))
    with other.scope(), pytest.raises(ValueError, match="A step belongs to one strategy"):
        loop.strategy.run(loop.step, args=(first(loop),))


def test_collectives_are_refused(loop):
    for code in (lambda batch: jax.lax.psum(ops.sum(batch[0]), "replicas"), lambda batch: jax.lax.axis_index("i")):
        with pytest.raises(ValueError, match=r"one after another: they have nobody to talk to.*strategy.reduce"):
            loop.strategy.run(code, args=(first(loop),))
    with pytest.raises(RuntimeError, match="strategy.reduce"):
        loop.strategy.run(lambda batch: un.get_replica_context().all_reduce("SUM", batch[0]), args=(first(loop),))


# 6. Lines of older programs.


def test_a_dead_attribute_of_an_optimizer_is_refused(loop):
    loop.one(first(loop))
    loop.optimizer.lr = 0.01
    with pytest.raises(AttributeError, match=r"optimizer.lr was set, but Adam has no such.*optimizer.learning_rate = "):
        loop.one(first(loop))
    del loop.optimizer.lr
    loop.optimizer.learning_rate = 0.01
    loop.one(first(loop))
    loop.model.compile(keras.optimizers.SGD(), "mse")
    loop.model.optimizer.momentun = 0.9
    with pytest.raises(AttributeError, match=r"optimizer.momentun was set, but SGD"):
        loop.model.fit(X, np.zeros((24, CLASSES)), verbose=0)


def test_a_dead_attribute_is_refused_outside_of_replica_code(loop):
    total = lambda value: loop.strategy.reduce("SUM", value, axis=None)
    weights = loop.model.trainable_variables
    loss = lambda batch: loop.loss(batch[1], loop.model(batch[0]))
    _, gradients = loop.strategy.run(lambda batch: un.value_and_grad(lambda: loss(batch), weights), args=(first(loop),))
    loop.optimizer.lr = 0.01
    for apply in (loop.optimizer.apply, un.function(lambda g, w: loop.optimizer.apply(g, w))):
        with pytest.raises(AttributeError, match=r"optimizer.lr was set(.|\n)*optimizer.learning_rate = \.\.\."):
            apply([total(g) for g in gradients], weights)
    del loop.optimizer.lr
    before = [np.asarray(w) for w in weights]
    loop.optimizer.apply([total(g) for g in gradients], weights)
    assert any((np.asarray(w) != b).any() for w, b in zip(weights, before, strict=True))


def test_older_names_work(loop):
    with loop.strategy.scope():
        loss = keras.losses.MeanSquaredError(reduction=keras.losses.Reduction.NONE)
        metric = keras.metrics.Mean()
    assert not hasattr(keras.losses, "Reduction")
    loop.strategy.run(lambda batch: metric(loss(batch[0], batch[0] + 2)), args=(first(loop),))
    with loop.strategy.scope():
        assert metric.result().numpy() == pytest.approx(4)
        metric.reset_states()
        with loop.strategy.scope():
            assert metric.result().numpy() == 0
        assert metric.result().numpy() == 0
    assert not hasattr(metric.result(), "numpy")
    with pytest.raises(ValueError, match="one value for each replica, and is used as one array"):
        first(loop)[0].numpy()


# Updates.


def test_reading_an_updated_weight_is_refused_and_two_runs_are_shown(loop):
    def code(batch):
        loop.step(batch)
        return loop.model(batch[0])

    with pytest.raises(
        ValueError, match=r"kernel' after it was updated(.|\n)*strategy.run\(update(.|\n)*strategy.run\(read_what_was_updated"
    ):
        loop.strategy.run(code, args=(first(loop),))


def test_two_updates_of_one_optimizer_are_refused(loop):
    def code(batch):
        _, gradients = un.value_and_grad(lambda: loop.loss(batch[1], loop.model(batch[0])), loop.model.trainable_variables)
        loop.optimizer.apply(gradients, loop.model.trainable_variables)
        loop.optimizer.apply(gradients, loop.model.trainable_variables)

    with pytest.raises(ValueError, match="applies the optimizer 'adam.*' twice.*call strategy.run twice"):
        loop.strategy.run(code, args=(first(loop),))


class Accumulating:
    """Gradients that several runs add up, in the form of TensorFlow's programs."""

    def __init__(self, replicas, devices=1):
        self.loop = Loop(on(devices, replicas), optimizer=lambda: keras.optimizers.SGD(0.1))
        with self.loop.strategy.scope():
            self.sums = [
                keras.Variable(ops.zeros(v.shape), trainable=False, aggregation="sum")
                for v in self.loop.model.trainable_variables
            ]

    def accumulate(self, batch):
        x, y = batch
        _, gradients = un.value_and_grad(lambda: self.loop.loss(y, self.loop.model(x)), self.loop.model.trainable_variables)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)

    def apply(self):
        gradients = [total / 2 for total in self.sums]
        self.loop.optimizer.apply_gradients(zip(gradients, self.loop.model.trainable_variables, strict=True))

    def train(self, apply):
        for batch in self.loop.strategy.distribute_dataset((X, Y), batch_size=12):
            self.loop.strategy.run(self.accumulate, args=(batch,))
        apply()
        for total in self.sums:
            total.assign(ops.zeros(total.shape))
        return un.fingerprint(self.loop.model, self.sums)


def test_accumulated_gradients_are_applied_outside_of_replica_code():
    """The update is that of all rows at once, on any devices; in replica code it would be made R times."""
    inside = Accumulating(4)
    with pytest.raises(
        ValueError, match=r"'sgd.*' in which nothing comes from the replica's rows[\s\S]*4 times too large[\s\S]*outside"
    ):
        inside.train(lambda: inside.loop.strategy.run(inside.apply))
    trained = [Accumulating(4), Accumulating(4, devices=2)]
    first, *others = [one.train(one.apply) for one in trained]
    assert others == [first]
    plain = Loop(on(1, 1), optimizer=lambda: keras.optimizers.SGD(0.1))
    plain.strategy.run(plain.step, args=((X, Y),))
    assert distance(trained[0].loop.model, plain.model) < 1e-6


def test_gradients_are_not_accumulated_and_applied_in_one_run():
    """What earlier runs have left would count once for each replica."""
    of = Accumulating(4)

    def both(batch):
        of.accumulate(batch)
        of.apply()

    with pytest.raises(ValueError, match=r"in which the variable '.*' stands[\s\S]*count 4 times[\s\S]*outside"):
        of.loop.strategy.run(both, args=(next(iter(of.loop.strategy.distribute_dataset((X, Y), batch_size=12))),))


def test_what_apply_gradients_returns_may_be_returned():
    """The optimizer's variable of its updates, as in Keras; its value is the one after the update."""
    loop = Loop(on(2, 4))

    def code(batch):
        _, gradients = un.value_and_grad(lambda: loop.loss(batch[1], loop.model(batch[0])), loop.model.trainable_variables)
        return loop.optimizer.apply_gradients(zip(gradients, loop.model.trainable_variables, strict=True))

    for count, batch in enumerate(loop.strategy.distribute_dataset((X, Y), batch_size=12), 1):
        returned = loop.strategy.run(code, args=(batch,))
        assert returned is loop.optimizer.iterations
        assert int(returned.value) == count


@pytest.mark.filterwarnings("error")
def test_the_older_name_of_reductions_works_in_replica_code(loop):
    """Outside of every scope, and it stays there; the code is compiled once."""
    code = lambda batch: keras.losses.MeanSquaredError(reduction=keras.losses.Reduction.NONE)(batch[0], batch[0] + 2)
    for batch in loop.strategy.distribute_dataset((X, Y), batch_size=12):
        values = loop.strategy.gather(loop.strategy.run(code, args=(batch,)), axis=0)
        np.testing.assert_allclose(values, 4, rtol=1e-6)
    assert not hasattr(keras.losses, "Reduction")


def test_gradients_that_an_earlier_run_returned_are_applied_in_replica_code():
    loop = Loop(on(1, 4))

    def gradients(batch):
        return un.value_and_grad(lambda: loop.loss(batch[1], loop.model(batch[0])), loop.model.trainable_variables)[1]

    def apply(gradients):
        loop.optimizer.apply(gradients, loop.model.trainable_variables)

    before = un.fingerprint(loop.model)
    loop.strategy.run(apply, args=(loop.strategy.run(gradients, args=(first(loop),)),))
    assert un.fingerprint(loop.model) != before


def test_assigning_a_weight_is_refused(loop):
    kernel = loop.model.trainable_variables[0]
    with pytest.raises(ValueError, match="assigns 'sequential.*kernel', a trainable variable"):
        loop.strategy.run(lambda batch: kernel.assign(kernel + 1), args=(first(loop),))


def test_stateless_apply_is_refused(loop):
    loop.optimizer.build(loop.model.trainable_variables)
    with pytest.raises(ValueError, match=r"stateless_apply.*optimizer.apply\(gradients, variables\)"):
        loop.strategy.run(lambda: loop.optimizer.stateless_apply([], [], []))


def test_values_of_replicas_are_not_one_array(loop):
    value = loop.strategy.run(lambda batch: loop.model(batch[0]), args=(first(loop),))
    for use in (np.asarray, jax.numpy.asarray, float, lambda v: v + 1, lambda v: 2 * v, lambda v: v[0], lambda v: v.shape, list):
        with pytest.raises(ValueError, match=r"one value for each replica, and is used as one array.*strategy.reduce"):
            use(value)
    loop.optimizer.build(loop.model.trainable_variables)
    with pytest.raises(ValueError, match="one value for each replica"):
        loop.optimizer.apply([value, value], loop.model.trainable_variables)
    with pytest.raises(ValueError, match="one value for each replica"):
        loop.model(first(loop)[0])


def test_metrics_are_not_read_in_replica_code(loop):
    for name in ("result", "reset_state", "reset_states"):
        with pytest.raises(
            ValueError, match=rf"calls sparse_categorical_accuracy.*\.{name.removesuffix('s')}\(\).*after strategy.run"
        ):
            loop.strategy.run(
                lambda batch, name=name: [
                    loop.accuracy.update_state(batch[1], loop.model(batch[0])),
                    getattr(loop.accuracy, name)(),
                ],
                args=(first(loop),),
            )


def test_what_cannot_be_compiled_is_named(loop):
    def code(batch):
        return float(ops.sum(batch[0]))

    with pytest.raises(ValueError, match="'code' could not run.*neither float"):
        loop.strategy.run(code, args=(first(loop),))
    with pytest.raises(ValueError, match="makes variables anew"):
        loop.strategy.run(lambda: layers.Dense(2)(ops.ones((1, 2))))


def test_an_error_of_code_that_makes_layers_in_each_run_is_raised(loop):
    """And not an error about the layers, which would hide it."""

    def code(batch):
        layers.Dense(2)(batch[0])
        raise KeyError("of the user's")

    with pytest.raises(KeyError, match="of the user's"):
        loop.strategy.run(code, args=(first(loop),))


def test_a_traced_value_that_is_kept_is_named(loop):
    losses, kept = [], {}

    def code(batch):
        losses.append(ops.sum(batch[0]))
        return losses[-1]

    with pytest.raises(ValueError, match=r"keeps a traced value in 'losses'.*Return the value"):
        loop.strategy.run(code, args=(first(loop),))

    @un.function
    def whole(x):
        kept["x"] = x + 1
        return x

    with pytest.raises(ValueError, match=r"keeps a traced value in 'kept'"):
        whole(np.float32(1))


def keep_in_attribute(x, kept):
    kept.last = ops.sum(x)
    return x


def keep_in_deque(x, kept):
    kept.append(ops.sum(x))
    return x


@pytest.mark.parametrize(
    ("code", "kept", "place"), [(keep_in_attribute, Settings, "kept.last"), (keep_in_deque, collections.deque, "kept")]
)
def test_a_traced_value_that_is_kept_in_an_argument_is_named(loop, code, kept, place):
    (x, _), said = first(loop), rf"keeps a traced value in '{place}'.*Return the value"
    with pytest.raises(ValueError, match=said):
        loop.strategy.run(code, args=(x, kept()))
    with pytest.raises(ValueError, match=said):
        un.function(code)(np.float32(1), kept())


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_double_precision_is_refused(loop):
    loop.model.weights[0]._dtype = "float64"
    with pytest.raises(ValueError, match=r"Replica code uses variables of dtype float64 \('.*kernel' among them\)"):
        loop.one(first(loop))


def test_float16_without_a_loss_scale_is_warned_about():
    with policy("mixed_float16"):
        loop = Loop(on(1, 2))
        with pytest.warns(UserWarning, match=r"'adam.*', which scales no loss.*LossScaleOptimizer\(optimizer\)"):
            loop.one(first(loop))


def test_a_function_that_is_made_anew_for_every_step_is_named(loop):
    def three_times():
        for number in range(3):
            loop.strategy.run(lambda number=number: ops.ones(()) * number)

    with pytest.warns(UserWarning, match=r"compiled '<lambda>' .*3 times.*make it once"):
        three_times()


class Step:
    def __init__(self, loop):
        self.loop = loop

    def __call__(self, batch):
        return ops.sum(self.loop.model(batch[0]))


def test_a_callable_that_is_made_anew_for_every_step_is_named(loop):
    with pytest.warns(UserWarning, match=r"compiled 'Step' \(.*checks/user_code/test_loop_mistakes.py:\d+\) 3 times"):
        [loop.strategy.run(Step(loop), args=(first(loop),)) for _ in range(4)]


def test_a_partial_that_is_made_anew_is_compiled_once(loop):
    calls = []

    def code(batch, factor, more=0):
        calls.append(factor)
        return ops.sum(batch[0]) * factor + more

    total = lambda *factors: float(
        loop.strategy.reduce(
            "SUM", loop.strategy.run(functools.partial(code, factor=factors[0], more=factors[1]), args=(first(loop),))
        )
    )
    one = total(2.0, 0)
    traced = len(calls)
    assert total(2.0, 0) == one
    assert len(calls) == traced
    np.testing.assert_allclose(total(2.0, 1), one + loop.strategy.num_replicas_in_sync, rtol=1e-6)


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


def test_a_compiled_function_that_is_made_anew_is_named():
    variable = keras.Variable(1.0)
    with pytest.warns(UserWarning, match=r"un.function has compiled '<lambda>' \(.*:\d+\) in 3 functions that were made anew"):
        results = [float(un.function(lambda x: x * variable)(np.float32(number))) for number in range(4)]
    assert results == [0, 1, 2, 3]


def test_what_is_kept_where_only_setattr_says_so_is_named():
    kept, queue = Loop(on(1, 4)), collections.deque()

    def by_name(x):
        setattr(kept, "last", ops.sum(x))  # noqa: B010
        return x

    def in_queue(x):
        queue.append(ops.sum(x))
        return x

    for code in (by_name, in_queue):
        with pytest.raises(ValueError, match="keeps a traced value in '(kept.last|queue)'"):
            un.function(code)(X)


@pytest.mark.parametrize("where", ["replica code", "a function"])
def test_a_variable_that_is_made_inside_is_named(loop, where):
    code = lambda batch: ops.sum(keras.Variable(1.0) * batch[0])
    with pytest.raises(ValueError, match=r"'<lambda>' makes a variable where it is compiled(.|\n)*build\(input_shape\)"):
        loop.strategy.run(code, args=(first(loop),)) if where == "replica code" else un.function(code)((X, Y))


@pytest.mark.parametrize("where", ["replica code", "a function"])
def test_numpy_of_a_traced_value_is_named(loop, where):
    code = lambda batch: ops.sum(batch[0]).numpy()
    with pytest.raises(ValueError, match=r"neither float\(\), \.numpy\(\) nor if on them"):
        loop.strategy.run(code, args=(first(loop),)) if where == "replica code" else un.function(code)((X, Y))


def test_the_step_of_another_model_is_another_step():
    """Several trainings by one function are no mistake."""
    strategy = on(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            loop = Loop(strategy)
            strategy.run(lambda batch, loop=loop: loop.model(batch[0]), args=(first(loop),))


def test_an_average_loss_of_replicated_rows_is_that_of_all_of_them():
    """There is no global batch then; R replicas have the rows, each of them all."""
    loop = Loop(on(2, 4))
    with loop.strategy.scope():
        mean = keras.metrics.Mean()

    def code(batch):
        values = loop.loss(batch[1], loop.model(ops.convert_to_tensor(batch[0])))
        mean.update_state(values)
        return un.compute_average_loss(values), un.value_and_grad(lambda: values, [])[0]

    found = loop.strategy.reduce("SUM", loop.strategy.run(code, args=(un.replicate((X, Y)),)))
    np.testing.assert_allclose(found, [crossentropy()(Y, loop.model(X))] * 2, rtol=1e-5)
    assert float(mean.count.value) == 24  # as the code has them, on all rows


def test_losses_are_for_replica_code():
    with pytest.raises(RuntimeError, match="un.compute_average_loss is for replica code"):
        un.compute_average_loss(np.ones(3, "float32"))
    with pytest.raises(RuntimeError, match="un.scale_regularization_loss is for replica code"):
        un.scale_regularization_loss(1.0)


# Values that nobody could merge, and updates that nobody could hold back.


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_a_variable_of_ones_own_says_how_it_is_merged(kind):
    loop = Loop(on(1, 4))
    with loop.strategy.scope():
        total = keras.Variable(0, dtype=kind, trainable=False, name="total")
    with pytest.raises(
        ValueError, match=r'assigns .total., a variable of your own(.|\n)*aggregation="sum"(.|\n)*keras.metrics.Sum'
    ):
        loop.strategy.run(lambda batch: total.assign_add(ops.cast(ops.size(batch[1]), kind)), args=(first(loop),))
    assert float(total.value) == 0


def test_an_update_under_a_condition_of_jax_is_refused(loop):
    def code(batch):
        value, gradients = un.value_and_grad(lambda: loop.loss(batch[1], loop.model(batch[0])), loop.model.trainable_variables)
        ops.cond(value > 1e9, lambda: loop.optimizer.apply(gradients, loop.model.trainable_variables), lambda: None)

    loop.one(first(loop))
    before = np.array(loop.model.trainable_variables[0].value)
    with pytest.raises(ValueError, match=r"inside of a function that JAX traces by itself(.|\n)*gradients times ops.cast"):
        loop.strategy.run(code, args=(first(loop),))
    np.testing.assert_array_equal(loop.model.trainable_variables[0].value, before)


def test_an_optimizer_with_a_loss_scale_is_applied_in_replica_code():
    """Elsewhere Keras cannot apply it, and would leave traced values in the weights."""
    loop = Loop(on(1, 4), optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    weights = loop.model.trainable_variables

    def gradients(batch):
        return un.value_and_grad(lambda: loop.loss(batch[1], loop.model(batch[0])), weights)[1]

    total = loop.strategy.reduce("SUM", loop.strategy.run(gradients, args=(first(loop),)))
    before = np.array(weights[0].value)
    with pytest.raises(ValueError, match=r"has a loss scale and is applied outside of replica code"):
        loop.optimizer.apply(total, weights)
    np.testing.assert_array_equal(weights[0].value, before)


@pytest.mark.parametrize("call", ["run", "reduce", "gather", "local_results"])
def test_the_strategy_is_not_asked_in_replica_code(loop, call):
    calls = {
        "run": lambda s, x: s.run(lambda: x),
        "reduce": lambda s, x: s.reduce("MEAN", x),
        "gather": lambda s, x: s.gather(x, axis=0),
        "local_results": lambda s, x: s.local_results(x),
    }
    with pytest.raises(RuntimeError, match=rf"Replica code calls strategy.{call}, but a replica knows"):
        loop.strategy.run(lambda batch: calls[call](loop.strategy, batch[0]), args=(first(loop),))


def test_what_is_put_into_an_argument_is_named(loop):
    def code(batch, kept):
        kept["loss"] = ops.sum(batch[0])

    with pytest.raises(ValueError, match=r"'code' puts something into an argument"):
        loop.strategy.run(code, args=(first(loop), {}))
    with pytest.raises(ValueError, match=r"puts something into an argument"):
        un.function(lambda kept, x: kept.append(x))([], np.float32(1))


def replace_item(x, kept):
    kept["losses"][0] = ops.sum(x)


def replace_number(*them):
    them[1]["losses"][0] += 1


@pytest.mark.parametrize(("code", "place"), [(replace_item, "kept['losses'][0]"), (replace_number, "args[1]['losses'][0]")])
def test_what_replaces_an_item_of_an_argument_is_named(loop, code, place):
    kept = {"losses": [0, 1]}
    said = re.escape(
        f"The function {code.__name__!r} puts another value into {place}, where nobody will find it when the function is compiled. Return "
        f"it instead; what only the function needs, it puts into a copy: list(argument), dict(argument)."
    )
    (x, _) = first(loop)
    with pytest.raises(ValueError, match=said):
        loop.strategy.run(code, args=(x, kept))
    with pytest.raises(ValueError, match=said):
        un.function(code)(np.float32(1), kept)
    if code is replace_item:
        with pytest.raises(ValueError, match=said):
            loop.strategy.run(code, args=(x,), kwargs={"kept": kept})
    assert kept == {"losses": [0, 1]}


def test_a_copy_of_an_argument_may_be_changed(loop):
    def code(batch):
        batch = dict(enumerate(batch))
        batch[0] = batch[0] / 2
        batch.pop(1)
        return ops.sum(batch[0])

    total = loop.strategy.reduce("SUM", loop.strategy.run(code, args=(first(loop),)))
    np.testing.assert_allclose(total, X[:12].sum() / 2, rtol=1e-5)
    np.testing.assert_allclose(un.function(code)([X[:12], Y[:12]]), X[:12].sum() / 2, rtol=1e-5)


def test_an_object_with_arrays_in_it_is_not_returned(loop):
    class Result:
        def __init__(self, loss):
            self.loss = loss

    with pytest.raises(ValueError, match=r"returns a Result with arrays in it(.|\n)*a named tuple"):
        loop.strategy.run(lambda batch: Result(ops.sum(batch[0])), args=(first(loop),))


def test_a_mean_by_hand_over_a_replicas_rows_is_warned_about(loop):
    """Whose gradients are R times too large; with one replica, or divided by R, it is right."""
    replicas = loop.strategy.num_replicas_in_sync
    weights = loop.model.trainable_variables

    def code(batch, by=1.0):
        return un.value_and_grad(lambda: ops.mean(loop.loss(batch[1], loop.model(batch[0]))) / by, weights)[0]

    *_, ragged = loop.strategy.distribute_dataset((X[:19], Y[:19]), batch_size=12)
    if replicas == 1:
        loop.strategy.run(code, args=(first(loop),))
        loop.strategy.run(code, args=(ragged,))
        return
    with pytest.warns(
        UserWarning, match=r"stays the same where a replica's rows are taken twice.*4 times the mean over the global batch of 12"
    ):
        loop.strategy.run(code, args=(first(loop),))
    loop.strategy.run(lambda batch: code(batch, by=4), args=(first(loop),))


DIVIDED = {
    "a constant of no batch": (
        lambda losses, n: ops.sum(losses) / 100,
        r"divides a sum by 100, and this global batch has 12 rows",
    ),
    "a constant behind a gradient of its own": (lambda losses, n: unchanged(ops.sum(losses)) / 100, r"divides a sum by 100"),
    "the rows of one replica": (
        lambda losses, n: ops.sum(losses) / 3.0,
        r"divides a sum by 3, and this global batch has 12 rows",
    ),
    "twice": (lambda losses, n: losses / 12, r"divides the loss of each example by 12, and the engine.*12 rows.*divided twice"),
    "twice, in an average": (lambda losses, n: un.compute_average_loss(losses / 12), r"divides the loss of each example by 12"),
    "twice, in an average by a size": (
        lambda losses, n: un.compute_average_loss(losses / 12, global_batch_size=12),
        r"divides the loss of each example by 12, and the engine.*divided twice. Give the losses as they are",
    ),
    "twice, behind an average": (
        lambda losses, n: un.compute_average_loss(losses) / 12,
        r"divides by 12 what un.compute_average_loss returned.*divided twice. Return it as it is.*write 0.0833 \* loss",
    ),
    "twice, behind an average by a size": (
        lambda losses, n: 0.1 + un.compute_average_loss(losses, global_batch_size=12) / 12,
        r"divides by 12 what un.compute_average_loss returned",
    ),
    "by the replicas, behind an average": (
        lambda losses, n: un.compute_average_loss(losses) / 4,
        r"divides by 4 what un.compute_average_loss returned",
    ),
    "by the replicas, in an average": (
        lambda losses, n: un.compute_average_loss(losses / 4),
        r"divides the loss of each example by 4, and the engine",
    ),
    "a sum, by the rows and the replicas": (
        lambda losses, n: ops.sum(losses) / 12 / 4,
        r"divides a sum, or its gradients, by the examples of the global batch and by 4 replicas too.*divided twice",
    ),
    "weights of a replica": (
        lambda losses, n: ops.average(losses, weights=losses + 1),
        r"stays the same where a replica's rows are taken twice, as a mean",
    ),
    "weights of a replica, by the replicas": (
        lambda losses, n: ops.average(losses, weights=losses + 1) / 4,
        r"makes of all rows together what is not made of their parts",
    ),
    "a regularizer": (
        lambda losses, n: un.compute_average_loss(losses) + 0.01 * ops.sum(ops.square(WEIGHTS[0])),
        r"adds to its loss, in each of 4 replicas.*a regularizer: it counts 4 times.*un.scale_regularization_loss",
    ),
}
WEIGHTS = []


def divided(how, form):
    loop = Loop(on(1, 4))
    WEIGHTS[:] = loop.model.trainable_variables
    code = lambda batch, n: un.value_and_grad(lambda: form(loop.loss(batch[1], loop.model(batch[0])), n), WEIGHTS)[0]
    loop.strategy.run(code, args=(first(loop), np.float32(12 if how in RIGHT else 128)))


@pytest.mark.parametrize(
    "how",
    mostly_slow(
        DIVIDED,
        "a constant of no batch",
        "twice",
        "twice, behind an average",
        "a sum, by the rows and the replicas",
        "weights of a replica",
        "weights of a replica, by the replicas",
        "a regularizer",
    ),
)
def test_a_loss_that_is_divided_by_another_number_is_warned_about(how):
    form, said = DIVIDED[how]
    with pytest.warns(UserWarning, match=said):
        divided(how, form)


RIGHT = {
    "the rows": lambda losses, n: ops.sum(losses) / 12,
    "the rows, as an argument": lambda losses, n: ops.sum(losses) / n,
    "the rows of a replica, and the replicas": lambda losses, n: ops.sum(losses) / (len(losses) * 4),
    "the rows, and halved": lambda losses, n: 0.5 * ops.sum(losses) / 12,
    "a sum": lambda losses, n: ops.sum(losses),
    "half a sum": lambda losses, n: ops.sum(losses) / 2,
    "weighted": lambda losses, n: un.compute_average_loss(losses) / 10 + 3 * un.compute_average_loss(losses),
    "weighted by a quarter": lambda losses, n: 0.25 * un.compute_average_loss(losses) + un.compute_average_loss(losses * 0.25),
    "weighted examples": lambda losses, n: losses * 0.3,
    "a regularizer": lambda losses, n: (
        un.compute_average_loss(losses) + un.scale_regularization_loss(ops.sum(ops.square(WEIGHTS[0])))
    ),
    "a regularizer over R": lambda losses, n: ops.sum(losses) / 12 + 0.01 * ops.sum(ops.square(WEIGHTS[0])) / 4,
    "a regularizer in each example": lambda losses, n: losses + 0.01 * ops.sum(ops.square(WEIGHTS[0])),
    "a number": lambda losses, n: ops.sum(losses) / 12 + 1.0,
    "a count that is an argument": lambda losses, n: ops.sum(losses * ops.ones((3,))) / (n + 53),
    "by the replicas": lambda losses, n: ops.sum(losses) / 4,
    "the rows, and four values of each": lambda losses, n: ops.sum(ops.expand_dims(losses, 1) * ops.ones((3, 4))) / 12 / 4,
    "a mean of two shares": lambda losses, n: ops.mean(
        ops.stack([un.compute_average_loss(losses), un.compute_average_loss(2 * losses)])
    ),
    "a learned weight": lambda losses, n: ops.exp(-WEIGHTS[1][0]) * un.compute_average_loss(losses),
    "values of each token": lambda losses, n: un.compute_average_loss(
        ops.expand_dims(losses, 1) * ops.ones((3, 7)), global_batch_size=12 * 7
    ),
    "as many features as rows": lambda losses, n: ops.mean(ops.expand_dims(losses, 1) * ops.ones((3, 12)), axis=-1),
    "a weight of examples": lambda losses, n: losses * (1 / 12),
}


COMMON = ("the rows", "weighted", "a regularizer")


@pytest.mark.parametrize("how", mostly_slow(RIGHT, *COMMON))
def test_a_loss_that_is_divided_rightly_is_not(how):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divided(how, RIGHT[how])


TWICE = {
    "the losses of examples": (
        lambda losses: losses,
        r"divides by 4 the gradients that un.value_and_grad returned.*they are divided twice. Apply them as they are",
    ),
    "an average": (un.compute_average_loss, r"divides by 4 the gradients that un.value_and_grad returned"),
    "a sum over the rows": (
        lambda losses: ops.sum(losses) / 12,
        r"divides a sum, or its gradients, by the examples.*divided twice",
    ),
}


def apply_quarters(form, change=lambda gradient: gradient / 4):
    """Train on one batch with gradients over R, of losses in this form, and return the weights."""
    loop = Loop(on(1, 4))
    weights = loop.model.trainable_variables
    with loop.strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(weights)

    def code(batch):
        _, gradients = un.value_and_grad(lambda: form(loop.loss(batch[1], loop.model(batch[0]))), weights)
        optimizer.apply([change(gradient) for gradient in gradients], weights)

    loop.strategy.run(code, args=(first(loop),))
    return [np.asarray(weight.value) for weight in weights]


@pytest.mark.parametrize("how", mostly_slow(TWICE, "the losses of examples", "a sum over the rows"))
def test_gradients_that_are_divided_twice_are_warned_about(how):
    form, said = TWICE[how]
    with pytest.warns(UserWarning, match=said):
        apply_quarters(form)


@pytest.mark.slow
def test_a_multiple_of_gradients_that_divides_by_the_replicas_is_warned_about():
    with pytest.warns(UserWarning, match=r"divides by 4 the gradients that un.value_and_grad returned"):
        apply_quarters(lambda losses: losses, lambda gradient: 0.25 * gradient)


def test_gradients_of_a_mean_over_a_replicas_rows_may_be_divided_by_the_replicas():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divided_gradients = apply_quarters(ops.mean)
        of_a_batch = apply_quarters(lambda losses: losses, lambda gradient: gradient)
        apply_quarters(lambda losses: losses, lambda gradient: 0.3 * gradient)
    for one, other in zip(divided_gradients, of_a_batch, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_number_of_pythons_that_changes_is_named():
    step = un.function(lambda x, rate: x * rate)
    with pytest.warns(UserWarning, match=r"compiled '<lambda>' 3 times(.|\n)*np.float32\(value\)"):
        results = [float(step(np.float32(2), rate)) for rate in (1, True, 1.5, 2.5)]
    assert results == [2, 2, 3, 5]
