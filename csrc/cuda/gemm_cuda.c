/* GEMMs through cuBLASLt. Descriptors live on the stack of each call, so calls share nothing but the plan
 * cache; the heuristic, which costs tens of microseconds, runs once for each problem. */
#include "plan_cuda.h"

#include <string.h>

#define MAX_CANDIDATES 16
#define TIMING_ROUNDS 5

static int autotune_candidates = 1;

void te__gemm_set_autotune(int candidates) {
  __atomic_store_n(&autotune_candidates, candidates < MAX_CANDIDATES ? candidates : MAX_CANDIDATES,
                   __ATOMIC_RELAXED);
}

/* A GEMM in cuBLASLt's terms. It is column-major, and a row-major M x N matrix is a column-major N x M
 * one, so it computes d^T = b^T a^T: our b is its A, our a its B. */
typedef struct problem {
  const te_gemm *gemm;
  te_plan_key key;
  cublasLtMatmulDescOpaque_t desc;
  cublasLtMatrixLayoutOpaque_t a, b, d;
  const void *bias; /* bias or row sums */
} problem;

#define LT_TRY(ctx, lib, call) \
  do { \
    cublasStatus_t te_status_ = (lib)->call; \
    if (te_status_ != CUBLAS_STATUS_SUCCESS) \
      return te__fail((ctx)->status, "%s: %s failed: %s", (ctx)->op, #call, \
                      (lib)->cublasLtGetStatusName(te_status_)); \
  } while (0)

static cudaDataType_t data_type(te_dtype dtype) {
  switch (dtype) {
  case TE_bf16:
    return CUDA_R_16BF;
  case TE_f16:
    return CUDA_R_16F;
  case TE_e4m3:
    return CUDA_R_8F_E4M3;
  case TE_e5m2:
    return CUDA_R_8F_E5M2;
  default:
    return CUDA_R_32F;
  }
}

static uint8_t alignment(const void *pointer) {
  uintptr_t bits = (uintptr_t)pointer | 256; /* more than 256 bytes helps no kernel */
  return (uint8_t)__builtin_ctzll(bits);
}

/* ------------------------------------------------------------------------------- describing ---------- */

static int describe(const te_context *ctx, const te_cublas *lib, const te_gemm *g, problem *p) {
  bool tf32 = false;
  /* A vector-shaped operand can be read either way; row-major is the better supported one. */
  bool a_rows = g->a.col_stride == 1, b_rows = g->b.col_stride == 1;
  if (g->a.dtype == TE_f32) TE_TRY(te__allows_tf32(ctx, lib, &tf32));
  memset(&p->key, 0, sizeof p->key);
  p->gemm = g;
  p->bias = g->bias ? g->bias : g->row_sums;
  te_plan_key *key = &p->key;
  key->m = g->d.cols;
  key->n = g->d.rows;
  key->k = g->a.cols;
  key->lda = b_rows ? g->b.row_stride : g->b.col_stride;
  key->ldb = a_rows ? g->a.row_stride : g->a.col_stride;
  key->ldd = g->d.row_stride;
  key->device = ctx->device_index;
  key->epilogue = g->bias       ? CUBLASLT_EPILOGUE_BIAS
                  : g->row_sums ? CUBLASLT_EPILOGUE_BGRADB
                                : CUBLASLT_EPILOGUE_DEFAULT;
  key->type_a = (uint8_t)data_type(g->b.dtype);
  key->type_b = (uint8_t)data_type(g->a.dtype);
  key->type_out = (uint8_t)data_type(g->d.dtype);
  key->trans_a = !b_rows;
  key->trans_b = !a_rows;
  key->tf32 = tf32;
  key->accumulates = g->beta != 0;
  key->fast = g->fast;
  key->device_alpha = g->alpha_beta != NULL;
  key->align[0] = alignment(g->b.data);
  key->align[1] = alignment(g->a.data);
  key->align[2] = alignment(g->d.data);
  key->align[3] = p->bias ? alignment(p->bias) : 8;
  return TE_OK;
}

