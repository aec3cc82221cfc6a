#include "convert_cpu.h"

typedef struct copy_job {
  const te_matrix *from;
  float *to;
} copy_job;

static void copy_rows(int64_t begin, int64_t end, void *user) {
  const copy_job *job = user;
  const te_matrix *m = job->from;
  for (int64_t r = begin; r < end; r++)
    for (int64_t c = 0; c < m->cols; c++)
      job->to[r * m->cols + c] = te__cpu_load(m->data, m->dtype, r * m->row_stride + c * m->col_stride);
}

int te__cpu_to_f32(const te_context *ctx, const te_matrix *m, float **out) {
  void *memory;
  int rc = ctx->services->workspace(ctx, (size_t)(m->rows * m->cols) * sizeof(float), &memory);
  if (rc != TE_OK) return rc;
  *out = memory;
  copy_job job = {m, *out};
  return ctx->services->parallel_for(ctx, m->rows, 1 + 16384 / (m->cols + 1), copy_rows, &job);
}
