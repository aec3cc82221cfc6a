/* Codes to values, and codes with zeros around them. */
#include "fp8_device.cuh"

#define THREADS 256
#define WIDE 16 /* codes for each thread */

template <te_dtype OUT> __device__ __forceinline__ void store(typename element<OUT>::type *out, float value) {
  if constexpr (OUT == TE_bf16)
    *out = te_f32_to_bf16(value);
  else if constexpr (OUT == TE_f16)
    *out = te_f32_to_f16(value);
  else
    *out = value;
}

/* Codes of one tensor are few: a table in shared memory is faster than arithmetic, and has the definition's
 * bits. */
template <te_dtype OUT>
__global__ void __launch_bounds__(THREADS)
    decode(const uint8_t *__restrict__ codes, bool e5m2, const float *__restrict__ scale_inv,
           typename element<OUT>::type *__restrict__ out, int64_t n) {
  typedef typename element<OUT>::type T;
  __shared__ T table[256];
  float scale = scale_inv ? *scale_inv : 1.0f;
  for (int i = threadIdx.x; i < 256; i += THREADS)
    store<OUT>(&table[i], (e5m2 ? te_e5m2_to_f32((uint8_t)i) : te_e4m3_to_f32((uint8_t)i)) * scale);
  __syncthreads();
  constexpr int per_store = 16 / sizeof(T), stores = WIDE / per_store;
  struct alignas(16) piece {
    T v[per_store];
  };
  int64_t begin = (int64_t)blockIdx.x * THREADS * WIDE, end = min(n, begin + THREADS * WIDE);
  if (end - begin == THREADS * WIDE && (uintptr_t)codes % per_store == 0) {
#pragma unroll
    for (int s = 0; s < stores; s++) { /* neighbouring threads write neighbouring pieces */
      int64_t at = begin + ((int64_t)s * THREADS + threadIdx.x) * per_store;
      struct alignas(per_store) few {
        uint8_t v[per_store];
      } in = *(const few *)(codes + at);
      piece result;
#pragma unroll
      for (int v = 0; v < per_store; v++) result.v[v] = table[in.v[v]];
      *(piece *)(out + at) = result;
    }
    return;
  }
  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) out[i] = table[codes[i]];
}

extern "C" cudaError_t te__decode(const te_matrix *codes, const float *scale_inv, void *out,
                                  te_dtype out_dtype, cudaStream_t stream) {
  int64_t n = codes->rows * codes->cols, blocks = (n + THREADS * WIDE - 1) / (THREADS * WIDE);
  const uint8_t *in = (const uint8_t *)codes->data;
  bool e5m2 = codes->dtype == TE_e5m2;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (out_dtype == TE_bf16)
    decode<TE_bf16><<<(unsigned)blocks, THREADS, 0, stream>>>(in, e5m2, scale_inv, (uint16_t *)out, n);
  else if (out_dtype == TE_f16)
    decode<TE_f16><<<(unsigned)blocks, THREADS, 0, stream>>>(in, e5m2, scale_inv, (uint16_t *)out, n);
  else
    decode<TE_f32><<<(unsigned)blocks, THREADS, 0, stream>>>(in, e5m2, scale_inv, (float *)out, n);
  return cudaGetLastError();
}

__global__ void __launch_bounds__(THREADS)
    pad(const uint8_t *__restrict__ codes, int64_t rows, int64_t cols, int64_t row_stride,
        uint32_t *__restrict__ out, int64_t out_words, int64_t words_per_row) {
  int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
  if (i >= out_words) return;
  int64_t row = i / words_per_row, col = i % words_per_row * 4;
  uint32_t word = 0;
  if (row < rows)
#pragma unroll
    for (int b = 0; b < 4; b++)
      if (col + b < cols) word |= (uint32_t)codes[row * row_stride + col + b] << (8 * b);
  out[i] = word;
}

extern "C" cudaError_t te__pad_codes(const void *codes, int64_t rows, int64_t cols, int64_t row_stride,
                                     void *out, int64_t out_rows, int64_t out_cols, cudaStream_t stream) {
  int64_t words = out_rows * (out_cols / 4), blocks = (words + THREADS - 1) / THREADS;
  if (blocks > INT32_MAX || out_cols % 4 != 0) return cudaErrorInvalidValue;
  pad<<<(unsigned)blocks, THREADS, 0, stream>>>((const uint8_t *)codes, rows, cols, row_stride,
                                                (uint32_t *)out, words, out_cols / 4);
  return cudaGetLastError();
}
