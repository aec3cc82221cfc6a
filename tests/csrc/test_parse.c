/* The grammar of rows: what parses, into what, and where a malformed row is said to be wrong. */
#include "rows.h"
#include "te_table.h"
#include "test.h"

#include <stdio.h>
#include <stdlib.h>

static te_op op; /* too large for the stack of a test with several */

/* ------------------------------------------------------------------------------ malformed rows -------- */

#define MAX_TEST_SLOTS 50
#define TEXT_SIZE 2048

/* Parses a row in which exactly one type has a caret. The caret is taken out; the error must name its slot
 * and its column. */
static void check_bad(const te_slot_row *slots, const te_format_row *formats, const char *reason,
                      const char *file, int line) {
  te_slot_row copy[MAX_TEST_SLOTS] = {{0}};
  char text[TEXT_SIZE], expected[TEXT_SIZE], where[32] = "";
  const char *slot = "(no caret)";
  for (int i = 0; slots[i].name; i++) {
    copy[i] = slots[i];
    const char *caret = strchr(slots[i].type, '^');
    if (!caret) continue;
    int column = (int)(caret - slots[i].type);
    snprintf(text, sizeof text, "%.*s%s", column, slots[i].type, caret + 1);
    snprintf(where, sizeof where, "%d", column + 1);
    copy[i].type = text;
    slot = slots[i].name;
  }
  te_op_row row = {"t", "made up", copy, NULL, NULL};
  te_status status = {0};
  test__check_int(te__parse_op("test", formats, &row, &op, &status), TE_ERROR, file, line,
                  "te__parse_op() == TE_ERROR");
  snprintf(expected, sizeof expected, "row t.%s, column %s: %s", slot, where, reason);
  test__check_str(status.message, expected, file, line, "message");
}

#define BAD(reason, ...) check_bad(SLOTS(__VA_ARGS__), test_formats, reason, __FILE__, __LINE__)

/* The other slots of a row whose slot under test is an input. */
#define Y OUT("y", "bf16 [M]")
#define X IN("x", "bf16 [*M, K]")

TEST(bad_format) {
  BAD("expected a type", IN("x", "^"), Y);
  BAD("expected a type", IN("x", "  ^[M]"), Y);
  BAD("expected a type", IN("x", "^16 [M]"), Y);
  BAD("unknown format 'bf17'", IN("x", "^bf17 [M]"), Y);
  BAD("unknown format 'bf17'", IN("x", "  ^bf17 [M]"), Y);
  BAD("unknown format 'nope'", IN("x", "bf16|^nope [M]"), Y);
  BAD("unknown format 'bfloat16'", IN("x", "bf16 | ^bfloat16 [M]"), Y); /* the table has short names */
  BAD("expected a type", IN("x", "bf16|^[M]"), Y);
  BAD("expected '['", IN("x", "bf16 ^"), Y);
  BAD("expected '['", IN("x", "bf16 ^f16 [M]"), Y);
  BAD("expected '['", IN("x", "bf16 ^M"), Y);
  BAD("expected '['", IN("x", "pair^|bf16 [M, K]"), Y);
  BAD("an output of several dtypes needs 'by FLAG'", X, OUT("y", "^bf16|f16 [*M, K]"));
  BAD("an output is a tensor", X, OUT("y", "^int"));
  BAD("an output is a tensor", X, OUT("y", "^bits a b"));
}

TEST(bad_shape) {
  BAD("expected a symbol, an integer or '('", IN("x", "bf16 [^"), Y);
  BAD("expected ']'", IN("x", "bf16 [M^"), Y);
  BAD("expected ']'", IN("x", "bf16 [*M, K ^"), Y);
  BAD("expected ']'", IN("x", "bf16 [M ^N]"), Y);
  BAD("expected ']'", IN("x", "bf16 [M^)]"), Y);
  BAD("expected ']'", IN("x", "bf16 [2^M]"), Y);
  BAD("expected ']'", IN("x", "bf16 [M^/2]"), Y);
  BAD("expected a symbol, an integer or '('", IN("x", "bf16 [M,^]"), Y);
  BAD("expected a symbol, an integer or '('", IN("x", "bf16 [^, M]"), Y);
  BAD("expected a symbol, an integer or '('", IN("x", "bf16 [M, ^-K]"), Y);
  BAD("expected a symbol, an integer or '('", IN("x", "bf16 [M, K + ^]"), Y);
  BAD("expected a symbol, an integer or '('", IN("x", "bf16 [M, (^)]"), Y);
  BAD("expected a symbol, an integer or '('", IN("x", "bf16 [M, K * ^*2]"), Y);
  BAD("expected ')'", IN("x", "bf16 [M, (K^]"), Y);
  BAD("expected ')'", IN("x", "bf16 [M, (K^, 2)]"), Y);
  BAD("expected '('", IN("x", "bf16 [M, ceil^]"), Y);
  BAD("expected '('", IN("x", "bf16 [M, up ^K]"), Y);
  BAD("expected ','", IN("x", "bf16 [M, ceil(K^)]"), Y);
  BAD("expected ','", IN("x", "bf16 [M, up(K ^32)]"), Y);
  BAD("expected ')'", IN("x", "bf16 [M, up(K, 32^, 1)]"), Y);
  BAD("expected ')'", IN("x", "bf16 [M, ceil(K, 32^]"), Y);
  BAD("leading dims come first", IN("x", "bf16 [K, ^*M]"), Y);
  BAD("leading dims come first", IN("x", "bf16 [*M, ^*M]"), Y);
  BAD("expected a symbol after '*'", IN("x", "bf16 [*^]"), Y);
  BAD("expected a symbol after '*'", IN("x", "bf16 [* ^2, K]"), Y);
  BAD("too many dims", IN("x", "bf16 [M, K, 1, 2, ^3]"), Y);
  BAD("too many dims", IN("x", "bf16 [*M, 0, 1, 2, 3, ^K]"), Y);
  BAD("the constant is too large", IN("x", "bf16 [M, ^2147483648]"), Y);
  BAD("the constant is too large", IN("x", "bf16 [M, K + ^99999999999999999999999999]"), Y);
  BAD("too many symbols at 'I'", IN("x", "bf16 [A, B, C, D]"), IN("z", "bf16 [E, F, G, H*^I]"));
  BAD("too many symbols at 'I'", IN("x", "bf16 [A, B, C, D]"), IN("z", "bf16 [E, F, G, H]"),
      OUT("y", "bf16 [*^I]"));
}

TEST(expression_too_long) {
  /* 16 steps: 8 symbols and 7 sums are 15. The column is just behind the piece that has no room. */
  BAD("the expression is too long", IN("x", "bf16 [M+M+M+M+M+M+M+M+M^+M]"), Y);
  BAD("the expression is too long", IN("x", "bf16 [M, M+(M+(M+(M+(M+(M+(M+(M+(M+(M+(M+(M+(M+(M+(M+(M+(M^"),
      Y);
  BAD("the expression is too long", IN("x", "bf16 [ceil(M+M+M+M+M+M+M+M, 32)^]"), Y);
  /* Written within bounds, but the format's [M, ceil(K, 32)] puts the slot's dims in. */
  BAD("the expression is too long", IN("x", "pair [M, 1+2+3+4+5+6+7+8]^"), Y);
  BAD("the expression is too long", IN("x", "pair [1+2+3+4+5, 1+2+3+4+5, K]^"), Y);
  CHECK_INT(parse_row(SLOTS(IN("x", "bf16 [M]"), OUT("y", "bf16 [M+M+M+M+M+M+M+M]")), &op, &(te_status){0}),
            TE_OK);
}

