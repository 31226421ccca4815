// The attention of groups over their unions (litedsa.cu explains it): a CTA has two consumer warpgroups and one that copies.
#pragma once

#include "litedsa_fetch.cuh"

namespace dsa {
namespace litedsa {

constexpr int kAttendThreads = kConsumerThreads + kProducerThreads;
// Registers of a thread after the roles part: 168 each when the CTA starts. 2 * 216 + 72 = 3 * 168.
constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
constexpr float kLog2E = 1.4426950408889634f;

// Which of a tile's 64 entries the query in `row` of the tile takes.
__device__ __forceinline__ uint64_t mask_word(const AttendParams& p, int64_t group, int first, int queries, int tile, int row) {
  const int query = row >> p.head_shift;
  if (query >= queries) return 0;
  if (p.ranges) {
    const int32_t* r = p.ranges + (static_cast<int64_t>(first) + query) * 3;
    const int base = tile * kKeys;
    return bits_between(0, __ldg(r) - base) | bits_between(__ldg(r + 1) - base, __ldg(r + 2) - base);
  }
  const int group_size = kRows >> p.head_shift;
  return __ldg(p.masks + (group * (p.capacity / kKeys) + tile) * group_size + query);
}

// What a sum of weights relative to the raw score `from` is multiplied with when `to`, at least as large, takes its place. Exactly 1 while
// the largest score stays: what rounding the shift leaves would be taken again in each of up to 256 tiles.
__device__ __forceinline__ float decay_of(float from, float to, float shift, float factor) {
  return from == to ? 1.0f : ptx::exp2_approx(__fmaf_rn(from, factor, -shift));
}

// A row without a key so far has shift 0: every weight is exp2(-inf - 0) = 0.
__device__ __forceinline__ float shift_of(float top, float factor) { return top == -INFINITY ? 0.0f : top * factor; }

// Minus infinity for the scores of entries that the query of row r (of the thread's two) does not take; then the largest of the row.
__device__ __forceinline__ float mask_and_top(float (&d)[32], int r, uint64_t word, int lane) {
  if (word != ~0ull) {
    const uint64_t bits = word >> (2 * (lane % 4));
    const uint32_t half[2] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (!(half[j / 4] >> (j % 4 * 8 + c) & 1)) d[4 * j + 2 * r + c] = -INFINITY;
  }
  float top = -INFINITY;
#pragma unroll
  for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  return fmaxf(top, __shfl_xor_sync(~0u, top, 2));
}

// Adds the products of queries and keys of `Blocks` blocks from block `from` on.
template <int Blocks>
__device__ __forceinline__ void score(float (&d)[32], uint64_t q_desc, uint64_t k_desc, int from, bool fresh) {
  q_desc += from * kNextBlock;
  k_desc += from * kNextBlock;
  ptx::wgmma_fence();
#pragma unroll
  for (int b = 0; b < Blocks; ++b)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      ptx::wgmma_m64n64k16_bf16(d, q_desc + b * kNextBlock + e * kNextElements, k_desc + b * kNextBlock + e * kNextElements,
                                !(fresh && b + e == 0));
}

// One arrival of the warp, after what all its lanes did.
__device__ __forceinline__ void arrive_once(uint64_t* bar, int lane) {
  __syncwarp();
  if (lane == 0) ptx::barrier_arrive(bar);
}

// Scores and weighs every other tile of the group, and adds weights times values of all tiles to half of the value columns; then writes the
// output. It has the weights of its own tiles in registers and finds the other's in shared memory. asked, filled, weighed: phases of
// barriers, which go on from group to group.
template <int kBlocks, bool kFp8>
__device__ __forceinline__ void consume(const AttendParams& p, AttendShared<kBlocks>& s, int which, int64_t group, int first, int queries,
                                        int tiles, uint32_t asked, uint32_t& filled, uint32_t& weighed, int thread) {
  const int lane = thread % 32, warp = thread / 32, other = which ^ 1;
  const int rows[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};  // all lanes of a warp have the same two queries
  const float factor = p.scale * kLog2E;
  float sums[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) sums[i] = 0.0f;
  float top[2] = {-INFINITY, -INFINITY}, mine[2] = {-INFINITY, -INFINITY};  // largest raw score up to the last tile, up to the last own one
  float total[2] = {0.0f, 0.0f};                                            // of the own weights in this thread's columns
  uint64_t words[2];
  if (which < tiles) {
#pragma unroll
    for (int r = 0; r < 2; ++r) words[r] = mask_word(p, group, first, queries, which, rows[r]);
  }
  const auto rescale = [&](const float (&to)[2]) {
    float decay[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) decay[r] = decay_of(top[r], to[r], shift_of(to[r], factor), factor);
#pragma unroll
    for (int i = 0; i < 128; ++i) sums[i] *= decay[i / 2 % 2];
  };
  // Starts the products of the other's next tile. What that waited for before its arrival need not be waited for here.
  const auto add_other = [&] {
    ptx::barrier_wait(&s.topped[other], weighed);
    const float to[2] = {s.top[other][rows[0]], s.top[other][rows[1]]};
    if (*reinterpret_cast<const uint32_t*>(s.raised[other])) {  // the same for all warps: they have to wait for wgmma together
      ptx::wgmma_wait<0>(sums);
      rescale(to);
    }
    top[0] = to[0];
    top[1] = to[1];
    ptx::barrier_wait(&s.weighed[other], weighed);
    weighed ^= 1;
    const uint64_t p_desc = k_major(ptx::smem_address(s.weights));
    const uint64_t v_desc = mn_major(ptx::smem_address(s.kv[other] + which * kHalfBlocks * kBlockBytes));
    ptx::wgmma_fence();
#pragma unroll
    for (int e = 0; e < 4; ++e) ptx::wgmma_m64n256k16_bf16_mn(sums, p_desc + e * kNextElements, v_desc + e * kNextRows);
    ptx::wgmma_commit();
  };

  ptx::barrier_wait(&s.asked, asked);
  if (which >= tiles) arrive_once(&s.answered, lane);
  for (int tile = which; tile < tiles; tile += 2) {
    // Opaque: else all 72 descriptors are computed once and kept in registers.
    const uint64_t q_desc = k_major(ptx::opaque(ptx::smem_address(s.q)));
    const uint64_t k_desc = k_major(ptx::opaque(ptx::smem_address(s.kv[which])));
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] = 0.0f;
    const auto score_mine = [&] {  // the rope part and the half whose values this consumer adds: they are there first
      if constexpr (kBlocks == 9 && !kFp8) ptx::barrier_wait(&s.filled[which][kRopePart], filled);
      ptx::barrier_wait(&s.filled[which][kFp8 ? 0 : which], filled);
      ptx::fence_async_proxy();  // wgmma reads what copies of other threads wrote
      if constexpr (kBlocks == 9) score<1>(d, q_desc, k_desc, 2 * kHalfBlocks, true);
      score<kHalfBlocks>(d, q_desc, k_desc, which * kHalfBlocks, kBlocks == 8);
      ptx::wgmma_commit();
    };
    // A bf16 tile's first scores keep the tensor cores busy while the other weighs. FP8 tiles come late: then its weights are first.
    if constexpr (!kFp8) score_mine();
    if (tile > 0) add_other();
    if constexpr (kFp8) {
      ptx::wgmma_wait<0>(sums);
      if (tile > 0) arrive_once(&s.empty[other][which], lane);
      score_mine();
    } else {
      ptx::barrier_wait(&s.filled[which][other], filled);
      ptx::fence_async_proxy();
    }
    score<kHalfBlocks>(d, q_desc, k_desc, other * kHalfBlocks, false);
    ptx::wgmma_commit();
    filled ^= 1;
    if constexpr (!kFp8) {
      ptx::wgmma_wait<1>(sums);
      if (tile > 0) arrive_once(&s.empty[other][which], lane);
    }
    ptx::wgmma_wait<0>(d);
    if constexpr (kBlocks == 9) arrive_once(&s.empty[which][kRopePart], lane);
    if (tile + 2 >= tiles) arrive_once(&s.answered, lane);

    float best[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) best[r] = fmaxf(top[r], mask_and_top(d, r, words[r], lane));
    const bool raised = !__all_sync(~0u, best[0] == top[0] && best[1] == top[1]);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (lane % 4 == 0) s.top[which][rows[r]] = best[r];
    if (lane == 0) s.raised[which][warp] = raised;
    ptx::barrier_arrive(&s.topped[which]);
    if (raised) rescale(best);
    const float shift[2] = {shift_of(best[0], factor), shift_of(best[1], factor)};
    float added[2] = {0.0f, 0.0f};
    uint32_t weights[16];  // in the order of wgmma's operand in registers
    const uint64_t v_desc = mn_major(ptx::smem_address(s.kv[which] + which * kHalfBlocks * kBlockBytes));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i % 2, at = 4 * (2 * e + i / 2) + 2 * r;
        const float low = ptx::exp2_approx(__fmaf_rn(d[at], factor, -shift[r]));
        const float high = ptx::exp2_approx(__fmaf_rn(d[at + 1], factor, -shift[r]));
        added[r] += low;
        added[r] += high;
        weights[4 * e + i] = ptx::pack_bf16(low, high);
      }
      ptx::wgmma_fence();
      ptx::wgmma_m64n256k16_bf16_mn(sums, weights + 4 * e, v_desc + e * kNextRows);
    }
    ptx::wgmma_commit();
    // The place is free: this warp's products with its rows of the other's last weights have ended.
    uint8_t* place = s.weights + ptx::opaque(lane % 4 * 4);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < 8; ++j) *reinterpret_cast<uint32_t*>(place + block_offset(ptx::opaque(rows[r]), j)) = weights[2 * j + r];
    ptx::fence_async_proxy();
    ptx::barrier_arrive(&s.weighed[which]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] = __fmaf_rn(total[r], decay_of(mine[r], best[r], shift[r], factor), added[r]);
      mine[r] = top[r] = best[r];
      if (tile + 2 < tiles) words[r] = mask_word(p, group, first, queries, tile + 2, rows[r]);  // here: a fence would wait for it
    }
    ptx::wgmma_wait<0>(sums);
    arrive_once(&s.empty[which][which], lane);
  }

  const int last = (tiles - 1) % 2;
  if (which != last) {
    add_other();
    ptx::wgmma_wait<0>(sums);
    arrive_once(&s.empty[other][which], lane);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    if (lane % 4 == 0) s.sums[asked][which][rows[r]] = total[r] * decay_of(mine[r], top[r], shift_of(top[r], factor), factor);
  }
  ptx::barrier_arrive(&s.summed);
  ptx::barrier_wait(&s.summed, asked);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = rows[r] >> p.head_shift, head = rows[r] & ((1 << p.head_shift) - 1);
    if (query >= queries) continue;
    const bool seen = top[r] != -INFINITY;
    const float weight = s.sums[asked][0][rows[r]] + s.sums[asked][1][rows[r]];
    float all = weight;
    if (p.sinks && seen) all += ptx::exp2_approx(__fmaf_rn(__ldg(p.sinks + head), kLog2E, -top[r] * factor));
    const float inverse = seen ? 1.0f / all : 0.0f;
    if (p.lse && which == last && lane % 4 == 0)
      p.lse[(static_cast<int64_t>(first) + query) * p.lse_token + head] = seen ? __fmaf_rn(top[r], p.scale, logf(weight)) : -INFINITY;
    uint8_t* out = p.out + (static_cast<int64_t>(first) + query) * p.out_token + head * p.out_head + which * 512 + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      *reinterpret_cast<uint32_t*>(out + j * 16) = ptx::pack_bf16(sums[4 * j + 2 * r] * inverse, sums[4 * j + 2 * r + 1] * inverse);
  }
}

