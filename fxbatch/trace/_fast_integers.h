/* Integers without dimensions, as words and labels are: their numbers, and whether they were written to since they
   were read. Part of _fast.c, whose names it uses; trace/integers.py has the twins. */

#ifndef FXBATCH_FAST_INTEGERS_H
#define FXBATCH_FAST_INTEGERS_H

static PyMethodDef *data_ptr; /* of torch.Tensor */

/* The version of a tensor, -1 with an error. */
static int64_t version_of(PyObject *t)
{
    PyObject *version = ask(get_version, t);
    int64_t number = version ? PyLong_AsSsize_t(version) : -1;
    Py_XDECREF(version);
    return number;
}

/* Read one number of `size` bytes; 0 where that can't be done, maybe with an error. */
static int read_integer(PyObject *t, char *out, Py_ssize_t size)
{
    if (!Py_IS_TYPE(t, Tensor) && !Py_IS_TYPE(t, Parameter))
        return 0;
    PyObject *here = ask(get_is_cpu, t), *address = here == Py_True ? data_ptr->ml_meth(t, NULL) : NULL;
    void *from = address ? PyLong_AsVoidPtr(address) : NULL;
    if (from)
        memcpy(out, from, size);
    Py_XDECREF(address);
    Py_XDECREF(here);
    return from != NULL;
}

/* read_integers(tensors, numbers, versions): the number of each of a list of tensors of one type, and its version
   (int64; None: not asked). False, with the arrays half written, where one is no plain tensor on the CPU. */
static PyObject *read_integers(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensors, *versions;
    Py_buffer numbers, seen = {.buf = NULL};
    if (!PyArg_ParseTuple(args, "O!w*O", &PyList_Type, &tensors, &numbers, &versions))
        return NULL;
    int good = versions == Py_None || PyObject_GetBuffer(versions, &seen, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) == 0;
    Py_ssize_t n = PyList_GET_SIZE(tensors), size = n ? numbers.len / n : 0;
    if (good && (numbers.len != n * size || (seen.buf && seen.len != 8 * n))) {
        PyErr_SetString(PyExc_ValueError, "an item a tensor");
        good = 0;
    }
    for (Py_ssize_t i = 0; good && i < n && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *t = PyList_GET_ITEM(tensors, i);
        good = read_integer(t, (char *)numbers.buf + i * size, size);
        if (good && seen.buf)
            good = (((int64_t *)seen.buf)[i] = version_of(t)) >= 0;
    }
    PyBuffer_Release(&numbers);
    if (seen.buf)
        PyBuffer_Release(&seen);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(good);
}

/* versions_are(tensors, versions): whether nobody has written to any of these tensors. */
static PyObject *versions_are(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensors;
    Py_buffer versions;
    if (!PyArg_ParseTuple(args, "O!y*", &PyList_Type, &tensors, &versions))
        return NULL;
    int same = versions.len == 8 * PyList_GET_SIZE(tensors);
    for (Py_ssize_t i = 0, n = PyList_GET_SIZE(tensors); same && i < n && i < PyList_GET_SIZE(tensors); i++) {
        if (i + 8 < n)
            __builtin_prefetch(PyList_GET_ITEM(tensors, i + 8)); /* they lie anywhere: most of it is waiting */
        same = version_of(PyList_GET_ITEM(tensors, i)) == ((int64_t *)versions.buf)[i];
    }
    PyBuffer_Release(&versions);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(same);
}

#endif
