"""What the user holds: strategies, their scope, and their errors."""

from __future__ import annotations

import re
import threading
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers

import unisono as un
from unisono._src.keras.ownership import find_strategy
from unisono._src.keras.strategy.builtin import DefaultStrategy

pytestmark = pytest.mark.compat


def small() -> keras.Model:
    return keras.Sequential([layers.Input((3,)), layers.Dense(2)])


def test_replicas_default_to_the_devices():
    assert un.MirroredStrategy().num_replicas_in_sync == len(jax.devices()) == 8
    assert un.MirroredStrategy(devices=3).num_replicas_in_sync == 3
    assert un.MirroredStrategy(devices=3, replicas=8).num_replicas_in_sync == 8
    assert un.MirroredStrategy(devices=2, accumulate=3).num_replicas_in_sync == 6
    assert un.OneDeviceStrategy().num_replicas_in_sync == 1
    assert un.OneDeviceStrategy(replicas=8).num_replicas_in_sync == 8


def test_devices_are_a_count_a_list_or_a_mesh():
    chosen = jax.devices()[2:5]
    assert un.MirroredStrategy(devices=2).devices == tuple(jax.devices()[:2])
    assert un.MirroredStrategy(devices=chosen).devices == tuple(chosen)
    assert un.MirroredStrategy(devices=jax.sharding.Mesh(np.array(chosen), ("data",))).devices == tuple(chosen)
    assert un.OneDeviceStrategy(devices=[chosen[1]], replicas=4).devices == (chosen[1],)


def test_numbers_of_numpy_are_numbers():
    assert un.MirroredStrategy(devices=np.int64(2), replicas=np.int32(4)).num_replicas_in_sync == 4


