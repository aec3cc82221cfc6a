/* Casts of tensors of any layout. Rows of either copy begin at any address, so what counts besides
 * instructions is that they leave in words and in long runs: partial sectors are what L2 is slow at. A block
 * therefore also looks at the four rows above its tile and the four columns before it, which complete the
 * words that straddle its edges. */
#include "cast_device.cuh"

#define IN_FLIGHT 4         /* rows of a warp that are loaded at once */
#define ROWS (TILE / WARPS) /* of a warp */
#define CHUNKS (TILE / 32)  /* of a row; a lane has one element of each */
#define WORDS (TILE / 4)    /* of a column; a word has the codes of four rows */

struct codes_tile {
  uint32_t words[TILE][WORDS];      /* by column; word w lies at w ^ swizzle(column) */
  uint32_t above[TILE], left[TILE]; /* four rows of a column, four columns of a row */
};

/* Keeps apart the banks of a warp's accesses: 32 neighbouring columns, every fourth column, or a whole
 * column. */
__device__ __forceinline__ int swizzle(int col) { return col / 4 ^ col % 4 * 8; }

/* An element as it lies in memory. */
template <te_dtype IN> __device__ __forceinline__ uint32_t load(const typename element<IN>::type *at) {
  if constexpr (IN == TE_f32)
    return __float_as_uint(*global(at));
  else
    return *global(at);
}

template <te_dtype IN> __device__ __forceinline__ float value_of(uint32_t bits) {
  if constexpr (IN == TE_f32)
    return __uint_as_float(bits);
  else
    return to_f32<IN>((typename element<IN>::type)bits);
}

template <te_dtype IN, bool E5M2>
__device__ __forceinline__ uint32_t encode4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, float scale) {
  if constexpr (IN == TE_e4m3)
    return a | b << 8 | c << 16 | d << 24;
  else
    return encode2<E5M2>(value_of<IN>(a) * scale, value_of<IN>(b) * scale) |
           encode2<E5M2>(value_of<IN>(c) * scale, value_of<IN>(d) * scale) << 16;
}

/* `n_rows` and `n_cols` count from the warp's first row and the tile's first column. FULL: all are there;
 * else zeros take the place of what is not. */
template <te_dtype IN, bool FULL>
__device__ __forceinline__ void load_rows(uint32_t (&in)[IN_FLIGHT][CHUNKS],
                                          const typename element<IN>::type *from, int64_t stride, int n_rows,
                                          int n_cols) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < IN_FLIGHT; r++) {
#pragma unroll
    for (int q = 0; q < CHUNKS; q++) {
      in[r][q] = 0;
      if (FULL || (r < n_rows && lane + 32 * q < n_cols)) in[r][q] = load<IN>(from + 32 * q);
    }
    from += stride;
  }
}

/* Four elements `step` apart as a word of codes; they are neighbours of the tile, so they exist if
 * `is_there`. */
template <te_dtype IN, bool E5M2>
__device__ __forceinline__ uint32_t neighbours(const typename element<IN>::type *from, int64_t step,
                                               bool is_there, float scale) {
  uint32_t in[4] = {};
#pragma unroll
  for (int k = 0; k < 4; k++)
    if (is_there) in[k] = load<IN>(from + k * step);
  return encode4<IN, E5M2>(in[0], in[1], in[2], in[3], scale);
}

/* A warp writes a line of TILE codes, four from each lane, to `to` + 4 * lane. Its first word may begin in
 * the line before, of which `before` has the last four codes; the line after it does the same. */
__device__ __forceinline__ void store_line(uint8_t *to, uint32_t word, uint32_t before) {
  uint32_t previous = __shfl_up_sync(~0u, word, 1);
  if (threadIdx.x % 32 == 0) previous = before;
  uintptr_t at = (uintptr_t)to;
  *global((uint32_t *)(at & ~(uintptr_t)3)) =
      __funnelshift_l(previous, word, (unsigned)at * 8); /* modulo 32 */
}

/* The same for a line of `n` <= TILE codes that has no line before it, or none after it. */
__device__ __noinline__ void store_edge_line(uint8_t *to, uint32_t word, uint32_t before, int n,
                                             bool is_first, bool is_last) {
  int lane = threadIdx.x % 32, shift = (int)((uintptr_t)to % 4), begin = lane * 4 - shift;
  int least = is_first ? 0 : -4;
  uint32_t previous = __shfl_up_sync(~0u, word, 1);
  uint32_t out = __funnelshift_l(lane == 0 ? before : previous, word, shift * 8);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    if (begin + k >= least && begin + k < n) to[k - shift] = (uint8_t)(out >> (8 * k));
    if (is_last && lane == 31 && k >= 4 - shift && lane * 4 + k < n) to[k] = (uint8_t)(word >> (8 * k));
  }
}

__device__ __forceinline__ void store_columns(const place &p, const codes_tile &tile, int n_rows,
                                              int n_cols) {
  const te_cast &c = p.j.cast;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  bool is_first = p.row == 0, is_last = p.row + TILE >= c.x.rows;
  uint8_t *to = (uint8_t *)c.col + (p.col + warp) * c.x.rows + p.row + lane * 4;
  if (is_first || is_last || n_cols < TILE) {
    for (int i = warp; i < n_cols; i += WARPS, to += WARPS * c.x.rows)
      store_edge_line(to, tile.words[i][lane ^ swizzle(i)], tile.above[i], n_rows, is_first, is_last);
    return;
  }
#pragma unroll 4
  for (int i = 0; i < TILE; i += WARPS) {
    store_line(to, tile.words[i + warp][lane ^ swizzle(i + warp)], tile.above[i + warp]);
    to += WARPS * c.x.rows;
  }
}

