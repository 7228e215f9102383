"""Where the description of a cluster comes from. What needs processes is in `test_cluster_integration`."""

from __future__ import annotations

import errno
import json
import re
import socket

import jax
import pytest

from unisono._src.cluster import connect as connecting
from unisono._src.cluster.connect import (
    check_port,
    compute_heartbeat_timeout,
    connect_processes,
    read_bound,
    require_same_cluster,
)
from unisono._src.cluster.description import (
    TF_CONFIG_FORM as FORM,
)
from unisono._src.cluster.description import (
    Cluster,
    ClusterError,
    describe_by_arguments,
    describe_by_launcher,
    describe_by_tf_config,
)

LAUNCHED = {"UNISONO_COORDINATOR": "127.0.0.1:1234", "UNISONO_PROCESSES": "3", "UNISONO_PROCESS": "2"}


def tf_config(kind="worker", index=1, **cluster):
    cluster = cluster or {"worker": ["a:1", "b:2"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def described(describe, given):
    return describe(*given) if isinstance(given, tuple) else describe(given)


def where(cluster):
    return cluster.coordinator, cluster.processes, cluster.process


def test_a_place_that_says_nothing():
    assert describe_by_arguments(None, None, None) is None
    assert describe_by_launcher({"PATH": "/bin"}) is None
    assert describe_by_tf_config({"PATH": "/bin"}) is None


@pytest.mark.parametrize("text", ["", "{}", '{"task": {"type": "worker", "index": 0}}', '{"cluster": {}}'])
def test_a_tf_config_without_a_cluster_is_a_single_process(text):
    assert describe_by_tf_config({"TF_CONFIG": text}) is None


@pytest.mark.parametrize(
    ("describe", "given", "found"),
    [
        (describe_by_arguments, ("h:1", 2, 0), ("h:1", 2, 0)),
        (describe_by_launcher, LAUNCHED, ("127.0.0.1:1234", 3, 2)),
        (describe_by_tf_config, tf_config(), ("a:1", 2, 1)),
        (describe_by_tf_config, tf_config("worker", 1, worker=["a:1", "b:2"], chief=["c:3"]), ("c:3", 3, 2)),
        (describe_by_tf_config, tf_config("chief", 0, worker=["a:1", "b:2"], chief=["c:3"]), ("c:3", 3, 0)),
        (describe_by_tf_config, tf_config("worker", 0, worker=["[fe80::1]:5"]), ("[fe80::1]:5", 1, 0)),
    ],
)
def test_a_place_that_says_something(describe, given, found):
    assert where(described(describe, given)) == found


def text_of(environment):
    return environment["TF_CONFIG"]


EVALUATOR = tf_config("evaluator", 0)
SERVERS = tf_config("worker", 0, worker=["a:1"], ps=["b:2"])
MASTER = tf_config("worker", 0, worker=["a:1"], master=["b:2"])
BEYOND = tf_config("worker", 2)
TYPE_LIST = tf_config(["worker"], 0)
NO_LIST = tf_config("worker", 0, worker={"0": "a:1"})


@pytest.mark.parametrize(
    ("describe", "given", "message"),
    [
        (
            describe_by_arguments, ("h:1", None, None),
            "received a cluster without processes and process. Write all three, coordinator='10.0.0.1:1234', processes=2, process=0, "
            "or none of them, where the environment says it.",
        ),
        (
            describe_by_arguments, ("h:1", 2, 2),
            "the program said process 2 of 2. There must be 1 process or more, and they are counted from 0 to 1.",
        ),
        (
            describe_by_arguments, ("localhost", 2, 1),
            "the program said that the coordinator is 'localhost'. It is the address of process 0 and a free port there: '10.0.0.1:1234'.",
        ),
        (
            describe_by_arguments, ("fd00::1:1234", 2, 1),
            "the program said that the coordinator is 'fd00::1:1234'. An IPv6 address stands in brackets before its port: '[fd00::1]:1234'.",
        ),
        (
            describe_by_launcher, {"UNISONO_PROCESSES": "3"},
            "the environment lacks UNISONO_COORDINATOR and UNISONO_PROCESS. `unisono launch` sets all of UNISONO_COORDINATOR, "
            "UNISONO_PROCESSES, UNISONO_PROCESS; set them or none.",
        ),
        (describe_by_launcher, LAUNCHED | {"UNISONO_PROCESS": "one"}, "the environment variable UNISONO_PROCESS is a number; received 'one'."),
        (
            describe_by_tf_config, {"TF_CONFIG": "{'cluster'"},
            f"TF_CONFIG is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)). It looks like {FORM}; "
            "received: {'cluster'",
        ),
        (describe_by_tf_config, {"TF_CONFIG": "[1]"}, f"TF_CONFIG looks like {FORM}; received: [1]"),
        (
            describe_by_tf_config, EVALUATOR,
            "TF_CONFIG names 'evaluator'. An evaluator of its own is not needed: fit takes validation_data, and evaluates on all "
            f"workers. Leave it out: {FORM}; received: {text_of(EVALUATOR)}",
        ),
        (
            describe_by_tf_config, SERVERS,
            "TF_CONFIG names 'ps'. Parameter servers are for asynchronous training, which Unisono does not do. "
            f"Leave it out: {FORM}; received: {text_of(SERVERS)}",
        ),
        (
            describe_by_tf_config, MASTER,
            f"TF_CONFIG names 'master', which is neither 'worker' nor 'chief'. It looks like {FORM}; received: {text_of(MASTER)}",
        ),
        (
            describe_by_tf_config, TYPE_LIST,
            f"TF_CONFIG names ['worker'], which is neither 'worker' nor 'chief'. It looks like {FORM}; received: {text_of(TYPE_LIST)}",
        ),
        (describe_by_tf_config, BEYOND, f"TF_CONFIG says that this is task 'worker' 2, and names worker 0, worker 1. Received: {text_of(BEYOND)}"),
        (describe_by_tf_config, NO_LIST, f"TF_CONFIG's 'worker' is a list of addresses. It looks like {FORM}; received: {text_of(NO_LIST)}"),
    ],
)  # fmt: skip
def test_what_cannot_be_right(describe, given, message):
    with pytest.raises(ClusterError, match=f"^{re.escape(message)}$"):
        described(describe, given)


@pytest.mark.parametrize(
    ("coordinator", "is_on_loopback"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("10.0.0.1:1", False),
        ("node-127.x:1", False),
        (None, False),
    ],
)
def test_loopback(coordinator, is_on_loopback):
    assert Cluster(coordinator, 2, 0, "x").is_on_loopback is is_on_loopback


def listen_at(host: str) -> socket.socket:
    """Return a listener at a free port; skip the test where the machine does not have the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family)
    except OSError as error:
        if host == "127.0.0.1" or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        pytest.skip(f"this machine does not have the address {host}")


@pytest.mark.parametrize(
    ("taken", "coordinator"),
    [("127.0.0.1", "localhost"), ("127.0.0.2", "127.0.0.2"), ("::1", "[::1]"), ("::", "10.0.0.1"), ("0.0.0.0", "10.0.0.1")],
)
def test_a_port_that_another_program_has(taken, coordinator):
    with listen_at(taken) as listener:
        address = f"{coordinator}:{listener.getsockname()[1]}"
        with pytest.raises(
            ClusterError,
            match=rf"^process 0 of 2 cannot listen at {re.escape(address)} \(the program said so\): \[Errno 98\] Address already in use. "
            rf"Name another port, the same in all processes.$",
        ):
            check_port(Cluster(address, 2, 0, "the program"))


@pytest.mark.parametrize(("taken", "coordinator"), [("127.0.0.1", "[::1]"), ("::1", "127.0.0.1"), ("127.0.0.1", "127.0.0.2")])
def test_a_port_of_another_address_is_free(taken, coordinator):
    listen_at(coordinator.strip("[]")).close()
    with listen_at(taken) as listener:
        check_port(Cluster(f"{coordinator}:{listener.getsockname()[1]}", 2, 0, "the program"))


def test_an_address_that_this_machine_does_not_have(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(connecting.socket, "socket", refuse)
    with pytest.raises(
        ClusterError,
        match=r"^process 0 of 2 cannot listen at \[::1\]:1234 \(the program said so\): \[Errno 97\] Address family not supported by protocol. "
        r"Name an address that this machine has, the same in all processes.$",
    ):
        check_port(Cluster("[::1]:1234", 2, 0, "the program"))


def test_who_says_something_must_agree(monkeypatch):
    for name, value in (LAUNCHED | tf_config()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ClusterError,
        match=r"^the environment \(UNISONO_COORDINATOR and its kin\) said process 2 of 3, and TF_CONFIG process 1 of 2. Leave one of them out.$",
    ):
        connect_processes()
    program, launched = Cluster("a:1", 3, 2, "the program"), describe_by_launcher(LAUNCHED)
    assert require_same_cluster([None, program, launched]) is program


def test_a_single_process_needs_nobody(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: pytest.fail("initialized"))
    jax.devices()
    assert where(connect_processes("127.0.0.1:1", 1, 0)) == ("127.0.0.1:1", 1, 0)
    assert where(connect_processes()) == (None, 1, 0)


def test_jax_must_not_have_started():
    jax.devices()
    with pytest.raises(
        ClusterError,
        match=r"^the program said process 0 of 2, but JAX has started already, as a single process. Make the strategy in the first lines of "
        r"the program, behind the imports: arrays, jax.devices\(\) and Keras' optimizers start JAX.$",
    ):
        connect_processes("127.0.0.1:1", 2, 0)


def test_what_is_initialized_already_is_taken(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(connecting.distributed, "get_process_count_and_number", lambda: (4, 3))
    assert where(connect_processes()) == (None, 4, 3)
    assert where(connect_processes("h:1", 4, 3)) == (None, 4, 3)
    with pytest.raises(
        ClusterError,
        match=r"^jax.distributed, which is initialized already, said process 3 of 4, and the program process 0 of 2. Leave one of them out.$",
    ):
        connect_processes("h:1", 2, 0)


def test_the_bound(monkeypatch):
    monkeypatch.delenv("UNISONO_BOUND", raising=False)
    assert (read_bound(), compute_heartbeat_timeout(read_bound())) == (30, 120)
    monkeypatch.setenv("UNISONO_BOUND", "2.5")
    assert (read_bound(), compute_heartbeat_timeout(read_bound())) == (2.5, 100)
    for text in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("UNISONO_BOUND", text)
        with pytest.raises(
            ClusterError, match=f"^the environment variable UNISONO_BOUND is a number of seconds above 0; received '{text}'.$"
        ):
            read_bound()
