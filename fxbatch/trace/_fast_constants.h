/* Rows of calls, real tensors that become constants, and whether torch's modes are as they were recorded. Part of _fast.c. */

static int has_columns(PyObject *recorder)
{
    return Py_IS_TYPE(SLOT(recorder, at.sigs), &ColumnType) && Py_IS_TYPE(SLOT(recorder, at.inputs), &ColumnType);
}

typedef struct {
    PyObject *value; /* ours */
    int64_t id;
} Input;

#define FEW 32

/* Whether an operand of an entry's that all instances share requires a gradient: asked once a recording; -1 on error. */
static int operands_ask(PyObject *recorder, PyObject *entry)
{
    PyObject *operands = SLOT(entry, at.operands);
    if (!operands || !PyTuple_GET_SIZE(operands))
        return 0;
    if (WHOLE(entry, at.asked_in) != WHOLE(recorder, at.base)) {
        PyObject *answer = PyObject_CallFunctionObjArgs(operands_require, operands, NULL);
        if (!answer)
            return -1;
        WHOLE(entry, at.requires) = answer == Py_True;
        WHOLE(entry, at.asked_in) = WHOLE(recorder, at.base);
        Py_DECREF(answer);
    }
    return WHOLE(entry, at.requires) != 0;
}

/* Which outputs of a call require a gradient, as bytes; "" where none does, NULL on error. */
static const char *gradients_of(PyObject *recorder, PyObject *entry, const Input *read, Py_ssize_t n)
{
    PyObject *carries = SLOT(entry, at.carries);
    if (!carries || !PyBytes_GET_SIZE(carries))
        return "";
    int asked = 0;
    for (Py_ssize_t i = 0; i < n && !asked; i++)
        asked = read[i].value && WHOLE(read[i].value, at.flags) & REQUIRES_GRAD;
    if (!asked)
        asked = operands_ask(recorder, entry);
    return asked < 0 ? NULL : asked ? PyBytes_AS_STRING(carries) : "";
}

/* Append a row; -1 on error. */
static int append_row(PyObject *recorder, PyObject *entry, const Input *read, Py_ssize_t n)
{
    Column *sigs = (Column *)SLOT(recorder, at.sigs), *inputs = (Column *)SLOT(recorder, at.inputs);
    if (column_reserve(sigs, 1) < 0 || column_reserve(inputs, n) < 0)
        return -1;
    sigs->data[sigs->size++] = WHOLE(entry, at.sid);
    for (Py_ssize_t i = 0; i < n; i++)
        inputs->data[inputs->size++] = read[i].id;
    return 0;
}

/* Append a row and give its result. */
static PyObject *record(PyObject *recorder, PyObject *entry, const Input *read, Py_ssize_t n)
{
    const char *gradients = gradients_of(recorder, entry, read, n);
    if (!gradients)
        return NULL;
    int any = gradients[0] != 0; /* 1: requires none, 3: requires one */
    if (append_row(recorder, entry, read, n) < 0)
        return NULL;
    PyObject *types = SLOT(entry, at.types);
    if (SLOT(entry, at.single) == Py_True)
        return make_value(recorder, PyTuple_GET_ITEM(types, 0), any && gradients[0] & 2 ? REQUIRES_GRAD : 0);
    PyObject *outputs = PyTuple_New(PyTuple_GET_SIZE(types));
    for (Py_ssize_t i = 0; outputs && i < PyTuple_GET_SIZE(types); i++) {
        PyObject *v = make_value(recorder, PyTuple_GET_ITEM(types, i), any && gradients[i] & 2 ? REQUIRES_GRAD : 0);
        if (v)
            PyTuple_SET_ITEM(outputs, i, v);
        else
            Py_CLEAR(outputs);
    }
    if (!outputs || SLOT(entry, at.is_tuple) == Py_True)
        return outputs;
    PyObject *built = PyObject_CallFunctionObjArgs(build_result, entry, outputs, NULL);
    Py_DECREF(outputs);
    return built;
}

