// The stack of sums of a reduction tree: one more contribution is added, in one pass over memory.
//
// The stack has the sums of 1, 2, 4, ... neighbours. Adding a contribution is counting up by one in binary: sums of equal length are added,
// until all lengths differ (`unisono/_src/engine/step/running_sums.py`).
#include <algorithm>
#include <vector>

#include "arguments.h"
#include "pieces.h"
#include "vectors.h"

namespace unisono {
namespace {

constexpr int64_t ELEMENTS_OF_A_PIECE = 1 << 15;

// Some elements of a contribution, and where they are in the stack.
struct Part {
  const float* from;  // null for zeros behind the last array
  int64_t first;
  int64_t count;
};

int64_t count_bits(uint64_t number) { return __builtin_popcountll(number); }

// Adds the places of the stack from `height - 1` down to `lowest` to elements of a contribution, and writes the sum to `lowest`.
void add_part(float* sums, int64_t length, int64_t height, int64_t lowest, const Part& part) {
  float* to = sums + lowest * length + part.first;
  int64_t i = 0;
  for (; i + LANES <= part.count; i += LANES) {
    Vector sum = part.from == nullptr ? Vector{} : load(part.from + i);
    for (int64_t place = height - 1; place >= lowest; place--) sum = load(sums + place * length + part.first + i) + sum;
    store(to + i, sum);
  }
  for (; i < part.count; i++) {
    float sum = part.from == nullptr ? 0.0f : part.from[i];
    for (int64_t place = height - 1; place >= lowest; place--) sum = sums[place * length + part.first + i] + sum;
    to[i] = sum;
  }
}

// sums: [places][length]; the result is the same memory. before: how many contributions the sums have. arrays: the contribution's.
ffi::Error PushContribution(ffi::ThreadPool pool, Array sums, ffi::Buffer<ffi::S32> before, ffi::RemainingArgs arrays, Result result) {
  if (sums.dimensions().size() != 2 || before.element_count() != 1)
    return ffi::Error::InvalidArgument("A stack of sums has the dimensions (places, length), and a number of contributions.");
  if (result->typed_data() != sums.typed_data()) return ffi::Error::InvalidArgument("A stack of sums is changed where it is.");
  const int64_t length = sums.dimensions()[1];
  const auto number = static_cast<uint64_t>(*before.typed_data());
  const int64_t height = count_bits(number);
  const int64_t lowest = height - count_bits(number & ~(number + 1));
  if (std::max(height, lowest + 1) > sums.dimensions()[0]) return ffi::Error::InvalidArgument("A stack of sums has too few places.");
  return run_kernel("unisono_push_contribution", [&] {
    std::vector<Part> parts;
    int64_t end = 0;
    for (size_t i = 0; i < arrays.size(); i++) {
      const auto array = *arrays.get<ffi::AnyBuffer>(i);
      const auto count = static_cast<int64_t>(array.element_count());
      parts.push_back({static_cast<const float*>(array.untyped_data()), end, count});
      end += count;
    }
    if (end < length) parts.push_back({nullptr, end, length - end});
    run_pieces(pool, divide_up(length, ELEMENTS_OF_A_PIECE), [&](int64_t piece) {
      const int64_t first = piece * ELEMENTS_OF_A_PIECE;
      const int64_t last = std::min(length, first + ELEMENTS_OF_A_PIECE);
      auto part = std::upper_bound(parts.begin(), parts.end(), first, [](int64_t place, const Part& part) { return place < part.first; }) - 1;
      for (; part != parts.end() && part->first < last; part++) {
        const int64_t begin = std::max(first, part->first);
        const int64_t count = std::min(last, part->first + part->count) - begin;
        if (count > 0)
          add_part(sums.typed_data(), length, height, lowest, {part->from == nullptr ? nullptr : part->from + begin - part->first, begin, count});
      }
    });
  });
}

}  // namespace
}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_push_contribution, unisono::PushContribution,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<unisono::Array>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<unisono::Array>());
#pragma GCC visibility pop
