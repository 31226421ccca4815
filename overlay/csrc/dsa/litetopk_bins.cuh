// The fast way of cutting a list to its best keys, by one warp or one block, in two or three readings: bins of a score's distance from an
// origin near the boundary, fine around an expected distance. Any monotone choice of bins gives the exact result: all keys above the
// boundary's bin are taken, and those in it are ranked. If that bin holds too many keys, another choice is tried, and then
// litetopk_select.cuh's way.
#pragma once

#include "litetopk_select.cuh"

namespace dsa {
namespace select {

constexpr int kBinShift = 17;                  // 64 bins for each doubling of the distance
constexpr int kBinRange = kBins << kBinShift;  // as bits of a float: 8 doublings

// Bin of a score: the bits of the distance max(0, score - origin), less `base`, above kBinShift. What lies outside is in the first or in
// the last bin; so are empty slots, which read as -inf. base: a multiple of 1 << kBinShift above 0, or 0 if there is no choice.
struct Bins {
  float origin;
  int base;
};

// Bins that are finest from a 16th of a distance to 16 times it.
__device__ __forceinline__ Bins bins_around(float origin, float distance) {
  if (!(fabsf(origin) < INFINITY && distance > 0.0f && distance < INFINITY)) return {0.0f, 0};
  const int base = (__float_as_int(distance) >> kBinShift << kBinShift) - kBinRange / 2;
  return {origin, min(max(base, 1 << kBinShift), 0x7f800000 - kBinRange)};
}

// Smallest of the lanes' values, and largest; NaN counts as none.
__device__ __forceinline__ void warp_range(float& low, float& high) {
#pragma unroll
  for (int s = 16; s; s >>= 1) {
    low = fminf(low, __shfl_xor_sync(~0u, low, s));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, s));
  }
}

// A first choice for n scores (a multiple of 64; NaN: none) of which the larger ones are wanted, about one in two: 64 samples give a
// score that a seventh of them is below, and the distance to one that a seventh is above.
__device__ __forceinline__ Bins sampled_bins(const float* scores, int n, int lane) {
  const float* sample = scores + lane * (n / 32) + n / 64 / 2 * 2;
  const float a = __ldcg(sample), b = __ldcg(sample + 1);
  float low = fmaxf(a, b), high = fminf(a, b);  // of a NaN and a number both return the number
  warp_range(low, high);
  return bins_around(low, high - low);
}

// A first choice for n keys (at least 32 * parts) of which the best one in `parts` are wanted. Of 32 groups of `parts` samples the lowest
// maximum is hardly ever above the boundary, and if scores rise from part to part about there; the origin is a little lower.
__device__ __forceinline__ Bins sampled_bins(const uint64_t* keys, int n, int parts, int lane) {
  const int stride = n / (32 * parts);
  float low = -INFINITY;
#pragma unroll 8
  for (int i = 0; i < parts; ++i) {
    const uint64_t key = __ldcg(reinterpret_cast<const unsigned long long*>(keys + (i * 32 + lane) * stride));
    if (is_key(key)) low = fmaxf(low, key_score(key));
  }
  float high = low;
  warp_range(low, high);
  return bins_around(low - (high - low) / 16, (high - low) / 4);
}

__device__ __forceinline__ int distance_bits(float score, float origin) { return __float_as_int(__fadd_rn(score, -origin)); }

// The bin that holds the k-th best key: distances whose bits are in [low, high].
struct Cut {
  int low, high;
  int above, inside;  // keys above it, keys in it
};

// Whether the bin of the k-th best key is found and holds few enough keys to rank them. Otherwise the cut says what to try next. The same
// in all threads.
template <int kThreads, typename Source>
__device__ __forceinline__ bool find_cut(const Source& source, const Bins& bins, int k, int* hist, int thread, Cut& cut) {
  constexpr int kPer = kBins / 32;
  const int lane = thread % 32;
  for (int i = thread; i < kBins / 4; i += kThreads) reinterpret_cast<int4*>(hist)[i] = make_int4(0, 0, 0, 0);
  group_sync<kThreads>();
  const int least = bins.base, most = bins.base + kBinRange - 1;
  int* first = hist - (bins.base >> kBinShift);
  source.template visit<kThreads, Source::kLoads>(thread, [&](const auto& batch) {
#pragma unroll
    for (const uint64_t key : batch)
      atomicAdd(first + (min(max(distance_bits(key_score(key), bins.origin), least), most) >> kBinShift), 1);
  });
  group_sync<kThreads>();
  int count[kPer];  // from this lane's highest bin down
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kPer / 4; ++i) {
    const int4 v = reinterpret_cast<const int4*>(hist)[(31 - lane) * (kPer / 4) + kPer / 4 - 1 - i];
    count[4 * i] = v.w, count[4 * i + 1] = v.z, count[4 * i + 2] = v.y, count[4 * i + 3] = v.x;
    sum += v.x + v.y + v.z + v.w;
  }
  int above = sum;
#pragma unroll
  for (int s = 1; s < 32; s <<= 1) {
    const int other = __shfl_up_sync(~0u, above, s);
    if (lane >= s) above += other;
  }
  above -= sum;
  const unsigned vote = __ballot_sync(~0u, above < k && above + sum >= k);
  int bin = (31 - lane) * kPer + kPer - 1, inside = count[0];
#pragma unroll
  for (int i = 1; i < kPer; ++i)
    if (above + inside < k) {
      above += inside;
      inside = count[i];
      --bin;
    }
  const int at = vote ? __ffs(vote) - 1 : 31;
  bin = vote ? __shfl_sync(~0u, bin, at) : 0;
  cut.above = __shfl_sync(~0u, above, at);
  cut.inside = __shfl_sync(~0u, inside, at);
  cut.low = bins.base + (bin << kBinShift);
  cut.high = bin == kBins - 1 ? INT32_MAX : cut.low + (1 << kBinShift) - 1;
  group_sync<kThreads>();
  return bin > 0 && cut.inside <= kListMax;
}

