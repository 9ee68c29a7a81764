// The parts of the simulated CUDA device: timelines, the race detector, memory and counts.
//
// Operators run on the CPU as soon as they are launched. What a GPU would be free to reorder is known from vector
// clocks: the host and each stream have one, an event is a copy of a stream's, and an access that isn't ordered behind
// a conflicting one is a race.
#pragma once

#include <Python.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simcuda {

// Guards all state. Nobody takes Python's lock while holding it, for threads that hold Python's lock wait for it.
extern std::recursive_mutex mutex;

// Whoever has the mutex may wait for Python's lock, so who waits for the mutex gives that back in the meantime.
class Lock {
 public:
  explicit Lock(std::recursive_mutex& wanted) : mutex_(wanted) {
    if (mutex_.try_lock()) return;
    PyThreadState* python = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex_.lock();
    if (python) PyEval_RestoreThread(python);
  }
  ~Lock() { mutex_.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  std::recursive_mutex& mutex_;
};

// --- code lines (site.cpp) ---

// Where in Python something was launched: a line, or the node of autograd's graph where no Python is running.
struct Site {
  PyCodeObject* code = nullptr;
  int line = 0;
  std::string node;
};
// The innermost frame outside torch and outside this device; to be called without `mutex`.
Site current_site();
std::string describe(const Site& site);
// All frames, the innermost first, torch's included.
std::vector<Site> current_stack();
void set_library_folders(std::vector<std::string> folders);

// --- timelines (timeline.cpp) ---

using Clock = std::vector<uint64_t>;
constexpr int kHost = 0;
constexpr int kDefaultStream = 1;  // of CUDA's number 0: a timeline is a stream's number + 1

void join(Clock& into, const Clock& other);
uint64_t at(const Clock& clock, int timeline);
const Clock& clock_of(int timeline);
void advance(int timeline);

int current_stream();
void set_current_stream(int timeline);
int new_stream();
// Begin a piece of work on a stream: it comes after all that the host knows of.
void begin_work(int stream);
// Have the host wait for all that a clock holds.
void wait_on_host(const Clock& clock, const std::string& reason, const Site& site, bool counts = true);
Clock clock_of_all();

struct Event {
  Clock clock;
  int64_t id = 0;
};
void record(Event& event, int stream, const Site& site);
void wait(const Event& event, int stream, const Site& site);

// Work whose effect is held back until something is ordered behind it.
struct Pending {
  int stream;
  uint64_t time;
  char* host_begin;  // memory of the host that it reads or writes; null if none
  char* host_end;
  std::function<void()> act;
};
enum class Delays { kNone, kCopies, kAll };
extern Delays delays;
void hold_back(Pending pending);
void finish_pending(const Clock& clock);
void drop_pending(char* begin, char* end);

// --- the race detector (detector.cpp) ---

struct Access {
  char* begin;
  char* end;
  int timeline;
  uint64_t time;
  bool writes;
  std::string name;
  Site site;
};
struct Race {
  std::string kind;  // "unordered", "unmapped", "unregistered"
  Access later;
  Access earlier;
};
extern std::vector<Race> races;
void touch(int timeline, char* begin, char* end, bool writes, const std::string& name, const Site& site);
// Forget accesses of a timeline up to a time: what comes next is known to come later.
void forget(char* begin, char* end, int timeline, uint64_t until);
void forget(char* begin, char* end);
void forget_all();
void report(const std::string& kind, const Access& later, const Access& earlier);

// --- memory (memory.cpp) ---

extern c10::Allocator* const device_allocator;
extern c10::Allocator* const pinned_allocator;
void register_allocators();
struct MemoryStats {
  int64_t allocated = 0, peak_allocated = 0, reserved = 0, peak_reserved = 0, requested = 0, pinned = 0;
  int64_t segments = 0, retries = 0, out_of_memory = 0;
};
extern MemoryStats memory;
extern int64_t total_bytes;
void empty_cache();
void reset_peaks();

// What the device's allocator has done, as torch.cuda.memory._record_memory_history keeps it.
struct Trace {
  std::string action;  // "alloc", "free_requested", "free_completed", "segment_alloc", "segment_map", "oom"...
  char* address;
  size_t size;
  int stream;
  std::vector<Site> frames;
  int64_t device_free;
};
struct BlockView {
  char* address;
  size_t size, requested;
  bool live;
  std::vector<Site> frames;
};
struct SegmentView {
  char* address;
  size_t size;
  int stream;
  bool small, expandable;
  std::vector<BlockView> blocks;
};
void record_history(size_t most);  // 0 ends it
bool records_history();
const std::vector<Trace>& history();
std::vector<SegmentView> segments_now();

void use_on_stream(const void* start, int stream);
bool is_pinned(const void* address);
bool memory_is_pinned();  // any
int register_host(char* begin, size_t size, const Site& site);
int unregister_host(char* begin, const Site& site);
void copies_under_way(char* begin, const Access& access);
void check_mapped(const Site& site);
bool is_mapped(char* begin, char* end);

// --- counts (counts.cpp) ---

struct Operation {
  std::string kind;  // "kernel", "up", "down", "within", "record", "wait", "synchronise"
  std::string name;
  int stream;        // CUDA's number; -1 for the host
  int64_t bytes;     // read and written by a kernel, moved by a copy
  bool pinned;
  int64_t event;     // of "record" and "wait"
  Site site;
};
extern std::vector<Operation> operations;
extern bool recording;
void note(Operation operation);
// Peaks since the call of begin, of whoever called it last; torch's own peak is untouched.
void begin_peaks();
std::pair<int64_t, int64_t> end_peaks();
void note_peaks();

// --- operators (operators.cpp) ---

at::Tensor host_alias(const at::Tensor& tensor);
std::pair<char*, char*> range_of(const at::Tensor& tensor);
void touch(int timeline, const at::Tensor& tensor, bool writes, const std::string& name, const Site& site);
void launch_begin(const std::string& name, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes);
void launch_end();
void seed(uint64_t number);
at::Tensor random_state();
void set_random_state(const at::Tensor& state);
void register_operators();
void start_watching_the_host();

}  // namespace simcuda