def test_devices_that_were_not_asked_for_are_never_more_than_the_replicas():
    assert len(un.MirroredStrategy(replicas=3).devices) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicas": 0}, "received replicas=0; it must be 1 or more"),
        ({"deterministic": 1}, "write True or False"),
        ({"devices": 0}, "received devices=0"),
        ({"accumulate": -1}, "received accumulate=-1"),
        ({"replicas": 4, "accumulate": 2}, "Write one of them"),
        ({"devices": 4, "replicas": 2}, "received 4 devices and replicas=2.*Write devices=2, or replicas=4"),
        ({"replicas": 2.5}, "replicas must be a whole number; received replicas=2.5"),
        ({"replicas": "8"}, "received replicas='8'; it must be a whole number"),
        ({"devices": True}, "devices must be a whole number"),
        ({"devices": "two"}, "must be a count, a list of JAX devices or a mesh"),
        ({"devices": []}, "must be a count"),
        (
            {"devices": 9},
            r"received devices=9, but JAX runs with 8 cpu devices[\s\S]*restart the kernel[\s\S]*jax.config.update\(\"jax_num_cpu_devices\", 9\)",
        ),
    ],
)
def test_arguments_that_make_no_sense_say_what_to_write(arguments, message):
    assert len(jax.devices()) == 8  # JAX has started: a number of devices comes too late
    with pytest.raises(ValueError, match=message):
        un.MirroredStrategy(**arguments)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_single_thread_is_said(threads, monkeypatch):
    """Another fingerprint may be, but never in silence."""
    monkeypatch.setenv("PJRT_NPROC", str(threads))
    monkeypatch.setattr(jax, "local_device_count", lambda backend: 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        un.OneDeviceStrategy(replicas=8)
    assert [str(of.message).partition(",")[0] for of in said] == ["JAX runs with one CPU thread here"] * (threads == 1)


def test_a_device_cannot_be_named_twice():
    with pytest.raises(ValueError, match="write accumulate=2"):
        un.MirroredStrategy(devices=[jax.devices()[0]] * 2)


@pytest.mark.parametrize(
    ("given", "write"),
    [
        ({"device": 4}, "devices=4"),
        ({"replica": 8}, "replicas=8"),
        ({"accumulation": 2, "determinstic": True}, "accumulate=2, deterministic=True"),
    ],
)
def test_names_that_are_nearly_right_are_answered(given, write):
    with pytest.raises(TypeError, match=rf"received .*Write MirroredStrategy\({write}\)\."):
        un.MirroredStrategy(**given)


def test_older_forms_are_answered():
    with pytest.raises(TypeError, match=r"received \['GPU:0', 'GPU:1'\]. Write MirroredStrategy\(devices=2\)"):
        un.MirroredStrategy(["GPU:0", "GPU:1"])
    with pytest.raises(TypeError, match=r"received cross_device_ops='nccl'. Write MirroredStrategy\(devices=2\)"):
        un.MirroredStrategy(cross_device_ops="nccl")
    with pytest.raises(TypeError, match=r"received '/gpu:0'. Write OneDeviceStrategy\(devices=1\)"):
        un.OneDeviceStrategy("/gpu:0")
    for form in ({"args": [3]}, {"device": 3}):
        said = r"received .*3. Write OneDeviceStrategy\(devices=jax.devices\(\)\[3:4\]\) for .* number, or MirroredStrategy\(devices=3\) for so many"
        with pytest.raises(TypeError, match=said):
            un.OneDeviceStrategy(*form.pop("args", ()), **form)
    with pytest.raises(
        TypeError, match=r"Write OneDeviceStrategy\(devices=jax.devices\(\)\[0:1\]\) for the device of this number\."
    ):
        un.OneDeviceStrategy(device=0)
    with pytest.raises(TypeError, match=r"received replica=3. Write OneDeviceStrategy\(replicas=3\)\."):
        un.OneDeviceStrategy(replica=3)
    with pytest.raises(TypeError, match=r"received .*. Write MirroredStrategy\(devices=2\)\."):
        un.OneDeviceStrategy(device=["/gpu:0", "/gpu:1"])
    with pytest.raises(TypeError, match=r"Write OneDeviceStrategy\(devices=jax.devices\(\"cpu\"\)\[2:3\]\)\."):
        un.OneDeviceStrategy(device=jax.devices()[2])
    with pytest.raises(ValueError, match=r"received \S*2\S*. Write devices=jax.devices\(\"cpu\"\)\[2:3\]\."):
        un.OneDeviceStrategy(devices=jax.devices()[2])
    with pytest.raises(TypeError, match=r"received 'nothing'. Write OneDeviceStrategy\(\), or OneDeviceStrategy\(devices=jax"):
        un.OneDeviceStrategy("nothing")
    for form in ({"args": [3]}, {"tpu_cluster_resolver": 3}):
        with pytest.raises(TypeError, match=r"Write TPUStrategy\(\): it needs no resolver"):
            un.TPUStrategy(*form.pop("args", ()), **form)
    with pytest.raises(ValueError, match=r"found no TPU: JAX runs on cpu.*MirroredStrategy\(\)"):
        un.TPUStrategy()
    with pytest.raises(ValueError, match="synchronous"):
        un.ParameterServerStrategy("cluster")
    with pytest.raises(ValueError, match=r"Write MirroredStrategy\(devices=2\)"):
        un.OneDeviceStrategy(devices=2)


@pytest.mark.parametrize(
    ("names", "write"),
    [
        (["/gpu:0", "/gpu:1"], "devices=2"),
        ("/device:GPU:1", 'devices=jax.devices("gpu")[1:2]'),
        (["/job:localhost/replica:0/task:0/device:CPU:0", "CPU:1"], 'devices=jax.devices("cpu")[:2]'),
        (("gpu:3", "gpu:1"), 'devices=[jax.devices("gpu")[i] for i in [3, 1]]'),
        (["gpu:0", "cpu:0"], 'devices=[jax.devices("gpu")[0], jax.devices("cpu")[0]]'),
    ],
)
def test_names_of_devices_are_translated(names, write):
    with pytest.raises(TypeError, match=re.escape(f"received {names!r}. Write MirroredStrategy({write}).")):
        un.MirroredStrategy(names)
    with pytest.raises(ValueError, match=re.escape(f"received names, {names!r}. Write {write}.")):
        un.MirroredStrategy(devices=names)


def test_the_current_strategy_is_that_of_the_scope():
    outside = un.get_strategy()
    assert (outside.num_replicas_in_sync, len(outside.devices)) == (1, 1)
    one = un.OneDeviceStrategy(replicas=2)
    with one.scope() as inside:
        assert un.get_strategy() is one is inside
        with one.scope():
            assert un.get_strategy() is one
        assert un.get_strategy() is one
    assert un.get_strategy() is outside


def test_code_that_a_step_calls_finds_its_strategy():
    """Outside of the scope too: what divides by the number of replicas would divide by 1."""
    seen = []

    class Sees(keras.layers.Layer):
        def call(self, x):
            seen.append(un.get_strategy())
            return x

    def loss(y, p):
        seen.append(un.get_strategy())
        return keras.ops.square(y - p)

    strategy = un.OneDeviceStrategy(replicas=2)
    with strategy.scope():
        model = keras.Sequential([Sees(), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    model.predict(np.ones((4, 3)), verbose=0)
    (batch,) = strategy.distribute_dataset([np.ones((4, 3), "float32")])
    strategy.run(lambda rows: model(rows), args=(batch,))
    assert len(seen) > 4
    assert set(map(id, seen)) == {id(strategy)}
    assert un.get_strategy().num_replicas_in_sync == 1


def test_scopes_cannot_be_mixed_and_errors_restore_what_was():
    one, other = un.OneDeviceStrategy(replicas=2), un.OneDeviceStrategy(replicas=3)
    with one.scope():
        with (
            pytest.raises(RuntimeError, match=r"scope of <OneDeviceStrategy: 2 replicas.*; the scope of <OneDeviceStrategy: 3"),
            other.scope(),
        ):
            pass
        with pytest.raises(RuntimeError, match="default strategy"), DefaultStrategy().scope():
            pass
        assert un.get_strategy() is one
    with pytest.raises(KeyError), one.scope():
        raise KeyError
    assert un.get_strategy().num_replicas_in_sync == 1


def test_a_model_keeps_the_strategy_in_whose_scope_it_was_made():
    one = un.OneDeviceStrategy(replicas=2)
    with one.scope():
        model = small()
    model.compile("sgd", "mse")
    assert find_strategy(model) is one
    assert find_strategy(small()) is None


def test_a_variable_that_processes_have_agreed_on_belongs_to_its_strategy():
    for _ in range(20):  # the places of strategies in a set differ
        strategy = un.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable = keras.Variable(1.0)
        strategy._agreed.add(variable)
        assert find_strategy(variable) is strategy


def test_a_scope_is_its_own_threads():
    """Threads come and go in scopes of their own, and a model belongs to the scope of the thread that makes it."""
    one, other = un.OneDeviceStrategy(replicas=2), un.OneDeviceStrategy(replicas=3)
    entered, left, owners = threading.Event(), threading.Event(), {}

    def first():
        with one.scope():
            entered.set()
            left.wait(10)
            owners["late"] = find_strategy(small())

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    owners["outside"] = find_strategy(small())
    with other.scope():
        owners["other"] = find_strategy(small())
    left.set()
    thread.join(10)
    assert owners == {"outside": None, "other": other, "late": one}


def test_a_model_made_outside_is_refused_inside(rng):
    plain, one, other = small(), un.OneDeviceStrategy(replicas=2), un.OneDeviceStrategy(replicas=3)
    with pytest.raises(ValueError, match=r"was made outside strategy.scope\(\) and is used inside"), one.scope():
        plain.compile("sgd", "mse")
    plain.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"was made outside"), one.scope():
        plain.fit(np.zeros((4, 3)), np.zeros((4, 2)), verbose=0)
    with one.scope():
        ours = small()
    with pytest.raises(ValueError, match="scope of another strategy"), other.scope():
        ours.compile("sgd", "mse")


def test_replicas_of_the_machine_are_announced_once(capsys):
    x, y = np.ones((8, 3)), np.ones((8, 2))
    for made, said in ((un.MirroredStrategy(), True), (un.MirroredStrategy(devices=2), False), (un.OneDeviceStrategy(), False)):
        with made.scope():
            model = small()
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)
        assert (
            capsys.readouterr().err.count("R = 8 from this machine; write replicas=8 to get these bits elsewhere") == 1
        ) is said


@pytest.mark.parametrize(
    ("make", "variables", "devices", "replicas"),
    [
        (lambda: un.MirroredStrategy(devices=2, replicas=4), {"UNISONO_DEVICES": "1"}, 1, 4),
        (lambda: un.MirroredStrategy(devices=2, accumulate=4), {"UNISONO_DEVICES": "1", "UNISONO_REPLICAS": "8"}, 1, 8),
        (lambda: un.OneDeviceStrategy(replicas=4), {"UNISONO_DEVICES": "2"}, 2, 4),
    ],
)
def test_the_environment_places_the_replicas(make, variables, devices, replicas, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    strategy = make()
    assert (len(strategy.devices), strategy.num_replicas_in_sync) == (devices, replicas)


def test_an_environment_without_a_count_is_refused(monkeypatch):
    monkeypatch.setenv("UNISONO_DEVICES", "two")
    with pytest.raises(
        ValueError, match=r"the environment variable UNISONO_DEVICES is a whole number of 1 or more; received 'two'\."
    ):
        un.MirroredStrategy(replicas=4)


def test_a_strategy_is_its_own_description():
    assert repr(un.MirroredStrategy(devices=2, replicas=4)) == "<MirroredStrategy: 4 replicas on 2 cpu devices>"
