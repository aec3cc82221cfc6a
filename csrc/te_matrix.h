/* Seeing an N-D tensor as a matrix: leading dims flattened into rows, the last dim as columns. */
#ifndef TE_MATRIX_H
#define TE_MATRIX_H

#include "te_ops.h"

typedef struct te_matrix {
  void *data;
  int64_t rows, cols;
  int64_t row_stride, col_stride; /* one of them is 1 */
  te_dtype dtype;
} te_matrix;

/* False if no single stride walks the flattened rows, or neither direction is contiguous, or elements
 * overlap; then the tensor has to be copied first. A vector is one row. */
static inline bool te__as_matrix(const te_tensor *t, te_matrix *m) {
  int64_t rows = 1, row_stride = 0;
  int32_t last = t->ndim - 1;
  bool walkable = true;
  for (int32_t i = last - 1; i >= 0; i--) {
    if (t->sizes[i] == 1) continue;
    if (rows == 1)
      row_stride = t->strides[i];
    else if (walkable) /* not after the first mismatch: the product may overflow then */
      walkable = t->strides[i] == row_stride * rows;
    rows *= t->sizes[i];
  }
  int64_t cols = t->ndim ? t->sizes[last] : 1, col_stride = t->ndim ? t->strides[last] : 1;
  if (rows == 0 || cols == 0) { /* nothing to walk, whatever the strides say */
    te_matrix empty = {t->data, rows, cols, cols > 0 ? cols : 1, 1, t->dtype};
    *m = empty;
    return true;
  }
  if (!walkable) return false;
  if (rows == 1 && cols == 1)
    row_stride = col_stride = 1;
  else if (rows == 1)
    row_stride = col_stride == 1 ? cols : 1;
  else if (cols == 1)
    col_stride = row_stride == 1 ? rows : 1;
  m->data = t->data;
  m->rows = rows;
  m->cols = cols;
  m->row_stride = row_stride;
  m->col_stride = col_stride;
  m->dtype = t->dtype;
  return (col_stride == 1 && row_stride >= cols) || (row_stride == 1 && col_stride >= rows);
}

/* A strided slot, an output or an updated buffer: the host passes only what can be seen as a matrix. */
static inline te_matrix te__matrix_of(const te_arg *arg) {
  te_matrix m;
  te__as_matrix(arg->buf, &m);
  return m;
}

static inline bool te__is_empty(const te_matrix *m) { return m->rows == 0 || m->cols == 0; }

static inline te_matrix te__transposed(te_matrix m) {
  te_matrix t = {m.data, m.cols, m.rows, m.col_stride, m.row_stride, m.dtype};
  return t;
}

#endif
