#include "winograd.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "product.h"
#include "vectors.h"

namespace unisono {

namespace {

constexpr int64_t LINES = 4;         // of the places of a tile: each needs two lines of the input
constexpr int64_t LINE_PLACES = 4;
constexpr int64_t PLACES = LINES * LINE_PLACES;
constexpr int64_t BLOCK_TILES = 48;  // tiles at a time
constexpr int64_t LEAST_FEATURES = 32;
constexpr int64_t LEAST_TILES = 64;  // the transformed kernel must be worth its time
constexpr int64_t FEATURE_UNIT = 16;  // features come in whole vectors, whatever the processor's vectors are

struct Tiles {
  Geometry g;
  Pair count;  // of one row of the batch

  explicit Tiles(const Geometry& geometry) : g(geometry), count{(geometry.results.y + 1) / 2, (geometry.results.x + 1) / 2} {}
  int64_t total() const { return g.rows * count.y * count.x; }
  int64_t blocks() const { return divide_up(total(), BLOCK_TILES); }
};

// A tile, from which the following ones are reached without divisions.
struct Tile {
  int64_t row;
  int64_t y;  // of its first output
  int64_t x;
  bool has_second_y;
  bool has_second_x;

  Tile(const Tiles& tiles, int64_t number)
      : row(number / (tiles.count.x * tiles.count.y)),
        y(2 * (number / tiles.count.x % tiles.count.y)),
        x(2 * (number % tiles.count.x)) {
    find_seconds(tiles);
  }

  void step(const Tiles& tiles) {
    x += 2;
    if (x >= tiles.g.results.x) {
      x = 0;
      y += 2;
    }
    if (y >= tiles.g.results.y) {
      y = 0;
      row++;
    }
    find_seconds(tiles);
  }

 private:
  void find_seconds(const Tiles& tiles) {
    has_second_y = y + 1 < tiles.g.results.y;
    has_second_x = x + 1 < tiles.g.results.x;
  }
};

const float* find_input(const Geometry& g, const float* input, const Tile& tile, int64_t y, int64_t x) {
  const int64_t in_y = tile.y - g.padding.y + y;
  const int64_t in_x = tile.x - g.padding.x + x;
  if (in_y < 0 || in_y >= g.size.y || in_x < 0 || in_x >= g.size.x) return nullptr;
  return input + ((tile.row * g.size.y + in_y) * g.size.x + in_x) * g.ins;
}

float* find_output(const Geometry& g, float* output, const Tile& tile) {
  return output + ((tile.row * g.results.y + tile.y) * g.results.x + tile.x) * g.outs;
}

// The memory of one block of tiles: some places of a transformed side with `ins` features and of one with `outs`, and a row of zeros.
struct Block {
  int64_t in_row, out_row;      // distances of tiles
  int64_t in_place, out_place;  // distances of places
  float *in, *out, *zeros;

