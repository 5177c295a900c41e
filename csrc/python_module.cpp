// What Python imports as fmoe_ext._C. Importing it loads the shared object, and with it the static
// registrations; there is nothing else in it. A C++ program may link the same file without Python: its one
// symbol of Python is weak.
#include <Python.h>

#pragma weak PyModule_Create2

PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
