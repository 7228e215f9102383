"""The elements of an HTML page. Whatever is put into one is escaped, unless it is an element already."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import TypeAlias


class Markup(str):
    """HTML that stands in a page as it is. Only the functions of this module make it."""

    __slots__ = ()


Content: TypeAlias = "str | int | Iterable[Content] | None"
"""What an element may contain: text, elements, and lists of these. None adds nothing."""

Attribute: TypeAlias = str | float | bool | None
"""None and False leave an attribute out, True writes its name alone."""

VOID = {"meta", "wbr"}
"""Elements that have no end."""

UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Characters that change how the text around them is read, or that no file in UTF-8 can hold."""


def make_element(tag: str, *content: Content, **attributes: Attribute) -> Markup:
    """Return an element. `class_` and `for_` are written without the underscore, `aria_label` with a hyphen."""
    start = "".join([tag, *(write_attribute(name, value) for name, value in attributes.items())])
    return Markup(f"<{start}>" if tag in VOID else f"<{start}>{join_content(*content)}</{tag}>")


def join_content(*content: Content) -> Markup:
    """Return texts and elements as one text."""
    return Markup("".join(write_content(item) for item in content))


def write_path(path: str) -> Markup:
    """Return a path as code, which may go on in another line after each "/"."""
    first, *rest = path.split("/")
    return make_element("code", first, [["/", make_element("wbr"), name] for name in rest])


def raw_style(text: str) -> Markup:
    """Return a style sheet of ours, in which nothing is quoted. Browsers do not resolve entities there, so nothing may be escaped."""
    if "<" in text:
        raise ValueError(
            f'A style sheet received "<" in {text!r}, and takes none: a browser could read the end of the element there.'
        )
    return Markup(f"<style>{text}</style>")


def show_unseen(text: str) -> str:
    """Return a text with unseen characters as Python writes them, so that a name cannot look like another one."""
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape", "backslashreplace").decode(), text)


def write_content(content: Content) -> str:
    if content is None:
        return ""
    if isinstance(content, Markup):
        return content
    if isinstance(content, str | int):
        return html.escape(show_unseen(str(content)))
    return join_content(*content)


def write_attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{html.escape(show_unseen(format(value, ".6g") if isinstance(value, float) else str(value)))}"'
