/* Elementwise conversion to and from fp32, in parallel. */
#ifndef TE_CONVERT_CPU_H
#define TE_CONVERT_CPU_H

#include "../te_format.h"
#include "../te_matrix.h"

/* The fp32 value of element `i` of a dense bf16, f16 or f32 array. Inline, so that loops choose the dtype
 * once. */
static inline float te__cpu_load(const void *data, te_dtype dtype, int64_t i) {
  switch (dtype) {
  case TE_bf16:
    return te_bf16_to_f32(((const uint16_t *)data)[i]);
  case TE_f16:
    return te_f16_to_f32(((const uint16_t *)data)[i]);
  default:
    return ((const float *)data)[i];
  }
}

static inline void te__cpu_store(void *data, te_dtype dtype, int64_t i, float value) {
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

/* A row-major fp32 copy of `m` in workspace memory. */
int te__cpu_to_f32(const te_context *ctx, const te_matrix *m, float **out);

#endif
