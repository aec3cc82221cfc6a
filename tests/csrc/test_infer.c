/* The one judge of arguments: what it infers, and the exact text of everything that it refuses. */
#include "rows.h"
#include "te_table.h"
#include "test.h"

#include <stdio.h>

/* One call: descriptions are as the last begin() left them, absent and 0, until set. */
static te_op op;
static te_op_row row;
static te_desc in[TE_MAX_ENTRIES];
static te_num sizes[TE_MAX_ENTRIES][TE_MAX_NDIM];
static te_out_desc out[TE_MAX_ENTRIES];
static te_status status;

static void begin(const char *ns, const te_format_row *formats) {
  status = (te_status){0};
  CHECK_INT(te__parse_op(ns, formats, &row, &op, &status), TE_OK);
  CHECK_STR(status.message, "");
  memset(in, 0, sizeof in);
  for (int e = 0; e < TE_MAX_ENTRIES; e++) in[e].sizes = sizes[e];
}

#define BEGIN(...) \
  do { \
    row = (te_op_row){"t", "made up", SLOTS(__VA_ARGS__), NULL, NULL}; \
    begin("test", test_formats); \
  } while (0)

static void begin_op(const char *name) {
  const te_op_row *real = te__ops;
  while (real->name && strcmp(real->name, name) != 0) real++;
  CHECK(real->name != NULL);
  row = *real;
  begin("te_ops", te__formats);
}

static void set_tensor(int e, te_dtype dtype, const int64_t *dims, int ndim) {
  in[e] = (te_desc){.present = true, .dtype = dtype, .ndim = ndim, .sizes = sizes[e], .device_index = -1};
  for (int i = 0; i < ndim; i++) sizes[e][i].i = dims[i];
}

#define TENSOR(e, dtype, ...) \
  set_tensor(e, dtype, (const int64_t[]){__VA_ARGS__}, (int)(sizeof(const int64_t[]){__VA_ARGS__} / 8))
#define SCALAR_TENSOR(e, dtype) set_tensor(e, dtype, NULL, 0)
#define ABSENT(e) (in[e].present = false)

static int run(void) {
  status = (te_status){0};
  te_arith arith = te__int64_arith(&status);
  memset(out, 0x5a, sizeof out); /* nothing may rely on what was there */
  int rc = te__infer(&op, &arith, in, out, &status);
  CHECK_INT(rc, status.code);
  return rc;
}

static void check_out(int o, te_dtype dtype, const int64_t *dims, int ndim, const char *file, int line) {
  test__check(out[o].present, file, line, "present");
  test__check_int(out[o].dtype, dtype, file, line, "dtype");
  test__check_int(out[o].ndim, ndim, file, line, "ndim");
  for (int i = 0; i < ndim; i++) test__check_int(out[o].sizes[i].i, dims[i], file, line, "size");
}

#define CHECK_RUNS() \
  do { \
    CHECK_INT(run(), TE_OK); \
    CHECK_STR(status.message, ""); \
  } while (0)
#define CHECK_OUT(o, dtype, ...) \
  check_out(o, dtype, (const int64_t[]){__VA_ARGS__}, (int)(sizeof(const int64_t[]){__VA_ARGS__} / 8), \
            __FILE__, __LINE__)
#define CHECK_ERROR(text) \
  do { \
    CHECK_INT(run(), TE_ERROR); \
    CHECK_STR(status.message, text); \
  } while (0)

/* ----------------------------------------------------------------------------------- linear_fwd ------- */

enum { FWD_X, FWD_W, FWD_B };

static void fwd(void) { /* [4, 3] by [5, 3] */
  begin_op("linear_fwd");
  TENSOR(FWD_X, TE_bf16, 4, 3);
  TENSOR(FWD_W, TE_bf16, 5, 3);
}

TEST(fwd_shapes) {
  fwd();
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 4, 5);
  TENSOR(FWD_B, TE_bf16, 5);
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 4, 5);
  TENSOR(FWD_X, TE_bf16, 3); /* a vector has no leading dims, and the result neither */
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 5);
  TENSOR(FWD_X, TE_bf16, 2, 7, 1, 3);
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 2, 7, 1, 5);
  TENSOR(FWD_X, TE_bf16, 0, 3); /* no rows */
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 0, 5);
  TENSOR(FWD_X, TE_bf16, 2, 0, 3);
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 2, 0, 5);
  TENSOR(FWD_X, TE_bf16, 4, 0); /* K = 0 */
  TENSOR(FWD_W, TE_bf16, 5, 0);
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 4, 5);
  TENSOR(FWD_W, TE_bf16, 0, 0); /* and N = 0 */
  TENSOR(FWD_B, TE_bf16, 0);
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 4, 0);
}

