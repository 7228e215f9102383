"""Arrays that are not distributed reach every replica: where they are rows they are refused, and tables, weights and sizes pass."""

import collections
import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from loops import CLASSES, Loop, crossentropy, data
from sizes import mostly_slow
from trainings import on

X, Y = data("dense", 24)


@pytest.fixture
def loop():
    return Loop(on(1, 4))


class Slotted:
    """What an array is kept in."""

    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = rows


class Trainer:
    def __init__(self, loop):
        self.loop = loop
        self.rows = X

    def step(self, batch):
        return ops.sum(self.loop.model(self.rows))


def pick(_, array):
    return array[:12]


def last_of(array, by=len):
    return array[by(array) - 12 :]


def kept_by_nobody(how, x):
    """Ways by which an array gets into code that no name leads to."""
    if how == "an iterator":
        batches = iter([x])
        return lambda: next(batches)
    if how == "in a dict":
        return lambda table={"f": lambda: x}: table["f"]()
    return functools.partial(lambda rows=x: rows)


HELD, QUEUE, BUNCH = Slotted(X), collections.deque([X]), type("Bunch", (dict,), {})(data=X)
ROWS, ONE_ROW, EQUAL_ROWS, ARRAY = [X[i] for i in range(24)], X[:1], np.ones((24, 6), "float32"), jax.numpy.asarray(X[:8])
NAMED = {
    "an array": lambda: X,
    "an array of JAX": lambda: ARRAY,
    "some rows": lambda: X[3:9],
    "divided": lambda: X / 2,
    "chosen": lambda: X[[3, 1, 2]],
    "labels": lambda: Y + 1,
    "a product": lambda: X.T @ X,
    "columns": lambda: X[:, :-1].repeat(6, 1),
    "stacked": lambda: np.stack(ROWS),
    "a queue's": lambda: QUEUE[0],
    "an object's with slots": lambda: HELD.rows,
    "of a dict of its own kind": lambda: BUNCH["data"],
    "one row": lambda: ONE_ROW,
    "equal rows": lambda: EQUAL_ROWS,
    "computed equal rows": lambda: EQUAL_ROWS / 2,
    "given to another function": lambda: pick(len, X),
    "given with its size": lambda: last_of(X),
    "beside its size": lambda: (len(X), X)[1][: X.shape[0] // 2],
}
UNNAMED = ("an iterator", "in a dict", "a default")


@pytest.mark.parametrize("how", NAMED)
def test_an_array_around_the_code_is_refused_by_its_name(loop, how):
    """Beside rows of the batch, and whatever is computed of it."""
    find = NAMED[how]
    with pytest.raises(ValueError, match=r"by the name '\w+(\.rows)?' and is not distributed(.|\n)*un.replicate"):
        loop.run(lambda batch: ops.sum(loop.model(ops.reshape(ops.cast(find(), "float32"), (-1, 6)))) * ops.sum(batch[0]))


@pytest.mark.parametrize("how", UNNAMED)
def test_an_array_that_no_name_leads_to_is_refused(loop, how):
    """In code without arguments, for a layer and for a loss."""
    for array, call in ((X, loop.model), (np.arange(24) % CLASSES, lambda y: loop.loss(y, ops.zeros((len(y), CLASSES))))):
        find = kept_by_nobody(how, array)
        with pytest.raises(ValueError, match=r"is not distributed: every one of"):
            loop.strategy.run(lambda find=find, call=call: ops.sum(call(find())))


ARGUMENTS = {
    "a batch": (lambda loop: (loop.step, ((X, Y),), {}), r"shape \(24, 6\).*every one of the 4 replicas.*same 24 rows(.|\n)*un.replicate"),
    "by a keyword": (lambda loop: (loop.step, (), {"batch": (ops.convert_to_tensor(X), Y)}), "as an argument and is not distributed"),
    "of code without any": (lambda loop: (lambda: ops.sum(X), (), {}), "by the name 'X' and is not distributed"),
    "of a partial": (lambda loop: (functools.partial(loop.model, X), (), {}), "is not distributed"),
    "an attribute": (lambda loop: (Trainer(loop).step, (loop.first(),), {}), "by the name 'self.rows'"),
    "an argument's": (lambda loop: (lambda held: ops.sum(loop.model(held.rows)), (HELD,), {}), "by the name 'held.rows'"),
}  # fmt: skip


@pytest.mark.parametrize("how", ARGUMENTS)
def test_an_array_in_an_argument_or_in_an_object_is_refused(loop, how):
    arguments, said = ARGUMENTS[how]
    code, args, kwargs = arguments(loop)
    with pytest.raises(ValueError, match=said):
        loop.strategy.run(code, args=args, kwargs=kwargs)


TABLE = np.random.default_rng(1).standard_normal((100, 6)).astype("float32")
ROW_WEIGHTS = np.linspace(0, 1, 24).astype("float32")
MEETING = {
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


@pytest.mark.parametrize("how", MEETING)
def test_what_meets_the_rows_of_a_replica_is_refused(loop, how):
    def code(batch):
        return un.value_and_grad(lambda: MEETING[how](loop, *batch), loop.model.trainable_variables)[0]

    with pytest.raises(ValueError, match="is not distributed"):
        loop.run(code)


MEAN, STD = X.mean(0), X.std(0)
CLASS_WEIGHTS, IDENTITY = np.linspace(0.5, 2, CLASSES).astype("float32"), np.eye(CLASSES, dtype="float32")
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
def test_tables_are_no_rows(loop, how):
    """Also where a replica has six rows, and a row six numbers."""

    def code(batch):
        x, y = batch

        def loss():
            given, weights = TABLES[how](x, y)
            return loop.loss(y, loop.model(given)) * weights

        return un.value_and_grad(loss, loop.model.trainable_variables)[0]

    (batch,) = loop.strategy.distribute_dataset((X, Y), batch_size=24)
    x, weights = TABLES[how](X, Y)
    expected = np.mean(loop.loss(Y, loop.model(x)) * weights)
    np.testing.assert_allclose(loop.strategy.reduce("SUM", loop.strategy.run(code, args=(batch,))), expected, rtol=1e-5)


class Scaled(layers.Layer):
    """Has arrays of its own: as long as the batch, and as the features."""

    def __init__(self):
        super().__init__()
        self.betas = np.linspace(0.1, 1, 6, dtype="float32")
        self.scales = self.betas * np.ones((24, 1), "float32")

    def add_noise(self, x):
        return x + self.betas

    def call(self, x):
        return x * self.betas * ops.sum(self.scales, axis=0)


class WeightedSum(keras.metrics.Sum):
    def __init__(self):
        super().__init__()
        self.w = np.linspace(0, 1, CLASSES, dtype="float32")

    def update_state(self, values):
        super().update_state(ops.sum(values * self.w, axis=-1))


def test_what_a_layer_or_a_metric_has_and_what_the_code_makes_pass(loop):
    """Whatever shapes are alike, and beside arrays of which only the size is used."""
    marks = np.eye(24, dtype="float32")[3]
    with loop.strategy.scope():
        layer, weighted, embedding, auc = Scaled(), WeightedSum(), layers.Embedding(6, 4), keras.metrics.AUC(num_thresholds=24)

    def code(batch):
        x, y = batch
        weighted.update_state(loop.model(x))
        auc.update_state(ops.cast(y > 0, "float32"), ops.sigmoid(x[:, 0]))
        smoothed = ops.one_hot(y, CLASSES) @ (0.9 * np.eye(CLASSES, dtype="float32") + 0.02)
        own = np.float32([[1, 2], [3, 4]]) @ ops.ones((2, 1))
        here = layer.add_noise(x) + layer(x) + np.eye(6, dtype="float32")[0]
        return len(marks) + ops.sum(here) / X.shape[0] + ops.sum(smoothed) + ops.sum(own) + ops.sum(embedding(np.arange(6)))

    loop.run(code)


def test_equal_labels_numbers_variables_and_python_values_pass(loop):
    """Beside an array that is looked at, and not computed with."""
    ones, unused, scale = np.ones(12, "int64"), X, np.float32(2)  # noqa: F841

    def code(batch, factor, name, option=None, variable=None):
        assert (name, option, X.shape, len(Y)) == ("name", {"a": [1, 2]}, (24, 6), 24)
        predictions = loop.model(batch[0])
        few = ops.sum(ops.take(predictions, np.array([1, 0]), axis=1)) + ops.sum(loop.loss(ones[: len(predictions)], predictions))
        return ops.sum(batch[0]) * factor * scale + variable + 0 * few

    named = {"option": {"a": [1, 2]}, "variable": loop.optimizer.learning_rate}
    total = loop.strategy.reduce("SUM", loop.strategy.run(code, args=(loop.first(), 3.0, "name"), kwargs=named))
    np.testing.assert_allclose(total, 6 * X[:12].sum() + 4 * 0.001, rtol=1e-5)


@pytest.mark.filterwarnings("error:Explicitly requested dtype")  # also where the labels are int64, which JAX has as int32
def test_one_replica_may_have_its_arrays_where_it_wants():
    loop = Loop(on(1, 1))

    def code(x, y):
        value, gradients = loop.differentiate((x, y))
        loop.apply(gradients)
        return value

    runs = [(code, (X, Y)), (lambda: code(X, Y), ()), (loop.step, ((X, Y),))]
    found = [loop.strategy.run(function, args=args).values[0] for function, args in runs]
    assert found == sorted(map(float, found), reverse=True)


# What is replicated is meant.

NUMBERS = np.array([1.0, 3.0, 2.0], "float32")
REPLICATED_ROWS, REPLICATED_LABELS = un.replicate(X[:3]), un.replicate(Y[:3])
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
    """Also as an argument, which every replica has whole."""
    both, named = un.replicate((NUMBERS, 2 * NUMBERS)), un.replicate({"a": NUMBERS})

    def code(whole):
        first, second = both
        parts = ops.sum(first) + ops.sum(second) + sum(ops.sum(named[name]) for name in named) + len(both)
        return parts, ops.sum(ops.convert_to_tensor(whole))

    for parts, whole in loop.strategy.local_results(loop.strategy.run(code, args=(un.replicate(X),))):
        assert float(parts) == 26
        np.testing.assert_allclose(whole, X.sum(), rtol=1e-5)


def test_replicated_arrays_are_given_to_layers_and_losses(loop):
    parts = un.replicate([X[:3], Y[:3]])

    def code(batch):
        given = loop.loss(parts[1], loop.model(parts[0])) + loop.loss(REPLICATED_LABELS, loop.model(REPLICATED_ROWS))
        return ops.sum(given) + 0 * ops.sum(batch[0])

    found = loop.strategy.reduce("MEAN", loop.run(code))
    np.testing.assert_allclose(found, 2 * ops.sum(crossentropy(None)(Y[:3], loop.model(X[:3]))), rtol=1e-5)


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


# Data that is the same everywhere, or distributed twice.


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
    for run in (loop.strategy.run, lambda code: un.function(code)()):
        with pytest.raises(ValueError, match=r"finds the iterator 'rows' by its name(.|\n)*as an argument: next\(rows\)"):
            run(lambda: next(rows) * ops.ones(()))
    rows = iter([np.float32(1), np.float32(2)])
    assert [float(loop.strategy.reduce("MEAN", loop.strategy.run(lambda x: x * 1, args=(x,)))) for x in rows] == [1, 2]


def test_a_batch_of_a_distributed_dataset_is_trained_on_by_keras_too(loop):
    """By train_on_batch, to what the arrays give."""
    results = []
    for rows in ((X[:12], Y[:12]), loop.first()):
        model = Loop(on(1, 4)).model
        model.compile("sgd", crossentropy())
        results.append((model.train_on_batch(*rows), model.test_on_batch(x=rows[0], y=rows[1]), un.fingerprint(model)))
    assert results[0] == results[1]


def test_a_distributed_dataset_is_not_distributed_again(loop):
    dataset = loop.strategy.distribute_dataset((X, Y), batch_size=12)
    for again, said in (
        (dataset, "is distributed already: iterate over it, or give it to fit"),
        (iter(dataset), "is distributed already"),
        (list(dataset), "batches of a distributed dataset, which are distributed already"),
        ((batch for batch in dataset), "batches of a distributed dataset, which are distributed already"),
        (zip(dataset, [0, 1], strict=True), "batches of a distributed dataset, which are distributed already"),
    ):
        with pytest.raises(ValueError, match=said):
            next(iter(loop.strategy.distribute_dataset(again)))


@pytest.mark.parametrize("size", [0, -3])
def test_a_batch_of_no_rows(loop, size):
    with pytest.raises(ValueError, match=f"batch_size={size}. It is the rows of a global batch, 1 or more"):
        loop.strategy.distribute_dataset((X, Y), batch_size=size)


def test_what_replicas_have_returned_is_asked_of_their_strategy(loop):
    other = on(1, 3)
    value = loop.run(lambda batch: ops.sum(batch[0]))
    for call in (lambda: other.reduce("SUM", value), lambda: other.gather(value, 0), lambda: other.local_results(value)):
        with pytest.raises(ValueError, match=r"replicas>, and the strategy has 3. Ask the strategy that ran"):
            call()
