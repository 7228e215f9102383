"""Losses of replica code, their gradients, and optimizers that apply them."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import unisono as un
from loops import CLASSES, Loop, bits, crossentropy, data
from sizes import slow
from trainings import on

X, Y = data("dense", 43)


@pytest.mark.slow
def test_gradients_outside_of_replica_code():
    model = keras.Sequential([layers.Input((6,)), layers.BatchNormalization(momentum=0.5), layers.Dense(CLASSES)])
    loss_fn, before = crossentropy(None), np.array(model.non_trainable_variables[0])
    value, gradients = un.value_and_grad(lambda: loss_fn(Y, model(X, training=True)), model.trainable_variables)
    assert not np.allclose(before, model.non_trainable_variables[0]), "moving statistics are kept"
    np.testing.assert_allclose(value, crossentropy()(Y, model(X, training=True)), rtol=1e-5)
    assert [g.shape for g in gradients] == [v.shape for v in model.trainable_variables]
    weights = np.linspace(0.5, 2, 43).astype("float32")
    (value, aux), _ = un.value_and_grad(
        lambda: ((loss_fn(Y, model(X)), weights), "more"), model.trainable_variables, has_aux=True
    )
    assert aux == "more"
    np.testing.assert_allclose(value, np.average(loss_fn(Y, model(X)), weights=weights), rtol=1e-5)


WRONG_LOSSES = (
    (lambda: None, r"returned None as its loss"),
    (lambda: (1.0, 2.0, 3.0), "as its loss. Return one value for each example"),
    (lambda: (1.0, 2.0), r"its loss is one number.* If the second is no weight, write has_aux=True"),
    (
        lambda: (np.ones(3, "float32"), np.ones((3, 2), "float32")),
        r"taken for \(values, weights\): sample_weight has the shape \(3, 2\), which does not fit .* write has_aux=True",
    ),
)


def test_losses_that_are_none():
    model = Loop(on(2, 4)).model
    for wrong, message in WRONG_LOSSES:
        with pytest.raises(ValueError, match=message):
            un.value_and_grad(wrong, model.trainable_variables)
    with pytest.raises(ValueError, match="with has_aux=True it must return"):
        un.value_and_grad(lambda: 1.0, model.trainable_variables, has_aux=True)
    with pytest.raises(TypeError, match="Write its trainable_variables"):
        un.value_and_grad(lambda: 1.0, model)
    with pytest.raises(TypeError, match="Give it Keras variables"):
        un.value_and_grad(lambda: 1.0, [np.ones(3)])


# Loss scales, and gradients that the code changes.


def scaling(initial_scale, inner=lambda: keras.optimizers.SGD(0.1)):
    return keras.optimizers.LossScaleOptimizer(inner(), initial_scale=initial_scale) if initial_scale else inner()


def test_gradients_that_code_changes_are_applied_as_they_are():
    """Also under a loss scale, of which the code sees nothing. That clipped parts are no clipped whole is said."""
    seen = []
    for scale in (None, 1024):
        loop = Loop(on(1, 4), optimizer=lambda scale=scale: scaling(scale))

        def code(batch, loop=loop):
            loop.apply([ops.clip(g, -0.01, 0.01) for g in loop.differentiate(batch)[1]])

        batches = list(loop.strategy.distribute_dataset((X[:24], Y[:24]), batch_size=12))
        with pytest.warns(UserWarning, match="'code' applies gradients that it has made or changed by itself"):
            loop.strategy.run(code, args=(batches[0],))
        for batch in batches[1:]:
            loop.strategy.run(code, args=(batch,))
        seen.append(np.concatenate([np.ravel(v) for v in loop.model.trainable_variables]))
    np.testing.assert_allclose(*seen, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_loss_that_the_code_scales_itself():
    """Keras' form of a loop with a loss scale gives what the engine gives."""

    def train(by_hand):
        loop = Loop(on(2, 4), optimizer=lambda: scaling(1024))

        def form(losses):
            loss = un.compute_average_loss(losses)
            return loop.optimizer.scale_loss(loss) if by_hand else loss

        for batch in loop.strategy.distribute_dataset((X, Y), batch_size=12):
            loop.strategy.run(lambda batch: loop.apply(loop.differentiate(batch, form)[1]), args=(batch,))
        return bits(loop.model, loop.optimizer)

    assert train(by_hand=True) == train(by_hand=False)


