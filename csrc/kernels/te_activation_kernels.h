/* Launchers of the activation kernels. They only enqueue work, and return the launch's status. */
#ifndef TE_ACTIVATION_KERNELS_H
#define TE_ACTIVATION_KERNELS_H

#include <cuda_runtime_api.h>

#include "../te_activation.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Neither rows nor columns are zero. */
cudaError_t te__activation(const te_activation_pass *pass, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
