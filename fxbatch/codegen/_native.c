/* Kernels as instructions on rows of memory, and whole stretches of steps run from the plan's columns.

   In: programs as records of int64 (codegen/native_table.py says what each number is), pointers of tensors that
   the caller holds. Out: the tensors' memory is written. Nothing here knows torch; the Python kernels are the
   reference, and run what is not a program. Programs are checked when they are made, places when they are used. */

#include <stddef.h>

#include "_native_steps.h"
#include <structmember.h>

/* Whether `rows` from the operand's offset on, of so many elements each, lie within its base, for n rows. */
static int fits(const Program *p, const Operand *o, int64_t rows, int64_t reach, int64_t bytes, int64_t n)
{
    const Base *base = &p->bases[o->base];
    int64_t last = o->offset + (rows - 1) * o->stride + reach;
    return last * bytes <= rows_of(base->per_row, base->rest, n) * base->row_bytes;
}

static int operand_good(const Program *p, const Operand *o, int reads)
{
    if (o->base == -1)
        return reads;
    int64_t most = (int64_t)1 << 31;
    return o->base >= 0 && o->base < p->base_count && o->offset >= 0 && o->offset < most && o->stride >= 0 &&
           o->stride < most && o->inner >= 0 && o->inner < most;
}

/* Whether BLAS can read an operand: lines that don't overlap, of neighbouring elements. Where there is one line, its
   stride may be anything. */
static int product_operand(const Instruction *x, int k)
{
    const Operand *o = &operands_of(x)[k];
    int64_t rows_vary = k == 2 ? x->depth_per_row : x->per_row, rows = k == 2 ? x->depth_rest : x->rest;
    int64_t columns_vary = k == 1 ? x->depth_per_row : 0, columns = k == 1 ? x->depth_rest : x->width;
    if (o->inner == 1)
        return (!rows_vary && rows == 1) || (!columns_vary && o->stride >= columns);
    return k && o->stride == 1 && ((!columns_vary && columns == 1) || (!rows_vary && o->inner >= rows));
}

/* NULL, or what is wrong with an instruction. */
static const char *instruction_fault(const Program *p, const Instruction *x)
{
    const int8_t *size = element_bytes(x->code);
    if (!size)
        return "unknown code";
    if (!rows_fit(x->per_row, x->rest) || x->width < 1 || x->width >= ((int64_t)1 << 31))
        return "rows or width";
    if (x->code == CALL)
        return x->group >= 0 || x->apart || x->packed ? "group" : call_fault(p, x);
    int pointwise = x->code < POINTWISE;
    if (pointwise != (x->group >= 0))
        return "group";
    if (x->code == PRODUCT && (!has_products() || !rows_fit(x->depth_per_row, x->depth_rest)))
        return "product";
    if (reduces(x->code) && (x->depth_per_row || x->depth_rest < 1 || x->depth_rest >= ((int64_t)1 << 31)))
        return "depth";
    if (x->apart || x->packed)
        return "what C finds";
    if (x->code == PUT && (x->column < 1 || x->depth_rest % x->column))
        return "columns";
    const Operand *operands = operands_of(x);
    for (int k = 0; k < 4; k++) {
        const Operand *o = &operands[k];
        if (!size[k])
            continue;
        if (!operand_good(p, o, (pointwise && k) || (x->code == PRODUCT && k == 3)))
            return "operand";
        if (o->base < 0)
            continue;
        if (k == 0 && p->bases[o->base].kind == INPUT)
            return "written operand";
        if (o->inner > 1 && !((x->code == PRODUCT || reduces(x->code)) && k) && !(x->code == PICK && k == 2))
            return "inner stride";
        if ((k == 0 || (x->code == PRODUCT && k == 3)) && o->inner != 1)
            return "inner stride of the result";
        if (x->code == PRODUCT && k < 3 && !product_operand(x, k))
            return "strides of a product";
        for (int64_t n = 1; n <= MOST_ROWS; n += MOST_ROWS - 1) {
            int64_t rows = rows_of(x->per_row, x->rest, n), width = width_of(x, k, n);
            if (x->code == PRODUCT && k == 2)
                rows = rows_of(x->depth_per_row, x->depth_rest, n);
            else if ((x->code == LOOKUP && k == 1) || (x->code == TABLE_GRADIENT && k == 0))
                rows = x->depth_rest;
            else if (x->code == SUM_ROWS && k == 0)
                rows = 1;
            if (rows < 1 || width < 1 || !fits(p, o, rows, reach(x, k, width), size[k], n))
                return "an operand is larger than its memory";
        }
    }
    return NULL;
}

