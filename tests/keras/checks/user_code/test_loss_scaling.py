"""By what replica code divides its losses and gradients, and what it feeds means with: other numbers are warned of, right ones are not."""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import ops

import unisono as un
from loops import Loop, crossentropy, data
from sizes import mostly_slow, slow
from trainings import on

X, Y = data("dense", 24)


@pytest.fixture
def loop():
    return Loop(on(1, 4), optimizer=lambda: keras.optimizers.SGD(0.1))


@jax.custom_jvp
def unchanged(x):
    return x * 1.0


unchanged.defjvp(lambda primals, tangents: (unchanged(*primals), tangents[0]))


def expected_loss(loop):
    return crossentropy()(Y[:12], loop.model(X[:12]))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "mean_with_sample_weight"])
def test_a_loss_with_a_mean_is_refused(loop, reduction):
    loss_fn = crossentropy(reduction)
    with pytest.raises(ValueError, match=rf"reduction='{reduction}'.* the 3 rows of a replica(.|\n)*reduction=None"):
        loop.run(lambda batch: loss_fn(batch[1], loop.model(batch[0])))


@pytest.mark.parametrize("reduction", [None, *slow("none", "sum")])
def test_a_loss_without_a_mean_is_right(loop, reduction):
    loss_fn = crossentropy(reduction)
    value = loop.strategy.reduce("SUM", loop.run(lambda batch: ops.sum(loss_fn(batch[1], loop.model(batch[0]))) / 12))
    np.testing.assert_allclose(value, expected_loss(loop), rtol=1e-5)


# Means that are fed with what is no value of a row: metrics are of all rows, on which a share is the loss.

FEEDS = {
    "values of examples": (lambda losses: losses, 1),
    "a mean": (ops.mean, 1),
    "a share by hand": (lambda losses: ops.sum(losses) / 12, 1),
    "a share in a checkpoint": (lambda losses: jax.checkpoint(lambda losses: ops.sum(losses) / 12)(losses), 1),
    "shares in a stack": (
        lambda losses: ops.stack([un.compute_average_loss(losses), un.compute_average_loss(2 * losses)]), 1.5
    ),
}  # fmt: skip


@pytest.fixture
def mean(loop):
    with loop.strategy.scope():
        return keras.metrics.Mean(name="train_loss")


@pytest.mark.parametrize("how", mostly_slow(FEEDS, "values of examples", "a share by hand", "shares in a stack"))
def test_a_mean_that_is_fed_with_losses_or_a_share_of_them_is_that_of_the_loss(loop, mean, how):
    feed, factor = FEEDS[how]
    loop.run(lambda batch: mean.update_state(feed(loop.loss(batch[1], loop.model(batch[0])))))
    np.testing.assert_allclose(mean.result(), factor * expected_loss(loop), rtol=1e-5)


@pytest.mark.parametrize("how", ["in evaluation", "inside", "from value_and_grad"])
def test_a_mean_that_is_fed_with_a_sum_of_shares_is_that_of_the_sum(loop, mean, how):
    """The average over the global batch and its part of the regularization."""

    def loss(losses):
        value = un.compute_average_loss(losses, global_batch_size=12) + un.scale_regularization_loss([ops.ones(())])
        if how == "inside":
            mean.update_state(value)
        return value

    def code(batch):
        if how == "in evaluation":
            mean.update_state(loss(loop.loss(batch[1], loop.model(batch[0]))))
            return
        value, _ = loop.differentiate(batch, loss)
        if how == "from value_and_grad":
            mean.update_state(value)

    loop.run(code)
    np.testing.assert_allclose(mean.result(), expected_loss(loop) + 1, rtol=1e-5)


def test_a_share_that_an_earlier_run_returned_is_that_of_its_replica(loop, mean):
    losses = lambda batch: loop.loss(batch[1], loop.model(batch[0]))
    rows, share = loop.run(lambda batch: (losses(batch), un.compute_average_loss(losses(batch)) + 0.0))
    with pytest.raises(
        ValueError, match=r"'train_loss' is a mean, and is fed with a replica's share of a loss, which an earlier run"
    ):
        loop.strategy.run(mean.update_state, args=(share,))
    loop.strategy.run(mean.update_state, args=(rows,))
    np.testing.assert_allclose(mean.result(), loop.strategy.reduce("SUM", share), rtol=1e-6)


OF_A_REPLICA = {
    "a sum that is divided by 3, the rows of one replica": lambda losses: ops.sum(losses) / 3,
    "a share of a loss times 4, the number of replicas": lambda losses: un.compute_average_loss(losses) * 4,
}


@pytest.mark.parametrize("what", OF_A_REPLICA)
def test_a_mean_that_is_fed_with_a_number_of_a_replica_is_refused(loop, mean, what):
    with pytest.raises(ValueError, match=rf"'train_loss' is a mean, and is fed with {what}(.|\n)*ops.mean"):
        loop.run(lambda batch: mean.update_state(OF_A_REPLICA[what](loop.loss(batch[1], loop.model(batch[0])))))


