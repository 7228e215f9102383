// Attention: weighted means of values, with weights from the products of queries and keys, forward and backward.
//
// The weights of a block of queries exist only while it is computed. The gradient computes them again from the products.
#include "attention.h"

#include <limits>

#include "arguments.h"

namespace unisono {

using Truths = ffi::Buffer<ffi::PRED>;

struct Attention {
  AttentionSizes sizes;
  Placed<const float> queries;
  Placed<const float> keys;
  Placed<const float> values;
  Placed<const bool> masks[2];
  Placed<const float> bias;
  Placed<const bool> kept;
  ScoreRules rules;
};

// Of each row: the largest score, and the sum of the exponentials of all scores' distances to it.
struct RowNumbers {
  float* largest;
  float* sum;
};

static Scratch& attention_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

// Memory for parts of a block, one after the other. A part begins at a whole vector: it may take up to LANES floats more than it holds.
class Parts {
 public:
  explicit Parts(float* memory) : memory_(memory) {}
  float* take(int64_t floats) {
    float* part = memory_;
    memory_ += round_up(floats, LANES);
    return part;
  }

 private:
  float* memory_;
};

static int64_t count_packed(int64_t rows, int64_t columns) { return count_panels(columns) * rows * TILE_COLUMNS; }

// Rows of keys or values beside each other. In an array with many heads they may lie on the same lines of a cache.
static void copy_rows(const float* from, int64_t distance, int64_t rows, int64_t columns, float* to) {
  for (int64_t i = 0; i < rows; i++) copy(from + i * distance, columns, to + i * (columns + ROW_GAP));
}

// Writes products of some queries with all keys: [keys][QUERIES]. `packed` holds the queries as `pack_queries` writes them.
static void multiply_with_queries(const AttentionSizes& sizes, const Block& block, const float* rows, int64_t depth, const float* packed, float* to) {
  multiply_panels<true>(sizes.keys, depth, choose_chain(depth), rows, depth + ROW_GAP, packed, round_up(block.count, TILE_COLUMNS), to, QUERIES, false);
}

// A score of LANES queries, from the product of query and key.
static inline Vector finish_score(const ScoreRules& rules, const BlockMasks& masks, Vector product, int64_t key, int64_t lane) {
  Vector score = product * rules.scale;
  if (masks.has_bias()) score += masks.bias(key, lane);
  if (!masks.has_masks()) return score;
  const Vector masked = rules.adds_fill ? score + rules.fill : splat(rules.fill);
  return choose(masks.mask(key, lane), score, masked);
}

// The sum of a term for each key: sums of 8 are added to sums of 64, so that the error grows little with the keys.
template <class Term>
static inline Vector sum_keys(int64_t keys, const Term& term) {
  Vector sum{};
  for (int64_t first = 0; first < keys; first += 64) {
    Vector sum_of_64{};
    const int64_t last = std::min(keys, first + 64);
    for (int64_t key = first; key < last;) {
      Vector sum_of_8{};
      for (const int64_t end = std::min(last, key + 8); key < end; key++) sum_of_8 += term(key);
      sum_of_64 += sum_of_8;
    }
    sum += sum_of_64;
  }
  return sum;
}

static void attend_block(const Attention& x, const Block& block, float* out, const Distances& out_distances, const RowNumbers& numbers) {
  const AttentionSizes& sizes = x.sizes;
  BlockMasks masks(sizes, x.masks, x.bias, x.kept);
  Parts parts(attention_scratch().get(round_up(sizes.depth, LANES) * QUERIES + sizes.keys * (sizes.depth + ROW_GAP) +
                                      count_packed(sizes.keys, sizes.values) + sizes.keys * QUERIES + masks.scratch() + 5 * LANES));
  float* queries = parts.take(round_up(sizes.depth, LANES) * QUERIES);
  float* keys = parts.take(sizes.keys * (sizes.depth + ROW_GAP));
  float* values = parts.take(count_packed(sizes.keys, sizes.values));
  float* scores = parts.take(sizes.keys * QUERIES);
  pack_queries(x.queries.data + sizes.place(x.queries.distances, block), x.queries.distances.query, block.count, sizes.depth, queries);
  copy_rows(x.keys.data + sizes.place_of_item(x.keys.distances, block.item), x.keys.distances.key, sizes.keys, sizes.depth, keys);
  pack_rows(x.values.data + sizes.place_of_item(x.values.distances, block.item), x.values.distances.key, sizes.keys, sizes.values, values);
  masks.read(block, parts.take(masks.scratch()));
  multiply_with_queries(sizes, block, keys, sizes.depth, queries, scores);

  float factors[QUERIES];
  for (int64_t lane = 0; lane < block.count; lane += LANES) {
    Vector largest = splat(-std::numeric_limits<float>::infinity());
    for (int64_t key = 0; key < sizes.keys; key++) {
      float* place = scores + key * QUERIES + lane;
      const Vector score = finish_score(x.rules, masks, load(place), key, lane);
      store(place, score);
      largest = larger(largest, score);
    }
    const Vector sum = sum_keys(sizes.keys, [&](int64_t key) {
      float* place = scores + key * QUERIES + lane;
      const Vector weight = exponential(load(place) - largest);
      store(place, masks.has_kept() ? choose(masks.kept(key, lane), weight, Vector{}) : weight);
      return weight;
    });
    store(factors + lane, x.rules.factor / sum);
    const int64_t count = std::min<int64_t>(LANES, block.count - lane);
    store_some(numbers.largest + sizes.row(block) + lane, largest, count);
    store_some(numbers.sum + sizes.row(block) + lane, sum, count);
  }
  float* result = out + sizes.place(out_distances, block);
  multiply_panels<false>(block.count, sizes.keys, KEYS, scores, QUERIES, values, sizes.values, result, out_distances.query, false);
  for (int64_t query = 0; query < block.count; query++) {
    float* row = result + query * out_distances.query;
    for (int64_t i = 0; i < sizes.values; i++) row[i] *= factors[query];
  }
}

struct AttentionGradients {
  Placed<const float> by_out;
  RowNumbers numbers;
  Placed<float> by_queries;
  Placed<float> by_keys;
  Placed<float> by_values;
  float* by_scores;  // [rows][keys]; null if nobody reads it
};

// What the blocks of an item share in the backward pass.
struct ItemRows {
  float* keys;         // by rows
  float* packed_keys;  // as panels
  float* values;       // by rows
};

// Where the sums of an item's gradients by keys and values are.
struct ItemSums {
  float* by_keys;
  int64_t key_distance;
  float* by_values;
  int64_t value_distance;
};

// Turns products of queries and keys into weights, and gradients by weights into gradients by those products.
static void differentiate_scores(const Attention& x, const AttentionGradients& g, const Block& block, const BlockMasks& masks, float* scores,
                                 float* gradients) {
  const AttentionSizes& sizes = x.sizes;
  const int64_t row = sizes.row(block);
  for (int64_t lane = 0; lane < block.count; lane += LANES) {
    const int64_t count = std::min<int64_t>(LANES, block.count - lane);
    const Vector largest = load_some(g.numbers.largest + row + lane, count);
    const Vector sum = load_some(g.numbers.sum + row + lane, count);
    const Vector inverse = 1.0f / sum;
    const Vector mean = sum_keys(sizes.keys, [&](int64_t key) {
      const int64_t place = key * QUERIES + lane;
      const Vector part = exponential(finish_score(x.rules, masks, load(scores + place), key, lane) - largest);
      const Vector rough = part * inverse;
      const Vector weight = rough + (part - rough * sum) * inverse;  // as exact as a division
      Vector by_weight = load(gradients + place) * x.rules.factor;
      if (masks.has_kept()) by_weight = choose(masks.kept(key, lane), by_weight, Vector{});
      store(scores + place, weight);
      store(gradients + place, by_weight);
      return weight * by_weight;
    });
    for (int64_t key = 0; key < sizes.keys; key++) {
      const int64_t place = key * QUERIES + lane;
      const Vector weight = load(scores + place);
      Vector by_score = weight * (load(gradients + place) - mean);
      if (masks.has_masks() && !x.rules.adds_fill) by_score = choose(masks.mask(key, lane), by_score, Vector{});
      const Vector used = weight * x.rules.factor;
      store(scores + place, masks.has_kept() ? choose(masks.kept(key, lane), used, Vector{}) : used);
      store(gradients + place, by_score * x.rules.scale);
      if (g.by_scores != nullptr)
        for (int64_t i = 0; i < count; i++) g.by_scores[(row + lane + i) * sizes.keys + key] = by_score[i];
    }
  }
}

static void differentiate_block(const Attention& x, const AttentionGradients& g, const Block& block, const ItemRows& item, const ItemSums& sums,
                                bool is_first, BlockMasks& masks, Parts parts) {
  const AttentionSizes& sizes = x.sizes;
  float* queries = parts.take(round_up(sizes.depth, LANES) * QUERIES);
  float* packed_queries = parts.take(count_packed(QUERIES, sizes.depth));
  float* by_out = parts.take(round_up(sizes.values, LANES) * QUERIES);
  float* packed_by_out = parts.take(count_packed(QUERIES, sizes.values));
  float* scores = parts.take(sizes.keys * QUERIES);
  float* gradients = parts.take(sizes.keys * QUERIES);
  const float* query_rows = x.queries.data + sizes.place(x.queries.distances, block);
  const float* gradient_rows = g.by_out.data + sizes.place(g.by_out.distances, block);
  masks.read(block, parts.take(masks.scratch()));
  pack_queries(query_rows, x.queries.distances.query, block.count, sizes.depth, queries);
  pack_queries(gradient_rows, g.by_out.distances.query, block.count, sizes.values, by_out);
  multiply_with_queries(sizes, block, item.keys, sizes.depth, queries, scores);
  multiply_with_queries(sizes, block, item.values, sizes.values, by_out, gradients);
  differentiate_scores(x, g, block, masks, scores, gradients);
  pack_rows(query_rows, x.queries.distances.query, block.count, sizes.depth, packed_queries);
  pack_rows(gradient_rows, g.by_out.distances.query, block.count, sizes.values, packed_by_out);
  multiply_panels<true>(sizes.keys, block.count, QUERIES, scores, QUERIES, packed_by_out, sizes.values, sums.by_values, sums.value_distance,
                        !is_first);
  multiply_panels<true>(sizes.keys, block.count, QUERIES, gradients, QUERIES, packed_queries, sizes.depth, sums.by_keys, sums.key_distance,
                        !is_first);
  multiply_panels<false>(block.count, sizes.keys, KEYS, gradients, QUERIES, item.packed_keys, sizes.depth,
                         g.by_queries.data + sizes.place(g.by_queries.distances, block), g.by_queries.distances.query, false);
}

// Blocks `first` to `last` of an item, whose gradients by keys and values are summed in their order.
static void differentiate_blocks(const Attention& x, const AttentionGradients& g, int64_t item, int64_t first, int64_t last, const ItemSums& sums) {
  const AttentionSizes& sizes = x.sizes;
  BlockMasks masks(sizes, x.masks, x.bias, x.kept);
  const int64_t of_item = sizes.keys * (sizes.depth + sizes.values + 2 * ROW_GAP) + count_packed(sizes.keys, sizes.depth);
  const int64_t of_block = (round_up(sizes.depth, LANES) + round_up(sizes.values, LANES)) * QUERIES + count_packed(QUERIES, sizes.depth) +
                           count_packed(QUERIES, sizes.values) + 2 * sizes.keys * QUERIES + masks.scratch();
  Parts parts(attention_scratch().get(of_item + of_block + 10 * LANES));
  ItemRows rows{};
  rows.keys = parts.take(sizes.keys * (sizes.depth + ROW_GAP));
  rows.packed_keys = parts.take(count_packed(sizes.keys, sizes.depth));
  rows.values = parts.take(sizes.keys * (sizes.values + ROW_GAP));
  const float* keys = x.keys.data + sizes.place_of_item(x.keys.distances, item);
  const float* values = x.values.data + sizes.place_of_item(x.values.distances, item);
  copy_rows(keys, x.keys.distances.key, sizes.keys, sizes.depth, rows.keys);
  pack_rows(keys, x.keys.distances.key, sizes.keys, sizes.depth, rows.packed_keys);
  copy_rows(values, x.values.distances.key, sizes.keys, sizes.values, rows.values);
  for (int64_t number = first; number < last; number++)
    differentiate_block(x, g, sizes.block(item, number), rows, sums, number == first, masks, parts);
}

// Pieces are items. If these are few, the blocks of an item are cut in groups too, whose sums are added in order.
static void differentiate(ffi::ThreadPool& pool, const Attention& x, const AttentionGradients& g) {
  const AttentionSizes& sizes = x.sizes;
  const int64_t items = sizes.item_count();
  const int64_t blocks = sizes.blocks();
  const int64_t groups = std::clamp<int64_t>(MOST_PIECES / items, 1, blocks);
  const int64_t width = sizes.depth + sizes.values;
  float* partial = groups == 1 ? nullptr : packed_scratch().get(items * groups * sizes.keys * width);
  const auto place_sums = [&](int64_t item) {
    return ItemSums{g.by_keys.data + sizes.place_of_item(g.by_keys.distances, item), g.by_keys.distances.key,
                    g.by_values.data + sizes.place_of_item(g.by_values.distances, item), g.by_values.distances.key};
  };
  const auto place_partial = [&](int64_t piece) {
    float* from = partial + piece * sizes.keys * width;
    return ItemSums{from, width, from + sizes.depth, width};
  };
  run_pieces(pool, items * groups, [&](int64_t piece) {
    const int64_t item = piece / groups;
    const int64_t group = piece % groups;
    differentiate_blocks(x, g, item, blocks * group / groups, blocks * (group + 1) / groups, groups == 1 ? place_sums(item) : place_partial(piece));
  });
  if (groups == 1) return;
  run_pieces(pool, items, [&](int64_t item) {
    const ItemSums sums = place_sums(item);
    for (int64_t key = 0; key < sizes.keys; key++) {
      float* first = partial + (item * groups * sizes.keys + key) * width;
      for (int64_t group = 1; group < groups; group++)
        for (int64_t i = 0; i < width; i++) first[i] += first[group * sizes.keys * width + i];
      copy(first, sizes.depth, sums.by_keys + key * sums.key_distance);
      copy(first + sizes.depth, sizes.values, sums.by_values + key * sums.value_distance);
    }
  });
}

// The words of a call: sizes, then the distances of each array in the order of the arguments. An array that is not used is empty.
static ffi::ErrorOr<Attention> read_attention(const Array& queries, const Array& keys, const Array& values, const Truths& mask, const Truths& other_mask,
                                              const Array& bias, const Truths& kept, Integers words, ffi::Span<const float> numbers, bool adds_fill) {
  constexpr size_t SIZES = 8, PLACED = 7;
  if (words.size() != SIZES + 6 * PLACED || numbers.size() != 3)
    return ffi::Unexpected(ffi::Error::InvalidArgument("Attention takes 8 sizes, 6 distances of each of 7 arrays, and 3 numbers."));
  Attention x{};
  x.sizes = {{words[0], words[1], words[2]}, words[3], words[4], words[5], words[6], words[7]};
  bool fits = *std::min_element(words.begin(), words.begin() + SIZES) > 0;
  const auto read = [&](auto& placed, const auto& buffer, int number, int64_t row) {
    const int64_t* at = words.begin() + SIZES + 6 * number;
    placed.distances = {{at[0], at[1], at[2]}, at[3], at[4], at[5]};
    if (buffer.element_count() == 0) return;
    placed.data = buffer.typed_data();
    const int64_t counts[6] = {words[0], words[1], words[2], words[3], words[4], words[5]};
    int64_t last = row;
    for (int i = 0; i < 6; i++) last += (counts[i] - 1) * at[i];
    fits = fits && *std::min_element(at, at + 6) >= 0 && last <= static_cast<int64_t>(buffer.element_count());
  };
  read(x.queries, queries, 0, x.sizes.depth);
  read(x.keys, keys, 1, x.sizes.depth);
  read(x.values, values, 2, x.sizes.values);
  read(x.masks[0], mask, 3, 1);
  read(x.masks[1], other_mask, 4, 1);
  read(x.bias, bias, 5, 1);
  read(x.kept, kept, 6, 1);
  const bool is_in_order = x.masks[0].data != nullptr || x.masks[1].data == nullptr;
  if (!fits || !is_in_order || x.queries.data == nullptr || x.keys.data == nullptr || x.values.data == nullptr)
    return ffi::Unexpected(ffi::Error::InvalidArgument("The arrays of attention are smaller than their sizes say, or the first mask is empty."));
  x.rules = {numbers[0], numbers[1], adds_fill, numbers[2]};
  return x;
}

// Values have other features than queries may have, so the distances of the result are those of its own array: queries' rows, each wider.
static Distances place_results(const AttentionSizes& sizes, const Distances& queries) {
  Distances results = queries;
  const auto widen = [&](int64_t& distance) { distance = distance / sizes.depth * sizes.values; };
  for (int64_t& distance : results.items) widen(distance);
  widen(results.group);
  widen(results.query);
  return results;
}

static RowNumbers read_numbers(const AttentionSizes& sizes, float* data) { return {data, data + sizes.rows()}; }

// out has the queries' order of dimensions. numbers: [2][rows], what the gradient needs of each row.
static ffi::Error Attend(ffi::ThreadPool pool, Array queries, Array keys, Array values, Truths mask, Truths other_mask, Array bias, Truths kept, Result out,
                         Result numbers, Integers words, ffi::Span<const float> constants, bool adds_fill) {
  auto read = read_attention(queries, keys, values, mask, other_mask, bias, kept, words, constants, adds_fill);
  if (read.has_error()) return read.error();
  const Attention& x = read.value();
  if (static_cast<int64_t>(numbers->element_count()) != 2 * x.sizes.rows() ||
      static_cast<int64_t>(out->element_count()) < x.sizes.rows() * x.sizes.values)
    return ffi::Error::InvalidArgument("The results of attention are smaller than its sizes say.");
  const RowNumbers of_rows = read_numbers(x.sizes, numbers->typed_data());
  const Distances out_distances = place_results(x.sizes, x.queries.distances);
  float* means = open_result(out);
  return run_kernel("unisono_attend", [&] {
    const int64_t blocks = x.sizes.blocks();
    run_pieces(pool, x.sizes.item_count() * blocks, [&](int64_t piece) {
      attend_block(x, x.sizes.block(piece / blocks, piece % blocks), means, out_distances, of_rows);
    });
  });
}

// by_scores is empty, or [rows][keys].
static ffi::Error AttendGradient(ffi::ThreadPool pool, Array queries, Array keys, Array values, Truths mask, Truths other_mask, Array bias, Truths kept,
                                 Array numbers, Array by_out, Result by_queries, Result by_keys, Result by_values, Result by_scores,
                                 Integers words, ffi::Span<const float> constants, bool adds_fill) {
  auto read = read_attention(queries, keys, values, mask, other_mask, bias, kept, words, constants, adds_fill);
  if (read.has_error()) return read.error();
  const Attention& x = read.value();
  const int64_t scores = static_cast<int64_t>(by_scores->element_count());
  if (by_queries->element_count() != queries.element_count() || by_keys->element_count() != keys.element_count() ||
      by_values->element_count() != values.element_count() || static_cast<int64_t>(numbers.element_count()) != 2 * x.sizes.rows() ||
      static_cast<int64_t>(by_out.element_count()) < x.sizes.rows() * x.sizes.values ||
      (scores != 0 && scores != x.sizes.rows() * x.sizes.keys))
    return ffi::Error::InvalidArgument("The gradients of attention have other sizes than its arrays.");
  const AttentionGradients g{
      {by_out.typed_data(), place_results(x.sizes, x.queries.distances)},
      read_numbers(x.sizes, numbers.typed_data()),
      {open_result(by_queries), x.queries.distances},
      {open_result(by_keys), x.keys.distances},
      {open_result(by_values), x.values.distances},
      scores == 0 ? nullptr : by_scores->typed_data(),
  };
  return run_kernel("unisono_attend_gradient", [&] { differentiate(pool, x, g); });
}

}  // namespace unisono