/* emit(recorder, entry, values): record one call; its result with Values. */
static PyObject *emit(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n)
{
    if (n != 3 || !PyObject_TypeCheck(args[0], Recorder) || !has_columns(args[0])) {
        PyErr_SetString(PyExc_TypeError, "emit(recorder with columns in C, entry, values)");
        return NULL;
    }
    PyObject *values = PySequence_Fast(args[2], "values are a list or a tuple"), *result = NULL;
    Py_ssize_t count = values ? PySequence_Fast_GET_SIZE(values) : 0;
    Input few[FEW], *read = count > FEW ? PyMem_Malloc(count * sizeof(Input)) : few;
    int good = values && read;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        PyObject *v = PySequence_Fast_GET_ITEM(values, i);
        if ((good = Py_IS_TYPE(v, Value)))
            read[i] = (Input){v, WHOLE(v, at.value)};
        else
            PyErr_SetString(PyExc_TypeError, "inputs are values");
    }
    if (good)
        result = record(args[0], args[1], read, count);
    if (read != few)
        PyMem_Free(read);
    Py_XDECREF(values);
    return result;
}

static const struct Exchange *exchange; /* NULL: Python asks */

#define MAX_RANK 5

/* What plain tensors of one type have in common; 0 where Python has to look. */
typedef struct {
    int32_t head[4];
    int64_t shape[MAX_RANK];
} Kind;

/* Memory and type of a tensor; 0 where it has none to say: sparse, on another kind of device, inside a transform. */
static int describe(PyObject *t, Described *out)
{
    int said = exchange && exchange->describe(t, out) == 0;
    if (exchange && !said)
        PyErr_Clear();
    return said;
}

static int kind_from(PyObject *t, Kind *kind, Described *described)
{
    if (!Py_IS_TYPE(t, Tensor) || !describe(t, described) || described->ndim > MAX_RANK)
        return 0;
    memset(kind, 0, sizeof *kind);
    kind->head[0] = described->device.type;
    kind->head[1] = described->device.id;
    kind->head[2] = described->ndim;
    memcpy(&kind->head[3], &described->dtype, 4);
    memcpy(kind->shape, described->shape, described->ndim * sizeof(int64_t));
    return 1;
}

/* The integer that a tensor of one element on the CPU holds; 0 where it holds something else. */
static int integer_in(const Described *t, int64_t *number)
{
    if (t->device.type != DLPACK_CPU || !t->data || t->dtype.lanes != 1)
        return 0;
    for (int32_t d = 0; d < t->ndim; d++)
        if (t->shape[d] != 1)
            return 0;
    const void *held = (const char *)t->data + t->byte_offset;
    switch (t->dtype.code << 8 | t->dtype.bits) {
    case DLPACK_INT << 8 | 64: *number = *(const int64_t *)held; return 1;
    case DLPACK_INT << 8 | 32: *number = *(const int32_t *)held; return 1;
    case DLPACK_INT << 8 | 16: *number = *(const int16_t *)held; return 1;
    case DLPACK_INT << 8 | 8: *number = *(const int8_t *)held; return 1;
    case DLPACK_UINT << 8 | 8:
    case DLPACK_BOOL << 8 | 8: *number = *(const uint8_t *)held; return 1;
    }
    return 0;
}

/* The integer of a plain tensor, in the same way. */
static int number_of(PyObject *t, int64_t *number)
{
    Described described;
    int plain = Py_IS_TYPE(t, Tensor) || Py_IS_TYPE(t, Parameter);
    return plain && describe(t, &described) && integer_in(&described, number);
}

/* kind_of(tensor): bytes that are equal for plain tensors of one type alone; None where that is not known. */
static PyObject *kind_of(PyObject *Py_UNUSED(module), PyObject *t)
{
    Kind kind;
    Described described;
    if (!kind_from(t, &kind, &described))
        Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((char *)&kind, sizeof kind);
}

/* How often torch has written to a tensor; -1 where nobody counts: those made in inference mode. */
static int64_t version_of(PyObject *t)
{
    PyObject *version = ask(get_version, t);
    int64_t number = version ? (int64_t)PyLong_AsSsize_t(version) : -1;
    Py_XDECREF(version);
    PyErr_Clear();
    return number;
}

/* --- Constants: the real tensors that a recording has met, by the object ---------------------------------------- */

typedef struct {
    PyObject *tensor, *value; /* a reference to each; value NULL when the recording is over */
    int64_t version, type;    /* version: when it was met, -1 where nobody counts */
    Py_ssize_t place;         /* among the constants of its signature, of the phase */
    int64_t number;           /* where `is_read`: what it held when it was met, one integer */
    int is_read;
} Constant;

typedef struct {
    PyObject_HEAD
    Constant *rows;              /* in the order in which they were met */
    Py_ssize_t n, room, checked; /* rows before `checked` have been read by a phase */
    Py_ssize_t *table, places;   /* by tensor: the number of its last row, plus one */
} Constants;