TEST(nesting_has_a_limit) {
  /* Parentheses cost no step, so the number of steps does not bound the recursion; a row may come from
   * Python, where a crash is not acceptable. */
  enum { DEPTH = 2000000 };
  char *type = malloc(2 * DEPTH + 32);
  te_status status;
  memset(type, '(', 2 * DEPTH + 32);
  memcpy(type, "bf16 [M, ", 9);
  type[DEPTH] = 0;
  CHECK_INT(parse_row(SLOTS(IN("x", type), Y), &op, &status), TE_ERROR);
  CHECK_CONTAINS(status.message, "row t.x, column ");
  CHECK_CONTAINS(status.message, ": the expression is nested too deeply");
  free(type);
  CHECK_INT(parse_row(SLOTS(IN("x", "bf16 [M]"), OUT("y", "bf16 [((((((((((((((((M))))))))))))))))]")), &op,
                      &status),
            TE_OK);
}

TEST(bad_modifiers) {
  BAD("unexpected 'junk'", IN("x", "bf16 [M] ^junk"), Y);
  BAD("unexpected ']'", IN("x", "bf16 [M]^]"), Y);
  BAD("unexpected '= 1'", IN("x", "bf16 [M] ^= 1"), Y);
  BAD("unexpected 'stride'", IN("x", "bf16 [M] ^stride"), Y);
  BAD("unexpected 'iff a'", IN("x", "bf16 [M] ^iff a"), Y);
  BAD("a slot is '!' or 'strided', not both", IN("x", "bf16 [M] ! ^strided"), Y);
  BAD("a slot is '!' or 'strided', not both", IN("x", "bf16 [M] strided ^!"), Y);
  BAD("a slot is '?' or 'if', not both", X, IN("z", "bf16 [M] ? ^if a"), IN("f", "bits a"));
  BAD("a slot is '?' or 'if', not both", X, IN("z", "bf16 [M] if a ^?"), IN("f", "bits a"));
  BAD("a slot has one 'if'", X, IN("z", "bf16 [M] if a ^if b"), IN("f", "bits a b"));
  BAD("a slot has one 'if'", IN("f", "bits a b"), IN("z", "bf16 [M] if a ^if b"), X);
  BAD("an output's only modifiers are 'if FLAG' and 'by FLAG'", X, OUT("y", "bf16 [*M] ^?"));
  BAD("an output's only modifiers are 'if FLAG' and 'by FLAG'", X, OUT("y", "bf16 [*M] ^!"));
  BAD("an output's only modifiers are 'if FLAG' and 'by FLAG'", X, OUT("y", "bf16 [*M] ^strided"));
  BAD("an output's only modifiers are 'if FLAG' and 'by FLAG'", X, IN("f", "bits a"),
      OUT("y", "bf16 [*M] if a ^!"));
  BAD("an output's only modifiers are 'if FLAG' and 'by FLAG'", X, IN("f", "bits a"),
      OUT("y", "bf16 [*M] if a ^strided"));
  BAD("an output's only modifiers are 'if FLAG' and 'by FLAG'", X, IN("f", "bits a"),
      OUT("y", "bf16 [*M] if a ^?"));
  BAD("expected a flag", X, IN("z", "bf16 [M] if ^"), Y);
  BAD("expected a flag", X, IN("z", "bf16 [M] if ^?"), Y);
  BAD("no bits or bool slot has the flag 'c'", X, IN("z", "bf16 [M] if ^c"), IN("f", "bits a b"));
  BAD("no bits or bool slot has the flag 'f'", X, IN("z", "bf16 [M] if ^f"), IN("f", "bits a b"));
  BAD("no bits or bool slot has the flag 'n'", X, IN("z", "bf16 [M] if ^n"), IN("n", "int"));
  BAD("no bits or bool slot has the flag 'a'", X, OUT("y", "bf16 [*M] if ^a"));
}

TEST(bad_like) {
  BAD("expected a slot after 'like'", X, IN("z", "like ^[M]"), Y);
  BAD("no earlier input is named 'q'", X, IN("z", "like ^q [M]"), Y);
  BAD("no earlier input is named 'z'", X, IN("z", "like ^z [M]"), Y);
  BAD("no earlier input is named 'w'", X, IN("z", "like ^w [M]"), IN("w", "bf16 [M]"));
  BAD("no earlier input is named 'y'", X, Y, OUT("z", "like ^y [M]"));
  BAD("'like n' needs a tensor that is always present", X, IN("n", "int"), IN("z", "like ^n [M]"));
  BAD("'like b' needs a tensor that is always present", X, IN("b", "bf16 [M] ?"), OUT("y", "like ^b [*M]"));
  BAD("'like b' needs a tensor that is always present", X, IN("f", "bits a"), IN("b", "bf16 [M] if a"),
      OUT("y", "like ^b [*M]"));
}

TEST(bad_scalars) {
  BAD("unexpected 'junk'", X, IN("n", "int ^junk"));
  BAD("unexpected '[M]'", X, IN("n", "int ^[M]"));
  BAD("unexpected 'if a'", X, IN("n", "int ^if a"), IN("f", "bits a"));
  BAD("unexpected 'float'", X, IN("n", "int ^float"));
  BAD("unexpected 'bool = True'", X, IN("n", "int ^bool = True"));
  BAD("unexpected 'bits a'", X, IN("n", "float ^bits a"));
  BAD("expected a number", X, IN("n", "float = ^"));
  BAD("expected a number", X, IN("n", "float = ^one"));
  BAD("expected a number", X, IN("n", "float = ^nan")); /* a schema has no way to write these */
  BAD("expected a number", X, IN("n", "float = ^inf"));
  BAD("expected a number", X, IN("n", "float = ^-inf"));
  BAD("expected a number", X, IN("n", "float = ^1e999"));
  BAD("unexpected 'x'", X, IN("n", "float = 1.5^x"));
  BAD("expected an integer", X, IN("n", "int = ^"));
  BAD("expected an integer", X, IN("n", "int = ^one"));
  BAD("expected an integer", X, IN("n", "int = ^nan"));
  BAD("expected an integer", X, IN("n", "int = ^.5"));
  BAD("unexpected '.5'", X, IN("n", "int = 1^.5"));
  BAD("unexpected 'e3'", X, IN("n", "int = 1^e3"));
  BAD("the default is too large", X, IN("n", "int = ^9007199254740993")); /* 2^53 + 1: kept as a double */
  BAD("the default is too large", X, IN("n", "int = ^-9007199254740993"));
  BAD("the default is too large", X, IN("n", "int = ^99999999999999999999999"));
  BAD("expected True or False", X, IN("n", "bool = ^1"));
  BAD("expected True or False", X, IN("n", "bool = ^true"));
  BAD("expected True or False", X, IN("n", "bool = ^Truest"));
  BAD("expected True or False", X, IN("n", "bool = ^"));
  BAD("unexpected 'False'", X, IN("n", "bool = True ^False"));
  BAD("bits needs at least one flag", X, IN("n", "bits ^"));
  BAD("bits needs at least one flag", X, IN("n", "bits ^= 3"));
  BAD("unexpected '= 3'", X, IN("n", "bits a ^= 3"));
  BAD("unexpected ', b'", X, IN("n", "bits a^, b"));
  BAD("too many flags", X, IN("flags", "bits a b c d e f g h i j k l m n o p ^q"));
}

