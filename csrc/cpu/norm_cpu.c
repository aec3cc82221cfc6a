/* Norms on the CPU: the definition. Sums over a row are formed in double, everything else in fp32 as on CUDA.
 */
#include "../te_norm.h"

#include "../te_status.h"
#include "convert_cpu.h"

#include <math.h>

#define GRAIN 16384 /* elements that make a task worth handing to a thread */

static int64_t grain_rows(int64_t cols) { return 1 + GRAIN / (cols + 1); }

static float gamma_at(const te_norm_vector *gamma, bool zero_centered, int64_t c) {
  float value = te__cpu_load(gamma->data, gamma->dtype, c);
  return zero_centered ? 1.0f + value : value;
}

/* ------------------------------------------------------------------------------------- forward ------- */

static void forward_rows(int64_t begin, int64_t end, void *user) {
  const te_norm_fwd *n = user;
  const te_matrix *x = &n->x;
  for (int64_t r = begin; r < end; r++) {
    int64_t row = r * x->cols;
    double sum = 0, squares = 0, count = x->cols > 0 ? (double)x->cols : 1.0;
    for (int64_t c = 0; c < x->cols && n->subtracts_mean; c++)
      sum += te__cpu_load(x->data, x->dtype, row + c);
    float mean = (float)(sum / count);
    for (int64_t c = 0; c < x->cols; c++) {
      double centered = (double)te__cpu_load(x->data, x->dtype, row + c) - mean;
      squares += centered * centered;
    }
    float rstd = 1.0f / sqrtf((float)(squares / count) + n->eps);
    for (int64_t c = 0; c < x->cols; c++) {
      float xhat = (te__cpu_load(x->data, x->dtype, row + c) - mean) * rstd;
      float y = xhat * gamma_at(&n->gamma, n->zero_centered, c);
      if (n->beta.data) y += te__cpu_load(n->beta.data, n->beta.dtype, c);
      te__cpu_store(n->y, x->dtype, row + c, y);
    }
    if (n->mean) n->mean[r] = mean;
    if (n->rstd) n->rstd[r] = rstd;
  }
}

int te__norm_fwd_cpu(const te_context *ctx, const te_norm_fwd *norm) {
  te_norm_fwd n = *norm;
  return ctx->services->parallel_for(ctx, n.x.rows, grain_rows(n.x.cols), forward_rows, &n);
}

/* ------------------------------------------------------------------------------------ backward ------- */

static float xhat_at(const te_norm_bwd *n, int64_t r, int64_t c) {
  float x = te__cpu_load(n->x.data, n->x.dtype, r * n->x.cols + c);
  return (n->mean ? x - n->mean[r] : x) * n->rstd[r];
}

static void input_rows(int64_t begin, int64_t end, void *user) {
  const te_norm_bwd *n = user;
  int64_t cols = n->x.cols;
  for (int64_t r = begin; r < end; r++) {
    double sum = 0, dot = 0;
    for (int64_t c = 0; c < cols; c++) {
      float g =
          te__cpu_load(n->dy.data, n->dy.dtype, r * cols + c) * gamma_at(&n->gamma, n->zero_centered, c);
      sum += g;
      dot += (double)g * xhat_at(n, r, c);
    }
    float mean_g = n->mean ? (float)(sum / (double)cols) : 0.0f, mean_dot = (float)(dot / (double)cols);
    for (int64_t c = 0; c < cols; c++) {
      float g =
          te__cpu_load(n->dy.data, n->dy.dtype, r * cols + c) * gamma_at(&n->gamma, n->zero_centered, c);
      te__cpu_store(n->dx, n->dy.dtype, r * cols + c,
                    n->rstd[r] * (g - mean_g - xhat_at(n, r, c) * mean_dot));
    }
  }
}

static void vector_columns(int64_t begin, int64_t end, void *user) {
  const te_norm_bwd *n = user;
  for (int64_t c = begin; c < end; c++) {
    double dgamma = 0, dbeta = 0;
    for (int64_t r = 0; r < n->x.rows; r++) {
      float dy = te__cpu_load(n->dy.data, n->dy.dtype, r * n->x.cols + c);
      dgamma += (double)dy * xhat_at(n, r, c);
      dbeta += dy;
    }
    if (n->dgamma) te__cpu_store(n->dgamma, n->gamma.dtype, c, (float)dgamma);
    if (n->dbeta) te__cpu_store(n->dbeta, n->gamma.dtype, c, (float)dbeta);
  }
}

int te__norm_bwd_cpu(const te_context *ctx, const te_norm_bwd *norm) {
  te_norm_bwd n = *norm;
  if (n.dx) TE_TRY(ctx->services->parallel_for(ctx, n.x.rows, grain_rows(n.x.cols), input_rows, &n));
  if (!n.dgamma && !n.dbeta) return TE_OK;
  return ctx->services->parallel_for(ctx, n.x.cols, grain_rows(n.x.rows), vector_columns, &n);
}
