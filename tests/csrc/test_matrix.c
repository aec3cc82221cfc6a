#include "te_matrix.h"
#include "test.h"

#include <stdio.h>

#define MAX_RANK 6

/* No data: what is compared are offsets of elements. */
static te_tensor tensor(int ndim, const int64_t *sizes, const int64_t *strides) {
  return (te_tensor){NULL, sizes, strides, ndim, TE_f32};
}

#define DIMS(...) ((const int64_t[]){__VA_ARGS__})
#define VIEW(n, sizes, strides, m) \
  (m = (te_matrix){0}, te__as_matrix(&(te_tensor){(void *)0x40, sizes, strides, n, TE_bf16}, &m))

static void check_view(te_matrix m, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  CHECK_INT(m.rows, rows);
  CHECK_INT(m.cols, cols);
  CHECK_INT(m.row_stride, row_stride);
  CHECK_INT(m.col_stride, col_stride);
}

TEST(contiguous) {
  te_matrix m;
  CHECK(VIEW(2, DIMS(3, 5), DIMS(5, 1), m));
  check_view(m, 3, 5, 5, 1);
  CHECK(m.data == (void *)0x40 && m.dtype == TE_bf16);
  CHECK(VIEW(4, DIMS(2, 3, 4, 5), DIMS(60, 20, 5, 1), m));
  check_view(m, 24, 5, 5, 1);
  CHECK(VIEW(1, DIMS(5), DIMS(1), m));
  check_view(m, 1, 5, 5, 1);
}

TEST(transposed) {
  te_matrix m;
  CHECK(VIEW(2, DIMS(3, 5), DIMS(1, 3), m));
  check_view(m, 3, 5, 1, 3);
  te_matrix t = te__transposed(m);
  check_view(t, 5, 3, 3, 1);
  CHECK(t.data == m.data && t.dtype == m.dtype);
  CHECK(VIEW(3, DIMS(2, 3, 5), DIMS(3, 1, 6), m)); /* (2 3) x 5, column-major */
  check_view(m, 6, 5, 1, 6);
}

TEST(padded_rows) {
  te_matrix m;
  CHECK(VIEW(2, DIMS(3, 5), DIMS(8, 1), m)); /* x[:, :5] */
  check_view(m, 3, 5, 8, 1);
  CHECK(VIEW(3, DIMS(2, 3, 5), DIMS(24, 8, 1), m));
  check_view(m, 6, 5, 8, 1);
  CHECK(!VIEW(3, DIMS(2, 3, 5), DIMS(40, 8, 1), m)); /* x[:, :3, :5] of 5 rows: no single row stride */
  CHECK(!VIEW(2, DIMS(3, 5), DIMS(10, 2), m));       /* x[:, ::2]: neither direction is contiguous */
}

TEST(permuted_leading_dims) {
  te_matrix m;
  CHECK(!VIEW(3, DIMS(3, 2, 5), DIMS(5, 15, 1), m));
}

TEST(expanded) {
  te_matrix m;
  CHECK(!VIEW(2, DIMS(3, 5), DIMS(0, 1), m));
  CHECK(!VIEW(2, DIMS(3, 5), DIMS(1, 0), m));
  CHECK(!VIEW(2, DIMS(3, 5), DIMS(0, 0), m));
  CHECK(!VIEW(3, DIMS(2, 3, 5), DIMS(0, 5, 1), m));
  CHECK(!VIEW(1, DIMS(5), DIMS(0), m));
  CHECK(!VIEW(2, DIMS(3, 1), DIMS(0, 1), m));
  CHECK(!VIEW(2, DIMS(3, 5), DIMS(2, 1), m)); /* overlapping windows (unfold) */
  CHECK(VIEW(2, DIMS(1, 5), DIMS(0, 1), m));  /* one row: nothing repeats */
  check_view(m, 1, 5, 5, 1);
}

