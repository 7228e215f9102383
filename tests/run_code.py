"""Runs the Python that it is given: launchers start scripts."""

import sys

exec(sys.argv[1])
