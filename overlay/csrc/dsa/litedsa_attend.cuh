// The attention of one group over its union (litedsa.cu explains it): one CTA, four warpgroups with one role each.
#pragma once

#include "litedsa_fetch.cuh"

namespace dsa {
namespace litedsa {

constexpr int kAttendThreads = 512;
// Registers of a thread after the roles part: 128 each when the CTA starts. 2 * 96 + 2 * 160 = 512.
constexpr int kStreamRegisters = 96, kValueRegisters = 160;
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

// Every other tile: fetches it, scores it, masks, and makes weights. The two streams hand the largest scores to each other. Ends with the
// weights' sums and the log-sum-exp.
template <int kBlocks, bool kFp8>
__device__ __forceinline__ void stream(const AttendParams& p, AttendShared<kBlocks, kFp8>& s, int which, int64_t group, int first, int queries,
                                       int tiles, int thread) {
  constexpr int kParts = parts_of(kFp8);
  const int lane = thread % 32, warp = thread / 32;
  const int rows[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};  // all lanes of a warp have the same two queries
  const float factor = p.scale * kLog2E;
  const int32_t* slots = p.slots + group * p.capacity;
  uint8_t* tile_rows = s.kv[which];
  float mine[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // this stream's last top; sum of the weights in this thread's columns
  Fetcher fetcher(thread);

  if (which < tiles) fetcher.look_up(slots, which, thread);
  for (int tile = which; tile < tiles; tile += 2) {
    const uint32_t phase = tile / 2 & 1;
    if constexpr (kFp8) {
      ptx::barrier_wait(&s.empty[which][0], phase ^ 1);
      fetch_fp8(p, tile_rows, fetcher, thread);
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        ptx::barrier_wait(&s.empty[which][part], phase ^ 1);
        fetch<kBlocks>(p, tile_rows, fetcher, part, thread);
        ptx::copy_async_commit();
      }
    }
    uint64_t words[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) words[r] = mask_word(p, group, first, queries, tile, rows[r]);
    if (tile + 2 < tiles) fetcher.look_up(slots, tile + 2, thread);

    if (tile == which) ptx::barrier_wait(&s.asked, 0);
    // Opaque: else all 72 descriptors are computed once and kept in registers.
    const uint64_t q_desc = k_major(ptx::opaque(ptx::smem_address(s.q)));
    const uint64_t k_desc = k_major(ptx::opaque(ptx::smem_address(s.kv[which])));
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part + 1 < kParts)
        ptx::copy_async_wait<1>();
      else
        ptx::copy_async_wait<0>();
      ptx::fence_async_proxy();  // before the arrival: wgmma reads what this thread wrote
      ptx::barrier_arrive(&s.filled[which][part]);
      ptx::barrier_wait(&s.filled[which][part], phase);
      ptx::wgmma_fence();
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        if (in_part(kParts, part, b)) {
#pragma unroll
          for (int e = 0; e < 4; ++e)
            ptx::wgmma_m64n64k16_bf16(d, q_desc + b * kNextBlock + e * kNextElements, k_desc + b * kNextBlock + e * kNextElements,
                                      b + e != 0);
        }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait_all(d);

    float best[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (words[r] != ~0ull) {
        const uint64_t bits = words[r] >> (2 * (lane % 4));
        const uint32_t half[2] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (!(half[j / 4] >> (j % 4 * 8 + c) & 1)) d[4 * j + 2 * r + c] = -INFINITY;
      }
      best[r] = -INFINITY;
#pragma unroll
      for (int j = 0; j < 8; ++j) best[r] = fmaxf(best[r], fmaxf(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]));
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 1));
      best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 2));
    }
    float before[2] = {-INFINITY, -INFINITY}, decay[2];
    if (tile > 0) {
      ptx::barrier_wait(&s.top_known[which ^ 1], (tile - 1) / 2 & 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) before[r] = s.top[which ^ 1][rows[r]];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      best[r] = fmaxf(before[r], best[r]);
      if (lane % 4 == 0) s.top[which][rows[r]] = best[r];
    }
    ptx::barrier_arrive(&s.top_known[which]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float shift = shift_of(best[r], factor);
      decay[r] = decay_of(before[r], best[r], shift, factor);
      float added = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& weight = d[4 * j + 2 * r + c];
          weight = ptx::exp2_approx(__fmaf_rn(weight, factor, -shift));
          added += weight;
        }
      sum[r] = __fmaf_rn(sum[r], decay_of(mine[r], best[r], shift, factor), added);
      mine[r] = best[r];
    }
    ptx::barrier_wait(&s.top_known[which], phase);  // the whole stream has scored: nothing reads the rope part any more
    uint8_t* weights = s.kv[which] + kWeightsBlock * kBlockBytes + ptx::opaque(lane % 4 * 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<uint32_t*>(weights + block_offset(ptx::opaque(rows[r]), j)) =
            ptx::pack_bf16(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]);
      if (lane % 4 == 0) s.decay[which][rows[r]] = decay[r];
    }
    ptx::fence_async_proxy();
    ptx::barrier_arrive(&s.weighed[which]);
  }

  // The stream without the last tile tells the other its sums, relative to the last top.
  const int last = tiles > 0 ? (tiles - 1) % 2 : 0;
  float total[2], top[2] = {mine[0], mine[1]};
  if (which != last && tiles > 0) {
    ptx::barrier_wait(&s.top_known[last], (tiles - 1) / 2 & 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = s.top[last][rows[r]];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] = sum[r];
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
    if (which != last) {
      total[r] *= decay_of(mine[r], top[r], shift_of(top[r], factor), factor);
      if (lane % 4 == 0) s.sums[rows[r]] = total[r];
    }
  }
  if (which != last) {
    ptx::barrier_arrive(&s.summed);
    return;
  }
  ptx::barrier_wait(&s.summed, 0);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = rows[r] >> p.head_shift, head = rows[r] & ((1 << p.head_shift) - 1);
    const bool seen = top[r] != -INFINITY;
    const float weight = total[r] + s.sums[rows[r]];
    float all = weight;
    if (p.sinks && seen) all += ptx::exp2_approx(__fmaf_rn(__ldg(p.sinks + head), kLog2E, -top[r] * factor));
    if (lane % 4 == 0) {
      s.inverse[rows[r]] = seen ? 1.0f / all : 0.0f;
      if (p.lse && query < queries)
        p.lse[(static_cast<int64_t>(first) + query) * p.lse_token + head] = seen ? __fmaf_rn(top[r], p.scale, logf(weight)) : -INFINITY;
    }
  }
  ptx::barrier_arrive(&s.done);
}

