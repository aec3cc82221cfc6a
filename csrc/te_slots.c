/* Rows to specs. Every error says "row <op>.<slot>, column <c>: <reason>". */
#include "te_parse.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------------------- slots -------- */

static int find_entry(const te_op *op, const char *name) {
  for (int i = 0; i < op->n_inputs + op->n_outputs; i++)
    if (strcmp(op->entries[i].name, name) == 0) return i;
  return -1;
}

/* What decides: a flag after 'if'; a flag or an int slot after 'by'. */
static int parse_flag(parser *p, te_condition *condition, bool may_be_int) {
  char name[TE_NAME_SIZE];
  te__skip_space(p);
  const char *start = p->at;
  if (!te__take_name(p, name)) FAIL_AT(p, start, "expected a flag%s", "");
  /* A condition may stand before its flag, so look at the row's text instead of at parsed entries; the
   * slot is resolved to its entry at the end of te__parse_op(). */
  const te_slot_row *slots = p->op->row->slots;
  for (int s = 0; slots[s].name && !slots[s].is_output; s++) {
    parser q = {.at = slots[s].type};
    if (te__take_word(&q, "bool") || (may_be_int && te__take_word(&q, "int"))) {
      if (strcmp(slots[s].name, name) == 0) return *condition = (te_condition){s, -1}, TE_OK;
    } else if (te__take_word(&q, "bits")) {
      char flag[TE_NAME_SIZE];
      for (int bit = 0; te__take_name(&q, flag); bit++)
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
    te__skip_space(p);
    const char *start = p->at;
    if (!te__take_name(p, flag)) break;
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
  if (!te__take(p, '=')) return TE_OK;
  te__skip_space(p);
  entry->has_default = true;
  if (entry->kind == TE_KIND_BOOL) {
    if (te__take_word(p, "True")) return entry->default_value = 1, TE_OK;
    if (te__take_word(p, "False")) return entry->default_value = 0, TE_OK;
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
    te__skip_space(p);
    const char *start = p->at;
    bool has_condition = entry->condition.entry >= 0, is_condition = false;
    if (te__take(p, '?'))
      entry->is_optional = true;
    else if (te__take(p, '!'))
      entry->is_mutable = true;
    else if (te__take_word(p, "strided"))
      entry->is_strided = true;
    else if ((is_condition = te__take_word(p, "if")))
      TE_TRY(parse_flag(p, &entry->condition, false));
    else if (is_output && te__take_word(p, "by"))
      TE_TRY(parse_flag(p, &entry->by, true));
    else
      return TE_OK;
    if (is_condition && has_condition) FAIL_AT(p, start, "a slot has one 'if'%s", "");
    if (is_output && !is_condition && entry->by.entry < 0)
      FAIL_AT(p, start, "an output's only modifiers are 'if FLAG' and 'by FLAG'%s", "");
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

static uint32_t dtype_bit(const char *name) {
  for (int d = 0; d < TE_DTYPE_COUNT; d++)
    if (strcmp(name, te__dtype_id((te_dtype)d)) == 0) return 1u << d;
  return 0;
}

/* A buffer's dtype: alternatives, or "like" an earlier buffer of the format. */
static int parse_buffer_dtype(parser *q, const te_format_row *format, const uint32_t *dtypes, uint32_t *out,
                              int *like) {
  char name[TE_NAME_SIZE];
  *out = 0;
  *like = -1;
  if (te__take_word(q, "like")) {
    te__skip_space(q);
    const char *start = q->at;
    if (!te__take_name(q, name)) FAIL_AT(q, start, "expected a buffer after 'like'%s", "");
    for (int b = 0; b < TE_MAX_BUFFERS && format->buffers[b].name && *like < 0; b++)
      if (dtypes[b] && strcmp(format->buffers[b].name, name) == 0) *like = b;
    if (*like < 0) FAIL_AT(q, start, "no earlier buffer is named '%s'", name);
    *out = dtypes[*like];
    return TE_OK;
  }
  do {
    te__skip_space(q);
    const char *start = q->at;
    if (!te__take_name(q, name)) FAIL_AT(q, start, "expected a dtype%s", "");
    uint32_t bit = dtype_bit(name);
    if (!bit) FAIL_AT(q, start, "unknown dtype '%s'", name);
    *out |= bit;
  } while (te__take(q, '|'));
  return TE_OK;
}

/* Which buffers of its format a slot takes: "row", or "row if FLAG, col if FLAG". */
typedef struct choice {
  bool any;
  bool taken[TE_MAX_BUFFERS];
  te_condition condition[TE_MAX_BUFFERS];
} choice;

static int parse_choice(parser *p, const te_format_row *format, const te_entry *slot, choice *out) {
  *out = (choice){false, {false}, {{0}}};
  for (int b = 0; b < TE_MAX_BUFFERS; b++) out->condition[b] = (te_condition){-1, -1};
  for (;;) {
    char name[TE_NAME_SIZE];
    te__skip_space(p);
    const char *start = p->at;
    int found = -1;
    if (!te__take_name(p, name)) break;
    for (int b = 0; b < TE_MAX_BUFFERS && format->buffers[b].name && found < 0; b++)
      if (strcmp(format->buffers[b].name, name) == 0) found = b;
    if (found < 0) FAIL_AT(p, start, "the format has no buffer '%s'", name);
    out->any = out->taken[found] = true;
    if (te__take_word(p, "if")) {
      if (slot->is_optional || slot->condition.entry >= 0)
        FAIL_AT(p, start, "'%s' cannot have an 'if' of its own beside the slot's", name);
      TE_TRY(parse_flag(p, &out->condition[found], false));
    }
    if (!te__take(p, ',')) break;
  }
  return TE_OK;
}

/* A slot whose format has several buffers: one entry a buffer, named <slot>_<buffer>. If the slot takes a
 * plain tensor too (`slot->dtypes`), the first buffer's entry is where that comes, under the slot's name. */
static int add_buffers(parser *p, const te_entry *slot, const te_format_row *format, uint32_t element) {
  static const char *format_symbols[] = {"M", "K"};
  uint32_t dtypes[TE_MAX_BUFFERS] = {0};
  int entries[TE_MAX_BUFFERS], like;
  bool is_union = slot->dtypes != 0, is_output = p->op->row->slots[slot->slot].is_output;
  choice chosen;
  if (!format->buffers[0].name) FAIL_AT(p, p->at, "format '%s' has no buffers", format->name);
  TE_TRY(parse_choice(p, format, slot, &chosen));
  for (int b = 0; format->buffers[b].name; b++) {
    if (b == TE_MAX_BUFFERS) FAIL_AT(p, p->at, "format '%s' has too many buffers", format->name);
    te_entry entry = *slot;
    te_shape shape;
    char context[2 * TE_NAME_SIZE];
    snprintf(context, sizeof context, "%s:%s.%s", slot->name, format->name, format->buffers[b].name);
    parser q = {p->op,          NULL, p->status, context, format->buffers[b].type, format->buffers[b].type,
                format_symbols, 2,    0};
    TE_TRY(te__check_name_lengths(&q));
    TE_TRY(parse_buffer_dtype(&q, format, dtypes, &dtypes[b], &like));
    TE_TRY(te__parse_shape(&q, &shape));
    bool may_lack = te__take(&q, '?');
    te__skip_space(&q);
    if (*q.at) FAIL_AT(&q, q.at, "unexpected '%s'", q.at);
    TE_TRY(te__format_shape(p, &shape, &slot->shape, &entry.shape));
    entry.dtypes = dtypes[b] & (element && (dtypes[b] & (dtypes[b] - 1)) ? element : ~0u);
    if (!entry.dtypes) FAIL_AT(p, p->text, "'%s' has no such element", format->name);
    entries[b] = -1;
    if (chosen.any && may_lack && !chosen.taken[b] && !(is_union && b == 0)) continue;
    if (is_output && may_lack && !chosen.any)
      FAIL_AT(p, p->text, "an output says which buffers of '%s' it has", format->name);
    if (is_output && entry.by.entry < 0 && (entry.dtypes & (entry.dtypes - 1)))
      FAIL_AT(p, p->text, "an output of several dtypes needs 'by FLAG'%s", "");
    if (!(entry.dtypes & (entry.dtypes - 1))) entry.by = (te_condition){-1, -1};
    if (chosen.condition[b].entry >= 0) entry.condition = chosen.condition[b];
    entry.buffer = b;
    entry.may_lack = may_lack && !chosen.taken[b] && !(is_union && b == 0);
    if (entry.may_lack) entry.is_optional = true;
    entry.same_dtype = like >= 0 ? entries[like] : -1;
    if (is_union && b == 0) {
      entry.quantized_dtypes = entry.dtypes;
      entry.dtypes |= slot->dtypes;
    } else {
      entry.part_of = is_union ? entries[0] : -1;
      int n = snprintf(entry.name, sizeof entry.name, "%s_%s", slot->name, format->buffers[b].name);
      if (n >= TE_NAME_SIZE) FAIL_AT(p, p->text, "the name is too long%s", "");
    }
    if (entry.part_of >= 0) entry.is_optional = true, entry.is_strided = false;
    entries[b] = p->op->n_inputs + p->op->n_outputs;
    TE_TRY(add_entry(p, &entry));
  }
  return TE_OK;
}

static int parse_slot(parser *p, int index) {
  const te_slot_row *row = &p->op->row->slots[index];
  te_entry entry = {.kind = TE_KIND_TENSOR,
                    .slot = index,
                    .condition = {-1, -1},
                    .by = {-1, -1},
                    .like = -1,
                    .part_of = -1,
                    .same_dtype = -1};
  const te_format_row *format = NULL;
  uint32_t element = 0;
  char name[TE_NAME_SIZE];
  p->slot = row->name;
  p->text = p->at = row->type;
  if (snprintf(entry.name, sizeof entry.name, "%s", row->name) >= TE_NAME_SIZE)
    FAIL_AT(p, p->text, "the name is too long%s", "");
  TE_TRY(te__check_name_lengths(p));
  for (int s = 0; s < index; s++)
    if (strcmp(p->op->row->slots[s].name, row->name) == 0)
      FAIL_AT(p, p->text, "the name '%s' is used twice", row->name);
  static const char *kinds[] = {[TE_KIND_INT] = "int", "float", "bool", "bits"};
  for (int k = TE_KIND_INT; k <= TE_KIND_BITS && entry.kind == TE_KIND_TENSOR; k++)
    if (te__take_word(p, kinds[k])) entry.kind = (te_kind)k;
  if (entry.kind != TE_KIND_TENSOR) {
    if (row->is_output) FAIL_AT(p, p->text, "an output is a tensor%s", "");
    TE_TRY(parse_scalar(p, &entry));
  } else if (te__take_word(p, "like")) {
    te__skip_space(p);
    const char *start = p->at;
    if (!te__take_name(p, name)) FAIL_AT(p, start, "expected a slot after 'like'%s", "");
    entry.like = find_entry(p->op, name);
    if (entry.like < 0 || entry.like >= p->op->n_inputs)
      FAIL_AT(p, start, "no earlier input is named '%s'", name);
    const te_entry *target = &p->op->entries[entry.like];
    if (target->kind != TE_KIND_TENSOR || te__entry_can_be_absent(target))
      FAIL_AT(p, start, "'like %s' needs a tensor that is always present", name);
  } else {
    do {
      te__skip_space(p);
      const char *start = p->at;
      if (!te__take_name(p, name)) FAIL_AT(p, start, "expected a type%s", "");
      uint32_t bit = dtype_bit(name);
      if (!bit) format = find_format(p, name);
      if (!bit && !format) FAIL_AT(p, start, "unknown format '%s'", name);
      entry.dtypes |= bit;
    } while (!format && te__take(p, '|'));
    if (format && te__take(p, ':')) {
      te__skip_space(p);
      const char *start = p->at;
      if (!te__take_name(p, name) || !(element = dtype_bit(name)))
        FAIL_AT(p, start, "expected a dtype%s", "");
    }
    if (row->is_output && format && entry.dtypes)
      FAIL_AT(p, p->text, "an output is plain or quantized, not either%s", "");
  }
  if (entry.kind == TE_KIND_TENSOR) {
    TE_TRY(te__parse_shape(p, &entry.shape));
    TE_TRY(parse_modifiers(p, &entry, row->is_output));
  }
  if (format) {
    TE_TRY(add_buffers(p, &entry, format, element));
  } else {
    if (row->is_output && entry.by.entry < 0 && (entry.dtypes & (entry.dtypes - 1)))
      FAIL_AT(p, p->text, "an output of several dtypes needs 'by FLAG'%s", "");
    TE_TRY(add_entry(p, &entry));
  }
  te__skip_space(p);
  if (*p->at) FAIL_AT(p, p->at, "unexpected '%s'", p->at);
  return TE_OK;
}

/* --------------------------------------------------------------------------------- whole rows -------- */

static bool same_condition(te_condition a, te_condition b) { return a.entry == b.entry && a.bit == b.bit; }

/* Whether `symbol` is known whenever `user` is present. */
static bool is_bound_for(const te_op *op, int symbol, const te_entry *user) {
  for (int i = 0; i < op->n_inputs; i++) {
    const te_entry *entry = &op->entries[i];
    if (entry->kind != TE_KIND_TENSOR) continue;
    /* The buffers of an optional slot are present together, unless one may be lacking. */
    if (entry->is_optional && (entry->slot != user->slot || entry->may_lack)) continue;
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

/* parse_flag() found a slot; from here on it is an entry. */
static void resolve(const te_op *op, te_condition *condition) {
  if (condition->entry < 0) return;
  for (int e = 0; e < op->n_inputs; e++)
    if (op->entries[e].slot == condition->entry && op->entries[e].kind != TE_KIND_TENSOR) {
      condition->entry = e;
      return;
    }
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
    resolve(op, &entry->condition);
    resolve(op, &entry->by);
  }
  p.slot = "*";
  if (!any_tensor) FAIL_AT(&p, p.text, "an operator needs a tensor input that is always present%s", "");
  for (int i = 0; i < op->n_inputs + op->n_outputs; i++)
    if (op->entries[i].kind == TE_KIND_TENSOR) TE_TRY(check_bound(&p, &op->entries[i], i >= op->n_inputs));
  return TE_OK;
}