TEST(dims_of_size_one_have_any_stride) {
  te_matrix m;
  CHECK(VIEW(4, DIMS(1, 3, 1, 5), DIMS(7, 5, 99, 1), m));
  check_view(m, 3, 5, 5, 1);
  CHECK(VIEW(2, DIMS(1, 5), DIMS(1, 1), m));
  check_view(m, 1, 5, 5, 1);
  CHECK(VIEW(2, DIMS(3, 1), DIMS(1, 77), m));
  check_view(m, 3, 1, 1, 3);
  CHECK(VIEW(2, DIMS(3, 1), DIMS(4, 77), m)); /* x[:, :1] */
  check_view(m, 3, 1, 4, 1);
  CHECK(VIEW(3, DIMS(1, 1, 1), DIMS(0, -5, 0), m));
  check_view(m, 1, 1, 1, 1);
  CHECK(VIEW(0, NULL, NULL, m));
  check_view(m, 1, 1, 1, 1);
}

TEST(vector_with_a_stride) {
  te_matrix m;
  CHECK(VIEW(1, DIMS(5), DIMS(3), m)); /* one row whose elements are 3 apart: column-major, ld = 3 */
  check_view(m, 1, 5, 1, 3);
}

TEST(nothing_to_walk_is_always_a_matrix) {
  te_matrix m;
  CHECK(VIEW(2, DIMS(0, 5), DIMS(5, 1), m));
  CHECK_INT(m.rows, 0);
  CHECK_INT(m.cols, 5);
  CHECK(VIEW(2, DIMS(3, 0), DIMS(1, 1), m));
  CHECK_INT(m.rows, 3);
  CHECK_INT(m.cols, 0);
  CHECK(m.row_stride >= 1 && m.col_stride >= 1); /* what a GEMM's leading dimension has to be even so */
  CHECK(VIEW(2, DIMS(0, 0), DIMS(0, 0), m));
  /* PyTorch's strides of an empty tensor are those of sizes clamped to 1; a body relies on a fresh
   * output being a matrix, and ignores the answer. */
  CHECK(VIEW(3, DIMS(2, 0, 5), DIMS(5, 5, 1), m));
  CHECK_INT(m.rows, 0);
  CHECK_INT(m.cols, 5);
  CHECK(VIEW(3, DIMS(0, 2, 5), DIMS(10, 5, 1), m));
  CHECK_INT(m.rows, 0);
  CHECK(VIEW(4, DIMS(3, 0, 2, 5), DIMS(10, 10, 5, 1), m));
  CHECK_INT(m.rows, 0);
  CHECK(VIEW(4, DIMS(2, 3, 4, 0), DIMS(12, 4, 1, 1), m));
  CHECK_INT(m.rows, 24);
  CHECK_INT(m.cols, 0);
  CHECK(VIEW(3, DIMS(4, 3, 0), DIMS(1, 9, 2), m)); /* permuted: still nothing to walk */
  CHECK_INT(m.rows, 12);
}

/* -------------------------------------------------------------------------------- properties --------- */

static void describe(int ndim, const int64_t *sizes, const int64_t *strides) {
  char text[300];
  int used = snprintf(text, sizeof text, "sizes");
  for (int i = 0; i < ndim; i++)
    used += snprintf(text + used, sizeof text - (size_t)used, " %d", (int)sizes[i]);
  used += snprintf(text + used, sizeof text - (size_t)used, ", strides");
  for (int i = 0; i < ndim; i++)
    used += snprintf(text + used, sizeof text - (size_t)used, " %d", (int)strides[i]);
  NOTE("%s", text);
}

/* Walks the tensor and its view together. */
static void check_same_elements(const te_tensor *t, const te_matrix *m) {
  int64_t index[MAX_RANK] = {0}, numel = 1;
  int last = t->ndim - 1;
  for (int i = 0; i < t->ndim; i++) numel *= t->sizes[i];
  CHECK_INT(m->rows * m->cols, numel);
  CHECK_INT(m->cols, t->ndim ? t->sizes[last] : 1);
  for (int64_t n = 0; n < numel; n++) {
    int64_t offset = 0;
    for (int i = 0; i < t->ndim; i++) offset += index[i] * t->strides[i];
    CHECK_INT(n / m->cols * m->row_stride + n % m->cols * m->col_stride, offset);
    for (int i = last; i >= 0 && ++index[i] == t->sizes[i]; i--) index[i] = 0;
  }
  if (numel == 0) return;
  /* What cuBLASLt needs: one contiguous direction, and a leading dimension that keeps elements apart. */
  CHECK((m->col_stride == 1 && m->row_stride >= m->cols) || (m->row_stride == 1 && m->col_stride >= m->rows));
}

