"""Where the description of a cluster comes from. What needs processes is in `test_cluster_integration`."""

from __future__ import annotations

import errno
import json
import re
import socket

import jax
import pytest

import unisono as un
from unisono._src.processes.description import Cluster, ClusterError, describe_by_arguments
from unisono._src.processes.environments import connect as connecting
from unisono._src.processes.environments.connect import check_port, compute_heartbeat_timeout, connect_processes, read_bound
from unisono._src.processes.environments.jax_variables import describe_by_jax
from unisono._src.processes.environments.keras_distribution import FORM as KERAS_FORM
from unisono._src.processes.environments.keras_distribution import describe_by_keras
from unisono._src.processes.environments.open_mpi import describe_by_open_mpi
from unisono._src.processes.environments.precedence import (
    AGREEING,
    AROUND,
    describe_by_agreeing,
    describe_by_around,
    describe_by_first,
    require_same_cluster,
)
from unisono._src.processes.environments.skypilot import describe_by_skypilot
from unisono._src.processes.environments.slurm import describe_by_slurm
from unisono._src.processes.environments.tf_config import TF_CONFIG_FORM as FORM
from unisono._src.processes.environments.tf_config import describe_by_tf_config
from unisono._src.processes.environments.torchrun import describe_by_torchrun
from unisono._src.processes.environments.unisono_launch import describe_by_launcher

LAUNCHED = {"UNISONO_COORDINATOR": "127.0.0.1:1234", "UNISONO_PROCESSES": "3", "UNISONO_PROCESS": "2"}
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
KUBEFLOW = {
    "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666", "JAX_COORDINATOR_PORT": "6666",
}  # fmt: skip
KERAS = {
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:1, 10.0.0.2:2", "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
    "KERAS_DISTRIBUTION_PROCESS_ID": "1",
}  # fmt: skip
SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
SLURM = {
    "SLURM_JOB_ID": "4097", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "678166528.0;tcp://10.0.0.1,10.1.0.1:59231;tcp6://[fd00::2]:51919",
}  # fmt: skip
OPEN_MPI_5 = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""}


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
    for environment in (*AGREEING, *AROUND):
        assert environment.describe({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("describe", "environment"),
    [
        (describe_by_torchrun, TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}),
        (describe_by_torchrun, {"WORLD_SIZE": "8", "MASTER_ADDR": "a"}),  # of a script whose processes srun numbers
        (describe_by_jax, {"JAX_COORDINATOR_ADDRESS": "a:1"}),  # beside a cluster that JAX detects
        (describe_by_skypilot, SKYPILOT | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}),
        (describe_by_slurm, SLURM | {"SLURM_STEP_NODELIST": ""}),  # in an allocation, outside of a step
    ],
)
def test_variables_that_say_nothing_of_others(describe, environment):
    assert describe(environment) is None


