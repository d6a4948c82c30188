/* What many tensors have in common that are looked at together: numbers of integers, one in each, as words and
   labels are, and sizes. Part of _fast.c, whose names it uses; trace/constants.py and trace/state.py have the twins. */

/* read_integers(tensors, numbers): what each of a list of tensors holds, int64. False, with the array half written, where
   one does not hold one integer, plain and on the CPU. */
static PyObject *read_integers(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensors;
    Py_buffer numbers;
    if (!PyArg_ParseTuple(args, "O!w*", &PyList_Type, &tensors, &numbers))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(tensors);
    int good = numbers.len == 8 * n;
    if (!good)
        PyErr_SetString(PyExc_ValueError, "an int64 a tensor");
    for (Py_ssize_t i = 0; good && i < n && i < PyList_GET_SIZE(tensors); i++)
        good = number_of(PyList_GET_ITEM(tensors, i), (int64_t *)numbers.buf + i);
    PyBuffer_Release(&numbers);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(good);
}

/* Whether t is a plain tensor of this type, which requires gradients or not alike; its shape goes to `shape`. */
static int alike(PyObject *t, PyObject *dtype, PyObject *asks, PyObject **shape)
{
    if (!Py_IS_TYPE(t, Tensor))
        return 0;
    PyObject *type = ask(get_dtype, t), *requires = type ? ask(get_requires_grad, t) : NULL;
    int same = type == dtype && requires == asks;
    Py_XDECREF(type);
    Py_XDECREF(requires);
    return same && (*shape = ask(get_shape, t)) != NULL;
}

/* sizes_of(tensors, sizes, rank): sizes of a list of plain tensors of one type and so many dimensions go to int64
   [tensors, rank]; the smallest of each dimension, then the largest. None where they are not alike. */
static PyObject *sizes_of(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensors;
    Py_buffer sizes;
    Py_ssize_t rank;
    if (!PyArg_ParseTuple(args, "O!w*n", &PyList_Type, &tensors, &sizes, &rank))
        return NULL;
    Py_ssize_t n = PyList_GET_SIZE(tensors);
    int64_t *out = sizes.buf;
    int good = n && sizes.len == 8 * n * rank && Py_IS_TYPE(PyList_GET_ITEM(tensors, 0), Tensor);
    PyObject *dtype = good ? ask(get_dtype, PyList_GET_ITEM(tensors, 0)) : NULL;
    PyObject *asks = dtype ? ask(get_requires_grad, PyList_GET_ITEM(tensors, 0)) : NULL;
    for (Py_ssize_t i = 0; good && asks && i < n && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *shape = NULL;
        good = alike(PyList_GET_ITEM(tensors, i), dtype, asks, &shape) && PyTuple_GET_SIZE(shape) == rank;
        for (Py_ssize_t d = 0; good && d < rank; d++)
            good = (*out++ = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, d))) >= 0;
        Py_XDECREF(shape);
    }
    good = good && asks;
    Py_XDECREF(asks);
    Py_XDECREF(dtype);
    PyObject *bounds = good ? PyTuple_New(2 * rank) : NULL;
    for (Py_ssize_t d = 0; bounds && d < rank; d++) {
        const int64_t *size = (int64_t *)sizes.buf + d;
        int64_t low = *size, high = low;
        for (Py_ssize_t i = 0; i < n; i++, size += rank) {
            low = *size < low ? *size : low;
            high = *size > high ? *size : high;
        }
        PyTuple_SET_ITEM(bounds, d, PyLong_FromSsize_t(low));
        PyTuple_SET_ITEM(bounds, rank + d, PyLong_FromSsize_t(high));
    }
    PyBuffer_Release(&sizes);
    if (PyErr_Occurred())
        Py_CLEAR(bounds);
    return bounds || PyErr_Occurred() ? bounds : Py_NewRef(Py_None);
}
