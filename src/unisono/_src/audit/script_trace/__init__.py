"""A run of a script whose lines and training are noted.

The files import the standard library alone, so that the script finds a Python in which nothing else was imported, and each other by relative
imports, since the run has this package under its bare name. `training_hooks` and `training_notes` are imported after Unisono.
"""
