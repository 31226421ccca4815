// Exact selection of the best `k` of `n` distinct candidates, by one warp or by one block.
//
// A key is the FP32 score of a candidate above the complement of its position. Its rank, with the score's bits in an order-preserving
// form, orders candidates completely: equal scores prefer the lower position. Radix selection over a range of ranks that shrinks to the
// bin holding the boundary; every range of distinct ranks ends after at most 64 / log2(kBins) + 1 rounds. litetopk_bins.cuh has the
// faster way that most lists take.
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
  return (static_cast<uint64_t>(static_cast<uint32_t>(__float_as_int(score))) << 32) | static_cast<uint32_t>(~position);
}
constexpr uint64_t kNoKey = uint64_t{0xff800000u} << 32;  // an empty slot reads as -inf; a key's lower half is never 0
__device__ __forceinline__ bool is_key(uint64_t key) { return static_cast<uint32_t>(key) != 0; }

__device__ __forceinline__ int key_position(uint64_t key) { return ~static_cast<int>(static_cast<uint32_t>(key)); }
__device__ __forceinline__ float key_score(uint64_t key) { return __uint_as_float(static_cast<uint32_t>(key >> 32)); }

// Larger for a better candidate, never 0; and the key that has it.
__device__ __forceinline__ uint64_t rank_of(uint64_t key) {
  const int bits = static_cast<int>(key >> 32);
  return key ^ static_cast<uint64_t>(static_cast<uint32_t>((bits >> 31) | INT32_MIN)) << 32;
}
__device__ __forceinline__ uint64_t key_of(uint64_t rank) {
  const int bits = static_cast<int>(rank >> 32);
  return rank ^ static_cast<uint64_t>(static_cast<uint32_t>(~(bits >> 31) | INT32_MIN)) << 32;
}

// A float t such that every score whose rank exceeds `bound` is >= t. With `ties_lose` (no remaining position can win a tie at the
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

// Calls f(batch) with n keys in batches of 2 * kLoads for each thread, kNoKey past the end, the same number of times in all threads and
// in step within a warp. All of a batch is read before its call.
template <int kThreads, int kLoads, typename F>
__device__ __forceinline__ void for_each_batch(const uint64_t* keys, int n, int thread, F f) {
#pragma unroll 1
  for (int base = 0; base < n; base += kThreads * 2 * kLoads) {
    uint64_t batch[2 * kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = base + (u * kThreads + thread) * 2;
      ulonglong2 v = make_ulonglong2(kNoKey, kNoKey);
      if (i + 1 < n)
        v = __ldcg(reinterpret_cast<const ulonglong2*>(keys + i));
      else if (i < n)
        v.x = __ldcg(reinterpret_cast<const unsigned long long*>(keys + i));
      batch[2 * u] = v.x;
      batch[2 * u + 1] = v.y;
    }
    __syncwarp();
    f(batch);
  }
}

// One contiguous array of keys.
struct Array {
  static constexpr int kLoads = 8;
  const uint64_t* keys;
  int n;
  template <int kThreads, int kLoads, typename F>
  __device__ __forceinline__ void visit(int thread, F f) const {
    for_each_batch<kThreads, kLoads>(keys, n, thread, f);
  }
};

// A row's list: `kept` keys at its head or, with `fresh`, so many scores (a multiple of 4; NaN: no key) of the positions from `first` on,
// as they came; and `kSegments` segments of `stride` slots, each of which holds kLists lists, slot j of list i at j * kLists + i, with
// counts[segment * kLists + i] keys. One warp. Rows of 8 lanes read one segment each, so that short segments do not leave lanes idle. All
// parts go through one call of f: the registers and the size of this code cost the scan's loop.
constexpr int kLists = 8;  // lanes of a warp that have scores of one row

template <int kSegments>
struct Segments {
  static constexpr int kLoads = 4;  // more of them in flight gain less than they cost
  const uint64_t* head;
  int kept;
  const float* scores;
  int fresh, first;
  const uint64_t* segments;
  int stride;
  const int* counts;
  template <int kThreads, int kUsed, typename F>
  __device__ __forceinline__ void visit(int lane, F f) const {
    static_assert(kThreads == 32 && kSegments % 4 == 0 && kUsed % 2 == 0, "four segments at a time, four scores for two loads of keys");
#pragma unroll 1
    for (int four = -4; four < kSegments; four += 4) {  // the head counts as four
      const bool at_head = four < 0, at_scores = at_head && fresh;
      const int segment = four + lane / 8;
      // An even slot holds a key below the first number, the odd one behind it below the second.
      const int* pair = counts + segment * kLists + lane % 4 * 2;
      const int count = at_scores ? fresh : at_head ? kept
                                                    : pair[0] * kLists;
      const int second = at_scores ? fresh : at_head ? kept - 1
                                                     : pair[1] * kLists;
      const int longer = max(count, second);
      const int most = __reduce_max_sync(~0u, longer);
      const uint64_t* from = at_head ? head : segments + segment * stride;
      const int step = at_head ? 64 : 16;
      const int begin = (at_head ? lane : lane % 8) * 2;
#pragma unroll 1
      for (int base = 0; base < most; base += kUsed * step) {
        uint64_t batch[2 * kUsed];
        if (at_scores) {
#pragma unroll
          for (int u = 0; u < kUsed / 2; ++u) {
            const int i = base + (u * 32 + lane) * 4;
            float4 v = make_float4(NAN, NAN, NAN, NAN);
            if (i < count) v = __ldcg(reinterpret_cast<const float4*>(scores + i));
            const float score[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; ++j)
              batch[4 * u + j] = make_key(fmaxf(score[j], -INFINITY), isnan(score[j]) ? -1 : first + i + j);
          }
        } else {
#pragma unroll
          for (int u = 0; u < kUsed; ++u) {
            const int i = base + begin + u * step;
            ulonglong2 v = make_ulonglong2(kNoKey, kNoKey);
            if (i < longer) v = __ldcg(reinterpret_cast<const ulonglong2*>(from + i));
            batch[2 * u] = i < count ? v.x : kNoKey;
            batch[2 * u + 1] = i < second ? v.y : kNoKey;
          }
        }
        __syncwarp();
        f(batch);
      }
    }
  }
};

