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
  int groups, capacity;
  int head_shift;  // log2 of heads: row r of the tile is head r % heads of the group's query r / heads
};

// A tile is given back in two parts of its columns and fetched and scored in kFills parts, so that each starts before the one before has
// ended. Each value warpgroup is done with the first half of its columns first: blocks 0, 1, 4 and 5 come back first.
constexpr int kFills = 4, kReturns = 2;
DSA_HOST_DEVICE constexpr int fill_of(int block) {
  const int quarter = block >= 6 ? 3 : block >= 4 ? 1
                                   : block >= 2   ? 2
                                                  : 0;
  return quarter * kFills / 4;
}

template <int kBlocks>
struct alignas(1024) AttendShared {
  uint8_t q[kBlocks * kBlockBytes];
  // Two tiles, one per stream. The last block has the keys' rope part, and when they are scored the weights, which are as large.
  uint8_t kv[2][9 * kBlockBytes];
  float decay[2][kRows];  // what the rows' sums so far are multiplied with before the tile is added
  float top[2][kRows];    // largest raw score up to the stream's tile
  float sums[kRows];      // the weights of the stream that does not have the last tile
  float inverse[kRows];   // 1 / sum of weights
  uint64_t empty[2][kReturns], top_known[2], weighed[2], asked, answered, summed, done, taken;
};
constexpr int kWeightsBlock = 8;

// Who arrives: the threads that wrote or read ordinary shared memory, or one lane of each warp when it was the copies' or wgmma's alone.
constexpr int kStreamThreads = 128, kValueThreads = 256;

// A group of queries and what this CTA did before it.
struct Work {
  int group, first, queries;
  int tiles;       // of its union; -1: refused
  int before = 0;  // tiles of the groups before: tile t of the group is the (before + t)-th, and its stage is the parity of that
  int turn = 0;    // groups before that had tiles
  __device__ __forceinline__ Work(const AttendParams& p, int group) { look_at(p, group); }
  __device__ __forceinline__ void look_at(const AttendParams& p, int next) {
    group = next;
    if (group >= p.groups) return;
    first = __ldg(p.starts + group);
    queries = min(__ldg(p.starts + group + 1) - first, kRows >> p.head_shift);
    const int count = __ldg(p.counts + group);
    tiles = count < 0 ? -1 : (min(count, p.capacity) + kKeys - 1) / kKeys;
  }
  __device__ __forceinline__ void advance(const AttendParams& p, int step) {
    if (tiles > 0) before += tiles, ++turn;
    look_at(p, group + step);
  }
};

// The queries of the group into shared memory, by one stream; rows of absent queries are zero.
template <int kBlocks>
__device__ __forceinline__ void load_queries(const AttendParams& p, uint8_t* q, const Work& w, int thread) {
  constexpr int kPieces = kBlocks * 8;
#pragma unroll 4
  for (int i = ptx::opaque(thread); i < kRows * kPieces; i += kStreamThreads) {  // opaque: no register is kept for it between groups
    const int row = i / kPieces, piece = i % kPieces;
    const int query = row >> p.head_shift, head = row & ((1 << p.head_shift) - 1);
    const int64_t token = query < w.queries ? w.first + query : w.first;
    const uint8_t* source = piece < 64 ? p.q_nope + token * p.nope_token + head * p.nope_head + piece * 16
                                       : p.q_rope + token * p.rope_token + head * p.rope_head + (piece - 64) * 16;
    ptx::copy_async_16(q + matrix_offset(row, piece / 8, piece % 8), source, query < w.queries ? 16 : 0);
  }
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

// Waits for the copies of all but the last `pending` groups, a number below kMost.
template <int kMost>
__device__ __forceinline__ void wait_but(int pending) {
  if constexpr (kMost > 1) {
    if (pending < kMost - 1) return wait_but<kMost - 1>(pending);
  }
  ptx::copy_async_wait<kMost - 1>();
}

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
      if (fill_of(b) == part) ptx::copy_async_16(target + b * kBlockBytes, source + b * 128, bytes);
  }
}

// A whole tile of fp8_ds_mla rows: 512 e4m3 values, four scales, 64 bf16. The values wait where blocks 4 to 7 of their row will be, the
// scales where its first piece will be, so that all rows are on their way at once; only this warp touches these rows.
__device__ __forceinline__ void fetch_fp8(const AttendParams& p, uint8_t* tile, const Fetcher& f, int thread) {
  // Opaque: else addresses are kept in registers from tile to tile.
  const int row0 = ptx::opaque(f.row0), piece = ptx::opaque(f.piece);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = row0 + 16 * i, slot = f.slot(i, thread);
    const uint8_t* source = p.kv + (slot < 0 ? 0 : slot) * p.kv_row;
    const int bytes = slot < 0 ? 0 : 16;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      ptx::copy_async_16(tile + matrix_offset(row, 4 + j, piece), source + j * 128 + piece * 16, bytes);
    ptx::copy_async_16(tile + matrix_offset(row, 8, piece), source + 528 + piece * 16, bytes);
    if (piece == 0) ptx::copy_async_16(tile + matrix_offset(row, 0, 0), source + 512, bytes);
    ptx::copy_async_commit();
  }
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    wait_but<4>(3 - i);
    __syncwarp();
    const int row = row0 + 16 * i;
    uint4 v[4];  // v[j]: the values of the dimensions 128 j + 16 piece on
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = *reinterpret_cast<const uint4*>(tile + matrix_offset(row, 4 + j, piece));
    const uint4 scale_bits = *reinterpret_cast<const uint4*>(tile + matrix_offset(row, 0, 0));
    const float scales[4] = {__uint_as_float(scale_bits.x), __uint_as_float(scale_bits.y), __uint_as_float(scale_bits.z),
                             __uint_as_float(scale_bits.w)};
    __syncwarp();  // all have read their row before any overwrites it
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int block = 2 * j + piece / 4, at = piece % 4 * 2;
      const uint4 even = dequantize(v[j].x, v[j].y, scales[j]), odd = dequantize(v[j].z, v[j].w, scales[j]);
      const bool swap = piece >= 4;  // the lanes that write to the odd block begin with the other piece: other banks
      *reinterpret_cast<uint4*>(tile + matrix_offset(row, block, at + swap)) = swap ? odd : even;
      *reinterpret_cast<uint4*>(tile + matrix_offset(row, block, at + !swap)) = swap ? even : odd;
    }
  }
}

}  // namespace litedsa
}  // namespace dsa
