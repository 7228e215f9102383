// The product of a transposed matrix and a matrix, as the gradient by a kernel is: both are read row by row, and rows are what is summed over.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "product.h"

namespace unisono {

constexpr int64_t BLOCK_SIDE = 256;        // most rows and columns of the result that one piece computes
constexpr int64_t SUMMED_AT_ONCE = 256;    // blocks of both matrices stay in a core's second cache
constexpr int64_t ENOUGH_PIECES = 8;       // if the result has fewer blocks, rows are cut in parts
constexpr int64_t LEAST_SUMMED = 512;      // of one piece: sums of parts are read and written once more
constexpr int64_t READ_AT_ONCE = 16;       // rows
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

// The rows of a matrix, [row][columns].
struct MatrixRows {
  const float* values;
  int64_t columns;
};

// Writes columns of some rows as panels of WIDTH columns, [row][WIDTH] each, `distance` apart; zeros beyond the last column.
template <int WIDTH>
inline void pack_lines(const float* lines, int64_t line, int64_t rows, int64_t columns, float* to, int64_t distance) {
  const int64_t whole = columns / WIDTH * WIDTH;
  for (int64_t k = 0; k < rows; k++, lines += line, to += WIDTH) {
    float* place = to;
    for (int64_t column = 0; column < whole; column += WIDTH, place += distance) std::memcpy(place, lines + column, WIDTH * sizeof(float));
    if (whole == columns) continue;
    for (int64_t j = 0; j < WIDTH; j++) place[j] = whole + j < columns ? lines[whole + j] : 0.0f;
  }
}

// The same of some rows and columns of a matrix.
template <int WIDTH>
inline void pack_rows(const MatrixRows& matrix, Range rows, Range columns, float*, float* to, int64_t distance) {
  pack_lines<WIDTH>(matrix.values + rows.begin * matrix.columns + columns.begin, matrix.columns, rows.size(), columns.size(), to, distance);
}

// The same where read_rows(first, count, k0, k1, to, distance) writes elements k0 to k1 of some rows. `lines` has room for READ_AT_ONCE rows.
template <int WIDTH, class ReadRows>
inline void pack_rows(const ReadRows& read_rows, Range rows, Range columns, float* lines, float* to, int64_t distance) {
  for (int64_t first = rows.begin; first < rows.end; first += READ_AT_ONCE, to += READ_AT_ONCE * WIDTH) {
    const int64_t count = std::min(READ_AT_ONCE, rows.end - first);
    read_rows(first, count, columns.begin, columns.end, lines, columns.size());
    pack_lines<WIDTH>(lines, columns.size(), count, columns.size(), to, distance);
  }
}

// Multiplies panels of TILE_ROWS rows of the result with one of TILE_COLUMNS columns.
template <bool ADD>
inline void multiply_panels(int64_t rows, int64_t depth, const float* a, int64_t a_panel, const float* b, float* c, int64_t c_row, int64_t width) {
  for (; rows > 0; rows -= TILE_ROWS, a += a_panel, c += TILE_ROWS * c_row) {
    const int64_t high = std::min<int64_t>(TILE_ROWS, rows);
    for (int64_t i = 0; i < high; i++)
      for (int64_t j = 0; j < width; j += LANES) __builtin_prefetch(c + i * c_row + j, 1);
    multiply_panel<ADD, false>(high, depth, a, TILE_ROWS, b, c, c_row, width);
  }
}

// c [depth][columns] = transposed left [rows][depth] * right [rows][columns].
//
// Pieces share the result in blocks, and, if there are few blocks, the rows; sums of parts of the rows are added in order.
template <class Left>
void multiply_transposed(ffi::ThreadPool& pool, const Sizes& sizes, const Left& left, const float* right, float* c) {
  const int64_t rows = sizes.rows, depth = sizes.depth, columns = sizes.columns;
  const int64_t down = std::max<int64_t>(1, divide_up(depth, BLOCK_SIDE));
  const int64_t across = std::max<int64_t>(1, divide_up(columns, BLOCK_SIDE));
  const int64_t parts = std::clamp<int64_t>(std::min(divide_up(ENOUGH_PIECES, down * across), rows / LEAST_SUMMED), 1, ENOUGH_PIECES);
  const int64_t size = depth * columns;
  float* sums = parts == 1 ? c : packed_scratch().get(parts * size);
  run_pieces(pool, down * across * parts, [&](int64_t piece) {
    const int64_t part = piece / (down * across);
    const Range high = take_part(depth, TILE_ROWS, piece % (down * across) / across, down);
    const Range wide = take_part(columns, TILE_COLUMNS, piece % across, across);
    const Range summed = take_part(rows, 1, part, parts);
    const int64_t tiles = divide_up(high.size(), TILE_ROWS);
    const int64_t panels = count_panels(wide.size());
    const int64_t a_panel = SUMMED_AT_ONCE * TILE_ROWS + ROW_GAP, b_panel = SUMMED_AT_ONCE * TILE_COLUMNS + ROW_GAP;
    float* a = block_scratch().get(tiles * a_panel + panels * b_panel + READ_AT_ONCE * high.size());
    float* b = a + tiles * a_panel;
    float* lines = b + panels * b_panel;
    float* result = sums + part * size + high.begin * columns + wide.begin;
    if (summed.size() == 0)
      for (int64_t i = 0; i < high.size(); i++) std::memset(result + i * columns, 0, wide.size() * sizeof(float));
    for (int64_t first = summed.begin; first < summed.end; first += SUMMED_AT_ONCE) {
      const Range now{first, std::min(first + SUMMED_AT_ONCE, summed.end)};
      pack_rows<TILE_ROWS>(left, now, high, lines, a, a_panel);
      pack_rows<TILE_COLUMNS>(MatrixRows{right, columns}, now, wide, nullptr, b, b_panel);
      for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t width = std::min<int64_t>(TILE_COLUMNS, wide.size() - panel * TILE_COLUMNS);
        float* to = result + panel * TILE_COLUMNS;
        if (first == summed.begin)
          multiply_panels<false>(high.size(), now.size(), a, a_panel, b + panel * b_panel, to, columns, width);
        else
          multiply_panels<true>(high.size(), now.size(), a, a_panel, b + panel * b_panel, to, columns, width);
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
