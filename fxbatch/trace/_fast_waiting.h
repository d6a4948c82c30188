/* What is done once a phase, or once an instance that waits. Part of _fast.c, whose names it uses. */

#ifndef FXBATCH_FAST_WAITING_H
#define FXBATCH_FAST_WAITING_H

/* --- What an instance that waits has to keep (trace/state.py, location.py) -------------------------------------- */

/* modes_are(modes): whether these are the thread's; autocast and function modes are taken to differ. */
static PyObject *modes_are(PyObject *Py_UNUSED(module), PyObject *modes)
{
    if (!Py_IS_TYPE(modes, ThreadModes)) {
        PyErr_SetString(PyExc_TypeError, "modes_are(ThreadModes)");
        return NULL;
    }
    PyObject *functions = SLOT(modes, at.m_functions), *recorder = SLOT(modes, at.m_recorder);
    PyObject *warnings = SLOT(modes, at.m_warnings);
    int same = mode_is(grad_enabled, SLOT(modes, at.m_grad)) &&
               mode_is(inference_enabled, SLOT(modes, at.m_inference)) && SLOT(modes, at.m_autocast) == Py_None &&
               mode_is(autocast_enabled, Py_False) && functions && PyList_Check(functions) &&
               !PyList_GET_SIZE(functions) && (recorder == Py_None ? !current : recorder == current);
    if (same) {
        PyObject *depth = PyCFunction_GET_FUNCTION(function_modes)(PyCFunction_GET_SELF(function_modes), NULL);
        same = depth && PyLong_AsLong(depth) == 0;
        Py_XDECREF(depth);
    }
    if (same && warning_handler) {
        void *expected = warnings == Py_None ? NULL : PyLong_AsVoidPtr(warnings);
        same = warning_handler() == expected;
    }
    return PyErr_Occurred() ? NULL : PyBool_FromLong(same);
}

/* copy_columns(sigs, inputs, base, count, int32 [calls], int64 [inputs]): whether all inputs are base to count. */
static PyObject *copy_columns(PyObject *Py_UNUSED(module), PyObject *args)
{
    Column *sigs, *inputs;
    long long base, count;
    Py_buffer sig, out;
    if (!PyArg_ParseTuple(args, "O!O!LLw*w*", &ColumnType, &sigs, &ColumnType, &inputs, &base, &count, &sig, &out))
        return NULL;
    int fits = sig.len == 4 * sigs->size && out.len == 8 * inputs->size, known = 1;
    if (fits) {
        for (Py_ssize_t i = 0; i < sigs->size; i++)
            ((int32_t *)sig.buf)[i] = (int32_t)sigs->data[i];
        for (Py_ssize_t i = 0; i < inputs->size; i++) {
            known &= inputs->data[i] >= base && inputs->data[i] < count;
            ((int64_t *)out.buf)[i] = inputs->data[i] - base;
        }
    } else
        PyErr_SetString(PyExc_ValueError, "copy_columns: arrays of other lengths than the columns");
    PyBuffer_Release(&sig);
    PyBuffer_Release(&out);
    return fits ? PyBool_FromLong(known) : NULL;
}

/* written_to([(Value, tensor, version), ...]): the first Value whose tensor has another version now, or None. */
static PyObject *written_to(PyObject *Py_UNUSED(module), PyObject *constants)
{
    for (Py_ssize_t i = 0; PyList_Check(constants) && i < PyList_GET_SIZE(constants); i++) {
        PyObject *kept = PyList_GET_ITEM(constants, i), *version = PyTuple_GET_ITEM(kept, 2);
        if (version == Py_None)
            continue;
        PyObject *now = PyObject_GetAttr(PyTuple_GET_ITEM(kept, 1), s_version);
        int same = now ? PyObject_RichCompareBool(now, version, Py_EQ) : -1;
        Py_XDECREF(now);
        if (same != 1)
            return same < 0 ? NULL : Py_NewRef(PyTuple_GET_ITEM(kept, 0));
    }
    Py_RETURN_NONE;
}

/* leaves_of({id: (Value, tensor, version)}): numbers of the Values whose tensors require gradients. */
static PyObject *leaves_of(PyObject *Py_UNUSED(module), PyObject *constants)
{
    PyObject *found = PyList_New(0), *key, *kept;
    for (Py_ssize_t place = 0; found && PyDict_Check(constants) && PyDict_Next(constants, &place, &key, &kept);) {
        PyObject *wanted = PyObject_GetAttr(PyTuple_GET_ITEM(kept, 1), s_requires_grad);
        if (!wanted || (wanted == Py_True && PyList_Append(found, SLOT(PyTuple_GET_ITEM(kept, 0), at.value)) < 0))
            Py_CLEAR(found);
        Py_XDECREF(wanted);
    }
    return found;
}

/* user_place(files, file_of): code and instruction of the innermost frame of the user's code, or None. */
static PyObject *user_place(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n)
{
    if (n != 2 || !PyDict_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "user_place(files, file_of)");
        return NULL;
    }
    PyFrameObject *frame = (PyFrameObject *)Py_XNewRef((PyObject *)PyEval_GetFrame());
    PyObject *place = NULL;
    while (frame && !place && !PyErr_Occurred()) {
        PyObject *code = (PyObject *)PyFrame_GetCode(frame);
        PyObject *file = Py_XNewRef(PyDict_GetItemWithError(args[0], code));
        if (!file && !PyErr_Occurred())
            file = PyObject_CallOneArg(args[1], (PyObject *)frame);
        if (file && PyUnicode_Check(file) && PyUnicode_GET_LENGTH(file))
            place = Py_BuildValue("(Oi)", code, PyFrame_GetLasti(frame));
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_XDECREF(file);
        Py_DECREF(code);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    if (PyErr_Occurred()) {
        Py_XDECREF(place);
        return NULL;
    }
    return place ? place : Py_NewRef(Py_None);
}

#endif
