/* Elements as kernels that work in fp32 move them: 16 bytes at a time, or one by one. */
#ifndef TE_ROW_VECTOR_CUH
#define TE_ROW_VECTOR_CUH

#include "fp8_device.cuh"

/* 16 bytes of a row. */
template <te_dtype IN> struct row_vector {
  typedef typename element<IN>::type T;
  static constexpr int size = 16 / sizeof(T);
  uint4 raw;

  __device__ __forceinline__ void values(float (&x)[size]) const {
    const uint32_t *w = (const uint32_t *)&raw;
    if constexpr (IN == TE_f32) {
#pragma unroll
      for (int i = 0; i < size; i++) x[i] = __uint_as_float(w[i]);
    } else {
#pragma unroll
      for (int i = 0; i < size / 2; i++) {
        float2 pair = unpack2<IN>(w[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ void set(const float (&x)[size]) {
    uint32_t *w = (uint32_t *)&raw;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (IN == TE_f32) {
        w[i] = __float_as_uint(x[i]);
      } else if constexpr (IN == TE_bf16) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        w[i] = *(uint32_t *)&pair;
      } else {
        __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        w[i] = *(uint32_t *)&pair;
      }
    }
  }
};

template <te_dtype IN> __device__ __forceinline__ void store_element(void *to, int64_t at, float value) {
  if constexpr (IN == TE_bf16)
    ((uint16_t *)to)[at] = te_f32_to_bf16(value);
  else if constexpr (IN == TE_f16)
    ((uint16_t *)to)[at] = te_f32_to_f16(value);
  else
    ((float *)to)[at] = value;
}

#endif
