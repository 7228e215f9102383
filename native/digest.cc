// Digests of parts of arrays, computed in one pass over memory (`digest.h`).
#include "digest.h"

#include <atomic>
#include <memory>
#include <vector>

#include "arguments.h"
#include "pieces.h"

namespace unisono {
namespace {

constexpr int64_t WORDS_OF_A_PIECE = 1 << 15;

// A part of an array, and which words of all parts it is.
struct DigestedPart {
  const char* data;
  int64_t bytes;  // of an element
  int64_t first;
  int64_t count;
};

// numbers: for each part (array, first element, elements). result: [parts][2].
ffi::Error DigestParts(ffi::ThreadPool pool, ffi::RemainingArgs arrays, ffi::ResultBuffer<ffi::U32> result, Integers numbers) {
  const auto count = static_cast<int64_t>(numbers.size() / 3);
  if (numbers.size() % 3 != 0 || static_cast<int64_t>(result->element_count()) != DIGEST_LANES * count)
    return ffi::Error::InvalidArgument("A part of an array is (array, first element, elements), and its digest has two words.");
  std::vector<DigestedPart> parts;
  int64_t words = 0;
  for (int64_t part = 0; part < count; part++) {
    const auto array = arrays.get<ffi::AnyBuffer>(static_cast<size_t>(numbers[3 * part]));
    const int64_t first = numbers[3 * part + 1], elements = numbers[3 * part + 2];
    if (array.has_error() || first < 0 || elements < 0 || first + elements > static_cast<int64_t>(array->element_count()))
      return ffi::Error::InvalidArgument("A part to digest does not lie within its array.");
    const auto bytes = static_cast<int64_t>(ffi::ByteWidth(array->element_type()));
    parts.push_back({static_cast<const char*>(array->untyped_data()) + first * bytes, bytes, words, count_words(elements, bytes)});
    words += parts.back().count;
  }
  return run_kernel("unisono_digest_parts", [&] {
    const DigestKeys& keys = digest_keys();
    std::vector<std::atomic<uint32_t>> sums(static_cast<size_t>(DIGEST_LANES * count));
    run_pieces(pool, divide_up(words, WORDS_OF_A_PIECE), [&](int64_t piece) {
      const int64_t begin = piece * WORDS_OF_A_PIECE;
      const int64_t end = std::min(words, begin + WORDS_OF_A_PIECE);
      auto part = std::upper_bound(parts.begin(), parts.end(), begin, [](int64_t word, const DigestedPart& part) { return word < part.first; }) - 1;
      for (; part != parts.end() && part->first < end; part++) {
        const int64_t first = std::max(begin, part->first);
        const int64_t taken = std::min(end, part->first + part->count) - first;
        if (taken <= 0) continue;
        Digest digest;
        const int64_t word = first - part->first;
        add_words(keys, part->data + word * std::min<int64_t>(part->bytes, 4), part->bytes, word, taken, digest);
        for (int lane = 0; lane < DIGEST_LANES; lane++) sums[static_cast<size_t>(DIGEST_LANES * (part - parts.begin()) + lane)] += digest.lanes[lane];
      }
    });
    std::copy(sums.begin(), sums.end(), result->typed_data());
  });
}

}  // namespace
}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    unisono_digest_parts, unisono::DigestParts,
    xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().Ret<xla::ffi::Buffer<xla::ffi::U32>>().Attr<unisono::Integers>("parts"));

// The digest of elements in memory, which are those from word `first` of an array on.
extern "C" void unisono_digest_memory(const void* data, int64_t elements, int64_t bytes, int64_t first, uint32_t* lanes) {
  unisono::Digest digest;
  unisono::add_words(unisono::digest_keys(), data, bytes, first, unisono::count_words(elements, bytes), digest);
  std::copy(digest.lanes, digest.lanes + unisono::DIGEST_LANES, lanes);
}
#pragma GCC visibility pop
