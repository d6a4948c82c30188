/* The hot path of recording: calls that were met before, with Values and constants as arguments.

   One table has them (CallTable), which Python fills: what is not in it goes the long way (trace/calls.py, modules.py),
   as every call does where this extension was not built. State lives in the slots of Python objects, read and written
   by their offsets, so that both sides see the same recorder.

   Values are used again (_fast_values.h): making an object of a subclass of torch.Tensor costs as much as all the rest. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <math.h>
#include <stdint.h>

#include "_fast_dlpack.h"
#include "_fast_columns.h"
#include "_fast_values.h"
#include "_fast_constants.h"
#include "_fast_arguments.h"
#include "_fast_views.h"
#include "_fast_numbers.h"

/* --- Writes in place ------------------------------------------------------------------------------------------ */

enum { WRITES_NOTHING, GIVES_TARGET, GIVES_NONE, WRITES_OTHERWISE, GIVES_SAME, GIVES_ROW }; /* Entry.written_as */

/* Whether a value can get another content by another number: views, constants and what autograd does not see are
   Python's. Its own views are recorded anew when they are used (is_stale). */
static int may_be_rewritten(PyObject *recorder, PyObject *v)
{
    return !SLOT(v, at.view) && !(WHOLE(v, at.flags) & NOT_WRITTEN_HERE) && counts_for_gradients(recorder);
}

/* Record a call whose only output is the new content of v; -1 without an error where it is for Python. */
static int rewrite(PyObject *recorder, PyObject *v, PyObject *entry, const Input *read, Py_ssize_t n)
{
    PyObject *types = SLOT(entry, at.types);
    if (WHOLE(entry, at.written) == WRITES_OTHERWISE || PyLong_AsLongLong(PyTuple_GET_ITEM(types, 0)) != WHOLE(v, at.type))
        return -1;
    const char *gradients = gradients_of(recorder, entry, read, n);
    if (!gradients || append_row(recorder, entry, read, n) < 0)
        return -1;
    WHOLE(v, at.value) = WHOLE(recorder, at.count)++;
    WHOLE(v, at.flags) = gradients[0] & 2 ? REQUIRES_GRAD : 0;
    WHOLE(v, at.writes)++;
    return 0;
}

/* --- Numbers of Python that differ from call to call (python_numbers.py) --------------------------------------- */

/* Which of two arguments is a number, where the other is a value: 0 or 1; -1 for other calls. */
static int number_place(const Arguments *a, PyObject *const *args, Py_ssize_t n)
{
    if (n != 2 || a->n != 3 || a->read != 1)
        return -1;
    int place = Py_IS_TYPE(args[0], Value) ? 1 : 0;
    return PyFloat_CheckExact(args[place]) || PyLong_CheckExact(args[place]) ? place : -1;
}

/* The same call with any number of this type there. */
static Call with_any_number(Call call, int place)
{
    call.tokens[place + 1].number = 0;
    call.mode = ~call.mode;
    call.hash = call_hash(&call);
    return call;
}

/* The number of the value that a number is in this recording; -1 on error. Equal ones are one value, but for zeros. */
static int64_t number_id(PyObject *recorder, PyObject *entry, int place, PyObject *number)
{
    PyObject *all = SLOT(recorder, at.number_ids), *sid = PyLong_FromLongLong(WHOLE(entry, at.sid));
    PyObject *ids = sid ? PyDict_GetItemWithError(all, sid) : NULL;
    PyObject *id = ids ? Py_XNewRef(PyDict_GetItemWithError(ids, number)) : NULL;
    if (!id && !PyErr_Occurred()) {
        PyObject *at_place = PyLong_FromLong(place);
        id = at_place ? PyObject_CallFunctionObjArgs(slow_number, recorder, entry, at_place, number, NULL) : NULL;
        Py_XDECREF(at_place);
    }
    int64_t found = id ? PyLong_AsLongLong(id) : -1;
    Py_XDECREF(id);
    Py_XDECREF(sid);
    return found;
}

/* The result of a call of a value with a number, which was met with others; NULL without an error where it was not. */
static PyObject *call_with_number(PyObject *recorder, PyObject *func, Arguments *a, PyObject *const *args, Py_ssize_t n)
{
    int place = number_place(a, args, n);
    CallTable *table = table_of(recorder);
    if (place < 0 || !table->used)
        return NULL;
    Call wanted = with_any_number(call_of(recorder, func, a), place);
    PyObject *entry = call_place(table->calls, table->room, &wanted)->entry, *result = NULL;
    if (!entry)
        return NULL;
    Py_INCREF(entry);
    int64_t id = number_id(recorder, entry, place, args[place]);
    if (id >= 0) {
        Input read[] = {a->inputs[0], a->inputs[0]};
        read[place] = (Input){NULL, id};
        result = record(recorder, entry, read, 2);
    }
    Py_DECREF(entry);
    return result;
}

/* The result of a call of parameters alone, which is recorded once a recording: another Value of one number. */
static PyObject *record_once(PyObject *recorder, PyObject *entry)
{
    PyObject *once = SLOT(recorder, at.once), *sid = PyLong_FromLongLong(WHOLE(entry, at.sid)), *result = NULL;
    PyObject *number = sid ? PyDict_GetItemWithError(once, sid) : NULL;
    const char *gradients = number ? gradients_of(recorder, entry, NULL, 0) : NULL;
    if (gradients)
        result = value_of_number(recorder, PyLong_AsLongLong(number),
                                 PyLong_AsLongLong(PyTuple_GET_ITEM(SLOT(entry, at.types), 0)),
                                 gradients[0] & 2 ? REQUIRES_GRAD : 0);
    else if (!PyErr_Occurred() && (result = record(recorder, entry, NULL, 0))) {
        number = PyLong_FromLongLong(WHOLE(result, at.value));
        if (!number || PyDict_SetItem(once, sid, number) < 0)
            Py_CLEAR(result);
        Py_XDECREF(number);
    }
    Py_XDECREF(sid);
    return result;
}

