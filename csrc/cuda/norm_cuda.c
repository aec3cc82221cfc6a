/* Norms on CUDA: empty tensors, partial sums, launches. */
#include "../te_norm.h"

#include "../kernels/te_norm_kernels.h"
#include "../te_spec.h"
#include "te_cuda.h"

int te__norm_fwd_cuda(const te_context *ctx, const te_norm_fwd *norm) {
  if (norm->x.rows == 0) return TE_OK;
  TE_CUDA_TRY(ctx, te__norm_fwd(norm, ctx->stream));
  return TE_OK;
}

static int zeros(const te_context *ctx, void *data, int64_t n, te_dtype dtype) {
  if (data && n > 0)
    TE_CUDA_TRY(ctx, cudaMemsetAsync(data, 0, (size_t)n * te__dtype_size(dtype), ctx->stream));
  return TE_OK;
}

int te__norm_bwd_cuda(const te_context *ctx, const te_norm_bwd *n) {
  int64_t cols = n->x.cols;
  int multiprocessors;
  void *dgamma = NULL, *dbeta = NULL;
  if (cols == 0) return TE_OK;
  if (n->x.rows == 0) {
    TE_TRY(zeros(ctx, n->dgamma, cols, n->gamma.dtype));
    return zeros(ctx, n->dbeta, cols, n->gamma.dtype);
  }
  TE_CUDA_TRY(ctx,
              cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ctx->device_index));
  int64_t partials = te__norm_bwd_partials(n, multiprocessors);
  size_t bytes = (size_t)(partials * cols) * sizeof(float);
  if (n->dgamma) TE_TRY(ctx->services->workspace(ctx, bytes, &dgamma));
  if (n->dbeta) TE_TRY(ctx->services->workspace(ctx, bytes, &dbeta));
  TE_CUDA_TRY(ctx, te__norm_bwd(n, partials, dgamma, dbeta, ctx->stream));
  if (dgamma)
    TE_CUDA_TRY(ctx, te__finish_column_sums(dgamma, partials, cols, n->dgamma, n->gamma.dtype, ctx->stream));
  if (dbeta)
    TE_CUDA_TRY(ctx, te__finish_column_sums(dbeta, partials, cols, n->dbeta, n->gamma.dtype, ctx->stream));
  return TE_OK;
}