TEST(bad_names) {
  static const char long_name[] = "a23456789_123456789_123456789_123456789_1234567"; /* 47 characters fit */
  char name[64], type[256];
  BAD("the name 'x' is used twice", X, IN("x", "^bf16 [M]"), Y);
  BAD("the name 'x' is used twice", X, IN("x", "^int"), Y);
  BAD("the name 'x' is used twice", X, OUT("x", "^bf16 [M]"));
  BAD("the name 'x_data' is used twice", X, IN("x_data", "bf16 [M]"), IN("z", "bf16 [M]"),
      IN("x_data", "^bf16 [M]"));
  BAD("the name 'p_data' is used twice", IN("p_data", "bf16 [M]"), IN("p", "^pair [M, K]"));
  BAD("the name 'p_data' is used twice", IN("x", "bf16 [M, K]"), OUT("p_data", "bf16 [M]"),
      OUT("p", "^pair [M, K]"));
  BAD("the name 'p_scale' is used twice", X, IN("p_scale", "bf16 [M]"), IN("p", "^pair [M, K]"));
  BAD("the name 'p' is used twice", X, IN("p", "pair [M, K]"),
      IN("p", "^bf16 [M]")); /* one field of a bundle */
  BAD("the name 'a' is used twice", X, IN("f", "bits a b ^a"));
  BAD("the name 'a' is used twice", X, IN("f", "bits a"), IN("g", "bits b ^a"));
  BAD("the name 'g' is used twice", X, IN("f", "bits ^g"), IN("g", "bool"));
  BAD("the name 'x' is used twice", X, IN("f", "bits ^x"));
  BAD("the name 'a' is used twice", X, IN("f", "bits ^a"), IN("a", "bool"));

  snprintf(name, sizeof name, "%s", long_name);
  CHECK_INT(parse_row(SLOTS(IN(name, "bf16 [M]")), &op, &(te_status){0}), TE_OK);
  CHECK_STR(op.entries[0].name, long_name);
  snprintf(name, sizeof name, "%s8", long_name);
  BAD("the name is too long", IN(name, "^bf16 [M]"));
  /* An identifier of 48 characters is one too long, not two identifiers. */
  snprintf(type, sizeof type, "bits b ^%s8 c", long_name);
  BAD("the name is too long", X, IN("f", type));
  snprintf(type, sizeof type, "bf16 [M, ^%s8]", long_name);
  BAD("the name is too long", IN("x", type), Y);
  snprintf(type, sizeof type, "bf16 [M] if ^%s8", long_name);
  BAD("the name is too long", X, IN("z", type));
  /* Nor are the names of buffers cut: 30 + 1 + 17 */
  BAD("the name is too long", X, IN("a23456789_123456789_123456789_123456789_123", "^pair [M, K]"));
  CHECK_INT(
      parse_row(SLOTS(IN("a23456789_123456789_123456789_1234567890_", "pair [M, K]")), &op, &(te_status){0}),
      TE_OK);
  CHECK_STR(op.entries[0].name, "a23456789_123456789_123456789_1234567890__data");
  CHECK_STR(op.entries[1].name, "a23456789_123456789_123456789_1234567890__scale");
}

static const char *slot_name(int i) {
  static char names[MAX_TEST_SLOTS][8];
  snprintf(names[i], sizeof names[i], "s%d", i);
  return names[i];
}

TEST(too_many_slots) {
  te_slot_row slots[MAX_TEST_SLOTS] = {{0}};
  for (int i = 0; i < TE_MAX_SLOTS; i++) slots[i] = (te_slot_row)IN(slot_name(i), i ? "int = 1" : "bf16 [M]");
  CHECK_INT(parse_row(slots, &op, &(te_status){0}), TE_OK);
  CHECK_INT(op.n_slots, TE_MAX_SLOTS);
  slots[TE_MAX_SLOTS] = (te_slot_row)IN(slot_name(TE_MAX_SLOTS), "^int");
  check_bad(slots, NULL, "too many slots", __FILE__, __LINE__);

  memset(slots, 0, sizeof slots); /* few slots, too many entries: 14 triples are 42 */
  for (int i = 0; i < 13; i++) slots[i] = (te_slot_row)IN(slot_name(i), "triple [M, K]");
  CHECK_INT(parse_row(slots, &op, &(te_status){0}), TE_OK);
  CHECK_INT(op.n_inputs, 39);
  slots[13] = (te_slot_row)IN(slot_name(13), "^triple [M, K]");
  check_bad(slots, test_formats, "too many slots", __FILE__, __LINE__);
  slots[13].is_output = true;
  check_bad(slots, test_formats, "too many slots", __FILE__, __LINE__);
  slots[12] = (te_slot_row)OUT(slot_name(12), "triple [M, K]");
  check_bad(slots, test_formats, "too many slots", __FILE__, __LINE__);
}

TEST(bad_order_and_presence) {
  BAD("inputs come before outputs", X, Y, IN("z", "^bf16 [M]"));
  te_status status;
  static const char need[] = "row t.*, column 1: an operator needs a tensor input that is always present";
  parse_row(SLOTS(IN("n", "int")), &op, &status);
  CHECK_STR(status.message, need);
  parse_row(SLOTS(IN("x", "bf16 [M] ?")), &op, &status);
  CHECK_STR(status.message, need);
  parse_row(SLOTS(IN("f", "bits a"), IN("x", "bf16 [M] if a")), &op, &status);
  CHECK_STR(status.message, need);
  parse_row(SLOTS(OUT("y", "bf16 [1]")), &op, &status);
  CHECK_STR(status.message, need);
  parse_row((const te_slot_row[]){{false, NULL, NULL}}, &op, &status);
  CHECK_STR(status.message, need);
}

TEST(symbols_must_be_bound) {
  BAD("no input that is present with it binds 'Q'", X, OUT("y", "^bf16 [*M, Q]"));
  BAD("no input that is present with it binds 'Q'", X, OUT("y", "^bf16 [K, 2 * Q]"));
  BAD("no input that is present with it binds '*Q'", X, OUT("y", "^bf16 [*Q, K]"));
  BAD("no input that is present with it binds 'Q'", X, IN("z", "bf16 [Q] ?"), OUT("y", "^bf16 [Q]"));
  BAD("no input that is present with it binds 'Q'", X, IN("z", "^bf16 [2 * Q]"),
      Y); /* an input's expression, too */
  BAD("no input that is present with it binds 'Q'", X, IN("z", "bf16 [2 * K]"), OUT("y", "^bf16 [Q + 1]"));
  BAD("no input that is present with it binds 'Q'", X, IN("f", "bits a b"), IN("z", "bf16 [Q] if a"),
      OUT("y", "^bf16 [Q]"));
  BAD("no input that is present with it binds 'Q'", X, IN("f", "bits a b"), IN("z", "bf16 [Q] if a"),
      OUT("y", "^bf16 [Q] if b"));
  BAD("no input that is present with it binds 'Q'", X, IN("f", "bits a"), IN("g", "bits b"),
      IN("z", "bf16 [Q] if a"), OUT("y", "^bf16 [Q] if b"));
  BAD("no input that is present with it binds 'Q'", X, IN("f", "bits a"), IN("g", "bool"),
      IN("z", "bf16 [Q] if a"), OUT("y", "^bf16 [Q] if g"));
  te_status status;
  parse_row(SLOTS(X, IN("f", "bits a b"), IN("z", "bf16 [Q] if b"), OUT("y", "bf16 [Q] if b")), &op, &status);
  CHECK_STR(status.message, "");
  parse_row(SLOTS(IN("x", "bf16 [M, K]"), OUT("y", "bf16 [*M, K]")), &op,
            &status); /* bound bare, used spread */
  CHECK_STR(status.message, "");
}

