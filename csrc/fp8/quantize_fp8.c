/* The quantizer operators. */
#include "../te_status.h"
#include "../te_table.h"
#include "fp8.h"

/* -------------------------------------------------------------------------- shared by operators ------ */

te_cast te__cast_of(te_matrix x, te_dtype out, void *row, void *col, float *scale_inv) {
  bool is_row_major = x.col_stride == 1;
  return (te_cast){.x = is_row_major ? x : te__transposed(x),
                   .out = out,
                   .row = is_row_major ? row : col,
                   .col = is_row_major ? col : row,
                   .scale_inv = scale_inv};
}

int te__find_amaxes(const te_context *ctx, const te_fp8_backend *be, te_cast *casts, int n, float *amaxes) {
  te_matrix unscaled[TE_CASTS];
  float *out[TE_CASTS];
  int count = 0;
  for (int i = 0; i < n; i++) {
    if (casts[i].scale || be->is_one_tile(&casts[i])) continue;
    unscaled[count] = casts[i].x;
    casts[i].amax = out[count] = &amaxes[count];
    casts[i].follows = true;
    count++;
  }
  if (count == 0) return TE_OK;
  TE_TRY(be->zero(ctx, amaxes, count));
  return be->amax(ctx, unscaled, out, count);
}

int te__cast_and_sum(const te_context *ctx, const te_fp8_backend *be, te_cast *cast, te_matrix x,
                     void *sums) {
  void *partial = NULL;
  int64_t tiles = sums && x.col_stride == 1 && !te__is_empty(&x) ? be->sum_tiles(x.rows) : 0;
  if (tiles > 0) {
    TE_TRY(ctx->services->workspace(ctx, (size_t)(tiles * x.cols) * sizeof(float), &partial));
    cast->col_sums = partial;
  }
  TE_TRY(be->cast(ctx, cast, 1));
  if (tiles > 0) TE_TRY(be->finish_sums(ctx, partial, tiles, x.cols, sums, x.dtype));
  if (partial) ctx->services->release(ctx, partial);
  return sums && tiles == 0 ? be->column_sums(ctx, x, sums) : TE_OK;
}

int te__delayed_args(const te_context *ctx, const te_arg *state, const te_arg *region,
                     const te_arg *new_scale, const te_arg *history_len, const te_arg *margin,
                     bool most_recent, bool backward_is_e5m2, te_delayed_args *out) {
  int64_t size = state->buf->sizes[0], len = history_len->i;
  TE_REQUIRE(ctx->status, len >= 1 && len <= (size - TE_STATE_HISTORY) / TE_STATE_TENSORS,
             "%s: history_len = %lld: must be 1 to %lld, what state with %lld elements holds", ctx->op,
             (long long)len, (long long)((size - TE_STATE_HISTORY) / TE_STATE_TENSORS), (long long)size);
  TE_REQUIRE(ctx->status, margin->i >= -64 && margin->i <= 64, "%s: margin = %lld: must be -64 to 64",
             ctx->op, (long long)margin->i);
  *out = (te_delayed_args){
      .state = state->buf->data,
      .region = region->buf->data,
      .how = {.history_len = (int32_t)len,
              .margin = (int32_t)margin->i,
              .most_recent = most_recent,
              .backward_is_e5m2 = backward_is_e5m2,
              .new_scale = new_scale->present ? new_scale->buf->data : NULL},
  };
  return TE_OK;
}

void te__cast_delayed(te_cast *cast, void *state, int tensor, te_amax_word *word) {
  cast->scale = te_state_scale(state, tensor);
  cast->follows = true;
  if (!word) return;
  cast->record = &word->amax;
  cast->done = &word->done;
  cast->stage = te_state_amax(state, tensor);
}

/* ---------------------------------------------------------------------------------- operators -------- */

static int amax(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_amax *a = (const te_amax *)args;
  te_cast cast = te__cast_of(te__matrix_of(&a->x), TE_e4m3, NULL, NULL, NULL);
  float *out = a->amax.buf->data;
  TE_TRY(be->zero(ctx, out, 1));
  return te__is_empty(&cast.x) ? TE_OK : be->amax(ctx, &cast.x, &out, 1);
}

/* The flags of `quantize`, in the order of its row. */
enum { Q_E5M2, Q_POW2, Q_WANT_ROW, Q_WANT_COL, Q_WANT_AMAX, Q_WANT_SUMS };

static int quantize(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_quantize *a = (const te_quantize *)args;
  te_matrix x = te__matrix_of(&a->x);
  void *memory;
  float *out = a->amax.present ? a->amax.buf->data : NULL;
  te_cast cast = te__cast_of(x, te_flag(&a->options, Q_E5M2) ? TE_e5m2 : TE_e4m3, a->q.buf[0].data,
                             a->q.buf[1].data, a->q.buf[2].data);
  cast.pow2 = te_flag(&a->options, Q_POW2);
  if (a->scale.present) {
    cast.scale = a->scale.buf->data;
    cast.record = out;
    cast.follows = out != NULL;
    if (out) TE_TRY(be->zero(ctx, out, 1));
  } else {
    if (!out) {
      TE_TRY(ctx->services->workspace(ctx, sizeof(float), &memory));
      out = memory;
    }
    TE_TRY(be->zero(ctx, out, 1));
    TE_TRY(be->amax(ctx, &cast.x, &out, 1));
    cast.amax = out;
    cast.follows = true;
  }
  return te__cast_and_sum(ctx, be, &cast, x, a->sums.present ? a->sums.buf->data : NULL);
}

