"""Machine code kept on disk, in the folder of JAX's compilation cache, where the user has named one (JAX_COMPILATION_CACHE_DIR).

JAX's own entries cannot be loaded on other devices than the one that they were compiled for; these can. JAX's settings hold for them: the
shortest compilation that is kept, and the size of the folder.
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
from jax._src.lru_cache import LRUCache  # checked with jax 0.10.2: what JAX's own cache keeps its entries in

from unisono._src.versions import versions
from unisono._src.xla import determinism, processor, runtime

DIGEST = 32
"""Bytes before the code: a process may have died while it wrote."""


def is_wanted() -> bool:
    return bool(setting("compilation_cache_dir") and setting("enable_compilation_cache"))


def key_of(text: str, device: jax.Device) -> str:
    """Of a program: whatever may make other code of it is in there, the machine too."""
    made_by = (*versions().values(), device.platform, device.device_kind, device.client.platform_version)
    said = (os.environ.get("XLA_FLAGS", ""), str(runtime.threads()), *processor.facts().values(), processor.all_instructions())
    options = map(str, determinism.compiler_options(device.platform).items())
    together = "\0".join((text, *made_by, *said, *options))
    return f"unisono-{hashlib.sha256(together.encode()).hexdigest()}"


def read(key: str) -> bytes | None:
    """None where it is not there, or not what was written."""
    with forgiving():
        stored = folder().get(key)
        if stored is not None and hashlib.sha256(stored[DIGEST:]).digest() == stored[:DIGEST]:
            return zlib.decompress(stored[DIGEST:])
        drop(key)
    return None


def write(key: str, code: bytes, seconds: float) -> None:
    """Unless it was compiled in less time than is worth it."""
    if seconds >= setting("persistent_cache_min_compile_time_secs"):
        packed = zlib.compress(code, 1)
        with forgiving():
            folder().put(key, hashlib.sha256(packed).digest() + packed)


def drop(key: str) -> None:
    """So that it can be written again: what is there is never overwritten."""
    (Path(setting("compilation_cache_dir")) / f"{key}-cache").unlink(missing_ok=True)


@contextlib.contextmanager
def forgiving() -> Iterator[None]:
    """A disk that is full, or a folder that nobody may write to, keeps nobody from training."""
    try:
        yield
    except Exception as error:
        if setting("raise_persistent_cache_errors"):
            raise
        warnings.warn(
            f"Programs are not kept in {setting('compilation_cache_dir')}: {type(error).__name__}: {error}.", stacklevel=4
        )


def folder() -> LRUCache:
    return LRUCache(str(setting("compilation_cache_dir")), max_size=setting("compilation_cache_max_size"))


def setting(name: str) -> Any:
    return getattr(jax.config, f"jax_{name}")
