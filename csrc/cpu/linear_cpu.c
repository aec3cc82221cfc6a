/* Linear on the CPU: PyTorch's own GEMM does the products, the rest is here. */
#include "../te_status.h"
#include "../te_table.h"
#include "linear_cpu.h"

#include <string.h>

#define GRAIN 16384 /* elements that make a task worth handing to a thread */

int te__cpu_product(const te_context *ctx, te_matrix a, te_matrix b, const te_tensor *bias, te_matrix out) {
  int64_t sizes[3][2] = {{a.rows, a.cols}, {b.rows, b.cols}, {out.rows, out.cols}};
  int64_t strides[3][2] = {
      {a.row_stride, a.col_stride}, {b.row_stride, b.col_stride}, {out.row_stride, out.col_stride}};
  te_tensor ta = {a.data, sizes[0], strides[0], 2, a.dtype}, tb = {b.data, sizes[1], strides[1], 2, b.dtype},
            to = {out.data, sizes[2], strides[2], 2, out.dtype};
  return ctx->services->matmul(ctx, &ta, &tb, bias, &to);
}

void te__cpu_fill_rows(te_matrix out, const void *row) {
  size_t row_bytes = (size_t)out.cols * (out.dtype == TE_f32 ? 4 : 2);
  for (int64_t r = 0; r < out.rows; r++) {
    if (row)
      memcpy((char *)out.data + (size_t)r * row_bytes, row, row_bytes);
    else
      memset((char *)out.data + (size_t)r * row_bytes, 0, row_bytes);
  }
}

/* --------------------------------------------------------------------------------- linear_fwd -------- */

int te__linear_fwd_cpu(const te_context *ctx, const te_arg *args) {
  const te_linear_fwd *a = (const te_linear_fwd *)args;
  te_matrix x = te__matrix_of(&a->x), w = te__matrix_of(&a->w), y = te__matrix_of(&a->y);
  if (te__is_empty(&y)) return TE_OK;
  if (x.cols > 0) return te__cpu_product(ctx, x, te__transposed(w), a->b.present ? a->b.buf : NULL, y);
  te__cpu_fill_rows(y, a->b.present ? a->b.buf->data : NULL); /* K = 0: an empty sum, so y = b */
  return TE_OK;
}

/* --------------------------------------------------------------------------------- linear_bwd -------- */

typedef struct bias_grad_job {
  const te_matrix *dy;
  void *db;
} bias_grad_job;

/* Sums in double and rounds once: the reference that the CUDA sum in fp32 is held to. */
static void sum_columns(int64_t begin, int64_t end, void *user) {
  const bias_grad_job *job = user;
  const te_matrix *dy = job->dy;
  for (int64_t c = begin; c < end; c++) {
    double sum = 0;
    for (int64_t r = 0; r < dy->rows; r++)
      sum += te__cpu_load(dy->data, dy->dtype, r * dy->row_stride + c * dy->col_stride);
    te__cpu_store(job->db, dy->dtype, c, (float)sum);
  }
}

int te__cpu_column_sums(const te_context *ctx, te_matrix m, void *sums) {
  bias_grad_job job = {&m, sums};
  return ctx->services->parallel_for(ctx, m.cols, 1 + GRAIN / (m.rows + 1), sum_columns, &job);
}

/* out = a b, zero where the sum is empty */
static int gradient(const te_context *ctx, te_matrix a, te_matrix b, te_matrix out) {
  if (te__is_empty(&out)) return TE_OK;
  if (a.cols > 0) return te__cpu_product(ctx, a, b, NULL, out);
  memset(out.data, 0, (size_t)(out.rows * out.cols) * (out.dtype == TE_f32 ? 4 : 2));
  return TE_OK;
}

int te__linear_bwd_cpu(const te_context *ctx, const te_arg *args) {
  const te_linear_bwd *a = (const te_linear_bwd *)args;
  te_matrix dy = te__matrix_of(&a->dy);
  if (a->dx.present) TE_TRY(gradient(ctx, dy, te__matrix_of(&a->w), te__matrix_of(&a->dx)));
  if (a->dw.present) TE_TRY(gradient(ctx, te__transposed(dy), te__matrix_of(&a->x), te__matrix_of(&a->dw)));
  return a->db.present ? te__cpu_column_sums(ctx, dy, a->db.buf->data) : TE_OK;
}

/* ------------------------------------------------------------------------------- linear_wgrad -------- */

typedef struct accumulate_job {
  const float *product;
  const te_arg *main_grad;
  bool accumulate;
} accumulate_job;

static void accumulate_range(int64_t begin, int64_t end, void *user) {
  const accumulate_job *job = user;
  void *grad = job->main_grad->buf->data;
  te_dtype dtype = job->main_grad->buf->dtype;
  for (int64_t i = begin; i < end; i++)
    te__cpu_store(grad, dtype, i, job->product[i] + (job->accumulate ? te__cpu_load(grad, dtype, i) : 0.0f));
}

/* main_grad may be wider than the operands, so the product is formed in fp32 and rounded once, after the
 * addition. */
int te__linear_wgrad_cpu(const te_context *ctx, const te_arg *args) {
  const te_linear_wgrad *a = (const te_linear_wgrad *)args;
  te_matrix dy = te__matrix_of(&a->dy), x = te__matrix_of(&a->x), grad = te__matrix_of(&a->main_grad);
  float *dy32 = NULL, *x32 = NULL;
  void *product32 = NULL;
  if (te__is_empty(&grad)) return TE_OK;
  TE_TRY(ctx->services->workspace(ctx, (size_t)(grad.rows * grad.cols) * sizeof(float), &product32));
  te_matrix out = {product32, grad.rows, grad.cols, grad.cols, 1, TE_f32};
  if (dy.rows > 0) {
    TE_TRY(te__cpu_to_f32(ctx, &dy, &dy32));
    TE_TRY(te__cpu_to_f32(ctx, &x, &x32));
  }
  te_matrix dy_f32 = {dy32, dy.rows, dy.cols, dy.cols, 1, TE_f32},
            x_f32 = {x32, x.rows, x.cols, x.cols, 1, TE_f32};
  TE_TRY(gradient(ctx, te__transposed(dy_f32), x_f32, out));
  accumulate_job job = {product32, &a->main_grad, a->accumulate.i != 0};
  return ctx->services->parallel_for(ctx, grad.rows * grad.cols, GRAIN, accumulate_range, &job);
}
