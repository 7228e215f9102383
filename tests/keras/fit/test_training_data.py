"""Every source of data gives the same training, each row once, in an order that is a rule."""

import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from sizes import ROWS_AT_ONCE, cases, mostly_slow, slow
from sources import PIPELINES, Batches, Endless, generated, pipelines
from trainings import assert_equals_keras, assert_same_bits, dense_with_momentum, fitting, labels, on, rows, run
from unisono._src.engine import global_batch

X, Y = rows(43, 5), labels(43, 3)
STEPS = -(-43 // ROWS_AT_ONCE)


ARRAYS = fitting(X, Y, batch_size=ROWS_AT_ONCE, epochs=2)


@pytest.fixture(scope="module")
def of_arrays():
    """What two epochs of arrays, unshuffled, give."""
    return run(dense_with_momentum, ARRAYS, on(3)).bits


SOURCES = {
    "PyDataset": lambda model: fitting(Batches((X, Y), ROWS_AT_ONCE), epochs=2)(model),
    "PyDataset with two workers": lambda model: fitting(Batches((X, Y), ROWS_AT_ONCE, workers=2), epochs=2)(model),
    "endless PyDataset": lambda model: fitting(Endless((X, Y), ROWS_AT_ONCE), epochs=2, steps_per_epoch=STEPS)(model),
    "generator": lambda model: fitting(generated((X, Y), ROWS_AT_ONCE, times=2), epochs=2, steps_per_epoch=STEPS)(model),
    "JAX arrays": lambda model: fitting(
        keras.ops.convert_to_tensor(X), keras.ops.convert_to_tensor(Y), batch_size=ROWS_AT_ONCE, epochs=2
    )(model),
    "arrays of another order of bytes": lambda model: fitting(
        X.astype(">f4"), Y.astype(">i8"), batch_size=ROWS_AT_ONCE, epochs=2
    )(model),
    "shards of an epoch": lambda model: [fitting(X, Y, batch_size=ROWS_AT_ONCE)(model) for _ in range(2)][1],
}


DEEPER = ("PyDataset with two workers", "endless PyDataset")


@pytest.mark.parametrize("source", mostly_slow(SOURCES, *(name for name in SOURCES if name not in DEEPER)))
def test_every_source_trains_what_arrays_train(source, of_arrays):
    """The same rows in the same order: the same bits as from arrays."""
    found = run(dense_with_momentum, SOURCES[source], on(3))
    assert found.bits[0] == of_arrays[0]
    assert {name: values[-1] for name, values in found.bits[1].items()} == {n: v[-1] for n, v in of_arrays[1].items()}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras asks a grain dataset for no length
@pytest.mark.parametrize("name", pipelines())
def test_pipelines_train_what_arrays_train(name, of_arrays):
    assert run(dense_with_momentum, fitting(**PIPELINES[name]((X, Y), ROWS_AT_ONCE), epochs=2), on(3)).bits == of_arrays


def test_sparse_matrices_train_what_arrays_train(of_arrays):
    """Rows of a scipy matrix are the rows of the array."""
    sparse = pytest.importorskip("scipy.sparse")
    assert run(dense_with_momentum, fitting(sparse.csr_matrix(X), Y, batch_size=ROWS_AT_ONCE, epochs=2), on(3)).bits == of_arrays


@pytest.mark.slow
def test_batches_of_many_rows():
    """They are read in place by one replica, the last one, which is smaller, is not, and steps come one by one or several in a call."""
    size = global_batch.IN_PLACE_BYTES // X[0].nbytes + 1
    x, y = np.tile(X, (size // len(X) + 2, 1)), np.tile(Y, size // len(Y) + 2)
    one_by_one = fitting(generated((x, y), size), steps_per_epoch=2)
    assert (
        run(dense_with_momentum, fitting(x, y, batch_size=size), on(1, 1)).bits
        == run(dense_with_momentum, one_by_one, on(1, 1)).bits
    )
    assert_equals_keras(dense_with_momentum, fitting(x, y, batch_size=size), replicas=(1,))


def test_shuffled_arrays():
    """A shuffled order is the same on every placement, another in every epoch, and not that of the arrays."""
    shuffled = assert_same_bits(
        dense_with_momentum, fitting(X, Y, batch_size=ROWS_AT_ONCE, epochs=2, shuffle=True), devices=cases((1, 3), (1, 3, 8))
    )
    assert shuffled.bits != run(dense_with_momentum, ARRAYS, on(3)).bits


@pytest.mark.parametrize("shuffle", [True, *slow("batch")])
def test_two_fits_of_one_epoch_are_one_fit_of_two(shuffle):
    """The order of rows goes on where it was: the model's epochs are counted over its life."""
    once = run(dense_with_momentum, fitting(X, Y, batch_size=ROWS_AT_ONCE, epochs=2, shuffle=shuffle), on(3))
    twice = run(
        dense_with_momentum,
        lambda model: [fitting(X, Y, batch_size=ROWS_AT_ONCE, shuffle=shuffle)(model) for _ in range(2)][0],
        on(3),
    )
    assert un.fingerprint(once.model) == un.fingerprint(twice.model)
    assert twice.logs["loss"] == once.logs["loss"][:1]
    again = run(
        dense_with_momentum,
        lambda model: (keras.utils.set_random_seed(7), fitting(X, Y, batch_size=ROWS_AT_ONCE, epochs=2, shuffle=shuffle)(model))[
            1
        ],
        on(3),
    )
    assert un.fingerprint(again.model) != un.fingerprint(once.model), "another seed is another order"


def summing(batch_of_rows):
    """A model whose weight, after an epoch, is minus the sum of the rows that it was trained on."""

    def build():
        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1.0), Total())
        return model

    return run(build, batch_of_rows, on(3)).model


class Total(keras.losses.Loss):
    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return y_pred


@pytest.mark.parametrize(("count", "batch"), [(14, 8), (31, 10), (10, 12), (9, 2), (1, 32)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_is_trained_on_once(count, batch, shuffle):
    """The sum of all rows, exactly: none is left out, none padded, none used twice."""
    x = 2.0 ** np.arange(count, dtype="float32")[:, None] if count < 20 else np.arange(count, dtype="float32")[:, None] + 1
    steps = []
    count_steps = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    model = summing(fitting(x, np.zeros_like(x), batch_size=batch, shuffle=shuffle, callbacks=[count_steps]))
    assert float(model.weights[0].value[0, 0]) == -x.sum()
    assert steps == list(range(-(-count // batch)))


VALIDATIONS = {
    "arrays": {"validation_data": (X[:7], Y[:7])},
    "weighted arrays": {"validation_data": (X[:7], Y[:7], np.abs(X[:7, 0]))},
    "a part of the data": {"validation_split": 0.3},
    "a dataset": {"validation_data": Batches((X[:17], Y[:17]), 6)},
    "a dataset, two steps of it": {"validation_data": Batches((X[:17], Y[:17]), 6), "validation_steps": 2},
    "every second epoch": {"validation_data": (X[:7], Y[:7]), "validation_freq": 2},
    "named epochs": {"validation_data": (X[:7], Y[:7]), "validation_freq": [1, 3], "validation_batch_size": 3},
}


@pytest.mark.parametrize("how", mostly_slow(VALIDATIONS, "weighted arrays", "named epochs"))
def test_validation(how):
    """Loss and metrics of the held-out rows, in the epochs that were asked for, equal plain Keras'."""
    assert_equals_keras(dense_with_momentum, fitting(X, Y, batch_size=ROWS_AT_ONCE, epochs=2, **VALIDATIONS[how]), devices=(3,))


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Explicitly requested dtype")
def test_whole_numbers_of_64_bits_are_no_warning_of_jax():
    """JAX has them in 32 bits, and says so where it is told of them as they are."""
    x = np.arange(40).reshape(10, 4) % 5
    with on(2, 4).scope():
        model = keras.Sequential([layers.Embedding(5, 3, mask_zero=True), layers.GlobalAveragePooling1D(), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(x, x[:, 0] % 3, batch_size=4, verbose=0)
    model.evaluate(x, x[:, 0] % 3, batch_size=4, verbose=0)
    assert x.dtype == "int64"
    assert model.predict(x, batch_size=4, verbose=0).shape == (10, 3)
