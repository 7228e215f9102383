// How the arguments of a handler come from XLA.
#pragma once

#include <utility>

#include "convolution.h"
#include "large_pages.h"
#include "xla/ffi/api/ffi.h"

namespace unisono {

namespace ffi = xla::ffi;

using Array = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;
using Integers = ffi::Span<const int64_t>;

template <class AnyArray>
Memory memory_of(const AnyArray& array) {
  const auto begin = reinterpret_cast<uintptr_t>(array.untyped_data());
  return {begin, begin + array.size_bytes()};
}

// The memory of a result, before it is written.
inline float* open_result(Result& result) {
  prefer_large_pages(memory_of(*result));
  return result->typed_data();
}

// A handler of two arrays, which returns one.
inline auto bind_product() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Array>().Arg<Array>().Ret<Array>(); }

// The same with one array more.
inline auto bind_product_and_array() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Array>().Arg<Array>().Arg<Array>().Ret<Array>(); }

// A handler of four arrays, which returns one, and perhaps more.
inline auto bind_four_arrays() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Array>().Arg<Array>().Arg<Array>().Arg<Array>().Ret<Array>();
}

// With a bias, and a rectifier or none.
inline auto bind_product_with_bias() { return bind_product_and_array().Attr<bool>("is_rectified"); }

// Adds the numbers of a window to the arguments of a handler.
template <class Binding>
inline auto with_window(Binding binding) {
  return std::move(binding).template Attr<Integers>("strides").template Attr<Integers>("padding").template Attr<Integers>("dilation");
}

inline auto bind_convolution() { return with_window(bind_product()); }

inline Pair to_pair(Integers values) { return {values[0], values[1]}; }

// input: (rows, y, x, features); kernel: (y, x, in, out); output: (rows, y, x, features).
inline ffi::ErrorOr<Geometry> read_geometry(ffi::Span<const int64_t> input, ffi::Span<const int64_t> kernel, ffi::Span<const int64_t> output,
                                            Integers strides, Integers padding, Integers dilation) {
  if (input.size() != 4 || kernel.size() != 4 || output.size() != 4 || strides.size() != 2 || padding.size() != 2 || dilation.size() != 2 ||
      input[0] != output[0] || input[3] != kernel[2] || output[3] != kernel[3])
    return ffi::Unexpected(ffi::Error::InvalidArgument("A convolution takes (rows, y, x, features) and a kernel (y, x, in, out)."));
  return Geometry{input[0],
                  {input[1], input[2]},
                  input[3],
                  {kernel[0], kernel[1]},
                  {output[1], output[2]},
                  output[3],
                  to_pair(strides),
                  to_pair(padding),
                  to_pair(dilation)};
}

}  // namespace unisono
