"""What is wrong with the data is said in our words, or has a defined result, and the model can go on."""

import numpy as np
import pytest

from sources import Batches, Endless
from trainings import dense_with_momentum, fitting, labels, net, on, rows, run
from unisono._src.processes import agreement

X, Y = rows(43, 5), labels(43, 3)


def untrained(strategy):
    return run(dense_with_momentum, lambda model: model.build((None, 5)), strategy).model


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_endless_data_without_steps_is_refused(call):
    """The error says which argument bounds an epoch."""
    with pytest.raises(ValueError, match=r"The dataset has no end.*steps"):
        getattr(untrained(on(3)), call)(Endless((X, Y)), verbose=0, **({"shuffle": False} if call == "fit" else {}))


@pytest.mark.compat
def test_endless_tf_data_without_steps_is_refused():
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10).repeat()
    with pytest.raises(ValueError, match="no end"):
        untrained(on(3)).fit(dataset, shuffle=False, verbose=0)
    run(dense_with_momentum, fitting(dataset, steps_per_epoch=3), on(3))


@pytest.mark.compat
@pytest.mark.parametrize("how", ["fit", "loop"])
def test_tf_data_that_is_divided_by_files_is_refused_in_several_processes(monkeypatch, how):
    tf = pytest.importorskip("tensorflow")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).with_options(options).batch(10)
    strategy = on(3)
    begin = {
        "fit": lambda: run(dense_with_momentum, fitting(dataset), strategy),
        "loop": lambda: strategy.distribute_dataset(dataset),
    }[how]
    begin()  # where this process is alone it means nothing
    monkeypatch.setattr(agreement, "_current", [agreement.Agreement(0, 2)])
    with pytest.raises(ValueError, match="AutoShardPolicy.FILE, by which each worker reads files of its own"):
        begin()


@pytest.mark.slow
def test_endless_validation_data_is_refused():
    with pytest.raises(ValueError, match=r"no end.*validation_steps"):
        run(dense_with_momentum, fitting(X, Y, batch_size=10, validation_data=Endless((X, Y))), on(3))


@pytest.mark.parametrize("data", [(X[:0], Y[:0]), (Batches((X[:0], Y[:0])),)])
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_empty_data_is_refused(data, call):
    """No batch at all is an error, not an epoch without a loss."""
    with pytest.raises(ValueError, match="The dataset is empty"):
        getattr(untrained(on(3)), call)(*data, verbose=0)


def test_labels_that_do_not_fit_the_outputs_are_explained():
    """The first line of the error is ours: which model, which shapes."""
    with pytest.raises(ValueError, match=r"A step of the model 'sequential\w*' could not run on the first batch[\s\S]*\(10, 2\)"):
        run(net(3), fitting(X, rows(43, 2), batch_size=10), on(3))


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"43.*42|cardinality"):
        run(dense_with_momentum, fitting(X, Y[:42], batch_size=10), on(3))
    with pytest.raises(ValueError, match=r"Batch 4 holds arrays of 3 and 2 rows|Batch 4 holds arrays of 2 and 3 rows"):
        run(dense_with_momentum, fitting(Batches((X, Y[:42]))), on(3))


def test_text_is_refused():
    with pytest.raises(ValueError, match=r"no device can hold.*StringLookup"):
        run(dense_with_momentum, fitting(Batches((np.array([["a"] * 5] * 10), Y[:10]), 5)), on(3))
