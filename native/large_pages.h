// Large pages for results: XLA asks for the memory of a step anew in each call, and the system clears it when it is first written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace unisono {

// Lets the system clear memory that nobody has written yet in pages of 2 MiB, which takes less time than 512 pages of 4 KiB.
//
// The pages lie inside of the memory, so that a process does not grow. Where the system has no such pages, nothing happens.
inline float* prefer_large_pages(float* data, int64_t floats) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = 1 << 21;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t last = reinterpret_cast<uintptr_t>(data + floats) / PAGE * PAGE;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return data;
}

struct Memory {
  uintptr_t begin;
  uintptr_t end;
};

// The same of several arrays: those that lie beside each other share pages.
inline void prefer_large_pages(std::vector<Memory> arrays) {
  constexpr uintptr_t GAP = 4096;  // what a compiler leaves between arrays of one block of memory
  std::sort(arrays.begin(), arrays.end(), [](const Memory& a, const Memory& b) { return a.begin < b.begin; });
  for (size_t first = 0, next; first < arrays.size(); first = next) {
    uintptr_t end = arrays[first].end;
    for (next = first + 1; next < arrays.size() && arrays[next].begin <= end + GAP; next++) end = std::max(end, arrays[next].end);
    prefer_large_pages(reinterpret_cast<float*>(arrays[first].begin), (end - arrays[first].begin) / sizeof(float));
  }
}

}  // namespace unisono
