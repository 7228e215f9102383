// Sums over the devices of a process, inside of the step program.
//
// The executions of a step, one for each device, come here with the sum of their replicas. The last one to come adds, in the order of the
// reduction tree, and writes the total into the memory of all. Nobody waits in a thread: those that have come go on when they are told, in a
// thread of XLA's pool. A device that is alone goes on at once, so one program serves every placement.
#include <algorithm>
#include <memory>
#include <mutex>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "pieces.h"

namespace unisono {
namespace {

constexpr int64_t BYTES_OF_A_PIECE = 1 << 16;

// Some elements of a dtype, which each device has.
struct Sum {
  void* data;
  int64_t length;
  ffi::DataType dtype;
};

struct Arrival {
  std::vector<Sum> sums;
  ffi::Promise promise;
};

// The devices that have come to add up the same sums.
struct Rendezvous {
  std::vector<std::unique_ptr<Arrival>> arrivals;
  int64_t count = 0;
};

// Devices that add up. `additions` are pairs: the first device's sum takes in the second's. The last pair makes the total, in device 0.
struct Group {
  int64_t devices;
  std::vector<int32_t> additions;
  std::unordered_map<int32_t, Rendezvous> rendezvous;  // by the phase: sums that do not need each other come in any order
};

std::mutex mutex;  // of all that follows, and of what the groups hold
std::unordered_map<int32_t, std::shared_ptr<Group>> groups;
int32_t next_group = 1;
std::string failure;  // of a kernel; groups with smaller numbers than the next one at that time are gone

template <class T>
void add_elements(const Group& group, const std::vector<std::unique_ptr<Arrival>>& arrivals, size_t place, int64_t first, int64_t last) {
  const auto data_of = [&](int64_t device) { return static_cast<T*>(arrivals[device]->sums[place].data); };
  for (size_t pair = 0; pair < group.additions.size(); pair += 2) {
    T* to = data_of(group.additions[pair]);
    const T* from = data_of(group.additions[pair + 1]);
    if constexpr (std::is_integral_v<T>) {  // which wrap around
      using Unsigned = std::make_unsigned_t<T>;
      for (int64_t i = first; i < last; i++) to[i] = static_cast<T>(static_cast<Unsigned>(to[i]) + static_cast<Unsigned>(from[i]));
    } else {
      for (int64_t i = first; i < last; i++) to[i] = to[i] + from[i];
    }
  }
  for (int64_t device = 1; device < group.devices; device++) std::copy(data_of(0) + first, data_of(0) + last, data_of(device) + first);
}

// Whether the sums of a dtype can be added here, and by what.
template <class Function>
bool with_type(ffi::DataType dtype, const Function& function) {
  switch (dtype) {
    case ffi::DataType::F32: function(float{}); return true;
    case ffi::DataType::F64: function(double{}); return true;
    case ffi::DataType::S32: function(int32_t{}); return true;
    case ffi::DataType::S64: function(int64_t{}); return true;
    case ffi::DataType::U32: function(uint32_t{}); return true;
    case ffi::DataType::U64: function(uint64_t{}); return true;
    default: return false;
  }
}

ffi::Error add_sums(ffi::ThreadPool& pool, const Group& group, const std::vector<std::unique_ptr<Arrival>>& arrivals) {
  for (size_t place = 0; place < arrivals[0]->sums.size(); place++) {
    const Sum& like = arrivals[0]->sums[place];
    for (const auto& arrival : arrivals)
      if (arrival->sums.size() != arrivals[0]->sums.size() || arrival->sums[place].length != like.length ||
          arrival->sums[place].dtype != like.dtype)
        return ffi::Error::InvalidArgument("The devices have sums of different shapes.");
    ffi::Error error = ffi::Error::Success();
    const bool is_known = with_type(like.dtype, [&](auto zero) {
      using T = decltype(zero);
      const int64_t unit = BYTES_OF_A_PIECE / sizeof(T);
      error = run_kernel("unisono_all_reduce", [&] {
        run_pieces(pool, divide_up(like.length, unit), [&](int64_t piece) {
          add_elements<T>(group, arrivals, place, piece * unit, std::min(like.length, (piece + 1) * unit));
        });
      });
    });
    if (!is_known) return ffi::Error::InvalidArgument("Sums of this dtype are not added here.");
    if (error.failure()) return error;
  }
  return ffi::Error::Success();
}

// Lets the others go on in threads of the pool: a promise that is kept runs what waits for it, and here that is the rest of a step.
void let_go(ffi::ThreadPool& pool, std::vector<std::unique_ptr<Arrival>>& arrivals, int64_t own, const ffi::Error& error) {
  for (int64_t device = 0; device < static_cast<int64_t>(arrivals.size()); device++) {
    const auto keep = [promise = std::make_shared<ffi::Promise>(std::move(arrivals[device]->promise)),
                       failure = error.failure() ? std::make_shared<std::string>(error.message()) : nullptr] {
      if (failure)
        promise->SetError(ffi::Error::Internal(*failure));
      else
        promise->SetAvailable();
    };
    if (device == own)
      keep();
    else
      pool.Schedule(std::function<void()>(keep));
  }
}

ffi::Future fail(const std::string& message) {
  ffi::Promise promise;
  promise.SetError(ffi::Error::Internal(message));
  return ffi::Future(promise);
}

// numbers: the group of the devices, 0 for a device alone; which of them this one is; and the phase of the step. sums: [places][length]
// each; the total is written to the first place, and the result is the same memory.
ffi::Future AllReduce(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> numbers, ffi::RemainingArgs sums, ffi::RemainingRets results) {
  if (numbers.element_count() != 3 || sums.size() != results.size()) return fail("An all-reduce gets a group, a device, a phase, and sums.");
  const int32_t number = numbers.typed_data()[0];
  const int32_t device = numbers.typed_data()[1];
  ffi::Promise promise;
  ffi::Future future(promise);
  std::vector<Sum> own;
  for (size_t i = 0; i < sums.size(); i++) {
    const auto array = *sums.get<ffi::AnyBuffer>(i);
    auto result = *results.get<ffi::AnyBuffer>(i);
    if (result->untyped_data() != array.untyped_data()) return fail("Sums are changed where they are.");
    if (array.dimensions().size() != 2) return fail("Sums have the dimensions (places, length).");
    own.push_back({array.untyped_data(), array.dimensions()[1], array.element_type()});
  }
  if (number == 0) {
    promise.SetAvailable();
    return future;
  }
  std::shared_ptr<Group> group;
  std::vector<std::unique_ptr<Arrival>> arrivals;
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = groups.find(number);
    if (found == groups.end()) return fail(failure.empty() ? "There is no such group of devices." : failure);
    group = found->second;
    if (device < 0 || device >= group->devices) return fail("There is no such device in the group.");
    Rendezvous& rendezvous = group->rendezvous[numbers.typed_data()[2]];
    if (rendezvous.arrivals.empty()) rendezvous.arrivals.resize(group->devices);
    if (rendezvous.arrivals[device]) return fail("A device has come twice.");
    rendezvous.arrivals[device] = std::make_unique<Arrival>(Arrival{std::move(own), std::move(promise)});
    if (++rendezvous.count < group->devices) return future;
    rendezvous.count = 0;
    arrivals.swap(rendezvous.arrivals);
  }
  let_go(pool, arrivals, device, add_sums(pool, *group, arrivals));
  return future;
}

}  // namespace

