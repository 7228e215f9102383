"""The words of a report for each cause, and for what to write instead."""

from __future__ import annotations

from typing import NamedTuple

from unisono._src.audit.cause import Cause


class CauseWords(NamedTuple):
    """The text of a cause."""

    cause: str
    instead: str


WORDS = {
    Cause.HOST_RANDOM: CauseWords(
        "Python or NumPy draw random numbers without a seed, so that each run has other ones.",
        "Give the generator a seed, as in np.random.default_rng(0), or call keras.utils.set_random_seed before the first number is drawn.",
    ),
    Cause.STEP_RANDOM: CauseWords(
        "The step uses random numbers that come from no Keras SeedGenerator.",
        "Make self.seed_generator = keras.random.SeedGenerator(0) in the layer's __init__, and draw by keras.random.normal(shape, "
        "seed=self.seed_generator) in its call.",
    ),
    Cause.TIME: CauseWords(
        "A value comes from a clock.",
        "Compute it from the number of the step or of the epoch, or give it as an argument of the script.",
    ),
    Cause.HASH_ORDER: CauseWords(
        "A value or an order comes from hash(), and with it the order of a set. It differs from one start of Python to the next.",
        "Take sorted(...) of the set, a list, or a dict; in place of hash(text) take zlib.crc32(text.encode()).",
    ),
    Cause.THREAD_ORDER: CauseWords(
        "Results come in the order in which threads finish.",
        "Take them in the order in which they were asked for: pool.map(...), or [future.result() for future in futures].",
    ),
    Cause.FILES: CauseWords(
        "What is read from a file differs: an earlier run has written it or changed it.",
        "Name the file as an input of the training and let no run write it, or compute the values anew in each run.",
    ),
    Cause.LAYER_STATE: CauseWords(
        "A layer keeps state in an attribute that is no Keras variable. It changes whenever Python runs the layer's code, which depends on "
        "how often a step is traced and on which process runs which replica.",
        "Make it a variable, self.add_weight(..., trainable=False), and assign it in call.",
    ),
    Cause.DEVICES: CauseWords(
        "A number comes from the count of devices, which differs between placements.",
        "Take strategy.num_replicas_in_sync, which is the same on every placement, or a number.",
    ),
    Cause.SHAPE: CauseWords(
        "A shape comes from the count of devices, which differs between placements.",
        "Take strategy.num_replicas_in_sync, which is the same on every placement, or a number.",
    ),
    Cause.PROCESS: CauseWords(
        "A value depends on the process: on its number, on how many processes there are, or on what only one of them does.",
        "Do the same in every process, and ask strategy.writes only before printing and writing files.",
    ),
    Cause.PROCESS_ROWS: CauseWords(
        "Each process reads other rows. Every process reads the whole global batch here, and takes the rows of its replicas.",
        "Read all rows in every process. Where each replica has a pipeline of its own, write strategy.distribute_datasets_from_function.",
    ),
    Cause.COLLECTIVE: CauseWords(
        "The script adds or gathers over devices or processes by itself: the result depends on how many there are, or on the order of the sum.",
        "Compute it from the whole data in every process, or in the step by strategy.reduce.",
    ),
    Cause.BATCH_STATISTICS: CauseWords(
        "It computes over the rows of a replica, or with their count.",
        "Compute along the other axes, as LayerNormalization and GroupNormalization do, or keep R as it is: it is part of the run.",
    ),
    Cause.RANDOM_LAYER: CauseWords(
        "It draws random numbers, and each replica draws for itself.",
        "Nothing, where other numbers are as good. To compare R = 1 with R = n, set its rate to 0.",
    ),
    Cause.BATCH_LOSS: CauseWords(
        "The loss looks at all rows of a replica together; over the whole batch it has another value.",
        "Return a loss for each row, or keep R as it is.",
    ),
    Cause.WEIGHTING: CauseWords(
        "A divisor or a length is taken from a replica's own rows, and is not that of the whole batch.",
        "In fit, use a Keras loss with sample_weight. In a loop, write un.compute_average_loss(losses, sample_weight=weights); limit "
        "gradients by the optimizer's clipnorm or global_clipnorm.",
    ),
    Cause.ROWS: CauseWords(
        "Replicas see rows twice, or rows not at all, that R = 1 sees once.",
        "Cut the rows of replica i of n from i * size to (i + 1) * size, with size = context.get_per_replica_batch_size(global_batch).",
    ),
    Cause.VERSIONS: CauseWords(
        "The two runs have other versions, another kind of device, or other kernels.",
        "Install the versions of the recorded run, and compare on the same kind of device.",
    ),
    Cause.UNKNOWN: CauseWords(
        "It is not one of the causes that the audit knows.",
        "Look at the line and at what it reads: its values differ between the two runs.",
    ),
}

FAILED = "Do what the error says; the audit knows no line that would explain it."
"""What to write where a run has failed, and no cause is known."""

OTHER_SCRIPT = CauseWords(
    "The script or its data are other ones than in the recorded run: the versions and the kernels are the same.",
    "Look at what was changed since. Leave out --against to see whether the script differs from itself: then the line is named.",
)
"""Of a run that differs from a recorded one, whose facts are the same."""

NO_SEED = CauseWords(
    "The weights start from other values in each run: no seed was set before the model was made.",
    "Call keras.utils.set_random_seed(0) before the model is made.",
)
