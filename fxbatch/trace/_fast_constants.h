/* Rows of calls, real tensors that become constants, and whether torch's modes are as they were recorded. Part of _fast.c. */

#ifndef FXBATCH_FAST_CONSTANTS_H
#define FXBATCH_FAST_CONSTANTS_H

static int has_columns(PyObject *recorder)
{
    PyObject *sigs = SLOT(recorder, at.sigs), *inputs = SLOT(recorder, at.inputs);
    return sigs && inputs && Py_IS_TYPE(sigs, &ColumnType) && Py_IS_TYPE(inputs, &ColumnType);
}

typedef struct {
    PyObject *value; /* ours */
    int64_t id;
} Input;

#define FEW 32

/* Append a row and give its result. */
static PyObject *record(PyObject *recorder, PyObject *entry, const Input *read, Py_ssize_t n)
{
    Column *sigs = (Column *)SLOT(recorder, at.sigs), *inputs = (Column *)SLOT(recorder, at.inputs);
    if (column_reserve(sigs, 1) < 0 || column_reserve(inputs, n) < 0)
        return NULL;
    sigs->data[sigs->size++] = WHOLE(entry, at.sid);
    for (Py_ssize_t i = 0; i < n; i++)
        inputs->data[inputs->size++] = read[i].id;
    PyObject *types = SLOT(entry, at.types);
    if (SLOT(entry, at.single) == Py_True)
        return make_value(recorder, PyTuple_GET_ITEM(types, 0));
    PyObject *outputs = PyTuple_New(PyTuple_GET_SIZE(types));
    for (Py_ssize_t i = 0; outputs && i < PyTuple_GET_SIZE(types); i++) {
        PyObject *v = make_value(recorder, PyTuple_GET_ITEM(types, i));
        if (v)
            PyTuple_SET_ITEM(outputs, i, v);
        else
            Py_CLEAR(outputs);
    }
    if (!outputs || SLOT(entry, at.is_tuple) == Py_True)
        return outputs;
    PyObject *built = PyObject_CallFunctionObjArgs(build_result, entry, outputs, NULL);
    Py_DECREF(outputs);
    return built;
}

/* emit(recorder, entry, ids): record one call; its result with Values. */
static PyObject *emit(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n)
{
    if (n != 3 || !PyObject_TypeCheck(args[0], Recorder) || !has_columns(args[0])) {
        PyErr_SetString(PyExc_TypeError, "emit(recorder with columns in C, entry, ids)");
        return NULL;
    }
    PyObject *added = column_extend(SLOT(args[0], at.inputs), args[2]);
    Py_XDECREF(added);
    return added ? record(args[0], args[1], NULL, 0) : NULL;
}

/* Where in memory is what is asked of plain tensors (tensor_memory.py); implementation -1: not known, then Python
   decides about all of them. */
#define MAX_KIND 24
static struct {
    Py_ssize_t implementation, storage, autograd, version, offset, numbers, resizable, counted;
    uint64_t no_view;
    Py_ssize_t kinds, kind[MAX_KIND];
} lies = {.implementation = -1};

#define AT(type, start, offset) (*(type *)((char *)(start) + (offset)))

/* How often torch has written to a tensor; -1 where nobody counts: those made in inference mode. */
static int64_t version_of(PyObject *t)
{
    if (lies.implementation >= 0) {
        void *counter = AT(void *, AT(void *, t, lies.implementation), lies.version);
        return counter ? (int64_t)AT(uint32_t, counter, lies.counted) : -1;
    }
    PyObject *version = get_version->get(t, get_version->closure);
    int64_t number = version ? (int64_t)PyLong_AsSsize_t(version) : -1;
    Py_XDECREF(version);
    PyErr_Clear();
    return number;
}

/* The words that are equal for tensors of one type alone. */
static PyObject *kind_of(PyObject *Py_UNUSED(module), PyObject *t)
{
    uint64_t words[MAX_KIND];
    if (lies.implementation < 0 || !Py_IS_TYPE(t, Tensor))
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < lies.kinds; i++)
        words[i] = AT(uint64_t, AT(void *, t, lies.implementation), lies.kind[i]);
    return PyBytes_FromStringAndSize((char *)words, lies.kinds * 8);
}

static int is_of_kind(PyObject *kind, const void *implementation)
{
    if (!PyBytes_CheckExact(kind) || PyBytes_GET_SIZE(kind) != lies.kinds * 8)
        return 0;
    for (Py_ssize_t i = 0; i < lies.kinds; i++)
        if (AT(uint64_t, PyBytes_AS_STRING(kind), 8 * i) != AT(uint64_t, implementation, lies.kind[i]))
            return 0;
    return 1;
}

