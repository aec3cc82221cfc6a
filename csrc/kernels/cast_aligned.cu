/* Casts of tensors whose rows, and those of the copies, are aligned: a block makes a tile of both copies. */
#include "cast_device.cuh"
#include "cast_line.cuh"

/* Through shared memory, so that each column of the tile leaves as one 128-byte line. Eight codes of a column
 * are one unit; units are spread by exclusive or, so that neither the writes nor the reads meet in a bank. */
__device__ __forceinline__ void store_columns(const place &p, const uint2 (&codes)[SUB], int row_group,
                                              int col_group, uint2 (*units)[TILE / SUB]) {
  const te_cast &c = p.j.cast;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint32_t top[4], bottom[4];
    if (half == 0) {
      transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, top);
      transpose4(codes[4].x, codes[5].x, codes[6].x, codes[7].x, bottom);
    } else {
      transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, top);
      transpose4(codes[4].y, codes[5].y, codes[6].y, codes[7].y, bottom);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      units[col_group * SUB + half * 4 + i][row_group ^ col_group] = make_uint2(top[i], bottom[i]);
  }
  __syncthreads();
  int piece = threadIdx.x % 8; /* 16 codes of a column */
  int64_t row = p.row + piece * 16;
#pragma unroll
  for (int i = 0; i < TILE / (THREADS / 8); i++) {
    int col = i * (THREADS / 8) + threadIdx.x / 8, group = col / SUB;
    uint4 v = *(const uint4 *)&units[col][(2 * piece ^ group) & ~1];
    if (group & 1) v = make_uint4(v.z, v.w, v.x, v.y);
    if (p.col + col < c.x.cols && row < c.x.rows)
      *global((uint4 *)((uint8_t *)c.col + (p.col + col) * c.x.rows + row)) = v;
  }
}

template <te_dtype IN, bool E5M2>
__global__ void __launch_bounds__(THREADS, IN == TE_f32    ? 2
                                           : IN == TE_e4m3 ? 5
                                                           : 4)
    cast_aligned(const __grid_constant__ cast_jobs work) {
  typedef typename element<IN>::type T;
  __shared__ alignas(16) uint2 units[TILE][TILE / SUB];
  __shared__ float sums[WARPS][TILE];
  place p = find_place(work);
  const te_cast &c = p.j.cast;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int col_group = lane % 16, row_group = warp * 2 + lane / 16;
  int64_t row = p.row + row_group * SUB, col = p.col + col_group * SUB;
  const T *from = (const T *)c.x.data + row * c.x.row_stride + col;
  int n_rows = col < c.x.cols ? (int)min((int64_t)SUB, c.x.rows - row) : 0;
  if (skips(c)) return;
  line<IN> in[SUB];
#pragma unroll
  for (int i = 0; i < SUB; i++) {
    in[i] = {};
    if (i < n_rows) in[i].load(from + i * c.x.row_stride);
  }
  wait_for_previous();
  uint32_t most = 0;
  if constexpr (IN != TE_e4m3) {
    if (c.scale || c.amax) {
      p.scale = scale_of(c);
    } else {
#pragma unroll
      for (int i = 0; i < SUB; i++) in[i].add_to(most);
      p.scale = scale_of_tile(c, largest<IN>(most));
    }
  }
  uint2 codes[SUB];
  float sum[SUB] = {};
  bool has_sums = c.col_sums != NULL, has_record = c.record != NULL;
  uint8_t *to = (uint8_t *)c.row + row * c.x.cols + col;
#pragma unroll
  for (int i = 0; i < SUB; i++) {
    if constexpr (IN == TE_e4m3) {
      codes[i] = make_uint2(in[i].w[0], in[i].w[1]);
    } else {
      float x[SUB];
      in[i].values(x);
      if (has_record) in[i].add_to(most);
      if (has_sums) {
#pragma unroll
        for (int v = 0; v < SUB; v++) sum[v] += x[v];
      }
      codes[i] = encode_line<E5M2>(x, p.scale);
    }
    if (c.row && i < n_rows) *global((uint2 *)(to + i * c.x.cols)) = codes[i];
  }
  if (c.col) store_columns(p, codes, row_group, col_group, units);
  if constexpr (IN != TE_e4m3) {
    if (has_sums) {
#pragma unroll
      for (int v = 0; v < SUB; v++) sum[v] += __shfl_xor_sync(~0u, sum[v], 16);
      if (lane < 16) {
#pragma unroll
        for (int v = 0; v < SUB; v++) sums[warp][col_group * SUB + v] = sum[v];
      }
      __syncthreads();
      store_sums<WARPS>(p, sums);
    }
    finish(p, largest<IN>(most));
  }
}

cudaError_t te__cast_aligned(const cast_jobs *work, int64_t blocks, bool chained, cudaStream_t stream) {
  if (work->at[0].cast.x.dtype == TE_e4m3) /* any byte: codes are moved, not read */
    return launch(cast_aligned<TE_e4m3, false>, blocks, THREADS, chained, stream, *work);
  TE_LAUNCH_CAST(cast_aligned, work, blocks, chained, stream);
}