static int quantize_into(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_quantize_into *a = (const te_quantize_into *)args;
  const te_tensor *codes = a->q.buf[0].data ? &a->q.buf[0] : &a->q.buf[1];
  te_cast cast =
      te__cast_of(te__matrix_of(&a->x), codes->dtype, a->q.buf[0].data, a->q.buf[1].data, a->q.buf[2].data);
  cast.pow2 = a->pow2.i != 0;
  cast.scale = a->scale.present ? a->scale.buf->data : NULL;
  void *amax_;
  TE_TRY(ctx->services->workspace(ctx, sizeof(float), &amax_));
  TE_TRY(te__find_amaxes(ctx, be, &cast, 1, amax_));
  return be->cast(ctx, &cast, 1);
}

static int dequantize(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_dequantize *a = (const te_dequantize *)args;
  te_matrix codes = te__matrix_of(&a->codes), x = te__matrix_of(&a->x);
  if (te__is_empty(&x)) return TE_OK;
  return be->decode(ctx, codes, a->scale_inv.buf->data, x.data, x.dtype);
}

static int transpose_codes(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_transpose_codes *a = (const te_transpose_codes *)args;
  te_matrix codes = te__matrix_of(&a->codes);
  if (te__is_empty(&codes)) return TE_OK;
  return be->transpose(ctx, codes.data, a->transposed.buf->data, codes.rows, codes.cols);
}

/* The flags of `quantize_delayed`, in the order of its row. */
enum { D_E5M2, D_WANT_ROW, D_WANT_COL, D_MOST_RECENT, D_BACKWARD_E5M2, D_STAGE };

static int quantize_delayed(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_quantize_delayed *a = (const te_quantize_delayed *)args;
  te_delayed_args d;
  void *words = NULL;
  bool stages = te_flag(&a->options, D_STAGE);
  TE_TRY(te__delayed_args(ctx, &a->state, &a->region, &a->new_scale, &a->history_len, &a->margin,
                          te_flag(&a->options, D_MOST_RECENT), te_flag(&a->options, D_BACKWARD_E5M2), &d));
  TE_REQUIRE(ctx->status, a->tensor.i >= 0 && a->tensor.i < TE_STATE_TENSORS,
             "%s: tensor = %lld: must be 0 to %d", ctx->op, (long long)a->tensor.i, TE_STATE_TENSORS - 1);
  if (stages) TE_TRY(ctx->services->workspace(ctx, sizeof(te_amax_word), &words));
  TE_TRY(be->roll(ctx, &d, words, stages));
  te_cast cast = te__cast_of(te__matrix_of(&a->x), te_flag(&a->options, D_E5M2) ? TE_e5m2 : TE_e4m3,
                             a->q.buf[0].data, a->q.buf[1].data, a->q.buf[2].data);
  te__cast_delayed(&cast, d.state, (int)a->tensor.i, words);
  return be->cast(ctx, &cast, 1);
}

static int linear_calibrate(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  const te_linear_calibrate *a = (const te_linear_calibrate *)args;
  te_delayed_args d;
  te_matrix x = te__matrix_of(&a->x), w = te__matrix_of(&a->w);
  void *words, *codes[2]; /* amaxes come with a cast, whose codes nobody wants here */
  TE_TRY(te__delayed_args(ctx, &a->state, &a->region, &a->new_scale, &a->history_len, &a->margin,
                          te_flag(&a->options, 0), te_flag(&a->options, 1), &d));
  TE_TRY(ctx->services->workspace(ctx, 2 * sizeof(te_amax_word), &words));
  TE_TRY(be->roll(ctx, &d, words, 2));
  TE_TRY(ctx->services->workspace(ctx, (size_t)(x.rows * x.cols), &codes[0]));
  TE_TRY(ctx->services->workspace(ctx, (size_t)(w.rows * w.cols), &codes[1]));
  te_cast casts[2] = {te__cast_of(x, TE_e4m3, codes[0], NULL, NULL),
                      te__cast_of(w, TE_e4m3, codes[1], NULL, NULL)};
  te__cast_delayed(&casts[0], d.state, TE_STATE_X, (te_amax_word *)words);
  te__cast_delayed(&casts[1], d.state, TE_STATE_W, (te_amax_word *)words + 1);
  return be->cast(ctx, casts, 2);
}

TE_FP8_BODIES(amax)
TE_FP8_BODIES(quantize)
TE_FP8_BODIES(quantize_into)
TE_FP8_BODIES(dequantize)
TE_FP8_BODIES(transpose_codes)
TE_FP8_BODIES(quantize_delayed)
TE_FP8_BODIES(linear_calibrate)