/* Records of `size` bytes, as such or as int64. */
static int take_records(PyObject *object, Py_buffer *view, Py_ssize_t size, int64_t *count)
{
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if ((view->itemsize != 8 && view->itemsize != size) || view->len % size) {
        PyBuffer_Release(view);
        PyErr_Format(PyExc_TypeError, "records of %zd int64 were expected", size / 8);
        return -1;
    }
    *count = view->len / size;
    return 0;
}

static void *copy_records(PyObject *object, Py_ssize_t size, int64_t *count)
{
    Py_buffer view;
    if (take_records(object, &view, size, count) < 0)
        return NULL;
    void *copy = PyMem_Malloc(view.len ? (size_t)view.len : 8);
    if (!copy)
        PyErr_NoMemory();
    else if (view.len)
        memcpy(copy, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return copy;
}

static void program_free(PyObject *self)
{
    Program *p = (Program *)self;
    PyMem_Free(p->bases);
    PyMem_Free(p->code);
    PyMem_Free(p->sources);
    PyMem_Free(p->segments);
    PyMem_Free(p->views);
    Py_XDECREF(p->functions);
    Py_TYPE(self)->tp_free(self);
}

static int count_bases(Program *p)
{
    int64_t counts[3] = {0, 0, 0}, kind = INPUT;
    for (int64_t b = 0; b < p->base_count; b++) {
        const Base *base = &p->bases[b];
        if (base->kind < kind || base->kind > OWN || !rows_fit(base->per_row, base->rest) || base->row_bytes < 1 ||
            base->row_bytes >= ((int64_t)1 << 33))
            return -1;
        kind = base->kind; /* the caller's memory first, in order of its kind */
        counts[base->kind]++;
    }
    p->inputs = counts[INPUT], p->outputs = counts[OUTPUT];
    return p->source_count <= p->inputs && p->base_count <= MOST_BASES ? 0 : -1;
}

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *bases, *code, *sources, *views = NULL, *functions = NULL;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Program(bases, instructions, sources, views=none, functions=())");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "OOO|OO!", &bases, &code, &sources, &views, &PyTuple_Type, &functions))
        return NULL;
    Program *p = (Program *)type->tp_alloc(type, 0);
    if (!p)
        return NULL;
    if (!(p->bases = copy_records(bases, sizeof(Base), &p->base_count)) ||
        !(p->code = copy_records(code, sizeof(Instruction), &p->length)) ||
        !(p->sources = copy_records(sources, sizeof(Source), &p->source_count)) ||
        (views && !(p->views = copy_records(views, sizeof(View), &p->view_count))) ||
        !(p->functions = functions ? Py_NewRef(functions) : PyTuple_New(0))) {
        Py_DECREF(p);
        return NULL;
    }
    const char *fault = count_bases(p) < 0 ? "bases" : NULL;
    int64_t i = 0;
    for (; i < p->length && !fault; i++)
        fault = instruction_fault(p, &p->code[i]);
    for (int64_t s = 0; s < p->source_count && !fault; s++) {
        const Source *source = &p->sources[s];
        if (source->kind < 0 || source->kind > SAVED || source->number < 0 || source->kept < -1 || source->size < 1 ||
            p->bases[s].per_row != 1 || p->bases[s].rest || p->bases[s].row_bytes % source->size)
            fault = "sources";
    }
    if (fault) {
        Py_DECREF(p);
        PyErr_Format(PyExc_ValueError, "instruction %lld: %s", (long long)(i - 1), fault);
        return NULL;
    }
    if (find_segments(p) < 0 || find_apart(p) < 0) {
        Py_DECREF(p);
        return PyErr_NoMemory();
    }
    return (PyObject *)p;
}

PyTypeObject ProgramType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.codegen._native.Program",
    .tp_basicsize = sizeof(Program),
    .tp_dealloc = program_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Program(bases, instructions, sources, views, functions): a kernel as instructions, checked.",
    .tp_new = program_new,
};

