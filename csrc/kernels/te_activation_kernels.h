/* Launchers of the activation kernels. They only enqueue work, and return the launch's status. */
#ifndef TE_ACTIVATION_KERNELS_H
#define TE_ACTIVATION_KERNELS_H

#include <cuda_runtime_api.h>

#include "../te_activation.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Neither rows nor columns are zero. With db, `partial` gets te__activation_partials() rows of sums, as many
 * columns as dx has, which te__finish_column_sums() adds up. */
int64_t te__activation_partials(const te_activation_pass *pass);
cudaError_t te__activation(const te_activation_pass *pass, float *partial, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
