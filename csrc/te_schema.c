/* The torch.library schema of an operator, from its parsed row. */
#include "te_spec.h"

#include <stdio.h>
#include <string.h>

static int append(char *text, size_t size, te_status *status, const char *a, const char *b, const char *c) {
  size_t used = strlen(text);
  int n = snprintf(text + used, size - used, "%s%s%s", a, b, c);
  TE_REQUIRE(status, n >= 0 && (size_t)n < size - used, "the schema is longer than %d bytes", (int)size);
  return TE_OK;
}

int te__schema(const te_op *op, char *text, size_t size, te_status *status) {
  char alias = 'a';
  text[0] = 0;
  TE_TRY(append(text, size, status, op->row->name, "(", ""));
  for (int i = 0; i < op->n_inputs; i++) {
    const te_entry *entry = &op->entries[i];
    char type[32], value[48] = "";
    if (entry->is_mutable && alias > 'z')
      return te__fail(status, "at most 26 tensors can be updated in place");
    if (entry->kind == TE_KIND_TENSOR && entry->is_mutable)
      snprintf(type, sizeof type, "Tensor(%c!)%s ", alias++, te__entry_can_be_absent(entry) ? "?" : "");
    else if (entry->kind == TE_KIND_TENSOR)
      snprintf(type, sizeof type, "Tensor%s ", te__entry_can_be_absent(entry) ? "?" : "");
    else
      snprintf(type, sizeof type, "%s ",
               entry->kind == TE_KIND_FLOAT  ? "float"
               : entry->kind == TE_KIND_BOOL ? "bool"
                                             : "int");
    if (entry->has_default && entry->kind == TE_KIND_BOOL)
      snprintf(value, sizeof value, "=%s", entry->default_value != 0 ? "True" : "False");
    else if (entry->has_default)
      snprintf(value, sizeof value, entry->kind == TE_KIND_INT ? "=%.0f" : "=%.17g", entry->default_value);
    TE_TRY(append(text, size, status, i ? ", " : "", type, entry->name));
    TE_TRY(append(text, size, status, value, "", ""));
  }
  TE_TRY(append(text, size, status, ") -> ", op->n_outputs == 1 ? "" : "(", ""));
  for (int i = 0; i < op->n_outputs; i++) {
    const te_entry *entry = &op->entries[op->n_inputs + i];
    /* A mutating operator cannot return Tensor? through torch.compile: there, absent is an empty tensor. */
    bool nullable = entry->condition.entry >= 0 && !op->is_mutating;
    TE_TRY(append(text, size, status, i ? ", " : "", nullable ? "Tensor?" : "Tensor", ""));
  }
  return append(text, size, status, op->n_outputs == 1 ? "" : ")", "", "");
}
