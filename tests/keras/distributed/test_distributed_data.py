"""Distributed datasets: every source, lengths, positions, the replicas' own pipelines, and fit on them."""

import re
import signal
import warnings

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

import unisono as un
from loops import CLASSES, Loop, crossentropy, data
from sizes import cases, mostly_slow, slow
from sources import PIPELINES, Batches, generated, pipelines
from trainings import on
from unisono._src.engine import global_batch

X, Y = data("dense", 43)
FEW, SIZE = (X[:20], Y[:20]), 8
"""Batches in which each of eight replicas has one row or none, which is one program."""


class Iterable:
    """What can be iterated over again and again."""

    def __iter__(self):
        return generated(FEW, SIZE)


SOURCES = {
    "arrays": lambda strategy: strategy.distribute_dataset(FEW, batch_size=SIZE),
    "a list": lambda strategy: strategy.distribute_dataset(list(generated(FEW, SIZE))),
    "an iterable": lambda strategy: strategy.distribute_dataset(Iterable()),
    "a PyDataset": lambda strategy: strategy.distribute_dataset(Batches(FEW, SIZE)),
    "a PyDataset with workers": lambda strategy: strategy.distribute_dataset(Batches(FEW, SIZE, workers=2)),
    "arrays of JAX": lambda strategy: strategy.distribute_dataset(tuple(map(keras.ops.convert_to_tensor, FEW)), batch_size=SIZE),
}


@pytest.fixture(scope="module")
def of_arrays():
    return Loop(on(1), batch_size=SIZE).train(*FEW)


def trained_on(source, strategy):
    loop = Loop(strategy)
    dataset = source(strategy)
    for _ in range(2):
        loop.whole_epoch(dataset)
    return loop.train(X, Y, epochs=0)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_trains_what_arrays_train(source, of_arrays):
    assert trained_on(SOURCES[source], on(3)) == of_arrays


@pytest.mark.parametrize("name", pipelines())
def test_pipelines_train_what_arrays_train(name, of_arrays):
    dataset = PIPELINES[name](FEW, SIZE)["x"]
    assert trained_on(lambda strategy: strategy.distribute_dataset(dataset), on(3)) == of_arrays


def test_lengths_and_positions():
    strategy = on(2, 4)
    dataset = strategy.distribute_dataset((X, Y), batch_size=10)
    assert len(dataset) == 5
    assert dataset.position == (0, 0)
    seen = [(batch[0].shape[0], dataset.position) for _ in range(2) for batch in dataset]
    assert seen == [(rows, (p, b + 1)) for p in range(2) for b, rows in enumerate((10, 10, 10, 10, 3))]
    assert len(strategy.distribute_dataset([X, Y])) == 2
    with pytest.raises(TypeError, match="does not know how many batches"):
        len(strategy.distribute_dataset(Iterable()))


def test_the_order_is_drawn_at_the_first_pass():
    """As in fit: a seed that is set after the dataset was distributed counts."""
    datasets = [on(1, 2).distribute_dataset(np.arange(20), batch_size=20, shuffle=True) for _ in range(2)]
    orders = []
    for dataset in datasets:
        keras.utils.set_random_seed(5)
        orders.append([batch.array.tolist() for _ in range(2) for batch in dataset])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_the_end_of_the_data_uses_every_row_once():
    """An iterator that runs out in the middle of a loop."""
    dataset = on(2, 4).distribute_dataset(np.arange(31), batch_size=10)
    batches, seen = iter(dataset), []

    def ten_steps():
        for _ in range(10):
            seen.append(np.concatenate(next(batches).values))

    with pytest.raises(StopIteration):
        ten_steps()
    assert [len(rows) for rows in seen] == [10, 10, 10, 1]
    assert np.concatenate(seen).tolist() == list(range(31))


@pytest.mark.filterwarnings("ignore:A batch of")
@given(st.integers(1, 40), st.integers(1, 15), st.integers(1, 9))
def test_every_row_goes_to_one_replica(rows, batch_size, replicas):
    strategy = on(1, replicas)
    seen = [part for batch in strategy.distribute_dataset(np.arange(rows), batch_size=batch_size) for part in batch.values]
    assert np.concatenate(seen).tolist() == list(range(rows))
    assert all(
        max(map(len, of)) - min(map(len, of)) <= 1 for of in (seen[i : i + replicas] for i in range(0, len(seen), replicas))
    )