/* --------------------------------------------------------------------------- formats of buffers -------- */

/* A caret in a buffer's type: the error names slot, format and buffer. */
static void check_bad_format(const char *caret_type, const char *reason, const char *file, int line) {
  char type[256], expected[512];
  const char *caret = strchr(caret_type, '^');
  int column = (int)(caret - caret_type);
  snprintf(type, sizeof type, "%.*s%s", column, caret_type, caret + 1);
  te_format_row formats[] = {
      {"f", "made up", (te_buffer_row[]){{"data", "u8 [*M, K]"}, {"bad", type}, {NULL, NULL}}},
      {NULL, NULL, NULL}};
  te_op_row row = {"t", "made up", SLOTS(IN("x", "f [*M, K]")), NULL, NULL};
  te_status status = {0};
  test__check_int(te__parse_op("test", formats, &row, &op, &status), TE_ERROR, file, line,
                  "te__parse_op() == TE_ERROR");
  snprintf(expected, sizeof expected, "row t.x:f.bad, column %d: %s", column + 1, reason);
  test__check_str(status.message, expected, file, line, "message");
}

#define BAD_FORMAT(reason, type) check_bad_format(type, reason, __FILE__, __LINE__)

TEST(bad_buffers) {
  BAD_FORMAT("expected a dtype", "^");
  BAD_FORMAT("expected a dtype", " ^[M]");
  BAD_FORMAT("unknown dtype 'q8'", "^q8 [M]");
  BAD_FORMAT("unknown dtype 'q8'", "  ^q8 [M]");
  BAD_FORMAT("no earlier buffer is named 'x'", "like ^x [M]");
  BAD_FORMAT("expected a buffer after 'like'", "like ^[M]");
  BAD_FORMAT("expected '['", "u8 ^");
  BAD_FORMAT("unknown dtype 'q8'", "u8 | ^q8 [M]");
  BAD_FORMAT("unknown symbol 'N' (a format's dims may use M and K)", "f32 [M, ^N]");
  BAD_FORMAT("unknown symbol 'N' (a format's dims may use M and K)", "f32 [*^N]");
  BAD_FORMAT("unknown symbol 'x' (a format's dims may use M and K)", "f32 [ceil(K, ^x)]");
  BAD_FORMAT("expected ']'", "f32 [M^");
  BAD_FORMAT("unexpected '?'", "f32 [M] ? ^?");
  BAD_FORMAT("unexpected 'strided'", "f32 [M] ^strided");
  BAD_FORMAT("the name is too long", "f32 [^a23456789_123456789_123456789_123456789_12345678]");
}

TEST(bad_uses_of_formats) {
  te_status status;
  BAD("a format of several buffers needs a last dim", IN("x", "pair []^"), Y);
  BAD("a format of several buffers needs a last dim", IN("x", "pair [*M]^"), Y);

  te_format_row spread_k[] = {{"f", "", (te_buffer_row[]){{"data", "u8 [*K]"}, {NULL, NULL}}},
                              {NULL, NULL, NULL}};
  te_op_row row = {"t", "", SLOTS(IN("x", "f [*M, K]")), NULL, NULL};
  status = (te_status){0};
  te__parse_op("test", spread_k, &row, &op, &status);
  CHECK_STR(status.message, "row t.x, column 10: only M can be spread in a format");

  te_format_row deep[] = {{"f", "", (te_buffer_row[]){{"data", "u8 [*M, K, 1, 2]"}, {NULL, NULL}}},
                          {NULL, NULL, NULL}};
  row.slots = SLOTS(IN("x", "f [A, B, K]"));
  status = (te_status){0};
  te__parse_op("test", deep, &row, &op, &status);
  CHECK_STR(status.message, "row t.x, column 12: too many dims");

  te_buffer_row many[TE_MAX_BUFFERS + 2] = {{NULL, NULL}};
  static const char *names[] = {"a", "b", "c", "d", "e", "f", "g", "h", "i"};
  for (int i = 0; i <= TE_MAX_BUFFERS; i++) many[i] = (te_buffer_row){names[i], "u8 [M]"};
  te_format_row wide[] = {{"f", "", many}, {NULL, NULL, NULL}};
  row.slots = SLOTS(IN("x", "f [M, K]"));
  status = (te_status){0};
  te__parse_op("test", wide, &row, &op, &status);
  CHECK_STR(status.message, "row t.x, column 9: format 'f' has too many buffers");
  many[TE_MAX_BUFFERS].name = NULL;
  status = (te_status){0};
  CHECK_INT(te__parse_op("test", wide, &row, &op, &status), TE_OK);
  CHECK_INT(op.n_inputs, TE_MAX_BUFFERS);

  te_format_row empty[] = {{"f", "", (te_buffer_row[]){{NULL, NULL}}}, {NULL, NULL, NULL}};
  row.slots = SLOTS(X, IN("z", "f [M, K]"));
  status = (te_status){0};
  te__parse_op("test", empty, &row, &op, &status);
  CHECK_STR(status.message, "row t.z, column 9: format 'f' has no buffers");

  te_format_row twice[] = {{"f", "", (te_buffer_row[]){{"data", "u8 [M]"}, {"data", "u8 [K]"}, {NULL, NULL}}},
                           {NULL, NULL, NULL}};
  status = (te_status){0};
  te__parse_op("test", twice, &row, &op, &status);
  CHECK_STR(status.message, "row t.z, column 1: the name 'z_data' is used twice");
}

/* The entry's dims in the operator's symbols, fully parenthesised, e.g. "[*M, ceil(K, 32)]". */
static const char *print_shape(const te_shape *shape) {
  static char text[512];
  size_t used = 0;
  used += (size_t)snprintf(text, sizeof text, "[");
  if (shape->spread >= 0)
    used += (size_t)snprintf(text + used, sizeof text - used, "*%s", op.symbols[shape->spread]);
  for (int d = 0; d < shape->n; d++) {
    char stack[TE_MAX_DIM_STEPS][128], both[256];
    int top = 0;
    for (int i = 0; i < shape->dims[d].n; i++) {
      te_dim_step step = shape->dims[d].steps[i];
      if (step.code == TE_DIM_SYMBOL) {
        snprintf(stack[top++], 128, "%s", op.symbols[step.operand]);
      } else if (step.code == TE_DIM_CONST) {
        snprintf(stack[top++], 128, "%d", (int)step.operand);
      } else {
        const char *form = step.code == TE_DIM_CEIL  ? "ceil(%s, %s)"
                           : step.code == TE_DIM_UP  ? "up(%s, %s)"
                           : step.code == TE_DIM_ADD ? "(%s + %s)"
                           : step.code == TE_DIM_SUB ? "(%s - %s)"
                                                     : "(%s * %s)";
        top--;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(both, sizeof both, form, stack[top - 1], stack[top]);
#pragma GCC diagnostic pop
        memcpy(stack[top - 1], both, 127);
        stack[top - 1][127] = 0;
      }
    }
    CHECK_INT(top, 1);
    used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", d || shape->spread >= 0 ? ", " : "",
                             stack[0]);
  }
  snprintf(text + used, sizeof text - used, "]");
  return text;
}

