"""What must be settled before JAX starts, in fresh processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from processes import python
from sizes import slow

SHOW = """
import json, os, warnings
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as said:
    {before}
    import unisono as un
    strategy = un.{strategy}
    strategy.devices
import jax
print(json.dumps([len(jax.devices()), len(strategy.devices), strategy.num_replicas_in_sync, os.environ.get("PJRT_NPROC"),
                  [str(w.message) for w in said if "threads" in str(w.message)]]))
"""


def show(strategy: str, before: str = "pass", **environment: str) -> list:
    done = python("-c", SHOW.format(strategy=strategy, before=before), **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ONE_CORE = "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])"


FRESH = """
import json, os, sys
found, before = {}, dict(os.environ)
loaded = lambda *names: sorted(set(names) & set(sys.modules))

import unisono as un
from unisono._src.tools.cli import launch_command
found["imported with unisono"] = loaded("jax", "keras", "numpy")
from unisono._src.programs.private import backends
import jax
changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
found["settings"] = [backends.has_jax_started(), changed, jax.config.jax_num_cpu_devices]
un.MirroredStrategy
found["imported with strategies"] = loaded("orbax", "tensorboardX")

import numpy as np
from threadpoolctl import threadpool_info
threads = lambda: {of["filepath"]: of["num_threads"] for of in threadpool_info() if of["user_api"] == "blas"}
then = threads()
strategy = un.MirroredStrategy(devices=4)
made = [backends.has_jax_started(), jax.config.jax_num_cpu_devices]
found["a strategy"] = made + [repr(un.OneDeviceStrategy(replicas=8).num_replicas_in_sync), backends.has_jax_started()]
un.OneDeviceStrategy()
larger = un.MirroredStrategy(devices=5)
found["devices of both"] = [len(strategy.devices), len(larger.devices), len(un.MirroredStrategy().devices)]
found["threads"] = [(path, then[path], count) for path, count in threads().items() if path in then]
found["devices"] = [len(jax.devices()), len(strategy.devices), strategy.num_replicas_in_sync, os.environ.get("PJRT_NPROC")]
un.callbacks.BackupAndRestore("backup")
import keras, tempfile
with tempfile.TemporaryDirectory() as folder:
    checkpoint = un.Checkpoint(of=keras.Variable(1.0))
    checkpoint.restore(checkpoint.save(folder))
found["imported with a checkpoint"] = loaded("orbax")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    """What a fresh process finds that imports the package and makes a strategy: one process, since each takes seconds to import Keras."""
    done = python("-W", "error", "-c", FRESH)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_takes_long_to_import_waits_until_it_is_used(fresh):
    names = "unisono", "strategies", "a checkpoint"
    assert [fresh[f"imported with {name}"] for name in names] == [[], [], []]


def test_importing_configures_nothing_and_starts_nothing(fresh):
    assert fresh["settings"] == [False, {}, -1]


def test_a_count_makes_cpu_devices(fresh):
    """The largest, whichever strategy was made first: none of them starts JAX, and one that names no number has all devices."""
    assert fresh["a strategy"] == [False, 4, "8", False]
    assert fresh["devices of both"] == [4, 5, 5]
    assert fresh["devices"] == [5, 4, 4, None]


def test_a_strategy_takes_one_thread_for_linear_algebra(fresh):
    """Where results are to be the same, and NumPy keeps those that it has."""
    assert fresh["threads"]
    for path, before, after in fresh["threads"]:
        assert after == (before if "numpy.libs" in path else 1)


ORDER = """
import unisono as un
import keras
from unisono._src.programs.private import backends
strategies = [un.{first}, un.{second}]
assert not backends.has_jax_started()
for strategy in strategies:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    print(len(strategy.devices), un.fingerprint(model))
"""


@pytest.mark.slow
def test_the_order_of_strategies_does_not_matter():
    """Each of these was an error in one of the two orders."""
    lines = []
    one, four = "OneDeviceStrategy(replicas=8)", "MirroredStrategy(devices=4, replicas=8)"
    for first, second in ((one, four), (four, one)):
        done = python("-c", ORDER.format(first=first, second=second))
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.splitlines())
    assert lines[0] == lines[1][::-1]
    assert [line.split()[0] for line in lines[0]] == ["1", "4"]


@pytest.mark.slow
def test_a_later_strategy_may_use_some_of_them():
    assert show("MirroredStrategy(devices=4); strategy = un.MirroredStrategy(devices=2, replicas=8)") == [4, 2, 8, None, []]


@pytest.mark.slow
def test_one_core_has_two_threads():
    assert show("OneDeviceStrategy(replicas=12)", before=ONE_CORE) == [1, 1, 12, "2", []]
    assert show("MirroredStrategy(devices=3)", before=ONE_CORE) == [3, 3, 3, None, []]


@pytest.mark.slow
def test_devices_that_the_user_has_asked_xla_for_stay():
    assert show("MirroredStrategy()", XLA_FLAGS="--xla_force_host_platform_device_count=3") == [3, 3, 3, None, []]


@pytest.mark.slow
def test_devices_that_are_too_late_say_what_to_write():
    done = python("-c", SHOW.format(strategy="MirroredStrategy(devices=4)", before="import jax; jax.devices()"))
    assert done.returncode == 1
    assert "received devices=4, but JAX runs with 1 cpu device." in done.stderr
    assert 'jax.config.update("jax_num_cpu_devices", 4)' in done.stderr


@pytest.mark.slow
def test_another_backend_is_refused():
    done = python("-c", "import unisono", KERAS_BACKEND="numpy")
    assert "Unisono runs on Keras' JAX backend, but Keras runs on 'numpy'" in done.stderr
    done = python("-c", "import keras; import unisono", KERAS_BACKEND="numpy")
    assert "Keras was imported before Unisono and runs on 'numpy'" in done.stderr


@pytest.mark.parametrize(
    ("strategy", "variables", "expected"),
    [
        *slow(
            ("MirroredStrategy(devices=2, replicas=4)", {"UNISONO_DEVICES": "1"}, [1, 4]),
            ("MirroredStrategy(devices=2, accumulate=4)", {"UNISONO_DEVICES": "1", "UNISONO_REPLICAS": "8"}, [1, 8]),
            ("OneDeviceStrategy(replicas=4)", {"UNISONO_DEVICES": "2"}, [2, 4]),
        ),
        ("MultiWorkerMirroredStrategy(replicas=4)", {"UNISONO_DEVICES": "4"}, [4, 4]),
    ],
)
def test_the_environment_places_the_replicas_of_a_script(strategy, variables, expected):
    assert show(strategy, **variables)[1:3] == expected
