"""Layers of which Keras says that they cannot be compiled (`supports_jit`): those that can be train as in Keras, the others are refused
by name and with what JAX says."""

from __future__ import annotations

import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from layer_groups import chain, places
from sizes import slow
from trainings import assert_equals_keras, fitting, labels, on, rows, run
from unisono._src.keras.checks.jax_errors import StepError
from unisono._src.keras.private.compiled_losses import call_model

IMAGES, Y = rows(8, 8, 8, 3), labels(8, 3)


def classifier(body, compile_=True, **options):
    def make():
        inputs = keras.Input(IMAGES.shape[1:])
        model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(body(inputs))))
        if compile_:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05), loss, **options)
        return model

    return make


class OfTheUser(layers.Layer):
    """Can be compiled, and says that it cannot."""

    def __init__(self, **options):
        super().__init__(**options)
        self.supports_jit = False

    def call(self, x):
        return ops.tanh(x)


class InNumpy(layers.Layer):
    """Computes in NumPy what a trace has no values for."""

    def call(self, x):
        return ops.convert_to_tensor(np.asarray(x) * 2)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class OfUnknownSize(InNumpy):
    """Takes a slice between traced positions."""

    def call(self, x):
        first = ops.cast(ops.max(x) > 0, "int32")
        return x[:, first : first + 4]


def crops(x):
    return layers.GlobalAveragePooling2D()(layers.RandomCrop(3, 4)(x))


@pytest.mark.parametrize("body", [crops, *slow(places)])
def test_one_replica_is_plain_keras(body):
    """Where Keras runs uncompiled, and draws the same numbers. Evaluation and prediction leave images as they are."""
    found = []

    def fit(model):
        history = fitting(IMAGES, Y, batch_size=4)(model)
        found.append((model.evaluate(IMAGES, Y, batch_size=4, verbose=0), model.predict(IMAGES, batch_size=4, verbose=0)))
        return history

    assert_equals_keras(classifier(body), fit, replicas=(1,), tolerance=1e-5)
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def called(model, state, x):
    """The outputs of a training step."""
    with keras.StatelessScope(state_mapping=list(zip(model.variables, state, strict=True))):
        return call_model(model, x, training=True)


@pytest.mark.parametrize("data_format", ["channels_last", *slow("channels_first")])
@pytest.mark.parametrize("size", [(3, 6), *slow(((6, 2),), ((9, 9),), ((8, 4),))])
def test_a_compiled_crop_is_that_of_keras(size, data_format):
    """By the same seed; an image that is not larger than the crop is resized."""
    images = IMAGES if data_format == "channels_last" else IMAGES.transpose(0, 3, 1, 2)
    model, twin = (keras.Sequential([layers.RandomCrop(*size, seed=3, data_format=data_format)]) for _ in range(2))
    model.build(images.shape)

    compiled, seen = jax.jit(functools.partial(called, model)), set()
    for _ in range(4):
        state = [np.asarray(v.value) for v in twin.variables]
        theirs = np.asarray(twin(images, training=True))
        np.testing.assert_array_equal(compiled(state, images), theirs)
        seen.add(theirs.tobytes())
    assert (len(seen) > 1) == (max(size) < 8)


def test_replica_code_crops_as_keras_does():
    """In strategy.run too, on one replica, which draws what Keras draws."""
    strategy = on(1, 1)
    with strategy.scope():
        model = keras.Sequential([layers.RandomCrop(3, 6, seed=3)])
    twin = keras.Sequential([layers.RandomCrop(3, 6, seed=3)])
    for batch in strategy.distribute_dataset(IMAGES, batch_size=4, shuffle=False):
        cropped = strategy.run(lambda x: model(x, training=True), args=(batch,))
        (images,) = strategy.local_results(batch)
        np.testing.assert_array_equal(strategy.local_results(cropped)[0], twin(np.asarray(images), training=True))


