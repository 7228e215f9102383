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
constexpr std::chrono::milliseconds LEAST_WAIT{50};  // for the next list: a list costs up to a millisecond
constexpr std::chrono::milliseconds LONGEST_WAIT{3000};

// Returns the large mappings that are memory alone: no file, no stack, and not the heap, which small arrays share. Neighbours are one.
inline std::vector<Memory> list_large_mappings() {
  std::vector<Memory> found;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> maps(std::fopen("/proc/self/maps", "re"), std::fclose);
  if (maps == nullptr) return found;
  Memory current{0, 0};
  const auto add = [&] {
    if (current.size() >= LEAST_MAPPING) found.push_back(current);
  };
  char line[512];
  bool is_begin = true;  // of a line: a long one comes in parts
  while (std::fgets(line, sizeof(line), maps.get())) {
    const bool is_whole = std::strchr(line, '\n') != nullptr;
    Memory mapping;
    char rights[5] = "", rest[8] = "";
    uint64_t inode = 1;
    if (is_begin && std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*x %*x:%*x %" SCNu64 " %7s", &mapping.begin, &mapping.end, rights, &inode, rest) >= 4 &&
        std::strcmp(rights, "rw-p") == 0 && inode == 0 && rest[0] == 0) {
      if (mapping.begin != current.end) {
        add();
        current.begin = mapping.begin;
      }
      current.end = mapping.end;
    }
    is_begin = is_whole;
  }
  add();
  return found;
}

// Returns the large mapping in which some memory lies, if there is one, as of a list that may be a little old.
//
// Lists become rarer where memory lies in no large mapping, as with small steps.
inline std::optional<Memory> find_large_mapping(Memory inside) noexcept {
  static std::mutex mutex;
  static std::vector<Memory> mappings;
  static std::chrono::steady_clock::time_point next_list;
  static std::chrono::milliseconds wait = LEAST_WAIT;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto find = [&]() -> std::optional<Memory> {
    for (const Memory& mapping : mappings)
      if (mapping.begin <= inside.begin && inside.end <= mapping.end) return mapping;
    return std::nullopt;
  };
  auto found = find();
  if (found || std::chrono::steady_clock::now() < next_list) return found;
  try {
    mappings = list_large_mappings();
  } catch (const std::bad_alloc&) {
    mappings.clear();
  }
  found = find();
  wait = found ? LEAST_WAIT : std::min(2 * wait, LONGEST_WAIT);
  next_list = std::chrono::steady_clock::now() + wait;
  return found;
}

}  // namespace unisono
