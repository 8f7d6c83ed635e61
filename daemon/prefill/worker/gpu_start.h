// Finding and initialising the GPU that this worker is to compute on, before the sandbox closes.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "common/result.h"
#include "daemon/prefill/worker/computer.h"
#include "daemon/prefill/worker/gpu_computer.h"
#include "include/internal/worker_device.h"

namespace polykv {

struct ComputerSettings {
  WorkerDevice device = WorkerDevice::automatic;  // worker.device of polykvd's configuration
  std::string cuda_library;                       // polykv's; empty: the default
  std::string gpu_uuid;                           // empty: the first
  bool documents_on_gpu = false;  // polykvd keeps its documents in the memory of gpu_uuid
  uint32_t thread_count = 1;
  std::string host_description;  // of the processor, see Computer::description()
};

struct ChosenComputer {
  std::unique_ptr<Computer> computer;
  std::optional<GpuPlace> gpu;  // that it computes on; none: the processor
};

/// Loads polykv's CUDA library and torch's, makes the GPU's context and runs a small pass: all that opens files. With
/// `automatic`, what fails is the reason why documents are computed on the processor, and told in the description; with
/// `cuda` it is an error.
Result<ChosenComputer> choose_computer(const ComputerSettings& settings);

/// Once the sandbox is closed: uses the GPU from inside it, which is known to be allowed only then. What fails has
/// the consequences that choose_computer() names.
Status look_from_inside(const ComputerSettings& settings, ChosenComputer& chosen);

/// What a worker does with its GPU, on a small scale: tensors, memory, copies.
Status use_gpu_once(const GpuPlace& gpu);

}  // namespace polykv
