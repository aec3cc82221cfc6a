/* Casts of tensors whose rows, and those of the copies, are aligned: a block makes a tile of both copies.
 * Tiles of large tensors are wider: longer runs of rows are what memory likes. */
#include "cast_device.cuh"
#include "cast_line.cuh"

/* Codes on their way to the transposed copy, then sums of eight rows each. Eight codes of a column are one
 * unit; units are spread by exclusive or, so that neither the writes nor the reads meet in a bank. */
template <int COLS> union tile_of {
  uint2 units[COLS][TILE / SUB];
  float sums[TILE / SUB][COLS];
};

/* Each column of the tile leaves as one 128-byte line. */
template <int COLS>
__device__ __forceinline__ void store_columns(const place &p, const uint2 (&codes)[SUB], int row_group,
                                              int col_group, tile_of<COLS> &tile) {
  constexpr int threads = COLS * 2, spread = TILE / SUB - 1;
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
      tile.units[col_group * SUB + half * 4 + i][row_group ^ (col_group & spread)] =
          make_uint2(top[i], bottom[i]);
  }
  __syncthreads();
  int piece = threadIdx.x % 8; /* 16 codes of a column */
  int64_t row = p.row + piece * 16;
#pragma unroll
  for (int i = 0; i < COLS / (threads / 8); i++) {
    int col = i * (threads / 8) + threadIdx.x / 8, group = col / SUB;
    uint4 v = *(const uint4 *)&tile.units[col][(2 * piece ^ (group & spread)) & ~1];
    if (group & 1) v = make_uint4(v.z, v.w, v.x, v.y);
    if (p.col + col < c.x.cols && row < c.x.rows)
      *global((uint4 *)((uint8_t *)c.col + (p.col + col) * c.x.rows + row)) = v;
  }
}

template <te_dtype IN, bool E5M2, int COLS>
__global__ void __launch_bounds__(COLS * 2, (IN == TE_f32    ? 2
                                             : IN == TE_e4m3 ? 5
                                                             : 4) *
                                                TILE / COLS)
    cast_tiles(const __grid_constant__ cast_jobs work) {
  typedef typename element<IN>::type T;
  constexpr int warps = COLS * 2 / 32;
  __shared__ alignas(16) tile_of<COLS> tile;
  place p = find_place<COLS>(work);
  const te_cast &c = p.j.cast;
  int col_group = threadIdx.x % (COLS / SUB), row_group = threadIdx.x / (COLS / SUB);
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
      p.scale = scale_of_tile<warps>(c, largest<IN>(most));
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
  if (c.col) store_columns(p, codes, row_group, col_group, tile);
  if constexpr (IN != TE_e4m3) {
    if (has_sums) {
      __syncthreads();
#pragma unroll
      for (int v = 0; v < SUB; v += 4)
        *(float4 *)&tile.sums[row_group][col_group * SUB + v] =
            make_float4(sum[v], sum[v + 1], sum[v + 2], sum[v + 3]);
      __syncthreads();
      store_sums(p, tile.sums);
    }
    finish<warps>(p, largest<IN>(most));
  }
}

template <te_dtype IN, bool E5M2>
static cudaError_t launch_tiles(const cast_jobs *work, int cols, int64_t blocks, bool chained,
                                cudaStream_t stream) {
  if constexpr (IN != TE_f32)
    if (cols == TE_WIDE_TILE)
      return launch(cast_tiles<IN, E5M2, TE_WIDE_TILE>, blocks, TE_WIDE_TILE * 2, chained, stream, *work);
  return launch(cast_tiles<IN, E5M2, TILE>, blocks, TILE * 2, chained, stream, *work);
}

cudaError_t te__cast_aligned(const cast_jobs *work, int cols, int64_t blocks, bool chained,
                             cudaStream_t stream) {
  bool e5m2 = work->at[0].cast.out == TE_e5m2;
  switch (work->at[0].cast.x.dtype) {
  case TE_bf16:
    return (e5m2 ? launch_tiles<TE_bf16, true> : launch_tiles<TE_bf16, false>)(work, cols, blocks, chained,
                                                                               stream);
  case TE_f16:
    return (e5m2 ? launch_tiles<TE_f16, true> : launch_tiles<TE_f16, false>)(work, cols, blocks, chained,
                                                                             stream);
  case TE_f32:
    return (e5m2 ? launch_tiles<TE_f32, true> : launch_tiles<TE_f32, false>)(work, cols, blocks, chained,
                                                                             stream);
  case TE_e4m3: /* any byte: codes are moved, not read */
    return launch_tiles<TE_e4m3, false>(work, cols, blocks, chained, stream);
  default:
    return cudaErrorInvalidValue;
  }
}