#define UNISONO_ATTENTION_ARGUMENTS       \
  xla::ffi::Ffi::Bind()                   \
      .Ctx<xla::ffi::ThreadPool>()        \
      .Arg<unisono::Array>()              \
      .Arg<unisono::Array>()              \
      .Arg<unisono::Array>()              \
      .Arg<unisono::Truths>()             \
      .Arg<unisono::Truths>()             \
      .Arg<unisono::Array>()              \
      .Arg<unisono::Truths>()

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_attend, unisono::Attend,
                              UNISONO_ATTENTION_ARGUMENTS.Ret<unisono::Array>()
                                  .Ret<unisono::Array>()
                                  .Attr<unisono::Integers>("words")
                                  .Attr<xla::ffi::Span<const float>>("constants")
                                  .Attr<bool>("adds_fill"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_attend_gradient, unisono::AttendGradient,
                              UNISONO_ATTENTION_ARGUMENTS.Arg<unisono::Array>()
                                  .Arg<unisono::Array>()
                                  .Ret<unisono::Array>()
                                  .Ret<unisono::Array>()
                                  .Ret<unisono::Array>()
                                  .Ret<unisono::Array>()
                                  .Attr<unisono::Integers>("words")
                                  .Attr<xla::ffi::Span<const float>>("constants")
                                  .Attr<bool>("adds_fill"));
#pragma GCC visibility pop
