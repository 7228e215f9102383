"""Several processes, really launched: the bits of one."""

import functools
import json
import os
import re

import pytest

from processes import HERE, python
from sizes import cases, thorough
from unisono._src.kernels.native.library import load_kernels

pytestmark = pytest.mark.processes

SCRIPT = str(HERE / "train_in_processes.py")
FIT = {"check": "fit", "replicas": 8, "family": "normalized", "rows": cases(27, None)}
LOOP = {"check": "loop", "replicas": 8, "model": cases("dense", "normalized")}
GAN, CONTRAST = ({"check": "whole_batch", "replicas": 8, "family": name} for name in ("gan", "simclr"))
FROZEN = {"check": "frozen", "replicas": 4}
EAGER = {"check": "eager", "replicas": 4}
DEALT_OUT = {"check": "dealt_out", "replicas": 8}
SOURCES = {"check": "sources", "replicas": 4, "kinds": ["dataset", "passes"]}
MORE_SOURCES = SOURCES | {"kinds": ["workers", "draws", "global draws", "changes", "generator", "pipelines", "resumed"]}
CUT = {"shard": "frozen"}
"""What is not trained lies cut over the devices of each process."""
MESSAGES = {"messages": True}
"""Sums are sent as messages, as between machines, and not through memory."""
FIVE = {"check": "loop", "replicas": 5, "model": "dense"}


def command(processes, devices, *specs):
    """`unisono launch` of a number of processes that run some checks."""
    options = ["--processes", str(processes), "--devices-per-process", str(devices), "--cpu"]
    return ["-m", "unisono", "launch", *options, SCRIPT, json.dumps(specs)]


def printed(lines, processes):
    """What each process found, and the lines in which it said so."""
    lines = [re.match(r"\[(\d)\] FOUND (.*)", line) for line in lines]
    found = {int(line[1]): json.loads(line[2]) for line in lines if line}
    assert sorted(found) == list(range(processes))
    return [found[process] for process in range(processes)]


@functools.cache
def found_alone(specs):
    """What one process finds; the checks are JSON."""
    done = python(SCRIPT, specs)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1].removeprefix("FOUND "))


def test_two_processes_have_the_bits_of_one(tmp_path):
    """One launched pair, of two devices each. The first process has one core, the other what there is."""
    cores = {"cores": [1, len(os.sched_getaffinity(0))]}
    files = {"check": "files", "replicas": 4, "folder": str(tmp_path)}
    done = python(*command(2, 2, FIT | cores, LOOP | MESSAGES, DEALT_OUT, GAN | MESSAGES, CONTRAST, FROZEN | CUT, SOURCES, files))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    found = printed(lines, 2)
    fit_alone, loop_alone, dealt_out_alone, *whole_alone, (sources_alone, _) = found_alone(
        json.dumps([FIT, LOOP, DEALT_OUT, GAN, CONTRAST, FROZEN, SOURCES])
    )
    for fit, loop, dealt_out, *whole, (sources, _), _ in found:
        assert fit == fit_alone, "batch statistics and dropout, eight replicas; the last batch has fewer rows than replicas"
        assert loop == loop_alone
        assert dealt_out == dealt_out_alone, "the first process has no rows"
        assert whole == whole_alone, "two optimizers in a step; rows that are compared with all others; weights that lie cut"
        assert sources == sources_alone
    by_process = [batches for *_, (_, batches), _ in found]
    assert len(by_process[0]["passes"]) == 2 * 6, "a stream is read in process 0"
    assert by_process[1]["passes"] == [0], "and the first batch in each process, to compare it"
    # Process 0 makes batches 0, 1, 3 and 5 of each pass, the other one 0 twice, to see that it stays the same, then 2 and 4. Before the first
    # pass Keras looks at its first batch, and the next one is read ahead.
    assert [len(batches["dataset"]) for batches in by_process] == [2 + 2 * 4, 3 + 2 * 4]
    epochs = [epoch for *_, epoch in found]
    assert epochs == [epochs[0]] * 2, "all stop at one epoch"
    assert 1 < epochs[0] < 5
    # One process writes and shows.
    assert (tmp_path / "log.csv").read_text().count("\n") == 1 + epochs[0]
    assert len(list(tmp_path.glob("*.weights.h5"))) == epochs[0]
    assert {line[:3] for line in lines if "Epoch" in line} == {"[0]"}


@pytest.mark.parametrize(("processes", "devices"), thorough((2, 1), (2, 2), (1, 4), (3, 1), (4, 1)))
def test_any_number_of_processes_has_the_bits_of_one(processes, devices):
    """Convolutions too; and five replicas, for which each process drew weights of its own, and took those of the first."""
    specs = [FIT | {"family": "conv"}, FIT, LOOP, GAN | {"family": "moco"}, FIVE]
    done = python(*command(processes, devices, *specs[:-1], FIVE | {"other_weights": True}))
    assert done.returncode == 0, done.stderr[-3000:]
    for found in printed(done.stdout.splitlines(), processes):
        assert found == found_alone(json.dumps(specs))


