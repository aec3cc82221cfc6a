#include "convert_cpu.h"

#include "../te_format.h"

float te__cpu_load(const void *data, te_dtype dtype, int64_t i) {
  switch (dtype) {
  case TE_bf16:
    return te_bf16_to_f32(((const uint16_t *)data)[i]);
  case TE_f16:
    return te_f16_to_f32(((const uint16_t *)data)[i]);
  default:
    return ((const float *)data)[i];
  }
}

void te__cpu_store(void *data, te_dtype dtype, int64_t i, float value) {
  switch (dtype) {
  case TE_bf16:
    ((uint16_t *)data)[i] = te_f32_to_bf16(value);
    break;
  case TE_f16:
    ((uint16_t *)data)[i] = te_f32_to_f16(value);
    break;
  default:
    ((float *)data)[i] = value;
  }
}

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
