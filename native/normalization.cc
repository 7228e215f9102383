// The normalization of rows, each by its mean and its variance, with a scale and an offset for each element of a row; and its gradient.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "arguments.h"
#include "elementwise.h"
#include "pieces.h"
#include "vectors.h"

namespace unisono {
namespace {

constexpr int64_t LEAST_ROWS_OF_A_PIECE = 32;
constexpr int64_t MOST_PIECES = 64;

// What is kept of a row for the gradient.
struct RowNumbers {
  float mean;
  float inverse;  // one over the deviation
};

// Rows that are normalized, cut in pieces by their number alone.
struct RowSizes {
  int64_t rows;
  int64_t width;
  int64_t rows_of_a_piece() const { return std::max(LEAST_ROWS_OF_A_PIECE, divide_up(rows, MOST_PIECES)); }
  int64_t pieces() const { return divide_up(rows, rows_of_a_piece()); }
};

// Sums of a row have a part for each of so many elements, on every level of instructions. So the level does not change a bit.
constexpr int PARTS = 64;
constexpr int VECTORS = PARTS / LANES;

struct Sum {
  Vector parts[VECTORS] = {};
  float total() const {
    float values[PARTS];
    for (int vector = 0; vector < VECTORS; vector++) store(values + vector * LANES, parts[vector]);
    for (int half = PARTS / 2; half > 0; half /= 2)
      for (int part = 0; part < half; part++) values[part] += values[part + half];
    return values[0];
  }
};

// Elements of a row; lanes behind its end hold `rest`.
Vector read(const float* from, int64_t count, float rest = 0.0f) {
  if (count == LANES) return load(from);
  Vector value = splat(rest);
  std::memcpy(&value, from, static_cast<size_t>(count) * sizeof(float));
  return value;
}

// Calls f(first element, elements, vector of a sum) for each vector of a row.
template <class Function>
void for_each_vector(int64_t width, const Function& f) {
  int64_t i = 0;
  for (; i + PARTS <= width; i += PARTS)
    for (int vector = 0; vector < VECTORS; vector++) f(i + vector * LANES, LANES, vector);
  for (int vector = 0; i < width; i += LANES, vector++) f(i, std::min<int64_t>(LANES, width - i), vector);
}

// What lies behind the end of a row differs from the mean by nothing, and so adds nothing to a sum.
RowNumbers normalize_row(const float* x, const float* scale, const float* offset, float epsilon, int64_t width, float* y) {
  const auto size = static_cast<float>(width);
  Sum sum;
  for_each_vector(width, [&](int64_t i, int64_t count, int vector) { sum.parts[vector] += read(x + i, count); });
  const float mean = sum.total() / size;
  Sum squares;
  for_each_vector(width, [&](int64_t i, int64_t count, int vector) {
    const Vector difference = read(x + i, count, mean) - mean;
    squares.parts[vector] += difference * difference;
  });
  const float inverse = 1.0f / std::sqrt(squares.total() / size + epsilon);
  for_each_vector(width, [&](int64_t i, int64_t count, int) {
    store_lanes(y + i, (read(x + i, count) - mean) * (inverse * read(scale + i, count)) + read(offset + i, count), count);
  });
  return {mean, inverse};
}

// Writes the gradient by a row, and adds what the row adds to the gradients by scale and offset.
void differentiate_row(const float* x, const float* scale, RowNumbers row, const float* by_y, int64_t width, float* by_x, float* by_scale,
                       float* by_offset) {
  const auto size = static_cast<float>(width);
  Sum sum, products;
  for_each_vector(width, [&](int64_t i, int64_t count, int vector) {
    const Vector normal = (read(x + i, count, row.mean) - row.mean) * row.inverse;
    const Vector gradient = read(by_y + i, count);
    const Vector scaled = gradient * read(scale + i, count);
    sum.parts[vector] += scaled;
    products.parts[vector] += scaled * normal;
    store_lanes(by_scale + i, read(by_scale + i, count) + gradient * normal, count);
    store_lanes(by_offset + i, read(by_offset + i, count) + gradient, count);
  });
  const float mean = sum.total() / size;
  const float slope = products.total() / size;
  for_each_vector(width, [&](int64_t i, int64_t count, int) {
    const Vector normal = (read(x + i, count) - row.mean) * row.inverse;
    store_lanes(by_x + i, row.inverse * (read(by_y + i, count) * read(scale + i, count) - mean - normal * slope), count);
  });
}

bool is_of_rows(const Array& x, const Array& scale) {
  return x.dimensions().size() > 0 && static_cast<int64_t>(scale.element_count()) == x.dimensions().back() && scale.element_count() > 0;
}

RowSizes measure_rows(const Array& x) {
  const int64_t width = x.dimensions().back();
  return {static_cast<int64_t>(x.element_count()) / width, width};
}

// x: [rows][width], also in more dimensions. scale, offset: [width]. y: as x. numbers: [rows][2].
ffi::Error NormalizeRows(ffi::ThreadPool pool, Array x, Array scale, Array offset, Result y, Result numbers, float epsilon) {
  if (!is_of_rows(x, scale) || offset.element_count() != scale.element_count() || y->element_count() != x.element_count() ||
      static_cast<int64_t>(numbers->element_count()) != 2 * measure_rows(x).rows)
    return ffi::Error::InvalidArgument("Rows have as many elements as their scale and their offset.");
  const RowSizes sizes = measure_rows(x);
  float* results = open_result(y);
  auto* kept = reinterpret_cast<RowNumbers*>(numbers->typed_data());
  return run_kernel("unisono_normalize_rows", [&] {
    run_pieces(pool, sizes.pieces(), [&](int64_t piece) {
      const int64_t first = piece * sizes.rows_of_a_piece();
      const int64_t last = std::min(sizes.rows, first + sizes.rows_of_a_piece());
      for (int64_t row = first; row < last; row++) {
        const int64_t place = row * sizes.width;
        kept[row] = normalize_row(x.typed_data() + place, scale.typed_data(), offset.typed_data(), epsilon, sizes.width, results + place);
      }
    });
  });
}

// The gradients by x, and by scale and offset: sums over the rows, of which each piece has its own.
ffi::Error NormalizeRowsGradient(ffi::ThreadPool pool, Array x, Array scale, Array numbers, Array by_y, Result by_x, Result by_scale,
                                 Result by_offset) {
  if (!is_of_rows(x, scale) || static_cast<int64_t>(numbers.element_count()) != 2 * measure_rows(x).rows ||
      by_y.element_count() != x.element_count() || by_x->element_count() != x.element_count() ||
      by_scale->element_count() != scale.element_count() || by_offset->element_count() != scale.element_count())
    return ffi::Error::InvalidArgument("Gradients have the sizes of what they are taken by.");
  const RowSizes sizes = measure_rows(x);
  float* results = open_result(by_x);
  const auto* kept = reinterpret_cast<const RowNumbers*>(numbers.typed_data());
  return run_kernel("unisono_normalize_rows_gradient", [&] {
    static thread_local Scratch scratch;
    float* const sums = scratch.get(sizes.pieces() * 2 * sizes.width);
    run_pieces(pool, sizes.pieces(), [&](int64_t piece) {
      float* const sums_of_piece = sums + piece * 2 * sizes.width;
      std::fill(sums_of_piece, sums_of_piece + 2 * sizes.width, 0.0f);
      const int64_t first = piece * sizes.rows_of_a_piece();
      const int64_t last = std::min(sizes.rows, first + sizes.rows_of_a_piece());
      for (int64_t row = first; row < last; row++) {
        const int64_t place = row * sizes.width;
        differentiate_row(x.typed_data() + place, scale.typed_data(), kept[row], by_y.typed_data() + place, sizes.width, results + place,
                          sums_of_piece, sums_of_piece + sizes.width);
      }
    });
    for (int64_t i = 0; i < sizes.width; i++) {
      float of_scale = 0.0f, of_offset = 0.0f;
      for (int64_t piece = 0; piece < sizes.pieces(); piece++) {
        of_scale += sums[piece * 2 * sizes.width + i];
        of_offset += sums[(piece * 2 + 1) * sizes.width + i];
      }
      by_scale->typed_data()[i] = of_scale;
      by_offset->typed_data()[i] = of_offset;
    }
  });
}

}  // namespace
}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    unisono_normalize_rows, unisono::NormalizeRows,
    unisono::bind_product_and_array().Ret<unisono::Array>().Attr<float>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    unisono_normalize_rows_gradient, unisono::NormalizeRowsGradient,
    unisono::bind_four_arrays().Ret<unisono::Array>().Ret<unisono::Array>());
#pragma GCC visibility pop
