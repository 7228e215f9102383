// A digest of an array: two sums of its words, each word times a key of its place. The sums are modulo 2^32, so they may be added in any
// order, and the digest of a whole is the sum of the digests of its parts. `unisono/_src/engine/digest.py` has the same in Python.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace unisono {

constexpr int DIGEST_LANES = 2;
constexpr int64_t WORDS_OF_A_CHUNK = 1024;

struct Digest {
  uint32_t lanes[DIGEST_LANES] = {0, 0};
};

// For each lane and each place in a chunk: the factors of the low and of the high half of a word.
struct DigestKeys {
  alignas(64) int16_t halves[DIGEST_LANES][2 * WORDS_OF_A_CHUNK];

  DigestKeys() {
    uint64_t state = 0;
    for (int64_t place = 0; place < WORDS_OF_A_CHUNK; place++) {
      int16_t drawn[4];
      do {
        const uint64_t bits = next(state);
        for (int i = 0; i < 4; i++) drawn[i] = static_cast<int16_t>(bits >> (16 * i) | 1);
      } while (hides_a_change(drawn));
      for (int lane = 0; lane < DIGEST_LANES; lane++)
        for (int half = 0; half < 2; half++) halves[lane][2 * place + half] = drawn[2 * lane + half];
    }
  }

 private:
  // SplitMix64.
  static uint64_t next(uint64_t& state) {
    uint64_t bits = state += 0x9E3779B97F4A7C15u;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
  }

  // Returns whether some change of one word may leave both sums as they are. Where the determinant of the four factors is no multiple of
  // 2^16, none does.
  static bool hides_a_change(const int16_t* drawn) {
    const int64_t determinant = int64_t{drawn[0]} * drawn[3] - int64_t{drawn[1]} * drawn[2];
    return determinant % (1 << 16) == 0;
  }
};

// Returns the factor of a chunk's sum.
inline uint32_t chunk_factor(uint32_t chunk, int lane) {
  uint32_t bits = 2 * chunk + static_cast<uint32_t>(lane) + 0x9E3779B9u;
  bits = (bits ^ bits >> 16) * 0x85EBCA6Bu;
  bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
  return (bits ^ bits >> 16) | 1;
}

#if defined(__AVX512BW__)
using Halves = __m512i;
inline Halves load_halves(const int16_t* from) { return _mm512_loadu_si512(from); }
inline Halves multiply_pairs(Halves left, Halves right) { return _mm512_madd_epi16(left, right); }
inline Halves add_sums(Halves left, Halves right) { return _mm512_add_epi32(left, right); }
#elif defined(__AVX2__)
using Halves = __m256i;
inline Halves load_halves(const int16_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Halves multiply_pairs(Halves left, Halves right) { return _mm256_madd_epi16(left, right); }
inline Halves add_sums(Halves left, Halves right) { return _mm256_add_epi32(left, right); }
#endif

// Adds to the sums of both lanes: halves of words, each times its keys.
inline void add_products(const int16_t* halves, const int16_t* left_keys, const int16_t* right_keys, int64_t count, uint32_t& left, uint32_t& right) {
  int64_t i = 0;
#if defined(__AVX2__)
  // An instruction multiplies halves and adds the products of the two halves of each word.
  constexpr int64_t WIDTH = sizeof(Halves) / sizeof(int16_t);
  Halves sums[2 * DIGEST_LANES] = {};
  for (; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
    for (int unrolled = 0; unrolled < 2; unrolled++) {
      const int64_t at = i + unrolled * WIDTH;
      const Halves words = load_halves(halves + at);
      sums[2 * unrolled] = add_sums(sums[2 * unrolled], multiply_pairs(words, load_halves(left_keys + at)));
      sums[2 * unrolled + 1] = add_sums(sums[2 * unrolled + 1], multiply_pairs(words, load_halves(right_keys + at)));
    }
  }
  for (int lane = 0; lane < DIGEST_LANES; lane++) {
    const Halves both = add_sums(sums[lane], sums[lane + 2]);
    uint32_t parts[sizeof(Halves) / sizeof(uint32_t)];
    std::memcpy(parts, &both, sizeof both);
    uint32_t& sum = lane == 0 ? left : right;
    for (const uint32_t part : parts) sum += part;
  }
#endif
  for (; i < count; i++) {
    left += static_cast<uint32_t>(int32_t{halves[i]} * int32_t{left_keys[i]});
    right += static_cast<uint32_t>(int32_t{halves[i]} * int32_t{right_keys[i]});
  }
}

// Adds elements of an array to its digest, from place `first` of the array on. An element of less than 32 bits is a
// word whose high half is zero.
template <class Element>
void add_elements(const DigestKeys& keys, const Element* from, int64_t first, int64_t count, Digest& digest) {
  constexpr bool is_word = sizeof(Element) == 4;
  while (count > 0) {
    const int64_t place = first % WORDS_OF_A_CHUNK;
    const int64_t taken = std::min(count, WORDS_OF_A_CHUNK - place);
    const int16_t* left_keys = keys.halves[0] + 2 * place;
    const int16_t* right_keys = keys.halves[1] + 2 * place;
    uint32_t left = 0, right = 0;
    if constexpr (is_word) {
      add_products(reinterpret_cast<const int16_t*>(from), left_keys, right_keys, 2 * taken, left, right);
    } else {
      for (int64_t i = 0; i < taken; i++) {
        left += static_cast<uint32_t>(int32_t{from[i]} * int32_t{left_keys[2 * i]});
        right += static_cast<uint32_t>(int32_t{from[i]} * int32_t{right_keys[2 * i]});
      }
    }
    const auto chunk = static_cast<uint32_t>(first / WORDS_OF_A_CHUNK);
    digest.lanes[0] += left * chunk_factor(chunk, 0);
    digest.lanes[1] += right * chunk_factor(chunk, 1);
    from += taken;
    first += taken;
    count -= taken;
  }
}

// The words of an array: an element narrower than a word is one, a wider element is several.
inline int64_t count_words(int64_t elements, int64_t bytes) { return bytes > 4 ? elements * (bytes / 4) : elements; }

// Adds the words that begin at `data`, and that are words `first` to `first + count - 1` of an array, to the array's digest.
inline void add_words(const DigestKeys& keys, const void* data, int64_t bytes, int64_t first, int64_t count, Digest& digest) {
  if (bytes == 1)
    add_elements(keys, static_cast<const uint8_t*>(data), first, count, digest);
  else if (bytes == 2)
    add_elements(keys, static_cast<const int16_t*>(data), first, count, digest);
  else
    add_elements(keys, static_cast<const int32_t*>(data), first, count, digest);
}

inline const DigestKeys& digest_keys() {
  static const DigestKeys keys;
  return keys;
}

}  // namespace unisono
