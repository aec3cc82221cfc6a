/* Python's view of the registered operators: their specs, and inference over Python numbers. */
#ifndef TE_PYTHON_H
#define TE_PYTHON_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

/* spec(index) -> dict: everything the shim needs to know of one operator. */
PyObject *te__py_spec(PyObject *module, PyObject *index);

/* infer(index, args) -> list of (sizes, dtype name) or None, one an output; see _C.pyi. */
PyObject *te__py_infer(PyObject *module, PyObject *const *args, Py_ssize_t n_args);

#endif
