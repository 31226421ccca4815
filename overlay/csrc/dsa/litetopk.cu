// dsa_litetopk: scores of the DSA indexer and their exact top-k in one kernel, without a [queries, keys] score matrix (Hopper).
//
//   score[i, j] = k_scale[j] * sum_h weights[i, h] * max(0, q[i, h, :] . k[j, :])        for ks[i] <= j < ke[i]
//
// A worker, one of two or three in a CTA, takes a block of kRows queries (kRows * heads = 256) and streams the keys of their ranges, 64 at
// a time, through shared memory (tensor-map copies into a ring per warpgroup). The keys are wgmma's M side and the 256 (query, head) pairs
// its N side, in an order that gives each thread all heads of its queries, so that a head sum needs no shuffle.
//
// Selection: all scores of the newest `fill_tiles` tiles are stored; the row's gate is a score that k of them reach. Of all later scores
// only those that pass the gate are appended to the row's list; when a list could overflow before the next
// check, the worker stops, the list is cut to its k best (exactly, by 64-bit keys) and the gate rises. So no list ever overflows and
// nothing that could belong to the k best is dropped. The lists lie in global memory, one per row *in flight*: their size does not
// depend on the number of queries or keys. Each lane appends to a list of its own, without atomics, so that the result,
// order included, is the same on every run. With `splits` > 1 the key ranges of the last blocks are cut into parts, each part leaves
// its k best keys, and a second kernel takes the k best of those. docs/litetopk.md has the proof.
#include <cuda.h>

#include "common.cuh"
#include "litetopk_scan.cuh"

namespace dsa {
namespace litetopk {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline EncodeTiled encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess)
    return nullptr;
  return reinterpret_cast<EncodeTiled>(function);
}