// Half of the 512 value columns: adds weights times values of all tiles, then writes the output.
template <int kBlocks, bool kFp8>
__device__ __forceinline__ void add_values(const AttendParams& p, AttendShared<kBlocks, kFp8>& s, int half, int first, int queries, int tiles,
                                           int thread) {
  constexpr int kParts = parts_of(kFp8);
  const int lane = thread % 32, warp = thread / 32;
  const int rows[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};
  float d[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = 0.0f;

  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    const uint32_t phase = tile / 2 & 1;
    const uint64_t p_desc = k_major(ptx::smem_address(s.kv[stage] + kWeightsBlock * kBlockBytes));
    const uint64_t v_desc = mn_major(ptx::smem_address(s.kv[stage] + half * 4 * kBlockBytes));
    ptx::barrier_wait(&s.filled[stage][kParts - 1], phase);
    ptx::barrier_wait(&s.weighed[stage], phase);
    const float decay[2] = {s.decay[stage][rows[0]], s.decay[stage][rows[1]]};
    if (!__all_sync(~0u, decay[0] == 1.0f && decay[1] == 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; ++i) d[i] *= decay[i / 2 % 2];
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int e = 0; e < 4; ++e) ptx::wgmma_m64n128k16_bf16_mn<0>(d, p_desc + e * kNextElements, v_desc + e * kNextRows, 1);
    if constexpr (kParts == 2) ptx::wgmma_commit();
#pragma unroll
    for (int e = 0; e < 4; ++e)
      ptx::wgmma_m64n128k16_bf16_mn<1>(d, p_desc + e * kNextElements, v_desc + e * kNextRows + 2 * kNextBlock, 1);
    ptx::wgmma_commit();
    if constexpr (kParts == 2) {
      ptx::wgmma_wait_but_one();
      ptx::barrier_arrive(&s.empty[stage][0]);
    }
    ptx::wgmma_wait_all(d);
    ptx::barrier_arrive(&s.empty[stage][kParts - 1]);
  }

  ptx::barrier_wait(&s.done, 0);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = rows[r] >> p.head_shift, head = rows[r] & ((1 << p.head_shift) - 1);
    const float inverse = s.inverse[rows[r]];
    if (query >= queries) continue;
    uint8_t* out = p.out + (static_cast<int64_t>(first) + query) * p.out_token + head * p.out_head + half * 512 + lane % 4 * 4;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      *reinterpret_cast<uint32_t*>(out + j * 16) = ptx::pack_bf16(d[4 * j + 2 * r] * inverse, d[4 * j + 2 * r + 1] * inverse);
  }
}