/* The result of a call that was met before; NULL without an error when it was not. views: see Arguments. */
static PyObject *call_function(PyObject *recorder, PyObject *func, PyObject *const *args, Py_ssize_t n,
                            PyObject *names, int views)
{
    CallTable *table = table_of(recorder);
    Arguments a;
    if (!table->used || !has_columns(recorder) || !modes_as_recorded(recorder) ||
        tokenise_all(&a, recorder, args, n, names, views) <= 0)
        return NULL;
    Call wanted = call_of(recorder, func, &a);
    PyObject *entry = NULL, *result = NULL;
    if (table->used) /* new constants may have run anything */
        entry = call_place(table->calls, table->room, &wanted)->entry;
    if (entry && holds(entry)) {
        Py_INCREF(entry);
        if (WHOLE(entry, at.comes_once))
            result = record_once(recorder, entry);
        else if (WHOLE(entry, at.written) == WRITES_NOTHING)
            result = record(recorder, entry, a.inputs, a.read);
        else if (WHOLE(entry, at.written) == GIVES_ROW) {
            if ((result = record(recorder, entry, a.inputs, a.read)))
                WHOLE(result, at.flags) |= COPIED_ROW;
        } else if (WHOLE(entry, at.written) == GIVES_SAME)
            result = n && a.read && args[0] == a.inputs[0].value ? Py_NewRef(args[0]) : NULL;
        else if (a.read && n && value_at(recorder, args[0]) == a.inputs[0].value &&
                 may_be_rewritten(recorder, a.inputs[0].value) &&
                 rewrite(recorder, a.inputs[0].value, entry, a.inputs, a.read) == 0)
            result = Py_NewRef(WHOLE(entry, at.written) == GIVES_TARGET ? args[0] : Py_None);
        if (result && WHOLE(entry, at.written) == WRITES_NOTHING && PyTuple_GET_SIZE(SLOT(entry, at.aliases)) &&
            link_views(recorder, entry, result, &a, args, n, names) < 0)
            Py_CLEAR(result);
        Py_DECREF(entry);
    } else if (!entry && !PyErr_Occurred())
        result = call_with_number(recorder, func, &a, args, n);
    arguments_free(&a);
    return result;
}

/* Whether writes.set_row has written a row: its arguments are (x, index, row); -1 on error. */
static int row_written(PyObject *recorder, PyObject *args)
{
    PyObject *written = PyObject_CallFunctionObjArgs(slow_row_write, recorder, args, NULL);
    int done = written ? written == Py_True : -1;
    Py_XDECREF(written);
    return done;
}

/* A function that writes to its first argument, by the same function that doesn't; NULL without an error where it is for
   Python. */
static PyObject *call_in_place(PyObject *recorder, PyObject *pure, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    if (!modes_as_recorded(recorder)) /* before anything is asked that depends on them */
        return NULL;
    PyObject *v = n ? value_at(recorder, args[0]) : NULL;
    int plain = v && may_be_rewritten(recorder, v);
    if (!plain && (!v || row_shown(v) < 0 || WHOLE(SLOT(SLOT(v, at.view), at.root), at.flags) & NOT_WRITTEN_HERE))
        return NULL;
    PyObject *content = call_function(recorder, pure, args, n, names, 1), *result = NULL;
    if (!plain) {
        int done = content && Py_IS_TYPE(content, Value) ? rewrite_row(recorder, v, content) : 0;
        result = done > 0 ? Py_NewRef(args[0]) : NULL;
    } else if (content && Py_IS_TYPE(content, Value) && WHOLE(content, at.type) == WHOLE(v, at.type) && !SLOT(content, at.view)) {
        WHOLE(v, at.value) = WHOLE(content, at.value);
        WHOLE(v, at.flags) = WHOLE(content, at.flags) & REQUIRES_GRAD;
        WHOLE(v, at.writes)++;
        result = Py_NewRef(args[0]);
    }
    Py_XDECREF(content);
    return result;
}

/* Whether a parameter among the arguments belongs to none of the modules that are watched; -1 on error. */
static int has_foreign_parameter(PyObject *recorder, const Arguments *a)
{
    int owned = 1;
    for (Py_ssize_t i = 0; i < a->n && owned > 0; i++)
        if (is_parameter(Py_TYPE(a->tokens[i].object)))
            owned = is_owned(recorder, a->tokens[i].object);
    return owned < 0 ? -1 : !owned;
}

/* Put a call into the table; -1 on error. */
static int table_put(CallTable *table, Call call, Arguments *a, PyObject *entry)
{
    Call *place = call_place(table->calls, table->room, &call);
    if (place->func) { /* what it read has changed */
        Py_SETREF(place->entry, Py_NewRef(entry));
        return 0;
    }
    if (!(call.tokens = PyMem_Malloc(a->n * sizeof(Token)))) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < a->n; i++) {
        call.tokens[i] = a->tokens[i];
        Py_INCREF(call.tokens[i].object);
    }
    Py_INCREF(call.func);
    call.entry = Py_NewRef(entry);
    *place = call;
    table->used++;
    return 0;
}

/* remember(recorder, func, args, kwargs, entry, any_number=False): such calls are recorded as this entry from now on;
   any_number: with any number in place of the one among the two arguments, which is an input of the entry. */
