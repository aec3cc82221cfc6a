#include "te_python.h"

#include "te_register.h"

#include <stdio.h>
#include <string.h>

/* -------------------------------------------------------------------------- Python arithmetic -------- */

/* Keeps every intermediate number alive until the inference is over. */
static int keep(PyObject *arena, PyObject *number, te_num *out) {
  if (!number) return TE_ERROR;
  int rc = PyList_Append(arena, number);
  Py_DECREF(number);
  out->obj = number;
  return rc == 0 ? TE_OK : TE_ERROR;
}

static int py_constant(void *arena, int64_t value, te_num *out) {
  return keep(arena, PyLong_FromLongLong(value), out);
}

static int py_binary(void *arena, enum te_dim_code code, te_num a, te_num b, te_num *out) {
  PyObject *x = a.obj, *y = b.obj;
  switch (code) {
  case TE_DIM_ADD:
    return keep(arena, PyNumber_Add(x, y), out);
  case TE_DIM_SUB:
    return keep(arena, PyNumber_Subtract(x, y), out);
  case TE_DIM_MUL:
    return keep(arena, PyNumber_Multiply(x, y), out);
  default:
    break;
  }
  /* ceil(a / b) = -(-a // b), with Python's flooring division */
  te_num negative, floored, ceiling;
  TE_TRY(keep(arena, PyNumber_Negative(x), &negative));
  TE_TRY(keep(arena, PyNumber_FloorDivide(negative.obj, y), &floored));
  TE_TRY(keep(arena, PyNumber_Negative(floored.obj), &ceiling));
  if (code == TE_DIM_CEIL) return *out = ceiling, TE_OK;
  return keep(arena, PyNumber_Multiply(ceiling.obj, y), out);
}

static int py_equal(void *arena, te_num a, te_num b, bool *out) {
  (void)arena;
  int equal = PyObject_RichCompareBool(a.obj, b.obj, Py_EQ);
  *out = equal == 1;
  return equal < 0 ? TE_ERROR : TE_OK;
}

/* Asking a symbolic size whether it is negative would add a guard for nothing. */
static int py_negative(void *arena, te_num a, bool *out) {
  (void)arena;
  *out = PyLong_CheckExact((PyObject *)a.obj) && PyLong_AsLongLong(a.obj) < 0;
  return PyErr_Occurred() ? TE_ERROR : TE_OK;
}

static void py_print(void *arena, te_num a, char *text, size_t size) {
  (void)arena;
  PyObject *str = PyObject_Str(a.obj), *bytes = str ? PyUnicode_AsUTF8String(str) : NULL;
  snprintf(text, size, "%s", bytes ? PyBytes_AsString(bytes) : "?");
  Py_XDECREF(bytes);
  Py_XDECREF(str);
}

/* ----------------------------------------------------------------------------------- inference -------- */

static const te_op *op_at(PyObject *index) {
  long i = PyLong_AsLong(index);
  if (i == -1 && PyErr_Occurred()) return NULL;
  if (i >= 0 && i < te__op_count()) return te__op((int)i);
  PyErr_Format(PyExc_IndexError, "no operator has index %ld: there are %d", i, te__op_count());
  return NULL;
}

/* A tensor comes as (sizes, dtype name, device type, device index). */
static int read_tensor(PyObject *arg, PyObject *arena, te_num *sizes, te_desc *desc) {
  PyObject *py_sizes, *dtype;
  if (!PyArg_ParseTuple(arg, "O!Oii", &PyTuple_Type, &py_sizes, &dtype, &desc->device_type,
                        &desc->device_index))
    return TE_ERROR;
  PyObject *bytes = PyUnicode_AsUTF8String(dtype);
  if (!bytes) return TE_ERROR;
  desc->dtype = te__dtype_from_name(PyBytes_AsString(bytes));
  Py_DECREF(bytes);
  Py_ssize_t ndim = PyTuple_Size(py_sizes);
  if (ndim > TE_MAX_NDIM)
    return PyErr_Format(PyExc_ValueError, "more than %d dimensions", TE_MAX_NDIM), TE_ERROR;
  if (PyList_Append(arena, py_sizes) != 0) return TE_ERROR;
  for (Py_ssize_t i = 0; i < ndim; i++) sizes[i].obj = PyTuple_GetItem(py_sizes, i);
  desc->sizes = sizes;
  desc->ndim = (int32_t)ndim;
  desc->present = true;
  return TE_OK;
}

static int read_args(const te_op *op, PyObject *args, PyObject *arena, te_num (*sizes)[TE_MAX_NDIM],
                     te_desc *descs) {
  if (!PyTuple_Check(args) || PyTuple_Size(args) != op->n_inputs) {
    PyErr_Format(PyExc_TypeError, "%s: expected a tuple of %d arguments", op->full_name, (int)op->n_inputs);
    return TE_ERROR;
  }
  for (int e = 0; e < op->n_inputs; e++) {
    PyObject *arg = PyTuple_GetItem(args, e);
    switch (op->entries[e].kind) {
    case TE_KIND_TENSOR:
      if (arg != Py_None) TE_TRY(read_tensor(arg, arena, sizes[e], &descs[e]));
      break;
    case TE_KIND_FLOAT: /* no shape depends on a float */
      break;
    default:
      descs[e].scalar = PyLong_AsLongLong(arg);
      if (descs[e].scalar == -1 && PyErr_Occurred()) return TE_ERROR;
    }
  }
  return TE_OK;
}

