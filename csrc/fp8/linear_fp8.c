/* Linear in per-tensor FP8: what is quantized, in which order, and which GEMMs run. Tensor cores take
 * operands whose inner dimension is contiguous, hence the column copies; each copy lives only as long as a
 * GEMM needs it. */
#include "../te_status.h"
#include "../te_table.h"
#include "fp8.h"

/* A tensor as GEMMs take it: codes [rows, cols], the transposed codes, or both. */
typedef struct operand {
  te_dtype dtype;
  void *row, *col;
  const float *scale_inv;
} operand;

static bool is_quantized(const te_arg *arg) {
  return arg->buf[0].dtype == TE_e4m3 || arg->buf[0].dtype == TE_e5m2;
}

static operand saved(const te_arg *arg) { /* a slot that has a column copy alone */
  return (operand){arg->buf[0].dtype, NULL, arg->buf[0].data, arg->buf[1].data};
}

static int make_workspace(const te_context *ctx, int64_t bytes, void **out) {
  return ctx->services->workspace(ctx, (size_t)bytes, out);
}

static void drop(const te_context *ctx, void **memory) {
  ctx->services->release(ctx, *memory);
  *memory = NULL;
}

/* ------------------------------------------------------------------------------------- forward ------ */

/* The flags of linear_fp8_fwd, in the order of its row; the last three are those of linear_fp8_fwd_delayed.
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
    TE_TRY(
        be->roll(ctx, a->delayed->state, a->delayed->region, &a->delayed->how, small->words, stages ? 2 : 0));
    for (int i = 0; i < n; i++)
      te__cast_delayed(&casts[i], a->delayed->state, i < n_x ? TE_STATE_X : TE_STATE_W,
                       stages ? &small->words[i] : NULL);
    if (n > 0) TE_TRY(be->cast(ctx, casts, n));
  } else if (n > 0) {
    TE_TRY(te__cast_current(ctx, be, casts, n, small->words));
  }
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
  return forward(ctx, be, &(forward_args){&a->x, &a->w, &a->b, &a->options, &a->y, &a->xq, &a->wq, &d});
}

/* ------------------------------------------------------------------------------------ backward ------ */

/* The flags of linear_fp8_bwd, in the order of its row, then those of its two variants. */
enum {
  B_NEED_DX,
  B_NEED_DW,
  B_NEED_DB,
  B_KEEP_DY,
  B_E5M2,
  B_POW2,
  B_FAST_DGRAD,
  B_FAST_WGRAD,
  B_MOST_RECENT,
  B_STAGE,
  B_ACCUMULATE
};

typedef struct backward_args {
  const te_arg *dy, *x, *w, *options, *dx, *dw, *db, *dyq;
  const te_delayed_args *delayed; /* NULL: current scaling */
  bool accumulate;                /* into dw */
} backward_args;

static bool is_there(const te_arg *arg) { return arg && arg->present; }

/* Casts dy, with the bias gradient on the way where the backend can. */
static int cast_gradient(const te_context *ctx, const te_fp8_backend *be, const backward_args *a,
                         te_matrix dy, te_cast *cast, te_amax_word *word) {
  void *partial = NULL;
  int64_t tiles = dy.col_stride == 1 && is_there(a->db) && !te__is_empty(&dy) ? be->sum_tiles(cast) : 0;
  cast->pow2 = te_flag(a->options, B_POW2);
  if (tiles > 0) {
    TE_TRY(make_workspace(ctx, tiles * dy.cols * (int64_t)sizeof(float), &partial));
    cast->col_sums = partial;
  }
  if (a->delayed) {
    bool stages = te_flag(a->options, B_STAGE);
    TE_TRY(be->roll(ctx, a->delayed->state, a->delayed->region, &a->delayed->how, word, stages));
    te__cast_delayed(cast, a->delayed->state, TE_STATE_DY, stages ? word : NULL);
    TE_TRY(be->cast(ctx, cast, 1));
  } else {
    TE_TRY(te__cast_current(ctx, be, cast, 1, word));
  }
  if (tiles > 0) TE_TRY(be->finish_sums(ctx, partial, tiles, dy.cols, a->db->buf->data, a->db->buf->dtype));
  if (partial) drop(ctx, &partial);
  return is_there(a->db) && tiles == 0 ? be->column_sums(ctx, dy, a->db->buf->data) : TE_OK;
}

