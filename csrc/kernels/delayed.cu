/* Small kernels of scaling: one block each, so that a launch is nearly all they cost. */
#include "fp8_device.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)

__device__ float scale_of_history(const te_delayed_args &d, int tensor, float staged, float amax) {
  const te_delayed &how = d.how;
  bool e5m2 = how.backward_is_e5m2 && (tensor == TE_STATE_DY || tensor == TE_STATE_DX);
  if (how.new_scale) return how.new_scale[tensor];
  return te_delayed_scale(how.most_recent ? staged : amax, *te_state_scale(d.state, tensor),
                          e5m2 ? TE_E5M2_MAX : TE_E4M3_MAX, how.margin);
}

/* A thread moves a row, of all tensors at once. Tensors that staged nothing keep history and scale. */
__global__ void __launch_bounds__(THREADS) roll(te_delayed_args d, te_amax_word *zero, int n_zero) {
  constexpr int n = TE_STATE_TENSORS;
  __shared__ float warps[WARPS][n];
  int thread = (int)threadIdx.x, len = d.how.history_len, region = *d.region;
  float *history = te_state_amax(d.state, 0), staged[n], amax[n];
  let_next_start();
  if (thread < n_zero) zero[thread] = {0, 0};
  if (thread == 0 && d.seen) *d.seen = region;
  bool is_current = *(const int32_t *)d.state == region;
#pragma unroll
  for (int t = 0; t < n; t++) amax[t] = staged[t] = history[t];
  __syncthreads(); /* all have read what is written next */
  if (is_current) return;
  for (int begin = 0; begin < len; begin += THREADS) {
    int i = begin + thread;
    float next[n];
#pragma unroll
    for (int t = 0; t < n; t++) {
      next[t] = i + 1 < len ? history[(int64_t)(i + 1) * n + t] : staged[t];
      amax[t] = fmaxf(amax[t], next[t]);
    }
    __syncthreads(); /* each row is read before it is written */
#pragma unroll
    for (int t = 0; t < n; t++)
      if (i < len && staged[t] != 0) history[(int64_t)i * n + t] = i == 0 ? 0.0f : next[t];
  }
#pragma unroll
  for (int t = 0; t < n; t++) {
    for (int offset = 16; offset > 0; offset /= 2)
      amax[t] = fmaxf(amax[t], __shfl_xor_sync(~0u, amax[t], offset));
    if (thread % 32 == 0) warps[thread / 32][t] = amax[t];
  }
  __syncthreads();
  if (thread == 0) *(int32_t *)d.state = region;
#pragma unroll
  for (int t = 0; t < n; t++) {
    if (thread != t || staged[t] == 0) continue;
    for (int w = 0; w < WARPS; w++) amax[t] = fmaxf(amax[t], warps[w][t]);
    *te_state_scale(d.state, t) = scale_of_history(d, t, staged[t], amax[t]);
  }
}

extern "C" cudaError_t te__delayed_roll(const te_delayed_args *delayed, te_amax_word *zero, int n_zero,
                                        cudaStream_t stream) {
  roll<<<1, THREADS, 0, stream>>>(*delayed, zero, n_zero);
  return cudaGetLastError();
}

__global__ void zero_kernel(float *values) {
  let_next_start();
  values[threadIdx.x] = 0;
}

extern "C" cudaError_t te__zero(float *values, int n, cudaStream_t stream) {
  zero_kernel<<<1, (unsigned)n, 0, stream>>>(values);
  return cudaGetLastError();
}

__global__ void alpha_beta(const float *a, const float *b, float beta, float *out) {
  out[0] = *a * *b;
  out[1] = beta;
}

extern "C" cudaError_t te__alpha_beta(const float *a, const float *b, float beta, float *out,
                                      cudaStream_t stream) {
  alpha_beta<<<1, 1, 0, stream>>>(a, b, beta, out);
  return cudaGetLastError();
}
