/* One call, start to end: own the arguments, check them, allocate outputs, run the body, hand over the
 * results, release everything else, and only then raise. */
#include "te_dispatch.h"

#include "te_matrix.h"
#include "te_torch.h"

#include <stdlib.h>
#include <string.h>

#define MAX_WORKSPACES 16

typedef struct frame {
  const te_op *op;
  te_status status;
  te_context context;
  AtenTensorHandle tensors[TE_MAX_ENTRIES]; /* owned: inputs as they came, outputs until handed over */
  AtenTensorHandle copies[TE_MAX_ENTRIES];  /* owned: dense copies of inputs that a body cannot walk */
  te_desc descs[TE_MAX_ENTRIES];
  double floats[TE_MAX_ENTRIES];
  te_tensor buffers[TE_MAX_ENTRIES];
  te_out_desc outputs[TE_MAX_ENTRIES];
  te_arg args[TE_MAX_SLOTS];
  int32_t device_type;
  CUDAGuardHandle guard;
  void *workspaces[MAX_WORKSPACES];
  int32_t n_workspaces;
} frame;

/* ----------------------------------------------------------------------------------- services -------- */

static bool on_cuda(const frame *f) { return f->device_type == te__torch.aoti_torch_device_type_cuda(); }

static int workspace(const te_context *ctx, size_t bytes, void **out) {
  frame *f = ctx->frame;
  *out = NULL;
  if (bytes == 0) return TE_OK;
  TE_REQUIRE(&f->status, f->n_workspaces < MAX_WORKSPACES, "%s: a body asks for more than %d workspaces",
             ctx->op, MAX_WORKSPACES);
  if (on_cuda(f)) {
    TE_TORCH_TRY(&f->status, aoti_torch_cuda_caching_allocator_raw_alloc, bytes, out);
  } else {
    *out = aligned_alloc(64, (bytes + 63) / 64 * 64);
    TE_REQUIRE(&f->status, *out, "%s: no memory for a workspace of %zu bytes", ctx->op, bytes);
  }
  f->workspaces[f->n_workspaces++] = *out;
  return TE_OK;
}

static void free_workspace(const frame *f, void *memory) {
  if (on_cuda(f))
    te__torch.aoti_torch_cuda_caching_allocator_raw_delete(memory);
  else
    free(memory);
}

static void release_workspace(const te_context *ctx, void *memory) {
  frame *f = ctx->frame;
  for (int i = 0; memory && i < f->n_workspaces; i++) {
    if (f->workspaces[i] != memory) continue;
    f->workspaces[i] = f->workspaces[--f->n_workspaces];
    free_workspace(f, memory);
    return;
  }
}

static int parallel_for(const te_context *ctx, int64_t n, int64_t grain,
                        void (*range)(int64_t, int64_t, void *), void *user) {
  TE_TORCH_TRY(ctx->status, torch_parallel_for, 0, n, grain, range, user);
  return TE_OK;
}

/* A tensor over borrowed memory: no autograd history, so PyTorch's out= variants accept it. */
static int borrow(const frame *f, const te_tensor *t, bool transposed, AtenTensorHandle *out) {
  int64_t sizes[TE_MAX_NDIM], strides[TE_MAX_NDIM];
  for (int i = 0; i < t->ndim; i++) {
    int from = transposed ? t->ndim - 1 - i : i;
    sizes[i] = t->sizes[from];
    strides[i] = t->strides[from];
  }
  TE_TORCH_TRY(f->context.status, aoti_torch_create_tensor_from_blob, t->data, t->ndim, sizes, strides, 0,
               te__torch.dtype_code[t->dtype], f->device_type, f->context.device_index, out);
  return TE_OK;
}

