// The same selection as litetopk_select.cuh in fewer reads of the list, for scores that spread over their range.
//
// A bin is linear in the score: bin = clamp(score * scale + shift). Each step of that rounds to nearest, so a better score never has a
// lower bin, whatever scale and shift are. They come from a sample, which decides how evenly the bins fill, not what is selected. When
// the bin of the k-th best key holds few keys, all keys of better bins are taken and those few are ranked; when it does not, the next
// round spreads that bin over all bins. What this cannot tell apart (equal scores, infinite ranges) is left to the radix selection.
#pragma once

#include "litetopk_select.cuh"

namespace dsa {
namespace select {

struct Bins {
  float scale, shift;
};

// The bin that holds the k-th best key, and how many of its keys are taken.
struct Cut {
  Bins bins;
  int bin, need;
};

// The score of a key that is not empty.
__device__ __forceinline__ float key_score(uint32_t ordered) {
  const int sign = static_cast<int>(ordered) >> 31;
  return __uint_as_float(ordered ^ (~static_cast<uint32_t>(sign) | 0x80000000u));
}

// -1 for an empty slot.
__device__ __forceinline__ int bin_of(uint64_t key, const Bins& b) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  const float x = fminf(fmaxf(__fmaf_rn(key_score(ordered), b.scale, b.shift), 0.0f), static_cast<float>(kBins - 1));
  const int bin = __float_as_int(__fadd_rn(x, 8388608.0f)) & (kBins - 1);  // 2^23: the last bits are the nearest integer
  return ordered ? bin : -1;
}

// Bins over the range of some keys at even distances of the list's head.
template <int kThreads>
__device__ __forceinline__ Bins sample_bins(const uint64_t* keys, int n, Scratch* scratch, int thread) {
  constexpr int kPer = kThreads == 32 ? 8 : 2;
  uint32_t low = ~0u, high = 0;
#pragma unroll
  for (int u = 0; u < kPer; ++u) {
    const int i = static_cast<int>(static_cast<int64_t>(u * kThreads + thread) * n / (kPer * kThreads));
    const uint32_t ordered = n ? static_cast<uint32_t>(__ldcg(reinterpret_cast<const unsigned long long*>(keys + i)) >> 32) : 0;
    low = min(low, ordered ? ordered : ~0u);
    high = max(high, ordered);
  }
  low = __reduce_min_sync(~0u, low);
  high = __reduce_max_sync(~0u, high);
  if constexpr (kThreads > 32) {
    if (thread == 0) {
      scratch->lo = ~0ull;
      scratch->hi = 0;
    }
    __syncthreads();
    if (thread % 32 == 0) {
      atomicMin(reinterpret_cast<unsigned long long*>(&scratch->lo), static_cast<unsigned long long>(low));
      atomicMax(reinterpret_cast<unsigned long long*>(&scratch->hi), static_cast<unsigned long long>(high));
    }
    __syncthreads();
    low = static_cast<uint32_t>(scratch->lo);
    high = static_cast<uint32_t>(scratch->hi);
  }
  const float worst = key_score(low), best = key_score(high);
  const float scale = low < high ? (kBins - 3) / (best - worst) : 0.0f;
  return {scale, 1.0f - worst * scale};
}

// False: the bins do not separate, or there are no more than k keys.
template <int kThreads, typename Source>
__device__ bool find_cut(const Source& source, int k, int* hist, Scratch* scratch, int thread, Cut* cut) {
  constexpr float kLimit = 1e30f;
  Bins b = sample_bins<kThreads>(source.keys, source.head(), scratch, thread);
  for (int round = 0; round < 3; ++round) {
    if (!(b.scale > 0.0f && b.scale < kLimit && fabsf(b.shift) < kLimit)) return false;
    for (int i = thread; i < kBins; i += kThreads) hist[i] = 0;
    if (thread == 0) scratch->inside = 0;
    group_sync<kThreads>();
    source.template visit<kThreads>(thread, [&](uint64_t key) {
      const int bin = bin_of(key, b);
      if (bin >= 0) atomicAdd(&hist[bin], 1);
    });
    group_sync<kThreads>();
    if (thread < 32) find_bin(hist, k, scratch, thread);
    group_sync<kThreads>();
    const int bin = scratch->bin, inside = scratch->inside, need = k - scratch->above;
    group_sync<kThreads>();
    if (inside == 0) return false;  // fewer than k keys
    if (inside <= kListMax) {
      *cut = {b, bin, need};
      return true;
    }
    if (bin == 0 || bin == kBins - 1) return false;
    constexpr float kZoom = (kBins - 3) / 2.0f;
    b = {b.scale * kZoom, (b.shift - static_cast<float>(bin - 1)) * kZoom + 1.0f};
  }
  return false;
}

// As take_largest, for what find_cut found.
template <int kThreads, typename Source, typename Emit>
__device__ uint64_t take_cut(const Source& source, const Cut& cut, int* hist, Scratch* scratch, int thread, Emit emit) {
  uint64_t* list = reinterpret_cast<uint64_t*>(hist);
  const int lane = thread % 32;
  if (thread == 0) scratch->inside = 0;
  int cursor = 0;
  if constexpr (kThreads > 32) {
    int mine = 0;
    source.template visit<kThreads>(thread, [&](uint64_t key) { mine += bin_of(key, cut.bins) > cut.bin; });
    cursor = warp_offset<kThreads>(mine, scratch, thread);
  }
  group_sync<kThreads>();
  source.template visit<kThreads>(thread, [&](uint64_t key) {
    const int bin = bin_of(key, cut.bins);
    const bool taken = bin > cut.bin;
    const unsigned vote = __ballot_sync(~0u, taken);
    if (taken) emit(key, cursor + __popc(vote & ((1u << lane) - 1)));
    cursor += __popc(vote);
    if (bin == cut.bin) list[atomicAdd(&scratch->inside, 1)] = key;
  });
  group_sync<kThreads>();
  return rank_rest<kThreads>(list, cut.need, cursor, scratch, thread, emit);
}

}  // namespace select
}  // namespace dsa
