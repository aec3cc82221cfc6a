/* Per-tensor FP8 on the CPU: the definition of the bits. GEMMs multiply the code values, which are exact in
 * fp32, accumulate in fp32, and apply the scales last, as tensor cores do. */
#include "../fp8/fp8.h"

#include "../te_fingerprint.h"
#include "../te_spec.h"
#include "../te_status.h"
#include "linear_cpu.h"

#include <string.h>

#define GRAIN 16384
#define BLOCK 64

static int64_t grain_rows(int64_t cols) { return 1 + GRAIN / (cols + 1); }

static int zero(const te_context *ctx, float *values, int n) {
  (void)ctx;
  memset(values, 0, (size_t)n * sizeof *values);
  return TE_OK;
}

static int fill_rows(const te_context *ctx, te_matrix out, const void *row) {
  (void)ctx;
  te__cpu_fill_rows(out, row);
  return TE_OK;
}

static int64_t no_tiles(int64_t rows) {
  (void)rows;
  return 0;
}

static bool is_one_tile(const te_cast *c) {
  (void)c;
  return false;
}

static int finish_sums(const te_context *ctx, const float *partial, int64_t n, int64_t cols, void *sums,
                       te_dtype dtype) {
  (void)partial, (void)n, (void)cols, (void)sums, (void)dtype;
  return te__fail(ctx->status, "%s: the CPU makes no partial sums", ctx->op);
}

/* --------------------------------------------------------------------------------- amax and cast ---- */

typedef struct amax_job {
  const te_matrix *m;
  float *out;
} amax_job;

