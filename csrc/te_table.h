/* te_ops.def as C: for each operator a struct that names its slots, its bodies, and its row. */
#ifndef TE_TABLE_H
#define TE_TABLE_H

#include "te_ops.h"

/* struct te_linear_fwd { te_arg x, w, b, y; }: the layout of a body's `args`, so that a body says a->x. */
#define TE_IN(name, type) te_arg name;
#define TE_OUT(name, type) te_arg name;
#define TE_OP(name, doc, ...) \
  typedef struct te_##name { \
    __VA_ARGS__ \
  } te_##name; \
  int te__##name##_cpu(const te_context *ctx, const te_arg *args); \
  int te__##name##_cuda(const te_context *ctx, const te_arg *args);
#include "te_ops.def"
#undef TE_IN
#undef TE_OUT

extern const te_format_row te__formats[];
extern const te_op_row te__ops[];

#endif
