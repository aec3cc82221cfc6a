/* The boxed entry: one function through which every call of every operator goes. */
#ifndef TE_DISPATCH_H
#define TE_DISPATCH_H

#include "te_spec.h"

void te__dispatch(const te_op *op, uint64_t *stack, uint64_t n_args, uint64_t n_outputs);

#endif
