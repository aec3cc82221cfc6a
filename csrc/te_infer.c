#include "te_spec.h"

#include <stdio.h>
#include <string.h>

#define SHAPE_TEXT 512 /* a message that has one still fits into TE_MESSAGE_SIZE */
#define NUM_TEXT 48

typedef struct symbol_state {
  bool bound;
  bool spread; /* `lead` holds the leading dims whose product is the value */
  int32_t n_lead;
  const te_num *lead;
  int32_t entry; /* who bound it, for messages */
  int32_t dim;
} symbol_state;

typedef struct infer_state {
  const te_op *op;
  const te_arith *arith;
  const te_desc *inputs;
  te_status *status;
  te_num values[TE_MAX_SYMBOLS];
  symbol_state symbols[TE_MAX_SYMBOLS];
} infer_state;

static const char *print_shape(const infer_state *s, const te_desc *desc, char *text) {
  size_t used = 0;
  int i = 0;
  text[used++] = '[';
  for (; i < desc->ndim && used < SHAPE_TEXT - NUM_TEXT - 8; i++) {
    char number[NUM_TEXT];
    s->arith->print(s->arith->user, desc->sizes[i], number, sizeof number);
    used += (size_t)snprintf(text + used, SHAPE_TEXT - used, "%s%s", i ? ", " : "", number);
  }
  snprintf(text + used, SHAPE_TEXT - used, "%s]", i < desc->ndim ? ", ..." : "");
  return text;
}

static bool flag_is_set(te_condition c, const te_desc *inputs) {
  if (c.entry < 0) return true;
  int64_t value = inputs[c.entry].scalar;
  return c.bit < 0 ? value != 0 : (value >> c.bit & 1) != 0;
}

static const char *flag_name(const te_op *op, te_condition c) {
  const te_entry *entry = &op->entries[c.entry];
  return c.bit < 0 ? entry->name : entry->flags[c.bit];
}

static int check_presence(const infer_state *s, int e) {
  const te_entry *entry = &s->op->entries[e];
  bool present = s->inputs[e].present;
  if (entry->part_of >= 0) {
    const te_entry *whole = &s->op->entries[entry->part_of];
    const te_desc *desc = &s->inputs[entry->part_of];
    bool quantized =
        desc->present && desc->dtype < TE_DTYPE_COUNT && whole->quantized_dtypes >> desc->dtype & 1;
    bool wrong = quantized ? !present && !entry->may_lack : present;
    TE_REQUIRE(s->status, !wrong, "%s: %s is %s although %s is %s: it belongs to a quantized tensor",
               s->op->full_name, entry->name, present ? "present" : "absent", whole->name,
               !desc->present ? "absent"
               : quantized    ? "quantized"
                              : te__dtype_name(desc->dtype));
    return TE_OK;
  }
  if (entry->may_lack) return TE_OK;
  if (entry->is_optional) {
    int first =
        e; /* a slot's buffers are neighbours, and those that may not be lacking are present together */
    for (int i = e - 1; i >= 0 && s->op->entries[i].slot == entry->slot; i--)
      if (!s->op->entries[i].may_lack) first = i;
    TE_REQUIRE(s->status, present == s->inputs[first].present,
               "%s: %s is %s although %s is %s: they are parts of one tensor", s->op->full_name, entry->name,
               present ? "present" : "absent", s->op->entries[first].name, present ? "absent" : "present");
    return TE_OK;
  }
  if (entry->condition.entry < 0) {
    TE_REQUIRE(s->status, present, "%s: %s is absent: it is required", s->op->full_name, entry->name);
    return TE_OK;
  }
  bool wanted = flag_is_set(entry->condition, s->inputs);
  TE_REQUIRE(s->status, present == wanted,
             "%s: %s is %s although %s is %s: it is present exactly when "
             "that flag is set",
             s->op->full_name, entry->name, present ? "present" : "absent",
             flag_name(s->op, entry->condition), wanted ? "set" : "not set");
  return TE_OK;
}

