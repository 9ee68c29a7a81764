// The device's memory, cut as torch's caching allocator cuts CUDA's, and pages of the host that are pinned.
#include "simcuda.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace simcuda {

MemoryStats memory;
int64_t total_bytes = int64_t(141) << 30;

namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kRound = 512, kSmall = kMiB;
constexpr int64_t kIdle = 1024 * kMiB;  // free bytes from which on freed blocks leave the host's memory, though reserved
const c10::Device kCuda(c10::kCUDA, 0);

size_t round_up(size_t size, size_t to) { return (size + to - 1) / to * to; }

struct Block {
  char* begin;
  size_t size;
  size_t requested;
  int stream;
  bool small;
  bool live;
  char* segment;
  std::set<int> used_on;  // other streams, by record_stream
  std::vector<Site> frames;
  size_t page = 0;  // of an expandable segment
  bool mapped = true;
};
std::map<char*, Block> blocks;
std::map<char*, size_t> segments;  // without expandable ones

bool expandable() { return c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments(); }

size_t most_traces = 0;
std::vector<Trace> traces;

void trace(const char* action, char* address, size_t size, int stream, const std::vector<Site>& frames) {
  if (!most_traces) return;
  if (traces.size() >= most_traces) traces.erase(traces.begin());
  traces.push_back({action, address, size, stream - kDefaultStream, frames, total_bytes - memory.reserved});
}

size_t segment_size(size_t size) {
  if (size <= kSmall) return 2 * kMiB;
  return size < 10 * kMiB ? 20 * kMiB : round_up(size, 2 * kMiB);
}

size_t extent(char* begin) {
  const auto it = blocks.find(begin), next = std::next(it);
  const bool grows = next != blocks.end() && next->second.segment == it->second.segment && !next->second.mapped;
  return it->second.size + (grows ? next->second.size : 0);
}

char* best_free(size_t size, int stream) {
  std::vector<std::pair<size_t, char*>> fitting;
  for (auto& [begin, block] : blocks)
    if (!block.live && block.mapped && block.stream == stream && block.small == (size <= kSmall) && block.size >= size &&
        (!block.page || expandable()))
      fitting.push_back({block.size, begin});
  if (fitting.empty()) return nullptr;
  if (!expandable()) return std::min_element(fitting.begin(), fitting.end())->second;
  std::sort(fitting.begin(), fitting.end());
  size_t best = 0;
  while (best + 1 < fitting.size() && blocks[fitting[best].second].page &&
         extent(fitting[best + 1].second) < extent(fitting[best].second))
    ++best;
  return fitting[best].second;
}

char* merge(std::map<char*, Block>::iterator it) {
  auto joins = [](const Block& one, const Block& other) {
    return !other.live && other.segment == one.segment && other.mapped == one.mapped;
  };
  auto next = std::next(it);
  if (next != blocks.end() && joins(it->second, next->second)) {
    it->second.size += next->second.size;
    blocks.erase(next);
  }
  if (it == blocks.begin()) return it->first;
  auto before = std::prev(it);
  if (!joins(it->second, before->second)) return it->first;
  before->second.size += it->second.size;
  blocks.erase(it);
  return before->first;
}

void cut(Block& block, size_t size) {
  Block rest{block.begin + size, block.size - size, 0, block.stream, block.small, false, block.segment, {}, {},
             block.page,         block.mapped};
  block.size = size;
  blocks[rest.begin] = rest;
}

void split(Block& block, size_t size) {
  const size_t rest = block.size - size;
  if (block.small || expandable() ? rest >= kRound : rest > kSmall) cut(block, size);
}

char* map_host(size_t size) {
  void* begin = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(begin != MAP_FAILED, "the host has no memory for the simulated device's ", size, " bytes");
  return (char*)begin;
}

void reserve(const char* action, char* begin, size_t size, int stream, const std::vector<Site>& frames) {
  trace(action, begin, size, stream, frames);
  memory.reserved += size;
  memory.peak_reserved = std::max(memory.peak_reserved, memory.reserved);
}

// Maps pages at the start of an unmapped block; returns the merged block, or null if the device has no such memory.
char* map_pages(std::map<char*, Block>::iterator it, size_t wanted, const std::vector<Site>& frames) {
  auto& block = it->second;
  const size_t size = round_up(std::min(wanted, block.size), block.page);
  if (memory.reserved + int64_t(size) > total_bytes) return nullptr;
  if (size < block.size) cut(block, size);
  block.mapped = true;
  reserve("segment_map", block.begin, size, block.stream, frames);
  return merge(it);
}

