/* Several small matrix products, and a sum of columns, in one launch: the gradients of a small layer. For
 * sizes up to 128 the GPU needs a few microseconds and a launch costs the host as much or more, so that one
 * launch instead of four is what counts. A single product, and all larger ones, belong to cuBLASLt.
 *
 * Each block makes one 32 x 32 tile: the whole inner dimension fits into shared memory, so there is one wait
 * for memory, then tensor cores with fp32 accumulators, then the tile's rounding and store. */
#include "te_kernels.h"
#include "../te_format.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#define TILE 32
#define MAX_INNER TE_SMALL_SIZE
#define THREADS 128
#define VEC 8                                     /* elements in 16 bytes */
#define PIECES (TILE * MAX_INNER / VEC / THREADS) /* of an operand's tile, for each thread */
#define PAD 8 /* elements a row: spreads a column over the banks, and keeps rows 16-byte aligned */

namespace wmma = nvcuda::wmma;

struct job {
  const void *a, *b;
  void *d;
  int32_t m, n, k, first_block;
  int64_t a_row, a_col, b_row, b_col; /* strides */
};

struct jobs {
  job at[TE_SMALL_PRODUCTS];
  int32_t n;
};

/* --------------------------------------------------------------------------------------- kernels ------ */

__device__ float to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_f32(__half x) { return __half2float(x); }
__device__ void from_f32(__nv_bfloat16 *out, float x) { *out = __float2bfloat16_rn(x); }
__device__ void from_f32(__half *out, float x) { *out = __float2half_rn(x); }

/* One operand's tile on its way to shared memory: to[r][c] = from[r][c] inside of rows x cols, 0 around it.
 */
template <typename T> struct tile {
  const T *from;
  int64_t row_stride, col_stride; /* one of them is 1 */
  int rows, cols, tile_rows, tile_cols;

  __device__ bool along_rows() const { return col_stride == 1; }

  /* Whether 16-byte pieces lie wholly inside or outside. */
  __device__ bool wide() const {
    int64_t stride = along_rows() ? row_stride : col_stride;
    return stride % VEC == 0 && (along_rows() ? cols : rows) % VEC == 0 && (uintptr_t)from % 16 == 0;
  }

  /* Row and column of the i-th piece of `size` elements; neighbouring threads read neighbouring addresses. */
  __device__ void place(int i, int size, int *r, int *c) const {
    int line = (along_rows() ? tile_cols : tile_rows) / size;
    *r = along_rows() ? i / line : i % line * size;
    *c = along_rows() ? i % line * size : i / line;
  }

  /* Issues all loads before the first use, so that the block waits for memory once. */
  __device__ void fetch(uint4 (&pieces)[PIECES]) const {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      int r, c;
      place(p * THREADS + threadIdx.x, VEC, &r, &c);
      pieces[p] = make_uint4(0, 0, 0, 0);
      if (r < rows && c < cols) pieces[p] = *(const uint4 *)(from + r * row_stride + c * col_stride);
    }
  }

  __device__ void put(const uint4 (&pieces)[PIECES], T *to, int ld) const {
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      int r, c, i = p * THREADS + threadIdx.x;
      if (i * VEC >= tile_rows * tile_cols) break;
      place(i, VEC, &r, &c);
      if (along_rows()) {
        *(uint4 *)(to + r * ld + c) = pieces[p];
      } else {
        const T *values = (const T *)&pieces[p];
#pragma unroll
        for (int v = 0; v < VEC; v++) to[(r + v) * ld + c] = values[v];
      }
    }
  }

  __device__ void copy_narrow(T *to, int ld) const {
    T zero;
    from_f32(&zero, 0.0f);
#pragma unroll 8
    for (int i = threadIdx.x; i < tile_rows * tile_cols; i += THREADS) {
      int r, c;
      place(i, 1, &r, &c);
      to[r * ld + c] = r < rows && c < cols ? from[r * row_stride + c * col_stride] : zero;
    }
  }
};

