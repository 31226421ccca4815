// Where things lie in the shared memory of dsa_litedsa_attend: plain index arithmetic, which the host can run too.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define DSA_HOST_DEVICE __host__ __device__
#else
#define DSA_HOST_DEVICE
#endif

namespace dsa {
namespace litedsa {

constexpr int kRows = 64;  // rows of the tile: queries of the group times heads
constexpr int kKeys = 64;  // union entries of one step
constexpr int kBlockBytes = 64 * 128;
constexpr int kValueDims = 512;
constexpr int kMaxGroup = 8;

// Q, KV and P are kept in blocks of 64 rows by 64 bf16 elements: row r at r * 128 bytes, its 16-byte piece c at position c ^ (r % 8).
// That is the 128-byte swizzle which a wgmma descriptor of type 1 undoes, provided that a block starts at a multiple of 1024 bytes.
DSA_HOST_DEVICE constexpr int block_offset(int row, int piece) { return row * 128 + ((piece ^ (row % 8)) * 16); }

// A matrix of 64 rows and 64 * n elements is n blocks, one after the other.
DSA_HOST_DEVICE constexpr int matrix_offset(int row, int block, int piece) { return block * kBlockBytes + block_offset(row, piece); }

// Shared-memory matrix descriptor of wgmma: address, leading and stride offset in units of 16 bytes, 128-byte swizzle.
//   K-major operand (Q, K, P: the summed index runs along a row): stride is from 8 rows to the next 8; leading is not used.
//   MN-major operand (V: the summed index counts rows): leading is from 64 columns to the next 64, that is from block to block; stride is
//   from 8 rows to the next 8.
DSA_HOST_DEVICE constexpr uint64_t descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | 1ull << 62;
}
DSA_HOST_DEVICE constexpr uint64_t k_major(uint32_t address) { return descriptor(address, 16, 1024); }
DSA_HOST_DEVICE constexpr uint64_t mn_major(uint32_t address) { return descriptor(address, kBlockBytes, 1024); }

// Steps of a descriptor's address field: the next 16 elements along a row (inside a swizzled row), the next block, the next 16 rows.
constexpr uint64_t kNextElements = 32 >> 4, kNextBlock = kBlockBytes >> 4, kNextRows = 16 * 128 >> 4;

// Bits [from, to) of a word for 64 entries, where both may lie outside.
DSA_HOST_DEVICE constexpr uint64_t bits_between(int from, int to) {
  from = from < 0 ? 0 : from;
  to = to > 64 ? 64 : to;
  if (from >= to) return 0;
  const uint64_t below = to == 64 ? ~0ull : (1ull << to) - 1;
  return below & ~((1ull << from) - 1);
}

}  // namespace litedsa
}  // namespace dsa
