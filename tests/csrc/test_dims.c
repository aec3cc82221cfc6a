/* Dims as rows write them, evaluated over int64_t. The expressions go through the parser, so this also
 * tests precedence and nesting. */
#include "rows.h"
#include "test.h"

#include <stdio.h>

/* Parses "[a, b, c, d, <text>]" in an operator whose symbols are a b c d. */
static bool parse_dim(const char *text, te_dim *dim) {
  static te_op op;
  te_status status;
  char type[512];
  snprintf(type, sizeof type, "f32 [%s]", text);
  int rc = parse_row(SLOTS(IN("x", "f32 [a, b, c, d]"), OUT("y", type)), &op, &status);
  CHECK_STR(status.message, "");
  if (rc == TE_OK) *dim = op.entries[1].shape.dims[0];
  return rc == TE_OK;
}

static int eval(const char *text, int64_t a, int64_t b, int64_t c, int64_t d, int64_t *out,
                te_status *status) {
  te_dim dim;
  te_num symbols[4] = {{a}, {b}, {c}, {d}}, result = {0};
  *status = (te_status){0};
  te_arith arith = te__int64_arith(status);
  if (!parse_dim(text, &dim)) return TE_ERROR;
  int rc = te__dim_eval(&dim, &arith, symbols, &result);
  *out = result.i;
  CHECK_INT(rc, status->code);
  return rc;
}

/* a = 7, b = 3, c = 32, d = -7 */
#define CHECK_VALUE(text, value) \
  do { \
    te_status status_; \
    int64_t out_ = 0; \
    CHECK_INT(eval(text, 7, 3, 32, -7, &out_, &status_), TE_OK); \
    CHECK_INT(out_, value); \
  } while (0)

#define CHECK_FAILS(text, a, b, message_) \
  do { \
    te_status status_; \
    int64_t out_ = 0; \
    CHECK_INT(eval(text, a, b, 0, 0, &out_, &status_), TE_ERROR); \
    CHECK_STR(status_.message, message_); \
  } while (0)

TEST(atoms) {
  CHECK_VALUE("0", 0);
  CHECK_VALUE("2147483647", 2147483647);
  CHECK_VALUE("a", 7);
  CHECK_VALUE("d", -7);
  CHECK_VALUE(" ( ( a ) ) ", 7);
}

TEST(operators) {
  CHECK_VALUE("a + b", 10);
  CHECK_VALUE("a - b", 4);
  CHECK_VALUE("b - a", -4);
  CHECK_VALUE("a * b", 21);
  CHECK_VALUE("a * d", -49);
  CHECK_VALUE("a*0", 0);
}

TEST(precedence_and_association) {
  CHECK_VALUE("a + b * c", 7 + 3 * 32);
  CHECK_VALUE("a * b + c", 7 * 3 + 32);
  CHECK_VALUE("(a + b) * c", (7 + 3) * 32);
  CHECK_VALUE("a * (b + c)", 7 * (3 + 32));
  CHECK_VALUE("a - b - c", 7 - 3 - 32);
  CHECK_VALUE("a - (b - c)", 7 - (3 - 32));
  CHECK_VALUE("a - b + c", 7 - 3 + 32);
  CHECK_VALUE("a - b * c - d", 7 - 3 * 32 + 7);
  CHECK_VALUE("2*a*b*c", 2 * 7 * 3 * 32);
  CHECK_VALUE("a+b-c*d+1", 7 + 3 + 32 * 7 + 1);
}

TEST(ceil_rounds_up) {
  CHECK_VALUE("ceil(0, 32)", 0);
  CHECK_VALUE("ceil(1, 32)", 1);
  CHECK_VALUE("ceil(32, 32)", 1);
  CHECK_VALUE("ceil(33, 32)", 2);
  CHECK_VALUE("ceil(a, b)", 3);
  CHECK_VALUE("ceil(d, b)", -2); /* -7 / 3 = -2.33 */
  CHECK_VALUE("ceil(d, 7)", -1);
  CHECK_VALUE("ceil(d, 8)", 0);
  CHECK_VALUE("ceil(a, 1)", 7);
}

TEST(up_rounds_to_a_multiple) {
  CHECK_VALUE("up(0, 16)", 0);
  CHECK_VALUE("up(1, 16)", 16);
  CHECK_VALUE("up(16, 16)", 16);
  CHECK_VALUE("up(17, 16)", 32);
  CHECK_VALUE("up(d, b)", -6);
  CHECK_VALUE("up(a, 1)", 7);
}