@pytest.mark.parametrize(
    ("describe", "environment"),
    [
        (describe_by_launcher, {"UNISONO_PROCESSES": "1"}),
        (describe_by_keras, {"KERAS_DISTRIBUTION_NUM_PROCESSES": "1"}),
        (describe_by_jax, KUBEFLOW | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}),
        (describe_by_slurm, SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "", "SLURM_PROCID": "0"}),
        (
            describe_by_slurm,
            SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        ),  # the shell of an interactive allocation of four tasks
        (describe_by_open_mpi, {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}),
    ],
)
def test_variables_of_a_single_process(describe, environment):
    assert where(describe(environment)) == (None, 1, 0)


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
        (describe_by_keras, KERAS, ("10.0.0.1:1", 2, 1)),
        (describe_by_keras, KERAS | {"KERAS_DISTRIBUTION_NUM_PROCESSES": ""}, ("10.0.0.1:1", 2, 1)),
        (describe_by_keras, KERAS | {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:1"}, ("10.0.0.1:1", 2, 1)),
        (describe_by_jax, KUBEFLOW, ("job-node-0-0.job:6666", 2, 1)),
        (describe_by_torchrun, TORCHRUN, ("10.0.0.1:29501", 4, 3)),
        (describe_by_torchrun, TORCHRUN | {"MASTER_PORT": "65535", "MASTER_ADDR": "fd00::1"}, ("[fd00::1]:65534", 4, 3)),
        (describe_by_torchrun, TORCHRUN | {"MASTER_PORT": "", "JAX_COORDINATOR_PORT": "5"}, ("10.0.0.1:5", 4, 3)),
        (describe_by_skypilot, SKYPILOT, ("10.0.0.1:8482", 2, 1)),
        (describe_by_skypilot, SKYPILOT | {"JAX_COORDINATOR_PORT": "5"}, ("10.0.0.1:5", 2, 1)),
        (describe_by_slurm, SLURM, ("n1:61441", 4, 3)),
        (describe_by_slurm, SLURM | {"SLURM_STEP_ID": "1"}, ("n1:62462", 4, 3)),  # beside the first step
        (describe_by_slurm, SLURM | {"JAX_COORDINATOR_PORT": "5"}, ("n1:5", 4, 3)),
        (describe_by_slurm, SLURM | {"JAX_COORDINATOR_ADDRESS": "n7:5"}, ("n7:5", 4, 3)),
        (describe_by_open_mpi, OPEN_MPI, ("10.0.0.1:63168", 4, 3)),
        (describe_by_open_mpi, OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp6://[fd00::2]:51919"}, ("[fd00::2]:61441", 4, 3)),
        (describe_by_open_mpi, OPEN_MPI_5, (None, 4, 3)),
        (describe_by_open_mpi, OPEN_MPI_5 | {"JAX_COORDINATOR_ADDRESS": "n7:5"}, ("n7:5", 4, 3)),
    ],
)
def test_a_place_that_says_something(describe, given, found):
    assert where(described(describe, given)) == found


@pytest.mark.parametrize(
    ("describe", "environment", "devices"),
    [
        (describe_by_torchrun, TORCHRUN, (1,)),
        (describe_by_torchrun, TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        (describe_by_torchrun, TORCHRUN | {"LOCAL_RANK": ""}, None),
        (describe_by_torchrun, TORCHRUN | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, None),
        (describe_by_slurm, SLURM, (1,)),
        (describe_by_slurm, SLURM | {"SLURM_STEP_NUM_NODES": "4", "SLURM_LOCALID": "0"}, None),
        (describe_by_open_mpi, OPEN_MPI, (1,)),
        (describe_by_open_mpi, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, None),
    ],
)
def test_of_several_processes_on_a_machine_each_has_its_gpu(describe, environment, devices):
    assert describe(environment).local_devices == devices


def test_the_order_of_environments():
    everything = LAUNCHED | tf_config() | KERAS | KUBEFLOW | TORCHRUN | OPEN_MPI | SLURM | SKYPILOT
    order = []
    while found := describe_by_first(everything):
        order.append(found[0].name)
        everything = {name: value for name, value in everything.items() if name not in found[0].variables}
    assert order == [
        "unisono launch",
        "TF_CONFIG",
        "Keras",
        "Kubeflow's JAX runtime",
        "torchrun",
        "Open MPI",
        "Slurm",
        "SkyPilot",
    ]
    around = OPEN_MPI | SLURM | SKYPILOT
    assert where(describe_by_agreeing(TORCHRUN | around)) == ("10.0.0.1:29501", 4, 3)  # they may count nodes
    assert describe_by_agreeing(around) is None
    assert describe_by_around(around).source == "Open MPI"


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
            describe_by_jax, {"JAX_NUM_PROCESSES": "2"},
            "the environment lacks JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID. Kubeflow's JAX runtime sets all of JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES, JAX_PROCESS_ID; set them or none.",
        ),
        (
            describe_by_torchrun, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"},
            "the environment says RANK=1 and WORLD_SIZE=2, as torchrun does, and lacks MASTER_ADDR. Set all four, or none.",
        ),
        (describe_by_torchrun, TORCHRUN | {"LOCAL_RANK": "x"}, "the environment variable LOCAL_RANK is a number; received 'x'."),
        (
            describe_by_keras, {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:1"},
            f"the environment lacks KERAS_DISTRIBUTION_PROCESS_ID. Keras' variables look like {KERAS_FORM}; set them or none.",
        ),
        (
            describe_by_keras, KERAS | {"KERAS_DISTRIBUTION_NUM_PROCESSES": "3"},
            "KERAS_DISTRIBUTION_JOB_ADDRESSES has 2 addresses, and KERAS_DISTRIBUTION_NUM_PROCESSES is 3. Write an address for each process, "
            f"or that of process 0 alone: {KERAS_FORM}.",
        ),
        (
            describe_by_skypilot, SKYPILOT | {"SKYPILOT_NODE_IPS": ""},
            "the environment lacks SKYPILOT_NODE_IPS. SkyPilot sets all of SKYPILOT_NUM_NODES, SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS; set "
            "them or none.",
        ),
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
    """Return a listener at a free port, which it shares, as gRPC's do; skip the test where the machine does not have the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, reuse_port=True)
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


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (LAUNCHED, "UNISONO_PROCESSES=3, UNISONO_PROCESS=2 (unisono launch) makes this process 2 of 3"),
        (tf_config(), f"TF_CONFIG={tf_config()['TF_CONFIG']} (TF_CONFIG) makes this process 1 of 2"),
        (TORCHRUN, "WORLD_SIZE=4, RANK=3 (torchrun) makes this process 3 of 4"),
        (KUBEFLOW, "JAX_NUM_PROCESSES=2, JAX_PROCESS_ID=1 (Kubeflow's JAX runtime) makes this process 1 of 2"),
        (SLURM, "SLURM_NTASKS=4, SLURM_PROCID=3 (Slurm) makes this process 3 of 4"),
        (OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_RANK=3 (Open MPI) makes this process 3 of 4"),
        (SKYPILOT, "SKYPILOT_NUM_NODES=2, SKYPILOT_NODE_RANK=1 (SkyPilot) makes this process 1 of 2"),
    ],
)
def test_a_strategy_of_one_process_is_refused_among_several(monkeypatch, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = (
        f"{said}, and OneDeviceStrategy knows this one alone: each of them would train the whole model by itself. Write "
        "MultiWorkerMirroredStrategy(), whose replicas are those of all processes, or start one process. Where each process is meant to "
        "train a model of its own, set UNISONO_PROCESSES=1 and no other variable of UNISONO_COORDINATOR's kin in it."
    )
    with pytest.raises(ClusterError, match=f"^{re.escape(message)}$"):
        un.OneDeviceStrategy()
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UNISONO_PROCESSES", "1")
    assert un.OneDeviceStrategy().num_replicas_in_sync == 1


def raise_like_jax(text):
    def initialize(**_):
        raise ValueError(text)

    return initialize


@pytest.mark.parametrize(
    ("variables", "text", "message"),
    [
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1"}, connecting.distributed.NO_COUNT,
            "JAX_COORDINATOR_ADDRESS=a:1 says where process 0 listens, and nothing says how many processes there are. Set JAX_NUM_PROCESSES "
            "and JAX_PROCESS_ID too, or none of the three.",
        ),
        (
            OPEN_MPI_5, connecting.distributed.NOBODY,
            "Open MPI said process 3 of 4, and not at which address process 0 listens. Set JAX_COORDINATOR_ADDRESS in each process, to the "
            "address of the machine of process 0 and a free port there: '10.0.0.1:1234'.",
        ),
    ],
)  # fmt: skip
def test_a_cluster_of_which_a_part_is_said(monkeypatch, variables, text, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(connecting, "has_jax_started", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", raise_like_jax(text))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(ClusterError, match=f"^{re.escape(message)}$"):
        connect_processes()


@pytest.mark.parametrize(
    ("named", "can", "message"),
    [
        (
            ["JAX_MTLS_CA_FILE"], False,
            f"JAX_MTLS_CA_FILE names a file, and jax {jax.__version__} connects processes without certificates: whoever reaches process 0 could "
            f"talk to it. Install jax 0.12 or newer, or unset the variable.",
        ),
        (
            ["JAX_MTLS_CERT_FILE"], True,
            "JAX_MTLS_CERT_FILE names a file, and nothing names JAX_MTLS_KEY_FILE and JAX_MTLS_CA_FILE: JAX needs all three, a certificate, its key, "
            "and that of the authority. Set them in every process, or none of them.",
        ),
    ],
)  # fmt: skip
def test_certificates_that_would_not_be_used(monkeypatch, named, can, message):
    for name in named:
        monkeypatch.setenv(name, "file.pem")
    monkeypatch.setattr(connecting, "has_jax_started", lambda: False)
    monkeypatch.setattr(connecting, "has_certificates", lambda: can)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: pytest.fail("initialized"))
    with pytest.raises(ClusterError, match=f"^{re.escape(message)}$"):
        connect_processes("127.0.0.1:1", 2, 0)


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
