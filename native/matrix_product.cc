// The product of two matrices, with a bias and a rectifier, or with a gate.
#include "arguments.h"
#include "epilogue.h"
#include "product.h"

namespace unisono {

// left: [rows][depth]. right: [depth][columns]; [columns][depth] if it is transposed. result: [rows][columns].
static ffi::Error multiply_matrices(const char* name, ffi::ThreadPool& pool, Array left, Array right, const ProductEpilogue& epilogue, Result& result,
                                    bool is_transposed) {
  const auto a = left.dimensions(), b = right.dimensions(), c = result->dimensions();
  if (a.size() != 2 || b.size() != 2 || c.size() != 2 || a[1] != b[is_transposed ? 1 : 0] || c[0] != a[0] || c[1] != b[is_transposed ? 0 : 1])
    return ffi::Error::InvalidArgument("A product takes two matrices: the second has as many rows as the first has columns, or as many columns if it is transposed.");
  const Sizes sizes{a[0], a[1], c[1]};
  return run_kernel(name, [&] {
    multiply(
        pool, sizes, MatrixRows{left.typed_data(), sizes.depth},
        [&](int64_t panel, float* to) {
          if (is_transposed)
            pack_transposed_panel(right.typed_data(), sizes.depth, sizes.columns, panel, to);
          else
            pack_panel(right.typed_data(), sizes.depth, sizes.columns, panel, to);
        },
        epilogue, open_result(result));
  });
}

static ffi::Error Multiply(ffi::ThreadPool pool, Array left, Array right, Result result, bool is_transposed) {
  return multiply_matrices("unisono_multiply", pool, left, right, {}, result, is_transposed);
}

// Where the gate, which has the sizes of the result, is not positive, the result is zero.
static ffi::Error MultiplyGated(ffi::ThreadPool pool, Array left, Array right, Array gate, Result result, bool is_transposed) {
  if (gate.element_count() != result->element_count()) return ffi::Error::InvalidArgument("A gate has a number for each number of a product.");
  return multiply_matrices("unisono_multiply_gated", pool, left, right, {{}, gate.typed_data()}, result, is_transposed);
}

// The bias has a number for each column. is_rectified: what is negative becomes zero.
static ffi::Error MultiplyWithBias(ffi::ThreadPool pool, Array left, Array right, Array bias, Result result, bool is_rectified) {
  if (result->dimensions().size() != 2 || static_cast<int64_t>(bias.element_count()) != result->dimensions()[1])
    return ffi::Error::InvalidArgument("A bias has a number for each column of a matrix.");
  return multiply_matrices("unisono_multiply_with_bias", pool, left, right, {{bias.typed_data(), is_rectified}}, result, false);
}

}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_multiply, unisono::Multiply, unisono::bind_product().Attr<bool>("is_transposed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_multiply_gated, unisono::MultiplyGated, unisono::bind_product_and_array().Attr<bool>("is_transposed"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_multiply_with_bias, unisono::MultiplyWithBias, unisono::bind_product_with_bias());
#pragma GCC visibility pop
