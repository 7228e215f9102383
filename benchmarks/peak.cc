// The most that the cores can do: fused multiply-adds in registers alone, on as many threads as the first argument says. Prints GFLOP/s.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#ifdef __AVX512F__
constexpr int kBytes = 64;
#else
constexpr int kBytes = 32;
#endif
using Vector = float __attribute__((vector_size(kBytes)));
constexpr int kChains = 12;  // more than the latency of an addition hides, and as many as there are registers for
constexpr long kRounds = 20'000'000;

void Multiply(float start, float* result) {
  Vector sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = Vector{} + (start + i);
  Vector factor = Vector{} + 0.999f, addend = Vector{} + start;
  for (long round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * factor + addend;
  }
  for (int i = 0; i < kChains; ++i) *result += sums[i][0];
}

int main(int, char** arguments) {
  int count = std::atoi(arguments[1]);
  std::vector<float> results(16 * count);
  std::vector<std::thread> threads;
  auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) threads.emplace_back(Multiply, 1.0f + i, &results[16 * i]);
  for (auto& thread : threads) thread.join();
  std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  double operations = 2.0 * kChains * (kBytes / 4) * kRounds * count;
  std::printf("%.6g\n", operations / took.count() / 1e9 + 0 * results[0]);
}
