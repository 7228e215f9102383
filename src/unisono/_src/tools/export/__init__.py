"""Models as files that run without the models' code. They are written as StableHLO, SavedModel or ONNX, and loaded as layers."""

from unisono._src.tools.export.formats import export as export
from unisono._src.tools.export.formats import load_exported as load_exported
