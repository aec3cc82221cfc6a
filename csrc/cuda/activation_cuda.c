/* Activations on CUDA. */
#include "../kernels/te_activation_kernels.h"
#include "te_cuda.h"

int te__activation_cuda(const te_context *ctx, const te_activation_pass *pass) {
  TE_CUDA_TRY(ctx, te__activation(pass, ctx->stream));
  return TE_OK;
}