def test_nested_batches():
    strategy = on(1, 2)
    rows = {"a": X, "b": (Y, [X])}
    batch = next(iter(strategy.distribute_dataset(rows, batch_size=8)))
    assert batch["a"].shape == (8, 6)
    np.testing.assert_array_equal(batch["b"][1][0].values[1], X[4:8])
    value = strategy.run(lambda batch: batch["b"][0] + 1, args=(batch,))
    assert strategy.gather(value, axis=0).tolist() == (Y[:8] + 1).tolist()


def test_what_is_no_dataset():
    strategy = on(1, 2)
    with pytest.raises(ValueError, match=r"a tuple without batch_size. Write distribute_dataset\(..., batch_size=n\)"):
        strategy.distribute_dataset((X, Y))
    with pytest.raises(ValueError, match="which has batches of its own. Leave it out"):
        strategy.distribute_dataset([X], batch_size=3)
    with pytest.raises(TypeError, match="It takes a list or another iterable"):
        strategy.distribute_dataset(3)
    with pytest.raises(ValueError, match="cannot shuffle a list"):
        strategy.distribute_dataset([X], shuffle=True)
    stream = strategy.distribute_dataset(generated((X, Y)))
    assert len(list(stream)) == 5
    with pytest.raises(ValueError, match="made of a generator, which was read once"):
        list(stream)


def test_batches_of_different_numbers_of_rows():
    strategy = on(1, 2)
    first, second = (next(iter(strategy.distribute_dataset([X[:rows]]))) for rows in (4, 6))
    with pytest.raises(ValueError, match=r"arrays of 4 and 6 rows, from different global batches.*zipping"):
        strategy.run(lambda a, b: a.sum() + b.sum(), args=(first, second))


class Asked:
    """Says which batch it was asked for."""

    def __init__(self, batches):
        self.batches = batches
        self.asked = []

    def __iter__(self):
        for number, batch in enumerate(self.batches):
            self.asked.append(number)
            yield batch
        self.asked.append("the end")


def test_the_next_batch_is_read_and_sent_when_the_devices_have_begun(monkeypatch):
    """One behind what lies ready. Rows are sent once, also where two runs take them."""
    sent, send = [], global_batch.send_blocks

    def watched(batches, rows, *where):
        sent.extend(int(batch.array[own.start]) for batch in batches for own in rows if own)
        return send(batches, rows, *where)

    monkeypatch.setattr(global_batch, "send_blocks", watched)
    strategy, source = on(2, 4), Asked([np.arange(8) + 10 * number for number in range(4)])
    total = un.function(lambda batch: strategy.reduce("SUM", strategy.run(lambda rows: rows.sum(), args=(batch,)), axis=None))
    asked, seen, sums = [], [], []
    for batch in strategy.distribute_dataset(source):
        before = len(source.asked)
        for _ in range(2):
            sums.append(int(total(batch)))
        asked.append(source.asked[before:])
        seen.append(sorted(sent))
        sent.clear()
    assert sums == [28, 28, 108, 108, 188, 188, 268, 268]
    assert asked == [[2], [3], ["the end"], []]
    assert seen == [[0, 4, 10, 14], [20, 24], [30, 34], []]


def test_an_error_of_the_data_comes_in_its_turn():
    def broken():
        yield X[:12]
        raise OSError("the disk is gone")

    class Broken:
        __iter__ = staticmethod(broken)

    strategy = on(1, 2)
    batches = iter(strategy.distribute_dataset(Broken()))
    strategy.run(lambda rows: rows.sum(), args=(next(batches),))
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_nothing_is_taken_from_a_generator_ahead_of_time():
    strategy, stream = on(1, 2), generated((X, Y), 12)
    for batch in strategy.distribute_dataset(stream):
        strategy.run(lambda batch: batch[0].sum(), args=(batch,))
        break
    assert len(list(stream)) == 3


