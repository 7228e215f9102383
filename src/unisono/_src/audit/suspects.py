"""The names in a line of source that can make two runs differ: clocks, random numbers, hash order, files, processes, devices, collectives.

A name never decides that runs are equal or differ: records do. Names say which of the known causes a line that differs has.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from unisono._src.audit.cause import Cause
from unisono._src.audit.source_code import spell_last_name, spell_name

COLLECTIVES = {
    "psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "ppermute", "process_allgather",
    "broadcast_one_to_all", "sync_global_devices",
}  # fmt: skip
CLOCKS = {
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns", "now", "utcnow",
    "today", "strftime", "localtime", "gmtime",
}  # fmt: skip
PROCESSES = {
    "getpid",
    "getppid",
    "process_index",
    "process_count",
    "gethostname",
    "writes",
    "get_ident",
    "task_id",
    "get_native_id",
}
PROCESS_VARIABLES = (
    "UNISONO_PROCESS",
    "RANK",
    "WORLD_SIZE",
    "TF_CONFIG",
    "SLURM_",
    "OMPI_",
    "SKYPILOT_",
    "JAX_PROCESS_ID",
    "KERAS_DISTRIBUTION_",
    "HOSTNAME",
)
DEVICES = {"device_count", "local_device_count", "local_devices", "devices", "cpu_count", "sched_getaffinity"}
THREADS = {"as_completed", "imap_unordered"}
FILES = {
    "open",
    "loadtxt",
    "load",
    "genfromtxt",
    "fromfile",
    "read_text",
    "read_bytes",
    "read_csv",
    "read_parquet",
    "exists",
    "glob",
    "iterdir",
    "listdir",
    "stat",
}
RANDOM = {
    "SystemRandom", "urandom", "uuid1", "uuid4", "randbits", "token_bytes", "token_hex", "randbelow", "random", "uniform", "normal", "randint",
    "integers", "choice", "choices", "sample", "shuffle", "permutation", "permuted", "betavariate", "gauss", "gammavariate", "randrange",
    "standard_normal", "rand", "randn", "beta", "gamma", "binomial", "poisson", "exponential", "triangular", "expovariate", "getrandbits",
    "normalvariate", "random_sample", "vonmisesvariate", "dirichlet", "laplace",
}  # fmt: skip
GENERATORS = {"default_rng", "RandomState", "Random", "SeedSequence", "Generator"}


def find_suspect(expressions: Collection[ast.AST], sets: Collection[str] = ()) -> Cause | None:
    """Return the cause that expressions suggest; None where they suggest none. `sets` are the names of values that are sets."""
    nodes = [node for expression in expressions for node in ast.walk(expression)]
    names = {spell_last_name(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))}
    called = {spell_last_name(node.func) for node in nodes if isinstance(node, ast.Call)}
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    if called & COLLECTIVES:
        return Cause.COLLECTIVE
    if names & PROCESSES or any(string.startswith(PROCESS_VARIABLES) for string in strings):
        return Cause.PROCESS
    if called & DEVICES or names & {"device_count", "local_device_count"}:
        return Cause.DEVICES
    if "hash" in called or iterates_set(nodes, sets):
        return Cause.HASH_ORDER
    if called & THREADS:
        return Cause.THREAD_ORDER
    if has_random_call(nodes):
        return Cause.HOST_RANDOM
    if called & CLOCKS:
        return Cause.TIME
    return Cause.FILES if called & FILES else None


def iterates_set(nodes: Collection[ast.AST], sets: Collection[str]) -> bool:
    """Return whether the items of a set are taken in its order."""
    if any(isinstance(node, ast.Call) and spell_name(node.func) in ("set", "frozenset") for node in nodes):
        return True
    if any(isinstance(node, (ast.Set, ast.SetComp)) for node in nodes):
        return True
    return any(isinstance(node, ast.Name) and node.id in sets and isinstance(node.ctx, ast.Load) for node in nodes)


def has_random_call(nodes: Collection[ast.AST]) -> bool:
    """Return whether numbers are drawn, or a generator is made without a seed."""
    for node in nodes:
        if isinstance(node, ast.Call):
            name = spell_last_name(node.func)
            arguments = (*node.args, *(keyword.value for keyword in node.keywords))
            if name in RANDOM or (name in GENERATORS and all(map(is_none, arguments))):
                return True
    return False


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
