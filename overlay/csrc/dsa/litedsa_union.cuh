// The union of a group's selections (litedsa.cu explains it): one CTA per group, one bit per position in shared memory.
#pragma once

#ifdef DSA_HOST_EMULATION
#include DSA_HOST_EMULATION
#else
#include "litedsa_ptx.cuh"
#endif
#include "litedsa_layout.cuh"

namespace dsa {
namespace litedsa {

constexpr int kUnionThreads = 256;
constexpr int kUnionWarps = kUnionThreads / 32;
constexpr int kIds = 2048 / kUnionThreads;  // of each query, that a thread holds
constexpr int kBatch = 4;                   // ids whose words a thread reads at a time
constexpr int kSpanStep = 128;
constexpr int kPositionBits = 20;  // of an entry of the union; bit kQueryBit + q: query q selects it
constexpr int kQueryBit = 24;

// Positions that the bitmap has room for. Longer spans are taken one segment after the other.
template <bool kLong>
constexpr int kSegment = kLong ? 1 << 18 : 1 << 17;

// CTAs on a multiprocessor, as registers and shared memory allow for k = 2048.
template <int kGroup, bool kLong>
constexpr int kUnionCtas = kGroup == 8 || kLong ? 2 : kGroup == 4 ? 3
                                                                  : 4;

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
  int k, capacity, span;
  int table_blocks, block_size, block_rows;
  uint64_t per_block;  // 2^40 / block_size, rounded up: a position times this, without its last 40 bits, is the position's block
  bool fours;          // ids can be read four at a time
};

// Bytes of dynamic shared memory: for 32 positions each a word of the bitmap and its rank, and the entries of the union. Behind each of the
// three are 32 words, one per lane, where an id goes that is no key.
inline int64_t union_shared_bytes(int span, int capacity) {
  const int segment = span <= kSegment<false> ? span : span < kSegment<true> ? span
                                                                             : kSegment<true>;
  return static_cast<int64_t>(segment) / 4 + static_cast<int64_t>(capacity) * 4 + 3 * 128;
}

// The ids of a group, -1 where there is none: ids[kIds * q ...] are this thread's share of query q.
template <int kGroup>
__device__ __forceinline__ void load_ids(const UnionParams& p, int64_t group, int32_t (&ids)[kIds * kGroup]) {
  const int first = __ldg(p.starts + group), queries = __ldg(p.starts + group + 1) - first;
  const int at = static_cast<int>(threadIdx.x) * (p.fours ? 4 : 1);
  const int32_t* row = p.topk + first * p.topk_stride + at;
#pragma unroll
  for (int q = 0; q < kGroup; ++q) {
    const int left = q < queries ? p.k - at : 0;
    if (p.fours) {
#pragma unroll
      for (int i = 0; i < kIds; i += 4) {
        int4 four = make_int4(-1, -1, -1, -1);
        if (i * kUnionThreads < left) four = __ldg(reinterpret_cast<const int4*>(row + i * kUnionThreads));
        ids[kIds * q + i] = four.x;
        ids[kIds * q + i + 1] = four.y;
        ids[kIds * q + i + 2] = four.z;
        ids[kIds * q + i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kIds; ++i) ids[kIds * q + i] = i * kUnionThreads < left ? __ldg(row + i * kUnionThreads) : -1;
    }
    row += p.topk_stride;
  }
}

// The word of a position in the bitmap or among the ranks; bits of `position` from 19 on are ignored.
template <typename T>
__device__ __forceinline__ T* word_of(T* words, uint32_t position) {
  return reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(words) + (position >> 3 & (2 * kSegment<true> / 8 - 4)));
}

// Gives each word of the bitmap its rank: four times the number of set bits before it, from `count` on. Adds all bits to `count`.
// Between its two barriers between(count) is called, where other memory can be cleared.
template <int kTurns, typename Function>
__device__ __forceinline__ void rank_words(const uint32_t* bits, uint32_t* ranks, int quads, int* partial, int& count, Function between) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t first = warp * (kTurns * 32) + lane;
  const int mine = quads - static_cast<int>(first);  // the quad of turn i exists if i * 32 < mine
  uint4 ones[kTurns];                                // set bits up to and with each word of the quad
  int before[kTurns], sum = 0;
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    uint4 quad = make_uint4(0, 0, 0, 0);
    if (i * 32 < mine) quad = reinterpret_cast<const uint4*>(bits)[first + i * 32];
    ones[i].x = __popc(quad.x);
    ones[i].y = ones[i].x + __popc(quad.y);
    ones[i].z = ones[i].y + __popc(quad.z);
    ones[i].w = ones[i].z + __popc(quad.w);
  }
  // Two turns share a scan: the sums of 32 quads take 13 bits.