/* d[c] = the sum of column c of a, TILE columns a block; a job without b. */
template <typename T> __device__ void sum_columns(const job &j, int block, float *partial) {
  int c = threadIdx.x % TILE, lane = threadIdx.x / TILE, col = block * TILE + c;
  float sum = 0;
  if (col < j.n)
    for (int r = lane; r < j.m; r += THREADS / TILE)
      sum += to_f32(((const T *)j.a)[r * j.a_row + col * j.a_col]);
  partial[threadIdx.x] = sum;
  __syncthreads();
  if (lane > 0 || col >= j.n) return;
  for (int i = 1; i < THREADS / TILE; i++) sum += partial[i * TILE + c];
  from_f32((T *)j.d + col, sum);
}

template <typename T> __global__ void __launch_bounds__(THREADS) multiply(const __grid_constant__ jobs work) {
  __shared__ alignas(32) T a[TILE][MAX_INNER + PAD];
  __shared__ alignas(32) T b[MAX_INNER][TILE + PAD];
  __shared__ alignas(32) float d[TILE][TILE + PAD];
  int which = 0;
  while (which + 1 < work.n && (int)blockIdx.x >= work.at[which + 1].first_block) which++;
  const job &j = work.at[which];
  int block = (int)blockIdx.x - j.first_block;
  if (!j.b) {
    sum_columns<T>(j, block, &d[0][0]);
    return;
  }
  int across = (j.n + TILE - 1) / TILE, row = block / across * TILE, col = block % across * TILE;
  int inner = (j.k + 15) / 16 * 16;
  tile<T> ta = {(const T *)j.a + row * j.a_row, j.a_row, j.a_col, j.m - row, j.k, TILE, inner};
  tile<T> tb = {(const T *)j.b + col * j.b_col, j.b_row, j.b_col, j.k, j.n - col, inner, TILE};
  uint4 pieces_a[PIECES], pieces_b[PIECES];
  bool wide_a = ta.wide(), wide_b = tb.wide();
  if (wide_a) ta.fetch(pieces_a);
  if (wide_b) tb.fetch(pieces_b);
  if (wide_a)
    ta.put(pieces_a, &a[0][0], MAX_INNER + PAD);
  else
    ta.copy_narrow(&a[0][0], MAX_INNER + PAD);
  if (wide_b)
    tb.put(pieces_b, &b[0][0], TILE + PAD);
  else
    tb.copy_narrow(&b[0][0], TILE + PAD);
  __syncthreads();

  int warp = threadIdx.x / 32, r = warp / 2 * 16, c = warp % 2 * 16;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc;
  wmma::fill_fragment(acc, 0.0f);
  for (int k = 0; k < inner; k += 16) {
    wmma::load_matrix_sync(fa, &a[r][k], MAX_INNER + PAD);
    wmma::load_matrix_sync(fb, &b[k][c], TILE + PAD);
    wmma::mma_sync(acc, fa, fb, acc);
  }
  wmma::store_matrix_sync(&d[r][c], acc, TILE + PAD, wmma::mem_row_major);
  __syncthreads();
  for (int i = threadIdx.x; i < TILE * TILE; i += THREADS) {
    int y = i / TILE, x = i % TILE;
    if (row + y >= j.m || col + x >= j.n) continue;
    from_f32((T *)j.d + (int64_t)(row + y) * j.n + col + x, d[y][x]);
  }
}

/* ------------------------------------------------------------------------------------- launchers ------ */

extern "C" cudaError_t te__small_products(const te_small_product *products, int n, cudaStream_t stream) {
  jobs work = {};
  int blocks = 0;
  for (int i = 0; i < n; i++) {
    const te_small_product *p = &products[i];
    job *j = &work.at[work.n++];
    j->a = p->a.data;
    j->b = p->sums_columns ? nullptr : p->b.data;
    j->d = p->d;
    j->m = (int32_t)p->a.rows;
    j->n = (int32_t)(p->sums_columns ? p->a.cols : p->b.cols);
    j->k = (int32_t)p->a.cols;
    j->a_row = p->a.row_stride;
    j->a_col = p->a.col_stride;
    j->b_row = p->b.row_stride;
    j->b_col = p->b.col_stride;
    j->first_block = blocks;
    int across = (j->n + TILE - 1) / TILE;
    blocks += p->sums_columns ? across : across * ((j->m + TILE - 1) / TILE);
  }
  if (products[0].a.dtype == TE_bf16)
    multiply<__nv_bfloat16><<<blocks, THREADS, 0, stream>>>(work);
  else
    multiply<__half><<<blocks, THREADS, 0, stream>>>(work);
  return cudaGetLastError();
}