static int check_dtype(const infer_state *s, int e) {
  const te_entry *entry = &s->op->entries[e];
  const te_desc *desc = &s->inputs[e];
  char shape[SHAPE_TEXT];
  if (entry->like >= 0) {
    te_dtype wanted = s->inputs[entry->like].dtype;
    TE_REQUIRE(s->status, desc->dtype == wanted,
               "%s: %s has dtype %s: must be the dtype of %s, %s (%s has shape %s)", s->op->full_name,
               entry->name, te__dtype_name(desc->dtype), s->op->entries[entry->like].name,
               te__dtype_name(wanted), entry->name, print_shape(s, desc, shape));
    return TE_OK;
  }
  if (entry->same_dtype >= 0 && s->inputs[entry->same_dtype].present) {
    te_dtype wanted = s->inputs[entry->same_dtype].dtype;
    TE_REQUIRE(s->status, desc->dtype == wanted, "%s: %s has dtype %s: must be the dtype of %s, %s",
               s->op->full_name, entry->name, te__dtype_name(desc->dtype),
               s->op->entries[entry->same_dtype].name, te__dtype_name(wanted));
  }
  if (desc->dtype < TE_DTYPE_COUNT && (entry->dtypes >> desc->dtype & 1)) return TE_OK;
  char allowed[192] = ""; /* all dtypes */
  for (int d = 0; d < TE_DTYPE_COUNT; d++) {
    if (!(entry->dtypes >> d & 1)) continue;
    size_t used = strlen(allowed);
    snprintf(allowed + used, sizeof allowed - used, "%s%s", used ? ", " : "", te__dtype_name(d));
  }
  bool several = strchr(allowed, ',') != NULL;
  return te__fail(s->status, "%s: %s has dtype %s: must be %s%s (%s has shape %s)", s->op->full_name,
                  entry->name, te__dtype_name(desc->dtype), several ? "one of " : "", allowed, entry->name,
                  print_shape(s, desc, shape));
}

static const char *print_device(const te_desc *desc, char *text) {
  switch (desc->device_type) { /* PyTorch's codes */
  case 0:
    return "cpu";
  case 1:
    snprintf(text, 32, "cuda:%d", (int)desc->device_index);
    return text;
  case 14:
    return "meta";
  default:
    snprintf(text, 32, "a device of type %d", (int)desc->device_type);
    return text;
  }
}

static int check_device(const infer_state *s, int e, int first) {
  const te_desc *a = &s->inputs[first], *b = &s->inputs[e];
  if (a->device_type == b->device_type && a->device_index == b->device_index) return TE_OK;
  char shape[SHAPE_TEXT];
  char here[32], there[32];
  return te__fail(s->status, "%s: %s is on %s: must be on the device of %s, %s (%s has shape %s)",
                  s->op->full_name, s->op->entries[e].name, print_device(b, here), s->op->entries[first].name,
                  print_device(a, there), s->op->entries[e].name, print_shape(s, b, shape));
}

static int check_rank(const infer_state *s, int e) {
  const te_entry *entry = &s->op->entries[e];
  const te_desc *desc = &s->inputs[e];
  const te_shape *shape = &entry->shape;
  char text[SHAPE_TEXT];
  bool ok = shape->spread < 0 ? desc->ndim == shape->n : desc->ndim >= shape->n;
  TE_REQUIRE(s->status, ok, "%s: %s has %d dimension%s: must have %s%d (%s has shape %s)", s->op->full_name,
             entry->name, (int)desc->ndim, desc->ndim == 1 ? "" : "s", shape->spread < 0 ? "" : "at least ",
             (int)shape->n, entry->name, print_shape(s, desc, text));
  return TE_OK;
}

static int dim_mismatch(const infer_state *s, int e, int dim, te_num wanted, const char *why) {
  const te_desc *desc = &s->inputs[e];
  const char *name = s->op->entries[e].name;
  char shape[SHAPE_TEXT], got[NUM_TEXT], want[NUM_TEXT];
  s->arith->print(s->arith->user, desc->sizes[dim], got, sizeof got);
  s->arith->print(s->arith->user, wanted, want, sizeof want);
  return te__fail(s->status, "%s: %s[%d] = %s: must be %s%s (%s has shape %s)", s->op->full_name, name, dim,
                  got, want, why, name, print_shape(s, desc, shape));
}

