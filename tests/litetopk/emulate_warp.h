// What litetopk's selections need beyond litedsa's emulator: votes, warp reductions and atomics, after the CUDA programming guide.
#pragma once

#include <cfenv>

#include "emulator.h"

using std::isnan;

struct ulonglong2 {
  unsigned long long x, y;
};
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

struct float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename T>
T __ldcg(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) emulator::fail("a load is not aligned");
  return *p;
}
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __float_as_int(float f) {
  int i;
  std::memcpy(&i, &f, 4);
  return i;
}
inline float __int_as_float(int i) {
  float f;
  std::memcpy(&f, &i, 4);
  return f;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fadd_rd(float a, float b) {
  const int mode = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  volatile float x = a, y = b;
  const volatile float sum = x + y;
  std::fesetround(mode);
  return sum;
}

template <typename T>
T __reduce_min_sync(unsigned, T v) {
  const uint64_t* all = emulator::exchange(static_cast<uint64_t>(v), "reduce");
  T found = static_cast<T>(all[0]);
  for (int i = 1; i < 32; ++i) found = min(found, static_cast<T>(all[i]));
  return found;
}
template <typename T>
T __reduce_max_sync(unsigned, T v) {
  const uint64_t* all = emulator::exchange(static_cast<uint64_t>(v), "reduce");
  T found = static_cast<T>(all[0]);
  for (int i = 1; i < 32; ++i) found = max(found, static_cast<T>(all[i]));
  return found;
}
inline unsigned long long __shfl_xor_sync(unsigned, unsigned long long v, int mask) {
  return emulator::exchange(v, "shuffle")[(emulator::machine().current % 32) ^ mask];
}

inline int atomicAdd(int* p, int v) {
  const int old = *p;
  *p += v;
  return old;
}
inline void atomicMin(unsigned long long* p, unsigned long long v) { *p = min(*p, v); }
inline void atomicMax(unsigned long long* p, unsigned long long v) { *p = max(*p, v); }
