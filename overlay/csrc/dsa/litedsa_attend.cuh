// The attention of one group over its union (litedsa.cu explains it): one CTA, four warpgroups with one role each.
#pragma once

#ifdef DSA_HOST_EMULATION
#include DSA_HOST_EMULATION
#else
#include "common.cuh"
#include "litedsa_ptx.cuh"
#endif
#include "litedsa_layout.cuh"

namespace dsa {
namespace litedsa {

constexpr int kAttendThreads = 512;
// Registers of a thread after the roles part: 128 each when the CTA starts. 72 + 112 + 2 * 160 <= 512.
constexpr int kGatherRegisters = 72, kScoreRegisters = 112, kValueRegisters = 160;
constexpr float kLog2E = 1.4426950408889634f;

struct AttendParams {
  const uint8_t* q_nope;  // bf16 [tokens, heads, 512]; strides in bytes
  const uint8_t* q_rope;  // bf16 [tokens, heads, 64], or null when a key has 512 elements
  int64_t nope_token, nope_head, rope_token, rope_head;
  const uint8_t* kv;      // rows of the cache
  int64_t kv_row;         // bytes between them
  const int32_t* starts;  // [groups + 1], first tokens
  const int32_t* counts;  // [groups], entries of the union; negative: refused
  const int32_t* slots;   // [groups, capacity], rows of the cache; -1 behind the last entry up to a multiple of 64
  const uint64_t* masks;  // [groups, capacity / 64, group size], bit e of word (t, g): query g takes entry 64 t + e
  const int32_t* ranges;  // or, instead of masks, [tokens, 3]: the query takes the entries [0, a) and [b, c)
  const float* sinks;     // [heads] or null: an extra logit, natural
  uint8_t* out;           // bf16 [tokens, heads, 512]; strides in bytes
  int64_t out_token, out_head;
  float* lse;  // [tokens, heads], or null
  int64_t lse_token;
  float scale;
  int capacity;
  int head_shift;  // log2 of heads: row r of the tile is head r % heads of the group's query r / heads
};

template <int kBlocks>
struct alignas(1024) AttendShared {
  uint8_t q[kBlocks * kBlockBytes];
  uint8_t kv[2][kBlocks * kBlockBytes];  // two tiles: one arrives while the other is used
  uint8_t p[kBlockBytes];                // weights of a tile, bf16
  float decay[kRows];                    // what the rows' sums so far are multiplied with; in the end, 1 / sum of weights
  uint64_t kv_full[2], kv_empty[2], p_full, p_empty;
};

// Who arrives: all 64 threads that filled a tile; one lane of each of the 8 warps that used it; all 128 threads that wrote weights, and
// all 256 that read the decay beside them.
constexpr int kFillers = 64, kUsers = 8, kWriters = 128, kReaders = 256;

// The queries of the group into shared memory; rows of absent queries are zero.
template <int kBlocks>
__device__ __forceinline__ void load_queries(const AttendParams& p, uint8_t* q, int first, int queries, int thread) {
  constexpr int kPieces = kBlocks * 8;
  for (int i = thread; i < kRows * kPieces; i += kAttendThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const int query = row >> p.head_shift, head = row & ((1 << p.head_shift) - 1);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (query < queries) {
      const int64_t token = first + query;
      const uint8_t* source = piece < 64 ? p.q_nope + token * p.nope_token + head * p.nope_head + piece * 16
                                         : p.q_rope + token * p.rope_token + head * p.rope_head + (piece - 64) * 16;
      v = ptx::load_16(source);
    }
    *reinterpret_cast<uint4*>(q + matrix_offset(row, piece / 8, piece % 8)) = v;
  }
  ptx::fence_async_proxy();  // wgmma reads what these ordinary stores wrote
}

// Two e4m3 quadruples times a scale as eight bf16.
__device__ __forceinline__ uint4 dequantize(uint32_t low, uint32_t high, float scale) {
  float a[4], b[4];
  ptx::unpack_e4m3(low, a);
  ptx::unpack_e4m3(high, b);
  return make_uint4(ptx::pack_bf16(a[0] * scale, a[1] * scale), ptx::pack_bf16(a[2] * scale, a[3] * scale),
                    ptx::pack_bf16(b[0] * scale, b[1] * scale), ptx::pack_bf16(b[2] * scale, b[3] * scale));
}

// Warps 0 and 1 fetch the even tiles, 2 and 3 the odd ones. Eight lanes read 128 bytes of one row; a warp takes four rows at a time.
template <int kBlocks, bool kFp8>
__device__ __forceinline__ void gather(const AttendParams& p, AttendShared<kBlocks>& s, int64_t group, int tiles, int thread) {
  const int stage = thread / 64, lane = thread % 32, piece = lane % 8;
  const int row0 = thread / 32 % 2 * 4 + lane / 8;  // and row0 + 8 i; row % 8 is row0
  const int32_t* slots = p.slots + group * p.capacity;
  uint8_t* tile_rows = s.kv[stage];
  for (int tile = stage; tile < tiles; tile += 2) {
    // Lane l keeps the slot of the warp's l-th row.
    const int mine = __ldg(slots + tile * kKeys + lane / 4 * 8 + thread / 32 % 2 * 4 + lane % 4);
    ptx::barrier_wait(&s.kv_empty[stage], (tile / 2 & 1) ^ 1);
    if constexpr (!kFp8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int slot = __shfl_sync(~0u, mine, i * 4 + lane / 8);
        const uint8_t* source = p.kv + (slot < 0 ? 0 : slot) * p.kv_row + piece * 16;
        const int bytes = slot < 0 ? 0 : 16;  // zeros behind the last entry: 0 times what happens to lie there might be NaN
        uint8_t* target = tile_rows + block_offset(row0 + 8 * i, piece);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) ptx::copy_async_16(target + b * kBlockBytes, source + b * 128, bytes);
      }
    } else {
      // A cache row: 512 e4m3 values, four scales, 64 bf16. The values wait where blocks 4 to 7 of their row will be, the scales where
      // its first piece will be, so that all rows are on their way at once; only this warp touches these rows.
#pragma unroll 2
      for (int i = 0; i < 8; ++i) {
        const int row = row0 + 8 * i;
        const int slot = __shfl_sync(~0u, mine, i * 4 + lane / 8);
        const uint8_t* source = p.kv + (slot < 0 ? 0 : slot) * p.kv_row;
        const int bytes = slot < 0 ? 0 : 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) ptx::copy_async_16(tile_rows + matrix_offset(row, 4 + j, piece), source + j * 128 + piece * 16, bytes);
        ptx::copy_async_16(tile_rows + matrix_offset(row, 8, piece), source + 528 + piece * 16, bytes);
        if (piece == 0) ptx::copy_async_16(tile_rows + matrix_offset(row, 0, 0), source + 512, bytes);
      }
      ptx::copy_async_wait_all();
      __syncwarp();
#pragma unroll 1
      for (int i = 0; i < 8; ++i) {
        const int row = row0 + 8 * i;
        uint4 v[4];  // v[j]: the values of the dimensions 128 j + 16 piece on
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = *reinterpret_cast<const uint4*>(tile_rows + matrix_offset(row, 4 + j, piece));
        const uint4 scale_bits = *reinterpret_cast<const uint4*>(tile_rows + matrix_offset(row, 0, 0));
        const float scales[4] = {__uint_as_float(scale_bits.x), __uint_as_float(scale_bits.y), __uint_as_float(scale_bits.z),
                                 __uint_as_float(scale_bits.w)};
        __syncwarp();  // all have read their row before any overwrites it
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int block = 2 * j + piece / 4, at = piece % 4 * 2;
          *reinterpret_cast<uint4*>(tile_rows + matrix_offset(row, block, at)) = dequantize(v[j].x, v[j].y, scales[j]);
          *reinterpret_cast<uint4*>(tile_rows + matrix_offset(row, block, at + 1)) = dequantize(v[j].z, v[j].w, scales[j]);
        }
      }
    }
    ptx::copy_async_wait_all();
    ptx::fence_async_proxy();  // before the arrival: wgmma reads what this thread wrote
    ptx::barrier_arrive(&s.kv_full[stage]);
  }
}

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

