// Depthwise convolutions over two dimensions, and their gradients by the kernel: each feature is convolved by itself.
//
// There is little arithmetic for an element, so elements are read where they are. Padding counts as zeros, which a NaN or an infinity turns
// into a NaN, as in a direct convolution.
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "elementwise.h"
#include "pieces.h"
#include "vectors.h"

namespace unisono {
namespace {

constexpr int64_t ELEMENTS_OF_A_PIECE = 1 << 14;
constexpr int64_t LINES_OF_A_PART = 16;  // of a gradient's sums
constexpr int64_t MOST_PARTS = 16;
constexpr int MOST_VECTORS = 4;
const float PADDING[MOST_VECTORS * LANES] = {};

struct DepthwiseGeometry {
  int64_t rows;
  int64_t features;
  Pair size;     // of the input
  Pair taps;     // of the kernel
  Pair results;  // of the output
  Pair strides;
  Pair padding;  // before the input
  Pair dilation;
  Pair spread;   // how far elements of the input lie apart, with zeros between them

  int64_t lines() const { return rows * results.y; }
  int64_t image() const { return size.y * size.x * features; }
};

// Some features beside each other, as vectors.
template <int COUNT>
struct Vectors {
  static constexpr int VECTORS = COUNT;
  Vector read(const float* from) const { return load(from); }
  void write(float* to, Vector value) const { store(to, value); }
};

struct PartOfVector {
  static constexpr int VECTORS = 1;
  int64_t count;
  Vector read(const float* from) const { return load_some(from, count); }
  void write(float* to, Vector value) const { store_some(to, value, count); }
};

// Calls visit(vectors, first) for all features.
template <class Visit>
inline void visit_features(int64_t features, const Visit& visit) {
  int64_t c = 0;
  for (; c + MOST_VECTORS * LANES <= features; c += MOST_VECTORS * LANES) visit(Vectors<MOST_VECTORS>{}, c);
  for (; c + LANES <= features; c += LANES) visit(Vectors<1>{}, c);
  if (c < features) visit(PartOfVector{features - c}, c);
}

// A position of the kernel that meets an element of the input, or padding.
struct Meeting {
  int64_t tap;
  int64_t place;  // of the element; -1 in padding
};

// What the kernel meets along one dimension, for each result. Zeros between elements are left out.
class Meetings {
 public:
  Meetings(int64_t size, int64_t taps, int64_t results, int64_t stride, int64_t padding, int64_t dilation, int64_t spread) {
    for (int64_t result = 0; result < results; result++) {
      ends_.push_back(all_.size());
      for (int64_t tap = 0; tap < taps; tap++) {
        const int64_t place = result * stride - padding + tap * dilation;
        if (place % spread == 0) all_.push_back({tap, place >= 0 && place / spread < size ? place / spread : -1});
      }
    }
    ends_.push_back(all_.size());
  }
  const Meeting* begin(int64_t result) const { return all_.data() + ends_[result]; }
  const Meeting* end(int64_t result) const { return all_.data() + ends_[result + 1]; }

