/* Activations on the CPU: the definition. */
#include "../te_activation.h"

#include "convert_cpu.h"

#define GRAIN 4096 /* elements that make a task worth handing to a thread */

static void rows(int64_t begin, int64_t end, void *user) {
  const te_activation_pass *p = user;
  int64_t width = p->gated ? 2 * p->cols : p->cols;
  for (int64_t r = begin; r < end; r++)
    for (int64_t c = 0; c < p->cols; c++) {
      int64_t at = r * width + c, gate_at = at + p->cols;
      te_slope f = te_activate(&p->activation, te__cpu_load(p->x, p->dtype, at)), gate = {1, 0};
      if (p->gated) gate = te_gate(&p->activation, te__cpu_load(p->x, p->dtype, gate_at));
      if (!p->dy) {
        te__cpu_store(p->out, p->dtype, r * p->cols + c, f.value * gate.value);
        continue;
      }
      float dy = te__cpu_load(p->dy, p->dtype, r * p->cols + c);
      te__cpu_store(p->out, p->dtype, at, dy * gate.value * f.slope);
      if (p->gated) te__cpu_store(p->out, p->dtype, gate_at, dy * f.value * gate.slope);
    }
}

int te__activation_cpu(const te_context *ctx, const te_activation_pass *pass) {
  te_activation_pass p = *pass;
  return ctx->services->parallel_for(ctx, p.rows, 1 + GRAIN / p.cols, rows, &p);
}
