// What Python calls.
#include "simcuda.h"

#include <ATen/Context.h>
#include <torch/extension.h>

namespace py = pybind11;
using namespace simcuda;

namespace {

py::dict dict_of(const Access& access) {
  py::dict made;
  made["name"] = access.name;
  made["writes"] = access.writes;
  made["timeline"] = access.timeline;
  made["bytes"] = access.end - access.begin;
  made["line"] = describe(access.site);
  return made;
}

py::list take_races() {
  std::vector<Race> taken;
  {
    Lock lock(mutex);
    taken.swap(races);
  }
  py::list made;
  for (const auto& race : taken) made.append(py::make_tuple(race.kind, dict_of(race.later), dict_of(race.earlier)));
  return made;
}

py::list operations_from(size_t first) {
  py::list made;
  for (size_t i = first; i < operations.size(); ++i) {
    const auto& one = operations[i];
    made.append(py::make_tuple(one.kind, one.name, one.stream, one.bytes, one.pinned, one.event, describe(one.site)));
  }
  return made;
}

std::map<std::string, int64_t> memory_stats() {
  Lock lock(mutex);
  return {
      {"allocated", memory.allocated}, {"peak_allocated", memory.peak_allocated}, {"reserved", memory.reserved},
      {"peak_reserved", memory.peak_reserved}, {"requested", memory.requested}, {"pinned", memory.pinned},
      {"segments", memory.segments}, {"retries", memory.retries}, {"out_of_memory", memory.out_of_memory}};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(c10::kCUDA, device_allocator);
  at::globalContext().lazyInitDevice(c10::kCUDA);
  register_operators();
  start_watching_the_host();

  m.def("set_library_folders", &set_library_folders);
  m.def("take_races", &take_races);
  m.def("forget_all", [] {
    py::gil_scoped_release others_may_run;
    Lock lock(mutex);
    forget_all();
  });

  m.def("set_recording", [](bool on) {
    Lock lock(mutex);
    recording = on;
    if (!on) operations.clear();
  });
  m.def("operation_count", [] { return operations.size(); });
  m.def("operations_from", &operations_from);
  m.def("begin_peaks", &begin_peaks);
  m.def("end_peaks", &end_peaks);

  m.def("set_delays", [](int kind) {
    Lock lock(mutex);
    if (Delays(kind) == Delays::kNone) finish_pending(clock_of_all());
    delays = Delays(kind);
  });

  m.def("memory_stats", &memory_stats);
  m.def("reset_peaks", [] {
    Lock lock(mutex);
    memory.peak_allocated = memory.allocated;
    memory.peak_reserved = memory.reserved;
  });
  m.def("empty_cache", [] {
    Lock lock(mutex);
    empty_cache();
  });
  m.def("total_bytes", [] { return total_bytes; });
  m.def("set_total_bytes", [](int64_t bytes) { total_bytes = bytes; });

  m.def("register_host", [](uintptr_t begin, size_t size) {
    auto site = current_site();
    Lock lock(mutex);
    return register_host((char*)begin, size, site);
  });
  m.def("unregister_host", [](uintptr_t begin) {
    auto site = current_site();
    Lock lock(mutex);
    return unregister_host((char*)begin, site);
  });
  m.def("touch_on_host", [](uintptr_t begin, size_t size, bool writes, const std::string& name) {
    auto site = current_site();
    Lock lock(mutex);
    if (!is_pinned((void*)begin)) return;
    advance(kHost);
    touch(kHost, (char*)begin, (char*)begin + size, writes, name, site);
  });

  m.def("host_alias", &host_alias);
  m.def("launch_begin", &launch_begin);
  m.def("launch_end", &launch_end);
  m.def("seed", &seed);
  m.def("random_state", &random_state);
  m.def("set_random_state", &set_random_state);
}
