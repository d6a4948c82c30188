/* What a call's arguments are: the key of the table of calls. Part of _fast.c. */

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
    if (is_stale(v)) { /* what it is now is recorded before the call */
        PyObject *refreshed = PyObject_CallOneArg(slow_refresh, v);
        if (!refreshed)
            return -1;
        Py_DECREF(refreshed);
    }
    if (token(a, (PyObject *)Value, WHOLE(v, at.type)) < 0)
        return -1;
    a->inputs[a->read++] = (Input){Py_NewRef(v), WHOLE(v, at.value)};
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

/* What a tensor that was written to stands for (values.py), borrowed; NULL for others. */
static PyObject *value_behind(PyObject *recorder, PyObject *x)
{
    PyObject **dict = Py_IS_TYPE(x, WrittenTensor) ? _PyObject_GetDictPtr(x) : NULL;
    PyObject *written = dict && *dict ? PyDict_GetItemWithError(*dict, s_written) : NULL;
    PyObject *v = written && Py_IS_TYPE(written, Written) ? SLOT(written, at.stands_for) : NULL;
    return v && Py_IS_TYPE(v, Value) && SLOT(v, at.recorder) == recorder ? v : NULL;
}

/* The value that an argument is or stands for, borrowed; NULL for others. */
static PyObject *value_at(PyObject *recorder, PyObject *x)
{
    return Py_IS_TYPE(x, Value) ? SLOT(x, at.recorder) == recorder ? x : NULL : value_behind(recorder, x);
}

/* An end of a slice, which may be a number of numpy. */
static int token_end(Arguments *a, PyObject *x)
{
    if (PyLong_Check(x))
        return PyLong_CheckExact(x) ? token_integer(a, x) : 0;
    if (!PyIndex_Check(x) || PyObject_TypeCheck(x, Tensor))
        return 0;
    PyObject *number = PyNumber_Index(x);
    int known = number ? token_integer(a, number) : -1;
    Py_XDECREF(number);
    return known;
}

/* A view of a parameter or buffer of a module's, by what it shows; 0 where that is for Python: gradients stop there, it is
   of another type, or complex. Those of which a row is looked up have become values (constant_of). */
static int token_view(Arguments *a, PyObject *recorder, PyObject *t)
{
    PyObject *base = ask(get_base, t);
    Described view, whole;
    int known = base && base != Py_None ? is_owned(recorder, base) : 0;
    if (known > 0 && (!describe(t, &view) || !describe(base, &whole) || view.dtype.code > 4 ||
                      memcmp(&view.dtype, &whole.dtype, sizeof view.dtype)))
        known = 0;
    if (known > 0 && SLOT(KNOWN(recorder), at.grad) == Py_True) {
        PyObject *requires = ask(get_requires_grad, base);
        PyObject *through = requires == Py_True ? ask(get_grad_fn, t) : NULL;
        known = requires == Py_False || (through && through != Py_None); /* of one made under no_grad it is None */
        Py_XDECREF(requires);
        Py_XDECREF(through);
    }
    if (known > 0) /* a parameter itself has number 0 */
        known = token(a, base, 1 + ((char *)view.data + view.byte_offset - (char *)whole.data - whole.byte_offset));
    if (known > 0)
        known = token(a, (PyObject *)Tensor, view.ndim);
    for (int d = 0; known > 0 && d < view.ndim; d++)
        if ((known = token(a, (PyObject *)Tensor, view.shape[d])) > 0)
            known = token(a, (PyObject *)Tensor, view.strides ? view.strides[d] : -1);
    if (known == 0)
        PyErr_Clear();
    Py_XDECREF(base);
    return known;
}

/* Whether a type is that of a named tuple. */
static int is_named_tuple(PyTypeObject *type)
{
    return type->tp_base == &PyTuple_Type && _PyType_Lookup(type, s_fields) != NULL;
}

/* Append what one argument is; 0 for arguments that need a closer look, -1 on error. */
static int tokenise(Arguments *a, PyObject *recorder, PyObject *x, int depth)
{
    PyTypeObject *type = Py_TYPE(x);
    if (type == Value || type == WrittenTensor) {
        PyObject *v = value_at(recorder, x);
        return v ? token_value(a, v) : PyErr_Occurred() ? -1 : 0;
    }
    if (type == Tensor) {
        PyObject *v = constant_of(recorder, x, a->views);
        if (v || PyErr_Occurred())
            return v ? token_value(a, v) : -1;
        int owned = is_owned(recorder, x); /* a buffer, as a parameter by itself */
        return owned ? owned < 0 ? -1 : token(a, x, 0) : a->views ? token_view(a, recorder, x) : 0;
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
    if ((type == &PyTuple_Type || type == &PyList_Type || type == Size || is_named_tuple(type)) && depth < 3) {
        int known = token(a, (PyObject *)type, PySequence_Fast_GET_SIZE(x));
        for (Py_ssize_t i = 0; known > 0 && i < PySequence_Fast_GET_SIZE(x); i++)
            known = tokenise(a, recorder, PySequence_Fast_GET_ITEM(x, i), depth + 1);
        return known;
    }
    if (type == &PySlice_Type) {
        PyObject *parts[] = {((PySliceObject *)x)->start, ((PySliceObject *)x)->stop, ((PySliceObject *)x)->step};
        int known = token(a, (PyObject *)type, 0);
        for (int i = 0; known > 0 && i < 3; i++)
            known = parts[i] == Py_None ? token(a, Py_None, 0) : token_end(a, parts[i]);
        return known;
    }
    if (type == BareView) { /* compared by what of which parameter it shows, or a row that is looked up */
        PyObject *shown = PyObject_GetAttr(x, s_view);
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
    PyObject *name, *x;
    if (names && PyTuple_Check(names))
        for (Py_ssize_t i = 0; known > 0 && i < PyTuple_GET_SIZE(names); i++)
            known = token(a, PyTuple_GET_ITEM(names, i), 1) > 0 ? tokenise(a, recorder, args[n + i], 0) : -1;
    else if (names)
        for (Py_ssize_t i = 0; known > 0 && PyDict_Next(names, &i, &name, &x);)
            known = token(a, name, 1) > 0 ? tokenise(a, recorder, x, 0) : -1;
    if (known <= 0)
        arguments_free(a);
    return known;
}

static Call call_of(PyObject *recorder, PyObject *func, Arguments *a)
{
    Call c = {.func = func, .n = a->n, .tokens = a->tokens, .mode = (int32_t)WHOLE(KNOWN(recorder), at.mode)};
    c.hash = call_hash(&c);
    return c;
}

static CallTable *table_of(PyObject *recorder)
{
    return (CallTable *)SLOT(KNOWN(recorder), at.table);
}
