/* What the recorder keeps in C: columns of numbers, and the calls that it knows. Part of _fast.c. */

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

/* --- CallTable: calls that were met before, by function (or module), mode and arguments -> Entry ------------- */

#define MAX_CALLS 4096 /* more are recorded by Python */

/* A part of a call's arguments: what must be this very object, and a number that goes with it: the type id of a
   Value, an int, the bits of a float, the length of a list. */
typedef struct {
    PyObject *object;
    int64_t number;
} Token;

typedef struct {
    PyObject *func, *entry; /* func NULL: a free place */
    uint64_t hash;
    int32_t mode;
    Py_ssize_t n;
    Token *tokens; /* ours, with a reference to each object */
} Call;

typedef struct {
    PyObject_HEAD
    Call *calls;
    Py_ssize_t used, room; /* room: a power of two, or 0 */
    int foreign;           /* whether a call has a parameter of no module that is watched */
} CallTable;

static inline int same_tokens(const Token *a, const Token *b, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++)
        if (a[i].object != b[i].object || a[i].number != b[i].number)
            return 0;
    return 1;
}

static Call *call_place(Call *calls, Py_ssize_t room, const Call *wanted)
{
    for (uint64_t h = wanted->hash;; h++) {
        Call *c = &calls[h & (uint64_t)(room - 1)];
        if (!c->func || (c->hash == wanted->hash && c->func == wanted->func && c->mode == wanted->mode &&
                         c->n == wanted->n && same_tokens(c->tokens, wanted->tokens, c->n)))
            return c;
    }
}

static uint64_t call_hash(const Call *c)
{
    uint64_t h = ((uint64_t)(uintptr_t)c->func >> 4) * 31 + (uint64_t)c->mode;
    for (Py_ssize_t i = 0; i < c->n; i++) {
        uint64_t number = (uint64_t)c->tokens[i].number * 0xBF58476D1CE4E5B9u;
        h = (h ^ ((uint64_t)(uintptr_t)c->tokens[i].object >> 4) ^ number ^ (number >> 32)) * 0x9E3779B97F4A7C15u;
        h ^= h >> 32;
    }
    return h;
}

static int table_grow(CallTable *t)
{
    Py_ssize_t room = t->room ? 2 * t->room : 64;
    Call *calls = PyMem_Calloc(room, sizeof(Call));
    if (!calls) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < t->room; i++)
        if (t->calls[i].func)
            *call_place(calls, room, &t->calls[i]) = t->calls[i];
    PyMem_Free(t->calls);
    t->calls = calls;
    t->room = room;
    return 0;
}

static int table_drop(PyObject *self)
{
    CallTable *t = (CallTable *)self;
    Call *calls = t->calls;
    Py_ssize_t room = t->room;
    t->calls = NULL;
    t->used = t->room = t->foreign = 0;
    for (Call *c = calls; c < calls + room; c++)
        if (c->func) {
            for (Py_ssize_t i = 0; i < c->n; i++)
                Py_DECREF(c->tokens[i].object);
            PyMem_Free(c->tokens);
            Py_DECREF(c->func);
            Py_DECREF(c->entry);
        }
    PyMem_Free(calls);
    return 0;
}

static PyObject *table_clear(PyObject *self, PyObject *Py_UNUSED(none))
{
    table_drop(self);
    Py_RETURN_NONE;
}

/* lasts(): whether these may be known in another minibatch. */
static PyObject *table_lasts(PyObject *self, PyObject *Py_UNUSED(none))
{
    CallTable *t = (CallTable *)self;
    return PyBool_FromLong(!t->foreign && t->used < MAX_CALLS);
}

static int table_traverse(PyObject *self, visitproc visit, void *arg)
{
    CallTable *t = (CallTable *)self;
    for (Call *c = t->calls; c < t->calls + t->room; c++) {
        Py_VISIT(c->func);
        Py_VISIT(c->entry);
        for (Py_ssize_t i = 0; c->func && i < c->n; i++)
            Py_VISIT(c->tokens[i].object);
    }
    return 0;
}

static void table_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    table_drop(self);
    Py_TYPE(self)->tp_free(self);
}

static Py_ssize_t table_length(PyObject *self)
{
    return ((CallTable *)self)->used;
}

static PyMethodDef table_methods[] = {
    {"clear", table_clear, METH_NOARGS, NULL},
    {"lasts", table_lasts, METH_NOARGS, NULL},
    {NULL}};
static PySequenceMethods table_sequence = {.sq_length = table_length};
static PyTypeObject CallTableType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.trace._fast.CallTable",
    .tp_doc = "Entries of calls that were met before.",
    .tp_basicsize = sizeof(CallTable),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = table_dealloc,
    .tp_traverse = table_traverse,
    .tp_clear = table_drop,
    .tp_methods = table_methods,
    .tp_as_sequence = &table_sequence,
};
