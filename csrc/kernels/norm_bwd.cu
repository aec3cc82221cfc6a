/* LayerNorm and RMSNorm, backward: a block has a row in registers and goes through every n-th row, so that
 * the sums for gamma and beta stay in its shared memory; what it ends with is one row of partial sums.
 *
 * Floor: one read of dy and of x, one write of dx. */
#include "norm_device.cuh"

#define ANY_THREADS 256
#define MOST_VECTORS 4 /* of a thread */
#define MOST_THREADS 512
#define ANY_RANGE 256 /* rows of a partial sum, where rows are not kept in registers */

template <te_dtype IN, int VECTORS> struct row_pair {
  row_vector<IN> dy[VECTORS], x[VECTORS];

  __device__ __forceinline__ void load(const te_norm_bwd &n, int64_t row, int vectors) {
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      int at = i * (int)blockDim.x + (int)threadIdx.x;
      dy[i].raw = x[i].raw = make_uint4(0, 0, 0, 0);
      if (row >= n.x.rows || at >= vectors) continue;
      dy[i].raw = ((const uint4 *)n.dy.data)[row * vectors + at];
      x[i].raw = ((const uint4 *)n.x.data)[row * vectors + at];
    }
  }
};

template <int N> __device__ __forceinline__ void add_to(float *sums, const float (&values)[N]) {
#pragma unroll
  for (int k = 0; k < N; k += 4) {
    float4 four = *(float4 *)(sums + k);
    four.x += values[k], four.y += values[k + 1], four.z += values[k + 2], four.w += values[k + 3];
    *(float4 *)(sums + k) = four;
  }
}

template <te_dtype IN, int VECTORS>
__global__ void __launch_bounds__(MOST_THREADS)
    norm_bwd_rows(const __grid_constant__ te_norm_bwd n, float *dgamma_of, float *dbeta_of) {
  constexpr int size = row_vector<IN>::size;
  extern __shared__ float4 memory[];
  int64_t cols = n.x.cols;
  int vectors = (int)(cols / size);
  float *dgamma = dgamma_of ? (float *)memory : NULL;
  float *dbeta = dbeta_of ? (float *)memory + (dgamma_of ? cols : 0) : NULL;
  for (int64_t c = threadIdx.x; c < cols * ((dgamma_of != NULL) + (dbeta_of != NULL)); c += blockDim.x)
    ((float *)memory)[c] = 0;
  __syncthreads();
  row_pair<IN, VECTORS> next;
  next.load(n, blockIdx.x, vectors);
  for (int64_t row = blockIdx.x; row < n.x.rows; row += gridDim.x) {
    row_pair<IN, VECTORS> in = next;
    next.load(n, row + gridDim.x, vectors); /* in flight while this row is worked on */
    float mean = n.mean ? n.mean[row] : 0.0f, rstd = n.rstd[row];
    float2 sums = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      int at = i * (int)blockDim.x + (int)threadIdx.x;
      float dy[size], x[size], gamma[size];
      if (at >= vectors) continue;
      in.dy[i].values(dy);
      in.x[i].values(x);
      vector_values(n.gamma, (int64_t)at * size, gamma);
#pragma unroll
      for (int k = 0; k < size; k++) {
        float xhat = (x[k] - mean) * rstd, g = dy[k] * (n.zero_centered ? 1.0f + gamma[k] : gamma[k]);
        sums.x += g;
        sums.y += g * xhat;
        x[k] = dy[k] * xhat;
      }
      if (dgamma) add_to(dgamma + at * size, x);
      if (dbeta) add_to(dbeta + at * size, dy);
    }
    if (!n.dx) continue;
    sums = block_sums(sums);
    float mean_g = n.mean ? sums.x / (float)cols : 0.0f, mean_dot = sums.y / (float)cols;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
      int at = i * (int)blockDim.x + (int)threadIdx.x;
      float dy[size], x[size], gamma[size];
      if (at >= vectors) continue;
      in.dy[i].values(dy);
      in.x[i].values(x);
      vector_values(n.gamma, (int64_t)at * size, gamma);
#pragma unroll
      for (int k = 0; k < size; k++) {
        float g = dy[k] * (n.zero_centered ? 1.0f + gamma[k] : gamma[k]);
        x[k] = rstd * (g - mean_g - (x[k] - mean) * rstd * mean_dot);
      }
      row_vector<IN> out;
      out.set(x);
      ((uint4 *)n.dx)[row * vectors + at] = out.raw;
    }
  }
  __syncthreads();
  for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
    if (dgamma) dgamma_of[blockIdx.x * cols + c] = dgamma[c];
    if (dbeta) dbeta_of[blockIdx.x * cols + c] = dbeta[c];
  }
}

/* Any width and alignment: dx, of which each row is read twice. */
template <te_dtype IN>
__global__ void __launch_bounds__(ANY_THREADS) norm_bwd_any(const __grid_constant__ te_norm_bwd n) {
  typedef typename element<IN>::type T;
  for (int64_t row = blockIdx.x; row < n.x.rows; row += gridDim.x) {
    const T *dy = (const T *)n.dy.data + row * n.x.cols, *x = (const T *)n.x.data + row * n.x.cols;
    float mean = n.mean ? n.mean[row] : 0.0f, rstd = n.rstd[row];
    float2 sums = make_float2(0, 0);
    for (int64_t c = threadIdx.x; c < n.x.cols; c += ANY_THREADS) {
      float gamma = vector_at(n.gamma, c), g = to_f32<IN>(dy[c]) * (n.zero_centered ? 1.0f + gamma : gamma);
      sums.x += g;
      sums.y += g * (to_f32<IN>(x[c]) - mean) * rstd;
    }
    sums = block_sums(sums);
    float mean_g = n.mean ? sums.x / (float)n.x.cols : 0.0f, mean_dot = sums.y / (float)n.x.cols;
    for (int64_t c = threadIdx.x; c < n.x.cols; c += ANY_THREADS) {
      float gamma = vector_at(n.gamma, c), g = to_f32<IN>(dy[c]) * (n.zero_centered ? 1.0f + gamma : gamma);
      store_element<IN>(n.dx, row * n.x.cols + c,
                        rstd * (g - mean_g - (to_f32<IN>(x[c]) - mean) * rstd * mean_dot));
    }
  }
}

