/* cuBLASLt and cuBLAS, looked up at first use in what torch has already loaded. */
#include "te_cuda.h"

#include "../te_torch.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define MAX_DEVICES 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static te_cublas library;
static bool library_ready;
static cublasLtHandle_t handles[MAX_DEVICES];

static void *open_loaded(const char *soname) {
  void *found = dlopen(soname, RTLD_NOLOAD | RTLD_LAZY);
  return found ? found : dlopen(soname, RTLD_LAZY);
}

static int open_library(const char *stem, void **out, te_status *status) {
  char soname[64];
  /* The structures and enums compiled in are those of the toolkit's major version. */
  snprintf(soname, sizeof soname, "lib%s.so.%d", stem, CUBLAS_VER_MAJOR);
  *out = open_loaded(soname);
  TE_REQUIRE(
      status, *out,
      "%s was not found: neither torch has loaded it nor is it on the library path. This te_ops was built "
      "for CUDA %d: use a torch for CUDA %d (pip install torch brings nvidia-cublas with it), or rebuild "
      "te_ops "
      "with the nvcc of torch's CUDA version",
      soname, CUBLAS_VER_MAJOR, CUBLAS_VER_MAJOR);
  return TE_OK;
}

static int look_up(void *from, const char *library_name, const char *name, void *slot, te_status *status) {
  void *symbol = dlsym(from, name);
  TE_REQUIRE(status, symbol, "%s has no %s: it is older than te_ops needs; upgrade nvidia-cublas",
             library_name, name);
  memcpy(slot, &symbol, sizeof symbol);
  return TE_OK;
}

static int load(te_status *status) {
  void *lt, *blas;
  TE_TRY(open_library("cublasLt", &lt, status));
  TE_TRY(open_library("cublas", &blas, status));
#define TE_X(name) TE_TRY(look_up(lt, "libcublasLt", #name, &library.name, status));
  TE_CUBLASLT_FUNCTIONS(TE_X)
#undef TE_X
  TE_TRY(look_up(blas, "libcublas", "cublasGetMathMode", &library.cublasGetMathMode, status));
  __atomic_store_n(&library_ready, true, __ATOMIC_RELEASE);
  return TE_OK;
}

int te__cublas(const te_cublas **out, te_status *status) {
  int rc = TE_OK;
  *out = &library;
  if (__atomic_load_n(&library_ready, __ATOMIC_ACQUIRE)) return TE_OK;
  pthread_mutex_lock(&lock);
  if (!library_ready) rc = load(status);
  pthread_mutex_unlock(&lock);
  return rc;
}

int te__cublaslt_version(size_t *version, te_status *status) {
  const te_cublas *lib;
  TE_TRY(te__cublas(&lib, status));
  *version = lib->cublasLtGetVersion();
  return TE_OK;
}

static int create_handle(const te_context *ctx, const te_cublas *lib) {
  /* Creation may allocate, which a stream capture in this thread would refuse. */
  enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  TE_CUDA_TRY(ctx, cudaThreadExchangeStreamCaptureMode(&mode));
  cublasLtHandle_t handle = NULL;
  cublasStatus_t status = lib->cublasLtCreate(&handle);
  TE_CUDA_TRY(ctx, cudaThreadExchangeStreamCaptureMode(&mode));
  TE_REQUIRE(ctx->status, status == CUBLAS_STATUS_SUCCESS, "%s: cublasLtCreate failed on cuda:%d: %s",
             ctx->op, (int)ctx->device_index, lib->cublasLtGetStatusName(status));
  __atomic_store_n(&handles[ctx->device_index], handle,
                   __ATOMIC_RELEASE); /* others read it without the lock */
  return TE_OK;
}

int te__cublaslt_handle(const te_context *ctx, const te_cublas *lib, cublasLtHandle_t *out) {
  int rc = TE_OK;
  TE_REQUIRE(ctx->status, ctx->device_index >= 0 && ctx->device_index < MAX_DEVICES,
             "%s: cuda:%d: at most %d devices", ctx->op, (int)ctx->device_index, MAX_DEVICES);
  *out = __atomic_load_n(&handles[ctx->device_index], __ATOMIC_ACQUIRE);
  if (*out) return TE_OK;
  pthread_mutex_lock(&lock);
  if (!handles[ctx->device_index]) rc = create_handle(ctx, lib);
  *out = handles[ctx->device_index];
  pthread_mutex_unlock(&lock);
  return rc;
}

/* PyTorch keeps the math mode of its cuBLAS handle in step with its TF32 settings. */
int te__allows_tf32(const te_context *ctx, const te_cublas *lib, bool *out) {
  void *handle;
  cublasMath_t mode;
  TE_TORCH_TRY(ctx->status, torch_get_current_cuda_blas_handle, &handle);
  cublasStatus_t status = lib->cublasGetMathMode(handle, &mode);
  TE_REQUIRE(ctx->status, status == CUBLAS_STATUS_SUCCESS, "%s: cublasGetMathMode failed: %s", ctx->op,
             lib->cublasLtGetStatusName(status));
  *out = (mode & CUBLAS_TF32_TENSOR_OP_MATH) == CUBLAS_TF32_TENSOR_OP_MATH;
  return TE_OK;
}
