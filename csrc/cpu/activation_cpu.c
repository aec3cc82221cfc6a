/* Activations on the CPU: the definition. */
#include "../te_activation.h"

#include "../te_status.h"
#include "convert_cpu.h"
#include "linear_cpu.h"

#define GRAIN 4096 /* elements that make a task worth handing to a thread */

static float load(const te_matrix *m, int64_t row, int64_t col) {
  return te__cpu_load(m->data, m->dtype, row * m->row_stride + col * m->col_stride);
}

static void store(const te_matrix *m, int64_t row, int64_t col, float value) {
  te__cpu_store(m->data, m->dtype, row * m->cols + col, value);
}

static void rows(int64_t begin, int64_t end, void *user) {
  const te_activation_pass *p = user;
  for (int64_t r = begin; r < end; r++)
    for (int64_t c = 0; c < p->cols; c++) {
      te_slope f = te_activate(&p->activation, load(&p->x, r, c)), gate = {1, 0};
      if (p->gated) gate = te_gate(&p->activation, load(&p->x, r, p->cols + c));
      if (!p->dy.data) {
        store(&p->out, r, c, f.value * gate.value);
        continue;
      }
      float dy = load(&p->dy, r, c);
      store(&p->out, r, c, dy * gate.value * f.slope);
      if (p->gated) store(&p->out, r, p->cols + c, dy * f.value * gate.slope);
    }
}

int te__activation_cpu(const te_context *ctx, const te_activation_pass *pass) {
  te_activation_pass p = *pass;
  if (!te__is_empty(&p.out))
    TE_TRY(ctx->services->parallel_for(ctx, p.out.rows, 1 + GRAIN / p.cols, rows, &p));
  return p.db ? te__cpu_column_sums(ctx, p.out, p.db) : TE_OK;
}
