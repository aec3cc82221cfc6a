/* The hash and the amax of a tensor in one read, and the comparison with a hash that is held. Floor: one
 * read. */
#include "fp8_device.cuh"

#include "../te_fingerprint.h"

#define THREADS 256
#define WARPS (THREADS / 32)
#define VECTORS 4        /* loads in flight, for each thread */
#define MOST_BLOCKS 2112 /* several for each multiprocessor of the largest GPUs */

__device__ __forceinline__ uint64_t block_sum(uint64_t value) {
  __shared__ unsigned long long warps[WARPS];
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (int w = 0; w < WARPS; w++) value += warps[w];
  return value;
}

/* Word i of eight bytes: whole, or what is left of the tensor and zeros. */
template <typename T> __device__ __forceinline__ uint64_t word_at(const T *data, int64_t n, int64_t i) {
  constexpr int per_word = 8 / sizeof(T);
  uint64_t word = 0;
#pragma unroll
  for (int k = 0; k < per_word; k++) {
    int64_t at = i * per_word + k;
    if (at >= n) continue;
    T value = data[at];
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    word |= bits << (8 * sizeof(T) * k);
  }
  return word;
}

template <te_dtype IN> __device__ __forceinline__ float amax_of_word(float amax, uint64_t word) {
  uint32_t low = (uint32_t)word, high = (uint32_t)(word >> 32);
  if constexpr (IN == TE_f32) return amax_of(amax_of(amax, __uint_as_float(low)), __uint_as_float(high));
  float2 pair = unpack2 < IN == TE_f32
                    ? TE_bf16
                    : IN > (amax2 < IN == TE_f32 ? TE_bf16 : IN > (low & 0x7fff7fffu, high));
  return fmaxf(amax, fmaxf(pair.x, pair.y));
}

template <te_dtype IN, bool ALIGNED>
__global__ void __launch_bounds__(THREADS)
    compare(const void *data, int64_t n, uint64_t salt, bool force, uint64_t *held, te_comparison *out) {
  typedef typename element<IN>::type T;
  let_next_start();
  int64_t words = (n * (int64_t)sizeof(T) + 7) / 8, vectors = ALIGNED ? n * (int64_t)sizeof(T) / 16 : 0;
  int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x, step = (int64_t)gridDim.x * THREADS;
  uint64_t sum = 0;
  float amax = 0;
  for (int64_t i = first; i < vectors; i += step * VECTORS) {
    ulonglong2 in[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
      if (i + k * step < vectors) in[k] = ((const ulonglong2 *)data)[i + k * step];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
      uint64_t at = (uint64_t)(i + k * step);
      if ((int64_t)at >= vectors) continue;
      sum += te_fingerprint_mix(in[k].x, 2 * at, salt) + te_fingerprint_mix(in[k].y, 2 * at + 1, salt);
      amax = amax_of_word<IN>(amax_of_word<IN>(amax, in[k].x), in[k].y);
    }
  }
  for (int64_t i = 2 * vectors + first; i < words; i += step) {
    uint64_t word = word_at((const T *)data, n, i);
    sum += te_fingerprint_mix(word, (uint64_t)i, salt);
    amax = amax_of_word<IN>(amax, word);
  }
  sum = block_sum(sum);
  amax = block_max<WARPS>(amax);
  wait_for_previous(); /* for the zeros */
  if (threadIdx.x != 0) return;
  atomicAdd((unsigned long long *)&out->hash, (unsigned long long)sum);
  atomic_amax(&out->amax, amax);
  __threadfence();
  if (atomicAdd(&out->done, 1u) + 1 != gridDim.x) return;
  uint64_t hash = te_fingerprint_end(atomicAdd((unsigned long long *)&out->hash, 0ull)); /* an atomic read */
  out->is_same = !force && hash == *held;
  *held = hash;
}

template <te_dtype IN>
static cudaError_t run(const te_matrix *x, uint64_t salt, bool force, uint64_t *held, te_comparison *out,
                       cudaStream_t stream) {
  int64_t n = x->rows * x->cols, per_block = THREADS * VECTORS * 16 / sizeof(typename element<IN>::type);
  int64_t blocks = (n + per_block - 1) / per_block;
  blocks = blocks < 1 ? 1 : blocks > MOST_BLOCKS ? MOST_BLOCKS : blocks;
  bool aligned = (uintptr_t)x->data % 16 == 0;
  return launch(aligned ? compare<IN, true> : compare<IN, false>, blocks, THREADS, true, stream,
                (const void *)x->data, n, salt, force, held, out);
}

extern "C" cudaError_t te__compare(const te_matrix *x, uint64_t salt, bool force, uint64_t *held,
                                   te_comparison *out, cudaStream_t stream) {
  switch (x->dtype) {
  case TE_bf16:
    return run<TE_bf16>(x, salt, force, held, out, stream);
  case TE_f16:
    return run<TE_f16>(x, salt, force, held, out, stream);
  case TE_f32:
    return run<TE_f32>(x, salt, force, held, out, stream);
  default:
    return cudaErrorInvalidValue;
  }
}
