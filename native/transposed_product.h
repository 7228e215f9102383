// The product of a transposed matrix and a matrix, as the gradient by a kernel is: both are read row by row, and rows are what is summed over.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "elementwise.h"
#include "product.h"

namespace unisono {

constexpr int64_t BLOCK_HEIGHT = 512;      // most rows of the result that one piece computes
constexpr int64_t BLOCK_WIDTH = 256;       // most columns
constexpr int64_t SUMMED_AT_ONCE = 128;    // rows of both matrices: a panel stays in the nearest cache, and the blocks in the second
constexpr int64_t ENOUGH_PIECES = 8;       // if the result has fewer blocks, rows are cut in parts
constexpr int64_t LEAST_SUMMED = 512;      // of one piece: sums of parts are read and written once more
constexpr int64_t ADDED_AT_ONCE = 1 << 16;  // numbers of all parts that one piece adds

struct Range {
  int64_t begin;
  int64_t end;

  int64_t size() const { return end - begin; }
};

// One of `count` parts of a size, in whole units.
inline Range take_part(int64_t size, int64_t unit, int64_t part, int64_t count) {
  const int64_t units = divide_up(size, unit);
  return {std::min(size, units * part / count * unit), std::min(size, units * (part + 1) / count * unit)};
}

// A part of a matrix: some columns of some rows.
struct Part {
  const float* values;
  int64_t distance;  // of rows
  int64_t rows;
  int64_t columns;
};

// Writes a part of a matrix as panels of TILE_COLUMNS columns, [row][TILE_COLUMNS] each, `distance` apart; zeros beyond the last column.
inline void pack_part(const Part& part, float* to, int64_t distance) {
  const int64_t whole = part.columns / TILE_COLUMNS * TILE_COLUMNS;
  const float* row = part.values;
  for (int64_t k = 0; k < part.rows; k++, row += part.distance, to += TILE_COLUMNS) {
    float* place = to;
    for (int64_t column = 0; column < whole; column += TILE_COLUMNS, place += distance)
      std::memcpy(place, row + column, TILE_COLUMNS * sizeof(float));
    if (whole == part.columns) continue;
    for (int64_t j = 0; j < TILE_COLUMNS; j++) place[j] = whole + j < part.columns ? row[whole + j] : 0.0f;
  }
}

// Fetches parts of matrices to the second cache, a line at a time: the memory is busy while products are computed.
class PartsAhead {
 public:
  static constexpr int64_t STEPS = 4;  // of a sum for each line

  void clear() {
    parts_.clear();
    next_ = 0;
    now_ = {};
    column_ = 0;
  }

  void add(const Part& part) { parts_.push_back(part); }

  void begin_tile(int64_t, const float*) {}

  void fetch() {
    constexpr int64_t LINE = 16;  // floats of a line of a cache
    if (column_ >= now_.columns) {
      column_ = 0;
      now_.values += now_.distance;
      now_.rows--;
    }
    if (now_.rows <= 0) {
      if (next_ == parts_.size()) return;
      now_ = parts_[next_++];
      if (now_.rows <= 0) return;
    }
    __builtin_prefetch(now_.values + column_, 0, 2);
    column_ += LINE;
  }

 private:
  std::vector<Part> parts_;
  size_t next_ = 0;
  Part now_{};
  int64_t column_ = 0;
};

// Matrices with the same number of rows, side by side.
struct MatricesBeside {
  std::vector<MatrixRows> matrices;

  int64_t count_columns() const {
    int64_t columns = 0;
    for (const MatrixRows& matrix : matrices) columns += matrix.columns;
    return columns;
  }