static PyObject *remember(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *recorder, *func, *given, *kwargs, *entry;
    int any_number = 0;
    Arguments a;
    if (!PyArg_ParseTuple(args, "OOO!O!O|p", &recorder, &func, &PyTuple_Type, &given, &PyDict_Type, &kwargs, &entry,
                          &any_number))
        return NULL;
    CallTable *table = table_of(recorder);
    if (table->used >= MAX_CALLS || !has_columns(recorder))
        Py_RETURN_NONE;
    int known = tokenise_all(&a, recorder, &PyTuple_GET_ITEM(given, 0), PyTuple_GET_SIZE(given), kwargs,
                             !PyObject_TypeCheck(func, Module));
    if (known <= 0)
        return known < 0 ? NULL : Py_NewRef(Py_None);
    int foreign = has_foreign_parameter(recorder, &a);
    int place = any_number ? number_place(&a, &PyTuple_GET_ITEM(given, 0), PyTuple_GET_SIZE(given)) : -1;
    if (foreign >= 0 && (place >= 0 || !any_number)) {
        Call call = call_of(recorder, func, &a);
        table->foreign |= foreign;
        if ((4 * table->used >= 3 * table->room && table_grow(table) < 0) ||
            table_put(table, place < 0 ? call : with_any_number(call, place), &a, entry) < 0)
            foreign = -1;
    }
    arguments_free(&a);
    return foreign < 0 ? NULL : Py_NewRef(Py_None);
}

/* recorded_before(recorder, func, args, kwargs): the result of a call that was met before, else None. */
static PyObject *recorded_before(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n)
{
    if (n != 4 || !PyTuple_Check(args[2]) || !PyDict_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "recorded_before(recorder, func, args, kwargs)");
        return NULL;
    }
    PyObject *result = call_function(args[0], args[1], &PyTuple_GET_ITEM(args[2], 0), PyTuple_GET_SIZE(args[2]),
                                     args[3], !PyObject_TypeCheck(args[1], Module));
    return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

/* Indices of plain numbers, slices among them, as a part of a key (arguments._hashable); NULL for others. */
static PyObject *index_keys(PyObject *const *items, Py_ssize_t n);
static PyObject *index_key(PyObject *x)
{
    if (x == Py_None || x == Py_Ellipsis || PyLong_CheckExact(x))
        return Py_NewRef(x);
    if (PyTuple_CheckExact(x))
        return index_keys(&PyTuple_GET_ITEM(x, 0), PyTuple_GET_SIZE(x));
    if (!PySlice_Check(x))
        return NULL;
    PyObject *ends[] = {((PySliceObject *)x)->start, ((PySliceObject *)x)->stop, ((PySliceObject *)x)->step};
    for (int i = 0; i < 3; i++)
        if (ends[i] != Py_None && !PyLong_CheckExact(ends[i]))
            return NULL;
    return PyTuple_Pack(4, &PySlice_Type, ends[0], ends[1], ends[2]);
}

static PyObject *index_keys(PyObject *const *items, Py_ssize_t n)
{
    PyObject *keys = PyTuple_New(n), *key;
    for (Py_ssize_t i = 0; keys && i < n; i++)
        if ((key = index_key(items[i])))
            PyTuple_SET_ITEM(keys, i, key);
        else
            Py_CLEAR(keys);
    return keys;
}

/* A view of a bare parameter, or of a view of it, that was asked for before by plain numbers (arguments.bare_function); NULL
   for others. */
static PyObject *view_of_bare(PyObject *recorder, PyObject *func, PyObject *const *args, Py_ssize_t n)
{
    PyObject *asked = SLOT(SLOT(recorder, at.heard), at.views_asked), *view = NULL;
    if (!PyDict_GET_SIZE(asked) || !modes_as_recorded(recorder))
        return NULL;
    if (func == getitem && n == 2 && PyLong_CheckExact(args[1]) && Py_IS_TYPE(args[0], BareParameter) &&
        ((view = row_of_table(recorder, args[0], args[1])) || PyErr_Occurred()))
        return view;
    unsigned long long of = (unsigned long long)(uintptr_t)args[0];
    long long mode = WHOLE(KNOWN(recorder), at.mode);
    PyObject *by = index_keys(args + 1, n - 1), *key = by ? Py_BuildValue("(OKNL)", func, of, by, mode) : NULL;
    if (key)
        view = Py_XNewRef(PyDict_GetItemWithError(asked, key));
    Py_XDECREF(key);
    return view;
}

/* __torch_function__(func, types, args=(), kwargs=None) of values, and of bare parameters */
static PyObject *torch_function(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    if (current && !kwnames && (n == 3 || n == 4) && PyTuple_CheckExact(args[2]) &&
        (n == 3 || args[3] == Py_None || PyDict_CheckExact(args[3]))) {
        PyObject *names = n == 4 && args[3] != Py_None ? args[3] : NULL;
        PyObject *pure = PyDict_GetItemWithError(pure_forms, args[0]), *const *given = &PyTuple_GET_ITEM(args[2], 0);
        PyObject *result = NULL;
        Py_ssize_t given_n = PyTuple_GET_SIZE(args[2]);
        int is_like = pure == Py_None;
        int of_real = (pure || args[0] == setitem) && given_n && Py_IS_TYPE(given[0], Tensor); /* which may become a value */
        if (given_n && !names && (Py_IS_TYPE(given[0], BareParameter) || Py_IS_TYPE(given[0], BareView)))
            result = view_of_bare(current, args[0], given, given_n);
        if (!result && !of_real && !PyErr_Occurred())
            result = pure && !is_like ? call_in_place(current, pure, given, given_n, names)
                          : call_function(current, args[0], given, given_n, names, 1);
        if (result || PyErr_Occurred())
            return result;
    }
    PyObject *slow = slow_bare; /* of bare parameters alone */
    for (Py_ssize_t i = 0; n > 1 && PyTuple_CheckExact(args[1]) && i < PyTuple_GET_SIZE(args[1]); i++) {
        PyObject *type = PyTuple_GET_ITEM(args[1], i);
        if (type == (PyObject *)WrittenTensor)
            slow = slow_written;
        else if (type == (PyObject *)Value && slow == slow_bare)
            slow = slow_torch_function;
    }
    return PyObject_Vectorcall(slow, args, n, kwnames);
}