static int matmul(const te_context *ctx, const te_tensor *a, const te_tensor *b, const te_tensor *bias,
                  const te_tensor *out) {
  const frame *f = ctx->frame;
  AtenTensorHandle handles[4] = {NULL}; /* a, b, bias, out */
  StableIValue stack[4] = {0};
  /* aten::linear.out adds the bias inside the GEMM, and takes the right operand transposed. */
  int rc = borrow(f, a, false, &handles[0]);
  if (rc == TE_OK) rc = borrow(f, b, bias != NULL, &handles[1]);
  if (rc == TE_OK && bias) rc = borrow(f, bias, false, &handles[2]);
  if (rc == TE_OK) rc = borrow(f, out, false, &handles[3]);
  int n = 0;
  stack[n++] = (StableIValue)(uintptr_t)handles[0];
  stack[n++] = (StableIValue)(uintptr_t)handles[1];
  if (rc == TE_OK && bias) rc = te__torch_make_optional(handles[2], &stack[n++], ctx->status);
  stack[n] = (StableIValue)(uintptr_t)handles[3];
  if (rc != TE_OK) {
    for (int i = 0; i < 4; i++)
      if (handles[i]) te__torch.aoti_torch_delete_tensor_object(handles[i]);
    return rc;
  }
  /* The call takes over the arguments and returns a new handle of `out`. */
  if (te__torch.torch_call_dispatcher(bias ? "aten::linear" : "aten::mm", "out", stack, TE_TORCH_ABI) != 0)
    return te__fail(ctx->status, "%s: PyTorch's CPU matrix product failed: %s", ctx->op,
                    te__torch_last_error());
  te__torch.aoti_torch_delete_tensor_object((AtenTensorHandle)(uintptr_t)stack[0]);
  return TE_OK;
}

static const te_services services = {te__fail, workspace, release_workspace, parallel_for, matmul};

/* ---------------------------------------------------------------------------------- arguments -------- */

/* Arguments that are not consumed leak, so all are owned before anything can fail. */
static void own_arguments(frame *f, const StableIValue *stack) {
  for (int e = 0; e < f->op->n_inputs; e++) {
    const te_entry *entry = &f->op->entries[e];
    switch (entry->kind) {
    case TE_KIND_TENSOR:
      f->tensors[e] = te__entry_can_be_absent(entry) ? te__torch_take_optional(stack[e])
                                                     : (AtenTensorHandle)(uintptr_t)stack[e];
      break;
    case TE_KIND_FLOAT:
      memcpy(&f->floats[e], &stack[e], sizeof(double));
      break;
    case TE_KIND_BOOL: /* only the lowest byte is defined */
      f->descs[e].scalar = (stack[e] & 0xff) != 0;
      break;
    default:
      f->descs[e].scalar = (int64_t)stack[e];
    }
  }
}

static int describe(frame *f, int e) {
  AtenTensorHandle tensor = f->tensors[e];
  te_desc *desc = &f->descs[e];
  te_tensor *buffer = &f->buffers[e];
  const char *name = f->op->entries[e].name;
  te_status *status = &f->status;
  int32_t layout, dtype;
  int64_t ndim, *sizes, *strides;
  *buffer = (te_tensor){0};
  desc->present = tensor != NULL;
  if (!tensor) return TE_OK;
  TE_TORCH_TRY(status, aoti_torch_get_layout, tensor, &layout);
  TE_REQUIRE(status, layout == te__torch.aoti_torch_layout_strided(),
             "%s: %s is a sparse (or otherwise not strided) tensor: must be dense; use .to_dense()",
             f->op->full_name, name);
  TE_TORCH_TRY(status, aoti_torch_get_dim, tensor, &ndim);
  TE_TORCH_TRY(status, aoti_torch_get_dtype, tensor, &dtype);
  TE_TORCH_TRY(status, aoti_torch_get_device_type, tensor, &desc->device_type);
  TE_TORCH_TRY(status, aoti_torch_get_device_index, tensor, &desc->device_index);
  if (te__torch.aoti_torch_get_sizes(tensor, &sizes) != 0 ||
      te__torch.aoti_torch_get_strides(tensor, &strides) != 0)
    return te__fail(status, "%s: %s is a nested tensor: must be dense; use torch.nested.to_padded_tensor",
                    f->op->full_name, name);
  desc->dtype = te__torch_dtype(dtype);
  desc->ndim = (int32_t)ndim;
  desc->sizes = (const te_num *)sizes;
  *buffer = (te_tensor){NULL, sizes, strides, (int32_t)ndim, desc->dtype};
  return TE_OK;
}

static bool is_contiguous(const te_tensor *t) {
  int64_t expected = 1;
  bool contiguous = true;
  for (int i = t->ndim - 1; i >= 0; i--) {
    if (t->sizes[i] == 0) return true;
    if (t->sizes[i] != 1 && t->strides[i] != expected) contiguous = false;
    expected *= t->sizes[i];
  }
  return contiguous;
}