TEST(fwd_dtypes) {
  static const te_dtype dtypes[] = {TE_bf16, TE_f16, TE_f32};
  for (int i = 0; i < 3; i++) {
    fwd();
    in[FWD_X].dtype = in[FWD_W].dtype = dtypes[i];
    CHECK_RUNS();
    CHECK_OUT(0, dtypes[i], 4, 5);
  }
}

TEST(sixty_four_dims) {
  int64_t dims[TE_MAX_NDIM], wanted[TE_MAX_NDIM];
  fwd();
  for (int i = 0; i < TE_MAX_NDIM; i++) wanted[i] = dims[i] = i % 20 == 0 ? 2 : 1;
  dims[TE_MAX_NDIM - 1] = 3;
  wanted[TE_MAX_NDIM - 1] = 5;
  set_tensor(FWD_X, TE_bf16, dims, TE_MAX_NDIM);
  CHECK_RUNS();
  check_out(0, TE_bf16, wanted, TE_MAX_NDIM, __FILE__, __LINE__);
}

TEST(too_many_dims_of_an_output) {
  int64_t dims[TE_MAX_NDIM];
  BEGIN(IN("x", "bf16 [*M]"), OUT("y", "bf16 [*M, 1]"));
  for (int i = 0; i < TE_MAX_NDIM; i++) dims[i] = 1;
  set_tensor(0, TE_bf16, dims, TE_MAX_NDIM - 1);
  CHECK_RUNS();
  CHECK_INT(out[0].ndim, TE_MAX_NDIM);
  set_tensor(0, TE_bf16, dims, TE_MAX_NDIM);
  CHECK_ERROR("test::t: y would have 65 dimensions: at most 64");
}

TEST(fwd_wrong_sizes) {
  fwd();
  TENSOR(FWD_X, TE_bf16, 896, 712);
  CHECK_ERROR("te_ops::linear_fwd: x[1] = 712: must be 3, which is K = w[1] (x has shape [896, 712])");
  TENSOR(FWD_X, TE_bf16, 2, 0, 4);
  CHECK_ERROR("te_ops::linear_fwd: x[2] = 4: must be 3, which is K = w[1] (x has shape [2, 0, 4])");
  TENSOR(FWD_X, TE_bf16, 4);
  CHECK_ERROR("te_ops::linear_fwd: x[0] = 4: must be 3, which is K = w[1] (x has shape [4])");
  fwd();
  TENSOR(FWD_B, TE_bf16, 6);
  CHECK_ERROR("te_ops::linear_fwd: b[0] = 6: must be 5, which is N = w[0] (b has shape [6])");
}

TEST(fwd_wrong_ranks) {
  fwd();
  SCALAR_TENSOR(FWD_X, TE_bf16);
  CHECK_ERROR("te_ops::linear_fwd: x has 0 dimensions: must have at least 1 (x has shape [])");
  fwd();
  TENSOR(FWD_W, TE_bf16, 3);
  CHECK_ERROR("te_ops::linear_fwd: w has 1 dimension: must have 2 (w has shape [3])");
  TENSOR(FWD_W, TE_bf16, 1, 5, 3);
  CHECK_ERROR("te_ops::linear_fwd: w has 3 dimensions: must have 2 (w has shape [1, 5, 3])");
  fwd();
  TENSOR(FWD_B, TE_bf16, 1, 5);
  CHECK_ERROR("te_ops::linear_fwd: b has 2 dimensions: must have 1 (b has shape [1, 5])");
}

TEST(fwd_wrong_dtypes) {
  fwd();
  in[FWD_X].dtype = TE_f64;
  CHECK_ERROR("te_ops::linear_fwd: x has dtype float64: must be one of bfloat16, float16, float32 (x has "
              "shape [4, 3])");
  in[FWD_X].dtype = TE_DTYPE_OTHER;
  CHECK_ERROR("te_ops::linear_fwd: x has dtype a dtype that te_ops does not know: must be one of bfloat16, "
              "float16, float32 "
              "(x has shape [4, 3])");
  fwd();
  in[FWD_W].dtype = TE_f32;
  CHECK_ERROR(
      "te_ops::linear_fwd: w has dtype float32: must be the dtype of x, bfloat16 (w has shape [5, 3])");
  fwd();
  TENSOR(FWD_B, TE_f16, 5);
  CHECK_ERROR("te_ops::linear_fwd: b has dtype float16: must be the dtype of x, bfloat16 (b has shape [5])");
  BEGIN(IN("x", "u8 [*M]"));
  TENSOR(0, TE_i8, 2);
  CHECK_ERROR("test::t: x has dtype int8: must be uint8 (x has shape [2])");
}

