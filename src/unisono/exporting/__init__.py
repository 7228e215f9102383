"""Models as files that run without their code: written as StableHLO, SavedModel or ONNX, and loaded again as layers."""

from unisono.exporting.formats import export as export
from unisono.exporting.formats import load_exported as load_exported
