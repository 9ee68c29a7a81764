// Accesses to memory by range, and those pairs of them that no clock orders.
#include "simcuda.h"

#include <algorithm>
#include <unordered_map>

namespace simcuda {

std::vector<Race> races;

namespace {

constexpr uintptr_t kPage = 1 << 16;
constexpr size_t kMost = 1000;  // races that are kept
std::unordered_map<uintptr_t, std::vector<Access>> accesses;  // by page, so that few are compared

template <typename Visit>
void each_page(char* begin, char* end, const Visit& visit) {
  if (begin >= end) return;
  for (uintptr_t page = uintptr_t(begin) / kPage; page <= (uintptr_t(end) - 1) / kPage; ++page)
    visit(page, std::max(begin, (char*)(page * kPage)), std::min(end, (char*)((page + 1) * kPage)));
}

bool same(const Access& one, const Access& other) {
  return one.name == other.name && one.timeline == other.timeline && one.site.code == other.site.code &&
      one.site.line == other.site.line && one.writes == other.writes;
}

}  // namespace

void report(const std::string& kind, const Access& later, const Access& earlier) {
  for (const auto& race : races)  // a copy of many pages is one race
    if (race.kind == kind && same(race.later, later) && same(race.earlier, earlier)) return;
  if (races.size() < kMost) races.push_back({kind, later, earlier});
}

void touch(int timeline, char* begin, char* end, bool writes, const std::string& name, const Site& site) {
  const auto& clock = clock_of(timeline);
  const uint64_t time = at(clock, timeline);
  each_page(begin, end, [&](uintptr_t page, char* low, char* high) {
    auto& list = accesses[page];
    const Access access{low, high, timeline, time, writes, name, site};
    size_t kept = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      auto& earlier = list[i];
      const bool overlaps = earlier.begin < high && low < earlier.end;
      const bool ordered = earlier.timeline == timeline || at(clock, earlier.timeline) >= earlier.time;
      if (overlaps && !ordered && (earlier.writes || writes)) report("unordered", access, earlier);
      // whoever comes behind this access comes behind an ordered one that it covers; or will be reported for this one
      const bool covered = earlier.begin >= low && earlier.end <= high;
      if (covered && (ordered || writes) && (writes || !earlier.writes)) continue;
      if (kept != i) list[kept] = std::move(earlier);
      ++kept;
    }
    list.resize(kept);
    list.push_back(access);
  });
}

void forget(char* begin, char* end, int timeline, uint64_t until) {
  each_page(begin, end, [&](uintptr_t page, char* low, char* high) {
    auto found = accesses.find(page);
    if (found == accesses.end()) return;
    auto& list = found->second;
    list.erase(
        std::remove_if(
            list.begin(), list.end(),
            [&](const Access& one) {
              return (timeline < 0 || one.timeline == timeline) && one.time <= until && one.begin >= low && one.end <= high;
            }),
        list.end());
  });
}

void forget(char* begin, char* end) { forget(begin, end, -1, UINT64_MAX); }

void forget_all() {
  finish_pending(clock_of_all());
  accesses.clear();
  races.clear();
}

}  // namespace simcuda
