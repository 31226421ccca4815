// The C interface of vllm/_dsa_C.so that all its functions follow; vllm/dsa/kernels.py is its only caller.
//
// Rules: extern "C", plain pointers, sizes and a stream; the caller owns all memory, sets the current device and checks shapes and
// types; nothing synchronises, allocates or prints; the result is 0 or an error code that dsa_error_string() explains.
#pragma once

#include <cstdint>

// Raised whenever a signature or the meaning of an argument changes; equal to ABI_VERSION in vllm/dsa/kernels.py.
#define DSA_ABI_VERSION 1

#define DSA_EXPORT extern "C" __attribute__((visibility("default")))

// Negative codes are ours; positive ones are cudaError_t values.
enum DsaError : int {
  DSA_OK = 0,
  DSA_INVALID_ARGUMENT = -1,  // a size or a pointer that the function's comment excludes
  DSA_UNSUPPORTED_ARCH = -2,  // no code for this device in the library
};

DSA_EXPORT int dsa_abi_version();
DSA_EXPORT const char* dsa_build_info();            // "abi=1;cuda=13.0;arch=sm_90a,sm_100a"
DSA_EXPORT const char* dsa_error_string(int code);  // never null; static storage