// Scores, masks and the online softmax of all tiles; ends with the weights' sums and the log-sum-exp.
template <int kBlocks>
__device__ __forceinline__ void score(const AttendParams& p, AttendShared<kBlocks>& s, int64_t group, int first, int queries, int tiles,
                                      int thread) {
  const int lane = thread % 32, warp = thread / 32;
  const int rows[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};  // all lanes of a warp have the same two queries
  const float factor = p.scale * kLog2E;
  const uint64_t q_desc = k_major(ptx::smem_address(s.q));
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // largest raw score; sum of the weights in this thread's columns

  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    ptx::barrier_wait(&s.kv_full[stage], tile / 2 & 1);
    const uint64_t k_desc = k_major(ptx::smem_address(s.kv[stage]));
    float d[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] = 0.0f;
    ptx::wgmma_fence();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        ptx::wgmma_m64n64k16_bf16(d, q_desc + b * kNextBlock + e * kNextElements, k_desc + b * kNextBlock + e * kNextElements,
                                  b + e != 0);
    ptx::wgmma_commit();
    uint64_t words[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) words[r] = mask_word(p, group, first, queries, tile, rows[r]);
    ptx::wgmma_wait_all(d);

    float decay[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (words[r] != ~0ull) {
        const uint64_t mine = words[r] >> (2 * (lane % 4));
        const uint32_t half[2] = {static_cast<uint32_t>(mine), static_cast<uint32_t>(mine >> 32)};
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (!(half[j / 4] >> (j % 4 * 8 + c) & 1)) d[4 * j + 2 * r + c] = -INFINITY;
      }
      float best = -INFINITY;
#pragma unroll
      for (int j = 0; j < 8; ++j) best = fmaxf(best, fmaxf(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]));
      best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
      best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
      const float now = fmaxf(top[r], best);
      const float shift = now == -INFINITY ? 0.0f : now * factor;  // no key so far: every weight is exp2(-inf - 0) = 0
      // Exactly 1 while the largest score stays: what rounding the shift leaves would be taken again in each of up to 256 tiles.
      decay[r] = now == top[r] ? 1.0f : ptx::exp2_approx(__fmaf_rn(top[r], factor, -shift));
      top[r] = now;
      float added = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& weight = d[4 * j + 2 * r + c];
          weight = ptx::exp2_approx(__fmaf_rn(weight, factor, -shift));
          added += weight;
        }
      sum[r] = __fmaf_rn(sum[r], decay[r], added);
    }

    ptx::barrier_wait(&s.p_empty, (tile & 1) ^ 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<uint32_t*>(s.p + block_offset(rows[r], j) + lane % 4 * 4) =
            ptx::pack_bf16(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]);
      if (lane % 4 == 0) s.decay[rows[r]] = decay[r];
    }
    ptx::fence_async_proxy();
    ptx::barrier_arrive(&s.p_full);
  }

  ptx::barrier_wait(&s.p_empty, (tiles & 1) ^ 1);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = sum[r];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int query = rows[r] >> p.head_shift, head = rows[r] & ((1 << p.head_shift) - 1);
    const bool seen = top[r] != -INFINITY;
    float weight = total;
    if (p.sinks && seen) weight += ptx::exp2_approx(__fmaf_rn(__ldg(p.sinks + head), kLog2E, -top[r] * factor));
    if (lane % 4 == 0) {
      s.decay[rows[r]] = seen ? 1.0f / weight : 0.0f;
      if (p.lse && query < queries)
        p.lse[(static_cast<int64_t>(first) + query) * p.lse_token + head] = seen ? __fmaf_rn(top[r], p.scale, logf(total)) : -INFINITY;
    }
  }
  ptx::barrier_arrive(&s.p_full);
}