TEST(nesting) {
  CHECK_VALUE("ceil(ceil(c, b), a)", 2);
  CHECK_VALUE("up(ceil(c, 5), 4)", 8);
  CHECK_VALUE("ceil(up(a, 4) * 3, b + 2)", 5);
  CHECK_VALUE("2 * up(a + b, 4) - ceil(c, a - b)", 24 - 8);
  CHECK_VALUE("ceil(up(ceil(a, 2), up(b, 2)), ceil(c, 16))", 2);
  CHECK_VALUE("((((((((((a))))))))))", 7);
}

#define MAX INT64_MAX
#define MIN INT64_MIN
#define MAX_TEXT "9223372036854775807"
#define MIN_TEXT "-9223372036854775808"
#define OVERFLOWS(x, y) "a size overflows 64 bits (operands " x " and " y ")"

TEST(overflow_is_an_error) {
  CHECK_FAILS("a + b", MAX, 1, OVERFLOWS(MAX_TEXT, "1"));
  CHECK_FAILS("a + b", MIN, -1, OVERFLOWS(MIN_TEXT, "-1"));
  CHECK_FAILS("a - b", MIN, 1, OVERFLOWS(MIN_TEXT, "1"));
  CHECK_FAILS("a - b", 0, MIN, OVERFLOWS("0", MIN_TEXT));
  CHECK_FAILS("a * b", MAX, 2, OVERFLOWS(MAX_TEXT, "2"));
  CHECK_FAILS("a * b", MIN, -1, OVERFLOWS(MIN_TEXT, "-1"));
  CHECK_FAILS("a * b", INT64_C(1) << 32, INT64_C(1) << 31, OVERFLOWS("4294967296", "2147483648"));
  CHECK_FAILS("up(a, b)", MAX, 2, OVERFLOWS(MAX_TEXT, "2"));
}

