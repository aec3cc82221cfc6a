/* What the quantizer kernels share: elements to fp32, fp32 to codes, reductions of a block. */
#ifndef TE_FP8_DEVICE_CUH
#define TE_FP8_DEVICE_CUH

#include "launch.cuh"
#include "te_quantize.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <te_dtype DTYPE> struct element;
template <> struct element<TE_bf16> { typedef uint16_t type; };
template <> struct element<TE_f16> { typedef uint16_t type; };
template <> struct element<TE_f32> { typedef float type; };
template <> struct element<TE_e4m3> { /* codes, which are only moved */
  typedef uint8_t type;
};

template <te_dtype DTYPE> __device__ __forceinline__ float to_f32(typename element<DTYPE>::type x) {
  if constexpr (DTYPE == TE_bf16)
    return te_bf16_to_f32(x);
  else if constexpr (DTYPE == TE_f16)
    return te_f16_to_f32(x);
  else
    return (float)x;
}

/* Two codes, the first in the lower byte. The instruction gives 0x7f for any NaN and saturates, as the
 * software does. */
template <bool E5M2> __device__ __forceinline__ uint32_t encode2(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  if constexpr (E5M2)
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  else
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  if constexpr (E5M2)
    return te_f32_to_e5m2(first) | (uint32_t)te_f32_to_e5m2(second) << 8;
  else
    return te_f32_to_e4m3(first) | (uint32_t)te_f32_to_e4m3(second) << 8;
#endif
}

/* Two packed elements as fp32, the first in the lower half. */
template <te_dtype DTYPE> __device__ __forceinline__ float2 unpack2(uint32_t pair) {
  if constexpr (DTYPE == TE_bf16)
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  else
    return __half22float2(*(const __half2 *)&pair);
}

/* The larger magnitudes of two pairs, packed; what is not NaN wins. (The sign is removed by hand, since the
 * compiler makes two multiplications of __habs2().) */
template <te_dtype DTYPE> __device__ __forceinline__ uint32_t amax2(uint32_t most, uint32_t pair) {
  pair &= 0x7fff7fffu;
  if constexpr (DTYPE == TE_bf16) {
    __nv_bfloat162 m = __hmax2(*(__nv_bfloat162 *)&most, *(__nv_bfloat162 *)&pair);
    return *(uint32_t *)&m;
  } else {
    __half2 m = __hmax2(*(__half2 *)&most, *(__half2 *)&pair);
    return *(uint32_t *)&m;
  }
}

/* fmaxf() drops a NaN. */
__device__ __forceinline__ float amax_of(float amax, float x) { return fmaxf(amax, fabsf(x)); }

template <int WARPS> __device__ float block_max(float value) {
  __shared__ float warps[WARPS];
  __syncthreads(); /* an earlier call's readers are done */
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = warps[0];
  for (int w = 1; w < WARPS; w++) value = fmaxf(value, warps[w]);
  return value;
}

/* Non-negative floats are ordered like their bits. */
__device__ __forceinline__ void atomic_amax(float *to, float value) {
  atomicMax((int *)to, __float_as_int(value));
}

#endif
