/* Modules: their attributes while a thread records, and whether they are as they were. Part of _fast.c, whose names
   it uses. */

#ifndef FXBATCH_FAST_MODULES_H
#define FXBATCH_FAST_MODULES_H

/* --- Attributes of modules ------------------------------------------------------------------------------------

   A parameter, buffer or submodule is found by nn.Module.__getattr__, in Python, after the ordinary look-up has
   failed and made an exception. While some thread traces, classes of modules that are met find them here, in the
   same order; what is not found goes the ordinary way, which raises what it always raises. */

#define MAX_QUICK 256
static PyTypeObject *quick[MAX_QUICK];
static int quick_types, quick_on;
static getattrofunc plain_getattro;
static PyObject *plain_getattr, *plain_getattribute;
static PyObject *s_getattr, *s_getattribute, *s_tables[3], *s_training, *s_hooks[4];
static PyObject *quick_getattro(PyObject *self, PyObject *name)
{
    PyObject **place = _PyType_Lookup(Py_TYPE(self), name) ? NULL : _PyObject_GetDictPtr(self);
    PyObject *dict = place ? *place : NULL, *found = NULL;
    if (dict && !(found = PyDict_GetItemWithError(dict, name)) && !PyErr_Occurred())
        for (int i = 0; i < 3 && !found; i++) {
            PyObject *table = PyDict_GetItemWithError(dict, s_tables[i]);
            if (!table || !(PyDict_CheckExact(table) || PyODict_CheckExact(table)))
                break;
            found = PyDict_GetItemWithError(table, name);
            if (!found && PyErr_Occurred())
                break;
        }
    if (found)
        return Py_NewRef(found);
    return PyErr_Occurred() ? NULL : plain_getattro(self, name);
}

/* quicken(type): while types may be quickened, those that find attributes as nn.Module does. */
static PyObject *quicken(PyObject *Py_UNUSED(module), PyObject *object)
{
    PyTypeObject *type = (PyTypeObject *)object;
    if (quick_on && quick_types < MAX_QUICK && PyType_Check(object) && type->tp_getattro == plain_getattro &&
        PyType_IsSubtype(type, Module) && _PyType_Lookup(type, s_getattr) == plain_getattr &&
        _PyType_Lookup(type, s_getattribute) == plain_getattribute) {
        quick[quick_types++] = (PyTypeObject *)Py_NewRef(object);
        type->tp_getattro = quick_getattro;
    }
    Py_RETURN_NONE;
}

/* quicken_modules(on): whether types may be quickened; those that were go back when it ends. */
static PyObject *quicken_modules(PyObject *Py_UNUSED(module), PyObject *on)
{
    quick_on = on == Py_True;
    while (!quick_on && quick_types) {
        PyTypeObject *type = quick[--quick_types];
        if (type->tp_getattro == quick_getattro)
            type->tp_getattro = plain_getattro;
        Py_DECREF(type);
    }
    Py_RETURN_NONE;
}

static PyObject *attributes_of(PyObject *owner)
{
    return PyType_Check(owner) ? ((PyTypeObject *)owner)->tp_dict : PyModule_GetDict(owner);
}

/* What entries ((owner, name, new), ...) would replace, in reverse; None for what is not there. */
static PyObject *replaced(PyObject *entries)
{
    Py_ssize_t n = PyTuple_GET_SIZE(entries);
    PyObject *before = PyTuple_New(n), *owner, *name, *new;
    for (Py_ssize_t i = 0; before && i < n; i++) {
        PyObject *dict = NULL, *row = NULL, *old = NULL;
        if (PyArg_ParseTuple(PyTuple_GET_ITEM(entries, i), "OUO", &owner, &name, &new))
            dict = attributes_of(owner);
        if (dict && ((old = PyDict_GetItemWithError(dict, name)) || !PyErr_Occurred()))
            row = PyTuple_Pack(3, owner, name, old ? old : Py_None);
        if (row)
            PyTuple_SET_ITEM(before, n - 1 - i, row);
        else
            Py_CLEAR(before);
    }
    return before;
}

/* swap(((owner, name, new), ...), saved): put attributes of classes and Python modules (None: take it away); what was
   there is appended to the list `saved` before, in reverse. The classes' methods are none that have a slot, or such that are Python
   functions before and after. */
static PyObject *swap(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *entries, *saved, *changed = NULL;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &entries, &PyList_Type, &saved))
        return NULL;
    PyObject *before = replaced(entries);
    int failed = !before || PyList_Append(saved, before) < 0;
    Py_XDECREF(before);
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(entries); i++) {
        PyObject *row = PyTuple_GET_ITEM(entries, i), *owner = PyTuple_GET_ITEM(row, 0);
        if (changed && changed != owner)
            PyType_Modified((PyTypeObject *)changed);
        changed = PyType_Check(owner) ? owner : NULL;
        PyObject *name = PyTuple_GET_ITEM(row, 1), *new = PyTuple_GET_ITEM(row, 2), *dict = attributes_of(owner);
        int there = PyDict_Contains(dict, name); /* a clean-up that was cut short is done again */
        failed = (new != Py_None ? PyDict_SetItem(dict, name, new) : there > 0 ? PyDict_DelItem(dict, name) : there) < 0;
    }
    if (changed)
        PyType_Modified((PyTypeObject *)changed);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* --- Modules as they were (trace/module_state.py) ---------------------------------------------------------------------- */

static int tensor_is(PyObject *t, PyObject *expected)
{
    PyObject *names[] = {s_shape, s_dtype, s_device};
    int same = 1;
    for (int i = 0; i < 3 && same == 1; i++) {
        PyObject *now = PyObject_GetAttr(t, names[i]);
        same = now ? PyObject_RichCompareBool(now, PyTuple_GET_ITEM(expected, i), Py_EQ) : -1;
        Py_XDECREF(now);
    }
    return same;
}

