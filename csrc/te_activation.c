/* The activation operators: from slots to one te_activation_pass, which each backend has a body for. */
#include "te_activation.h"

#include "te_status.h"
#include "te_table.h"

#include <stdio.h>

static const struct {
  const char *name;
  te_activation_function function;
  bool gated;
} kinds[] = {
#define X(name, function, gated) {#name, function, gated},
    TE_ACTIVATIONS(X)
#undef X
};

#define N_KINDS ((int64_t)(sizeof kinds / sizeof *kinds))

/* "0 (gelu), 3 (qgelu), …": the kinds that an operator takes. */
static void allowed(bool gated, char *text, size_t size) {
  size_t at = 0;
  text[0] = '\0';
  for (int64_t i = 0; i < N_KINDS && at < size; i++)
    if (kinds[i].gated == gated)
      at +=
          (size_t)snprintf(text + at, size - at, "%s%lld (%s)", at ? ", " : "", (long long)i, kinds[i].name);
}

static int pass_of(const te_context *ctx, const te_arg *x, const te_arg *dy, const te_arg *kind,
                   const te_arg *out, bool gated, te_activation_pass *pass) {
  char text[256];
  te_matrix m = te__matrix_of(x);
  allowed(gated, text, sizeof text);
  TE_REQUIRE(ctx->status, kind->i >= 0 && kind->i < N_KINDS && kinds[kind->i].gated == gated,
             "%s: kind = %lld: must be one of %s", ctx->op, (long long)kind->i, text);
  TE_REQUIRE(ctx->status, !gated || m.cols % 2 == 0, "%s: x has rows of %lld: they must have two halves",
             ctx->op, (long long)m.cols);
  *pass = (te_activation_pass){
      .activation = {kinds[kind->i].function, (float)kind[1].f, (float)kind[2].f, (float)kind[3].f},
      .gated = gated,
      .dtype = m.dtype,
      .rows = m.rows,
      .cols = gated ? m.cols / 2 : m.cols,
      .x = m.data,
      .dy = dy ? dy->buf->data : NULL,
      .out = out->buf->data};
  return TE_OK;
}

#define BODY(op, dy, out, gated, backend) \
  int te__##op##_##backend(const te_context *ctx, const te_arg *args) { \
    const te_##op *a = (const te_##op *)args; \
    te_activation_pass pass; \
    TE_TRY(pass_of(ctx, &a->x, dy, &a->kind, &a->out, gated, &pass)); \
    return pass.rows == 0 || pass.cols == 0 ? TE_OK : te__activation_##backend(ctx, &pass); \
  }

#define BODIES(backend) \
  BODY(activation_fwd, NULL, y, false, backend) \
  BODY(activation_bwd, &a->dy, dx, false, backend) \
  BODY(gated_fwd, NULL, y, true, backend) \
  BODY(gated_bwd, &a->dy, dx, true, backend)

BODIES(cpu)
#if defined(TE_WITH_CUDA)
BODIES(cuda)
#endif
