/* Activations and their gradients, gated or not, with the bias gradient on the way if it is wanted.
 *
 * A block has a tile of y (or dy): a thread has 16 bytes of a row, or one element where the layout is not
 * aligned, and goes down the rows.
 *
 * Floor, in elements for each of y: forward 1 read (gated 2) and 1 write; backward 2 reads (3) and 1 write
 * (2). */
#include "activation_device.cuh"
#include "row_vector.cuh"
#include "te_activation_kernels.h"

#define THREADS 256
#define THREAD_ROWS 4 /* of a thread, at least: less would not be worth finding out where it is */
#define SUM_ROWS 64   /* of a partial sum, at least: then partial sums are at most 3 % of the bytes */

struct tiling {
  uint32_t across; /* tiles in a row of them */
  uint32_t lanes;  /* threads that share a row; a power of two */
  int64_t rows;    /* of a tile */
  int64_t down;    /* tiles in a column of them */
};

/* --------------------------------------------------------------------------------------- kernels ------ */

/* What a thread has of a row. */
template <te_dtype IN, bool ALIGNED> struct piece : row_vector<IN> {
  typedef typename element<IN>::type T;
  static __device__ __forceinline__ uint4 *at(const te_matrix &m, int64_t row, int64_t col) {
    return global((uint4 *)((T *)m.data + row * m.row_stride + col));
  }
  __device__ __forceinline__ void load(const te_matrix &m, int64_t row, int64_t col) {
    this->raw = *at(m, row, col);
  }
  __device__ __forceinline__ void store(const te_matrix &m, int64_t row, int64_t col) const {
    const uint4 &v = this->raw; /* by hand, since the compiler makes four stores of an assignment */
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at(m, row, col))),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
  }
};

template <te_dtype IN> struct piece<IN, false> {
  typedef typename element<IN>::type T;
  static constexpr int size = 1;
  T raw;
  __device__ __forceinline__ void load(const te_matrix &m, int64_t row, int64_t col) {
    raw = *global((const T *)m.data + row * m.row_stride + col * m.col_stride);
  }
  __device__ __forceinline__ void store(const te_matrix &m, int64_t row, int64_t col) const {
    *global((T *)m.data + row * m.row_stride + col) = raw;
  }
  __device__ __forceinline__ void values(float (&x)[1]) const { x[0] = to_f32<IN>(raw); }
  __device__ __forceinline__ void set(const float (&x)[1]) { store_element<IN>(&raw, 0, x[0]); }
};

template <int N> __device__ __forceinline__ void add(float (&sums)[N], const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) sums[i] += x[i];
}

/* The sums of the threads that have the same columns are added up, in order. */
template <int N, int HALVES>
__device__ __forceinline__ void store_partial(const tiling &t, const float (&sums)[HALVES][N], int64_t first,
                                              int64_t cols, float *to) {
  __shared__ float all[HALVES][THREADS * N];
#pragma unroll
  for (int h = 0; h < HALVES; h++)
#pragma unroll
    for (int i = 0; i < N; i++) all[h][threadIdx.x * N + i] = sums[h][i];
  __syncthreads();
  int width = (int)t.lanes * N;
#pragma unroll
  for (int h = 0; h < HALVES; h++)
    for (int c = threadIdx.x; c < width && first + c < cols; c += THREADS) {
      float sum = 0;
      for (int at = c; at < THREADS * N; at += width) sum += all[h][at];
      *global(to + h * cols + first + c) = sum;
    }
}