/* Whether some matrix with one contiguous direction and no overlap has these elements in this order: by
 * trying, on the offsets themselves. */
static bool is_walkable(const te_tensor *t) {
  int64_t index[MAX_RANK] = {0}, numel = 1, offsets[4096];
  int last = t->ndim - 1;
  for (int i = 0; i < t->ndim; i++) numel *= t->sizes[i];
  if (numel == 0) return true;
  for (int64_t n = 0; n < numel; n++) {
    offsets[n] = 0;
    for (int i = 0; i < t->ndim; i++) offsets[n] += index[i] * t->strides[i];
    for (int i = last; i >= 0 && ++index[i] == t->sizes[i]; i--) index[i] = 0;
  }
  int64_t cols = t->ndim ? t->sizes[last] : 1, rows = numel / cols;
  int64_t col_stride = cols > 1 ? offsets[1] : 0, row_stride = rows > 1 ? offsets[cols] : 0;
  for (int64_t n = 0; n < numel; n++)
    if (offsets[n] != n / cols * row_stride + n % cols * col_stride) return false;
  if (cols == 1) return rows == 1 || row_stride >= 1;
  if (rows == 1) return col_stride >= 1;
  return (col_stride == 1 && row_stride >= cols) || (row_stride == 1 && col_stride >= rows);
}

static void check_tensor(int ndim, const int64_t *sizes, const int64_t *strides, int *n_true) {
  te_tensor t = tensor(ndim, sizes, strides);
  te_matrix m = {0};
  bool is_matrix = te__as_matrix(&t, &m);
  describe(ndim, sizes, strides);
  CHECK_INT(is_matrix, is_walkable(&t));
  if (!is_matrix) return;
  ++*n_true;
  check_same_elements(&t, &m);
  te_matrix back = te__transposed(te__transposed(m));
  check_same_elements(&t, &back);
}

PROPERTY(view_has_the_tensors_elements) {
  int n_true = 0;
  for (int trial = 0; trial < 60000; trial++) {
    int64_t sizes[MAX_RANK], strides[MAX_RANK];
    int ndim = (int)rng_below(r, MAX_RANK), order[MAX_RANK];
    bool permute = rng_below(r, 2), pad = rng_below(r, 2), odd = rng_below(r, 4) == 0;
    for (int i = 0; i < ndim; i++) sizes[i] = rng_below(r, 12) == 0 ? 0 : 1 + rng_below(r, 3), order[i] = i;
    for (int i = ndim - 1; i > 0 && permute; i--) {
      int j = (int)rng_below(r, i + 1), swap = order[i];
      order[i] = order[j];
      order[j] = swap;
    }
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; i--) { /* a permuted, perhaps padded layout */
      strides[order[i]] = step;
      step *= sizes[order[i]] > 1 ? sizes[order[i]] : 1;
      if (pad && rng_below(r, 3) == 0) step += rng_below(r, 3);
    }
    for (int i = 0; i < ndim; i++) {
      if (odd && rng_below(r, 3) == 0) strides[i] = rng_below(r, 7); /* expanded, or simply anything */
      if (sizes[i] == 1 && rng_below(r, 2)) strides[i] = rng_below(r, 100);
    }
    check_tensor(ndim, sizes, strides, &n_true);
  }
  CHECK(n_true > 10000); /* else the property above says little */
}

/* All small tensors of rank 3: sizes 0..3, strides 0..7. */
TEST(every_small_tensor) {
  int n_true = 0;
  for (int s = 0; s < 4 * 4 * 4; s++)
    for (int t = 0; t < 8 * 8 * 8; t++)
      check_tensor(3, DIMS(s & 3, s >> 2 & 3, s >> 4), DIMS(t & 7, t >> 3 & 7, t >> 6), &n_true);
  CHECK(n_true > 1000);
}
