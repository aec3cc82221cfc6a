/* LayerNorm and RMSNorm as one thing: the latter has no mean and no beta. */
#ifndef TE_NORM_H
#define TE_NORM_H

#include "te_matrix.h"

typedef struct te_norm_vector { /* gamma or beta */
  const void *data;             /* NULL: none */
  te_dtype dtype;
} te_norm_vector;

typedef struct te_norm_fwd {
  te_matrix x; /* contiguous */
  te_norm_vector gamma, beta;
  float eps;
  bool subtracts_mean, zero_centered;
  void *y;
  float *mean, *rstd; /* NULL: not wanted */
} te_norm_fwd;

typedef struct te_norm_bwd {
  te_matrix dy, x; /* contiguous */
  te_norm_vector gamma;
  const float *mean, *rstd; /* mean is NULL where none was subtracted */
  bool zero_centered;
  void *dx, *dgamma, *dbeta; /* NULL: not wanted */
} te_norm_bwd;

int te__norm_fwd_cpu(const te_context *ctx, const te_norm_fwd *norm);
int te__norm_bwd_cpu(const te_context *ctx, const te_norm_bwd *norm);
int te__norm_fwd_cuda(const te_context *ctx, const te_norm_fwd *norm);
int te__norm_bwd_cuda(const te_context *ctx, const te_norm_bwd *norm);

#endif
