"""Machine code on disk, in the folder of JAX's compilation cache.

It is used if the user has named a folder (JAX_COMPILATION_CACHE_DIR). An entry of JAX can be loaded only on the device that it
was compiled for; our entries can be loaded on all devices. JAX's settings hold for our entries too: the shortest compilation that
is kept, and the size of the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from unisono._src.engine.xla import determinism, device_kind
from unisono._src.programs.private.machine_code import LRUCache
from unisono._src.versions import list_versions

DIGEST = 32
"""Bytes of the digest before the code: a process may have died while it wrote."""


def is_cache_wanted() -> bool:
    return bool(read_setting("compilation_cache_dir") and read_setting("enable_compilation_cache"))


def compute_key(text: str, device: jax.Device) -> str:
    """Compute the key of a program. It covers all that may change the machine code: versions, flags, and the machine."""
    compiler = (*list_versions().values(), device.platform, device.device_kind, device.client.platform_version)
    machine = (
        os.environ.get("XLA_FLAGS", ""),
        *device_kind.describe_processor().values(),
        device_kind.list_all_instructions(),
    )
    options = map(str, determinism.get_compiler_options(device.platform).items())
    description = "\0".join((text, *compiler, *machine, *options))
    return f"unisono-{hashlib.sha256(description.encode()).hexdigest()}"


def read_code(key: str) -> bytes | None:
    """Read the code of a key. None if there is none, or if its digest does not match."""
    with tolerate_disk_errors():
        stored = open_cache().get(key)
        if stored is not None and hashlib.sha256(stored[DIGEST:]).digest() == stored[:DIGEST]:
            return zlib.decompress(stored[DIGEST:])
        drop_code(key)
    return None


def write_code(key: str, code: bytes, seconds: float) -> None:
    """Write the code of a key, if its compilation took long enough."""
    if seconds >= read_setting("persistent_cache_min_compile_time_secs"):
        packed = zlib.compress(code, 1)
        with tolerate_disk_errors():
            open_cache().put(key, hashlib.sha256(packed).digest() + packed)


def drop_code(key: str) -> None:
    """Remove the code of a key. The cache never overwrites an entry, so it must go before it can be written again."""
    (Path(read_setting("compilation_cache_dir")) / f"{key}-cache").unlink(missing_ok=True)


@contextlib.contextmanager
def tolerate_disk_errors() -> Iterator[None]:
    """Turn errors of the block into warnings. A full disk, or a folder without write permission, must not stop a training."""
    try:
        yield
    except Exception as error:  # of a disk, of the client of a remote one, or of a package that JAX misses for it
        if read_setting("raise_persistent_cache_errors"):
            raise
        warnings.warn(
            f"Programs are not kept in {read_setting('compilation_cache_dir')}: {type(error).__name__}: {error}.", stacklevel=4
        )


def open_cache() -> LRUCache:
    return LRUCache(str(read_setting("compilation_cache_dir")), max_size=read_setting("compilation_cache_max_size"))


def read_setting(name: str) -> Any:
    return getattr(jax.config, f"jax_{name}")
