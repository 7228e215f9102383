// Products of float32 matrices. An element of a result is one chain of sums, in an order that the sizes fix.
//
// The left matrix is an array, or a function that writes a part of a row: what a convolution reads for a pixel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "epilogue.h"
#include "pieces.h"
#include "transpose.h"
#include "vectors.h"

namespace unisono {

constexpr int64_t BLOCK_ROWS = 48;   // rows of the left matrix at a time: a multiple of TILE_ROWS
constexpr int64_t BLOCK_DEPTH = 512;    // of the sums at a time, so that a panel stays in the near caches and chains of sums are short
constexpr int64_t MOST_PIECES = 16;
constexpr int64_t LEAST_PANELS = 4;  // of a piece: each piece reads its rows anew
constexpr int64_t LEAST_PRODUCTS = 1 << 20;  // of single numbers in a piece, if rows are too few for many pieces
constexpr int64_t FEW_TO_PACK = 4096;  // rows of panels that one thread packs sooner than it wakes another
constexpr int64_t LEAST_DEPTH_TO_FETCH = 64;  // of a tile: its place in the result is fetched before its products, if these take long enough
constexpr int64_t ROW_GAP = 16;      // floats between rows of a block: else rows may fall on the same lines of a cache

// Fetches nothing.
struct NothingAhead {
  static constexpr int64_t STEPS = 0;  // of a sum for each call of `fetch`; 0 for none
  void begin_tile(int64_t, const float*) {}
  void fetch() {}
};

// Writes a * b to a tile of c, or adds it. a(i, k) is a[i * row + k * step]; b has TILE_COLUMNS columns. `width` columns are stored, after
// the epilogue, if there is one. `ahead` fetches what is read next, between the products.
//
// What is added is a sum by itself: the error of a chain of sums grows with its length.
template <int ROWS, bool ADD, class Ahead = NothingAhead>
inline __attribute__((always_inline)) void multiply_tile(int64_t depth, const float* a, int64_t row, int64_t step, const float* b, float* c,
                                                         int64_t c_row, int64_t width, const PanelEpilogue* epilogue, Ahead& ahead) {
  if (depth >= LEAST_DEPTH_TO_FETCH)
    for (int i = 0; i < ROWS; i++)
      for (int64_t j = 0; j < width; j += LANES) {
        __builtin_prefetch(c + i * c_row + j, 1);
        if (epilogue != nullptr) epilogue->fetch(c + i * c_row + j);
      }
  Vector sums[ROWS][TILE_VECTORS] = {};
  ahead.begin_tile(depth, b);
  for (int64_t k = 0; k < depth;) {
    const int64_t end = Ahead::STEPS > 1 ? std::min(depth, k + Ahead::STEPS) : depth;
    if (Ahead::STEPS > 1) ahead.fetch();
    for (; k < end; k++) {
      if (Ahead::STEPS == 1) ahead.fetch();
      Vector columns[TILE_VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < TILE_VECTORS; j++) columns[j] = load(b + k * TILE_COLUMNS + j * LANES);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; i++) {
        const Vector element = splat(a[i * row + k * step]);
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; j++) sums[i][j] += element * columns[j];
      }
    }
  }
  if (width == TILE_COLUMNS) {
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
      for (int j = 0; j < TILE_VECTORS; j++) {
        float* to = c + i * c_row + j * LANES;
        const Vector sum = ADD ? load(to) + sums[i][j] : sums[i][j];
        store(to, epilogue == nullptr ? sum : epilogue->finish(sum, j, to));
      }
    return;
  }
  Vector kept[ROWS][TILE_VECTORS];  // indexed by numbers that are not known before: the sums themselves stay in registers
  std::memcpy(kept, sums, sizeof(kept));
  for (int i = 0; i < ROWS; i++)
    for (int64_t j = 0; j < width; j += LANES) {
      float* to = c + i * c_row + j;
      const int64_t count = std::min<int64_t>(LANES, width - j);
      const Vector sum = ADD ? load_some(to, count) + kept[i][j / LANES] : kept[i][j / LANES];
      store_some(to, epilogue == nullptr ? sum : epilogue->finish(sum, j / LANES, to, count), count);
    }
}

