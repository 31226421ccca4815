// dsa_topk_compare: how far two top-k id lists differ as sets, and whether each is well formed.
//
// The order of a top-k list is free, so equality of two kernels' results is equality of sets. One block takes one row and puts both
// lists into an open-addressing hash table in shared memory; every count comes from integer atomics, so the result does not depend on
// timing. The PyTorch reference with the exact meaning of each count is vllm.dsa.topk_compare.topk_compare_reference.
#include "common.cuh"

namespace dsa {
namespace topk_compare {

constexpr int kThreads = 256;
constexpr int kMaxK = 2048;
constexpr int kEmpty = -1;

enum Column { kOnlyA,
              kOnlyB,
              kMalformedA,
              kMalformedB,
              kColumns };

// Marks `id` in the table as a member of `list` (bit 1 or 2); true if that list held it before. `slots` is a power of two, at
// least twice the number of ids in both lists, so that a free slot always turns up.
__device__ inline bool insert(int* keys, int* members, int slots, int id, int list) {
  unsigned slot = (static_cast<unsigned>(id) * 2654435769u) >> 7;
  for (;; ++slot) {
    slot &= slots - 1;
    const int seen = atomicCAS(&keys[slot], kEmpty, id);
    if (seen == kEmpty || seen == id) return atomicOr(&members[slot], list) & list;
  }
}

__global__ void __launch_bounds__(kThreads)
    kernel(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride, const int32_t* limits, int k,
           int slots, int32_t* out) {
  extern __shared__ int shared[];
  int* keys = shared;
  int* members = shared + slots;
  __shared__ int counts[kColumns];
  __shared__ int first_gap[2];

  const int64_t row = blockIdx.x;
  const int32_t* lists[2] = {a + row * a_stride, b + row * b_stride};
  const int limit = limits[row];
  for (int i = threadIdx.x; i < slots; i += kThreads) {
    keys[i] = kEmpty;
    members[i] = 0;
  }
  if (threadIdx.x < kColumns) counts[threadIdx.x] = 0;
  if (threadIdx.x < 2) first_gap[threadIdx.x] = k;
  __syncthreads();

  for (int list = 0; list < 2; ++list)
    for (int i = threadIdx.x; i < k; i += kThreads)
      if (lists[list][i] == -1) atomicMin(&first_gap[list], i);
  __syncthreads();

  for (int list = 0; list < 2; ++list) {
    int malformed = 0;
    for (int i = threadIdx.x; i < k; i += kThreads) {
      const int id = lists[list][i];
      if (id == -1) continue;
      if (id < 0 || id >= limit) {
        ++malformed;
        continue;
      }
      malformed += i > first_gap[list];
      malformed += insert(keys, members, slots, id, 1 << list);
    }
    if (malformed) atomicAdd(&counts[kMalformedA + list], malformed);
  }
  __syncthreads();

  int only[2] = {0, 0};
  for (int i = threadIdx.x; i < slots; i += kThreads) {
    only[0] += members[i] == 1;
    only[1] += members[i] == 2;
  }
  if (only[0]) atomicAdd(&counts[kOnlyA], only[0]);
  if (only[1]) atomicAdd(&counts[kOnlyB], only[1]);
  __syncthreads();
  if (threadIdx.x < kColumns) out[row * kColumns + threadIdx.x] = counts[threadIdx.x];
}

}  // namespace topk_compare
}  // namespace dsa

// a, b: int32 [rows, k] with row strides in elements and unit column stride; limits: int32 [rows], ids of row r are valid in [0, limits[r]);
// out: int32 [rows, 4], contiguous: ids only in a, ids only in b, format errors of a, format errors of b.
// 1 <= k <= 2048, 0 <= rows < 2^31.
DSA_EXPORT int dsa_topk_compare(const int32_t* a, int64_t a_stride, const int32_t* b, int64_t b_stride,
                                const int32_t* limits, int64_t rows, int32_t k, int32_t* out, void* stream) {
  using namespace dsa::topk_compare;
  if (rows < 0 || rows > INT32_MAX || k < 1 || k > kMaxK) return DSA_INVALID_ARGUMENT;
  if (rows == 0) return DSA_OK;
  if (!a || !b || !limits || !out) return DSA_INVALID_ARGUMENT;
  int slots = 64;
  while (slots < 4 * k) slots *= 2;  // 2 * k ids at most: a load of one half
  const int bytes = 2 * slots * static_cast<int>(sizeof(int));
  if (bytes > 48 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return static_cast<int>(status);
  }
  kernel<<<static_cast<unsigned>(rows), kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(
      a, a_stride, b, b_stride, limits, k, slots, out);
  return dsa::launch_status();
}
