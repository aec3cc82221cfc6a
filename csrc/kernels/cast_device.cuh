/* What the cast kernels share: which block does what, the scale, the amax, the partial sums.
 *
 * Floor of a cast: the element size to read, and one byte to write for each copy that is wanted. */
#ifndef TE_CAST_DEVICE_CUH
#define TE_CAST_DEVICE_CUH

#include "fp8_device.cuh"

#define TILE \
  128 /* a block's rows and columns (or more), so that rows of both copies are whole 128-byte lines */
#define TE_WIDE_TILE 256 /* columns, for large aligned tensors */
#define THREADS 256
#define WARPS (THREADS / 32)

struct cast_job {
  te_cast cast;
  uint32_t first_block, blocks, across; /* across: of the tiles in a row of them */
};

struct cast_jobs {
  cast_job at[TE_CASTS];
  int n;
};

/* The job is a copy, so that stores of codes, which may alias anything, do not make it be read again. */
struct place {
  cast_job j;
  uint32_t block;   /* of this job */
  int64_t row, col; /* of its tile's corner */
  float scale;
};

template <int COLS = TILE> __device__ __forceinline__ place find_place(const cast_jobs &work) {
  let_next_start();
  int which = 0;
  while (which + 1 < work.n && blockIdx.x >= work.at[which + 1].first_block) which++;
  place p = {work.at[which], 0, 0, 0, 1.0f};
  const cast_job &j = p.j;
  p.block = blockIdx.x - j.first_block;
  /* The amax pass went forwards just before: what it read last is still in L2. */
  if (j.cast.amax) p.block = j.blocks - 1 - p.block;
  uint32_t down = p.block / j.across;
  p.row = (int64_t)down * TILE;
  p.col = (int64_t)(p.block - down * j.across) * COLS;
  return p;
}

/* Before x is read: whether there is nothing to do. The same for all threads of a block. */
__device__ __forceinline__ bool skips(const te_cast &c) {
  if (!c.unless) return false;
  wait_for_previous();
  return *c.unless != 0;
}

/* After x is read, where it is given from outside of the tile: the kernel before this one may have made it.
 */
__device__ __forceinline__ float scale_of(const te_cast &c) {
  return c.scale ? *c.scale : te_current_scale(*c.amax, te_fp8_max(c.out), c.pow2);
}

/* Of a tensor that is one tile: its amax is the block's own business. */
template <int N = WARPS> __device__ __forceinline__ float scale_of_tile(const te_cast &c, float amax) {
  return te_current_scale(block_max<N>(amax), te_fp8_max(c.out), c.pow2);
}

/* `amax` is the thread's own, used if there is a record. */
template <int N = WARPS> __device__ __forceinline__ void finish(const place &p, float amax) {
  const te_cast &c = p.j.cast;
  if (threadIdx.x == 0 && p.block == 0 && c.scale_inv) *c.scale_inv = 1.0f / p.scale;
  if (!c.record) return;
  amax = block_max<N>(amax);
  if (threadIdx.x != 0) return;
  atomic_amax(c.record, amax);
  if (!c.stage) return;
  __threadfence();
  if (atomicAdd(c.done, 1u) + 1 != p.j.blocks) return;
  float whole = __int_as_float(atomicMax((int *)c.record, 0)); /* an atomic read: other blocks wrote it */
  if (te_is_finite(whole) && whole > *c.stage) *c.stage = whole;
}

/* Adds up the sums of the block's row groups. */
template <int GROUPS, int COLS>
__device__ __forceinline__ void store_sums(const place &p, const float (&sums)[GROUPS][COLS]) {
  const te_cast &c = p.j.cast;
  int col = threadIdx.x;
  if (col >= COLS || p.col + col >= c.x.cols) return;
  float sum = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) sum += sums[g][col];
  c.col_sums[p.row / TILE * c.x.cols + p.col + col] = sum;
}

/* The 4 x 4 bytes of four words, transposed. */
__device__ __forceinline__ void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                           uint32_t (&out)[4]) {
  uint32_t ab_low = __byte_perm(a, b, 0x5140), cd_low = __byte_perm(c, d, 0x5140);
  uint32_t ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410);
  out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410);
  out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

/* The launchers; all casts of one call have the dtypes of the first. */
cudaError_t te__cast_aligned(const cast_jobs *work, int cols, int64_t blocks, bool chained,
                             cudaStream_t stream);
cudaError_t te__cast_flat(const cast_jobs *work, int64_t blocks, bool chained, cudaStream_t stream);
cudaError_t te__cast_any(const cast_jobs *work, int64_t blocks, bool chained, cudaStream_t stream);

/* kernel<IN, E5M2> of a template for the jobs' dtypes. */
#define TE_LAUNCH_CAST(kernel, work, blocks, chained, stream) \
  do { \
    bool e5m2_ = (work)->at[0].cast.out == TE_e5m2; \
    switch ((work)->at[0].cast.x.dtype) { \
    case TE_bf16: \
      return launch(e5m2_ ? kernel<TE_bf16, true> : kernel<TE_bf16, false>, blocks, THREADS, chained, \
                    stream, *(work)); \
    case TE_f16: \
      return launch(e5m2_ ? kernel<TE_f16, true> : kernel<TE_f16, false>, blocks, THREADS, chained, stream, \
                    *(work)); \
    case TE_f32: \
      return launch(e5m2_ ? kernel<TE_f32, true> : kernel<TE_f32, false>, blocks, THREADS, chained, stream, \
                    *(work)); \
    default: \
      return cudaErrorInvalidValue; \
    } \
  } while (0)

#endif
