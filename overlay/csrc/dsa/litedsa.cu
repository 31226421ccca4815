// dsa_litedsa_union and dsa_litedsa_attend: sparse MLA attention of a prefill for groups of neighbouring queries (Hopper).
//
// Sparse attention gives each query its own k keys. One query has 8 to 32 heads on a rank, which fill an eighth to a half of a
// 64-row tensor-core tile, and every query fetches its k rows anew. Neighbouring queries select mostly the same keys. Here G = 64 / heads
// queries of one request share a tile:
//
//   1. dsa_litedsa_union marks the group's selected positions in a bitmap, which gives their union in ascending order without a sort, the
//      cache row of each entry, and for every 64 entries one word per query: which of them it selected.
//   2. dsa_litedsa_attend walks the union once, 64 entries at a time: scores of all 64 rows, minus infinity where a query's bit is not
//      set, online softmax, weights times values. Each row of the cache is fetched once per group.
//
// A masked weight is exactly 0, so the result is that of each query alone, up to the order of sums. An entry that only another query of
// the group selects must be finite, however: 0 times infinity is NaN.
//
// A CTA of the attention takes group after group. One warpgroup copies rows of the cache, two consume them: each scores and weighs every
// other tile, and adds all tiles to its half of the value columns (64 x 512 sums do not fit into one warpgroup's registers). While one
// weighs, the other's products run. docs/litedsa.md has the picture.
#include "common.cuh"
#define DSA_SHARED __shared__
#define DSA_GRID_CONSTANT __grid_constant__
#include "litedsa_attend.cuh"
#include "litedsa_union.cuh"

