"""un.Checkpoint: objects of every kind come back with their bits, and what does not fit is named."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from loops import crossentropy
from sizes import slow
from storages import NAMES, storage, write
from trainings import on, rows
from unisono._src.keras.private.variable_paths import walk_variables

X = rows(13, 6)


def saved(tmp_path, **trackables):
    checkpoint = un.Checkpoint(**trackables)
    path = checkpoint.save(tmp_path / "ckpt")
    checkpoint.wait()
    return path


def sequential(*units, dtype="float32"):
    return keras.Sequential([layers.Input((6,)), *(layers.Dense(u, dtype=dtype) for u in units)])


def unbuilt():
    return keras.Sequential([layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.2), layers.Dense(5)])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8)
        self.heads = {"a": layers.Dense(2), "b": [layers.Dense(3)]}

    def call(self, x):
        x = ops.relu(self.hidden(x))
        return ops.concatenate([self.heads["a"](x), self.heads["b"][0](x)], -1)


class WithSeeds(layers.Layer):
    """Attributes that are called like groups of variables."""

    def __init__(self):
        super().__init__()
        self.random, self.seeds = keras.random.SeedGenerator(), layers.Dense(3)

    def build(self, shape):
        self.seeds.build(shape)

    def call(self, x):
        return self.seeds(x)


def with_optimizers(base):
    """A layer or a model that is not compiled, and has optimizers all the same."""

    class WithOptimizers(base):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)
            self.optimizer = keras.optimizers.Adam()
            self.slow = keras.optimizers.SGD(momentum=0.9)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

    return WithOptimizers


def with_own_optimizer():
    """A compiled model, its optimizer, a layer of it, and a layer without variables."""
    model = sequential(3)
    model.compile(keras.optimizers.Adam(), "mse")
    return {"model": model, "optimizer": model.optimizer, "head": model.layers[-1], "act": layers.Activation("relu")}


def contained():
    return {
        "seeds": keras.random.SeedGenerator(),
        "counts": [keras.Variable(1.0), keras.Variable(2.0)],
        "towers": {"left": sequential(3), "right": (sequential(3),)},
    }


def two_models():
    parts = (("model", unbuilt), ("optimizer", keras.optimizers.Adam))
    return {f"{name}_{part}": make() for name in "ab" for part, make in parts}


def leaves(things):
    for thing in things.values() if isinstance(things, dict) else things:
        if isinstance(thing, list | tuple | dict):
            yield from leaves(thing)
        else:
            yield thing.state if isinstance(thing, keras.random.SeedGenerator) else thing


def train(things):
    """Whatever has a state gets another one. An optimizer is that of the layer before it."""
    for thing in leaves(things):
        if isinstance(thing, keras.Variable):
            thing.assign(thing + 5)
        elif isinstance(thing, layers.Layer):
            thing(X)
            variables = thing.trainable_variables
        optimizers = thing, *(vars(thing).values() if isinstance(thing, layers.Layer) else ())
        for optimizer in (of for of in optimizers if isinstance(of, keras.optimizers.Optimizer)):
            optimizer.apply([ops.ones(of.shape) for of in variables], variables)


OBJECTS = {
    "an unbuilt model": lambda: {"model": unbuilt(), "optimizer": keras.optimizers.Adam()},
    "a subclass": lambda: {"model": Subclassed(), "optimizer": keras.optimizers.Adam()},
    "two models": two_models,
    "in lists and dicts": contained,
    "bfloat16": lambda: {"model": sequential(3, dtype="bfloat16")},
    "with its optimizer": with_own_optimizer,
    "named like groups": lambda: {"layer": WithSeeds()},
    "a layer with optimizers": lambda: {"thing": with_optimizers(layers.Layer)()},
    "a model with optimizers": lambda: {"thing": with_optimizers(keras.Model)()},
}


@pytest.mark.parametrize("name", [name for name in OBJECTS if name != "a subclass"] + slow("a subclass"))
def test_into_fresh_objects(tmp_path, name):
    """With other automatic names, of which nothing is built; each optimizer is built for the variables that it was built for."""
    first, fresh = OBJECTS[name](), OBJECTS[name]()
    checkpoint = un.Checkpoint(**first)  # what is built after this is saved too
    train(first)
    assert un.Checkpoint(**fresh).restore(checkpoint.save(str(tmp_path) + "/"))
    assert un.fingerprint(*leaves(fresh)) == un.fingerprint(*leaves(first))


def test_two_variables_never_have_one_name():
    layer = called(WithSeeds())
    assert [name for name, _ in walk_variables(layer, "of")] == ["of/seeds/0", "of/seeds/0'", "of/seeds/1"]


class WithMetric(keras.Model):
    """Compiled with metrics, which a loop never builds, and with one of its own."""

    def __init__(self):
        super().__init__()
        self.dense, self.seen = layers.Dense(2), keras.metrics.Sum()
        self(X)
        self.compile(keras.optimizers.SGD(), "mse", metrics=["mae", keras.metrics.MeanSquaredError()])
        self.optimizer.build(self.trainable_variables)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize("there", [True, False], ids=["built there", "not built there"])
@pytest.mark.parametrize("here", [True, False], ids=["built here", "not built here"])
def test_metrics_of_compile_that_are_built_late(tmp_path, there, here):
    """By fit or evaluate, before or after the restore; the model's own are matched in any case."""
    first, fresh = WithMetric(), WithMetric()
    for model, built in ((first, there), (fresh, here)):
        if built:
            model.evaluate(X, np.ones((13, 2)), verbose=0)
    first.seen.update_state(5.0)
    fresh.seen.update_state(7.0)
    un.Checkpoint(model=fresh).restore(saved(tmp_path, model=first))
    assert un.fingerprint(fresh) == un.fingerprint(first)
    assert float(fresh.seen.result()) == 5.0
    if there and here:
        assert un.fingerprint(fresh.metrics_variables) == un.fingerprint(first.metrics_variables)
    elif here:
        assert fresh.get_metrics_result()["mae"] == 0.0, "as a model has them before its first batch"


