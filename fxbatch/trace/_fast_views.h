/* Which values are views of which, and rows of values by number. Part of _fast.c. */

#ifndef FXBATCH_FAST_VIEWS_H
#define FXBATCH_FAST_VIEWS_H

/* Note that a value is leaf `output` of a call that gives views of `source`; -1 on error. */
static int link_view(PyObject *recorder, PyObject *v, PyObject *source, PyObject *call, Py_ssize_t output)
{
    PyObject *view = View->tp_alloc(View, 0), *above = SLOT(source, at.view);
    if (!view)
        return -1;
    PyObject *root = above ? SLOT(above, at.root) : source;
    SLOT(view, at.source) = Py_NewRef(source);
    SLOT(view, at.root) = Py_NewRef(root);
    SLOT(view, at.call) = Py_NewRef(call);
    SLOT(view, at.again) = Py_NewRef(Py_None);
    SLOT(view, at.through) = Py_NewRef(SLOT(KNOWN(recorder), at.grad));
    WHOLE(view, at.output) = output;
    WHOLE(view, at.source_type) = WHOLE(source, at.type);
    WHOLE(view, at.seen) = WHOLE(root, at.writes);
    put(v, at.view, view);
    return 0;
}

/* The call of a view, as a View has it: (function, args, kwargs). */
static PyObject *call_of_view(PyObject *target, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *given = PyTuple_New(n), *named = names && PyDict_Check(names) ? Py_NewRef(names) : PyDict_New();
    for (Py_ssize_t i = 0; given && i < n; i++)
        PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    int good = given && named;
    for (Py_ssize_t i = 0; good && names && PyTuple_Check(names) && i < PyTuple_GET_SIZE(names); i++)
        good = PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[n + i]) == 0;
    PyObject *call = good ? PyTuple_Pack(3, target, given, named) : NULL;
    Py_XDECREF(given);
    Py_XDECREF(named);
    return call;
}

/* Note which outputs are views of which inputs; -1 on error. */
static int link_views(PyObject *recorder, PyObject *entry, PyObject *result, Arguments *a, PyObject *const *args,
                      Py_ssize_t n, PyObject *names)
{
    PyObject *aliases = SLOT(entry, at.aliases), *call = call_of_view(SLOT(entry, at.target), args, n, names);
    int single = SLOT(entry, at.single) == Py_True, done = call ? 0 : -1;
    if (call && (single || SLOT(entry, at.is_tuple) == Py_True)) {
        Py_ssize_t outputs = single ? 1 : PyTuple_GET_SIZE(result);
        for (Py_ssize_t k = 0; done == 0 && k < outputs && k < PyTuple_GET_SIZE(aliases); k++) {
            Py_ssize_t i = PyLong_AsSsize_t(PyTuple_GET_ITEM(aliases, k));
            if (i >= 0 && i < a->read)
                done = link_view(recorder, single ? result : PyTuple_GET_ITEM(result, k), a->inputs[i].value, call, k);
        }
    } else if (call) {
        PyObject *inputs = PyTuple_New(a->read), *linked = NULL;
        for (Py_ssize_t i = 0; inputs && i < a->read; i++)
            PyTuple_SET_ITEM(inputs, i, Py_NewRef(a->inputs[i].value));
        if (inputs)
            linked = PyObject_CallFunctionObjArgs(slow_link, entry, result, inputs, call, NULL);
        done = linked ? 0 : -1;
        Py_XDECREF(linked);
        Py_XDECREF(inputs);
    }
    Py_XDECREF(call);
    return done;
}

/* v[index] for an int that was met before (python_numbers.call_row); NULL without an error for others. */
static PyObject *row_of_value(PyObject *recorder, PyObject *const *args)
{
    PyObject *v = args[0], *rows = SLOT(recorder, at.row_calls), *lifted = SLOT(recorder, at.lifted);
    if (!Py_IS_TYPE(v, Value) || SLOT(v, at.recorder) != recorder || !rows || !PyDict_Check(rows) || !lifted ||
        !PyDict_Check(lifted) || !has_columns(recorder) || is_stale(v) || !modes_as_recorded(recorder))
        return NULL;
    PyObject *key = Py_BuildValue("(LLO)", (long long)WHOLE(KNOWN(recorder), at.mode), (long long)WHOLE(v, at.type), args[1]);
    PyObject *known = key ? PyDict_GetItemWithError(rows, key) : NULL; /* (entry, number of the index, row) */
    Py_XDECREF(key);
    if (!known || !PyTuple_Check(known) || PyTuple_GET_SIZE(known) != 3)
        return NULL;
    Py_INCREF(known);
    PyObject *entry = PyTuple_GET_ITEM(known, 0), *given[] = {v, PyTuple_GET_ITEM(known, 2)}, *result = NULL;
    Input read[] = {{v, WHOLE(v, at.value)}, {NULL, PyLong_AsSsize_t(PyTuple_GET_ITEM(known, 1))}};
    PyObject *call = call_of_view(getitem, given, 2, NULL), *sid = PyLong_FromLongLong(WHOLE(entry, at.sid));
    if (call && sid && PyDict_SetItem(lifted, sid, Py_True) == 0 &&
        (result = record(recorder, entry, read, 2)) && link_view(recorder, result, v, call, 0) < 0)
        Py_CLEAR(result);
    Py_XDECREF(call);
    Py_XDECREF(sid);
    Py_DECREF(known);
    return result;
}

#endif
