"""Machine code on the local disk of a worker. Workers that Ray starts again load what they have compiled before."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax

from unisono._src.typed_jax import settings


@contextlib.contextmanager
def keep_programs(folder: Path) -> Iterator[None]:
    """Keep in a folder what the block compiles. The folder is removed when the block ends without an error.

    A folder that the user has named for JAX's compilation cache is used in its place.
    """
    if settings.jax_compilation_cache_dir or not make_private(folder):
        yield
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    shutil.rmtree(folder, ignore_errors=True)  # another worker of this machine may have removed it


def make_private(folder: Path) -> bool:
    """Make a folder to which nobody else may write: what lies in it is run. Return whether it is one."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return True
    warnings.warn(
        f"Workers that Ray starts again compile their programs again: {folder} is no folder of this user to which nobody else may write. Remove "
        f"it, or name another folder in JAX_COMPILATION_CACHE_DIR.",
        stacklevel=2,
    )
    return False
