"""Rewrite programs into forms that XLA runs fast, in loops too.

Attention, normalizations and last results of loops are rewritten before differentiation (`before_gradient`), all else after it (`rewriting`).
Convolutions, poolings, sums and their gradients are rewritten for speed (`benchmarks/rewrites.py` measures kinds of convolutions and
pools); matmuls, convolutions and Fourier transforms also for their bits, which then do not depend on the number of threads. Not
rewritten are:

- Convolutions that the fast kernel takes as they are (most forward passes), and convolutions of no or more than three dimensions.
- More than 64 groups of more than four pairs of features: brought to the fast layout, but left to XLA's kernel as they are.
- Inputs with zeros between their elements (strided gradients, transposed convolutions) that also have a stride or a dilated
  kernel (no Keras layer makes them), or more than 64 phases (patches of 16 x 16, whose gradient by the input is seldom
  needed): brought to the fast layout, together with their zeros.
- Gradients of maxima over more than 49 elements, and poolings over more than 64: unrolled they are as slow as before.
- Arrays of float64 and of complex numbers, except in Fourier transforms: YNNPACK takes none, and Eigen computes their matmuls.
- Poolings of dilated windows and of integers, and empty arrays: no layer makes them in a training step.
- Jaxprs inside other equations than those of `equations.NESTED`, such as `shard_map` and `custom_linear_solve`.
- On GPU everything except the gradients of maxima over windows that do not overlap; on TPU everything. Their compilers choose layouts
  inside loops as well.
"""
