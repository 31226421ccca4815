// Exact selection of the largest `need` of `n` distinct 64-bit keys, by one warp or by one block.
//
// A key orders a candidate completely: the order-preserving bits of its FP32 score above the complement of its position, so a larger
// key is a better candidate and equal scores prefer the lower position. 0 marks an empty slot. Radix selection over a key range that
// shrinks to the bin holding the boundary; every range of distinct keys ends after at most 64 / log2(kBins) + 1 rounds.
#pragma once

#include <cstdint>

#ifdef DSA_HOST_EMULATION
#include DSA_HOST_EMULATION
#else
#include "common.cuh"
#endif

namespace dsa {
namespace select {

constexpr int kBins = 512;
constexpr int kListMax = 128;  // boundary bins of at most this many keys are ranked by comparing all pairs

// Scores have no NaN and no -0 here (see finish_score).
__device__ __forceinline__ uint64_t make_key(float score, int position) {
  const int bits = __float_as_int(score);
  const uint32_t ordered = static_cast<uint32_t>(bits ^ ((bits >> 31) | INT32_MIN));
  return (static_cast<uint64_t>(ordered) << 32) | static_cast<uint32_t>(~position);
}

__device__ __forceinline__ int key_position(uint64_t key) { return ~static_cast<int>(static_cast<uint32_t>(key)); }

// A float t such that every score whose key exceeds `bound` is >= t. With `ties_lose` (no remaining position can win a tie at the
// bound's score) t is the next float above that score, so that ties are refused by the comparison alone.
__device__ __forceinline__ float gate_of(uint64_t bound, bool ties_lose) {
  uint32_t bits = static_cast<uint32_t>(bound >> 32);
  if (bits <= 0x007fffffu) return -INFINITY;  // no bound yet, or -inf at the boundary
  if (ties_lose && bits < 0xff800000u) ++bits;
  return __uint_as_float((bits & 0x80000000u) ? (bits ^ 0x80000000u) : ~bits);
}

struct Scratch {
  uint64_t lo, hi;
  int bin, above, inside, valid;
  int taken[16];  // by warp; blocks only
};

template <int kThreads>
__device__ __forceinline__ void group_sync() {
  if constexpr (kThreads == 32)
    __syncwarp();
  else
    __syncthreads();
}

// 16-byte loads that a thread has in flight: a selection waits for memory more than for anything else.
#ifndef LT_UNROLL
#define LT_UNROLL 8
#endif
constexpr int kUnroll = LT_UNROLL;

// Calls f(key) for each of n keys (0 past the end), the same number of times in all threads and in step within a warp. All of a batch
// is read before the first call of that batch.
template <int kThreads, typename F>
__device__ __forceinline__ void for_each_key(const uint64_t* keys, int n, int thread, F f) {
  for (int base = 0; base < n; base += kThreads * 2 * kUnroll) {
    ulonglong2 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int i = base + (u * kThreads + thread) * 2;
      v[u] = make_ulonglong2(0, 0);
      if (i + 1 < n)
        v[u] = __ldcg(reinterpret_cast<const ulonglong2*>(keys + i));
      else if (i < n)
        v[u].x = __ldcg(reinterpret_cast<const unsigned long long*>(keys + i));
    }
    __syncwarp();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      f(static_cast<uint64_t>(v[u].x));
      f(static_cast<uint64_t>(v[u].y));
    }
  }
}

// The same for n scores (a multiple of 4), NaN where there is no key; their positions count from `first` on. One warp.
template <typename F>
__device__ __forceinline__ void for_each_score(const float* scores, int n, int first, int lane, F f) {
  constexpr int kLoads = kUnroll / 2;
  const auto key = [](float score, int position) { return isnan(score) ? 0 : make_key(score, position); };
  for (int base = 0; base < n; base += 32 * 4 * kLoads) {
    float4 v[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = base + (u * 32 + lane) * 4;
      v[u] = make_float4(NAN, NAN, NAN, NAN);
      if (i < n) v[u] = __ldcg(reinterpret_cast<const float4*>(scores + i));
    }
    __syncwarp();
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int position = first + base + (u * 32 + lane) * 4;
      f(key(v[u].x, position));
      f(key(v[u].y, position + 1));
      f(key(v[u].z, position + 2));
      f(key(v[u].w, position + 3));
    }
  }
}

