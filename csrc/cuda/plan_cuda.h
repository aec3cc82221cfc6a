/* A bounded cache of GEMM plans: what cuBLASLt's heuristic (or a timing) chose for a problem. */
#ifndef TE_PLAN_CUDA_H
#define TE_PLAN_CUDA_H

#include "te_cuda.h"

/* Everything the choice of an algorithm depends on. Zero it before filling it in: keys are compared as
 * bytes. Names are cuBLASLt's column-major ones. */
typedef struct te_plan_key {
  int64_t m, n, k, lda, ldb, ldd;
  int32_t device, epilogue;
  uint8_t type_a, type_b, type_out, trans_a, trans_b, tf32, accumulates, fast;
  uint8_t align[4]; /* log2 of the byte alignment of a, b, d and the bias or row sums */
  uint8_t device_alpha, unused[3];
} te_plan_key;

typedef struct te_plan {
  cublasLtMatmulAlgo_t algo;
  size_t workspace;
  bool supported; /* false: cuBLASLt has no algorithm for this problem */
} te_plan;

/* Both are thread-safe. */
bool te__plan_find(const te_plan_key *key, te_plan *out);
void te__plan_store(const te_plan_key *key, const te_plan *plan);

#endif
