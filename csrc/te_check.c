/* The build's own check: parses every row of the table and fails the build on a malformed one. */
#include "te_spec.h"
#include "te_table.h"

#include <stdio.h>

int main(void) {
  static te_op op;
  int failures = 0;
  for (const te_op_row *row = te__ops; row->name; row++) {
    char schema[TE_SCHEMA_SIZE];
    te_status status = {0};
    if (te__parse_op("te_ops", te__formats, row, &op, &status) == TE_OK &&
        te__schema(&op, schema, sizeof schema, &status) == TE_OK)
      continue;
    fprintf(stderr, "csrc/te_ops.def: %s\n", status.message);
    failures++;
  }
  return failures ? 1 : 0;
}
