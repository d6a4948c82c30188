/* What the recorder keeps in C: columns of numbers, and the calls that it knows. Part of _fast.c. */

#ifndef FXBATCH_FAST_COLUMNS_H
#define FXBATCH_FAST_COLUMNS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* --- Column: what array.array("q") is to the recorder, with appends from C --- */

typedef struct {
    PyObject_HEAD
    int64_t *data;
    Py_ssize_t size, room, exports;
} Column;

static int column_reserve(Column *c, Py_ssize_t more)
{
    if (c->exports) {
        PyErr_SetString(PyExc_BufferError, "a column can't grow while its buffer is in use");
        return -1;
    }
    if (c->size + more <= c->room)
        return 0;
    Py_ssize_t room = 2 * (c->size + more) + 62;
    int64_t *data = PyMem_Realloc(c->data, room * sizeof(int64_t));
    if (!data) {
        PyErr_NoMemory();
        return -1;
    }
    c->data = data;
    c->room = room;
    return 0;
}

static PyObject *column_append(PyObject *self, PyObject *number)
{
    Column *c = (Column *)self;
    int64_t x = PyLong_AsSsize_t(number);
    if ((x == -1 && PyErr_Occurred()) || column_reserve(c, 1) < 0)
        return NULL;
    c->data[c->size++] = x;
    Py_RETURN_NONE;
}

static PyObject *column_extend(PyObject *self, PyObject *numbers)
{
    Column *c = (Column *)self;
    PyObject *items = PySequence_Fast(numbers, "a column is extended by a sequence");
    if (!items)
        return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(items), before = c->size;
    int failed = column_reserve(c, n) < 0;
    for (Py_ssize_t i = 0; i < n && !failed; i++) {
        int64_t x = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(items, i));
        failed = x == -1 && PyErr_Occurred();
        c->data[before + i] = x;
    }
    Py_DECREF(items);
    if (failed)
        return NULL;
    c->size = before + n;
    Py_RETURN_NONE;
}

static Py_ssize_t column_length(PyObject *self)
{
    return ((Column *)self)->size;
}

static PyObject *column_item(PyObject *self, Py_ssize_t i)
{
    Column *c = (Column *)self;
    if (i < 0 || i >= c->size) {
        PyErr_SetString(PyExc_IndexError, "column index out of range");
        return NULL;
    }
    return PyLong_FromLongLong(c->data[i]);
}

static int column_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
    Column *c = (Column *)self;
    static int64_t nothing;
    if (PyBuffer_FillInfo(view, self, c->data ? c->data : &nothing, c->size * 8, 0, flags) < 0)
        return -1;
    view->itemsize = 8;
    view->format = (flags & PyBUF_FORMAT) ? "q" : NULL;
    if (flags & PyBUF_ND)
        view->shape = &c->size; /* no append while there are exports */
    if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES)
        view->strides = &view->itemsize;
    c->exports++;
    return 0;
}

static void column_releasebuffer(PyObject *self, Py_buffer *Py_UNUSED(view))
{
    ((Column *)self)->exports--;
}

static void column_dealloc(PyObject *self)
{
    PyMem_Free(((Column *)self)->data);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef column_methods[] = {
    {"append", column_append, METH_O, NULL},
    {"extend", column_extend, METH_O, NULL},
    {NULL}};
static PySequenceMethods column_sequence = {.sq_length = column_length, .sq_item = column_item};
static PyBufferProcs column_buffer = {column_getbuffer, column_releasebuffer};
static PyTypeObject ColumnType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.trace._fast.Column",
    .tp_doc = "A growing int64 column.",
    .tp_basicsize = sizeof(Column),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = column_dealloc,
    .tp_methods = column_methods,
    .tp_as_sequence = &column_sequence,
    .tp_as_buffer = &column_buffer,
};

/* --- KnownCalls: (owner, mode, input types) -> Entry ---------------------------------------------------- */

#define MAX_INPUTS 6

typedef struct {
    PyObject *owner, *entry; /* owner NULL: a free place */
    int32_t mode, n, types[MAX_INPUTS];
} Call;

#define MAX_TOKENS 64
#define MAX_PATTERNS 4096

/* A part of a function's arguments: what must be this very object, and a number that goes with it: the type id
   of a Value, an int, the bits of a float, the length of a list. */
typedef struct {
    PyObject *object;
    int64_t number;
} Token;

typedef struct {
    PyObject *func, *entry; /* func NULL: a free place */
    uint64_t hash;
    int32_t mode, n;
    Token *tokens; /* ours, with a reference to each object */
} Pattern;

typedef struct {
    PyObject_HEAD
    Call *calls;
    Py_ssize_t used, room; /* room: a power of two, or 0 */
    Pattern *patterns;
    Py_ssize_t pattern_used, pattern_room;
    int foreign; /* whether a pattern has a parameter of no module that is watched */
} KnownCalls;

static Call *known_place(Call *calls, Py_ssize_t room, const Call *wanted)
{
    uint64_t h = ((uint64_t)(uintptr_t)wanted->owner >> 4) * 31 + (uint64_t)wanted->mode;
    for (int i = 0; i < wanted->n; i++)
        h = (h ^ (uint64_t)wanted->types[i]) * 0x9E3779B97F4A7C15u;
    for (h ^= h >> 29;; h++) {
        Call *c = &calls[h & (uint64_t)(room - 1)];
        if (!c->owner || (c->owner == wanted->owner && c->mode == wanted->mode && c->n == wanted->n &&
                          !memcmp(c->types, wanted->types, wanted->n * sizeof(int32_t))))
            return c;
    }
}

