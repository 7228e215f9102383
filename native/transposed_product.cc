// The product of transposed matrices and a matrix.
#include "transposed_product.h"

#include "arguments.h"

namespace unisono {

// right: [rows][columns]. lefts: [rows][depth] each. result: [depth][columns] of the matrices, one below the other; with sums, one row more.
static ffi::Error MultiplyTransposed(ffi::ThreadPool pool, Array right, ffi::RemainingArgs lefts, Result result, bool with_sums) {
  const auto right_sizes = right.dimensions();
  if (right_sizes.size() != 2) return ffi::Error::InvalidArgument("A product of transposed matrices and a matrix takes matrices.");
  MatricesBeside left;
  for (size_t i = 0; i < lefts.size(); i++) {
    const auto matrix = lefts.get<Array>(i);
    if (!matrix.has_value() || matrix->dimensions().size() != 2 || matrix->dimensions()[0] != right_sizes[0])
      return ffi::Error::InvalidArgument("Transposed matrices have as many rows as the matrix with which they are multiplied.");
    left.matrices.push_back({matrix->typed_data(), matrix->dimensions()[1]});
  }
  const Sizes sizes{right_sizes[0], left.count_columns(), right_sizes[1]};
  if (static_cast<int64_t>(result->element_count()) != (sizes.depth + with_sums) * sizes.columns)
    return ffi::Error::InvalidArgument("The result of a product has a row for each column of the left matrices, and one for sums.");
  return run_kernel("unisono_multiply_transposed",
                    [&] { multiply_transposed(pool, sizes, left, right.typed_data(), with_sums, open_result(result)); });
}

}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_multiply_transposed, unisono::MultiplyTransposed,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<unisono::Array>()
                                  .RemainingArgs()
                                  .Ret<unisono::Array>()
                                  .Attr<bool>("with_sums"));
#pragma GCC visibility pop
