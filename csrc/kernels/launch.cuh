/* Chained launches (CUDA's programmatic dependent launch): between small kernels the gaps would cost as much
 * as the kernels. */
#ifndef TE_LAUNCH_CUH
#define TE_LAUNCH_CUH

#include <cuda_runtime.h>
#include <stdint.h>

/* A pointer that is not to shared or local memory; the compiler cannot tell by itself if it comes from a
 * struct. */
template <typename T> __device__ __forceinline__ T *global(T *pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

/* Until here a chained kernel may run beside the one before it in the stream; from here on, that one and all
 * it waited for have ended. All blocks of a chained kernel must come by, so that its end implies theirs. */
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* From here on a chained kernel may start, as soon as there is room for it. */
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Code that was compiled for less than Hopper, and then for the GPU from its PTX, does not wait. */
static bool waits(const void *kernel) {
  static volatile signed char
      known[64]; /* by device: 1 yes, -1 no; all kernels have the same architectures */
  int device = 0;
  cudaFuncAttributes attributes;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
  if (known[device] == 0) {
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return false;
    known[device] = attributes.ptxVersion >= 90 ? 1 : -1;
  }
  return known[device] > 0;
}

/* `chained`: the launch just before this one in the stream is one of ours. */
template <typename... PARAMETERS, typename... ARGUMENTS>
static cudaError_t launch(void (*kernel)(PARAMETERS...), int64_t blocks, unsigned threads, bool chained,
                          cudaStream_t stream, const ARGUMENTS &...arguments) {
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  cudaLaunchAttribute chain = {};
  chain.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  chain.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((unsigned)blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &chain;
  config.numAttrs = chained && waits((const void *)kernel) ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

#endif