TEST(every_dtype_is_named_in_the_rule) {
  char type[256] = "", expected[512] = "";
  for (int d = 0; d < TE_DTYPE_COUNT; d++) {
    size_t n = strlen(type), m = strlen(expected);
    snprintf(type + n, sizeof type - n, "%s%s", d ? "|" : "", te__dtype_id((te_dtype)d));
    snprintf(expected + m, sizeof expected - m, "%s%s", d ? ", " : "must be one of ",
             te__dtype_name((te_dtype)d));
  }
  strcat(type, " []");
  strcat(expected, " (x has shape [])");
  BEGIN(IN("x", type));
  SCALAR_TENSOR(0, TE_DTYPE_OTHER);
  CHECK_INT(run(), TE_ERROR);
  CHECK_CONTAINS(status.message, expected);
}

TEST(absent_though_required) {
  fwd();
  ABSENT(FWD_W);
  CHECK_ERROR("te_ops::linear_fwd: w is absent: it is required");
  ABSENT(FWD_X);
  CHECK_ERROR("te_ops::linear_fwd: x is absent: it is required");
}

TEST(mixed_devices) {
  fwd();
  in[FWD_W].device_type = 1;
  in[FWD_W].device_index = 2;
  CHECK_ERROR("te_ops::linear_fwd: w is on cuda:2: must be on the device of x, cpu (w has shape [5, 3])");
  in[FWD_X].device_type = 1;
  in[FWD_X].device_index = 0;
  CHECK_ERROR("te_ops::linear_fwd: w is on cuda:2: must be on the device of x, cuda:0 (w has shape [5, 3])");
  in[FWD_X].device_index = 2;
  CHECK_RUNS();
  TENSOR(FWD_B, TE_bf16, 5);
  in[FWD_B].device_type = 14;
  CHECK_ERROR("te_ops::linear_fwd: b is on meta: must be on the device of x, cuda:2 (b has shape [5])");
  in[FWD_B].device_type = -7;
  CHECK_ERROR("te_ops::linear_fwd: b is on a device of type -7: must be on the device of x, cuda:2 (b has "
              "shape [5])");
  ABSENT(FWD_B); /* where an absent tensor is does not matter */
  CHECK_RUNS();
}

/* ----------------------------------------------------------------------------------- linear_bwd ------- */

enum { BWD_DY, BWD_X, BWD_W, BWD_GRADS };
enum { NEED_DX = 1, NEED_DW = 2, NEED_DB = 4 };

static void bwd(int64_t grads) { /* M = 2 x 4, N = 5, K = 3 */
  begin_op("linear_bwd");
  TENSOR(BWD_DY, TE_f16, 2, 4, 5);
  if (grads & NEED_DW) TENSOR(BWD_X, TE_f16, 2, 4, 3);
  if (grads & NEED_DX) TENSOR(BWD_W, TE_f16, 5, 3);
  in[BWD_GRADS].scalar = grads;
}

TEST(bwd_shapes_for_every_choice_of_gradients) {
  for (int grads = 0; grads < 8; grads++) {
    bwd(grads);
    NOTE("grads = %d", grads);
    CHECK_RUNS();
    CHECK_INT(out[0].present, (grads & NEED_DX) != 0);
    CHECK_INT(out[1].present, (grads & NEED_DW) != 0);
    CHECK_INT(out[2].present, (grads & NEED_DB) != 0);
    if (grads & NEED_DX) CHECK_OUT(0, TE_f16, 2, 4, 3);
    if (grads & NEED_DW) CHECK_OUT(1, TE_f16, 5, 3);
    if (grads & NEED_DB) CHECK_OUT(2, TE_f16, 5);
    for (int o = 0; o < 3; o++) {
      CHECK_INT(out[o].dtype, TE_f16); /* an absent output of a mutating operator is an empty tensor of it */
      if (!out[o].present) CHECK_INT(out[o].ndim, 0);
    }
  }
}

