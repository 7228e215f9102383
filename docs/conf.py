"""The docs site. `make docs` builds it, runs the cells of its pages, and needs no network."""

from __future__ import annotations

import os
import pathlib
import re
import sys
import zlib

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))  # the extensions of this folder

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # cells print the same lines wherever the site is built

import messages
from sphinx.application import Sphinx

import unisono

project = "Unisono"
author = "the Unisono developers"
version = release = unisono.__version__
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
exclude_patterns = ["_static"]
nitpicky = True
nitpick_ignore_regex = [  # names of types that have no page: ours, and those of signatures that Sphinx does not evaluate
    ("py:class", r"\w+"),
    ("py:class", r"unisono\._src\..+"),
    ("py:class", r"keras\.(src\.backend\.)?Variable"),
]

# Pages.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
highlight_language = "none"  # of blocks that name none: outputs and drawings
suppress_warnings = ["mystnb.unknown_mime_type"]

# Cells. Each page runs in a Python and a folder of its own; an error ends the build.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

# The reference.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def write_inventories(folder: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Write the inventories of `inventories/` in Sphinx' format, and return what intersphinx takes.

    An inventory is a text file: the address of a site, then a line for each name that a page links to: the name, its role, its place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for text in sorted((HERE / "inventories").glob("*.txt")):
        address, *lines = text.read_text().split("\n")
        entries = "".join(f"{name} {role} 1 {place} -\n" for name, role, place in map(str.split, filter(None, lines)))
        head = f"# Sphinx inventory version 2\n# Project: {text.stem}\n# Version: \n# The remainder of this file is compressed using zlib.\n"
        inventory = folder / f"{text.stem}.inv"
        inventory.write_bytes(head.encode() + zlib.compress(entries.encode()))
        mapping[text.stem] = (address, str(inventory))
    return mapping


def show_errors_alone(folder: pathlib.Path) -> None:
    """Let the kernel of the cells show the text of an error, without the lines of our source and their paths."""
    profile = folder / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipython_config.py").write_text('get_config().InteractiveShell.xmode = "Minimal"\n')
    os.environ["IPYTHONDIR"] = str(folder)


show_errors_alone(HERE.parent / "out" / "ipython")
intersphinx_mapping = write_inventories(HERE.parent / "out" / "inventories")

# The look.
html_theme = "furo"
html_title = f"Unisono {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"


def setup(app: Sphinx) -> None:
    app.connect("source-read", show_results)
    app.connect("source-read", show_messages)


def show_results(app: Sphinx, page: str, source: list[str]) -> None:
    """Show the results of the benchmarks, which lie beside this folder, as a page of the site, and let links lead to it."""
    if page == "results":
        results = (HERE.parent / "benchmarks" / "RESULTS.md").read_text()
        source[0] = re.sub(r"\]\((?!\w+:)", "](../benchmarks/", results)
    else:
        source[0] = source[0].replace("](../benchmarks/RESULTS.md", "](results.md")


def show_messages(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the messages of the source into their page."""
    if page == "messages":
        source[0] = source[0].replace("<!-- messages -->", messages.make_list())
