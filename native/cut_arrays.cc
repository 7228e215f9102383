// Arrays that lie cut over the devices of a process, and are put together where a step reads them.
//
// The parts stay where they are: a program gets the number of an array, and not its parts. So programs do not depend on how many parts
// there are, and one program serves every placement.
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "pieces.h"

namespace unisono {
namespace {

constexpr int64_t BYTES_OF_A_PIECE = 1 << 20;

// Each of `blocks` blocks of the array has a run of `bytes` bytes from each part, in the order of the parts.
struct CutArray {
  std::vector<const char*> parts;
  int64_t blocks;
  int64_t bytes;
};

std::mutex mutex;  // of all that follows
std::unordered_map<int32_t, std::shared_ptr<const CutArray>> arrays;
int32_t next_array = 1;

void copy_run(const CutArray& array, int64_t run, int64_t first, int64_t last, char* whole) {
  const int64_t parts = array.parts.size();
  const char* from = array.parts[run % parts] + run / parts * array.bytes;
  std::memcpy(whole + run * array.bytes + first, from + first, last - first);
}

// number: of the array, and what else stands for it. after: what has to be there before the array is put together, so that it takes no memory any sooner.
ffi::Error PutTogether(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> number, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result) {
  std::shared_ptr<const CutArray> array;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = arrays.find(number.element_count() ? number.typed_data()[0] : 0);
    if (found == arrays.end()) return ffi::Error::InvalidArgument("There is no such array that lies cut over devices.");
    array = found->second;
  }
  const int64_t runs = array->parts.size() * array->blocks;
  if (static_cast<int64_t>(result->size_bytes()) != runs * array->bytes)
    return ffi::Error::InvalidArgument("The parts of an array have another size than the array.");
  char* whole = static_cast<char*>(result->untyped_data());
  prefer_large_pages(memory_of(*result));
  return run_kernel("unisono_put_together", [&] {
    if (array->bytes >= BYTES_OF_A_PIECE) {
      const int64_t pieces = divide_up(array->bytes, BYTES_OF_A_PIECE);
      run_pieces(pool, runs * pieces, [&](int64_t piece) {
        const int64_t first = piece % pieces * BYTES_OF_A_PIECE;
        copy_run(*array, piece / pieces, first, std::min(array->bytes, first + BYTES_OF_A_PIECE), whole);
      });
      return;
    }
    const int64_t unit = std::max<int64_t>(1, BYTES_OF_A_PIECE / array->bytes);
    run_pieces(pool, divide_up(runs, unit), [&](int64_t piece) {
      for (int64_t run = piece * unit; run < std::min(runs, (piece + 1) * unit); run++) copy_run(*array, run, 0, array->bytes, whole);
    });
  });
}

// Hands an array on when others are there. XLA takes two such results for two arrays, and so keeps nothing that is computed of one for
// who reads the other.
ffi::Error ComeAfter(ffi::AnyBuffer array, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result) {
  if (array.size_bytes() != result->size_bytes()) return ffi::Error::InvalidArgument("An array is handed on in another size.");
  if (array.untyped_data() != result->untyped_data()) std::memcpy(result->untyped_data(), array.untyped_data(), array.size_bytes());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_put_together, unisono::PutTogether,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_come_after, unisono::ComeAfter,
                              xla::ffi::Ffi::Bind().Arg<xla::ffi::AnyBuffer>().RemainingArgs().Ret<xla::ffi::AnyBuffer>());

// Makes an array known to programs, and returns its number. Its parts stay where they are until it is dropped.
extern "C" int32_t unisono_keep_cut_array(const void* const* parts, int64_t count, int64_t blocks, int64_t bytes) {
  auto array = std::make_shared<unisono::CutArray>();
  for (int64_t part = 0; part < count; part++) array->parts.push_back(static_cast<const char*>(parts[part]));
  array->blocks = blocks;
  array->bytes = bytes;
  std::lock_guard<std::mutex> lock(unisono::mutex);
  unisono::arrays.emplace(unisono::next_array, array);
  return unisono::next_array++;
}

// Forgets an array. No program that reads it may run any more.
extern "C" void unisono_drop_cut_array(int32_t number) {
  std::lock_guard<std::mutex> lock(unisono::mutex);
  unisono::arrays.erase(number);
}
#pragma GCC visibility pop