#define SET(ctx, lib, object, attribute, value) \
  LT_TRY(ctx, lib, cublasLtMatmulDescSetAttribute(object, attribute, &(value), sizeof(value)))

static int make_descriptors(const te_context *ctx, const te_cublas *lib, problem *p) {
  const te_plan_key *k = &p->key;
  cublasComputeType_t compute = k->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  LT_TRY(ctx, lib, cublasLtMatmulDescInit_internal(&p->desc, sizeof p->desc, compute, CUDA_R_32F));
  cublasOperation_t op_a = k->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                    op_b = k->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  SET(ctx, lib, &p->desc, CUBLASLT_MATMUL_DESC_TRANSA, op_a);
  SET(ctx, lib, &p->desc, CUBLASLT_MATMUL_DESC_TRANSB, op_b);
  if (p->gemm->a_scale) {
    int8_t fast = (int8_t)k->fast;
    SET(ctx, lib, &p->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p->gemm->b_scale);
    SET(ctx, lib, &p->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p->gemm->a_scale);
    SET(ctx, lib, &p->desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast);
  }
  if (k->device_alpha) {
    int32_t mode = CUBLASLT_POINTER_MODE_DEVICE;
    SET(ctx, lib, &p->desc, CUBLASLT_MATMUL_DESC_POINTER_MODE, mode);
  }
  if (p->bias) {
    cublasLtEpilogue_t epilogue = (cublasLtEpilogue_t)k->epilogue;
    cudaDataType_t type = (cudaDataType_t)k->type_out;
    SET(ctx, lib, &p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    SET(ctx, lib, &p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p->bias);
    SET(ctx, lib, &p->desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
  }
  uint64_t am = (uint64_t)(k->trans_a ? k->k : k->m), an = (uint64_t)(k->trans_a ? k->m : k->k);
  uint64_t bm = (uint64_t)(k->trans_b ? k->n : k->k), bn = (uint64_t)(k->trans_b ? k->k : k->n);
  cudaDataType_t type_a = (cudaDataType_t)k->type_a, type_b = (cudaDataType_t)k->type_b,
                 out = (cudaDataType_t)k->type_out;
  LT_TRY(ctx, lib, cublasLtMatrixLayoutInit_internal(&p->a, sizeof p->a, type_a, am, an, k->lda));
  LT_TRY(ctx, lib, cublasLtMatrixLayoutInit_internal(&p->b, sizeof p->b, type_b, bm, bn, k->ldb));
  LT_TRY(ctx, lib,
         cublasLtMatrixLayoutInit_internal(&p->d, sizeof p->d, out, (uint64_t)k->m, (uint64_t)k->n, k->ldd));
  return TE_OK;
}

/* --------------------------------------------------------------------------------- planning ---------- */

static int launch(const te_context *ctx, const te_cublas *lib, cublasLtHandle_t handle, problem *p, void *d,
                  float beta, const te_plan *plan, void *workspace) {
  const te_gemm *g = p->gemm;
  float one = 1.0f;
  const void *alpha = g->alpha_beta ? g->alpha_beta : &one,
             *beta_at = g->alpha_beta ? g->alpha_beta + 1 : &beta;
  cublasStatus_t status =
      lib->cublasLtMatmul(handle, &p->desc, alpha, g->b.data, &p->a, g->a.data, &p->b, beta_at, d, &p->d, d,
                          &p->d, &plan->algo, workspace, plan->workspace, (cudaStream_t)ctx->stream);
  if (status == CUBLAS_STATUS_SUCCESS) return TE_OK;
  /* cuBLASLt does not say why; if earlier work broke the context, the stream still does. */
  cudaError_t error = cudaStreamQuery((cudaStream_t)ctx->stream);
  bool broken = error != cudaSuccess && error != cudaErrorNotReady;
  return te__fail(ctx->status, "%s: cublasLtMatmul failed: %s%s%s (M = %lld, N = %lld, K = %lld)", ctx->op,
                  lib->cublasLtGetStatusName(status), broken ? ", CUDA: " : "",
                  broken ? cudaGetErrorString(error) : "", (long long)g->d.rows, (long long)g->d.cols,
                  (long long)g->a.cols);
}

/* Times the candidates by turns (clocks drift, so one after the other would favour the first) and returns
 * the index of the fastest. */
static int fastest(const te_context *ctx, const te_cublas *lib, cublasLtHandle_t handle, problem *p,
                   const te_plan *plans, int n, int *best) {
  float times[MAX_CANDIDATES], elapsed;
  size_t most = 0, d_bytes = (size_t)(p->key.m * p->key.n) * (p->key.type_out == CUDA_R_32F ? 4 : 2);
  void *workspace, *d = p->gemm->d.data;
  cudaEvent_t start = NULL, stop = NULL;
  for (int i = 0; i < n; i++) {
    times[i] = 1e30f;
    if (plans[i].workspace > most) most = plans[i].workspace;
  }
  TE_TRY(ctx->services->workspace(ctx, most, &workspace));
  if (p->key.accumulates)
    TE_TRY(ctx->services->workspace(ctx, d_bytes, &d)); /* d is input too: leave it alone */
  TE_CUDA_TRY(ctx, cudaEventCreate(&start));
  cudaError_t error = cudaEventCreate(&stop);
  int rc = TE_OK;
  for (int round = 0; round < TIMING_ROUNDS && rc == TE_OK && error == cudaSuccess; round++)
    for (int i = 0; i < n && rc == TE_OK && error == cudaSuccess; i++) {
      error = cudaEventRecord(start, ctx->stream);
      if (error == cudaSuccess) rc = launch(ctx, lib, handle, p, d, 0.0f, &plans[i], workspace);
      if (error == cudaSuccess) error = cudaEventRecord(stop, ctx->stream);
      if (error == cudaSuccess) error = cudaEventSynchronize(stop);
      if (error == cudaSuccess) error = cudaEventElapsedTime(&elapsed, start, stop);
      if (error == cudaSuccess && round > 0 && elapsed < times[i]) times[i] = elapsed; /* round 0 warms up */
    }
  cudaEventDestroy(start);
  if (stop) cudaEventDestroy(stop);
  TE_TRY(rc);
  TE_CUDA_TRY(ctx, error);
  *best = 0;
  for (int i = 1; i < n; i++)
    if (times[i] < times[*best]) *best = i;
  return TE_OK;
}

#define PREFER(ctx, lib, object, attribute, value) \
  LT_TRY(ctx, lib, cublasLtMatmulPreferenceSetAttribute(object, attribute, &(value), sizeof(value)))

static int make_plan(const te_context *ctx, const te_cublas *lib, cublasLtHandle_t handle, problem *p,
                     te_plan *plan, bool *keep) {
  static const uint64_t workspace_limit = 32u << 20;
  /* No partial sums in the output's dtype (the in-place scheme makes them too): accumulation is fp32 to the
   * end. */
  static const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  cublasLtMatmulPreferenceOpaque_t preference;
  cublasLtMatmulHeuristicResult_t results[MAX_CANDIDATES];
  te_plan plans[MAX_CANDIDATES];
  const uint8_t *align = p->key.align;
  uint32_t bytes[3] = {1u << align[0], 1u << align[1], 1u << align[2]};
  int n = 0, found = 0, best = 0, wanted = __atomic_load_n(&autotune_candidates, __ATOMIC_RELAXED);
  enum cudaStreamCaptureStatus capture;
  LT_TRY(ctx, lib, cublasLtMatmulPreferenceInit_internal(&preference, sizeof preference));
  PREFER(ctx, lib, &preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_limit);
  PREFER(ctx, lib, &preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  PREFER(ctx, lib, &preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, bytes[0]);
  PREFER(ctx, lib, &preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, bytes[1]);
  PREFER(ctx, lib, &preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, bytes[2]);
  PREFER(ctx, lib, &preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, bytes[2]);
  cublasStatus_t status = lib->cublasLtMatmulAlgoGetHeuristic(handle, &p->desc, &p->a, &p->b, &p->d, &p->d,
                                                              &preference, wanted, results, &found);
  *keep = true;
  *plan = (te_plan){.supported = false};
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return TE_OK;
  TE_REQUIRE(ctx->status, status == CUBLAS_STATUS_SUCCESS, "%s: cublasLtMatmulAlgoGetHeuristic failed: %s",
             ctx->op, lib->cublasLtGetStatusName(status));
  for (int i = 0; i < found; i++)
    if (results[i].state == CUBLAS_STATUS_SUCCESS)
      plans[n++] = (te_plan){results[i].algo, results[i].workspaceSize, true};
  if (n == 0) return TE_OK;
  if (n > 1) {
    TE_CUDA_TRY(ctx, cudaStreamIsCapturing(ctx->stream, &capture));
    if (capture == cudaStreamCaptureStatusNone)
      TE_TRY(fastest(ctx, lib, handle, p, plans, n, &best));
    else
      *keep = false; /* timing has to wait for a call outside of the capture */
  }
  *plan = plans[best];
  return TE_OK;
}

static int prepare(const te_context *ctx, const te_gemm *g, const te_cublas **lib, cublasLtHandle_t *handle,
                   problem *p, te_plan *plan) {
  bool keep;
  TE_TRY(te__cublas(lib, ctx->status));
  TE_TRY(te__cublaslt_handle(ctx, *lib, handle));
  TE_TRY(describe(ctx, *lib, g, p));
  TE_TRY(make_descriptors(ctx, *lib, p));
  if (te__plan_find(&p->key, plan)) return TE_OK;
  TE_TRY(make_plan(ctx, *lib, *handle, p, plan, &keep));
  if (keep) te__plan_store(&p->key, plan);
  return TE_OK;
}

/* The sums of a's rows by a kernel of their own: sums of columns of a^T. */
static int separate_row_sums(const te_context *ctx, const te_gemm *g) {
  te_matrix transposed = te__transposed(g->a);
  void *partial;
  TE_TRY(
      ctx->services->workspace(ctx, te__column_sums_workspace(transposed.rows, transposed.cols), &partial));
  TE_CUDA_TRY(ctx, te__column_sums(&transposed, g->row_sums, partial, ctx->stream));
  return TE_OK;
}

/* cuBLASLt's kernels with this epilogue run at a quarter of the speed where rows are not 16-byte aligned. */
static bool sums_rows_fast(const te_gemm *g) {
  int64_t bytes = g->a.dtype == TE_f32 ? 4 : 2;
  int64_t a = g->a.col_stride == 1 ? g->a.row_stride : g->a.col_stride;
  int64_t b = g->b.col_stride == 1 ? g->b.row_stride : g->b.col_stride;
  uintptr_t pointers = (uintptr_t)g->a.data | (uintptr_t)g->b.data;
  return (a * bytes | b * bytes | g->d.row_stride * bytes) % 16 == 0 && pointers % 16 == 0;
}

int te__gemm(const te_context *ctx, const te_gemm *gemm) {
  te_gemm g = *gemm;
  const te_cublas *lib;
  cublasLtHandle_t handle;
  problem p;
  te_plan plan;
  void *workspace;
  if (g.row_sums && !sums_rows_fast(&g)) {
    TE_TRY(separate_row_sums(ctx, &g));
    g.row_sums = NULL;
  }
  TE_TRY(prepare(ctx, &g, &lib, &handle, &p, &plan));
  if (!plan.supported && g.row_sums) { /* not every dtype has this epilogue */
    TE_TRY(separate_row_sums(ctx, &g));
    g.row_sums = NULL;
    TE_TRY(prepare(ctx, &g, &lib, &handle, &p, &plan));
  }
  TE_REQUIRE(ctx->status, plan.supported, "%s: cuBLASLt has no algorithm for M = %lld, N = %lld, K = %lld",
             ctx->op, (long long)g.d.rows, (long long)g.d.cols, (long long)g.a.cols);
  TE_TRY(ctx->services->workspace(ctx, plan.workspace, &workspace));
  TE_TRY(launch(ctx, lib, handle, &p, g.d.data, g.beta, &plan, workspace));
  ctx->services->release(ctx, workspace); /* a body may multiply many times */
  return TE_OK;
}
