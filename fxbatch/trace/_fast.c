/* The hot path of recording: calls that were met before, with Values and constants as arguments.

   One table has them (CallTable), which Python fills: what is not in it goes the long way (trace/calls.py, modules.py),
   as every call does where this extension was not built. State lives in the slots of Python objects, read and written
   by their offsets, so that both sides see the same recorder.

   Values are recycled: making an object of a subclass of torch.Tensor costs as much as all the rest. When
   the last reference to a Value goes, the object is kept in a bounded pool and handed out again. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>

#include "_fast_columns.h"

/* --- Slots of Python objects ----------------------------------------------------------------------------- */

static struct {
    Py_ssize_t value, type, recorder, alias;                            /* of a Value */
    Py_ssize_t source, call, output, again, through, views;             /* of an Alias */
    Py_ssize_t sid, types, single, is_tuple, aliases, guards, target;   /* of an Entry */
    Py_ssize_t sigs, inputs, count, table, mode, grad, autocast, floats; /* of the recorder */
    Py_ssize_t constants, owners, entries, payload, unchecked, settled, lifted, row_calls;
} at;
static PyTypeObject *Value, *Alias, *Tensor, *Parameter, *BareParameter, *BareView;
static PyTypeObject *Dtype, *Device, *Size, *Module, *Entry, *Recorder;
static PyObject *plain_new, *build_result, *slow_constant, *slow_row, *slow_link, *strided, *getitem;
static PyObject *grad_enabled, *autocast_enabled, *default_dtype, *modes_enabled;
static const PyGetSetDef *get_shape, *get_dtype, *get_device, *get_is_cpu, *get_layout, *get_version, *get_base;
static PyObject *cpu; /* the device */
/* C++, of torch: the same as the first three, or NULL */
static _Bool (*keys_excluded)(uint64_t), (*grad_now)(void);
static int8_t (*dtype_now)(void);
static uint64_t autocast_keys;
static PyObject *slow_torch_function, *slow_bare, *slow_handle;
static _Thread_local PyObject *current; /* this thread's recorder */

#define SLOT(object, where) (*(PyObject **)((char *)(object) + (where)))