// Half of the 512 value columns: adds weights times values of all tiles, then writes the output.
template <int kBlocks>
__device__ __forceinline__ void add_values(const AttendParams& p, AttendShared<kBlocks>& s, int half, int first, int queries, int tiles,
                                           int thread) {
  const int lane = thread % 32, warp = thread / 32;
  const int rows[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};
  const uint64_t p_desc = k_major(ptx::smem_address(s.p));
  float d[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) d[i] = 0.0f;

  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    ptx::barrier_wait(&s.kv_full[stage], tile / 2 & 1);
    ptx::barrier_wait(&s.p_full, tile & 1);
    const float decay[2] = {s.decay[rows[0]], s.decay[rows[1]]};
    if (!__all_sync(~0u, decay[0] == 1.0f && decay[1] == 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; ++i) d[i] *= decay[i / 2 % 2];
    }
    const uint64_t v_desc = mn_major(ptx::smem_address(s.kv[stage] + half * 4 * kBlockBytes));
    ptx::wgmma_fence();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      ptx::wgmma_m64n128k16_bf16_mn<0>(d, p_desc + e * kNextElements, v_desc + e * kNextRows, 1);
      ptx::wgmma_m64n128k16_bf16_mn<1>(d, p_desc + e * kNextElements, v_desc + e * kNextRows + 2 * kNextBlock, 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait_all(d);
    ptx::barrier_arrive(&s.p_empty);
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&s.kv_empty[stage]);
  }

  ptx::barrier_wait(&s.p_full, tiles & 1);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = rows[r] >> p.head_shift, head = rows[r] & ((1 << p.head_shift) - 1);
    const float inverse = s.decay[rows[r]];
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
  AttendShared<kBlocks>& s =
      *reinterpret_cast<AttendShared<kBlocks>*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~static_cast<uintptr_t>(1023));
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
      ptx::barrier_init(&s.kv_full[i], kFillers);
      ptx::barrier_init(&s.kv_empty[i], kUsers);
    }
    ptx::barrier_init(&s.p_full, kWriters);
    ptx::barrier_init(&s.p_empty, kReaders);
    ptx::barrier_init_fence();
  }
  load_queries<kBlocks>(p, s.q, first, queries, thread);
  __syncthreads();

  if (role == 0) {
    ptx::registers_decrease<kGatherRegisters>();
    gather<kBlocks, kFp8>(p, s, group, tiles, thread);
  } else if (role == 1) {
    ptx::registers_decrease<kScoreRegisters>();
    score<kBlocks>(p, s, group, first, queries, tiles, thread - 128);
  } else {
    ptx::registers_increase<kValueRegisters>();
    add_values<kBlocks>(p, s, role - 2, first, queries, tiles, thread % 128);
  }
#else
  __trap();
#endif
}

}  // namespace litedsa
}  // namespace dsa
