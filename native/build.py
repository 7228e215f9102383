"""Compiles the kernels when a wheel of Unisono is built, or when Unisono is installed from a checkout: a hook of hatch.

Each level of the processor's instructions is a library of its own, beside the Python code. Where there is no C++ compiler, or where it
fails, the reason is written there instead, and Unisono runs without native code.

`python native/build.py` compiles them again in a checkout.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
LIBRARIES = HERE.parent / "src/unisono/_src/kernels/native/libraries"
REASON = "reason.txt"

LEVELS = {
    "x86_64": {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]},
    "aarch64": {"neon": []},
    "arm64": {"neon": []},
}
"""The levels of each machine, with the compiler's options."""

# Contraction is part of the bits, so it is not left to the compiler's default.
OPTIONS = ["-std=gnu++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]


class BuildError(Exception):
    """Why there are no libraries."""


def build(folder: pathlib.Path = LIBRARIES, more_options: tuple[str, ...] = ()) -> list[pathlib.Path]:
    """Compile the kernels of every level into a folder; raise `BuildError` with the reason where that fails."""
    levels = LEVELS.get(platform.machine())
    if not sys.platform.startswith("linux") or levels is None:
        raise BuildError(f"there are no kernels for {sys.platform} on {platform.machine()}")
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [pool.submit(compile_level, compiler, name, [*options, *more_options], folder) for name, options in levels.items()]
        return [job.result() for job in jobs]


def find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    raise BuildError("no C++ compiler was found (c++, g++, clang++, or the one that CXX names)")


def find_headers() -> pathlib.Path:
    """Return the folder of XLA's headers, which come with jaxlib."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise BuildError("jaxlib is not there, and so XLA's headers are not")
    return pathlib.Path(spec.origin).parent / "include"


def compile_level(compiler: str, level: str, options: list[str], folder: pathlib.Path) -> pathlib.Path:
    """Return the library of a level: the one that is there if it is of the same build, else a new one."""
    library = folder / f"kernels-{level}.so"
    options = [*OPTIONS, *options]
    build_name = describe_build(compiler, options)
    if library.exists() and build_name.encode() in library.read_bytes():
        return library
    headers = find_headers().resolve()  # GCC names headers of the system by the place to which links lead
    # Two builds in two folders have the same bytes: the names of the folders do not go into the library.
    places = [f"-ffile-prefix-map={headers}=jaxlib/include", f"-ffile-prefix-map={HERE}=native"]
    command = [compiler, *options, *places, f'-DUNISONO_BUILD="{build_name}"', "-isystem", str(headers)]
    partial = library.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, *map(str, sorted(HERE.glob("*.cc"))), "-o", str(partial)], capture_output=True, text=True)
    if done.returncode:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{compiler} failed: {done.stderr[-2000:]}")
    partial.replace(library)
    return library


def describe_build(compiler: str, options: list[str]) -> str:
    """Return a short name of what the bits of the kernels depend on: their source, the compiler and its options."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    if version.returncode:
        raise BuildError(f"{compiler} --version failed: {version.stderr[-2000:]}")
    digest = hashlib.sha256("\0".join([version.stdout.splitlines()[0], *options]).encode())
    for path in sorted([*HERE.glob("*.cc"), *HERE.glob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def build_or_say_why(folder: pathlib.Path = LIBRARIES) -> str | None:
    """Compile the kernels; where that fails, write and return the reason."""
    with lock_sources():
        (folder / REASON).unlink(missing_ok=True)
        try:
            libraries = build(folder)
        except BuildError as error:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / REASON).write_text(f"{error}\n")
            return str(error)
        for path in set(folder.iterdir()) - set(libraries):
            path.unlink()
        return None


@contextlib.contextmanager
def lock_sources() -> Iterator[None]:
    """Wait until no other process compiles this checkout: two environments may be made at once."""
    folder = os.open(HERE, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # called as a program
    pass
else:

    class KernelBuildHook(BuildHookInterface):  # pyright: ignore[reportMissingTypeArgument]
        """Puts the libraries into the wheel, which is then for one platform."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel":
                return
            reason = build_or_say_why()
            build_data["artifacts"].append("src/unisono/_src/kernels/native/libraries/*")
            if reason is not None:
                self.app.display_warning(f"Unisono is built without native kernels: {reason}")
                return
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    reason = build_or_say_why()
    print(f"No kernels: {reason}" if reason else "\n".join(map(str, sorted(LIBRARIES.iterdir()))))
    sys.exit(bool(reason))
