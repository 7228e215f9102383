"""The start of a traced run, by its path: python start.py DIRECTORY SCRIPT ARGUMENTS, or with -m and a module in place of the script."""

from __future__ import annotations

import importlib
import os
import sys

if __name__ == "__main__":
    package = os.path.dirname(os.path.abspath(__file__))
    sys.path[0] = os.path.dirname(package)
    traced_run = importlib.import_module(f"{os.path.basename(package)}.traced_run")
    for name in [name for name in sys.modules if name.partition(".")[0] == os.path.basename(package)]:
        del sys.modules[name]  # a module of the script's may have this name
    traced_run.run_script(sys.argv[1], sys.argv[2:])
