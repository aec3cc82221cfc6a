/* Casts to FP8: codes, transposed codes, amax and sums over rows in one pass over the tensor.
 *
 * Floor: the element size to read, and one byte to write for each copy that is wanted. A block makes a tile
 * of 128 x 128, so that rows of both copies are written in whole 128-byte lines. */
#include "fp8_device.cuh"

#define TILE 128
#define THREADS 256
#define WARPS (THREADS / 32)
#define SUB 8 /* a thread owns 8 x 8 elements of an aligned tile */

struct job {
  te_cast cast;
  uint32_t first_block, tiles_across, tiles;
};

struct jobs {
  job at[TE_CASTS];
  int n;
};

/* ------------------------------------------------------------------------------------- what both share
 * ------ */

struct place {
  const job *j;
  uint32_t tile;
  int64_t row, col; /* of the tile's corner */
  float scale;
};

template <int ROWS, int COLS> __device__ __forceinline__ place find_place(const jobs &work) {
  int which = 0;
  while (which + 1 < work.n && blockIdx.x >= work.at[which + 1].first_block) which++;
  const job *j = &work.at[which];
  place p = {j, blockIdx.x - j->first_block, 0, 0, 1.0f};
  /* The amax pass went forwards just before: what it read last is still in L2. */
  if (j->cast.amax) p.tile = j->tiles - 1 - p.tile;
  p.row = (int64_t)(p.tile / j->tiles_across) * ROWS;
  p.col = (int64_t)(p.tile % j->tiles_across) * COLS;
  return p;
}

__device__ __forceinline__ float scale_of(const te_cast &c) {
  return c.scale ? *c.scale : te_current_scale(c.amax->amax, te_fp8_max(c.out), c.pow2);
}

/* Of a tensor that is one tile: its amax is the block's own business. */
__device__ __forceinline__ float scale_of_tile(const te_cast &c, float amax) {
  return te_current_scale(block_max<WARPS>(amax), te_fp8_max(c.out), c.pow2);
}

__device__ __forceinline__ void finish(const place &p, float amax) {
  const te_cast &c = p.j->cast;
  if (threadIdx.x == 0 && p.tile == 0 && c.scale_inv) *c.scale_inv = 1.0f / p.scale;
  if (!c.record) return;
  amax = block_max<WARPS>(amax);
  if (threadIdx.x != 0) return;
  atomic_amax(&c.record->amax, amax);
  if (!c.stage) return;
  __threadfence();
  if (atomicAdd(&c.record->done, 1u) + 1 != p.j->tiles) return;
  float whole =
      __int_as_float(atomicMax((int *)&c.record->amax, 0)); /* an atomic read: other blocks wrote it */
  if (te_is_finite(whole) && whole > *c.stage) *c.stage = whole;
}

/* Adds up the sums of the block's warps: `sums` has 128 columns for each. */
__device__ __forceinline__ void store_sums(const place &p, float (*sums)[TILE]) {
  const te_cast &c = p.j->cast;
  int col = threadIdx.x;
  if (col >= TILE || p.col + col >= c.x.cols) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += sums[w][col];
  c.col_sums[p.row / TILE * c.x.cols + p.col + col] = sum;
}

/* -------------------------------------------------------------------------------------- aligned tiles ------
 */

