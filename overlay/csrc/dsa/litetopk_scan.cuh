// The device side of dsa_litetopk (litetopk.cu explains it): one worker's scan of its blocks, and the merge of cut ranges.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "common.cuh"
#include "litetopk_bins.cuh"
#include "litetopk_ptx.cuh"

namespace dsa {
namespace litetopk {

// What a roofline measurement leaves out (bench/litetopk_roofline.py builds these; results are wrong then): 1 appending, 2 also the
// products.
#ifndef LT_PROBE
#define LT_PROBE 0
#endif
constexpr int kProbe = LT_PROBE;

constexpr int kDim = 128;      // bytes of one e4m3 key or query head
constexpr int kTile = 64;      // keys per tile
constexpr int kColumns = 256;  // (query, head) pairs per block
constexpr int kRing = 3;       // tiles in flight
constexpr int kMaxRows = 8;
constexpr int kMergeThreads = 512;
constexpr int kWeightPad = 36;  // floats per (chunk, lane) group of 32 weights: four lanes read four groups without bank conflicts

// Chosen by measurement. A CTA has a multiprocessor for itself and parts it among workers, which know nothing of each other; a CTA for each
// worker was 2 to 10 % slower. Groups: warpgroups of a worker. More workers keep the tensor cores busy while one of them selects; weights in
// registers (168 per thread) save shared-memory bandwidth, weights in shared memory (128) allow one warpgroup more.
template <int kHeads>
struct Config {
  static constexpr int kGroups = kHeads == 64 ? 1 : 2;
  static constexpr int kWorkers = kHeads == 64 ? 3 : 2;
  static constexpr bool kRegisterWeights = kHeads == 64;
  static constexpr int kAddedRelu = 2;             // bit 0: of even heads, bit 1: of odd heads; see relu
  static constexpr int kRows = kColumns / kHeads;  // queries per block
  static constexpr int kWarps = 4 * kGroups;
  static constexpr int kThreads = 32 * kWarps;  // of a worker
};

struct Params {
  const uint8_t* q;
  int64_t q_stride;  // bytes
  const float* weights;
  int64_t weights_stride;  // elements
  const int32_t* ks;
  const int32_t* ke;
  int32_t* out;
  int64_t out_stride;  // elements
  float* dense;        // [queries, keys] scores, debugging only
  uint64_t* lists;     // [workers, kRows, capacity]
  uint64_t* parts;     // [queries with cut ranges, splits, k]
  unsigned* counter;
  int queries, keys, k, whole, splits, items, workers;
  int capacity, front, segment, limit, check_tiles, fill_tiles;  // front: slots of a list before its segments
};

struct Item {
  int first_query;  // -1: no more work
  int split, splits;
  int base;            // column of tile 0
  int begin, end;      // this item's tiles
  int max_ks, min_ke;  // over active rows: tiles in between need no range checks
  int active;          // bit per row with more than k keys
  int ks[kMaxRows], ke[kMaxRows];
};

template <int kGroups>
struct __align__(1024) Shared {
  uint8_t q[kColumns * kDim];
  uint8_t keys[kGroups * kRing][kTile * kDim];
  float scales[kGroups * kRing][kTile];
  float weights[2][4][kWeightPad];
  int hist[4 * kGroups][select::kBins];
  select::Scratch scratch[4 * kGroups];
  float gate[kMaxRows];
  float step[kMaxRows];                               // from the gate to where the next cut is expected; 0: unknown
  int kept[kMaxRows];                                 // keys at the head of a row's list; -1: the first scores are not cut yet
  int count[kMaxRows][4 * kGroups * select::kLists];  // keys in the lists of the warps' lanes behind it
  Item item[3];
  uint64_t full[kGroups * kRing], empty[kGroups * kRing];
};

template <int kHeads>
__device__ __forceinline__ void load_item(const Params& p, Item& item, int worker, int lane, bool initial) {
  constexpr int kRows = kColumns / kHeads;
  unsigned next = worker;
  if (!initial) {
    next = p.workers;
    if (p.items > p.workers) {  // otherwise the counter is not set
      if (lane == 0) next += atomicAdd(p.counter, 1u);
      next = __shfl_sync(~0u, next, 0);
    }
  }
  if (next >= static_cast<unsigned>(p.items)) {
    if (lane == 0) item.first_query = -1;
    return;
  }
  const int index = static_cast<int>(next);
  const int blocks = (p.queries + kRows - 1) / kRows;
  const bool whole = index < p.whole;
  const int splits = whole ? 1 : p.splits;
  const int split = whole ? 0 : (index - p.whole) % splits;
  const int block = whole ? index : p.whole + (index - p.whole) / splits;
  const int first = (blocks - 1 - block) * kRows;  // late queries have the longest ranges
  int ks = 0, ke = 0;
  if (lane < kRows && first + lane < p.queries) {
    ks = min(max(p.ks[first + lane], 0), p.keys);
    ke = min(max(p.ke[first + lane], ks), p.keys);
  }
  const bool active = ke - ks > p.k;
  const int mask = static_cast<int>(__ballot_sync(~0u, active));
  // The copy of the scales traps unless it starts at a multiple of 16 bytes.
  const int base = mask ? __reduce_min_sync(~0u, active ? ks : INT32_MAX) / 4 * 4 : 0;
  const int max_ks = __reduce_max_sync(~0u, active ? ks : 0);
  const int min_ke = __reduce_min_sync(~0u, active ? ke : INT32_MAX);
  const int last = __reduce_max_sync(~0u, active ? ke : 0);
  const int tiles = mask ? (last - base + kTile - 1) / kTile : 0;
  const int per_split = (tiles + splits - 1) / splits;
  if (lane < kRows) {
    item.ks[lane] = ks;
    item.ke[lane] = ke;
  }
  if (lane == 0) {
    item.first_query = first;
    item.split = split;
    item.splits = splits;
    item.base = base;
    item.begin = min(tiles, split * per_split);
    item.end = min(tiles, item.begin + per_split);
    item.max_ks = max_ks;
    item.min_ke = min_ke;
    item.active = mask;
  }
}

// The i-th tile of an item in scan order: the newest `fill` ones first, then from the oldest on.
__device__ __forceinline__ int tile_at(int begin, int end, int fill, int i) {
  return i < fill ? end - fill + i : begin + i - fill;
}

// Queries into shared memory: row n of the N side is the head 2 * (n % 128 / 8) + n % 2 (+ 32 in the second half when heads = 64) of the
// query n % 8 / 2 (+ 4 in the second half when heads = 32), in the 128-byte swizzle.
template <int kHeads, typename Shared>
__device__ __forceinline__ void load_queries(const Params& p, Shared& s, int first, int thread) {
  constexpr int kThreads = Config<kHeads>::kThreads;
#pragma unroll 4
  for (int u = 0; u < kColumns * 8 / kThreads; ++u) {
    const int i = u * kThreads + thread;
    const int n = i / 8, piece = i % 8;
    const int half = n / 128;
    const int head = 2 * (n % 128 / 8) + n % 2 + (kHeads == 64 ? 32 * half : 0);
    const int query = first + n % 8 / 2 + (kHeads == 32 ? 4 * half : 0);
    uint4 v = make_uint4(0, 0, 0, 0);
    if (query < p.queries)
      v = __ldg(reinterpret_cast<const uint4*>(p.q + query * p.q_stride + head * kDim + piece * 16));
    *reinterpret_cast<uint4*>(s.q + n * kDim + ((piece ^ (n % 8)) * 16)) = v;
  }
  for (int i = thread; i < kColumns; i += kThreads) {
    const int half = i / 128, lane = i / 32 % 4, h = i % 32;
    const int head = h + (kHeads == 64 ? 32 * half : 0);
    const int query = first + lane + (kHeads == 32 ? 4 * half : 0);
    const float factor = Config<kHeads>::kAddedRelu >> h % 2 & 1 ? 0.5f : 1.0f;  // see relu
    s.weights[half][lane][h] = query < p.queries ? factor * __ldg(p.weights + query * p.weights_stride + head) : 0.0f;
  }
  ptx::fence_async_proxy();
}

// Cuts a row's list (select::cut_row). One warp. Before the item's end the keys become the list's head, at its end they are written as
// positions, or as keys for the merge of the parts.
template <int kGroups>
__device__ __forceinline__ void take_best(const Params& p, Shared<kGroups>& s, const Item& item, uint64_t* list, int row, bool whole,
                                          int next, int warp, int lane) {
  const int fill = min(item.end - item.begin, p.fill_tiles);
  const bool fresh = whole || s.kept[row] < 0;
  const select::Segments<4 * kGroups> source{list,
                                             s.kept[row],
                                             reinterpret_cast<const float*>(list + p.k),
                                             fresh ? fill * kTile : 0,
                                             item.base + (item.end - fill) * kTile,
                                             list + p.front,
                                             p.segment,
                                             s.count[row]};
  const int64_t query = item.first_query + row;
  const bool positions = next < 0 && item.splits == 1;
  uint64_t* keys = next >= 0 || positions ? list : p.parts + (query * p.splits + item.split) * p.k;
  const auto emit = [&](bool taken, uint64_t key, int slot) {
    if (taken) __stcg(keys + slot, key);
  };
  const int taken = select::cut_row(source, whole, next, p.k, s.gate[row], s.step[row], s.kept[row], s.hist[warp], &s.scratch[warp], lane,
                                    emit);
  if (next >= 0) return;
  __syncwarp();
  if (positions) {
    int32_t* out = p.out + query * p.out_stride;
    const int ks = item.ks[row];
#pragma unroll 4
    for (int i = lane; i < p.k; i += 32) out[i] = select::key_position(__ldcg(reinterpret_cast<const unsigned long long*>(list + i))) - ks;
  } else {
    for (int i = taken + lane; i < p.k; i += 32) keys[i] = select::kNoKey;
  }
}

// max(x, 0), or 2 * max(x, 0) as x + |x| where kAdded. On Hopper an addition issues twice as fast as a maximum, but on the pipe of the
// products: mixing the two was fastest. Both are exact, and so is halving the weights in turn: the sums have the same bits. A NaN becomes
// 0, where kAdded it stays.
template <bool kAdded>
__device__ __forceinline__ float relu(float x) {
  return kAdded ? __fadd_rn(x, fabsf(x)) : fmaxf(x, 0.0f);
}

// sum * scale with -0 turned into +0 and NaN into -inf, so that comparing scores and comparing their keys is the same.
__device__ __forceinline__ float finish_score(float sum, float scale) {
  return fmaxf(__fmaf_rn(sum, scale, 0.0f), -INFINITY);
}

// One warpgroup's ring of key tiles. Fetching keeps no state, so that the warps can take turns: the work of one thread delays a whole
// warpgroup, and its warp's scheduler serves the same warp of all workers.
struct Ring {
  int first;                // stage of slot 0
  int slot = 0, phase = 0;  // next tile to consume

