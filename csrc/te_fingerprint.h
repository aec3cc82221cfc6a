/* A 64-bit hash of a tensor's bytes, in parts that can be added in any order: eight bytes at a time, each
 * mixed with its index and a salt. Mixing is one-to-one for each index, so a change of eight bytes always
 * shows; of more, but for one chance in 2^64. */
#ifndef TE_FINGERPRINT_H
#define TE_FINGERPRINT_H

#include "te_format.h"

TE_HOST_DEVICE uint64_t te_fingerprint_mix(uint64_t word, uint64_t index, uint64_t salt) {
  uint64_t x = word ^ ((index + 1) * 0x9e3779b97f4a7c15u + salt * 0xc2b2ae3d27d4eb4fu);
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
  return x ^ x >> 32;
}

/* Zero means that nothing is held. */
TE_HOST_DEVICE uint64_t te_fingerprint_end(uint64_t sum) { return sum == 0 ? 1 : sum; }

#endif
