/* Registered operators: parsed specs, kept for the life of the process. */
#ifndef TE_REGISTER_H
#define TE_REGISTER_H

#include "te_spec.h"

/* Operators get consecutive indices as they are registered, te_ops' own first. */
int te__op_count(void);
const te_op *te__op(int index);

#endif