/* Where a tensor is, or would be, in the table. */
static Py_ssize_t *constant_place(const Constants *c, PyObject *t)
{
    uint64_t h = ((uint64_t)(uintptr_t)t >> 4) * 0x9E3779B97F4A7C15u;
    for (Py_ssize_t i = (Py_ssize_t)(h >> 20) & (c->places - 1);; i = (i + 1) & (c->places - 1))
        if (!c->table[i] || c->rows[c->table[i] - 1].tensor == t)
            return &c->table[i];
}

/* Room for one row more; -1 on error. */
static int constants_reserve(Constants *c)
{
    if (c->n < c->room)
        return 0;
    Py_ssize_t room = 2 * c->room + 64, places = 1;
    while (places < 4 * room) /* one that was exchanged has two */
        places *= 2;
    Constant *rows = PyMem_Realloc(c->rows, room * sizeof *rows);
    if (rows)
        c->rows = rows;
    Py_ssize_t *table = rows ? PyMem_Calloc(places, sizeof *table) : NULL;
    if (!table) {
        PyErr_NoMemory();
        return -1;
    }
    PyMem_Free(c->table);
    c->table = table;
    c->room = room;
    c->places = places;
    for (Py_ssize_t i = 0; i < c->n; i++)
        *constant_place(c, rows[i].tensor) = i + 1;
    return 0;
}

/* A tensor was met; -1 on error. number: what it holds, NULL where that is not one integer. */
static int constants_put(Constants *c, PyObject *t, PyObject *value, int64_t version, Py_ssize_t place, const int64_t *number)
{
    if (constants_reserve(c) < 0)
        return -1;
    c->rows[c->n] = (Constant){Py_NewRef(t), Py_NewRef(value), version, WHOLE(value, at.type), place, number ? *number : 0, number != NULL};
    *constant_place(c, t) = ++c->n;
    return 0;
}

/* The row of a tensor as it is now, NULL where it was not met or was written to since. */
static Constant *constants_find(const Constants *c, PyObject *t)
{
    Py_ssize_t row = c->places ? *constant_place(c, t) : 0;
    Constant *found = row && c->rows[row - 1].value ? &c->rows[row - 1] : NULL;
    int64_t number;
    if (found && found->is_read)
        return number_of(t, &number) && number == found->number ? found : NULL;
    return found && (found->version < 0 || found->version == version_of(t)) ? found : NULL;
}

/* get(tensor): its value, None where it was not met or was written to since. */
static PyObject *constants_get(PyObject *self, PyObject *t)
{
    Constant *found = constants_find((Constants *)self, t);
    return Py_NewRef(found ? found->value : Py_None);
}

