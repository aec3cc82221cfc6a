/* Casts of tensors of any layout. Rows, of x and of both copies, begin at any address, but memory likes
 * aligned words in long runs, and L2 is slow at sectors that are written in part. So all words are loaded and
 * stored where they are aligned, and shifted in between; and a block also looks at the four rows above its
 * tile and the four columns before it, which complete the words that straddle its edges. A lane has four
 * neighbouring columns. */
#include "cast_device.cuh"

#define ROWS (TILE / WARPS) /* of a warp */
#define IN_FLIGHT 8         /* of them, loaded at once */
#define WORDS (TILE / 4)    /* of a column; a word has the codes of four rows */

struct codes_tile {
  uint32_t words[TILE][WORDS]; /* by column; word w lies at w ^ swizzle(column) */
  uint32_t above[TILE];        /* the four rows above the tile */
};

/* Keeps apart the banks of a warp's accesses: every fourth column, or a whole column. */
__device__ __forceinline__ int swizzle(int col) { return col / 4 ^ col % 4 * 8; }

/* Four neighbours of a row. */
template <te_dtype IN> struct quad {
  typedef typename element<IN>::type T;
  static constexpr int words = IN == TE_f32 ? 4 : 4 * sizeof(T) / 4 + 1;
  uint32_t w[words];

  /* The aligned words that the first `n` of four elements lie in. */
  __device__ __forceinline__ void load(const T *at, int n) {
    int skew = (int)((uintptr_t)at % 4);
    const uint32_t *from = (const uint32_t *)((uintptr_t)at & ~(uintptr_t)3);
#pragma unroll
    for (int j = 0; j < words; j++) {
      w[j] = 0;
      if (j * 4 < skew + n * (int)sizeof(T)) w[j] = *global(from + j);
    }
  }

  /* Shifts the elements to where a word begins, and makes 0 of those that are not among the first `n`. */
  template <bool FULL> __device__ __forceinline__ void align(const T *at, int n) {
    if constexpr (IN != TE_f32) {
#pragma unroll
      for (int j = 0; j + 1 < words; j++) {
        w[j] = __funnelshift_r(w[j], w[j + 1], (unsigned)(uintptr_t)at * 8); /* modulo 32 */
        int bits = (n * (int)sizeof(T) - j * 4) * 8;
        if (!FULL && bits < 32) w[j] &= bits > 0 ? ~0u >> (32 - bits) : 0;
      }
    }
  }

  __device__ __forceinline__ void values(float (&x)[4]) const {
    if constexpr (IN == TE_f32) {
#pragma unroll
      for (int k = 0; k < 4; k++) x[k] = __uint_as_float(w[k]);
    } else {
      float2 low = unpack2<IN>(w[0]), high = unpack2<IN>(w[1]);
      x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    }
  }
};

template <te_dtype IN, bool E5M2>
__device__ __forceinline__ uint32_t encode4(const float (&x)[4], float scale) {
  return encode2<E5M2>(x[0] * scale, x[1] * scale) | encode2<E5M2>(x[2] * scale, x[3] * scale) << 16;
}

/* The codes of four elements `step` apart, or zeros. */
template <te_dtype IN, bool E5M2>
__device__ __forceinline__ uint32_t neighbours(const typename element<IN>::type *from, int64_t step,
                                               bool is_there, float scale) {
  float x[4] = {};
  uint32_t word = 0;
  if (!is_there) return 0;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    typename element<IN>::type value = *global(from + k * step);
    if constexpr (IN == TE_e4m3)
      word |= (uint32_t)value << (8 * k);
    else
      x[k] = to_f32<IN>(value);
  }
  if constexpr (IN != TE_e4m3) word = encode4<IN, E5M2>(x, scale);
  return word;
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

/* What a thread carries from row to row. */
struct cast_sums {
  float amax, sum[4];
};

/* IN_FLIGHT rows of a warp: their codes into the row copy, and, turned, into the tile. Pointers are those of
 * the lane's first column; `left` has the codes before it, lane i those of row i. FULL: all rows and columns
 * are there, and lines before and after those of the row copy. */
