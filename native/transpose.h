// Squares of a matrix, transposed in registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "vectors.h"

namespace unisono {

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define UNISONO_HAS_SHUFFLES
#endif
#endif

#ifdef UNISONO_HAS_SHUFFLES

// Swaps the upper right quarter of each square of 2 * HALF lanes with the lower left one: a holds its upper rows, b its lower rows.
template <int HALF, std::size_t... LANE>
inline void swap_quarters(Vector& a, Vector& b, std::index_sequence<LANE...>) {
  const Vector upper = __builtin_shufflevector(a, b, (LANE & HALF ? LANES + LANE - HALF : LANE)...);
  b = __builtin_shufflevector(a, b, (LANE & HALF ? LANES + LANE : LANE + HALF)...);
  a = upper;
}

template <int HALF>
inline __attribute__((always_inline)) void transpose_lanes(Vector (&rows)[LANES]) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
    if (!(i & HALF)) swap_quarters<HALF>(rows[i], rows[i + HALF], std::make_index_sequence<LANES>());
  if constexpr (HALF > 1) transpose_lanes<HALF / 2>(rows);
}

#endif

// Writes the transpose of a square of LANES times LANES elements.
inline void transpose_square(const float* from, int64_t distance, float* to, int64_t to_distance) {
#ifdef UNISONO_HAS_SHUFFLES
  Vector square[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) square[i] = load(from + i * distance);
  transpose_lanes<LANES / 2>(square);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) store(to + i * to_distance, square[i]);
#else
  for (int i = 0; i < LANES; i++)
    for (int k = 0; k < LANES; k++) to[k * to_distance + i] = from[i * distance + k];
#endif
}

}  // namespace unisono