char* grow_segment(size_t size, int stream, const std::vector<Site>& frames) {
  const bool small = size <= kSmall;
  char* begin = nullptr;
  for (auto it = blocks.begin(); it != blocks.end() && !begin; ++it) {
    char* const segment = it->second.segment;
    if (it->second.mapped || it->second.stream != stream || it->second.small != small) continue;
    auto first = it;
    if (it != blocks.begin() && std::prev(it)->second.segment == segment && !std::prev(it)->second.live) --first;
    size_t room = 0;
    for (auto at = first; at != blocks.end() && at->second.segment == segment && !at->second.live; ++at)
      room += at->second.size;
    if (room >= size) begin = first->first;
  }
  if (!begin) {
    const size_t page = small ? 2 * kMiB : 20 * kMiB, whole = round_up(total_bytes + total_bytes / 8, page);
    begin = map_host(whole);
    blocks[begin] = {begin, whole, 0, stream, small, false, begin, {}, {}, page, false};
  }
  while (begin) {
    auto it = blocks.find(begin);
    if (it->second.mapped && it->second.size >= size) break;
    begin = it->second.mapped ? map_pages(std::next(it), size - it->second.size, frames) : map_pages(it, size, frames);
  }
  return begin;
}

char* try_segment(size_t size, int stream, const std::vector<Site>& frames) {
  if (expandable()) return grow_segment(size, stream, frames);
  const size_t whole = segment_size(size);
  if (memory.reserved + int64_t(whole) > total_bytes) return nullptr;
  char* begin = map_host(whole);
  blocks[begin] = {begin, whole, 0, stream, size <= kSmall, false, begin, {}, {}};
  segments[begin] = whole;
  ++memory.segments;
  reserve("segment_alloc", begin, whole, stream, frames);
  return begin;
}

char* new_segment(size_t size, int stream, const std::vector<Site>& frames) {
  char* begin = try_segment(size, stream, frames);
  if (begin) return begin;
  ++memory.retries;
  empty_cache();
  begin = try_segment(size, stream, frames);
  if (begin) return begin;
  ++memory.out_of_memory;
  trace("oom", nullptr, size, stream, frames);
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes of the simulated device's ",
      total_bytes, ", of which ", memory.reserved, " are reserved");
}

// Unmaps the pages of an expandable segment that are within a free block.
void unmap_pages(char* begin) {
  auto it = blocks.find(begin);
  const auto& block = it->second;
  const size_t start = block.begin - block.segment, from = round_up(start, block.page),
               to = (start + block.size) / block.page * block.page;
  if (from >= to) return;
  if (to < start + block.size) cut(it->second, to - start);
  if (from > start) {
    cut(it->second, from - start);
    ++it;
  }
  auto& middle = it->second;
  forget(middle.begin, middle.begin + middle.size);
  madvise(middle.begin, middle.size, MADV_DONTNEED);
  trace("segment_unmap", middle.begin, middle.size, middle.stream, {});
  memory.reserved -= middle.size;
  middle.mapped = false;
  merge(it);
}

// Gives the host its pages within a freed block back, unless work that is held back may still read them.
void give_back(const Block& block) {
  if (memory.reserved - memory.allocated < kIdle || delays != Delays::kNone) return;
  const uintptr_t page = sysconf(_SC_PAGESIZE), from = round_up(uintptr_t(block.begin), page),
                  to = uintptr_t(block.begin + block.size) / page * page;
  if (from < to) madvise((void*)from, to - from, MADV_DONTNEED);
}

