/* What linear layers share on the CPU. */
#ifndef TE_LINEAR_CPU_H
#define TE_LINEAR_CPU_H

#include "convert_cpu.h"

/* out = a b (+ bias) by PyTorch's GEMM; all of one dtype. */
int te__cpu_product(const te_context *ctx, te_matrix a, te_matrix b, const te_tensor *bias, te_matrix out);

/* Every row of `out`, which is contiguous, becomes `row`, or zero if that is NULL. */
void te__cpu_fill_rows(te_matrix out, const void *row);

/* The sums over rows, formed in double and rounded once: the reference that the CUDA sum in fp32 is held to.
 */
int te__cpu_column_sums(const te_context *ctx, te_matrix m, void *sums);

#endif