static PyObject *output_tuple(const te_op *op, const te_out_desc *out) {
  if (!out->present && op->is_mutating) /* it cannot return None: absent is an empty tensor */
    return Py_BuildValue("((i)s)", 0, te__dtype_name(out->dtype));
  if (!out->present) Py_RETURN_NONE;
  PyObject *sizes = PyTuple_New(out->ndim);
  for (int i = 0; sizes && i < out->ndim; i++) {
    Py_INCREF((PyObject *)out->sizes[i].obj);
    PyTuple_SetItem(sizes, i, out->sizes[i].obj);
  }
  return sizes ? Py_BuildValue("(Ns)", sizes, te__dtype_name(out->dtype)) : NULL;
}

/* Too large for the stack of a thread that may be anywhere in a trace. */
typedef struct scratch {
  te_num sizes[TE_MAX_ENTRIES][TE_MAX_NDIM];
  te_desc descs[TE_MAX_ENTRIES];
  te_out_desc outputs[TE_MAX_ENTRIES];
  te_status status;
} scratch;

PyObject *te__py_infer(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
  (void)module;
  if (n_args != 2)
    return PyErr_Format(PyExc_TypeError, "infer(index, args) takes 2 arguments, not %zd", n_args);
  const te_op *op = op_at(args[0]);
  if (!op) return NULL;
  PyObject *arena = PyList_New(0), *result = NULL;
  scratch *s = PyMem_Calloc(1, sizeof *s);
  if (!s) PyErr_NoMemory();
  te_arith arith = {py_constant, py_binary, py_equal, py_negative, py_print, arena};
  if (!s || !arena || read_args(op, args[1], arena, s->sizes, s->descs) != TE_OK) goto done;
  if (te__infer(op, &arith, s->descs, s->outputs, &s->status) != TE_OK) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, s->status.message);
    goto done;
  }
  result = PyList_New(op->n_outputs);
  for (int o = 0; result && o < op->n_outputs; o++) {
    PyObject *out = output_tuple(op, &s->outputs[o]);
    if (out)
      PyList_SetItem(result, o, out);
    else
      Py_CLEAR(result);
  }
done:
  PyMem_Free(s);
  Py_XDECREF(arena);
  return result;
}

/* ---------------------------------------------------------------------------------------- spec -------- */

static PyObject *condition_of(const te_op *op, const te_entry *entry) {
  if (entry->condition.entry < 0) Py_RETURN_NONE;
  const te_entry *flags = &op->entries[entry->condition.entry];
  return PyUnicode_FromString(entry->condition.bit < 0 ? flags->name : flags->flags[entry->condition.bit]);
}

static PyObject *default_of(const te_entry *entry) {
  if (!entry->has_default) Py_RETURN_NONE;
  if (entry->kind == TE_KIND_BOOL) return PyBool_FromLong(entry->default_value != 0);
  if (entry->kind == TE_KIND_INT) return PyLong_FromDouble(entry->default_value);
  return PyFloat_FromDouble(entry->default_value);
}

static PyObject *entry_dict(const te_op *op, const te_entry *entry) {
  static const char *const kinds[] = {"tensor", "int", "float", "bool", "bits"};
  const te_slot_row *slot = &op->row->slots[entry->slot];
  PyObject *flags = PyTuple_New(entry->n_flags);
  for (int i = 0; flags && i < entry->n_flags; i++)
    PyTuple_SetItem(flags, i, PyUnicode_FromString(entry->flags[i]));
  if (!flags) return NULL;
  const char *buffer = entry->name + (entry->kind == TE_KIND_TENSOR ? strlen(slot->name) : 0);
  return Py_BuildValue(
      "{s:s,s:s,s:s,s:s,s:s,s:N,s:O,s:O,s:O,s:N,s:N}", "name", entry->name, "kind", kinds[entry->kind],
      "slot", slot->name, "type", slot->type, "buffer", *buffer == '_' ? buffer + 1 : "", "flags", flags,
      "optional", entry->is_optional ? Py_True : Py_False, "mutable", entry->is_mutable ? Py_True : Py_False,
      "union", entry->quantized_dtypes || entry->part_of >= 0 ? Py_True : Py_False, "condition",
      condition_of(op, entry), "default", default_of(entry));
}

static PyObject *entry_list(const te_op *op, int first, int count) {
  PyObject *list = PyList_New(count);
  for (int i = 0; list && i < count; i++) {
    PyObject *dict = entry_dict(op, &op->entries[first + i]);
    if (dict)
      PyList_SetItem(list, i, dict);
    else
      Py_CLEAR(list);
  }
  return list;
}

PyObject *te__py_spec(PyObject *module, PyObject *index) {
  (void)module;
  const te_op *op = op_at(index);
  if (!op) return NULL;
  char schema[TE_SCHEMA_SIZE];
  te_status status = {0};
  if (te__schema(op, schema, sizeof schema, &status) != TE_OK)
    return PyErr_Format(PyExc_RuntimeError, "%s", status.message);
  return Py_BuildValue("{s:s,s:s,s:s,s:N,s:N,s:O,s:O}", "name", op->full_name, "doc", op->row->doc, "schema",
                       schema, "inputs", entry_list(op, 0, op->n_inputs), "outputs",
                       entry_list(op, op->n_inputs, op->n_outputs), "has_cpu",
                       op->row->cpu ? Py_True : Py_False, "has_cuda", op->row->cuda ? Py_True : Py_False);
}
