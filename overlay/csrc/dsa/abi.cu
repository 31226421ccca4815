// Version, build description and error texts of the library.
#include "common.cuh"

#define DSA_STRING_(x) #x
#define DSA_STRING(x) DSA_STRING_(x)

int dsa_abi_version() { return DSA_ABI_VERSION; }

const char* dsa_build_info() {
  return "abi=" DSA_STRING(DSA_ABI_VERSION) ";cuda=" DSA_STRING(__CUDACC_VER_MAJOR__) "." DSA_STRING(
      __CUDACC_VER_MINOR__) ";arch=sm_90a,sm_100a";
}

const char* dsa_error_string(int code) {
  switch (code) {
    case DSA_OK:
      return "ok";
    case DSA_INVALID_ARGUMENT:
      return "invalid argument";
    case DSA_UNSUPPORTED_ARCH:
      return "the library holds no code for this device";
    default:
      return code > 0 ? cudaGetErrorString(static_cast<cudaError_t>(code)) : "unknown error code";
  }
}