static void room_free(PyObject *self)
{
    PyMem_RawFree(((Room *)self)->memory);
    for (int64_t k = 0; k < ((Room *)self)->apart_count; k++)
        PyMem_RawFree(((Room *)self)->apart[k]);
    PyMem_RawFree(((Room *)self)->apart);
    PyMem_RawFree(((Room *)self)->apart_size);
    Py_TYPE(self)->tp_free(self);
}

int room_reserve(Room *room, size_t bytes)
{
    if (bytes + 64 <= room->size)
        return 0;
    PyMem_RawFree(room->memory);
    room->size = 0;
    room->memory = PyMem_RawMalloc(bytes + bytes / 4 + 64);
    if (!room->memory)
        return -1;
    room->size = bytes + bytes / 4 + 64;
    return 0;
}

int room_count(Room *room, int64_t count)
{
    for (; room->apart_count < count; room->apart_count++) {
        char **apart = PyMem_RawRealloc(room->apart, (size_t)count * sizeof(char *));
        room->apart = apart ? apart : room->apart;
        size_t *size = PyMem_RawRealloc(room->apart_size, (size_t)count * sizeof(size_t));
        room->apart_size = size ? size : room->apart_size;
        if (!apart || !size)
            return -1;
        room->apart[room->apart_count] = NULL;
        room->apart_size[room->apart_count] = 0;
    }
    return 0;
}

char *room_apart(Room *room, int64_t number, size_t bytes)
{
    if (bytes + 64 > room->apart_size[number]) {
        PyMem_RawFree(room->apart[number]);
        room->apart[number] = PyMem_RawMalloc(bytes + 64);
        room->apart_size[number] = room->apart[number] ? bytes + 64 : 0;
    }
    return room->apart[number] ? (char *)aligned((size_t)room->apart[number]) : NULL;
}

static PyObject *room_bytes(PyObject *self, void *closure)
{
    const Room *room = (const Room *)self;
    size_t bytes = room->size;
    (void)closure;
    for (int64_t k = 0; k < room->apart_count; k++)
        bytes += room->apart_size[k];
    return PyLong_FromSize_t(bytes);
}

static PyGetSetDef room_attributes[] = {{"nbytes", room_bytes, NULL, "bytes held", NULL}, {NULL, NULL, NULL, NULL, NULL}};
static PyMemberDef room_members[] = {
    {"threads", T_LONG, offsetof(Room, threads), 0, "how many threads programs may run on"},
    {"apart", T_LONG, offsetof(Room, shared), 0, "how many products of steps were done for several steps at once"},
    {"packed", T_LONG, offsetof(Room, packed), 0, "how often weights were packed"},
    {NULL, 0, 0, 0, NULL},
};
PyTypeObject RoomType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fxbatch.codegen._native.Room",
    .tp_basicsize = sizeof(Room),
    .tp_dealloc = room_free,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Room(): memory that one thread's programs write their intermediates to; it grows.",
    .tp_new = PyType_GenericNew,
    .tp_getset = room_attributes,
    .tp_members = room_members,
};

/* One program on memory [inputs + outputs, 2] of the caller's, pointer and bytes; 0 where it did not run. */
static int run_given(const Program *p, Room *room, int64_t n, const Place *given)
{
    char *bases[MOST_BASES] = {NULL};
    if (n < 1 || n > MOST_ROWS)
        return 0;
    for (int64_t b = 0; b < p->inputs + p->outputs; b++) {
        if (given[b].bytes < rows_of(p->bases[b].per_row, p->bases[b].rest, n) * p->bases[b].row_bytes)
            return 0;
        bases[b] = (char *)(intptr_t)given[b].pointer;
    }
    return run_program(p, n, bases, NULL, 0, room) == 0;
}

/* run_all(programs, room, counts, memory, first, last) -> the first program from `first` on that did not run, `last` if
   all did. counts: rows of each; memory: a Place for each of all their inputs and outputs. */
