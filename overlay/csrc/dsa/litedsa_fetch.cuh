// How rows of the cache and queries get into the shared memory of dsa_litedsa_attend, and where they lie there (litedsa.cu explains it).
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
  int64_t groups, ctas;  // CTA b takes the groups b, b + ctas, ...
  int head_shift;        // log2 of heads: row r of the tile is head r % heads of the group's query r / heads
};

// A tile comes and goes in parts of its columns: each half of the values is free when its consumer has added it, the keys' rope part as soon
// as the tile is scored. FP8 rows come whole, as they are converted.
constexpr int kParts = 3, kRopePart = 2, kHalfBlocks = 4;

template <int kBlocks>
struct alignas(1024) AttendShared {
  uint8_t q[kBlocks * kBlockBytes];
  uint8_t kv[2][kBlocks * kBlockBytes];  // one tile of each consumer
  uint8_t weights[kBlockBytes];          // of one tile, for the consumer that did not make them
  float top[2][kRows];                   // largest raw score up to the consumer's last tile
  float sums[2][2][kRows];               // of the weights of each consumer; groups take turns
  alignas(4) uint8_t raised[2][4];       // whether a row of the warp has another top than before that tile
  uint64_t filled[2][kParts], empty[2][kParts];
  uint64_t topped[2], weighed[2];    // a consumer's tile has its top, its weights
  uint64_t asked, answered, summed;  // the group's queries are there, are scored; its sums are there
};

// Who arrives: every thread that wrote or read; where only wgmma read, one lane of each warp.
constexpr int kConsumerThreads = 256, kProducerThreads = 128, kConsumerWarps = 4;

// Two e4m3 quadruples times a scale as eight bf16.
__device__ __forceinline__ uint4 dequantize(uint32_t low, uint32_t high, float scale) {
  float a[4], b[4];
  ptx::unpack_e4m3(low, a);
  ptx::unpack_e4m3(high, b);
  return make_uint4(ptx::pack_bf16(a[0] * scale, a[1] * scale), ptx::pack_bf16(a[2] * scale, a[3] * scale),
                    ptx::pack_bf16(b[0] * scale, b[1] * scale), ptx::pack_bf16(b[2] * scale, b[3] * scale));
}

// One thread's share of the rows of a tile: eight lanes read 128 bytes of one row, a warp takes four rows at a time.
struct Fetcher {
  int row0, piece;  // rows row0 + 16 i, i in 0..3; row % 8 is row0 % 8
  int mine;         // lane l keeps the slot of the warp's row 16 (l / 4 % 4) + l % 4
  __device__ __forceinline__ explicit Fetcher(int thread) : row0(thread / 32 * 4 + thread % 32 / 8), piece(thread % 8), mine(-1) {}
  __device__ __forceinline__ void look_up(const int32_t* slots, int tile, int thread) {
    const int lane = thread % 32;
    mine = __ldg(slots + tile * kKeys + lane / 4 % 4 * 16 + thread / 32 * 4 + lane % 4);
  }
  __device__ __forceinline__ int slot(int i, int thread) const { return __shfl_sync(~0u, mine, i * 4 + thread % 32 / 8); }
};

// Starts the copies of the group's queries, once those of the group before are scored; rows of absent queries are zero.
template <int kBlocks>
__device__ __forceinline__ void fetch_queries(const AttendParams& p, AttendShared<kBlocks>& s, const Fetcher& f, int first, int queries,
                                              uint32_t phase) {
  ptx::barrier_wait(&s.answered, phase ^ 1);
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int row = f.row0 + 16 * i, query = row >> p.head_shift, head = row & ((1 << p.head_shift) - 1);
    const int64_t token = query < queries ? first + query : first;
    const int bytes = query < queries ? 16 : 0;
    uint8_t* target = s.q + block_offset(row, f.piece);
    const uint8_t* nope = p.q_nope + token * p.nope_token + head * p.nope_head + f.piece * 16;
#pragma unroll
    for (int b = 0; b < 8; ++b) ptx::copy_async_16(target + b * kBlockBytes, nope + b * 128, bytes);
    if constexpr (kBlocks == 9)
      ptx::copy_async_16(target + 8 * kBlockBytes, p.q_rope + token * p.rope_token + head * p.rope_head + f.piece * 16, bytes);
  }
  ptx::copy_async_arrive(&s.asked);
}

