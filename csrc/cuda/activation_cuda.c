/* Activations on CUDA. */
#include "../kernels/te_activation_kernels.h"
#include "te_cuda.h"

int te__activation_cuda(const te_context *ctx, const te_activation_pass *pass) {
  const te_matrix *out = &pass->out;
  void *partial = NULL;
  int64_t n = 0;
  if (te__is_empty(out)) return pass->db ? te__cuda_column_sums(ctx, *out, pass->db) : TE_OK;
  if (pass->db) {
    n = te__activation_partials(pass);
    TE_TRY(ctx->services->workspace(ctx, (size_t)(n * out->cols) * sizeof(float), &partial));
  }
  TE_CUDA_TRY(ctx, te__activation(pass, partial, ctx->stream));
  if (pass->db)
    TE_CUDA_TRY(ctx, te__finish_column_sums(partial, n, out->cols, pass->db, out->dtype, ctx->stream));
  return TE_OK;
}
