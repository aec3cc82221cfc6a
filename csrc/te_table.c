#include "te_table.h"

/* The rows alone are needed by the build's check (te_check.c), which links no bodies. */
#if defined(TE_ROWS_ONLY)
#define CPU_BODY(name) NULL
#define CUDA_BODY(name) NULL
#else
#define CPU_BODY(name) te__##name##_cpu
#if defined(TE_WITH_CUDA)
#define CUDA_BODY(name) te__##name##_cuda
#else
#define CUDA_BODY(name) NULL
#endif
#endif

#define TE_BUFFER(name, type) {#name, type},
#define TE_FORMAT(name, doc, ...) {#name, doc, (const te_buffer_row[]){__VA_ARGS__{NULL, NULL}}},
const te_format_row te__formats[] = {
#include "te_ops.def"
    {NULL, NULL, NULL}};

#define TE_IN(name, type) {false, #name, type},
#define TE_OUT(name, type) {true, #name, type},
#define TE_OP(name, doc, ...) \
  {#name, doc, (const te_slot_row[]){__VA_ARGS__{false, NULL, NULL}}, CPU_BODY(name), CUDA_BODY(name)},
const te_op_row te__ops[] = {
#include "te_ops.def"
    {NULL, NULL, NULL, NULL, NULL}};
