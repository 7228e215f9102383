"""What packages and programs for `tf.distribute` read of a strategy beside its methods."""

from __future__ import annotations

import keras
import pytest

import unisono as un
from trainings import on
from unisono._src.keras.strategy.extended import INSTEAD, ClusterResolver


def test_extended_says_what_has_a_meaning_here():
    strategy = on(2, 4)
    outside = keras.Variable(1.0)
    with strategy.scope():
        inside = keras.Variable(1.0)
        layer = keras.layers.Dense(1)
        layer.build((None, 2))
    extended = strategy.extended
    assert extended.worker_devices == extended.parameter_devices == strategy.devices
    assert (extended.should_checkpoint, extended.should_save_summary, extended.experimental_require_static_shapes) == (
        True,
        True,
        False,
    )
    assert [extended.variable_created_in_scope(v) for v in (inside, layer.kernel, outside)] == [True, True, False]


def test_keras_tuner_asks_whether_several_workers_train():
    """As its constructor does."""
    for strategy in (on(2, 4), un.MultiWorkerMirroredStrategy(devices=1), un.get_strategy()):
        assert hasattr(strategy.extended, "_in_multi_worker_mode")
        assert (strategy.extended._in_multi_worker_mode(), strategy.extended.should_checkpoint) == (False, True)


@pytest.mark.parametrize("name", [*INSTEAD, "_container_strategy"])
def test_what_extended_does_not_have_is_answered(name):
    with pytest.raises(AttributeError, match=rf"strategy.extended has worker_devices, .*; received '{name}'\.") as error:
        getattr(on(1, 2).extended, name)
    assert (f"Write {INSTEAD.get(name)}." in str(error.value)) == (name in INSTEAD)


def is_chief(task_type, task_id, cluster_spec):
    """As the tutorial of `tf.distribute` has it."""
    return (
        task_type is None
        or task_type == "chief"
        or (task_type == "worker" and task_id == 0 and "chief" not in cluster_spec.as_dict())
    )


def test_a_cluster_resolver_says_which_process_this_is():
    resolvers = [ClusterResolver(process, 3, "10.0.0.1:99") for process in range(3)]
    assert [is_chief(of.task_type, of.task_id, of.cluster_spec()) for of in resolvers] == [True, False, False]
    spec = resolvers[1].cluster_spec()
    assert (spec.jobs, spec.num_tasks("worker")) == (["worker"], 3)
    assert spec.as_dict() == {"worker": ["10.0.0.1:99", "process 1", "process 2"]}


def test_a_process_that_is_alone_has_no_task():
    assert on(2).cluster_resolver is None
    resolver = un.MultiWorkerMirroredStrategy(devices=1).cluster_resolver
    assert (resolver.task_type, resolver.task_id, resolver.cluster_spec().as_dict(), resolver.num_accelerators()) == (
        None,
        None,
        {},
        {},
    )
    with pytest.raises(
        AttributeError, match=r"has task_type, task_id, cluster_spec\(\) and num_accelerators\(\); received 'master'"
    ):
        resolver.master()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "cluster_resolver",
            r"Delete the resolver: un.MultiWorkerMirroredStrategy\(\) finds .* un.TPUStrategy\(\) .*\(coordinator='10.0.0.1:1234'",
        ),
        ("NcclAllReduce", "Leave it out: sums have one fixed order"),
        ("InputOptions", "Leave it out: the next batch"),
        ("nothing", r"'nothing'$"),
    ],
)
def test_names_of_tf_distribute_are_answered(name, said):
    with pytest.raises(AttributeError, match=said):
        getattr(un, name)
