// An array as it is: a place in a program at which XLA has to have it in memory.
#include <cstring>

#include "arguments.h"

namespace unisono {

// The result lies where the array lies, unless something else reads the array later.
static ffi::Error KeepArray(Array array, Result result) {
  if (array.size_bytes() != result->size_bytes()) return ffi::Error::InvalidArgument("The array that is kept has another size than the result.");
  if (array.untyped_data() != result->untyped_data()) std::memcpy(result->untyped_data(), array.untyped_data(), array.size_bytes());
  return ffi::Error::Success();
}

}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_keep_array, unisono::KeepArray, xla::ffi::Ffi::Bind().Arg<unisono::Array>().Ret<unisono::Array>());
#pragma GCC visibility pop
