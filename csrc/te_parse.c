/* Tokens and dims of a row. */
#include "te_parse.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

/* Parentheses cost no step, so the steps do not bound the recursion. */
#define MAX_DEPTH 64

/* ------------------------------------------------------------------------------------- tokens -------- */

int te__parse_fail(parser *p, const char *where, const char *format, const char *detail) {
  char reason[256];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
  snprintf(reason, sizeof reason, format, detail);
#pragma GCC diagnostic pop
  return te__fail(p->status, "row %s.%s, column %d: %s", p->op->row->name, p->slot,
                  (int)(where - p->text) + 1, reason);
}

void te__skip_space(parser *p) {
  while (isspace((unsigned char)*p->at)) p->at++;
}

bool te__take(parser *p, char c) {
  te__skip_space(p);
  if (*p->at != c) return false;
  p->at++;
  return true;
}

static int expect(parser *p, char c) {
  char text[2] = {c, 0};
  if (!te__take(p, c)) FAIL_AT(p, p->at, "expected '%s'", text);
  return TE_OK;
}

/* Takes an identifier if one is next; the caller's buffer has TE_NAME_SIZE bytes. */
bool te__take_name(parser *p, char *name) {
  te__skip_space(p);
  size_t n = 0;
  if (!isalpha((unsigned char)*p->at) && *p->at != '_') return false;
  while ((isalnum((unsigned char)p->at[n]) || p->at[n] == '_') && n + 1 < TE_NAME_SIZE) n++;
  memcpy(name, p->at, n);
  name[n] = 0;
  p->at += n;
  return true;
}

/* te__take_name() cuts what is longer than a name may be, which is never what the row means. */
int te__check_name_lengths(parser *p) {
  for (const char *at = p->text; *at;) {
    size_t n = 0;
    while (isalnum((unsigned char)at[n]) || at[n] == '_') n++;
    if (n >= TE_NAME_SIZE && !isdigit((unsigned char)*at)) FAIL_AT(p, at, "the name is too long%s", "");
    at += n ? n : 1;
  }
  return TE_OK;
}

bool te__take_word(parser *p, const char *word) {
  char name[TE_NAME_SIZE];
  const char *start = p->at;
  if (te__take_name(p, name) && strcmp(name, word) == 0) return true;
  p->at = start;
  return false;
}

/* --------------------------------------------------------------------------------------- dims -------- */

static int find_symbol(parser *p, const char *name, const char *where, int *out) {
  for (int i = 0; i < p->n_symbols; i++)
    if (strcmp(p->symbols[i], name) == 0) return *out = i, TE_OK;
  if (p->symbols) FAIL_AT(p, where, "unknown symbol '%s' (a format's dims may use M and K)", name);
  te_op *op = p->op;
  for (int i = 0; i < op->n_symbols; i++)
    if (strcmp(op->symbols[i], name) == 0) return *out = i, TE_OK;
  if (op->n_symbols == TE_MAX_SYMBOLS) FAIL_AT(p, where, "too many symbols at '%s'", name);
  snprintf(op->symbols[op->n_symbols], TE_NAME_SIZE, "%s", name);
  *out = op->n_symbols++;
  return TE_OK;
}

static int emit(parser *p, te_dim *dim, int code, int operand) {
  if (dim->n == TE_MAX_DIM_STEPS) FAIL_AT(p, p->at, "the expression is too long%s", "");
  dim->steps[dim->n++] = (te_dim_step){code, operand};
  return TE_OK;
}

static int parse_sum(parser *p, te_dim *dim);

static int parse_nested(parser *p, te_dim *dim) {
  if (p->depth == MAX_DEPTH) FAIL_AT(p, p->at, "the expression is nested too deeply%s", "");
  p->depth++;
  int rc = parse_sum(p, dim);
  p->depth--;
  return rc;
}

static int parse_atom(parser *p, te_dim *dim) {
  char name[TE_NAME_SIZE];
  te__skip_space(p);
  const char *start = p->at;
  if (isdigit((unsigned char)*start)) {
    char *end;
    long value = strtol(start, &end, 10);
    if (value > INT32_MAX) FAIL_AT(p, start, "the constant is too large%s", "");
    p->at = end;
    return emit(p, dim, TE_DIM_CONST, (int)value);
  }
  if (te__take(p, '(')) {
    TE_TRY(parse_nested(p, dim));
    return expect(p, ')');
  }
  if (!te__take_name(p, name)) FAIL_AT(p, start, "expected a symbol, an integer or '('%s", "");
  bool is_ceil = strcmp(name, "ceil") == 0;
  if (is_ceil || strcmp(name, "up") == 0) {
    TE_TRY(expect(p, '('));
    TE_TRY(parse_nested(p, dim));
    TE_TRY(expect(p, ','));
    TE_TRY(parse_nested(p, dim));
    TE_TRY(expect(p, ')'));
    return emit(p, dim, is_ceil ? TE_DIM_CEIL : TE_DIM_UP, 0);
  }
  int symbol;
  TE_TRY(find_symbol(p, name, start, &symbol));
  return emit(p, dim, TE_DIM_SYMBOL, symbol);
}

