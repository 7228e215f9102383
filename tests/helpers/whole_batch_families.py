"""Families of trainings that look at the whole batch, as users write them; each with small data of a ragged batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import keras
import numpy as np
from keras import layers as L  # noqa: N812
from keras import ops

import gans
import whole_batch_losses as losses
from own_steps import ByGradients, Guided
from sizes import cases
from trainings import Run, labels, rows, run
from whole_batch_layers import (
    Capacity,
    Center,
    CentredInTraining,
    Codebook,
    Doubled,
    Experts,
    OfOneReplica,
    OverRows,
    Quantized,
    Queue,
    Renewed,
    between,
    mlp,
)
from whole_batch_losses import CLASSES, SPARSE

BATCH = 20
"""Eight replicas have shards of three and of two rows."""
ROWS = cases(60, 46)
"""Three steps; in `make test-all` the last has fewer rows than replicas."""
X, OTHERS, Y = rows(ROWS, 8), rows(ROWS, 8, seed=1), labels(ROWS, CLASSES)
ZEROS = np.zeros(ROWS, "int32")


def net(*sizes: int, activation: str = "tanh") -> keras.Model:
    """Return dense layers of these sizes, the first of which is that of a row."""
    *hidden, last = sizes[1:]
    return keras.Sequential([L.Input((sizes[0],)), *(L.Dense(size, activation) for size in hidden), L.Dense(last)])


class SimClr(Guided):
    """Two views of a row, by noise and dropout, and by a projection behind the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.augment = keras.Sequential([L.Input((8,)), L.GaussianNoise(0.3, seed=1), L.Dropout(0.2, seed=2)])
        self.encoder, self.projection = net(8, 8, 6), net(6, 6, 4)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return [self.projection(self.encoder(self.augment(x, training=training))) for _ in range(2)]

    def losses_of(self, x: Any, outputs: Any) -> tuple[Any, ...]:
        return (losses.nt_xent(*outputs),)


class VariationalAutoencoder(Guided):
    names = ("reconstruction", "divergence")

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.seeds = net(8, 8, 6), net(3, 8, 8), keras.random.SeedGenerator(3)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
        drawn = mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seeds)
        return self.decoder(drawn), mean, log_variance

    def losses_of(self, x: Any, outputs: Any) -> tuple[Any, ...]:
        found, mean, log_variance = outputs
        divergence = -0.5 * ops.sum(1 + log_variance - mean**2 - ops.exp(log_variance), axis=-1)
        return ops.mean(ops.sum((x - found) ** 2, axis=-1)), 0.5 * ops.mean(divergence)


class TwoTowers(keras.Model):
    """Questions and answers, of which those of other rows are wrong; and a log of its own: how many are found."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = [net(8, 8, 4), net(8, 8, 4)]
        self.built = True

    def call(self, x: Any) -> Any:
        first, second = (
            ops.normalize(tower(part), axis=-1) for tower, part in zip(self.towers, (x["ask"], x["say"]), strict=True)
        )
        return first @ ops.transpose(second) / 0.2

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(losses.cross_entropy(ops.arange(ops.shape(y_pred)[0]), y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = ops.argmax(y_pred, -1) == ops.arange(ops.shape(y_pred)[0])
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"found": ops.mean(ops.cast(found, "float32"))}


class Pairs(keras.Model):
    """A table of pairs and its transpose, as outputs; compiled losses compare them with the numbers of the rows in their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = [net(8, 8, 4), net(8, 8, 4)]
        self.built = True

    def call(self, x: Any) -> Any:
        first, second = (ops.normalize(tower(x[key]), axis=-1) for tower, key in zip(self.towers, ("ask", "say"), strict=True))
        logits = first @ ops.transpose(second) / 0.2
        return {"ask": logits, "say": ops.transpose(logits)}


def follow(net: keras.Model, leader: keras.Model, momentum: float = 0.9) -> None:
    """Move the weights of a net toward those of another."""
    for slow, fast in zip(net.variables, leader.variables, strict=True):
        slow.assign(momentum * slow + (1 - momentum) * ops.stop_gradient(fast))