TEST(bwd_shapes) {
  bwd(NEED_DX | NEED_DW | NEED_DB);
  TENSOR(BWD_DY, TE_f16, 5); /* vectors */
  TENSOR(BWD_X, TE_f16, 3);
  CHECK_RUNS();
  CHECK_OUT(0, TE_f16, 3);
  CHECK_OUT(1, TE_f16, 5, 3);
  TENSOR(BWD_DY, TE_f16, 0, 5); /* no rows: dw and db are sums over nothing, and there */
  TENSOR(BWD_X, TE_f16, 0, 3);
  CHECK_RUNS();
  CHECK_OUT(0, TE_f16, 0, 3);
  CHECK_OUT(1, TE_f16, 5, 3);
  CHECK_OUT(2, TE_f16, 5);
  TENSOR(BWD_DY, TE_f16, 4, 0); /* N = 0 and K = 0 */
  TENSOR(BWD_X, TE_f16, 4, 0);
  TENSOR(BWD_W, TE_f16, 0, 0);
  CHECK_RUNS();
  CHECK_OUT(0, TE_f16, 4, 0);
  CHECK_OUT(1, TE_f16, 0, 0);
  CHECK_OUT(2, TE_f16, 0);
}

TEST(presence_must_match_the_flag) {
  bwd(NEED_DX | NEED_DW);
  ABSENT(BWD_X);
  CHECK_ERROR(
      "te_ops::linear_bwd: x is absent although need_dw is set: it is present exactly when that flag is set");
  bwd(NEED_DX | NEED_DW);
  in[BWD_GRADS].scalar = NEED_DX;
  CHECK_ERROR("te_ops::linear_bwd: x is present although need_dw is not set: it is present exactly when that "
              "flag is set");
  bwd(NEED_DX);
  ABSENT(BWD_W);
  CHECK_ERROR(
      "te_ops::linear_bwd: w is absent although need_dx is set: it is present exactly when that flag is set");
  BEGIN(IN("x", "bf16 [M]"), IN("z", "bf16 [M] if on"), IN("on", "bool"));
  TENSOR(0, TE_bf16, 2);
  CHECK_RUNS();
  in[2].scalar = 1;
  CHECK_ERROR("test::t: z is absent although on is set: it is present exactly when that flag is set");
  TENSOR(1, TE_bf16, 2);
  CHECK_RUNS();
  in[2].scalar = 0;
  CHECK_ERROR("test::t: z is present although on is not set: it is present exactly when that flag is set");
}

TEST(the_flags_may_come_first) {
  BEGIN(IN("f", "bits a b"), IN("x", "bf16 [M]"), IN("z", "bf16 [M] if b"), OUT("y", "bf16 [M] if a"));
  TENSOR(1, TE_bf16, 2);
  CHECK_RUNS();
  CHECK(!out[0].present);
  in[0].scalar = 1;
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 2);
  in[0].scalar = 2;
  CHECK_ERROR("test::t: z is absent although b is set: it is present exactly when that flag is set");
}

TEST(bits_beyond_the_flags) {
  bwd(0);
  in[BWD_GRADS].scalar = 8;
  CHECK_ERROR("te_ops::linear_bwd: grads = 8: has bits beyond its 3 flags");
  in[BWD_GRADS].scalar = INT64_MIN;
  CHECK_ERROR("te_ops::linear_bwd: grads = -9223372036854775808: has bits beyond its 3 flags");
  bwd(7);
  in[BWD_GRADS].scalar = -1;
  CHECK_ERROR("te_ops::linear_bwd: grads = -1: has bits beyond its 3 flags");
  in[BWD_GRADS].scalar = (INT64_C(1) << 32) | 7;
  CHECK_ERROR("te_ops::linear_bwd: grads = 4294967303: has bits beyond its 3 flags");
}

TEST(bwd_leading_dims_must_agree) {
  bwd(NEED_DW);
  TENSOR(BWD_X, TE_f16, 2, 6, 3);
  CHECK_ERROR("te_ops::linear_bwd: x[1] = 6: must be 4 as in dy[1] (x has shape [2, 6, 3])");
  TENSOR(BWD_X, TE_f16, 7, 4, 3);
  CHECK_ERROR("te_ops::linear_bwd: x[0] = 7: must be 2 as in dy[0] (x has shape [7, 4, 3])");
  TENSOR(BWD_X, TE_f16, 8, 3); /* the same product is not enough */
  CHECK_ERROR("te_ops::linear_bwd: x has 1 leading dimensions: must have the 2 of dy (x has shape [8, 3])");
  TENSOR(BWD_X, TE_f16, 3);
  CHECK_ERROR("te_ops::linear_bwd: x has 0 leading dimensions: must have the 2 of dy (x has shape [3])");
  TENSOR(BWD_DY, TE_f16, 5);
  TENSOR(BWD_X, TE_f16, 1, 3);
  CHECK_ERROR("te_ops::linear_bwd: x has 1 leading dimensions: must have the 0 of dy (x has shape [1, 3])");
}

