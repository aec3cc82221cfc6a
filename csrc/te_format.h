/* Bit-exact encoding and decoding of element formats, shared by CPU and CUDA code. */
#ifndef TE_FORMAT_H
#define TE_FORMAT_H

#include "te_ops.h"

#if defined(__CUDACC__)
#define TE_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define TE_HOST_DEVICE static inline
#endif

TE_HOST_DEVICE float te_bits_to_f32(uint32_t bits) {
  union {
    uint32_t u;
    float f;
  } v;
  v.u = bits;
  return v.f;
}

TE_HOST_DEVICE uint32_t te_f32_to_bits(float value) {
  union {
    uint32_t u;
    float f;
  } v;
  v.f = value;
  return v.u;
}

TE_HOST_DEVICE float te_bf16_to_f32(uint16_t x) { return te_bits_to_f32((uint32_t)x << 16); }

/* Round to nearest, ties to even; NaN stays NaN (quiet), overflow goes to infinity. */
TE_HOST_DEVICE uint16_t te_f32_to_bf16(float value) {
  uint32_t bits = te_f32_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

TE_HOST_DEVICE float te_f16_to_f32(uint16_t x) {
  uint32_t sign = (uint32_t)(x & 0x8000u) << 16, exponent = x >> 10 & 0x1fu, mantissa = x & 0x3ffu;
  if (exponent == 0x1fu) return te_bits_to_f32(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return te_bits_to_f32(sign | (exponent + 112u) << 23 | mantissa << 13);
  float magnitude = (float)mantissa * 5.9604644775390625e-8f; /* 2^-24: subnormals are exact in fp32 */
  return te_bits_to_f32(sign | te_f32_to_bits(magnitude));
}

TE_HOST_DEVICE uint16_t te_f32_to_f16(float value) {
  uint32_t bits = te_f32_to_bits(value), sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (bits >> 13 & 0x3ffu));
  if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
  if (bits < 0x38800000u) {
    /* Subnormal: adding 0.5 aligns the mantissa so that the FPU's own rounding does the work. */
    float aligned = te_bits_to_f32(bits) + 0.5f;
    return (uint16_t)(sign | (te_f32_to_bits(aligned) - 0x3f000000u));
  }
  bits += 0xc8000fffu + (bits >> 13 & 1u);
  return (uint16_t)(sign | bits >> 13);
}

/* ------------------------------------------------------------------------------------------ fp8 ------ */

#define TE_E4M3_MAX 448.0f
#define TE_E5M2_MAX 57344.0f
#define TE_FP8_NAN 0x7f

/* Encodes |value| for a format of `mantissa` bits whose smallest normal is 2^min_exp and whose largest code
 * is `max_code`: round to nearest, ties to even, saturating, infinity too. The sign is the caller's. */
TE_HOST_DEVICE uint8_t te_f32_to_fp8(float value, int mantissa, int min_exp, float max, uint8_t max_code) {
  uint32_t bits = te_f32_to_bits(value);
  uint8_t sign = (uint8_t)(bits >> 24 & 0x80u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return TE_FP8_NAN; /* whatever its sign, as the hardware does */
  if (te_bits_to_f32(bits) >= max) return (uint8_t)(sign | max_code);
  if (bits < (uint32_t)(min_exp + 127) << 23) {
    /* Subnormal: adding 1.5 * 2^p, whose last bit is the format's smallest step, lets the FPU round. */
    float anchor = te_bits_to_f32((uint32_t)(min_exp - mantissa + 23 + 127) << 23 | 0x400000u);
    return (uint8_t)(sign | (te_f32_to_bits(te_bits_to_f32(bits) + anchor) - te_f32_to_bits(anchor)));
  }
  int drop = 23 - mantissa;
  bits += (1u << (drop - 1)) - 1u + (bits >> drop & 1u);
  bits -= (uint32_t)(min_exp + 126) << 23;
  return (uint8_t)(sign | bits >> drop);
}

TE_HOST_DEVICE uint8_t te_f32_to_e4m3(float x) { return te_f32_to_fp8(x, 3, -6, TE_E4M3_MAX, 0x7e); }
TE_HOST_DEVICE uint8_t te_f32_to_e5m2(float x) { return te_f32_to_fp8(x, 2, -14, TE_E5M2_MAX, 0x7b); }

TE_HOST_DEVICE float te_e5m2_to_f32(uint8_t x) { return te_f16_to_f32((uint16_t)(x << 8)); }

TE_HOST_DEVICE float te_e4m3_to_f32(uint8_t x) {
  uint32_t sign = (uint32_t)(x & 0x80u) << 24, exponent = x >> 3 & 0xfu, mantissa = x & 7u;
  if ((x & 0x7fu) == 0x7fu) return te_bits_to_f32(sign | 0x7fc00000u);
  if (exponent) return te_bits_to_f32(sign | (exponent + 120u) << 23 | mantissa << 20);
  return te_bits_to_f32(sign | te_f32_to_bits((float)mantissa * 0.001953125f)); /* 2^-9 */
}

#endif