/* put(tensor, value, place) */
static PyObject *constants_add(PyObject *self, PyObject *args)
{
    PyObject *t, *value;
    Py_ssize_t place;
    int64_t number;
    if (!PyArg_ParseTuple(args, "OO!n", &t, Value, &value, &place) ||
        constants_put((Constants *)self, t, value, version_of(t), place, number_of(t, &number) ? &number : NULL) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* exchange(tensor, other, but_lost): what was met was `other`, which has the content that the tensor had. The value and its
   place, or None. but_lost: None also where the tensor was written to since and no phase has read it; `written` finds it. */
static PyObject *constants_exchange(PyObject *self, PyObject *args)
{
    Constants *c = (Constants *)self;
    PyObject *t, *other;
    int but_lost;
    if (!PyArg_ParseTuple(args, "OOp", &t, &other, &but_lost))
        return NULL;
    Py_ssize_t row = c->places ? *constant_place(c, t) : 0;
    if (!row || !c->rows[row - 1].value)
        Py_RETURN_NONE;
    Constant *met = &c->rows[row - 1];
    if (but_lost && row > c->checked && !constants_find(c, t))
        Py_RETURN_NONE;
    Py_SETREF(met->tensor, Py_NewRef(other)); /* what leads there for t is no match for it any more */
    met->version = version_of(other);
    *constant_place(c, other) = row;
    return Py_BuildValue("(On)", met->value, met->place);
}

/* written(but_integers): the type of the first that was written to since it was met, before a phase has read it; None if
   none was. but_integers: what integers held when they were met is known. */
static PyObject *constants_written(PyObject *self, PyObject *but_integers)
{
    Constants *c = (Constants *)self;
    for (Py_ssize_t i = c->checked; i < c->n; i++) {
        const Constant *met = &c->rows[i];
        if (met->version >= 0 && !(met->is_read && but_integers == Py_True) && met->version != version_of(met->tensor))
            return PyLong_FromLongLong(met->type);
    }
    Py_RETURN_NONE;
}

/* integers(type): what those of a type held that no phase has read yet, int64 as a bytearray; None where that is not
   known of one. */
static PyObject *constants_integers(PyObject *self, PyObject *type)
{
    Constants *c = (Constants *)self;
    int64_t wanted = PyLong_AsLongLong(type), n = 0;
    PyObject *numbers = PyErr_Occurred() ? NULL : PyByteArray_FromStringAndSize(NULL, (c->n - c->checked) * 8);
    for (Py_ssize_t i = c->checked; numbers && i < c->n; i++) {
        if (c->rows[i].type != wanted)
            continue;
        if (!c->rows[i].is_read) {
            Py_SETREF(numbers, Py_NewRef(Py_None));
            return numbers;
        }
        memcpy(PyByteArray_AS_STRING(numbers) + 8 * n++, &c->rows[i].number, 8);
    }
    if (numbers && PyByteArray_Resize(numbers, 8 * n) < 0)
        Py_CLEAR(numbers);
    return numbers;
}

/* read(): a phase has read them. */
static PyObject *constants_read(PyObject *self, PyObject *Py_UNUSED(none))
{
    ((Constants *)self)->checked = ((Constants *)self)->n;
    Py_RETURN_NONE;
}

/* let_go(): no value is referred to from here on. */
static PyObject *constants_let_go(PyObject *self, PyObject *Py_UNUSED(none))
{
    Constants *c = (Constants *)self;
    for (Py_ssize_t i = 0; i < c->n; i++)
        Py_CLEAR(c->rows[i].value);
    Py_RETURN_NONE;
}

static void constants_dealloc(PyObject *self)
{
    Constants *c = (Constants *)self;
    for (Py_ssize_t i = 0; i < c->n; i++) {
        Py_XDECREF(c->rows[i].value);
        Py_DECREF(c->rows[i].tensor);
    }
    PyMem_Free(c->rows);
    PyMem_Free(c->table);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef constants_methods[] = {
    {"get", constants_get, METH_O, "The value of a tensor as it is now, or None."},
    {"put", constants_add, METH_VARARGS, "put(tensor, value, place)"},
    {"exchange", constants_exchange, METH_VARARGS, "exchange(tensor, other, but_lost): what was met was the other; its value and place."},
    {"written", constants_written, METH_O, "The type of the first that was written to before it was read."},
    {"integers", constants_integers, METH_O, "What those of a type held, where they are integers."},
    {"read", constants_read, METH_NOARGS, "A phase has read all."},
    {"let_go", constants_let_go, METH_NOARGS, "Refer to no value any more."},
    {NULL}};
static PyTypeObject ConstantsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.trace._fast.Constants",
    .tp_doc = "The real tensors that a recording has met.",
    .tp_basicsize = sizeof(Constants),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = constants_dealloc,
    .tp_methods = constants_methods,
};

/* The entry of constants of a kind, borrowed; NULL where there is none, maybe with an error. Most recordings have few. */
static PyObject *entry_like(PyObject *recorder, const Kind *kind)
{
    PyObject *entries = SLOT(KNOWN(recorder), at.entries), *key, *entry = NULL;
    if (PyDict_GET_SIZE(entries) <= 16) {
        for (Py_ssize_t place = 0; PyDict_Next(entries, &place, &key, &entry);)
            if (PyBytes_CheckExact(key) && !memcmp(PyBytes_AS_STRING(key), kind, sizeof *kind))
                return entry;
        return NULL;
    }
    if ((key = PyBytes_FromStringAndSize((const char *)kind, sizeof *kind)))
        entry = PyDict_GetItemWithError(entries, key);
    Py_XDECREF(key);
    return entry;
}

/* lists[key], borrowed, which is a new list where there was none; NULL on error. */
static PyObject *list_at(PyObject *lists, PyObject *key)
{
    PyObject *list = PyDict_GetItemWithError(lists, key), *none = NULL;
    if (!list && !PyErr_Occurred() && (none = PyList_New(0)) && PyDict_SetItem(lists, key, none) == 0)
        list = none;
    Py_XDECREF(none); /* the dict has it */
    return list;
}

/* lists[key].append(x); -1 on error. */
static int append_to(PyObject *lists, PyObject *key, PyObject *x)
{
    PyObject *list = list_at(lists, key);
    return list ? PyList_Append(list, x) : -1;
}

/* A tensor has become a constant: a factory whose tensors often do gives values (writes.note_uses); -1 on error. */
static int note_use(PyObject *recorder, PyObject *t, PyObject *id)
{
    PyObject *uses = SLOT(recorder, at.uses);
    PyObject *call = uses == Py_None ? NULL : PyDict_GetItemWithError(SLOT(recorder, at.made_by), id);
    return call ? append_to(uses, call, t) : PyErr_Occurred() ? -1 : 0;
}

/* Whether a tensor is a parameter or buffer of a module that is watched; -1 on error. */
static int is_owned(PyObject *recorder, PyObject *t)
{
    PyObject *owners = SLOT(KNOWN(recorder), at.owners);
    PyObject *key = owners == Py_None ? NULL : PyLong_FromVoidPtr(t);
    int found = key ? PyDict_Contains(owners, key) : PyErr_Occurred() ? -1 : 0;
    Py_XDECREF(key);
    return found;
}

/* The Value of a real tensor met first now that no module has, or NULL without an error: then the slow path decides. */
static PyObject *new_constant(PyObject *recorder, PyObject *t, PyObject *key)
{
    PyObject *v = NULL;
    Kind kind;
    Described described;
    int64_t count = -1, number = 0;
    if (SLOT(KNOWN(recorder), at.owners) == Py_None || !kind_from(t, &kind, &described))
        return NULL;
    int is_read = integer_in(&described, &number);
    if (!is_read && (count = version_of(t)) < 0)
        return NULL;
    PyObject *entry = entry_like(recorder, &kind);
    PyObject *sid = entry ? PyLong_FromLongLong(WHOLE(entry, at.sid)) : NULL;
    PyObject *payload = sid ? list_at(SLOT(recorder, at.payload), sid) : NULL;
    Py_XDECREF(sid);
    if (payload && (v = record(recorder, entry, NULL, 0))) {
        PyObject *requires = ask(get_requires_grad, t);
        WHOLE(v, at.flags) = CONSTANT | (requires == Py_True ? REQUIRES_GRAD : 0);
        Py_XDECREF(requires);
        Py_DECREF(v); /* the constants have it */
        Constants *c = (Constants *)SLOT(recorder, at.constants);
        Py_ssize_t place = PyList_GET_SIZE(payload);
        if (PyList_Append(payload, t) < 0 || constants_put(c, t, v, count, place, is_read ? &number : NULL) < 0 ||
            (!is_read && note_use(recorder, t, key) < 0))
            v = NULL;
    }
    return v;
}

/* Whether a tensor met first now may be a view of a shared operand; -1 on error. */
static int perhaps_shared_view(PyObject *recorder, PyObject *t)
{ /* a view of another tensor is noted: it has to let go of the memory before that is written to */
    PyObject *base = ask(get_base, t);
    if (!base)
        return -1;
    int found = base != Py_None;
    PyObject *owners = SLOT(KNOWN(recorder), at.owners);
    if (found && Py_IS_TYPE(base, Tensor) && owners != Py_None) {
        PyObject *key = PyLong_FromVoidPtr(base);
        found = key ? PyDict_Contains(owners, key) : -1;
        if (!found && append_to(SLOT(recorder, at.views_met), key, t) < 0)
            found = -1;
        Py_XDECREF(key);
    }
    Py_DECREF(base);
    return found;
}

/* The Value of a real tensor, borrowed; NULL without an error when it is a shared operand, or where `views` count
   when it may be a view of one. */
static PyObject *constant_of(PyObject *recorder, PyObject *t, int views)
{
    Constant *met = constants_find((Constants *)SLOT(recorder, at.constants), t);
    if (met || is_owned(recorder, t))
        return met ? met->value : NULL;
    PyObject *v = NULL, *key = PyLong_FromVoidPtr(t);
    if (key) {
        int shared = perhaps_shared_view(recorder, t);
        if (shared > 0 && (v = PyObject_CallFunctionObjArgs(slow_row, recorder, t, NULL))) {
            Py_DECREF(v); /* the recorder keeps rows */
            if (v == Py_None)
                v = NULL;
        }
        if (shared < 0 || v || PyErr_Occurred() || (shared && views)) {
            Py_DECREF(key);
            return v;
        }
        v = new_constant(recorder, t, key);
    }
    Py_XDECREF(key);
    if (v || PyErr_Occurred())
        return v;
    v = PyObject_CallFunctionObjArgs(slow_constant, recorder, t, NULL);
    if (!v || v == Py_None) {
        Py_XDECREF(v);
        return NULL;
    }
    Py_DECREF(v); /* the recorder's constants keep it */
    return v;
}

/* Whether a tensor was written to since a version was noted, None: it has none. */
static int is_written_to(PyObject *t, PyObject *version)
{
    return version != Py_None && version_of(t) != (int64_t)PyLong_AsLongLong(version);
}

/* written_to(rows): whose tensor was the first that was written to, of rows (whose, tensor, version); None if none was. */
static PyObject *written_to(PyObject *Py_UNUSED(module), PyObject *rows)
{
    for (Py_ssize_t i = 0; PyList_CheckExact(rows) && i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        if (is_written_to(PyTuple_GET_ITEM(row, 1), PyTuple_GET_ITEM(row, 2)))
            return Py_NewRef(PyTuple_GET_ITEM(row, 0));
    }
    Py_RETURN_NONE;
}

/* What a function in C without arguments gives. */
static PyObject *answer(PyObject *question)
{
    return PyCFunction_GET_FUNCTION(question)(PyCFunction_GET_SELF(question), NULL);
}

static int mode_is(PyObject *question, PyObject *expected)
{
    PyObject *now = answer(question);
    Py_XDECREF(now);
    return now && now == expected; /* True and False live for ever */
}

/* Whether gradients and autocast are so. Autocast is False or, where it is on, None. */
static int grad_and_autocast_are(PyObject *grad, PyObject *autocast)
{
    if (!(grad_now ? (grad_now() ? Py_True : Py_False) == grad : mode_is(grad_enabled, grad)))
        return 0;
    return keys_excluded ? autocast == Py_False && keys_excluded(autocast_keys) : mode_is(autocast_enabled, autocast);
}

/* Whether torch's default dtype is this one: asked of Python once for each that is met in turn. */
static int default_dtype_is(PyObject *expected)
{
    static int8_t number = -1;
    static PyObject *known; /* dtypes live for ever */
    if (!dtype_now)
        return mode_is(default_dtype, expected);
    int8_t now = dtype_now();
    if (now != number || !known) {
        if (!(known = answer(default_dtype)))
            return 0;
        Py_DECREF(known);
        number = now;
    }
    return known == expected;
}

static int modes_are_same(PyObject *recorder)
{
    PyObject *known = KNOWN(recorder);
    return grad_and_autocast_are(SLOT(known, at.grad), SLOT(known, at.autocast)) && default_dtype_is(SLOT(known, at.floats));
}

/* Whether torch's modes are those that calls are recorded with, after a look at them where they were not; under autocast
   they never are. */
static int modes_as_recorded(PyObject *recorder)
{
    if (modes_are_same(recorder))
        return 1;
    if (SLOT(KNOWN(recorder), at.autocast) != Py_False)
        return 0;
    PyObject *done = PyObject_CallOneArg(slow_sync, recorder);
    if (!done)
        PyErr_Clear(); /* Python looks again, and says what is wrong */
    Py_XDECREF(done);
    return done && modes_are_same(recorder);
}

/* What a place holds now, borrowed: a dictionary's item, a class's attribute, a cell's content, a list's item; with an ellipsis for
 * its name how many there are, as Python's own object, which it has for small ones. */
static PyObject *held_by(PyObject *holder, PyObject *name)
{
    if (name == Py_Ellipsis) {
        PyObject *length = PyLong_FromSsize_t(PyObject_Size(holder));
        Py_XDECREF(length);
        return length;
    }
    if (PyDict_Check(holder))
        return PyDict_GetItem(holder, name);
    if (PyList_Check(holder)) {
        Py_ssize_t i = PyLong_AsSsize_t(name);
        return i < PyList_GET_SIZE(holder) ? PyList_GET_ITEM(holder, i) : NULL;
    }
    return PyType_Check(holder) ? _PyType_Lookup((PyTypeObject *)holder, name) : PyCell_Check(holder) ? PyCell_GET(holder) : NULL;
}

/* Whether what an entry's body reads, and user code may change unseen, is as it was (Entry.guards). */
static int holds(PyObject *entry)
{
    PyObject *guards = SLOT(entry, at.guards);
    if (!guards || guards == Py_None)
        return 1;
    for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(guards); i += 3)
        if (held_by(PyTuple_GET_ITEM(guards, i), PyTuple_GET_ITEM(guards, i + 1)) != PyTuple_GET_ITEM(guards, i + 2))
            return 0;
    return 1;
}
