/* The recursive-descent parser of rows: tokens and dims (te_parse.c), slots and whole rows (te_slots.c). */
#ifndef TE_PARSE_H
#define TE_PARSE_H

#include "te_spec.h"

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

#define FAIL_AT(p, where, ...) return te__parse_fail(p, where, __VA_ARGS__)

/* `format` has one %s, for `detail`. */
int te__parse_fail(parser *p, const char *where, const char *format, const char *detail);

void te__skip_space(parser *p);
bool te__take(parser *p, char c);
bool te__take_name(parser *p, char *name); /* TE_NAME_SIZE bytes */
bool te__take_word(parser *p, const char *word);
int te__check_name_lengths(parser *p);

int te__parse_shape(parser *p, te_shape *shape);

/* The dims of a format's buffer in the symbols of the operator, for a slot of shape `slot`. */
int te__format_shape(parser *p, const te_shape *buffer, const te_shape *slot, te_shape *out);

#endif
