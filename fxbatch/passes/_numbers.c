/* Numbers of many tensors without dimensions at once: reading them one by one takes a microsecond each. */

#include "_arrays.h"

/* read_numbers(tensors, out, classes, data_ptr): the number of each of a list of CPU tensors into `out`. False, with
   `out` half written, where one is of none of the two classes or not on the CPU. */
PyObject *read_numbers(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    (void)module;
    if (given != 4 || !PyList_CheckExact(args[0]) || !PyTuple_CheckExact(args[2]) || PyTuple_GET_SIZE(args[2]) != 2) {
        PyErr_SetString(PyExc_TypeError, "read_numbers(list, array, (class, class), data_ptr)");
        return NULL;
    }
    static PyObject *is_cpu;
    if (!is_cpu && !(is_cpu = PyUnicode_InternFromString("is_cpu")))
        return NULL;
    PyTypeObject *one = (PyTypeObject *)PyTuple_GET_ITEM(args[2], 0), *other = (PyTypeObject *)PyTuple_GET_ITEM(args[2], 1);
    Py_buffer out;
    if (PyObject_GetBuffer(args[1], &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return NULL;
    int good = 1;
    for (Py_ssize_t i = 0; good > 0 && i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *tensor = PyList_GET_ITEM(args[0], i);
        if (Py_TYPE(tensor) != one && Py_TYPE(tensor) != other) {
            good = 0;
            break;
        }
        PyObject *here = PyObject_GetAttr(tensor, is_cpu);
        PyObject *address = here == Py_True ? PyObject_Vectorcall(args[3], &tensor, 1, NULL) : NULL;
        void *from = address ? PyLong_AsVoidPtr(address) : NULL;
        if (from && (i + 1) * out.itemsize <= out.len)
            memcpy((char *)out.buf + i * out.itemsize, from, out.itemsize);
        else
            good = PyErr_Occurred() ? -1 : 0;
        Py_XDECREF(address);
        Py_XDECREF(here);
    }
    PyBuffer_Release(&out);
    return good < 0 ? NULL : PyBool_FromLong(good);
}
