"""The surface of a loop of the user's own: run, reduce, gather, local results, functions, gradients."""

import gc
import weakref

import jax
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, ops

import unisono as un
from foreign_tensors import LentTensor, Tensor
from loops import CLASSES, Loop, bits, crossentropy, data
from sizes import cases, mostly_slow, slow
from trainings import on

X, Y = data("dense", 43)


@pytest.fixture(params=[(2, 4), *slow(((3, 4),), ((1, 1),), ((1, 4),))], ids=["R=4 on 2", "R=4 on 3", "R=1", "R=4 on 1"])
def loop(request):
    return Loop(on(*request.param))


def batches(loop, rows=X, size=10):
    return loop.strategy.distribute_dataset((rows, np.arange(len(rows))), batch_size=size)


def first(loop, rows=X, size=10):
    return next(iter(batches(loop, rows, size)))


# run, local_results, reduce, gather


def test_one_result_for_each_replica_in_order(loop):
    def code(batch):
        context = un.get_replica_context()
        assert not un.in_cross_replica_context()
        assert context.num_replicas_in_sync == loop.strategy.num_replicas_in_sync
        return {"id": context.replica_id_in_sync_group, "rows": batch[1], "none": None, "text": "same"}

    replicas = loop.strategy.num_replicas_in_sync
    found = loop.strategy.local_results(loop.strategy.run(code, args=(first(loop),)))
    assert [int(result["id"]) for result in found] == list(range(replicas))
    assert [row for result in found for row in result["rows"].tolist()] == list(range(10))
    assert all(result["text"] == "same" and result["none"] is None for result in found)
    assert [result["rows"].devices() for result in found] == [{loop.strategy.devices[0]}] * replicas


def test_replicas_without_rows_are_not_run(loop):
    value = loop.strategy.run(lambda batch: (batch[0], ops.sum(batch[0])), args=(first(loop, X[:1]),))
    rows, totals = value
    replicas = loop.strategy.num_replicas_in_sync
    assert [part.shape for part in rows.values] == [(1, 6)] + [(0, 6)] * (replicas - 1)
    assert [float(v) for v in totals.values[1:]] == [0.0] * (replicas - 1)
    np.testing.assert_allclose(loop.strategy.reduce("MEAN", totals), X[0].sum(), rtol=1e-6)
    np.testing.assert_array_equal(loop.strategy.gather(rows, axis=0), X[:1])


@pytest.mark.parametrize("op", [un.ReduceOp.SUM, "Sum", *slow("SUM", "sum")])
def test_sums(loop, op):
    rows, total = loop.strategy.run(lambda batch: (batch[0], ops.sum(batch[0])), args=(first(loop),))
    np.testing.assert_allclose(loop.strategy.reduce(op, total, axis=None), X[:10].sum(), rtol=1e-5)
    np.testing.assert_allclose(loop.strategy.reduce(op, rows, axis=0), X[:10].sum(0), rtol=1e-5)
    with loop.strategy.scope():
        np.testing.assert_allclose(loop.strategy.reduce(op, {"a": [total]})["a"][0], X[:10].sum(), rtol=1e-5)


def test_means_weigh_real_rows(loop):
    """Of rows: all of them; without an axis: of the replicas that have some."""
    rows, total = loop.strategy.run(lambda batch: (batch[0], ops.sum(batch[0])), args=(first(loop),))
    np.testing.assert_allclose(loop.strategy.reduce("mean", rows, axis=0), X[:10].mean(0), rtol=1e-5)
    np.testing.assert_allclose(loop.strategy.reduce("MEAN", total), X[:10].sum() / loop.strategy.num_replicas_in_sync, rtol=1e-5)


SHARES = {
    "of the engine": lambda losses: losses,
    "of an average": un.compute_average_loss,
    "with a regularizer": lambda losses: un.compute_average_loss(losses) + un.scale_regularization_loss(1.0),
}


