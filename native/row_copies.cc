// Copies of chosen rows of an array on the host, for the next step: written past the caches, where the running step has its data.
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace unisono {
namespace {

constexpr int64_t LINE = 64;  // of a cache, in bytes
constexpr int64_t READ_AHEAD = 512;  // bytes of the next row: the processor finds the rest of a row by itself

// Writes a whole line of a cache, which begins at a multiple of its size.
inline void write_line(char* to, const char* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif defined(__AVX2__)
  for (int half = 0; half < 2; half++)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + half, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half));
#else
  std::memcpy(to, from, LINE);
#endif
}

// Makes what was written past the caches visible to other threads before anything that is written later.
inline void end_of_writes() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

inline void copy_row(char* to, const char* from, int64_t bytes) {
  const int64_t before = std::min<int64_t>(bytes, -reinterpret_cast<uintptr_t>(to) % LINE);
  std::memcpy(to, from, before);
  int64_t byte = before;
  for (; byte + LINE <= bytes; byte += LINE) write_line(to + byte, from + byte);
  std::memcpy(to + byte, from + byte, bytes - byte);
}

}  // namespace
}  // namespace unisono

// Writes row chosen[i] of an array with `rows` rows of `bytes` bytes to row i of `to`. Numbers outside of the array stand for its nearest row.
extern "C" __attribute__((visibility("default"))) void unisono_copy_rows(const char* array, int64_t rows, int64_t bytes, const int64_t* chosen,
                                                                        int64_t count, char* to) {
  const auto find_row = [&](int64_t i) { return array + std::clamp<int64_t>(chosen[i], 0, rows - 1) * bytes; };
  for (int64_t i = 0; i < count; i++) {
    if (i + 1 < count) {
      const char* next = find_row(i + 1);
      for (int64_t byte = 0; byte < std::min(bytes, unisono::READ_AHEAD); byte += unisono::LINE) __builtin_prefetch(next + byte);
    }
    unisono::copy_row(to + i * bytes, find_row(i), bytes);
  }
  unisono::end_of_writes();
}