@pytest.mark.slow
def test_drawn_augmentations_can_be_traced_and_differentiated():
    """They take a minute to compile."""
    model = keras.Sequential([keras.Input(IMAGES.shape[1:]), layers.RandAugment((0, 1))])
    state = [v.value for v in model.variables]
    found = jax.eval_shape(jax.grad(lambda x: called(model, state, x).sum()), IMAGES)
    assert found.shape == IMAGES.shape


def test_a_layer_of_the_users_that_can_be_compiled_is():
    """Though it says otherwise; in replicas too."""
    assert_equals_keras(classifier(OfTheUser()), fitting(IMAGES, Y, batch_size=8), devices=(1,))


def test_a_file_of_keras_that_says_jit_compile_false_is_trained(tmp_path):
    """Keras writes so of a model with such a layer, and so it is when the file is opened in a scope."""
    run(classifier(OfTheUser()), lambda model: model.save(tmp_path / "model.keras"))
    with on(1).scope():
        model = keras.saving.load_model(tmp_path / "model.keras", {"OfTheUser": OfTheUser})
    assert not model.jit_compile
    fitting(IMAGES, Y, batch_size=8)(model)


USES = {
    "fit": lambda model: fitting(IMAGES, Y, batch_size=8)(model),
    "evaluate": lambda model: model.evaluate(IMAGES, Y, verbose=0),
    "predict": lambda model: model.predict(IMAGES, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(IMAGES, Y),
}


@pytest.mark.parametrize(("use", "compile_"), [("predict", False), *slow(*((use, True) for use in USES))])
def test_a_layer_that_cannot_be_compiled_is_named_with_the_reason(use, compile_):
    """predict() needs no compile()."""
    says = r"The layer 'in_numpy\w*' \(InNumpy\) cannot be compiled, .*__array__\(\) was called on traced array.*dataset.map\(layer\)"
    with pytest.raises(StepError, match=says):
        run(classifier(chain(InNumpy), compile_), USES[use], on(1, 2))


def test_a_layer_of_keras_that_cannot_be_compiled_is_named():
    """Its kernel has a random size."""
    with pytest.raises(
        StepError, match=r"'random_elastic_transform\w*' .*Abstract tracer value .* traced array with shape float32\[\]\. Move"
    ):
        run(classifier(chain(layers.RandomElasticTransform)), USES["fit"], on(1, 2))


def test_a_slice_of_an_unknown_size_is_named():
    """JAX has an IndexError for it."""
    reason = "(Slice entries must be static integers|Array slice indices must have static start/stop/step)"  # since JAX 0.11 the second
    with pytest.raises(StepError, match=rf"'of_unknown_size\w*' \(OfUnknownSize\) cannot be compiled.*{reason}"):
        run(classifier(chain(OfUnknownSize)), USES["predict"], on(1, 2))


def test_a_model_that_is_built_by_its_first_batch_names_the_layer():
    """There, Keras' trace fails."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.out = InNumpy(), layers.Dense(3)

        def call(self, x):
            return self.out(layers.Flatten()(self.inner(x)))

    def make():
        model = Model()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    with pytest.raises(StepError, match=r"The layer 'in_numpy\w*' \(InNumpy\) cannot be compiled"):
        run(make, USES["fit"], on(1, 2))


@pytest.mark.parametrize("how", ["run", "function"])
def test_replica_code_names_the_layer(how):
    """In strategy.run, and where the step around it is compiled as well."""
    strategy = on(1, 2)
    with strategy.scope():
        model = classifier(chain(InNumpy), compile_=False)()

    def step(batch):
        return strategy.run(lambda x: ops.sum(model(x)), args=(batch,))

    step = un.function(step) if how == "function" else step
    batch = next(iter(strategy.distribute_dataset(IMAGES, batch_size=8)))
    with pytest.raises(StepError, match=r"The layer 'in_numpy\w*' \(InNumpy\) cannot be compiled"):
        step(batch)