static PyObject *native_run_all(PyObject *module, PyObject *args)
{
    PyObject *programs, *room, *counts, *memory;
    Py_buffer rows, view;
    int64_t number, pieces, needed = 0;
    long long at, last;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!OOLL", &PyTuple_Type, &programs, &RoomType, &room, &counts, &memory, &at, &last))
        return NULL;
    if (take_records(counts, &rows, 8, &number) < 0)
        return NULL;
    if (take_records(memory, &view, sizeof(Place), &pieces) < 0) {
        PyBuffer_Release(&rows);
        return NULL;
    }
    int good = number == PyTuple_GET_SIZE(programs) && at >= 0 && at <= last && last <= number;
    last = ((Room *)room)->busy ? at : last;
    for (int64_t i = 0; i < number && good; i++) {
        const Program *p = (const Program *)PyTuple_GET_ITEM(programs, i);
        good = Py_TYPE(p) == &ProgramType;
        needed += good ? p->inputs + p->outputs : 0;
    }
    if (good && needed == pieces) {
        const Place *given = view.buf;
        for (int64_t i = 0; i < at; i++) {
            const Program *p = (const Program *)PyTuple_GET_ITEM(programs, i);
            given += p->inputs + p->outputs;
        }
        Py_BEGIN_ALLOW_THREADS
        for (; at < last; at++) {
            const Program *p = (const Program *)PyTuple_GET_ITEM(programs, at);
            if (!run_given(p, (Room *)room, ((const int64_t *)rows.buf)[at], given))
                break;
            given += p->inputs + p->outputs;
        }
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "programs, their rows and their memory don't belong together");
    PyBuffer_Release(&rows);
    PyBuffer_Release(&view);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(at);
}

/* --- Where tensors are: Python's methods, asked from here ------------------------------------------------ */

static PyObject *plain_tensors; /* classes whose numbers are in memory as they are */
enum { UNTYPED_STORAGE, DATA_PTR, NBYTES, IS_CPU, IS_NEG, IS_CONJ, NAMES };
static PyObject *names[NAMES];

static int64_t asked(PyObject *object, int method) /* -1 with an exception */
{
    PyObject *found = PyObject_CallMethodNoArgs(object, names[method]);
    int64_t number = found ? (int64_t)PyLong_AsUnsignedLongLong(found) : -1;
    Py_XDECREF(found);
    return number;
}

/* The start of `size` bytes in a tensor's memory; 0: nowhere, -1: an exception. */
static int64_t place_in_memory(PyObject *tensor, int64_t size)
{
    PyObject *storage = PyObject_CallMethodNoArgs(tensor, names[UNTYPED_STORAGE]);
    if (!storage) { /* wrapped by a transform, sparse, opaque */
        if (!PyErr_ExceptionMatches(PyExc_NotImplementedError))
            return -1;
        PyErr_Clear();
        return 0;
    }
    int64_t start = asked(tensor, DATA_PTR), end = 0; /* 0: functional, or zeros without memory */
    if (start && !PyErr_Occurred())
        end = asked(storage, DATA_PTR);
    if (end && !PyErr_Occurred())
        end += asked(storage, NBYTES);
    Py_DECREF(storage);
    return PyErr_Occurred() ? -1 : start + size <= end ? start : 0;
}

/* address(tensor, size): codegen/native.py says what it is, and where C may look at a tensor at all. */
static PyObject *native_address(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    int64_t size = count == 2 ? PyLong_AsLongLong(args[1]) : -1;
    if (size < 0 || !plain_tensors)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "address(tensor, size)");
    PyObject *cpu = NULL;
    int plain = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plain_tensors); i++)
        plain |= (PyObject *)Py_TYPE(args[0]) == PyTuple_GET_ITEM(plain_tensors, i);
    plain = plain && (cpu = PyObject_GetAttr(args[0], names[IS_CPU])) == Py_True;
    Py_XDECREF(cpu);
    for (int k = IS_NEG; k <= IS_CONJ && plain; k++)
        plain = asked(args[0], k) == 0;
    int64_t start = plain && size ? place_in_memory(args[0], size) : 0;
    if (PyErr_Occurred())
        return NULL;
    if (!plain || (size && !start))
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong((unsigned long long)start);
}

static PyObject *native_set_plain(PyObject *module, PyObject *classes)
{
    (void)module;
    if (!PyTuple_Check(classes))
        return PyErr_Format(PyExc_TypeError, "a tuple of classes");
    Py_XSETREF(plain_tensors, Py_NewRef(classes));
    Py_RETURN_NONE;
}

static PyObject *native_set_products(PyObject *module, PyObject *address)
{
    (void)module;
    void *single = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred())
        return NULL;
    set_products(single);
    Py_RETURN_NONE;
}