/* Whether nobody but Value has a say in a call with this argument. */
static int ours_alone(PyObject *x)
{
    PyTypeObject *t = Py_TYPE(x);
    return t == Value || t == WrittenTensor || t == Tensor || is_parameter(t) || x == Py_None;
}

/* has_torch_function_variadic(*arguments), which torch.nn.functional asks before each handle_torch_function. */
static PyObject *has_torch_function(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    for (Py_ssize_t i = 0; current && i < n; i++)
        if ((Py_IS_TYPE(args[i], Value) || Py_IS_TYPE(args[i], WrittenTensor)) && mode_is(functions_enabled, Py_True))
            Py_RETURN_TRUE;
    return PyObject_Vectorcall(slow_question, args, n, kwnames);
}

/* torch.overrides.handle_torch_function(public_api, relevant_args, *args, **kwargs) */
static PyObject *handle_torch_function(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n,
                                       PyObject *kwnames)
{
    int ours = current && n >= 2 && PyTuple_CheckExact(args[1]) && mode_is(modes_enabled, Py_False);
    for (Py_ssize_t i = 0; ours && i < PyTuple_GET_SIZE(args[1]); i++)
        ours = ours_alone(PyTuple_GET_ITEM(args[1], i));
    if (ours) {
        PyObject *result = call_function(current, args[0], args + 2, n - 2, kwnames, 1);
        if (result || PyErr_Occurred())
            return result;
    }
    return PyObject_Vectorcall(slow_handle, args, n, kwnames);
}

/* --- Method: a method with a fast path and the Python function behind it ------------------------------------ */

/* Whether it was met that a module is recorded by its parts, whatever it is given or with arguments of these types
   (modules._is_by_parts); -1 on error. */
static int is_by_parts(PyObject *recorder, PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *met = SLOT(recorder, at.by_parts);
    if (!PySet_GET_SIZE(met))
        return 0;
    PyObject *number = PyLong_FromVoidPtr(module), *key = NULL;
    int found = number ? PySet_Contains(met, number) : -1;
    if (!found && !names && (key = PyTuple_New(n + 1))) {
        PyTuple_SET_ITEM(key, 0, Py_NewRef(number));
        for (Py_ssize_t i = 0; i < n; i++)
            PyTuple_SET_ITEM(key, i + 1, Py_NewRef(Py_TYPE(args[i])));
        found = PySet_Contains(met, key);
    }
    Py_XDECREF(key);
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : found;
}

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *owner; /* a function that its arguments are given to; NULL: the first argument is a module */
    PyObject *slow;
    int how; /* of a method that gives a number: as what; IN_PLACE: it writes to its first argument, by `owner` */
} Method;

/* Whether an index says something of all of a tensor: slices, None, positions. Others begin with a row, or are read first. */
static int for_all_of_it(PyObject *index)
{
    if (PyTuple_CheckExact(index) && PyTuple_GET_SIZE(index))
        index = PyTuple_GET_ITEM(index, 0);
    if (Py_IS_TYPE(index, Tensor)) { /* a position, without dimensions, is read */
        Described described;
        return describe(index, &described) && described.ndim;
    }
    return PySlice_Check(index) || index == Py_None || index == Py_Ellipsis;
}

/* Whether an index is several plain numbers, as in x[i, j]. */
static int is_place(PyObject *index)
{
    Py_ssize_t n = PyTuple_CheckExact(index) ? PyTuple_GET_SIZE(index) : 0, i = 0;
    while (i < n && PyLong_CheckExact(PyTuple_GET_ITEM(index, i)))
        i++;
    return n && i == n;
}

/* x[i] = y or x[i, j] = y for numbers i, j; 1 where it is done, 0 where it is another write, -1 on error. No row is put
   together with the others for it. */
static int set_item(PyObject *recorder, PyObject *const *args)
{
    PyObject *target = value_at(recorder, args[0]);
    int done = PyLong_CheckExact(args[1]) ? set_row(recorder, target, args[1], args[2]) : 0;
    int kept_apart = target && is_stale(target) &&
                     (SLOT(target, at.view) || PyFloat_CheckExact(args[2]) || PyLong_CheckExact(args[2]));
    if (done || !target || !modes_as_recorded(recorder) || !(is_place(args[1]) || kept_apart))
        return done;
    PyObject *given = PyTuple_Pack(3, target, args[1], args[2]);
    done = given ? row_written(recorder, given) : -1;
    Py_XDECREF(given);
    return done;
}

/* Whether a call is x[:, t], where rows of x were written to: it may be one of these. */
static int is_row_of_written(PyObject *owner, PyObject *const *args, Py_ssize_t n)
{
    PyObject *target = owner && owner == getitem && n == 2 && PyTuple_CheckExact(args[1]) ? value_at(current, args[0]) : NULL;
    return target && SLOT(target, at.rows);
}