#pragma unroll
  for (int i = 0; i < kTurns; i += 2) {
    const uint32_t own = ones[i].w | ones[i + 1].w << 16;
    uint32_t inclusive = own;
#pragma unroll
    for (uint32_t d = 1; d < 32; d *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, inclusive, d);
      if (lane >= d) inclusive += other;
    }
    const uint32_t all = __shfl_sync(~0u, inclusive, 31), exclusive = inclusive - own;
    before[i] = sum + static_cast<int>(exclusive & 0xffff);
    sum += static_cast<int>(all & 0xffff);
    before[i + 1] = sum + static_cast<int>(exclusive >> 16);
    sum += static_cast<int>(all >> 16);
  }
  if (lane == 0) partial[warp] = sum;
  __syncthreads();
  const int part = lane < kUnionWarps ? partial[lane] : 0;
  const int base = count + __reduce_add_sync(~0u, lane < warp ? part : 0);
  count += __reduce_add_sync(~0u, part);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const uint32_t rank = base + before[i];
    if (i * 32 < mine)
      reinterpret_cast<uint4*>(ranks)[first + i * 32] =
          make_uint4(rank * 4, (rank + ones[i].x) * 4, (rank + ones[i].y) * 4, (rank + ones[i].z) * 4);
  }
  between(count);
  __syncthreads();
}

