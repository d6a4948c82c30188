/* The slots of Python objects that C reads and writes, and Value objects, which are handed out again. Part of _fast.c. */

static struct {
    Py_ssize_t value, type, flags, writes, recorder, view, rows;        /* of a Value */
    Py_ssize_t source, root, source_type, call, output, again, through, seen; /* of a View */
    Py_ssize_t sid, types, single, is_tuple, aliases, guards, target;   /* of an Entry */
    Py_ssize_t carries, operands, asked_in, requires, written, comes_once;
    Py_ssize_t sigs, inputs, count, base, knowledge, constants, payload, settled, lifted, row_calls, number_ids, once; /* of the recorder */
    Py_ssize_t values, graded, views_met, heard, filled, made_by, uses, by_parts;
    Py_ssize_t views_asked; /* of what was heard of */
    Py_ssize_t stands_for; /* of a Written */
    Py_ssize_t table, mode, grad, autocast, floats, owners, entries; /* of what it knows */
} at;
static PyTypeObject *Value, *View, *Written, *WrittenTensor, *Tensor, *Parameter, *BareParameter, *BareView, *Heard;
static PyTypeObject *Dtype, *Device, *Size, *Module, *Entry, *Recorder, *Knowledge;
static PyObject *plain_new, *module_call, *build_result, *slow_constant, *slow_row, *slow_number, *slow_row_write, *slow_filled, *slow_link, *slow_refresh, *slow_sync, *getitem, *setitem, *operands_require;
static PyObject *grad_enabled, *autocast_enabled, *default_dtype, *modes_enabled, *functions_enabled;
static const PyGetSetDef *get_version, *get_base, *get_requires_grad, *get_grad_fn;
/* C++, of torch: the same as the first three, or NULL */
static _Bool (*keys_excluded)(uint64_t), (*grad_now)(void);
static int8_t (*dtype_now)(void);
static uint64_t autocast_keys;
static PyObject *slow_torch_function, *slow_bare, *slow_handle, *slow_question, *slow_written;
static PyObject *s_getattr, *s_getattribute, *s_call, *s_tables[3], *s_fields, *s_written, *s_view; /* names */
static PyObject *pure_forms; /* of functions that write to their first argument: what gives the new content; None of calls.LIKE */
static _Thread_local PyObject *current; /* this thread's recorder */

#define SLOT(object, where) (*(PyObject **)((char *)(object) + (where)))

#define WHOLE(object, where) (*(int64_t *)((char *)(object) + (where)))

#define KNOWN(recorder) SLOT(recorder, at.knowledge) /* it has one from its beginning on */

/* What a plain tensor's attribute is, by the getter itself: the class was looked through once. */
static PyObject *ask(const PyGetSetDef *attribute, PyObject *t)
{
    return attribute->get(t, attribute->closure);
}

/* Where a slot is. whole: it holds a number of 8 bytes from here on, in place of an object. */
static int slot(PyObject *type, const char *name, Py_ssize_t *offset, int whole)
{
    PyObject *descriptor = PyObject_GetAttrString(type, name);
    if (!descriptor)
        return -1;
    int found = Py_IS_TYPE(descriptor, &PyMemberDescr_Type);
    if (found) {
        *offset = ((PyMemberDescrObject *)descriptor)->d_member->offset;
        if (whole)
            ((PyMemberDescrObject *)descriptor)->d_member->type = T_LONGLONG;
    } else
        PyErr_Format(PyExc_TypeError, "%s is no slot", name);
    Py_DECREF(descriptor);
    return found ? 0 : -1;
}

static void put(PyObject *object, Py_ssize_t where, PyObject *stolen)
{
    PyObject *before = SLOT(object, where);
    SLOT(object, where) = stolen;
    Py_XDECREF(before);
}

/* Whether a value's content is still to be recorded: rows of it were written to, or it is a view of what was. */
static int is_stale(PyObject *v)
{
    PyObject *view = SLOT(v, at.view);
    if (SLOT(v, at.rows))
        return 1;
    return view && WHOLE(view, at.seen) != WHOLE(SLOT(view, at.root), at.writes);
}

/* --- Values -------------------------------------------------------------------------------------------------- */

#define REQUIRES_GRAD 1 /* what is known of a Value from its beginning on (values.py) */
#define CONSTANT 2
#define COPIED_ROW 4
#define NOT_WRITTEN_HERE (CONSTANT | COPIED_ROW)