TEST(bwd_wrong_sizes) {
  bwd(NEED_DX | NEED_DW);
  TENSOR(BWD_X, TE_f16, 2, 4, 9);
  CHECK_ERROR("te_ops::linear_bwd: x[2] = 9: must be 3, which is K = w[1] (x has shape [2, 4, 9])");
  bwd(NEED_DX | NEED_DW);
  TENSOR(BWD_DY, TE_f16, 2, 4, 9);
  CHECK_ERROR("te_ops::linear_bwd: dy[2] = 9: must be 5, which is N = w[0] (dy has shape [2, 4, 9])");
}

TEST(wgrad_has_no_output) {
  begin_op("linear_wgrad");
  TENSOR(0, TE_bf16, 2, 4, 5);
  TENSOR(1, TE_bf16, 2, 4, 3);
  TENSOR(2, TE_f32, 5, 3); /* its own dtype */
  CHECK_RUNS();
  TENSOR(2, TE_f32, 3, 5);
  CHECK_ERROR(
      "te_ops::linear_wgrad: dy[2] = 5: must be 3, which is N = main_grad[0] (dy has shape [2, 4, 5])");
}

/* ---------------------------------------------------------------------------------------- symbols ------ */

TEST(a_spread_symbol_used_bare_is_the_product) {
  BEGIN(IN("x", "bf16 [*M, K]"), IN("rows", "f32 [M]"), IN("tiles", "f32 [ceil(M, 4)]"),
        OUT("y", "f32 [M, K + 1]"));
  TENSOR(0, TE_bf16, 2, 3, 5);
  TENSOR(1, TE_f32, 6);
  TENSOR(2, TE_f32, 2);
  CHECK_RUNS();
  CHECK_OUT(0, TE_f32, 6, 6);
  TENSOR(1, TE_f32, 7);
  CHECK_ERROR("test::t: rows[0] = 7: must be 6, which is M, the leading dims of x (rows has shape [7])");
  TENSOR(1, TE_f32, 6);
  TENSOR(2, TE_f32, 3);
  CHECK_ERROR("test::t: tiles[0] = 3: must be 2 (tiles has shape [3])");
  TENSOR(0, TE_bf16, 5); /* no leading dims: one row */
  TENSOR(1, TE_f32, 1);
  TENSOR(2, TE_f32, 1);
  CHECK_RUNS();
  CHECK_OUT(0, TE_f32, 1, 6);
}

TEST(a_bare_symbol_spread_in_an_output_is_one_dim) {
  BEGIN(IN("x", "bf16 [M, K]"), OUT("y", "f32 [*M, 2 * K, 1]"));
  TENSOR(0, TE_bf16, 4, 3);
  CHECK_RUNS();
  CHECK_OUT(0, TE_f32, 4, 6, 1);
}

TEST(the_spread_wins_over_a_bare_use_before_it) {
  BEGIN(IN("rows", "f32 [M]"), IN("x", "bf16 [*M, K]"), OUT("y", "f32 [*M]"));
  TENSOR(0, TE_f32, 6);
  TENSOR(1, TE_bf16, 2, 3, 5);
  CHECK_RUNS();
  CHECK_OUT(0, TE_f32, 2, 3);
  TENSOR(0, TE_f32, 2);
  CHECK_ERROR("test::t: rows[0] = 2: must be 6, which is M, the leading dims of x (rows has shape [2])");
}

TEST(a_symbol_twice_in_a_shape) {
  BEGIN(IN("x", "bf16 [N, N]"), OUT("y", "bf16 [N * N, 0]"));
  TENSOR(0, TE_bf16, 3, 3);
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 9, 0);
  TENSOR(0, TE_bf16, 3, 4);
  CHECK_ERROR("test::t: x[1] = 4: must be 3, which is N = x[0] (x has shape [3, 4])");
}

