/* Casts to FP8: codes, transposed codes, amax and sums over rows in one pass. Which kernel a cast gets. */
#include "cast_device.cuh"
#include "cast_line.cuh"

enum kind { ALIGNED, FLAT, ANY };

static int64_t size_of(te_dtype dtype) { return dtype == TE_f32 ? 4 : dtype == TE_e4m3 ? 1 : 2; }

static kind kind_of(const te_cast *c) {
  int64_t size = size_of(c->x.dtype), line_size = size * SUB < 16 ? size * SUB : 16;
  uintptr_t data = (uintptr_t)c->x.data, stride = (uintptr_t)(c->x.row_stride * size);
  bool is_dense = c->x.row_stride == c->x.cols || c->x.rows == 1;
  if (c->row && !c->col && !c->col_sums && is_dense && data % (uintptr_t)line_size == 0 &&
      (uintptr_t)c->row % SUB == 0)
    return FLAT;
  uintptr_t row = c->row ? (uintptr_t)c->row : 0, col = c->col ? (uintptr_t)c->col | (uintptr_t)c->x.rows : 0;
  bool is_aligned =
      (data | stride) % (uintptr_t)line_size == 0 && c->x.cols % SUB == 0 && row % SUB == 0 && col % 16 == 0;
  return is_aligned ? ALIGNED : ANY;
}

static int64_t tiles_of(int64_t length) { return (length + TILE - 1) / TILE; }

extern "C" int64_t te__cast_sum_tiles(int64_t rows) { return tiles_of(rows); }

extern "C" bool te__cast_is_one_tile(const te_cast *c) { return c->x.rows <= TILE && c->x.cols <= TILE; }

static void add_job(cast_jobs *work, const te_cast *c, kind k, int64_t *blocks) {
  cast_job *j = &work->at[work->n++];
  int64_t across =
      k == FLAT ? (c->x.rows * c->x.cols + TILE * TILE - 1) / (TILE * TILE) : tiles_of(c->x.cols);
  int64_t down = k == FLAT ? 1 : tiles_of(c->x.rows), tiles = across * down;
  if (tiles == 0) across = down = tiles = 1; /* an empty tensor has a scale too */
  j->cast = *c;
  j->first_block = (uint32_t)*blocks;
  j->tiles = (uint32_t)tiles;
  j->across = (uint32_t)across;
  j->down = k == FLAT ? 0 : (uint32_t)down;
  *blocks += tiles;
}

static cudaError_t run(kind k, const cast_jobs *work, int64_t blocks, bool chained, cudaStream_t stream) {
  return k == ALIGNED ? te__cast_aligned(work, blocks, chained, stream)
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
    kind k = kind_of(first);
    for (;
         i < n && casts[i].x.dtype == first->x.dtype && casts[i].out == first->out && kind_of(&casts[i]) == k;
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
  kind k = kind_of(&c);
  add_job(&work, &c, k, &blocks);
  return run(k, &work, blocks, false, stream);
}
