"""The page of messages quotes what the source says."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import types

import pytest

from sizes import cases

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def messages() -> types.ModuleType:
    """The module that makes the list."""
    spec = importlib.util.spec_from_file_location("messages", DOCS / "messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = cases(("keras/checks/",), ("",))  # each text of them is compared with each message
    texts = {place: texts for place, texts in module.texts_of_tests().items() if place.startswith(tests)}
    module.texts_of_tests = lambda: texts
    return module


def test_the_usual_messages_are_those_of_the_source(messages):
    page = (DOCS / "messages.md").read_text()
    quoted = re.findall(r"^- `(.+?)`: ", page, re.MULTILINE)
    texts = " ".join(" ".join(text.split()) for text in messages.list_texts())
    assert len(quoted) > 10
    assert [text for text in quoted if text not in texts] == []


def test_messages_are_found_with_the_tests_that_quote_them(messages):
    found = [test for message, test in messages.tests_of_messages().items() if message.text.startswith("Keras has")]
    assert found == ["keras/checks/test_refusals.py::test_a_distribution_of_keras_is_refused"]
    listed = messages.make_list()
    assert all(f"*{message.kind} of `{message.module}`" in listed for message in messages.list_messages())
    assert "shown by `keras/checks/test_refusals.py::test_a_distribution_of_keras_is_refused`" in listed


def test_the_page_has_no_table_which_would_be_wider_than_a_phone(messages):
    assert re.findall(r"^\|", (DOCS / "messages.md").read_text() + messages.make_list(), re.MULTILINE) == []