void free_device(void* begin) {
  if (!begin) return;
  Lock lock(mutex);
  auto it = blocks.find((char*)begin);
  auto& block = it->second;
  trace("free_requested", block.begin, block.requested, block.stream, {});
  trace("free_completed", block.begin, block.requested, block.stream, {});
  memory.allocated -= block.size;
  memory.requested -= block.requested;
  // the allocator lets nobody have it before the work of these streams, and what they wait for, is done
  for (int stream : block.used_on) {
    const Clock done = clock_of(stream);
    finish_pending(done);
    for (int timeline = 0; timeline < int(done.size()); ++timeline)
      forget(block.begin, block.begin + block.size, timeline, done[timeline]);
  }
  block.used_on.clear();
  block.live = false;
  give_back(block);
  merge(it);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    if (!wanted) return {nullptr, nullptr, &free_device, kCuda};
    const auto frames = records_history() ? current_stack() : std::vector<Site>();
    Lock lock(mutex);
    const size_t size = round_up(wanted, kRound);
    const int stream = current_stream();
    char* begin = best_free(size, stream);
    if (!begin) begin = new_segment(size, stream, frames);
    auto& block = blocks[begin];
    split(block, size);
    block.live = true;
    block.requested = wanted;
    block.frames = frames;
    trace("alloc", begin, wanted, stream, frames);
    memset(begin, 0xFF, wanted);  // NaN in any floating type
    memory.allocated += block.size;
    memory.requested += wanted;
    memory.peak_allocated = std::max(memory.peak_allocated, memory.allocated);
    note_peaks();
    return {begin, begin, &free_device, kCuda};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(mutex);
    empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(mutex);
    use_on_stream(data.get(), int(stream.id()) + kDefaultStream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& each, int64_t current, int64_t peak) {
      each[0].current = current;
      each[0].peak = peak;
    };
    set(stats.allocated_bytes, memory.allocated, memory.peak_allocated);
    set(stats.active_bytes, memory.allocated, memory.peak_allocated);
    set(stats.reserved_bytes, memory.reserved, memory.peak_reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    Lock lock(mutex);
    return {total_bytes - memory.reserved, total_bytes};
  }
} the_device_allocator;

// --- the host's pages ---

struct Pinned {
  size_t size;
  bool registered;  // by cudaHostRegister, else torch's own
  std::vector<Access> under_way;
};
std::map<char*, Pinned> pinned;

std::map<char*, Pinned>::iterator find_pinned(const void* address) {
  auto it = pinned.upper_bound((char*)address);
  if (it == pinned.begin()) return pinned.end();
  --it;
  return (char*)address < it->first + std::max<size_t>(it->second.size, 1) ? it : pinned.end();
}

size_t power_of_two(size_t size) {
  size_t rounded = 1;
  while (rounded < size) rounded *= 2;
  return rounded;
}

void free_pinned(void* begin) {
  if (!begin) return;
  Lock lock(mutex);
  auto it = pinned.find((char*)begin);
  // torch's allocator records an event for each copy, and lets nobody have the memory before
  for (const auto& access : it->second.under_way) finish_pending(clock_of(access.timeline));
  forget(it->first, it->first + it->second.size);
  memory.pinned -= power_of_two(it->second.size);
  pinned.erase(it);
  free(begin);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    if (!wanted) return {nullptr, nullptr, &free_pinned, c10::Device(c10::kCPU)};
    void* begin = nullptr;
    TORCH_CHECK(!posix_memalign(&begin, 4096, wanted), "the host has no ", wanted, " bytes to pin");
    Lock lock(mutex);
    pinned[(char*)begin] = {wanted, false, {}};
    memory.pinned += power_of_two(wanted);
    return {begin, begin, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }

  bool record_event(void*, void*, c10::Stream) override { return true; }  // of each copy it is known
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} the_pinned_allocator;

bool page_is_mapped(char* address) {
  const uintptr_t page = sysconf(_SC_PAGESIZE);
  unsigned char resident;
  return mincore((void*)(uintptr_t(address) / page * page), page, &resident) == 0;
}

void remove_known(Pinned& region) {
  const auto& known = clock_of(kHost);
  auto& list = region.under_way;
  list.erase(
      std::remove_if(list.begin(), list.end(), [&](const Access& one) { return at(known, one.timeline) >= one.time; }),
      list.end());
}

Access by_host(char* begin, size_t size, const std::string& name, const Site& site) {
  return {begin, begin + size, kHost, at(clock_of(kHost), kHost), true, name, site};
}

}  // namespace

c10::Allocator* const device_allocator = &the_device_allocator;
c10::Allocator* const pinned_allocator = &the_pinned_allocator;

void register_allocators() {
  c10::SetAllocator(c10::kCUDA, device_allocator);
  at::setHostAllocator(c10::kCUDA, &the_pinned_allocator);
}

void reset_peaks() {
  Lock lock(mutex);
  memory.peak_allocated = memory.allocated;
  memory.peak_reserved = memory.reserved;
}

