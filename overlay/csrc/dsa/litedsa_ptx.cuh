// The instructions that dsa_litedsa needs beside those of litetopk_ptx.cuh: 16-byte copies, BF16 wgmma and conversions (Hopper).
#pragma once

#include <cstdint>

#include "common.cuh"
#include "litetopk_ptx.cuh"

namespace dsa {
namespace ptx {

// The same number; the compiler does not know that it is.
__device__ __forceinline__ uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 16 bytes from global to shared memory past L1; with bytes = 0 nothing is read and zeros are written.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
// Waits for every copy that this thread started.
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Arrives at the barrier for this thread, one of those that it counts, once all copies that the thread has started are there.
__device__ __forceinline__ void copy_async_arrive(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(bar)) : "memory");
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats as bfloat16, rounded to nearest even; `low` goes to the lower address.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Four e4m3 values, the one at the lowest address first.
__device__ __forceinline__ void unpack_e4m3(uint32_t packed, float (&f)[4]) {
#if DSA_SM90A
  asm("{\n.reg .b16 low, high, a, b, c, d;\n.reg .b32 x, y;\n"
      "mov.b32 {low, high}, %4;\n"
      "cvt.rn.f16x2.e4m3x2 x, low;\ncvt.rn.f16x2.e4m3x2 y, high;\n"
      "mov.b32 {a, b}, x;\nmov.b32 {c, d}, y;\n"
      "cvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\ncvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}"
      : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])
      : "r"(packed));
#endif
}

// A warpgroup gives registers back, or takes some, so that each of its threads has kCount.
template <int kCount>
__device__ __forceinline__ void registers_decrease() {
#if DSA_SM90A
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void registers_increase() {
#if DSA_SM90A
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

#define DSA_D8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DSA_D32(i) DSA_D8(i), DSA_D8(i + 8), DSA_D8(i + 16), DSA_D8(i + 24)

// Waits until at most the last `Pending` wgmma groups are in flight; d, which is complete then, is an operand so that no use of it moves
// up.
template <int Pending>
__device__ __forceinline__ void wgmma_wait(float (&d)[32]) {
#if DSA_SM90A
  asm volatile("wgmma.wait_group.sync.aligned %32;" : DSA_D32(0) : "n"(Pending) : "memory");
#endif
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait(float (&d)[128]) {
#if DSA_SM90A
  asm volatile("wgmma.wait_group.sync.aligned %128;" : DSA_D32(0), DSA_D32(32), DSA_D32(64), DSA_D32(96) : "n"(Pending) : "memory");
#endif
}

// d[64 x 64] (+)= a[64 x 16] * b[64 x 16]^T, both bf16 and K-major in shared memory. Thread t of the warpgroup holds, for j in 0..7,
// the columns 8j + 2(t%4) + {0, 1} of row 16(t/32) + (t%32)/4 in d[4j], d[4j+1] and of that row + 8 in d[4j+2], d[4j+3].
__device__ __forceinline__ void wgmma_m64n64k16_bf16(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
#if DSA_SM90A
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}"
      : DSA_D32(0)
      : "l"(a), "l"(b), "r"(accumulate));
#endif
}

#define DSA_TEXT128                                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "

// d[64 x 256] += a[64 x 16] * b[16 x 256], both bf16, b MN-major in shared memory; d as above for j in 0..31. a: K-major in shared memory,
// or in registers: this thread has the columns 8j + 2(t%4) + {0, 1} of the row 16(t/32) + (t%32)/4 in a[2j] and of that row + 8 in
// a[2j + 1], j in 0..1.
__device__ __forceinline__ void wgmma_m64n256k16_bf16_mn(float (&d)[128], uint64_t a, uint64_t b) {
#if DSA_SM90A
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" DSA_TEXT128
      "%128, %129, 1, 1, 1, 0, 1;"
      : DSA_D32(0), DSA_D32(32), DSA_D32(64), DSA_D32(96)
      : "l"(a), "l"(b));
#endif
}
__device__ __forceinline__ void wgmma_m64n256k16_bf16_mn(float (&d)[128], const uint32_t* a, uint64_t b) {
#if DSA_SM90A
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" DSA_TEXT128
      "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
      : DSA_D32(0), DSA_D32(32), DSA_D32(64), DSA_D32(96)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
#undef DSA_TEXT128
#undef DSA_D32
#undef DSA_D8

}  // namespace ptx
}  // namespace dsa