TEST(extremes_that_fit) {
  te_status status;
  int64_t out;
  CHECK_INT(eval("a + b", MAX, MIN, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, -1);
  CHECK_INT(eval("a + 0", MAX, 0, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, MAX);
  CHECK_INT(eval("a - b", MIN, MIN, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, 0);
  CHECK_INT(eval("a * b", MIN, 1, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, MIN);
  CHECK_INT(eval("a * b", INT64_C(1) << 31, INT64_C(1) << 31, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, INT64_C(1) << 62);
  CHECK_INT(eval("ceil(a, b)", MAX, MAX, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, 1);
  CHECK_INT(eval("ceil(a, b)", MAX, 1, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, MAX);
  CHECK_INT(eval("ceil(a, b)", MAX, 2, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, INT64_C(1) << 62);
  CHECK_INT(eval("ceil(a, b)", MIN, MAX, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, -1);
  CHECK_INT(eval("up(a, b)", MIN, 1, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, MIN);
  CHECK_INT(eval("up(a, b)", MAX, MAX, 0, 0, &out, &status), TE_OK);
  CHECK_INT(out, MAX);
}

TEST(division_by_what_is_not_positive) {
  CHECK_FAILS("ceil(a, b)", 7, 0, "a size is divided by 0, which is not positive");
  CHECK_FAILS("up(a, b)", 7, 0, "a size is divided by 0, which is not positive");
  CHECK_FAILS("ceil(a, b)", 7, -3, "a size is divided by -3, which is not positive");
  CHECK_FAILS("ceil(a, b)", MIN, -1, "a size is divided by -1, which is not positive"); /* no SIGFPE */
  CHECK_FAILS("up(a, b - b)", 7, 5, "a size is divided by 0, which is not positive");
  CHECK_FAILS("ceil(a, 0)", 7, 5, "a size is divided by 0, which is not positive");
}

TEST(arithmetic_compares_and_prints) {
  te_status status = {0};
  te_arith arith = te__int64_arith(&status);
  te_num min = {MIN}, zero = {0}, out;
  bool answer;
  char text[32];
  CHECK_INT(arith.equal(arith.user, min, min, &answer), TE_OK);
  CHECK(answer);
  CHECK_INT(arith.equal(arith.user, min, zero, &answer), TE_OK);
  CHECK(!answer);
  CHECK_INT(arith.negative(arith.user, min, &answer), TE_OK);
  CHECK(answer);
  CHECK_INT(arith.negative(arith.user, zero, &answer), TE_OK);
  CHECK(!answer);
  arith.print(arith.user, min, text, sizeof text);
  CHECK_STR(text, MIN_TEXT);
  CHECK_INT(arith.constant(arith.user, -5, &out), TE_OK);
  CHECK_INT(out.i, -5);
  CHECK_INT(arith.binary(arith.user, TE_DIM_SYMBOL, zero, zero, &out), TE_ERROR);
  CHECK_CONTAINS(status.message, "unknown step");
}

/* ------------------------------------------------------------------- against 128-bit arithmetic ------ */

typedef __int128 wide;

typedef struct expression {
  char text[512];
  int used, n_steps;
  bool failed; /* some intermediate result does not fit, or a divisor is not positive */
  int64_t values[4];
} expression;

static void put(expression *x, const char *text) {
  x->used += snprintf(x->text + x->used, sizeof x->text - (size_t)x->used, "%s", text);
}

static wide ceil_div(wide a, wide b) { /* floor-based, unlike the code's truncation */
  wide q = a / b;
  return q * b < a ? q + 1 : q;
}

/* Writes a random expression of at most `budget` steps, fully parenthesised or as bare as precedence
 * allows (`level` 0: a sum may stand here, 1: a product, 2: only an atom), and returns its value. */
static wide generate(rng *r, expression *x, int budget, int level) {
  int kind = budget < 3 ? 0 : (int)rng_below(r, 6);
  if (rng_below(r, 4) == 0) put(x, " ");
  x->n_steps++;
  if (kind == 0) {
    int which = (int)rng_below(r, 6);
    if (which < 4) {
      put(x, (const char *[]){"a", "b", "c", "d"}[which]);
      return x->values[which];
    }
    int64_t constant = which == 4 ? rng_below(r, 200) : rng_below(r, INT64_C(1) << 31);
    char number[32];
    snprintf(number, sizeof number, "%lld", (long long)constant);
    put(x, number);
    return constant;
  }
  int left = 1 + (int)rng_below(r, budget - 2), right = budget - 1 - left;
  bool call = kind >= 4, product = kind == 3,
       parens = !call && (level > (product ? 1 : 0) || rng_below(r, 4) == 0);
  if (call) put(x, kind == 4 ? "ceil(" : "up(");
  if (parens) put(x, "(");
  wide a = generate(r, x, left, product ? 1 : 0);
  if (rng_below(r, 4) == 0) put(x, " ");
  put(x, call ? "," : product ? "*" : kind == 1 ? "+" : "-");
  wide b = generate(r, x, right, call ? 0 : product ? 2 : 1);
  if (call || parens) put(x, ")");
  if (x->failed) return 0;
  if (call && b <= 0) return x->failed = true, 0;
  wide v = kind == 1   ? a + b
           : kind == 2 ? a - b
           : kind == 3 ? a * b
           : kind == 4 ? ceil_div(a, b)
                       : ceil_div(a, b) * b;
  if (v != (int64_t)v) return x->failed = true, 0;
  return v;
}

static int64_t random_size(rng *r) {
  switch (rng_below(r, 8)) {
  case 0:
    return MAX - rng_below(r, 3);
  case 1:
    return MIN + rng_below(r, 3);
  case 2:
    return -rng_below(r, 100);
  case 3:
    return (int64_t)rng_next(r) >> rng_below(r, 64);
  case 4:
    return 0;
  default:
    return rng_below(r, 5000);
  }
}

PROPERTY(random_expressions) {
  int n_failed = 0, n_fine = 0;
  for (int trial = 0; trial < 20000; trial++) {
    expression x = {.used = 0};
    te_status status;
    int64_t out = 0;
    bool tame = rng_below(r, 2);
    for (int i = 0; i < 4; i++) x.values[i] = tame ? rng_below(r, 5000) : random_size(r);
    wide wanted = generate(r, &x, 1 + (int)rng_below(r, TE_MAX_DIM_STEPS), 0);
    NOTE("%s, a = %lld, b = %lld, c = %lld, d = %lld", x.text, (long long)x.values[0], (long long)x.values[1],
         (long long)x.values[2], (long long)x.values[3]);
    int rc = eval(x.text, x.values[0], x.values[1], x.values[2], x.values[3], &out, &status);
    CHECK_INT(rc, x.failed ? TE_ERROR : TE_OK);
    if (!x.failed) CHECK_INT(out, (int64_t)wanted);
    if (x.failed)
      n_failed++;
    else
      n_fine++;
  }
  CHECK(n_failed > 1000 && n_fine > 5000);
}
