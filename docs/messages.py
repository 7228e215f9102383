"""The list of messages.md: every error and warning of the source, and the test that shows it.

    python docs/messages.py

prints the messages that no test shows. The docs site writes the list into its page.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "src" / "unisono" / "_src"
HOLE = "…"
"""What stands for a value in a message."""
SHORTEST = 6
"""The fewest letters of a part of a text that count."""
LEAST_FIT = 16
"""The fewest letters of a message that a test has to quote."""

NEVER_SHOWN = {"NotByRowsError"}
"""Errors that the source catches by itself."""


class Message(NamedTuple):
    """An error or a warning."""

    kind: str
    text: str
    module: str


def list_messages() -> list[Message]:
    """Return the messages of the source, in the order of its files."""
    found: dict[tuple[str, str], Message] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = str(path.relative_to(SOURCE).with_suffix(""))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and (kind := kind_of(node.func)):
                text = " ".join(text_of(node.args[0]).split())
                if len(re.sub(rf"[\W{HOLE}]", "", text)) >= SHORTEST:
                    found.setdefault((text, module), Message(kind, text, module))
    return list(found.values())


def list_texts() -> list[str]:
    """Return all texts of the source, also those that are no message or a part of one."""
    trees = (ast.parse(path.read_text()) for path in [SOURCE.parent / "__init__.py", *sorted(SOURCE.rglob("*.py"))])
    return [text_of(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr)]


def kind_of(call: ast.expr) -> str | None:
    """Return the kind of message that a call makes: the class of an error, or "warning"."""
    name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
    if name in NEVER_SHOWN:
        return None
    if name in ("warn", "warn_once"):
        return "warning"
    return name if re.search(r"(Error|Interrupt)$", name) else None


def text_of(node: ast.expr) -> str:
    """Return the text of an expression, with a hole for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return HOLE


@functools.cache
def texts_of_tests() -> dict[str, list[str]]:
    """Return the texts in tests, by "file::test" or file."""
    texts: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT / "tests"))
        for node in ast.parse(path.read_text()).body:
            place = f"{name}::{node.name}" if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") else name
            constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
            sentences = (text for text in constants if " " in text and len(text) >= SHORTEST)  # one word alone quotes nothing
            texts.setdefault(place, []).extend(" ".join(text.split()) for text in sentences)
    return texts


@functools.cache
def tests_of_messages() -> dict[Message, str]:
    """Return the test that shows each message: its text, or pattern, fits this message better than any other, and fits no test better."""
    messages = list_messages()
    best: dict[Message, tuple[int, str]] = {}
    for place, texts in texts_of_tests().items():
        for parts in {split_pattern(text) for text in texts}:
            scores = [sum(measure_fit(part, message.text) for part in parts) for message in messages]
            highest = max(scores, default=0)
            if highest >= LEAST_FIT and scores.count(highest) == 1:
                message = messages[scores.index(highest)]
                best[message] = max(best.get(message, (0, "")), (highest, place))
    return {message: place for message, (_, place) in best.items()}


def split_pattern(text: str) -> tuple[str, ...]:
    """Return the parts of a pattern, or of a text with values, that can stand in a message as they are."""
    plain = re.sub(r"\\([^\w\s])", r"\1", text)
    return tuple(part for part in re.split(r"\.\*\??|\\w\+|\\d\+|\[.+?\][+*]?|\n", plain) if len(part) >= SHORTEST)


def measure_fit(part: str, message: str) -> int:
    """Return how many letters of the message the part of a test's text has; values of the test may stand for its holes."""
    if part in message:
        return len(part)
    return sum(len(piece) for piece in message.split(HOLE) if len(piece) >= LEAST_FIT and piece in part) if HOLE in message else 0


def make_list() -> str:
    """Return the messages in Markdown: a section for each room of the source. A table would be wider than a phone."""
    lines: list[str] = []
    room = ""
    for message in list_messages():
        if (parent := message.module.rpartition("/")[0] or message.module) != room:
            room = parent
            lines += ["", f"### `{room}`", ""]
        test = tests_of_messages().get(message)
        text = re.sub(r"([\\`*_\[\]<>|{}$])", r"\\\1", message.text)
        shown = f", shown by `{test}`" if test else ""
        lines += [f"- {text}\\", f"  *{message.kind} of `{message.module}`{shown}*"]
    return "\n".join(lines)


if __name__ == "__main__":
    messages = list_messages()
    missing = [message for message in messages if message not in tests_of_messages()]
    for one in missing:
        print(f"{one.module}: {one.kind}: {one.text}")
    print(f"{len(messages)} messages, {len(missing)} without a test that quotes them")
