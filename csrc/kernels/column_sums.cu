/* Sums over rows (the bias gradient): each element is read once, 16 bytes a thread where the layout allows,
 * added in fp32 in an order that depends on the shape alone, so that runs agree to the bit.
 *
 * Floor: rows * cols * element size bytes. The partial sums are at most 1/32 of that. */
#include "launch.cuh"
#include "te_kernels.h"
#include "../te_format.h"

#define WARPS 8
#define LANES 32
#define MIN_ROWS_PER_BLOCK 32
#define ONE_BLOCK_ROWS 256 /* up to here a second launch costs more than it gains */
#define TARGET_BLOCKS 1024 /* several for each multiprocessor of the largest GPUs */

/* --------------------------------------------------------------------------------------- kernels ------ */

template <int SIZE> struct element;
template <> struct element<2> { typedef uint16_t type; };
template <> struct element<4> { typedef float type; };

template <te_dtype DTYPE> __device__ float load(typename element<DTYPE == TE_f32 ? 4 : 2>::type x) {
  if constexpr (DTYPE == TE_bf16)
    return te_bf16_to_f32(x);
  else if constexpr (DTYPE == TE_f16)
    return te_f16_to_f32(x);
  else
    return x;
}

template <te_dtype DTYPE> __device__ void store(void *out, int64_t i, float value) {
  if constexpr (DTYPE == TE_bf16)
    ((uint16_t *)out)[i] = te_f32_to_bf16(value);
  else if constexpr (DTYPE == TE_f16)
    ((uint16_t *)out)[i] = te_f32_to_f16(value);
  else
    ((float *)out)[i] = value;
}

/* Each block sums a range of rows of LANES * COLS columns; with one block of rows the result is final.
 * VECTORIZED: a thread's columns are neighbours, loaded at once. Else they are LANES apart, so that the loads
 * of a warp still touch neighbouring addresses of a row-major matrix. */
