// Products of two matrices, each of which may be read transposed.
#include "arguments.h"
#include "product.h"

namespace unisono {

// left: [rows][depth], or [depth][rows] if `is_left_transposed`. right: [depth][columns], or [columns][depth] if `is_right_transposed`.
static ffi::Error Multiply(ffi::ThreadPool pool, Array left, Array right, Result result, bool is_left_transposed, bool is_right_transposed) {
  if (left.dimensions().size() != 2 || right.dimensions().size() != 2)
    return ffi::Error::InvalidArgument("A product takes two matrices.");
  const int64_t rows = left.dimensions()[is_left_transposed];
  const int64_t depth = left.dimensions()[!is_left_transposed];
  const int64_t columns = right.dimensions()[!is_right_transposed];
  if (right.dimensions()[is_right_transposed] != depth) return ffi::Error::InvalidArgument("The matrices of a product do not fit.");
  const float* a = left.typed_data();
  const float* b = right.typed_data();
  if (is_left_transposed && is_right_transposed)
    return ffi::Error::InvalidArgument("Write the product of two transposed matrices as a transposed product.");
  return run_kernel("unisono_multiply", [&] {
    if (is_left_transposed)
      return multiply_transposed(
          pool, {depth, rows, columns},
          [&](int64_t first, int64_t count, int64_t k0, int64_t k1, float* to, int64_t distance) {
            for (int64_t i = 0; i < count; i++) copy(a + (first + i) * rows + k0, k1 - k0, to + i * distance);
          },
          b, open_result(result));
    multiply(
        pool, {rows, depth, columns},
        [&](int64_t first, int64_t count, int64_t k0, int64_t k1, float* to, int64_t distance) {
          for (int64_t i = 0; i < count; i++) copy(a + (first + i) * depth + k0, k1 - k0, to + i * distance);
        },
        [&](int64_t panel, float* to) {
          if (is_right_transposed)
            pack_transposed_panel(b, depth, columns, panel, to);
          else
            pack_panel(b, depth, columns, panel, to);
        },
        open_result(result));
  });
}

}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_multiply, unisono::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<unisono::Array>()
                                  .Arg<unisono::Array>()
                                  .Ret<unisono::Array>()
                                  .Attr<bool>("is_left_transposed")
                                  .Attr<bool>("is_right_transposed"));
#pragma GCC visibility pop
