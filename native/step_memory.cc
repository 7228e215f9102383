// Large pages for the memory of a whole step, which XLA's own operations write as well.
#include <algorithm>

#include "arguments.h"
#include "mappings.h"

namespace unisono {

// result: a copy of the numbers. It lies in the memory of the step, so that this memory is found by it.
static ffi::Error OpenStep(ffi::Buffer<ffi::S32> numbers, ffi::ResultBuffer<ffi::S32> result) {
  if (numbers.element_count() != result->element_count()) return ffi::Error::InvalidArgument("The result is a copy of the numbers.");
  if (const auto mapping = find_large_mapping(memory_of(*result))) prefer_large_pages(*mapping);
  std::copy_n(numbers.typed_data(), numbers.element_count(), result->typed_data());
  return ffi::Error::Success();
}

}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_open_step, unisono::OpenStep,
                              xla::ffi::Ffi::Bind().Arg<xla::ffi::Buffer<xla::ffi::S32>>().Ret<xla::ffi::Buffer<xla::ffi::S32>>());

// Writes begin and end of the large mappings in a list of /proc/self/maps, at most `most`. Returns how many there are.
extern "C" int64_t unisono_list_large_mappings(const char* path, uint64_t* bounds, int64_t most) {
  const auto mappings = unisono::list_large_mappings(path);
  for (int64_t i = 0; i < std::min<int64_t>(most, mappings.size()); i++) {
    bounds[2 * i] = mappings[i].begin;
    bounds[2 * i + 1] = mappings[i].end;
  }
  return mappings.size();
}
#pragma GCC visibility pop