// No score of the cut's bin or above is below this.
__device__ __forceinline__ float floor_of(const Bins& bins, const Cut& cut) {
  return __fadd_rd(bins.origin, __int_as_float(cut.low - 1));  // the distance was rounded
}

// Another choice after one that failed: what lies farther or nearer, or the bin alone.
__device__ __forceinline__ Bins next_bins(const Bins& bins, const Cut& cut) {
  if (cut.high == INT32_MAX) return {bins.origin, min(bins.base + kBinRange, 0x7f800000 - kBinRange)};
  if (cut.low == bins.base) return {bins.origin, max(bins.base - kBinRange, 0)};
  return bins_around(floor_of(bins, cut), (__int_as_float(cut.high) - __int_as_float(cut.low)) / 8);
}

// As take_largest, for a cut that find_cut has found.
template <int kThreads, typename Source, typename Emit>
__device__ __forceinline__ uint64_t take_cut(const Source& source, const Bins& bins, const Cut& cut, int k, int* hist, Scratch* scratch,
                                             int thread, Emit emit) {
  uint64_t* list = reinterpret_cast<uint64_t*>(hist);
  const int lane = thread % 32;
  if (thread == 0) scratch->inside = 0;
  int cursor = 0;
  if constexpr (kThreads > 32) {
    int mine = 0;
    source.template visit<kThreads, Source::kLoads>(thread, [&](const auto& batch) {
#pragma unroll
      for (const uint64_t key : batch) mine += distance_bits(key_score(key), bins.origin) > cut.high;
    });
    cursor = start_of_warp<kThreads>(mine, scratch, thread);
  }
  group_sync<kThreads>();
  source.template visit<kThreads, Source::kLoads>(thread, [&](const auto& batch) {
    int mine = 0;
    bool any = false;
#pragma unroll
    for (const uint64_t key : batch) {
      const int bits = distance_bits(key_score(key), bins.origin);
      mine += bits > cut.high;
      any |= static_cast<unsigned>(bits - cut.low) <= static_cast<unsigned>(cut.high - cut.low);
    }
    int slot = mine;
#pragma unroll
    for (int s = 1; s < 32; s <<= 1) {
      const int other = __shfl_up_sync(~0u, slot, s);
      if (lane >= s) slot += other;
    }
    const int all = __shfl_sync(~0u, slot, 31);
    slot += cursor - mine;
    cursor += all;
#pragma unroll
    for (const uint64_t key : batch) {
      const bool taken = distance_bits(key_score(key), bins.origin) > cut.high;
      emit(taken, key, slot);
      slot += taken;
    }
    if (any) {
#pragma unroll
      for (const uint64_t key : batch) {
        const int bits = distance_bits(key_score(key), bins.origin);
        if (bits >= cut.low && bits <= cut.high) list[atomicAdd(&scratch->inside, 1)] = rank_of(key);
      }
    }
    __syncwarp();
  });
  group_sync<kThreads>();
  return take_listed<kThreads>(list, cut.inside, k - cut.above, cut.above, scratch, thread, emit);
}

// Tries a choice of bins and, if it fails, others made from it.
template <int kThreads, typename Source>
__device__ __forceinline__ bool try_bins(const Source& source, Bins& bins, int k, int* hist, int thread, Cut& cut) {
  bool found = false;
#pragma unroll 1
  for (int tries = 0; tries < 3 && !found && bins.base; ++tries) {
    if (tries) bins = next_bins(bins, cut);
    found = bins.base && find_cut<kThreads>(source, bins, k, hist, thread, cut);
  }
  return found;
}

// One cut of a row's list in a scan; `whole`: the first one, of scores alone. Emits the k best, or all if there are fewer, and returns how
// many; with next >= 0 there are keys to come, of which those that can win a tie have positions from `next` on, and the taken ones are the
// new head: they set `gate`, which refuses none of the k best, `step`, from there to where the next cut is expected (0: unknown), and
// `kept`. Then a first cut by bins emits nothing: it sets a gate that at least k scores reach, and kept = -1 for scores that stay as they
// are. One warp; gate, step and kept are shared by it.
template <int kSegments, typename Emit>
__device__ __forceinline__ int cut_row(const Segments<kSegments>& source, bool whole, int next, int k, float& gate, float& step, int& kept,
                                       int* hist, Scratch* scratch, int lane, Emit emit) {
  Bins bins = whole ? sampled_bins(source.scores, source.fresh, lane) : bins_around(gate, step);
  const float origin = bins.origin;
  Cut cut;
  const bool found = try_bins<32>(source, bins, k, hist, lane, cut);
  int taken = k;
  float now = found ? floor_of(bins, cut) : 0.0f;
  const float distance = found ? fmaxf(now - origin, __int_as_float(cut.low)) : 0.0f;
  const bool stays = found && whole && next >= 0;
  if (!stays) {
    uint64_t bound;
    if (found) {
      bound = take_cut<32>(source, bins, cut, k, hist, scratch, lane, emit);
    } else {
      const Boundary b = find_boundary<32>(source, k, hist, scratch, lane);
      bound = take_largest<32>(source, b, hist, scratch, lane, emit);
      taken = min(b.valid, k);
    }
    if (taken < k) bound = 0;
    now = gate_of(bound, key_position(bound) < next);
  }
  if (next >= 0 && lane == 0) {
    gate = now;
    step = distance;
    kept = stays ? -1 : taken;
  }
  return taken;
}

}  // namespace select
}  // namespace dsa