  // Waits for the next tile and returns its stage.
  template <typename Shared>
  __device__ __forceinline__ int advance(Shared& s) {
    const int stage = __shfl_sync(~0u, first + slot, 0);  // tells the compiler that it is the same in all lanes
    ptx::barrier_wait(&s.full[stage], phase);
    if (++slot == kRing) {
      slot = 0;
      phase ^= 1;
    }
    return stage;
  }

  // Starts the copy of the tile that is consumed `ahead` tiles after the next one. One thread.
  template <typename Shared>
  __device__ __forceinline__ void fetch(Shared& s, const CUtensorMap* k_map, const CUtensorMap* scale_map, int column, int ahead) const {
    const bool wraps = slot + ahead >= kRing;
    const int stage = first + slot + ahead - (wraps ? kRing : 0);
    ptx::barrier_wait(&s.empty[stage], phase ^ (wraps ? 0 : 1));
    ptx::barrier_arrive_expect(&s.full[stage], kTile * (kDim + sizeof(float)));
    ptx::tma_load_2d(s.keys[stage], k_map, 0, column, &s.full[stage]);
    ptx::tma_load_1d(s.scales[stage], scale_map, column, &s.full[stage]);
  }
};

template <int kHeads, bool kDense>
__device__ __forceinline__ void scan(const Params& p, const CUtensorMap* k_map, const CUtensorMap* scale_map,
                                     Shared<Config<kHeads>::kGroups>& s, int worker, int local, int thread) {
  constexpr int kRows = Config<kHeads>::kRows, kGroups = Config<kHeads>::kGroups, kWarps = Config<kHeads>::kWarps;
  constexpr bool kRegisterWeights = Config<kHeads>::kRegisterWeights;
  constexpr int kLaneRows = kRows / 4;  // queries whose heads a lane holds
  const int warp = __shfl_sync(~0u, static_cast<unsigned>(thread) / 32, 0), lane = static_cast<unsigned>(thread) % 32;
  const int group = kGroups == 1 ? 0 : warp / 4;
  const int key_row = warp % 4 * 16 + lane / 4;  // and key_row + 8
  uint64_t* lists = ptx::opaque(p.lists + static_cast<int64_t>(worker) * kRows * p.capacity);
  const uint64_t q_desc = ptx::wgmma_descriptor(s.q);
  // Where this lane's list of candidates for its r-th query begins, in bytes within lists.
  const auto segment = [&](int r) { return 8u * ((lane % 4 + 4 * r) * p.capacity + p.front + warp * p.segment + lane / 4); };
  Ring ring;
  ring.first = group * kRing;
  const auto sync = [&] { ptx::named_sync(1 + local, Config<kHeads>::kThreads); };

  for (int round = 0;; ++round) {
    const Item& item = s.item[round % 3];
    const int first = item.first_query;
    if (first < 0) break;
    const int begin = __shfl_sync(~0u, item.begin, 0), end = __shfl_sync(~0u, item.end, 0), base = item.base, max_ks = item.max_ks, min_ke = item.min_ke;
    const int tiles = end - begin;
    const int fill = min(tiles, p.fill_tiles);
    const int active = item.active;
    if (thread == 128 * group)
      for (int i = 0; group + i * kGroups < min(tiles, kGroups * kRing); ++i)
        ring.fetch(s, k_map, scale_map, base + tile_at(begin, end, fill, group + i * kGroups) * kTile, i);
    if (warp == kWarps - 1) load_item<kHeads>(p, s.item[(round + 1) % 3], worker, lane, false);
    load_queries<kHeads>(p, s, first, thread);
    sync();

    // Own tile in which this warp fetches the next but one; none in the first, whose successors are there.
    int turn = (4 - warp % 4) * kGroups + group;
    float gate[kLaneRows];
    uint32_t cursor[kLaneRows];  // where this lane's next candidate of its queries goes
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      gate[r] = INFINITY;
      cursor[r] = segment(r);
    }
    for (int i = 0;;) {
      float weights[2][32];  // of this lane's queries; not kept over a selection, which needs the registers
      if constexpr (kRegisterWeights) {
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const float4 w = *reinterpret_cast<const float4*>(&s.weights[j / 8][lane % 4][j % 8 * 4]);
          weights[j / 8][j % 8 * 4 + 0] = w.x;
          weights[j / 8][j % 8 * 4 + 1] = w.y;
          weights[j / 8][j % 8 * 4 + 2] = w.z;
          weights[j / 8][j % 8 * 4 + 3] = w.w;
        }
      }
      const bool filling = i < fill;
      const int stop = filling ? fill : min(tiles, i + p.check_tiles);
      int tile = kGroups == 1 ? i : i + (group + i) % 2;               // this group's first one
      const int column = base + tile_at(begin, end, fill, i) * kTile;  // of tile i
      const bool plain = !kDense && !filling && column >= max_ks && column + (stop - i) * kTile <= min_ke;
      uint32_t low = ~static_cast<uint32_t>(column + (tile - i) * kTile + key_row);  // complement of the lane's first position
      float sums[4];

      const auto issue = [&](float (&d)[64], int stage, int half) {
        const uint64_t k_desc = ptx::wgmma_descriptor(s.keys[stage]);
        ptx::wgmma_fence();
#pragma unroll
        for (int part = 0; part < (kProbe == 2 ? 0 : kDim / 32); ++part)
          ptx::wgmma_m64n128k32_e4m3(d, k_desc + part * 2, q_desc + half * (128 * kDim / 16) + part * 2, part != 0);
        ptx::wgmma_commit();
      };
      // Adds the weighted heads of half the columns to sums[0..1] (key_row) and sums[2..3] (key_row + 8).
      const auto accumulate = [&](const float (&d)[64], int half) {
        constexpr bool kEven = Config<kHeads>::kAddedRelu & 1, kOdd = Config<kHeads>::kAddedRelu >> 1;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float4 w = kRegisterWeights ? make_float4(weights[half][4 * j], weights[half][4 * j + 1], weights[half][4 * j + 2],
                                                          weights[half][4 * j + 3])
                                            : *reinterpret_cast<const float4*>(&s.weights[half][lane % 4][4 * j]);
          sums[0] = __fmaf_rn(relu<kEven>(d[8 * j + 0]), w.x, sums[0]);
          sums[1] = __fmaf_rn(relu<kOdd>(d[8 * j + 1]), w.y, sums[1]);
          sums[2] = __fmaf_rn(relu<kEven>(d[8 * j + 2]), w.x, sums[2]);
          sums[3] = __fmaf_rn(relu<kOdd>(d[8 * j + 3]), w.y, sums[3]);
          sums[0] = __fmaf_rn(relu<kEven>(d[8 * j + 4]), w.z, sums[0]);
          sums[1] = __fmaf_rn(relu<kOdd>(d[8 * j + 5]), w.w, sums[1]);
          sums[2] = __fmaf_rn(relu<kEven>(d[8 * j + 6]), w.z, sums[2]);
          sums[3] = __fmaf_rn(relu<kOdd>(d[8 * j + 7]), w.w, sums[3]);
        }
      };
      const auto append = [&](int r, float score0, float score1) {
        ptx::append_if_passes(score0, gate[r], low, lists, cursor[r], 8 * select::kLists);
        ptx::append_if_passes(score1, gate[r], low - 8, lists, cursor[r], 8 * select::kLists);
      };
      // Stores, filters or dumps the two scores that are complete; r: which of the lane's queries.
      const auto deliver = [&](auto simple, int r, float scale0, float scale1) {
        float score0 = finish_score(__fadd_rn(sums[0], sums[1]), scale0);
        float score1 = finish_score(__fadd_rn(sums[2], sums[3]), scale1);
        if constexpr (!simple.value) {
          const int row = lane % 4 + 4 * r;
          const int position0 = static_cast<int>(~low), position1 = position0 + 8;
          const int ks = item.ks[row], ke = item.ke[row];
          if (position0 < ks || position0 >= ke) score0 = NAN;
          if (position1 < ks || position1 >= ke) score1 = NAN;
          if constexpr (kDense) {
            if (active >> row & 1) {
              float* out = p.dense + static_cast<int64_t>(first + row) * p.keys;
              if (!isnan(score0)) out[position0] = score0;
              if (!isnan(score1)) out[position1] = score1;
            }
            return;
          }
          if (filling) {
            float* scores = reinterpret_cast<float*>(lists + row * p.capacity + p.k) + tile * kTile + key_row;
            if (active >> row & 1) {
              __stcg(scores, score0);
              __stcg(scores + 8, score1);
            }
            return;
          }
        }
        append(r, score0, score1);
      };