template <te_dtype IN, bool E5M2, bool FULL>
__device__ __forceinline__ void cast_rows(const place &p, const typename element<IN>::type *from, uint8_t *to,
                                          int row, int n_rows, int n_cols, uint32_t left, codes_tile &tile,
                                          cast_sums &sums) {
  const te_cast &c = p.j.cast;
  int lane = threadIdx.x % 32, n = FULL ? 4 : min(4, n_cols - lane * 4);
  bool is_first = p.col == 0, is_last = p.col + TILE >= c.x.cols;
  quad<IN> in[IN_FLIGHT];
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; i++) {
    in[i] = {};
    if (FULL || (row + i < n_rows && n > 0)) in[i].load(from + i * c.x.row_stride, n);
  }
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; i += 4) {
    uint32_t rows[4], cols[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      in[i + k].template align<FULL>(from + (i + k) * c.x.row_stride, n);
      if constexpr (IN == TE_e4m3) {
        rows[k] = in[i + k].w[0];
      } else {
        float x[4];
        in[i + k].values(x);
#pragma unroll
        for (int v = 0; v < 4; v++) {
          sums.amax = amax_of(sums.amax, x[v]);
          sums.sum[v] += x[v];
        }
        rows[k] = encode4<IN, E5M2>(x, p.scale);
      }
      if (c.row) {
        uint32_t before = __shfl_sync(~0u, left, (row + i + k) % ROWS);
        if (FULL)
          store_line(to, rows[k], before);
        else if (row + i + k < n_rows)
          store_edge_line(to, rows[k], before, n_cols, is_first, is_last);
        to += c.x.cols;
      }
    }
    transpose4(rows[0], rows[1], rows[2], rows[3], cols);
#pragma unroll
    for (int k = 0; k < 4; k++) tile.words[lane * 4 + k][(row + i) / 4 ^ swizzle(lane * 4 + k)] = cols[k];
  }
}

template <te_dtype IN>
__device__ float amax_of_rows(const te_cast &c, const typename element<IN>::type *from, int n_rows, int n) {
  float amax = 0, x[4];
  for (int r = 0; r < n_rows && n > 0; r++, from += c.x.row_stride) {
    quad<IN> in;
    in.load(from, n);
    in.template align<false>(from, n);
    in.values(x);
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (k < n) amax = amax_of(amax, x[k]);
  }
  return amax;
}

template <te_dtype IN, bool E5M2>
__global__ void __launch_bounds__(THREADS, 4) cast_any(const __grid_constant__ cast_jobs work) {
  typedef typename element<IN>::type T;
  __shared__ codes_tile tile;
  __shared__ float sums_of[WARPS][TILE];
  place p = find_place(work);
  const te_cast &c = p.j.cast;
  int lane = threadIdx.x % 32, row = threadIdx.x / 32 * ROWS;
  int n_rows = (int)min((int64_t)TILE, c.x.rows - p.row), n_cols = (int)min((int64_t)TILE, c.x.cols - p.col);
  bool is_full = n_rows == TILE && p.col > 0 && p.col + TILE < c.x.cols;
  int64_t stride = c.x.row_stride;
  const T *corner = (const T *)c.x.data + p.row * stride + p.col, *from = corner + row * stride + lane * 4;
  uint8_t *to = (uint8_t *)c.row + (p.row + row) * c.x.cols + p.col + lane * 4;
  if (skips(c)) return;
  wait_for_previous();
  if constexpr (IN != TE_e4m3) {
    if (c.scale || c.amax)
      p.scale = scale_of(c);
    else
      p.scale =
          scale_of_tile(c, amax_of_rows<IN>(c, from, min(ROWS, n_rows - row), min(4, n_cols - lane * 4)));
  }
  int at = threadIdx.x;
  if (c.col && at < TILE)
    tile.above[at] =
        neighbours<IN, E5M2>(corner - 4 * stride + at, stride, p.row > 0 && at < n_cols, p.scale);
  uint32_t left = 0;
  if (c.row)
    left = neighbours<IN, E5M2>(corner - 4 + (row + lane) * stride, 1,
                                p.col > 0 && lane < ROWS && row + lane < n_rows, p.scale);
  cast_sums sums = {};
#pragma unroll 1
  for (int r = row; r < row + ROWS; r += IN_FLIGHT) {
    if (is_full)
      cast_rows<IN, E5M2, true>(p, from, to, r, n_rows, n_cols, left, tile, sums);
    else
      cast_rows<IN, E5M2, false>(p, from, to, r, n_rows, n_cols, left, tile, sums);
    from += IN_FLIGHT * stride;
    to += IN_FLIGHT * c.x.cols;
  }
  if constexpr (IN != TE_e4m3)
    *(float4 *)&sums_of[row / ROWS][lane * 4] =
        make_float4(sums.sum[0], sums.sum[1], sums.sum[2], sums.sum[3]);
  __syncthreads();
  if (c.col) store_columns(p, tile, n_rows, n_cols);
  if constexpr (IN != TE_e4m3) {
    if (c.col_sums) store_sums(p, sums_of);
    finish(p, sums.amax);
  }
}

cudaError_t te__cast_any(const cast_jobs *work, int64_t blocks, bool chained, cudaStream_t stream) {
  if (work->at[0].cast.x.dtype == TE_e4m3) /* any byte: codes are moved, not read */
    return launch(cast_any<TE_e4m3, false>, blocks, THREADS, chained, stream, *work);
  TE_LAUNCH_CAST(cast_any, work, blocks, chained, stream);
}