TEST(constants) {
  BEGIN(IN("x", "bf16 [*M, 8]"), IN("s", "f32 []"), OUT("y", "f32 []"));
  TENSOR(0, TE_bf16, 3, 8);
  SCALAR_TENSOR(1, TE_f32);
  CHECK_RUNS();
  CHECK_OUT(0, TE_f32);
  TENSOR(0, TE_bf16, 8, 3);
  CHECK_ERROR("test::t: x[1] = 3: must be 8 (x has shape [8, 3])");
  TENSOR(0, TE_bf16, 3, 8);
  TENSOR(1, TE_f32, 1);
  CHECK_ERROR("test::t: s has 1 dimension: must have 0 (s has shape [1])");
}

TEST(sizes_that_cannot_be) {
  BEGIN(IN("x", "bf16 [M, K]"), OUT("y", "bf16 [M, K - 4]"));
  TENSOR(0, TE_bf16, 2, 4);
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 2, 0);
  TENSOR(0, TE_bf16, 2, 3);
  CHECK_ERROR("test::t: y[1] would be -1: must not be negative");
  BEGIN(IN("x", "bf16 [M, K]"), OUT("y", "bf16 [ceil(M, K)]"));
  TENSOR(0, TE_bf16, 2, 0);
  CHECK_ERROR("test::t: a size is divided by 0, which is not positive");
}

/* The linear operators do not ask for the product of leading dims, but it has to exist: a body works in it.
 */
TEST(overflow_names_the_operator) {
  fwd();
  TENSOR(FWD_X, TE_bf16, INT64_C(1) << 32, INT64_C(1) << 31, 3);
  CHECK_ERROR("te_ops::linear_fwd: a size overflows 64 bits (operands 4294967296 and 2147483648)");
  BEGIN(IN("x", "bf16 [M, K]"), OUT("y", "bf16 [M * K]"));
  TENSOR(0, TE_bf16, INT64_MAX, 1);
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, INT64_MAX);
  TENSOR(0, TE_bf16, INT64_MAX, 2);
  CHECK_ERROR("test::t: a size overflows 64 bits (operands 9223372036854775807 and 2)");
}

TEST(huge_sizes) {
  fwd();
  TENSOR(FWD_X, TE_bf16, INT64_MAX, 3);
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, INT64_MAX, 5);
  TENSOR(FWD_X, TE_bf16, INT64_MAX, INT64_MAX - 1);
  CHECK_ERROR("te_ops::linear_fwd: x[1] = 9223372036854775806: must be 3, which is K = w[1] "
              "(x has shape [9223372036854775807, 9223372036854775806])");
}

/* ------------------------------------------------------------------------------------ long messages ---- */

TEST(a_shape_of_64_dims_is_printed_in_full) {
  int64_t dims[TE_MAX_NDIM];
  char expected[TE_MESSAGE_SIZE];
  fwd();
  int used = snprintf(expected, sizeof expected,
                      "te_ops::linear_fwd: x[63] = 8192: must be 3, which is K = w[1] (x has shape [");
  for (int i = 0; i < TE_MAX_NDIM; i++) {
    dims[i] = i == TE_MAX_NDIM - 1 ? 8192 : i % 20 ? 1 : 1024;
    used += snprintf(expected + used, sizeof expected - (size_t)used, "%s%d", i ? ", " : "", (int)dims[i]);
  }
  snprintf(expected + used, sizeof expected - (size_t)used, "])");
  set_tensor(FWD_X, TE_bf16, dims, TE_MAX_NDIM);
  CHECK_ERROR(expected);
}

TEST(a_shape_that_is_too_long_says_so) {
  int64_t dims[TE_MAX_NDIM];
  fwd();
  for (int i = 0; i < TE_MAX_NDIM; i++) dims[i] = i ? INT64_MAX : 0; /* 0 first: the product is 0 */
  set_tensor(FWD_X, TE_bf16, dims, TE_MAX_NDIM);
  CHECK_INT(run(), TE_ERROR);
  CHECK_CONTAINS(status.message, "te_ops::linear_fwd: x[63] = 9223372036854775807: must be 3, which is K = "
                                 "w[1] (x has shape [0, 9223372036854775807, ");
  CHECK_CONTAINS(status.message, ", 9223372036854775807, ...])"); /* not cut in the middle of a number */
}

