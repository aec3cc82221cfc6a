/* Elementwise conversion to and from fp32, in parallel. */
#ifndef TE_CONVERT_CPU_H
#define TE_CONVERT_CPU_H

#include "../te_matrix.h"

/* The fp32 value of element `i` of a dense bf16, f16 or f32 array. */
float te__cpu_load(const void *data, te_dtype dtype, int64_t i);
void te__cpu_store(void *data, te_dtype dtype, int64_t i, float value);

/* A row-major fp32 copy of `m` in workspace memory. */
int te__cpu_to_f32(const te_context *ctx, const te_matrix *m, float **out);

#endif
