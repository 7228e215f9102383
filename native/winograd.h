// Convolutions with 3 x 3 kernels and strides of 1, by Winograd's F(2 x 2, 3 x 3): 2.25 times fewer products than a direct convolution.
//
// A tile of 4 x 4 of the input gives 2 x 2 of the output. Input, kernel and output are transformed with additions; each of the 16 places of
// the tiles is then a product of matrices.
#pragma once

#include "convolution.h"
#include "epilogue.h"
#include "pieces.h"

namespace unisono {

// Returns whether the algorithm takes the convolution, and is faster for it than a product.
bool is_for_winograd(const Geometry& g);

// Outputs that are not finite are computed again directly: in a tile, an infinity or a NaN reaches more outputs than in a direct convolution.
void convolve_by_winograd(ffi::ThreadPool& pool, const Geometry& g, const float* input, Weights kernel, const Epilogue& epilogue, float* output);

// Returns false, with nothing useful in `result`, if some of the gradient is not finite: it must be computed directly.
bool find_kernel_gradient_by_winograd(ffi::ThreadPool& pool, const Geometry& g, const float* input, const float* gradient, float* result);

}  // namespace unisono
