// Operators of the CUDA key: each runs on the CPU, on aliases of its tensors, and its accesses go to the detector.
#include "simcuda.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace simcuda {
namespace {

const c10::DispatchKeySet kCudaKeys(c10::DispatchKey::CUDA);
const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);

// While a kernel runs, what it calls on the CPU isn't the host's work.
thread_local int inside = 0;
struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};

// --- aliases on the CPU ---

at::Tensor alias_of(const at::Tensor& tensor, const c10::Storage& storage) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), kCpuKeys, tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

// Of one operator's tensors: those that share a storage share its alias.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(storage);
    if (found == storages_.end()) {
      c10::DataPtr data(storage->mutable_data(), c10::Device(c10::kCPU));
      c10::Storage made(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(data), c10::GetCPUAllocator(), true);
      found = storages_.emplace(storage, std::move(made)).first;
    }
    return alias_of(tensor, found->second);
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType kind) {
  return at::detail::empty_strided_generic(sizes, strides, device_allocator, kCudaKeys, kind);
}

bool fills_its_range(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

// Have bytes that a kernel has written appear only when something is ordered behind it.
void hold_back_bytes(int stream, const at::Tensor& tensor, std::vector<char> before) {
  auto [begin, end] = range_of(tensor);
  std::vector<char> after(begin, end);
  memcpy(begin, before.data(), before.size());
  char* to = begin;
  hold_back({stream, at(clock_of(stream), stream), nullptr, nullptr,
             [to, after = std::move(after)] { memcpy(to, after.data(), after.size()); }});
}

// --- the device's generator: the CPU's kernels draw from it in place of the CPU's ---

at::Generator& generator() {
  static at::Generator made = at::detail::createCPUGenerator(c10::default_rng_seed_val);
  return made;
}

class DrawFromDevice {
 public:
  explicit DrawFromDevice(bool draws) : draws_(draws) {
    if (!draws_) return;
    guard_ = std::unique_lock<std::recursive_mutex>(mutex);
    auto& cpu = at::detail::getDefaultCPUGenerator();
    before_ = cpu.get_state();
    const_cast<at::Generator&>(cpu).set_state(generator().get_state());
  }
  ~DrawFromDevice() {
    if (!draws_) return;
    auto& cpu = at::detail::getDefaultCPUGenerator();
    generator().set_state(cpu.get_state());
    const_cast<at::Generator&>(cpu).set_state(before_);
  }

 private:
  bool draws_;
  std::unique_lock<std::recursive_mutex> guard_;
  at::Tensor before_;
};

// --- what is known of an operator by its schema ---

struct Traits {
  bool launches;      // else it makes a view, or looks at no bytes
  bool draws;         // random numbers
  bool host_waits;    // for the size of its result
  bool takes_host_tensors;
  bool touches_host;  // when it runs on the CPU: a kernel that reads or writes, rather than calling others
  std::vector<bool> writes;
};

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }
bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