// Calls f(key) for each key of a source and each empty slot that it has to read.
template <int kThreads, typename Source, typename F>
__device__ __forceinline__ void for_each_key(const Source& source, int thread, F f) {
  source.template visit<kThreads, Source::kLoads>(thread, [&](const auto& batch) {
#pragma unroll
    for (const uint64_t key : batch) f(key);
  });
}

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
  uint64_t lo, hi;  // ranks above hi are taken; of those in [lo, hi], the largest `need`
  int need;
  int valid;  // keys
  bool all;   // need == number of ranks in [lo, hi], or all keys are taken
};

// hist: kBins ints; also the list of the boundary's keys in take_largest.
template <int kThreads, typename Source>
__device__ Boundary find_boundary(const Source& source, int k, int* hist, Scratch* scratch, int thread) {
  uint64_t lo = ~0ull, hi = 0;
  int valid = 0;
  for_each_key<kThreads>(source, thread, [&](uint64_t key) {
    if (is_key(key)) {
      lo = min(lo, rank_of(key));
      hi = max(hi, rank_of(key));
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
    for_each_key<kThreads>(source, thread, [&](uint64_t key) {
      const uint64_t rank = rank_of(key);
      if (is_key(key) && rank >= lo && rank <= hi) atomicAdd(&hist[static_cast<int>((rank - lo) >> shift)], 1);
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

// Of `inside` ranks in shared memory the largest `need` are emitted, from slot `base` on; returns the smallest of them.
template <int kThreads, typename Emit>
__device__ __forceinline__ uint64_t take_listed(const uint64_t* list, int inside, int need, int base, Scratch* scratch, int thread,
                                                Emit emit) {
  for (int i = thread; i < inside; i += kThreads) {
    const uint64_t rank = list[i];
    int better = 0;
#pragma unroll 1
    for (int j = 0; j < inside; ++j) better += list[j] > rank;
    if (better < need) emit(true, key_of(rank), base + better);
    if (better == need - 1) scratch->lo = rank;
  }
  group_sync<kThreads>();
  const uint64_t bound = scratch->lo;
  group_sync<kThreads>();
  return bound;
}

// Where a warp's keys start if each thread takes `mine`, so that their order does not depend on timing. Blocks only.
template <int kThreads>
__device__ __forceinline__ int start_of_warp(int mine, Scratch* scratch, int thread) {
  mine = __reduce_add_sync(~0u, mine);
  if (thread % 32 == 0) scratch->taken[thread / 32] = mine;
  __syncthreads();
  int start = 0;
  for (int warp = 0; warp < thread / 32; ++warp) start += scratch->taken[warp];
  return start;
}

// Calls emit(taken, key, slot) for keys, once for each of the taken ones, with slots 0 .. taken-1 in an order that only the input decides.
// Returns a bound: exactly the taken keys' ranks are >= it. A warp may emit into the array that it reads: slots never pass what has been
// read of the head.
template <int kThreads, typename Source, typename Emit>
__device__ uint64_t take_largest(const Source& source, const Boundary& boundary, int* hist, Scratch* scratch, int thread,
                                 Emit emit) {
  uint64_t* list = reinterpret_cast<uint64_t*>(hist);
  const int lane = thread % 32;
  const uint64_t floor = boundary.lo, ceiling = boundary.hi;
  const bool all = boundary.all;
  const auto taken = [&](uint64_t key) {
    const uint64_t rank = rank_of(key);
    return is_key(key) && (all ? rank >= floor : rank > ceiling);
  };
  if (thread == 0) scratch->inside = 0;
  int cursor = 0;
  if constexpr (kThreads > 32) {
    int mine = 0;
    for_each_key<kThreads>(source, thread, [&](uint64_t key) { mine += taken(key); });
    cursor = start_of_warp<kThreads>(mine, scratch, thread);
  }
  group_sync<kThreads>();
  for_each_key<kThreads>(source, thread, [&](uint64_t key) {
    const bool mine = taken(key);
    const unsigned vote = __ballot_sync(~0u, mine);
    const int base = cursor;
    cursor += __popc(vote);
    emit(mine, key, base + __popc(vote & ((1u << lane) - 1)));
    const uint64_t rank = rank_of(key);
    if (!all && is_key(key) && rank >= floor && rank <= ceiling) list[atomicAdd(&scratch->inside, 1)] = rank;
  });
  group_sync<kThreads>();
  if (all) return floor;
  int base = cursor;
  if constexpr (kThreads > 32) {
    base = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) base += scratch->taken[warp];
  }
  return take_listed<kThreads>(list, scratch->inside, boundary.need, base, scratch, thread, emit);
}

}  // namespace select
}  // namespace dsa
