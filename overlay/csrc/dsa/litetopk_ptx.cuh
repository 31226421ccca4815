// The few Hopper instructions that litetopk.cu needs: mbarrier, tensor-map copies and FP8 wgmma (PTX ISA 8.0 and later).
#pragma once

#include <cstdint>

#include "common.cuh"

namespace dsa {
namespace ptx {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(smem_address(bar)), "r"(parity)
        : "memory");
  } while (!done);
}

// Named barrier `id` of `threads` threads: waits for all of them.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// named_sync that tells whether any of the threads said so.
__device__ __forceinline__ bool named_or(int id, int threads, bool said) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbarrier.cta.red.or.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(said))
      : "memory");
  return any;
}

// The same pointer; the compiler keeps it instead of computing it again at each use.
__device__ __forceinline__ uint64_t* opaque(uint64_t* p) {
  asm("" : "+l"(p));
  return p;
}

// If score reaches the gate: stores {score, low} `at` bytes behind lists, cached in L2 alone, and moves `at` on by `step`. No branch.
__device__ __forceinline__ void append_if_passes(float score, float gate, uint32_t low, uint64_t* lists, uint32_t& at, int step) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 to;\nsetp.ge.f32 p, %1, %2;\ncvt.u64.u32 to, %0;\nadd.u64 to, to, %4;\n"
      "@p st.global.cg.v2.b32 [to], {%3, %5};\n@p add.u32 %0, %0, %6;\n}"
      : "+r"(at)
      : "f"(score), "f"(gate), "r"(low), "l"(lists), "r"(__float_as_uint(score)), "r"(step)
      : "memory");
}

__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void tma_load_2d(void* dst, const void* map, int x, int y, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          smem_address(dst)),
      "l"(map), "r"(x), "r"(y), "r"(smem_address(bar))
      : "memory");
}

__device__ __forceinline__ void tma_load_1d(void* dst, const void* map, int x, uint64_t* bar) {
  asm volatile(
      "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2}], [%3];" ::"r"(
          smem_address(dst)),
      "l"(map), "r"(x), "r"(smem_address(bar))
      : "memory");
}

// Shared-memory descriptor of a K-major operand with rows of 128 bytes in the 128-byte swizzle (8-row groups 1024 bytes apart).
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* p) {
  return (static_cast<uint64_t>((smem_address(p) & 0x3ffff) >> 4)) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void wgmma_fence() {
#if DSA_SM90A
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if DSA_SM90A
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
#define DSA_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DSA_D64 DSA_D8(0), DSA_D8(8), DSA_D8(16), DSA_D8(24), DSA_D8(32), DSA_D8(40), DSA_D8(48), DSA_D8(56)

// Waits until at most `Pending` groups are in flight; d, which is complete then, is an operand so that no use of it moves up.
template <int Pending>
__device__ __forceinline__ void wgmma_wait(float (&d)[64]) {
#if DSA_SM90A
  asm volatile("wgmma.wait_group.sync.aligned %64;" : DSA_D64 : "n"(Pending) : "memory");
#endif
}

// d[64 x 128] (+)= a[64 x 32] * b[128 x 32]^T, both e4m3 in shared memory. Thread t of the warpgroup holds, for j in 0..15, the
// columns 8j + 2(t%4) + {0, 1} of row 16(t/32) + (t%32)/4 in d[4j], d[4j+1] and of that row + 8 in d[4j+2], d[4j+3].
__device__ __forceinline__ void wgmma_m64n128k32_e4m3(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
#if DSA_SM90A
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1;\n}"
      : DSA_D64
      : "l"(a), "l"(b), "r"(accumulate));
#endif
}

#undef DSA_D64
#undef DSA_D8

}  // namespace ptx
}  // namespace dsa