class Moco(keras.Model):
    """Keys by an encoder that follows, and a queue of the keys of earlier batches as wrong answers; the right one is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.slow = net(8, 8, 4), net(8, 8, 4)
        self.slow.set_weights(self.encoder.get_weights())
        self.slow.trainable = False
        self.queue = self.add_weight(shape=(24, 4), initializer=keras.initializers.RandomNormal(seed=4), trainable=False)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        asked = ops.normalize(self.encoder(x["first"]), axis=-1)
        queue = ops.convert_to_tensor(self.queue)
        if training:
            follow(self.slow, self.encoder)
        keys = ops.stop_gradient(ops.normalize(self.slow(x["second"]), axis=-1))
        if training:
            self.queue.assign(ops.concatenate([keys, queue])[:24])
        right = ops.sum(asked * keys, axis=-1, keepdims=True)
        return ops.concatenate([right, asked @ ops.transpose(queue)], axis=-1) / 0.2


class Dino(keras.Model):
    """A student of a teacher that follows it, with a center of the teacher's outputs; the loss is added in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.center = net(8, 8, 6), net(8, 8, 6), Center()
        self.teacher.set_weights(self.student.get_weights())
        self.teacher.trainable = False
        self.center.build((None, 6))
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            follow(self.teacher, self.student)
        wanted = ops.stop_gradient(self.center(self.teacher(x["first"])))
        found = self.student(x["second"])
        self.add_loss(-ops.mean(ops.sum(wanted * ops.log_softmax(found / 0.5), axis=-1)))
        return found


def beside_the_steepest(compute: Any, weights: Any, x: Any, y: Any) -> Any:
    """Sharpness-aware: the gradient where the loss is larger."""
    slopes = jax.grad(compute)(weights, x, y)
    size = ops.sqrt(sum(ops.sum(slope**2) for slope in slopes))
    return jax.value_and_grad(compute)([w + 0.05 * slope / size for w, slope in zip(weights, slopes, strict=True)], x, y)


def of_each_row(compute: Any, weights: Any, x: Any, y: Any) -> Any:
    """Private: the gradient of each row is cut off by itself."""
    values, gradients = jax.vmap(lambda x, y: jax.value_and_grad(compute)(weights, x[None], y[None]))(x, y)
    sizes = ops.sqrt(sum(ops.sum(ops.reshape(g, (len(x), -1)) ** 2, 1) for g in gradients))
    share = ops.minimum(1, 0.5 / sizes) / len(x)
    return ops.mean(values), [ops.tensordot(share, g, 1) for g in gradients]


def after_an_update(compute: Any, weights: Any, x: Any, y: Any) -> Any:
    """As meta learning: an update by one half of the rows, and what it does to the other half."""
    half = len(x) // 2

    def learn(weights: Any) -> Any:
        slopes = jax.grad(compute)(weights, x[:half], y[:half])
        return compute([w - 0.1 * slope for w, slope in zip(weights, slopes, strict=True)], x[half:], y[half:])

    return jax.value_and_grad(learn)(weights)


def of_mixed_rows(compute: Any, weights: Any, x: Any, y: Any) -> Any:
    """Each row with another one."""
    order = jax.random.permutation(jax.random.key(1), len(x))
    mixed = 0.7 * x + 0.3 * x[order]
    return jax.value_and_grad(lambda w: 0.7 * compute(w, mixed, y) + 0.3 * compute(w, mixed, y[order]))(weights)


