// What torch asks of a CUDA device: streams and events by its guard, memory and generators by its hooks.
#include "simcuda.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simcuda {
namespace {

const c10::Device kCuda(c10::kCUDA, 0);

c10::Stream stream_of(int timeline) {
  return c10::Stream(c10::Stream::UNSAFE, kCuda, timeline - kDefaultStream);
}
int timeline_of(const c10::Stream& stream) { return int(stream.id()) + kDefaultStream; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kCuda; }
  c10::Device getDevice() const override { return kCuda; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(kDefaultStream); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock lock(mutex);
    return stream_of(new_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = stream_of(current_stream());
    set_current_stream(timeline_of(stream));
    return before;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto site = current_site();
    Lock lock(mutex);
    if (!*event) *event = new Event;
    simcuda::record(*static_cast<Event*>(*event), timeline_of(stream), site);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;  // never recorded: nothing to wait for
    auto site = current_site();
    Lock lock(mutex);
    wait(*static_cast<Event*>(event), timeline_of(stream), site);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  // The host learns that work is done, as it would in the end by asking again and again.
  bool queryEvent(void* event) const override {
    if (event) wait_for(static_cast<Event*>(event)->clock, "query", false);
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    wait_for(clock_of(timeline_of(stream)), "query", false);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for(static_cast<Event*>(event)->clock, "event");
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(clock_of(timeline_of(stream)), "stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Clock all;
    {
      Lock lock(mutex);
      all = clock_of_all();
    }
    wait_for(all, "device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Lock lock(mutex);
    use_on_stream(data.get(), timeline_of(stream));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }  // it has no time

 private:
  static void wait_for(const Clock& clock, const char* reason, bool counts = true) {
    auto site = current_site();
    Lock lock(mutex);
    wait_on_host(Clock(clock), reason, site, counts);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override {
    Lock lock(mutex);
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return kCuda; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { Guard().synchronizeDevice(0); }
};

}  // namespace
}  // namespace simcuda

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, simcuda::Guard)
}
namespace at {
using SimulatedHooks = simcuda::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
}  // namespace at
