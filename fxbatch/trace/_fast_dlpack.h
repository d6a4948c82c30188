/* What a tensor says of its memory and type by DLPack's C exchange interface (torch.Tensor.__dlpack_c_exchange_api__), and
   tensors made of memory: the declarations of dlpack.h 1.2 and later that are used here. */

#ifndef FXBATCH_DLPACK_H
#define FXBATCH_DLPACK_H

#include <Python.h>
#include <stdint.h>

typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Described;

enum { DLPACK_CPU = 1, DLPACK_INT = 0, DLPACK_UINT = 1, DLPACK_FLOAT = 2, DLPACK_BOOL = 6 };

/* Memory that a tensor is made of, which calls `release` in the end. */
typedef struct Managed {
    uint32_t major, minor;
    void *context;
    void (*release)(struct Managed *);
    uint64_t flags;
    Described tensor;
} Managed;

struct Exchange {
    uint32_t major, minor;
    const struct Exchange *older;
    int (*allocate)(void), (*managed)(void);
    int (*to_python)(Managed *memory, void **tensor); /* -1 with an error */
    int (*describe)(void *tensor, Described *out); /* borrowed of the tensor; -1 with an error where there is none */
};

/* The interface in torch's capsule, of the layout that is declared here; NULL where it has none. */
static inline const struct Exchange *exchange_of(PyObject *capsule)
{
    const struct Exchange *api = capsule == Py_None ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (api && api->major > 1)
        api = api->older;
    return api && api->major == 1 ? api : NULL;
}

#endif
