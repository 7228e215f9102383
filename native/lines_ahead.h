// Memory that is fetched while products are computed, in lines of a cache.
#pragma once

#include <cstdint>
#include <vector>

#include "product.h"

namespace unisono {

// Fetches ranges of memory to the second cache. A tile of a product fetches a part of one range, a line with each step of its sums: this needs
// no decision between the products, which would take longer than the line.
class LinesAhead {
 public:
  static constexpr int64_t STEPS = 1;

  void clear() {
    ranges_.clear();
    next_ = 0;
    left_ = {nullptr, 0};
  }

  void add(const char* first, int64_t bytes) { ranges_.push_back({first, bytes}); }

  void begin_tile(int64_t depth, const float* panel) {
    if (left_.bytes <= 0 && next_ < ranges_.size()) left_ = ranges_[next_++];
    if (left_.bytes <= 0) {
      at_ = reinterpret_cast<const char*>(panel);  // which is in the nearest cache, or soon will be
      return;
    }
    at_ = left_.first;
    left_.first += depth * LINE;
    left_.bytes -= depth * LINE;
  }

  void fetch() {
    __builtin_prefetch(at_, 0, 2);
    at_ += LINE;
  }

 private:
  static constexpr int64_t LINE = 64;  // bytes

  struct Range {
    const char* first;
    int64_t bytes;
  };

  std::vector<Range> ranges_;
  size_t next_ = 0;
  Range left_{nullptr, 0};
  const char* at_ = nullptr;
};

}  // namespace unisono
