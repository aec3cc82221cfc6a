/* Formats whose buffers a slot chooses, slots that take a plain or a quantized tensor, and outputs whose
 * dtype a flag picks. */
#include "rows.h"
#include "te_table.h"
#include "test.h"

#include <stdio.h>

static const te_format_row formats[] = {
    {"q", "codes, their transpose, a scale",
     (const te_buffer_row[]){
         {"row", "e4m3|e5m2 [*M, K] ?"}, {"col", "like row [K, M] ?"}, {"scale", "f32 [1]"}, {NULL, NULL}}},
    {NULL, NULL, NULL}};

static te_op op;
static te_op_row row;
static te_status status;

static int parse(const te_slot_row *slots) {
  status = (te_status){0};
  row = (te_op_row){"t", "made up", slots, NULL, NULL};
  return te__parse_op("test", formats, &row, &op, &status);
}

#define X IN("x", "f32 [*M, K]")
#define PARSE(...) CHECK_INT(parse(SLOTS(__VA_ARGS__)), TE_OK)
#define FAILS(reason, ...) \
  do { \
    CHECK_INT(parse(SLOTS(__VA_ARGS__)), TE_ERROR); \
    CHECK_CONTAINS(status.message, reason); \
  } while (0)

static const char *schema(void) {
  static char text[TE_SCHEMA_SIZE];
  CHECK_INT(te__schema(&op, text, sizeof text, &status), TE_OK);
  return text;
}

TEST(a_slot_chooses_its_buffers) {
  PARSE(X, IN("f", "bits a b"), IN("w", "q [*M, K] if a col"), OUT("y", "q:e4m3 [*M, K] row if a, col if b"));
  CHECK_STR(schema(), "t(Tensor x, int f, Tensor? w_col, Tensor? w_scale) -> (Tensor?, Tensor?, Tensor)");
  PARSE(X, IN("w", "q [*M, K]"), OUT("y", "q:e5m2 [*M, K] row"));
  CHECK_STR(schema(), "t(Tensor x, Tensor? w_row, Tensor? w_col, Tensor w_scale) -> (Tensor, Tensor)");
}

TEST(a_slot_takes_plain_or_quantized) {
  PARSE(IN("x", "bf16|f32|q:e4m3 [*M, K] strided"), OUT("y", "f32 [*M, K]"));
  CHECK_STR(schema(), "t(Tensor x, Tensor? x_col, Tensor? x_scale) -> Tensor");
  CHECK(op.entries[0].is_strided);
  CHECK(!op.entries[1].is_strided);
}

TEST(bad_choices) {
  FAILS("column 13: the format has no buffer 'diag'", X, IN("w", "q [*M, K]   diag"));
  FAILS("an output says which buffers of 'q' it has", X, OUT("y", "q:e4m3 [*M, K]"));
  FAILS("an output of several dtypes needs 'by FLAG'", X, OUT("y", "q [*M, K] row"));
  FAILS("an output of several dtypes needs 'by FLAG'", X, OUT("y", "bf16|f32 [*M, K]"));
  FAILS("an output is plain or quantized, not either", X, OUT("y", "bf16|q:e4m3 [*M, K] row"));
  FAILS("expected a dtype", X, IN("w", "q: [*M, K]"));
  FAILS("'q' has no such element", X, IN("w", "q:f32 [*M, K]"));
  FAILS("'row' cannot have an 'if' of its own beside the slot's", X, IN("f", "bits a b"),
        IN("w", "q [*M, K] if a row if b"));
  FAILS("no bits or bool slot has the flag 'c'", X, IN("f", "bits a b"), IN("w", "q [*M, K] row if c"));
}

/* ----------------------------------------------------------------------------------- inference -------- */

static te_desc in[TE_MAX_ENTRIES];
static te_num sizes[TE_MAX_ENTRIES][TE_MAX_NDIM];
static te_out_desc out[TE_MAX_ENTRIES];

static void tensor(int e, te_dtype dtype, int64_t a, int64_t b) {
  in[e] = (te_desc){.present = true, .dtype = dtype, .ndim = b < 0 ? 1 : 2, .sizes = sizes[e]};
  sizes[e][0].i = a;
  sizes[e][1].i = b;
}

static int infer(void) {
  status = (te_status){0};
  te_arith arith = te__int64_arith(&status);
  return te__infer(&op, &arith, in, out, &status);
}

#define REFUSES(reason) \
  do { \
    CHECK_INT(infer(), TE_ERROR); \
    CHECK_CONTAINS(status.message, reason); \
  } while (0)

TEST(parts_belong_to_a_quantized_tensor) {
  PARSE(IN("x", "bf16|q:e4m3 [*M, K]"), OUT("y", "f32 [K, M]"));
  memset(in, 0, sizeof in);
  tensor(0, TE_bf16, 3, 5);
  CHECK_INT(infer(), TE_OK);
  CHECK_INT(out[0].sizes[0].i, 5);
  tensor(2, TE_f32, 1, -1);
  REFUSES("test::t: x_scale is present although x is bfloat16: it belongs to a quantized tensor");
  tensor(0, TE_e4m3, 3, 5);
  CHECK_INT(infer(), TE_OK);
  tensor(1, TE_e4m3, 5, 3);
  CHECK_INT(infer(), TE_OK);
  tensor(1, TE_e4m3, 3, 5);
  REFUSES("x_col[0] = 3: must be 5");
  in[1].present = false;
  in[2].present = false;
  REFUSES("x_scale is absent although x is quantized");
  tensor(0, TE_e5m2, 3, 5);
  REFUSES("x has dtype float8_e5m2: must be one of bfloat16, float8_e4m3fn");
}

TEST(copies_share_a_dtype) {
  PARSE(X, IN("w", "q [N, K]"));
  memset(in, 0, sizeof in);
  tensor(0, TE_f32, 3, 5);
  tensor(1, TE_e5m2, 4, 5);
  tensor(2, TE_e5m2, 5, 4);
  tensor(3, TE_f32, 1, -1);
  CHECK_INT(infer(), TE_OK);
  in[2].dtype = TE_e4m3;
  REFUSES("w_col has dtype float8_e4m3fn: must be the dtype of w_row, float8_e5m2");
  in[1].present = false;
  CHECK_INT(infer(), TE_OK);
}

TEST(a_flag_or_an_int_picks_the_dtype) {
  PARSE(X, IN("which", "int"), IN("f", "bits a five"), OUT("y", "bf16|f16|f32 [*M, K] by which"),
        OUT("z", "q [*M, K] by five col"));
  memset(in, 0, sizeof in);
  tensor(0, TE_f32, 3, 5);
  in[1].present = in[2].present = true;
  for (int i = 0; i < 3; i++) {
    in[1].scalar = i;
    in[2].scalar = i == 1 ? 2 : 1;
    CHECK_INT(infer(), TE_OK);
    CHECK_INT(out[0].dtype, (i == 0 ? TE_bf16 : i == 1 ? TE_f16 : TE_f32));
    CHECK_INT(out[1].dtype, (i == 1 ? TE_e5m2 : TE_e4m3));
    CHECK_INT(out[1].sizes[0].i, 5);
    CHECK_INT(out[2].dtype, TE_f32);
  }
  in[1].scalar = 3;
  REFUSES("test::t: which = 3: must be 0 to 2, the dtype of y");
  in[1].scalar = -1;
  REFUSES("test::t: which = -1: must be 0 to 2, the dtype of y");
}
