/* What is done once a phase, or once an instance that waits. Part of _fast.c, whose names it uses. */

#ifndef FXBATCH_FAST_WAITING_H
#define FXBATCH_FAST_WAITING_H

/* --- What an instance that waits has to keep (trace/state.py) -------------------------------------- */

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

#endif
