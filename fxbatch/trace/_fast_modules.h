/* Attributes of modules while a thread records. Part of _fast.c, whose names it uses. */

/* --- Attributes and calls of modules ------------------------------------------------------------------------------------

   A parameter, buffer or submodule is found by nn.Module.__getattr__, in Python, after the ordinary look-up has
   failed and made an exception. While some thread traces, classes of modules that are met find them here, in the
   same order; what is not found goes the ordinary way, which raises what it always raises. So do calls that were met
   before, which need no look-up of `__call__` and of the Method that is there while some thread traces. */

#define MAX_QUICK 256
static PyTypeObject *quick[MAX_QUICK];
static int quick_types, quick_on;
static getattrofunc plain_getattro;
static ternaryfunc plain_call;
static PyObject *plain_getattr, *plain_getattribute;

/* What a module's dictionary or tables have of this name, borrowed; NULL where they have none, maybe with an error. */
static PyObject *look_up(PyObject *dict, PyObject *name)
{
    PyObject *object = PyDict_GetItemWithError(dict, name);
    for (int i = 0; i < 3 && !object && !PyErr_Occurred(); i++) {
        PyObject *table = PyDict_GetItemWithError(dict, s_tables[i]);
        if (!table || !(PyDict_CheckExact(table) || PyODict_CheckExact(table)))
            return NULL;
        object = PyDict_GET_SIZE(table) ? PyDict_GetItemWithError(table, name) : NULL;
    }
    return object;
}

static PyObject *quick_getattro(PyObject *self, PyObject *name)
{
    PyObject *on_type = _PyType_Lookup(Py_TYPE(self), name), **place = on_type ? NULL : _PyObject_GetDictPtr(self);
    if (on_type && PyFunction_Check(on_type)) /* a method, which is always found */
        return PyObject_GenericGetAttr(self, name);
    PyObject *found = place && *place ? look_up(*place, name) : NULL;
    if (found)
        return Py_NewRef(found);
    return PyErr_Occurred() ? NULL : plain_getattro(self, name);
}

static PyObject *quick_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *result = NULL, *const *first = &PyTuple_GET_ITEM(args, 0);
    int parts = current ? is_by_parts(current, self, first, PyTuple_GET_SIZE(args), kwargs) : 0;
    if (parts < 0)
        return NULL;
    if (parts) {
        PyObject *bound = PyMethod_New(module_call, self);
        result = bound ? PyObject_Call(bound, args, kwargs) : NULL;
        Py_XDECREF(bound);
    } else if (current && PyTuple_GET_SIZE(args))
        result = call_function(current, self, first, PyTuple_GET_SIZE(args), kwargs, 0);
    return result || PyErr_Occurred() ? result : plain_call(self, args, kwargs);
}

/* quicken(types): while types may be quickened, those that find attributes as nn.Module does. */
static PyObject *quicken(PyObject *Py_UNUSED(module), PyObject *types)
{
    for (Py_ssize_t i = 0; PyTuple_CheckExact(types) && i < PyTuple_GET_SIZE(types); i++) {
        PyTypeObject *type = (PyTypeObject *)PyTuple_GET_ITEM(types, i);
        if (!quick_on || quick_types == MAX_QUICK || !PyType_Check(type) || type->tp_getattro != plain_getattro ||
            !PyType_IsSubtype(type, Module) || _PyType_Lookup(type, s_getattr) != plain_getattr ||
            _PyType_Lookup(type, s_getattribute) != plain_getattribute)
            continue;
        quick[quick_types++] = (PyTypeObject *)Py_NewRef(type);
        type->tp_getattro = quick_getattro;
        PyObject *call = _PyType_Lookup(type, s_call);
        if (type->tp_call == plain_call && call && Py_IS_TYPE(call, &MethodType) && !((Method *)call)->owner)
            type->tp_call = quick_call;
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
        if (type->tp_call == quick_call)
            type->tp_call = plain_call;
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
