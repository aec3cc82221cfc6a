/* Parsed rows: an operator as a list of flat entries, which are what crosses the dispatcher.
 * A tensor slot whose format has several buffers contributes one entry a buffer. */
#ifndef TE_SPEC_H
#define TE_SPEC_H

#include "te_dims.h"

#define TE_MAX_ENTRIES 40
#define TE_MAX_SLOTS 32
#define TE_MAX_BUFFERS 8
#define TE_MAX_FLAGS 16
#define TE_MAX_NDIM 64 /* PyTorch's own limit */
#define TE_NAME_SIZE 48
#define TE_SCHEMA_SIZE 2048

typedef enum te_kind { TE_KIND_TENSOR, TE_KIND_INT, TE_KIND_FLOAT, TE_KIND_BOOL, TE_KIND_BITS } te_kind;

/* A flag that decides whether an entry is present (or which dtype it has): bit `bit` of the bits entry, or
 * the value of the bool or int entry. */
typedef struct te_condition {
  int32_t entry; /* -1: always present */
  int32_t bit;   /* -1: the entry is a bool or an int */
} te_condition;

typedef struct te_entry {
  te_kind kind;
  int32_t slot;   /* index among the row's slots */
  int32_t buffer; /* index among the format's buffers */
  char name[TE_NAME_SIZE];
  bool is_optional; /* may be absent at the caller's will ("?") */
  bool is_mutable;
  bool is_strided;
  te_condition condition;
  uint32_t dtypes; /* bit set of te_dtype; 0 when `like` decides */
  int32_t like;    /* entry whose dtype this one has, or -1 */
  te_condition by; /* of an output with several dtypes: the flag or int that picks one, in te_dtype's order */
  /* A slot that takes a plain tensor or a quantized one: its first entry gets the plain tensor too, the
   * others are present only if that one has one of `quantized_dtypes`. */
  uint32_t quantized_dtypes;
  int32_t part_of;    /* that first entry, or -1 */
  bool may_lack;      /* a buffer that a quantized tensor need not have */
  int32_t same_dtype; /* entry of the same slot that, if present, has the same dtype; or -1 */
  te_shape shape;
  bool has_default;
  double default_value;
  int32_t n_flags;
  char flags[TE_MAX_FLAGS][TE_NAME_SIZE];
} te_entry;

typedef struct te_op {
  const te_op_row *row;
  char full_name[2 * TE_NAME_SIZE]; /* "te_ops::linear_fwd" */
  int32_t n_slots;
  int32_t n_inputs; /* entries 0..n_inputs-1 are inputs, then come the outputs */
  int32_t n_outputs;
  bool is_mutating;
  int32_t n_symbols;
  char symbols[TE_MAX_SYMBOLS][TE_NAME_SIZE];
  te_entry entries[TE_MAX_ENTRIES];
} te_op;

const char *te__dtype_name(te_dtype dtype);     /* PyTorch's: "bfloat16" */
const char *te__dtype_id(te_dtype dtype);       /* the table's: "bf16" */
size_t te__dtype_size(te_dtype dtype);          /* bytes */
te_dtype te__dtype_from_name(const char *name); /* PyTorch's name; TE_DTYPE_OTHER if unknown */

static inline bool te__entry_can_be_absent(const te_entry *entry) {
  return entry->is_optional || entry->condition.entry >= 0;
}

/* Parses one row. `formats` (may be NULL) ends with a NULL name. A malformed row fails with
 * "row <op>.<slot>, column <c>: <reason>". */
int te__parse_op(const char *ns, const te_format_row *formats, const te_op_row *row, te_op *op,
                 te_status *status);

/* Writes the torch.library schema, e.g. "linear_fwd(Tensor x, Tensor w, Tensor? b) -> Tensor". */
int te__schema(const te_op *op, char *text, size_t size, te_status *status);

/* ------------------------------------------------------------------ checking and inference ---------- */

/* An argument as inference sees it: a description, never data. */
typedef struct te_desc {
  bool present;
  te_dtype dtype;
  int32_t ndim;
  const te_num *sizes;
  int32_t device_type; /* compared with each other only */
  int32_t device_index;
  int64_t scalar; /* int, bool, bits */
} te_desc;

typedef struct te_out_desc {
  bool present;
  te_dtype dtype;
  int32_t ndim;
  te_num sizes[TE_MAX_NDIM];
} te_out_desc;

/* Checks the inputs against the row and describes the outputs: presence, dtype and sizes (outputs are
 * always contiguous and on the inputs' device). The one place where arguments are judged, for real calls
 * and for fakes alike. */
int te__infer(const te_op *op, const te_arith *arith, const te_desc *inputs, te_out_desc *outputs,
              te_status *status);

#endif
