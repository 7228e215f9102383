"""Compiles the native kernels for Arm, on any machine, and looks at what came out: python tests/helpers/compile_for_arm.py FOLDER.

The compiler is Zig's: a package, `pip install ziglang`, with which clang compiles for other machines. `make arm` installs it and runs this.
Nothing is run: the library is for NEON.
"""

from __future__ import annotations

import argparse
import pathlib
import struct
import subprocess
import sys

NATIVE = pathlib.Path(__file__).resolve().parents[2] / "native"
sys.path.insert(0, str(NATIVE))

import build

from unisono._src.kernels.native.library import TARGETS

COMPILER = (sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu.2.28")
AARCH64 = 183
"""The number of the machine in the header of an ELF file."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "kernels-neon.so"
    options = [*build.OPTIONS, *build.LEVELS["aarch64"]["neon"], "-Werror", '-DUNISONO_BUILD="arm"']
    sources = map(str, sorted(NATIVE.glob("*.cc")))
    subprocess.run([*COMPILER, *options, "-isystem", str(build.find_headers()), *sources, "-o", str(library)], check=True)
    check_library(library.read_bytes())
    print(f"{library}: {len(TARGETS)} kernels for Arm")


def check_library(content: bytes) -> None:
    (machine,) = struct.unpack_from("<H", content, 18)
    assert content.startswith(b"\x7fELF"), content[:4]
    assert machine == AARCH64, f"the library is for machine {machine}"
    missing = [target for target in TARGETS if b"\0" + target.encode() + b"\0" not in content]
    assert not missing, f"the library has no {missing}"


if __name__ == "__main__":
    main()
