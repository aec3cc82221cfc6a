/* 8 neighbours of a row in registers, as the kernels for aligned tensors handle them. */
#ifndef TE_CAST_LINE_CUH
#define TE_CAST_LINE_CUH

#include "fp8_device.cuh"

#define SUB 8

/* 8 neighbours of a row as they lie in memory. */
template <te_dtype IN> struct line {
  static constexpr int words = IN == TE_f32 ? 8 : IN == TE_e4m3 ? 2 : 4;
  uint32_t w[words];

  __device__ void load(const void *from) {
    if constexpr (words == 2) {
      *(uint2 *)w = *global((const uint2 *)from);
    } else {
#pragma unroll
      for (int i = 0; i < words; i += 4) *(uint4 *)&w[i] = global((const uint4 *)from)[i / 4];
    }
  }

  __device__ void values(float (&x)[SUB]) const {
    if constexpr (IN == TE_f32) {
#pragma unroll
      for (int i = 0; i < SUB; i++) x[i] = __uint_as_float(w[i]);
    } else {
#pragma unroll
      for (int i = 0; i < SUB / 2; i++) {
        float2 pair = unpack2<IN>(w[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }

  /* The running amax: packed where elements are 16 bits wide, which halves the work. */
  __device__ void add_to(uint32_t &most) const {
    if constexpr (IN == TE_f32) {
#pragma unroll
      for (int i = 0; i < SUB; i++)
        most = __float_as_uint(amax_of(__uint_as_float(most), __uint_as_float(w[i])));
    } else {
#pragma unroll
      for (int i = 0; i < words; i++) most = amax2<IN>(most, w[i]);
    }
  }
};

template <te_dtype IN> __device__ __forceinline__ float largest(uint32_t most) {
  if constexpr (IN == TE_f32) return __uint_as_float(most);
  float2 pair = unpack2 < IN == TE_f32 ? TE_bf16 : IN > (most);
  return fmaxf(pair.x, pair.y);
}

/* The line's codes, its values scaled. */
template <bool E5M2> __device__ __forceinline__ uint2 encode_line(float (&x)[SUB], float scale) {
#pragma unroll
  for (int v = 0; v < SUB; v++) x[v] *= scale;
  return make_uint2(encode2<E5M2>(x[0], x[1]) | encode2<E5M2>(x[2], x[3]) << 16,
                    encode2<E5M2>(x[4], x[5]) | encode2<E5M2>(x[6], x[7]) << 16);
}

#endif