@pytest.mark.parametrize("how", mostly_slow(SHARES, "of the engine", "with a regularizer"))
def test_a_mean_of_shares_of_a_loss_is_warned_about(loop, how):
    def code(batch):
        return un.value_and_grad(lambda: SHARES[how](loop.loss(batch[1], loop.model(batch[0]))), loop.model.trainable_variables)[
            0
        ]

    share = loop.strategy.run(code, args=(first(loop),))
    total = loop.strategy.reduce("SUM", share)
    if loop.strategy.num_replicas_in_sync == 1:
        assert loop.strategy.reduce("MEAN", share) == total
        return
    with pytest.warns(
        UserWarning, match=r"the loss is their sum, and their mean is 1/4 of it. Write strategy.reduce\(\"SUM\""
    ) as said:
        assert loop.strategy.reduce("MEAN", {"loss": share})["loss"] == total / 4
    assert said[0].filename == __file__


def test_what_cannot_be_reduced(loop):
    rows = loop.strategy.run(lambda batch: batch[0], args=(first(loop),))
    assert loop.strategy.reduce("MEAN", 3.0) == 3.0
    assert loop.strategy.reduce("SUM", 0) == 0
    if loop.strategy.num_replicas_in_sync > 1:
        with pytest.raises(ValueError, match="their sum would be 4 times it"):
            loop.strategy.reduce("SUM", 3.0)
        with pytest.raises(ValueError, match=r"shapes \(2, 6\) and \(3, 6\).*axis=0"):
            loop.strategy.reduce("SUM", rows)
    with pytest.raises(ValueError, match='Write un.ReduceOp.SUM or un.ReduceOp.MEAN, or "SUM" or "MEAN"'):
        loop.strategy.reduce("MAX", rows)
    with pytest.raises(ValueError, match="axis=5 for values of rank 2"):
        loop.strategy.reduce("SUM", rows, axis=5)
    with pytest.raises(ValueError, match="Gather what strategy.run returned"):
        loop.strategy.gather(X, axis=0)


def test_half_precision_is_summed_in_float32(loop):
    value = loop.strategy.run(lambda: ops.cast(ops.ones((3,)) * 20000, "float16"))
    assert loop.strategy.reduce("MEAN", value).tolist() == [20000] * 3


@settings(max_examples=cases(3, 15))
@given(st.integers(1, 30), st.integers(1, 9), st.data())
def test_gathered_rows_are_the_rows(rows, replicas, data):
    strategy = on(data.draw(st.integers(1, min(replicas, 8))), replicas)
    batch = next(iter(strategy.distribute_dataset([np.arange(rows)])))
    value = strategy.run(lambda batch: batch + 1, args=(batch,))
    assert strategy.gather(value, axis=0).tolist() == list(range(1, rows + 1))
    assert int(strategy.reduce("SUM", value, axis=0)) == sum(range(1, rows + 1))