static int known_grow(KnownCalls *k)
{
    Py_ssize_t room = k->room ? 2 * k->room : 64;
    Call *calls = PyMem_Calloc(room, sizeof(Call));
    if (!calls) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < k->room; i++)
        if (k->calls[i].owner)
            *known_place(calls, room, &k->calls[i]) = k->calls[i];
    PyMem_Free(k->calls);
    k->calls = calls;
    k->room = room;
    return 0;
}

/* Fill `call` from Python arguments; 0 when it has too many inputs to be kept, -1 on error. */
static int known_key(Call *call, PyObject *owner, int mode, PyObject *types)
{
    if (!PyTuple_Check(types)) {
        PyErr_SetString(PyExc_TypeError, "types is a tuple");
        return -1;
    }
    if (PyTuple_GET_SIZE(types) > MAX_INPUTS)
        return 0;
    memset(call, 0, sizeof(Call));
    call->owner = owner;
    call->mode = mode;
    call->n = (int32_t)PyTuple_GET_SIZE(types);
    for (int i = 0; i < call->n; i++)
        call->types[i] = (int32_t)PyLong_AsLong(PyTuple_GET_ITEM(types, i));
    return PyErr_Occurred() ? -1 : 1;
}

static PyObject *known_add(PyObject *self, PyObject *args)
{
    KnownCalls *k = (KnownCalls *)self;
    PyObject *owner, *types, *entry;
    int mode;
    Call call;
    if (!PyArg_ParseTuple(args, "OiOO", &owner, &mode, &types, &entry))
        return NULL;
    int fits = known_key(&call, owner, mode, types);
    if (fits < 0 || (fits && 4 * k->used >= 3 * k->room && known_grow(k) < 0))
        return NULL;
    if (fits) {
        Call *place = known_place(k->calls, k->room, &call);
        PyObject *before = place->entry;
        call.entry = Py_NewRef(entry);
        if (!place->owner) {
            Py_INCREF(owner);
            k->used++;
        }
        *place = call;
        Py_XDECREF(before);
    }
    Py_RETURN_NONE;
}

static PyObject *known_find(PyObject *self, PyObject *args)
{
    KnownCalls *k = (KnownCalls *)self;
    PyObject *owner, *types;
    int mode;
    Call call;
    if (!PyArg_ParseTuple(args, "OiO", &owner, &mode, &types))
        return NULL;
    int fits = known_key(&call, owner, mode, types);
    if (fits < 0)
        return NULL;
    PyObject *entry = fits && k->room ? known_place(k->calls, k->room, &call)->entry : NULL;
    return Py_NewRef(entry ? entry : Py_None);
}

static void pattern_free(Pattern *p)
{
    for (int32_t i = 0; i < p->n; i++)
        Py_DECREF(p->tokens[i].object);
    PyMem_Free(p->tokens);
    Py_XDECREF(p->func);
    Py_XDECREF(p->entry);
}

static int known_drop(PyObject *self)
{
    KnownCalls *k = (KnownCalls *)self;
    Pattern *patterns = k->patterns;
    Py_ssize_t pattern_room = k->pattern_room;
    k->patterns = NULL;
    k->pattern_used = k->pattern_room = 0;
    k->foreign = 0;
    for (Py_ssize_t i = 0; i < pattern_room; i++)
        if (patterns[i].func)
            pattern_free(&patterns[i]);
    PyMem_Free(patterns);
    Call *calls = k->calls;
    Py_ssize_t room = k->room;
    k->calls = NULL;
    k->used = k->room = 0;
    for (Py_ssize_t i = 0; i < room; i++) {
        Py_XDECREF(calls[i].owner);
        Py_XDECREF(calls[i].entry);
    }
    PyMem_Free(calls);
    return 0;
}

static PyObject *known_clear(PyObject *self, PyObject *Py_UNUSED(none))
{
    known_drop(self);
    Py_RETURN_NONE;
}

/* lasts(): whether these may be known in another minibatch. */
static PyObject *known_lasts(PyObject *self, PyObject *Py_UNUSED(none))
{
    KnownCalls *k = (KnownCalls *)self;
    return PyBool_FromLong(!k->foreign && k->used < MAX_PATTERNS && k->pattern_used < MAX_PATTERNS);
}

static int known_traverse(PyObject *self, visitproc visit, void *arg)
{
    KnownCalls *k = (KnownCalls *)self;
    for (Py_ssize_t i = 0; i < k->room; i++) {
        Py_VISIT(k->calls[i].owner);
        Py_VISIT(k->calls[i].entry);
    }
    for (Py_ssize_t i = 0; i < k->pattern_room; i++) {
        Pattern *p = &k->patterns[i];
        Py_VISIT(p->func);
        Py_VISIT(p->entry);
        for (int32_t j = 0; p->func && j < p->n; j++)
            Py_VISIT(p->tokens[j].object);
    }
    return 0;
}

static void known_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    known_drop(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef known_methods[] = {
    {"add", known_add, METH_VARARGS, NULL},
    {"find", known_find, METH_VARARGS, NULL},
    {"clear", known_clear, METH_NOARGS, NULL},
    {"lasts", known_lasts, METH_NOARGS, NULL},
    {NULL}};
static PyTypeObject KnownCallsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.trace._fast.KnownCalls",
    .tp_doc = "Entries by owner, mode and input types.",
    .tp_basicsize = sizeof(KnownCalls),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = known_dealloc,
    .tp_traverse = known_traverse,
    .tp_clear = known_drop,
    .tp_methods = known_methods,
};

#endif
