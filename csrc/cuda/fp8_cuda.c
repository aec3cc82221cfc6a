/* Per-tensor FP8 on CUDA: kernels of our own for codes and scales, cuBLASLt for products. Tensor cores from
 * compute capability 8.9 on multiply the codes; older GPUs multiply their values in bf16, which holds them
 * exactly. */
#include "../fp8/fp8.h"

#include "../kernels/te_quantize.h"
#include "te_cuda.h"

static int zero(const te_context *ctx, float *values, int n) {
  TE_CUDA_TRY(ctx, te__zero(values, n, ctx->stream));
  return TE_OK;
}

static int fill_rows(const te_context *ctx, te_matrix out, const void *row) {
  TE_CUDA_TRY(ctx,
              te__fill_rows(out.data, row, out.rows, out.cols, out.dtype == TE_f32 ? 4 : 2, ctx->stream));
  return TE_OK;
}

static int amax(const te_context *ctx, const te_matrix *m, float *const *out, int n) {
  TE_CUDA_TRY(ctx, te__amax(m, out, n, ctx->stream));
  return TE_OK;
}

static int compare(const te_context *ctx, te_matrix x, uint64_t salt, bool force, uint64_t *held,
                   te_comparison *out) {
  TE_CUDA_TRY(ctx, te__compare(&x, salt, force, held, out, ctx->stream));
  return TE_OK;
}

static int cast(const te_context *ctx, const te_cast *casts, int n) {
  TE_CUDA_TRY(ctx, te__cast(casts, n, ctx->stream));
  return TE_OK;
}

static int transpose(const te_context *ctx, const void *codes, void *out, int64_t rows, int64_t cols) {
  TE_CUDA_TRY(ctx, te__transpose_codes(codes, out, rows, cols, ctx->stream));
  return TE_OK;
}

static int decode(const te_context *ctx, te_matrix codes, const float *scale_inv, void *out,
                  te_dtype out_dtype) {
  TE_CUDA_TRY(ctx, te__decode(&codes, scale_inv, out, out_dtype, ctx->stream));
  return TE_OK;
}

static int finish_sums(const te_context *ctx, const float *partial, int64_t n, int64_t cols, void *sums,
                       te_dtype dtype) {
  TE_CUDA_TRY(ctx, te__finish_column_sums(partial, n, cols, sums, dtype, ctx->stream));
  return TE_OK;
}

static int roll(const te_context *ctx, const te_delayed_args *delayed, te_amax_word *zero_, int n_zero) {
  TE_CUDA_TRY(ctx, te__delayed_roll(delayed, zero_, n_zero, ctx->stream));
  return TE_OK;
}

/* ------------------------------------------------------------------------------------------ GEMM ------ */

static int workspace(const te_context *ctx, int64_t bytes, void **out) {
  return ctx->services->workspace(ctx, (size_t)bytes, out);
}

static int has_fp8_cores(const te_context *ctx, bool *out) {
  int major, minor;
  TE_CUDA_TRY(ctx, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ctx->device_index));
  TE_CUDA_TRY(ctx, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ctx->device_index));
  *out = major * 10 + minor >= 89;
  return TE_OK;
}

/* What one GEMM needs for itself: given back at once, since a body may multiply many times. */
typedef struct temporaries {
  void *at[6];
  int n;
} temporaries;

static int temporary(const te_context *ctx, temporaries *t, int64_t bytes, void **out) {
  TE_TRY(workspace(ctx, bytes, out));
  t->at[t->n++] = *out;
  return TE_OK;
}

static void release_all(const te_context *ctx, temporaries *t) {
  while (t->n > 0) ctx->services->release(ctx, t->at[--t->n]);
}

/* An operand as tensor cores take it: its own memory where rows are aligned and there are enough of them,
 * else a copy with zeros around. */
static int aligned_codes(const te_context *ctx, temporaries *t, const void *codes, int64_t rows, int64_t cols,
                         int64_t out_rows, const void **out) {
  int64_t out_cols = (cols + 15) / 16 * 16;
  void *copy;
  *out = codes;
  if (out_rows == rows && out_cols == cols && (uintptr_t)codes % 16 == 0) return TE_OK;
  TE_TRY(temporary(ctx, t, out_rows * out_cols, &copy));
  TE_CUDA_TRY(ctx, te__pad_codes(codes, rows, cols, cols, copy, out_rows, out_cols, ctx->stream));
  *out = copy;
  return TE_OK;
}

/* cuBLASLt reads scales from addresses of a multiple of 16 bytes only. */
static int aligned_scale(const te_context *ctx, temporaries *t, const float **scale) {
  void *copy;
  if ((uintptr_t)*scale % 16 == 0) return TE_OK;
  TE_TRY(temporary(ctx, t, sizeof(float), &copy));
  TE_CUDA_TRY(ctx, te__fill_rows(copy, *scale, 1, 1, sizeof(float), ctx->stream));
  *scale = copy;
  return TE_OK;
}

