/* The CUDA backend: status checks, the libraries that torch has loaded, and GEMMs. Knows pointers, sizes and
 * streams; knows neither PyTorch nor Python. */
#ifndef TE_CUDA_H
#define TE_CUDA_H

#include <cublasLt.h>
#include <cublas_api.h>
#include <cuda_runtime_api.h>

#include "../kernels/te_kernels.h"
#include "../te_matrix.h"
#include "../te_status.h"

#define TE_CUDA_TRY(ctx, call) \
  do { \
    cudaError_t te_error_ = (call); \
    if (te_error_ != cudaSuccess) \
      return te__fail((ctx)->status, "%s: %s failed: %s (%s)", (ctx)->op, #call, \
                      cudaGetErrorString(te_error_), cudaGetErrorName(te_error_)); \
  } while (0)

/* -------------------------------------------------------------------------------- libraries ---------- */

/* X(name): what is used of cuBLASLt. It is looked up at first use in the copy that torch has loaded. */
#define TE_CUBLASLT_FUNCTIONS(X) \
  X(cublasLtCreate) \
  X(cublasLtGetVersion) \
  X(cublasLtGetStatusName) \
  X(cublasLtMatmul) \
  X(cublasLtMatmulAlgoGetHeuristic) \
  X(cublasLtMatmulDescInit_internal) \
  X(cublasLtMatmulDescSetAttribute) \
  X(cublasLtMatrixLayoutInit_internal) \
  X(cublasLtMatmulPreferenceInit_internal) \
  X(cublasLtMatmulPreferenceSetAttribute)

typedef struct te_cublas {
#define TE_X(name) __typeof__(&name) name;
  TE_CUBLASLT_FUNCTIONS(TE_X)
#undef TE_X
  __typeof__(&cublasGetMathMode) cublasGetMathMode; /* from libcublas */
} te_cublas;

/* The libraries, or an error that says what was looked for and how to get it. Thread-safe. */
int te__cublas(const te_cublas **out, te_status *status);
int te__cublaslt_version(size_t *version, te_status *status);

/* The cuBLASLt handle of the current device; made once, kept for the life of the process. */
int te__cublaslt_handle(const te_context *ctx, const te_cublas *lib, cublasLtHandle_t *out);

/* Whether PyTorch's settings let fp32 products run in TF32. */
int te__allows_tf32(const te_context *ctx, const te_cublas *lib, bool *out);

/* -------------------------------------------------------------------------------------- GEMM ---------- */

/* d = alpha a b + beta d, accumulated in fp32; a is M x K, b is K x N, d is M x N, contiguous and row-major.
 * All sizes positive. a and b share a dtype (of FP8 either may be e4m3 or e5m2), d may differ. */
typedef struct te_gemm {
  te_matrix a, b, d;
  const void *bias; /* added to every row of d: N values of d's dtype, or NULL */
  void *row_sums;   /* receives the M sums of a's rows, in d's dtype, or NULL */
  float beta;
  /* FP8 only: device scalars that the product is multiplied by, and the accumulation of the tensor cores. a's
   * rows and b's columns must be contiguous, 16-byte aligned and of a multiple of 16 bytes, N a multiple
   * of 16. */
  const float *a_scale, *b_scale;
  bool fast;
  const float *alpha_beta; /* two device scalars in place of alpha = 1 and `beta`, or NULL */
} te_gemm;

int te__gemm(const te_context *ctx, const te_gemm *gemm);

/* Sums over rows by a kernel of our own, in m's dtype; zeros where there are no rows. */
int te__cuda_column_sums(const te_context *ctx, te_matrix m, void *sums);

typedef struct te_gemm_cache_info {
  int size, capacity;
  int64_t hits, misses;
} te_gemm_cache_info;

te_gemm_cache_info te__gemm_cache_info(void);
void te__gemm_set_autotune(int candidates);

#endif
