#include "te_status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int te__fail(te_status *status, const char *format, ...) {
  if (status->code != TE_OK) return TE_ERROR;
  va_list args;
  va_start(args, format);
  vsnprintf(status->message, sizeof status->message, format, args);
  va_end(args);
  status->code = TE_ERROR;
  return TE_ERROR;
}

void te__name_failure(te_status *status, const char *name) {
  size_t length = strlen(name), room = sizeof status->message - length - 2;
  if (status->code == TE_OK || strncmp(status->message, name, length) == 0) return;
  if (length + 2 >= sizeof status->message) return;
  memmove(status->message + length + 2, status->message, room);
  status->message[sizeof status->message - 1] = 0;
  memcpy(status->message, name, length);
  memcpy(status->message + length, ": ", 2);
}
