// The geometry of attention: where queries, keys, values, masks and results lie, and a block of scores.
//
// An item is what has keys and values of its own: an example and a head. Its queries are `groups` times `queries` rows: heads may share keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "elementwise.h"
#include "pieces.h"
#include "product.h"
#include "transpose.h"
#include "vectors.h"

namespace unisono {

constexpr int64_t QUERIES = 64;  // rows of queries at a time: a multiple of TILE_COLUMNS
constexpr int64_t KEYS = 128;    // keys of a product at a time, so that a panel of values stays in the near caches and chains of sums are short

// How many features of a query and a key are summed at a time. Errors of scores grow in the exponential, so their sums are short.
inline int64_t choose_chain(int64_t depth) {
  const int64_t chains = depth <= 16 ? 1 : std::max<int64_t>(2, divide_up(depth, 32));
  return divide_up(depth, chains);
}

// Distances of the elements of an array in each dimension, in elements; 0 where all places have the same element.
struct Distances {
  int64_t items[3];
  int64_t group;
  int64_t query;
  int64_t key;
};

// A block of queries of an item.
struct Block {
  int64_t item;
  int64_t group;
  int64_t first;  // query
  int64_t count;
};

struct AttentionSizes {
  int64_t items[3];
  int64_t groups;
  int64_t queries;
  int64_t keys;
  int64_t depth;   // of queries and keys
  int64_t values;  // features of a value

  int64_t item_count() const { return items[0] * items[1] * items[2]; }
  int64_t blocks() const { return groups * divide_up(queries, QUERIES); }  // of an item
  int64_t rows() const { return item_count() * groups * queries; }

  Block block(int64_t item, int64_t number) const {
    const int64_t in_group = blocks() / groups;
    const int64_t first = number % in_group * QUERIES;
    return {item, number / in_group, first, std::min(QUERIES, queries - first)};
  }
  // The place of a block's first query among all rows.
  int64_t row(const Block& block) const { return (block.item * groups + block.group) * queries + block.first; }

  int64_t place_of_item(const Distances& distances, int64_t item) const {
    return item / (items[1] * items[2]) * distances.items[0] + item / items[2] % items[1] * distances.items[1] +
           item % items[2] * distances.items[2];
  }
  int64_t place(const Distances& distances, const Block& block) const {
    return place_of_item(distances, block.item) + block.group * distances.group + block.first * distances.query;
  }
};

template <class Element>
struct Placed {
  Element* data;  // null if there is none
  Distances distances;
};

// What is done with a score before and after the exponential.
struct ScoreRules {
  float scale;
  float fill;      // replaces, or is added to, a score whose mask is false
  bool adds_fill;
  float factor;    // of a weight that is kept
};

// Masks, a bias and kept weights of one block, in the order of its scores: [keys][QUERIES].
class BlockMasks {
 public:
  using Mask = Placed<const bool>;

  BlockMasks(const AttentionSizes& sizes, const Mask (&masks)[2], const Placed<const float>& bias, const Mask& kept)
      : sizes_(sizes), masks_{masks[0], masks[1]}, bias_(bias), kept_(kept) {}

  // Floats of scratch memory that `read` needs.
  int64_t scratch() const {
    const int64_t size = sizes_.keys * QUERIES;
    return (is_needed(bias_) ? size : 0) + (is_needed(masks_[0]) + is_needed(masks_[1]) + is_needed(kept_)) * size / 4;
  }

  // Writes what differs from query to query into scratch memory; points to what does not.
  void read(const Block& block, float* scratch) {
    bias_from_ = read_one(bias_, block, scratch);
    for (int i = 0; i < 2; i++) mask_from_[i] = read_one(masks_[i], block, scratch);
    kept_from_ = read_one(kept_, block, scratch);
  }

  bool has_bias() const { return bias_.data != nullptr; }
  bool has_masks() const { return masks_[0].data != nullptr; }
  bool has_kept() const { return kept_.data != nullptr; }

  // Of LANES queries from `lane` on.
  Vector bias(int64_t key, int64_t lane) const {
    return bias_from_.is_by_query ? load(bias_from_.data + key * QUERIES + lane) : splat(bias_from_.data[key * bias_from_.distance]);
  }
  Integers32 mask(int64_t key, int64_t lane) const {
    Integers32 all = read_truths(mask_from_[0], key, lane);
    if (mask_from_[1].data != nullptr) all &= read_truths(mask_from_[1], key, lane);
    return all;
  }
  Integers32 kept(int64_t key, int64_t lane) const { return read_truths(kept_from_, key, lane); }

 private:
  template <class Element>
  struct ByKeys {
    const Element* data = nullptr;
    int64_t distance = 0;  // of keys, where all queries have the same
    bool is_by_query = false;
  };

