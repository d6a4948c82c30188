/* The slots of Python objects that C reads and writes, and Value objects, which are handed out again. Part of _fast.c. */

#ifndef FXBATCH_FAST_VALUES_H
#define FXBATCH_FAST_VALUES_H

static struct {
    Py_ssize_t value, type, recorder, alias;                            /* of a Value */
    Py_ssize_t source, call, output, again, through, views;             /* of an Alias */
    Py_ssize_t sid, types, single, is_tuple, aliases, guards, target;   /* of an Entry */
    Py_ssize_t sigs, inputs, count, known, constants, payload, unchecked, settled, lifted, row_calls; /* of the recorder */
    Py_ssize_t table, mode, grad, autocast, floats, owners, entries; /* of what it knows */
} at;
static PyTypeObject *Value, *Alias, *Tensor, *Parameter, *BareParameter, *BareView;
static PyTypeObject *Dtype, *Device, *Size, *Module, *Entry, *Recorder, *Knowledge;
static PyObject *plain_new, *build_result, *slow_constant, *slow_row, *slow_link, *getitem;
static PyObject *grad_enabled, *autocast_enabled, *default_dtype, *modes_enabled, *functions_enabled;
static const PyGetSetDef *get_shape, *get_dtype, *get_is_cpu, *get_version, *get_base;
/* C++, of torch: the same as the first three, or NULL */
static _Bool (*keys_excluded)(uint64_t), (*grad_now)(void);
static int8_t (*dtype_now)(void);
static uint64_t autocast_keys;
static PyObject *slow_torch_function, *slow_bare, *slow_handle, *slow_question;
static _Thread_local PyObject *current; /* this thread's recorder */

#define SLOT(object, where) (*(PyObject **)((char *)(object) + (where)))

#define WHOLE(object, where) (*(int64_t *)((char *)(object) + (where)))

#define KNOWN(recorder) SLOT(recorder, at.known) /* it has one from its beginning on */

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

/* --- Values -------------------------------------------------------------------------------------------------- */

#define POOL 16384
static PyObject *pool[POOL]; /* untracked, one reference each: ours */
static Py_ssize_t pooled;
static destructor plain_dealloc;
static inquiry plain_clear;

static void value_dealloc(PyObject *v)
{
    /* A Value without recorder was cleared by the garbage collector: its tensor may be gone. */
    if (pooled < POOL && Py_IS_TYPE(v, Value) && SLOT(v, at.recorder)) {
        PyObject **dict = _PyObject_GetDictPtr(v);
        if (!dict || !*dict || !PyDict_GET_SIZE(*dict)) {
            PyObject_GC_UnTrack(v);
            if (*(PyObject **)((char *)v + Value->tp_weaklistoffset))
                PyObject_ClearWeakRefs(v);
            if (pooled >= POOL) { /* what that ran has filled it */
                PyObject_GC_Track(v);
                goto no_room;
            }
            PyObject *recorder = SLOT(v, at.recorder), *alias = SLOT(v, at.alias);
            SLOT(v, at.recorder) = SLOT(v, at.alias) = NULL;
            Py_SET_REFCNT(v, 1);
            pool[pooled++] = v;
            Py_XDECREF(alias); /* last: they may run anything */
            Py_DECREF(recorder);
            return;
        }
    }
no_room:
    /* What a type's own dealloc and clear do is to look for the first base whose function differs. */
    Value->tp_dealloc = plain_dealloc;
    plain_dealloc(v);
    Value->tp_dealloc = value_dealloc;
}

static int value_clear(PyObject *v)
{
    Py_CLEAR(SLOT(v, at.recorder));
    Value->tp_clear = plain_clear;
    int result = plain_clear(v);
    Value->tp_clear = value_clear;
    return result;
}

/* A Value with nothing in its slots. */
static PyObject *empty_value(void)
{
    while (pooled) {
        PyObject *v = pool[--pooled];
        PyObject_GC_Track(v);
        if (Py_REFCNT(v) == 1)
            return v;
        Py_DECREF(v); /* somebody found it through its tensor */
    }
    return PyObject_CallOneArg(plain_new, (PyObject *)Value);
}

static PyObject *make_value(PyObject *recorder, PyObject *type)
{
    PyObject *v = empty_value();
    if (!v)
        return NULL;
    WHOLE(v, at.value) = WHOLE(recorder, at.count)++;
    WHOLE(v, at.type) = PyLong_AsSsize_t(type);
    put(v, at.recorder, Py_NewRef(recorder));
    return v;
}

#endif
