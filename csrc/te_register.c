/* Walks a table and registers its operators with torch.library. No per-operator code. */
#include "te_register.h"

#include "te_dispatch.h"
#include "te_torch.h"

#include <stdlib.h>
#include <string.h>

/* libtorch calls a kernel without telling it which operator it is, so each operator has its own entry. */
#define MAX_OPS 256

static te_op *ops[MAX_OPS];
static int n_ops;

int te__op_count(void) { return n_ops; }
const te_op *te__op(int index) { return ops[index]; }

/* clang-format off */
#define ENTRY(i)                                                                                          \
  static void entry_##i(StableIValue *stack, uint64_t n_args, uint64_t n_outputs) {                       \
    te__dispatch(ops[0x##i], stack, n_args, n_outputs);                                                   \
  }
#define NAME(i) entry_##i,
#define ROW(X, h)                                                                                         \
  X(h##0) X(h##1) X(h##2) X(h##3) X(h##4) X(h##5) X(h##6) X(h##7)                                         \
  X(h##8) X(h##9) X(h##a) X(h##b) X(h##c) X(h##d) X(h##e) X(h##f)
#define ALL(X)                                                                                            \
  ROW(X, 0) ROW(X, 1) ROW(X, 2) ROW(X, 3) ROW(X, 4) ROW(X, 5) ROW(X, 6) ROW(X, 7)                         \
  ROW(X, 8) ROW(X, 9) ROW(X, a) ROW(X, b) ROW(X, c) ROW(X, d) ROW(X, e) ROW(X, f)
/* clang-format on */
ALL(ENTRY)
static te_boxed_fn *const entries[MAX_OPS] = {ALL(NAME)};

/* CPU and CUDA have bodies. The others are registered so that a sparse or nested tensor gets our error
 * (which names the slot and the rule) instead of the dispatcher's. */
static const char *const dispatch_keys[] = {
    "CPU",           "CUDA",      "SparseCPU",       "SparseCUDA",       "SparseCsrCPU",
    "SparseCsrCUDA", "MkldnnCPU", "NestedTensorCPU", "NestedTensorCUDA", "AutogradNestedTensor"};
#define N_KEYS ((int)(sizeof dispatch_keys / sizeof *dispatch_keys))

static int register_ops(const char *ns, int first, int count, te_status *status) {
  /* Deleting a library handle deregisters what it defined: on success the handles are kept for good. */
  TorchLibraryHandle libraries[1 + N_KEYS] = {NULL};
  TE_TORCH_TRY(status, aoti_torch_library_init_fragment, ns, __FILE__, __LINE__, &libraries[0]);
  int rc = TE_OK;
  for (int i = first; i < first + count && rc == TE_OK; i++) {
    char schema[TE_SCHEMA_SIZE];
    rc = te__schema(ops[i], schema, sizeof schema, status);
    if (rc == TE_OK && te__torch.aoti_torch_library_def(libraries[0], schema) != 0)
      rc = te__fail(status, "cannot define %s: %s", schema, te__torch_last_error());
  }
  for (int k = 0; k < N_KEYS && rc == TE_OK; k++) {
    if (te__torch.aoti_torch_library_init_impl(ns, dispatch_keys[k], __FILE__, __LINE__, &libraries[1 + k]) !=
        0)
      rc = te__fail(status, "cannot open namespace %s for %s: %s", ns, dispatch_keys[k],
                    te__torch_last_error());
    for (int i = first; i < first + count && rc == TE_OK; i++)
      if (te__torch.torch_library_impl(libraries[1 + k], ops[i]->row->name, entries[i], TE_TORCH_ABI) != 0)
        rc = te__fail(status, "cannot implement %s: %s", ops[i]->full_name, te__torch_last_error());
  }
  if (rc != TE_OK)
    for (int k = N_KEYS; k >= 0; k--)
      if (libraries[k]) te__torch.aoti_torch_delete_library_object(libraries[k]);
  return rc;
}

int te_register_table(const char *ns, const te_format_row *formats, const te_op_row *rows,
                      te_status *status) {
  int first = n_ops, added = 0, rc = TE_OK;
  for (const te_op_row *row = rows; row->name && rc == TE_OK; row++) {
    te_op *op = first + added < MAX_OPS ? malloc(sizeof *op) : NULL;
    if (!op) {
      rc =
          te__fail(status, "%s::%s: no room: at most %d operators can be registered", ns, row->name, MAX_OPS);
      break;
    }
    ops[first + added++] = op;
    rc = te__parse_op(ns, formats, row, op, status);
  }
  if (rc == TE_OK) rc = register_ops(ns, first, added, status);
  if (rc == TE_OK) {
    n_ops += added;
    return TE_OK;
  }
  for (int i = first; i < first + added; i++) free(ops[i]), ops[i] = NULL;
  return rc;
}