const std::unordered_set<std::string> kHostWaits = {
    "aten::nonzero", "aten::equal", "aten::masked_select", "aten::unique_dim", "aten::_unique", "aten::_unique2",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::histc"};
const std::unordered_set<std::string> kMetadataOnly = {
    "aten::_to_copy", "aten::to", "aten::clone", "aten::is_pinned", "aten::_pin_memory", "aten::pin_memory", "aten::record_stream",
    "aten::resize_", "aten::set_", "aten::detach", "aten::alias", "aten::empty_strided", "aten::_has_same_storage_numel",
    "aten::size", "aten::stride", "aten::is_set_to", "aten::lift_fresh", "aten::result_type", "aten::is_same_size", "aten::data"};

Traits traits_of(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  Traits traits{};
  for (const auto& argument : schema.arguments()) {
    auto* alias = argument.alias_info();
    traits.writes.push_back(alias && alias->isWrite());
  }
  traits.launches = !kMetadataOnly.count(name);
  for (const auto& result : schema.returns()) {
    auto* alias = result.alias_info();
    if (alias && !alias->isWrite()) traits.launches = false;
  }
  traits.draws = op.hasTag(at::Tag::nondeterministic_seeded);
  traits.host_waits = kHostWaits.count(name) || (name == "aten::repeat_interleave" && schema.overload_name() == "Tensor");
  traits.takes_host_tensors = name.find("index") != std::string::npos || starts_with(name, "aten::_foreach") ||
      starts_with(name, "aten::_fused") || !starts_with(name, "aten::");
  const bool composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  traits.touches_host = traits.launches && !composite && !ends_with(name, "_like") &&
      !starts_with(name, "aten::new_") && !starts_with(name, "aten::empty");
  return traits;
}

const Traits& traits(const c10::OperatorHandle& op) {
  static std::unordered_map<c10::OperatorName, Traits> known;
  static std::mutex guard;
  std::lock_guard<std::mutex> lock(guard);
  auto found = known.find(op.operator_name());
  if (found == known.end()) found = known.emplace(op.operator_name(), traits_of(op)).first;
  return found->second;
}

// --- kernels ---

// One launch of a kernel: what it reads and writes, from launching it to what it has written.
class Kernel {
 public:
  Kernel(std::string name, bool counts) : name_(std::move(name)), site_(current_site()), counts_(counts) {}

  void reads(const at::Tensor& tensor) { read_.push_back(tensor); }
  void writes(const at::Tensor& tensor) { written_.push_back(tensor); }

  void launch() {
    Lock lock(mutex);
    stream_ = current_stream();
    if (!counts_) return;
    begin_work(stream_);
    finish_pending(clock_of(stream_));
    int64_t bytes = 0;
    for (const auto& tensor : read_) {
      touch(stream_, tensor, false, name_, site_);
      bytes += tensor.nbytes();
    }
    for (const auto& tensor : written_) {
      touch(stream_, tensor, true, name_, site_);
      bytes += tensor.nbytes();
      if (delays == Delays::kAll && tensor.is_cuda() && tensor.numel() && fills_its_range(tensor)) {
        auto [begin, end] = range_of(tensor);
        before_.emplace_back(tensor, std::vector<char>(begin, end));
      }
    }
    bytes_ = bytes;
  }

  // A result in memory that is new, with the bytes of a tensor on the CPU.
  at::Tensor result(const at::Tensor& computed) {
    auto made = empty_on_device(computed.sizes(), computed.strides(), computed.scalar_type());
    if (computed.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    auto [from, from_end] = range_of(computed);
    auto [to, to_end] = range_of(made);
    if (!from) return made;
    Lock lock(mutex);
    if (delays == Delays::kAll && fills_its_range(made)) before_.emplace_back(made, std::vector<char>(to, to_end));
    memcpy(to, from, std::min(from_end - from, to_end - to));
    touch(stream_, made, true, name_, site_);
    bytes_ += made.nbytes();
    return made;
  }

  void done(bool host_waits) {
    Lock lock(mutex);
    for (auto& [tensor, before] : before_) hold_back_bytes(stream_, tensor, std::move(before));
    if (counts_) note({"kernel", name_, stream_ - kDefaultStream, bytes_, false, 0, site_});
    if (host_waits) wait_on_host(Clock(clock_of(stream_)), name_, site_);
  }

 private:
  std::string name_;
  Site site_;
  bool counts_;
  int stream_ = kDefaultStream;
  int64_t bytes_ = 0;
  std::vector<at::Tensor> read_, written_;
  std::vector<std::pair<at::Tensor, std::vector<char>>> before_;
};

// An operator's arguments on the stack, replaced by aliases on the CPU, and its results brought back.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(*stack), traits_(traits(op)), first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    find_tensors();
    Kernel kernel(op_.schema().name(), traits_.launches && (elements_ || on_device_));
    for (const auto& [tensor, writes] : tensors_) writes ? kernel.writes(tensor) : kernel.reads(tensor);
    kernel.launch();
    for (size_t i = first_; i < stack_.size(); ++i) to_host(stack_[i], traits_.writes[i - first_]);
    {
      Inside kernels_work;
      DrawFromDevice draw(traits_.draws && !given_generator_);
      op_.redispatchBoxed(kCpuKeys, &stack_);
    }
    take_over_sizes();
    if (starts_with(op_.schema().name(), "aten::_foreach_")) count_versions();
    for (size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i) to_device(kernel, stack_[i]);
    kernel.done(traits_.host_waits || masks_);
  }

 private:
  void find_tensors() {
    for (size_t i = first_; i < stack_.size(); ++i) {
      auto& value = stack_[i];
      const bool writes = traits_.writes[i - first_];
      if (value.isTensor()) see(value.toTensor(), writes);
      if (value.isTensorList())
        for (const at::Tensor& tensor : value.toTensorVector()) see(tensor, writes);
      else if (holds_optional_tensors(value, i))
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
          if (tensor) {
            see(*tensor, writes);
            masks_ = masks_ || (tensor->defined() && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte));
          }
      if (value.isDevice()) on_device_ = on_device_ || value.toDevice().is_cuda();
      if (value.isGenerator()) given_generator_ = true;
    }
    const auto& name = op_.schema().name();
    if (starts_with(name, "aten::_foreach_") && name != "aten::_foreach_copy_" && name != "aten::_foreach_copy")
      check_lists();
    if (!tensors_.empty() && host_tensor_.defined() && !traits_.takes_host_tensors)
      TORCH_CHECK(
          false, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
          op_.schema().name(), ", a tensor of ", host_tensor_.sizes(), " on the CPU)");
  }

  // CUDA takes lists of tensors on several devices apart, and refuses those of one place that aren't on one device.
  void check_lists() const {
    std::vector<bool> host, device;
    for (size_t i = first_; i < stack_.size(); ++i) {
      if (!stack_[i].isTensorList()) continue;
      const auto tensors = stack_[i].toTensorVector();
      host.resize(std::max(host.size(), tensors.size()));
      device.resize(host.size());
      for (size_t k = 0; k < tensors.size(); ++k) {
        if (tensors[k].is_cuda()) device[k] = true;
        if (tensors[k].is_cpu() && tensors[k].dim()) host[k] = true;
      }
    }
    for (size_t k = 0; k < host.size(); ++k)
      TORCH_CHECK(
          !(host[k] && device[k]), "Expected all tensors to be on the same device, but found at least two devices, ",
          "cuda:0 and cpu! (", op_.schema().name(), ", tensors of index ", k, ")");
  }

  bool holds_optional_tensors(const c10::IValue& value, size_t i) const {
    return value.isList() && op_.schema().arguments()[i - first_].type()->str().find("Tensor?") != std::string::npos;
  }

  void see(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return;
    if (!tensor.is_cuda()) {
      if (tensor.is_cpu() && tensor.dim()) host_tensor_ = tensor;
      return;
    }
    elements_ += tensor.numel();
    tensors_.emplace_back(tensor, writes);
  }

  at::Tensor alias(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto made = aliases_.of(tensor);
    pairs_.push_back({tensor, made, writes});
    return made;
  }

  void to_host(c10::IValue& value, bool writes) {
    if (value.isTensor()) {
      value = alias(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(alias(tensor, writes));
      value = made;
    } else if (value.isList() && holds_optional_tensors(value, &value - stack_.data())) {
      c10::List<std::optional<at::Tensor>> made;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        made.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(alias(*tensor, writes)) : std::nullopt);
      value = made;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = c10::Device(c10::kCPU);
    }
  }

  // What the operator has resized on the CPU is resized on the device.
  void take_over_sizes() {
    for (auto& [tensor, made, writes] : pairs_) {
      if (!writes) continue;
      if (made.sizes() != tensor.sizes() || (tensor.numel() && made.strides() != tensor.strides())) {
        at::native::resize_(tensor, made.sizes(), std::nullopt);
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
      }
      if (!tensor.numel() || made.const_data_ptr() == tensor.const_data_ptr()) continue;
      auto [from, from_end] = range_of(made);
      auto [to, to_end] = range_of(tensor);
      memcpy(to, from, std::min(from_end - from, to_end - to));
    }
  }

  // For autograd, which counts those of single tensors itself and leaves lists to CUDA's kernels.
  void count_versions() {
    for (auto& [tensor, writes] : tensors_)
      if (writes) tensor.unsafeGetTensorImpl()->bump_version();
  }

  at::Tensor back(Kernel& kernel, const at::Tensor& computed) {
    if (!computed.defined() || !computed.is_cpu() || (tensors_.empty() && !on_device_)) return computed;
    for (auto& [tensor, made, writes] : pairs_)
      if (made.unsafeGetTensorImpl() == computed.unsafeGetTensorImpl()) return tensor;
    for (auto& [tensor, made, writes] : pairs_) {
      if (made.storage().unsafeGetStorageImpl() != computed.storage().unsafeGetStorageImpl()) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), kCudaKeys, computed.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(computed.sizes(), computed.strides(), computed.storage_offset());
      return view;
    }
    return kernel.result(computed);
  }

  void to_device(Kernel& kernel, c10::IValue& value) {
    if (value.isTensor()) {
      value = back(kernel, value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(back(kernel, tensor));
      value = made;
    }
  }

  struct Pair {
    at::Tensor tensor, made;
    bool writes;
  };
  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const Traits& traits_;
  const size_t first_;
  std::vector<std::pair<at::Tensor, bool>> tensors_;
  std::vector<Pair> pairs_;
  Aliases aliases_;
  at::Tensor host_tensor_;
  int64_t elements_ = 0;
  bool on_device_ = false, masks_ = false, given_generator_ = false;
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// --- copies ---

void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  Inside kernels_work;
  Aliases aliases;
  c10::impl::ExcludeDispatchKeyGuard not_again(kCudaKeys);
  auto target = aliases.of(to);
  target.copy_(aliases.of(from));
}