/* Leading dims: the first slot with "*M" defines them, the others must repeat them. */
static int bind_spread(infer_state *s, int e) {
  const te_entry *entry = &s->op->entries[e];
  const te_desc *desc = &s->inputs[e];
  int n_lead = desc->ndim - entry->shape.n, sym = entry->shape.spread;
  symbol_state *state = &s->symbols[sym];
  if (!state->bound) {
    *state = (symbol_state){true, true, n_lead, desc->sizes, e, 0};
    if (n_lead == 0) return s->arith->constant(s->arith->user, 1, &s->values[sym]);
    s->values[sym] = desc->sizes[0];
    for (int i = 1; i < n_lead; i++)
      TE_TRY(s->arith->binary(s->arith->user, TE_DIM_MUL, s->values[sym], desc->sizes[i], &s->values[sym]));
    return TE_OK;
  }
  char text[SHAPE_TEXT], why[TE_NAME_SIZE + 40];
  const char *other = s->op->entries[state->entry].name;
  TE_REQUIRE(s->status, n_lead == state->n_lead,
             "%s: %s has %d leading dimensions: must have the %d of %s (%s has shape %s)", s->op->full_name,
             entry->name, n_lead, (int)state->n_lead, other, entry->name, print_shape(s, desc, text));
  for (int i = 0; i < n_lead; i++) {
    bool equal;
    TE_TRY(s->arith->equal(s->arith->user, desc->sizes[i], state->lead[i], &equal));
    if (equal) continue;
    snprintf(why, sizeof why, " as in %s[%d]", other, i);
    return dim_mismatch(s, e, i, state->lead[i], why);
  }
  return TE_OK;
}

static void bind_symbols(infer_state *s, int e) {
  const te_shape *shape = &s->op->entries[e].shape;
  const te_desc *desc = &s->inputs[e];
  int n_lead = desc->ndim - shape->n;
  for (int i = 0; i < shape->n; i++) {
    if (!te__dim_is_symbol(&shape->dims[i])) continue;
    int sym = shape->dims[i].steps[0].operand;
    if (s->symbols[sym].bound) continue;
    s->values[sym] = desc->sizes[n_lead + i];
    s->symbols[sym] = (symbol_state){true, false, 1, &desc->sizes[n_lead + i], e, n_lead + i};
  }
}

static int check_dims(const infer_state *s, int e) {
  const te_shape *shape = &s->op->entries[e].shape;
  const te_desc *desc = &s->inputs[e];
  int n_lead = desc->ndim - shape->n;
  for (int i = 0; i < shape->n; i++) {
    te_num wanted;
    bool equal, is_symbol = te__dim_is_symbol(&shape->dims[i]);
    if (is_symbol) {
      const symbol_state *by = &s->symbols[shape->dims[i].steps[0].operand];
      if (!by->spread && by->entry == e && by->dim == n_lead + i) continue; /* it bound the symbol itself */
    }
    TE_TRY(te__dim_eval(&shape->dims[i], s->arith, s->values, &wanted));
    TE_TRY(s->arith->equal(s->arith->user, desc->sizes[n_lead + i], wanted, &equal));
    if (equal) continue;
    char why[2 * TE_NAME_SIZE + 40] = "";
    if (is_symbol) {
      int sym = shape->dims[i].steps[0].operand;
      const symbol_state *by = &s->symbols[sym];
      if (by->spread)
        snprintf(why, sizeof why, ", which is %s, the leading dims of %s", s->op->symbols[sym],
                 s->op->entries[by->entry].name);
      else
        snprintf(why, sizeof why, ", which is %s = %s[%d]", s->op->symbols[sym],
                 s->op->entries[by->entry].name, (int)by->dim);
    }
    return dim_mismatch(s, e, n_lead + i, wanted, why);
  }
  return TE_OK;
}

/* The dtype that the flag or int of 'by' picks among an output's alternatives. */
static int pick_dtype(const infer_state *s, const te_entry *entry, te_dtype *out) {
  int64_t value = s->inputs[entry->by.entry].scalar;
  uint32_t left = entry->dtypes;
  if (entry->by.bit >= 0) value = value >> entry->by.bit & 1;
  int count = __builtin_popcount(left);
  TE_REQUIRE(s->status, value >= 0 && value < count, "%s: %s = %lld: must be 0 to %d, the dtype of %s",
             s->op->full_name, flag_name(s->op, entry->by), (long long)value, count - 1, entry->name);
  for (; value > 0; value--) left &= left - 1;
  *out = (te_dtype)__builtin_ctz(left);
  return TE_OK;
}

