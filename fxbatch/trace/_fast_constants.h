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
    sigs->data[sigs->size++] = PyLong_AsSsize_t(SLOT(entry, at.sid));
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

/* What a plain tensor's attribute is, by the getter itself: the class was looked through once. */
static PyObject *ask(const PyGetSetDef *attribute, PyObject *t)
{
    return attribute->get(t, attribute->closure);
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

/* The entry of constants like t, borrowed; NULL without an error where there is none. There are few. */
static PyObject *entry_like(PyObject *recorder, PyObject *t)
{
    PyObject *entries = SLOT(recorder, at.entries), *found = NULL, *key, *entry;
    PyObject *shape = ask(get_shape, t), *dtype = ask(get_dtype, t), *on_cpu = ask(get_is_cpu, t), *device = NULL;
    if (on_cpu)
        device = on_cpu == Py_True ? Py_NewRef(cpu) : ask(get_device, t);
    if (shape && dtype && device && PyDict_GET_SIZE(entries) <= 8) {
        for (Py_ssize_t place = 0; !found && PyDict_Next(entries, &place, &key, &entry);) {
            if (PyTuple_GET_ITEM(key, 1) != dtype)
                continue;
            int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(key, 0), shape, Py_EQ);
            if (same == 1)
                same = PyObject_RichCompareBool(PyTuple_GET_ITEM(key, 2), device, Py_EQ);
            if (same < 0)
                break;
            found = same ? entry : NULL;
        }
    } else if (shape && dtype && device) {
        key = PyTuple_Pack(3, shape, dtype, device);
        found = key ? PyDict_GetItemWithError(entries, key) : NULL;
        Py_XDECREF(key);
    }
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(on_cpu);
    Py_XDECREF(device);
    return found;
}

/* Where a tensor's storage says whether it may be resized (torch_private.resizable_place); -1: not known. */
static Py_ssize_t to_impl = -1, to_storage, to_resizable;

/* Whether somebody else may write to the memory of a plain tensor unseen (numpy, another process); 1 too where that
   can't be told here: then Python does. */
static int is_foreign(PyObject *t)
{
    if (to_impl < 0)
        return 1;
    const char *impl = *(char **)((char *)t + to_impl), *storage = impl ? *(char **)(impl + to_storage) : NULL;
    return !storage || !storage[to_resizable];
}

/* The Value of a real tensor met first now, or NULL without an error: then the slow path decides. */
static PyObject *new_constant(PyObject *recorder, PyObject *t, PyObject *key)
{
    PyObject *owners = SLOT(recorder, at.owners), *v = NULL;
    if (!owners || !PyDict_Check(owners) || PyDict_Contains(owners, key) || is_foreign(t))
        return NULL;
    PyObject *layout = ask(get_layout, t), *version = NULL;
    PyObject *entry = layout == strided ? entry_like(recorder, t) : NULL;
    Py_XDECREF(layout);
    if (entry && (version = ask(get_version, t))) {
        PyObject *payload = PyDict_GetItemWithError(SLOT(recorder, at.payload), SLOT(entry, at.sid)), *kept = NULL;
        if (payload && (v = record(recorder, entry, NULL, 0))) {
            kept = PyTuple_Pack(3, v, t, version);
            Py_DECREF(v); /* `kept` has it */
            if (!kept || PyList_Append(payload, t) < 0 ||
                PyDict_SetItem(SLOT(recorder, at.constants), key, kept) < 0 ||
                PyList_Append(SLOT(recorder, at.unchecked), kept) < 0)
                v = NULL;
            Py_XDECREF(kept); /* so has the dict */
        }
        Py_DECREF(version);
    }
    if (!v && PyErr_ExceptionMatches(PyExc_RuntimeError))
        PyErr_Clear(); /* tensors made in inference mode have no version */
    return v;
}

/* Whether a tensor met first now may be a view of a shared operand; -1 on error. */
static int perhaps_shared_view(PyObject *recorder, PyObject *t)
{
    PyObject *base = ask(get_base, t);
    if (!base)
        return -1;
    int found = base != Py_None;
    PyObject *owners = SLOT(recorder, at.owners);
    if (found && Py_IS_TYPE(base, Tensor) && owners && PyDict_Check(owners)) {
        PyObject *key = PyLong_FromVoidPtr(base);
        found = key ? PyDict_Contains(owners, key) : -1;
        Py_XDECREF(key);
    }
    Py_DECREF(base);
    return found;
}

/* The Value of a real tensor, borrowed; NULL without an error when it is a shared operand, or where `views` count
   when it may be a view of one. */
static PyObject *constant_of(PyObject *recorder, PyObject *t, int views)
{
    PyObject *v = NULL, *key = PyLong_FromVoidPtr(t);
    PyObject *kept = key ? PyDict_GetItemWithError(SLOT(recorder, at.constants), key) : NULL;
    if (kept) {
        PyObject *version = PyTuple_GET_ITEM(kept, 2);
        PyObject *now = version == Py_None ? Py_NewRef(Py_None) : ask(get_version, t);
        int same = now ? PyObject_RichCompareBool(now, version, Py_EQ) : -1;
        Py_XDECREF(now);
        v = same == 1 ? PyTuple_GET_ITEM(kept, 0) : NULL;
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

static int mode_is(PyObject *ask, PyObject *expected)
{
    PyObject *now = PyCFunction_GET_FUNCTION(ask)(PyCFunction_GET_SELF(ask), NULL);
    Py_XDECREF(now);
    return now && now == expected; /* True and False live for ever */
}

/* Whether gradients and autocast are as they were recorded. Autocast is False or, where it is on, None. */
static int grad_and_autocast_as_recorded(PyObject *recorder)
{
    PyObject *grad = SLOT(recorder, at.grad), *autocast = SLOT(recorder, at.autocast);
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
    return grad_and_autocast_as_recorded(recorder) && default_dtype_is(SLOT(recorder, at.floats));
}

/* Whether what an entry's body reads, and user code may change unseen, is as it was (Entry.guards). */
static int holds(PyObject *entry)
{
    PyObject *guards = SLOT(entry, at.guards);
    if (!guards || guards == Py_None)
        return 1;
    for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(guards); i += 3) {
        PyObject *dict = PyTuple_GET_ITEM(guards, i);
        if (!PyDict_Check(dict) || PyDict_GetItem(dict, PyTuple_GET_ITEM(guards, i + 1)) != PyTuple_GET_ITEM(guards, i + 2))
            return 0;
    }
    return 1;
}

#endif