@pytest.mark.parametrize("scales", [(8, 1024), *slow(((8, 8),), ((0, 8),))])
def test_every_optimizer_has_its_own_loss_scale(scales):
    """One loss over the weights of two optimizers."""

    def trained(scales):
        loop = Loop(on(1, 4), optimizer=lambda: list(map(scaling, scales)))

        def code(batch):
            weights, (_, gradients) = loop.model.trainable_variables, loop.differentiate(batch)
            loop.optimizer[0].apply(gradients[:2], weights[:2])
            loop.optimizer[1].apply(gradients[2:], weights[2:])

        loop.run(code)
        return [np.array(v.value) for v in loop.model.trainable_variables]

    for found, expected in zip(trained(scales), trained((0, 0)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_one_replica_that_overflows_skips_the_step_for_all():
    """The scale is halved once, weights and slots stay."""
    loop = Loop(on(2, 4), optimizer=lambda: scaling(8, lambda: keras.optimizers.SGD(0.1, momentum=0.9)))
    loop.train(X, Y, epochs=1)
    wrong = X[:12].copy()
    wrong[5] = np.inf
    state = lambda: un.fingerprint(loop.model.trainable_variables, loop.optimizer.inner_optimizer)
    for rows, moves in ((wrong, False), (X[:12], True)):
        (batch,) = loop.strategy.distribute_dataset([(rows, Y[:12])])
        before = state()
        loop.one(batch)
        assert (state() != before, float(loop.optimizer.dynamic_scale.value)) == (moves, 4)


def test_clipping_acts_on_the_sum_of_all_replicas():
    """Opposite gradients: 1 - 5 is clipped, not each of them."""
    strategy = on(2, 2)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0, clipvalue=2.0)

    def code(batch):
        value, gradients = un.value_and_grad(lambda: ops.sum(batch * weight), [weight])
        optimizer.apply(gradients, [weight])
        return value

    (batch,) = strategy.distribute_dataset([np.array([1.0, -5.0], "float32")])
    strategy.run(code, args=(batch,))
    assert float(weight.value) == 2.0


def test_regularizers_count_once():
    """A gradient of regularizers alone: one step from 1 with rate 1 lands on -1, whatever R."""
    for replicas in (1, 4):
        strategy = on(1, replicas)
        with strategy.scope():
            model = keras.Sequential(
                [layers.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="ones", kernel_regularizer="l2")]
            )
            optimizer = keras.optimizers.SGD(100.0)

        def code(batch, model=model, optimizer=optimizer):
            def loss():
                model(batch)
                return un.scale_regularization_loss(model.losses)

            value, gradients = un.value_and_grad(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return value

        value = strategy.run(code, args=(next(iter(strategy.distribute_dataset([np.ones((4, 1), "float32")]))),))
        assert float(strategy.reduce("SUM", value)) == pytest.approx(0.01)
        assert float(model.trainable_variables[0].value[0, 0]) == pytest.approx(-1)


# Averages over the global batch.


def test_the_tutorials_example_of_average_losses():
    """Two replicas, losses 2, 3 and 4, 5: 1.25 and 2.25 each, 3.5 in all."""
    strategy = on(1, 2)
    batch = next(iter(strategy.distribute_dataset([np.array([2.0, 3.0, 4.0, 5.0], "float32")])))
    for size in (None, 4):
        value = strategy.run(lambda losses, size=size: un.compute_average_loss(losses, global_batch_size=size), args=(batch,))
        assert [float(v) for v in strategy.local_results(value)] == [1.25, 2.25]
        assert float(strategy.reduce("SUM", value)) == 3.5


def average(rows, code):
    strategy = on(1, 2)
    (batch,) = strategy.distribute_dataset([rows])
    return float(strategy.reduce("SUM", strategy.run(code, args=(batch,))))


def test_average_losses_of_weights_and_of_another_size():
    losses, weights = np.arange(1, 6, dtype="float32"), np.array([1, 0, 2, 0, 1], "float32")
    weighted = average((losses, weights), lambda batch: un.compute_average_loss(batch[0], sample_weight=batch[1]))
    assert weighted == pytest.approx(12 / 5)
    with pytest.warns(UserWarning, match="divides a sum by 10, and this global batch has 5 rows"):
        assert average(losses, lambda x: un.compute_average_loss(x, global_batch_size=10)) == pytest.approx(1.5)


NO_AVERAGES = {
    "a number": (lambda losses: un.compute_average_loss(ops.sum(losses)), "received one number"),
    "no rows": (lambda losses: un.compute_average_loss(losses, global_batch_size=0), "must be a positive number"),
    "as many weights as values of a row": (
        lambda losses: un.compute_average_loss(losses, sample_weight=np.ones(4, "float32")),
        r"sample_weight has the shape \(4,\), which does not fit losses of the shape \(3, 4\)",
    ),
    "weights of no row": (
        lambda losses: un.compute_average_loss(losses, sample_weight=ops.ones(7)),
        r"sample_weight has the shape \(7,\)",
    ),
    "weights of rank 4": (
        lambda losses: un.compute_average_loss(losses, sample_weight=ops.ones((1, 2, 3, 1))),
        r"sample_weight has the shape .*does not fit",
    ),
}


@pytest.mark.parametrize("what", NO_AVERAGES)
def test_what_is_no_average_is_refused(what):
    code, said = NO_AVERAGES[what]
    with pytest.raises(ValueError, match=said):
        average(np.ones((6, 4), "float32"), code)


@pytest.mark.parametrize("form", ["division", *slow("argument", "product")])
def test_a_constant_divisor_on_a_ragged_batch_is_warned_about_once(form):
    """128 on a last batch of 80, as many write it."""
    loop = Loop(on(1, 4))
    forms = {
        "argument": lambda losses: un.compute_average_loss(losses, global_batch_size=12),
        "division": lambda losses: ops.sum(losses) / 12,
        "product": lambda losses: ops.sum(losses) * (1.0 / 12),
    }
    code = lambda batch: loop.differentiate(batch, forms[form])[0]
    whole, ragged = loop.strategy.distribute_dataset((X[:19], Y[:19]), batch_size=12)
    loop.strategy.run(code, args=(whole,))
    with pytest.warns(UserWarning, match=r"divides a sum by 12, and this global batch has 7 rows: its examples weigh 7/12"):
        loop.strategy.run(code, args=(ragged,))
    loop.strategy.run(code, args=(ragged,))


# Masks: a loss over tokens is divided by the valid ones, as in fit.

TOKENS, TARGETS = data("lstm", 11)[0], np.random.default_rng(1).integers(0, CLASSES, (11, 10))
TOKEN_WEIGHTS = np.broadcast_to(np.linspace(0.2, 3, 11, dtype="float32")[:, None], TOKENS.shape).copy()


def tagger(regularizer=None):
    hidden = layers.Embedding(30, 8, mask_zero=True), layers.Dense(CLASSES, kernel_regularizer=regularizer)
    return keras.Sequential([layers.Input((10,), dtype="int32"), *hidden])


FORMS = {
    "values": (lambda loop, values, batch: values, {}),
    "with the mask as weights": (lambda loop, values, batch: (values, ops.cast(batch[0] != 0, "float32")), {}),
    "with weights": (
        lambda loop, values, batch: (values, batch[2]),
        {"sample_weight": TOKEN_WEIGHTS},
    ),
    "with a regularizer": (lambda loop, values, batch: values + sum(loop.model.losses), {}),
}


@pytest.mark.parametrize("how", ["values", "with the mask as weights", *slow("with weights", "with a regularizer")])
def test_masked_tokens_are_not_counted(how):
    form, options = FORMS[how]
    model = lambda: tagger("l2" if how == "with a regularizer" else None)

    def by_loop(devices):
        loop = Loop(on(devices, 4), model, lambda: keras.optimizers.SGD(0.5))
        (batch,) = loop.strategy.distribute_dataset([(TOKENS, TARGETS, TOKEN_WEIGHTS)])

        def code(batch):
            value, gradients = loop.differentiate(batch[:2], lambda losses: form(loop, losses, batch))
            loop.apply(gradients)
            return value

        loss = float(loop.strategy.reduce("SUM", loop.strategy.run(code, args=(batch,))))
        return loss, un.fingerprint(loop.model.trainable_variables)

    fitted = Loop(on(2, 4), model, lambda: keras.optimizers.SGD(0.5))
    fitted.model.compile(fitted.optimizer, crossentropy("mean_with_sample_weight" if options else "sum_over_batch_size"))
    loss = fitted.model.fit(TOKENS, TARGETS, batch_size=11, shuffle=False, verbose=0, **options).history["loss"][0]
    found = by_loop(2)
    assert found[0] == pytest.approx(loss, rel=1e-5)
    if how == "values":
        assert found == by_loop(1) == (found[0], un.fingerprint(fitted.model.trainable_variables))
