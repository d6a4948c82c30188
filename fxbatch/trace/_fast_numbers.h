/* Numbers of values that were computed: `.item()`, `int(v)`, `if v > 0` read them where they lie, without a frame of
   Python. Part of _fast.c, whose names it uses; runtime/run.py says where they are after each phase. */

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

enum { AS_ITEM, AS_LIST, AS_BOOL, AS_INT, AS_FLOAT, AS_INDEX, IN_PLACE };

/* The number at a place, as Python's; NULL without an error where it is not for C. */
static PyObject *number_at(const char *place, char format, int how)
{
    int64_t whole = 0;
    double real = 0;
    int is_real = format == 'f' || format == 'd';
#define IS(letter, type, number)     \
    case letter: {                   \
        type x;                      \
        memcpy(&x, place, sizeof x); \
        number = x;                  \
        break;                       \
    }
    switch (format) {
        IS('?', unsigned char, whole)
        IS('b', signed char, whole)
        IS('B', unsigned char, whole)
        IS('h', short, whole)
        IS('i', int, whole)
        IS('l', long, whole)
        IS('q', long long, whole)
        IS('f', float, real)
        IS('d', double, real)
    default:
        return NULL;
    }
#undef IS
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
    if (!settled || !Py_IS_TYPE(settled, &SettledType) || is_stale(v))
        return NULL;
    Settled *s = (Settled *)settled;
    int64_t i = WHOLE(v, at.value) - s->base;
    if (i < 0 || 8 * (i + 1) > s->types.len || 8 * (i + 1) > s->rows.len)
        return NULL;
    int64_t type = ((const int64_t *)s->types.buf)[i], row = ((const int64_t *)s->rows.buf)[i];
    const Py_buffer *arena = type >= 0 && type < s->n ? &s->arenas[type] : NULL;
    if (!arena || !arena->obj || !arena->format || arena->format[1] || row < 0 ||
        (row + 1) * arena->itemsize > arena->len || (how == AS_LIST && arena->ndim > 1))
        return NULL;
    return number_at((const char *)arena->buf + row * arena->itemsize, arena->format[0], how);
}
