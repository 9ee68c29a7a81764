// The host's and the streams' clocks, events, and work whose effect is held back.
#include "simcuda.h"

#include <algorithm>
#include <deque>

namespace simcuda {

std::recursive_mutex mutex;
Delays delays = Delays::kNone;

namespace {

// As many as two pools of CUDA's 32 with priorities; from the last one the first comes again.
constexpr int kStreams = 128;
std::vector<Clock> clocks(2 + kStreams);
int turn = 0;
thread_local int current = kDefaultStream;
std::deque<Pending> pending;  // in the order of their launches, which is one that all clocks agree with
int64_t next_event = 1;

}  // namespace

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

uint64_t at(const Clock& clock, int timeline) { return timeline < int(clock.size()) ? clock[timeline] : 0; }

const Clock& clock_of(int timeline) { return clocks[timeline]; }

void advance(int timeline) {
  auto& clock = clocks[timeline];
  if (int(clock.size()) <= timeline) clock.resize(timeline + 1, 0);
  ++clock[timeline];
}

int current_stream() { return current; }
void set_current_stream(int timeline) { current = timeline; }

int new_stream() {
  turn = turn % kStreams + 1;
  return kDefaultStream + turn;
}

void begin_work(int stream) {
  join(clocks[stream], clocks[kHost]);
  advance(stream);
}

Clock clock_of_all() {
  Clock all;
  for (const auto& clock : clocks) join(all, clock);
  return all;
}

void wait_on_host(const Clock& clock, const std::string& reason, const Site& site, bool counts) {
  finish_pending(clock);
  check_mapped(site);
  join(clocks[kHost], clock);
  advance(kHost);
  if (counts) note({"synchronise", reason, -1, 0, false, 0, site});
}

void record(Event& event, int stream, const Site& site) {
  begin_work(stream);
  event.clock = clocks[stream];
  event.id = next_event++;
  note({"record", "", stream - 1, 0, false, event.id, site});
}

void wait(const Event& event, int stream, const Site& site) {
  join(clocks[stream], event.clock);
  note({"wait", "", stream - 1, 0, false, event.id, site});
}

void hold_back(Pending given) { pending.push_back(std::move(given)); }

void finish_pending(const Clock& clock) {
  for (auto it = pending.begin(); it != pending.end();) {
    if (at(clock, it->stream) < it->time) {
      ++it;
      continue;
    }
    if (!it->host_begin || is_mapped(it->host_begin, it->host_end)) it->act();
    it = pending.erase(it);
  }
}

void drop_pending(char* begin, char* end) {
  pending.erase(
      std::remove_if(
          pending.begin(), pending.end(),
          [&](const Pending& one) { return one.host_begin && one.host_begin < end && begin < one.host_end; }),
      pending.end());
}

}  // namespace simcuda
