/* Names and sizes of dtypes. */
#include "te_spec.h"

#include <string.h>

static const struct {
  const char *id, *name;
  size_t size;
} dtype_rows[] = {
#define TE_X(id, name, size, getter) {#id, name, size},
    TE_DTYPES(TE_X)
#undef TE_X
        {"?", "a dtype that te_ops does not know", 0}};

const char *te__dtype_name(te_dtype dtype) { return dtype_rows[dtype].name; }
const char *te__dtype_id(te_dtype dtype) { return dtype_rows[dtype].id; }
size_t te__dtype_size(te_dtype dtype) { return dtype_rows[dtype].size; }

te_dtype te__dtype_from_name(const char *name) {
  for (int i = 0; i < TE_DTYPE_COUNT; i++)
    if (strcmp(dtype_rows[i].name, name) == 0) return (te_dtype)i;
  return TE_DTYPE_OTHER;
}