void record_history(size_t most) {
  Lock lock(mutex);
  most_traces = most;
  traces.clear();
}
bool records_history() {
  Lock lock(mutex);
  return most_traces;
}
const std::vector<Trace>& history() { return traces; }

std::vector<SegmentView> segments_now() {
  std::vector<SegmentView> made;
  for (const auto& [begin, size] : segments) {
    const auto& first = blocks[begin];
    made.push_back({begin, size, first.stream - kDefaultStream, first.small, false, {}});
    for (auto it = blocks.find(begin); it != blocks.end() && it->second.segment == begin; ++it)
      made.back().blocks.push_back(
          {it->first, it->second.size, it->second.requested, it->second.live, it->second.frames});
  }
  const Block* before = nullptr;
  for (const auto& [begin, block] : blocks) {  // each mapped part of an expandable segment is one of its own
    if (block.page && block.mapped) {
      if (!before || before->segment != block.segment || !before->mapped)
        made.push_back({begin, 0, block.stream - kDefaultStream, block.small, true, {}});
      made.back().size += block.size;
      made.back().blocks.push_back({begin, block.size, block.requested, block.live, block.frames});
    }
    before = &block;
  }
  return made;
}

void use_on_stream(const void* start, int stream) {
  auto it = blocks.find((char*)start);
  if (it != blocks.end() && it->second.stream != stream) it->second.used_on.insert(stream);
}

void empty_cache() {
  finish_pending(clock_of_all());  // cudaFree waits for the device
  for (auto it = segments.begin(); it != segments.end();) {
    auto block = blocks.find(it->first);
    if (block->second.live || block->second.size != it->second) {
      ++it;
      continue;
    }
    forget(it->first, it->first + it->second);
    munmap(it->first, it->second);
    trace("segment_free", it->first, it->second, block->second.stream, {});
    memory.reserved -= it->second;
    --memory.segments;
    blocks.erase(block);
    it = segments.erase(it);
  }
  std::vector<char*> free;
  for (const auto& [begin, block] : blocks)
    if (block.page && block.mapped && !block.live) free.push_back(begin);
  for (char* begin : free) unmap_pages(begin);
}

bool is_pinned(const void* address) { return address && find_pinned(address) != pinned.end(); }

bool memory_is_pinned() {
  Lock lock(mutex);
  return !pinned.empty();
}

bool is_mapped(char* begin, char* end) { return page_is_mapped(begin) && page_is_mapped(end - 1); }

void copies_under_way(char* begin, const Access& access) {
  auto it = find_pinned(begin);
  if (it == pinned.end()) return;
  remove_known(it->second);
  it->second.under_way.push_back(access);
}

void check_mapped(const Site& site) {
  for (auto& [begin, region] : pinned) {
    if (region.under_way.empty()) continue;
    if (!is_mapped(begin, begin + region.size)) {
      for (const auto& access : region.under_way)
        report("unmapped", by_host(begin, region.size, "munmap, at the latest", site), access);
      region.under_way.clear();
    }
    remove_known(region);
  }
}

int register_host(char* begin, size_t size, const Site& site) {
  constexpr int kAlreadyRegistered = 712, kInvalid = 1;
  if (!size || !is_mapped(begin, begin + size)) return kInvalid;
  auto next = pinned.lower_bound(begin);
  if (find_pinned(begin) != pinned.end() || (next != pinned.end() && next->first < begin + size))
    return kAlreadyRegistered;
  pinned[begin] = {size, true, {}};
  note({"register", "cudaHostRegister", -1, int64_t(size), true, 0, site});
  return 0;
}

int unregister_host(char* begin, const Site& site) {
  constexpr int kNotRegistered = 713;
  auto it = pinned.find(begin);
  if (it == pinned.end() || !it->second.registered) return kNotRegistered;
  auto& region = it->second;
  const auto access = by_host(begin, region.size, "cudaHostUnregister", site);
  remove_known(region);
  for (const auto& copy : region.under_way) report("unregistered", access, copy);
  if (!is_mapped(begin, begin + region.size)) report("unmapped", access, access);
  else finish_pending(clock_of_all());  // so that nothing that is held back reads it later
  drop_pending(begin, begin + region.size);
  forget(begin, begin + region.size);
  note({"unregister", "cudaHostUnregister", -1, int64_t(region.size), true, 0, site});
  pinned.erase(it);
  return 0;
}

}  // namespace simcuda