namespace dsa {
namespace litedsa {

// 3, 4 and 5 for 8, 16 and 32 heads, else -1.
inline int head_shift(int32_t heads) { return heads == 8 ? 3 : heads == 16 ? 4
                                                           : heads == 32   ? 5
                                                                           : -1; }

inline bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

template <int kGroup, bool kLong>
int launch_union(const UnionParams& p, int64_t groups, cudaStream_t stream) {
  const int bytes = static_cast<int>(union_shared_bytes(p.span, p.capacity));
  const cudaError_t status = cudaFuncSetAttribute(union_kernel<kGroup, kLong>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return static_cast<int>(status);
  union_kernel<kGroup, kLong><<<static_cast<unsigned>(groups), kUnionThreads, bytes, stream>>>(p);
  return launch_status();
}

template <bool kLong>
int launch_union(const UnionParams& p, int group_size, int64_t groups, cudaStream_t stream) {
  return group_size == 8 ? launch_union<8, kLong>(p, groups, stream) : group_size == 4 ? launch_union<4, kLong>(p, groups, stream)
                                                                                       : launch_union<2, kLong>(p, groups, stream);
}

template <int kBlocks, bool kFp8>
int launch(AttendParams& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(AttendShared<kBlocks>) + 1024;
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess)
    status = cudaFuncSetAttribute(attend_kernel<kBlocks, kFp8>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return static_cast<int>(status);
  p.ctas = p.groups < multiprocessors ? p.groups : multiprocessors;
  attend_kernel<kBlocks, kFp8><<<static_cast<unsigned>(p.ctas), kAttendThreads, kBytes, stream>>>(p);
  return launch_status();
}

}  // namespace litedsa
}  // namespace dsa

// topk: int32 [tokens, k], topk_stride elements between tokens, positions of the token's request, negative: no key; starts: int32
// [groups + 1], the first token of each group and the end, at most 64 / heads tokens per group, all of one request; requests: int32
// [tokens], rows of table, or null for row 0; table: int32 [requests, table_blocks], table_stride elements between rows: position i lies in
// cache row table[i / block_size] * block_rows + i % block_size; null: in row i. Positions from table_blocks * block_size or from span on
// are no keys, as in upstream's conversion. span: a multiple of 128, at most 2^20. slots: int32 [groups, capacity], masks: uint64 [groups,
// capacity / 64, 64 / heads] at a multiple of 16 bytes, counts: int32 [groups], all contiguous; capacity is a multiple of 64 and at least
// 64 / heads * k. Written up to the count, rounded up to 64. counts[g] is -1 if a query of the group selects a position twice.
// 1 <= k <= 2048.
DSA_EXPORT int dsa_litedsa_union(const int32_t* topk, int64_t topk_stride, const int32_t* starts, const int32_t* requests,
                                 const int32_t* table, int64_t table_stride, int32_t table_blocks, int32_t block_size, int32_t block_rows,
                                 int64_t groups, int32_t heads, int32_t k, int32_t span, int32_t capacity, int32_t* slots, void* masks,
                                 int32_t* counts, void* stream) {
  using namespace dsa::litedsa;
  if (groups == 0) return DSA_OK;
  const int shift = head_shift(heads);
  if (groups < 0 || groups > INT32_MAX || shift < 0 || k < 1 || k > 2048 || span < kSpanStep || span % kSpanStep || span > 1 << 20)
    return DSA_INVALID_ARGUMENT;
  const int group_size = kRows >> shift;
  if (capacity % kKeys || capacity < group_size * k || capacity > kMaxGroup * 2048) return DSA_INVALID_ARGUMENT;
  if (!topk || !starts || !slots || !masks || !counts || !aligned(masks, 16)) return DSA_INVALID_ARGUMENT;
  if (table_blocks < 1 || block_size < 1 || (table && block_rows < block_size)) return DSA_INVALID_ARGUMENT;
  UnionParams p;
  p.topk = topk;
  p.topk_stride = topk_stride;
  p.starts = starts;
  p.requests = requests;
  p.table = table;
  p.table_stride = table_stride;
  p.slots = slots;
  p.masks = static_cast<uint64_t*>(masks);
  p.counts = counts;
  p.k = k;
  p.capacity = capacity;
  p.span = span;
  p.table_blocks = table_blocks;
  p.block_size = block_size;
  p.block_rows = block_rows;
  p.per_block = block_size > 1 << 20 ? 0 : ((1ull << 40) + block_size - 1) / block_size;
  p.fours = aligned(topk, 16) && topk_stride % 4 == 0 && k % 4 == 0;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return span > kSegment<false> ? launch_union<true>(p, group_size, groups, s) : launch_union<false>(p, group_size, groups, s);
}

// q_nope: bf16 [tokens, heads, 512], q_rope: bf16 [tokens, heads, 64], strides in bytes and multiples of 16, the last dimension contiguous;
// kv: rows of the cache, kv_row bytes apart (a multiple of 16, at least a row); kv_format 0: 576 bf16 (512 if q_rope is null: then a key is
// its value), 1: fp8_ds_mla, 512 e4m3, 4 fp32 scales, 64 bf16 (656 bytes). starts, slots, masks, counts, capacity: as dsa_litedsa_union
// left them. ranges: null, or int32 [tokens, 3] instead of masks: the query takes the entries [0, a) and [b, c) of its group's slots.
// sinks: null, or fp32 [heads], an extra logit that takes part in the normalisation only. out: bf16 [tokens, heads, 512], strides in bytes
// and multiples of 4; lse: null, or fp32 [tokens, heads], lse_token elements between tokens: natural log-sum-exp of the scaled scores. A
// query without keys gets 0 and -inf; all of a refused group (negative count) NaN. scale > 0. heads: 8, 16 or 32. q and kv are 16-byte
// aligned.
DSA_EXPORT int dsa_litedsa_attend(const void* q_nope, int64_t nope_token, int64_t nope_head, const void* q_rope, int64_t rope_token,
                                  int64_t rope_head, const void* kv, int64_t kv_row, int32_t kv_format, const int32_t* starts,
                                  const int32_t* slots, const void* masks, const int32_t* ranges, const int32_t* counts, int64_t groups,
                                  int32_t heads, int32_t capacity, float scale, const float* sinks, void* out, int64_t out_token,
                                  int64_t out_head, float* lse, int64_t lse_token, void* stream) {
  using namespace dsa::litedsa;
  if (groups == 0) return DSA_OK;
  const int shift = head_shift(heads);
  if (groups < 0 || groups > INT32_MAX || shift < 0 || capacity < kKeys || capacity % kKeys || !(scale > 0.0f))
    return DSA_INVALID_ARGUMENT;
  if (!q_nope || !kv || !starts || !slots || (!masks && !ranges) || !counts || !out) return DSA_INVALID_ARGUMENT;
  if (kv_format != 0 && (kv_format != 1 || !q_rope)) return DSA_INVALID_ARGUMENT;
  if (kv_row < (kv_format == 1 ? 656 : q_rope ? 1152
                                              : 1024)) return DSA_INVALID_ARGUMENT;
  if (!aligned(q_nope, 16) || !aligned(q_rope, 16) || !aligned(kv, 16) || !aligned(masks, 8) || !aligned(out, 4) ||
      (nope_token | nope_head | rope_token | rope_head | kv_row) % 16 || (out_token | out_head) % 4)
    return DSA_INVALID_ARGUMENT;
  if (const int code = dsa::check_hopper()) return code;
  AttendParams p;
  p.q_nope = static_cast<const uint8_t*>(q_nope);
  p.q_rope = static_cast<const uint8_t*>(q_rope);
  p.nope_token = nope_token;
  p.nope_head = nope_head;
  p.rope_token = rope_token;
  p.rope_head = rope_head;
  p.kv = static_cast<const uint8_t*>(kv);
  p.kv_row = kv_row;
  p.starts = starts;
  p.counts = counts;
  p.slots = slots;
  p.masks = static_cast<const uint64_t*>(masks);
  p.ranges = ranges;
  p.sinks = sinks;
  p.out = static_cast<uint8_t*>(out);
  p.out_token = out_token;
  p.out_head = out_head;
  p.lse = lse;
  p.lse_token = lse_token;
  p.scale = scale;
  p.capacity = capacity;
  p.groups = groups;
  p.head_shift = shift;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (kv_format == 1) return launch<9, true>(p, s);
  return q_rope ? launch<9, false>(p, s) : launch<8, false>(p, s);
}
