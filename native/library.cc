// What a library says of itself.
#include "vectors.h"
#include "xla/ffi/api/c_api.h"

#define UNISONO_EXPORT extern "C" __attribute__((visibility("default")))

// A short name of the source, the compiler and its options.
UNISONO_EXPORT const char* unisono_build() { return UNISONO_BUILD; }

// The version of XLA's interface that the library was compiled for.
UNISONO_EXPORT int unisono_ffi_major() { return XLA_FFI_API_MAJOR; }
UNISONO_EXPORT int unisono_ffi_minor() { return XLA_FFI_API_MINOR; }