static int allocate(frame *f, const int64_t *sizes, int ndim, te_dtype dtype, AtenTensorHandle *out,
                    te_tensor *view) {
  int64_t strides[TE_MAX_NDIM], step = 1;
  for (int i = ndim - 1; i >= 0; i--) {
    strides[i] = step;
    bool overflow = __builtin_mul_overflow(step, sizes[i] > 1 ? sizes[i] : 1, &step);
    TE_REQUIRE(&f->status, !overflow, "%s: a result would have more than 2^63 elements", f->op->full_name);
  }
  TE_REQUIRE(&f->status, step <= INT64_MAX / 16, "%s: a result of %lld elements is too large",
             f->op->full_name, (long long)step);
  if (te__torch.aoti_torch_empty_strided(ndim, sizes, strides, te__torch.dtype_code[dtype], f->device_type,
                                         f->context.device_index, out) != 0)
    return te__fail(&f->status, "%s: cannot allocate %lld elements of %s: %s", f->op->full_name,
                    (long long)step, te__dtype_name(dtype), te__torch_last_error());
  int64_t *own_sizes, *own_strides;
  TE_TORCH_TRY(&f->status, aoti_torch_get_sizes, *out, &own_sizes);
  TE_TORCH_TRY(&f->status, aoti_torch_get_strides, *out, &own_strides);
  *view = (te_tensor){NULL, own_sizes, own_strides, ndim, dtype};
  TE_TORCH_TRY(&f->status, torch_get_mutable_data_ptr, *out, &view->data);
  return TE_OK;
}

/* Points the entry's buffer at memory that a body can walk: the tensor's own where its strides allow it
 * (a contiguous tensor, or for a strided slot any matrix), else a copy. */
static int prepare_input(frame *f, int e) {
  const te_entry *entry = &f->op->entries[e];
  te_tensor *buffer = &f->buffers[e];
  const void *data;
  te_matrix unused;
  bool is_code = buffer->dtype < TE_DTYPE_COUNT && entry->quantized_dtypes >> buffer->dtype & 1;
  bool walkable = entry->is_strided && !is_code ? te__as_matrix(buffer, &unused) : is_contiguous(buffer);
  if (entry->is_mutable) {
    TE_REQUIRE(&f->status, walkable, "%s: %s is not contiguous: it is updated in place and must be",
               f->op->full_name, entry->name);
    TE_TORCH_TRY(&f->status, torch_get_mutable_data_ptr, f->tensors[e], &buffer->data);
    return TE_OK;
  }
  if (!walkable) {
    te_tensor copy;
    TE_TRY(allocate(f, buffer->sizes, buffer->ndim, buffer->dtype, &f->copies[e], &copy));
    TE_TORCH_TRY(&f->status, aoti_torch_copy_, f->copies[e], f->tensors[e], 1);
    *buffer = copy;
    return TE_OK;
  }
  TE_TORCH_TRY(&f->status, torch_get_const_data_ptr, f->tensors[e], &data);
  buffer->data = (void *)(uintptr_t)data;
  return TE_OK;
}

static void point_args(frame *f) {
  for (int e = f->op->n_inputs + f->op->n_outputs - 1; e >= 0; e--) { /* backwards: buf is the first buffer */
    te_arg *arg = &f->args[f->op->entries[e].slot];
    bool present = e < f->op->n_inputs ? f->descs[e].present : f->outputs[e - f->op->n_inputs].present;
    bool is_last =
        e + 1 == f->op->n_inputs + f->op->n_outputs || f->op->entries[e + 1].slot != f->op->entries[e].slot;
    arg->buf = &f->buffers[e];
    arg->present = is_last ? present : arg->present || present;
    arg->i = e < f->op->n_inputs ? f->descs[e].scalar : 0;
    arg->f = f->floats[e];
  }
}

/* ----------------------------------------------------------------------------------- the call -------- */