// Writes rows and masks of a union whose entries are in shared memory.
template <int kGroup>
__device__ __forceinline__ void write_union(const UnionParams& p, int64_t group, const int32_t* table, const uint32_t* entries, int count) {
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  int32_t* slots = p.slots + group * p.capacity;
  uint4* masks = reinterpret_cast<uint4*>(p.masks + group * (p.capacity / kKeys) * kGroup);
  const int tiles = (count + kKeys - 1) / kKeys;
#pragma unroll 2
  for (int tile = warp; tile < tiles; tile += kUnionWarps) {
    uint32_t queries[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = tile * kKeys + half * 32 + lane;
      queries[half] = entries[i];
      const int position = static_cast<int>(queries[half] & ((1u << kPositionBits) - 1));
      int row = position;
      if (table) {
        const int block = static_cast<int>(position * p.per_block >> 40);
        row = __ldg(table + block) * p.block_rows + position - block * p.block_size;
      }
      slots[i] = i < count ? row : -1;
    }
#pragma unroll
    for (int q = 0; q < kGroup; q += 2) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = __ballot_sync(~0u, queries[w % 2] >> (kQueryBit + q + w / 2) & 1);
      if (lane == 0) masks[tile * (kGroup / 2) + q / 2] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Writes slots, masks and count of group blockIdx.x. Positions outside of the span or of the table are no keys, as in upstream's
// conversion. A query that selects a position twice makes the count -1: the group is refused.
template <int kGroup, bool kLong>
__global__ void __launch_bounds__(kUnionThreads, kUnionCtas<kGroup, kLong>) union_kernel(const UnionParams p) {
#ifdef DSA_HOST_EMULATION
  uint8_t* raw = emulated_shared();
#else
  extern __shared__ __align__(16) uint8_t raw[];
#endif
  DSA_SHARED int partial[kUnionWarps];
  const int64_t group = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int room = kLong ? min(p.span, kSegment<kLong>) : p.span;  // positions of a segment
  uint32_t* bits = reinterpret_cast<uint32_t*>(raw);
  uint32_t* ranks = bits + room / 32 + 32;
  uint32_t* entries = ranks + room / 32 + 32;
  const int64_t most = static_cast<int64_t>(p.table_blocks) * p.block_size;
  const int limit = most < p.span ? static_cast<int>(most) : p.span;
  const uint32_t none = room + 32 * lane;  // where an id that is no key goes, for lack of a branch

  int32_t ids[kIds * kGroup];
  load_ids<kGroup>(p, group, ids);
  if (thread < 32) {
    bits[room / 32 + lane] = 0;
    ranks[room / 32 + lane] = (p.capacity + lane) * 4;
    entries[p.capacity + lane] = 0;
  }

  int count = 0;
  uint32_t again = 0;
  for (int base = 0; base < limit; base += room) {
    const int length = min(limit - base, room), quads = (length + 127) / 128;
    for (int i = thread; i < quads; i += kUnionThreads) reinterpret_cast<uint4*>(bits)[i] = make_uint4(0, 0, 0, 0);
    // What an id is in this segment: the position there with the query's bit, or `none`. Of a short span this stays in the ids' place.
    const auto key_of = [&](int i) {
      const uint32_t at = static_cast<uint32_t>(ids[i]) - static_cast<uint32_t>(base);  // -1 and what lies before become large
      return at < static_cast<uint32_t>(length) ? at | 1u << (kQueryBit + i / kIds) : none;
    };
    if (!kLong) {
#pragma unroll
      for (int i = 0; i < kIds * kGroup; ++i) ids[i] = static_cast<int32_t>(key_of(i));
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kIds * kGroup; ++i) {
      const uint32_t key = kLong ? key_of(i) : static_cast<uint32_t>(ids[i]);
      atomicOr(word_of(bits, key), __funnelshift_l(0, 1, key));
    }
    __syncthreads();
    const int cleared = (count + kKeys - 1) / kKeys * kKeys;
    rank_words<kSegment<kLong> / 128 / kUnionThreads>(bits, ranks, quads, partial, count, [&](int known) {
      const int end = (known + kKeys - 1) / kKeys * kKeys;
      for (int i = cleared + thread * 4; i < end; i += kUnionThreads * 4) *reinterpret_cast<uint4*>(entries + i) = make_uint4(0, 0, 0, 0);
    });
#pragma unroll
    for (int some = 0; some < kIds * kGroup; some += kBatch) {
      uint32_t keys[kBatch], words[kBatch], places[kBatch];  // read before any entry is written, so that they arrive together
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        ids[some + i] = static_cast<int32_t>(ptx::opaque(static_cast<uint32_t>(ids[some + i])));  // else all addresses stay in registers
        keys[i] = kLong ? key_of(some + i) : static_cast<uint32_t>(ids[some + i]);
        words[i] = *word_of(bits, keys[i]);
        places[i] = *word_of(ranks, keys[i]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t place = places[i] + __popc(words[i] & ~__funnelshift_l(0, ~0u, keys[i])) * 4;
        // `none` has no query's bit, and a key of a later segment is further on than its place there says.
        const uint32_t entry = keys[i] + (kLong && keys[i] >> kQueryBit ? base : 0);
        again |= atomicOr(reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(entries) + place), entry) & entry;
      }
    }
    if (!kLong) break;
    __syncthreads();
  }
  const bool refused = __syncthreads_or(again >> kQueryBit != 0);
  const int32_t* table = p.table;
  if (table && p.requests) table += __ldg(p.requests + p.starts[group]) * p.table_stride;
  write_union<kGroup>(p, group, table, entries, count);
  if (thread == 0) p.counts[group] = refused ? -1 : count;
}

}  // namespace litedsa
}  // namespace dsa