static PyObject *method_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Method *m = (Method *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (m->how == IN_PLACE) {
        PyObject *result = current ? call_in_place(current, m->owner, args, n, kwnames) : NULL;
        if (result || PyErr_Occurred())
            return result;
    } else if (m->owner == getitem && m->owner && n == 2 && !kwnames && !for_all_of_it(args[1])) {
        PyObject *result = current && PyLong_CheckExact(args[1]) ? row_of_value(current, args) : NULL;
        if (result || PyErr_Occurred())
            return result;
    } else if (m->owner == setitem && m->owner && n == 3 && !kwnames && current &&
               (PyLong_CheckExact(args[1]) || is_place(args[1]))) {
        int done = set_item(current, args);
        if (done)
            return done < 0 ? NULL : Py_NewRef(Py_None);
    } else if (current && (m->owner || n >= (kwnames ? 1 : 2)) && !is_row_of_written(m->owner, args, n)) {
        int parts = m->owner ? 0 : is_by_parts(current, args[0], args + 1, n - 1, kwnames);
        if (parts)
            return parts < 0 ? NULL : PyObject_Vectorcall(module_call, args, nargsf, kwnames);
        PyObject *result = m->owner ? call_function(current, m->owner, args, n, kwnames, 1)
                                    : call_function(current, args[0], args + 1, n - 1, kwnames, 0);
        if (result || PyErr_Occurred())
            return result;
    }
    return PyObject_Vectorcall(m->slow, args, nargsf, kwnames);
}

/* A method that gives a number of a value that was computed: it is read where it lies. */
static PyObject *reader_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Method *m = (Method *)self;
    if (PyVectorcall_NARGS(nargsf) == 1 && !kwnames) {
        PyObject *found = settled_number(args[0], m->how);
        if (found || PyErr_Occurred())
            return found;
    }
    return PyObject_Vectorcall(m->slow, args, nargsf, kwnames);
}

static PyObject *method_get(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    return object && object != Py_None ? PyMethod_New(self, object) : Py_NewRef(self);
}

static PyObject *method_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *owner, *slow;
    int how = -1;
    if (!PyArg_ParseTuple(args, "OO|i", &owner, &slow, &how))
        return NULL;
    Method *m = (Method *)type->tp_alloc(type, 0);
    if (m) {
        m->how = how;
        m->call = how < 0 || how == IN_PLACE ? method_call : reader_call;
        m->owner = owner == Py_None ? NULL : Py_NewRef(owner);
        m->slow = Py_NewRef(slow);
    }
    return (PyObject *)m;
}

static void method_dealloc(PyObject *self)
{
    Py_XDECREF(((Method *)self)->owner);
    Py_XDECREF(((Method *)self)->slow);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef method_members[] = {{"__wrapped__", T_OBJECT_EX, offsetof(Method, slow), READONLY, NULL}, {NULL}};
static PyTypeObject MethodType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.trace._fast.Method",
    .tp_doc = "Method(owner, slow, how=-1): known calls of owner (None: of the module it is called on), else slow; "
              "how: the number of a computed value, else slow.",
    .tp_basicsize = sizeof(Method),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = method_new,
    .tp_dealloc = method_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Method, call),
    .tp_descr_get = method_get,
    .tp_members = method_members,
};

/* --- Function: a function of torch, while some thread records -------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *plain; /* torch's own, which it is taken for */
    PyObject *slow;  /* what takes its calls with what was recorded; NULL: they are recorded */
    int fills;       /* whether it gives a tensor of sizes with one content */
    PyObject *weak;
} Function;

static PyTypeObject FunctionType;

/* Whether one of these, or of what lists hold, is what torch would ask; at_large: or might be in another sequence. */
static int one_is_recorded(PyObject *const *x, Py_ssize_t n, int at_large, int depth)
{
    int recorded = 0;
    for (Py_ssize_t i = 0; !recorded && i < n; i++) {
        PyTypeObject *t = Py_TYPE(x[i]);
        recorded = t == Value || t == WrittenTensor || t == BareParameter || t == BareView;
        if (depth < 16 && (PyList_Check(x[i]) || PyTuple_Check(x[i])))
            recorded = one_is_recorded(PySequence_Fast_ITEMS(x[i]), PySequence_Fast_GET_SIZE(x[i]), at_large, depth + 1);
        else if (at_large && !PyUnicode_Check(x[i]))
            recorded |= PySequence_Check(x[i]);
    }
    return recorded;
}

/* What tells a call of a factory from others: where it stands, its modes and arguments (which of them are floats: 1 is
   1.0). NULL without an error for arguments other than sizes, numbers, a dtype and a device. */
static PyObject *factory_key(PyObject *recorder, PyObject *plain, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyFrameObject *frame = PyEval_GetFrame();
    Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    int usual = frame && n < 8, floats = 0;
    for (Py_ssize_t i = 0; usual && i < n; i++)
        if (PyFloat_CheckExact(args[i])) {
            floats |= 1 << i;
            usual = PyFloat_AS_DOUBLE(args[i]) == PyFloat_AS_DOUBLE(args[i]) && !signbit(PyFloat_AS_DOUBLE(args[i]));
        } else
            usual = PyLong_CheckExact(args[i]) || Py_IS_TYPE(args[i], Size) || is_place(args[i]) || (PyTuple_CheckExact(args[i]) && !PyTuple_GET_SIZE(args[i]));
    for (Py_ssize_t i = 0; usual && i < named; i++)
        usual = Py_IS_TYPE(args[n + i], Dtype) || Py_IS_TYPE(args[n + i], Device) || PyUnicode_CheckExact(args[n + i]);
    if (!usual)
        return NULL;
    PyCodeObject *code = PyFrame_GetCode(frame);
    PyObject *all = PyTuple_New(n + named);
    for (Py_ssize_t i = 0; all && i < n + named; i++)
        PyTuple_SET_ITEM(all, i, Py_NewRef(args[i]));
    PyObject *key = all ? Py_BuildValue("(OKiiLNO)", plain, (unsigned long long)(uintptr_t)code, PyFrame_GetLasti(frame), floats,
                                          (long long)WHOLE(KNOWN(recorder), at.mode), all, names ? names : Py_None)
                          : NULL;
    Py_DECREF(code);
    return key;
}

