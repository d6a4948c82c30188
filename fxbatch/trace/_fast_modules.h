/* Modules: their attributes while a thread records, and whether they and all that code reads are as they were. Part of
   _fast.c, whose names it uses. */

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
static PyObject *s_getattr, *s_getattribute, *s_tables[3];
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

/* --- Places as they were (trace/places.py) ------------------------------------------------------------------- */

enum { IN_DICT, IN_TYPE, IN_CELL, IN_SLOT, CONTENT, TYPES, MEMBERS, FILLED, TENSORS };

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

/* Whether a dictionary has these (names, values), in this order; kinds: values of these kinds. */
static int dict_is(PyObject *dict, PyObject *expected, int kinds)
{
    PyObject *names = PyTuple_GET_ITEM(expected, 0), *values = PyTuple_GET_ITEM(expected, 1), *name, *value;
    Py_ssize_t place = 0, i = 0;
    if (!dict || !PyDict_Check(dict) || PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(names))
        return 0;
    for (; PyDict_Next(dict, &place, &name, &value); i++) {
        PyObject *before = PyTuple_GET_ITEM(names, i);
        int same = kinds ? kind_is(value, PyTuple_GET_ITEM(values, i)) : value == PyTuple_GET_ITEM(values, i);
        if (same != 1)
            return same;
        if (name != before && !(PyUnicode_Check(name) && PyUnicode_Check(before) && !PyUnicode_Compare(name, before)))
            return 0;
    }
    return 1;
}

/* Whether an attribute of an object, of a slot or of its class's, is the very object that it was. */
static int slot_is(PyObject *holder, PyObject *name, PyObject *expected, PyObject *missing)
{
    PyTypeObject *type = Py_TYPE(holder);
    PyObject *found = PyUnicode_CheckExact(name) ? _PyType_Lookup(type, name) : NULL;
    if (!found || !Py_TYPE(found)->tp_descr_get)
        return 0;
    Py_INCREF(found);
    PyObject *now = Py_TYPE(found)->tp_descr_get(found, holder, (PyObject *)type);
    Py_DECREF(found);
    if (!now && PyErr_ExceptionMatches(PyExc_AttributeError))
        PyErr_Clear();
    int same = (now ? now : missing) == expected;
    Py_XDECREF(now);
    return same;
}

/* Whether a place holds what it held; 0 too where Python has to tell. */
static int holds_still(long kind, PyObject *holder, PyObject *name, PyObject *expected, PyObject *missing)
{
    PyObject *now = NULL;
    int in_dict = PyDict_Check(holder) && (kind == IN_DICT || kind == MEMBERS);
    if (in_dict && !(now = PyDict_GetItemWithError(holder, name)) && PyErr_Occurred())
        return 0;
    if (kind == IN_TYPE && PyType_Check(holder) && PyUnicode_CheckExact(name))
        return ((now = _PyType_Lookup((PyTypeObject *)holder, name)) ? now : missing) == expected;
    switch (kind) {
    case IN_DICT:
        return in_dict && (now ? now : missing) == expected;
    case IN_SLOT:
        return slot_is(holder, name, expected, missing);
    case TYPES:
        return dict_is(holder, expected, 1) == 1;
    case MEMBERS:
        return in_dict && dict_is(now, expected, 0) == 1;
    }
    int same = kind == FILLED || kind == TENSORS;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(expected); i++) {
        PyObject *before = PyTuple_GET_ITEM(expected, i);
        if (kind == TENSORS)
            same = tensor_is(PyTuple_GET_ITEM(holder, i), before);
        else if ((now = PyDict_GetItemWithError(holder, PyTuple_GET_ITEM(name, i))) || !PyErr_Occurred())
            same = (now ? PyObject_IsTrue(now) : 0) == (before == Py_True);
    }
    return same == 1;
}

/* first_other(places, start, missing): the first place from `start` on, their number if there is none, that does not
   hold what it held; or holds another object, of which Python tells whether it is equal. */
static PyObject *first_other(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *places, *missing;
    Py_ssize_t i;
    if (!PyArg_ParseTuple(args, "O!nO", &PyList_Type, &places, &i, &missing))
        return NULL;
    for (int same = 1; i < PyList_GET_SIZE(places); i += same) {
        PyObject *p = Py_NewRef(PyList_GET_ITEM(places, i));
        same = holds_still(PyLong_AsLong(PyTuple_GET_ITEM(p, 0)), PyTuple_GET_ITEM(p, 1), PyTuple_GET_ITEM(p, 2),
                           PyTuple_GET_ITEM(p, 3), missing);
        Py_DECREF(p);
        if (!same || PyErr_Occurred())
            break;
    }
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(i);
}

#endif