static int bias_gradient_of_codes(const te_context *ctx, const te_fp8_backend *be, const te_arg *db,
                                  te_matrix codes, const float *scale_inv) {
  void *values = NULL;
  te_dtype dtype = db->buf->dtype;
  TE_TRY(make_workspace(ctx, codes.rows * codes.cols * (dtype == TE_f32 ? 4 : 2), &values));
  te_matrix decoded = {values, codes.rows, codes.cols, codes.cols, 1, dtype};
  if (!te__is_empty(&codes)) TE_TRY(be->decode(ctx, codes, scale_inv, values, dtype));
  TE_TRY(be->column_sums(ctx, decoded, db->buf->data));
  drop(ctx, &values);
  return TE_OK;
}

/* dw = dy^T x from the column copies; an empty sum is zero. */
static int weight_gradient(const te_context *ctx, const te_fp8_backend *be, const operand *dy,
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

static int input_gradient(const te_context *ctx, const te_fp8_backend *be, const backward_args *a,
                          const operand *dy, te_matrix dx, int64_t n) {
  operand w = saved(a->w);
  if (te__is_empty(&dx)) return TE_OK;
  if (n == 0) return be->fill_rows(ctx, dx, NULL);
  return be->gemm(ctx, &(te_fp8_gemm){.m = dx.rows,
                                      .n = dx.cols,
                                      .k = n,
                                      .a = dy->row,
                                      .b = w.col,
                                      .a_dtype = dy->dtype,
                                      .b_dtype = w.dtype,
                                      .a_scale_inv = dy->scale_inv,
                                      .b_scale_inv = w.scale_inv,
                                      .d = dx,
                                      .fast = te_flag(a->options, B_FAST_DGRAD)});
}

/* Memory for the codes of dy that only dgrad reads: dw's, where they fit, which wgrad overwrites afterwards.
 */
static void *borrowed(const backward_args *a, te_matrix dy) {
  if (!is_there(a->dw) || a->accumulate) return NULL;
  te_matrix dw = te__matrix_of(a->dw);
  int64_t bytes = dw.rows * dw.cols * (dw.dtype == TE_f32 ? 4 : 2);
  return dy.rows * dy.cols <= bytes && (uintptr_t)dw.data % 16 == 0 ? dw.data : NULL;
}

static int backward(const te_context *ctx, const te_fp8_backend *be, const backward_args *a) {
  te_matrix dy = te__matrix_of(a->dy);
  bool keeps = is_there(a->dyq), need_col = is_there(a->dw) || keeps, need_row = is_there(a->dx),
       was_cast = false;
  operand g = {.dtype = te_flag(a->options, B_E5M2) ? TE_e5m2 : TE_e4m3};
  void *row = NULL, *col = NULL, *scale_inv = NULL;
  TE_REQUIRE(ctx->status, is_quantized(a->dy) || !is_there(a->db) || a->db->buf->dtype == dy.dtype,
             "%s: dy does not have the dtype of db, which `dtype` names", ctx->op);
  if (need_col && !keeps) TE_TRY(make_workspace(ctx, dy.rows * dy.cols, &col));
  if (is_quantized(a->dy)) {
    g = (operand){dy.dtype, dy.data, a->dy->buf[1].data, a->dy->buf[2].data};
    TE_REQUIRE(ctx->status, !keeps || a->dyq->buf[0].dtype == dy.dtype,
               "%s: dy has another dtype than e5m2 names", ctx->op);
    if (keeps) {
      te_matrix one = {a->dyq->buf[1].data, 1, 1, 1, 1, TE_f32};
      TE_TRY(be->fill_rows(ctx, one, g.scale_inv));
    }
    if (need_col && (!g.col || keeps)) {
      g.col = keeps ? a->dyq->buf[0].data : col;
      if (!te__is_empty(&dy)) TE_TRY(be->transpose(ctx, dy.data, g.col, dy.rows, dy.cols));
    }
    if (is_there(a->db)) TE_TRY(bias_gradient_of_codes(ctx, be, a->db, dy, g.scale_inv));
  } else if (need_row || need_col) {
    if (need_row) row = borrowed(a, dy);
    if (need_row && !row) TE_TRY(make_workspace(ctx, dy.rows * dy.cols, &row));
    void *memory; /* a word for the amax, then a scale, 16 bytes each */
    TE_TRY(make_workspace(ctx, 32, &memory));
    te_amax_word *word = memory;
    scale_inv = keeps ? a->dyq->buf[1].data : (char *)memory + 16;
    g.row = row;
    g.col = keeps ? a->dyq->buf[0].data : col;
    g.scale_inv = scale_inv;
    te_cast cast = te__cast_of(dy, g.dtype, g.row, g.col, scale_inv);
    TE_TRY(cast_gradient(ctx, be, a, dy, &cast, word));
    was_cast = true;
  } else if (is_there(a->db)) {
    TE_TRY(be->column_sums(ctx, dy, a->db->buf->data));
  }
  if (need_row) TE_TRY(input_gradient(ctx, be, a, &g, te__matrix_of(a->dx), dy.cols));
  if (was_cast && row) drop(ctx, &row); /* does nothing to borrowed memory */
  if (!is_there(a->dw)) return TE_OK;
  operand x = saved(a->x);
  return weight_gradient(ctx, be, &g, &x, dy.rows, te__matrix_of(a->dw), a->accumulate,
                         te_flag(a->options, B_FAST_WGRAD));
}

static int linear_fp8_bwd(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_linear_fp8_bwd *a = (const te_linear_fp8_bwd *)args;
  return backward(
      ctx, be,
      &(backward_args){&a->dy, &a->x, &a->w, &a->options, &a->dx, &a->dw, &a->db, &a->dyq, NULL, false});
}

static int linear_fp8_bwd_delayed(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_linear_fp8_bwd_delayed *a = (const te_linear_fp8_bwd_delayed *)args;
  te_delayed_args d;
  TE_TRY(te__delayed_args(ctx, &a->state, &a->region, &a->new_scale, &a->history_len, &a->margin,
                          te_flag(&a->options, B_MOST_RECENT), te_flag(&a->options, B_E5M2), &d));
  return backward(
      ctx, be,
      &(backward_args){&a->dy, &a->x, &a->w, &a->options, &a->dx, &a->dw, &a->db, &a->dyq, &d, false});
}

static int linear_fp8_bwd_main_grad(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_linear_fp8_bwd_main_grad *a = (const te_linear_fp8_bwd_main_grad *)args;
  te_delayed_args d;
  bool is_delayed = a->state.present;
  TE_REQUIRE(ctx->status, a->region.present == is_delayed, "%s: region is %s although state is %s", ctx->op,
             is_delayed ? "absent" : "present", is_delayed ? "present" : "absent");
  if (is_delayed)
    TE_TRY(te__delayed_args(ctx, &a->state, &a->region, &a->new_scale, &a->history_len, &a->margin,
                            te_flag(&a->options, B_MOST_RECENT), te_flag(&a->options, B_E5M2), &d));
  return backward(ctx, be,
                  &(backward_args){&a->dy, &a->x, &a->w, &a->options, &a->dx, &a->main_grad, &a->db, NULL,
                                   is_delayed ? &d : NULL, te_flag(&a->options, B_ACCUMULATE)});
}

/* ---------------------------------------------------------------------- the weight gradient alone ------ */

static int linear_fp8_wgrad(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_linear_fp8_wgrad *a = (const te_linear_fp8_wgrad *)args;
  operand dy = saved(&a->dy), x = saved(&a->x);
  return weight_gradient(ctx, be, &dy, &x, a->x.buf[0].sizes[1], te__matrix_of(&a->dw), false,
                         a->fast.i != 0);
}

static int linear_fp8_wgrad_into(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_linear_fp8_wgrad_into *a = (const te_linear_fp8_wgrad_into *)args;
  operand dy = saved(&a->dy), x = saved(&a->x);
  return weight_gradient(ctx, be, &dy, &x, a->x.buf[0].sizes[1], te__matrix_of(&a->main_grad),
                         a->accumulate.i != 0, a->fast.i != 0);
}

TE_FP8_BODIES(linear_fp8_fwd)
TE_FP8_BODIES(linear_fp8_fwd_delayed)
TE_FP8_BODIES(linear_fp8_bwd)
TE_FP8_BODIES(linear_fp8_bwd_delayed)
TE_FP8_BODIES(linear_fp8_bwd_main_grad)
TE_FP8_BODIES(linear_fp8_wgrad)
TE_FP8_BODIES(linear_fp8_wgrad_into)
