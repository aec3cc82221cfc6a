/* The only door to PyTorch: our declarations of the libtorch C functions that te_ops uses.
 *
 * libtorch's own shim headers are not valid C, so the functions are listed here, and
 * tests/contract/test_headers.py compiles the list against the installed torch's headers: any mismatch
 * is a compile error. They are looked up at import in the libraries that torch has loaded, so building
 * needs no torch and one binary serves every version from 2.11 on. */
#ifndef TE_TORCH_H
#define TE_TORCH_H

#include "te_status.h"

#ifndef TE_TORCH_TYPES_DECLARED /* the header check brings torch's own */
typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef struct CUDAGuardOpaque *CUDAGuardHandle;
typedef int32_t AOTITorchError;
typedef uint64_t StableIValue;
#endif
typedef void te_boxed_fn(StableIValue *, uint64_t, uint64_t);
typedef void te_range_fn(int64_t, int64_t, void *);

/* The version whose encodings of values this code is written to. */
#define TE_TORCH_ABI ((UINT64_C(2) << 56) | (UINT64_C(11) << 48))

/* X(return type, name, parameters), from libtorch_cpu. */
#define TE_TORCH_FUNCTIONS(X) \
  X(AOTITorchError, aoti_torch_library_init_fragment, \
    (const char *, const char *, uint32_t, TorchLibraryHandle *)) \
  X(AOTITorchError, aoti_torch_library_init_impl, \
    (const char *, const char *, const char *, uint32_t, TorchLibraryHandle *)) \
  X(AOTITorchError, aoti_torch_library_def, (TorchLibraryHandle, const char *)) \
  X(AOTITorchError, aoti_torch_delete_library_object, (TorchLibraryHandle)) \
  X(AOTITorchError, torch_library_impl, (TorchLibraryHandle, const char *, te_boxed_fn *, uint64_t)) \
  X(AOTITorchError, torch_call_dispatcher, (const char *, const char *, StableIValue *, uint64_t)) \
  X(AOTITorchError, aoti_torch_delete_tensor_object, (AtenTensorHandle)) \
  X(AOTITorchError, aoti_torch_get_dim, (AtenTensorHandle, int64_t *)) \
  X(AOTITorchError, aoti_torch_get_sizes, (AtenTensorHandle, int64_t **)) \
  X(AOTITorchError, aoti_torch_get_strides, (AtenTensorHandle, int64_t **)) \
  X(AOTITorchError, aoti_torch_get_dtype, (AtenTensorHandle, int32_t *)) \
  X(AOTITorchError, aoti_torch_get_layout, (AtenTensorHandle, int32_t *)) \
  X(AOTITorchError, aoti_torch_get_device_type, (AtenTensorHandle, int32_t *)) \
  X(AOTITorchError, aoti_torch_get_device_index, (AtenTensorHandle, int32_t *)) \
  X(AOTITorchError, torch_get_mutable_data_ptr, (AtenTensorHandle, void **)) \
  X(AOTITorchError, torch_get_const_data_ptr, (AtenTensorHandle, const void **)) \
  X(AOTITorchError, aoti_torch_empty_strided, \
    (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, AtenTensorHandle *)) \
  X(AOTITorchError, aoti_torch_create_tensor_from_blob, \
    (void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, \
     AtenTensorHandle *)) \
  X(AOTITorchError, aoti_torch_copy_, (AtenTensorHandle, AtenTensorHandle, int32_t)) \
  X(AOTITorchError, torch_parallel_for, (int64_t, int64_t, int64_t, te_range_fn *, void *)) \
  X(void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *)) \
  X(int32_t, aoti_torch_layout_strided, (void)) \
  X(int32_t, aoti_torch_device_type_cpu, (void)) \
  X(int32_t, aoti_torch_device_type_cuda, (void))

/* From libtorch_cuda; absent with a CPU-only torch. */
#define TE_TORCH_CUDA_FUNCTIONS(X) \
  X(AOTITorchError, aoti_torch_create_cuda_guard, (int32_t, CUDAGuardHandle *)) \
  X(AOTITorchError, aoti_torch_delete_cuda_guard, (CUDAGuardHandle)) \
  X(AOTITorchError, aoti_torch_get_current_cuda_stream, (int32_t, void **)) \
  X(AOTITorchError, aoti_torch_cuda_caching_allocator_raw_alloc, (uint64_t, void **)) \
  X(AOTITorchError, aoti_torch_cuda_caching_allocator_raw_delete, (void *)) \
  X(AOTITorchError, torch_get_current_cuda_blas_handle, (void **))

/* Newer than the oldest supported torch; used where present. */
#define TE_TORCH_OPTIONAL_FUNCTIONS(X) \
  X(const char *, torch_exception_get_what_without_backtrace, (void)) \
  X(AOTITorchError, torch_new_stable_ivalue, (StableIValue **)) \
  X(AOTITorchError, torch_delete_stable_ivalue, (StableIValue *))

#ifndef TE_TORCH_TYPES_DECLARED
typedef struct te_torch_api {
#define TE_X(ret, name, params) ret(*name) params;
  TE_TORCH_FUNCTIONS(TE_X)
  TE_TORCH_CUDA_FUNCTIONS(TE_X)
  TE_TORCH_OPTIONAL_FUNCTIONS(TE_X)
#undef TE_X
  int32_t dtype_code[TE_DTYPE_COUNT]; /* libtorch's codes; -1 where it has no such dtype */
  bool has_cuda;                      /* libtorch_cuda is loaded and complete */
} te_torch_api;

extern te_torch_api te__torch;

/* Looks everything up; needs `import torch` to have happened. */
int te__torch_load(te_status *status);

/* Throws status->message as a RuntimeError through this frame and the caller's boxed entry. */
void te__torch_raise(const te_status *status);

te_dtype te__torch_dtype(int32_t code);

/* A Tensor? argument arrives as a heap cell that holds the handle and is ours to free. */
AtenTensorHandle te__torch_take_optional(StableIValue value);
int te__torch_make_optional(AtenTensorHandle tensor, StableIValue *out, te_status *status);

/* The message of the shim's last failure where libtorch gives it, else a hint to look at stderr. */
const char *te__torch_last_error(void);

#define TE_TORCH_TRY(status, name, ...) \
  do { \
    if (te__torch.name(__VA_ARGS__) != 0) \
      return te__fail(status, "%s failed: %s", #name, te__torch_last_error()); \
  } while (0)
#endif

#endif
