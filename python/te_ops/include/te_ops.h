/* te_ops' public C interface: the rows that describe operators and formats, and what a body receives.
 *
 * A row is text (see docs/architecture.md for its grammar). te_register_table() parses rows, registers
 * the operators with torch.library and runs `body` for each call after it has checked the arguments and
 * allocated the outputs. Bodies know pointers, sizes and a stream; they know neither PyTorch nor Python.
 * te_ops registers its own operators through exactly this interface. */
#ifndef TE_OPS_H
#define TE_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TE_API __attribute__((visibility("default")))
#define TE_MESSAGE_SIZE 1024

/* X(id, PyTorch's name, bytes per element, libtorch's getter of its code). Dtypes that no slot may take
 * are listed too, so that an error can name what was passed. */
#define TE_DTYPES(X) \
  X(bf16, "bfloat16", 2, aoti_torch_dtype_bfloat16) \
  X(f16, "float16", 2, aoti_torch_dtype_float16) \
  X(f32, "float32", 4, aoti_torch_dtype_float32) \
  X(f64, "float64", 8, aoti_torch_dtype_float64) \
  X(e4m3, "float8_e4m3fn", 1, aoti_torch_dtype_float8_e4m3fn) \
  X(e5m2, "float8_e5m2", 1, aoti_torch_dtype_float8_e5m2) \
  X(e8m0, "float8_e8m0fnu", 1, torch_dtype_float8_e8m0fnu) \
  X(e2m1x2, "float4_e2m1fn_x2", 1, torch_dtype_float4_e2m1fn_x2) \
  X(u8, "uint8", 1, aoti_torch_dtype_uint8) \
  X(i8, "int8", 1, aoti_torch_dtype_int8) \
  X(i16, "int16", 2, aoti_torch_dtype_int16) \
  X(i32, "int32", 4, aoti_torch_dtype_int32) \
  X(i64, "int64", 8, aoti_torch_dtype_int64) \
  X(b8, "bool", 1, aoti_torch_dtype_bool) \
  X(c32, "complex32", 4, aoti_torch_dtype_complex32) \
  X(c64, "complex64", 8, aoti_torch_dtype_complex64) \
  X(c128, "complex128", 16, aoti_torch_dtype_complex128)

typedef enum te_dtype {
#define TE_X(id, name, size, getter) TE_##id,
  TE_DTYPES(TE_X)
#undef TE_X
      TE_DTYPE_COUNT,
  TE_DTYPE_OTHER = TE_DTYPE_COUNT /* a dtype of PyTorch's that the list above does not have */
} te_dtype;

enum { TE_OK = 0, TE_ERROR = 1 };

/* The first failure of a call. Whoever detects it writes the message; everybody else returns the code. */
typedef struct te_status {
  int code;
  char message[TE_MESSAGE_SIZE];
} te_status;

typedef struct te_tensor {
  void *data;
  const int64_t *sizes;
  const int64_t *strides; /* in elements */
  int32_t ndim;
  te_dtype dtype;
} te_tensor;

/* One slot as a body sees it. `buf` are the buffers of the slot's format, in the order of the format's
 * row; a plain dtype has one. An absent tensor has present == false and buf[0].data == NULL. */
typedef struct te_arg {
  bool present;
  const te_tensor *buf;
  int64_t i; /* int, bool and bits slots */
  double f;  /* float slots */
} te_arg;

typedef struct te_context te_context;

/* What the host does for a body. Memory comes from PyTorch's allocators and lives until the call ends. */
typedef struct te_services {
  int (*fail)(te_status *status, const char *format, ...) __attribute__((format(printf, 2, 3)));
  int (*workspace)(const te_context *ctx, size_t bytes, void **out);
  /* Gives a workspace back before the call ends; work already enqueued may still use it. */
  void (*release)(const te_context *ctx, void *memory);
  int (*parallel_for)(const te_context *ctx, int64_t n, int64_t grain,
                      void (*range)(int64_t begin, int64_t end, void *user), void *user);
  /* CPU only: out = a b (+ bias), 2-D operands of one dtype with any strides, by PyTorch's own GEMM. */
  int (*matmul)(const te_context *ctx, const te_tensor *a, const te_tensor *b, const te_tensor *bias,
                const te_tensor *out);
} te_services;

struct te_context {
  te_status *status;
  const te_services *services;
  const char *op;       /* "te_ops::linear_fwd", for messages */
  void *stream;         /* cudaStream_t on CUDA, NULL on CPU */
  int32_t device_index; /* the current device while a body runs */
  void *frame;          /* the host's own */
};

/* `args` has the inputs, then the outputs, in the order of the row. Returns TE_OK or the code of a
 * failure reported through services->fail. Must not synchronise with the device. */
typedef int (*te_body)(const te_context *ctx, const te_arg *args);

typedef struct te_slot_row {
  bool is_output;
  const char *name;
  const char *type;
} te_slot_row;

typedef struct te_op_row {
  const char *name;
  const char *doc;
  const te_slot_row *slots; /* ends with a NULL name */
  te_body cpu;
  te_body cuda; /* NULL: none in this build */
} te_op_row;

typedef struct te_buffer_row {
  const char *name;
  const char *type; /* dims over M (all leading dims) and K (the last one) of the logical tensor */
} te_buffer_row;

typedef struct te_format_row {
  const char *name;
  const char *doc;
  const te_buffer_row *buffers; /* ends with a NULL name */
} te_format_row;

/* Registers the operators of `ops` in the torch.library namespace `ns`. Rows end with a NULL name and
 * must outlive the process' use of them; `formats` may be NULL. On a failure nothing is registered.
 * Call with the GIL held; then te_ops.load_table(ns) gives the operators their fakes. */
TE_API int te_register_table(const char *ns, const te_format_row *formats, const te_op_row *ops,
                             te_status *status);

#ifdef __cplusplus
}
#endif
#endif