static int enter_device(frame *f, te_body *body) {
  const te_op *op = f->op;
  for (int e = 0; e < op->n_inputs; e++) {
    if (!f->tensors[e]) continue;
    f->device_type = f->descs[e].device_type;
    f->context.device_index = f->descs[e].device_index;
    if (f->device_type == te__torch.aoti_torch_device_type_cpu()) {
      *body = op->row->cpu;
      TE_REQUIRE(&f->status, *body, "%s: %s is on the CPU: this operator has no CPU implementation",
                 op->full_name, op->entries[e].name);
      return TE_OK;
    }
    TE_REQUIRE(&f->status, on_cuda(f), "%s: %s is on a device of type %d: must be on cpu or cuda",
               op->full_name, op->entries[e].name, (int)f->device_type);
    *body = op->row->cuda;
    TE_REQUIRE(&f->status, *body,
               "%s: %s is on cuda:%d, but this te_ops was built without CUDA code; rebuild it where "
               "nvcc >= 12.8 is found (set CUDA_HOME, or: pip install nvidia-cuda-nvcc)",
               op->full_name, op->entries[e].name, (int)f->context.device_index);
    TE_REQUIRE(&f->status, te__torch.has_cuda,
               "%s: libtorch_cuda.so is not loaded, or lacks functions of torch >= 2.11", op->full_name);
    TE_TORCH_TRY(&f->status, aoti_torch_create_cuda_guard, f->context.device_index, &f->guard);
    TE_TORCH_TRY(&f->status, aoti_torch_get_current_cuda_stream, f->context.device_index, &f->context.stream);
    return TE_OK;
  }
  return te__fail(&f->status, "%s: no tensor among the arguments", op->full_name);
}

static int run(frame *f, StableIValue *stack) {
  const te_op *op = f->op;
  te_body body = NULL;
  te_arith arith = te__int64_arith(&f->status);
  for (int e = 0; e < op->n_inputs; e++)
    if (op->entries[e].kind == TE_KIND_TENSOR) TE_TRY(describe(f, e));
  TE_TRY(te__infer(op, &arith, f->descs, f->outputs, &f->status));
  TE_TRY(enter_device(f, &body));
  for (int o = 0; o < op->n_outputs; o++) {
    static const int64_t empty[1] = {0};
    int e = op->n_inputs + o;
    te_out_desc *out = &f->outputs[o];
    f->buffers[e] = (te_tensor){0};
    if (out->present)
      TE_TRY(allocate(f, (const int64_t *)out->sizes, out->ndim, out->dtype, &f->tensors[e], &f->buffers[e]));
    else if (op->is_mutating) /* such an operator cannot return None: absent is an empty tensor */
      TE_TRY(allocate(f, empty, 1, out->dtype, &f->tensors[e], &f->buffers[e]));
  }
  for (int e = 0; e < op->n_inputs; e++)
    if (f->tensors[e]) TE_TRY(prepare_input(f, e));
  point_args(f);
  TE_TRY(body(&f->context, f->args));
  for (int o = 0; o < op->n_outputs; o++) {
    AtenTensorHandle *tensor = &f->tensors[op->n_inputs + o];
    if (op->entries[op->n_inputs + o].condition.entry >= 0 && !op->is_mutating)
      TE_TRY(te__torch_make_optional(*tensor, &stack[o], &f->status));
    else
      stack[o] = (StableIValue)(uintptr_t)*tensor;
    *tensor = NULL; /* libtorch's from here on */
  }
  return TE_OK;
}

static void release(frame *f) {
  while (f->n_workspaces > 0) free_workspace(f, f->workspaces[--f->n_workspaces]);
  for (int e = f->op->n_inputs + f->op->n_outputs - 1; e >= 0; e--) {
    if (f->copies[e]) te__torch.aoti_torch_delete_tensor_object(f->copies[e]);
    if (f->tensors[e]) te__torch.aoti_torch_delete_tensor_object(f->tensors[e]);
  }
  if (f->guard) te__torch.aoti_torch_delete_cuda_guard(f->guard);
}

void te__dispatch(const te_op *op, uint64_t *stack, uint64_t n_args, uint64_t n_outputs) {
  frame f;
  (void)n_args;
  (void)n_outputs;
  /* Clearing the whole frame would cost as much as the checks: only what is read unconditionally. */
  f.op = op;
  f.status.code = TE_OK;
  f.guard = NULL;
  f.n_workspaces = 0;
  f.device_type = 0;
  int n = op->n_inputs + op->n_outputs;
  for (int e = 0; e < n; e++)
    f.tensors[e] = f.copies[e] = NULL, f.floats[e] = 0, f.descs[e].scalar = 0, f.descs[e].present = true;
  f.context = (te_context){&f.status, &services, op->full_name, NULL, 0, &f};
  own_arguments(&f, stack);
  int rc = run(&f, stack);
  release(&f);
  if (rc != TE_OK) {
    if (f.status.code == TE_OK) te__fail(&f.status, "failed without a reason");
    te__name_failure(&f.status, op->full_name);
    te__torch_raise(&f.status);
  }
}
