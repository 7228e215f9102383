"""Names of `tf.distribute` that do not exist here. Each has what to write in its place."""

from __future__ import annotations

FIXED_ORDER = "Leave it out: sums have one fixed order, whatever the devices."

INSTEAD = {
    "cluster_resolver": (
        "Delete the resolver: un.MultiWorkerMirroredStrategy() finds the other processes by TF_CONFIG and by the variables of Slurm and other "
        "launchers, and un.TPUStrategy() finds the TPUs. In place of a SimpleClusterResolver write "
        "un.MultiWorkerMirroredStrategy(coordinator='10.0.0.1:1234', processes=2, process=0)."
    ),
    "experimental": "Write the name without experimental: un.MultiWorkerMirroredStrategy, un.TPUStrategy.",
    "has_strategy": "Compare un.get_strategy() with your strategy.",
    "experimental_set_strategy": "Open a scope: with strategy.scope().",
    "CrossDeviceOps": FIXED_ORDER,
    "HierarchicalCopyAllReduce": FIXED_ORDER,
    "NcclAllReduce": FIXED_ORDER,
    "ReductionToOneDevice": FIXED_ORDER,
    "InputOptions": "Leave it out: the next batch is read and sent ahead.",
    "RunOptions": "Leave it out.",
    "Server": "Leave it out: there are no servers to start.",
    "coordinator": "It is for parameter servers, whose training is asynchronous. Write un.MirroredStrategy().",
}
