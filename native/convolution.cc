// Convolutions over two dimensions and their gradients by the kernel: by Winograd's algorithm where it is faster, else as a product.
#include "arguments.h"
#include "epilogue.h"
#include "transposed_product.h"
#include "winograd.h"

namespace unisono {

// Writes columns of the weights as a panel, in the order [taps.y][taps.x][ins].
static void pack_weights(const Geometry& g, Weights kernel, int64_t panel, float* to) {
  if (!kernel.is_reversed) {
    pack_panel(kernel.values, g.depth(), g.outs, panel, to);
    return;
  }
  const int64_t taps = g.taps.y * g.taps.x;
  for (int64_t tap = 0; tap < taps; tap++)
    pack_transposed_panel(kernel.values + (taps - 1 - tap) * g.ins * g.outs, g.ins, g.outs, panel, to + tap * g.ins * TILE_COLUMNS);
}

static void convolve_as_product(ffi::ThreadPool& pool, const Geometry& g, const float* input, Weights kernel, const Epilogue& epilogue,
                                float* output) {
  multiply(
      pool, {g.pixels(), g.depth(), g.outs},
      [&](int64_t first, int64_t count, int64_t k0, int64_t k1, float* to, int64_t distance) {
        read_pixels(g, input, first, count, k0, k1, to, distance);
      },
      [&](int64_t panel, float* to) { pack_weights(g, kernel, panel, to); }, {epilogue}, output);
}

static void sum_kernel_gradient(ffi::ThreadPool& pool, const Geometry& g, const float* input, const float* gradient, float* result) {
  multiply_transposed(
      pool, {g.pixels(), g.depth(), g.outs},
      [&](int64_t first, int64_t count, int64_t k0, int64_t k1, float* to, int64_t distance) {
        read_pixels(g, input, first, count, k0, k1, to, distance);
      },
      gradient, false, result);
}

static ffi::Error convolve(ffi::ThreadPool& pool, Array input, Array kernel, const Epilogue& epilogue, Result& output, Integers strides,
                           Integers padding, Integers dilation, bool is_reversed) {
  const auto sizes = kernel.dimensions();
  if (sizes.size() != 4) return ffi::Error::InvalidArgument("A kernel has four dimensions.");
  const int64_t in_order[] = {sizes[0], sizes[1], sizes[is_reversed ? 3 : 2], sizes[is_reversed ? 2 : 3]};
  const auto geometry =
      read_geometry(input.dimensions(), ffi::Span<const int64_t>(in_order, 4), output->dimensions(), strides, padding, dilation);
  if (geometry.has_error()) return geometry.error();
  const Geometry& g = *geometry;
  const Weights weights{kernel.typed_data(), is_reversed};
  return run_kernel("unisono_convolve", [&] {
    if (is_for_winograd(g))
      convolve_by_winograd(pool, g, input.typed_data(), weights, epilogue, open_result(output));
    else
      convolve_as_product(pool, g, input.typed_data(), weights, epilogue, open_result(output));
  });
}

// is_reversed: the kernel is (y, x, out, in), with the last tap first.
static ffi::Error Convolve(ffi::ThreadPool pool, Array input, Array kernel, Result output, Integers strides, Integers padding,
                           Integers dilation, bool is_reversed) {
  return convolve(pool, input, kernel, {}, output, strides, padding, dilation, is_reversed);
}

// The bias has a number for each feature of the output. is_rectified: what is negative becomes zero.
static ffi::Error ConvolveWithBias(ffi::ThreadPool pool, Array input, Array kernel, Array bias, Result output, bool is_rectified,
                                   Integers strides, Integers padding, Integers dilation) {
  if (static_cast<int64_t>(bias.element_count()) != output->dimensions().back())
    return ffi::Error::InvalidArgument("A bias has a number for each feature.");
  return convolve(pool, input, kernel, {bias.typed_data(), is_rectified}, output, strides, padding, dilation, false);
}

static ffi::Error KernelGradient(ffi::ThreadPool pool, Array input, Array gradient, Result result, Integers strides, Integers padding,
                                 Integers dilation) {
  const auto geometry =
      read_geometry(input.dimensions(), result->dimensions(), gradient.dimensions(), strides, padding, dilation);
  if (geometry.has_error()) return geometry.error();
  const Geometry& g = *geometry;
  return run_kernel("unisono_convolution_kernel_gradient", [&] {
    if (!is_for_winograd(g) || !find_kernel_gradient_by_winograd(pool, g, input.typed_data(), gradient.typed_data(), result->typed_data()))
      sum_kernel_gradient(pool, g, input.typed_data(), gradient.typed_data(), result->typed_data());
  });
}

}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_convolve, unisono::Convolve, unisono::bind_convolution().Attr<bool>("is_reversed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_convolve_with_bias, unisono::ConvolveWithBias, unisono::with_window(unisono::bind_product_with_bias()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_convolution_kernel_gradient, unisono::KernelGradient, unisono::bind_convolution());
#pragma GCC visibility pop
