// Functions of vectors, and loops over the elements of rows.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace unisono {

typedef int32_t Integers32 __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1)));

inline Integers32 to_bits(Vector value) { return reinterpret_cast<Integers32>(value); }
inline Vector from_bits(Integers32 bits) { return reinterpret_cast<Vector>(bits); }
inline Integers32 splat_bits(int32_t bits) { return bits - Integers32{}; }
// Returns `yes` where the mask is set, else `no`.
inline Vector choose(Integers32 mask, Vector yes, Vector no) { return from_bits((to_bits(yes) & mask) | (to_bits(no) & ~mask)); }
inline Vector to_truth(Integers32 mask) { return from_bits(mask & to_bits(splat(1.0f))); }
inline Vector absolute(Vector x) { return from_bits(to_bits(x) & splat_bits(0x7fffffff)); }
inline Vector with_sign_of(Vector size, Vector sign) { return from_bits(to_bits(size) | (to_bits(sign) & splat_bits(INT32_MIN))); }
// An operand that is not a number is the result, as in XLA.
inline Vector larger(Vector x, Vector y) { return choose((x > y) | (x != x), x, y); }
inline Vector smaller(Vector x, Vector y) { return choose((x < y) | (x != x), x, y); }

// Returns 2 to the power of whole numbers from -127 to 128, which are given as floats plus 1.5 * 2^23.
inline Vector raise_two(Vector shifted) { return from_bits((to_bits(shifted) + splat_bits(127 - 0x4b400000)) << 23); }

// Returns x within bounds; what is not a number stays.
inline Vector bound(Vector x, float low, float high) {
  const Vector raised = splat(low) > x ? splat(low) : x;
  return splat(high) < raised ? splat(high) : raised;
}

// A power of e as 2^n * (1 + rest), where n is whole.
struct PowerOfE {
  Vector n;
  Vector shifted;  // n + TO_INTEGER
  Vector rest;
};

constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: a float of this size has no digits behind the point

// e^x = 2^n * e^r, where |r| <= ln(2) / 2, and e^r is a polynomial. x is from -104 to 89.
inline PowerOfE split_power(Vector x) {
  const Vector shifted = x * 1.44269504f + TO_INTEGER;
  const Vector n = shifted - TO_INTEGER;
  const Vector r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return {n, shifted, p * (r * r) + r};
}

// Returns x * 2^n.
inline Vector scale_by_power(Vector x, Vector n) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_scalef_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(n)));
#else
  // In two factors, since 2^n alone may be too large or too small for a float.
  const Vector half = n * 0.5f + TO_INTEGER;
  const Vector rest = n - (half - TO_INTEGER) + TO_INTEGER;
  return x * raise_two(half) * raise_two(rest);
#endif
}

// e to the power of x. Errors are within one unit of the last place.
inline Vector exponential(Vector x) {
  const PowerOfE power = split_power(bound(x, -104.0f, 89.0f));
  return scale_by_power(power.rest + 1.0f, power.n);
}

inline Vector logistic(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

// The hyperbolic tangent, from e^2x - 1, which loses no digits near zero. Errors are within 3 units of the last place.
inline Vector tangent(Vector x) {
  const PowerOfE power = split_power(bound(x + x, -20.0f, 20.0f));
  const Vector whole = raise_two(power.shifted);
  const Vector less_one = power.rest * whole + (whole - 1.0f);
  return with_sign_of(less_one / (less_one + 2.0f), x);  // of zeros, too
}

// By the processor's instruction: compilers call a function for each lane, which may set an error number.
inline Vector square_root(Vector x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_sqrt_ps(reinterpret_cast<__m512>(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<Vector>(_mm256_sqrt_ps(reinterpret_cast<__m256>(x)));
#else
  Vector y;
  for (int lane = 0; lane < LANES; lane++) y[lane] = __builtin_sqrtf(x[lane]);
  return y;
#endif
}

inline Vector load_some(const float* from, int64_t count) {
  Vector value{};
  std::memcpy(&value, from, count * sizeof(float));
  return value;
}

inline void store_some(float* to, Vector value, int64_t count) { std::memcpy(to, &value, count * sizeof(float)); }

// The same for a count that is nearly always that of a whole vector.
inline Vector load_lanes(const float* from, int64_t count) { return count == LANES ? load(from) : load_some(from, count); }
inline void store_lanes(float* to, Vector value, int64_t count) { count == LANES ? store(to, value) : store_some(to, value, count); }

// Some rows of an operand: each has its own place, or one number for the whole row.
struct Rows {
  const float* first;
  int64_t distance;  // of rows, in floats; 0 if all rows are the same
  bool is_number;
};

template <bool IS_NUMBER>
struct Reader {
  explicit Reader(const float* row) : row(row), number(IS_NUMBER ? splat(*row) : Vector{}) {}
  Vector read(int64_t i) const { return IS_NUMBER ? number : load(row + i); }
  Vector read_some(int64_t i, int64_t count) const { return IS_NUMBER ? number : load_some(row + i, count); }
  const float* row;
  Vector number;
};

template <bool A, class Function>
void map_row(const Function& f, const float* a, float* to, int64_t width) {
  const Reader<A> x(a);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(to + i, f(x.read(i)));
  if (i < width) store_some(to + i, f(x.read_some(i, width - i)), width - i);
}

template <bool A, bool B, class Function>
void map_row(const Function& f, const float* a, const float* b, float* to, int64_t width) {
  const Reader<A> x(a);
  const Reader<B> y(b);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(to + i, f(x.read(i), y.read(i)));
  if (i < width) store_some(to + i, f(x.read_some(i, width - i), y.read_some(i, width - i)), width - i);
}

template <class Function>
void map_rows(const Function& f, const Rows& a, float* to, int64_t to_distance, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; i++) {
    const float* x = a.first + i * a.distance;
    float* y = to + i * to_distance;
    a.is_number ? map_row<true>(f, x, y, width) : map_row<false>(f, x, y, width);
  }
}

template <class Function>
void map_rows(const Function& f, const Rows& a, const Rows& b, float* to, int64_t to_distance, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; i++) {
    const float* x = a.first + i * a.distance;
    const float* y = b.first + i * b.distance;
    float* z = to + i * to_distance;
    if (a.is_number)
      b.is_number ? map_row<true, true>(f, x, y, z, width) : map_row<true, false>(f, x, y, z, width);
    else
      b.is_number ? map_row<false, true>(f, x, y, z, width) : map_row<false, false>(f, x, y, z, width);
  }
}

// Writes `yes` where a condition is not 0, else `no`.
inline void choose_rows(const Rows& condition, const Rows& yes, const Rows& no, float* to, int64_t to_distance, int64_t rows, int64_t width) {
  const auto read = [](const Rows& from, int64_t row, int64_t i, int64_t count) {
    const float* first = from.first + row * from.distance;
    return from.is_number ? splat(*first) : count == LANES ? load(first + i) : load_some(first + i, count);
  };
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < width; i += LANES) {
      const int64_t count = width - i < LANES ? width - i : LANES;
      const Integers32 mask = read(condition, row, i, count) != 0.0f;
      const Vector value = choose(mask, read(yes, row, i, count), read(no, row, i, count));
      float* place = to + row * to_distance + i;
      count == LANES ? store(place, value) : store_some(place, value, count);
    }
}

}  // namespace unisono