static int slot(PyObject *type, const char *name, Py_ssize_t *offset)
{
    PyObject *descriptor = PyObject_GetAttrString(type, name);
    if (!descriptor)
        return -1;
    int found = Py_IS_TYPE(descriptor, &PyMemberDescr_Type);
    if (found)
        *offset = ((PyMemberDescrObject *)descriptor)->d_member->offset;
    else
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
static Py_ssize_t pooled, pool_limit = POOL;
static destructor plain_dealloc;
static inquiry plain_clear;

static void value_dealloc(PyObject *v)
{
    /* A Value without recorder was cleared by the garbage collector: its tensor may be gone. */
    if (pooled < pool_limit && Py_IS_TYPE(v, Value) && SLOT(v, at.recorder)) {
        PyObject **dict = _PyObject_GetDictPtr(v);
        if (!dict || !*dict || !PyDict_GET_SIZE(*dict)) {
            PyObject_GC_UnTrack(v);
            if (*(PyObject **)((char *)v + Value->tp_weaklistoffset))
                PyObject_ClearWeakRefs(v);
            if (pooled >= pool_limit) { /* what that ran has filled it */
                PyObject_GC_Track(v);
                goto no_room;
            }
            PyObject *recorder = SLOT(v, at.recorder), *alias = SLOT(v, at.alias);
            SLOT(v, at.recorder) = SLOT(v, at.alias) = NULL;
            Py_CLEAR(SLOT(v, at.value));
            Py_CLEAR(SLOT(v, at.type));
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
    PyObject *number = SLOT(recorder, at.count); /* moves from the recorder to the value */
    PyObject *next = PyLong_FromLongLong(PyLong_AsSsize_t(number) + 1);
    if (!next)
        return NULL;
    PyObject *v = empty_value();
    if (!v) {
        Py_DECREF(next);
        return NULL;
    }
    SLOT(recorder, at.count) = next;
    put(v, at.value, number);
    put(v, at.type, Py_NewRef(type));
    put(v, at.recorder, Py_NewRef(recorder));
    return v;
}

/* --- Calls --------------------------------------------------------------------------------------------------- */

static int has_columns(PyObject *recorder)
{
    PyObject *sigs = SLOT(recorder, at.sigs), *inputs = SLOT(recorder, at.inputs);
    return sigs && inputs && Py_IS_TYPE(sigs, &ColumnType) && Py_IS_TYPE(inputs, &ColumnType);
}

typedef struct {
    PyObject *value; /* ours */
    int64_t id;
} Input;

#define FEW 32

/* Append a row and give its result. */
static PyObject *record(PyObject *recorder, PyObject *entry, const Input *read, Py_ssize_t n)
{
    Column *sigs = (Column *)SLOT(recorder, at.sigs), *inputs = (Column *)SLOT(recorder, at.inputs);
    if (column_reserve(sigs, 1) < 0 || column_reserve(inputs, n) < 0)
        return NULL;
    sigs->data[sigs->size++] = PyLong_AsSsize_t(SLOT(entry, at.sid));
    for (Py_ssize_t i = 0; i < n; i++)
        inputs->data[inputs->size++] = read[i].id;
    PyObject *types = SLOT(entry, at.types);
    if (SLOT(entry, at.single) == Py_True)
        return make_value(recorder, PyTuple_GET_ITEM(types, 0));
    PyObject *outputs = PyTuple_New(PyTuple_GET_SIZE(types));
    for (Py_ssize_t i = 0; outputs && i < PyTuple_GET_SIZE(types); i++) {
        PyObject *v = make_value(recorder, PyTuple_GET_ITEM(types, i));
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

/* What a plain tensor's attribute is, by the getter itself: the class was looked through once. */
static PyObject *ask(const PyGetSetDef *attribute, PyObject *t)
{
    return attribute->get(t, attribute->closure);
}

/* emit(recorder, entry, ids): record one call; its result with Values. */
static PyObject *emit(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n)
{
    if (n != 3 || !PyObject_TypeCheck(args[0], Recorder) || !has_columns(args[0])) {
        PyErr_SetString(PyExc_TypeError, "emit(recorder with columns in C, entry, ids)");
        return NULL;
    }
    PyObject *given = PySequence_Fast(args[2], "ids are a sequence"), *result = NULL;
    Py_ssize_t inputs = given ? PySequence_Fast_GET_SIZE(given) : 0;
    Input few[FEW], *read = inputs > FEW ? PyMem_Malloc(inputs * sizeof(Input)) : few;
    if (given && !read)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; read && i < inputs; i++)
        read[i].id = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(given, i));
    if (given && !PyErr_Occurred())
        result = record(args[0], args[1], read, inputs);
    if (read != few)
        PyMem_Free(read);
    Py_XDECREF(given);
    return result;
}

/* The entry of constants like t, borrowed; NULL without an error where there is none. There are few. */
static PyObject *entry_like(PyObject *recorder, PyObject *t)
{
    PyObject *entries = SLOT(recorder, at.entries), *found = NULL, *key, *entry;
    PyObject *shape = ask(get_shape, t), *dtype = ask(get_dtype, t), *on_cpu = ask(get_is_cpu, t), *device = NULL;
    if (on_cpu)
        device = on_cpu == Py_True ? Py_NewRef(cpu) : ask(get_device, t);
    if (shape && dtype && device && PyDict_GET_SIZE(entries) <= 8) {
        for (Py_ssize_t place = 0; !found && PyDict_Next(entries, &place, &key, &entry);) {
            if (PyTuple_GET_ITEM(key, 1) != dtype)
                continue;
            int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(key, 0), shape, Py_EQ);
            if (same == 1)
                same = PyObject_RichCompareBool(PyTuple_GET_ITEM(key, 2), device, Py_EQ);
            if (same < 0)
                break;
            found = same ? entry : NULL;
        }
    } else if (shape && dtype && device) {
        key = PyTuple_Pack(3, shape, dtype, device);
        found = key ? PyDict_GetItemWithError(entries, key) : NULL;
        Py_XDECREF(key);
    }
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    Py_XDECREF(on_cpu);
    Py_XDECREF(device);
    return found;
}

/* Where a tensor's storage says whether it may be resized (torch_private.resizable_place); -1: not known. */
static Py_ssize_t to_impl = -1, to_storage, to_resizable;

/* Whether somebody else may write to the memory of a plain tensor unseen (numpy, another process); 1 too where that
   can't be told here: then Python does. */
static int is_foreign(PyObject *t)
{
    if (to_impl < 0)
        return 1;
    const char *impl = *(char **)((char *)t + to_impl), *storage = impl ? *(char **)(impl + to_storage) : NULL;
    return !storage || !storage[to_resizable];
}

/* The Value of a real tensor met first now, or NULL without an error: then the slow path decides. */
static PyObject *new_constant(PyObject *recorder, PyObject *t, PyObject *key)
{
    PyObject *owners = SLOT(recorder, at.owners), *v = NULL;
    if (!owners || !PyDict_Check(owners) || PyDict_Contains(owners, key) || is_foreign(t))
        return NULL;
    PyObject *layout = ask(get_layout, t), *version = NULL;
    PyObject *entry = layout == strided ? entry_like(recorder, t) : NULL;
    Py_XDECREF(layout);
    if (entry && (version = ask(get_version, t))) {
        PyObject *payload = PyDict_GetItemWithError(SLOT(recorder, at.payload), SLOT(entry, at.sid)), *kept = NULL;
        if (payload && (v = record(recorder, entry, NULL, 0))) {
            kept = PyTuple_Pack(3, v, t, version);
            Py_DECREF(v); /* `kept` has it */
            if (!kept || PyList_Append(payload, t) < 0 ||
                PyDict_SetItem(SLOT(recorder, at.constants), key, kept) < 0 ||
                PyList_Append(SLOT(recorder, at.unchecked), kept) < 0)
                v = NULL;
            Py_XDECREF(kept); /* so has the dict */
        }
        Py_DECREF(version);
    }
    if (!v && PyErr_ExceptionMatches(PyExc_RuntimeError))
        PyErr_Clear(); /* tensors made in inference mode have no version */
    return v;
}

/* Whether a tensor met first now may be a view of a shared operand; -1 on error. */
static int perhaps_shared_view(PyObject *recorder, PyObject *t)
{
    PyObject *base = ask(get_base, t);
    if (!base)
        return -1;
    int found = base != Py_None;
    PyObject *owners = SLOT(recorder, at.owners);
    if (found && Py_IS_TYPE(base, Tensor) && owners && PyDict_Check(owners)) {
        PyObject *key = PyLong_FromVoidPtr(base);
        found = key ? PyDict_Contains(owners, key) : -1;
        Py_XDECREF(key);
    }
    Py_DECREF(base);
    return found;
}

/* The Value of a real tensor, borrowed; NULL without an error when it is a shared operand, or where `views` count
   when it may be a view of one. */
static PyObject *constant_of(PyObject *recorder, PyObject *t, int views)
{
    PyObject *v = NULL, *key = PyLong_FromVoidPtr(t);
    PyObject *kept = key ? PyDict_GetItemWithError(SLOT(recorder, at.constants), key) : NULL;
    if (kept) {
        PyObject *version = PyTuple_GET_ITEM(kept, 2);
        PyObject *now = version == Py_None ? Py_NewRef(Py_None) : ask(get_version, t);
        int same = now ? PyObject_RichCompareBool(now, version, Py_EQ) : -1;
        Py_XDECREF(now);
        v = same == 1 ? PyTuple_GET_ITEM(kept, 0) : NULL;
    } else if (key && !PyErr_Occurred()) {
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

static int mode_is(PyObject *ask, PyObject *expected)
{
    PyObject *now = PyCFunction_GET_FUNCTION(ask)(PyCFunction_GET_SELF(ask), NULL);
    Py_XDECREF(now);
    return now && now == expected; /* True and False live for ever */
}

/* Whether gradients and autocast are as they were recorded. Autocast is False or, where it is on, None. */
static int grad_and_autocast_as_recorded(PyObject *recorder)
{
    PyObject *grad = SLOT(recorder, at.grad), *autocast = SLOT(recorder, at.autocast);
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
        if (!(known = PyCFunction_GET_FUNCTION(default_dtype)(PyCFunction_GET_SELF(default_dtype), NULL)))
            return 0;
        Py_DECREF(known);
        number = now;
    }
    return known == expected;
}

static int modes_as_recorded(PyObject *recorder)
{
    return grad_and_autocast_as_recorded(recorder) && default_dtype_is(SLOT(recorder, at.floats));
}

/* Whether what an entry's body reads, and user code may change unseen, is as it was (Entry.guards). */
static int holds(PyObject *entry)
{
    PyObject *guards = SLOT(entry, at.guards);
    if (!guards || guards == Py_None)
        return 1;
    for (Py_ssize_t i = 0; i + 2 < PyTuple_GET_SIZE(guards); i += 3) {
        PyObject *dict = PyTuple_GET_ITEM(guards, i);
        if (!PyDict_Check(dict) || PyDict_GetItem(dict, PyTuple_GET_ITEM(guards, i + 1)) != PyTuple_GET_ITEM(guards, i + 2))
            return 0;
    }
    return 1;
}

/* --- Calls by all of their arguments ------------------------------------------------------------------------- */

/* What a call's arguments are. Objects of tokens are borrowed of the arguments, values of inputs are held: a constant's
   has no other owner than the recorder, and what looks at one argument may run anything. */
typedef struct {
    Token *tokens, few_tokens[FEW];
    Input *inputs, few_inputs[FEW];
    Py_ssize_t n, read, room;
    int views; /* whether a tensor met first now may be a view of a shared operand, which Python has to look at */
} Arguments;

static int arguments_grow(Arguments *a)
{
    Py_ssize_t room = 4 * a->room;
    Token *tokens = PyMem_Malloc(room * sizeof(Token));
    Input *inputs = PyMem_Malloc(room * sizeof(Input));
    if (!tokens || !inputs) {
        PyMem_Free(tokens);
        PyMem_Free(inputs);
        PyErr_NoMemory();
        return -1;
    }
    memcpy(tokens, a->tokens, a->n * sizeof(Token));
    memcpy(inputs, a->inputs, a->read * sizeof(Input));
    if (a->tokens != a->few_tokens) {
        PyMem_Free(a->tokens);
        PyMem_Free(a->inputs);
    }
    a->tokens = tokens;
    a->inputs = inputs;
    a->room = room;
    return 0;
}

static void arguments_free(Arguments *a)
{
    for (Py_ssize_t i = 0; i < a->read; i++)
        Py_DECREF(a->inputs[i].value);
    if (a->tokens != a->few_tokens) {
        PyMem_Free(a->tokens);
        PyMem_Free(a->inputs);
    }
}

static int token(Arguments *a, PyObject *object, int64_t number)
{
    if (a->n == a->room && arguments_grow(a) < 0)
        return -1;
    a->tokens[a->n++] = (Token){object, number};
    return 1;
}

static int token_value(Arguments *a, PyObject *v)
{
    if (a->n == a->room && arguments_grow(a) < 0)
        return -1;
    a->tokens[a->n++] = (Token){(PyObject *)Value, PyLong_AsSsize_t(SLOT(v, at.type))};
    a->inputs[a->read++] = (Input){Py_NewRef(v), PyLong_AsSsize_t(SLOT(v, at.value))};
    return 1;
}

static int token_integer(Arguments *a, PyObject *x)
{
    int overflow;
    int64_t number = PyLong_AsLongLongAndOverflow(x, &overflow);
    return overflow ? 0 : token(a, (PyObject *)&PyLong_Type, number);
}

/* Strings and devices are compared by content: what stands for all that are equal, borrowed; NULL where there are too
   many, or with an error. */
static PyObject *one_of_equals(PyObject *x)
{
    static PyObject *known;
    if (!known && !(known = PyDict_New()))
        return NULL;
    PyObject *found = PyDict_GetItemWithError(known, x);
    if (!found && !PyErr_Occurred() && PyDict_GET_SIZE(known) < MAX_CALLS && PyDict_SetItem(known, x, x) == 0)
        return x;
    return found;
}

static int is_parameter(PyTypeObject *type)
{
    return type == Parameter || type == BareParameter;
}

/* Append what one argument is; 0 for arguments that need a closer look, -1 on error. */
static int tokenise(Arguments *a, PyObject *recorder, PyObject *x, int depth)
{
    PyTypeObject *type = Py_TYPE(x);
    if (type == Value)
        return SLOT(x, at.recorder) == recorder ? token_value(a, x) : 0;
    if (type == Tensor) {
        PyObject *v = constant_of(recorder, x, a->views);
        return v ? token_value(a, v) : PyErr_Occurred() ? -1 : 0;
    }
    if (x == Py_None || x == Py_Ellipsis || type == &PyBool_Type || is_parameter(type) || type == Dtype)
        return token(a, x, 0);
    if (type == &PyLong_Type)
        return token_integer(a, x);
    if (type == &PyFloat_Type) {
        double number = PyFloat_AS_DOUBLE(x);
        int64_t bits;
        memcpy(&bits, &number, sizeof bits);
        return number == number ? token(a, (PyObject *)type, bits) : 0;
    }
    if ((type == &PyTuple_Type || type == &PyList_Type || type == Size) && depth < 3) {
        int known = token(a, (PyObject *)type, PySequence_Fast_GET_SIZE(x));
        for (Py_ssize_t i = 0; known > 0 && i < PySequence_Fast_GET_SIZE(x); i++)
            known = tokenise(a, recorder, PySequence_Fast_GET_ITEM(x, i), depth + 1);
        return known;
    }
    if (type == &PySlice_Type) {
        PyObject *parts[] = {((PySliceObject *)x)->start, ((PySliceObject *)x)->stop, ((PySliceObject *)x)->step};
        int known = token(a, (PyObject *)type, 0);
        for (int i = 0; known > 0 && i < 3; i++)
            known = parts[i] == Py_None           ? token(a, Py_None, 0)
                    : PyLong_CheckExact(parts[i]) ? token_integer(a, parts[i])
                                                  : 0;
        return known;
    }
    if (type == BareView) { /* compared by what of which parameter it shows, or a row that is looked up */
        PyObject *shown = PyObject_GetAttrString(x, "_fxbatch_view");
        int known = !shown                       ? 0
                    : Py_IS_TYPE(shown, Value) ? tokenise(a, recorder, shown, depth)
                    : a->views                 ? token(a, shown, 0)
                                               : 0;
        if (!shown)
            PyErr_Clear();
        Py_XDECREF(shown); /* the view and the table of signatures keep it */
        return known;
    }
    if (type == &PyUnicode_Type || type == Device)
        return (x = one_of_equals(x)) ? token(a, x, 0) : PyErr_Occurred() ? -1 : 0;
    return 0;
}

/* All arguments: `names` is a tuple with its values behind the positional ones, a dict, or NULL. 1 where all are
   known; else there is nothing to free. */
static int tokenise_all(Arguments *a, PyObject *recorder, PyObject *const *args, Py_ssize_t n, PyObject *names,
                        int views)
{
    a->tokens = a->few_tokens;
    a->inputs = a->few_inputs;
    a->n = a->read = 0;
    a->room = FEW;
    a->views = views;
    int known = token(a, (PyObject *)&PyTuple_Type, n);
    for (Py_ssize_t i = 0; known > 0 && i < n; i++)
        known = tokenise(a, recorder, args[i], 0);
    if (names && PyTuple_Check(names))
        for (Py_ssize_t i = 0; known > 0 && i < PyTuple_GET_SIZE(names); i++) {
            known = token(a, PyTuple_GET_ITEM(names, i), 1);
            if (known > 0)
                known = tokenise(a, recorder, args[n + i], 0);
        }
    else if (names) {
        PyObject *name, *x;
        Py_ssize_t i = 0;
        while (known > 0 && PyDict_Next(names, &i, &name, &x)) {
            known = token(a, name, 1);
            if (known > 0)
                known = tokenise(a, recorder, x, 0);
        }
    }
    if (known <= 0)
        arguments_free(a);
    return known;
}

static Call call_of(PyObject *recorder, PyObject *func, Arguments *a)
{
    Call c = {.func = func, .n = a->n, .tokens = a->tokens, .mode = (int32_t)PyLong_AsLong(SLOT(recorder, at.mode))};
    c.hash = call_hash(&c);
    return c;
}

static CallTable *table_of(PyObject *recorder)
{
    PyObject *table = SLOT(recorder, at.table);
    return table && Py_IS_TYPE(table, &CallTableType) ? (CallTable *)table : NULL;
}

/* --- Views ----------------------------------------------------------------------------------------------------- */

/* What an Alias of values.py holds; source and call may be NULL: of a value that is no view and has some. */
static PyObject *new_alias(PyObject *source, PyObject *call, PyObject *output, PyObject *through)
{
    PyObject *alias = Alias->tp_alloc(Alias, 0);
    if (alias) {
        SLOT(alias, at.source) = Py_NewRef(source ? source : Py_None);
        SLOT(alias, at.call) = Py_NewRef(call ? call : Py_None);
        SLOT(alias, at.output) = Py_NewRef(output);
        SLOT(alias, at.again) = Py_NewRef(Py_None);
        SLOT(alias, at.through) = Py_NewRef(through);
        SLOT(alias, at.views) = Py_NewRef(Py_None);
    }
    return alias;
}

/* Note that a value is leaf `output` of a call that gives views of `source`; -1 on error. */
static int link_view(PyObject *recorder, PyObject *view, PyObject *source, PyObject *call, Py_ssize_t output)
{
    PyObject *leaf = PyLong_FromSsize_t(output), *through = SLOT(recorder, at.grad), *ref = NULL;
    PyObject *alias = leaf ? new_alias(source, call, leaf, through) : NULL, *above = SLOT(source, at.alias);
    if (alias)
        put(view, at.alias, alias);
    if (alias && !above && (above = new_alias(NULL, NULL, leaf, through)))
        put(source, at.alias, above);
    Py_XDECREF(leaf);
    if (!alias || !above || !(ref = PyWeakref_NewRef(view, NULL)))
        return -1;
    if (SLOT(above, at.views) == Py_None) {
        PyObject *views = PyList_New(0);
        if (views)
            put(above, at.views, views);
    }
    int done = PyList_Check(SLOT(above, at.views)) ? PyList_Append(SLOT(above, at.views), ref) : -1;
    Py_DECREF(ref);
    return done;
}

/* The call of a view, as an Alias has it: (function, args, kwargs). */
static PyObject *call_of_view(PyObject *target, PyObject *const *args, Py_ssize_t n, PyObject *names)
{
    PyObject *given = PyTuple_New(n), *named = names && PyDict_Check(names) ? Py_NewRef(names) : PyDict_New();
    for (Py_ssize_t i = 0; given && i < n; i++)
        PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
    int good = given && named;
    for (Py_ssize_t i = 0; good && names && PyTuple_Check(names) && i < PyTuple_GET_SIZE(names); i++)
        good = PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[n + i]) == 0;
    PyObject *call = good ? PyTuple_Pack(3, target, given, named) : NULL;
    Py_XDECREF(given);
    Py_XDECREF(named);
    return call;
}

/* Note which outputs are views of which inputs; -1 on error. */
static int link_views(PyObject *recorder, PyObject *entry, PyObject *result, Arguments *a, PyObject *const *args,
                      Py_ssize_t n, PyObject *names)
{
    PyObject *aliases = SLOT(entry, at.aliases), *call = call_of_view(SLOT(entry, at.target), args, n, names);
    int single = SLOT(entry, at.single) == Py_True, done = call ? 0 : -1;
    if (call && (single || SLOT(entry, at.is_tuple) == Py_True)) {
        Py_ssize_t outputs = single ? 1 : PyTuple_GET_SIZE(result);
        for (Py_ssize_t k = 0; done == 0 && k < outputs && k < PyTuple_GET_SIZE(aliases); k++) {
            Py_ssize_t i = PyLong_AsSsize_t(PyTuple_GET_ITEM(aliases, k));
            if (i >= 0 && i < a->read)
                done = link_view(recorder, single ? result : PyTuple_GET_ITEM(result, k), a->inputs[i].value, call, k);
        }
    } else if (call) {
        PyObject *inputs = PyTuple_New(a->read), *linked = NULL;
        for (Py_ssize_t i = 0; inputs && i < a->read; i++)
            PyTuple_SET_ITEM(inputs, i, Py_NewRef(a->inputs[i].value));
        if (inputs)
            linked = PyObject_CallFunctionObjArgs(slow_link, entry, result, inputs, call, NULL);
        done = linked ? 0 : -1;
        Py_XDECREF(linked);
        Py_XDECREF(inputs);
    }
    Py_XDECREF(call);
    return done;
}

/* v[index] for an int that was met before (python_numbers.call_row); NULL without an error for others. */
static PyObject *row_of_value(PyObject *recorder, PyObject *const *args)
{
    PyObject *v = args[0], *rows = SLOT(recorder, at.row_calls), *lifted = SLOT(recorder, at.lifted);
    if (!Py_IS_TYPE(v, Value) || SLOT(v, at.recorder) != recorder || !rows || !PyDict_Check(rows) || !lifted ||
        !PyDict_Check(lifted) || !has_columns(recorder) || !modes_as_recorded(recorder))
        return NULL;
    PyObject *key = PyTuple_Pack(3, SLOT(recorder, at.mode), SLOT(v, at.type), args[1]);
    PyObject *known = key ? PyDict_GetItemWithError(rows, key) : NULL; /* (entry, number of the index, row) */
    Py_XDECREF(key);
    if (!known || !PyTuple_Check(known) || PyTuple_GET_SIZE(known) != 3)
        return NULL;
    Py_INCREF(known);
    PyObject *entry = PyTuple_GET_ITEM(known, 0), *given[] = {v, PyTuple_GET_ITEM(known, 2)}, *result = NULL;
    Input read[] = {{v, PyLong_AsSsize_t(SLOT(v, at.value))}, {NULL, PyLong_AsSsize_t(PyTuple_GET_ITEM(known, 1))}};
    PyObject *call = call_of_view(getitem, given, 2, NULL);
    if (call && PyDict_SetItem(lifted, SLOT(entry, at.sid), Py_True) == 0 &&
        (result = record(recorder, entry, read, 2)) && link_view(recorder, result, v, call, 0) < 0)
        Py_CLEAR(result);
    Py_XDECREF(call);
    Py_DECREF(known);
    return result;
}

/* The result of a call that was met before; NULL without an error when it was not. views: see Arguments. */
static PyObject *call_function(PyObject *recorder, PyObject *func, PyObject *const *args, Py_ssize_t n,
                               PyObject *names, int views)
{
    CallTable *table = table_of(recorder);
    Arguments a;
    if (!table || !table->used || !has_columns(recorder) || !modes_as_recorded(recorder) ||
        tokenise_all(&a, recorder, args, n, names, views) <= 0)
        return NULL;
    Call wanted = call_of(recorder, func, &a);
    PyObject *entry = NULL, *result = NULL;
    if ((table = table_of(recorder)) && table->used) /* new constants may have run anything */
        entry = call_place(table->calls, table->room, &wanted)->entry;
    if (entry && holds(entry)) {
        Py_INCREF(entry);
        result = record(recorder, entry, a.inputs, a.read);
        if (result && PyTuple_GET_SIZE(SLOT(entry, at.aliases)) &&
            link_views(recorder, entry, result, &a, args, n, names) < 0)
            Py_CLEAR(result);
        Py_DECREF(entry);
    }
    arguments_free(&a);
    return result;
}

/* Whether a parameter among the arguments belongs to none of the modules that are watched; -1 on error. */
static int has_foreign_parameter(PyObject *recorder, const Arguments *a)
{
    PyObject *owners = SLOT(recorder, at.owners);
    int foreign = 0;
    for (Py_ssize_t i = 0; i < a->n && !foreign; i++) {
        if (!is_parameter(Py_TYPE(a->tokens[i].object)))
            continue;
        PyObject *key = PyLong_FromVoidPtr(a->tokens[i].object);
        int found = !key ? -1 : owners && PyDict_Check(owners) ? PyDict_Contains(owners, key) : 0;
        Py_XDECREF(key);
        foreign = found < 0 ? -1 : !found;
    }
    return foreign;
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

/* remember(recorder, func, args, kwargs, entry): such calls are recorded as this entry from now on. */
static PyObject *remember(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *recorder, *func, *given, *kwargs, *entry;
    Arguments a;
    if (!PyArg_ParseTuple(args, "OOO!O!O", &recorder, &func, &PyTuple_Type, &given, &PyDict_Type, &kwargs, &entry))
        return NULL;
    CallTable *table = table_of(recorder);
    if (!table || table->used >= MAX_CALLS || !has_columns(recorder))
        Py_RETURN_NONE;
    int known = tokenise_all(&a, recorder, &PyTuple_GET_ITEM(given, 0), PyTuple_GET_SIZE(given), kwargs,
                             !PyObject_TypeCheck(func, Module));
    if (known <= 0)
        return known < 0 ? NULL : Py_NewRef(Py_None);
    int foreign = has_foreign_parameter(recorder, &a);
    if (foreign >= 0 && (table = table_of(recorder))) {
        table->foreign |= foreign;
        if ((4 * table->used >= 3 * table->room && table_grow(table) < 0) ||
            table_put(table, call_of(recorder, func, &a), &a, entry) < 0)
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

/* __torch_function__(func, types, args=(), kwargs=None) of values, and of bare parameters */
static PyObject *torch_function(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n, PyObject *kwnames)
{
    if (current && !kwnames && (n == 3 || n == 4) && PyTuple_CheckExact(args[2]) &&
        (n == 3 || args[3] == Py_None || PyDict_CheckExact(args[3]))) {
        PyObject *names = n == 4 && args[3] != Py_None ? args[3] : NULL;
        PyObject *result = call_function(current, args[0], &PyTuple_GET_ITEM(args[2], 0),
                                         PyTuple_GET_SIZE(args[2]), names, 1);
        if (result || PyErr_Occurred())
            return result;
    }
    int bare = n > 1 && PyTuple_CheckExact(args[1]);
    for (Py_ssize_t i = 0; bare && i < PyTuple_GET_SIZE(args[1]); i++)
        bare = PyTuple_GET_ITEM(args[1], i) != (PyObject *)Value;
    return PyObject_Vectorcall(bare ? slow_bare : slow_torch_function, args, n, kwnames);
}

/* Whether nobody but Value has a say in a call with this argument. */
static int ours_alone(PyObject *x)
{
    PyTypeObject *t = Py_TYPE(x);
    return t == Value || t == Tensor || is_parameter(t) || x == Py_None;
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

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *owner; /* a function that its arguments are given to; NULL: the first argument is a module */
    PyObject *slow;
} Method;

/* Whether an index says something of all of a tensor: slices, None. Others begin with a row, or are read first. */
static int for_all_of_it(PyObject *index)
{
    if (PyTuple_CheckExact(index) && PyTuple_GET_SIZE(index))
        index = PyTuple_GET_ITEM(index, 0);
    return PySlice_Check(index) || index == Py_None || index == Py_Ellipsis;
}

static PyObject *method_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    Method *m = (Method *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (m->owner == getitem && m->owner && n == 2 && !kwnames && !for_all_of_it(args[1])) {
        PyObject *result = current && PyLong_CheckExact(args[1]) ? row_of_value(current, args) : NULL;
        if (result || PyErr_Occurred())
            return result;
    } else if (current && n >= (kwnames ? 1 : 2)) {
        PyObject *result = m->owner ? call_function(current, m->owner, args, n, kwnames, 1)
                                    : call_function(current, args[0], args + 1, n - 1, kwnames, 0);
        if (result || PyErr_Occurred())
            return result;
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
    if (!PyArg_ParseTuple(args, "OO", &owner, &slow))
        return NULL;
    Method *m = (Method *)type->tp_alloc(type, 0);
    if (m) {
        m->call = method_call;
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
    .tp_doc = "Method(owner, slow): known calls of owner (None: of the module it is called on), else slow.",
    .tp_basicsize = sizeof(Method),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = method_new,
    .tp_dealloc = method_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Method, call),
    .tp_descr_get = method_get,
    .tp_members = method_members,
};

#include "_fast_modules.h"
#include "_fast_numbers.h"
#include "_fast_tensors.h"

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
    {"device", &Device}, {"Size", &Size}, {"Columns", &Recorder}, {"Entry", &Entry},
    {"plain_new", &plain_new}, {"build_result", &build_result}, {"constant", &slow_constant},
    {"row_of_parameter", &slow_row},
    {"link_views", &slow_link}, {"Alias", &Alias}, {"getitem", &getitem}, {"torch_function", &slow_torch_function},
    {"BareParameter", &BareParameter}, {"BareView", &BareView}, {"bare_function", &slow_bare},
    {"handle_torch_function", &slow_handle}, {"strided", &strided}, {"cpu", &cpu},
};

static struct {
    const char *name;
    PyObject **where; /* functions in C without arguments */
} const given_questions[] = {
    {"is_grad_enabled", &grad_enabled}, {"any_autocast", &autocast_enabled}, {"default_dtype", &default_dtype},
    {"modes_enabled", &modes_enabled},
};

static struct {
    const char *name;
    const PyGetSetDef **where;
} const getters[] = {
    {"shape", &get_shape}, {"dtype", &get_dtype}, {"device", &get_device}, {"is_cpu", &get_is_cpu},
    {"layout", &get_layout}, {"_version", &get_version}, {"_base", &get_base}, {"requires_grad", &get_requires_grad},
};

static struct {
    PyTypeObject **type;
    const char *name;
    Py_ssize_t *offset;
} const slots[] = {
    {&Value, "_value", &at.value}, {&Value, "_type", &at.type}, {&Value, "_recorder", &at.recorder},
    {&Value, "_alias", &at.alias}, {&Entry, "sid", &at.sid}, {&Entry, "types", &at.types},
    {&Entry, "single", &at.single}, {&Entry, "is_tuple", &at.is_tuple}, {&Entry, "aliases", &at.aliases}, {&Entry, "target", &at.target},
    {&Entry, "guards", &at.guards}, {&Recorder, "sigs", &at.sigs}, {&Recorder, "inputs", &at.inputs},
    {&Recorder, "count", &at.count}, {&Recorder, "call_table", &at.table}, {&Recorder, "mode", &at.mode},
    {&Recorder, "grad", &at.grad}, {&Recorder, "autocast", &at.autocast}, {&Recorder, "floats", &at.floats},
    {&Recorder, "constants", &at.constants}, {&Recorder, "owners", &at.owners},
    {&Recorder, "constant_entries", &at.entries}, {&Recorder, "payload", &at.payload},
    {&Recorder, "unchecked", &at.unchecked}, {&Recorder, "settled", &at.settled},
    {&Recorder, "lifted", &at.lifted}, {&Recorder, "row_calls", &at.row_calls},
    {&Alias, "source", &at.source}, {&Alias, "call", &at.call}, {&Alias, "output", &at.output},
    {&Alias, "again", &at.again}, {&Alias, "grad", &at.through}, {&Alias, "views", &at.views},
};

static PyObject *not_as_expected(void)
{
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "torch is not as this was written for");
    return NULL;
}

#define EACH(i, table) for (size_t i = 0; i < sizeof table / sizeof *table; i++)

/* setup(what is given by name, addresses of torch's C++): what the Python objects are; once. */
static PyObject *setup(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *given, *pointer;
    unsigned long long address[4];
    if (!PyArg_ParseTuple(args, "O!(KKKK)", &PyDict_Type, &given, &address[0], &address[1], &address[2], &address[3]))
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
    EACH(i, slots) if (slot((PyObject *)*slots[i].type, slots[i].name, slots[i].offset) < 0) return NULL;
    EACH(i, getters) if (!(*getters[i].where = getter_of((PyObject *)Tensor, getters[i].name))) return NULL;
    if ((pointer = PyObject_GetAttrString((PyObject *)Tensor, "data_ptr")) && Py_IS_TYPE(pointer, &PyMethodDescr_Type))
        data_ptr = ((PyMethodDescrObject *)pointer)->d_method;
    Py_XDECREF(pointer); /* its class keeps it */
    if (!data_ptr || data_ptr->ml_flags != METH_NOARGS || !Value->tp_clear || !Value->tp_weaklistoffset)
        return not_as_expected();
    keys_excluded = (_Bool (*)(uint64_t))(uintptr_t)address[0];
    autocast_keys = address[1];
    grad_now = (_Bool (*)(void))(uintptr_t)address[2];
    dtype_now = (int8_t (*)(void))(uintptr_t)address[3];
    plain_getattro = Module->tp_getattro;
    plain_getattr = Py_XNewRef(_PyType_Lookup(Module, s_getattr));
    plain_getattribute = Py_XNewRef(_PyType_Lookup(Module, s_getattribute));
    plain_dealloc = Value->tp_dealloc;
    plain_clear = Value->tp_clear;
    Value->tp_dealloc = value_dealloc;
    Value->tp_clear = value_clear;
    Py_RETURN_NONE;
}

static PyObject *new_value(PyObject *Py_UNUSED(module), PyObject *type)
{
    if (type == (PyObject *)Value)
        return empty_value();
    PyErr_SetString(PyExc_TypeError, "makes Values only");
    return NULL;
}

static PyObject *find_resizable(PyObject *Py_UNUSED(module), PyObject *args)
{
    return PyArg_ParseTuple(args, "nnn", &to_impl, &to_storage, &to_resizable) ? Py_NewRef(Py_None) : NULL;
}

static PyObject *recycle(PyObject *Py_UNUSED(module), PyObject *on)
{
    pool_limit = PyObject_IsTrue(on) ? POOL : 0;
    while (pooled > pool_limit) {
        PyObject *v = pool[--pooled];
        PyObject_GC_Track(v);
        Py_DECREF(v);
    }
    Py_RETURN_NONE;
}

/* usual_modes(recorder, grad): whether this thread records with it, with gradients so, and without autocast. None where
   torch's library was not understood. */
static PyObject *usual_modes(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t n)
{
    if (n != 2 || !grad_now || !keys_excluded)
        Py_RETURN_NONE;
    return PyBool_FromLong(current == args[0] && (grad_now() ? Py_True : Py_False) == args[1] &&
                           keys_excluded(autocast_keys));
}

/* waiting_frame(known): the innermost frame of the user's code, where no frame of it holds what others may share; None
   where Python must look. known: by id of a code (it, whether it is the user's, whether it may hold something). */
static PyObject *waiting_frame(PyObject *Py_UNUSED(module), PyObject *known)
{
    PyFrameObject *frame = PyEval_GetFrame(), *found = NULL;
    if (!PyDict_Check(known))
        Py_RETURN_NONE;
    Py_XINCREF(frame);
    while (frame) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        PyObject *key = PyLong_FromVoidPtr(code), *row = key ? PyDict_GetItemWithError(known, key) : NULL;
        Py_XDECREF(key);
        Py_DECREF(code);
        int good = row && PyTuple_Check(row) && PyTuple_GET_SIZE(row) == 3 && PyTuple_GET_ITEM(row, 2) == Py_False;
        if (!good) {
            Py_DECREF(frame);
            Py_CLEAR(found);
            break;
        }
        if (!found && PyTuple_GET_ITEM(row, 1) == Py_True)
            found = (PyFrameObject *)Py_NewRef(frame);
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    if (PyErr_Occurred()) {
        Py_XDECREF(found);
        return NULL;
    }
    return found ? (PyObject *)found : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"setup", setup, METH_VARARGS, "Say what the Python objects are; once."},
    {"set_current", set_current, METH_O, "Make a recorder (or None) this thread's current one."},
    {"new_value", new_value, METH_O, "An empty Value, recycled where there is one."},
    {"find_resizable", find_resizable, METH_VARARGS, "Say where storages say whether they may be resized; once."},
    {"recycle", recycle, METH_O, "Whether Values are handed out again."},
    {"usual_modes", (PyCFunction)(void (*)(void))usual_modes, METH_FASTCALL, "Whether a thread's modes are as expected."},
    {"waiting_frame", waiting_frame, METH_O, "The user's frame that waits, where it holds nothing."},
    {"quicken", quicken, METH_O, "Let modules of a class find their parameters and submodules in C."},
    {"quicken_modules", quicken_modules, METH_O, "Whether classes may be quickened; none is any more if not."},
    {"read_integers", read_integers, METH_VARARGS, "Numbers of tensors without dimensions."},
    {"sizes_of", sizes_of, METH_VARARGS, "Sizes of tensors that are alike otherwise."},
    {"swap", swap, METH_VARARGS, "Put attributes ((owner, name, new), ...); what was there goes to a list."},
    {"emit", (PyCFunction)(void (*)(void))emit, METH_FASTCALL, "emit(recorder, entry, ids): Recorder.emit."},
    {"remember", remember, METH_VARARGS, "remember(recorder, func, args, kwargs, entry)"},
    {"recorded_before", (PyCFunction)(void (*)(void))recorded_before, METH_FASTCALL, "recorded_before(recorder, func, args, kwargs)"},
    {"torch_function", (PyCFunction)(void (*)(void))torch_function, METH_FASTCALL | METH_KEYWORDS,
     "Value.__torch_function__: calls that were met before, else Python's."},
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
    {"__getattr__", &s_getattr}, {"__getattribute__", &s_getattribute},
};

PyMODINIT_FUNC PyInit__fast(void)
{
    EACH(i, interned) if (!(*interned[i].where = PyUnicode_InternFromString(interned[i].text))) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddType(module, &ColumnType) < 0 || PyModule_AddType(module, &CallTableType) < 0 ||
                   PyModule_AddType(module, &MethodType) < 0 || PyModule_AddType(module, &SettledType) < 0 ||
                   PyModule_AddType(module, &ReaderType) < 0))
        Py_CLEAR(module);
    return module;
}