static int infer_output(const infer_state *s, int e, te_out_desc *out) {
  const te_op *op = s->op;
  const te_entry *entry = &op->entries[e];
  out->present = flag_is_set(entry->condition, s->inputs);
  out->ndim = 0;
  out->dtype = entry->like >= 0 ? s->inputs[entry->like].dtype : (te_dtype)__builtin_ctz(entry->dtypes);
  if (!out->present) return TE_OK;
  if (entry->by.entry >= 0) TE_TRY(pick_dtype(s, entry, &out->dtype));
  if (entry->shape.spread >= 0) {
    const symbol_state *lead = &s->symbols[entry->shape.spread];
    for (int i = 0; i < lead->n_lead; i++) out->sizes[out->ndim++] = lead->lead[i];
  }
  TE_REQUIRE(s->status, out->ndim + entry->shape.n <= TE_MAX_NDIM,
             "%s: %s would have %d dimensions: at most %d", op->full_name, entry->name,
             (int)(out->ndim + entry->shape.n), TE_MAX_NDIM);
  for (int i = 0; i < entry->shape.n; i++) {
    bool negative;
    te_num *size = &out->sizes[out->ndim++];
    TE_TRY(te__dim_eval(&entry->shape.dims[i], s->arith, s->values, size));
    TE_TRY(s->arith->negative(s->arith->user, *size, &negative));
    if (!negative) continue;
    char number[NUM_TEXT];
    s->arith->print(s->arith->user, *size, number, sizeof number);
    return te__fail(s->status, "%s: %s[%d] would be %s: must not be negative", op->full_name, entry->name,
                    (int)out->ndim - 1, number);
  }
  return TE_OK;
}

/* Slots without leading dims (weights) define the sizes, so that an error blames the activation; what belongs
 * to a tensor follows it. */
static int binding_order(const te_entry *entry) {
  return entry->part_of >= 0 ? 2 : entry->shape.spread >= 0 ? 1 : 0;
}

static int infer(const te_op *op, const te_arith *arith, const te_desc *inputs, te_out_desc *outputs,
                 te_status *status) {
  infer_state s = {.op = op, .arith = arith, .inputs = inputs, .status = status};
  int first = -1;
  for (int e = 0; e < op->n_inputs; e++) {
    const te_entry *entry = &op->entries[e];
    if (entry->kind == TE_KIND_BITS)
      TE_REQUIRE(status, inputs[e].scalar >> entry->n_flags == 0,
                 "%s: %s = %lld: has bits beyond its %d flags", op->full_name, entry->name,
                 (long long)inputs[e].scalar, (int)entry->n_flags);
    if (entry->kind != TE_KIND_TENSOR) continue;
    TE_TRY(check_presence(&s, e));
    if (!inputs[e].present) continue;
    if (first < 0) first = e;
    TE_TRY(check_dtype(&s, e));
    TE_TRY(check_device(&s, e, first));
    TE_TRY(check_rank(&s, e));
    if (entry->shape.spread >= 0) TE_TRY(bind_spread(&s, e));
  }
  for (int order = 0; order < 3; order++)
    for (int e = 0; e < op->n_inputs; e++)
      if (op->entries[e].kind == TE_KIND_TENSOR && inputs[e].present &&
          binding_order(&op->entries[e]) == order)
        bind_symbols(&s, e);
  for (int e = 0; e < op->n_inputs; e++)
    if (op->entries[e].kind == TE_KIND_TENSOR && inputs[e].present) TE_TRY(check_dims(&s, e));
  for (int o = 0; o < op->n_outputs; o++) TE_TRY(infer_output(&s, op->n_inputs + o, &outputs[o]));
  return TE_OK;
}

int te__infer(const te_op *op, const te_arith *arith, const te_desc *inputs, te_out_desc *outputs,
              te_status *status) {
  int rc = infer(op, arith, inputs, outputs, status);
  if (rc != TE_OK)
    te__name_failure(status, op->full_name); /* the arithmetic does not know for whom it computes */
  return rc;
}
