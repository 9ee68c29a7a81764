// The Python line at which something was launched.
#include "simcuda.h"

#include <torch/csrc/autograd/node.h>

#include <unordered_map>

namespace simcuda {
namespace {

std::vector<std::string> folders;
std::unordered_map<PyCodeObject*, bool> of_library;  // guarded by Python's lock, as all of this file

bool is_library(PyCodeObject* code) {
  auto known = of_library.find(code);
  if (known != of_library.end()) return known->second;
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  bool found = !file || file[0] == '<';
  for (const auto& folder : folders) found = found || std::string(file).rfind(folder, 0) == 0;
  Py_INCREF(code);  // so that its address isn't another's later
  return of_library[code] = found;
}

}  // namespace

void set_library_folders(std::vector<std::string> given) {
  folders = std::move(given);
  of_library.clear();
}

Site current_site() {
  Site site;
  if (!Py_IsInitialized()) return site;
  auto state = PyGILState_Ensure();
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const bool skipped = is_library(code);
    Py_DECREF(code);  // of_library keeps it
    if (!skipped) {
      site.code = code;
      site.line = PyFrame_GetLineNumber(frame);
      Py_DECREF(frame);
      break;
    }
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  PyGILState_Release(state);
  if (!site.code)
    if (auto node = torch::autograd::get_current_node()) site.node = node->name();
  return site;
}

std::vector<Site> current_stack() {
  std::vector<Site> stack;
  if (!Py_IsInitialized()) return stack;
  auto state = PyGILState_Ensure();
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    is_library(code);  // which keeps it
    Py_DECREF(code);
    stack.push_back({code, PyFrame_GetLineNumber(frame), ""});
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  PyGILState_Release(state);
  return stack;
}

std::string describe(const Site& site) {
  if (site.code) return std::string(PyUnicode_AsUTF8(site.code->co_filename)) + ":" + std::to_string(site.line);
  return site.node.empty() ? "" : "backward of " + site.node;
}

}  // namespace simcuda
