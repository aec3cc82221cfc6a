/* Launchers of the kernels in this folder. They only enqueue work, and return the launch's status. */
#ifndef TE_KERNELS_H
#define TE_KERNELS_H

#include <cuda_runtime_api.h>

#include "../te_matrix.h"

#ifdef __cplusplus
extern "C" {
#endif

/* sums[c] = the sum over r of m[r][c], added in fp32 in a fixed order, stored in m's dtype.
 * `partial` has te__column_sums_workspace() bytes. */
size_t te__column_sums_workspace(int64_t rows, int64_t cols);
cudaError_t te__column_sums(const te_matrix *m, void *sums, float *partial, cudaStream_t stream);

/* sums[c] = the sum over i of partial[i][c], in a fixed order. */
cudaError_t te__finish_column_sums(const float *partial, int64_t n, int64_t cols, void *sums, te_dtype dtype,
                                   cudaStream_t stream);

/* Every row of `out` (elements of `size` bytes, contiguous) becomes `row`, or zero if that is NULL. */
cudaError_t te__fill_rows(void *out, const void *row, int64_t rows, int64_t cols, size_t size,
                          cudaStream_t stream);

#define TE_SMALL_SIZE 128
#define TE_SMALL_PRODUCTS 3

/* d = a b, contiguous; or with sums_columns, d[c] = the sum of column c of a. */
typedef struct te_small_product {
  te_matrix a, b;
  void *d;
  bool sums_columns;
} te_small_product;

/* Up to TE_SMALL_PRODUCTS of them in one launch. All bf16 or all f16; every size from 1 to TE_SMALL_SIZE
 * (rows of a sum of columns: any number). */
cudaError_t te__small_products(const te_small_product *products, int n, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
