/* Casts to FP8: codes, transposed codes, amax and sums over rows in one pass. Which kernel a cast gets. */
#include "cast_device.cuh"
#include "cast_line.cuh"

enum kind { ALIGNED, WIDE, FLAT, ANY };

/* From here on wide tiles gain more than the coarser last wave of blocks costs. */
#define WIDE_FROM ((int64_t)100 << 20)

static int64_t size_of(te_dtype dtype) { return dtype == TE_f32 ? 4 : dtype == TE_e4m3 ? 1 : 2; }

static kind kind_of(const te_cast *c, bool has_sums) {
  int64_t size = size_of(c->x.dtype), line_size = size * SUB < 16 ? size * SUB : 16;
  uintptr_t data = (uintptr_t)c->x.data, stride = (uintptr_t)(c->x.row_stride * size);
  bool is_dense = c->x.row_stride == c->x.cols || c->x.rows == 1;
  if (c->row && !c->col && !has_sums && is_dense && data % (uintptr_t)line_size == 0 &&
      (uintptr_t)c->row % SUB == 0)
    return FLAT;
  uintptr_t row = c->row ? (uintptr_t)c->row : 0, col = c->col ? (uintptr_t)c->col | (uintptr_t)c->x.rows : 0;
  bool is_aligned =
      (data | stride) % (uintptr_t)line_size == 0 && c->x.cols % SUB == 0 && row % SUB == 0 && col % 16 == 0;
  if (!is_aligned) return ANY;
  return size < 4 && c->x.rows * c->x.cols >= WIDE_FROM ? WIDE : ALIGNED;
}

static int64_t tiles_of(int64_t length) { return (length + TILE - 1) / TILE; }

extern "C" int64_t te__cast_sum_tiles(int64_t rows) { return tiles_of(rows); }

extern "C" bool te__cast_is_one_tile(const te_cast *c) { return c->x.rows <= TILE && c->x.cols <= TILE; }

static void add_job(cast_jobs *work, const te_cast *c, kind k, int64_t *blocks) {
  cast_job *j = &work->at[work->n++];
  int64_t across = tiles_of(c->x.cols), down = tiles_of(c->x.rows);
  if (k == WIDE) across = (c->x.cols + TE_WIDE_TILE - 1) / TE_WIDE_TILE;
  if (k == FLAT) across = (c->x.rows * c->x.cols + TILE * TILE - 1) / (TILE * TILE), down = 1;
  if (across * down == 0) across = down = 1; /* an empty tensor has a scale too */
  *j = {*c, (uint32_t)*blocks, (uint32_t)(across * down), (uint32_t)across};
  *blocks += across * down;
}

static cudaError_t run(kind k, const cast_jobs *work, int64_t blocks, bool chained, cudaStream_t stream) {
  return k == ALIGNED ? te__cast_aligned(work, TILE, blocks, chained, stream)
         : k == WIDE  ? te__cast_aligned(work, TE_WIDE_TILE, blocks, chained, stream)
         : k == FLAT  ? te__cast_flat(work, blocks, chained, stream)
                      : te__cast_any(work, blocks, chained, stream);
}

extern "C" cudaError_t te__cast(const te_cast *casts, int n, cudaStream_t stream) {
  bool chained = false;
  for (int i = 0; i < n; i++) chained = chained || casts[i].follows;
  for (int i = 0; i < n;) { /* a second launch follows the first, which waited for what is before it */
    cast_jobs work = {};
    int64_t blocks = 0;
    const te_cast *first = &casts[i];
    kind k = kind_of(first, first->col_sums != NULL);
    for (; i < n && casts[i].x.dtype == first->x.dtype && casts[i].out == first->out &&
           kind_of(&casts[i], casts[i].col_sums != NULL) == k;
         i++)
      add_job(&work, &casts[i], k, &blocks);
    cudaError_t error = run(k, &work, blocks, chained, stream);
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
  c.x.dtype = TE_e4m3;
  c.out = TE_e4m3;
  c.col = out;
  cast_jobs work = {};
  int64_t blocks = 0;
  kind k = kind_of(&c, false);
  add_job(&work, &c, k, &blocks);
  return run(k, &work, blocks, false, stream);
}
