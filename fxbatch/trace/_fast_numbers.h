/* Numbers of values that were computed: `.item()`, `int(v)`, `if v > 0` read them where they lie, without a frame of
   Python. Part of _fast.c, whose names it uses; runtime/run.py says where they are after each phase. */

#ifndef FXBATCH_FAST_NUMBERS_H
#define FXBATCH_FAST_NUMBERS_H

typedef struct {
    PyObject_HEAD
    int64_t base;          /* the number of the first value */
    Py_buffer types, rows; /* int64: of each value its type and row */
    Py_ssize_t n;
    Py_buffer *arenas; /* by type; obj NULL where they can't be read */
} Settled;

static void settled_dealloc(PyObject *self)
{
    Settled *s = (Settled *)self;
    for (Py_ssize_t i = 0; i < s->n; i++)
        PyBuffer_Release(&s->arenas[i]);
    PyMem_Free(s->arenas);
    PyBuffer_Release(&s->types);
    PyBuffer_Release(&s->rows);
    Py_TYPE(self)->tp_free(self);
}

/* Settled(base, types, rows, arenas): arenas[type] is an array of one number a row, or None. */
static PyObject *settled_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    long long base;
    PyObject *types, *rows, *arenas;
    if (!PyArg_ParseTuple(args, "LOOO!", &base, &types, &rows, &PyTuple_Type, &arenas))
        return NULL;
    Settled *s = (Settled *)type->tp_alloc(type, 0);
    if (!s || !(s->arenas = PyMem_Calloc(PyTuple_GET_SIZE(arenas) + 1, sizeof(Py_buffer)))) {
        Py_XDECREF(s);
        return s ? PyErr_NoMemory() : NULL;
    }
    s->base = base;
    int good = PyObject_GetBuffer(types, &s->types, PyBUF_SIMPLE) == 0 &&
               PyObject_GetBuffer(rows, &s->rows, PyBUF_SIMPLE) == 0;
    for (; good && s->n < PyTuple_GET_SIZE(arenas); s->n++) {
        PyObject *arena = PyTuple_GET_ITEM(arenas, s->n);
        good = arena == Py_None ||
               PyObject_GetBuffer(arena, &s->arenas[s->n], PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0;
        if (!good)
            break;
    }
    if (!good)
        Py_CLEAR(s);
    return (PyObject *)s;
}

static PyTypeObject SettledType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.trace._fast.Settled",
    .tp_doc = "Where the numbers of values are that were computed.",
    .tp_basicsize = sizeof(Settled),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = settled_new,
    .tp_dealloc = settled_dealloc,
};

enum { AS_ITEM, AS_LIST, AS_BOOL, AS_INT, AS_FLOAT, AS_INDEX };

/* The number at a place, as Python's; NULL without an error where it is not for C. */
static PyObject *number_at(const char *place, char format, int how)
{
    int64_t whole = 0;
    double real = 0;
    int is_real = 0;
#define WHOLE(letter, type)            \
    case letter: {                     \
        type x;                        \
        memcpy(&x, place, sizeof x);   \
        whole = (int64_t)x;            \
        break;                         \
    }
#define REAL(letter, type)             \
    case letter: {                     \
        type x;                        \
        memcpy(&x, place, sizeof x);   \
        real = x;                      \
        is_real = 1;                   \
        break;                         \
    }
    switch (format) {
        WHOLE('?', unsigned char)
        WHOLE('b', signed char)
        WHOLE('B', unsigned char)
        WHOLE('h', short)
        WHOLE('i', int)
        WHOLE('l', long)
        WHOLE('q', long long)
        REAL('f', float)
        REAL('d', double)
    default:
        return NULL;
    }
#undef WHOLE
#undef REAL
    if (how == AS_BOOL)
        return PyBool_FromLong(is_real ? real != 0 : whole != 0);
    if (how == AS_FLOAT)
        return PyFloat_FromDouble(is_real ? real : (double)whole);
    if (how == AS_INT || how == AS_INDEX) /* others round, or refuse */
        return is_real || format == '?' ? NULL : PyLong_FromLongLong(whole);
    return is_real ? PyFloat_FromDouble(real) : format == '?' ? PyBool_FromLong(whole != 0) : PyLong_FromLongLong(whole);
}

/* The number of a value of this thread's recording that was computed; NULL without an error where C does not know it. */
static PyObject *settled_number(PyObject *v, int how)
{
    PyObject *settled = Py_IS_TYPE(v, Value) && current && SLOT(v, at.recorder) == current ? SLOT(current, at.settled) : NULL;
    if (!settled || !Py_IS_TYPE(settled, &SettledType))
        return NULL;
    Settled *s = (Settled *)settled;
    int64_t i = (int64_t)PyLong_AsSsize_t(SLOT(v, at.value)) - s->base;
    if (i < 0 || 8 * (i + 1) > s->types.len || 8 * (i + 1) > s->rows.len)
        return NULL;
    int64_t type = ((const int64_t *)s->types.buf)[i], row = ((const int64_t *)s->rows.buf)[i];
    const Py_buffer *arena = type >= 0 && type < s->n ? &s->arenas[type] : NULL;
    if (!arena || !arena->obj || !arena->format || arena->format[1] || row < 0 ||
        (row + 1) * arena->itemsize > arena->len || (how == AS_LIST && arena->ndim > 1))
        return NULL;
    return number_at((const char *)arena->buf + row * arena->itemsize, arena->format[0], how);
}

/* --- Reader: a method that gives a number, and the Python function behind it --- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *slow;
    int how;
} Reader;

static PyObject *reader_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Reader *r = (Reader *)self;
    if (PyVectorcall_NARGS(nargsf) == 1 && !kwnames) {
        PyObject *found = settled_number(args[0], r->how);
        if (found || PyErr_Occurred())
            return found;
    }
    return PyObject_Vectorcall(r->slow, args, nargsf, kwnames);
}

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    int how;
    PyObject *slow;
    if (!PyArg_ParseTuple(args, "iO", &how, &slow))
        return NULL;
    Reader *r = (Reader *)type->tp_alloc(type, 0);
    if (r) {
        r->call = reader_call;
        r->slow = Py_NewRef(slow);
        r->how = how;
    }
    return (PyObject *)r;
}

static void reader_dealloc(PyObject *self)
{
    Py_XDECREF(((Reader *)self)->slow);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef reader_members[] = {{"__wrapped__", T_OBJECT_EX, offsetof(Reader, slow), READONLY, NULL}, {NULL}};
static PyTypeObject ReaderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.trace._fast.Reader",
    .tp_doc = "Reader(how, slow): the number of a value that was computed, else slow(value).",
    .tp_basicsize = sizeof(Reader),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = reader_new,
    .tp_dealloc = reader_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Reader, call),
    .tp_descr_get = method_get,
    .tp_members = reader_members,
};

#endif