// A tensor that keeps no storage alive, for a copy that is done later.
at::Tensor unowned(const at::Tensor& tensor) {
  auto* begin = (char*)tensor.storage().mutable_data();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(begin, c10::Device(c10::kCPU)), nullptr, false);
  return alias_of(tensor, storage);
}

at::Tensor& copy_within(at::Tensor& self, const at::Tensor& src) {
  const bool plain = self.scalar_type() == src.scalar_type() && self.sizes() == src.sizes() && self.is_contiguous() &&
      src.is_contiguous();
  Kernel kernel("aten::copy_", true);
  kernel.reads(src);
  kernel.writes(self);
  kernel.launch();
  copy_bytes(self, src);
  kernel.done(false);
  Lock lock(mutex);
  if (plain && recording) {  // cudaMemcpyAsync, no kernel
    operations.back().kind = "within";
    operations.back().bytes = self.nbytes();
  }
  return self;
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (!self.numel()) return self;
  if (self.is_cuda() && src.is_cuda()) return copy_within(self, src);
  const bool up = self.is_cuda();
  const std::string name = up ? "copy to the device" : "copy to the host";
  const auto site = current_site();
  Lock lock(mutex);
  const int stream = current_stream();
  begin_work(stream);
  finish_pending(clock_of(stream));
  const at::Tensor& on_host = up ? src : self;
  // torch converts and gathers on the host, in pageable memory, what goes up; what comes down is converted on the device
  const bool converted = self.scalar_type() != src.scalar_type();
  const bool direct = on_host.is_contiguous() && self.sizes() == src.sizes() && !(up && converted);
  const bool pinned = direct && is_pinned(on_host.const_data_ptr());
  if (!up && (converted || !src.is_contiguous())) note({"kernel", "aten::copy_", stream - kDefaultStream, int64_t(2 * self.nbytes()), false, 0, site});
  note({up ? "up" : "down", name, stream - kDefaultStream, int64_t(self.nbytes()), pinned, 0, site});
  if (up && !self.is_contiguous()) note({"kernel", "aten::copy_", stream - kDefaultStream, int64_t(2 * self.nbytes()), false, 0, site});
  if (pinned) {
    touch(stream, src, false, name, site);
    touch(stream, self, true, name, site);
    auto [begin, end] = range_of(on_host);
    copies_under_way(begin, {begin, end, stream, at(clock_of(stream), stream), !up, name, site});
    if (non_blocking && delays != Delays::kNone) {
      hold_back({stream, at(clock_of(stream), stream), begin, end,
                 [to = unowned(self), from = unowned(src)] { copy_bytes(to, from); }});
      return self;
    }
    copy_bytes(self, src);
    if (!non_blocking) wait_on_host(Clock(clock_of(stream)), name, site);
    return self;
  }
  // pageable: the host takes part, and is back when it has read or written all; the device may write later
  if (!up) {
    touch(stream, src, false, name, site);
    wait_on_host(Clock(clock_of(stream)), name, site);
  }
  advance(kHost);
  if (is_pinned(on_host.storage().data())) touch(kHost, on_host, !up, name, site);
  copy_bytes(self, src);
  if (up) {
    touch(stream, self, true, name, site);
    if (non_blocking) note({"synchronise", name + ", pageable", -1, 0, false, 0, site});
    else wait_on_host(Clock(clock_of(stream)), name, site);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor to = target;
  return copy(to, self, non_blocking);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const auto site = current_site();
  {
    Lock lock(mutex);
    const int stream = current_stream();
    begin_work(stream);
    touch(stream, self, false, "item", site);
    note({"down", "item", stream - kDefaultStream, int64_t(self.itemsize()), true, 0, site});
    wait_on_host(Clock(clock_of(stream)), "item", site);
  }
  Inside kernels_work;
  Aliases aliases;
  return at::_local_scalar_dense(aliases.of(self));
}

// --- tensors without data of their own ---

c10::ScalarType kind_of(std::optional<c10::ScalarType> kind) {
  return kind.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}
at::Tensor empty(
    at::IntArrayRef size, std::optional<c10::ScalarType> kind, std::optional<c10::Layout>, std::optional<c10::Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, device_allocator, kCudaKeys, kind_of(kind), format);
}
at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<c10::ScalarType> kind, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  return empty_on_device(size, stride, kind_of(kind));
}
at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}
at::Tensor& set_source(at::Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, c10::Storage storage) {
  const int64_t elements = storage.nbytes() / self.dtype().itemsize();
  return set_source(self, storage, 0, {elements}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_source(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_allocator->allocate(0), device_allocator, true);
  return set_source(self, nothing, 0, {0}, {1});
}
void record_stream(at::Tensor& self, c10::Stream stream) {
  Lock lock(mutex);
  use_on_stream(self.storage().data(), int(stream.id()) + kDefaultStream);
}

int64_t attention_by_operators(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return int64_t(sdp::SDPBackend::math);
}

// --- the host's own reads and writes of pinned memory ---

void touch_by_host(const at::Tensor& tensor, bool writes, const std::string& name, const Site& site) {
  if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage() || !tensor.numel()) return;
  Lock lock(mutex);
  if (!is_pinned(tensor.storage().data())) return;
  advance(kHost);
  touch(kHost, tensor, writes, name, site);
}

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  if (inside || !memory_is_pinned()) return nullptr;
  auto name = function.operator_name();
  if (!name) return nullptr;
  auto op = c10::Dispatcher::singleton().findOp(*name);
  if (!op) return nullptr;
  const auto& known = traits(*op);
  if (!known.touches_host) return nullptr;
  std::vector<std::pair<at::Tensor, bool>> tensors;
  auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size() && i < known.writes.size(); ++i) {
    if (inputs[i].isTensor()) tensors.emplace_back(inputs[i].toTensor(), known.writes[i]);
    if (inputs[i].isTensorList())
      for (const at::Tensor& tensor : inputs[i].toTensorVector()) tensors.emplace_back(tensor, known.writes[i]);
  }
  for (const auto& [tensor, writes] : tensors)
    if (tensor.defined() && tensor.is_cuda()) return nullptr;  // the device's, which tells itself
  std::optional<Site> site;
  for (const auto& [tensor, writes] : tensors) {
    if (!tensor.defined() || !tensor.is_cpu()) continue;
    if (!site) site = current_site();
    touch_by_host(tensor, writes, name->name, *site);
  }
  return nullptr;
}