/* 8 neighbours of a row as they lie in memory. */
template <te_dtype IN> struct line {
  static constexpr int words = IN == TE_f32 ? 8 : IN == TE_e4m3 ? 2 : 4;
  uint32_t w[words];

  __device__ void load(const void *from) {
    if constexpr (words == 2) {
      *(uint2 *)w = *(const uint2 *)from;
    } else {
#pragma unroll
      for (int i = 0; i < words; i += 4) *(uint4 *)&w[i] = ((const uint4 *)from)[i / 4];
    }
  }

  __device__ void values(float (&x)[SUB]) const {
    if constexpr (IN == TE_f32) {
#pragma unroll
      for (int i = 0; i < SUB; i++) x[i] = __uint_as_float(w[i]);
    } else {
#pragma unroll
      for (int i = 0; i < SUB / 2; i++) {
        float2 pair = unpack2<IN>(w[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }

  /* The running amax: packed where elements are 16 bits wide, which halves the work. */
  __device__ void add_to(uint32_t &most) const {
    if constexpr (IN == TE_f32) {
#pragma unroll
      for (int i = 0; i < SUB; i++)
        most = __float_as_uint(amax_of(__uint_as_float(most), __uint_as_float(w[i])));
    } else {
#pragma unroll
      for (int i = 0; i < words; i++) most = amax2<IN>(most, w[i]);
    }
  }
};

template <te_dtype IN> __device__ __forceinline__ float largest(uint32_t most) {
  if constexpr (IN == TE_f32) return __uint_as_float(most);
  float2 pair = unpack2 < IN == TE_f32 ? TE_bf16 : IN > (most);
  return fmaxf(pair.x, pair.y);
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

/* Through shared memory, so that each column of the tile leaves as one 128-byte line. Eight codes of a column
 * are one unit; units are spread by exclusive or, so that neither the writes nor the reads meet in a bank. */
__device__ __forceinline__ void store_columns(const place &p, const uint2 (&codes)[SUB], int row_group,
                                              int col_group, uint2 (*units)[TILE / SUB]) {
  const te_cast &c = p.j->cast;
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
      *(uint4 *)((uint8_t *)c.col + (p.col + col) * c.x.rows + row) = v;
  }
}

template <te_dtype IN, bool E5M2>
__global__ void __launch_bounds__(THREADS, IN == TE_f32 ? 2 : 4)
    cast_aligned(const __grid_constant__ jobs work) {
  typedef typename element<IN>::type T;
  __shared__ alignas(16) uint2 units[TILE][TILE / SUB];
  __shared__ float sums[WARPS][TILE];
  place p = find_place<TILE, TILE>(work);
  const te_cast &c = p.j->cast;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int col_group = lane % 16, row_group = warp * 2 + lane / 16;
  int64_t row = p.row + row_group * SUB, col = p.col + col_group * SUB;
  const T *from = (const T *)c.x.data + row * c.x.row_stride + col;
  int n_rows = col < c.x.cols ? (int)min((int64_t)SUB, c.x.rows - row) : 0;
  line<IN> in[SUB];
#pragma unroll
  for (int i = 0; i < SUB; i++) {
    in[i] = {};
    if (i < n_rows) in[i].load(from + i * c.x.row_stride);
  }
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
#pragma unroll
      for (int v = 0; v < SUB; v++) x[v] *= p.scale;
      codes[i].x = encode2<E5M2>(x[0], x[1]) | encode2<E5M2>(x[2], x[3]) << 16;
      codes[i].y = encode2<E5M2>(x[4], x[5]) | encode2<E5M2>(x[6], x[7]) << 16;
    }
    if (c.row && i < n_rows) *(uint2 *)(to + i * c.x.cols) = codes[i];
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
      store_sums(p, sums);
    }
    finish(p, largest<IN>(most));
  }
}

/* ------------------------------------------------------------------------------------------ any tiles ------
 */

#define ANY_COLS 124 /* so that 32 aligned groups of 4 cover a tile's columns wherever a row begins */
#define GROUP 4

/* Writes a line of `n` codes to any address, in aligned words where they are whole; one warp a line. Word i
 * of the line lies at words[i ^ swizzle]. */
__device__ __forceinline__ void store_line(uint8_t *to, const uint32_t *words, int swizzle, int n) {
  int shift = (int)((uintptr_t)to % 4);
  for (int w = threadIdx.x % 32; w * 4 < n + shift; w += 32) {
    int first = w * 4 - shift;
    uint32_t low = w > 0 ? words[(w - 1) ^ swizzle] : 0, high = w < 32 ? words[w ^ swizzle] : 0;
    uint32_t word = shift ? __funnelshift_r(low, high, (4 - shift) * 8) : high;
    if (first >= 0 && first + 4 <= n) {
      *(uint32_t *)(to + first) = word;
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (first + i >= 0 && first + i < n) to[first + i] = (uint8_t)(word >> (8 * i));
    }
  }
}

/* Four neighbours of a row as they lie in aligned memory. */
template <te_dtype IN> struct group_of {
  static constexpr int words = IN == TE_f32 ? 4 : IN == TE_e4m3 ? 1 : 2;
  uint32_t w[words];

  __device__ void load(const void *from) {
    if constexpr (words == 4)
      *(uint4 *)w = *(const uint4 *)from;
    else if constexpr (words == 2)
      *(uint2 *)w = *(const uint2 *)from;
    else
      w[0] = *(const uint32_t *)from;
  }

  /* Makes 0 of what lies before `begin` or from `end` on. */
  __device__ void keep(int begin, int end) {
    constexpr int bits = words * 8; /* of an element */
#pragma unroll
    for (int i = 0; i < words; i++) {
      int first = begin * bits - i * 32, last = end * bits - i * 32;
      uint32_t mask = (first < 32 ? ~0u << max(first, 0) : 0u) & (last > 0 ? ~0u >> max(32 - last, 0) : 0u);
      w[i] &= mask;
    }
  }

  __device__ void values(float (&x)[GROUP]) const {
    if constexpr (words == 4) {
#pragma unroll
      for (int i = 0; i < GROUP; i++) x[i] = __uint_as_float(w[i]);
    } else {
#pragma unroll
      for (int i = 0; i < GROUP / 2; i++) {
        float2 pair = unpack2<IN>(w[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }
};

template <te_dtype IN, bool E5M2>
__global__ void __launch_bounds__(THREADS, IN == TE_f32 ? 2 : 4) cast_any(const __grid_constant__ jobs work) {
  typedef typename element<IN>::type T;
  constexpr int rounds = TILE / (WARPS * GROUP);
  __shared__ uint32_t rows[TILE][32], cols[TILE][32]; /* the tile's codes, and its transpose, 4 to a word */
  place p = find_place<TILE, ANY_COLS>(work);
  const te_cast &c = p.j->cast;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int n_rows = (int)max((int64_t)0, min((int64_t)TILE, c.x.rows - p.row)),
      n_cols = (int)max((int64_t)0, min((int64_t)ANY_COLS, c.x.cols - p.col));
  if (n_cols == 0) n_rows = 0; /* rows without columns have no address */
  const T *from = (const T *)c.x.data + p.row * c.x.row_stride + p.col;
  group_of<IN> in[rounds][GROUP]; /* all loads first, so that a block waits for memory once */
#pragma unroll
  for (int i = 0; i < rounds * GROUP; i++) {
    int r = (i / GROUP * WARPS + warp) * GROUP + i % GROUP;
    const T *begin = from + r * c.x.row_stride;
    int skew = (int)((uintptr_t)begin / sizeof(T) %
                     GROUP); /* elements from the aligned address to the row's first */
    group_of<IN> &g = in[i / GROUP][i % GROUP];
    g = {};
    if (r < n_rows && lane * GROUP < n_cols + skew) g.load(begin - skew + lane * GROUP);
  }
  if constexpr (IN != TE_e4m3) {
    if (c.scale || c.amax) {
      p.scale = scale_of(c);
    } else {
      float amax = 0, x[GROUP];
#pragma unroll
      for (int i = 0; i < rounds * GROUP; i++) {
        int r = (i / GROUP * WARPS + warp) * GROUP + i % GROUP;
        int skew = (int)((uintptr_t)(from + r * c.x.row_stride) / sizeof(T) % GROUP);
        group_of<IN> g = in[i / GROUP][i % GROUP];
        g.keep(max(0, skew - lane * GROUP), n_cols + skew - lane * GROUP);
        g.values(x);
#pragma unroll
        for (int v = 0; v < GROUP; v++) amax = amax_of(amax, x[v]);
      }
      p.scale = scale_of_tile(c, amax);
    }
  }
  float amax = 0;
#pragma unroll
  for (int k = 0; k < rounds; k++) {
    int r = (k * WARPS + warp) * GROUP;
    uint32_t codes[GROUP], turned[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      int skew = (int)((uintptr_t)(from + (r + i) * c.x.row_stride) / sizeof(T) % GROUP);
      group_of<IN> &g = in[k][i];
      if constexpr (IN == TE_e4m3) {
        codes[i] = g.w[0];
      } else {
        float x[GROUP];
        if (c.record) {
          g.keep(max(0, skew - lane * GROUP), n_cols + skew - lane * GROUP);
          g.values(x);
#pragma unroll
          for (int v = 0; v < GROUP; v++) amax = amax_of(amax, x[v]);
        }
        g.values(x);
        codes[i] = encode2<E5M2>(x[0] * p.scale, x[1] * p.scale) |
                   encode2<E5M2>(x[2] * p.scale, x[3] * p.scale) << 16;
      }
      uint32_t next = __shfl_down_sync(~0u, codes[i], 1);
      codes[i] = __funnelshift_r(codes[i], next, skew * 8); /* columns 4 * lane to 4 * lane + 3 */
      rows[r + i][lane] = codes[i];
    }
    if (!c.col) continue;
    transpose4(codes[0], codes[1], codes[2], codes[3], turned);
#pragma unroll
    for (int i = 0; i < GROUP; i++) cols[lane * GROUP + i][(r / GROUP) ^ lane] = turned[i];
  }
  __syncthreads();
  if (c.row)
    for (int r = warp; r < n_rows; r += WARPS)
      store_line((uint8_t *)c.row + (p.row + r) * c.x.cols + p.col, rows[r], 0, n_cols);
  if (c.col)
    for (int i = warp; i < n_cols; i += WARPS)
      store_line((uint8_t *)c.col + (p.col + i) * c.x.rows + p.row, cols[i], i / GROUP, n_rows);
  if constexpr (IN != TE_e4m3) finish(p, amax);
}

/* ------------------------------------------------------------------------------------------ launchers ------
 */

static bool is_aligned(const te_cast *c) {
  int64_t size = c->x.dtype == TE_f32    ? 4
                 : c->x.dtype == TE_e4m3 ? 1
                                         : 2,
          line_size = size * SUB < 16 ? size * SUB : 16;
  uintptr_t in = (uintptr_t)c->x.data | (uintptr_t)(c->x.row_stride * size);
  uintptr_t row = c->row ? (uintptr_t)c->row | (uintptr_t)c->x.cols : 0;
  uintptr_t col = c->col ? (uintptr_t)c->col | (uintptr_t)c->x.rows : 0;
  return in % (uintptr_t)line_size == 0 && c->x.cols % SUB == 0 && row % SUB == 0 && col % 16 == 0;
}

template <te_dtype IN>
static cudaError_t launch(const jobs &work, int64_t blocks, bool aligned, cudaStream_t stream) {
  bool e5m2 = work.at[0].cast.out == TE_e5m2;
  unsigned grid = (unsigned)blocks;
  if (aligned && e5m2)
    cast_aligned<IN, true><<<grid, THREADS, 0, stream>>>(work);
  else if (aligned)
    cast_aligned<IN, false><<<grid, THREADS, 0, stream>>>(work);
  else if (e5m2)
    cast_any<IN, true><<<grid, THREADS, 0, stream>>>(work);
  else
    cast_any<IN, false><<<grid, THREADS, 0, stream>>>(work);
  return cudaGetLastError();
}

static cudaError_t dispatch(const jobs &work, int64_t blocks, bool aligned, cudaStream_t stream) {
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  switch (work.at[0].cast.x.dtype) {
  case TE_bf16:
    return launch<TE_bf16>(work, blocks, aligned, stream);
  case TE_f16:
    return launch<TE_f16>(work, blocks, aligned, stream);
  case TE_f32:
    return launch<TE_f32>(work, blocks, aligned, stream);
  default:
    return cudaErrorInvalidValue;
  }
}

static int64_t row_tiles(int64_t rows) { return (rows + TILE - 1) / TILE; }

extern "C" int64_t te__cast_sum_tiles(const te_cast *c) { return is_aligned(c) ? row_tiles(c->x.rows) : 0; }

extern "C" bool te__cast_is_one_tile(const te_cast *c) {
  return c->x.rows <= TILE && c->x.cols <= (is_aligned(c) ? TILE : ANY_COLS);
}

static void add_job(jobs *work, const te_cast *c, bool aligned, int64_t *blocks) {
  job *j = &work->at[work->n++];
  int64_t width = aligned ? TILE : ANY_COLS;
  int64_t across = (c->x.cols + width - 1) / width, down = row_tiles(c->x.rows);
  j->cast = *c;
  int64_t tiles = across * down > 0 ? across * down : 1; /* an empty tensor has a scale too */
  j->first_block = (uint32_t)*blocks;
  j->tiles_across = across > 0 ? (uint32_t)across : 1;
  j->tiles = (uint32_t)tiles;
  *blocks += tiles;
}

extern "C" cudaError_t te__cast(const te_cast *casts, int n, cudaStream_t stream) {
  for (int i = 0; i < n;) {
    jobs work = {};
    int64_t blocks = 0;
    bool aligned = is_aligned(&casts[i]);
    int first = i;
    for (; i < n && casts[i].x.dtype == casts[first].x.dtype && casts[i].out == casts[first].out &&
           is_aligned(&casts[i]) == aligned;
         i++)
      add_job(&work, &casts[i], aligned, &blocks);
    cudaError_t error = dispatch(work, blocks, aligned, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

extern "C" cudaError_t te__transpose_codes(const void *codes, void *out, int64_t rows, int64_t cols,
                                           cudaStream_t stream) {
  te_cast c = {};
  c.x.data = (void *)codes;
  c.x.rows = rows;
  c.x.cols = c.x.row_stride = cols;
  c.x.col_stride = 1;
  c.x.dtype = TE_e4m3; /* any byte: codes are moved, not read */
  c.out = TE_e4m3;
  c.col = out;
  jobs work = {};
  int64_t blocks = 0;
  bool aligned = is_aligned(&c);
  add_job(&work, &c, aligned, &blocks);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  if (aligned)
    cast_aligned<TE_e4m3, false><<<(unsigned)blocks, THREADS, 0, stream>>>(work);
  else
    cast_any<TE_e4m3, false><<<(unsigned)blocks, THREADS, 0, stream>>>(work);
  return cudaGetLastError();
}
