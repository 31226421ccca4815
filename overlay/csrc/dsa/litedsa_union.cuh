// The union of a group's selections (litedsa.cu explains it): one CTA per group, one bit per position in shared memory.
#pragma once

#ifdef DSA_HOST_EMULATION
#include DSA_HOST_EMULATION
#else
#include "common.cuh"
#endif
#include "litedsa_layout.cuh"

namespace dsa {
namespace litedsa {

constexpr int kUnionThreads = 512;
constexpr int kQuad = 128;  // positions of four bitmap words, which one 16-byte access takes

struct UnionParams {
  const int32_t* topk;  // [tokens, k]
  int64_t topk_stride;
  const int32_t* starts;    // [groups + 1]
  const int32_t* requests;  // [tokens], or null: the table has one row
  const int32_t* table;     // [requests, table_blocks], or null: position i is row i, for i < table_blocks * block_size
  int64_t table_stride;
  int32_t* slots;   // [groups, capacity]
  uint64_t* masks;  // [groups, capacity / 64, group size]
  int32_t* counts;  // [groups]
  int k, group_size, capacity, span;
  int table_blocks, block_size, block_rows;
};

// Bytes of dynamic shared memory: bitmap, 16-bit ranks of its quads, masks.
inline int64_t union_shared_bytes(int span, int capacity, int group_size) {
  return static_cast<int64_t>(span) / 8 + (static_cast<int64_t>(span) / kQuad * 2 + 15) / 16 * 16 +
         static_cast<int64_t>(capacity) / 64 * group_size * 8;
}

__device__ __forceinline__ int count_bits(uint32_t word) { return __popc(word); }

// The place of a position in the union: the ones before it in the bitmap.
__device__ __forceinline__ int rank_of(const uint32_t* bitmap, const uint16_t* ranks, int position) {
  const uint4 quad = *reinterpret_cast<const uint4*>(bitmap + position / kQuad * 4);
  const int word = position / 32 % 4;
  const uint32_t below = (1u << (position % 32)) - 1;
  int rank = ranks[position / kQuad];
  rank += count_bits(word > 0 ? quad.x : quad.x & below);
  if (word > 0) rank += count_bits(word > 1 ? quad.y : quad.y & below);
  if (word > 1) rank += count_bits(word > 2 ? quad.z : quad.z & below);
  if (word > 2) rank += count_bits(quad.w & below);
  return rank;
}

// Exclusive sum over the CTA's threads; *total gets the sum of all. `partial` is shared, one int per warp and one more.
__device__ __forceinline__ int exclusive_sum(int value, int* partial, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  constexpr int kWarps = kUnionThreads / 32;
  int inclusive = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, d);
    if (lane >= d) inclusive += other;
  }
  if (lane == 31) partial[warp] = inclusive;
  __syncthreads();
  int before = 0, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += partial[w];
    all += partial[w];
  }
  __syncthreads();  // the next call overwrites `partial`
  *total = all;
  return before + inclusive - value;
}

// Calls do_key(query, position) for each key of the group; a thread reads several before it looks at the first, so that they arrive together.
template <typename Function>
__device__ __forceinline__ void for_each_key(const UnionParams& p, int first, int queries, int limit, Function do_key) {
  constexpr int kBatch = 4;
  const int thread = threadIdx.x;
  for (int query = 0; query < queries; ++query) {
    const int32_t* keys = p.topk + (first + query) * p.topk_stride;
    for (int base = thread; base < p.k; base += kUnionThreads * kBatch) {
      int position[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) position[b] = base + b * kUnionThreads < p.k ? __ldg(keys + base + b * kUnionThreads) : -1;
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (position[b] >= 0 && position[b] < limit) do_key(query, position[b]);
    }
  }
}

// Writes slots, masks and count of group blockIdx.x. Positions outside of the span or of the table are no keys, as in upstream's
// conversion. A query that selects a position twice makes the count -1: the group is refused.
__global__ void __launch_bounds__(kUnionThreads) union_kernel(const UnionParams p) {
#ifdef DSA_HOST_EMULATION
  uint8_t* raw = emulated_shared();
#else
  extern __shared__ __align__(16) uint8_t raw[];
#endif
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(raw);
  uint16_t* ranks = reinterpret_cast<uint16_t*>(raw + p.span / 8);
  uint32_t* masks = reinterpret_cast<uint32_t*>(raw + p.span / 8 + (p.span / kQuad * 2 + 15) / 16 * 16);
  DSA_SHARED int partial[kUnionThreads / 32];
  DSA_SHARED int twice;

  const int64_t group = blockIdx.x;
  const int thread = threadIdx.x;
  const int first = p.starts[group];
  const int queries = min(p.starts[group + 1] - first, p.group_size);
  const int quads = p.span / kQuad, mask_words = p.capacity / 64 * p.group_size * 2;
  for (int i = thread; i < quads; i += kUnionThreads) reinterpret_cast<uint4*>(bitmap)[i] = make_uint4(0, 0, 0, 0);
  for (int i = thread; i < mask_words; i += kUnionThreads) masks[i] = 0;
  if (thread == 0) twice = 0;
  __syncthreads();

  const int64_t most = static_cast<int64_t>(p.table_blocks) * p.block_size;
  const int limit = most < p.span ? static_cast<int>(most) : p.span;
  for_each_key(p, first, queries, limit, [&](int, int position) { atomicOr(&bitmap[position / 32], 1u << (position % 32)); });
  __syncthreads();

  // Ranks of the quads, and the rows of the positions in order.
  const int request = p.requests ? p.requests[first] : 0;
  const int32_t* table = p.table ? p.table + request * p.table_stride : nullptr;
  int32_t* slots = p.slots + group * p.capacity;
  int count = 0;
  for (int base = 0; base < quads; base += kUnionThreads) {
    const int i = base + thread;
    uint4 quad = make_uint4(0, 0, 0, 0);
    if (i < quads) quad = reinterpret_cast<const uint4*>(bitmap)[i];
    const int ones = count_bits(quad.x) + count_bits(quad.y) + count_bits(quad.z) + count_bits(quad.w);
    int all;
    int slot = count + exclusive_sum(ones, partial, &all);
    if (i < quads) ranks[i] = static_cast<uint16_t>(slot);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t word = w == 0 ? quad.x : w == 1 ? quad.y
                                    : w == 2   ? quad.z
                                               : quad.w;
      while (word) {
        const int position = i * kQuad + w * 32 + __ffs(static_cast<int>(word)) - 1;
        word &= word - 1;
        slots[slot++] = table ? table[position / p.block_size] * p.block_rows + position % p.block_size : position;
      }
    }
    count += all;
  }
  const int tiles = (count + kKeys - 1) / kKeys;
  for (int i = count + thread; i < tiles * kKeys; i += kUnionThreads) slots[i] = -1;
  __syncthreads();

  for_each_key(p, first, queries, limit, [&](int query, int position) {
    const int rank = rank_of(bitmap, ranks, position);
    const uint32_t bit = 1u << (rank % 32);
    if (atomicOr(&masks[(rank / 64 * p.group_size + query) * 2 + rank / 32 % 2], bit) & bit) twice = 1;
  });
  __syncthreads();

  uint64_t* out = p.masks + group * (p.capacity / 64) * p.group_size;
  for (int i = thread; i < tiles * p.group_size; i += kUnionThreads)
    out[i] = static_cast<uint64_t>(masks[2 * i + 1]) << 32 | masks[2 * i];
  if (thread == 0) p.counts[group] = twice ? -1 : count;
}

}  // namespace litedsa
}  // namespace dsa
