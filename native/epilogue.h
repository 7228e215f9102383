// What is done to the result of a convolution or a product before it is stored for good: a bias is added, and what is negative becomes zero.
//
// Each element is a sum, then another sum, as if each had a pass through memory of its own: the bits are the same.
#pragma once

#include <cstdint>

#include "elementwise.h"

namespace unisono {

struct Epilogue {
  const float* bias;  // of each feature; null if there is no epilogue
  bool is_rectified;

  Vector finish(Vector sum, Vector added) const {
    if (bias == nullptr) return sum;
    const Vector value = sum + added;
    return is_rectified ? larger(value, Vector{}) : value;
  }

  // Returns a vector of the bias, from a feature on, or nothing useful if there is none.
  Vector load_bias(int64_t feature) const { return bias == nullptr ? Vector{} : load(bias + feature); }

  // Changes `width` features of some rows, from `feature` on.
  void finish_rows(int64_t rows, int64_t feature, int64_t width, float* values, int64_t distance) const {
    if (bias == nullptr) return;
    for (int64_t i = 0; i < width; i += LANES) {
      const int64_t count = width - i < LANES ? width - i : LANES;
      const Vector added = load_some(bias + feature + i, count);
      for (int64_t row = 0; row < rows; row++) {
        float* to = values + row * distance + i;
        if (count == LANES)
          store(to, finish(load(to), added));
        else
          store_some(to, finish(load_some(to, count), added), count);
      }
    }
  }
};

// The epilogue of some columns: a panel of them.
struct PanelEpilogue {
  PanelEpilogue(const Epilogue& epilogue, int64_t first, int64_t width) : epilogue(epilogue) {
    if (epilogue.bias == nullptr) return;
    for (int64_t j = 0; j < width; j += LANES)
      added[j / LANES] = load_some(epilogue.bias + first + j, width - j < LANES ? width - j : LANES);
  }

  Vector finish(Vector sum, int j) const { return epilogue.finish(sum, added[j]); }

  const Epilogue& epilogue;
  Vector added[TILE_VECTORS] = {};
};

}  // namespace unisono