/* set_choice(bytes): for each layout and class of rows 1 where BLAS multiplies, 0 where loops of ours do. */
static PyObject *native_set_choice(PyObject *module, PyObject *choice)
{
    char *bytes;
    Py_ssize_t count;
    (void)module;
    if (PyBytes_AsStringAndSize(choice, &bytes, &count) < 0)
        return NULL;
    if (count != LAYOUTS * ROW_CLASSES)
        return PyErr_Format(PyExc_ValueError, "%d bytes were expected", LAYOUTS * ROW_CLASSES);
    set_choice((const int8_t *)bytes);
    Py_RETURN_NONE;
}

/* products() -> (whether BLAS is there, the level of loops of ours, "" for none). */
static PyObject *native_products(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return Py_BuildValue("(Os)", has_products() & 1 ? Py_True : Py_False, has_products() & 2 ? chosen_loops() : "");
}

/* set_threads(GOMP_parallel, omp_get_thread_num, omp_get_num_threads, set_num_threads_local): addresses, 0 for none. */
static PyObject *native_set_threads(PyObject *module, PyObject *args)
{
    unsigned long long at[4];
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKK", &at[0], &at[1], &at[2], &at[3]))
        return NULL;
    set_threads((void *)(uintptr_t)at[0], (void *)(uintptr_t)at[1], (void *)(uintptr_t)at[2], (void *)(uintptr_t)at[3]);
    Py_RETURN_NONE;
}

/* set_loops(level) -> the level before: "plain", "avx2", "avx512", "" for the best. For tests. */
static PyObject *native_set_loops(PyObject *module, PyObject *level)
{
    const char *before = chosen_loops(), *name = PyUnicode_AsUTF8(level);
    (void)module;
    if (!name)
        return NULL;
    if (choose_loops(name) < 0)
        return PyErr_Format(PyExc_ValueError, "no loops for %s on this processor", name);
    return PyUnicode_FromString(before);
}

/* put(pointer, buffer): what a buffer holds, to memory of the caller's. */
static PyObject *native_put(PyObject *module, PyObject *args)
{
    unsigned long long to;
    Py_buffer from;
    (void)module;
    if (!PyArg_ParseTuple(args, "Ky*", &to, &from))
        return NULL;
    memcpy((void *)(uintptr_t)to, from.buf, (size_t)from.len);
    PyBuffer_Release(&from);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run_all", native_run_all, METH_VARARGS, "run_all(programs, room, counts, memory, first, last): where it stopped."},
    {"forward", native_forward, METH_VARARGS, "forward(programs, room, columns, first, last): steps; where it stopped."},
    {"backward", native_backward, METH_VARARGS, "backward(programs, room, columns, first, last): from last - 1 down."},
    {"put", native_put, METH_VARARGS, "put(pointer, buffer): to memory that the caller holds."},
    {"set_threads", native_set_threads, METH_VARARGS, "set_threads(addresses of four functions, 0: none)."},
    {"set_loops", native_set_loops, METH_O, "set_loops(level) -> the level before, for tests."},
    {"set_choice", native_set_choice, METH_O, "set_choice(bytes): which library multiplies, by layout and rows."},
    {"products", native_products, METH_NOARGS, "products() -> (whether BLAS is there, the level of our loops)."},
    {"product", native_product, METH_VARARGS, "product(a, b, out, rows, width, depth, layout, library, repeats)."},
    {"address", (PyCFunction)(void (*)(void))native_address, METH_FASTCALL, "address(tensor, size): where it is, or None."},
    {"set_plain", native_set_plain, METH_O, "set_plain(classes of tensors whose numbers are in memory as they are)."},
    {"set_exchange", native_set_exchange, METH_O, "set_exchange(capsule of DLPack's interface): whether torch can be called."},
    {"set_products", native_set_products, METH_O, "set_products(address of sgemm_, 0: none)."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    static const char *const texts[] = {"untyped_storage", "data_ptr", "nbytes", "is_cpu", "is_neg", "is_conj"};
    for (int k = 0; k < NAMES; k++)
        if (!(names[k] = PyUnicode_InternFromString(texts[k])))
            return NULL;
    choose_loops("");
    if (PyType_Ready(&ProgramType) < 0 || PyType_Ready(&RoomType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    Py_INCREF(&ProgramType);
    Py_INCREF(&RoomType);
    if (PyModule_AddObject(module, "Program", (PyObject *)&ProgramType) < 0 ||
        PyModule_AddObject(module, "Room", (PyObject *)&RoomType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