// Multiplies `rows` rows of a with one panel of b. BY_ROWS: a is [rows][depth], else [depth][rows]; `a_row` is the distance of its rows.
template <bool ADD, bool BY_ROWS, class Ahead>
inline void multiply_panel(int64_t rows, int64_t depth, const float* a, int64_t a_row, const float* b, float* c, int64_t c_row,
                           int64_t width, const PanelEpilogue* epilogue, Ahead& ahead) {
  const int64_t row = BY_ROWS ? a_row : 1;
  const int64_t step = BY_ROWS ? 1 : a_row;
  const auto multiply_rows = [&](auto count, int64_t i) {
    multiply_tile<count.value, ADD>(depth, a + i * row, row, step, b, c + i * c_row, c_row, width, epilogue, ahead);
  };
  const auto is_for_smaller_tiles = [](int64_t left) { return TILE_ROWS == 12 && left == 16; };  // 8 and 8 rather than 12 and 4
  int64_t i = 0;
  for (; i + TILE_ROWS <= rows && !is_for_smaller_tiles(rows - i); i += TILE_ROWS) multiply_rows(std::integral_constant<int, TILE_ROWS>(), i);
  for (; TILE_ROWS > 8 && rows - i >= 8; i += 8) multiply_rows(std::integral_constant<int, 8>(), i);
  if (rows - i >= 4) {
    multiply_rows(std::integral_constant<int, 4>(), i);
    i += 4;
  }
  if (rows - i >= 2) {
    multiply_rows(std::integral_constant<int, 2>(), i);
    i += 2;
  }
  if (rows > i) multiply_rows(std::integral_constant<int, 1>(), i);
}

// The same with nothing beside the product.
template <bool ADD, bool BY_ROWS>
inline void multiply_panel(int64_t rows, int64_t depth, const float* a, int64_t a_row, const float* b, float* c, int64_t c_row,
                           int64_t width) {
  NothingAhead nothing;
  multiply_panel<ADD, BY_ROWS>(rows, depth, a, a_row, b, c, c_row, width, nullptr, nothing);
}

inline int64_t count_panels(int64_t columns) { return divide_up(columns, TILE_COLUMNS); }

// Writes rows of b, [depth][columns], as one panel: [depth][TILE_COLUMNS], zeros beyond the last column.
inline void pack_panel(const float* b, int64_t depth, int64_t columns, int64_t panel, float* to) {
  const int64_t first = panel * TILE_COLUMNS;
  const int64_t width = std::min<int64_t>(TILE_COLUMNS, columns - first);
  if (width == TILE_COLUMNS) {
    for (int64_t k = 0; k < depth; k++)
#pragma GCC unroll 4
      for (int j = 0; j < TILE_VECTORS; j++) store(to + k * TILE_COLUMNS + j * LANES, load(b + k * columns + first + j * LANES));
    return;
  }
  for (int64_t k = 0; k < depth; k++) {
    std::memcpy(to + k * TILE_COLUMNS, b + k * columns + first, width * sizeof(float));
    std::memset(to + k * TILE_COLUMNS + width, 0, (TILE_COLUMNS - width) * sizeof(float));
  }
}

// The same of a transposed b, [columns][depth].
inline void pack_transposed_panel(const float* b, int64_t depth, int64_t columns, int64_t panel, float* to) {
  const int64_t first = panel * TILE_COLUMNS;
  const int64_t width = std::min<int64_t>(TILE_COLUMNS, columns - first);
  constexpr int64_t AT_ONCE = 16;  // elements of a row: a line of a cache
  int64_t start = 0;
  if (width == TILE_COLUMNS)
    for (; start + LANES <= depth; start += LANES)
      for (int64_t j = 0; j < TILE_COLUMNS; j += LANES)
        transpose_square(b + (first + j) * depth + start, depth, to + start * TILE_COLUMNS + j, TILE_COLUMNS);
  for (; start < depth; start += AT_ONCE) {
    const int64_t end = std::min(depth, start + AT_ONCE);
    for (int64_t j = 0; j < width; j++)
      for (int64_t k = start; k < end; k++) to[k * TILE_COLUMNS + j] = b[(first + j) * depth + k];
    for (int64_t k = start; k < end; k++)
      for (int64_t j = width; j < TILE_COLUMNS; j++) to[k * TILE_COLUMNS + j] = 0.0f;
  }
}

struct Sizes {
  int64_t rows;     // of the left matrix
  int64_t depth;    // of the left matrix: its columns
  int64_t columns;  // of the right matrix
};

