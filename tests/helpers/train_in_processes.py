"""One of several processes that train together, or the only one: runs checks in turn and prints what came out, as JSON.

python train_in_processes.py '[{"check": "loop", "replicas": 8}]'        unisono launch --processes 2 train_in_processes.py ...

The first entry may say what holds for the process: its cores.
"""

import functools
import json
import os
import signal
import sys

import keras
import numpy as np

import unisono as un

specs = json.loads(sys.argv[1])
if "cores" in specs[0]:  # of each process; it counts them when JAX starts
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: specs[0]["cores"][int(os.environ["UNISONO_PROCESS"])]])
strategies = [
    un.MultiWorkerMirroredStrategy(devices=spec.get("devices"), replicas=spec["replicas"], shard=spec.get("shard"))
    for spec in specs
]  # starts JAX

import families
import frozen_nets
import whole_batch_families
from loops import MODELS, Loop, crossentropy, data


def fit(strategy, spec):
    """A family's fingerprints and history."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, compile_, rows = families.FAMILIES[spec["family"]]()
    model.compile(**compile_)
    rows |= {name: rows[name][: spec.get("rows")] for name in ("x", "y")}
    validation = {"validation_data": (rows["x"], rows["y"]), "validation_batch_size": families.BATCH}
    history = model.fit(**rows, **validation, batch_size=families.BATCH, epochs=1, verbose=0)
    predictions = model.predict(rows["x"], batch_size=families.BATCH, verbose=0)
    few = model.predict(rows["x"][:3], verbose=0)
    return [un.fingerprint(model), history.history, un.fingerprint(predictions), un.fingerprint(few)]


def whole_batch(strategy, spec):
    """A training that looks at the whole batch: fingerprint and history."""
    done = whole_batch_families.train(whole_batch_families.FAMILIES[spec["family"]], strategy)
    return [un.fingerprint(done.run.model), done.run.logs]


def frozen(strategy, spec):
    """A net most of whose weights are frozen: fingerprint and predictions."""
    net = frozen_nets.NETS["quantized"]
    model = frozen_nets.build(strategy, "quantized")
    model.fit(net.draw(13), frozen_nets.draw_labels(13), batch_size=8, verbose=0)
    return [un.fingerprint(model), model.predict(net.draw(5), verbose=0).tolist()]


def loop(strategy, spec):
    """What a loop of the user's own ends with, and all forms of what its replicas return."""
    cluster, resolver = strategy.cluster, strategy.cluster_resolver
    expected = ("worker", cluster.process, {"worker": cluster.processes}) if cluster.processes > 1 else (None, None, {})
    counts = {job: resolver.cluster_spec().num_tasks(job) for job in resolver.cluster_spec().jobs}
    assert (resolver.task_type, resolver.task_id, counts) == expected
    assert strategy.extended.should_checkpoint == strategy.writes == (cluster.process == 0)
    keras.utils.set_random_seed(strategy.cluster.process if spec.get("other_weights") else 0)
    loop = Loop(strategy, MODELS[spec["model"]])
    totals = []
    for batch in strategy.distribute_dataset(data("dense", 43), batch_size=12):  # the last has seven rows, fewer than replicas
        totals.append(float(loop.one(batch)))
        if len(totals) == spec.get("killed_after") and strategy.cluster.process == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    outputs, numbers = strategy.run(
        lambda batch: (loop.model(batch[0]), un.get_replica_context().replica_id_in_sync_group), args=(batch,)
    )
    each = strategy.local_results(outputs)
    return {
        "bits": un.fingerprint(loop.model, loop.optimizer),
        "losses": totals,
        "gathered": un.fingerprint(np.asarray(strategy.gather(outputs, axis=0))),
        "each": [list(one.shape) for one in each],
        "rows": un.fingerprint(np.concatenate([np.asarray(one) for one in each])),
        "sum over rows": un.fingerprint(np.asarray(strategy.reduce("SUM", outputs, axis=0))),
        "mean": float(strategy.reduce("MEAN", numbers)),
        "numbers": [int(one) for one in strategy.local_results(numbers)],
    }