inline bool make_maps(const void* k, const float* k_scale, int keys, CUtensorMap* k_map, CUtensorMap* scale_map) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return false;
  const cuuint64_t k_dims[2] = {kDim, static_cast<cuuint64_t>(keys)}, k_strides[1] = {kDim};
  const cuuint32_t k_box[2] = {kDim, kTile}, ones[2] = {1, 1};
  // A size that is no multiple of 16 bytes makes the copy trap; what lies behind the last scale belongs to columns out of range.
  const cuuint64_t s_dims[1] = {static_cast<cuuint64_t>(keys + 3) / 4 * 4}, none[1] = {0};
  const cuuint32_t s_box[1] = {kTile};
  return encode(k_map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(k), k_dims, k_strides, k_box, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS &&
         encode(scale_map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 1, const_cast<float*>(k_scale), s_dims, none, s_box, ones,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Slots of one row's list before its segments: k kept keys, and the scores of the fill tiles.
inline int front_slots(int k, int fill_tiles) { return k + fill_tiles * kTile / 2; }

// Slots of one row's list: those, and a segment per math warp, which its lanes part among themselves.
inline int list_slots(int heads, int k, int segment, int fill_tiles) {
  return front_slots(k, fill_tiles) + (heads == 64 ? Config<64>::kWarps : Config<32>::kWarps) * segment;
}

// Queries whose ranges are cut into parts: those of all blocks but the first `whole` in order of work, which are the last ones.
inline int merged_rows(int64_t queries, int heads, int whole, int splits) {
  const int64_t rows = kColumns / heads, blocks = (queries + rows - 1) / rows;
  if (splits == 1 || whole >= blocks) return 0;
  const int64_t cut = (blocks - whole) * rows;
  return static_cast<int>(cut < queries ? cut : queries);
}

inline int64_t round_up(int64_t n) { return (n + 255) / 256 * 256; }

template <int kHeads, bool kDense>
int launch(const CUtensorMap& k_map, const CUtensorMap& scale_map, const Params& p, int workers, cudaStream_t stream) {
  constexpr int kWorkers = Config<kHeads>::kWorkers, kBytes = kWorkers * sizeof(Shared<Config<kHeads>::kGroups>) + 1024;
  cudaError_t status =
      cudaFuncSetAttribute(scan_kernel<kHeads, kDense>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return static_cast<int>(status);
  if (p.items > p.workers) {
    status = cudaMemsetAsync(p.counter, 0, sizeof(unsigned), stream);
    if (status != cudaSuccess) return static_cast<int>(status);
  }
  scan_kernel<kHeads, kDense><<<min(p.workers, (workers + kWorkers - 1) / kWorkers), kWorkers * Config<kHeads>::kThreads, kBytes, stream>>>(
      k_map, scale_map, p);
  int code = launch_status();
  const int cut = merged_rows(p.queries, kHeads, p.whole, p.splits);
  if (code != DSA_OK || kDense || cut == 0) return code;
  merge_kernel<<<cut, kMergeThreads, 0, stream>>>(p.parts, p.ks, p.ke, p.out, p.out_stride, p.keys, p.k, p.splits);
  return launch_status();
}

}  // namespace litetopk
}  // namespace dsa

// Bytes of workspace of one dsa_litetopk call, or an error code; vllm/dsa/litetopk/plan.py computes the same.
DSA_EXPORT int64_t dsa_litetopk_workspace_bytes(int64_t queries, int32_t heads, int32_t k, int32_t whole, int32_t splits,
                                                int32_t workers, int32_t segment, int32_t fill_tiles) {
  using namespace dsa::litetopk;
  if (heads != 32 && heads != 64) return DSA_INVALID_ARGUMENT;
  const int64_t rows = kColumns / heads, capacity = list_slots(heads, k, segment, fill_tiles);
  return 256 + round_up(workers * rows * capacity * 8) + round_up(static_cast<int64_t>(merged_rows(queries, heads, whole, splits)) * splits * k * 8);
}

// q: e4m3 [queries, heads, 128], q_stride bytes between queries, the rest contiguous; k: e4m3 [keys, 128]; k_scale: fp32 [keys]; weights:
// fp32 [queries, heads], weights_stride elements between queries; ks, ke: int32 [queries], columns [ks, ke) of a query; out: int32,
// out_stride elements between queries: positions relative to ks of the min(k, ke - ks) best scores, in an order that only the arguments
// decide, then -1 up to k. dense: null, or fp32 [queries, keys] that gets the scores of all columns in range instead (out is not written
// then). q, k and k_scale are 16-byte aligned, q_stride is a multiple of 16. workspace: dsa_litetopk_workspace_bytes, 256-byte aligned. The
// rest affects speed only. whole: blocks of 256 / heads queries whose ranges are not cut, the last queries first; splits: parts of every
// other block's range; workers: at most; segment: candidates per warp and row between two cuts, even, at least 32 * check_tiles;
// check_tiles: tiles between two checks; fill_tiles: tiles stored whole. k is even and at most 64 * fill_tiles.
DSA_EXPORT int dsa_litetopk(const void* q, int64_t q_stride, const void* k_values, const float* k_scale, const float* weights,
                            int64_t weights_stride, const int32_t* ks, const int32_t* ke, int32_t* out, int64_t out_stride,
                            float* dense, int64_t queries, int64_t keys, int32_t heads, int32_t k, int32_t whole, int32_t splits, int32_t workers,
                            int32_t segment, int32_t check_tiles, int32_t fill_tiles, void* workspace,
                            int64_t workspace_bytes, void* stream) {
  using namespace dsa::litetopk;
  if (queries == 0) return DSA_OK;
  if (queries < 0 || queries > INT32_MAX / 4096 || keys < 1 || keys > (1 << 30) || (heads != 32 && heads != 64) || splits < 1 || whole < 0 ||
      workers < 1 || k < 1 || k % 2 || check_tiles < 1 || check_tiles > 4096 || fill_tiles < 2 || fill_tiles > 1024 ||
      k > fill_tiles * kTile || segment % 2 || segment < 32 * check_tiles || segment > (1 << 16))
    return DSA_INVALID_ARGUMENT;
  if (!q || !k_values || !k_scale || !weights || !ks || !ke || (!out && !dense) || !workspace) return DSA_INVALID_ARGUMENT;
  if (reinterpret_cast<uintptr_t>(q) % 16 || reinterpret_cast<uintptr_t>(k_values) % 16 || reinterpret_cast<uintptr_t>(k_scale) % 16 ||
      q_stride % 16 || reinterpret_cast<uintptr_t>(workspace) % 256)
    return DSA_INVALID_ARGUMENT;
  if (workspace_bytes < dsa_litetopk_workspace_bytes(queries, heads, k, whole, splits, workers, segment, fill_tiles)) return DSA_INVALID_ARGUMENT;
  const int rows = kColumns / heads;
  const int capacity = list_slots(heads, k, segment, fill_tiles);
  const int64_t blocks = (queries + rows - 1) / rows;
  if (whole > blocks) whole = static_cast<int32_t>(blocks);
  const int64_t items = whole + (blocks - whole) * splits;
  if (items > INT32_MAX) return DSA_INVALID_ARGUMENT;

  if (const int code = dsa::check_hopper()) return code;
  CUtensorMap k_map, scale_map;
  if (!make_maps(k_values, k_scale, static_cast<int>(keys), &k_map, &scale_map)) return DSA_UNSUPPORTED_ARCH;
  uint8_t* bytes = static_cast<uint8_t*>(workspace);
  Params p;
  p.q = static_cast<const uint8_t*>(q);
  p.q_stride = q_stride;
  p.weights = weights;
  p.weights_stride = weights_stride;
  p.ks = ks;
  p.ke = ke;
  p.out = out;
  p.out_stride = out_stride;
  p.dense = dense;
  p.counter = reinterpret_cast<unsigned*>(bytes);
  p.lists = reinterpret_cast<uint64_t*>(bytes + 256);
  p.parts = reinterpret_cast<uint64_t*>(bytes + 256 + round_up(static_cast<int64_t>(workers) * rows * capacity * 8));
  p.queries = static_cast<int>(queries);
  p.keys = static_cast<int>(keys);
  p.k = dense ? 0 : k;
  p.whole = whole;
  p.splits = splits;
  p.items = static_cast<int>(items);
  p.workers = min(workers, p.items);
  p.capacity = capacity;
  p.front = front_slots(k, fill_tiles);
  p.segment = segment;
  const int groups = heads == 64 ? Config<64>::kGroups : Config<32>::kGroups;
  p.limit = segment / dsa::select::kLists - 2 * ((check_tiles + groups - 1) / groups);  // a lane adds at most 2 per tile of its group
  p.check_tiles = check_tiles;
  p.fill_tiles = fill_tiles;
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (dense) return heads == 64 ? launch<64, true>(k_map, scale_map, p, workers, s) : launch<32, true>(k_map, scale_map, p, workers, s);
  return heads == 64 ? launch<64, false>(k_map, scale_map, p, workers, s) : launch<32, false>(k_map, scale_map, p, workers, s);
}
