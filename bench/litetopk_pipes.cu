// How the tensor cores and the CUDA cores of a Hopper multiprocessor share it: warpgroups that do LiteTopK's products of half a tile
// (4 wgmma m64n128k32, 64 sums in FP32), its weighted sums of them (64 relu, 64 FMA), or both in turn. bench/litetopk_pipes.py builds and runs it.
#include <cstdio>

#include "common.cuh"
#include "litetopk_ptx.cuh"

namespace {

using namespace dsa;

constexpr int kGroups = 4, kRepeats = 4000, kShared = 70000;
enum Role { kIdle = 0, kProducts = 1, kSums = 2, kBoth = 3 };
struct Roles {
  int of[kGroups];
};

__device__ float repeat(int role, uint64_t keys, uint64_t queries, const float* shared_weights, long long* cycles) {
  float d[64], weights[32], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 64; ++i) d[i] = threadIdx.x * 0.01f + i;
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i] = shared_weights[threadIdx.x % 4 * 32 + i];
  const long long begin = clock64();
#pragma unroll 1
  for (int i = 0; i < kRepeats; ++i) {
    if (role & kProducts) {
      ptx::wgmma_fence();
#pragma unroll
      for (int part = 0; part < 4; ++part) ptx::wgmma_m64n128k32_e4m3(d, keys + part * 2, queries + part * 2, part != 0);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>(d);
    } else {
#pragma unroll
      for (int j = 0; j < 64; ++j) asm volatile("" : "+f"(d[j]));  // other values, for all that the compiler knows
    }
    if (role & kSums) {
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        sums[0] = __fmaf_rn(fmaxf(d[4 * j], 0.0f), weights[2 * j], sums[0]);
        sums[1] = __fmaf_rn(__fadd_rn(d[4 * j + 1], fabsf(d[4 * j + 1])), weights[2 * j + 1], sums[1]);
        sums[2] = __fmaf_rn(fmaxf(d[4 * j + 2], 0.0f), weights[2 * j], sums[2]);
        sums[3] = __fmaf_rn(__fadd_rn(d[4 * j + 3], fabsf(d[4 * j + 3])), weights[2 * j + 1], sums[3]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(sums[j]));
    }
  }
  if (threadIdx.x % 128 == 0) *cycles = clock64() - begin;
  return sums[0] + sums[1] + sums[2] + sums[3] + d[5];
}

__global__ void __launch_bounds__(128 * kGroups, 1) share(Roles roles, long long* cycles, float* never) {
  extern __shared__ __align__(1024) uint8_t raw[];
  for (int i = threadIdx.x; i < 65536 / 4; i += blockDim.x)
    reinterpret_cast<uint32_t*>(raw)[i] = 0x38383838u ^ (i * 2654435761u & 0x07070707u);  // e4m3 between 0.5 and 2
  float* weights = reinterpret_cast<float*>(raw + 65536);
  for (int i = threadIdx.x; i < 128; i += blockDim.x) weights[i] = i * 0.001f;
  ptx::fence_async_proxy();
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int role = roles.of[group];
  if (role == kIdle) return;
  const float found = repeat(role, ptx::wgmma_descriptor(raw + group * 8192), ptx::wgmma_descriptor(raw + 32768 + group % 2 * 16384),
                             weights, cycles + blockIdx.x * kGroups + group);
  if (found == 12345.0f) *never = found;
}

struct Case {
  const char* name;
  Roles roles;
};
constexpr Case kCases[] = {
    {"3 warpgroups, products", {kProducts, kProducts, kProducts, kIdle}},
    {"3 warpgroups, sums", {kSums, kSums, kSums, kIdle}},
    {"2 warpgroups, products; 2, sums", {kProducts, kProducts, kSums, kSums}},
    {"1 warpgroup, both in turn", {kBoth, kIdle, kIdle, kIdle}},
    {"2 warpgroups, both in turn", {kBoth, kBoth, kIdle, kIdle}},
    {"3 warpgroups, both in turn", {kBoth, kBoth, kBoth, kIdle}},
    {"4 warpgroups, both in turn", {kBoth, kBoth, kBoth, kBoth}},
};

}  // namespace

// A line per case: name, and cycles of half a tile for products and for sums, over all warpgroups that do them (0: none does).
int main() {
  int units = 0;
  cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, 0);
  long long* cycles = nullptr;
  float* never = nullptr;
  if (cudaMallocManaged(&cycles, sizeof(long long) * kGroups * units) || cudaMalloc(&never, 4) ||
      cudaFuncSetAttribute(share, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
  for (const Case& one : kCases) {
    share<<<units, 128 * kGroups, kShared>>>(one.roles, cycles, never);
    if (const cudaError_t failed = cudaDeviceSynchronize()) {
      std::fprintf(stderr, "%s: %s\n", one.name, cudaGetErrorString(failed));
      return 1;
    }
    double rates[2] = {0, 0};
    for (int group = 0; group < kGroups; ++group)
      for (int kind = 0; kind < 2; ++kind)
        if (one.roles.of[group] >> kind & 1) rates[kind] += double{kRepeats} / cycles[group];
    std::printf("%s\t%.1f\t%.1f\n", one.name, rates[0] ? 1 / rates[0] : 0, rates[1] ? 1 / rates[1] : 0);
  }
  return 0;
}