#define POOL 16384
static PyObject *pool[POOL]; /* objects that nobody else refers to, untracked; one reference each: ours */
static Py_ssize_t pooled;

/* Values: those of one recording, in the order in which they were made. One that nobody else refers to ("one, mine") is
   used again: the newest are looked at whenever there are YOUNG of them, all others when the recording ends. */
#define YOUNG 1024
typedef struct {
    PyObject_HEAD
    PyObject **old, *young[YOUNG]; /* a reference to each */
    Py_ssize_t n_old, room, n_young;
} Values;

/* Take away what a Value is; one that the user has given attributes or weak references is not used again. Takes its
   reference. */
static void recycle(PyObject *v)
{
    PyObject **dict = _PyObject_GetDictPtr(v);
    int plain = (!dict || !*dict || !PyDict_GET_SIZE(*dict)) &&
                !*(PyObject **)((char *)v + Value->tp_weaklistoffset) && Py_IS_TYPE(v, Value) && pooled < POOL;
    if (!plain) {
        Py_DECREF(v);
        return;
    }
    PyObject *recorder = SLOT(v, at.recorder), *view = SLOT(v, at.view), *rows = SLOT(v, at.rows);
    SLOT(v, at.recorder) = SLOT(v, at.view) = SLOT(v, at.rows) = NULL;
    pool[pooled++] = v;
    Py_XDECREF(rows);
    Py_XDECREF(view);
    Py_XDECREF(recorder);
}

/* Use again what only the list has of the newest values; -1 on error. A view comes after what it is a view of. */
static int values_sweep(Values *all)
{
    if (all->n_old + YOUNG > all->room) {
        Py_ssize_t room = 2 * (all->n_old + YOUNG);
        PyObject **old = PyMem_Realloc(all->old, room * sizeof *old);
        if (!old) {
            PyErr_NoMemory();
            return -1;
        }
        all->old = old;
        all->room = room;
    }
    while (all->n_young) {
        PyObject *v = all->young[--all->n_young];
        if (Py_REFCNT(v) == 1)
            recycle(v);
        else
            all->old[all->n_old++] = v;
    }
    return 0;
}

/* Every value of the recording. */
#define EACH_VALUE(v, all)                                                                                       \
    for (Py_ssize_t k = (all)->n_old + (all)->n_young - 1;                                                       \
         k >= 0 && (v = k < (all)->n_old ? (all)->old[k] : (all)->young[k - (all)->n_old]); k--)

/* close(): the values that the user still refers to; all others are used again, and no view is known any more. */
static PyObject *values_close(PyObject *self, PyObject *Py_UNUSED(none))
{
    Values *all = (Values *)self;
    PyObject *v, *used = PyList_New(0);
    if (!used)
        return NULL;
    EACH_VALUE(v, all)
    {
        Py_CLEAR(SLOT(v, at.view));
        Py_CLEAR(SLOT(v, at.rows));
    }
    EACH_VALUE(v, all)
    {
        if (Py_REFCNT(v) == 1) {
            recycle(v);
            continue;
        }
        if (!PyObject_GC_IsTracked(v))
            PyObject_GC_Track(v);
        if (PyList_Append(used, v) < 0)
            PyErr_Clear(); /* it is no result then, and says so when it is used */
        Py_DECREF(v);
    }
    all->n_old = all->n_young = 0;
    return used;
}

/* living(): the values that somebody refers to besides this list, which goes on with these alone. */
static PyObject *values_living(PyObject *self, PyObject *Py_UNUSED(none))
{
    Values *all = (Values *)self;
    Py_ssize_t before, n;
    if (values_sweep(all) < 0)
        return NULL;
    do { /* a view that goes lets go of what it is a view of */
        before = all->n_old;
        n = 0;
        for (Py_ssize_t i = 0; i < before; i++) {
            PyObject *v = all->old[i];
            if (Py_REFCNT(v) == 1)
                recycle(v);
            else
                all->old[n++] = v;
        }
        all->n_old = n;
    } while (n < before);
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list && i < n; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(all->old[i]));
    return list;
}

/* The values that are to be recorded anew before they are used, and that somebody refers to. */
static PyObject *stale_values(Values *all)
{
    PyObject *v, *stale = PyList_New(0);
    EACH_VALUE(v, all) if (stale && is_stale(v) && Py_REFCNT(v) > 1 && PyList_Append(stale, v) < 0)
        Py_CLEAR(stale);
    return stale;
}

