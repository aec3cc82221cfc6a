/* What the operators of an FP8 linear layer share. */
#ifndef TE_LINEAR_FP8_H
#define TE_LINEAR_FP8_H

#include "fp8.h"

/* A tensor as GEMMs take it: codes [rows, cols], the transposed codes, or both. */
typedef struct operand {
  te_dtype dtype;
  void *row, *col;
  const float *scale_inv;
} operand;

static inline bool is_quantized(const te_arg *arg) {
  return arg->buf[0].dtype == TE_e4m3 || arg->buf[0].dtype == TE_e5m2;
}

static inline operand saved(const te_arg *arg) { /* a slot that has a column copy alone */
  return (operand){arg->buf[0].dtype, NULL, arg->buf[0].data, arg->buf[1].data};
}

static inline int make_workspace(const te_context *ctx, int64_t bytes, void **out) {
  return ctx->services->workspace(ctx, (size_t)bytes, out);
}

/* dw = dy^T x from the column copies of `m` tokens; an empty sum is zero. */
int te__fp8_weight_gradient(const te_context *ctx, const te_fp8_backend *be, const operand *dy,
                            const operand *x, int64_t m, te_matrix dw, bool accumulate, bool fast);

#endif