 private:
  std::vector<Meeting> all_;
  std::vector<size_t> ends_;
};

void convolve_depthwise(ffi::ThreadPool& pool, const DepthwiseGeometry& g, const float* input, const float* kernel, float* output) {
  const Meetings of_lines(g.size.y, g.taps.y, g.results.y, g.strides.y, g.padding.y, g.dilation.y, g.spread.y);
  const Meetings in_line(g.size.x, g.taps.x, g.results.x, g.strides.x, g.padding.x, g.dilation.x, g.spread.x);
  const auto convolve_pixel = [&](const float* image, int64_t out_y, int64_t out_x, float* to) {
    visit_features(g.features, [&](auto vectors, int64_t c) {
      Vector sums[vectors.VECTORS] = {};
      for (const Meeting* y = of_lines.begin(out_y); y != of_lines.end(out_y); y++)
        for (const Meeting* x = in_line.begin(out_x); x != in_line.end(out_x); x++) {
          const float* elements = y->place < 0 || x->place < 0 ? PADDING : image + (y->place * g.size.x + x->place) * g.features + c;
          const float* weights = kernel + (y->tap * g.taps.x + x->tap) * g.features + c;
#pragma GCC unroll 4
          for (int i = 0; i < vectors.VECTORS; i++) sums[i] += vectors.read(elements + i * LANES) * vectors.read(weights + i * LANES);
        }
#pragma GCC unroll 4
      for (int i = 0; i < vectors.VECTORS; i++) vectors.write(to + c + i * LANES, sums[i]);
    });
  };
  const int64_t line_size = g.results.x * g.features;
  const int64_t lines_of_a_piece = std::max<int64_t>(1, ELEMENTS_OF_A_PIECE / std::max<int64_t>(1, line_size));
  run_pieces(pool, divide_up(g.lines(), lines_of_a_piece), [&](int64_t piece) {
    const int64_t last = std::min(g.lines(), (piece + 1) * lines_of_a_piece);
    for (int64_t line = piece * lines_of_a_piece; line < last; line++)
      for (int64_t x = 0; x < g.results.x; x++)
        convolve_pixel(input + line / g.results.y * g.image(), line % g.results.y, x, output + line * line_size + x * g.features);
  });
}

// Adds to `sums` what a line of the output says of one position of the kernel. It meets places of a line of the input from `place` on;
// `elements` is null if that line is padding.
void sum_line(const DepthwiseGeometry& g, const float* elements, int64_t place, const float* gradient, float* sums) {
  visit_features(g.features, [&](auto vectors, int64_t c) {
    Vector sum[vectors.VECTORS] = {};
    for (int64_t i = 0; i < g.results.x; i++) {
      const int64_t at = place + i * g.strides.x;
      const float* x = elements == nullptr || at < 0 || at >= g.size.x ? PADDING : elements + at * g.features + c;
      const float* dy = gradient + i * g.features + c;
#pragma GCC unroll 4
      for (int j = 0; j < vectors.VECTORS; j++) sum[j] += vectors.read(x + j * LANES) * vectors.read(dy + j * LANES);
    }
#pragma GCC unroll 4
    for (int j = 0; j < vectors.VECTORS; j++) vectors.write(sums + c + j * LANES, vectors.read(sums + c + j * LANES) + sum[j]);
  });
}

// Each part of the lines has sums of its own, which are added in order.
void sum_depthwise_gradient(ffi::ThreadPool& pool, const DepthwiseGeometry& g, const float* input, const float* gradient, float* result) {
  static thread_local Scratch scratch;
  const int64_t size = g.taps.y * g.taps.x * g.features;
  const int64_t parts = std::clamp<int64_t>(g.lines() / LINES_OF_A_PART, 1, MOST_PARTS);
  float* sums = scratch.get(parts * size);
  run_pieces(pool, parts, [&](int64_t part) {
    clear(size, sums + part * size);
    for (int64_t line = g.lines() * part / parts; line < g.lines() * (part + 1) / parts; line++)
      for (int64_t y = 0; y < g.taps.y; y++) {
        const int64_t in_y = line % g.results.y * g.strides.y - g.padding.y + y * g.dilation.y;
        const bool is_inside = in_y >= 0 && in_y < g.size.y;
        const float* elements = is_inside ? input + line / g.results.y * g.image() + in_y * g.size.x * g.features : nullptr;
        for (int64_t x = 0; x < g.taps.x; x++)
          sum_line(g, elements, x * g.dilation.x - g.padding.x, gradient + line * g.results.x * g.features,
                   sums + part * size + (y * g.taps.x + x) * g.features);
      }
  });
  for (int64_t i = 0; i < size; i++) {
    float sum = sums[i];
    for (int64_t part = 1; part < parts; part++) sum += sums[part * size + i];
    result[i] = sum;
  }
}

// input: (rows, y, x, features); kernel: (y, x, features); output: (rows, y, x, features).
ffi::ErrorOr<DepthwiseGeometry> read_depthwise(ffi::Span<const int64_t> input, ffi::Span<const int64_t> kernel, ffi::Span<const int64_t> output,
                                               Integers strides, Integers padding, Integers dilation, Integers spread) {
  if (input.size() != 4 || kernel.size() != 3 || output.size() != 4 || strides.size() != 2 || padding.size() != 2 || dilation.size() != 2 ||
      spread.size() != 2 || input[0] != output[0] || input[3] != kernel[2] || output[3] != kernel[2])
    return ffi::Unexpected(ffi::Error::InvalidArgument("A depthwise convolution takes (rows, y, x, features) and a kernel (y, x, features)."));
  return DepthwiseGeometry{input[0],
                           input[3],
                           {input[1], input[2]},
                           {kernel[0], kernel[1]},
                           {output[1], output[2]},
                           to_pair(strides),
                           to_pair(padding),
                           to_pair(dilation),
                           to_pair(spread)};
}

ffi::Error ConvolveDepthwise(ffi::ThreadPool pool, Array input, Array kernel, Result output, Integers strides, Integers padding,
                             Integers dilation, Integers spread) {
  const auto g = read_depthwise(input.dimensions(), kernel.dimensions(), output->dimensions(), strides, padding, dilation, spread);
  if (g.has_error()) return g.error();
  float* to = open_result(output);
  return run_kernel("unisono_convolve_depthwise", [&] { convolve_depthwise(pool, *g, input.typed_data(), kernel.typed_data(), to); });
}

ffi::Error DepthwiseGradient(ffi::ThreadPool pool, Array input, Array gradient, Result result, Integers strides, Integers padding,
                             Integers dilation, Integers spread) {
  const auto g = read_depthwise(input.dimensions(), result->dimensions(), gradient.dimensions(), strides, padding, dilation, spread);
  if (g.has_error()) return g.error();
  if (g->spread.y != 1 || g->spread.x != 1) return ffi::Error::InvalidArgument("The gradient by a kernel takes an input without spread.");
  return run_kernel("unisono_depthwise_kernel_gradient",
                    [&] { sum_depthwise_gradient(pool, *g, input.typed_data(), gradient.typed_data(), result->typed_data()); });
}

}  // namespace
}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_convolve_depthwise, unisono::ConvolveDepthwise, unisono::bind_convolution().Attr<unisono::Integers>("spread"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_depthwise_kernel_gradient, unisono::DepthwiseGradient, unisono::bind_convolution().Attr<unisono::Integers>("spread"));
#pragma GCC visibility pop