/* Whether an attribute is of a type, or a tensor of (shape, dtype, device, class). */
static int kind_is(PyObject *x, PyObject *kind)
{
    if (!PyTuple_Check(kind))
        return (PyObject *)Py_TYPE(x) == kind && (kind == (PyObject *)Value || !PyObject_TypeCheck(x, Tensor));
    if ((PyObject *)Py_TYPE(x) != PyTuple_GET_ITEM(kind, 3))
        return 0;
    Py_INCREF(x);
    int same = tensor_is(x, kind);
    Py_DECREF(x);
    return same;
}

/* Whether a dictionary has these keys, in this order, and these values (or values of these kinds). */
static int dict_is(PyObject *dict, PyObject *names, PyObject *values, int kinds)
{
    PyObject *name, *value;
    Py_ssize_t place = 0, i = 0;
    if (!dict || !PyDict_Check(dict) || PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(names))
        return 0;
    for (; PyDict_Next(dict, &place, &name, &value); i++) {
        PyObject *expected = PyTuple_GET_ITEM(values, i), *before = PyTuple_GET_ITEM(names, i);
        int same = kinds ? kind_is(value, expected) : value == expected;
        if (same != 1)
            return same;
        if (name != before && !(PyUnicode_Check(name) && PyUnicode_Check(before) && !PyUnicode_Compare(name, before)))
            return 0;
    }
    return 1;
}

static int part_is(PyObject *part, PyObject *dict)
{
    PyObject *hooks = PyTuple_GET_ITEM(part, 5), *tensors = PyTuple_GET_ITEM(part, 9);
    if ((PyObject *)Py_TYPE(PyTuple_GET_ITEM(part, 0)) != PyTuple_GET_ITEM(part, 1))
        return 0;
    int same = dict_is(dict, PyTuple_GET_ITEM(part, 2), PyTuple_GET_ITEM(part, 3), 1);
    if (same != 1)
        return same;
    if (PyDict_GetItemWithError(dict, s_training) != PyTuple_GET_ITEM(part, 4))
        return 0;
    for (int i = 0; i < 4; i++) {
        PyObject *table = PyDict_GetItemWithError(dict, s_hooks[i]);
        if ((table ? PyObject_IsTrue(table) : 0) != (PyTuple_GET_ITEM(hooks, i) == Py_True))
            return 0;
    }
    for (int i = 0; i < 3; i++) {
        PyObject *pair = PyTuple_GET_ITEM(part, 6 + i), *table = PyDict_GetItemWithError(dict, s_tables[(i + 2) % 3]);
        if (!dict_is(table, PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1), 0))
            return 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors) && same == 1; i++)
        same = tensor_is(PyTuple_GET_ITEM(tensors, i), PyTuple_GET_ITEM(PyTuple_GET_ITEM(part, 10), i));
    return same;
}

/* as_they_were(parts): whether modules are as their parts say. */
static PyObject *as_they_were(PyObject *Py_UNUSED(module), PyObject *parts)
{
    int same = PyList_Check(parts);
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(parts); i++) {
        PyObject *part = Py_NewRef(PyList_GET_ITEM(parts, i));
        PyObject *dict = PyObject_GenericGetDict(PyTuple_GET_ITEM(part, 0), NULL);
        same = dict ? part_is(part, dict) : -1;
        Py_XDECREF(dict);
        Py_DECREF(part);
    }
    return PyErr_Occurred() ? NULL : PyBool_FromLong(same);
}

/* --- What bodies read (trace/body_reads.py) ---------------------------------------------------------------- */

/* What a place holds now, a new reference; NULL without an error: nothing, or it is none of the kinds below. */
static PyObject *held_now(long kind, PyObject *holder, PyObject *name, int *known)
{
    PyTypeObject *type = Py_TYPE(holder);
    PyObject *found = NULL;
    *known = 1;
    if (kind == 0 && PyDict_Check(holder)) /* an item of a dictionary */
        return Py_XNewRef(PyDict_GetItemWithError(holder, name));
    if (kind == 1 && PyType_Check(holder) && PyUnicode_CheckExact(name)) /* an attribute of a class */
        return Py_XNewRef(_PyType_Lookup((PyTypeObject *)holder, name));
    if (kind == 3 && PyUnicode_CheckExact(name) && (found = _PyType_Lookup(type, name)) && Py_TYPE(found)->tp_descr_get) {
        Py_INCREF(found); /* a slot of an object, a function's code */
        PyObject *now = Py_TYPE(found)->tp_descr_get(found, holder, (PyObject *)type);
        Py_DECREF(found);
        if (!now && PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Clear();
        return now;
    }
    *known = 0;
    return NULL;
}

/* first_other(items, start, missing): the first place from `start` on, their number if there is none, that does not hold
   the very object that it held. */
static PyObject *first_other(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *items, *missing;
    Py_ssize_t i;
    if (!PyArg_ParseTuple(args, "O!nO", &PyList_Type, &items, &i, &missing))
        return NULL;
    for (int same = 1; i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        PyObject *now = held_now(PyLong_AsLong(PyTuple_GET_ITEM(item, 0)), PyTuple_GET_ITEM(item, 1), PyTuple_GET_ITEM(item, 2), &same);
        if (PyErr_Occurred())
            return NULL;
        same = same && (now ? now : missing) == PyTuple_GET_ITEM(item, 3);
        Py_XDECREF(now);
        if (!same)
            break;
    }
    return PyLong_FromSsize_t(i);
}

#endif
