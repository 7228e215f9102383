// Sums over the rows of a matrix, for each column: what a batch normalization and its gradient need. Each array is read from memory once.
#include <algorithm>
#include <cmath>

#include "arguments.h"
#include "elementwise.h"
#include "pieces.h"
#include "vectors.h"

// Of a function that is called for each vector.
#define INLINED __attribute__((always_inline))

namespace unisono {
namespace {

constexpr int64_t MOST_PIECES = 32;
constexpr int64_t LEAST_OF_A_PIECE = 1 << 14;  // elements
constexpr int64_t MOST_OF_A_BLOCK = 1 << 14;   // elements: a block is read twice, the second time from a cache
constexpr int64_t ROWS_AT_ONCE = 8;

// Rows `first` to `last` - 1.
struct RowRange {
  int64_t first;
  int64_t last;
  int64_t count() const { return last - first; }
};

// A matrix whose rows are cut in pieces, and these in blocks, by its sizes alone.
struct Matrix {
  int64_t rows;
  int64_t columns;

  int64_t rows_of_a_piece() const { return std::max(divide_up(rows, MOST_PIECES), divide_up(LEAST_OF_A_PIECE, columns)); }
  int64_t pieces() const { return divide_up(rows, rows_of_a_piece()); }
  // The rows of some pieces, which lie one behind the other.
  RowRange range(int64_t first, int64_t last) const { return {first * rows_of_a_piece(), std::min(rows, last * rows_of_a_piece())}; }

  // A piece has about as many blocks as a block has steps: so chains of sums are short.
  int64_t rows_of_a_block() const {
    const auto steps = static_cast<int64_t>(std::sqrt(static_cast<double>(divide_up(std::min(rows, rows_of_a_piece()), ROWS_AT_ONCE))));
    return ROWS_AT_ONCE * std::max<int64_t>(1, std::min(steps, MOST_OF_A_BLOCK / columns / ROWS_AT_ONCE));
  }

