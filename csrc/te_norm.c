/* The norm operators: from slots to te_norm_fwd and te_norm_bwd, which each backend has a body for. */
#include "te_norm.h"
#include "te_table.h"

static bool flag(const te_arg *bits, int flag) { return (bits->i >> flag & 1) != 0; }

static void *data_of(const te_arg *arg) { return arg->present ? arg->buf->data : NULL; }

static te_norm_vector vector_of(const te_arg *arg) {
  return (te_norm_vector){data_of(arg), arg->present ? arg->buf->dtype : TE_f32};
}

#define ZERO_CENTERED \
  0 /* the first flag of all rows; what the others want is seen by the slots that are there */

static te_norm_fwd layernorm_fwd(const te_arg *args) {
  const te_layernorm_fwd *a = (const te_layernorm_fwd *)args;
  return (te_norm_fwd){.x = te__matrix_of(&a->x),
                       .gamma = vector_of(&a->gamma),
                       .beta = vector_of(&a->beta),
                       .eps = (float)a->eps.f,
                       .subtracts_mean = true,
                       .zero_centered = flag(&a->options, ZERO_CENTERED),
                       .y = a->y.buf->data,
                       .mean = data_of(&a->mean),
                       .rstd = data_of(&a->rstd)};
}

static te_norm_fwd rmsnorm_fwd(const te_arg *args) {
  const te_rmsnorm_fwd *a = (const te_rmsnorm_fwd *)args;
  return (te_norm_fwd){.x = te__matrix_of(&a->x),
                       .gamma = vector_of(&a->gamma),
                       .eps = (float)a->eps.f,
                       .zero_centered = flag(&a->options, ZERO_CENTERED),
                       .y = a->y.buf->data,
                       .rstd = data_of(&a->rstd)};
}

static te_norm_bwd layernorm_bwd(const te_arg *args) {
  const te_layernorm_bwd *a = (const te_layernorm_bwd *)args;
  return (te_norm_bwd){.dy = te__matrix_of(&a->dy),
                       .x = te__matrix_of(&a->x),
                       .gamma = vector_of(&a->gamma),
                       .mean = a->mean.buf->data,
                       .rstd = a->rstd.buf->data,
                       .zero_centered = flag(&a->options, ZERO_CENTERED),
                       .dx = data_of(&a->dx),
                       .dgamma = data_of(&a->dgamma),
                       .dbeta = data_of(&a->dbeta)};
}

static te_norm_bwd rmsnorm_bwd(const te_arg *args) {
  const te_rmsnorm_bwd *a = (const te_rmsnorm_bwd *)args;
  return (te_norm_bwd){.dy = te__matrix_of(&a->dy),
                       .x = te__matrix_of(&a->x),
                       .gamma = vector_of(&a->gamma),
                       .rstd = a->rstd.buf->data,
                       .zero_centered = flag(&a->options, ZERO_CENTERED),
                       .dx = data_of(&a->dx),
                       .dgamma = data_of(&a->dgamma)};
}

#define BODY(name, kind, backend) \
  int te__##name##_##backend(const te_context *ctx, const te_arg *args) { \
    te_norm_##kind norm = name(args); \
    return te__norm_##kind##_##backend(ctx, &norm); \
  }

BODY(layernorm_fwd, fwd, cpu)
BODY(layernorm_bwd, bwd, cpu)
BODY(rmsnorm_fwd, fwd, cpu)
BODY(rmsnorm_bwd, bwd, cpu)
#if defined(TE_WITH_CUDA)
BODY(layernorm_fwd, fwd, cuda)
BODY(layernorm_bwd, bwd, cuda)
BODY(rmsnorm_fwd, fwd, cuda)
BODY(rmsnorm_bwd, bwd, cuda)
#endif