@pytest.mark.parametrize("metric", [keras.metrics.Mean, keras.metrics.BinaryCrossentropy])
def test_as_many_features_as_rows_are_no_share(loop, metric):
    """Twelve of each."""
    wide = np.random.default_rng(0).uniform(size=(12, 12)).astype("float32")
    with loop.strategy.scope():
        ours = metric()
    pair = (lambda x: (ops.mean(x, axis=-1),)) if metric is keras.metrics.Mean else lambda x: (x, x / 2)
    (batch,) = loop.strategy.distribute_dataset([wide])
    loop.strategy.run(lambda x: ours.update_state(*pair(x)), args=(batch,))
    alone = metric()
    alone.update_state(*pair(wide))
    np.testing.assert_allclose(ours.result(), alone.result(), rtol=1e-5)


# Losses and gradients that are divided by other numbers, or twice.


def tile(losses, values):
    return ops.repeat(ops.expand_dims(losses, 1), values, axis=1)


def square(weights):
    return ops.sum(ops.square(weights[0]))


DIVIDED = {
    "a constant of no batch": (
        lambda losses, w: ops.sum(losses) / 100,
        r"divides a sum by 100, and this global batch has 12 rows",
    ),
    "a constant behind a gradient of its own": (lambda losses, w: unchanged(ops.sum(losses)) / 100, r"divides a sum by 100"),
    "the rows of one replica": (
        lambda losses, w: ops.sum(losses) / 3.0,
        r"divides a sum by 3, and this global batch has 12 rows",
    ),
    "twice": (lambda losses, w: losses / 12, r"divides the loss of each example by 12, and the engine.*12 rows.*divided twice"),
    "twice, in an average": (lambda losses, w: un.compute_average_loss(losses / 12), r"divides the loss of each example by 12"),
    "twice, in an average by a size": (
        lambda losses, w: un.compute_average_loss(losses / 12, global_batch_size=12),
        r"divides the loss of each example by 12, and the engine.*divided twice. Give the losses as they are",
    ),
    "twice, behind an average": (
        lambda losses, w: un.compute_average_loss(losses) / 12,
        r"divides by 12 what un.compute_average_loss returned.*divided twice. Return it as it is.*write 0.0833 \* loss",
    ),
    "twice, behind an average by a size": (
        lambda losses, w: 0.1 + un.compute_average_loss(losses, global_batch_size=12) / 12,
        r"divides by 12 what un.compute_average_loss returned",
    ),
    "by the replicas, behind an average": (
        lambda losses, w: un.compute_average_loss(losses) / 4,
        r"divides by 4 what un.compute_average_loss returned",
    ),
    "by the replicas, in an average": (
        lambda losses, w: un.compute_average_loss(losses / 4),
        r"divides the loss of each example by 4, and the engine",
    ),
    "a sum, by the rows and the replicas": (
        lambda losses, w: ops.sum(losses) / 12 / 4,
        r"divides a sum, or its gradients, by the examples of the global batch and by 4 replicas too.*divided twice",
    ),
    "a mean of a replica": (
        lambda losses, w: ops.mean(losses),
        r"'<lambda>' differentiates a number that stays the same where a replica's rows are taken twice.*4 times the mean over the "
        "global batch of 12",
    ),
    "weights of a replica": (
        lambda losses, w: ops.average(losses, weights=losses + 1),
        r"stays the same where a replica's rows are taken twice, as a mean",
    ),
    "weights of a replica, by the replicas": (
        lambda losses, w: ops.average(losses, weights=losses + 1) / 4,
        r"makes of all rows together what is not made of their parts",
    ),
    "what looks at other rows": (
        lambda losses, w: ops.sum(ops.square(losses - ops.mean(losses))),
        "'<lambda>' makes of all rows together what is not made of their parts",
    ),
    "neither a mean nor a sum": (
        lambda losses, w: ops.sqrt(ops.sum(ops.square(losses))),
        r"a number that is 1.41 times as large(.|\n)*neither a mean over them \(1\) nor a sum",
    ),
    "a regularizer": (
        lambda losses, w: un.compute_average_loss(losses) + 0.01 * square(w),
        r"adds to its loss, in each of 4 replicas.*a regularizer: it counts 4 times.*un.scale_regularization_loss",
    ),
}
QUICK_DIVIDED = (
    "a constant of no batch", "twice", "twice, behind an average", "a sum, by the rows and the replicas", "a mean of a replica",
    "weights of a replica, by the replicas", "neither a mean nor a sum", "a regularizer",
)  # fmt: skip


def differentiate(loop, form, **batch):
    weights = loop.model.trainable_variables
    code = lambda batch: loop.differentiate(batch, lambda losses: form(losses, weights))[0]
    loop.strategy.run(code, args=(loop.first(**batch),))


@pytest.mark.parametrize("how", mostly_slow(DIVIDED, *QUICK_DIVIDED))
def test_a_loss_that_is_divided_by_another_number_is_warned_about(loop, how):
    form, said = DIVIDED[how]
    with pytest.warns(UserWarning, match=said):
        differentiate(loop, form)