# The replicas' own pipelines.


def pipelines(strategy, rows, size, drop=False):
    def of_replica(context):
        mine = rows[context.input_pipeline_id :: context.num_input_pipelines]
        stop = len(mine) // size * size if drop else len(mine)
        return [mine[start : start + size] for start in range(0, stop, size)]

    return strategy.distribute_datasets_from_function(of_replica)


def test_a_pipeline_for_each_replica():
    """The second one ends first."""
    found = [[part.tolist() for part in batch.values] for batch in pipelines(on(1, 2), np.arange(9), 2)]
    assert found == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8], []]]
    dropped = pipelines(on(2, 2), np.arange(9), 2, drop=True)
    assert [[part.tolist() for part in batch.values] for batch in dropped] == found[:2]
    assert len(dropped) == 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 0, 3, 2), *slow(((0, 2, 2, 0),), ((3, 3, 0, 1),), ((0, 0, 0, 4),))])
def test_rows_that_were_dealt_out_train_to_the_same_bits(sizes):
    """Whatever the number of rows of each replica, none among them, on one device and on several, in a loop and in fit."""

    def dataset(strategy):
        ends = np.cumsum((0, *sizes))

        def of_replica(context):
            rows = slice(ends[context.input_pipeline_id], ends[context.input_pipeline_id + 1])
            return [(X[rows], Y[rows])] * 2 if rows.stop > rows.start else []

        return strategy.distribute_datasets_from_function(of_replica)

    seen = {trained_on(dataset, on(devices, 4)) for devices in cases((1, 3), (1, 2, 3, 4))}
    for devices in cases((1,), (1, 3)):
        keras.utils.set_random_seed(0)
        loop = Loop(on(devices, 4))
        loop.model.compile(loop.optimizer, crossentropy())
        loop.model.fit(dataset(loop.strategy), epochs=2, verbose=0)
        seen.add(loop.train(X, Y, epochs=0))
    assert len(seen) == 1


@pytest.mark.parametrize("sizes", [(0, 2, 2, 2), *slow(((0, 0, 1, 1),), ((0, 3, 0, 0),), ((1, 0, 1, 1),))])
def test_a_replica_keeps_its_number_whichever_replicas_have_rows(sizes):
    """It draws the random numbers of its number, in fit and in a loop, also where it is the first with rows."""
    ends = np.cumsum((0, *sizes))

    def of_replica(context):
        rows = slice(ends[context.input_pipeline_id], ends[context.input_pipeline_id + 1])
        return [(X[rows], Y[rows])] * 2 if rows.stop > rows.start else []

    def train(devices):
        keras.utils.set_random_seed(0)
        strategy = on(devices, 4)
        with strategy.scope():
            model = keras.Sequential([layers.Dropout(0.5), layers.Dense(5)])
        model.compile("sgd", crossentropy())
        dataset = strategy.distribute_datasets_from_function(of_replica)
        model.fit(dataset, verbose=0)
        number = lambda x, y: un.get_replica_context().replica_id_in_sync_group + 0 * keras.ops.cast(y[:1], "int32")
        numbers = [strategy.gather(strategy.run(number, args=batch), axis=0).tolist() for batch in dataset]
        return un.fingerprint(model), numbers

    found = [train(devices) for devices in cases((1, 3), (1, 2, 4))]
    assert found == found[:1] * len(found)
    assert found[0][1] == [[replica for replica, size in enumerate(sizes) if size]] * 2


class Steps(layers.Layer):
    """Counts steps, and draws random numbers."""

    def __init__(self, growth=1):
        super().__init__()
        self.growth = growth
        self.seeds = keras.random.SeedGenerator(1)
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="steps")

    def call(self, x):
        self.steps.assign(self.steps + self.growth)
        return x + keras.random.normal((), seed=self.seeds)