/* zeros(8), to which values were written in a recording before: a value from its beginning, one content for all. */
static PyObject *filled_tensor(PyObject *recorder, Function *f, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *key = mode_is(modes_enabled, Py_False) && modes_as_recorded(recorder) ? factory_key(recorder, f->plain, args, n, names) : NULL;
    PyObject *all = SLOT(recorder, at.filled), *made_by = SLOT(recorder, at.made_by), *result = NULL;
    PyObject *before = key ? PyDict_GetItemWithError(all, key) : NULL;
    if (before && before != Py_None)
        result = value_of_number(recorder, PyLong_AsLongLong(PyTuple_GET_ITEM(before, 0)), PyLong_AsLongLong(PyTuple_GET_ITEM(before, 1)), 0);
    else if (before)
        result = PyObject_CallFunctionObjArgs(slow_filled, recorder, key, NULL);
    else if (!PyErr_Occurred() && (result = PyObject_Vectorcall(f->plain, args, n, names)) && key && Py_IS_TYPE(result, Tensor)) {
        PyObject *id = PyLong_FromVoidPtr(result);
        if (!id || PyDict_SetItem(made_by, id, key) < 0)
            Py_CLEAR(result);
        Py_XDECREF(id);
    }
    Py_XDECREF(key);
    return result;
}

/* torch.tanh(v): torch would look itself up by name for __torch_function__, which takes four times as long. */
static PyObject *function_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Function *f = (Function *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    int recorded = current && one_is_recorded(args, n + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0), f->slow != NULL, 0);
    PyObject *result = NULL;
    if (current && !recorded && f->fills)
        return filled_tensor(current, f, args, n, kwnames);
    if (recorded && !f->slow && mode_is(functions_enabled, Py_True) && mode_is(modes_enabled, Py_False))
        result = call_function(current, f->plain, args, n, kwnames, 1);
    if (result || PyErr_Occurred())
        return result;
    return PyObject_Vectorcall(recorded && f->slow ? f->slow : f->plain, args, nargsf, kwnames);
}

static PyObject *plain_function(PyObject *Py_UNUSED(module), PyObject *x)
{
    return Py_NewRef(Py_IS_TYPE(x, &FunctionType) ? ((Function *)x)->plain : x);
}

static PyObject *function_getattro(PyObject *self, PyObject *name)
{
    return PyObject_GetAttr(((Function *)self)->plain, name);
}

static PyObject *function_repr(PyObject *self)
{
    return PyObject_Repr(((Function *)self)->plain);
}

static Py_hash_t function_hash(PyObject *self)
{
    return PyObject_Hash(((Function *)self)->plain);
}

static PyObject *function_equal(PyObject *self, PyObject *other, int op)
{
    if (Py_IS_TYPE(other, &FunctionType))
        other = ((Function *)other)->plain;
    return PyObject_RichCompare(((Function *)self)->plain, other, op);
}

static PyObject *function_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *plain, *slow = NULL;
    int fills = 0;
    Function *f = PyArg_ParseTuple(args, "O|Op", &plain, &slow, &fills) ? (Function *)type->tp_alloc(type, 0) : NULL;
    if (f) {
        f->fills = fills;
        f->call = function_call;
        f->plain = Py_NewRef(plain);
        f->slow = Py_XNewRef(slow);
    }
    return (PyObject *)f;
}

static void function_dealloc(PyObject *self)
{
    PyObject_ClearWeakRefs(self);
    Py_XDECREF(((Function *)self)->plain);
    Py_XDECREF(((Function *)self)->slow);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject FunctionType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.trace._fast.Function",
    .tp_doc = "Function(plain, slow=None, fills=False): a function of torch, of which known calls are recorded at once, or slow takes "
              "those with what was recorded. In all else it is as torch's.",
    .tp_basicsize = sizeof(Function),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = function_new,
    .tp_dealloc = function_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Function, call),
    .tp_weaklistoffset = offsetof(Function, weak),
    .tp_getattro = function_getattro,
    .tp_repr = function_repr,
    .tp_hash = function_hash,
    .tp_richcompare = function_equal,
};

#include "_fast_modules.h"

/* --- Module --------------------------------------------------------------------------------------------------- */

