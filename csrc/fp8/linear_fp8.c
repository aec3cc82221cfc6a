/* Linear in per-tensor FP8, forward: what is quantized, in which order, and the GEMM. Also the weight
 * gradient alone. Tensor cores take operands whose inner dimension is contiguous, hence the column copies;
 * each copy lives only as long as a GEMM needs it. */
#include "../te_status.h"
#include "../te_table.h"
#include "linear_fp8.h"

/* ------------------------------------------------------------------------------------- forward ------ */

/* The flags of linear_fp8_fwd, in the order of its row; the last ones are those of linear_fp8_fwd_delayed.
 */
enum { F_SAVE_X, F_SAVE_W, F_POW2_X, F_POW2_W, F_FAST, F_MOST_RECENT, F_BACKWARD_E5M2, F_STAGE };

typedef struct forward_args {
  const te_arg *x, *w, *b, *options, *y, *xq, *wq;
  const te_delayed_args *delayed; /* NULL: current scaling */
} forward_args;

/* What a forward needs besides its results, in one allocation: an allocation costs the host as much as a
 * slot. */
typedef struct forward_memory {
  te_amax_word words[2];
  float scale_inv[2][4]; /* the first of each four: GEMMs want scales aligned to 16 bytes */
  float amaxes[2];
} forward_memory;

#define CODES_AT 256 /* bytes; codes are aligned for tensor cores */

static int64_t codes_size(const te_arg *arg) {
  if (is_quantized(arg)) return 0;
  te_matrix m = te__matrix_of(arg);
  return (m.rows * m.cols + CODES_AT - 1) / CODES_AT * CODES_AT;
}

/* Readies one operand of the forward GEMM, its row copy, and the column copy that backward wants (`keep`).
 * Codes that are there already need at most a transposition; else it appends a cast to `row`. */
static int forward_operand(const te_context *ctx, const te_fp8_backend *be, const te_arg *arg,
                           const te_arg *keep, bool pow2, void *row, float *own_scale_inv, operand *out,
                           te_cast *casts, int *n_casts) {
  te_matrix m = te__matrix_of(arg);
  void *col = keep->present ? keep->buf[0].data : NULL;
  float *scale_inv = keep->present ? keep->buf[1].data : own_scale_inv;
  if (is_quantized(arg)) {
    *out = (operand){m.dtype, m.data, NULL, arg->buf[2].data};
    if (!keep->present) return TE_OK;
    if (!te__is_empty(&m)) TE_TRY(be->transpose(ctx, m.data, col, m.rows, m.cols));
    te_matrix one = {scale_inv, 1, 1, 1, 1, TE_f32};
    return be->fill_rows(ctx, one, arg->buf[2].data);
  }
  *out = (operand){.dtype = TE_e4m3, .row = row, .scale_inv = scale_inv};
  casts[*n_casts] = te__cast_of(m, TE_e4m3, row, col, scale_inv);
  casts[(*n_casts)++].pow2 = pow2;
  return TE_OK;
}