  // Calls use(part, column) with what each matrix has of some columns of some rows, and at which of these columns it begins.
  template <class Use>
  void for_each_part(int64_t first, int64_t count, Range columns, const Use& use) const {
    int64_t begin = 0;  // of a matrix
    for (const MatrixRows& matrix : matrices) {
      const int64_t low = std::max(columns.begin, begin), high = std::min(columns.end, begin + matrix.columns);
      if (low < high) use(Part{matrix.values + first * matrix.columns + low - begin, matrix.columns, count, high - low}, low - columns.begin);
      begin += matrix.columns;
    }
  }
};

// Writes columns of some rows of a left matrix: `MatricesBeside`, or a function as `multiply` takes it.
template <class ReadRows>
inline void read_rows(const ReadRows& read, int64_t first, int64_t count, Range columns, float* to, int64_t distance) {
  read(first, count, columns.begin, columns.end, to, distance);
}

inline void read_rows(const MatricesBeside& left, int64_t first, int64_t count, Range columns, float* to, int64_t distance) {
  left.for_each_part(first, count, columns, [&](const Part& part, int64_t column) {
    for (int64_t row = 0; row < count; row++)
      std::memcpy(to + row * distance + column, part.values + row * part.distance, part.columns * sizeof(float));
  });
}

// Lets these rows be fetched; nothing of a function.
template <class ReadRows>
inline void add_parts(const ReadRows&, int64_t, int64_t, Range, PartsAhead&) {}

inline void add_parts(const MatricesBeside& left, int64_t first, int64_t count, Range columns, PartsAhead& ahead) {
  left.for_each_part(first, count, columns, [&](const Part& part, int64_t) { ahead.add(part); });
}

// Adds up the rows of a panel; `is_added`: to what is there. Even rows and odd ones have sums of their own.
inline void add_up_panel(const float* panel, int64_t rows, int64_t width, bool is_added, float* to) {
  Vector sums[2][TILE_VECTORS] = {};
  const auto add = [&](int parity, int64_t k) {
    for (int j = 0; j < TILE_VECTORS; j++) sums[parity][j] += load(panel + k * TILE_COLUMNS + j * LANES);
  };
  for (int64_t k = 0; k + 1 < rows; k += 2) {
    add(0, k);
    add(1, k + 1);
  }
  if (rows % 2 == 1) add(0, rows - 1);
  for (int64_t j = 0; j < width; j += LANES) {
    const int64_t count = std::min<int64_t>(LANES, width - j);
    const Vector sum = sums[0][j / LANES] + sums[1][j / LANES];
    store_some(to + j, is_added ? load_some(to + j, count) + sum : sum, count);
  }
}

// c [depth][columns] = transposed left [rows][depth] * right [rows][columns]. With sums, c has one row more: the sums of the rows of `right`.
//
// Pieces share the result in blocks, and, if there are few blocks, the rows; sums of parts of the rows are added in order.
template <class Left>
void multiply_transposed(ffi::ThreadPool& pool, const Sizes& sizes, const Left& left, const float* right, bool with_sums, float* c) {
  const int64_t rows = sizes.rows, depth = sizes.depth, columns = sizes.columns;
  const int64_t down = std::max<int64_t>(1, divide_up(depth, BLOCK_HEIGHT));
  const int64_t across = std::max<int64_t>(1, divide_up(columns, BLOCK_WIDTH));
  const int64_t parts = std::clamp<int64_t>(std::min(divide_up(ENOUGH_PIECES, down * across), rows / LEAST_SUMMED), 1, ENOUGH_PIECES);
  const int64_t size = (depth + with_sums) * columns;
  float* sums = parts == 1 ? c : packed_scratch().get(parts * size);
  run_pieces(pool, down * across * parts, [&](int64_t piece) {
    const int64_t part = piece / (down * across);
    const Range high = take_part(depth, TILE_ROWS, piece % (down * across) / across, down);
    const Range wide = take_part(columns, TILE_COLUMNS, piece % across, across);
    const Range summed = take_part(rows, 1, part, parts);
    const int64_t panels = count_panels(wide.size());
    const int64_t a_row = high.size() + ROW_GAP, b_panel = SUMMED_AT_ONCE * TILE_COLUMNS + ROW_GAP;
    float* a = block_scratch().get(SUMMED_AT_ONCE * a_row + panels * b_panel);
    float* b = a + SUMMED_AT_ONCE * a_row;
    float* result = sums + part * size + high.begin * columns + wide.begin;
    float* last = with_sums && high.end == depth ? sums + part * size + depth * columns + wide.begin : nullptr;
    if (summed.size() == 0)
      for (int64_t i = 0; i < high.size() + (last != nullptr); i++) std::memset(result + i * columns, 0, wide.size() * sizeof(float));
    PartsAhead ahead;
    for (int64_t first = summed.begin; first < summed.end; first += SUMMED_AT_ONCE) {
      const int64_t count = std::min(SUMMED_AT_ONCE, summed.end - first);
      const int64_t next = first + count;
      const int64_t next_count = std::min(SUMMED_AT_ONCE, summed.end - next);
      const Part now{right + first * columns + wide.begin, columns, count, wide.size()};
      read_rows(left, first, count, high, a, a_row);
      pack_part(now, b, b_panel);
      ahead.clear();
      if (next_count > 0) add_parts(left, next, next_count, high, ahead);
      ahead.add({now.values + count * columns, columns, next_count, wide.size()});
      for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t width = std::min<int64_t>(TILE_COLUMNS, wide.size() - panel * TILE_COLUMNS);
        const float* rows_of_b = b + panel * b_panel;
        float* to = result + panel * TILE_COLUMNS;
        const bool is_added = first > summed.begin;
        if (last != nullptr) add_up_panel(rows_of_b, count, width, is_added, last + panel * TILE_COLUMNS);
        if (is_added)
          multiply_panel<true, false>(high.size(), count, a, a_row, rows_of_b, to, columns, width, nullptr, ahead);
        else
          multiply_panel<false, false>(high.size(), count, a, a_row, rows_of_b, to, columns, width, nullptr, ahead);
      }
    }
  });
  if (parts == 1) return;
  const int64_t pieces = std::min(MOST_PIECES, divide_up(size * parts, ADDED_AT_ONCE));
  run_pieces(pool, pieces, [&](int64_t piece) {
    for (int64_t i = size * piece / pieces; i < size * (piece + 1) / pieces; i++) {
      float sum = sums[i];
      for (int64_t part = 1; part < parts; part++) sum += sums[part * size + i];
      c[i] = sum;
    }
  });
}

}  // namespace unisono