static PyObject *set_current(PyObject *Py_UNUSED(module), PyObject *recorder)
{
    PyObject *before = current;
    int usable = Recorder && PyObject_TypeCheck(recorder, Recorder);
    current = usable ? Py_NewRef(recorder) : NULL;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

/* The getter of an attribute of torch.Tensor; NULL with an error where it is no getter in C. */
static const PyGetSetDef *getter_of(PyObject *tensor, const char *name)
{
    PyObject *descriptor = PyObject_GetAttrString(tensor, name);
    const PyGetSetDef *found = NULL;
    if (descriptor && Py_IS_TYPE(descriptor, &PyGetSetDescr_Type))
        found = ((PyGetSetDescrObject *)descriptor)->d_getset;
    else if (descriptor)
        PyErr_Format(PyExc_TypeError, "torch.Tensor.%s is no getter", name);
    Py_XDECREF(descriptor); /* its class keeps it */
    return found;
}

/* What setup is given by name; all of it lives as long as the process. */
static struct {
    const char *name;
    void *where; /* a PyObject * or a PyTypeObject * */
} const given_objects[] = {
    {"Value", &Value}, {"Tensor", &Tensor}, {"Parameter", &Parameter}, {"Module", &Module}, {"dtype", &Dtype},
    {"device", &Device}, {"Size", &Size}, {"Columns", &Recorder}, {"Knowledge", &Knowledge}, {"Entry", &Entry},
    {"plain_new", &plain_new}, {"module_call", &module_call}, {"build_result", &build_result}, {"constant", &slow_constant},
    {"row_of_parameter", &slow_row}, {"number_id", &slow_number}, {"sync_modes", &slow_sync}, {"set_row", &slow_row_write},
    {"filled", &slow_filled}, {"link_views", &slow_link}, {"refresh", &slow_refresh}, {"View", &View}, {"Written", &Written}, {"WrittenTensor", &WrittenTensor}, {"getitem", &getitem},
    {"setitem", &setitem},
    {"operands_require", &operands_require}, {"pure_forms", &pure_forms}, {"written_function", &slow_written}, {"torch_function", &slow_torch_function},
    {"BareParameter", &BareParameter}, {"BareView", &BareView}, {"Heard", &Heard}, {"bare_function", &slow_bare},
    {"handle_torch_function", &slow_handle}, {"has_torch_function", &slow_question},
};

static struct {
    const char *name;
    PyObject **where; /* functions in C without arguments */
} const given_questions[] = {
    {"is_grad_enabled", &grad_enabled}, {"any_autocast", &autocast_enabled}, {"default_dtype", &default_dtype},
    {"modes_enabled", &modes_enabled}, {"functions_enabled", &functions_enabled},
};

static struct {
    const char *name;
    const PyGetSetDef **where;
} const getters[] = {
    {"_version", &get_version}, {"_base", &get_base},
    {"requires_grad", &get_requires_grad}, {"grad_fn", &get_grad_fn},
};

static struct {
    PyTypeObject **type;
    const char *name;
    Py_ssize_t *offset;
    int whole;
} const slots[] = {
    {&Value, "_value", &at.value, 1}, {&Value, "_type", &at.type, 1}, {&Value, "_recorder", &at.recorder},
    {&Value, "_view", &at.view}, {&Value, "_rows", &at.rows},
    {&Value, "_flags", &at.flags, 1}, {&Value, "_writes", &at.writes, 1}, {&Entry, "sid", &at.sid, 1}, {&Entry, "types", &at.types},
    {&Entry, "single", &at.single}, {&Entry, "is_tuple", &at.is_tuple}, {&Entry, "aliases", &at.aliases}, {&Entry, "target", &at.target},
    {&Entry, "guards", &at.guards}, {&Recorder, "sigs", &at.sigs}, {&Recorder, "inputs", &at.inputs},
    {&Recorder, "count", &at.count, 1}, {&Recorder, "knowledge", &at.knowledge}, {&Recorder, "constants", &at.constants},
    {&Recorder, "payload", &at.payload}, {&Knowledge, "call_table", &at.table}, {&Knowledge, "mode", &at.mode, 1},
    {&Knowledge, "grad", &at.grad}, {&Knowledge, "autocast", &at.autocast}, {&Knowledge, "floats", &at.floats},
    {&Knowledge, "owners", &at.owners}, {&Knowledge, "constant_entries", &at.entries},
    {&Recorder, "settled", &at.settled}, {&Recorder, "by_parts", &at.by_parts},
    {&Recorder, "lifted", &at.lifted}, {&Recorder, "row_calls", &at.row_calls}, {&Recorder, "number_ids", &at.number_ids}, {&Recorder, "once", &at.once},
    {&Recorder, "values", &at.values}, {&Recorder, "filled", &at.filled}, {&Recorder, "made_by", &at.made_by}, {&Recorder, "uses", &at.uses}, {&Recorder, "views_met", &at.views_met}, {&Recorder, "graded", &at.graded}, {&Recorder, "heard", &at.heard}, {&Heard, "again", &at.views_asked}, {&Recorder, "base", &at.base, 1},
    {&View, "source", &at.source}, {&View, "root", &at.root}, {&View, "source_type", &at.source_type, 1},
    {&View, "call", &at.call}, {&View, "output", &at.output, 1}, {&View, "again", &at.again},
    {&View, "grad", &at.through}, {&View, "seen", &at.seen, 1}, {&Written, "value", &at.stands_for},
    {&Entry, "carries", &at.carries}, {&Entry, "operands", &at.operands}, {&Entry, "asked_in", &at.asked_in, 1},
    {&Entry, "requires", &at.requires, 1}, {&Entry, "written_as", &at.written, 1}, {&Entry, "once", &at.comes_once, 1},
};

static PyObject *not_as_expected(void)
{
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "torch is not as this was written for");
    return NULL;
}

#define EACH(i, table) for (size_t i = 0; i < sizeof table / sizeof *table; i++)

/* setup(what is given by name, addresses of torch's C++, the capsule of DLPack's exchange interface or None); once. */
static PyObject *setup(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *given, *capsule;
    unsigned long long address[4];
    if (!PyArg_ParseTuple(args, "O!(KKKK)O", &PyDict_Type, &given, &address[0], &address[1], &address[2], &address[3],
                          &capsule))
        return NULL;
    if (Value) {
        PyErr_SetString(PyExc_RuntimeError, "set up already");
        return NULL;
    }
    EACH(i, given_objects) if (!(*(PyObject **)given_objects[i].where =
                                     Py_XNewRef(PyDict_GetItemString(given, given_objects[i].name))))
        return not_as_expected();
    EACH(i, given_questions)
    {
        PyObject *f = PyDict_GetItemString(given, given_questions[i].name);
        if (!f || !PyCFunction_Check(f) || PyCFunction_GET_FLAGS(f) != METH_NOARGS)
            return not_as_expected();
        *given_questions[i].where = Py_NewRef(f);
    }
    EACH(i, slots) if (slot((PyObject *)*slots[i].type, slots[i].name, slots[i].offset, slots[i].whole) < 0) return NULL;
    EACH(i, getters) if (!(*getters[i].where = getter_of((PyObject *)Tensor, getters[i].name))) return NULL;
    exchange = exchange_of(capsule);
    if (PyErr_Occurred() || !Value->tp_weaklistoffset)
        return not_as_expected();
    keys_excluded = (_Bool (*)(uint64_t))(uintptr_t)address[0];
    autocast_keys = address[1];
    grad_now = (_Bool (*)(void))(uintptr_t)address[2];
    dtype_now = (int8_t (*)(void))(uintptr_t)address[3];
    plain_getattro = Module->tp_getattro;
    plain_call = Module->tp_call;
    plain_getattr = Py_XNewRef(_PyType_Lookup(Module, s_getattr));
    plain_getattribute = Py_XNewRef(_PyType_Lookup(Module, s_getattribute));
    Py_RETURN_NONE;
}

