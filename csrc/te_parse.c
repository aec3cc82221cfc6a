/* Rows to specs: a recursive-descent parser. Every error says "row <op>.<slot>, column <c>: <reason>". */
#include "te_spec.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>

typedef struct parser {
  te_op *op;
  const te_format_row *formats;
  te_status *status;
  const char *slot;
  const char *text;
  const char *at;
  const char **symbols; /* names that dims may use; NULL: the operator's own, new ones are added */
  int n_symbols;
  int depth; /* of parse_atom() */
} parser;

/* Parentheses cost no step, so the steps do not bound the recursion. */
#define MAX_DEPTH 64

/* ------------------------------------------------------------------------------------- tokens -------- */

#define FAIL_AT(p, where, ...) return fail_at(p, where, __VA_ARGS__)

static int fail_at(parser *p, const char *where, const char *format, const char *detail) {
  char reason[256];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
  snprintf(reason, sizeof reason, format, detail);
#pragma GCC diagnostic pop
  return te__fail(p->status, "row %s.%s, column %d: %s", p->op->row->name, p->slot,
                  (int)(where - p->text) + 1, reason);
}

static void skip_space(parser *p) {
  while (isspace((unsigned char)*p->at)) p->at++;
}

static bool take(parser *p, char c) {
  skip_space(p);
  if (*p->at != c) return false;
  p->at++;
  return true;
}

static int expect(parser *p, char c) {
  char text[2] = {c, 0};
  if (!take(p, c)) FAIL_AT(p, p->at, "expected '%s'", text);
  return TE_OK;
}

/* Takes an identifier if one is next; the caller's buffer has TE_NAME_SIZE bytes. */
static bool take_name(parser *p, char *name) {
  skip_space(p);
  size_t n = 0;
  if (!isalpha((unsigned char)*p->at) && *p->at != '_') return false;
  while ((isalnum((unsigned char)p->at[n]) || p->at[n] == '_') && n + 1 < TE_NAME_SIZE) n++;
  memcpy(name, p->at, n);
  name[n] = 0;
  p->at += n;
  return true;
}

/* take_name() cuts what is longer than a name may be, which is never what the row means. */
static int check_name_lengths(parser *p) {
  for (const char *at = p->text; *at;) {
    size_t n = 0;
    while (isalnum((unsigned char)at[n]) || at[n] == '_') n++;
    if (n >= TE_NAME_SIZE && !isdigit((unsigned char)*at)) FAIL_AT(p, at, "the name is too long%s", "");
    at += n ? n : 1;
  }
  return TE_OK;
}

static bool take_word(parser *p, const char *word) {
  char name[TE_NAME_SIZE];
  const char *start = p->at;
  if (take_name(p, name) && strcmp(name, word) == 0) return true;
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
  skip_space(p);
  const char *start = p->at;
  if (isdigit((unsigned char)*start)) {
    char *end;
    long value = strtol(start, &end, 10);
    if (value > INT32_MAX) FAIL_AT(p, start, "the constant is too large%s", "");
    p->at = end;
    return emit(p, dim, TE_DIM_CONST, (int)value);
  }
  if (take(p, '(')) {
    TE_TRY(parse_nested(p, dim));
    return expect(p, ')');
  }
  if (!take_name(p, name)) FAIL_AT(p, start, "expected a symbol, an integer or '('%s", "");
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
  while (take(p, '*')) {
    TE_TRY(parse_atom(p, dim));
    TE_TRY(emit(p, dim, TE_DIM_MUL, 0));
  }
  return TE_OK;
}

static int parse_sum(parser *p, te_dim *dim) {
  TE_TRY(parse_product(p, dim));
  for (;;) {
    bool add = take(p, '+');
    if (!add && !take(p, '-')) return TE_OK;
    TE_TRY(parse_product(p, dim));
    TE_TRY(emit(p, dim, add ? TE_DIM_ADD : TE_DIM_SUB, 0));
  }
}