      const auto clear = [&] { sums[0] = sums[1] = sums[2] = sums[3] = 0.0f; };
      const auto run = [&](auto simple) {
        for (; tile < stop; tile += kGroups, low -= kGroups * kTile) {
          float d[64];
          const int stage = ring.advance(s);
          issue(d, stage, 0);
          const float scale0 = s.scales[stage][key_row], scale1 = s.scales[stage][key_row + 8];
          clear();
          ptx::wgmma_wait<0>(d);
          accumulate(d, 0);
          if (kHeads == 32) {
            deliver(simple, 0, scale0, scale1);
            clear();
          }
          issue(d, stage, 1);
          ptx::wgmma_wait<0>(d);
          if (lane == 0) ptx::barrier_arrive(&s.empty[stage]);
          accumulate(d, 1);
          deliver(simple, kLaneRows - 1, scale0, scale1);
          if (tile == turn) {
            // All warps of the group have left the stage of the tile before.
            const int later = tile + kGroups * (kRing - 1);
            turn += 4 * kGroups;
            if (lane == 0 && later < tiles)
              ring.fetch(s, k_map, scale_map, base + tile_at(begin, end, fill, later) * kTile, 1);
          }
        }
      };
      if (!kDense && plain)
        run(std::bool_constant<true>());
      else
        run(std::bool_constant<false>());
      __syncwarp();
      i = stop;
      const bool finished = i == tiles;
      if constexpr (kDense) {
        if (finished) break;
      } else {
        int most = 0;
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
          const int count = static_cast<int>((cursor[r] - segment(r)) / (8 * select::kLists));
          s.count[lane % 4 + 4 * r][warp * select::kLists + lane / 4] = count;
          most = max(most, count);
        }
        if (!ptx::named_or(1 + local, Config<kHeads>::kThreads, finished || filling || most > p.limit)) continue;
        const bool whole = i <= fill;  // the first cut, of the scores of all keys
        const int next = finished ? -1 : base + (begin + i - fill) * kTile;
        for (int row = warp; row < kRows; row += kWarps) {
          if (active >> row & 1) {
            if (tiles) take_best(p, s, item, lists + row * p.capacity, row, whole, next, warp, lane);
          } else if (lane == 0) {
            s.gate[row] = INFINITY;
          }
        }
        if (finished) break;
        sync();
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
          cursor[r] = segment(r);
          gate[r] = kProbe ? INFINITY : s.gate[lane % 4 + 4 * r];
        }
      }
    }

    if constexpr (kDense) {
      sync();
    } else {
      for (int row = warp; row < kRows && first + row < p.queries; row += kWarps) {
        if (active >> row & 1) {
          // A part without tiles (the other parts have them) leaves no keys.
          if (tiles == 0)
            for (int i = lane; i < p.k; i += 32)
              p.parts[(static_cast<int64_t>(first + row) * p.splits + item.split) * p.k + i] = select::kNoKey;
        } else if (item.split == 0) {
          const int length = item.ke[row] - item.ks[row];
          for (int i = lane; i < p.k; i += 32) p.out[(first + row) * p.out_stride + i] = i < length ? i : -1;
        }
      }
    }
  }
}