  template <class Element>
  static bool is_needed(const Placed<Element>& placed) {
    return placed.data != nullptr && placed.distances.query != 0;
  }

  template <class Element>
  ByKeys<Element> read_one(const Placed<const Element>& placed, const Block& block, float*& scratch) const {
    if (placed.data == nullptr) return {};
    const Distances& distances = placed.distances;
    const Element* from = placed.data + sizes_.place(distances, block);
    if (!is_needed(placed)) return {from, distances.key, false};
    Element* to = reinterpret_cast<Element*>(scratch);
    scratch += sizes_.keys * QUERIES * sizeof(Element) / sizeof(float);
    for (int64_t first = 0; first < sizes_.keys; first += KEYS_AT_ONCE) {
      const int64_t last = std::min(sizes_.keys, first + KEYS_AT_ONCE);
      for (int64_t query = 0; query < block.count; query++)
        for (int64_t key = first; key < last; key++) to[key * QUERIES + query] = from[query * distances.query + key * distances.key];
      for (int64_t key = first; key < last; key++)
        std::memset(to + key * QUERIES + block.count, 0, (QUERIES - block.count) * sizeof(Element));
    }
    return {to, QUERIES, true};
  }
  static constexpr int64_t KEYS_AT_ONCE = 64;

  static Integers32 read_truths(const ByKeys<bool>& from, int64_t key, int64_t lane) {
    if (!from.is_by_query) return splat_bits(-static_cast<int32_t>(from.data[key * from.distance]));
    Bytes bytes;
    std::memcpy(&bytes, from.data + key * QUERIES + lane, LANES);
    return __builtin_convertvector(bytes, Integers32) != 0;
  }

  const AttentionSizes& sizes_;
  Mask masks_[2];
  Placed<const float> bias_;
  Mask kept_;
  ByKeys<bool> mask_from_[2];
  ByKeys<float> bias_from_;
  ByKeys<bool> kept_from_;
};

// Writes rows of a matrix as the panels of its transpose: [panel][depth][TILE_COLUMNS], zeros beyond the last row.
inline void pack_queries(const float* from, int64_t distance, int64_t count, int64_t depth, float* to) {
  for (int64_t first = 0; first < count; first += TILE_COLUMNS, to += depth * TILE_COLUMNS)
    for (int64_t lane = 0; lane < TILE_COLUMNS; lane += LANES) {
      const int64_t rows = std::clamp<int64_t>(count - first - lane, 0, LANES);
      const float* row = from + (first + lane) * distance;
      int64_t k = 0;
      for (; rows == LANES && k + LANES <= depth; k += LANES) transpose_square(row + k, distance, to + k * TILE_COLUMNS + lane, TILE_COLUMNS);
      for (; k < depth; k++)
        for (int64_t i = 0; i < LANES; i++) to[k * TILE_COLUMNS + lane + i] = i < rows ? row[i * distance + k] : 0.0f;
    }
}

// Writes rows of a matrix as panels: [panel][rows][TILE_COLUMNS], zeros beyond the last column.
inline void pack_rows(const float* from, int64_t distance, int64_t rows, int64_t columns, float* to) {
  for (int64_t panel = 0; panel < count_panels(columns); panel++) {
    const int64_t first = panel * TILE_COLUMNS;
    const int64_t width = std::min<int64_t>(TILE_COLUMNS, columns - first);
    for (int64_t i = 0; i < rows; i++, to += TILE_COLUMNS) {
      std::memcpy(to, from + i * distance + first, width * sizeof(float));
      std::memset(to + width, 0, (TILE_COLUMNS - width) * sizeof(float));
    }
  }
}

// c = a * b for packed b: [panel][depth][TILE_COLUMNS], `chain` elements of the depth at a time. It is added to c if `is_added`.
template <bool BY_ROWS>
inline void multiply_panels(int64_t rows, int64_t depth, int64_t chain, const float* a, int64_t a_row, const float* b, int64_t columns, float* c,
                            int64_t c_row, bool is_added) {
  for (int64_t k0 = 0; k0 < depth; k0 += chain) {
    const int64_t count = std::min(chain, depth - k0);
    const float* left = a + k0 * (BY_ROWS ? 1 : a_row);
    for (int64_t panel = 0; panel < count_panels(columns); panel++) {
      const float* right = b + (panel * depth + k0) * TILE_COLUMNS;
      const int64_t width = std::min<int64_t>(TILE_COLUMNS, columns - panel * TILE_COLUMNS);
      float* to = c + panel * TILE_COLUMNS;
      if (is_added || k0 > 0)
        multiply_panel<true, BY_ROWS>(rows, count, left, a_row, right, to, c_row, width);
      else
        multiply_panel<false, BY_ROWS>(rows, count, left, a_row, right, to, c_row, width);
    }
  }
}

}  // namespace unisono
