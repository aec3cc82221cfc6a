/* Per-tensor FP8: what the operators ask of a backend. The operators themselves (quantize_fp8.c,
 * linear_fp8.c) are written once over this interface; the CPU's bodies define the bits. */
#ifndef TE_FP8_H
#define TE_FP8_H

#include "../te_matrix.h"
#include "../te_scale.h"

/* An amax in the making, and how many parts of the tensor have added to it. Zeroed before it is used. */
typedef struct te_amax_word {
  float amax;
  uint32_t done;
} te_amax_word;

/* One tensor to cast. x has unit stride along its columns. */
typedef struct te_cast {
  te_matrix x;
  te_dtype out;       /* TE_e4m3 or TE_e5m2 */
  void *row;          /* rows x cols codes, contiguous, or NULL */
  void *col;          /* cols x rows codes, contiguous, or NULL */
  const float *scale; /* a given scale, or NULL: from `amax` by te_current_scale() */
  const float *amax;  /* of x, finished */
  bool pow2;
  bool follows; /* the launch just before this one makes what scale, amax, record or unless point to */
  const int32_t *unless; /* the cast does nothing if this is there and not zero */
  float *scale_inv;      /* receives 1 / scale, or NULL */
  float *record;         /* zero; collects the amax on the way, or NULL */
  float *stage;          /* with record and done: becomes max(*stage, amax) if the amax is finite, or NULL */
  uint32_t *done;        /* zero; counts towards the end of record */
  float *col_sums;       /* sum_tiles(rows) x cols partial sums over rows of x in fp32, or NULL */
} te_cast;

#define TE_CASTS 3 /* at most, in one call */

/* d = scale_a scale_b (a b^T) + bias + beta d on codes: a is m x k, b is n x k, both contiguous; d is m x n,
 * contiguous, bf16, f16 or f32. Products are accumulated in fp32; then come the scales. All sizes positive.
 */
typedef struct te_fp8_gemm {
  int64_t m, n, k;
  const void *a, *b;
  te_dtype a_dtype, b_dtype;
  const float *a_scale_inv, *b_scale_inv;
  te_matrix d;
  const void *bias; /* n values of d's dtype, or NULL */
  float beta;       /* 0 or 1 */
  bool fast;        /* the tensor cores' fast accumulation, where there is such a choice */
} te_fp8_gemm;

/* The slots of delayed scaling as one thing. */
typedef struct te_delayed_args {
  void *state;
  const int32_t *region; /* the number of the region that is active */
  int32_t *seen;         /* receives it, or NULL */
  te_delayed how;
} te_delayed_args;

/* Whether a tensor still has the values that a fingerprint was taken of. */
typedef struct te_comparison {
  uint64_t hash; /* this and the next two: zero before */
  float amax;    /* of the tensor */
  uint32_t done;
  int32_t is_same;
} te_comparison;

typedef struct te_fp8_backend {
  int (*zero)(const te_context *ctx, float *values, int n);
  /* Into floats that the call just before this one zeroed. */
  int (*amax)(const te_context *ctx, const te_matrix *m, float *const *out, int n);
  /* Compares with *held, unless `force`, and replaces it. x is contiguous. */
  int (*compare)(const te_context *ctx, te_matrix x, uint64_t salt, bool force, uint64_t *held,
                 te_comparison *out);
  int (*cast)(const te_context *ctx, const te_cast *casts, int n);
  int (*transpose)(const te_context *ctx, const void *codes, void *out, int64_t rows, int64_t cols);
  /* codes times scale_inv, rounded once; `out` is contiguous */
  int (*decode)(const te_context *ctx, te_matrix codes, const float *scale_inv, void *out,
                te_dtype out_dtype);
  int (*gemm)(const te_context *ctx, const te_fp8_gemm *gemm);
  int (*fill_rows)(const te_context *ctx, te_matrix out, const void *row); /* NULL: zeros */
  int (*column_sums)(const te_context *ctx, te_matrix m, void *sums);      /* in m's dtype */
  /* How many partial sums a cast of as many rows makes; 0: casts make none. */
  int64_t (*sum_tiles)(int64_t rows);
  /* Whether a cast by current scaling needs no amax pass before it. */
  bool (*is_one_tile)(const te_cast *cast);
  int (*finish_sums)(const te_context *ctx, const float *partial, int64_t n, int64_t cols, void *sums,
                     te_dtype dtype);
  /* Zeroes `zero`, and rolls the state's history if a new region began since it was last rolled. */
  int (*roll)(const te_context *ctx, const te_delayed_args *delayed, te_amax_word *zero, int n_zero);
} te_fp8_backend;

extern const te_fp8_backend te__fp8_cpu;
extern const te_fp8_backend te__fp8_cuda;

/* Both bodies of an operator that is written over a backend. */
#if defined(TE_WITH_CUDA)
#define TE_FP8_BODIES(name) \
  int te__##name##_cpu(const te_context *ctx, const te_arg *args) { return name(ctx, &te__fp8_cpu, args); } \
  int te__##name##_cuda(const te_context *ctx, const te_arg *args) { return name(ctx, &te__fp8_cuda, args); }
#else
#define TE_FP8_BODIES(name) \
  int te__##name##_cpu(const te_context *ctx, const te_arg *args) { return name(ctx, &te__fp8_cpu, args); }
#endif

/* ------------------------------------------------------------------------ shared by the operators ---- */

/* x as a cast takes it: a column-major x is the transpose of a row-major one, so its copies change places. */
te_cast te__cast_of(te_matrix x, te_dtype out, void *row, void *col, float *scale_inv);

/* Readies casts by current scaling (where casts[i].scale is NULL): their amaxes, into n floats. */
int te__find_amaxes(const te_context *ctx, const te_fp8_backend *be, te_cast *casts, int n, float *amaxes);

/* Casts x, with its sums over rows (or NULL, in x's dtype) on the way where the backend can. */
int te__cast_and_sum(const te_context *ctx, const te_fp8_backend *be, te_cast *cast, te_matrix x, void *sums);

int te__delayed_args(const te_context *ctx, const te_arg *state, const te_arg *region,
                     const te_arg *new_scale, const te_arg *history_len, const te_arg *margin,
                     bool most_recent, bool backward_is_e5m2, te_delayed_args *out);

/* Makes a cast that follows roll() use a tensor's scale in a state, and stage its amax there if `word` is not
 * NULL. */
void te__cast_delayed(te_cast *cast, void *state, int tensor, te_amax_word *word);

static inline bool te_flag(const te_arg *bits, int flag) { return (bits->i >> flag & 1) != 0; }

#endif