// The rows of a matrix, [row][columns].
struct MatrixRows {
  const float* values;
  int64_t columns;
};

inline Scratch& packed_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

inline Scratch& block_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// Some rows of the left matrix, or a part of each.
struct RowBlock {
  const float* values;
  int64_t distance;  // of rows
};

// Returns elements k0 to k1 of some rows, which `read_rows` writes to memory of this thread.
template <class ReadRows>
inline RowBlock read_block(const ReadRows& read_rows, int64_t first, int64_t count, int64_t k0, int64_t k1) {
  const int64_t distance = k1 - k0 + ROW_GAP;
  float* block = block_scratch().get(BLOCK_ROWS * distance);
  read_rows(first, count, k0, k1, block, distance);
  return {block, distance};
}

// The same of a matrix. Long rows are read where they are: the processor fetches what follows. Short ones are copied first.
inline RowBlock read_block(const MatrixRows& matrix, int64_t first, int64_t count, int64_t k0, int64_t k1) {
  const float* values = matrix.values + first * matrix.columns;
  if (matrix.columns >= BLOCK_DEPTH) return {values + k0, matrix.columns};
  const auto read_rows = [&](int64_t, int64_t, int64_t, int64_t, float* to, int64_t distance) {
    for (int64_t row = 0; row < count; row++) std::memcpy(to + row * distance, values + row * matrix.columns + k0, (k1 - k0) * sizeof(float));
  };
  return read_block(read_rows, first, count, k0, k1);
}

// c [rows][columns] = left [rows][depth] * right [depth][columns]. The left is `MatrixRows`, or a function: left(first, count, k0, k1, to,
// distance) writes elements k0 to k1 of some rows. pack(panel, to) writes a panel of the right matrix.
template <class Left, class Pack>
void multiply(ffi::ThreadPool& pool, const Sizes& sizes, const Left& left, const Pack& pack, const ProductEpilogue& epilogue, float* c) {
  const int64_t rows = sizes.rows, depth = sizes.depth, columns = sizes.columns;
  const int64_t panels = count_panels(columns);
  float* packed = packed_scratch().get(panels * depth * TILE_COLUMNS);
  const int64_t pack_pieces = panels * depth > FEW_TO_PACK ? panels : 1;
  run_pieces(pool, pack_pieces, [&](int64_t piece) {
    for (int64_t panel = panels * piece / pack_pieces; panel < panels * (piece + 1) / pack_pieces; panel++)
      pack(panel, packed + panel * depth * TILE_COLUMNS);
  });
  // Pieces share the rows, and, if these are few, the columns.
  const int64_t blocks = divide_up(rows, BLOCK_ROWS);
  const int64_t products = std::min(rows, BLOCK_ROWS) * depth * columns;
  const int64_t groups = std::clamp<int64_t>(std::min({MOST_PIECES / std::max<int64_t>(1, blocks), panels / LEAST_PANELS, products / LEAST_PRODUCTS}), 1, MOST_PIECES);
  run_pieces(pool, blocks * groups, [&](int64_t piece) {
    const int64_t first = piece / groups * BLOCK_ROWS;
    const int64_t group = piece % groups;
    const int64_t count = std::min(BLOCK_ROWS, rows - first);
    for (int64_t k0 = 0; k0 == 0 || k0 < depth; k0 += BLOCK_DEPTH) {
      const int64_t k1 = std::min(depth, k0 + BLOCK_DEPTH);
      const RowBlock a = read_block(left, first, count, k0, k1);
      for (int64_t panel = panels * group / groups; panel < panels * (group + 1) / groups; panel++) {
        const float* b = packed + (panel * depth + k0) * TILE_COLUMNS;
        float* to = c + first * columns + panel * TILE_COLUMNS;
        const int64_t width = std::min<int64_t>(TILE_COLUMNS, columns - panel * TILE_COLUMNS);
        const PanelEpilogue panel_epilogue(epilogue, panel * TILE_COLUMNS, width, c);
        const PanelEpilogue* last = k1 == depth && !epilogue.is_empty() ? &panel_epilogue : nullptr;
        NothingAhead nothing;
        if (k0 == 0)
          multiply_panel<false, true>(count, k1 - k0, a.values, a.distance, b, to, columns, width, last, nothing);
        else
          multiply_panel<true, true>(count, k1 - k0, a.values, a.distance, b, to, columns, width, last, nothing);
      }
    }
  });
}

}  // namespace unisono