static int parse_shape(parser *p, te_shape *shape) {
  *shape = (te_shape){.spread = -1};
  TE_TRY(expect(p, '['));
  if (take(p, ']')) return TE_OK;
  do {
    skip_space(p);
    const char *start = p->at;
    if (take(p, '*')) {
      char name[TE_NAME_SIZE];
      if (shape->n || shape->spread >= 0) FAIL_AT(p, start, "leading dims come first%s", "");
      if (!take_name(p, name)) FAIL_AT(p, p->at, "expected a symbol after '*'%s", "");
      TE_TRY(find_symbol(p, name, start + 1, &shape->spread));
      continue;
    }
    if (shape->n == TE_MAX_DIMS) FAIL_AT(p, start, "too many dims%s", "");
    TE_TRY(parse_sum(p, &shape->dims[shape->n++]));
  } while (take(p, ','));
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

static int format_shape(parser *p, const te_shape *buffer, const te_shape *slot, te_shape *out) {
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

/* -------------------------------------------------------------------------------------- slots -------- */

static int find_entry(const te_op *op, const char *name) {
  for (int i = 0; i < op->n_inputs + op->n_outputs; i++)
    if (strcmp(op->entries[i].name, name) == 0) return i;
  return -1;
}

static int parse_flag(parser *p, te_condition *condition) {
  char name[TE_NAME_SIZE];
  skip_space(p);
  const char *start = p->at;
  if (!take_name(p, name)) FAIL_AT(p, start, "expected a flag after 'if'%s", "");
  /* A condition may stand before its flag, so look at the row's text instead of at parsed entries; the
   * slot is resolved to its entry at the end of te__parse_op(). */
  const te_slot_row *slots = p->op->row->slots;
  for (int s = 0; slots[s].name && !slots[s].is_output; s++) {
    parser q = {.at = slots[s].type};
    if (take_word(&q, "bool")) {
      if (strcmp(slots[s].name, name) == 0) return *condition = (te_condition){s, -1}, TE_OK;
    } else if (take_word(&q, "bits")) {
      char flag[TE_NAME_SIZE];
      for (int bit = 0; take_name(&q, flag); bit++)
        if (strcmp(flag, name) == 0) return *condition = (te_condition){s, bit}, TE_OK;
    }
  }
  FAIL_AT(p, start, "no bits or bool slot has the flag '%s'", name);
}

/* A flag is a field of the row's argument bundle, as a slot is: their names share one space. */
static int check_flag_name(parser *p, const te_entry *entry, const char *where, const char *flag) {
  const te_op *op = p->op;
  bool taken = false;
  for (const te_slot_row *slot = op->row->slots; slot->name; slot++) taken |= strcmp(slot->name, flag) == 0;
  for (int f = 0; f < entry->n_flags; f++) taken |= strcmp(entry->flags[f], flag) == 0;
  for (int e = 0; e < op->n_inputs; e++)
    for (int f = 0; f < op->entries[e].n_flags; f++) taken |= strcmp(op->entries[e].flags[f], flag) == 0;
  if (taken) FAIL_AT(p, where, "the name '%s' is used twice", flag);
  return TE_OK;
}

static int parse_flags(parser *p, te_entry *entry) {
  for (;;) {
    char flag[TE_NAME_SIZE];
    skip_space(p);
    const char *start = p->at;
    if (!take_name(p, flag)) break;
    if (entry->n_flags == TE_MAX_FLAGS) FAIL_AT(p, start, "too many flags%s", "");
    TE_TRY(check_flag_name(p, entry, start, flag));
    memcpy(entry->flags[entry->n_flags++], flag, sizeof flag);
  }
  if (entry->n_flags == 0) FAIL_AT(p, p->at, "bits needs at least one flag%s", "");
  return TE_OK;
}

static int parse_scalar(parser *p, te_entry *entry) {
  char *end;
  if (entry->kind == TE_KIND_BITS) return parse_flags(p, entry);
  if (!take(p, '=')) return TE_OK;
  skip_space(p);
  entry->has_default = true;
  if (entry->kind == TE_KIND_BOOL) {
    if (take_word(p, "True")) return entry->default_value = 1, TE_OK;
    if (take_word(p, "False")) return entry->default_value = 0, TE_OK;
    FAIL_AT(p, p->at, "expected True or False%s", "");
  }
  if (entry->kind == TE_KIND_INT) {
    const long long limit = 1LL << 53; /* what the double that holds it can tell apart */
    long long value = strtoll(p->at, &end, 10);
    if (end == p->at) FAIL_AT(p, p->at, "expected an integer%s", "");
    if (value > limit || value < -limit) FAIL_AT(p, p->at, "the default is too large%s", "");
    entry->default_value = (double)value;
  } else {
    entry->default_value = strtod(p->at, &end);
    /* A schema has no way to write infinity or NaN. */
    if (end == p->at || !isfinite(entry->default_value)) FAIL_AT(p, p->at, "expected a number%s", "");
  }
  p->at = end;
  return TE_OK;
}

static int parse_modifiers(parser *p, te_entry *entry, bool is_output) {
  for (;;) {
    skip_space(p);
    const char *start = p->at;
    bool has_condition = entry->condition.entry >= 0, is_condition = false;
    if (take(p, '?'))
      entry->is_optional = true;
    else if (take(p, '!'))
      entry->is_mutable = true;
    else if (take_word(p, "strided"))
      entry->is_strided = true;
    else if ((is_condition = take_word(p, "if")))
      TE_TRY(parse_flag(p, &entry->condition));
    else
      return TE_OK;
    if (is_condition && has_condition) FAIL_AT(p, start, "a slot has one 'if'%s", "");
    if (is_output && !is_condition) FAIL_AT(p, start, "an output's only modifier is 'if FLAG'%s", "");
    if (entry->is_mutable && entry->is_strided)
      FAIL_AT(p, start, "a slot is '!' or 'strided', not both%s", "");
    if (entry->is_optional && entry->condition.entry >= 0)
      FAIL_AT(p, start, "a slot is '?' or 'if', not both%s", "");
  }
}

static const te_format_row *find_format(const parser *p, const char *name) {
  for (const te_format_row *f = p->formats; f && f->name; f++)
    if (strcmp(f->name, name) == 0) return f;
  return NULL;
}

static int add_entry(parser *p, const te_entry *entry) {
  te_op *op = p->op;
  if (op->n_inputs + op->n_outputs == TE_MAX_ENTRIES) FAIL_AT(p, p->text, "too many slots%s", "");
  if (find_entry(op, entry->name) >= 0) FAIL_AT(p, p->text, "the name '%s' is used twice", entry->name);
  op->entries[op->n_inputs + op->n_outputs] = *entry;
  if (op->row->slots[entry->slot].is_output)
    op->n_outputs++;
  else
    op->n_inputs++;
  if (entry->is_mutable) op->is_mutating = true;
  return TE_OK;
}

/* A slot whose format has several buffers: one entry a buffer, named <slot>_<buffer>. */
static int add_buffers(parser *p, const te_entry *slot, const te_format_row *format) {
  static const char *format_symbols[] = {"M", "K"};
  if (!format->buffers[0].name) FAIL_AT(p, p->at, "format '%s' has no buffers", format->name);
  for (int b = 0; format->buffers[b].name; b++) {
    if (b == TE_MAX_BUFFERS) FAIL_AT(p, p->at, "format '%s' has too many buffers", format->name);
    char name[TE_NAME_SIZE];
    te_entry entry = *slot;
    te_shape shape;
    char context[2 * TE_NAME_SIZE];
    snprintf(context, sizeof context, "%s:%s.%s", slot->name, format->name, format->buffers[b].name);
    parser q = {p->op,          NULL, p->status, context, format->buffers[b].type, format->buffers[b].type,
                format_symbols, 2,    0};
    TE_TRY(check_name_lengths(&q));
    skip_space(&q);
    const char *start = q.at;
    if (!take_name(&q, name)) FAIL_AT(&q, start, "expected a dtype%s", "");
    entry.dtypes = 0;
    for (int d = 0; d < TE_DTYPE_COUNT; d++)
      if (strcmp(name, te__dtype_id((te_dtype)d)) == 0) entry.dtypes = 1u << d;
    if (!entry.dtypes) FAIL_AT(&q, start, "unknown dtype '%s'", name);
    TE_TRY(parse_shape(&q, &shape));
    skip_space(&q);
    if (*q.at) FAIL_AT(&q, q.at, "unexpected '%s'", q.at);
    TE_TRY(format_shape(p, &shape, &slot->shape, &entry.shape));
    entry.buffer = b;
    int n = snprintf(entry.name, sizeof entry.name, "%s_%s", slot->name, format->buffers[b].name);
    if (n >= TE_NAME_SIZE) FAIL_AT(p, p->text, "the name is too long%s", "");
    TE_TRY(add_entry(p, &entry));
  }
  return TE_OK;
}

static int parse_slot(parser *p, int index) {
  const te_slot_row *row = &p->op->row->slots[index];
  te_entry entry = {.kind = TE_KIND_TENSOR, .slot = index, .condition = {-1, -1}, .like = -1};
  const te_format_row *format = NULL;
  char name[TE_NAME_SIZE];
  p->slot = row->name;
  p->text = p->at = row->type;
  if (snprintf(entry.name, sizeof entry.name, "%s", row->name) >= TE_NAME_SIZE)
    FAIL_AT(p, p->text, "the name is too long%s", "");
  TE_TRY(check_name_lengths(p));
  for (int s = 0; s < index; s++)
    if (strcmp(p->op->row->slots[s].name, row->name) == 0)
      FAIL_AT(p, p->text, "the name '%s' is used twice", row->name);
  static const char *kinds[] = {[TE_KIND_INT] = "int", "float", "bool", "bits"};
  for (int k = TE_KIND_INT; k <= TE_KIND_BITS && entry.kind == TE_KIND_TENSOR; k++)
    if (take_word(p, kinds[k])) entry.kind = (te_kind)k;
  if (entry.kind != TE_KIND_TENSOR) {
    if (row->is_output) FAIL_AT(p, p->text, "an output is a tensor%s", "");
    TE_TRY(parse_scalar(p, &entry));
  } else if (take_word(p, "like")) {
    skip_space(p);
    const char *start = p->at;
    if (!take_name(p, name)) FAIL_AT(p, start, "expected a slot after 'like'%s", "");
    entry.like = find_entry(p->op, name);
    if (entry.like < 0 || entry.like >= p->op->n_inputs)
      FAIL_AT(p, start, "no earlier input is named '%s'", name);
    const te_entry *target = &p->op->entries[entry.like];
    if (target->kind != TE_KIND_TENSOR || te__entry_can_be_absent(target))
      FAIL_AT(p, start, "'like %s' needs a tensor that is always present", name);
  } else {
    do {
      skip_space(p);
      const char *start = p->at;
      if (!take_name(p, name)) FAIL_AT(p, start, "expected a type%s", "");
      uint32_t bit = 0;
      for (int d = 0; d < TE_DTYPE_COUNT; d++)
        if (strcmp(name, te__dtype_id((te_dtype)d)) == 0) bit = 1u << d;
      if (!bit) format = find_format(p, name);
      if (!bit && !format) FAIL_AT(p, start, "unknown format '%s'", name);
      if (format && entry.dtypes)
        FAIL_AT(p, start, "'%s' has several buffers and cannot be an alternative", name);
      entry.dtypes |= bit;
    } while (!format && take(p, '|'));
    if (row->is_output && !format && (entry.dtypes & (entry.dtypes - 1)))
      FAIL_AT(p, p->text, "an output has one format%s", "");
  }
  if (entry.kind == TE_KIND_TENSOR) {
    TE_TRY(parse_shape(p, &entry.shape));
    TE_TRY(parse_modifiers(p, &entry, row->is_output));
  }
  skip_space(p);
  if (*p->at) FAIL_AT(p, p->at, "unexpected '%s'", p->at);
  return format ? add_buffers(p, &entry, format) : add_entry(p, &entry);
}

/* --------------------------------------------------------------------------------- whole rows -------- */

static bool same_condition(te_condition a, te_condition b) { return a.entry == b.entry && a.bit == b.bit; }

/* Whether `symbol` is known whenever `user` is present. */
static bool is_bound_for(const te_op *op, int symbol, const te_entry *user) {
  for (int i = 0; i < op->n_inputs; i++) {
    const te_entry *entry = &op->entries[i];
    if (entry->kind != TE_KIND_TENSOR) continue;
    if (entry->is_optional && entry->slot != user->slot) continue; /* a slot's buffers are present together */
    if (entry->condition.entry >= 0 && !same_condition(entry->condition, user->condition)) continue;
    if (entry->shape.spread == symbol) return true;
    for (int d = 0; d < entry->shape.n; d++)
      if (te__dim_is_symbol(&entry->shape.dims[d]) && entry->shape.dims[d].steps[0].operand == symbol)
        return true;
  }
  return false;
}

static int check_bound(parser *p, const te_entry *entry, bool is_output) {
  const te_shape *shape = &entry->shape;
  p->slot = entry->name;
  p->text = p->at = p->op->row->slots[entry->slot].type;
  if (is_output && shape->spread >= 0 && !is_bound_for(p->op, shape->spread, entry))
    FAIL_AT(p, p->text, "no input that is present with it binds '*%s'", p->op->symbols[shape->spread]);
  for (int d = 0; d < shape->n; d++) {
    if (!is_output && te__dim_is_symbol(&shape->dims[d])) continue; /* binds it itself */
    for (int i = 0; i < shape->dims[d].n; i++) {
      if (shape->dims[d].steps[i].code != TE_DIM_SYMBOL) continue;
      int symbol = shape->dims[d].steps[i].operand;
      if (!is_bound_for(p->op, symbol, entry))
        FAIL_AT(p, p->text, "no input that is present with it binds '%s'", p->op->symbols[symbol]);
    }
  }
  return TE_OK;
}

int te__parse_op(const char *ns, const te_format_row *formats, const te_op_row *row, te_op *op,
                 te_status *status) {
  memset(op, 0, sizeof *op);
  op->row = row;
  parser p = {op, formats, status, "", "", "", NULL, 0, 0};
  if (snprintf(op->full_name, sizeof op->full_name, "%s::%s", ns, row->name) >= (int)sizeof op->full_name)
    FAIL_AT(&p, p.text, "the operator's name is too long%s", "");
  bool outputs_began = false;
  for (int s = 0; row->slots[s].name; s++) {
    p.slot = row->slots[s].name;
    p.text = p.at = row->slots[s].type;
    if (s == TE_MAX_SLOTS) FAIL_AT(&p, p.text, "too many slots%s", "");
    if (outputs_began && !row->slots[s].is_output) FAIL_AT(&p, p.text, "inputs come before outputs%s", "");
    outputs_began = row->slots[s].is_output;
    TE_TRY(parse_slot(&p, s));
    op->n_slots++;
  }
  bool any_tensor = false;
  for (int i = 0; i < op->n_inputs + op->n_outputs; i++) {
    te_entry *entry = &op->entries[i];
    if (entry->kind == TE_KIND_TENSOR && i < op->n_inputs && !te__entry_can_be_absent(entry))
      any_tensor = true;
    if (entry->condition.entry < 0) continue;
    for (int e = 0; e < op->n_inputs; e++) /* the slot that parse_flag() found, as an entry */
      if (op->entries[e].slot == entry->condition.entry && op->entries[e].kind != TE_KIND_TENSOR) {
        entry->condition.entry = e;
        break;
      }
  }
  p.slot = "*";
  if (!any_tensor) FAIL_AT(&p, p.text, "an operator needs a tensor input that is always present%s", "");
  for (int i = 0; i < op->n_inputs + op->n_outputs; i++)
    if (op->entries[i].kind == TE_KIND_TENSOR) TE_TRY(check_bound(&p, &op->entries[i], i >= op->n_inputs));
  return TE_OK;
}