static void check_entry(int index, const char *name, te_dtype dtype, const char *shape) {
  const te_entry *entry = &op.entries[index];
  NOTE("entry %d", index);
  CHECK_STR(entry->name, name);
  CHECK_INT(entry->kind, TE_KIND_TENSOR);
  CHECK_INT(entry->dtypes, 1u << dtype);
  CHECK_STR(print_shape(&entry->shape), shape);
  NOTE("%s", "");
}

/* For a row that has to parse. */
#define PARSE(...) \
  do { \
    te_status status_; \
    CHECK_INT(parse_row(SLOTS(__VA_ARGS__), &op, &status_), TE_OK); \
    CHECK_STR(status_.message, ""); \
  } while (0)

TEST(buffers_of_an_input) {
  PARSE(IN("x", "pair [*T, C]"), IN("w", "triple [N, C] strided"), OUT("y", "bf16 [*T, N]"));
  CHECK_INT(op.n_slots, 3);
  CHECK_INT(op.n_inputs, 5);
  CHECK_INT(op.n_outputs, 1);
  check_entry(0, "x_data", TE_u8, "[*T, C]");
  check_entry(1, "x_scale", TE_f32, "[T, ceil(C, 32)]");
  check_entry(2, "w_data", TE_e4m3, "[N, C]");
  check_entry(3, "w_scale", TE_f32, "[ceil(N, 128), up(ceil(C, 128), 4)]");
  check_entry(4, "w_amax", TE_f32, "[1]");
  check_entry(5, "y", TE_bf16, "[*T, N]");
  static const int slots[] = {0, 0, 1, 1, 1, 2}, buffers[] = {0, 1, 0, 1, 2, 0};
  for (int i = 0; i < 6; i++) {
    CHECK_INT(op.entries[i].slot, slots[i]);
    CHECK_INT(op.entries[i].buffer, buffers[i]);
    CHECK_INT(op.entries[i].is_strided, slots[i] == 1);
  }
}

TEST(buffers_of_an_output) {
  PARSE(IN("x", "bf16 [*M, K]"), IN("f", "bits row col"), OUT("q", "pair [*M, K] if row"),
        OUT("t", "triple [K, M] if col"));
  CHECK_INT(op.n_inputs, 2);
  CHECK_INT(op.n_outputs, 5);
  check_entry(2, "q_data", TE_u8, "[*M, K]");
  check_entry(3, "q_scale", TE_f32, "[M, ceil(K, 32)]");
  check_entry(4, "t_data", TE_e4m3, "[K, M]");
  check_entry(5, "t_scale", TE_f32, "[ceil(K, 128), up(ceil(M, 128), 4)]");
  check_entry(6, "t_amax", TE_f32, "[1]");
  for (int i = 2; i < 7; i++) {
    CHECK_INT(op.entries[i].condition.entry, 1);
    CHECK_INT(op.entries[i].condition.bit, i >= 4);
  }
}

TEST(formats_of_other_shapes) {
  /* M is the product of all dims but the last, whatever they are; 1 if there are none. */
  PARSE(IN("v", "pair [C]"), IN("a", "pair [A, B, C]"), IN("s", "pair [*T, B, C]"),
        IN("e", "pair [A + 1, 2 * C]"));
  check_entry(0, "v_data", TE_u8, "[C]");
  check_entry(1, "v_scale", TE_f32, "[1, ceil(C, 32)]");
  check_entry(2, "a_data", TE_u8, "[A, B, C]");
  check_entry(3, "a_scale", TE_f32, "[(A * B), ceil(C, 32)]");
  check_entry(4, "s_data", TE_u8, "[*T, B, C]");
  check_entry(5, "s_scale", TE_f32, "[(T * B), ceil(C, 32)]");
  check_entry(6, "e_data", TE_u8, "[(A + 1), (2 * C)]");
  check_entry(7, "e_scale", TE_f32, "[(A + 1), ceil((2 * C), 32)]");
}

TEST(a_buffer_may_have_any_dtype) {
  for (int d = 0; d < TE_DTYPE_COUNT; d++) {
    char type[32];
    te_format_row formats[] = {{"f", "", (te_buffer_row[]){{"data", type}, {NULL, NULL}}},
                               {NULL, NULL, NULL}};
    te_op_row of_one = {"t", "", SLOTS(IN("x", "f [*M, K]")), NULL, NULL};
    te_status status = {0};
    snprintf(type, sizeof type, "%s [*M, K]", te__dtype_id((te_dtype)d));
    CHECK_INT(te__parse_op("test", formats, &of_one, &op, &status), TE_OK);
    check_entry(0, "x_data", (te_dtype)d, "[*M, K]");
  }
}

TEST(optional_and_conditional_buffers) {
  /* A slot's buffers are present together, so they may bind each other's symbols. */
  PARSE(IN("x", "bf16 [*M, K]"), IN("f", "bits a"), IN("o", "pair [P, Q] ?"), IN("c", "triple [R, S] if a"),
        OUT("y", "pair [*M, S] if a"));
  for (int i = 2; i < 4; i++) CHECK(op.entries[i].is_optional && op.entries[i].condition.entry == -1);
  for (int i = 4; i < 9; i++) CHECK(!op.entries[i].is_optional && op.entries[i].condition.entry == 1);
  BAD("no input that is present with it binds 'P'", X, IN("o", "pair [P, Q] ?"), OUT("y", "^bf16 [P]"));
  BAD("no input that is present with it binds 'Q'", X, IN("o", "pair [P, Q] ?"), IN("z", "^bf16 [Q + 1] ?"));
}

/* --------------------------------------------------------------------------------- what parses -------- */

