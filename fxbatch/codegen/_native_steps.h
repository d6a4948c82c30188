/* What the steps need beside programs: see _native_steps.c. */

#ifndef FXBATCH_NATIVE_STEPS_H
#define FXBATCH_NATIVE_STEPS_H

#include "_native.h"

PyObject *native_forward(PyObject *module, PyObject *args);
PyObject *native_backward(PyObject *module, PyObject *args);

#endif
