"""The examples in fresh processes, as a user starts them."""

import pathlib
import re

from processes import python

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def test_one_line_changes_the_placement_and_no_bit():
    finished = python(str(EXAMPLES / "one_line.py"), timeout=500)
    assert finished.returncode == 0, finished.stderr
    for devices in (4, 2, 1):
        assert f"4 replicas on {devices} cpu device" in finished.stdout
    for kind in ("sequential", "functional", "Subclassed"):
        lines = re.findall(rf"{kind} +evaluate ([\d.]+)% +predict ([\d.]+)% +([0-9a-f]{{32}})", finished.stdout)
        assert len(lines) == 3
        assert len(set(lines)) == 1
        evaluated, predicted, _ = lines[0]
        assert evaluated == predicted
        assert float(evaluated) > 95


def test_half_precision_prints_its_dtypes():
    finished = python(str(EXAMPLES / "mixed_precision.py"))
    assert finished.returncode == 0, finished.stderr
    bfloat16, float16 = finished.stdout.split("mixed_bfloat16\n")[1].split("mixed_float16\n")
    for half, text in (("bfloat16", bfloat16), ("float16", float16)):
        assert f"hidden computes in {half}, its variables are float32" in text
        assert "logits computes in float32, its variables are float32" in text
        lines = re.findall(r"on [12]: accuracy ([\d.]+)%, ([0-9a-f]{32})", text)
        assert len(lines) == 2
        assert lines[0] == lines[1]
        assert float(lines[0][0]) > 95
    assert "no loss scale" in bfloat16
    assert re.search(r"loss scale \d+", float16)