TEST(entries) {
  PARSE(IN("x", "bf16|f16|f32 [*M, K] strided"), IN("w", "like x [N, K]"), IN("b", "like x [N] ?"),
        IN("g", "f32 [N, K] ! if update"), IN("f", "bits update other"), IN("eps", "float = 1e-5"),
        IN("flag", "bool"), OUT("y", "like x [*M, N]"), OUT("z", "f32 [] if flag"));
  CHECK_STR(op.full_name, "test::t");
  CHECK_INT(op.n_slots, 9);
  CHECK_INT(op.n_inputs, 7);
  CHECK_INT(op.n_outputs, 2);
  CHECK(op.is_mutating);
  CHECK_INT(op.n_symbols, 3);
  CHECK_STR(op.symbols[0], "M");
  CHECK_STR(op.symbols[1], "K");
  CHECK_STR(op.symbols[2], "N");
  const te_entry *x = &op.entries[0], *w = x + 1, *b = x + 2, *g = x + 3, *f = x + 4, *eps = x + 5,
                 *flag = x + 6, *y = x + 7, *z = x + 8;
  CHECK_INT(x->dtypes, 1 << TE_bf16 | 1 << TE_f16 | 1 << TE_f32);
  CHECK_INT(x->like, -1);
  CHECK(x->is_strided && !x->is_optional && !x->is_mutable && x->condition.entry == -1);
  CHECK_STR(print_shape(&x->shape), "[*M, K]");
  CHECK_INT(w->like, 0);
  CHECK_INT(w->dtypes, 0);
  CHECK(!w->is_strided);
  CHECK(b->is_optional && te__entry_can_be_absent(b));
  CHECK(g->is_mutable && te__entry_can_be_absent(g));
  CHECK_INT(g->condition.entry, 4); /* written before its flag */
  CHECK_INT(g->condition.bit, 0);
  CHECK_INT(f->kind, TE_KIND_BITS);
  CHECK_INT(f->n_flags, 2);
  CHECK_STR(f->flags[0], "update");
  CHECK_STR(f->flags[1], "other");
  CHECK_INT(eps->kind, TE_KIND_FLOAT);
  CHECK(eps->has_default && eps->default_value == 1e-5);
  CHECK_INT(flag->kind, TE_KIND_BOOL);
  CHECK(!flag->has_default);
  CHECK_INT(y->like, 0);
  CHECK_INT(z->condition.entry, 6);
  CHECK_INT(z->condition.bit, -1);
  CHECK_STR(print_shape(&z->shape), "[]");
}

TEST(a_condition_finds_its_flag_behind_buffers) {
  /* The flag's entry is not its slot: the pair before it has two entries. */
  PARSE(IN("x", "pair [*M, K]"), IN("z", "bf16 [K] if b"), IN("f", "bits a b"), OUT("y", "bf16 [K] if b"),
        OUT("v", "bf16 [K] if a"));
  CHECK_INT(op.entries[2].condition.entry, 3);
  CHECK_INT(op.entries[2].condition.bit, 1);
  CHECK_INT(op.entries[4].condition.entry, 3);
  CHECK_INT(op.entries[5].condition.bit, 0);
}

TEST(space_is_free) {
  PARSE(IN("x", " \t\n bf16\t|\nf16 [ * M ,K ]strided "), IN("f", " bits\ta\n b "), IN("g", "\tbool=True"),
        OUT("y", "like x[*M,ceil(K,2)]if b"), OUT("z", "f32[1]if g"));
  CHECK_STR(print_shape(&op.entries[0].shape), "[*M, K]");
  CHECK_STR(print_shape(&op.entries[3].shape), "[*M, ceil(K, 2)]");
  CHECK_INT(op.entries[3].condition.entry, 1);
  CHECK_INT(op.entries[3].condition.bit, 1);
  CHECK_INT(op.entries[4].condition.entry, 2);
}

TEST(names_that_begin_like_keywords) {
  PARSE(IN("strided", "bf16 [ceiling, upper, likes]"), IN("f", "bits iff bool_ int_"),
        IN("like", "like strided [ceiling] if iff"), OUT("y", "f32 [2 * upper] if int_"));
  CHECK_STR(op.symbols[0], "ceiling");
  CHECK_INT(op.entries[2].like, 0);
  CHECK_INT(op.entries[3].condition.bit, 2);
}

TEST(most_flags) {
  PARSE(X, IN("f", "bits a b c d e f_ g h i j k l m n o p"), OUT("y", "f32 [1] if p"));
  CHECK_INT(op.entries[1].n_flags, 16);
  CHECK_INT(op.entries[2].condition.bit, 15);
}

TEST(dtypes) {
  static const struct {
    te_dtype dtype;
    const char *id, *name;
    size_t size;
  } rows[] = {
#define ROW(id, name, size, getter) {TE_##id, #id, name, size},
      TE_DTYPES(ROW)
#undef ROW
  };
  CHECK_INT(sizeof rows / sizeof *rows, TE_DTYPE_COUNT);
  for (int d = 0; d < TE_DTYPE_COUNT; d++) {
    char type[32];
    CHECK_INT(rows[d].dtype, d);
    CHECK_STR(te__dtype_id(rows[d].dtype), rows[d].id);
    CHECK_STR(te__dtype_name(rows[d].dtype), rows[d].name);
    CHECK_INT((int64_t)te__dtype_size(rows[d].dtype), (int64_t)rows[d].size);
    CHECK_INT(te__dtype_from_name(rows[d].name), d);
    snprintf(type, sizeof type, "%s []", rows[d].id);
    PARSE(IN("x", type));
    CHECK_INT(op.entries[0].dtypes, 1u << d);
  }
  CHECK_INT(te__dtype_from_name("bf16"), TE_DTYPE_OTHER);
  CHECK_INT(te__dtype_from_name(""), TE_DTYPE_OTHER);
  CHECK_STR(te__dtype_name(TE_DTYPE_OTHER), "a dtype that te_ops does not know");
}

TEST(operator_name_too_long) {
  char ns[2 * TE_NAME_SIZE + 1];
  te_status status = {0};
  te_op_row row = {"t", "", SLOTS(X), NULL, NULL};
  memset(ns, 'n', sizeof ns);
  ns[2 * TE_NAME_SIZE - 4] = 0; /* and "::t" and the end */
  CHECK_INT(te__parse_op(ns, NULL, &row, &op, &status), TE_OK);
  ns[2 * TE_NAME_SIZE - 4] = 'n';
  ns[2 * TE_NAME_SIZE - 3] = 0;
  CHECK_INT(te__parse_op(ns, NULL, &row, &op, &status), TE_ERROR);
  CHECK_CONTAINS(status.message, "the operator's name is too long");
}

/* -------------------------------------------------------------------------------------- schemas -------- */

static void check_schema(const char *expected, const char *file, int line) {
  char text[TE_SCHEMA_SIZE];
  te_status status = {0};
  te_op_row row = {.name = "t"};
  op.row = &row;
  test__check_int(te__schema(&op, text, sizeof text, &status), TE_OK, file, line, "te__schema() == TE_OK");
  test__check_str(text, expected, file, line, "schema");
  op.row = NULL;
}

#define SCHEMA(expected, ...) \
  do { \
    PARSE(__VA_ARGS__); \
    check_schema(expected, __FILE__, __LINE__); \
  } while (0)

TEST(schemas) {
  SCHEMA("t(Tensor x) -> ()", IN("x", "bf16 [M]"));
  SCHEMA("t(Tensor x) -> Tensor", IN("x", "bf16 [M]"), OUT("y", "bf16 [M]"));
  SCHEMA("t(Tensor x) -> (Tensor, Tensor, Tensor)", IN("x", "bf16 [M]"), OUT("y", "bf16 [M]"),
         OUT("z", "f32 [M]"), OUT("s", "f32 []"));
  SCHEMA("t(Tensor x, int n, float e, bool b, int f) -> ()", IN("x", "bf16 [M]"), IN("n", "int"),
         IN("e", "float"), IN("b", "bool"), IN("f", "bits one two"));
  SCHEMA("t(Tensor x, Tensor? o, Tensor? c, int f) -> ()", IN("x", "bf16 [M]"), IN("o", "bf16 [M] ?"),
         IN("c", "bf16 [M] if a"), IN("f", "bits a"));
  /* Mutable ones get an alias set each. */
  SCHEMA("t(Tensor x, Tensor(a!) g, Tensor(b!)? h, Tensor(c!)? i, bool u) -> ()", IN("x", "bf16 [M]"),
         IN("g", "f32 [M] !"), IN("h", "f32 [M] ! ?"), IN("i", "f32 [M] if u !"), IN("u", "bool"));
}