template <te_dtype DTYPE, int COLS, bool VECTORIZED>
__global__ void __launch_bounds__(WARPS *LANES)
    sum_rows(const void *__restrict__ data, int64_t rows, int64_t cols, int64_t row_stride,
             int64_t col_stride, int64_t rows_per_block, float *__restrict__ partial,
             void *__restrict__ sums) {
  typedef typename element<DTYPE == TE_f32 ? 4 : 2>::type T;
  struct alignas(sizeof(T) * COLS) vec {
    T v[COLS];
  };
  __shared__ float tile[WARPS][LANES * COLS + 1];
  int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, local = VECTORIZED ? lane * COLS : lane;
  constexpr int step = VECTORIZED ? 1 : LANES;
  int64_t first = (int64_t)blockIdx.x * LANES * COLS, col = first + local;
  int64_t begin = (int64_t)blockIdx.y * rows_per_block, end = min(rows, begin + rows_per_block);
  const T *base = (const T *)data + col * col_stride;
  float acc[COLS] = {};
  if (col < cols) {
#pragma unroll 8
    for (int64_t r = begin + warp; r < end; r += WARPS) {
      if constexpr (VECTORIZED) {
        vec x = *(const vec *)(base + r * row_stride);
#pragma unroll
        for (int i = 0; i < COLS; i++) acc[i] += load<DTYPE>(x.v[i]);
      } else {
#pragma unroll
        for (int i = 0; i < COLS; i++)
          if (col + i * step < cols) acc[i] += load<DTYPE>(base[r * row_stride + i * step * col_stride]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < COLS; i++) tile[warp][local + i * step] = acc[i];
  __syncthreads();
  for (int c = threadIdx.x; c < LANES * COLS && first + c < cols; c += WARPS * LANES) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += tile[w][c];
    if (gridDim.y == 1)
      store<DTYPE>(sums, first + c, sum);
    else
      partial[blockIdx.y * cols + first + c] = sum;
  }
}

/* LANES columns a block, WARPS ranges of the partial sums; few blocks would wait for memory in turn. */
template <te_dtype DTYPE>
__global__ void __launch_bounds__(WARPS *LANES)
    sum_partials(const float *__restrict__ partial, int64_t n, int64_t cols, void *__restrict__ sums) {
  __shared__ float tile[WARPS][LANES];
  int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  int64_t c = (int64_t)blockIdx.x * LANES + lane;
  wait_for_previous();
  float sum = 0;
  if (c < cols) {
#pragma unroll 8
    for (int64_t i = warp; i < n; i += WARPS) sum += partial[i * cols + c];
  }
  tile[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || c >= cols) return;
#pragma unroll
  for (int w = 1; w < WARPS; w++) sum += tile[w][lane];
  store<DTYPE>(sums, c, sum);
}

/* ------------------------------------------------------------------------------------- launchers ------ */

static int64_t row_blocks(int64_t rows, int64_t cols) {
  int64_t across = (cols + 255) / 256, wanted = (TARGET_BLOCKS + across - 1) / across;
  int64_t most = (rows + MIN_ROWS_PER_BLOCK - 1) / MIN_ROWS_PER_BLOCK;
  if (rows <= ONE_BLOCK_ROWS) return 1;
  return wanted < most ? wanted : most;
}

extern "C" size_t te__column_sums_workspace(int64_t rows, int64_t cols) {
  int64_t n = row_blocks(rows, cols);
  return n > 1 ? (size_t)(n * cols) * sizeof(float) : 0;
}

/* `partial` is what the launch just before this one made. */
template <te_dtype DTYPE>
static cudaError_t finish(const float *partial, int64_t n, int64_t cols, void *sums, cudaStream_t stream) {
  return launch(sum_partials<DTYPE>, (cols + LANES - 1) / LANES, WARPS * LANES, true, stream, partial, n,
                cols, sums);
}

template <te_dtype DTYPE>
static cudaError_t sum(const te_matrix *m, void *sums, float *partial, cudaStream_t stream) {
  constexpr int size = DTYPE == TE_f32 ? 4 : 2, wide = 16 / size;
  int64_t n = row_blocks(m->rows, m->cols), per_block = (m->rows + n - 1) / n;
  bool vectorized =
      m->col_stride == 1 && m->row_stride % wide == 0 && m->cols % wide == 0 && (uintptr_t)m->data % 16 == 0;
  constexpr int apart = 4;
  int64_t tile = LANES * (vectorized ? wide : apart);
  dim3 grid((unsigned)((m->cols + tile - 1) / tile), (unsigned)n);
  if (vectorized)
    sum_rows<DTYPE, wide, true><<<grid, WARPS * LANES, 0, stream>>>(m->data, m->rows, m->cols, m->row_stride,
                                                                    1, per_block, partial, sums);
  else
    sum_rows<DTYPE, apart, false><<<grid, WARPS * LANES, 0, stream>>>(
        m->data, m->rows, m->cols, m->row_stride, m->col_stride, per_block, partial, sums);
  cudaError_t error = cudaGetLastError();
  return n > 1 && error == cudaSuccess ? finish<DTYPE>(partial, n, m->cols, sums, stream) : error;
}

extern "C" cudaError_t te__column_sums(const te_matrix *m, void *sums, float *partial, cudaStream_t stream) {
  switch (m->dtype) {
  case TE_bf16:
    return sum<TE_bf16>(m, sums, partial, stream);
  case TE_f16:
    return sum<TE_f16>(m, sums, partial, stream);
  case TE_f32:
    return sum<TE_f32>(m, sums, partial, stream);
  default:
    return cudaErrorInvalidValue;
  }
}

extern "C" cudaError_t te__finish_column_sums(const float *partial, int64_t n, int64_t cols, void *sums,
                                              te_dtype dtype, cudaStream_t stream) {
  switch (dtype) {
  case TE_bf16:
    return finish<TE_bf16>(partial, n, cols, sums, stream);
  case TE_f16:
    return finish<TE_f16>(partial, n, cols, sums, stream);
  default:
    return finish<TE_f32>(partial, n, cols, sums, stream);
  }
}
