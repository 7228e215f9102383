"""The kernels that this process uses; importing this file loads them."""

from __future__ import annotations

from unisono._src.kernels.native.library import Kernels, load_kernels

native: Kernels = load_kernels()
