/* The largest absolute value that is not NaN. Floor: one read. */
#include "fp8_device.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define VECTORS 8        /* loads in flight, for each thread */
#define MOST_BLOCKS 2112 /* several for each multiprocessor of the largest GPUs */

struct job {
  te_matrix m;
  float *out;
  int64_t first_block, blocks, vectors; /* of 16 bytes, or single elements */
};

struct jobs {
  job at[TE_CASTS];
  int n;
};

/* DENSE: 16-byte vectors, no gaps between rows. Else element by element. */
template <te_dtype IN, bool DENSE>
__global__ void __launch_bounds__(THREADS) amax_kernel(const __grid_constant__ jobs work) {
  typedef typename element<IN>::type T;
  constexpr int wide = DENSE ? 16 / sizeof(T) : 1;
  struct alignas(sizeof(T) * wide) vec {
    T v[wide];
  };
  let_next_start();
  int which = 0;
  while (which + 1 < work.n && blockIdx.x >= work.at[which + 1].first_block) which++;
  const job &j = work.at[which];
  int64_t block = (int64_t)blockIdx.x - j.first_block, step = j.blocks * THREADS;
  float amax = 0;
  uint32_t most = 0;
  for (int64_t i = block * THREADS + threadIdx.x; i < j.vectors; i += step * VECTORS) {
    vec in[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
      int64_t at = i + k * step;
#pragma unroll
      for (int v = 0; v < wide; v++) in[k].v[v] = (T)0;
      if (at >= j.vectors) continue;
      if constexpr (DENSE)
        in[k] = ((const vec *)j.m.data)[at];
      else
        in[k] = ((const vec *)j.m.data)[at / j.m.cols * j.m.row_stride + at % j.m.cols];
    }
#pragma unroll
    for (int k = 0; k < VECTORS; k++) {
      if constexpr (DENSE && IN != TE_f32) { /* packed, which is half the work */
#pragma unroll
        for (int v = 0; v < wide / 2; v++) most = amax2<IN>(most, ((const uint32_t *)&in[k])[v]);
      } else {
#pragma unroll
        for (int v = 0; v < wide; v++) amax = amax_of(amax, to_f32<IN>(in[k].v[v]));
      }
    }
  }
  if constexpr (DENSE && IN != TE_f32) {
    float2 pair = unpack2<IN>(most);
    amax = fmaxf(pair.x, pair.y);
  }
  if constexpr (DENSE) { /* what no whole vector holds */
    int64_t at = j.vectors * wide + threadIdx.x;
    if (block == 0 && at < j.m.rows * j.m.cols) amax = amax_of(amax, to_f32<IN>(((const T *)j.m.data)[at]));
  }
  amax = block_max<WARPS>(amax);
  wait_for_previous(); /* for the zero */
  if (threadIdx.x == 0) atomic_amax(j.out, amax);
}

static bool is_dense(const te_matrix *m) { return m->row_stride == m->cols && (uintptr_t)m->data % 16 == 0; }

template <te_dtype IN>
static cudaError_t run(const jobs &work, int64_t blocks, bool dense, cudaStream_t stream) {
  return dense ? launch(amax_kernel<IN, true>, blocks, THREADS, true, stream, work)
               : launch(amax_kernel<IN, false>, blocks, THREADS, true, stream, work);
}

extern "C" cudaError_t te__amax(const te_matrix *m, float *const *out, int n, cudaStream_t stream) {
  for (int i = 0; i < n;) {
    jobs work = {};
    int64_t blocks = 0;
    te_dtype dtype = m[i].dtype;
    bool dense = is_dense(&m[i]);
    for (; i < n && m[i].dtype == dtype && is_dense(&m[i]) == dense; i++) {
      if (te__is_empty(&m[i])) continue;
      job *j = &work.at[work.n++];
      int64_t per_block = THREADS * VECTORS, wide = dense ? 16 / (dtype == TE_f32 ? 4 : 2) : 1;
      j->m = m[i];
      j->out = out[i];
      j->vectors = m[i].rows * m[i].cols / wide;
      j->blocks = (j->vectors + per_block - 1) / per_block;
      if (j->blocks == 0) j->blocks = 1;
      if (j->blocks > MOST_BLOCKS) j->blocks = MOST_BLOCKS;
      j->first_block = blocks;
      blocks += j->blocks;
    }
    if (blocks == 0) continue;
    cudaError_t error = dtype == TE_bf16  ? run<TE_bf16>(work, blocks, dense, stream)
                        : dtype == TE_f16 ? run<TE_f16>(work, blocks, dense, stream)
                                          : run<TE_f32>(work, blocks, dense, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