TEST(the_longest_message_is_whole) {
  static const char n47[] = "a23456789_123456789_123456789_123456789_1234567",
                    m47[] = "b23456789_123456789_123456789_123456789_1234567";
  char type[256], other[256], expected[64];
  int64_t dims[TE_MAX_NDIM];
  snprintf(type, sizeof type, "bf16 [*S, %s]", m47);
  snprintf(other, sizeof other, "like %s [*S, %s]", n47, m47);
  row = (te_op_row){n47, "made up", SLOTS(IN(n47, type), IN(m47, other)), NULL, NULL};
  begin(m47 + 1, NULL);
  for (int i = 0; i < TE_MAX_NDIM; i++) dims[i] = i ? INT64_MAX - i : 0;
  set_tensor(0, TE_bf16, dims, TE_MAX_NDIM);
  dims[62]--;
  set_tensor(1, TE_bf16, dims, TE_MAX_NDIM);
  CHECK_INT(run(), TE_ERROR);
  CHECK_CONTAINS(status.message, ", ...])");
  dims[62]++;
  dims[63]--;
  set_tensor(1, TE_bf16, dims, TE_MAX_NDIM);
  CHECK_INT(run(), TE_ERROR);
  snprintf(expected, sizeof expected, "%s[63] (", n47);
  CHECK_CONTAINS(status.message, expected);
  CHECK_CONTAINS(status.message, ", ...])");
  in[1].dtype = TE_DTYPE_OTHER;
  CHECK_INT(run(), TE_ERROR);
  CHECK_CONTAINS(status.message, ", ...])");
}

/* --------------------------------------------------------------------------- formats of buffers -------- */

TEST(buffers_of_inputs) {
  BEGIN(IN("x", "pair [*M, K]"), IN("w", "triple [N, K]"), OUT("y", "bf16 [*M, N]"));
  TENSOR(0, TE_u8, 2, 3, 40);
  TENSOR(1, TE_f32, 6, 2);
  TENSOR(2, TE_e4m3, 130, 40);
  TENSOR(3, TE_f32, 2, 4);
  TENSOR(4, TE_f32, 1);
  CHECK_RUNS();
  CHECK_OUT(0, TE_bf16, 2, 3, 130);
  TENSOR(1, TE_f32, 6, 1);
  CHECK_ERROR("test::t: x_scale[1] = 1: must be 2 (x_scale has shape [6, 1])");
  TENSOR(1, TE_f32, 3, 2);
  CHECK_ERROR("test::t: x_scale[0] = 3: must be 6, which is M, the leading dims of x_data (x_scale has shape "
              "[3, 2])");
  TENSOR(1, TE_f32, 2, 3, 2);
  CHECK_ERROR("test::t: x_scale has 3 dimensions: must have 2 (x_scale has shape [2, 3, 2])");
  TENSOR(1, TE_f32, 6, 2);
  TENSOR(3, TE_f32, 2, 1);
  CHECK_ERROR("test::t: w_scale[1] = 1: must be 4 (w_scale has shape [2, 1])");
  TENSOR(3, TE_f32, 2, 4);
  TENSOR(4, TE_f32, 2);
  CHECK_ERROR("test::t: w_amax[0] = 2: must be 1 (w_amax has shape [2])");
  TENSOR(4, TE_f32, 1);
  in[2].dtype = TE_e5m2;
  CHECK_ERROR("test::t: w_data has dtype float8_e5m2: must be float8_e4m3fn (w_data has shape [130, 40])");
  in[2].dtype = TE_e4m3;
  ABSENT(1);
  CHECK_ERROR("test::t: x_scale is absent: it is required");
}

TEST(buffers_of_outputs) {
  BEGIN(IN("x", "bf16 [*M, K]"), IN("f", "bits row col"), OUT("q", "pair [*M, K] if row"),
        OUT("t", "triple [K, M] if col"));
  TENSOR(0, TE_bf16, 2, 100, 33);
  in[1].scalar = 3;
  CHECK_RUNS();
  CHECK_OUT(0, TE_u8, 2, 100, 33);
  CHECK_OUT(1, TE_f32, 200, 2);
  CHECK_OUT(2, TE_e4m3, 33, 200);
  CHECK_OUT(3, TE_f32, 1, 4);
  CHECK_OUT(4, TE_f32, 1);
  in[1].scalar = 2;
  CHECK_RUNS();
  CHECK(!out[0].present && !out[1].present && out[2].present && out[3].present && out[4].present);
  in[1].scalar = 3;
  TENSOR(0, TE_bf16, 2, 0, 33); /* no rows */
  CHECK_RUNS();
  CHECK_OUT(0, TE_u8, 2, 0, 33);
  CHECK_OUT(1, TE_f32, 0, 2);
  CHECK_OUT(3, TE_f32, 1, 0);
  TENSOR(0, TE_bf16, 33); /* a vector is one row */
  CHECK_RUNS();
  CHECK_OUT(0, TE_u8, 33);
  CHECK_OUT(1, TE_f32, 1, 2);
  CHECK_OUT(2, TE_e4m3, 33, 1);
}

