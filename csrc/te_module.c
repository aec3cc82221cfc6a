/* The extension module te_ops._C. */
#include "te_python.h"

#include "te_activation.h"
#include "te_register.h"
#include "te_table.h"
#include "te_torch.h"
#if defined(TE_WITH_CUDA)
#include "cuda/te_cuda.h"
#endif

static PyObject *op_count(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return PyLong_FromLong(te__op_count());
}

/* ((name, whether it is gated), ...), in the order in which the operators count them. */
static PyObject *activations(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *list = PyList_New(0);
  bool gated;
  const char *name;
  for (int64_t i = 0; list && (name = te__activation_name(i, &gated)) != NULL; i++) {
    PyObject *item = Py_BuildValue("(sO)", name, gated ? Py_True : Py_False);
    if (!item || PyList_Append(list, item) != 0) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  PyObject *result = list ? PyList_AsTuple(list) : NULL;
  Py_XDECREF(list);
  return result;
}

/* TE_CUDA_BUILD is "13.0" and TE_CUDA_ARCHS "8.0 9.0a" in a build with CUDA code, else both are "". */
static PyObject *build_info(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  return Py_BuildValue("{s:s,s:s,s:s}", "cuda", TE_CUDA_BUILD, "cuda_archs", TE_CUDA_ARCHS, "compiler",
                       __VERSION__);
}

#if defined(TE_WITH_CUDA)
static PyObject *cublaslt_version(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  te_status status = {0};
  size_t version = 0;
  if (te__cublaslt_version(&version, &status) != TE_OK)
    return PyErr_Format(PyExc_RuntimeError, "%s", status.message);
  return PyLong_FromSize_t(version);
}

static PyObject *set_gemm_autotune(PyObject *module, PyObject *candidates) {
  (void)module;
  long n = PyLong_AsLong(candidates);
  if (n == -1 && PyErr_Occurred()) return NULL;
  te__gemm_set_autotune((int)n);
  Py_RETURN_NONE;
}

static PyObject *gemm_cache(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  te_gemm_cache_info info = te__gemm_cache_info();
  return Py_BuildValue("{s:i,s:i,s:L,s:L}", "size", info.size, "capacity", info.capacity, "hits",
                       (long long)info.hits, "misses", (long long)info.misses);
}

#endif

static PyMethodDef methods[] = {
    {"op_count", op_count, METH_NOARGS, "Number of registered operators."},
    {"spec", te__py_spec, METH_O, "The parsed row of one operator."},
    {"infer", (PyCFunction)(void (*)(void))te__py_infer, METH_FASTCALL,
     "Checks arguments and describes the outputs."},
    {"activations", activations, METH_NOARGS, "Their names, and whether they are gated."},
    {"build_info", build_info, METH_NOARGS, "What this binary was built with."},
#if defined(TE_WITH_CUDA)
    {"cublaslt_version", cublaslt_version, METH_NOARGS,
     "The version of the cuBLASLt in use; raises where there is none."},
    {"set_gemm_autotune", set_gemm_autotune, METH_O,
     "Number of GEMM candidates to time; 1 takes the heuristic's first."},
    {"gemm_cache", gemm_cache, METH_NOARGS, "State of the GEMM plan cache."},
#endif
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT,
                                        "te_ops._C",
                                        "Operators of te_ops, registered from one table in C.",
                                        -1,
                                        methods,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__C(void) {
  te_status status = {0};
  if (te__torch_load(&status) != TE_OK ||
      te_register_table("te_ops", te__formats, te__ops, &status) != TE_OK) {
    PyErr_SetString(PyExc_ImportError, status.message);
    return NULL;
  }
  return PyModule_Create(&module_def);
}