static int forward(const te_context *ctx, const te_fp8_backend *be, const forward_args *a) {
  te_matrix x = te__matrix_of(a->x), y = te__matrix_of(a->y);
  const void *bias = a->b->present ? a->b->buf->data : NULL;
  operand xo, wo;
  te_cast casts[TE_CASTS];
  int n = 0, n_x;
  void *memory;
  TE_REQUIRE(ctx->status, !bias || a->b->buf->dtype == y.dtype,
             "%s: b does not have the dtype of y, which `dtype` names", ctx->op);
  int64_t x_size = codes_size(a->x);
  TE_TRY(make_workspace(ctx, CODES_AT + x_size + codes_size(a->w), &memory));
  forward_memory *small = memory;
  char *codes = (char *)memory + CODES_AT;
  TE_TRY(forward_operand(ctx, be, a->x, a->xq, te_flag(a->options, F_POW2_X), codes, small->scale_inv[0], &xo,
                         casts, &n));
  n_x = n;
  TE_TRY(forward_operand(ctx, be, a->w, a->wq, te_flag(a->options, F_POW2_W), codes + x_size,
                         small->scale_inv[1], &wo, casts, &n));
  if (a->delayed) {
    bool stages = te_flag(a->options, F_STAGE);
    TE_TRY(be->roll(ctx, a->delayed, small->words, stages ? 2 : 0));
    for (int i = 0; i < n; i++)
      te__cast_delayed(&casts[i], a->delayed->state, i < n_x ? TE_STATE_X : TE_STATE_W,
                       stages ? &small->words[i] : NULL);
  } else {
    TE_TRY(te__find_amaxes(ctx, be, casts, n, small->amaxes));
  }
  if (n > 0) TE_TRY(be->cast(ctx, casts, n));
  if (te__is_empty(&y)) return TE_OK;
  if (x.cols == 0) return be->fill_rows(ctx, y, bias); /* an empty sum, so y = b */
  return be->gemm(ctx, &(te_fp8_gemm){.m = y.rows,
                                      .n = y.cols,
                                      .k = x.cols,
                                      .a = xo.row,
                                      .b = wo.row,
                                      .a_dtype = xo.dtype,
                                      .b_dtype = wo.dtype,
                                      .a_scale_inv = xo.scale_inv,
                                      .b_scale_inv = wo.scale_inv,
                                      .d = y,
                                      .bias = bias,
                                      .fast = te_flag(a->options, F_FAST)});
}

static int linear_fp8_fwd(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_linear_fp8_fwd *a = (const te_linear_fp8_fwd *)args;
  return forward(ctx, be, &(forward_args){&a->x, &a->w, &a->b, &a->options, &a->y, &a->xq, &a->wq, NULL});
}

static int linear_fp8_fwd_delayed(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_linear_fp8_fwd_delayed *a = (const te_linear_fp8_fwd_delayed *)args;
  te_delayed_args d;
  TE_TRY(te__delayed_args(ctx, &a->state, &a->region, &a->new_scale, &a->history_len, &a->margin,
                          te_flag(&a->options, F_MOST_RECENT), te_flag(&a->options, F_BACKWARD_E5M2), &d));
  d.seen = a->seen.present ? a->seen.buf->data : NULL;
  return forward(ctx, be, &(forward_args){&a->x, &a->w, &a->b, &a->options, &a->y, &a->xq, &a->wq, &d});
}

/* ---------------------------------------------------------------------- the weight gradient alone ------ */

int te__fp8_weight_gradient(const te_context *ctx, const te_fp8_backend *be, const operand *dy,
                            const operand *x, int64_t m, te_matrix dw, bool accumulate, bool fast) {
  if (te__is_empty(&dw)) return TE_OK;
  if (m == 0) return accumulate ? TE_OK : be->fill_rows(ctx, dw, NULL);
  return be->gemm(ctx, &(te_fp8_gemm){.m = dw.rows,
                                      .n = dw.cols,
                                      .k = m,
                                      .a = dy->col,
                                      .b = x->col,
                                      .a_dtype = dy->dtype,
                                      .b_dtype = x->dtype,
                                      .a_scale_inv = dy->scale_inv,
                                      .b_scale_inv = x->scale_inv,
                                      .d = dw,
                                      .beta = accumulate ? 1.0f : 0.0f,
                                      .fast = fast});
}

static int linear_fp8_wgrad(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_linear_fp8_wgrad *a = (const te_linear_fp8_wgrad *)args;
  operand dy = saved(&a->dy), x = saved(&a->x);
  return te__fp8_weight_gradient(ctx, be, &dy, &x, a->x.buf[0].sizes[1], te__matrix_of(&a->dw), false,
                                 a->fast.i != 0);
}

static int linear_fp8_wgrad_into(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_linear_fp8_wgrad_into *a = (const te_linear_fp8_wgrad_into *)args;
  operand dy = saved(&a->dy), x = saved(&a->x);
  return te__fp8_weight_gradient(ctx, be, &dy, &x, a->x.buf[0].sizes[1], te__matrix_of(&a->main_grad),
                                 a->accumulate.i != 0, a->fast.i != 0);
}

TE_FP8_BODIES(linear_fp8_fwd)
TE_FP8_BODIES(linear_fp8_fwd_delayed)
TE_FP8_BODIES(linear_fp8_wgrad)
TE_FP8_BODIES(linear_fp8_wgrad_into)
