/* Failures: every C function that can fail returns TE_OK or TE_ERROR and writes the message once. */
#ifndef TE_STATUS_H
#define TE_STATUS_H

#include "te_ops.h"

/* Records the message unless one is recorded already (the first failure is the cause). Returns TE_ERROR. */
int te__fail(te_status *status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Puts "<name>: " in front of a message that does not begin with it. */
void te__name_failure(te_status *status, const char *name);

#define TE_TRY(call) \
  do { \
    int te_rc_ = (call); \
    if (te_rc_ != TE_OK) return te_rc_; \
  } while (0)

#define TE_REQUIRE(status, condition, ...) \
  do { \
    if (!(condition)) return te__fail(status, __VA_ARGS__); \
  } while (0)

#endif
