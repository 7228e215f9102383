// The product of transposed matrices and a matrix.
#include "transposed_product.h"

#include "arguments.h"

namespace unisono {
namespace {

constexpr int64_t NARROW = 16;  // most columns: a half of a panel of the widest vectors

// Writes the sums of the rows of a narrow matrix.
void add_up_rows(ffi::ThreadPool& pool, const MatrixRows& matrix, int64_t rows, float* to) {
  const int64_t parts = std::clamp<int64_t>(rows / LEAST_SUMMED, 1, ENOUGH_PIECES);
  float sums[ENOUGH_PIECES][NARROW] = {};
  run_pieces(pool, parts, [&](int64_t part) {
    const Range summed = take_part(rows, 1, part, parts);
    for (int64_t first = summed.begin; first < summed.end; first += SUMMED_AT_ONCE) {
      float block[NARROW] = {};
      for (int64_t row = first; row < std::min(summed.end, first + SUMMED_AT_ONCE); row++)
        for (int64_t j = 0; j < matrix.columns; j++) block[j] += matrix.values[row * matrix.columns + j];
      for (int64_t j = 0; j < NARROW; j++) sums[part][j] += block[j];
    }
  });
  for (int64_t j = 0; j < matrix.columns; j++) {
    to[j] = sums[0][j];
    for (int64_t part = 1; part < parts; part++) to[j] += sums[part][j];
  }
}

// The product with a narrow matrix on the right, computed the other way round and transposed: its columns would leave most of a panel empty.
void multiply_by_narrow(ffi::ThreadPool& pool, const Sizes& sizes, const MatrixRows& left, const MatrixRows& right, bool with_sums, float* c) {
  static thread_local Scratch scratch;
  const int64_t depth = sizes.depth, columns = sizes.columns;
  float* const turned = scratch.get(columns * depth);
  multiply_transposed(pool, {sizes.rows, columns, depth}, MatricesBeside{{right}}, left.values, false, turned);
  for (int64_t i = 0; i < depth; i++)
    for (int64_t j = 0; j < columns; j++) c[i * columns + j] = turned[j * depth + i];
  if (with_sums) add_up_rows(pool, right, sizes.rows, c + depth * columns);
}

}  // namespace

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
  return run_kernel("unisono_multiply_transposed", [&] {
    float* const c = open_result(result);
    if (sizes.columns <= NARROW && sizes.depth > sizes.columns && left.matrices.size() == 1)
      multiply_by_narrow(pool, sizes, left.matrices[0], {right.typed_data(), sizes.columns}, with_sums, c);
    else
      multiply_transposed(pool, sizes, left, right.typed_data(), with_sums, c);
  });
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