/* The entry of constants like t, borrowed; NULL where there is none, maybe with an error. Most recordings have few. */
static PyObject *entry_like(PyObject *recorder, PyObject *t)
{
    PyObject *entries = SLOT(KNOWN(recorder), at.entries), *key, *entry = NULL;
    if (PyDict_GET_SIZE(entries) <= 16) {
        for (Py_ssize_t place = 0; PyDict_Next(entries, &place, &key, &entry);)
            if (is_of_kind(key, AT(void *, t, lies.implementation)))
                return entry;
        return NULL;
    }
    if ((key = kind_of(NULL, t)))
        entry = PyDict_GetItemWithError(entries, key);
    Py_XDECREF(key);
    return entry;
}

/* The Value of a real tensor met first now, or NULL without an error: then the slow path decides. */
static PyObject *new_constant(PyObject *recorder, PyObject *t, PyObject *key)
{
    PyObject *owners = SLOT(KNOWN(recorder), at.owners), *v = NULL;
    if (!owners || !PyDict_Check(owners) || PyDict_Contains(owners, key) || lies.implementation < 0 ||
        version_of(t) < 0)
        return NULL;
    void *storage = AT(void *, AT(void *, t, lies.implementation), lies.storage);
    if (!storage || !AT(char, storage, lies.resizable)) /* others may write there unseen: numpy, another process */
        return NULL;
    PyObject *entry = entry_like(recorder, t);
    PyObject *sid = entry ? PyLong_FromLongLong(WHOLE(entry, at.sid)) : NULL;
    PyObject *none = NULL, *payload = sid ? PyDict_GetItemWithError(SLOT(recorder, at.payload), sid) : NULL;
    if (sid && !payload && !PyErr_Occurred() && (none = PyList_New(0)) &&
        PyDict_SetItem(SLOT(recorder, at.payload), sid, none) == 0)
        payload = none;
    Py_XDECREF(sid);
    Py_XDECREF(none); /* the dict has it */
    if (payload && (v = record(recorder, entry, NULL, 0))) {
        PyObject *version = PyLong_FromLongLong(version_of(t)), *kept = version ? PyTuple_Pack(3, v, t, version) : NULL;
        Py_XDECREF(version);
        Py_DECREF(v); /* `kept` has it */
        if (!kept || PyList_Append(payload, t) < 0 || PyDict_SetItem(SLOT(recorder, at.constants), key, kept) < 0 ||
            PyList_Append(SLOT(recorder, at.unchecked), kept) < 0)
            v = NULL;
        Py_XDECREF(kept); /* so has the dict */
    }
    return v;
}

/* Whether a tensor met first now may be a view of a shared operand; -1 on error. */
static int perhaps_shared_view(PyObject *recorder, PyObject *t)
{
    uint64_t *autograd = lies.implementation < 0 ? NULL : AT(void *, AT(void *, t, lies.implementation), lies.autograd);
    if (lies.implementation >= 0 && (!autograd || *autograd == lies.no_view))
        return 0;
    PyObject *base = get_base->get(t, get_base->closure);
    if (!base)
        return -1;
    int found = base != Py_None;
    PyObject *owners = SLOT(KNOWN(recorder), at.owners);
    if (found && Py_IS_TYPE(base, Tensor) && owners && PyDict_Check(owners)) {
        PyObject *key = PyLong_FromVoidPtr(base);
        found = key ? PyDict_Contains(owners, key) : -1;
        Py_XDECREF(key);
    }
    Py_DECREF(base);
    return found;
}

/* Whether a tensor was written to since a version was noted, None: it has none. */
static int is_written_to(PyObject *t, PyObject *version)
{
    return version != Py_None && version_of(t) != (int64_t)PyLong_AsLongLong(version);
}

/* The Value of a real tensor, borrowed; NULL without an error when it is a shared operand, or where `views` count
   when it may be a view of one. */