thread_local std::unique_ptr<Kernel> launched;
thread_local std::unique_ptr<Inside> launched_inside;

}  // namespace

at::Tensor host_alias(const at::Tensor& tensor) { return Aliases().of(tensor); }

std::pair<char*, char*> range_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.numel()) return {nullptr, nullptr};
  auto* base = (char*)tensor.storage().data();
  if (!base) return {nullptr, nullptr};
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {base + tensor.storage_offset() * tensor.itemsize(), base + (last + 1) * tensor.itemsize()};
}

void touch(int timeline, const at::Tensor& tensor, bool writes, const std::string& name, const Site& site) {
  auto [begin, end] = range_of(tensor);
  touch(timeline, begin, end, writes, name, site);
}

void launch_begin(const std::string& name, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes) {
  launched = std::make_unique<Kernel>(name, true);
  for (const auto& tensor : reads) launched->reads(tensor);
  for (const auto& tensor : writes) launched->writes(tensor);
  launched->launch();
  launched_inside = std::make_unique<Inside>();
}

void launch_end() {
  launched_inside.reset();
  launched->done(false);
  launched.reset();
}

void seed(uint64_t number) {
  Lock lock(mutex);
  generator().set_current_seed(number);
}
at::Tensor random_state() {
  Lock lock(mutex);
  return generator().get_state();
}
void set_random_state(const at::Tensor& state) {
  Lock lock(mutex);
  generator().set_state(state);
}

void register_operators() {
  static std::vector<c10::RegistrationHandleRAII> kept;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    // CUDA has a kernel of many tensors where the CPU goes through them one by one
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && !starts_with(name.name, "aten::_foreach_")) continue;
    kept.push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>(), std::nullopt, nullptr,
        "simulated CUDA"));
  }
}

void start_watching_the_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_by_operators);
}

// For operators of other libraries; of torch's, `register_operators` has all with a kernel of their own, for an in-place
// one that has none on a device is run as another and a copy.
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
}

}  // namespace simcuda