  Block(const Geometry& g, int64_t places) {
    const int64_t outs = count_panels(g.outs) * TILE_COLUMNS;
    in_row = g.ins + ROW_GAP;
    out_row = outs + ROW_GAP;
    in_place = BLOCK_TILES * in_row;
    out_place = BLOCK_TILES * out_row;
    const int64_t longest = std::max(g.ins, outs);
    in = block_scratch().get(places * (in_place + out_place) + longest);
    out = in + places * in_place;
    zeros = out + places * out_place;
    clear(longest, zeros);
  }
};

// Calls use(line) with the number of a line of places as a constant.
template <class Use>
void with_line(int64_t line, const Use& use) {
  if (line == 0) use(std::integral_constant<int, 0>());
  if (line == 1) use(std::integral_constant<int, 1>());
  if (line == 2) use(std::integral_constant<int, 2>());
  if (line == 3) use(std::integral_constant<int, 3>());
}

// B^T d B, one line of its places. `to`: [LINE_PLACES][BLOCK_TILES][block.in_row]
template <int LINE>
void transform_input(const Tiles& tiles, const float* input, int64_t first, int64_t count, const Block& block, float* to) {
  constexpr int UPPER[] = {0, 1, 2, 1}, LOWER[] = {2, 2, 1, 3};
  const Geometry& g = tiles.g;
  Tile tile(tiles, first);
  for (int64_t t = 0; t < count; t++, tile.step(tiles), to += block.in_row) {
    const float *upper[4], *lower[4];
    for (int j = 0; j < 4; j++) {
      upper[j] = find_input(g, input, tile, UPPER[LINE], j);
      lower[j] = find_input(g, input, tile, LOWER[LINE], j);
      if (upper[j] == nullptr) upper[j] = block.zeros;
      if (lower[j] == nullptr) lower[j] = block.zeros;
    }
    for (int64_t c = 0; c < g.ins; c += LANES) {
      Vector r[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const Vector a = load(upper[j] + c), b = load(lower[j] + c);
        r[j] = LINE == 1 ? a + b : a - b;
      }
      store(to + c, r[0] - r[2]);
      store(to + block.in_place + c, r[1] + r[2]);
      store(to + 2 * block.in_place + c, r[2] - r[1]);
      store(to + 3 * block.in_place + c, r[1] - r[3]);
    }
  }
}

// Computes outputs of a tile directly.
void convolve_tile(const Geometry& g, const float* input, const float* kernel, const Epilogue& epilogue, const Tile& tile, float* output) {
  for (int64_t i = 0; i < 1 + tile.has_second_y; i++)
    for (int64_t j = 0; j < 1 + tile.has_second_x; j++) {
      float* to = find_output(g, output, tile) + (i * g.results.x + j) * g.outs;
      clear(g.outs, to);
      for (int64_t tap = 0; tap < 9; tap++) {
        const float* from = find_input(g, input, tile, i + tap / 3, j + tap % 3);
        for (int64_t k = 0; k < g.ins; k++) {
          const float element = from == nullptr ? 0.0f : from[k];
          const float* weights = kernel + (tap * g.ins + k) * g.outs;
          for (int64_t c = 0; c < g.outs; c += LANES) store(to + c, load(to + c) + element * load(weights + c));
        }
      }
      epilogue.finish_rows(1, 0, g.outs, to, g.outs);
    }
}

// A^T m A. Returns whether the outputs are finite, before the epilogue.
bool transform_output(const Geometry& g, const Tile& tile, const float* m, int64_t place, const Epilogue& epilogue, float* output) {
  const int64_t below = g.results.x * g.outs;
  float* to = find_output(g, output, tile);
  Vector nothing{};  // a NaN where an output is not finite
  for (int64_t c = 0; c < g.outs; c += LANES) {
    Vector r[2][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const Vector m0 = load(m + j * place + c), m1 = load(m + (4 + j) * place + c);
      const Vector m2 = load(m + (8 + j) * place + c), m3 = load(m + (12 + j) * place + c);
      r[0][j] = m0 + m1 + m2;
      r[1][j] = m1 - m2 - m3;
    }
    const Vector y00 = r[0][0] + r[0][1] + r[0][2], y01 = r[0][1] - r[0][2] - r[0][3];
    const Vector y10 = r[1][0] + r[1][1] + r[1][2], y11 = r[1][1] - r[1][2] - r[1][3];
    const Vector bias = epilogue.load_bias(c);
    store(to + c, epilogue.finish(y00, bias));
    if (tile.has_second_x) store(to + g.outs + c, epilogue.finish(y01, bias));
    if (tile.has_second_y) store(to + below + c, epilogue.finish(y10, bias));
    if (tile.has_second_x && tile.has_second_y) store(to + below + g.outs + c, epilogue.finish(y11, bias));
    nothing += (y00 * 0.0f + y01 * 0.0f) + (y10 * 0.0f + y11 * 0.0f);
  }
  return !has_nonfinite(nothing);
}

// A line of A d
template <int LINE>
inline __attribute__((always_inline)) Vector add_rows(Vector upper, Vector lower) {
  if constexpr (LINE == 0) return upper;
  if constexpr (LINE == 1) return upper + lower;
  if constexpr (LINE == 2) return upper - lower;
  return -lower;
}

// A d A^T of the gradient by the output, one line of its places. `to`: [LINE_PLACES][BLOCK_TILES][block.out_row]
template <int LINE>
void transform_output_gradient(const Tiles& tiles, const float* gradient, int64_t first, int64_t count, const Block& block, float* to) {
  const Geometry& g = tiles.g;
  Tile tile(tiles, first);
  for (int64_t t = 0; t < count; t++, tile.step(tiles), to += block.out_row) {
    const float* d00 = gradient + ((tile.row * g.results.y + tile.y) * g.results.x + tile.x) * g.outs;
    const float* d01 = tile.has_second_x ? d00 + g.outs : block.zeros;
    const float* d10 = tile.has_second_y ? d00 + g.results.x * g.outs : block.zeros;
    const float* d11 = tile.has_second_x && tile.has_second_y ? d00 + (g.results.x + 1) * g.outs : block.zeros;
    for (int64_t c = 0; c < g.outs; c += LANES) {
      const Vector left = add_rows<LINE>(load(d00 + c), load(d10 + c)), right = add_rows<LINE>(load(d01 + c), load(d11 + c));
      store(to + c, left);
      store(to + block.out_place + c, left + right);
      store(to + 2 * block.out_place + c, left - right);
      store(to + 3 * block.out_place + c, -right);
    }
  }
}

// G g G^T of a vector of output features. `tap` is the distance of taps, `place` that of places.
void transform_weights(const float* from, int64_t tap, float* to, int64_t place) {
  Vector r[4][3];
#pragma GCC unroll 3
  for (int j = 0; j < 3; j++) {
    const Vector g0 = load(from + j * tap), g1 = load(from + (3 + j) * tap), g2 = load(from + (6 + j) * tap);
    const Vector outer = (g0 + g2) * 0.5f, inner = g1 * 0.5f;
    r[0][j] = g0;
    r[1][j] = outer + inner;
    r[2][j] = outer - inner;
    r[3][j] = g2;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const Vector outer = (r[i][0] + r[i][2]) * 0.5f, inner = r[i][1] * 0.5f;
    store(to + 4 * i * place, r[i][0]);
    store(to + (4 * i + 1) * place, outer + inner);
    store(to + (4 * i + 2) * place, outer - inner);
    store(to + (4 * i + 3) * place, r[i][2]);
  }
}

// Transforms the weights of input features k0 to k1, which are whole units, as panels: [PLACES][panels][ins][TILE_COLUMNS]
void transform_kernel(const Geometry& g, Weights kernel, int64_t k0, int64_t k1, float* transformed) {
  const int64_t tap = g.ins * g.outs;
  const int64_t place = count_panels(g.outs) * g.ins * TILE_COLUMNS;
  const auto find = [&](int64_t k, int64_t c) { return transformed + (c / TILE_COLUMNS * g.ins + k) * TILE_COLUMNS + c % TILE_COLUMNS; };
  if (!kernel.is_reversed) {
    for (int64_t k = k0; k < k1; k++)
      for (int64_t c = 0; c < g.outs; c += LANES) transform_weights(kernel.values + k * g.outs + c, tap, find(k, c), place);
    return;
  }
  constexpr int64_t SQUARE = LANES * LANES;
  float squares[9 * SQUARE];
  for (int64_t c = 0; c < g.outs; c += LANES)
    for (int64_t k = k0; k < k1; k += LANES) {
      for (int64_t i = 0; i < 9; i++) transpose_square(kernel.values + (8 - i) * tap + c * g.ins + k, g.ins, squares + i * SQUARE, LANES);
      for (int64_t i = 0; i < LANES; i++) transform_weights(squares + i * LANES, SQUARE, find(k + i, c), place);
    }
}

// The weights in the order [9][ins][outs], copied when they are first asked for.
class OrderedWeights {
 public:
  OrderedWeights(const Geometry& g, Weights kernel) : g_(g), kernel_(kernel) {}