static PyObject *constant_of(PyObject *recorder, PyObject *t, int views)
{
    PyObject *v = NULL, *key = PyLong_FromVoidPtr(t);
    PyObject *kept = key ? PyDict_GetItemWithError(SLOT(recorder, at.constants), key) : NULL;
    if (kept) {
        v = is_written_to(t, PyTuple_GET_ITEM(kept, 2)) ? NULL : PyTuple_GET_ITEM(kept, 0);
    } else if (key && !PyErr_Occurred()) {
        int shared = perhaps_shared_view(recorder, t);
        if (shared > 0 && (v = PyObject_CallFunctionObjArgs(slow_row, recorder, t, NULL))) {
            Py_DECREF(v); /* the recorder keeps rows */
            if (v == Py_None)
                v = NULL;
        }
        if (shared < 0 || v || PyErr_Occurred() || (shared && views)) {
            Py_DECREF(key);
            return v;
        }
        v = new_constant(recorder, t, key);
    }
    Py_XDECREF(key);
    if (v || PyErr_Occurred())
        return v;
    v = PyObject_CallFunctionObjArgs(slow_constant, recorder, t, NULL);
    if (!v || v == Py_None) {
        Py_XDECREF(v);
        return NULL;
    }
    Py_DECREF(v); /* the recorder's constants keep it */
    return v;
}

/* written_to(rows): whose tensor was the first that was written to, of rows (whose, tensor, version); None if none was. */
static PyObject *written_to(PyObject *Py_UNUSED(module), PyObject *rows)
{
    for (Py_ssize_t i = 0; PyList_CheckExact(rows) && i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        if (is_written_to(PyTuple_GET_ITEM(row, 1), PyTuple_GET_ITEM(row, 2)))
            return Py_NewRef(PyTuple_GET_ITEM(row, 0));
    }
    Py_RETURN_NONE;
}

/* versions_of(tensors): int64 of each, as bytes; None where one has none. */
static PyObject *versions_of(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    Py_ssize_t n = PyList_CheckExact(tensors) ? PyList_GET_SIZE(tensors) : 0;
    PyObject *found = PyBytes_FromStringAndSize(NULL, n * 8);
    for (Py_ssize_t i = 0; found && i < n; i++) {
        int64_t version = version_of(PyList_GET_ITEM(tensors, i));
        memcpy(PyBytes_AS_STRING(found) + 8 * i, &version, 8);
        if (version < 0) {
            Py_DECREF(found);
            Py_RETURN_NONE;
        }
    }
    return found;
}

static int mode_is(PyObject *ask, PyObject *expected)
{
    PyObject *now = PyCFunction_GET_FUNCTION(ask)(PyCFunction_GET_SELF(ask), NULL);
    Py_XDECREF(now);
    return now && now == expected; /* True and False live for ever */
}

/* Whether gradients and autocast are as they were recorded. Autocast is False or, where it is on, None. */
static int grad_and_autocast_as_recorded(PyObject *recorder)
{
    PyObject *grad = SLOT(KNOWN(recorder), at.grad), *autocast = SLOT(KNOWN(recorder), at.autocast);
    if (!(grad_now ? (grad_now() ? Py_True : Py_False) == grad : mode_is(grad_enabled, grad)))
        return 0;
    return keys_excluded ? autocast == Py_False && keys_excluded(autocast_keys) : mode_is(autocast_enabled, autocast);
}

/* Whether torch's default dtype is this one: asked of Python once for each that is met in turn. */
static int default_dtype_is(PyObject *expected)
{
    static int8_t number = -1;
    static PyObject *known; /* dtypes live for ever */
    if (!dtype_now)
        return mode_is(default_dtype, expected);
    int8_t now = dtype_now();
    if (now != number || !known) {
        if (!(known = PyCFunction_GET_FUNCTION(default_dtype)(PyCFunction_GET_SELF(default_dtype), NULL)))
            return 0;
        Py_DECREF(known);
        number = now;
    }
    return known == expected;
}

static int modes_as_recorded(PyObject *recorder)
{
    return grad_and_autocast_as_recorded(recorder) && default_dtype_is(SLOT(KNOWN(recorder), at.floats));
}

/* What a place holds now, borrowed: a dictionary's item, a class's attribute, a cell's content. */
static PyObject *held_by(PyObject *holder, PyObject *name)
{
    if (PyDict_Check(holder))
        return PyDict_GetItem(holder, name);
    return PyType_Check(holder) ? _PyType_Lookup((PyTypeObject *)holder, name) : PyCell_Check(holder) ? PyCell_GET(holder) : NULL;
}

/* Whether what an entry's body reads, and user code may change unseen, is as it was (Entry.guards). */
static int holds(PyObject *entry)
{
    PyObject *guards = SLOT(entry, at.guards);
    if (!guards || guards == Py_None)
        return 1;
    for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(guards); i += 3)
        if (held_by(PyTuple_GET_ITEM(guards, i), PyTuple_GET_ITEM(guards, i + 1)) != PyTuple_GET_ITEM(guards, i + 2))
            return 0;
    return 1;
}

#endif
