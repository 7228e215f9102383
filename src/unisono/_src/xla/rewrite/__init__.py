"""Programs in the forms that XLA runs fast, in loops too, after differentiation.

Convolutions, poolings, sums and their gradients for speed (`benchmarks/rewrites.py` measures what each rule brings); products,
convolutions and Fourier transforms also for their bits, which then do not depend on the number of threads. What is left as it is, and why:

- Convolutions that the fast kernel takes as they are (most forward passes), and those of no or more than three dimensions.
- Groups beyond 64 of more than four pairs of features: brought to the fast layout, but left to XLA's kernel as they are.
- Inputs with zeros between their elements (strided gradients, transposed convolutions) that also have a stride or a dilated
  kernel (no Keras layer makes them), or more than 64 phases (patches of 16 x 16, whose gradient by the input is seldom
  needed): brought to the fast layout, with their zeros.
- Gradients of maxima over more than 49 elements, and poolings over more than 64: unrolled they are as slow as they were.
- Arrays of float64 and of complex numbers, but for Fourier transforms: YNNPACK takes none, so that Eigen has their products.
- Poolings of dilated windows and of integers, and empty arrays: no layer of a training step makes them.
- Programs inside other equations than those of `program.NESTED`, such as `shard_map` and `custom_linear_solve`.
- On GPU all but the gradients of maxima over windows that do not overlap; on TPU everything. Their compilers choose layouts
  inside loops as well.
"""

from unisono._src.xla.rewrite.replace import rewritten

__all__ = ["rewritten"]
