/* Weights quantized once for several microbatches, and again when they have changed. */
#include "../te_status.h"
#include "../te_table.h"
#include "fp8.h"

/* The rows of both operators have the same slots. */
static int update(const te_context *ctx, const te_fp8_backend *be, const te_refresh_weight *a, bool force) {
  float *scale_inv = a->row_scale_inv.buf->data;
  te_matrix x = te__matrix_of(&a->x), copy = {a->col_scale_inv.buf->data, 1, 1, 1, 1, TE_f32};
  te_cast cast = te__cast_of(x, TE_e4m3, a->row.buf->data, a->col.buf->data, scale_inv);
  void *memory;
  TE_REQUIRE(ctx->status, (uintptr_t)a->fingerprint.buf->data % sizeof(uint64_t) == 0,
             "%s: fingerprint has to begin at a multiple of 8 bytes", ctx->op);
  TE_TRY(ctx->services->workspace(ctx, sizeof(te_comparison), &memory));
  te_comparison *comparison = memory;
  TE_TRY(be->zero(ctx, memory, sizeof(te_comparison) / sizeof(float)));
  TE_TRY(be->compare(ctx, x, (uint64_t)a->salt.i, force, a->fingerprint.buf->data, comparison));
  cast.pow2 = a->pow2.i != 0;
  cast.scale = a->scale.present ? a->scale.buf->data : NULL;
  cast.amax = &comparison->amax;
  cast.unless = &comparison->is_same;
  cast.follows = true;
  TE_TRY(be->cast(ctx, &cast, 1));
  return be->fill_rows(ctx, copy, scale_inv);
}

static int cache_weight(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  return update(ctx, be, (const te_refresh_weight *)args, true);
}

static int refresh_weight(const te_context *ctx, const te_fp8_backend *be, const te_arg *args) {
  return update(ctx, be, (const te_refresh_weight *)args, false);
}

TE_FP8_BODIES(cache_weight)
TE_FP8_BODIES(refresh_weight)