def test_unequal_shares_of_a_mean_that_is_divided_by_the_replicas_are_warned_about(loop):
    with pytest.warns(UserWarning, match=r"by 4 replicas, and of the 10 rows of this global batch some have 3 and others 2"):
        differentiate(loop, lambda losses, w: ops.mean(losses) / 4, rows=10)


RIGHT = {
    "the rows": lambda losses, w: ops.sum(losses) / 12,
    "the rows of a replica, and the replicas": lambda losses, w: ops.sum(losses) / (len(losses) * 4),
    "the rows, and halved": lambda losses, w: 0.5 * ops.sum(losses) / 12,
    "a sum": lambda losses, w: ops.sum(losses),
    "half a sum": lambda losses, w: ops.sum(losses) / 2,
    "a mean, and the replicas": lambda losses, w: ops.mean(losses) / 4,
    "weighted": lambda losses, w: un.compute_average_loss(losses) / 10 + 3 * un.compute_average_loss(losses),
    "weighted by a quarter": lambda losses, w: 0.25 * un.compute_average_loss(losses) + un.compute_average_loss(losses * 0.25),
    "weighted examples": lambda losses, w: losses * 0.3,
    "a regularizer": lambda losses, w: un.compute_average_loss(losses) + un.scale_regularization_loss(square(w)),
    "a regularizer over R": lambda losses, w: ops.sum(losses) / 12 + 0.01 * square(w) / 4,
    "a regularizer in each example": lambda losses, w: losses + 0.01 * square(w),
    "a number": lambda losses, w: ops.sum(losses) / 12 + 1.0,
    "by the replicas": lambda losses, w: ops.sum(losses) / 4,
    "the rows, and four values of each": lambda losses, w: ops.sum(tile(losses, 4)) / 12 / 4,
    "a mean of two shares": lambda losses, w: ops.mean(
        ops.stack([un.compute_average_loss(losses), un.compute_average_loss(2 * losses)])
    ),
    "a learned weight": lambda losses, w: ops.exp(-w[1][0]) * un.compute_average_loss(losses),
    "values of each token": lambda losses, w: un.compute_average_loss(tile(losses, 7), global_batch_size=12 * 7),
    "as many features as rows": lambda losses, w: ops.mean(tile(losses, 12), axis=-1),
    "a weight of examples": lambda losses, w: losses * (1 / 12),
}


@pytest.mark.parametrize("how", mostly_slow(RIGHT, "the rows", "a mean, and the replicas", "weighted", "a regularizer"))
def test_a_loss_that_is_divided_rightly_is_not(loop, how):
    differentiate(loop, RIGHT[how])


def test_a_divisor_that_is_an_argument_is_looked_at_in_each_step(loop):
    """It may be any count; together with the replicas it must not be the rows."""
    code = lambda batch, n, by: loop.differentiate(batch, lambda losses: ops.sum(losses) / (n * by))[0]
    for number in (12, 65):
        loop.run(code, np.float32(number), 1)
    with pytest.warns(UserWarning, match="by the examples of the global batch and by 4 replicas too"):
        loop.run(lambda batch, n: loop.differentiate(batch, lambda losses: ops.sum(losses) / n / 4)[0], np.float32(12))


def test_one_replica_may_take_a_mean():
    loop = Loop(on(1, 1))
    code = lambda batch: loop.differentiate(batch, ops.mean)[0]
    loop.run(code)
    loop.strategy.run(code, args=(loop.first(7),))


TWICE = {
    "the losses of examples": (
        lambda losses: losses, lambda gradient: gradient / 4,
        r"divides by 4 the gradients that un.value_and_grad returned.*they are divided twice. Apply them as they are",
    ),
    "by a multiple": (
        lambda losses: losses, lambda gradient: 0.25 * gradient, r"divides by 4 the gradients that un.value_and_grad returned",
    ),
    "an average": (
        un.compute_average_loss, lambda gradient: gradient / 4, r"divides by 4 the gradients that un.value_and_grad returned",
    ),
    "a sum over the rows": (
        lambda losses: ops.sum(losses) / 12, lambda gradient: gradient / 4,
        r"divides a sum, or its gradients, by the examples.*divided twice",
    ),
}  # fmt: skip


def apply_changed(form, change):
    """Train on one batch with gradients of losses in this form, changed so, and return the weights."""
    loop = Loop(on(1, 4), optimizer=lambda: keras.optimizers.SGD(0.1))
    loop.run(lambda batch: loop.apply([change(gradient) for gradient in loop.differentiate(batch, form)[1]]))
    return [np.asarray(weight.value) for weight in loop.model.trainable_variables]


@pytest.mark.parametrize("how", mostly_slow(TWICE, "the losses of examples", "a sum over the rows"))
def test_gradients_that_are_divided_twice_are_warned_about(how):
    form, change, said = TWICE[how]
    with pytest.warns(UserWarning, match=said):
        apply_changed(form, change)


def test_gradients_of_a_mean_over_a_replicas_rows_may_be_divided_by_the_replicas():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divided = apply_changed(ops.mean, lambda gradient: gradient / 4)
        of_a_batch = apply_changed(lambda losses: losses, lambda gradient: gradient)
    for one, other in zip(divided, of_a_batch, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
