// What memory the process has, as Linux lists it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <vector>

namespace unisono {

struct Memory {
  uintptr_t begin;
  uintptr_t end;

  uintptr_t size() const { return end - begin; }
};

constexpr uintptr_t LEAST_MAPPING = 1 << 25;  // more than the C library keeps: what is freed goes back to the system
constexpr uintptr_t ARENA = 1 << 26;          // where the C library keeps small arrays of threads: such memory begins at a multiple of this size

// A list costs up to a millisecond.
constexpr std::chrono::milliseconds LIST_AGE{1000};
constexpr std::chrono::milliseconds LEAST_WAIT{50};  // for the next list, where memory was not found in one
constexpr std::chrono::milliseconds LONGEST_WAIT{3000};

// Returns the large mappings in a list as /proc/self/maps is: those that are memory alone, without a name, and none in which small arrays lie.
//
// Lines are not joined: a thread's stack is a line of its own, beside other memory, and must not have large pages.
inline std::vector<Memory> list_large_mappings(const char* path) {
  std::vector<Memory> found;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> list(std::fopen(path, "re"), std::fclose);
  if (list == nullptr) return found;
  char line[512];
  bool is_begin = true;  // of a line: a long one comes in parts
  while (std::fgets(line, sizeof(line), list.get())) {
    Memory mapping;
    char rights[5] = "", name[8] = "";
    uint64_t inode = 1;
    if (is_begin &&
        std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*x %*x:%*x %" SCNu64 " %7s", &mapping.begin, &mapping.end, rights, &inode, name) == 4 &&
        std::strcmp(rights, "rw-p") == 0 && inode == 0 && mapping.size() >= LEAST_MAPPING && mapping.begin % ARENA != 0)
      found.push_back(mapping);
    is_begin = std::strchr(line, '\n') != nullptr;
  }
  return found;
}

// Returns the large mapping in which some memory lies, if there is one, as of a list that is not older than LIST_AGE.
//
// Lists become rarer where memory lies in no large mapping, as with small steps.
inline std::optional<Memory> find_large_mapping(Memory inside) noexcept {
  using Clock = std::chrono::steady_clock;
  static std::mutex mutex;
  static std::vector<Memory> mappings;
  static Clock::time_point listed, next_list;
  static std::chrono::milliseconds wait = LEAST_WAIT;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto find = [&]() -> std::optional<Memory> {
    for (const Memory& mapping : mappings)
      if (mapping.begin <= inside.begin && inside.end <= mapping.end) return mapping;
    return std::nullopt;
  };
  const auto now = Clock::now();
  auto found = find();
  if (now < (found ? listed + LIST_AGE : next_list)) return found;
  try {
    mappings = list_large_mappings("/proc/self/maps");
  } catch (const std::bad_alloc&) {
    mappings.clear();
  }
  found = find();
  wait = found ? LEAST_WAIT : std::min(2 * wait, LONGEST_WAIT);
  listed = now;
  next_list = now + wait;
  return found;
}

}  // namespace unisono
