/* Launchers of the norm kernels. They only enqueue work, and return the launch's status. */
#ifndef TE_NORM_KERNELS_H
#define TE_NORM_KERNELS_H

#include <cuda_runtime_api.h>

#include "../te_norm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* x has rows. */
cudaError_t te__norm_fwd(const te_norm_fwd *norm, cudaStream_t stream);

/* dx, and for dgamma and dbeta te__norm_bwd_partials() rows of fp32 sums each (NULL: not wanted). */
int64_t te__norm_bwd_partials(const te_norm_bwd *norm, int multiprocessors);
cudaError_t te__norm_bwd(const te_norm_bwd *norm, int64_t n_partials, float *dgamma, float *dbeta,
                         cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
