// What is done to the result of a convolution or a product before it is stored for good: a bias is added, and what is negative becomes zero. Or
// the result is zero where a gate is not positive, as the gradient by the operand of a rectifier is.
//
// Each element is a sum, then another sum, as if each had a pass through memory of its own: the bits are the same.
#pragma once

#include <cstdint>

#include "elementwise.h"

namespace unisono {

struct Epilogue {
  const float* bias = nullptr;  // of each feature; null if there is no epilogue
  bool is_rectified = false;

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

// The epilogue of a product of matrices. With a gate, which is as large as the result, the result is zero where the gate is not positive.
struct ProductEpilogue {
  Epilogue each;
  const float* gate = nullptr;

  bool is_empty() const { return each.bias == nullptr && gate == nullptr; }
};

// The epilogue of some columns: a panel of them.
class PanelEpilogue {
 public:
  PanelEpilogue(const ProductEpilogue& epilogue, int64_t first, int64_t width, const float* result) : epilogue_(epilogue), result_(result) {
    if (epilogue.each.bias == nullptr) return;
    for (int64_t j = 0; j < width; j += LANES)
      added_[j / LANES] = load_some(epilogue.each.bias + first + j, width - j < LANES ? width - j : LANES);
  }

  // Returns what is stored for `count` sums. j: which vector of the panel.
  Vector finish(Vector sum, int j, const float* place, int64_t count = LANES) const {
    const Vector value = epilogue_.each.finish(sum, added_[j]);
    if (epilogue_.gate == nullptr) return value;
    const float* gate = epilogue_.gate + (place - result_);
    return load_lanes(gate, count) > 0.0f ? value : Vector{};
  }

  void fetch(const float* place) const {
    if (epilogue_.gate != nullptr) __builtin_prefetch(epilogue_.gate + (place - result_));
  }

 private:
  const ProductEpilogue& epilogue_;
  const float* result_;
  Vector added_[TILE_VECTORS] = {};
};

}  // namespace unisono