template <bool EDGE>
__device__ __forceinline__ void store_rows(const place &p, const codes_tile &tile, int n_rows, int n_cols) {
  const te_cast &c = p.j.cast;
  int lane = threadIdx.x % 32, first = threadIdx.x / 32 * ROWS;
  bool is_first = p.col == 0, is_last = p.col + TILE >= c.x.cols;
  uint8_t *to = (uint8_t *)c.row + (p.row + first) * c.x.cols + p.col + lane * 4;
#pragma unroll 1
  for (int row = first; row < first + ROWS; row += 4) {
    uint32_t in[4], rows[4];
#pragma unroll
    for (int k = 0; k < 4; k++) in[k] = tile.words[lane * 4 + k][row / 4 ^ swizzle(lane * 4 + k)];
    transpose4(in[0], in[1], in[2], in[3], rows);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (!EDGE)
        store_line(to, rows[k], tile.left[row + k]);
      else if (row + k < n_rows)
        store_edge_line(to, rows[k], tile.left[row + k], n_cols, is_first, is_last);
      to += c.x.cols;
    }
  }
}

template <te_dtype IN, bool E5M2>
__global__ void __launch_bounds__(THREADS, 4) cast_any(const __grid_constant__ cast_jobs work) {
  typedef typename element<IN>::type T;
  __shared__ codes_tile tile;
  __shared__ float sums[WARPS][TILE];
  place p = find_place(work);
  const te_cast &c = p.j.cast;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp * ROWS;
  int n_rows = (int)min((int64_t)TILE, c.x.rows - p.row), n_cols = (int)min((int64_t)TILE, c.x.cols - p.col);
  bool is_full = n_rows == TILE && n_cols == TILE;
  int64_t stride = c.x.row_stride;
  const T *corner = (const T *)c.x.data + p.row * stride + p.col, *from = corner + row * stride + lane;
  if (skips(c)) return;
  wait_for_previous();
  float amax = 0, sum[CHUNKS] = {};
  uint32_t in[IN_FLIGHT][CHUNKS];
  if constexpr (IN != TE_e4m3) {
    if (c.scale || c.amax) {
      p.scale = scale_of(c);
    } else {
      for (int b = 0; b < ROWS; b += IN_FLIGHT) {
        load_rows<IN, false>(in, from + b * stride, stride, n_rows - row - b, n_cols);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT * CHUNKS; i++)
          amax = amax_of(amax, value_of<IN>(in[i / CHUNKS][i % CHUNKS]));
      }
      p.scale = scale_of_tile(c, amax);
    }
  }
  int at = threadIdx.x % TILE;
  if (threadIdx.x < TILE)
    tile.above[at] =
        neighbours<IN, E5M2>(corner - 4 * stride + at, stride, p.row > 0 && at < n_cols, p.scale);
  else
    tile.left[at] = neighbours<IN, E5M2>(corner - 4 + at * stride, 1, p.col > 0 && at < n_rows, p.scale);
#pragma unroll 1
  for (int b = 0; b < ROWS; b += IN_FLIGHT) {
    if (is_full)
      load_rows<IN, true>(in, from + b * stride, stride, 0, 0);
    else
      load_rows<IN, false>(in, from + b * stride, stride, n_rows - row - b, n_cols);
#pragma unroll
    for (int q = 0; q < CHUNKS; q++) {
      int col = q * 32 + lane;
#pragma unroll
      for (int r = 0; r < IN_FLIGHT; r += 4) {
        tile.words[col][(row + b + r) / 4 ^ swizzle(col)] =
            encode4<IN, E5M2>(in[r][q], in[r + 1][q], in[r + 2][q], in[r + 3][q], p.scale);
      }
      if constexpr (IN != TE_e4m3) {
#pragma unroll
        for (int r = 0; r < IN_FLIGHT; r++) {
          float x = value_of<IN>(in[r][q]);
          amax = amax_of(amax, x);
          sum[q] += x;
        }
      }
    }
  }
  if constexpr (IN != TE_e4m3) {
#pragma unroll
    for (int q = 0; q < CHUNKS; q++) sums[warp][q * 32 + lane] = sum[q];
  }
  __syncthreads();
  if (c.row) {
    if (p.col == 0 || p.col + TILE >= c.x.cols || n_rows < TILE)
      store_rows<true>(p, tile, n_rows, n_cols);
    else
      store_rows<false>(p, tile, n_rows, n_cols);
  }
  if (c.col) store_columns(p, tile, n_rows, n_cols);
  if constexpr (IN != TE_e4m3) {
    if (c.col_sums) store_sums(p, sums);
    finish(p, amax);
  }
}

cudaError_t te__cast_any(const cast_jobs *work, int64_t blocks, bool chained, cudaStream_t stream) {
  if (work->at[0].cast.x.dtype == TE_e4m3) /* any byte: codes are moved, not read */
    return launch(cast_any<TE_e4m3, false>, blocks, THREADS, chained, stream, *work);
  TE_LAUNCH_CAST(cast_any, work, blocks, chained, stream);
}