// The same for every output of a group that has no keys, or whose union was refused.
__device__ __forceinline__ void fill(const AttendParams& p, int first, int queries, uint32_t out, float lse, int thread) {
  const int heads = 1 << p.head_shift;
  for (int i = thread; i < queries * heads * (kValueDims / 2); i += kConsumerThreads) {
    const int64_t token = first + i / (heads * (kValueDims / 2));
    const int head = i / (kValueDims / 2) % heads;
    *reinterpret_cast<uint32_t*>(p.out + token * p.out_token + head * p.out_head + i % (kValueDims / 2) * 4) = out;
    if (p.lse && i % (kValueDims / 2) == 0) p.lse[token * p.lse_token + head] = lse;
  }
}

template <int kBlocks, bool kFp8>
__global__ void __launch_bounds__(kAttendThreads, 1) attend_kernel(const DSA_GRID_CONSTANT AttendParams p) {
#ifdef DSA_HOST_EMULATION
  uint8_t* raw = emulated_shared();
#else
  extern __shared__ uint8_t raw[];
#endif
#if DSA_SM90A
  AttendShared<kBlocks>& s = *reinterpret_cast<AttendShared<kBlocks>*>(raw + (-ptx::smem_address(raw) & 1023));
  const int thread = threadIdx.x;
  const int role = __shfl_sync(~0u, thread / 128, 0);  // known to be the same in all lanes: descriptors are in uniform registers then
  if (thread == 0) {
    for (int i = 0; i < 2; ++i) {
      for (int part = 0; part < kParts; ++part) {
        ptx::barrier_init(&s.filled[i][part], kProducerThreads);
        ptx::barrier_init(&s.empty[i][part], kConsumerWarps);
      }
      ptx::barrier_init(&s.topped[i], kConsumerThreads / 2);
      ptx::barrier_init(&s.weighed[i], kConsumerThreads / 2);
    }
    ptx::barrier_init(&s.asked, kProducerThreads);
    ptx::barrier_init(&s.answered, 2 * kConsumerWarps);
    ptx::barrier_init(&s.summed, kConsumerThreads);
    ptx::barrier_init_fence();
  }
  __syncthreads();

  const auto each_group = [&](auto work) {  // work(group, first token, queries, tiles or -1 if it was refused)
    for (int64_t group = blockIdx.x; group < p.groups; group += p.ctas) {
      const int first = p.starts[group], queries = min(p.starts[group + 1] - first, kRows >> p.head_shift);
      const int count = p.counts[group];
      work(group, first, queries, count < 0 ? -1 : (min(count, p.capacity) + kKeys - 1) / kKeys);
    }
  };
  uint32_t asked = 0;
  if (role < 2) {
    ptx::registers_increase<kConsumerRegisters>();
    uint32_t filled = 0, weighed = 0;
    each_group([&](int64_t group, int first, int queries, int tiles) {
      if (tiles <= 0) {
        fill(p, first, queries, tiles < 0 ? 0x7fff7fff : 0, tiles < 0 ? __uint_as_float(0x7fffffff) : -INFINITY, thread);
      } else {
        consume<kBlocks, kFp8>(p, s, role, group, first, queries, tiles, asked, filled, weighed, thread % 128);
        asked ^= 1;
      }
    });
  } else {
    ptx::registers_decrease<kProducerRegisters>();
    uint32_t phases = 0;
    Fetcher f(thread % 128);
    each_group([&](int64_t group, int first, int queries, int tiles) {
      if (tiles <= 0) return;
      const int32_t* slots = p.slots + group * p.capacity;
      f.look_up(slots, 0, thread % 128);
      fetch_queries(p, s, f, first, queries, asked);
      fetch_tiles<kBlocks, kFp8>(p, s, f, slots, tiles, phases, thread % 128);
      asked ^= 1;
    });
    ptx::copy_async_wait();
  }
#else
  __trap();
#endif
}

}  // namespace litedsa
}  // namespace dsa
