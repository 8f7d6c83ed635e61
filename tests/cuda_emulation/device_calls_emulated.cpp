#include <cstdlib>
#include <cstring>
#include <new>

#include "kernels/cuda/attend_launcher.h"
#include "kernels/cuda/checksum_launcher.h"
#include "kernels/cuda/decode_launcher.h"
#include "kernels/cuda/encode_launcher.h"
#include "tests/cuda_emulation/device_calls.h"

namespace polykv::test {

namespace {

class Memory {
 public:
  explicit Memory(uint64_t size_bytes) : size_bytes_(size_bytes) {
    if (posix_memalign(&data_, 256, size_bytes) != 0) throw std::bad_alloc();
    std::memset(data_, 0xff, size_bytes);
  }
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }
  void upload(const void* host, uint64_t size_bytes) { std::memcpy(data_, host, size_bytes); }
  void download(void* host, uint64_t size_bytes) const { std::memcpy(host, data_, size_bytes); }

 private:
  void* data_ = nullptr;
  uint64_t size_bytes_;
};

Status run_decode(const LayerView& layer, const DecodeTarget& target, const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::decode_with(launcher, layer, target);
}

Status run_attend(const cuda::AttendCall& call, const cuda::Workspace& workspace,
                  uint32_t multiprocessor_count, const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::attend_with(launcher, call, workspace, multiprocessor_count);
}

Status run_encode(const KvSource& source, const LayerSlot& slot, const cuda::Workspace& workspace,
                  cuda::EncodeOutcome* outcome, const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::encode_with(launcher, source, slot, workspace, outcome);
}

Status run_checksum(std::span<const cuda::ChecksumRange> ranges, uint64_t* sums,
                    const Schedule& schedule) {
  EmulatedLauncher launcher(schedule);
  return cuda::checksum_with(launcher, ranges, sums);
}

}  // namespace

}  // namespace polykv::test

#include "tests/cuda_emulation/device_calls.inl"
