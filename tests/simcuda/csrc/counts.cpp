// What was launched, copied and waited for, while somebody counts.
#include "simcuda.h"

#include <algorithm>

namespace simcuda {

std::vector<Operation> operations;
bool recording = false;

namespace {
std::vector<std::pair<int64_t, int64_t>> peaks;  // (allocated, reserved) of each counting, inner ones last
}

void note(Operation operation) {
  if (recording) operations.push_back(std::move(operation));
}

void begin_peaks() { peaks.emplace_back(memory.allocated, memory.reserved); }

void note_peaks() {
  for (auto& [allocated, reserved] : peaks) {
    allocated = std::max(allocated, memory.allocated);
    reserved = std::max(reserved, memory.reserved);
  }
}

std::pair<int64_t, int64_t> end_peaks() {
  auto peak = peaks.back();
  peaks.pop_back();
  return peak;
}

}  // namespace simcuda
