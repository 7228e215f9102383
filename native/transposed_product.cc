// The product of a transposed matrix and a matrix.
#include "transposed_product.h"

#include "arguments.h"

namespace unisono {

// left: [rows][depth]. right: [rows][columns]. result: [depth][columns].
static ffi::Error MultiplyTransposed(ffi::ThreadPool pool, Array left, Array right, Result result) {
  if (left.dimensions().size() != 2 || right.dimensions().size() != 2 || left.dimensions()[0] != right.dimensions()[0])
    return ffi::Error::InvalidArgument("The product of a transposed matrix and a matrix takes two matrices with the same number of rows.");
  const Sizes sizes{left.dimensions()[0], left.dimensions()[1], right.dimensions()[1]};
  if (static_cast<int64_t>(result->element_count()) != sizes.depth * sizes.columns)
    return ffi::Error::InvalidArgument("The result of a product has a row for each column of the left matrix.");
  return run_kernel("unisono_multiply_transposed", [&] {
    multiply_transposed(pool, sizes, MatrixRows{left.typed_data(), sizes.depth}, right.typed_data(), open_result(result));
  });
}

}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_multiply_transposed, unisono::MultiplyTransposed, unisono::bind_product());
#pragma GCC visibility pop