// One contiguous array of keys.
struct Array {
  const uint64_t* keys;
  int n;
  template <int kThreads, typename F>
  __device__ __forceinline__ void visit(int thread, F f) const {
    for_each_key<kThreads>(keys, n, thread, f);
  }
};

// Behind `stride0` slots either `fresh` scores of the positions from `first` on, or, with fresh = 0, `kSegments` segments of `stride` slots
// with counts[0 .. kSegments-1] keys each; then the slots before them begin with `kept` keys. One warp. Rows of 8 lanes read one segment
// each, so that short segments do not leave lanes idle.
template <int kSegments>
struct Segments {
  const uint64_t* keys;
  int kept, stride0, stride;
  const int* counts;
  int fresh, first;
  template <int kThreads, typename F>
  __device__ __forceinline__ void visit(int lane, F f) const {
    static_assert(kThreads == 32 && kSegments % 4 == 0, "four segments at a time");
    if (fresh) {
      for_each_score(reinterpret_cast<const float*>(keys + stride0), fresh, first, lane, f);
      return;
    }
    for_each_key<32>(keys, kept, lane, f);
#pragma unroll 1
    for (int first = 0; first < kSegments; first += 4) {
      const int segment = first + lane / 8;
      const int count = counts[segment];
      const int most = __reduce_max_sync(~0u, count);
      const uint64_t* from = keys + stride0 + segment * stride;
      for (int base = 0; base < most; base += 8 * 2 * kUnroll) {
        ulonglong2 v[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int i = base + (u * 8 + lane % 8) * 2;
          v[u] = make_ulonglong2(0, 0);
          if (i < count) v[u] = __ldcg(reinterpret_cast<const ulonglong2*>(from + i));
          if (i + 1 >= count) v[u].y = 0;
        }
        __syncwarp();
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          f(static_cast<uint64_t>(v[u].x));
          f(static_cast<uint64_t>(v[u].y));
        }
      }
    }
  }
};

__device__ __forceinline__ uint64_t warp_min(uint64_t v) {
#pragma unroll
  for (int s = 16; s; s >>= 1) v = min(v, static_cast<uint64_t>(__shfl_xor_sync(~0u, static_cast<unsigned long long>(v), s)));
  return v;
}
__device__ __forceinline__ uint64_t warp_max(uint64_t v) {
#pragma unroll
  for (int s = 16; s; s >>= 1) v = max(v, static_cast<uint64_t>(__shfl_xor_sync(~0u, static_cast<unsigned long long>(v), s)));
  return v;
}

struct Boundary {
  uint64_t lo, hi;  // keys above hi are taken; of those in [lo, hi], the largest `need`
  int need;
  int valid;  // non-empty keys
  bool all;   // need == number of keys in [lo, hi], or all keys are taken
};

