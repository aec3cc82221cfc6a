/* What the norm kernels share: gamma and beta, sums over a block. */
#ifndef TE_NORM_DEVICE_CUH
#define TE_NORM_DEVICE_CUH

#include "row_vector.cuh"
#include "te_norm_kernels.h"

#define MOST_WARPS 16

__device__ __forceinline__ float vector_at(const te_norm_vector &v, int64_t c) {
  return v.dtype == TE_f32    ? ((const float *)v.data)[c]
         : v.dtype == TE_bf16 ? te_bf16_to_f32(((const uint16_t *)v.data)[c])
                              : te_f16_to_f32(((const uint16_t *)v.data)[c]);
}

/* N neighbours of gamma or beta; aligned like rows are. */
template <int N>
__device__ __forceinline__ void vector_values(const te_norm_vector &v, int64_t c, float (&out)[N]) {
  if (v.dtype == TE_f32) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      float4 four = *(const float4 *)((const float *)v.data + c + i);
      out[i] = four.x, out[i + 1] = four.y, out[i + 2] = four.z, out[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      uint2 four = *(const uint2 *)((const uint16_t *)v.data + c + i);
      float2 low = v.dtype == TE_bf16 ? unpack2<TE_bf16>(four.x) : unpack2<TE_f16>(four.x);
      float2 high = v.dtype == TE_bf16 ? unpack2<TE_bf16>(four.y) : unpack2<TE_f16>(four.y);
      out[i] = low.x, out[i + 1] = low.y, out[i + 2] = high.x, out[i + 3] = high.y;
    }
  }
}

/* Sums over the block, of up to MOST_WARPS whole warps, in an order that depends on its size alone. */
__device__ __forceinline__ float2 block_sums(float2 value) {
  __shared__ float2 warps[MOST_WARPS];
  int n = (int)blockDim.x / 32;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value.x += __shfl_xor_sync(~0u, value.x, offset);
    value.y += __shfl_xor_sync(~0u, value.y, offset);
  }
  if (n == 1) return value;
  __syncthreads(); /* an earlier call's readers are done */
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = make_float2(0, 0);
  for (int w = 0; w < n; w++) value.x += warps[w].x, value.y += warps[w].y;
  return value;
}

#endif
