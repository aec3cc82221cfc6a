/* Dims programs: sizes as expressions over symbols, parsed once (te_parse.c) and evaluated by one
 * interpreter over whichever numbers the caller has: int64_t when a kernel is about to allocate, Python
 * numbers (SymInt among them) when PyTorch traces. */
#ifndef TE_DIMS_H
#define TE_DIMS_H

#include "te_status.h"

#define TE_MAX_DIM_STEPS 16
#define TE_MAX_DIMS 4 /* dims written in a row, besides leading ones */
#define TE_MAX_SYMBOLS 8

enum te_dim_code {
  TE_DIM_CONST,
  TE_DIM_SYMBOL,
  TE_DIM_ADD,
  TE_DIM_SUB,
  TE_DIM_MUL,
  TE_DIM_CEIL, /* ceil(a, b): a / b rounded up */
  TE_DIM_UP,   /* up(a, b): the next multiple of b */
};

typedef struct te_dim_step {
  int32_t code;
  int32_t operand; /* the constant, or the symbol's index */
} te_dim_step;

/* Postfix. */
typedef struct te_dim {
  int32_t n;
  te_dim_step steps[TE_MAX_DIM_STEPS];
} te_dim;

typedef struct te_shape {
  int32_t spread; /* symbol of "*M" in front, or -1 */
  int32_t n;
  te_dim dims[TE_MAX_DIMS];
} te_shape;

typedef union te_num {
  int64_t i;
  void *obj; /* PyObject *, owned by the arithmetic */
} te_num;

typedef struct te_arith {
  int (*constant)(void *user, int64_t value, te_num *out);
  int (*binary)(void *user, enum te_dim_code code, te_num a, te_num b, te_num *out);
  int (*equal)(void *user, te_num a, te_num b, bool *out);
  int (*negative)(void *user, te_num a, bool *out);
  void (*print)(void *user, te_num a, char *text, size_t size);
  void *user; /* for te_int64_arith: the te_status */
} te_arith;

/* Checked 64-bit arithmetic; overflow and division by a non-positive number are errors. */
te_arith te__int64_arith(te_status *status);

/* `symbols[i]` must be bound for every symbol that the program uses. */
int te__dim_eval(const te_dim *dim, const te_arith *arith, const te_num *symbols, te_num *out);

static inline bool te__dim_is_symbol(const te_dim *dim) {
  return dim->n == 1 && dim->steps[0].code == TE_DIM_SYMBOL;
}

#endif
