"""Distributed datasets: every source, lengths, positions, the replicas' own pipelines, and fit on them."""

import signal
import warnings

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unisono as un
from loops import Loop, crossentropy, data
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