@pytest.mark.slow
def test_batches_that_one_process_makes_for_all_train_to_the_bits_of_one():
    """Also with workers, of datasets that draw, of generators, over two calls of fit and after a resume, and sent as messages."""
    of_two = {"replicas": 2, "kinds": ["resumed", "passes"]} | MESSAGES
    specs = [MORE_SOURCES, SOURCES | of_two]
    done = python(*command(2, 1, *specs))
    assert done.returncode == 0, done.stderr[-3000:]
    alone = found_alone(json.dumps(specs))
    found = printed(done.stdout.splitlines(), 2)
    for of_process in found:
        assert [bits for bits, _ in of_process] == [bits for bits, _ in alone]
    for kind in ("draws", "global draws", "changes"):
        made = [of_process[0][1][kind] for of_process in found]
        assert made == [alone[0][1][kind], made[1][:3]], "process 0 makes what a single process makes"


@pytest.mark.slow
def test_a_source_that_fails_in_one_process_fails_in_all():
    done = python(*command(2, 1, {"check": "faults", "replicas": 2}))
    assert done.returncode == 0, done.stderr[-3000:]
    (first,), (second,) = printed(done.stdout.splitlines(), 2)
    assert [batches for batches, *_ in first[:2]] == [[0, 1, 3], [0]]
    assert [batches for batches, *_ in second[:2]] == [[0, 0, 2, 4], [0, 0]]
    assert first[0][1:] == ["AgreementError", "Process 1 cannot read batch 4 of pass 0: KeyError: 'of the source'"]
    assert second[0][1:] == ["KeyError", "'of the source'"]
    assert [of_process[4][1] for of_process in (first, second)] == ["KeyError", "AgreementError"], "the first batch, in both"
    assert [of_process[7][1:] for of_process in (first, second)] == [
        ["OSError", "Process 1 cannot read batch 0 of pass 0: OSError: the index is gone"],
        ["OSError", "the index is gone"],
    ]
    for number, said in (
        (
            1,
            r"At batch 0 of pass 0 process 0 has 6 batches, and process 1 7 batches: their data have other lengths\. Every process is given",
        ),
        (2, r"Batch 0 of pass 0 has other rows in process 1 than in process 0"),
        (3, r"Batch 2 of pass 0 has the structure .* every batch must have the same structure"),
        (
            5,
            r"Batch 0 of pass 0 has the structure .*\(\*, \*\).* in process 0, and .*\(\*,\).* in process 1\. Every process is given",
        ),
        (
            6,
            r"draws from a global generator, .*, as it makes batch 2 of pass 0, and did not draw for the first batch .*Or give batches",
        ),
    ):
        for of_process in (first, second):
            assert re.search(said, of_process[number][2]), of_process[number]


@pytest.mark.slow
@pytest.mark.thorough
def test_steps_that_are_not_compiled_give_the_numbers_of_one_process():
    """Up to rounding."""
    done = python(*command(2, 2, EAGER))
    assert done.returncode == 0, done.stderr[-3000:]
    ((_, alone),) = found_alone(json.dumps([EAGER]))
    for ((kind, numbers),) in printed(done.stdout.splitlines(), 2):
        assert kind == "unpromised-"
        assert numbers == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("replicas=4 + 2 * me", "replicas: process 0 has 4, and process 1 has 6."),
        *thorough(("replicas=4, verify=(1 + me) / 100", "verify: process 0 has 0.01, and process 1 has 0.02.")),
    ],
)
def test_processes_that_do_not_agree_stop_with_both_values(tmp_path, options, said):
    script = tmp_path / "train.py"
    script.write_text(
        f"import os\nimport unisono as un\nme = int(os.environ['UNISONO_PROCESS'])\nun.MultiWorkerMirroredStrategy({options})\n"
    )
    done = python("-m", "unisono", "launch", "--processes", "2", "--cpu", str(script))
    assert done.returncode == 1
    assert f"The processes do not agree on {said}" in done.stderr


def test_a_process_that_is_killed_in_a_step_is_named():
    specs = json.dumps([{"check": "loop", "replicas": 4, "model": "dense", "killed_after": 2}])
    done = python("-m", "unisono", "launch", "--processes", "2", "--cpu", "--bound", "20", SCRIPT, specs)
    assert done.returncode == 137
    assert re.search(r"^\[0\] unisono: process 1 \(pid \d+ on .*\) was killed after step \d", done.stderr, re.MULTILINE)
    assert "[0] unisono: process 0 ends with exit code 76." in done.stderr.splitlines()
    assert "unisono launch: process 1 was killed by SIGKILL." in done.stderr.splitlines()


@pytest.mark.slow
def test_rows_that_differ_between_processes_are_found():
    done = python(*command(2, 1, {"check": "shuffled", "replicas": 2}))
    assert done.returncode == 1
    assert re.search(r"Batch 0 of pass 0 has other rows in process 1 than in process 0 \(digests \w{8} and \w{8}\)", done.stderr)