class Own:
    def __init__(self, state=None):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_objects_with_a_state_of_their_own(tmp_path):
    own = Own()
    un.Checkpoint(own=own).restore(saved(tmp_path, own=Own({"seen": [1, 2.5, None, "x", float("inf")], "mean": np.arange(3.0)})))
    assert repr(own.state) == repr({"seen": [1, 2.5, None, "x", float("inf")], "mean": np.arange(3.0)})
    with pytest.raises(
        TypeError, match=r"an array of dtype <U4 at own/of, which is not kept. Turn it into numbers, or into a list"
    ):
        un.Checkpoint(own=Own({"of": np.array(["text"])})).save(tmp_path / "ckpt")


# --- what does not fit ------------------------------------------------------------------------------------------------


class ShapesUnknown(Subclassed):
    def get_build_config(self):
        return None


class Stubborn(keras.Variable):
    def assign(self, value):
        pass


class OfSome(layers.Layer):
    def __init__(self, make, count):
        super().__init__()
        self.all = [make(float(index)) for index in range(count)]
        self.built = True


def called(thing):
    thing(X)
    return thing


def made_in(strategy, what):
    with strategy.scope():
        return {
            "data": lambda: strategy.distribute_dataset((X,), batch_size=4),
            "optimizer": keras.optimizers.Adam,
            "variable": lambda: keras.Variable(0.0),
        }[what]()


def other_slow():
    thing = with_optimizers(layers.Layer)()
    thing.slow = keras.optimizers.Adam()
    return thing


STEP = lambda: keras.Variable(7)