static int copy_2d(const te_context *ctx, void *to, int64_t to_cols, const void *from, int64_t from_cols,
                   int64_t rows, int64_t cols, size_t size) {
  TE_CUDA_TRY(ctx,
              cudaMemcpy2DAsync(to, (size_t)to_cols * size, from, (size_t)from_cols * size,
                                (size_t)cols * size, (size_t)rows, cudaMemcpyDeviceToDevice, ctx->stream));
  return TE_OK;
}

static int native_gemm(const te_context *ctx, const te_fp8_gemm *g) {
  int64_t k = (g->k + 15) / 16 * 16, n = (g->n + 15) / 16 * 16;
  size_t size = g->d.dtype == TE_f32 ? 4 : 2;
  const void *a, *b, *bias = g->bias;
  const float *a_scale = g->a_scale_inv, *b_scale = g->b_scale_inv;
  void *padded_d = NULL, *padded_bias;
  te_matrix d = g->d;
  temporaries t = {.n = 0};
  TE_TRY(aligned_scale(ctx, &t, &a_scale));
  TE_TRY(aligned_scale(ctx, &t, &b_scale));
  TE_TRY(aligned_codes(ctx, &t, g->a, g->m, g->k, g->m, &a));
  TE_TRY(aligned_codes(ctx, &t, g->b, g->n, g->k, n, &b));
  if (n != g->n || (uintptr_t)d.data % 16 != 0) {
    TE_TRY(temporary(ctx, &t, g->m * n * (int64_t)size, &padded_d));
    d = (te_matrix){padded_d, g->m, n, n, 1, g->d.dtype};
    if (g->beta != 0) TE_TRY(copy_2d(ctx, padded_d, n, g->d.data, g->n, g->m, g->n, size));
    if (bias) {
      TE_TRY(temporary(ctx, &t, n * (int64_t)size, &padded_bias));
      TE_CUDA_TRY(ctx, te__pad_codes(bias, 1, g->n * (int64_t)size, g->n * (int64_t)size, padded_bias, 1,
                                     n * (int64_t)size, ctx->stream));
      bias = padded_bias;
    }
  }
  te_gemm gemm = {.a = {(void *)(uintptr_t)a, g->m, k, k, 1, g->a_dtype},
                  .b = {(void *)(uintptr_t)b, k, n, 1, k, g->b_dtype},
                  .d = d,
                  .bias = bias,
                  .beta = g->beta,
                  .a_scale = a_scale,
                  .b_scale = b_scale,
                  .fast = g->fast};
  TE_TRY(te__gemm(ctx, &gemm));
  if (padded_d) TE_TRY(copy_2d(ctx, g->d.data, g->n, padded_d, n, g->m, g->n, size));
  release_all(ctx, &t);
  return TE_OK;
}

/* bf16 and f16 both hold every code exactly; which one it is follows from the output. */
static int values_of(const te_context *ctx, const void *codes, te_dtype dtype, int64_t rows, int64_t cols,
                     te_dtype out_dtype, te_matrix *out) {
  te_matrix m = {(void *)(uintptr_t)codes, rows, cols, cols, 1, dtype};
  *out = (te_matrix){NULL, rows, cols, cols, 1, out_dtype};
  TE_TRY(workspace(ctx, rows * cols * 2, &out->data));
  return decode(ctx, m, NULL, out->data, out_dtype);
}

static int emulated_gemm(const te_context *ctx, const te_fp8_gemm *g) {
  te_matrix a, b;
  void *alpha_beta;
  te_dtype dtype = g->d.dtype == TE_f16 ? TE_f16 : TE_bf16;
  TE_TRY(values_of(ctx, g->a, g->a_dtype, g->m, g->k, dtype, &a));
  TE_TRY(values_of(ctx, g->b, g->b_dtype, g->n, g->k, dtype, &b));
  TE_TRY(workspace(ctx, 2 * sizeof(float), &alpha_beta));
  TE_CUDA_TRY(ctx, te__alpha_beta(g->a_scale_inv, g->b_scale_inv, g->beta, alpha_beta, ctx->stream));
  te_gemm gemm = {
      .a = a, .b = te__transposed(b), .d = g->d, .bias = g->bias, .beta = g->beta, .alpha_beta = alpha_beta};
  TE_TRY(te__gemm(ctx, &gemm));
  ctx->services->release(ctx, a.data);
  ctx->services->release(ctx, b.data);
  ctx->services->release(ctx, alpha_beta);
  return TE_OK;
}

static int gemm(const te_context *ctx, const te_fp8_gemm *gemm_) {
  te_fp8_gemm g = *gemm_;
  bool native = false;
  TE_TRY(has_fp8_cores(ctx, &native));
  if (g.bias && g.d.dtype == TE_f32) { /* no such epilogue: the bias is what is added to */
    TE_TRY(fill_rows(ctx, g.d, g.bias));
    g.bias = NULL;
    g.beta = 1.0f;
  }
  return native ? native_gemm(ctx, &g) : emulated_gemm(ctx, &g);
}

const te_fp8_backend te__fp8_cuda = {zero,
                                     amax,
                                     compare,
                                     cast,
                                     transpose,
                                     decode,
                                     gemm,
                                     fill_rows,
                                     te__cuda_column_sums,
                                     te__cast_sum_tiles,
                                     te__cast_is_one_tile,
                                     finish_sums,
                                     roll};