// hist: kBins ints; also the list of the boundary's keys in take_largest.
template <int kThreads, typename Source>
__device__ Boundary find_boundary(const Source& source, int k, int* hist, Scratch* scratch, int thread) {
  uint64_t lo = ~0ull, hi = 0;
  int valid = 0;
  source.template visit<kThreads>(thread, [&](uint64_t key) {
    if (key) {
      lo = min(lo, key);
      hi = max(hi, key);
      ++valid;
    }
  });
  lo = warp_min(lo);
  hi = warp_max(hi);
  valid = __reduce_add_sync(~0u, valid);
  if constexpr (kThreads > 32) {
    if (thread == 0) {
      scratch->lo = ~0ull;
      scratch->hi = 0;
      scratch->valid = 0;
    }
    __syncthreads();
    if (thread % 32 == 0) {
      atomicMin(reinterpret_cast<unsigned long long*>(&scratch->lo), static_cast<unsigned long long>(lo));
      atomicMax(reinterpret_cast<unsigned long long*>(&scratch->hi), static_cast<unsigned long long>(hi));
      atomicAdd(&scratch->valid, valid);
    }
    __syncthreads();
    lo = scratch->lo;
    hi = scratch->hi;
    valid = scratch->valid;
  }
  Boundary result;
  result.valid = valid;
  if (valid <= k) {
    result.lo = lo;
    result.hi = ~0ull;
    result.need = valid;
    result.all = true;
    return result;
  }

  int need = k;
  for (;;) {
    const uint64_t span = hi - lo;
    const int width = 64 - __clzll(static_cast<long long>(span));
    const int shift = max(0, width - 9);
    static_assert(kBins == 1 << 9, "shift and bins belong together");
    for (int i = thread; i < kBins; i += kThreads) hist[i] = 0;
    group_sync<kThreads>();
    source.template visit<kThreads>(thread, [&](uint64_t key) {
      if (key >= lo && key <= hi) atomicAdd(&hist[static_cast<int>((key - lo) >> shift)], 1);
    });
    group_sync<kThreads>();
    if (thread < 32) {
      constexpr int kPer = kBins / 32;
      const int top = kBins - 1 - thread * kPer;
      int sum = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i) sum += hist[top - i];
      int before = sum;
#pragma unroll
      for (int s = 1; s < 32; s <<= 1) {
        const int other = __shfl_up_sync(~0u, before, s);
        if (thread >= s) before += other;
      }
      before -= sum;
      if (before < need && before + sum >= need) {
        int above = before;
        int i = 0;
        while (above + hist[top - i] < need) above += hist[top - i++];
        scratch->bin = top - i;
        scratch->above = above;
        scratch->inside = hist[top - i];
      }
    }
    group_sync<kThreads>();
    const int inside = scratch->inside;
    need -= scratch->above;
    lo += static_cast<uint64_t>(scratch->bin) << shift;
    hi = min(hi, lo + ((uint64_t{1} << shift) - 1));
    group_sync<kThreads>();
    if (inside == need || inside <= kListMax) {
      result.lo = lo;
      result.hi = hi;
      result.need = need;
      result.all = inside == need;
      return result;
    }
  }
}

// Calls emit(key, slot) once for each of the taken keys, with slots 0 .. taken-1 in an order that only the input decides. Returns a bound: exactly the taken keys
// are >= it. A warp may emit into the array that it reads: slots never pass what has been read of the head.
template <int kThreads, typename Source, typename Emit>
__device__ uint64_t take_largest(const Source& source, const Boundary& boundary, int* hist, Scratch* scratch, int thread,
                                 Emit emit) {
  uint64_t* list = reinterpret_cast<uint64_t*>(hist);
  const int lane = thread % 32;
  const uint64_t floor = boundary.lo, ceiling = boundary.hi;
  const bool all = boundary.all;
  if (thread == 0) scratch->inside = 0;
  int cursor = 0;
  if constexpr (kThreads > 32) {
    // Where each warp's keys start, so that the order does not depend on timing.
    if (thread < kThreads / 32) scratch->taken[thread] = 0;
    __syncthreads();
    int mine = 0;
    source.template visit<kThreads>(thread, [&](uint64_t key) { mine += key != 0 && (all ? key >= floor : key > ceiling); });
    mine = __reduce_add_sync(~0u, mine);
    if (lane == 0) scratch->taken[thread / 32] = mine;
    __syncthreads();
    for (int warp = 0; warp < thread / 32; ++warp) cursor += scratch->taken[warp];
  }
  group_sync<kThreads>();
  source.template visit<kThreads>(thread, [&](uint64_t key) {
    const bool taken = key != 0 && (all ? key >= floor : key > ceiling);
    const unsigned vote = __ballot_sync(~0u, taken);
    const int base = cursor;
    cursor += __popc(vote);
    if (taken) emit(key, base + __popc(vote & ((1u << lane) - 1)));
    if (!all && key >= floor && key <= ceiling) list[atomicAdd(&scratch->inside, 1)] = key;
  });
  group_sync<kThreads>();
  if (all) return floor;
  const int inside = scratch->inside;
  int base = cursor;
  if constexpr (kThreads > 32) {
    base = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) base += scratch->taken[warp];
  }
  for (int i = thread; i < inside; i += kThreads) {
    const uint64_t key = list[i];
    int rank = 0;
    for (int j = 0; j < inside; ++j) rank += list[j] > key;
    if (rank < boundary.need) emit(key, base + rank);
    if (rank == boundary.need - 1) scratch->lo = key;
  }
  group_sync<kThreads>();
  const uint64_t bound = scratch->lo;
  group_sync<kThreads>();
  return bound;
}

}  // namespace select
}  // namespace dsa