template <int kHeads, bool kDense>
__global__ void __launch_bounds__(Config<kHeads>::kWorkers* Config<kHeads>::kThreads, 1)
    scan_kernel(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap scale_map,
                const __grid_constant__ Params p) {
#if DSA_SM90A
  constexpr int kStages = Config<kHeads>::kGroups * kRing;
  extern __shared__ uint8_t raw[];
  using Memory = Shared<Config<kHeads>::kGroups>;
  const int local = __shfl_sync(~0u, static_cast<unsigned>(threadIdx.x) / Config<kHeads>::kThreads, 0);
  const int thread = static_cast<unsigned>(threadIdx.x) % Config<kHeads>::kThreads;
  // Neighbouring workers of a CTA are far apart, so that few workers spread over all multiprocessors.
  const int worker = static_cast<int>(local * gridDim.x + blockIdx.x);
  Memory& s = reinterpret_cast<Memory*>(raw + (1024 - ptx::smem_address(raw) % 1024) % 1024)[local];
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(&s.full[i], 1);
      ptx::barrier_init(&s.empty[i], 4);
    }
    ptx::barrier_init_fence();
  }
  if (thread < 32) load_item<kHeads>(p, s.item[0], worker, thread, true);
  __syncthreads();
  if (worker < p.workers) scan<kHeads, kDense>(p, &k_map, &scale_map, s, worker, local, thread);