// Copies a bf16 tile: each part as soon as its place is free.
template <int kBlocks>
__device__ __forceinline__ void fetch(AttendShared<kBlocks>& s, const uint8_t* const (&sources)[4], const int (&bytes)[4], const Fetcher& f,
                                      int buffer, uint32_t phase) {
  uint8_t* target = s.kv[buffer] + block_offset(f.row0, f.piece);
  if constexpr (kBlocks == 9) {
    ptx::barrier_wait(&s.empty[buffer][kRopePart], phase ^ 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::copy_async_16(target + 8 * kBlockBytes + i * 16 * 128, sources[i] + 8 * 128, bytes[i]);
    ptx::copy_async_arrive(&s.filled[buffer][kRopePart]);
  }
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    const int half = n ^ buffer;  // the tile's own consumer gives its half back first
    ptx::barrier_wait(&s.empty[buffer][half], phase ^ 1);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int b = 0; b < kHalfBlocks; ++b)
        ptx::copy_async_16(target + (half * kHalfBlocks + b) * kBlockBytes + i * 16 * 128, sources[i] + (half * kHalfBlocks + b) * 128, bytes[i]);
    ptx::copy_async_arrive(&s.filled[buffer][half]);
  }
}

// A whole tile of fp8_ds_mla rows: 512 e4m3 values, four scales, 64 bf16. The values wait where blocks 4 to 7 of their row will be, the
// scales where its first piece will be, so that all rows are on their way at once; only this warp touches these rows.
__device__ __forceinline__ void fetch_converted(uint8_t* tile, const uint8_t* const (&sources)[4], const int (&bytes)[4], const Fetcher& f) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = f.row0 + 16 * i;
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::copy_async_16(tile + matrix_offset(row, 4 + j, f.piece), sources[i] + j * 128, bytes[i]);
    ptx::copy_async_16(tile + matrix_offset(row, 8, f.piece), sources[i] + 528, bytes[i]);
    if (f.piece == 0) ptx::copy_async_16(tile + matrix_offset(row, 0, 0), sources[i] + 512, bytes[i]);
  }
  ptx::copy_async_wait();
  __syncwarp();
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int row = f.row0 + 16 * i;
    uint4 v[4];  // v[j]: the values of the dimensions 128 j + 16 piece on
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = *reinterpret_cast<const uint4*>(tile + matrix_offset(row, 4 + j, f.piece));
    const uint4 scale_bits = *reinterpret_cast<const uint4*>(tile + matrix_offset(row, 0, 0));
    const float scales[4] = {__uint_as_float(scale_bits.x), __uint_as_float(scale_bits.y), __uint_as_float(scale_bits.z),
                             __uint_as_float(scale_bits.w)};
    __syncwarp();  // all have read their row before any overwrites it
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int block = 2 * j + f.piece / 4, at = f.piece % 4 * 2;
      *reinterpret_cast<uint4*>(tile + matrix_offset(row, block, at)) = dequantize(v[j].x, v[j].y, scales[j]);
      *reinterpret_cast<uint4*>(tile + matrix_offset(row, block, at + 1)) = dequantize(v[j].z, v[j].w, scales[j]);
    }
  }
}

// The tiles of a group, one after the other. phases: bit b changes with each tile in buffer b.
template <int kBlocks, bool kFp8>
__device__ __forceinline__ void fetch_tiles(const AttendParams& p, AttendShared<kBlocks>& s, Fetcher& f, const int32_t* slots, int tiles,
                                            uint32_t& phases, int thread) {
  for (int tile = 0; tile < tiles; ++tile) {
    const int buffer = tile % 2;
    const uint32_t phase = phases >> buffer & 1;
    phases ^= 1u << buffer;
    const uint8_t* sources[4];
    int bytes[4];  // 0 behind the last entry: zeros, as 0 times what happens to lie there might be NaN
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = f.slot(i, thread);
      sources[i] = p.kv + (slot < 0 ? 0 : slot) * p.kv_row + f.piece * 16;
      bytes[i] = slot < 0 ? 0 : 16;
    }
    if (tile + 1 < tiles) f.look_up(slots, tile + 1, thread);
    if constexpr (kFp8) {
      for (int part = 0; part < kParts; ++part) ptx::barrier_wait(&s.empty[buffer][part], phase ^ 1);
      fetch_converted(s.kv[buffer], sources, bytes, f);
      ptx::fence_async_proxy();  // wgmma reads what this thread wrote
      ptx::barrier_arrive(&s.filled[buffer][0]);
    } else {
      fetch<kBlocks>(s, sources, bytes, f, buffer, phase);
    }
  }
}

}  // namespace litedsa
}  // namespace dsa
