/* Delayed scaling's own small kernels: one block each, so that a launch is nearly all they cost. */
#include "fp8_device.cuh"

#define THREADS 1024
#define WARPS (THREADS / 32)

__device__ void roll_column(void *state, const te_delayed &how, int tensor) {
  float *history = te_state_amax(state, tensor), *scale = te_state_scale(state, tensor);
  int len = how.history_len;
  float staged = history[0];
  if (staged == 0) return; /* the same for all threads */
  float amax = staged;
  for (int i = 1 + threadIdx.x; i < len && !how.most_recent; i += THREADS)
    amax = fmaxf(amax, history[(int64_t)i * TE_STATE_TENSORS]);
  amax = block_max<WARPS>(amax);
  for (int begin = 0; begin < len; begin += THREADS) { /* each chunk is read before it is written */
    int i = begin + threadIdx.x;
    float next = i + 1 < len ? history[(int64_t)(i + 1) * TE_STATE_TENSORS] : staged;
    __syncthreads();
    if (i < len) history[(int64_t)i * TE_STATE_TENSORS] = i == 0 ? 0.0f : next;
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  bool e5m2 = how.backward_is_e5m2 && (tensor == TE_STATE_DY || tensor == TE_STATE_DX);
  *scale = how.new_scale ? how.new_scale[tensor]
                         : te_delayed_scale(amax, *scale, e5m2 ? TE_E5M2_MAX : TE_E4M3_MAX, how.margin);
}

__global__ void __launch_bounds__(THREADS)
    roll(void *state, const int32_t *region, te_delayed how, te_amax_word *words, int n_words) {
  if ((int)threadIdx.x < n_words) words[threadIdx.x].amax = 0, words[threadIdx.x].done = 0;
  bool is_current = *(const int32_t *)state == *region;
  __syncthreads();
  if (is_current) return;
  for (int t = 0; t < TE_STATE_TENSORS; t++) roll_column(state, how, t);
  if (threadIdx.x == 0) *(int32_t *)state = *region;
}

extern "C" cudaError_t te__delayed_roll(void *state, const int32_t *region, const te_delayed *how,
                                        te_amax_word *words, int n_words, cudaStream_t stream) {
  roll<<<1, THREADS, 0, stream>>>(state, region, *how, words, n_words);
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