TEST(schemas_of_conditional_outputs) {
  SCHEMA("t(int f, Tensor x) -> Tensor?", IN("f", "bits a"), IN("x", "bf16 [M]"), OUT("y", "bf16 [M] if a"));
  /* None where nothing is mutated; a mutating operator cannot return it, so there absent is empty. */
  SCHEMA("t(Tensor x, int f) -> Tensor?", IN("x", "bf16 [M]"), IN("f", "bits a"), OUT("y", "bf16 [M] if a"));
  SCHEMA("t(Tensor x, int f) -> (Tensor, Tensor?)", IN("x", "bf16 [M]"), IN("f", "bits a"),
         OUT("y", "bf16 [M]"), OUT("z", "bf16 [M] if a"));
  SCHEMA("t(Tensor(a!) x, int f) -> Tensor", IN("x", "bf16 [M] !"), IN("f", "bits a"),
         OUT("y", "bf16 [M] if a"));
  SCHEMA("t(Tensor x, Tensor(a!)? h, int f) -> (Tensor, Tensor)", IN("x", "bf16 [M]"), IN("h", "f32 [1] ! ?"),
         IN("f", "bits a"), OUT("y", "bf16 [M]"), OUT("z", "bf16 [M] if a"));
}

TEST(schemas_of_defaults) {
  SCHEMA("t(Tensor x, int n=3, int m=-1, int z=0, int l=9007199254740992, int k=-9007199254740992) -> ()",
         IN("x", "bf16 [M]"), IN("n", "int = 3"), IN("m", "int=-1"), IN("z", "int = 0"),
         IN("l", "int = 9007199254740992"), IN("k", "int = -9007199254740992"));
  SCHEMA("t(Tensor x, bool t=True, bool f=False) -> ()", IN("x", "bf16 [M]"), IN("t", "bool = True"),
         IN("f", "bool=False"));
  /* 17 digits: the number that comes back is the one that was written. */
  SCHEMA("t(Tensor x, float e=1.0000000000000001e-05, float o=1, float h=-0.5) -> ()", IN("x", "bf16 [M]"),
         IN("e", "float = 1e-5"), IN("o", "float = 1"), IN("h", "float = -.5"));
}

TEST(schemas_of_buffers) {
  SCHEMA("t(Tensor x_data, Tensor x_scale, Tensor? o_data, Tensor? o_scale, Tensor(a!) m_data, Tensor(b!) "
         "m_scale, Tensor(c!) m_amax) "
         "-> (Tensor, Tensor)",
         IN("x", "pair [*M, K]"), IN("o", "pair [M, K] ?"), IN("m", "triple [M, K] !"),
         OUT("y", "pair [*M, K]"));
  SCHEMA("t(Tensor x, int f) -> (Tensor?, Tensor?, Tensor?)", IN("x", "bf16 [M, K]"), IN("f", "bits a"),
         OUT("y", "triple [M, K] if a"));
}

TEST(schema_that_does_not_fit) {
  char text[32];
  te_status status = {0};
  te_op_row row = {.name = "t"};
  PARSE(IN("x", "bf16 [M]"), IN("a_long_name", "bf16 [M]"));
  op.row = &row;
  /* "t(Tensor x, Tensor a_long_name) -> ()" has 37 characters. */
  CHECK_INT(te__schema(&op, text, sizeof text, &status), TE_ERROR);
  CHECK_STR(status.message, "the schema is longer than 32 bytes");
  CHECK(strnlen(text, sizeof text) < sizeof text);
}

TEST(more_mutable_slots_than_letters) {
  te_slot_row slots[MAX_TEST_SLOTS] = {{0}};
  char text[TE_SCHEMA_SIZE];
  te_status status = {0};
  for (int i = 0; i < 27; i++) slots[i] = (te_slot_row)IN(slot_name(i), "bf16 [M] !");
  te_op_row row = {"t", "", slots, NULL, NULL};
  CHECK_INT(te__parse_op("test", NULL, &row, &op, &status), TE_OK);
  CHECK_INT(te__schema(&op, text, sizeof text, &status), TE_ERROR); /* '{' is no alias set */
  CHECK_CONTAINS(status.message, "26");
}

/* ---------------------------------------------------------------------------------- the real table ----- */

TEST(every_row_of_the_table_parses) {
  int n = 0;
  for (const te_op_row *row = te__ops; row->name; row++, n++) {
    char schema[TE_SCHEMA_SIZE];
    te_status status = {0};
    te__parse_op("te_ops", te__formats, row, &op, &status);
    CHECK_STR(status.message, "");
    te__schema(&op, schema, sizeof schema, &status);
    CHECK_STR(status.message, "");
    CHECK(strncmp(schema, row->name, strlen(row->name)) == 0);
  }
  CHECK(n >= 3);
}

TEST(linear_schemas) {
  static const char *expected[] = {
      "linear_fwd(Tensor x, Tensor w, Tensor? b) -> Tensor",
      "linear_bwd(Tensor dy, Tensor? x, Tensor? w, int grads) -> (Tensor?, Tensor?, Tensor?)",
      "linear_wgrad(Tensor dy, Tensor x, Tensor(a!) main_grad, bool accumulate=True) -> ()",
  };
  for (unsigned i = 0; i < sizeof expected / sizeof *expected; i++) {
    bool found = false;
    size_t length = strcspn(expected[i], "(");
    for (const te_op_row *row = te__ops; row->name; row++) {
      char schema[TE_SCHEMA_SIZE];
      te_status status = {0};
      if (strlen(row->name) != length || strncmp(row->name, expected[i], length) != 0) continue;
      found = true;
      CHECK_INT(te__parse_op("te_ops", te__formats, row, &op, &status), TE_OK);
      CHECK_INT(te__schema(&op, schema, sizeof schema, &status), TE_OK);
      CHECK_STR(schema, expected[i]);
    }
    CHECK(found);
  }
}

/* ------------------------------------------------------------------------------------------ fuzz ------- */

static const char *const types[] = {
    "bf16|f16|f32 [*M, K] strided",
    "like s0 [N, K] strided if fa",
    "like s0 [*M, ceil(K, 32)] ?",
    "f32 [N, up(ceil(K, 128), 4)] !",
    "pair [*M, K]",
    "triple [N + 1, 2 * K - 1] ?",
    "bits fa fb fc",
    "int = 3",
    "float = 1e-5",
    "bool = True",
    "u8 [M, (K + 15) * 2]",
};

/* Exactly the type's bytes and a NUL on the heap, so that ASan sees the first byte read beyond. */
static char *on_heap(const char *text, size_t n) {
  char *copy = malloc(n + 1);
  memcpy(copy, text, n);
  copy[n] = 0;
  return copy;
}

