#include "te_status.h"

#include <stdarg.h>
#include <stdio.h>

int te__fail(te_status *status, const char *format, ...) {
  if (status->code != TE_OK) return TE_ERROR;
  va_list args;
  va_start(args, format);
  vsnprintf(status->message, sizeof status->message, format, args);
  va_end(args);
  status->code = TE_ERROR;
  return TE_ERROR;
}
