#include "te_torch.h"

#include <dlfcn.h>
#include <string.h>

te_torch_api te__torch;

#define MAX_DTYPE_CODES 128
static int8_t dtype_of_code[MAX_DTYPE_CODES];

/* C++'s operator new and delete, with which libtorch 2.11 and 2.12 make and free the cells of optionals. */
static void *(*cxx_new)(size_t);
static void (*cxx_delete)(void *);

/* ISO C has no conversion from object to function pointer; POSIX defines this one. */
static bool look_up(void *library, const char *name, void *slot) {
  void *symbol = library ? dlsym(library, name) : NULL;
  memcpy(slot, &symbol, sizeof symbol);
  return symbol != NULL;
}

static int load_dtypes(void *library) {
  memset(dtype_of_code, TE_DTYPE_OTHER, sizeof dtype_of_code);
#define TE_X(id, name, size, getter) \
  { \
    int32_t (*get)(void); \
    te__torch.dtype_code[TE_##id] = look_up(library, #getter, &get) ? get() : -1; \
    int32_t code = te__torch.dtype_code[TE_##id]; \
    if (code >= 0 && code < MAX_DTYPE_CODES) dtype_of_code[code] = TE_##id; \
  }
  TE_DTYPES(TE_X)
#undef TE_X
  return TE_OK;
}

int te__torch_load(te_status *status) {
  void *cpu = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
  TE_REQUIRE(status, cpu,
             "te_ops needs torch: libtorch_cpu.so is not loaded in this process; import torch first");
#define TE_X(ret, name, params) \
  TE_REQUIRE(status, look_up(cpu, #name, &te__torch.name), \
             "te_ops needs torch >= 2.11: libtorch_cpu.so has no %s; upgrade with: pip install -U torch", \
             #name);
  TE_TORCH_FUNCTIONS(TE_X)
#undef TE_X
#define TE_X(ret, name, params) look_up(cpu, #name, &te__torch.name);
  TE_TORCH_OPTIONAL_FUNCTIONS(TE_X)
#undef TE_X
  /* dlsym on a library also searches what it depends on, libstdc++ among it. */
  look_up(cpu, "_Znwm", &cxx_new);
  look_up(cpu, "_ZdlPv", &cxx_delete);
  TE_REQUIRE(status, te__torch.torch_delete_stable_ivalue || (cxx_new && cxx_delete),
             "te_ops found neither torch_delete_stable_ivalue nor libstdc++'s operator delete next to "
             "libtorch_cpu.so");
  void *cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  te__torch.has_cuda = cuda != NULL;
#define TE_X(ret, name, params) \
  if (!look_up(cuda, #name, &te__torch.name)) te__torch.has_cuda = false;
  TE_TORCH_CUDA_FUNCTIONS(TE_X)
#undef TE_X
  return load_dtypes(cpu);
}

void te__torch_raise(const te_status *status) {
  te__torch.aoti_torch_check(false, __func__, __FILE__, (uint32_t)__LINE__, status->message);
}

te_dtype te__torch_dtype(int32_t code) {
  return code >= 0 && code < MAX_DTYPE_CODES ? (te_dtype)dtype_of_code[code] : TE_DTYPE_OTHER;
}

AtenTensorHandle te__torch_take_optional(StableIValue value) {
  if (value == 0) return NULL;
  StableIValue *cell = (StableIValue *)(uintptr_t)value;
  AtenTensorHandle tensor = (AtenTensorHandle)(uintptr_t)*cell;
  if (te__torch.torch_delete_stable_ivalue)
    te__torch.torch_delete_stable_ivalue(cell);
  else
    cxx_delete(cell);
  return tensor;
}

int te__torch_make_optional(AtenTensorHandle tensor, StableIValue *out, te_status *status) {
  StableIValue *cell = NULL;
  *out = 0;
  if (!tensor) return TE_OK;
  if (te__torch.torch_new_stable_ivalue)
    TE_TORCH_TRY(status, torch_new_stable_ivalue, &cell);
  else
    cell = cxx_new(sizeof *cell);
  *cell = (StableIValue)(uintptr_t)tensor;
  *out = (StableIValue)(uintptr_t)cell;
  return TE_OK;
}

const char *te__torch_last_error(void) {
  const char *what = te__torch.torch_exception_get_what_without_backtrace
                         ? te__torch.torch_exception_get_what_without_backtrace()
                         : NULL;
  return what && what[0] ? what : "torch wrote the reason to stderr";
}
