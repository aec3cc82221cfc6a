/* Launchers of the quantizer kernels. They only enqueue work, and return the launch's status. */
#ifndef TE_QUANTIZE_H
#define TE_QUANTIZE_H

#include <cuda_runtime_api.h>

#include "../fp8/fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

/* values[0..n-1] = 0, n <= 1024. A kernel, unlike cudaMemsetAsync(), so that the next one need not wait for
 * its end. */
cudaError_t te__zero(float *values, int n, cudaStream_t stream);

/* Amaxes of n <= TE_CASTS tensors, in one launch if the dtypes are equal, into floats that the launch just
 * before this one zeroed. */
cudaError_t te__amax(const te_matrix *m, float *const *out, int n, cudaStream_t stream);

/* See te_fp8_backend.compare; the launch just before this one zeroed *out. */
cudaError_t te__compare(const te_matrix *x, uint64_t salt, bool force, uint64_t *held, te_comparison *out,
                        cudaStream_t stream);

/* n <= TE_CASTS casts, in one launch if their dtypes are equal. */
cudaError_t te__cast(const te_cast *casts, int n, cudaStream_t stream);

/* See te_fp8_backend. */
int64_t te__cast_sum_tiles(int64_t rows);
bool te__cast_is_one_tile(const te_cast *c);

/* out = codes^T; both contiguous. */
cudaError_t te__transpose_codes(const void *codes, void *out, int64_t rows, int64_t cols,
                                cudaStream_t stream);

/* out = the codes' values (times *scale_inv, if not NULL), rounded once; both contiguous. */
cudaError_t te__decode(const te_matrix *codes, const float *scale_inv, void *out, te_dtype out_dtype,
                       cudaStream_t stream);

/* Copies rows x cols bytes into out_rows x out_cols (a multiple of 4), with zeros around them. */
cudaError_t te__pad_codes(const void *codes, int64_t rows, int64_t cols, int64_t row_stride, void *out,
                          int64_t out_rows, int64_t out_cols, cudaStream_t stream);

/* See te_fp8_backend.roll. */
cudaError_t te__delayed_roll(const te_delayed_args *delayed, te_amax_word *zero, int n_zero,
                             cudaStream_t stream);

/* out = {*a * *b, beta} */
cudaError_t te__alpha_beta(const float *a, const float *b, float beta, float *out, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
