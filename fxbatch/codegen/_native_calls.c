/* Instructions that are calls of torch: a function is given tensors that lie in the program's memory, what it reads first
   and then what it writes to. */

#include "_native.h"
#include "../trace/_fast_dlpack.h"

static const struct Exchange *exchange;
static const struct {
    uint8_t code, bytes;
} types[] = {{DLPACK_FLOAT, 4}, {DLPACK_INT, 8}, {DLPACK_BOOL, 1}};

typedef struct {
    Managed memory;
    int64_t shape[MOST_RANK], strides[MOST_RANK];
} Lent;

static void release(Managed *memory)
{
    PyMem_RawFree(memory);
}

static PyObject *tensor_of(const View *v, char **bases, int64_t n)
{
    Lent *lent = PyMem_RawMalloc(sizeof *lent);
    void *tensor = NULL;
    if (!lent)
        return PyErr_NoMemory();
    for (int64_t i = 0; i < v->rank; i++) {
        const Dimension *d = &v->dimensions[i];
        lent->shape[i] = rows_of(d->per_row, d->rest, n);
        lent->strides[i] = d->stride;
    }
    lent->memory = (Managed){1, 0, NULL, release, 0, {
        .data = bases[v->base] + v->offset * types[v->type].bytes, .device = {DLPACK_CPU, 0}, .ndim = (int32_t)v->rank,
        .dtype = {types[v->type].code, (uint8_t)(types[v->type].bytes * 8), 1}, .shape = lent->shape, .strides = lent->strides}};
    return exchange->to_python(&lent->memory, &tensor) < 0 ? NULL : tensor;
}

/* NULL, or what is wrong with a call. */
const char *call_fault(const Program *p, const Instruction *x)
{
    if (!exchange || x->number < 0 || x->number >= PyTuple_GET_SIZE(p->functions))
        return "function";
    if (x->views < 0 || x->view_count < 1 || x->views + x->view_count > p->view_count || x->results < 1 ||
        x->results > x->view_count)
        return "views";
    for (int64_t i = 0; i < x->view_count; i++) {
        const View *v = &p->views[x->views + i];
        if (v->base < 0 || v->base >= p->base_count || v->offset < 0 || v->offset >= (int64_t)1 << 31 || v->type < 0 ||
            v->type > 2 || v->rank < 0 || v->rank > MOST_RANK)
            return "view";
        if (i >= x->view_count - x->results && p->bases[v->base].kind == INPUT)
            return "written view";
        for (int64_t n = 1; n <= MOST_ROWS; n += MOST_ROWS - 1) {
            const Base *base = &p->bases[v->base];
            double last = (double)v->offset;
            for (int64_t k = 0; k < v->rank; k++) {
                const Dimension *d = &v->dimensions[k];
                if (!rows_fit(d->per_row, d->rest) || d->stride < 0)
                    return "dimension";
                last += (double)(rows_of(d->per_row, d->rest, n) - 1) * (double)d->stride;
            }
            if ((last + 1) * types[v->type].bytes > (double)(rows_of(base->per_row, base->rest, n) * base->row_bytes))
                return "a view is larger than its memory";
        }
    }
    return NULL;
}

int call_uses(const Program *p, const Instruction *x, int64_t base, int written)
{
    for (int64_t i = written ? x->view_count - x->results : 0; i < x->view_count; i++)
        if (p->views[x->views + i].base == base)
            return 1;
    return 0;
}

int run_call(const Program *p, const Instruction *x, int64_t n, char **bases)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *tensors = PyTuple_New(x->view_count), *result = NULL;
    int64_t i = 0;
    for (; tensors && i < x->view_count; i++) {
        PyObject *tensor = tensor_of(&p->views[x->views + i], bases, n);
        if (!tensor)
            break;
        PyTuple_SET_ITEM(tensors, i, tensor);
    }
    if (tensors && i == x->view_count)
        result = PyObject_CallOneArg(PyTuple_GET_ITEM(p->functions, x->number), tensors);
    Py_XDECREF(tensors);
    Py_XDECREF(result);
    PyGILState_Release(state);
    return !result;
}

/* set_exchange(capsule) -> whether torch can be called: DLPack's exchange interface, or None. */
PyObject *native_set_exchange(PyObject *module, PyObject *capsule)
{
    (void)module;
    exchange = exchange_of(capsule);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(exchange != NULL);
}