static char *random_type(rng *r) {
  static const char alphabet[] = "[](),*+-?!=|&. 019MKNxceilupbf16ifstrided_\t\n\x7f\xff";
  static const char *const tokens[] = {"bf16", "pair", "triple", "like ",   "s0", "[", "]",     "*M",
                                       "M",    ",",    "ceil(",  "up(",     "(",  ")", "32",    "?",
                                       "!",    "if ",  "fa",     "strided", "+",  "-", "bits ", "int ",
                                       "=",    "1e9",  "0x1",    "nan",     "K",  " "};
  char text[200];
  size_t n = 0;
  switch (rng_below(r, 4)) {
  case 0: { /* a valid one, cut short */
    const char *type = types[rng_below(r, (int64_t)(sizeof types / sizeof *types))];
    return on_heap(type, (size_t)rng_below(r, (int64_t)strlen(type) + 1));
  }
  case 1: { /* a valid one with a few bytes changed */
    n = (size_t)snprintf(text, sizeof text, "%s",
                         types[rng_below(r, (int64_t)(sizeof types / sizeof *types))]);
    for (int64_t i = 1 + rng_below(r, 3); i > 0; i--)
      text[rng_below(r, (int64_t)n)] = alphabet[rng_below(r, sizeof alphabet - 1)];
    return on_heap(text, n);
  }
  case 2: /* tokens */
    for (int64_t i = rng_below(r, 24); i > 0; i--)
      n += (size_t)snprintf(text + n, sizeof text - n, "%s",
                            tokens[rng_below(r, (int64_t)(sizeof tokens / sizeof *tokens))]);
    return on_heap(text, n);
  default: /* bytes */
    for (int64_t i = rng_below(r, 60); i > 0; i--)
      text[n++] =
          rng_below(r, 4) ? alphabet[rng_below(r, sizeof alphabet - 1)] : (char)(1 + rng_below(r, 255));
    return on_heap(text, n);
  }
}

/* "row t.<slot>, column <c>: <reason>" with a column of that slot's text. */
static void check_message(const char *message, const te_slot_row *slots) {
  char slot[128];
  int column = -1, begin = -1;
  int n = sscanf(message, "row t.%127[^,], column %d: %n", slot, &column, &begin);
  CHECK(n == 2 && begin > 0 && message[begin]);
  CHECK(column >= 1);
  for (int i = 0; slots[i].name; i++)
    if (strcmp(slots[i].name, slot) == 0) CHECK(column <= (int)strlen(slots[i].type) + 1);
}

/* Whatever parses must also survive inference. */
static void infer_anything(rng *r) {
  static te_desc inputs[TE_MAX_ENTRIES];
  static te_out_desc outputs[TE_MAX_ENTRIES];
  static te_num sizes[TE_MAX_ENTRIES][TE_MAX_NDIM];
  for (int trial = 0; trial < 4; trial++) {
    te_status status = {0};
    te_arith arith = te__int64_arith(&status);
    for (int e = 0; e < op.n_inputs; e++) {
      const te_entry *entry = &op.entries[e];
      inputs[e] = (te_desc){.present = rng_below(r, 8) != 0, .sizes = sizes[e], .scalar = rng_below(r, 16)};
      inputs[e].dtype =
          entry->dtypes ? (te_dtype)__builtin_ctz(entry->dtypes) : (te_dtype)rng_below(r, TE_DTYPE_COUNT + 1);
      inputs[e].ndim = entry->shape.n + (entry->shape.spread >= 0 ? (int)rng_below(r, 4) : 0);
      for (int d = 0; d < inputs[e].ndim; d++)
        sizes[e][d].i = rng_below(r, 10) ? rng_below(r, 3) : INT64_MAX >> rng_below(r, 40);
    }
    int rc = te__infer(&op, &arith, inputs, outputs, &status);
    CHECK_INT(rc, status.code);
    if (rc != TE_OK) CHECK(strncmp(status.message, "test::t: ", 9) == 0);
  }
}

PROPERTY(random_rows_never_crash) {
  int n_fine = 0;
  for (int trial = 0; trial < 40000; trial++) {
    te_slot_row slots[12] = {{0}};
    int n = 1 + (int)rng_below(r, 8), bad = (int)rng_below(r, n + 2);
    for (int i = 0; i < n; i++) {
      const char *type = i ? types[rng_below(r, (int64_t)(sizeof types / sizeof *types))] : types[0];
      /* Flags are declared once. */
      if (strncmp(type, "bits", 4) == 0) type = "int";
      slots[i] = (te_slot_row){i + 2 > n && rng_below(r, 2) && n > 1, slot_name(i),
                               i == bad ? random_type(r) : on_heap(type, strlen(type))};
    }
    slots[n] = (te_slot_row){false, NULL, NULL};
    if (n > 1 && rng_below(r, 2) && !slots[1].is_output) { /* a flag for "if fa" */
      free((void *)(uintptr_t)slots[1].type);
      slots[1].type = on_heap(types[6], strlen(types[6]));
    }
    te_status status;
    int rc = parse_row(slots, &op, &status);
    NOTE("trial %d: %s", trial, status.message);
    CHECK_INT(rc, status.code);
    if (rc != TE_OK) check_message(status.message, slots);
    if (rc == TE_OK) {
      char schema[TE_SCHEMA_SIZE];
      te_op_row row = {.name = "t"};
      op.row = &row;
      CHECK_INT(te__schema(&op, schema, sizeof schema, &status), TE_OK);
      infer_anything(r);
      n_fine++;
    }
    for (int i = 0; i < n; i++) free((void *)(uintptr_t)slots[i].type);
  }
  CHECK(n_fine > 1000);
}

/* Every prefix of every type of the real table and of the rows above, and of the formats' buffers. */
TEST(every_truncation) {
  for (const te_op_row *row = te__ops; row->name; row++) {
    for (int s = 0; row->slots[s].name; s++) {
      te_slot_row slots[TE_MAX_SLOTS + 1] = {{0}};
      for (int i = 0; row->slots[i].name; i++) slots[i] = row->slots[i];
      for (size_t n = 0; n <= strlen(row->slots[s].type); n++) {
        char *cut = on_heap(row->slots[s].type, n);
        slots[s].type = cut;
        te_op_row copy = {"t", "", slots, NULL, NULL};
        te_status status = {0};
        int rc = te__parse_op("test", te__formats, &copy, &op, &status);
        NOTE("%s.%s cut to '%s'", row->name, row->slots[s].name, cut);
        CHECK_INT(rc, status.code);
        if (rc != TE_OK) check_message(status.message, slots);
        free(cut);
      }
    }
  }
  for (const te_format_row *format = test_formats; format->name; format++)
    for (int b = 0; format->buffers[b].name; b++)
      for (size_t n = 0; n < strlen(format->buffers[b].type); n++) {
        char *cut = on_heap(format->buffers[b].type, n);
        te_buffer_row buffers[TE_MAX_BUFFERS + 1] = {{0}};
        for (int i = 0; format->buffers[i].name; i++) buffers[i] = format->buffers[i];
        buffers[b].type = cut;
        te_format_row formats[] = {{"f", "", buffers}, {NULL, NULL, NULL}};
        te_op_row row = {"t", "", SLOTS(IN("x", "f [*M, K]")), NULL, NULL};
        te_status status = {0};
        CHECK_INT(te__parse_op("test", formats, &row, &op, &status), TE_ERROR);
        CHECK_CONTAINS(status.message, "row t.x:f.");
        free(cut);
      }
}
