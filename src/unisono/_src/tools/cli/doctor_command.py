"""`unisono doctor`: an examination of this machine, with a self-test."""

from __future__ import annotations

from unisono._src.tools.cli.output import CommandError


def doctor(
    *,
    json: bool = False,
    processes: bool = False,
    cluster: bool = False,
    self_test: bool = True,
    versions: bool = False,
) -> int:
    """Says what breaks the promise of the same bits on this machine.

    It also says what this machine has, and what to write to mend what breaks.

    A small net is trained on the placements that this machine can make, and the fingerprints are compared. Nothing is downloaded or
    changed. The exit code is 0 if nothing breaks the promise, 1 if something does, and 2 if something could not be looked at.

    For several processes: unisono launch --processes 2 -m unisono doctor

    Args:
        json: Print one JSON object, for programs.
        processes: Train on two processes over loopback as well.
        cluster: Meet the other processes of a cluster that JAX finds, as of Kubernetes. Those that the environment names meet by themselves.
        self_test: Train a small net on the placements of this machine.
        versions: Print which versions of Keras and JAX have the same bits, and nothing else.
    """
    if versions:
        from unisono._src.tools.doctor.references import format_versions, read_references

        if processes or cluster:
            raise CommandError(
                "--versions prints a table that is kept, and looks at no process. Leave --processes and --cluster out."
            )
        references = read_references()
        print(references.to_json() if json else format_versions(references))
        return 0
    from unisono._src.tools.doctor.doctor import examine_machine  # imports JAX

    return examine_machine(self_test, processes, cluster, json)