  const float* get() {
    if (!kernel_.is_reversed) return kernel_.values;
    std::call_once(is_copied_, [&] {
      copy_.resize(9 * g_.ins * g_.outs);
      for (int64_t i = 0; i < 9; i++)
        for (int64_t k = 0; k < g_.ins; k++)
          for (int64_t c = 0; c < g_.outs; c++) copy_[(i * g_.ins + k) * g_.outs + c] = kernel_.values[((8 - i) * g_.outs + c) * g_.ins + k];
    });
    return copy_.data();
  }

 private:
  const Geometry& g_;
  const Weights kernel_;
  std::once_flag is_copied_;
  std::vector<float> copy_;
};

// G^T u G of input features k0 to k1. u: [PLACES][ins][outs]. Returns whether the gradient is finite.
bool transform_kernel_gradient(const Geometry& g, const float* u, int64_t k0, int64_t k1, float* result) {
  const int64_t tap = g.ins * g.outs;
  Vector nothing{};
  for (int64_t i = k0 * g.outs; i < k1 * g.outs; i += LANES) {
    const float* from = u + i;
    Vector r[3][4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const Vector u0 = load(from + j * tap), u1 = load(from + (4 + j) * tap), u2 = load(from + (8 + j) * tap), u3 = load(from + (12 + j) * tap);
      const Vector outer = (u1 + u2) * 0.5f;
      r[0][j] = u0 + outer;
      r[1][j] = (u1 - u2) * 0.5f;
      r[2][j] = outer + u3;
    }
    float* to = result + i;
#pragma GCC unroll 3
    for (int j = 0; j < 3; j++) {
      const Vector outer = (r[j][1] + r[j][2]) * 0.5f;
      const Vector g0 = r[j][0] + outer, g1 = (r[j][1] - r[j][2]) * 0.5f, g2 = outer + r[j][3];
      store(to + 3 * j * tap, g0);
      store(to + (3 * j + 1) * tap, g1);
      store(to + (3 * j + 2) * tap, g2);
      nothing += g0 * 0.0f + g1 * 0.0f + g2 * 0.0f;
    }
  }
  return !has_nonfinite(nothing);
}

int64_t count_kernel_pieces(const Geometry& g) { return g.ins * g.outs >= 1 << 14 ? 8 : 1; }

}  // namespace

bool is_for_winograd(const Geometry& g) {
  const bool is_three_by_three = g.taps.y == 3 && g.taps.x == 3;
  const bool is_dense = g.strides.y == 1 && g.strides.x == 1 && g.dilation.y == 1 && g.dilation.x == 1;
  const bool has_features = g.ins % FEATURE_UNIT == 0 && g.outs % FEATURE_UNIT == 0 && std::min(g.ins, g.outs) >= LEAST_FEATURES;
  return is_three_by_three && is_dense && has_features && Tiles(g).total() >= LEAST_TILES;
}

void convolve_by_winograd(ffi::ThreadPool& pool, const Geometry& g, const float* input, Weights kernel, const Epilogue& epilogue, float* output) {
  const Tiles tiles(g);
  const int64_t panels = count_panels(g.outs);
  const int64_t place = panels * g.ins * TILE_COLUMNS;
  float* transformed = packed_scratch().get(PLACES * place);
  if (g.outs % TILE_COLUMNS != 0) clear(PLACES * place, transformed);
  const int64_t kernel_pieces = count_kernel_pieces(g);
  const int64_t units = g.ins / FEATURE_UNIT;
  run_pieces(pool, kernel_pieces, [&](int64_t piece) {
    transform_kernel(g, kernel, units * piece / kernel_pieces * FEATURE_UNIT, units * (piece + 1) / kernel_pieces * FEATURE_UNIT, transformed);
  });
  OrderedWeights ordered(g, kernel);
  run_pieces(pool, tiles.blocks(), [&](int64_t number) {
    const int64_t first = number * BLOCK_TILES;
    const int64_t count = std::min(BLOCK_TILES, tiles.total() - first);
    const Block block(g, PLACES);
    for (int64_t line = 0; line < LINES; line++)
      with_line(line, [&](auto constant) {
        transform_input<constant.value>(tiles, input, first, count, block, block.in + line * LINE_PLACES * block.in_place);
      });
    for (int64_t p = 0; p < PLACES; p++)
      for (int64_t panel = 0; panel < panels; panel++)
        multiply_panel<false, true>(count, g.ins, block.in + p * block.in_place, block.in_row,
                                    transformed + p * place + panel * g.ins * TILE_COLUMNS,
                                    block.out + p * block.out_place + panel * TILE_COLUMNS, block.out_row, TILE_COLUMNS);
    Tile tile(tiles, first);
    for (int64_t t = 0; t < count; t++, tile.step(tiles))
      if (!transform_output(g, tile, block.out + t * block.out_row, block.out_place, epilogue, output))
        convolve_tile(g, input, ordered.get(), epilogue, tile, output);
  });
}

bool find_kernel_gradient_by_winograd(ffi::ThreadPool& pool, const Geometry& g, const float* input, const float* gradient, float* result) {
  const Tiles tiles(g);
  const int64_t size = g.ins * g.outs;
  const int64_t panels = count_panels(g.outs);
  // Parts of the tiles, whose sums are added in order, and lines of places, which have nothing in common.
  const int64_t parts = std::clamp<int64_t>(tiles.blocks() / 4, 1, 4);
  float* sums = packed_scratch().get(parts * PLACES * size);
  run_pieces(pool, parts * LINES, [&](int64_t piece) {
    const int64_t part = piece / LINES;
    float* u = sums + piece * LINE_PLACES * size;
    const Block block(g, LINE_PLACES);
    const int64_t begin = tiles.blocks() * part / parts;
    const int64_t end = tiles.blocks() * (part + 1) / parts;
    static thread_local Scratch panel_scratch;
    float* packed = panel_scratch.get(BLOCK_TILES * TILE_COLUMNS);
    for (int64_t number = begin; number < end; number++) {
      const int64_t first = number * BLOCK_TILES;
      const int64_t count = std::min(BLOCK_TILES, tiles.total() - first);
      with_line(piece % LINES, [&](auto line) {
        transform_input<line.value>(tiles, input, first, count, block, block.in);
        transform_output_gradient<line.value>(tiles, gradient, first, count, block, block.out);
      });
      for (int64_t p = 0; p < LINE_PLACES; p++)
        for (int64_t panel = 0; panel < panels; panel++) {
          const int64_t width = std::min<int64_t>(TILE_COLUMNS, g.outs - panel * TILE_COLUMNS);
          for (int64_t t = 0; t < count; t++)
            copy(block.out + p * block.out_place + t * block.out_row + panel * TILE_COLUMNS, TILE_COLUMNS, packed + t * TILE_COLUMNS);
          float* to = u + p * size + panel * TILE_COLUMNS;
          const float* in = block.in + p * block.in_place;
          if (number == begin)
            multiply_panel<false, false>(g.ins, count, in, block.in_row, packed, to, g.outs, width);
          else
            multiply_panel<true, false>(g.ins, count, in, block.in_row, packed, to, g.outs, width);
        }
    }
  });
  std::atomic<bool> is_finite{true};
  const int64_t pieces = count_kernel_pieces(g);
  run_pieces(pool, pieces, [&](int64_t piece) {
    const int64_t k0 = g.ins * piece / pieces;
    const int64_t k1 = g.ins * (piece + 1) / pieces;
    for (int64_t p = 0; p < PLACES; p++)
      for (int64_t i = p * size + k0 * g.outs; i < p * size + k1 * g.outs; i += LANES)
        for (int64_t part = 1; part < parts; part++) store(sums + i, load(sums + i) + load(sums + part * PLACES * size + i));
    if (!transform_kernel_gradient(g, sums, k0, k1, result)) is_finite = false;
  });
  return is_finite;
}

}  // namespace unisono
