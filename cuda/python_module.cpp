// What Python imports as fmoe_ext._C_cuda; csrc/python_module.cpp says how a C++ program links it.
#include <Python.h>

#pragma weak PyModule_Create2

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
