"""The programs of two processes are compared where they have the same shapes, and variables find their layers."""

from __future__ import annotations

from typing import Any

from unisono._src.audit.program_comparison import find_equation, find_layer_of_variable
from unisono._src.audit.trace_comparison import ProcessTrace


def make_equation(rows: int, constant: str) -> dict[str, Any]:
    return {
        "primitive": "mul",
        "operands": ["", constant],
        "params": {},
        "shapes": [f"float32[{rows},3]", "float32[]", f"float32[{rows},3]"],
        "lines": [["train.py", 29, "call"]],
    }


def make_trace(*programs: tuple[int, str]) -> ProcessTrace:
    content = [{"name": "train", "step": 0, "equations": [make_equation(*program)]} for program in programs]
    return ProcessTrace({"programs": content})


def test_a_process_with_fewer_replicas_is_compared_by_the_shapes_of_its_programs():
    one = make_trace((6, "1.1"), (5, "1.2"))
    assert find_equation(one, make_trace((5, "1.2")), 0) is None
    found = find_equation(one, make_trace((5, "1.1")), 0)
    assert found is not None
    assert found.equation["operands"] == ["", "1.2"]
    assert not found.has_other_shapes


def test_programs_of_other_shapes_are_compared_in_order():
    found = find_equation(make_trace((6, "1.1"), (5, "1.2")), make_trace((6, "1.1"), (4, "1.2")), 0)
    assert found is not None
    assert found.has_other_shapes
    assert found.equation["shapes"][0] == "float32[5,3]"


def test_a_variable_whose_path_does_not_name_its_layer_is_of_the_layer_that_has_it():
    state = "seed_generator/seed_generator_state"
    layers = [
        {"path": "net", "is_model": True, "strays": []},
        {"path": "net/block", "is_model": False, "strays": [state]},
        {"path": "net/block/rest", "is_model": False, "strays": [state]},
        {"path": "net/block/wide", "is_model": False, "strays": []},
    ]
    assert find_layer_of_variable(state, layers) == "block/rest"
    assert find_layer_of_variable("block/wide/kernel", layers) == "block/wide"
    assert find_layer_of_variable("adam/learning_rate", layers) is None