@pytest.mark.slow
def test_lists_of_other_lengths_are_found():
    """One process has come to the end of its list, the other has another batch: both wait, and nobody will come."""
    specs = json.dumps([{"check": "lengths", "replicas": 2}])
    done = python("-m", "unisono", "launch", "--processes", "2", "--cpu", "--bound", "10", SCRIPT, specs)
    assert done.returncode in (70, 76)
    assert re.search(
        r"process 1 \(pid \d+ on .*\) waits for a sum after step 3, and process 0 \(.*\) waits to hear of .* after step 3: nobody will come. "
        r"Their data have other lengths",
        done.stderr,
    )


OTHER_KERNELS = """
import os

if os.environ["UNISONO_PROCESS"] == "1":
    os.environ["UNISONO_NATIVE"] = "0"
import unisono as un

un.MultiWorkerMirroredStrategy(replicas=4)
"""


@pytest.mark.slow
@pytest.mark.skipif(load_kernels().level is None, reason=str(load_kernels().reason))
def test_processes_with_and_without_native_kernels_are_refused(tmp_path):
    (tmp_path / "train.py").write_text(OTHER_KERNELS)
    done = python("-m", "unisono", "launch", "--processes", "2", "--cpu", str(tmp_path / "train.py"))
    assert done.returncode == 1
    said = r"Processes compute with different kernels: XLA's in process 1, native .+ in process 0\. .* Start all processes with UNISONO_NATIVE=0"
    assert re.search(said, done.stderr), done.stderr[-3000:]


ONE_SIDED = """
import os, sys
import unisono as un
import jax
import keras
import numpy as np

what, is_first = sys.argv[1], os.environ["UNISONO_PROCESS"] == "0"
keras.utils.set_random_seed(0)
strategy = un.MultiWorkerMirroredStrategy(replicas=2)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1, clipnorm=0.5 if is_first and what == "clipnorm" else None)
x, y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")


class Slower(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and (is_first or what == "both"):
            self.model.optimizer.learning_rate = 0.01


class Quiet(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if is_first:
            self.model.optimizer.learning_rate = 0.1
            self.model.metrics[0].reset_state()


def loss(truth, found):
    if is_first and what == "print":
        jax.debug.print("sum {}", found.sum())
    return ((truth - found) ** 2).mean(axis=-1)


if what == "watch":  # process 0 takes other steps in a call than process 1
    model.compile(optimizer, keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    watching = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)] if is_first else []
    model.fit(x, y, sample_weight=np.arange(1.0, 9.0), batch_size=2, epochs=40, verbose=0, callbacks=watching)
elif what in ("clipnorm", "print"):
    model.compile(optimizer, loss)
    model.fit(x, y, batch_size=2, verbose=0)
elif what in ("rate", "both", "same"):
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=2, epochs=2, verbose=0, shuffle=False, callbacks=[Quiet() if what == "same" else Slower()])
elif what == "weights":
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=2, verbose=0)
    if is_first:
        model.layers[0].bias.assign([5.0, 5.0])
    model.fit(x, y, batch_size=2, verbose=0)
else:
    KINDS = {"argument": np.float32, "array": jax.numpy.float32, "number": float, "none": float, "key": lambda _: jax.random.key(0)}

    def read(scale):
        return jax.random.uniform(scale, (2,)) if what == "key" else scale

    def replica_step(batch, scale):
        value, gradients = un.value_and_grad(lambda: (model(batch) * read(scale)).mean(axis=1), model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    for batch in strategy.distribute_dataset(x, batch_size=2):
        strategy.run(replica_step, args=(batch, KINDS[what](2.0 + is_first * (what != "none"))))
print("trained", un.fingerprint(model))
"""
SAID_OF_VARIABLES = (
    r"atch \d of pass \d starts from other values of variables in process 1 than in process 0\. Since the step before"
)


SAID_OF_PROGRAM = (
    r"Batch 0 of pass 0 is computed by another program in process 1 than in process 0\. A number, an array or a branch"
)
SAID_OF_ARGUMENTS = r"(A batch|Batch 0 of pass 0) starts from other arguments in process 1 than in process 0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("rate", SAID_OF_VARIABLES),
        *thorough(
            ("clipnorm", SAID_OF_PROGRAM),
            ("number", SAID_OF_ARGUMENTS),
            ("weights", SAID_OF_VARIABLES),
            ("argument", SAID_OF_ARGUMENTS),
            ("array", SAID_OF_ARGUMENTS),
            ("print", None),
            ("watch", None),
            ("key", None),
            ("both", None),
            ("same", None),
            ("none", None),
        ),
    ],
)
def test_what_one_process_alone_changes_is_found(tmp_path, what, said):
    """Values that stay the same are no change, and metrics may differ."""
    (tmp_path / "train.py").write_text(ONE_SIDED)
    done = python("-m", "unisono", "launch", "--processes", "2", "--cpu", str(tmp_path / "train.py"), what)
    if said is None:
        assert done.returncode == 0, done.stderr[-3000:]
        assert len(set(re.findall(r"trained (\w+)", done.stdout))) == 1
    else:
        assert done.returncode == 1
        assert re.search(said, done.stderr), done.stderr[-3000:]