/* The sums of ANY_RANGE rows, a thread for each column. */
template <te_dtype IN>
__global__ void __launch_bounds__(ANY_THREADS)
    norm_bwd_sums(const __grid_constant__ te_norm_bwd n, float *dgamma_of, float *dbeta_of) {
  typedef typename element<IN>::type T;
  int64_t blocks_across = (n.x.cols + ANY_THREADS - 1) / ANY_THREADS, range = blockIdx.x / blocks_across;
  int64_t c = (blockIdx.x - range * blocks_across) * ANY_THREADS + threadIdx.x;
  int64_t end = min(n.x.rows, (range + 1) * ANY_RANGE);
  float dgamma = 0, dbeta = 0;
  if (c >= n.x.cols) return;
  for (int64_t row = range * ANY_RANGE; row < end; row++) {
    float dy = to_f32<IN>(((const T *)n.dy.data)[row * n.x.cols + c]);
    float x = to_f32<IN>(((const T *)n.x.data)[row * n.x.cols + c]);
    dgamma += dy * (n.mean ? x - n.mean[row] : x) * n.rstd[row];
    dbeta += dy;
  }
  if (dgamma_of) dgamma_of[range * n.x.cols + c] = dgamma;
  if (dbeta_of) dbeta_of[range * n.x.cols + c] = dbeta;
}

static bool is_aligned(const void *pointer) { return (uintptr_t)pointer % 16 == 0; }

static int64_t vectors_of(const te_norm_bwd *n) { return n->x.cols / (n->x.dtype == TE_f32 ? 4 : 8); }

static bool fits_registers(const te_norm_bwd *n) {
  int64_t size = n->x.dtype == TE_f32 ? 4 : 8;
  return n->x.cols % size == 0 && vectors_of(n) <= MOST_VECTORS * MOST_THREADS && is_aligned(n->dy.data) &&
         is_aligned(n->x.data) && is_aligned(n->dx) && is_aligned(n->gamma.data);
}

extern "C" int64_t te__norm_bwd_partials(const te_norm_bwd *n, int multiprocessors) {
  if (!fits_registers(n)) return (n->x.rows + ANY_RANGE - 1) / ANY_RANGE;
  int64_t most = (int64_t)multiprocessors * (vectors_of(n) <= 256 ? 4 : vectors_of(n) <= 1024 ? 2 : 1);
  return n->x.rows < most ? n->x.rows : most;
}

template <te_dtype IN, int VECTORS>
static cudaError_t run_rows(const te_norm_bwd *n, int64_t blocks, float *dgamma, float *dbeta,
                            cudaStream_t stream) {
  auto kernel = norm_bwd_rows<IN, VECTORS>;
  int64_t vectors = vectors_of(n);
  unsigned threads = (unsigned)((vectors + VECTORS * 32 - 1) / (VECTORS * 32) * 32);
  size_t bytes = (size_t)n->x.cols * sizeof(float) * (size_t)((dgamma != NULL) + (dbeta != NULL));
  if (bytes > 48 * 1024) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<(unsigned)blocks, threads, bytes, stream>>>(*n, dgamma, dbeta);
  return cudaGetLastError();
}

template <te_dtype IN>
static cudaError_t run(const te_norm_bwd *n, int64_t blocks, float *dgamma, float *dbeta,
                       cudaStream_t stream) {
  if (fits_registers(n)) {
    int64_t vectors = vectors_of(n);
    return vectors <= MOST_THREADS       ? run_rows<IN, 1>(n, blocks, dgamma, dbeta, stream)
           : vectors <= 2 * MOST_THREADS ? run_rows<IN, 2>(n, blocks, dgamma, dbeta, stream)
                                         : run_rows<IN, MOST_VECTORS>(n, blocks, dgamma, dbeta, stream);
  }
  cudaError_t error = cudaSuccess;
  int64_t rows = n->x.rows < INT32_MAX ? n->x.rows : INT32_MAX;
  if (n->dx) error = launch(norm_bwd_any<IN>, rows, ANY_THREADS, false, stream, *n);
  if (error != cudaSuccess || (!dgamma && !dbeta)) return error;
  int64_t across = (n->x.cols + ANY_THREADS - 1) / ANY_THREADS;
  return launch(norm_bwd_sums<IN>, across * blocks, ANY_THREADS, false, stream, *n, dgamma, dbeta);
}

extern "C" cudaError_t te__norm_bwd(const te_norm_bwd *norm, int64_t n_partials, float *dgamma, float *dbeta,
                                    cudaStream_t stream) {
  switch (norm->x.dtype) {
  case TE_bf16:
    return run<TE_bf16>(norm, n_partials, dgamma, dbeta, stream);
  case TE_f16:
    return run<TE_f16>(norm, n_partials, dgamma, dbeta, stream);
  case TE_f32:
    return run<TE_f32>(norm, n_partials, dgamma, dbeta, stream);
  default:
    return cudaErrorInvalidValue;
  }
}