/* stale(): those of them. Views that nobody refers to any more hold what they show: they go first. */
static PyObject *values_stale(PyObject *self, PyObject *Py_UNUSED(none))
{
    PyObject *stale = stale_values((Values *)self);
    if (!stale || !PyList_GET_SIZE(stale))
        return stale;
    Py_DECREF(stale);
    Py_XDECREF(values_living(self, NULL));
    return PyErr_Occurred() ? NULL : stale_values((Values *)self);
}

static Py_ssize_t values_length(PyObject *self)
{
    return ((Values *)self)->n_old + ((Values *)self)->n_young;
}

static void values_dealloc(PyObject *self)
{
    PyObject *used = values_close(self, NULL);
    Py_XDECREF(used);
    PyErr_Clear();
    PyMem_Free(((Values *)self)->old);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef values_methods[] = {
    {"stale", values_stale, METH_NOARGS, "Values that somebody refers to, and whose content is to be recorded anew."},
    {"living", values_living, METH_NOARGS, "The values that somebody refers to; the list goes on with these alone."},
    {"close", values_close, METH_NOARGS, "The values that somebody refers to; all others are used again."},
    {NULL}};
static PySequenceMethods values_sequence = {.sq_length = values_length};
static PyTypeObject ValuesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.trace._fast.Values",
    .tp_doc = "The values of a recording.",
    .tp_basicsize = sizeof(Values),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = values_dealloc,
    .tp_methods = values_methods,
    .tp_as_sequence = &values_sequence,
};

/* A Value with nothing in its slots, untracked: the recorder's list keeps it. */
static PyObject *empty_value(void)
{
    while (pooled) {
        PyObject *v = pool[--pooled];
#ifdef __GNUC__
        if (pooled >= 4) /* to read it is most of the work */
            __builtin_prefetch(pool[pooled - 4]);
#endif
        if (Py_REFCNT(v) == 1)
            return v;
        Py_DECREF(v); /* somebody got at it through its tensor */
    }
    PyObject *v = PyObject_CallNoArgs(plain_new);
    if (v && PyObject_GC_IsTracked(v))
        PyObject_GC_UnTrack(v);
    return v;
}

/* A new Value of this number, in the recorder's list. */
static PyObject *value_of_number(PyObject *recorder, int64_t number, int64_t type, int64_t flags)
{
    Values *all = (Values *)SLOT(recorder, at.values);
    if (all->n_young == YOUNG && values_sweep(all) < 0)
        return NULL;
    PyObject *v = empty_value();
    if (!v)
        return NULL;
    WHOLE(v, at.value) = number;
    WHOLE(v, at.type) = type;
    WHOLE(v, at.flags) = flags;
    WHOLE(v, at.writes) = 0;
    put(v, at.recorder, Py_NewRef(recorder));
    all->young[all->n_young++] = Py_NewRef(v);
    return v;
}

/* The Value of the next number. */
static PyObject *make_value(PyObject *recorder, PyObject *type, int64_t flags)
{
    return value_of_number(recorder, WHOLE(recorder, at.count)++, PyLong_AsSsize_t(type), flags);
}

/* value(recorder, number, type, flags): a Value object of a number. */
static PyObject *new_value(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n)
{
    if (n != 4 || !PyObject_TypeCheck(args[0], Recorder)) {
        PyErr_SetString(PyExc_TypeError, "value(recorder, number, type, flags)");
        return NULL;
    }
    int64_t given[3];
    for (int i = 0; i < 3; i++)
        given[i] = PyLong_AsLongLong(args[i + 1]);
    return PyErr_Occurred() ? NULL : value_of_number(args[0], given[0], given[1], given[2]);
}

/* facts(values): int64 [values, 3] as bytes: number, type and flags of each. */
static PyObject *facts(PyObject *Py_UNUSED(module), PyObject *values)
{
    Py_ssize_t n = PyList_CheckExact(values) ? PyList_GET_SIZE(values) : 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, n * 24);
    for (Py_ssize_t i = 0; bytes && i < n; i++) {
        PyObject *v = PyList_GET_ITEM(values, i);
        if (!Py_IS_TYPE(v, Value)) {
            PyErr_SetString(PyExc_TypeError, "facts of values");
            Py_CLEAR(bytes);
            break;
        }
        int64_t row[] = {WHOLE(v, at.value), WHOLE(v, at.type), WHOLE(v, at.flags)};
        memcpy(PyBytes_AS_STRING(bytes) + 24 * i, row, 24);
    }
    return bytes;
}
