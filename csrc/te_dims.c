#include "te_dims.h"

#include <inttypes.h>
#include <stdio.h>

int te__dim_eval(const te_dim *dim, const te_arith *arith, const te_num *symbols, te_num *out) {
  te_num stack[TE_MAX_DIM_STEPS];
  int top = 0;
  for (int i = 0; i < dim->n; i++) {
    const te_dim_step *step = &dim->steps[i];
    switch (step->code) {
    case TE_DIM_CONST:
      TE_TRY(arith->constant(arith->user, step->operand, &stack[top]));
      top++;
      break;
    case TE_DIM_SYMBOL:
      stack[top++] = symbols[step->operand];
      break;
    default:
      top--;
      TE_TRY(arith->binary(arith->user, (enum te_dim_code)step->code, stack[top - 1], stack[top],
                           &stack[top - 1]));
    }
  }
  *out = stack[0];
  return TE_OK;
}

static int int64_constant(void *user, int64_t value, te_num *out) {
  (void)user;
  out->i = value;
  return TE_OK;
}

static int int64_binary(void *user, enum te_dim_code code, te_num a, te_num b, te_num *out) {
  te_status *status = user;
  bool overflow = false;
  int64_t result = 0;
  switch (code) {
  case TE_DIM_ADD:
    overflow = __builtin_add_overflow(a.i, b.i, &result);
    break;
  case TE_DIM_SUB:
    overflow = __builtin_sub_overflow(a.i, b.i, &result);
    break;
  case TE_DIM_MUL:
    overflow = __builtin_mul_overflow(a.i, b.i, &result);
    break;
  case TE_DIM_CEIL:
  case TE_DIM_UP:
    TE_REQUIRE(status, b.i > 0, "a size is divided by %" PRId64 ", which is not positive", b.i);
    result = a.i / b.i + (a.i % b.i > 0);
    if (code == TE_DIM_UP) overflow = __builtin_mul_overflow(result, b.i, &result);
    break;
  default:
    return te__fail(status, "unknown step %d in a dims program", (int)code);
  }
  TE_REQUIRE(status, !overflow, "a size overflows 64 bits (operands %" PRId64 " and %" PRId64 ")", a.i, b.i);
  out->i = result;
  return TE_OK;
}

static int int64_equal(void *user, te_num a, te_num b, bool *out) {
  (void)user;
  *out = a.i == b.i;
  return TE_OK;
}

static int int64_negative(void *user, te_num a, bool *out) {
  (void)user;
  *out = a.i < 0;
  return TE_OK;
}

static void int64_print(void *user, te_num a, char *text, size_t size) {
  (void)user;
  snprintf(text, size, "%" PRId64, a.i);
}

te_arith te__int64_arith(te_status *status) {
  return (te_arith){int64_constant, int64_binary, int64_equal, int64_negative, int64_print, status};
}