def test_what_a_run_returns_goes_into_the_next(loop):
    """Also when the run before had other rows."""

    def second(values, total, batch=None):
        return ops.sum(values) + total + (0 if batch is None else ops.sum(batch[1]))

    for batch in batches(loop, X[:11], 8):
        values, total = loop.strategy.run(lambda batch: (batch[0] * 2, ops.sum(batch[0])), args=(batch,))
        both = loop.strategy.run(second, args=(values, total), kwargs={"batch": batch})
        alone = loop.strategy.run(second, args=(values, total))
        rows, numbers = np.concatenate(batch[0].values), np.concatenate(batch[1].values)
        np.testing.assert_allclose(loop.strategy.reduce("SUM", alone), 3 * rows.sum(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(loop.strategy.reduce("SUM", both), 3 * rows.sum() + numbers.sum(), rtol=1e-4)


def test_no_arguments_and_no_strategy():
    assert un.get_replica_context() is None
    value = on(3, 4).run(lambda: un.get_replica_context().replica_id_in_sync_group + 1)
    assert on(3, 4).reduce("SUM", value) == 10
    default = un.get_strategy()
    assert default.local_results(default.run(lambda x: x * 2, args=(3.0,)))[0] == 6


def test_older_names():
    strategy = on(1, 2)
    batch = next(iter(strategy.experimental_distribute_dataset([X])))
    value = strategy.experimental_run_v2(lambda x: ops.sum(x), args=(batch,))
    assert len(strategy.experimental_local_results(value)) == 2


def test_a_run_whose_result_is_dropped_is_run(loop):
    with loop.strategy.scope():
        seen = keras.metrics.Sum()
    for batch in batches(loop, X[:16], 8):
        loop.strategy.run(lambda batch: seen.update_state(batch[1] * 0 + 1), args=(batch,))
    assert float(seen.result()) == 16


@pytest.mark.slow
def test_arrays_that_somebody_holds_are_not_used_again(loop):
    loop.train(X[:12], Y[:12], epochs=1)
    held = [v.value for v in [*loop.model.weights, *loop.optimizer.variables]]
    before = [np.array(value) for value in held]
    loop.train(X[:24], Y[:24], epochs=1)
    for value, copy in zip(held, before, strict=True):
        np.testing.assert_array_equal(value, copy)


@pytest.mark.parametrize("replicas", [4, *slow(1)])
def test_arrays_of_the_user_are_not_used_again(replicas):
    """What was assigned, and what a variable gave while another function owned the state."""
    loop = Loop(on(1, replicas))
    batch = first(loop, size=8)
    loop.one(batch)
    kernel = loop.model.trainable_variables[0]
    mine = jax.numpy.asarray(np.ones(kernel.shape, "float32"))
    kernel.assign(mine)
    loop.one(batch)
    held = kernel.value
    before = np.array(held)
    loop.strategy.run(lambda batch: ops.sum(loop.model(batch[0])), args=(batch,))
    loop.one(batch)
    loop.one(batch)
    np.testing.assert_array_equal(mine, np.ones(kernel.shape))
    np.testing.assert_array_equal(held, before)


def test_a_call_that_fails_leaves_the_state_as_it_is(loop):
    """Also where another function has changed it since this one's last call."""
    batch, kernel = first(loop, X, 12), loop.model.trainable_variables[0]

    def look(batch, number):
        return ops.sum(loop.model(batch[0])) + number

    loop.strategy.run(look, args=(batch, np.float32(1)))
    loop.train(X[:12], Y[:12], epochs=1)
    before = np.array(kernel.value)
    with pytest.raises(ValueError, match="made of a generator|different global batches"):
        loop.strategy.run(look, args=((batch[0], first(loop, X, 5)[0]), np.float32(1)))
    loop.optimizer.lr = 0.1
    with pytest.raises(AttributeError, match="learning_rate"):
        loop.train(X[:12], Y[:12], epochs=1)
    np.testing.assert_array_equal(kernel.value, before)


def test_memory_of_the_state_is_used_again():
    loop = Loop(on(1, 4))
    loop.train(X[:12], Y[:12], epochs=1)
    kernel, batch = loop.model.trainable_variables[0], first(loop, size=12)
    places = set()
    for _ in range(5):
        loop.one(batch)
        places.add(kernel.value.unsafe_buffer_pointer())
    assert len(places) == 1


@pytest.mark.slow
def test_a_strategy_and_its_programs_can_be_let_go():
    loop = Loop(on(1, 2))
    loop.train(X, Y)
    alive = weakref.ref(loop.model)
    del loop
    gc.collect()
    assert alive() is None


# value_and_grad


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


@pytest.mark.slow
def test_what_is_made_inside_of_a_loss_may_be_used_outside_if_no_weight_is_in_it(loop):
    """As JAX allows it. With attention in the model, whose kernel is put in before the gradient is taken."""
    with loop.strategy.scope():
        model = keras.Sequential([layers.Input((9, 6)), Attentive()])

    def code(batch):
        made = []

        def loss():
            made.append(ops.sum(batch[0]))
            return ops.sum(model(ops.repeat(batch[0][:, None], 9, 1)))

        value, _ = un.value_and_grad(loss, model.trainable_variables)
        return value, made[0]

    value, made = loop.strategy.run(code, args=(first(loop, size=8),))
    np.testing.assert_allclose(loop.strategy.reduce("SUM", made), X[:8].sum(), rtol=1e-5)
    with loop.strategy.scope():
        expected = model(np.repeat(X[:8, None], 9, 1)).numpy().sum()
    np.testing.assert_allclose(loop.strategy.reduce("SUM", value), expected, rtol=1e-4)


class Attentive(layers.Layer):
    def __init__(self):
        super().__init__()
        self.heads = layers.MultiHeadAttention(1, 6)

    def call(self, x):
        return self.heads(x, x)


def test_losses_that_are_none(loop):
    variables = loop.model.trainable_variables
    for wrong, message in (
        (lambda: None, r"returned None as its loss"),
        (lambda: (1.0, 2.0, 3.0), "as its loss. Return one value for each example"),
        (lambda: (1.0, 2.0), r"its loss is one number.* If the second is no weight, write has_aux=True"),
        (
            lambda: (np.ones(3, "float32"), np.ones((3, 2), "float32")),
            r"taken for \(values, weights\): sample_weight has the shape \(3, 2\), which does not fit .* write has_aux=True",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            un.value_and_grad(wrong, variables)
    with pytest.raises(ValueError, match="with has_aux=True it must return"):
        un.value_and_grad(lambda: 1.0, variables, has_aux=True)
    with pytest.raises(TypeError, match="Write its trainable_variables"):
        un.value_and_grad(lambda: 1.0, loop.model)
    with pytest.raises(TypeError, match="Give it Keras variables"):
        un.value_and_grad(lambda: 1.0, [np.ones(3)])


def test_gradients_that_code_changes_are_applied_as_they_are():
    """Also under a loss scale, of which the code sees nothing. That clipped parts are no clipped whole is said."""
    seen = []
    for scaled in (False, True):
        loop = Loop(on(1, 4), optimizer=lambda: keras.optimizers.SGD(0.1))
        optimizer = loop.optimizer
        if scaled:
            with loop.strategy.scope():
                optimizer = keras.optimizers.LossScaleOptimizer(loop.optimizer, initial_scale=1024)

        def code(batch, loop=loop, optimizer=optimizer):
            variables = loop.model.trainable_variables
            value, gradients = un.value_and_grad(lambda: loop.loss(batch[1], loop.model(batch[0])), variables)
            optimizer.apply([ops.clip(g, -0.01, 0.01) for g in gradients], variables)
            return value

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
    seen = []
    for by_hand in (False, True):
        loop = Loop(
            on(2, 4), optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024)
        )

        def code(batch, loop=loop, by_hand=by_hand):
            def loss():
                average = un.compute_average_loss(loop.loss(batch[1], loop.model(batch[0])))
                return loop.optimizer.scale_loss(average) if by_hand else average

            _, gradients = un.value_and_grad(loss, loop.model.trainable_variables)
            loop.optimizer.apply(gradients, loop.model.trainable_variables)

        for batch in loop.strategy.distribute_dataset((X, Y), batch_size=12):
            loop.strategy.run(code, args=(batch,))
        seen.append(bits(loop.model, loop.optimizer))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("scales", [(8, 1024), *slow(*(((one, other),) for one, other in ((8, 8), (1024, 8), (0, 8))))])
def test_every_optimizer_has_its_own_loss_scale(scales):
    """One loss over the weights of two optimizers."""

    def trained(scales):
        keras.utils.set_random_seed(0)
        strategy = on(1, 4)
        with strategy.scope():
            one, other = layers.Dense(4), layers.Dense(CLASSES)
            one.build((None, 6)), other.build((None, 4))
            optimizers = [
                keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=s)
                if s
                else keras.optimizers.SGD(0.1)
                for s in scales
            ]

        def code(batch):
            weights = [one.trainable_variables, other.trainable_variables]
            loss = lambda: crossentropy(None)(batch[1], other(one(batch[0])))
            _, gradients = un.value_and_grad(loss, weights[0] + weights[1])
            optimizers[0].apply(gradients[:2], weights[0])
            optimizers[1].apply(gradients[2:], weights[1])

        strategy.run(code, args=(next(iter(strategy.distribute_dataset((X, Y), batch_size=12))),))
        return [np.array(v.value) for v in one.trainable_variables + other.trainable_variables]

    for found, expected in zip(trained(scales), trained((0, 0)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize(("aggregation", "grown"), [("sum", 24), ("only_first_replica", 24), ("mean", 6)])
def test_variables_of_ones_own_are_merged_as_they_say(replicas, aggregation, grown):
    strategy = on(min(2, replicas), replicas)
    with strategy.scope():
        numbers = [
            keras.Variable(0, dtype=dtype, trainable=False, aggregation=aggregation)
            for dtype in ("float32", "int32")
            if (aggregation, dtype) != ("mean", "int32")
        ]

    def code(rows):
        for number in numbers:
            number.assign_add(len(rows))

    for batch in strategy.distribute_dataset(np.arange(24.0), batch_size=12):
        strategy.run(code, args=(batch,))
    assert [float(number.value) for number in numbers] == [grown if replicas > 1 else 24] * len(numbers)


@pytest.mark.parametrize(("replicas", "dtype"), [(4, "float32"), (4, "int32"), *slow((1, "float32"), (1, "int32"))])
def test_what_replicas_assign_to_a_sum_is_added(replicas, dtype):
    """In place of the value before, which the code does not read; from then on it grows."""
    strategy = on(min(2, replicas), replicas)
    with strategy.scope():
        number = keras.Variable(7, dtype=dtype, trainable=False, aggregation="sum")

    def code(rows):
        number.assign(ops.sum(rows))
        number.assign_add(ops.cast(len(rows), dtype))

    for batch in strategy.distribute_dataset(np.arange(16, dtype=dtype), batch_size=8):
        strategy.run(code, args=(batch,))
    assert float(number.value) == sum(range(8, 16)) + 8


@pytest.mark.parametrize(
    ("replicas", "aggregation"),
    [(4, "mean"), (4, "only_first_replica"), (1, "mean"), *slow((1, "only_first_replica"))],
)
@pytest.mark.parametrize("start", [np.inf, np.nan, *slow(-np.inf)])
def test_state_may_begin_at_no_number(replicas, aggregation, start):
    strategy = on(min(2, replicas), replicas)
    with strategy.scope():
        last = keras.Variable(start, trainable=False, aggregation=aggregation)

    def code(rows):
        last.assign(ops.where(ops.isfinite(last), ops.minimum(last, 2.0), 3.0 + 0 * ops.sum(rows)))

    seen = []
    for batch in strategy.distribute_dataset(np.ones(24, "float32"), batch_size=12):
        strategy.run(code, args=(batch,))
        seen.append(float(last.value))
    assert seen == [3, 2]


def test_results_that_have_no_rows(loop):
    """Of a replica that was not run they are zero, in their shape."""
    strategy = on(1, 4)
    (batch,) = strategy.distribute_dataset([X[:2]])
    value = strategy.run(lambda rows: (ops.ones((6, 5)), rows * 2), args=(batch,))
    sums, rows = zip(*strategy.local_results(value), strict=True)
    assert [float(ops.sum(part)) for part in sums] == [30, 30, 0, 0]
    assert [part.shape for part in sums] == [(6, 5)] * 4
    assert [part.shape for part in rows] == [(1, 6), (1, 6), (0, 6), (0, 6)]


def test_results_of_replicas_are_computed_with_together(loop):
    """Whatever the devices on which the replicas ran."""
    values = loop.strategy.run(lambda batch: (ops.sum(batch[0]), batch[0] * 2), args=(first(loop),))
    sums, rows = zip(*loop.strategy.local_results(values), strict=True)
    np.testing.assert_allclose(sum(sums), X[:10].sum(), rtol=1e-5)
    np.testing.assert_array_equal(ops.concatenate(rows, axis=0), X[:10] * 2)
    assert all(isinstance(part, np.ndarray) for part in loop.strategy.local_results(first(loop))[0])


def test_sums_of_truth_values_count():
    strategy = on(1, 4)
    (batch,) = strategy.distribute_dataset([np.arange(12)])
    large = strategy.run(lambda rows: rows > 3, args=(batch,))
    assert int(strategy.reduce("SUM", large, axis=0)) == 8
    assert float(strategy.reduce("MEAN", large, axis=0)) == pytest.approx(8 / 12)
    assert int(strategy.reduce("SUM", strategy.run(lambda rows: rows[0] > 2, args=(batch,)))) == 3


@pytest.mark.slow
def test_two_networks_with_two_runs():
    """A generator that reads what the discriminator's update left, as the error about it says."""

    def train(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            maker = keras.Sequential([layers.Input((3,)), layers.Dense(6)])
            judge = keras.Sequential([layers.Input((6,)), layers.Dense(8, "relu"), layers.Dropout(0.2), layers.Dense(1)])
            of_maker, of_judge = keras.optimizers.Adam(), keras.optimizers.Adam()
            noise = keras.random.SeedGenerator(1)
        distance = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

        def made(rows):
            return maker(keras.random.normal((rows.shape[0], 3), seed=noise))

        def judged(rows):
            fake = made(rows)

            def loss():
                real, false = judge(rows, training=True), judge(fake, training=True)
                return distance(ops.ones_like(real), real) + distance(ops.zeros_like(false), false)

            value, gradients = un.value_and_grad(loss, judge.trainable_variables)
            of_judge.apply(gradients, judge.trainable_variables)
            return value

        def improved(rows):
            def loss():
                false = judge(made(rows), training=True)
                return distance(ops.ones_like(false), false)

            value, gradients = un.value_and_grad(loss, maker.trainable_variables)
            of_maker.apply(gradients, maker.trainable_variables)
            return value

        @un.function
        def step(batch):
            values = strategy.run(judged, args=(batch,)), strategy.run(improved, args=(batch,))
            return strategy.reduce("SUM", values)

        for _ in range(3):
            for batch in strategy.distribute_dataset(X, batch_size=12):
                losses = step(batch)
        return un.fingerprint(maker, judge, of_maker, of_judge, noise.state, list(losses))

    assert train(on(1, 4)) == train(on(3, 4))


def test_a_network_that_is_built_by_its_first_step(loop):
    def train(strategy, built):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([layers.Dense(4, "relu"), layers.BatchNormalization(), layers.Dense(CLASSES)])
            optimizer = keras.optimizers.Adam()
        if built:
            model.build((None, 6))
        loss_fn = crossentropy(None)

        def step(batch):
            _, gradients = un.value_and_grad(lambda: loss_fn(batch[1], model(batch[0], training=True)), model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for batch in strategy.distribute_dataset((X[:24], Y[:24]), batch_size=12):
            strategy.run(step, args=(batch,))
        return bits(model, optimizer)

    assert train(loop.strategy, built=False) == train(loop.strategy, built=True)


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


@pytest.mark.slow
def test_losses_of_the_model_are_added_to_those_of_the_examples():
    """To the values for each example, or by their share to a number: the loss of fit."""

    def trained(how):
        keras.utils.set_random_seed(0)
        strategy = on(2, 4)
        with strategy.scope():
            model = keras.Sequential(
                [layers.Input((6,)), layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2"), layers.Dense(CLASSES)]
            )
            optimizer = keras.optimizers.SGD(0.1)
        if how == "fit":
            model.compile(optimizer, crossentropy())
            return model.fit(X, Y, batch_size=43, shuffle=False, verbose=0).history["loss"][0], model
        loss_fn = crossentropy(None)

        def step(batch):
            def loss():
                values = loss_fn(batch[1], model(batch[0], training=True))
                if how == "values":
                    return values + sum(model.losses)
                return un.compute_average_loss(values) + un.scale_regularization_loss(model.losses)

            value, gradients = un.value_and_grad(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return value

        (batch,) = strategy.distribute_dataset([(X, Y)])
        return float(strategy.reduce("SUM", strategy.run(step, args=(batch,)))), model

    (loss, model), *others = [trained(how) for how in ("fit", "values", "number")]
    for value, other in others:
        assert value == pytest.approx(loss, rel=1e-6)
        for a, b in zip(other.trainable_variables, model.trainable_variables, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_the_tutorials_example_of_average_losses():
    """Two replicas, losses 2, 3 and 4, 5: 1.25 and 2.25 each, 3.5 in all."""
    strategy = on(1, 2)
    batch = next(iter(strategy.distribute_dataset([np.array([2.0, 3.0, 4.0, 5.0], "float32")])))
    for size in (None, 4):
        value = strategy.run(lambda losses, size=size: un.compute_average_loss(losses, global_batch_size=size), args=(batch,))
        assert [float(v) for v in strategy.local_results(value)] == [1.25, 2.25]
        assert float(strategy.reduce("SUM", value)) == 3.5


@pytest.mark.slow
def test_average_losses():
    strategy = on(1, 2)
    batch = next(iter(strategy.distribute_dataset([np.arange(1, 6, dtype="float32")])))
    weights = np.array([1, 0, 2, 0, 1], "float32")

    def value(code, *more):
        return float(strategy.reduce("SUM", strategy.run(code, args=(batch, *more))))

    weight = next(iter(strategy.distribute_dataset([weights])))
    assert value(lambda losses, w: un.compute_average_loss(losses, sample_weight=w), weight) == pytest.approx(12 / 5)
    with pytest.warns(UserWarning, match="divides a sum by 10, and this global batch has 5 rows"):
        assert value(lambda losses: un.compute_average_loss(losses, global_batch_size=10)) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="received one number"):
        value(lambda losses: un.compute_average_loss(ops.sum(losses)))
    with pytest.raises(ValueError, match="must be a positive number"):
        value(lambda losses: un.compute_average_loss(losses, global_batch_size=0))
    with pytest.raises(ValueError, match=r"sample_weight has the shape \(7,\)"):
        value(lambda losses: un.compute_average_loss(losses, sample_weight=np.ones(7, "float32")))


@pytest.mark.parametrize("form", ["division", *slow("argument", "product")])
def test_a_constant_divisor_on_a_ragged_batch_is_warned_about_once(form):
    """As program 1's author wrote it: 128 on a last batch of 80."""
    loop = Loop(on(1, 4), loss="fixed")

    def code(batch):
        def loss():
            losses = loop.loss(batch[1], loop.model(batch[0]))
            if form == "argument":
                return un.compute_average_loss(losses, global_batch_size=12)
            return ops.sum(losses) / 12 if form == "division" else ops.sum(losses) * (1.0 / 12)

        return un.value_and_grad(loss, loop.model.trainable_variables)[0]

    *whole, ragged = loop.strategy.distribute_dataset((X[:19], Y[:19]), batch_size=12)
    for batch in whole:
        loop.strategy.run(code, args=(batch,))
    with pytest.warns(UserWarning, match=r"divides a sum by 12, and this global batch has 7 rows: its examples weigh 7/12"):
        loop.strategy.run(code, args=(ragged,))
    loop.strategy.run(code, args=(ragged,))


# function


def test_a_function_without_replicas_is_compiled_as_a_whole():
    model = keras.Sequential([layers.Dense(4, "relu"), layers.Dropout(0.5), layers.Dense(CLASSES)])
    optimizer, accuracy, loss_fn = keras.optimizers.Adam(), keras.metrics.SparseCategoricalAccuracy(), crossentropy(None)
    calls = []

    @un.function
    def step(x, y, training=True):
        calls.append(training)
        value, gradients = un.value_and_grad(lambda: loss_fn(y, model(x, training=training)), model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(y, model(x))
        return value

    losses = [float(step(X, Y)) for _ in range(30)]
    assert losses[-1] < losses[0]
    assert int(optimizer.iterations.value) == 30
    assert float(accuracy.count.value) == 30 * 43
    traced = len(calls)
    step(X, Y)
    assert len(calls) == traced
    step(X, Y, training=False)
    assert len(calls) > traced


def test_data_that_a_function_finds_by_itself():
    """Nothing of it is taken twice: an iterator and a shuffled dataset around the function, and behind enumerate; a generator."""
    strategy = on(1, 4)
    total = lambda batch: strategy.reduce("SUM", strategy.run(ops.sum, args=(batch,)))

    def dataset(rows=24, **options):
        return strategy.distribute_dataset(np.arange(rows, dtype="float32"), batch_size=8, **options)

    batches, calls = iter(dataset()), []
    step = un.function(lambda: (calls.append(1), total(next(batches)))[1])
    assert [float(step()) for _ in range(3)] == [28, 92, 156]
    assert len(calls) == 3
    numbered = un.function(lambda pairs: [(number, float(total(batch))) for number, batch in pairs])
    assert numbered(enumerate(dataset())) == [(0, 28), (1, 92), (2, 156)]
    shuffled, orders = dataset(shuffle=True), []
    epoch = un.function(lambda: [float(total(batch)) for batch in shuffled])
    for as_argument in (False, True):
        keras.utils.set_random_seed(3)
        orders.append(
            un.function(lambda data: [float(total(batch)) for batch in data])(dataset(shuffle=True)) if as_argument else epoch()
        )
    assert orders[0] == orders[1]
    assert shuffled.position == (1, 0)
    stream = strategy.distribute_dataset(np.arange(8.0) + number for number in range(3))
    assert un.function(lambda: [float(total(batch)) for batch in stream])() == [28, 36, 44]


def test_an_except_around_a_run_takes_nothing_away():
    strategy = on(1, 4)
    (batch,) = strategy.distribute_dataset([np.arange(8.0)])
    runs = {"step": strategy.run}  # so that nothing tells beforehand that replicas are run

    @un.function
    def careful(batch):
        try:
            return strategy.reduce("SUM", runs["step"](ops.sum, args=(batch["rows"],)))
        except Exception:
            return -1

    class Held(dict):
        """No tree to JAX."""

    assert float(careful(Held(rows=batch))) == 28


def test_a_function_is_named_like_what_it_compiles():
    class Trainer:
        factor = 3

        @un.function
        def scaled(self, x):
            """Times three."""
            return x * self.factor

    assert Trainer.scaled.__doc__ == "Times three."
    assert float(Trainer().scaled(np.float32(2))) == 6
    with pytest.raises(ValueError, match="'wrong' could not be compiled.*neither float"):
        un.function(wrong)(np.float32(2))


def wrong(x):
    return float(x)


def test_a_function_that_runs_replicas_without_arguments():
    strategy = on(2, 4)

    @un.function
    def numbers():
        return strategy.reduce("SUM", strategy.run(lambda: un.get_replica_context().replica_id_in_sync_group))

    assert [int(numbers()) for _ in range(3)] == [6, 6, 6]


def test_a_whole_epoch_in_one_function_waits_for_nothing(loop, monkeypatch):
    """One device runs one program a step; of several, one runs replicas on all, one adds, and one ends the step. Nothing is fetched."""
    dataset = loop.strategy.distribute_dataset((X[:36], Y[:36]), batch_size=12)
    loop.whole_epoch(dataset)
    asked = {"programs": 0, "fetched": 0}

    def counted(of, name, what):
        stock = of.__dict__[name]
        call = stock.fget if isinstance(stock, property) else stock

        def counting(*args, **kwargs):
            asked[what] += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(of, name, property(counting) if isinstance(stock, property) else counting)

    array = type(jax.numpy.zeros(()))
    counted(jax.stages.Compiled, "__call__", "programs")
    for name in ("_value", "__array__", "__float__", "__int__", "__bool__", "block_until_ready"):
        counted(array, name, "fetched")
    total = loop.whole_epoch(dataset)
    devices, steps = len(loop.strategy.devices), 3
    assert asked["programs"] == steps if devices == 1 else asked["programs"] <= steps * 3
    assert not asked["fetched"]
    assert np.isfinite(float(total))
    assert asked["fetched"]


# Tensors of other libraries


def tensors(library):
    """What makes a tensor of a library of an array."""
    if library == "tensorflow":
        return pytest.importorskip("tensorflow").constant
    if library == "torch":
        return pytest.importorskip("torch").tensor
    return {"array": Tensor, "dlpack": LentTensor}[library]


@pytest.mark.parametrize(
    "library",
    ["array", "dlpack", *(pytest.param(name, marks=pytest.mark.compat) for name in ("tensorflow", "torch"))],
)
def test_tensors_of_other_libraries_are_arrays(library):
    """For a function that is compiled as a whole, for `run`, `reduce` and fingerprints: a compilation for each shape, and no warning."""
    tensor, traced = tensors(library), []
    strategy = on(1, 2)
    weight = keras.Variable(2.0)

    @un.function
    def scaled(x, rate):
        traced.append(x["rows"].shape)
        return ops.sum(x["rows"]) * rate * weight

    results = [float(scaled({"rows": tensor(np.full(3, n, "float32"))}, tensor(np.float32(n)))) for n in range(5)]
    assert results == [3 * n * n * 2.0 for n in range(5)]
    assert len(set(traced)) == 1
    traced_once = len(traced)
    scaled({"rows": np.ones(3, "float32")}, np.float32(1))
    assert len(traced) == traced_once

    def doubled(rate):
        traced.append("run")
        return rate * 2

    runs = [strategy.reduce("MEAN", strategy.run(doubled, args=(tensor(np.float32(n)),))) for n in range(4)]
    assert list(map(float, runs)) == [0, 2, 4, 6]
    one = tensor(np.float32(3))
    assert strategy.reduce("MEAN", one) is one
    assert un.fingerprint([tensor(np.arange(3.0))]) == un.fingerprint([np.arange(3.0)])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            float,
            r"un.function has compiled 'step' 3 times for other values of x\['rate'\], of type float. Pass a number .* np.float32\(value\)",
        ),
        (
            lambda number: range(number + 1),
            "for other values of x\\['rate'\\], of type range. Pass the same object each time, or the arrays in it",
        ),
    ],
    ids=["numbers", "objects"],
)
def test_what_changes_from_call_to_call_is_named(make, said):
    @un.function
    def step(x):
        return x["rows"] * 2

    step({"rows": X, "rate": make(1)})
    step({"rows": X, "rate": make(2)})
    with pytest.warns(UserWarning, match=said):
        step({"rows": X, "rate": make(3)})