/* Non-negative floats are ordered like their bits, and a comparison with NaN is false. */
static void amax_range(int64_t begin, int64_t end, void *user) {
  const amax_job *job = user;
  const te_matrix *m = job->m;
  uint32_t most = 0, seen = __atomic_load_n((uint32_t *)(void *)job->out, __ATOMIC_RELAXED);
  for (int64_t r = begin; r < end; r++)
    for (int64_t c = 0; c < m->cols; c++) {
      uint32_t bits = te_f32_to_bits(te__cpu_load(m->data, m->dtype, r * m->row_stride + c)) & 0x7fffffffu;
      if (bits <= 0x7f800000u && bits > most) most = bits;
    }
  while (most > seen && !__atomic_compare_exchange_n((uint32_t *)(void *)job->out, &seen, most, true,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    continue;
}

static int amax(const te_context *ctx, const te_matrix *m, float *const *out, int n) {
  for (int i = 0; i < n; i++) {
    amax_job job = {&m[i], out[i]};
    TE_TRY(ctx->services->parallel_for(ctx, m[i].rows, grain_rows(m[i].cols), amax_range, &job));
  }
  return TE_OK;
}

typedef struct cast_job {
  const te_cast *cast;
  float scale;
} cast_job;

/* In blocks, so that the scattered writes of the transposed copy stay in the cache. */
static void cast_range(int64_t begin, int64_t end, void *user) {
  const cast_job *job = user;
  const te_matrix *x = &job->cast->x;
  uint8_t *row = job->cast->row, *col = job->cast->col;
  bool e5m2 = job->cast->out == TE_e5m2;
  for (int64_t r0 = begin; r0 < end; r0 += BLOCK)
    for (int64_t c0 = 0; c0 < x->cols; c0 += BLOCK)
      for (int64_t r = r0; r < r0 + BLOCK && r < end; r++)
        for (int64_t c = c0; c < c0 + BLOCK && c < x->cols; c++) {
          float value = te__cpu_load(x->data, x->dtype, r * x->row_stride + c) * job->scale;
          uint8_t code = e5m2 ? te_f32_to_e5m2(value) : te_f32_to_e4m3(value);
          if (row) row[r * x->cols + c] = code;
          if (col) col[c * x->rows + r] = code;
        }
}

static int cast(const te_context *ctx, const te_cast *casts, int n) {
  for (int i = 0; i < n; i++) {
    const te_cast *c = &casts[i];
    if (c->unless && *c->unless) continue;
    float scale = c->scale ? *c->scale : te_current_scale(*c->amax, te_fp8_max(c->out), c->pow2);
    cast_job job = {c, scale};
    if (c->scale_inv) *c->scale_inv = 1.0f / scale;
    TE_TRY(ctx->services->parallel_for(ctx, c->x.rows, grain_rows(c->x.cols), cast_range, &job));
    if (!c->record) continue;
    TE_TRY(amax(ctx, &c->x, &c->record, 1));
    if (c->stage && te_is_finite(*c->record) && *c->record > *c->stage) *c->stage = *c->record;
  }
  return TE_OK;
}

/* ------------------------------------------------------------------------------- fingerprint -------- */

typedef struct hash_job {
  const char *bytes;
  int64_t size;
  uint64_t salt, sum;
} hash_job;

static void hash_range(int64_t begin, int64_t end, void *user) {
  hash_job *job = user;
  uint64_t sum = 0;
  for (int64_t i = begin; i < end; i++) {
    uint64_t word = 0;
    int64_t left = job->size - i * 8;
    memcpy(&word, job->bytes + i * 8, left < 8 ? (size_t)left : 8);
    sum += te_fingerprint_mix(word, (uint64_t)i, job->salt);
  }
  __atomic_fetch_add(&job->sum, sum, __ATOMIC_RELAXED);
}

static int compare(const te_context *ctx, te_matrix x, uint64_t salt, bool force, uint64_t *held,
                   te_comparison *out) {
  float *amax_ = &out->amax;
  hash_job job = {x.data, x.rows * x.cols * (int64_t)te__dtype_size(x.dtype), salt, 0};
  TE_TRY(ctx->services->parallel_for(ctx, (job.size + 7) / 8, GRAIN, hash_range, &job));
  out->hash = te_fingerprint_end(job.sum);
  out->is_same = !force && out->hash == *held;
  *held = out->hash;
  return out->is_same ? TE_OK : amax(ctx, &x, &amax_, 1);
}

/* ------------------------------------------------------------------------- transpose and decode ------ */

typedef struct codes_job {
  const uint8_t *codes;
  void *out;
  te_dtype dtype, out_dtype;
  int64_t rows, cols, row_stride;
  float scale;
} codes_job;

static void transpose_range(int64_t begin, int64_t end, void *user) {
  const codes_job *job = user;
  uint8_t *out = job->out;
  for (int64_t r0 = 0; r0 < job->rows; r0 += BLOCK)
    for (int64_t c = begin; c < end; c++)
      for (int64_t r = r0; r < r0 + BLOCK && r < job->rows; r++)
        out[c * job->rows + r] = job->codes[r * job->cols + c];
}

static int transpose(const te_context *ctx, const void *codes, void *out, int64_t rows, int64_t cols) {
  codes_job job = {.codes = codes, .out = out, .rows = rows, .cols = cols};
  return ctx->services->parallel_for(ctx, cols, grain_rows(rows), transpose_range, &job);
}

static void decode_range(int64_t begin, int64_t end, void *user) {
  const codes_job *job = user;
  float values[256];
  for (int i = 0; i < 256; i++)
    values[i] =
        (job->dtype == TE_e5m2 ? te_e5m2_to_f32((uint8_t)i) : te_e4m3_to_f32((uint8_t)i)) * job->scale;
  for (int64_t r = begin; r < end; r++)
    for (int64_t c = 0; c < job->cols; c++)
      te__cpu_store(job->out, job->out_dtype, r * job->cols + c, values[job->codes[r * job->row_stride + c]]);
}

static int decode(const te_context *ctx, te_matrix codes, const float *scale_inv, void *out,
                  te_dtype out_dtype) {
  codes_job job = {codes.data, out,        codes.dtype,      out_dtype,
                   codes.rows, codes.cols, codes.row_stride, scale_inv ? *scale_inv : 1.0f};
  return ctx->services->parallel_for(ctx, codes.rows, grain_rows(codes.cols), decode_range, &job);
}

/* -------------------------------------------------------------------------------------- GEMM --------- */

typedef struct epilogue_job {
  const te_fp8_gemm *gemm;
  const float *product;
  float scale;
} epilogue_job;

static void epilogue_range(int64_t begin, int64_t end, void *user) {
  const epilogue_job *job = user;
  const te_fp8_gemm *g = job->gemm;
  for (int64_t r = begin; r < end; r++)
    for (int64_t c = 0; c < g->n; c++) {
      int64_t i = r * g->n + c;
      float value = job->product[i] * job->scale;
      if (g->bias) value += te__cpu_load(g->bias, g->d.dtype, c);
      if (g->beta != 0) value += te__cpu_load(g->d.data, g->d.dtype, i);
      te__cpu_store(g->d.data, g->d.dtype, i, value);
    }
}

static int values_of(const te_context *ctx, const void *codes, te_dtype dtype, int64_t rows, int64_t cols,
                     te_matrix *out) {
  te_matrix m = {(void *)(uintptr_t)codes, rows, cols, cols, 1, dtype};
  *out = (te_matrix){NULL, rows, cols, cols, 1, TE_f32};
  TE_TRY(ctx->services->workspace(ctx, (size_t)(rows * cols) * sizeof(float), &out->data));
  return decode(ctx, m, NULL, out->data, TE_f32);
}

static int gemm(const te_context *ctx, const te_fp8_gemm *g) {
  te_matrix a, b, product = {NULL, g->m, g->n, g->n, 1, TE_f32};
  TE_TRY(values_of(ctx, g->a, g->a_dtype, g->m, g->k, &a));
  TE_TRY(values_of(ctx, g->b, g->b_dtype, g->n, g->k, &b));
  TE_TRY(ctx->services->workspace(ctx, (size_t)(g->m * g->n) * sizeof(float), &product.data));
  TE_TRY(te__cpu_product(ctx, a, te__transposed(b), NULL, product));
  epilogue_job job = {g, product.data, *g->a_scale_inv * *g->b_scale_inv};
  TE_TRY(ctx->services->parallel_for(ctx, g->m, grain_rows(g->n), epilogue_range, &job));
  ctx->services->release(ctx, a.data);
  ctx->services->release(ctx, b.data);
  ctx->services->release(ctx, product.data);
  return TE_OK;
}

/* ---------------------------------------------------------------------------- delayed scaling -------- */

static void roll_column(void *state, const te_delayed *how, int tensor) {
  float *history = te_state_amax(state, tensor), *scale = te_state_scale(state, tensor);
  int64_t len = how->history_len;
  float staged = history[0], amax = staged;
  if (staged == 0) return;
  for (int64_t i = 1; i < len && !how->most_recent; i++)
    if (history[i * TE_STATE_TENSORS] > amax) amax = history[i * TE_STATE_TENSORS];
  bool is_e5m2 = how->backward_is_e5m2 && (tensor == TE_STATE_DY || tensor == TE_STATE_DX);
  *scale = how->new_scale ? how->new_scale[tensor]
                          : te_delayed_scale(amax, *scale, is_e5m2 ? TE_E5M2_MAX : TE_E4M3_MAX, how->margin);
  for (int64_t i = 0; i + 1 < len; i++) history[i * TE_STATE_TENSORS] = history[(i + 1) * TE_STATE_TENSORS];
  history[(len - 1) * TE_STATE_TENSORS] = staged;
  history[0] = 0;
}

static int roll(const te_context *ctx, const te_delayed_args *d, te_amax_word *zero_, int n_zero) {
  (void)ctx;
  if (n_zero > 0) memset(zero_, 0, (size_t)n_zero * sizeof *zero_);
  if (d->seen) *d->seen = *d->region;
  if (*(int32_t *)d->state == *d->region) return TE_OK;
  *(int32_t *)d->state = *d->region;
  for (int t = 0; t < TE_STATE_TENSORS; t++) roll_column(d->state, &d->how, t);
  return TE_OK;
}

static int column_sums(const te_context *ctx, te_matrix m, void *sums) {
  return te__cpu_column_sums(ctx, m, sums);
}

const te_fp8_backend te__fp8_cpu = {zero,      amax,        compare,  cast,        transpose,   decode, gemm,
                                    fill_rows, column_sums, no_tiles, is_one_tile, finish_sums, roll};