static int parse_product(parser *p, te_dim *dim) {
  TE_TRY(parse_atom(p, dim));
  while (te__take(p, '*')) {
    TE_TRY(parse_atom(p, dim));
    TE_TRY(emit(p, dim, TE_DIM_MUL, 0));
  }
  return TE_OK;
}

static int parse_sum(parser *p, te_dim *dim) {
  TE_TRY(parse_product(p, dim));
  for (;;) {
    bool add = te__take(p, '+');
    if (!add && !te__take(p, '-')) return TE_OK;
    TE_TRY(parse_product(p, dim));
    TE_TRY(emit(p, dim, add ? TE_DIM_ADD : TE_DIM_SUB, 0));
  }
}

int te__parse_shape(parser *p, te_shape *shape) {
  *shape = (te_shape){.spread = -1};
  TE_TRY(expect(p, '['));
  if (te__take(p, ']')) return TE_OK;
  do {
    te__skip_space(p);
    const char *start = p->at;
    if (te__take(p, '*')) {
      char name[TE_NAME_SIZE];
      if (shape->n || shape->spread >= 0) FAIL_AT(p, start, "leading dims come first%s", "");
      if (!te__take_name(p, name)) FAIL_AT(p, p->at, "expected a symbol after '*'%s", "");
      TE_TRY(find_symbol(p, name, start + 1, &shape->spread));
      continue;
    }
    if (shape->n == TE_MAX_DIMS) FAIL_AT(p, start, "too many dims%s", "");
    TE_TRY(parse_sum(p, &shape->dims[shape->n++]));
  } while (te__take(p, ','));
  return expect(p, ']');
}

/* Replaces a format's symbols (0: M, 1: K) by the slot's dims, so that a buffer's dims are in the
 * operator's own symbols. */
static int substitute(parser *p, const te_dim *in, const te_dim replacement[2], te_dim *out) {
  *out = (te_dim){0};
  for (int i = 0; i < in->n; i++) {
    if (in->steps[i].code != TE_DIM_SYMBOL) {
      TE_TRY(emit(p, out, in->steps[i].code, in->steps[i].operand));
      continue;
    }
    const te_dim *r = &replacement[in->steps[i].operand];
    for (int j = 0; j < r->n; j++) TE_TRY(emit(p, out, r->steps[j].code, r->steps[j].operand));
  }
  return TE_OK;
}

int te__format_shape(parser *p, const te_shape *buffer, const te_shape *slot, te_shape *out) {
  te_dim mk[2] = {{0}, {0}};
  if (slot->n == 0) FAIL_AT(p, p->at, "a format of several buffers needs a last dim%s", "");
  bool first = true;
  if (slot->spread >= 0) {
    TE_TRY(emit(p, &mk[0], TE_DIM_SYMBOL, slot->spread));
    first = false;
  }
  for (int i = 0; i + 1 < slot->n; i++) {
    for (int j = 0; j < slot->dims[i].n; j++)
      TE_TRY(emit(p, &mk[0], slot->dims[i].steps[j].code, slot->dims[i].steps[j].operand));
    if (!first) TE_TRY(emit(p, &mk[0], TE_DIM_MUL, 0));
    first = false;
  }
  if (first) TE_TRY(emit(p, &mk[0], TE_DIM_CONST, 1));
  mk[1] = slot->dims[slot->n - 1];
  *out = (te_shape){.spread = -1};
  if (buffer->spread >= 0) { /* "*M": the leading dims as the slot writes them */
    if (buffer->spread != 0) FAIL_AT(p, p->at, "only M can be spread in a format%s", "");
    out->spread = slot->spread;
    for (int i = 0; i + 1 < slot->n; i++) out->dims[out->n++] = slot->dims[i];
  }
  for (int i = 0; i < buffer->n; i++) {
    if (out->n == TE_MAX_DIMS) FAIL_AT(p, p->at, "too many dims%s", "");
    TE_TRY(substitute(p, &buffer->dims[i], mk, &out->dims[out->n++]));
  }
  return TE_OK;
}
