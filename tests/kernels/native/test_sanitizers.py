"""The kernels touch no memory that is not theirs, and do nothing undefined: GCC's sanitizers watch them on random shapes."""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
import platform
import re
import shutil
import subprocess
from types import ModuleType

import pytest

from processes import HERE, python
from sizes import thorough
from unisono._src.kernels.native.library import NEEDED, TARGETS, list_common_instructions

SANITIZERS = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
LEVELS = [level for level, needed in NEEDED.items() if list_common_instructions().issuperset(needed)]
"""Of this processor, best first."""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not LEVELS, reason=f"this processor has the instructions of none of {', '.join(NEEDED)}"),
]


@functools.cache
def load_build() -> ModuleType:
    """Return `native/build.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("build_of_kernels", HERE.parents[1] / "native/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compiler() -> str:
    """GCC, by whose macros `native/pieces.h` knows that it is watched."""
    path = shutil.which("g++")
    if path is None:
        pytest.skip("there is no g++")
    return path


@pytest.fixture(scope="module")
def watched(compiler: str) -> dict[str, str]:
    """The environment of a process whose memory is watched."""
    runtimes = [find_runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    # What JAX and Keras keep until the end is no leak of ours.
    return {"LD_PRELOAD": ":".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def find_runtime(compiler: str, name: str) -> str:
    """Return the path of a library of GCC's, or skip the test."""
    path = pathlib.Path(subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip())
    if path.is_file() and not path.read_bytes().startswith(
        b"\x7fELF"
    ):  # on some systems a text for the linker, which names the library
        path = pathlib.Path(*re.findall(r"/\S+\.so\S*", path.read_text()))
    if not path.is_absolute() or not path.is_file():
        pytest.skip(f"{compiler} has no {name}")
    return str(path)


@pytest.mark.parametrize(
    ("level", "cases"), [*[(level, 2) for level in LEVELS[-1:]], *thorough(*[(level, 10) for level in LEVELS])]
)
def test_kernels_on_random_shapes(compiler, watched, tmp_path, level, cases):
    """The short form tries the level that compiles fastest, the long one each."""
    build = load_build()
    library = build.compile_level(compiler, level, [*build.LEVELS[platform.machine()][level], *SANITIZERS], tmp_path)
    arguments = str(tmp_path), str(cases), str(cases)  # the long form has other cases
    done = python(str(HERE / "call_kernels.py"), *arguments, timeout=150.0 * cases, UNISONO_NATIVE=level, **watched)
    assert done.returncode == 0, f"{done.stderr[:6000]}\n...\n{done.stderr[-2000:]}"  # a sanitizer says first what it has found
    found = json.loads(done.stdout)
    assert found["build"].encode() in library.read_bytes()
    assert found["kernels"] == sorted(TARGETS)


BROKEN = """
#include <cstdlib>
extern "C" int read_beyond(int count) {
  float* memory = static_cast<float*>(std::malloc(count * sizeof(float)));
  return memory[count] > 0;
}
extern "C" int overflow(int count) { return count + 0x7fffffff; }
"""


@pytest.mark.parametrize(
    ("function", "said"),
    [("read_beyond", "AddressSanitizer: heap-buffer-overflow"), ("overflow", "runtime error: signed integer overflow")],
)
def test_a_fault_ends_the_process(compiler, watched, tmp_path, function, said):
    """With these options, in this environment: else the other tests would see nothing."""
    source, library = tmp_path / "broken.cc", tmp_path / "broken.so"
    source.write_text(BROKEN)
    subprocess.run([compiler, *SANITIZERS, "-fPIC", "-shared", str(source), "-o", str(library)], check=True)
    done = python("-c", f"import ctypes; ctypes.CDLL({str(library)!r}).{function}(3)", **watched)
    assert done.returncode != 0
    assert said in done.stderr