TEST(buffers_are_present_together) {
  BEGIN(IN("x", "bf16 [*M, K]"), IN("o", "triple [P, Q] ?"), IN("c", "pair [R, Q] if on"), IN("on", "bool"));
  TENSOR(0, TE_bf16, 4, 8);
  CHECK_RUNS();
  TENSOR(1, TE_e4m3, 200, 8);
  TENSOR(2, TE_f32, 2, 4);
  TENSOR(3, TE_f32, 1);
  CHECK_RUNS();
  ABSENT(3);
  CHECK_ERROR("test::t: o_amax is absent although o_data is present: they are parts of one tensor");
  TENSOR(3, TE_f32, 1);
  ABSENT(2);
  CHECK_ERROR("test::t: o_scale is absent although o_data is present: they are parts of one tensor");
  TENSOR(2, TE_f32, 2, 4);
  ABSENT(1);
  CHECK_ERROR("test::t: o_scale is present although o_data is absent: they are parts of one tensor");
  ABSENT(2);
  ABSENT(3);
  in[6].scalar = 1;
  TENSOR(4, TE_u8, 3, 70);
  CHECK_ERROR("test::t: c_scale is absent although on is set: it is present exactly when that flag is set");
  TENSOR(5, TE_f32, 3, 3);
  CHECK_RUNS();
  TENSOR(1, TE_e4m3, 200, 71);
  TENSOR(2, TE_f32, 2, 4);
  TENSOR(3, TE_f32, 1);
  CHECK_ERROR("test::t: c_data[1] = 70: must be 71, which is Q = o_data[1] (c_data has shape [3, 70])");
}

TEST(buffers_of_a_shape_with_several_leading_dims) {
  BEGIN(IN("a", "pair [A, B, C]"), IN("s", "pair [*T, B, C]"), IN("v", "pair [C]"));
  TENSOR(0, TE_u8, 2, 3, 64);
  TENSOR(1, TE_f32, 6, 2);
  TENSOR(2, TE_u8, 5, 7, 3, 64);
  TENSOR(3, TE_f32, 105, 2);
  TENSOR(4, TE_u8, 64);
  TENSOR(5, TE_f32, 1, 2);
  CHECK_RUNS();
  TENSOR(3, TE_f32, 35, 2);
  CHECK_ERROR("test::t: s_scale[0] = 35: must be 105 (s_scale has shape [35, 2])");
}

/* ---------------------------------------------------------------------------------------- properties --- */

/* linear_bwd's fake of linear_fwd's shapes: whatever fwd accepts, bwd of its result accepts, and returns
 * the shapes of the operands. One wrong size anywhere is an error that names the slot. */
PROPERTY(random_linears) {
  for (int trial = 0; trial < 2000; trial++) {
    int64_t x[TE_MAX_NDIM], y[TE_MAX_NDIM];
    int ndim = 1 + (int)rng_below(r, 6);
    int64_t n = rng_below(r, 5), k = rng_below(r, 5);
    for (int i = 0; i + 1 < ndim; i++) x[i] = rng_below(r, 4);
    x[ndim - 1] = k;
    begin_op("linear_fwd");
    set_tensor(FWD_X, TE_f32, x, ndim);
    TENSOR(FWD_W, TE_f32, n, k);
    if (rng_below(r, 2)) TENSOR(FWD_B, TE_f32, n);
    CHECK_RUNS();
    CHECK_INT(out[0].ndim, ndim);
    for (int i = 0; i < ndim; i++) y[i] = out[0].sizes[i].i;
    begin_op("linear_bwd");
    set_tensor(BWD_DY, TE_f32, y, ndim);
    set_tensor(BWD_X, TE_f32, x, ndim);
    TENSOR(BWD_W, TE_f32, n, k);
    in[BWD_GRADS].scalar = 7;
    CHECK_RUNS();
    check_out(0, TE_f32, x, ndim, __FILE__, __LINE__);
    CHECK_OUT(1, TE_f32, n, k);
    CHECK_OUT(2, TE_f32, n);
    int e = (int)rng_below(r, 3), dim = (int)rng_below(r, in[e].ndim);
    sizes[e][dim].i += 1;
    CHECK_INT(run(), TE_ERROR);
    CHECK_CONTAINS(status.message, "te_ops::linear_bwd: ");
    CHECK_CONTAINS(status.message, "has shape [");
  }
}