MISFITS = {
    "shapes and layers": (
        lambda: {"model": sequential(3, 4)},
        lambda: {"model": sequential(3, 5, 2)},
        r"does not fit:\n"
        r"  model/layers/dense_1/0: \(3, 4\) float32 in the checkpoint, \(3, 5\) float32 here\n"
        r"  model/layers/dense_1/1: \(4,\) float32 in the checkpoint, \(5,\) float32 here\n"
        r"  model/layers/dense_2/0: nothing in the checkpoint, \(5, 2\) float32 here\n"
        r"  model/layers/dense_2/1: nothing in the checkpoint, \(2,\) float32 here\n"
        r"Nothing was restored.$",
    ),
    "a dtype": (
        lambda: {"model": sequential(3)},
        lambda: {"model": sequential(3, dtype="bfloat16")},
        r"\(6, 3\) float32 in the checkpoint, \(6, 3\) bfloat16 here",
    ),
    "a layer less": (
        lambda: {"model": sequential(3, 4)},
        lambda: {"model": sequential(3)},
        r"model/layers/dense_1/0: \(3, 4\) float32 in the checkpoint, nothing here",
    ),
    "an object more": (
        lambda: {"model": sequential(3), "step": STEP()},
        lambda: {"model": sequential(3)},
        r"also holds step. Give step= to Checkpoint as well, or write restore\(path, partial=True\)",
    ),
    "an object less": (
        lambda: {"model": sequential(3), "step": STEP()},
        lambda: {"model": sequential(3), "step": STEP(), "other": STEP()},
        "holds no other, only model, step. Nothing was restored",
    ),
    "an item more": (
        lambda: {"counts": [STEP(), STEP()]},
        lambda: {"counts": [STEP()]},
        r"also holds counts\[1\]. Give counts\[1\] to Checkpoint as well",
    ),
    "an item less": (lambda: {"counts": [STEP()]}, lambda: {"counts": [STEP(), STEP()]}, r"holds no counts\[1\]"),
    "an optimizer": (
        lambda: {"optimizer": keras.optimizers.Adam()},
        lambda: {"optimizer": keras.optimizers.SGD()},
        "holds the state of Adam as optimizer, and here that is SGD",
    ),
    "an attribute": (
        lambda: {"thing": with_optimizers(layers.Layer)()},
        lambda: {"thing": other_slow()},
        "holds the state of SGD as thing/slow, and here that is Adam",
    ),
    "no shapes": (
        lambda: {"model": called(ShapesUnknown())},
        lambda: {"model": ShapesUnknown()},
        r"model \(ShapesUnknown\) is not built.*Call it on one batch before you restore",
    ),
    "not built there": (
        lambda: {"thing": unbuilt()},
        lambda: {"thing": called(unbuilt())},
        r"nothing in the checkpoint, \(6, 8\)",
    ),
    **{
        f"R by {what}": (
            lambda what=what: {"of": made_in(on(1, 4), what)},
            lambda what=what: {"of": made_in(on(1, 2), what)},
            "R = 4 replicas, and this strategy has R = 2",
        )
        for what in ("data", "optimizer", "variable")
    },
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named_and_nothing_restored(tmp_path, monkeypatch, name):
    """And nothing is warned of. Keras' own loading keeps fresh weights in silence."""
    there, here, said = MISFITS[name]
    path, things = saved(tmp_path, **there()), here()
    monkeypatch.setattr("jax.__version__", "9.9.9")
    state = lambda: [un.fingerprint(of) for of in leaves(things) if isinstance(of, keras.Variable | layers.Layer)]
    before = state()
    with pytest.raises(ValueError, match=said):
        un.Checkpoint(**things).restore(path)
    assert state() == before


@pytest.mark.parametrize(
    ("things", "error", "said"),
    [
        ({"epoch": 3}, TypeError, r"Checkpoint\(epoch=\.\.\.\) received 3 of type int.*Write keras.Variable"),
        ({"counts": [STEP(), 3]}, TypeError, r"Checkpoint\(counts\[1\]=\.\.\.\) received 3 of type int"),
        ({"loss": crossentropy()}, TypeError, "SparseCategoricalCrossentropy"),
        ({"a/b": STEP()}, ValueError, r"received the name 'a/b'. Its names are those of Python's arguments"),
    ],
    ids=["a number", "an item", "a loss", "a name"],
)
def test_what_is_no_object_is_refused(things, error, said):
    with pytest.raises(error, match=said):
        un.Checkpoint(**things)


@pytest.mark.parametrize("count", [2, 1], ids=["a whole object", "a part of it"])
def test_a_part_may_be_restored_and_bits_are_compared(tmp_path, count):
    path = saved(tmp_path, thing=OfSome(lambda value: keras.Variable(value + 1), 2), step=STEP())
    assert un.Checkpoint(thing=OfSome(keras.Variable, count)).restore(path, partial=True)
    with pytest.raises(RuntimeError, match=r"thing was restored from .*, and thing/0 has other bits now.*do not train on"):
        un.Checkpoint(thing=OfSome(Stubborn, count)).restore(path, partial=True)


# --- what is warned of ------------------------------------------------------------------------------------------------


def classifier(activation="relu", rate=0.2, loss="mse", schedule=0.9, own=None):
    body = [keras.layers.Dense(3, activation, name="first"), keras.layers.Dropout(rate)]
    model = keras.Sequential([keras.Input((4,)), *body, keras.layers.Dense(2, activation=own)])
    decaying = keras.optimizers.schedules.ExponentialDecay(0.1, 10, schedule)
    model.compile(keras.optimizers.SGD(decaying), loss)
    model.optimizer.build(model.trainable_variables)
    return model


def own_activation(x):
    return x * 2


def promised(deterministic):
    with un.OneDeviceStrategy(replicas=2, deterministic=deterministic).scope():
        return sequential(3)


CONFIGURED = "training goes on with that of this program: {}. That is another run"
WARNED = [
    (
        classifier,
        lambda: classifier("tanh"),
        CONFIGURED.format(r"activation of layer 0 \(Dense\) of model: relu there, tanh here"),
    ),
    (classifier, lambda: classifier(rate=0.5), CONFIGURED.format(r"rate of layer 1 \(Dropout\) of model: 0.2 there, 0.5 here")),
    (classifier, lambda: classifier(loss="mae"), CONFIGURED.format(r"loss of compile\(\) of model: mse there, mae here")),
    (
        classifier,
        lambda: classifier(loss=keras.losses.Huber(0.5)),
        CONFIGURED.format(r"loss of compile\(\) of model: mse there, Huber here"),
    ),
    (
        classifier,
        lambda: classifier(schedule=0.5),
        CONFIGURED.format(r"decay_rate of config of learning_rate of compile\(\) of model: 0.9 there, 0.5 here"),
    ),
    (
        classifier,
        lambda: classifier(own=own_activation),
        CONFIGURED.format(r"activation of layer 2 \(Dense\) of model: linear there, own_activation here"),
    ),
    (
        lambda: sequential(3, dtype="mixed_bfloat16"),
        lambda: sequential(3),
        "precision of a layer of model: mixed_bfloat16 there, float32 here",
    ),
    (lambda: promised(False), lambda: promised(True), "deterministic: False there, True here"),
    (unbuilt, unbuilt, r"model \(Sequential\) was not built when .*Call it on one batch before you save"),
    (lambda: layers.Dense(3), lambda: layers.Dense(3), r"model \(Dense\) was not built when "),
]


@pytest.mark.parametrize(("there", "here", "said"), WARNED)
def test_what_may_change_bits_is_warned_of(tmp_path, there, here, said):
    step, first, other = keras.Variable(0), there(), here()
    path = saved(tmp_path, model=first, step=STEP())
    with pytest.warns(UserWarning, match=said):
        assert un.Checkpoint(model=other, step=step).restore(path)
    assert int(step) == 7
    if first.built:
        assert un.fingerprint(first).removeprefix("unpromised-") == un.fingerprint(other)


@pytest.mark.parametrize(
    ("name", "where"), [("jax", "jax.__version__"), ("numpy", "numpy.__version__"), ("unisono", "unisono._src.versions.VERSION")]
)
def test_other_versions_are_warned_of(tmp_path, monkeypatch, name, where):
    path = saved(tmp_path, model=sequential(3))
    monkeypatch.setattr(where, "9.9.9")
    with pytest.warns(UserWarning, match=rf"of another setting, with which results may differ: {name}: .* there, 9.9.9 here\."):
        un.Checkpoint(model=sequential(3)).restore(path)


class Silent(layers.Layer):
    def __init__(self, thing=None):
        super().__init__()
        self.thing = thing

    def call(self, x):
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: classifier(loss=keras.losses.Huber(0.5)),
        lambda: classifier(own=own_activation),
        lambda: classifier(own=lambda x: x),
        lambda: keras.Sequential([keras.Input((4,)), Silent(object()), layers.Dense(2)]),
    ],
    ids=["a loss", "a function", "a lambda", "what Keras cannot write down"],
)
def test_the_same_configuration_says_nothing(tmp_path, make):
    """Also in other objects, whose names Keras counts up."""
    assert un.Checkpoint(model=make()).restore(saved(tmp_path, model=make()))


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_names(tmp_path, name):
    """A prefix, a directory that exists, one with a slash; what is there is never written over."""
    checkpoint = un.Checkpoint(step=STEP())
    with storage(name, tmp_path) as place:
        assert un.latest_checkpoint(place) is un.latest_checkpoint(place / "nowhere") is None
        assert checkpoint.restore(None) is False
        assert checkpoint.save(place / "a") == str(place / "a_1")
        assert checkpoint.save(place / "a") == str(place / "a_2")
        assert un.Checkpoint(step=STEP()).save(place / "a", keep=2) == str(place / "a_3")
        assert un.latest_checkpoint(place / "a") == str(place / "a_3")
        assert place.list_names() == ["a_2", "a_3"]
        write(place / "there" / "of somebody", b"")
        assert checkpoint.save(place / "there") == str(place / "there" / "ckpt_1")
        assert checkpoint.save(f"{place}/new/") == str(place / "new" / "ckpt_1")
        assert un.latest_checkpoint(place / "new") == str(place / "new" / "ckpt_1")
