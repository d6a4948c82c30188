/* What the steps need beside programs: see _native_steps.c. */

#ifndef FXBATCH_NATIVE_STEPS_H
#define FXBATCH_NATIVE_STEPS_H

#include "_native.h"

enum { GROUP, RESULT, SAVED };          /* where backward finds an input */
enum { VIEW, BROADCAST, INDEX };        /* gathers, as in ir.py */
enum { NOTHING, READ_VIEW, READ_INDEX, READ_SUM }; /* reads of gradients, as in passes/gradients.py */

PyObject *native_forward(PyObject *module, PyObject *args);
PyObject *native_backward(PyObject *module, PyObject *args);

#endif