// NaN for every output of a group whose union was refused.
__device__ __forceinline__ void refuse(const AttendParams& p, int first, int queries, int thread) {
  const int heads = 1 << p.head_shift;
  for (int i = thread; i < queries * heads * (kValueDims / 2); i += kAttendThreads) {
    const int64_t token = first + i / (heads * (kValueDims / 2));
    const int head = i / (kValueDims / 2) % heads;
    *reinterpret_cast<uint32_t*>(p.out + token * p.out_token + head * p.out_head + i % (kValueDims / 2) * 4) = 0x7fff7fff;
    if (p.lse && i % (kValueDims / 2) == 0) p.lse[token * p.lse_token + head] = __uint_as_float(0x7fffffff);
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
  AttendShared<kBlocks, kFp8>& s =
      *reinterpret_cast<AttendShared<kBlocks, kFp8>*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~static_cast<uintptr_t>(1023));
  const int64_t group = blockIdx.x;
  const int thread = threadIdx.x, role = thread / 128;
  const int first = p.starts[group], queries = min(p.starts[group + 1] - first, kRows >> p.head_shift);
  const int count = p.counts[group];
  if (count < 0) {
    refuse(p, first, queries, thread);
    return;
  }
  const int tiles = (min(count, p.capacity) + kKeys - 1) / kKeys;
  if (thread == 0) {
    for (int i = 0; i < 2; ++i) {
      for (int part = 0; part < parts_of(kFp8); ++part) {
        ptx::barrier_init(&s.filled[i][part], kStreamThreads);
        ptx::barrier_init(&s.empty[i][part], kValueThreads);
      }
      ptx::barrier_init(&s.top_known[i], kStreamThreads);
      ptx::barrier_init(&s.weighed[i], kStreamThreads);
    }
    ptx::barrier_init(&s.asked, kValueThreads);
    ptx::barrier_init(&s.summed, kStreamThreads);
    ptx::barrier_init(&s.done, kStreamThreads);
    ptx::barrier_init_fence();
  }
  __syncthreads();

  if (role < 2) {
    ptx::registers_decrease<kStreamRegisters>();
    stream<kBlocks, kFp8>(p, s, role, group, first, queries, tiles, thread % 128);
  } else {
    ptx::registers_increase<kValueRegisters>();
    load_queries<kBlocks, kFp8>(p, s, first, queries, thread - 2 * kStreamThreads);
    add_values<kBlocks, kFp8>(p, s, role - 2, first, queries, tiles, thread % 128);
  }
#else
  __trap();
#endif
}

}  // namespace litedsa
}  // namespace dsa