def dealt_out(strategy, spec):
    """Replicas with data of their own. Those of the first process end first: it has no rows, and no place in the reduction tree."""
    keras.utils.set_random_seed(0)
    loop, (x, y) = Loop(strategy), data("dense", 30)

    def own(context):
        replica = context.input_pipeline_id
        for batch in range(1 if replica < strategy.num_replicas_in_sync // 2 else 3):
            yield x[replica + batch :][: 1 + replica % 2], y[replica + batch :][: 1 + replica % 2]

    losses = [float(loop.one(batch)) for batch in strategy.distribute_datasets_from_function(own)]
    return [un.fingerprint(loop.model, loop.optimizer), losses]


def eager(strategy, spec):
    """Steps that are not compiled: (the fingerprint's beginning, losses and norms, to be compared up to rounding)."""
    keras.utils.set_random_seed(0)
    x, y = data("dense", 17)
    with strategy.scope():
        model = MODELS["dense"]()
    model.compile("sgd", crossentropy(), run_eagerly=True)
    weights, options = np.linspace(0, 1, 17, dtype="float32"), {"batch_size": 8, "verbose": 0}  # the last batch has one row
    history = model.fit(x, y, sample_weight=weights, shuffle=False, **options)
    predictions = model.predict(x, **options)
    numbers = [*history.history["loss"], model.evaluate(x, y, **options), *np.abs(predictions).sum(0)]
    return [un.fingerprint(model)[:11], [float(number) for number in numbers]]


def files(strategy, spec):
    """Callbacks that write, and one that stops."""
    keras.utils.set_random_seed(0)
    x, y = data("dense", 43)
    with strategy.scope():
        model = MODELS["dense"]()
    model.compile("sgd", crossentropy())
    callbacks = [
        keras.callbacks.ModelCheckpoint(os.path.join(spec["folder"], "{epoch}.weights.h5"), save_weights_only=True),
        keras.callbacks.CSVLogger(os.path.join(spec["folder"], "log.csv"), append=True),
        keras.callbacks.EarlyStopping("loss", mode="max", patience=1),
    ]
    history = model.fit(x, y, batch_size=12, epochs=5, verbose=2, callbacks=callbacks)
    return len(history.epoch)


def lengths(strategy, spec):
    """Lists of which each process' own has another length."""
    loop, (x, y) = Loop(strategy), data("dense", 12)
    for batch in strategy.distribute_dataset([(x, y)] * (3 + strategy.cluster.process)):
        loop.one(batch)
    loop.model.compile("sgd", crossentropy())
    loop.model.fit(x, y, verbose=0)


class Made(keras.utils.PyDataset):
    """Batches of a source that says which it has made."""

    def __init__(self, rng=None, undrawn=(), turned=0, length=6, fails=None, **options):
        super().__init__(**options)
        self.length, self.fails = np.int64(length), fails
        self.rows, self.made = [np.roll(array, turned, axis=0) for array in data("dense", 67)], []
        self.rng, self.undrawn = rng, undrawn

    @property
    def num_batches(self):
        return self.length

    def __getitem__(self, index):
        self.made.append(index)
        if index == self.fails:
            raise KeyError("of the source")
        x, y = (array[12 * index : 12 * index + 12] for array in self.rows)
        if self.rng is None or index in self.undrawn:
            return x, y
        drawn = self.rng.standard_normal(x.shape).astype("float32")
        return (x + drawn if index or self.rng is not np.random else x), y  # a global draw shows in its generator

    def generate(self):
        for index in range(self.length):
            yield self[index]


class Uncounted(Made):
    """A source that cannot say its length once training has begun, in the last process."""

    @property
    def num_batches(self):
        if self.made and strategies[0].cluster.process:
            raise OSError("the index is gone")
        return self.length


class Changing(Made):
    """Batches that are other ones in each epoch."""

    def on_epoch_end(self):
        self.rows = [np.roll(array, 7, axis=0) for array in self.rows]


class Passes:
    """An iterable that can begin again."""

    def __init__(self, made):
        self.made = made

    def __iter__(self):
        return self.made.generate()


def fit_made(strategy, made, loop, epochs=2, **options):
    loop.model.compile("sgd", crossentropy())
    loop.model.fit(made, epochs=epochs, verbose=0, **options)


fit_in_order = functools.partial(fit_made, shuffle=False)
fit_in_mid_pass = functools.partial(fit_made, epochs=3, steps_per_epoch=2)


def fit_generated(strategy, made, loop):
    """Two calls of fit, of which the second goes on where the first has left the generator."""
    loop.model.compile("sgd", crossentropy())
    batches = made.generate()
    for steps in (2, 3):
        loop.model.fit(batches, steps_per_epoch=steps, verbose=0, validation_data=Made().generate(), validation_steps=2)


def loop_over_passes(strategy, made, loop):
    dataset = strategy.distribute_dataset(Passes(made))
    for _ in range(2):
        loop.whole_epoch(dataset)


def loop_over_pipelines(strategy, made, loop):
    def of_replica(context):
        return Made(turned=context.input_pipeline_id) if context.input_pipeline_id else made

    dataset = strategy.distribute_datasets_from_function(of_replica)
    for _ in range(2):
        loop.whole_epoch(dataset)


def loop_resumed(strategy, made, loop):
    """A loop that is broken off after three batches, and goes on in another one: of a source with an index, and of a stream."""
    states = []
    for source in (lambda: made, lambda: Passes(made)):
        first, rest = strategy.distribute_dataset(source()), strategy.distribute_dataset(source())
        un.Checkpoint(first=first, rest=rest)
        for batch in first:
            loop.one(batch)
            if first.position == (0, 3):
                states.append(first.get_state())
                break
        rest.set_state(states[-1])
        loop.whole_epoch(rest)
    return states


SOURCES = {
    "dataset": (fit_made, {}),
    "workers": (fit_made, {"workers": 2}),
    "draws": (fit_made, {"rng": np.random.default_rng(0)}),
    "global draws": (fit_in_order, {"rng": np.random}),
    "changes": (fit_in_mid_pass, {"kind": Changing}),
    "generator": (fit_generated, {}),
    "passes": (loop_over_passes, {}),
    "pipelines": (loop_over_pipelines, {}),
    "resumed": (loop_resumed, {}),
}


def sources(strategy, spec):
    """(bits of trainings on sources whose batches are made, the batches that this process has made)."""
    found, batches = {}, {}
    for kind in spec["kinds"]:
        train, options = SOURCES[kind]
        made, loop = options.pop("kind", Made)(**options), Loop(strategy)
        found[kind] = [train(strategy, made, loop), un.fingerprint(loop.model)]
        batches[kind] = made.made
    return found, batches


def faults(strategy, spec):
    """What is said of sources that fail, or differ between processes, and the batches before that."""
    me, (x, y) = strategy.cluster.process, data("dense", 12)
    of_another_structure = [(x, y), (x, y), (x,)] if me == 0 else [(x, y)] * 3
    sources = [Made(fails=4), Made(length=6 + me), Made(turned=me), iter(of_another_structure), Made(fails=0)]
    sources += [iter([(x, y)[: 2 - me]]), Made(rng=np.random, undrawn=(0, 1)), Uncounted()]
    found = []
    for source in sources:
        batches = iter(strategy.distribute_dataset(source))
        try:
            found.append([sum(1 for _ in batches), "", ""])
        except Exception as error:
            found.append([getattr(source, "made", None), type(error).__name__, str(error)])
    return found


def shuffled(strategy, spec):
    """Rows that are not the same in all processes."""

    def batches():
        rng = np.random.default_rng(strategy.cluster.process)
        for _ in range(3):
            yield rng.standard_normal((12, 6)).astype("float32"), np.zeros(12, "int32")

    loop = Loop(strategy)
    for batch in strategy.distribute_dataset(batches()):
        loop.one(batch)


CHECKS = {
    check.__name__: check
    for check in (fit, whole_batch, frozen, loop, dealt_out, eager, files, lengths, sources, faults, shuffled)
}


def check(strategy, spec):
    """What a check finds. The exchange is chosen at the first sum."""
    os.environ["UNISONO_SHARED_MEMORY"] = "0" if spec.get("messages") else "1"
    return CHECKS[spec["check"]](strategy, spec)


print("FOUND", json.dumps([check(strategy, spec) for strategy, spec in zip(strategies, specs, strict=True)]))
