/* Which values are views of which, and rows of values by number. Part of _fast.c. */

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

/* --- Rows that were written to, apart from their whole until it is used -------------------------------------- */

/* Whether what is written now counts for gradients as what is computed does. */
static int counts_for_gradients(PyObject *recorder)
{
    return SLOT(KNOWN(recorder), at.grad) == Py_True || SLOT(recorder, at.graded) != Py_True;
}

/* The number of the row that v is of its root, as `root[number]` gives it; -1 for other values. */
static Py_ssize_t row_shown(PyObject *v)
{
    PyObject *view = SLOT(v, at.view), *call = view ? SLOT(view, at.call) : NULL;
    if (!call || SLOT(view, at.root) != SLOT(view, at.source) || !PyTuple_CheckExact(call) ||
        PyTuple_GET_ITEM(call, 0) != getitem)
        return -1;
    PyObject *index = PyTuple_GET_ITEM(PyTuple_GET_ITEM(call, 1), 1);
    return PyLong_CheckExact(index) ? PyLong_AsSsize_t(index) : -1; /* below 0 is for Python */
}

/* Whether places `x[i, j]` of a value were written to, and the whole was not put together since: Python's. */
static int has_places(PyObject *v)
{
    return SLOT(v, at.rows) && !PyDict_CheckExact(SLOT(v, at.rows));
}

/* Give row `index` of a value the content of another; -1 on error. */
static int write_row(PyObject *recorder, PyObject *v, PyObject *index, PyObject *content)
{
    if (!SLOT(v, at.rows) && !(SLOT(v, at.rows) = PyDict_New()))
        return -1;
    PyObject *row = value_of_number(recorder, WHOLE(content, at.value), WHOLE(content, at.type),
                                    WHOLE(content, at.flags) & REQUIRES_GRAD);
    int done = row ? PyDict_SetItem(SLOT(v, at.rows), index, row) : -1;
    Py_XDECREF(row);
    WHOLE(v, at.flags) |= WHOLE(content, at.flags) & REQUIRES_GRAD; /* and so it does when the row is written to again */
    WHOLE(v, at.writes)++;
    return done;
}

/* What is known of rows of a type: the entry of (mode, type) or of (mode, type, type of a row); borrowed, NULL for others. */
static PyObject *known_rows(PyObject *recorder, PyObject *v, PyObject *content)
{
    long long mode = WHOLE(KNOWN(recorder), at.mode), type = WHOLE(v, at.type);
    PyObject *key = content ? Py_BuildValue("(LLL)", mode, type, (long long)WHOLE(content, at.type))
                            : Py_BuildValue("(LL)", mode, type);
    PyObject *known = key ? PyDict_GetItemWithError(SLOT(recorder, at.row_calls), key) : NULL;
    Py_XDECREF(key);
    return known;
}

/* An index counted from the start; -1 where it is out of range, or not known to be in it. */
static Py_ssize_t from_start(PyObject *index, PyObject *size)
{
    int overflow;
    long i = PyLong_AsLongAndOverflow(index, &overflow), n = size && PyLong_CheckExact(size) ? PyLong_AsLong(size) : 0;
    return overflow || i < -n || i >= n ? -1 : i < 0 ? i + n : i;
}

/* x[i] = y for a number i; 1 where it is done, 0 where it is for Python, -1 on error. `target` is the value that x is or
   stands for; such a row was written to one of its type before (writes.set_row). */
static int set_row(PyObject *recorder, PyObject *target, PyObject *index, PyObject *content)
{
    if (!target || !Py_IS_TYPE(content, Value) || SLOT(content, at.recorder) != recorder || is_stale(content) ||
        !modes_as_recorded(recorder))
        return 0;
    PyObject *size = known_rows(recorder, target, content), *view = SLOT(content, at.view);
    Py_ssize_t row = size ? from_start(index, size) : -1;
    if (row < 0)
        return PyErr_Occurred() ? -1 : 0;
    if (view && SLOT(view, at.source) == target && row_shown(content) == row)
        return 1; /* what `x[i] += y` stores last */
    if (SLOT(target, at.view) || WHOLE(target, at.flags) & NOT_WRITTEN_HERE || has_places(target) ||
        !counts_for_gradients(recorder))
        return 0;
    PyObject *number = PyLong_FromSsize_t(row);
    int done = number ? write_row(recorder, target, number, content) : -1;
    Py_XDECREF(number);
    return done < 0 ? -1 : 1;
}

