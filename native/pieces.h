// Work in pieces on XLA's thread pool, and memory that a thread keeps.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace unisono {

namespace ffi = xla::ffi;

inline int64_t divide_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }
inline int64_t round_up(int64_t count, int64_t unit) { return divide_up(count, unit) * unit; }

// Memory that a kernel asked for, and did not get.
class NoMemory : public std::bad_alloc {
 public:
  explicit NoMemory(int64_t bytes) : bytes(bytes) {}
  const int64_t bytes;
};

// Tells the devices that add up with this one (all_reduce.cc).
void note_kernel_failure(const std::string& message);

// Runs a kernel. Where there is no memory for it, returns an error that says so, which JAX raises.
template <class Kernel>
ffi::Error run_kernel(const char* name, const Kernel& kernel) {
  std::string amount = "memory";
  try {
    kernel();
    return ffi::Error::Success();
  } catch (const NoMemory& error) {
    amount = std::to_string(error.bytes) + " bytes of memory";
  } catch (const std::bad_alloc&) {
  }
  const auto message =
      std::string("The kernel ") + name + " asked for " + amount + ", and there is no more. Use smaller batches, or more replicas.";
  note_kernel_failure(message);
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, message);
}

// Calls piece(0) to piece(count - 1). Which thread computes a piece is open; what a piece computes must not depend on it.
//
// The caller computes pieces too, and waits only for pieces that a thread has begun. So it returns even if no thread of the pool is free.
//
// If pieces throw, the others are computed all the same, and the caller throws what was thrown first.
inline void run_pieces(ffi::ThreadPool& pool, int64_t count, const std::function<void(int64_t)>& piece) {
  const int64_t helpers = std::min<int64_t>(count, pool.num_threads()) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; i++) piece(i);
    return;
  }
  struct Progress {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable all_done;
    std::exception_ptr failure;
  };
  // Shared with helpers that start after the last piece is done.
  auto progress = std::make_shared<Progress>();
  const auto* shared_piece = &piece;
  auto work = [progress, shared_piece, count] {
    for (int64_t i; (i = progress->next.fetch_add(1)) < count;) {
      try {
        (*shared_piece)(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(progress->mutex);
        if (!progress->failure) progress->failure = std::current_exception();
      }
      if (progress->done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(progress->mutex);
        progress->all_done.notify_all();
      }
    }
  };
  try {
    for (int64_t helper = 0; helper < helpers; helper++) pool.Schedule(std::function<void()>(work));
  } catch (const std::bad_alloc&) {  // fewer helpers: those that were scheduled need the piece, so the caller must stay
  }
  work();
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->all_done.wait(lock, [&] { return progress->done.load() == count; });
  if (progress->failure) std::rethrow_exception(progress->failure);
}

// Memory of one thread for one use. It is kept from call to call: new memory costs a page fault for each 4 KiB.
class Scratch {
 public:
  float* get(int64_t floats) {
    if (floats > size_ || IS_CHECKED) {
      std::free(data_);
      void* data = nullptr;
      size_ = posix_memalign(&data, 4096, std::max<int64_t>(1, floats) * sizeof(float)) == 0 ? floats : 0;
      data_ = static_cast<float*>(data);
      if (data == nullptr) throw NoMemory(floats * sizeof(float));
    }
    return data_;
  }
  ~Scratch() { std::free(data_); }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr bool IS_CHECKED = true;  // memory of the exact size each time, so that an access beyond it is seen
#else
  static constexpr bool IS_CHECKED = false;
#endif
  float* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace unisono
