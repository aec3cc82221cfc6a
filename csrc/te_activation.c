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

const char *te__activation_name(int64_t i, bool *gated) {
  if (i < 0 || i >= N_KINDS) return NULL;
  *gated = kinds[i].gated;
  return kinds[i].name;
}

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
                   const te_arg *out, const te_arg *db, bool gated, te_activation_pass *pass) {
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
      .cols = gated ? m.cols / 2 : m.cols,
      .x = m,
      .dy = dy ? te__matrix_of(dy) : (te_matrix){0},
      .out = te__matrix_of(out),
      .db = db && db->present ? db->buf->data : NULL};
  return TE_OK;
}

#define BODY(op, dy, out, db, gated, backend) \
  int te__##op##_##backend(const te_context *ctx, const te_arg *args) { \
    const te_##op *a = (const te_##op *)args; \
    te_activation_pass pass; \
    TE_TRY(pass_of(ctx, &a->x, dy, &a->kind, &a->out, db, gated, &pass)); \
    return te__activation_##backend(ctx, &pass); \
  }

#define BODIES(backend) \
  BODY(activation_fwd, NULL, y, NULL, false, backend) \
  BODY(activation_bwd, &a->dy, dx, &a->db, false, backend) \
  BODY(gated_fwd, NULL, y, NULL, true, backend) \
  BODY(gated_bwd, &a->dy, dx, &a->db, true, backend)

BODIES(cpu)
#if defined(TE_WITH_CUDA)
BODIES(cuda)
#endif