@pytest.mark.parametrize("devices", [3, *slow(1)])
def test_state_moves_on_where_the_first_replica_has_no_rows_left(devices):
    def of_replica(context):
        me = context.input_pipeline_id
        return [(X[2 * me : 2 * me + 2], Y[2 * me : 2 * me + 2])] * (4 if me else 1)

    strategy = on(devices, 3)
    with strategy.scope():
        model = keras.Sequential([Steps(), layers.Dense(5)])
    model.compile("sgd", crossentropy())
    model.fit(strategy.distribute_datasets_from_function(of_replica), verbose=0)
    assert int(model.layers[0].steps.value) == 4
    assert np.asarray(model.layers[0].seeds.state.value).tolist() == [1, 4]


def test_a_large_growth_of_an_integer_is_that_of_one_replica():
    """The sum over replicas has more than 32 bits."""
    strategy = on(1, 4)
    with strategy.scope():
        model = keras.Sequential([Steps(growth=1_000_000_007), layers.Dense(5)])
    model.compile("sgd", crossentropy())
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert int(model.layers[0].steps.value) == 1_000_000_007


def test_sizes_of_replicas():
    sizes = []
    on(1, 4).distribute_datasets_from_function(lambda context: sizes.append(context.get_per_replica_batch_size(12)) or [X])
    assert sizes == [3, 3, 3, 3]
    with pytest.raises(ValueError, match=r"12 rows cannot be dealt out evenly to 5 replicas.*strategy.distribute_dataset"):
        on(1, 5).distribute_datasets_from_function(lambda context: [context.get_per_replica_batch_size(12)])
    with pytest.raises(ValueError, match="It must return a replica's batches"):
        on(1, 2).distribute_datasets_from_function(lambda context: (X, Y))


# fit, evaluate and predict on them.


def test_fit_takes_distributed_datasets():
    """And calls callbacks as often as on the data itself."""

    def trained(distributed):
        loop, calls = Loop(on(2, 4)), []
        data = [(X[:16], Y[:16]), (X[16:24], Y[16:24])]
        if distributed:
            x, validation = (loop.strategy.distribute_dataset(rows, batch_size=SIZE) for rows in data)
        else:
            x, validation = (Batches(rows, SIZE) for rows in data)
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: calls.append(("train", batch)),
            on_epoch_end=lambda epoch, logs: calls.append(("epoch", epoch)),
        )
        loop.model.compile(loop.optimizer, crossentropy(), metrics=["accuracy"])
        history = loop.model.fit(x, validation_data=validation, epochs=2, verbose=0, shuffle=False, callbacks=[count]).history
        evaluated = loop.model.evaluate(validation, verbose=0, return_dict=True)
        assert evaluated["loss"] == history["val_loss"][-1]
        rows = X[:16]
        predicted = loop.model.predict(
            loop.strategy.distribute_dataset(rows, batch_size=SIZE) if distributed else rows, SIZE, verbose=0
        )
        assert predicted.shape == (16, CLASSES)
        return loop.train(X, Y, epochs=0), history, calls, predicted.tolist()

    assert trained(True) == trained(False)


class Shared:
    """An iterable that gives one generator again and again."""

    def __init__(self):
        self._batches = generated((X, Y), 12)

    def __iter__(self):
        return self._batches


WHOLE = X[:24], Y[:24]
"""Batches of twelve, all of them whole."""


def of_pipeline(context):
    return [rows[context.input_pipeline_id :: 4] for rows in WHOLE]


STREAMS = {
    "a generator": lambda strategy: strategy.distribute_dataset(generated(WHOLE, 12)),
    "a generator for each replica": lambda strategy: strategy.distribute_datasets_from_function(
        lambda context: generated(of_pipeline(context), 3)
    ),
}


