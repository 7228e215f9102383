"""`unisono completion`: a script that completes the command in a shell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import tyro


def make_completion(app: tyro.extras.SubcommandApp) -> Callable[..., None]:
    """Make the subcommand that prints the completion of an app."""

    def completion(
        shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional, tyro.conf.arg(help_behavior_hint="(required)")],
    ) -> None:
        """Prints a script by which your shell completes subcommands and options.

        For bash: unisono completion bash > ~/.local/share/bash-completion/completions/unisono

        For zsh, with a folder of $fpath: unisono completion zsh > FOLDER/_unisono

        Args:
            shell: The shell.
        """
        app.cli(prog="unisono", args=["--tyro-print-completion", shell])

    return completion
