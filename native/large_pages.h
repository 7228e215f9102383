// Large pages: XLA asks for the memory of a step anew in each call, and the system clears it when it is first written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "mappings.h"

namespace unisono {

constexpr uintptr_t LARGE_PAGE = 1 << 21;

// Lets the system clear memory that nobody has written yet in pages of 2 MiB, which takes less time than 512 pages of 4 KiB.
//
// The pages lie inside of the memory, so that a process does not grow. Where the system has no such pages, nothing happens.
inline void prefer_large_pages(Memory memory) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t first = (memory.begin + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
  const uintptr_t last = memory.end / LARGE_PAGE * LARGE_PAGE;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// The same of several arrays: those that lie beside each other share pages.
inline void prefer_large_pages(std::vector<Memory> arrays) {
  constexpr uintptr_t GAP = 4096;  // what a compiler leaves between arrays of one block of memory
  std::sort(arrays.begin(), arrays.end(), [](const Memory& a, const Memory& b) { return a.begin < b.begin; });
  for (size_t first = 0, next; first < arrays.size(); first = next) {
    Memory beside = arrays[first];
    for (next = first + 1; next < arrays.size() && arrays[next].begin <= beside.end + GAP; next++)
      beside.end = std::max(beside.end, arrays[next].end);
    prefer_large_pages(beside);
  }
}

}  // namespace unisono