#else
  __trap();
#endif
}

// The k best of the splits' k best. One block per query.
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const uint64_t* parts, const int32_t* ks_of, const int32_t* ke_of, int32_t* out, int64_t out_stride, int keys, int k,
                 int splits) {
  __shared__ __align__(16) int hist[select::kBins];
  __shared__ select::Scratch scratch;
  const int64_t row = blockIdx.x;
  const int ks = min(max(ks_of[row], 0), keys);
  const int ke = min(max(ke_of[row], ks), keys);
  if (ke - ks <= k) return;
  const select::Array list{parts + row * splits * k, splits * k};
  const int thread = static_cast<int>(threadIdx.x);
  const auto emit = [&](bool taken, uint64_t key, int at) {
    if (taken) out[row * out_stride + at] = select::key_position(key) - ks;
  };
  select::Bins bins = k < 32 ? select::Bins{} : select::sampled_bins(list.keys, list.n, splits, thread % 32);
  select::Cut cut;
  if (select::try_bins<kMergeThreads>(list, bins, k, hist, thread, cut)) {
    select::take_cut<kMergeThreads>(list, bins, cut, k, hist, &scratch, thread, emit);
    return;
  }
  const select::Boundary b = select::find_boundary<kMergeThreads>(list, k, hist, &scratch, thread);
  select::take_largest<kMergeThreads>(list, b, hist, &scratch, thread, emit);
}

}  // namespace litetopk
}  // namespace dsa
