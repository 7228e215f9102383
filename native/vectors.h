// Vectors of the processor: as wide as the instructions that this file is compiled for.
#pragma once

#include <cstdint>

namespace unisono {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_ROWS = 12;
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int TILE_ROWS = 6;
#else
constexpr int LANES = 4;
constexpr int TILE_ROWS = 6;
#endif
constexpr int TILE_VECTORS = 2;
constexpr int TILE_COLUMNS = LANES * TILE_VECTORS;
// A tile of a product: its sums fit in the processor's registers.

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4)));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }
inline Vector splat(float value) { return value - Vector{}; }

// Returns whether a lane is an infinity or a NaN.
inline bool has_nonfinite(Vector value) {
  const Vector zeros_or_nan = value * 0.0f;
  bool found = false;
  for (int lane = 0; lane < LANES; lane++) found |= zeros_or_nan[lane] != zeros_or_nan[lane];
  return found;
}

}  // namespace unisono
