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

py::list frames_of(const std::vector<Site>& sites) {
  py::list made;
  for (const auto& site : sites) {
    py::dict frame;
    frame["filename"] = PyUnicode_AsUTF8(site.code->co_filename);
    frame["name"] = PyUnicode_AsUTF8(site.code->co_name);
    frame["line"] = site.line;
    made.append(frame);
  }
  return made;
}

// As torch.cuda.memory._snapshot returns it.
py::dict snapshot() {
  std::vector<SegmentView> segments;
  std::vector<Trace> traces;
  {
    Lock lock(mutex);
    segments = segments_now();
    traces = history();
  }
  py::list segments_made, traces_made;
  for (const auto& segment : segments) {
    py::dict made;
    py::list blocks;
    size_t allocated = 0, requested = 0;
    for (const auto& block : segment.blocks) {
      py::dict one;
      one["address"] = uintptr_t(block.address);
      one["size"] = block.size;
      one["requested_size"] = block.live ? block.requested : 0;
      one["state"] = block.live ? "active_allocated" : "inactive";
      one["frames"] = frames_of(block.frames);
      blocks.append(one);
      if (block.live) allocated += block.size, requested += block.requested;
    }
    made["device"] = 0;
    made["address"] = uintptr_t(segment.address);
    made["total_size"] = segment.size;
    made["allocated_size"] = allocated;
    made["active_size"] = allocated;
    made["requested_size"] = requested;
    made["stream"] = segment.stream;
    made["segment_type"] = segment.small ? "small" : "large";
    made["is_expandable"] = segment.expandable;
    made["blocks"] = blocks;
    segments_made.append(made);
  }
  for (const auto& one : traces) {
    py::dict made;
    made["action"] = one.action;
    made["addr"] = uintptr_t(one.address);
    made["size"] = one.size;
    made["stream"] = one.stream;
    made["frames"] = frames_of(one.frames);
    if (one.action == "oom") made["device_free"] = one.device_free;
    traces_made.append(made);
  }
  py::dict made;
  made["segments"] = segments_made;
  made["device_traces"] = py::list();
  made["device_traces"].attr("append")(traces_made);
  return made;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_allocators();
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
  m.def("reset_peaks", &reset_peaks);
  m.def("record_history", &record_history);
  m.def("records_history", &records_history);
  m.def("snapshot", &snapshot);
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
