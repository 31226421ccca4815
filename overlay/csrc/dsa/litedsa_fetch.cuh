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
  int head_shift;  // log2 of heads: row r of the tile is head r % heads of the group's query r / heads
};

// A bf16 tile is fetched, scored and given back in two parts of its columns, so that each starts before the one before has ended. Each
// value warpgroup is done with the first half of its columns first: part 0 is the blocks 0, 1, 4 and 5, part 1 the others. FP8 rows are
// converted whole.
DSA_HOST_DEVICE constexpr int parts_of(bool fp8) { return fp8 ? 1 : 2; }
DSA_HOST_DEVICE constexpr bool in_part(int parts, int part, int block) {
  return parts == 1 || (block < 8 && block % 4 < 2) == (part == 0);
}

template <int kBlocks, bool kFp8>
struct alignas(1024) AttendShared {
  uint8_t q[kBlocks * kBlockBytes];
  // Two tiles, one per stream. The last block has the keys' rope part, and when they are scored the weights, which are as large.
  uint8_t kv[2][9 * kBlockBytes];
  float decay[2][kRows];  // what the rows' sums so far are multiplied with before the tile is added
  float top[2][kRows];    // largest raw score up to the stream's tile
  float sums[kRows];      // the weights of the stream that does not have the last tile
  float inverse[kRows];   // 1 / sum of weights
  uint64_t filled[2][parts_of(kFp8)], empty[2][parts_of(kFp8)], top_known[2], weighed[2], asked, summed, done;
};
constexpr int kWeightsBlock = 8;

// Who arrives: every thread that wrote or read, of one stream or of both value warpgroups.
constexpr int kStreamThreads = 128, kValueThreads = 256;

// The queries of the group into shared memory, by the value warpgroups, which have nothing to do before the first weights; rows of absent
// queries are zero.
template <int kBlocks, bool kFp8>
__device__ __forceinline__ void load_queries(const AttendParams& p, AttendShared<kBlocks, kFp8>& s, int first, int queries, int thread) {
  constexpr int kPieces = kBlocks * 8;
#pragma unroll 6
  for (int i = thread; i < kRows * kPieces; i += kValueThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    const int query = row >> p.head_shift, head = row & ((1 << p.head_shift) - 1);
    const int64_t token = query < queries ? first + query : first;
    const uint8_t* source = piece < 64 ? p.q_nope + token * p.nope_token + head * p.nope_head + piece * 16
                                       : p.q_rope + token * p.rope_token + head * p.rope_head + (piece - 64) * 16;
    ptx::copy_async_16(s.q + matrix_offset(row, piece / 8, piece % 8), source, query < queries ? 16 : 0);
  }
  ptx::copy_async_wait<0>();
  ptx::fence_async_proxy();  // wgmma reads what this thread copied
  ptx::barrier_arrive(&s.asked);
}

// Two e4m3 quadruples times a scale as eight bf16.
__device__ __forceinline__ uint4 dequantize(uint32_t low, uint32_t high, float scale) {
  float a[4], b[4];
  ptx::unpack_e4m3(low, a);
  ptx::unpack_e4m3(high, b);
  return make_uint4(ptx::pack_bf16(a[0] * scale, a[1] * scale), ptx::pack_bf16(a[2] * scale, a[3] * scale),
                    ptx::pack_bf16(b[0] * scale, b[1] * scale), ptx::pack_bf16(b[2] * scale, b[3] * scale));
}

// One thread's share of the rows of a tile: eight lanes read 128 bytes of one row, a warp takes four rows at a time, a stream sixteen.
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

// Starts the copies of one part of a bf16 tile.
template <int kBlocks>
__device__ __forceinline__ void fetch(const AttendParams& p, uint8_t* tile, const Fetcher& f, int part, int thread) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int slot = f.slot(i, thread);
    const uint8_t* source = p.kv + (slot < 0 ? 0 : slot) * p.kv_row + f.piece * 16;
    const int bytes = slot < 0 ? 0 : 16;  // zeros behind the last entry: 0 times what happens to lie there might be NaN
    uint8_t* target = tile + block_offset(f.row0 + 16 * i, f.piece);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      if (in_part(parts_of(false), part, b)) ptx::copy_async_16(target + b * kBlockBytes, source + b * 128, bytes);
  }
}

// A whole tile of fp8_ds_mla rows: 512 e4m3 values, four scales, 64 bf16. The values wait where blocks 4 to 7 of their row will be, the
// scales where its first piece will be, so that all rows are on their way at once; only this warp touches these rows.
__device__ __forceinline__ void fetch_fp8(const AttendParams& p, uint8_t* tile, const Fetcher& f, int thread) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = f.row0 + 16 * i, slot = f.slot(i, thread);
    const uint8_t* source = p.kv + (slot < 0 ? 0 : slot) * p.kv_row;
    const int bytes = slot < 0 ? 0 : 16;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      ptx::copy_async_16(tile + matrix_offset(row, 4 + j, f.piece), source + j * 128 + f.piece * 16, bytes);
    ptx::copy_async_16(tile + matrix_offset(row, 8, f.piece), source + 528 + f.piece * 16, bytes);
    if (f.piece == 0) ptx::copy_async_16(tile + matrix_offset(row, 0, 0), source + 512, bytes);
  }
  ptx::copy_async_wait<0>();
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

}  // namespace litedsa
}  // namespace dsa
