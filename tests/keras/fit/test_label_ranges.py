"""Integer labels that are no class: their loss would be 0, in Keras on JAX without a word."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, losses

from trainings import labels, on, rows

X, Y = rows(24, 4), labels(24, 3)
SPARSE = losses.SparseCategoricalCrossentropy(from_logits=True)


def compile_model(loss=SPARSE, replicas=2, sequence=False):
    keras.utils.set_random_seed(0)
    with on(1, replicas).scope():
        head = [layers.RepeatVector(2)] if sequence else []
        model = keras.Sequential([keras.Input((4,)), *head, layers.Dense(3)])
    model.compile("sgd", loss)
    return model


def put(value, *index, y=Y):
    y = np.array(y)
    y[index] = value
    return y


@pytest.mark.parametrize(("value", "replicas"), [(3, 2), (-1, 1)])
def test_a_label_out_of_range_is_named_with_its_row(value, replicas):
    expected = rf"The label of row 2 of batch 1 is {value}, and the output has 3 classes, whose labels are 0 to 2\. The loss"
    with pytest.raises(ValueError, match=expected):
        compile_model(replicas=replicas).fit(X, put(value, 10), batch_size=8, shuffle=False, verbose=0)


def test_the_row_of_the_data_is_named_where_rows_are_shuffled():
    with pytest.raises(ValueError, match=r", which is row 10 of the data, is 7, and the output has 3 classes"):
        compile_model().fit(X, put(7, 10), batch_size=8, verbose=0)


def test_the_first_batch_is_looked_at_too():
    many = put(9, slice(0, 3))
    with pytest.raises(ValueError, match=r"row 0 of batch 0 is 9.*, and 2 more of this batch are out of range too\. The loss"):
        compile_model().evaluate(X, many, batch_size=8, verbose=0)


def test_labels_of_sequences_and_of_several_outputs_are_looked_at():
    y = np.stack([Y, Y], 1)
    with pytest.raises(ValueError, match="The label of row 3 of batch 0 is 5"):
        compile_model(sequence=True).fit(X, put(5, 3, 1, y=y), batch_size=8, shuffle=False, verbose=0)
    with on(1, 2).scope():
        x = keras.Input((4,))
        model = keras.Model(x, {"a": layers.Dense(9, name="a")(x), "b": layers.Dense(3, name="b")(x)})
    model.compile("sgd", {"a": SPARSE, "b": SPARSE})
    targets = {"a": put(8, 0), "b": Y}
    model.fit(X, targets, batch_size=8, shuffle=False, verbose=0)
    with pytest.raises(ValueError, match="The label of row 1 of batch 0 is 4, and the output has 3 classes"):
        model.fit(X, targets | {"b": put(4, 1)}, batch_size=8, shuffle=False, verbose=0)


def test_labels_that_do_not_count_may_have_any_value():
    weights = put(0, 10, y=np.ones(24, "float32"))
    compile_model().fit(X, put(-1, 10)[:, None], sample_weight=weights, batch_size=8, verbose=0)
    ignoring = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=255)
    model = compile_model(ignoring)
    model.fit(X, put(255, slice(0, 9)), batch_size=8, verbose=0)
    with pytest.raises(ValueError, match="is 254, and the output has 3 classes"):
        model.fit(X, put(254, 9), batch_size=8, verbose=0)


def test_labels_under_a_mask_may_have_any_value():
    with on(1, 2).scope():
        model = keras.Sequential([keras.Input((2,), dtype="int32"), layers.Embedding(5, 4, mask_zero=True), layers.Dense(3)])
    model.compile("sgd", SPARSE)
    tokens = np.stack([Y + 1, 0 * Y], 1)
    model.fit(tokens, np.stack([Y, 0 * Y - 1], 1), batch_size=8, verbose=0)
