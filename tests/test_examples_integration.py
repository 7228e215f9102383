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