/* usual_modes(recorder, grad): whether this thread records with it (None: it does not), with gradients so, and without
   autocast. */
static PyObject *usual_modes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n)
{
    return PyBool_FromLong(n == 2 && (current ? current : Py_None) == args[0] && grad_and_autocast_are(args[1], Py_False));
}

#if defined(__GNUC__) && defined(__x86_64__)
#define NO_CALLER ".cfi_undefined rip"
#elif defined(__GNUC__) && defined(__aarch64__)
#define NO_CALLER ".cfi_undefined x30"
#endif

/* stack_here(): how deep this thread's stack is, as an address; 0 where `at_bottom` can't be. */
static PyObject *stack_here(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
#ifdef NO_CALLER
    char here;
    return PyLong_FromVoidPtr(&here);
#else
    return PyLong_FromLong(0);
#endif
}

/* at_bottom(work): call it where who walks the stack finds its end. In a greenlet that is used again others have
   written to what lies behind it, and torch's exceptions look at all callers. */
static PyObject *at_bottom(PyObject *Py_UNUSED(module), PyObject *work)
{
#ifdef NO_CALLER
    __asm__ volatile(NO_CALLER);
#endif
    PyObject *found = PyObject_CallNoArgs(work);
#ifdef NO_CALLER
    __asm__ volatile("" ::: "memory"); /* no tail call */
#endif
    return found;
}

static PyMethodDef functions[] = {
    {"setup", setup, METH_VARARGS, "Say what the Python objects are; once."},
    {"set_current", set_current, METH_O, "Make a recorder (or None) this thread's current one."},
    {"value", (PyCFunction)(void (*)(void))new_value, METH_FASTCALL, "value(recorder, number, type, flags): a Value object."},
    {"usual_modes", (PyCFunction)(void (*)(void))usual_modes, METH_FASTCALL, "Whether a thread's modes are as expected."},
    {"stack_here", stack_here, METH_NOARGS, "How deep the stack is."},
    {"at_bottom", at_bottom, METH_O, "Call where the stack ends for who walks it."},
    {"plain_function", plain_function, METH_O, "Torch's own function where a Function stands for it."},
    {"quicken", quicken, METH_O, "Let modules of a class find their parameters and submodules in C."},
    {"quicken_modules", quicken_modules, METH_O, "Whether classes may be quickened; none is any more if not."},
    {"kind_of", kind_of, METH_O, "What is equal for plain tensors of one type alone, with up to five dimensions."},
    {"facts", facts, METH_O, "int64 [values, 3]: number, type and flags of each of a list."},
    {"written_to", written_to, METH_O, "Whose tensor of rows (whose, tensor, version) was written to first."},
    {"swap", swap, METH_VARARGS, "Put attributes ((owner, name, new), ...); what was there goes to a list."},
    {"emit", (PyCFunction)(void (*)(void))emit, METH_FASTCALL, "emit(recorder, entry, ids): Recorder.emit."},
    {"remember", remember, METH_VARARGS, "remember(recorder, func, args, kwargs, entry)"},
    {"recorded_before", (PyCFunction)(void (*)(void))recorded_before, METH_FASTCALL, "recorded_before(recorder, func, args, kwargs)"},
    {"torch_function", (PyCFunction)(void (*)(void))torch_function, METH_FASTCALL | METH_KEYWORDS,
     "Value.__torch_function__: calls that were met before, else Python's."},
    {"has_torch_function", (PyCFunction)(void (*)(void))has_torch_function, METH_FASTCALL | METH_KEYWORDS,
     "torch.overrides.has_torch_function_variadic: at once where there is a Value."},
    {"handle_torch_function", (PyCFunction)(void (*)(void))handle_torch_function, METH_FASTCALL | METH_KEYWORDS,
     "torch.overrides.handle_torch_function: calls that were met before, else torch's."},
    {NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_fast", .m_doc = "The hot path of recording.", .m_size = -1,
    .m_methods = functions};

static struct {
    const char *text;
    PyObject **where;
} const interned[] = {
    {"_parameters", &s_tables[0]}, {"_buffers", &s_tables[1]}, {"_modules", &s_tables[2]},
    {"__getattr__", &s_getattr}, {"__getattribute__", &s_getattribute}, {"__call__", &s_call},
    {"_fields", &s_fields}, {"_fxbatch_written", &s_written}, {"_fxbatch_view", &s_view},
};

PyMODINIT_FUNC PyInit__fast(void)
{
    EACH(i, interned) if (!(*interned[i].where = PyUnicode_InternFromString(interned[i].text))) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddType(module, &ColumnType) < 0 || PyModule_AddType(module, &CallTableType) < 0 ||
                   PyModule_AddType(module, &MethodType) < 0 || PyModule_AddType(module, &FunctionType) < 0 || PyModule_AddType(module, &SettledType) < 0 ||
                   PyModule_AddType(module, &ValuesType) < 0 || PyModule_AddType(module, &ConstantsType) < 0))
        Py_CLEAR(module);
    return module;
}
