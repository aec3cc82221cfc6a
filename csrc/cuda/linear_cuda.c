/* Linear on CUDA: which GEMMs to run, and what to do when there is nothing to multiply. */
#include "../te_spec.h"
#include "../te_table.h"
#include "te_cuda.h"

int te__linear_fwd_cuda(const te_context *ctx, const te_arg *args) {
  const te_linear_fwd *a = (const te_linear_fwd *)args;
  te_matrix x = te__matrix_of(&a->x), w = te__matrix_of(&a->w), y = te__matrix_of(&a->y);
  const void *bias = a->b.present ? a->b.buf->data : NULL;
  if (te__is_empty(&y)) return TE_OK;
  if (x.cols == 0) { /* K = 0: an empty sum, so y = b */
    TE_CUDA_TRY(ctx, te__fill_rows(y.data, bias, y.rows, y.cols, te__dtype_size(y.dtype), ctx->stream));
    return TE_OK;
  }
  return te__gemm(ctx, &(te_gemm){.a = x, .b = te__transposed(w), .d = y, .bias = bias});
}

/* d = a b + beta d, and the sums of a's rows if wanted; an empty sum is zero. */
static int gradient(const te_context *ctx, te_matrix a, te_matrix b, te_matrix d, void *row_sums,
                    float beta) {
  if (!te__is_empty(&d) && a.cols > 0)
    return te__gemm(ctx, &(te_gemm){.a = a, .b = b, .d = d, .row_sums = row_sums, .beta = beta});
  if (!te__is_empty(&d) && beta == 0)
    TE_CUDA_TRY(ctx,
                cudaMemsetAsync(d.data, 0, (size_t)(d.rows * d.cols) * te__dtype_size(d.dtype), ctx->stream));
  return TE_OK;
}

int te__cuda_column_sums(const te_context *ctx, te_matrix dy, void *db) {
  void *partial;
  if (dy.cols == 0) return TE_OK;
  if (dy.rows == 0) {
    TE_CUDA_TRY(ctx, cudaMemsetAsync(db, 0, (size_t)dy.cols * te__dtype_size(dy.dtype), ctx->stream));
    return TE_OK;
  }
  TE_TRY(ctx->services->workspace(ctx, te__column_sums_workspace(dy.rows, dy.cols), &partial));
  TE_CUDA_TRY(ctx, te__column_sums(&dy, db, partial, ctx->stream));
  return TE_OK;
}

/* Whether a single launch for all gradients beats a GEMM each: up to here the GPU waits for the host. */
static bool is_small(const te_matrix *m) {
  return !te__is_empty(m) && m->rows <= TE_SMALL_SIZE && m->cols <= TE_SMALL_SIZE && m->dtype != TE_f32;
}

static int small_backward(const te_context *ctx, const te_linear_bwd *a, te_matrix dy) {
  te_small_product p[TE_SMALL_PRODUCTS];
  int n = 0;
  if (a->dx.present) p[n++] = (te_small_product){.a = dy, .b = te__matrix_of(&a->w), .d = a->dx.buf->data};
  if (a->dw.present)
    p[n++] = (te_small_product){.a = te__transposed(dy), .b = te__matrix_of(&a->x), .d = a->dw.buf->data};
  if (a->db.present) p[n++] = (te_small_product){.a = dy, .d = a->db.buf->data, .sums_columns = true};
  if (n > 0) TE_CUDA_TRY(ctx, te__small_products(p, n, ctx->stream));
  return TE_OK;
}

/* An operand that is absent is needed by nothing. */
static bool is_small_or_absent(const te_arg *arg) {
  te_matrix m = arg->present ? te__matrix_of(arg) : (te_matrix){0};
  return !arg->present || is_small(&m);
}

int te__linear_bwd_cuda(const te_context *ctx, const te_arg *args) {
  const te_linear_bwd *a = (const te_linear_bwd *)args;
  te_matrix dy = te__matrix_of(&a->dy);
  void *db = a->db.present ? a->db.buf->data : NULL;
  if (is_small(&dy) && is_small_or_absent(&a->x) && is_small_or_absent(&a->w))
    return small_backward(ctx, a, dy);
  if (a->dx.present) TE_TRY(gradient(ctx, dy, te__matrix_of(&a->w), te__matrix_of(&a->dx), NULL, 0));
  if (a->dw.present) {
    te_matrix dw = te__matrix_of(&a->dw), x = te__matrix_of(&a->x);
    /* The weight gradient reads dy anyway, so its GEMM can sum the columns on the way. */
    bool fused = db && !te__is_empty(&dw) && dy.rows > 0;
    TE_TRY(gradient(ctx, te__transposed(dy), x, dw, fused ? db : NULL, 0));
    if (fused) return TE_OK;
  }
  return db ? te__cuda_column_sums(ctx, dy, db) : TE_OK;
}

int te__linear_wgrad_cuda(const te_context *ctx, const te_arg *args) {
  const te_linear_wgrad *a = (const te_linear_wgrad *)args;
  te_matrix dy = te__matrix_of(&a->dy), x = te__matrix_of(&a->x), grad = te__matrix_of(&a->main_grad);
  return gradient(ctx, te__transposed(dy), x, grad, NULL, a->accumulate.i ? 1.0f : 0.0f);
}