  // Calls use(rows) for each block of a piece.
  template <class Use>
  void for_each_block(RowRange piece, const Use& use) const {
    for (int64_t first = piece.first; first < piece.last; first += rows_of_a_block())
      use(RowRange{first, std::min(piece.last, first + rows_of_a_block())});
  }
};

// Some numbers for each column: columns[i] points to the number i of each.
struct ColumnNumbers {
  float* values;
  int64_t columns;
  float* operator[](int64_t i) const { return values + i * columns; }
};

// Calls use(first column, columns) for each vector of a row.
template <class Use>
INLINED inline void for_each_vector(int64_t columns, const Use& use) {
  int64_t j = 0;
  for (; j + LANES <= columns; j += LANES) use(j, static_cast<int64_t>(LANES));
  if (j < columns) use(j, columns - j);
}

// Vectors that are added up side by side.
template <int COUNT>
struct Terms {
  Vector vectors[COUNT];
  Terms operator+(const Terms& other) const {
    Terms sum;
    for (int i = 0; i < COUNT; i++) sum.vectors[i] = vectors[i] + other.vectors[i];
    return sum;
  }
};

// Adds term(0) to term(count - 1). Of eight, neighbours are added first.
template <class Term>
INLINED inline auto add_terms(int64_t count, const Term& term) {
  if (count == ROWS_AT_ONCE) return ((term(0) + term(1)) + (term(2) + term(3))) + ((term(4) + term(5)) + (term(6) + term(7)));
  auto sum = term(0);
  for (int64_t i = 1; i < count; i++) sum = sum + term(i);
  return sum;
}

// Writes sums of some rows, numbers `first` and following of each column: term(place in the matrix, column, columns) has what is added up.
template <int COUNT, class Term>
inline void sum_rows(const Matrix& matrix, RowRange rows, ColumnNumbers sums, int64_t first, const Term& term) {
  for (int64_t row = rows.first; row < rows.last; row += ROWS_AT_ONCE) {
    const int64_t at_once = std::min(ROWS_AT_ONCE, rows.last - row);
    for_each_vector(matrix.columns, [&](int64_t j, int64_t count) INLINED {
      const Terms<COUNT> sum = add_terms(at_once, [&](int64_t i) INLINED { return term((row + i) * matrix.columns + j, j, count); });
      for (int64_t i = 0; i < COUNT; i++) {
        float* const to = sums[first + i] + j;
        store_lanes(to, row == rows.first ? sum.vectors[i] : load_lanes(to, count) + sum.vectors[i], count);
      }
    });
  }
}

// The numbers that describe each column of some rows. The mean is MEAN + REST: an error of the mean as small as its last bit is an error of each
// difference from it, and a gradient adds these up.
enum Moments { MEAN, SQUARES, REST, MOMENTS };

// Adds a number to a mean.
inline void move_mean(ColumnNumbers moments, int64_t j, int64_t count, Vector change) {
  const Vector mean = load_lanes(moments[MEAN] + j, count);
  const Vector moved = mean + change;
  store_lanes(moments[MEAN] + j, moved, count);
  store_lanes(moments[REST] + j, change - (moved - mean), count);
}

// Writes the moments of some rows: SQUARES is the sum of the squares of what differs from the mean.
void measure_rows(const Matrix& matrix, const float* x, RowRange rows, ColumnNumbers moments) {
  const auto size = static_cast<float>(rows.count());
  sum_rows<1>(matrix, rows, moments, MEAN, [&](int64_t place, int64_t, int64_t count) INLINED { return Terms<1>{{load_lanes(x + place, count)}}; });
  for_each_vector(matrix.columns, [&](int64_t j, int64_t count) INLINED { store_lanes(moments[MEAN] + j, load_lanes(moments[MEAN] + j, count) / size, count); });
  sum_rows<2>(matrix, rows, moments, SQUARES, [&](int64_t place, int64_t j, int64_t count) INLINED {
    const Vector apart = load_lanes(x + place, count) - load_lanes(moments[MEAN] + j, count);
    return Terms<2>{{apart * apart, apart}};
  });
  for_each_vector(matrix.columns, [&](int64_t j, int64_t count) INLINED {
    const Vector rest = load_lanes(moments[REST] + j, count) / size;
    store_lanes(moments[SQUARES] + j, load_lanes(moments[SQUARES] + j, count) - rest * rest * size, count);
    move_mean(moments, j, count, rest);
  });
}

// Joins the moments of `before` rows with those of the `after` rows behind them; the result takes the place of the former.
void join_moments(ColumnNumbers moments, int64_t before, ColumnNumbers next, int64_t after) {
  const float part = static_cast<float>(after) / static_cast<float>(before + after);
  const float weight = static_cast<float>(before) * part;
  for_each_vector(moments.columns, [&](int64_t j, int64_t count) INLINED {
    const Vector rest = load_lanes(moments[REST] + j, count);
    const Vector apart = (load_lanes(next[MEAN] + j, count) - load_lanes(moments[MEAN] + j, count)) + (load_lanes(next[REST] + j, count) - rest);
    store_lanes(moments[SQUARES] + j, load_lanes(moments[SQUARES] + j, count) + (load_lanes(next[SQUARES] + j, count) + apart * apart * weight), count);
    move_mean(moments, j, count, rest + apart * part);
  });
}

// The sums of each column: of an array, and of its products with another.
enum Sums { SUM, PRODUCTS, SUMS };

void add_sums(ColumnNumbers sums, ColumnNumbers next) {
  for (int64_t i = 0; i < SUMS; i++)
    for_each_vector(sums.columns, [&](int64_t j, int64_t count) INLINED { store_lanes(sums[i] + j, load_lanes(sums[i] + j, count) + load_lanes(next[i] + j, count), count); });
}

// Computes COUNT numbers for each column: measure(rows, numbers) those of a block of rows, and join(numbers, rows before, next numbers, next
// rows) those of two.
template <int64_t COUNT, class Measure, class Join>
void reduce_columns(ffi::ThreadPool& pool, const Matrix& matrix, float* result, const Measure& measure, const Join& join) {
  static thread_local Scratch scratch;
  const int64_t size = COUNT * matrix.columns;
  float* const of_pieces = scratch.get(matrix.pieces() * size);
  const auto numbers_of = [&](int64_t piece) { return ColumnNumbers{of_pieces + piece * size, matrix.columns}; };
  run_pieces(pool, matrix.pieces(), [&](int64_t number) {
    static thread_local Scratch block_scratch;
    const ColumnNumbers next{block_scratch.get(size), matrix.columns};
    const RowRange piece = matrix.range(number, number + 1);
    matrix.for_each_block(piece, [&](RowRange block) {
      if (block.first == piece.first) return measure(block, numbers_of(number));
      measure(block, next);
      join(numbers_of(number), block.first - piece.first, next, block.count());
    });
  });
  const int64_t pieces = matrix.pieces();
  for (int64_t joined = 1; joined < pieces; joined *= 2)
    for (int64_t first = 0; first + joined < pieces; first += 2 * joined) {
      const int64_t middle = first + joined;
      join(numbers_of(first), matrix.range(first, middle).count(), numbers_of(middle), matrix.range(middle, middle + joined).count());
    }
  std::copy(of_pieces, of_pieces + size, result);
}

bool has_columns(const Array& x, Result& result, int64_t count) {
  return x.dimensions().size() > 0 && x.element_count() > 0 && static_cast<int64_t>(result->element_count()) == count * x.dimensions().back();
}

Matrix view_as_matrix(const Array& x) {
  const int64_t columns = x.dimensions().back();
  return {static_cast<int64_t>(x.element_count()) / columns, columns};
}

// x: [rows][columns], also in more dimensions. moments: [3][columns]: the means, the variances, and what is to be added to the means.
ffi::Error MeasureColumns(ffi::ThreadPool pool, Array x, Result moments) {
  if (!has_columns(x, moments, MOMENTS)) return ffi::Error::InvalidArgument("The moments of columns are three numbers for each.");
  const Matrix matrix = view_as_matrix(x);
  return run_kernel("unisono_measure_columns", [&] {
    const auto measure = [&](RowRange rows, ColumnNumbers numbers) { measure_rows(matrix, x.typed_data(), rows, numbers); };
    const ColumnNumbers result{moments->typed_data(), matrix.columns};
    reduce_columns<MOMENTS>(pool, matrix, result.values, measure, join_moments);
    for (int64_t j = 0; j < matrix.columns; j++) result[SQUARES][j] /= static_cast<float>(matrix.rows);
  });
}

// Sums what values(place in the matrix, column, columns) returns, and its products with x.
template <class Values>
void sum_columns(ffi::ThreadPool& pool, const Array& x, const Values& values, Result& sums) {
  const Matrix matrix = view_as_matrix(x);
  const auto measure = [&, factors = x.typed_data()](RowRange rows, ColumnNumbers numbers) {
    sum_rows<SUMS>(matrix, rows, numbers, SUM, [&](int64_t place, int64_t j, int64_t count) INLINED {
      const Vector value = values(place, j, count);
      return Terms<SUMS>{{value, value * load_lanes(factors + place, count)}};
    });
  };
  const auto join = [](ColumnNumbers numbers, int64_t, ColumnNumbers next, int64_t) { add_sums(numbers, next); };
  reduce_columns<SUMS>(pool, matrix, sums->typed_data(), measure, join);
}

ffi::Error say_sizes_of_sums() {
  return ffi::Error::InvalidArgument("The sums of columns are two numbers for each: of an array, and of its products with another.");
}

// values, x: [rows][columns], also in more dimensions. sums: [2][columns], of the values, and of the products of the values and x.
ffi::Error SumColumns(ffi::ThreadPool pool, Array values, Array x, Result sums) {
  if (!has_columns(x, sums, SUMS) || values.element_count() != x.element_count()) return say_sizes_of_sums();
  const auto read_value = [from = values.typed_data()](int64_t place, int64_t, int64_t count) INLINED { return load_lanes(from + place, count); };
  return run_kernel("unisono_sum_columns", [&] { sum_columns(pool, x, read_value, sums); });
}

// The same of the values where x * scale + offset is above `low` and not at or above `high`; NaN is no bound. scale, offset: [columns].
ffi::Error SumGatedColumns(ffi::ThreadPool pool, Array values, Array x, Array scale, Array offset, Result sums, float low, float high) {
  if (!has_columns(x, sums, SUMS) || values.element_count() != x.element_count() || 2 * scale.element_count() != sums->element_count() ||
      offset.element_count() != scale.element_count())
    return say_sizes_of_sums();
  const auto read_value = [&, lowest = splat(low), highest = splat(high)](int64_t place, int64_t j, int64_t count) INLINED {
    const Vector gate = load_lanes(x.typed_data() + place, count) * load_lanes(scale.typed_data() + j, count) + load_lanes(offset.typed_data() + j, count);
    const Vector value = load_lanes(values.typed_data() + place, count);
    return gate > lowest ? (gate >= highest ? Vector{} : value) : Vector{};
  };
  return run_kernel("unisono_sum_gated_columns", [&] { sum_columns(pool, x, read_value, sums); });
}

}  // namespace
}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_measure_columns, unisono::MeasureColumns,
                              xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().Arg<unisono::Array>().Ret<unisono::Array>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_sum_columns, unisono::SumColumns, unisono::bind_product());
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_sum_gated_columns, unisono::SumGatedColumns,
                              unisono::bind_four_arrays().Attr<float>("low").Attr<float>("high"));
#pragma GCC visibility pop
