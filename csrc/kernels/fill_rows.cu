/* Every row of a matrix becomes the same row: the result of a product with an empty inner dimension. */
#include "te_kernels.h"

#define THREADS 256
#define MAX_BLOCKS 4096

template <typename T>
__global__ void fill(T *__restrict__ out, const T *__restrict__ row, int64_t n, int64_t cols) {
  int64_t step = (int64_t)gridDim.x * THREADS;
  for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) out[i] = row[i % cols];
}

extern "C" cudaError_t te__fill_rows(void *out, const void *row, int64_t rows, int64_t cols, size_t size,
                                     cudaStream_t stream) {
  int64_t n = rows * cols, blocks = (n + THREADS - 1) / THREADS;
  unsigned grid = (unsigned)(blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS);
  if (!row) return cudaMemsetAsync(out, 0, (size_t)n * size, stream);
  if (size == 2)
    fill<<<grid, THREADS, 0, stream>>>((uint16_t *)out, (const uint16_t *)row, n, cols);
  else
    fill<<<grid, THREADS, 0, stream>>>((float *)out, (const float *)row, n, cols);
  return cudaGetLastError();
}