template <te_dtype IN, bool ALIGNED, bool GATED, bool BACKWARD, bool SUMS>
__global__ void __launch_bounds__(THREADS) activation(const __grid_constant__ te_activation_pass p,
                                                      const __grid_constant__ tiling t, float *partial) {
  typedef piece<IN, ALIGNED> pieces;
  constexpr int size = pieces::size, ahead = BACKWARD ? 2 : 4; /* rows in flight */
  if (SUMS) let_next_start();
  uint32_t down = blockIdx.x / t.across, lane = threadIdx.x & (t.lanes - 1), lines = THREADS / t.lanes;
  int64_t first = (int64_t)(blockIdx.x - down * t.across) * t.lanes * size, col = first + lane * size;
  int64_t row = down * t.rows + threadIdx.x / t.lanes, end = min(p.out.rows, (down + 1) * t.rows);
  float sums[GATED ? 2 : 1][size] = {};
  for (; col < p.cols && row < end; row += ahead * lines) {
    pieces x[ahead], g[ahead], dy[ahead];
#pragma unroll
    for (int i = 0; i < ahead; i++) {
      int64_t r = row + i * lines;
      if (r >= end) break;
      x[i].load(p.x, r, col);
      if (GATED) g[i].load(p.x, r, p.cols + col);
      if (BACKWARD) dy[i].load(p.dy, r, col);
    }
#pragma unroll
    for (int i = 0; i < ahead; i++) {
      int64_t r = row + i * lines;
      if (r >= end) break;
      float xs[size], gs[size], dys[size];
      x[i].values(xs);
      if (GATED) g[i].values(gs);
      if (BACKWARD) {
        dy[i].values(dys);
        activate_grads<GATED>(p.activation, dys, xs, gs);
      } else {
        activate<GATED>(p.activation, xs, gs, xs);
      }
      x[i].set(xs);
      x[i].store(p.out, r, col);
      if (GATED && BACKWARD) {
        g[i].set(gs);
        g[i].store(p.out, r, p.cols + col);
      }
      if (SUMS) { /* of what is stored, as a sum over dx afterwards would be */
        x[i].values(xs);
        add(sums[0], xs);
        if (GATED) {
          g[i].values(gs);
          add(sums[GATED], gs);
        }
      }
    }
  }
  if constexpr (SUMS) store_partial(t, sums, first, p.cols, partial + down * p.out.cols);
}

/* ------------------------------------------------------------------------------------- launchers ------ */

static int64_t over(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t bytes_of(te_dtype dtype) { return dtype == TE_f32 ? 4 : 2; }

/* Pieces of 16 bytes begin at multiples of 16 bytes in both halves. */
static bool is_aligned(const te_matrix *m, int64_t cols) {
  int64_t bytes = bytes_of(m->dtype);
  return m->col_stride == 1 && (uintptr_t)m->data % 16 == 0 && m->row_stride * bytes % 16 == 0 &&
         cols * bytes % 16 == 0;
}

static bool is_aligned(const te_activation_pass *p) {
  return is_aligned(&p->x, p->cols) && is_aligned(&p->out, p->cols) &&
         (!p->dy.data || is_aligned(&p->dy, p->cols));
}

/* As many threads to a row as do not leave many idle; from 32 on a warp has whole lines of memory. */
static tiling tiling_of(const te_activation_pass *p, bool aligned) {
  int64_t pieces = aligned ? p->cols * bytes_of(p->out.dtype) / 16 : p->cols, lanes = 1;
  while (lanes < THREADS && lanes < pieces) lanes *= 2;
  while (lanes > 32 && over(pieces, lanes) * lanes - pieces > pieces / 8) lanes /= 2;
  int64_t rows = THREADS / lanes * THREAD_ROWS;
  if (p->db) rows = over(SUM_ROWS, rows) * rows;
  tiling t = {(uint32_t)over(pieces, lanes), (uint32_t)lanes, rows, over(p->out.rows, rows)};
  return t;
}

template <te_dtype IN, bool ALIGNED, bool GATED>
static cudaError_t run(const te_activation_pass *p, float *partial, cudaStream_t stream) {
  tiling t = tiling_of(p, ALIGNED);
  auto kernel = !p->dy.data ? activation<IN, ALIGNED, GATED, false, false>
                : p->db     ? activation<IN, ALIGNED, GATED, true, true>
                            : activation<IN, ALIGNED, GATED, true, false>;
  return launch(kernel, t.down * t.across, THREADS, false, stream, *p, t, partial);
}

template <te_dtype IN>
static cudaError_t run(const te_activation_pass *p, float *partial, cudaStream_t stream) {
  if (is_aligned(p)) return (p->gated ? run<IN, true, true> : run<IN, true, false>)(p, partial, stream);
  return (p->gated ? run<IN, false, true> : run<IN, false, false>)(p, partial, stream);
}

extern "C" int64_t te__activation_partials(const te_activation_pass *pass) {
  return tiling_of(pass, is_aligned(pass)).down;
}

extern "C" cudaError_t te__activation(const te_activation_pass *pass, float *partial, cudaStream_t stream) {
  switch (pass->out.dtype) {
  case TE_bf16:
    return run<TE_bf16>(pass, partial, stream);
  case TE_f16:
    return run<TE_f16>(pass, partial, stream);
  case TE_f32:
    return run<TE_f32>(pass, partial, stream);
  default:
    return cudaErrorInvalidValue;
  }
}
