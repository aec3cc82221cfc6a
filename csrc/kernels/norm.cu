/* LayerNorm and RMSNorm, forward: a block has a row in registers.
 *
 * Floor: one read of x and one write of y. */
#include "norm_device.cuh"

#define ANY_THREADS 256

struct row_statistics {
  float mean, rstd;
};

__device__ __forceinline__ void keep(const te_norm_fwd &n, int64_t row, const row_statistics &s) {
  if (threadIdx.x != 0) return;
  if (n.mean) n.mean[row] = s.mean;
  if (n.rstd) n.rstd[row] = s.rstd;
}

/* From sums of what is left after subtracting a first estimate of the mean, which is then corrected: no
 * digits are lost where the mean is much larger than what varies. */
__device__ __forceinline__ row_statistics statistics_of(const te_norm_fwd &n, float estimate, float2 sums) {
  float count = n.x.cols > 0 ? (float)n.x.cols : 1.0f, rest = n.subtracts_mean ? sums.x / count : 0.0f;
  float variance = fmaxf(sums.y / count - rest * rest, 0.0f);
  return {estimate + rest, 1.0f / sqrtf(variance + n.eps)};
}

template <te_dtype IN, int VECTORS>
__global__ void __launch_bounds__(VECTORS == 8 ? 512 : 256) norm_rows(const __grid_constant__ te_norm_fwd n) {
  constexpr int size = row_vector<IN>::size;
  int vectors = (int)(n.x.cols / size);
  for (int64_t row = blockIdx.x; row < n.x.rows; row += gridDim.x) {
    const uint4 *from = (const uint4 *)n.x.data + row * vectors;
    uint4 *to = (uint4 *)n.y + row * vectors;
    row_vector<IN> in[VECTORS];
    float x[size], estimate = 0;
    float2 sums = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      int at = i * (int)blockDim.x + (int)threadIdx.x;
      in[i].raw = make_uint4(0, 0, 0, 0);
      if (at < vectors) in[i].raw = from[at];
    }
    if (n.subtracts_mean) {
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        in[i].values(x);
#pragma unroll
        for (int k = 0; k < size; k++) sums.x += x[k];
      }
      estimate = block_sums(sums).x / (float)n.x.cols;
    }
    sums = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      if (i * (int)blockDim.x + (int)threadIdx.x >= vectors) continue;
      in[i].values(x);
#pragma unroll
      for (int k = 0; k < size; k++) {
        float centered = x[k] - estimate;
        sums.x += centered;
        sums.y += centered * centered;
      }
    }
    row_statistics s = statistics_of(n, estimate, block_sums(sums));
    keep(n, row, s);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      int at = i * (int)blockDim.x + (int)threadIdx.x;
      float gamma[size], beta[size];
      if (at >= vectors) continue;
      in[i].values(x);
      vector_values(n.gamma, (int64_t)at * size, gamma);
      if (n.beta.data) vector_values(n.beta, (int64_t)at * size, beta);
#pragma unroll
      for (int k = 0; k < size; k++) {
        x[k] = (x[k] - s.mean) * s.rstd * (n.zero_centered ? 1.0f + gamma[k] : gamma[k]);
        if (n.beta.data) x[k] += beta[k];
      }
      in[i].set(x);
      to[at] = in[i].raw;
    }
  }
}

/* Any width and alignment: rows are read three times, from L2 at best. */
template <te_dtype IN>
__global__ void __launch_bounds__(ANY_THREADS) norm_any(const __grid_constant__ te_norm_fwd n) {
  typedef typename element<IN>::type T;
  for (int64_t row = blockIdx.x; row < n.x.rows; row += gridDim.x) {
    const T *x = (const T *)n.x.data + row * n.x.cols;
    T *y = (T *)n.y + row * n.x.cols;
    float2 sums = make_float2(0, 0);
    float estimate = 0;
    if (n.subtracts_mean) {
      for (int64_t c = threadIdx.x; c < n.x.cols; c += ANY_THREADS) sums.x += to_f32<IN>(x[c]);
      estimate = n.x.cols > 0 ? block_sums(sums).x / (float)n.x.cols : 0.0f;
    }
    sums = make_float2(0, 0);
    for (int64_t c = threadIdx.x; c < n.x.cols; c += ANY_THREADS) {
      float centered = to_f32<IN>(x[c]) - estimate;
      sums.x += centered;
      sums.y += centered * centered;
    }
    row_statistics s = statistics_of(n, estimate, block_sums(sums));
    keep(n, row, s);
    for (int64_t c = threadIdx.x; c < n.x.cols; c += ANY_THREADS) {
      float gamma = vector_at(n.gamma, c);
      float value = (to_f32<IN>(x[c]) - s.mean) * s.rstd * (n.zero_centered ? 1.0f + gamma : gamma);
      if (n.beta.data) value += vector_at(n.beta, c);
      store_element<IN>(y, c, value);
    }
  }
}

static bool is_aligned(const void *pointer) { return (uintptr_t)pointer % 16 == 0; }

template <te_dtype IN> static cudaError_t run(const te_norm_fwd *n, cudaStream_t stream) {
  int64_t blocks = n->x.rows < INT32_MAX ? n->x.rows : INT32_MAX, size = row_vector<IN>::size;
  int64_t vectors = n->x.cols / size;
  bool aligned = n->x.cols % size == 0 && is_aligned(n->x.data) && is_aligned(n->y) &&
                 is_aligned(n->gamma.data) && is_aligned(n->beta.data);
  if (!aligned || vectors == 0 || vectors > 8 * 512)
    return launch(norm_any<IN>, blocks, ANY_THREADS, false, stream, *n);
  int per_thread = vectors <= 256 ? 1 : vectors <= 512 ? 2 : vectors <= 1024 ? 4 : 8;
  unsigned threads = (unsigned)((vectors + per_thread * 32 - 1) / (per_thread * 32) * 32);
  switch (per_thread) {
  case 1:
    return launch(norm_rows<IN, 1>, blocks, threads, false, stream, *n);
  case 2:
    return launch(norm_rows<IN, 2>, blocks, threads, false, stream, *n);
  case 4:
    return launch(norm_rows<IN, 4>, blocks, threads, false, stream, *n);
  default:
    return launch(norm_rows<IN, 8>, blocks, threads, false, stream, *n);
  }
}

extern "C" cudaError_t te__norm_fwd(const te_norm_fwd *norm, cudaStream_t stream) {
  switch (norm->x.dtype) {
  case TE_bf16:
    return run<TE_bf16>(norm, stream);
  case TE_f16:
    return run<TE_f16>(norm, stream);
  case TE_f32:
    return run<TE_f32>(norm, stream);
  default:
    return cudaErrorInvalidValue;
  }
}
