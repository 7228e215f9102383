// The geometry of a convolution over two dimensions, rows and features last, and its input as the rows of a matrix.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace unisono {

struct Pair {
  int64_t y;
  int64_t x;
};

struct Geometry {
  int64_t rows;
  Pair size;     // of the input
  int64_t ins;   // features of the input
  Pair taps;     // of the kernel
  Pair results;  // of the output
  int64_t outs;  // features of the output
  Pair strides;
  Pair padding;  // before the input
  Pair dilation;

  int64_t pixels() const { return rows * results.y * results.x; }
  int64_t depth() const { return taps.y * taps.x * ins; }
};

// The weights of a convolution: [taps.y][taps.x][ins][outs], or as the convolution has them whose gradient by the input this one is:
// the last tap first, and of each tap [outs][ins].
struct Weights {
  const float* values;
  bool is_reversed;
};

inline void copy(const float* from, int64_t count, float* to) { std::memcpy(to, from, count * sizeof(float)); }
inline void clear(int64_t count, float* to) { std::memset(to, 0, count * sizeof(float)); }

// Copies a few elements; for them, a call of the C library takes longer than the copy.
inline void copy_few(const float* from, int64_t count, float* to) {
  for (; count >= 4; count -= 4, from += 4, to += 4) copy(from, 4, to);
  if (count & 2) {
    copy(from, 2, to);
    from += 2;
    to += 2;
  }
  if (count & 1) *to = *from;
}

// Writes elements `first` to `last` of a line of the input, with zeros outside of it.
inline void copy_padded(const float* line, int64_t length, int64_t first, int64_t last, float* to) {
  const int64_t inside = std::clamp<int64_t>(first, 0, length);
  const int64_t outside = std::clamp<int64_t>(last, inside, length);
  if (inside == outside) {
    clear(last - first, to);
    return;
  }
  clear(inside - first, to);
  copy(line + inside, outside - inside, to + inside - first);
  clear(last - outside, to + outside - first);
}

constexpr int64_t FEW = 32;

// Writes elements k0 to k1 of what the kernel reads, in the order [taps.y][taps.x][ins], for some pixels of the output: a row each.
inline void read_pixels(const Geometry& g, const float* input, int64_t first_pixel, int64_t count, int64_t k0, int64_t k1, float* to,
                        int64_t to_row) {
  if (k0 == k1) return;  // no features, for example
  // Taps in a row lie beside each other in the input, if they are not dilated.
  const bool is_joined = g.dilation.x == 1;
  const int64_t length = is_joined ? g.taps.x * g.ins : g.ins;
  const int64_t line = g.size.x * g.ins;
  const int64_t first_run = k0 / length;
  int64_t out_x = first_pixel % g.results.x;
  int64_t out_y = first_pixel / g.results.x % g.results.y;
  const float* image = input + first_pixel / (g.results.x * g.results.y) * g.size.y * line;
  for (int64_t i = 0; i < count; i++, to += to_row) {
    const int64_t x0 = out_x * g.strides.x - g.padding.x;
    const int64_t y0 = out_y * g.strides.y - g.padding.y;
    for (int64_t run = first_run; run * length < k1; run++) {
      const int64_t begin = std::max(k0, run * length);
      const int64_t end = std::min(k1, (run + 1) * length);
      const int64_t y = y0 + (is_joined ? run : run / g.taps.x) * g.dilation.y;
      const int64_t x = x0 + (is_joined ? 0 : run % g.taps.x * g.dilation.x);
      const int64_t first = x * g.ins + begin - run * length;
      const int64_t last = first + end - begin;
      if (y < 0 || y >= g.size.y)
        clear(end - begin, to + begin - k0);
      else if (first >= 0 && last <= line && end - begin <= FEW)
        copy_few(image + y * line + first, end - begin, to + begin - k0);
      else
        copy_padded(image + y * line, line, first, last, to + begin - k0);
    }
    if (++out_x == g.results.x) {
      out_x = 0;
      if (++out_y == g.results.y) {
        out_y = 0;
        image += g.size.y * line;
      }
    }
  }
}

}  // namespace unisono