// A device whose kernel has failed does not come any more: the others are told, those that wait and those that are still to come.
void note_kernel_failure(const std::string& message) {
  std::vector<std::unique_ptr<Arrival>> left;
  {
    std::lock_guard<std::mutex> lock(mutex);
    failure = message;
    for (auto& [number, group] : groups)
      for (auto& [phase, rendezvous] : group->rendezvous)
        for (auto& arrival : rendezvous.arrivals)
          if (arrival) left.push_back(std::move(arrival));
    groups.clear();
  }
  for (auto& arrival : left) arrival->promise.SetError(ffi::Error::Internal(message));
}

}  // namespace unisono

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(unisono_all_reduce, unisono::AllReduce,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());

// Makes a group of devices, and returns its number.
extern "C" int32_t unisono_make_group(int64_t devices, const int32_t* additions, int64_t count) {
  auto group = std::make_shared<unisono::Group>();
  group->devices = devices;
  group->additions.assign(additions, additions + count);
  std::lock_guard<std::mutex> lock(unisono::mutex);
  unisono::groups.emplace(unisono::next_group, group);
  return unisono::next_group++;
}

// Whether a group is there: none of those is that were made before a kernel failed.
extern "C" int32_t unisono_has_group(int32_t number) {
  std::lock_guard<std::mutex> lock(unisono::mutex);
  return unisono::groups.count(number);
}
#pragma GCC visibility pop