/* Record the new content of a value that is a row of another; 1 where it is done, 0 where it is for Python, -1 on error. */
static int rewrite_row(PyObject *recorder, PyObject *v, PyObject *content)
{
    Py_ssize_t number = row_shown(v);
    PyObject *view = SLOT(v, at.view), *root = number < 0 ? NULL : SLOT(view, at.root);
    if (!root || WHOLE(root, at.flags) & NOT_WRITTEN_HERE || has_places(root) || !counts_for_gradients(recorder) ||
        SLOT(content, at.view) || WHOLE(content, at.type) != WHOLE(v, at.type))
        return 0;
    PyObject *index = PyTuple_GET_ITEM(PyTuple_GET_ITEM(SLOT(view, at.call), 1), 1);
    if (write_row(recorder, root, index, content) < 0)
        return -1;
    WHOLE(v, at.value) = WHOLE(content, at.value);
    WHOLE(v, at.flags) = WHOLE(content, at.flags) & REQUIRES_GRAD;
    WHOLE(view, at.seen) = WHOLE(root, at.writes);
    return 1;
}

/* v[index] for a row of a type, and a number, that were met before (python_numbers.call_row); NULL without an error for
   others. */
static PyObject *row_of_value(PyObject *recorder, PyObject *const *args)
{
    PyObject *v = value_at(recorder, args[0]), *lifted = SLOT(recorder, at.lifted);
    if (!v || !has_columns(recorder) ||
        (is_stale(v) && SLOT(v, at.view)) || has_places(v) || !modes_as_recorded(recorder))
        return NULL;
    PyObject *known = known_rows(recorder, v, NULL); /* (entry, how many rows, number of the value of each row's number) */
    Py_ssize_t at_row = known ? from_start(args[1], PyTuple_GET_ITEM(known, 1)) : -1;
    PyObject *row = at_row < 0 ? NULL : PyLong_FromSsize_t(at_row);
    PyObject *number = row ? PyDict_GetItemWithError(PyTuple_GET_ITEM(known, 2), row) : NULL, *result = NULL;
    if (number) {
        Py_INCREF(known);
        PyObject *entry = PyTuple_GET_ITEM(known, 0), *given[] = {v, row};
        PyObject *written = SLOT(v, at.rows) ? PyDict_GetItemWithError(SLOT(v, at.rows), row) : NULL;
        PyObject *call = call_of_view(getitem, given, 2, NULL), *sid = PyLong_FromLongLong(WHOLE(entry, at.sid));
        if (written && call)
            result = value_of_number(recorder, WHOLE(written, at.value), WHOLE(written, at.type),
                                     WHOLE(v, at.flags) & REQUIRES_GRAD); /* as a view of the whole */
        else if (call && sid && !PyErr_Occurred() && PyDict_SetItem(lifted, sid, Py_True) == 0) {
            Input read[] = {{v, WHOLE(v, at.value)}, {NULL, PyLong_AsSsize_t(number)}};
            result = record(recorder, entry, read, 2);
        }
        if (result && link_view(recorder, result, v, call, 0) < 0)
            Py_CLEAR(result);
        Py_XDECREF(call);
        Py_XDECREF(sid);
        Py_DECREF(known);
    }
    Py_XDECREF(row);
    return result;
}

/* table[index] of a bare parameter many of whose rows were looked up, for a number that was met before
   (arguments.row_of_table); NULL without an error for others. */
static PyObject *row_of_table(PyObject *recorder, PyObject *table, PyObject *index)
{
    unsigned long long of = (unsigned long long)(uintptr_t)table;
    PyObject *key = Py_BuildValue("(iKL)", -1, of, (long long)WHOLE(KNOWN(recorder), at.mode)), *result = NULL;
    PyObject *known = key ? PyDict_GetItemWithError(SLOT(recorder, at.row_calls), key) : NULL;
    Py_XDECREF(key);
    Py_ssize_t at_row = known && has_columns(recorder) ? from_start(index, PyTuple_GET_ITEM(known, 1)) : -1;
    PyObject *row = at_row < 0 ? NULL : PyLong_FromSsize_t(at_row);
    PyObject *number = row ? PyDict_GetItemWithError(PyTuple_GET_ITEM(known, 2), row) : NULL;
    if (number) {
        Input read[] = {{NULL, PyLong_AsSsize_t(number)}};
        if ((result = record(recorder, PyTuple_GET_ITEM(known, 0), read, 1)))
            WHOLE(result, at.flags) |= COPIED_ROW;
    }
    Py_XDECREF(row);
    return result;
}