class Spread(keras.metrics.Metric):
    """The deviation of all logits from their mean, of which no batch knows, and the largest of all."""

    def __init__(self) -> None:
        super().__init__(name="spread")
        self.count, self.total, self.squares, self.largest = (
            self.add_variable((), "zeros", name=name) for name in ("count", "total", "squares", "largest")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(ops.cast(ops.size(y_pred), "float32"))
        self.total.assign_add(ops.sum(y_pred))
        self.squares.assign_add(ops.sum(y_pred**2))
        self.largest.assign(ops.maximum(self.largest, ops.max(y_pred)))

    def result(self) -> Any:
        mean = self.total / self.count
        return {"deviation": ops.sqrt(self.squares / self.count - mean**2), "largest": +self.largest}


class Logging(keras.Sequential):
    """Shows what no metric gives: an F1 of the batch, by hand."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found, truth = ops.argmax(y_pred, -1) == 1, ops.cast(y, "int32") == 1
        both, all_ = (ops.sum(ops.cast(v, "float32")) for v in (found & truth, ops.concatenate([found, truth])))
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"f1": 2 * both / (all_ + 1e-3)}


def momentum(rate: float = 0.1) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate, momentum=0.9)


def adam(rate: float = 0.01) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(rate)


def by(optimizer: Callable[..., Any] = momentum, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"optimizer": optimizer(), **options}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model and how it is compiled and fed."""

    make_model: Callable[[], Any]
    compile: Callable[[], dict[str, Any]]
    data: tuple[Any, ...]

    def make(self) -> keras.Model:
        model = self.make_model()
        model.compile(**self.compile())
        if model.optimizer is not None:
            model.optimizer.build(model.trainable_variables)
        return model


def of_loss(loss: Any, optimizer: Callable[[], Any] = momentum, **options: Any) -> Family:
    return Family(mlp, lambda: {"optimizer": optimizer(), "loss": loss, **options}, (X, Y))


def of_gradients(make_gradients: Callable[..., Any]) -> Family:
    return Family(lambda: ByGradients(make_gradients, [L.Input((8,)), *mlp().layers]), by(loss=SPARSE), (X, Y))


def of_layer(layer: Callable[[], Any]) -> Family:
    return Family(between(layer), lambda: {"optimizer": momentum(), "loss": SPARSE, "metrics": ["accuracy"]}, (X, Y))


VIEWS = {"first": X, "second": X + 0.3 * OTHERS}
ASKED, PLACES = {"ask": X, "say": X + OTHERS}, np.arange(ROWS) % BATCH
SHORT = X[:, : gans.SIZE]

FAMILIES = {
    "simclr": Family(SimClr, by(adam), (X,)),
    "two towers": Family(TwoTowers, by(adam), (ASKED,)),
    "tables of pairs": Family(
        Pairs, by(adam, loss={"ask": SPARSE, "say": SPARSE}, metrics={"ask": "accuracy"}), (ASKED, {"ask": PLACES, "say": PLACES})
    ),
    "barlow twins": of_loss(losses.barlow_twins),
    "hardest triplets": of_loss(losses.hardest_triplets),
    "dice": of_loss(losses.dice, adam, metrics=["accuracy"]),
    "rmse": of_loss(losses.rmse, metrics=[losses.rmse]),
    "pairs of neighbours": of_loss(losses.pairs_of_neighbours),
    "counts by rejection": of_loss(losses.counts_by_rejection),
    "complex numbers": of_loss(losses.turned),
    "hardest five": of_loss(losses.hardest_five),
    "by the size of the batch": of_loss(losses.by_the_size_of_the_batch),
    "balanced assignments": of_loss(losses.balanced_assignments),
    "worst class": of_loss(losses.worst_class),
    "sharpness": of_gradients(beside_the_steepest),
    "gradients of rows": of_gradients(of_each_row),
    "meta learning": of_gradients(after_an_update),
    "mixed rows": of_gradients(of_mixed_rows),
    "experts with a capacity": of_layer(Capacity),
    "attention over the batch": of_layer(OverRows),
    "balance of experts": of_layer(Experts),
    "variational autoencoder": Family(VariationalAutoencoder, by(adam), (X,)),
    "codebook": of_layer(Codebook),
    "queue and largest": of_layer(Queue),
    "quantization": of_layer(Quantized),
    "renewed mean": of_layer(Renewed),
    "centred in training": of_layer(CentredInTraining),
    "of one replica": of_layer(OfOneReplica),
    "doubled until large": of_layer(Doubled),
    "moco": Family(Moco, by(loss=SPARSE, metrics=["accuracy"]), (VIEWS, ZEROS)),
    "dino": Family(Dino, by(adam), (VIEWS,)),
    "own metrics and logs": Family(
        lambda: Logging(mlp().layers), by(loss=losses.masked_mean, metrics=[Spread(), "accuracy", losses.dice]), (X, Y)
    ),
    "gan": Family(gans.TwoOptimizers, lambda: {"d_optimizer": adam(), "g_optimizer": adam(0.02)}, (SHORT,)),
    "wasserstein gan": Family(gans.WassersteinGan, lambda: {"critic": adam(), "generator": adam(0.02)}, (SHORT,)),
}


@dataclasses.dataclass
class Trained:
    """A training of one epoch: its state before and after it, by groups."""

    start: dict[str, list[np.ndarray]]
    end: dict[str, list[np.ndarray]]
    run: Run


def read_state(model: Any) -> dict[str, list[np.ndarray]]:
    optimizer = [] if model.optimizer is None else model.optimizer.variables
    groups = {"trainable": model.trainable_variables, "non-trainable": model.non_trainable_variables, "optimizer": optimizer}
    return {name: [np.array(v.value) for v in group] for name, group in groups.items()}


def train(family: Family, strategy: Any = None, batch_size: int = BATCH) -> Trained:
    start: list[Any] = []

    def fit(model: Any) -> Any:
        start.append(read_state(model))
        return model.fit(*family.data, batch_size=batch_size, verbose=0, shuffle=False)

    done = run(family.make, fit, strategy)
    return Trained(start[0], read_state(done.model), done)


def norm(arrays: Iterable[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(a)) for a in arrays)))


def measure(ours: Trained, wanted: Trained) -> dict[str, float]:
    """Return how far each group of variables is from that of plain Keras, relative to its change; what counts must be equal."""
    errors = {}
    for group, end in wanted.end.items():
        begun, found = wanted.start[group], ours.end[group]
        floats = [place for place, array in enumerate(end) if array.dtype.kind == "f"]
        for place in set(range(len(end))) - set(floats):
            np.testing.assert_array_equal(found[place], end[place])
        change, apart = (norm(end[place].astype("float64") - other[place] for place in floats) for other in (begun, found))
        errors[group] = apart / change if apart else 0.0
    return errors
