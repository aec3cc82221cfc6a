/* Small kernels of scaling: one block each, so that a launch is nearly all they cost. */
#include "fp8_device.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)

__device__ float scale_of_history(const te_delayed_args &d, int tensor, float amax, float previous) {
  const te_delayed &how = d.how;
  bool e5m2 = how.backward_is_e5m2 && (tensor == TE_STATE_DY || tensor == TE_STATE_DX);
  if (how.new_scale) return how.new_scale[tensor];
  return te_delayed_scale(amax, previous, e5m2 ? TE_E5M2_MAX : TE_E4M3_MAX, how.margin);
}

/* Row i of a history as it will be: the one after it, or what was staged. */
__device__ __forceinline__ void load_next(float (&next)[TE_STATE_TENSORS], const float *history,
                                          const float (&staged)[TE_STATE_TENSORS], int i, int len) {
#pragma unroll
  for (int t = 0; t < TE_STATE_TENSORS; t++)
    next[t] = i + 1 < len ? history[(int64_t)(i + 1) * TE_STATE_TENSORS + t] : staged[t];
}

/* A thread moves a row, of all tensors at once. Tensors that staged nothing keep history and scale.
 * Everything that may be needed is loaded at once, before it is known whether it is: latency is all that this
 * kernel costs. */
__global__ void __launch_bounds__(THREADS) roll(te_delayed_args d, te_amax_word *zero, int n_zero) {
  constexpr int n = TE_STATE_TENSORS;
  __shared__ float warps[n][WARPS];
  int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32, len = d.how.history_len;
  float *history = te_state_amax(d.state, 0), staged[n], next[n], amax[n];
  let_next_start();
  int region = *d.region, rolled = *(const int32_t *)d.state;
  float previous = warp < n ? *te_state_scale(d.state, warp) : 0.0f;
#pragma unroll
  for (int t = 0; t < n; t++) staged[t] = history[t];
  load_next(next, history, staged, thread, len);
  if (thread < n_zero) zero[thread] = {0, 0};
  if (thread == 0 && d.seen) *d.seen = region;
  __syncthreads(); /* all have read what is written next */
  if (rolled == region) return;
#pragma unroll
  for (int t = 0; t < n; t++) amax[t] = staged[t];
  for (int i = thread; i - thread < len; i += THREADS) {
    if (i >= THREADS) load_next(next, history, staged, i, len);
    __syncthreads(); /* each row is read before it is written */
    if (i >= len) continue;
#pragma unroll
    for (int t = 0; t < n; t++) {
      amax[t] = fmaxf(amax[t], next[t]);
      if (staged[t] != 0) history[(int64_t)i * n + t] = i == 0 ? 0.0f : next[t];
    }
  }
#pragma unroll
  for (int t = 0; t < n; t++) {
    for (int offset = 16; offset > 0; offset /= 2)
      amax[t] = fmaxf(amax[t], __shfl_xor_sync(~0u, amax[t], offset));
    if (lane == 0) warps[t][warp] = amax[t];
  }
  __syncthreads();
  if (thread == 0) *(int32_t *)d.state = region;
  if (warp >= n) return;
  float most = warps[warp][lane], own = 0;
  for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
#pragma unroll
  for (int t = 0; t < n; t++)
    if (warp == t) own = staged[t];
  if (lane == 0 && own != 0)
    *te_state_scale(d.state, warp) = scale_of_history(d, warp, d.how.most_recent ? own : most, previous);
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
