// What every kernel file of this folder shares: which architecture is being compiled, and how a launch is checked.
#pragma once

#include <cuda_runtime.h>

#include "dsa.h"

// Instructions of one architecture only (wgmma, tcgen05, setmaxnreg) stand between `#if DSA_SM90A` / `#if DSA_SM100A` and
// `#endif`: every file is compiled for both, and a kernel that lacks code for one must trap there instead of doing nothing.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DSA_SM90A 1
#else
#define DSA_SM90A 0
#endif
#if defined(__CUDA_ARCH_FEAT_SM100_ALL)
#define DSA_SM100A 1
#else
#define DSA_SM100A 0
#endif

namespace dsa {

// The code of the launch just made (a positive cudaError_t or 0). Does not wait for the kernel.
inline int launch_status() { return static_cast<int>(cudaGetLastError()); }

// DSA_OK on compute capability 9.0, for kernels that have code for it alone.
inline int check_hopper() {
  int device = 0, major = 0, minor = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status != cudaSuccess) return static_cast<int>(status);
  return major == 9 && minor == 0 ? DSA_OK : DSA_UNSUPPORTED_ARCH;
}

}  // namespace dsa
