"""Convolutions and poolings as products, and in kernels."""