def fresh(strategy, built=True):
    """A model that Keras builds, or whose metrics it builds, by looking at the first batch."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([layers.Input(X.shape[1:])] if built else [])
        model.add(layers.Dense(CLASSES))
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    return model


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # by Keras, at the end of any stream
@pytest.mark.parametrize("kind", mostly_slow(STREAMS, "a generator"))
@pytest.mark.parametrize("built", [True, *slow(False)])
def test_keras_may_look_at_the_first_batch_of_a_stream(kind, built):
    """Every batch is then trained on once, and in later epochs the stream is over."""
    strategy = on(1, 4)
    make = STREAMS[kind]
    listed = strategy.distribute_dataset(list(generated(WHOLE, 12))) if kind == "a generator" else None
    model, again = fresh(strategy, built), fresh(strategy, built)
    history = model.fit(make(strategy), verbose=0).history
    again.fit(
        listed or strategy.distribute_datasets_from_function(lambda context: list(generated(of_pipeline(context), 3))),
        verbose=0,
    )
    assert un.fingerprint(model) == un.fingerprint(again)
    assert len(history["loss"]) == 1
    assert fresh(strategy, built).evaluate(make(strategy), verbose=0) == pytest.approx(
        fresh(strategy, built).evaluate(*WHOLE, batch_size=12, verbose=0), rel=1e-5
    )
    with pytest.raises(ValueError, match="made of a generator, which was read once"):
        fresh(strategy, built).fit(make(strategy), epochs=2, verbose=0)


@pytest.mark.parametrize("built", [False, *slow(True)])
def test_a_look_at_the_first_batch_is_no_pass(built):
    """The rows of a shuffled dataset come in the order of fit, whether Keras has looked at the first batch or not."""
    strategy = on(1, 4)

    def trained(**options):
        model = fresh(strategy)
        if built:
            model.train_on_batch(X[:12], Y[:12])
            model.optimizer.learning_rate = 0.1
        model.fit(**options, epochs=2, verbose=0)
        return un.fingerprint(model)

    shuffled = strategy.distribute_dataset(WHOLE, batch_size=12, shuffle=True)
    assert trained(x=shuffled) == trained(x=WHOLE[0], y=WHOLE[1], batch_size=12)
    assert shuffled.source.order.passes == 2


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", ["stream", "arrays"])
def test_prediction_builds_a_model_by_the_first_batch(kind):
    strategy = on(1, 4)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(2)])
    batches = ((x,) for x, _ in generated((X, Y), 12))
    dataset = strategy.distribute_dataset(batches) if kind == "stream" else strategy.distribute_dataset(X, batch_size=12)
    predicted = model.predict(dataset, verbose=0)
    assert predicted.shape == (43, 2)
    np.testing.assert_array_equal(predicted, model.predict(X, batch_size=12, verbose=0))


def test_steps_of_an_epoch_go_on_in_a_stream():
    strategy = on(1, 4)
    taken = []

    def batches():
        for batch in generated((X, Y), 12):
            taken.append(len(batch[0]))
            yield batch

    dataset = strategy.distribute_dataset(batches())
    model = fresh(strategy)
    model.fit(dataset, steps_per_epoch=1, epochs=2, verbose=0)
    assert taken == [12, 12]
    with pytest.raises(ValueError, match="made of a generator, which was read once"):
        model.fit(dataset, steps_per_epoch=1, verbose=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_iterable_that_is_a_stream_loses_no_batch_in_silence():
    strategy = on(1, 4)
    with pytest.raises(ValueError, match="made of a generator, which was read once"):
        fresh(strategy).fit(strategy.distribute_dataset(Shared()), verbose=0)
    shared = strategy.distribute_dataset(Shared())
    assert sum(batch[0].shape[0] for batch in shared) == 43
    with pytest.raises(ValueError, match="made of a generator, which was read once"):
        next(iter(shared))


def test_a_dataset_of_another_strategy():
    loop = Loop(on(2, 4))
    loop.model.compile("sgd", crossentropy())
    with pytest.raises(ValueError, match="distributed to 3 replicas, and the model belongs to"):
        loop.model.fit(on(1, 3).distribute_dataset([(X, Y)]), verbose=0)
    with pytest.raises(ValueError, match="of a dataset that was distributed to 3 replicas"):
        loop.strategy.run(lambda x: x, args=(next(iter(on(1, 3).distribute_dataset([X]))),))


def test_batches_smaller_than_r_are_warned_about_once():
    """They look like a replica's batches where global ones are due. One alone is the last of a pass, or of a pass that is repeated."""
    strategy = on(1, 4)
    with strategy.scope():
        model = keras.Sequential([layers.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    calls = {
        "fit": lambda rows, size: model.fit(rows, rows[:, :1], batch_size=size, epochs=2, verbose=0),
        "evaluate": lambda rows, size: [model.evaluate(rows, rows[:, :1], batch_size=size, verbose=0) for _ in range(2)],
        "a loop": lambda rows, size: [list(dataset) for dataset in [strategy.distribute_dataset(rows, size)] for _ in range(2)],
        "a repeated dataset": lambda rows, size: list(
            strategy.distribute_dataset([rows[:size], rows[:1], rows[:size], rows[:1]])
        ),
    }
    x = X.astype("float32")
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call(x[:9], 4)
            assert [str(one.message) for one in said] == [], name
            call(x[:6], 2)
        assert len(said) == 1, name
        assert re.search(r"Batches of [12] rows for 4 replicas: .*global.*4 times as large", str(said[0].message))


@pytest.mark.compat
def test_what_tensorflow_has_distributed_is_answered():
    tf = pytest.importorskip("tensorflow")
    of_tensorflow = tf.distribute.MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(data("dense", 24)).batch(12)
    )
    loop = Loop(on(1, 4))
    loop.model.compile("sgd", crossentropy())
    calls = {
        "model.fit": lambda: loop.model.fit(of_tensorflow, verbose=0),
        "model.evaluate": lambda: loop.model.evaluate(of_tensorflow, verbose=0),
        "model.predict": lambda: loop.model.predict(of_tensorflow, verbose=0),
        "strategy.distribute_dataset": lambda: loop.strategy.distribute_dataset(of_tensorflow),
        "strategy.run": lambda: loop.strategy.run(loop.step, args=(of_tensorflow,)),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"{name} received a DistributedDataset, [\s\S]*the tf.data dataset itself"):
            call()


@pytest.fixture
def _handler_of_children():
    """Torch sets one of its own."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.usefixtures("_handler_of_children")
def test_workers_of_torch_that_are_forked_are_warned_of():
    torch = pytest.importorskip("torch")
    x, y = data("dense", 24)

    def loader(**options):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y)), 12, **options)

    loop = Loop(on(1, 4))
    loop.model.compile("sgd", crossentropy())
    loop.model.fit(loader(), verbose=0, shuffle=False)
    loop.strategy.distribute_dataset(loader(num_workers=1, multiprocessing_context="forkserver"))
    with pytest.warns(UserWarning, match=r"forks this process for its 1 workers[\s\S]*multiprocessing_context='forkserver'"):
        loop.model.fit(loader(num_workers=1, multiprocessing_context="fork"), verbose=0, shuffle=False)
    with pytest.warns(UserWarning, match="forks this process"):
        next(iter(loop.strategy.distribute_dataset(loader(num_workers=1, multiprocessing_context="fork"))))


@pytest.mark.compat
@pytest.mark.usefixtures("_handler_of_children")
def test_an_order_of_torch_that_other_code_changes_is_warned_of_where_it_is_to_be_resumed(tmp_path):
    torch = pytest.importorskip("torch")
    x, y = data("dense", 24)
    rows = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    loop = Loop(on(1, 4))
    loop.model.compile("sgd", crossentropy())

    def fit(callbacks=(), **options):
        loop.model.fit(torch.utils.data.DataLoader(rows, 12, **options), verbose=0, shuffle=False, callbacks=list(callbacks))

    def backup():
        return [un.callbacks.BackupAndRestore(tmp_path / "b")]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The DataLoader shuffles")
        fit(shuffle=True)
        fit(backup(), shuffle=True, generator=torch.Generator().manual_seed(0))
        fit(backup())
    with pytest.warns(UserWarning, match=r"shuffles by torch's global generator.*generator=torch.Generator\(\).manual_seed\(0\)"):
        fit(backup(), shuffle=True)
    dataset = loop.strategy.distribute_dataset(torch.utils.data.DataLoader(rows, 12, shuffle=True))
    with pytest.warns(UserWarning, match="shuffles by torch's global generator"):
        loop.model.fit(dataset, verbose=0, callbacks=backup())
    with pytest.warns(UserWarning, match="shuffles by torch's global generator"):
        un.Checkpoint(data=dataset)
