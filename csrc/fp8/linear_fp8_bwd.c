/* Linear in per-tensor FP8, backward: dy's codes, the bias gradient on the way, and two GEMMs. */
#include "../te_spec.h"
#include "../te_status.h"
#include "../te_table.h"
#include "linear_fp8.h"

static void drop(const te_context *ctx, void **memory) {
  ctx->services->release(ctx, *memory);
  *memory = NULL;
}

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

/* Finds what the casts of dy share: its scale, where amaxes go. `words` are as many as there will be casts.
 */
static int ready_gradient(const te_context *ctx, const te_fp8_backend *be, const backward_args *a,
                          te_cast *cast, te_amax_word *words, int n_words) {
  cast->pow2 = te_flag(a->options, B_POW2);
  if (!a->delayed) return te__find_amaxes(ctx, be, cast, 1, &words->amax);
  bool stages = te_flag(a->options, B_STAGE);
  TE_TRY(be->roll(ctx, a->delayed, words, stages ? n_words : 0));
  te__cast_delayed(cast, a->delayed->state, TE_STATE_DY, stages ? words : NULL);
  return TE_OK;
}

static int bias_gradient_of_codes(const te_context *ctx, const te_fp8_backend *be, const te_arg *db,
                                  te_matrix codes, const float *scale_inv) {
  void *values = NULL;
  te_dtype dtype = db->buf->dtype;
  TE_TRY(make_workspace(ctx, codes.rows * codes.cols * (int64_t)te__dtype_size(dtype), &values));
  te_matrix decoded = {values, codes.rows, codes.cols, codes.cols, 1, dtype};
  if (!te__is_empty(&codes)) TE_TRY(be->decode(ctx, codes, scale_inv, values, dtype));
  TE_TRY(be->column_sums(ctx, decoded, db->buf->data));
  drop(ctx, &values);
  return TE_OK;
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

/* -------------------------------------------------------------------------------- dy in parts -------- */

/* dy is often the largest tensor of a backward pass, and both copies of it come on top. Where they are more
 * than this, dy is cast twice, in parts that one GEMM each consumes: one more read of dy for most of that
 * memory. */
#define MOST_CODES ((int64_t)256 << 20)
#define PART_CODES ((int64_t)64 << 20)
#define MOST_PARTS 64

static int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/* The least rows (or columns) of a part of `length`: so many that a GEMM fills the GPU, and whole tiles. */
static int64_t least_part(int64_t length) {
  int64_t least = (length + MOST_PARTS - 1) / MOST_PARTS;
  return least < 2048 ? 2048 : (least + 127) / 128 * 128;
}

/* As many of `length` rows, of `width` codes each, as `bytes` hold. */
static int64_t part_length(int64_t length, int64_t width, int64_t bytes) {
  int64_t least = least_part(length), part = bytes / width / 128 * 128;
  return at_most(part > least ? part : least, length);
}

static te_matrix part_of(te_matrix m, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  int64_t elements = row * m.row_stride + col * m.col_stride;
  m.data = (char *)m.data + elements * (int64_t)te__dtype_size(m.dtype);
  m.rows = rows;
  m.cols = cols;
  return m;
}

/* Memory for codes of dy that only dgrad reads: dw's, which wgrad overwrites afterwards; NULL if there is
 * none. */
static void *borrowed(const backward_args *a, int64_t *bytes) {
  *bytes = 0;
  if (!is_there(a->dw) || a->accumulate) return NULL;
  te_matrix dw = te__matrix_of(a->dw);
  *bytes = dw.rows * dw.cols * (int64_t)te__dtype_size(dw.dtype);
  return (uintptr_t)dw.data % 16 == 0 ? dw.data : NULL;
}

static int input_gradient_in_parts(const te_context *ctx, const te_fp8_backend *be, const backward_args *a,
                                   te_matrix dy, const te_cast *whole, te_amax_word *words, operand g) {
  int64_t bytes, length;
  void *row = borrowed(a, &bytes);
  te_matrix dx = te__matrix_of(a->dx);
  if (row && bytes >= least_part(dy.rows) * dy.cols) {
    length = part_length(dy.rows, dy.cols, bytes);
  } else {
    length = part_length(dy.rows, dy.cols, PART_CODES);
    TE_TRY(make_workspace(ctx, length * dy.cols, &row));
  }
  g.row = row;
  for (int64_t r = 0, i = 0; r < dy.rows; r += length, i++) {
    int64_t rows = at_most(length, dy.rows - r);
    te_cast cast = *whole;
    cast.x = part_of(dy, r, rows, 0, dy.cols);
    cast.row = row;
    cast.follows = whole->follows && r == 0;
    if (whole->record) cast.record = &words[i].amax, cast.done = &words[i].done;
    TE_TRY(be->cast(ctx, &cast, 1));
    TE_TRY(input_gradient(ctx, be, a, &g, part_of(dx, r, rows, 0, dx.cols), dy.cols));
  }
  drop(ctx, &row); /* does nothing to borrowed memory */
  return TE_OK;
}

static int weight_gradient_in_parts(const te_context *ctx, const te_fp8_backend *be, const backward_args *a,
                                    te_matrix dy, const te_cast *whole, operand g) {
  int64_t length = part_length(dy.cols, dy.rows, PART_CODES);
  te_matrix dw = te__matrix_of(a->dw);
  operand x = saved(a->x);
  void *col;
  TE_TRY(make_workspace(ctx, length * dy.rows, &col));
  g.col = col;
  for (int64_t c = 0; c < dy.cols; c += length) {
    int64_t cols = at_most(length, dy.cols - c);
    te_matrix part = part_of(dy, 0, dy.rows, c, cols);
    te_cast cast = {.x = part, .out = whole->out, .col = col, .scale = whole->scale, .amax = whole->amax};
    cast.pow2 = whole->pow2;
    void *db = is_there(a->db) ? (char *)a->db->buf->data + c * (int64_t)te__dtype_size(dy.dtype) : NULL;
    TE_TRY(te__cast_and_sum(ctx, be, &cast, part, db));
    TE_TRY(te__fp8_weight_gradient(ctx, be, &g, &x, dy.rows, part_of(dw, c, cols, 0, dw.cols), a->accumulate,
                                   te_flag(a->options, B_FAST_WGRAD)));
  }
  drop(ctx, &col);
  return TE_OK;
}

/* ----------------------------------------------------------------------------------------- whole -------- */

static int backward_of_codes(const te_context *ctx, const te_fp8_backend *be, const backward_args *a,
                             te_matrix dy, operand *g) {
  bool keeps = is_there(a->dyq), need_col = is_there(a->dw) || keeps;
  void *col = NULL;
  *g = (operand){dy.dtype, dy.data, a->dy->buf[1].data, a->dy->buf[2].data};
  TE_REQUIRE(ctx->status, !keeps || a->dyq->buf[0].dtype == dy.dtype,
             "%s: dy has another dtype than e5m2 names", ctx->op);
  if (keeps) {
    te_matrix one = {a->dyq->buf[1].data, 1, 1, 1, 1, TE_f32};
    TE_TRY(be->fill_rows(ctx, one, g->scale_inv));
  }
  if (need_col && (!g->col || keeps)) {
    if (!keeps) TE_TRY(make_workspace(ctx, dy.rows * dy.cols, &col));
    g->col = keeps ? a->dyq->buf[0].data : col;
    if (!te__is_empty(&dy)) TE_TRY(be->transpose(ctx, dy.data, g->col, dy.rows, dy.cols));
  }
  return is_there(a->db) ? bias_gradient_of_codes(ctx, be, a->db, dy, g->scale_inv) : TE_OK;
}

static int backward(const te_context *ctx, const te_fp8_backend *be, const backward_args *a) {
  te_matrix dy = te__matrix_of(a->dy);
  bool keeps = is_there(a->dyq), need_col = is_there(a->dw) || keeps, need_row = is_there(a->dx);
  operand g = {.dtype = te_flag(a->options, B_E5M2) ? TE_e5m2 : TE_e4m3};
  void *row = NULL, *col = NULL, *memory, *db = is_there(a->db) ? a->db->buf->data : NULL;
  TE_REQUIRE(ctx->status, is_quantized(a->dy) || !db || a->db->buf->dtype == dy.dtype,
             "%s: dy does not have the dtype of db, which `dtype` names", ctx->op);
  if (is_quantized(a->dy)) {
    TE_TRY(backward_of_codes(ctx, be, a, dy, &g));
  } else if (!need_row && !need_col) {
    return db ? be->column_sums(ctx, dy, db) : TE_OK;
  } else {
    bool in_parts =
        need_row && need_col && !keeps && dy.col_stride == 1 && 2 * dy.rows * dy.cols > MOST_CODES;
    int64_t bytes;
    TE_TRY(make_workspace(ctx, 16 + MOST_PARTS * (int64_t)sizeof(te_amax_word), &memory));
    te_amax_word *words = (te_amax_word *)((char *)memory + 16); /* GEMMs want a scale aligned to 16 bytes */
    float *scale_inv = keeps ? a->dyq->buf[1].data : memory;
    g.scale_inv = scale_inv;
    te_cast cast = te__cast_of(dy, g.dtype, NULL, NULL, scale_inv);
    TE_TRY(ready_gradient(ctx, be, a, &cast, words, in_parts ? MOST_PARTS : 1));
    if (in_parts) {
      TE_TRY(input_gradient_in_parts(ctx, be, a, dy, &cast, words, g));
      return weight_gradient_in_parts(ctx, be, a, dy, &cast, g);
    }
    if (need_row) row = borrowed(a, &bytes);
    if (need_row && (!row || bytes < dy.rows * dy.cols)) TE_TRY(make_workspace(ctx, dy.rows * dy.cols, &row));
    if (need_col && !keeps) TE_TRY(make_workspace(ctx, dy.rows * dy.cols, &col));
    g.row = row;
    g.col = keeps ? a->dyq->buf[0].data : col;
    te_cast copies = te__cast_of(dy, g.dtype, g.row, g.col, NULL);
    cast.row = copies.row;
    cast.col = copies.col;
    TE_TRY(te__cast_and_sum(ctx, be, &cast, dy, db));
  }
  if (need_row) TE_TRY(input_gradient(ctx, be, a, &g, te__matrix_of(a->dx), dy.cols));
  if (row) drop(ctx, &row); /* does nothing to borrowed memory */
  if (!is_there(a->dw)) return TE_OK;
  operand x = saved(a->x);
  return te__fp8_weight_gradient(ctx, be, &g, &x, dy.rows, te__matrix_of(a->dw), a->accumulate,
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

TE_FP8_BODIES(linear_fp8_bwd)
TE_FP8_BODIES(linear_fp8_bwd_delayed)
TE_FP8_BODIES(linear_fp8_bwd_main_grad)
