#include "daemon/prefill/worker/sandbox.h"

#include <fcntl.h>
#include <sched.h>
#include <seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <memory>

namespace polykv {

namespace {

constexpr uint64_t kMemoryMarginBytes = uint64_t{256} << 20;  // stacks, allocator slack, text

constexpr uint64_t kGpuDescriptors = 1024;  // a context alone has dozens open

struct ReleaseFilter {
  void operator()(void* context) const { seccomp_release(context); }
};
using Filter = std::unique_ptr<void, ReleaseFilter>;

/// Harmless whatever their arguments are: they reach nothing outside the process but descriptors
/// that it holds already.
constexpr int kAllowed[] = {
    // descriptors
    SCMP_SYS(read), SCMP_SYS(pread64), SCMP_SYS(readv), SCMP_SYS(preadv), SCMP_SYS(write),
    SCMP_SYS(writev), SCMP_SYS(lseek), SCMP_SYS(fstat), SCMP_SYS(close), SCMP_SYS(poll),
    SCMP_SYS(ppoll), SCMP_SYS(sendmsg), SCMP_SYS(recvmsg), SCMP_SYS(memfd_create),
    // memory
    SCMP_SYS(brk), SCMP_SYS(mmap), SCMP_SYS(munmap), SCMP_SYS(mremap), SCMP_SYS(mprotect),
    SCMP_SYS(madvise),
    // threads and signals of this process
    SCMP_SYS(futex), SCMP_SYS(set_robust_list), SCMP_SYS(get_robust_list), SCMP_SYS(rseq),
    SCMP_SYS(sched_yield), SCMP_SYS(sched_getaffinity), SCMP_SYS(gettid), SCMP_SYS(getpid),
    SCMP_SYS(getppid), SCMP_SYS(rt_sigaction), SCMP_SYS(rt_sigprocmask), SCMP_SYS(rt_sigreturn),
    SCMP_SYS(sigaltstack), SCMP_SYS(restart_syscall), SCMP_SYS(exit), SCMP_SYS(exit_group),
    // clocks, randomness, facts
    SCMP_SYS(clock_gettime), SCMP_SYS(clock_getres), SCMP_SYS(clock_nanosleep), SCMP_SYS(nanosleep),
    SCMP_SYS(gettimeofday), SCMP_SYS(getrandom), SCMP_SYS(getrusage), SCMP_SYS(sysinfo),
    SCMP_SYS(uname)};

/// What a process with a running CUDA context needs besides, beside the ioctls below. What is known of NVIDIA's driver, from
/// its open kernel modules and from others who confine it: it talks to the GPU by ioctls on descriptors that it opened when
/// the context was made; device memory is allocated by these alone; it polls descriptors and eventfds of its own; and it
/// opens a device file anew for each mapping of GPU memory into the host's address space, which pinned memory, streams
/// and channels need. So all of those are made in the warm-up (gpu_start.cpp), and opening stays refused. It was not run
/// on a GPU yet: `polykv-prefill --self-check` uses the GPU once more inside the sandbox and says whether it works.
constexpr int kAllowedWithGpu[] = {
    SCMP_SYS(eventfd2), SCMP_SYS(epoll_wait),    SCMP_SYS(epoll_pwait), SCMP_SYS(epoll_ctl),
    SCMP_SYS(pipe2),    SCMP_SYS(mlock),         SCMP_SYS(munlock),     SCMP_SYS(mincore),
    SCMP_SYS(mbind),    SCMP_SYS(get_mempolicy), SCMP_SYS(getcpu),      SCMP_SYS(membarrier),
    SCMP_SYS(getuid),   SCMP_SYS(geteuid),       SCMP_SYS(getgid),      SCMP_SYS(getegid)};

/// The driver's requests and no others: a filter cannot see which file a descriptor is of, and the terminal that may be
/// standard error takes input for its shell by one. Masks leave out the upper half, which the kernel ignores.
int add_gpu_rules(void* filter) {
  struct Requests {
    scmp_datum_t mask;
    scmp_datum_t value;
  };
  constexpr Requests kRequests[] = {
      {0x0000ff00, 0x4600},      // _IO*('F', ...) of /dev/nvidia*
      {0xffffff00, 0},           // /dev/nvidia-uvm numbers its requests from 1
      {0xfffffff0, 0x30000000},  // and two from 0x30000001
  };
  int error = 0;
  for (const int call : kAllowedWithGpu) {
    if (error == 0) error = seccomp_rule_add(filter, SCMP_ACT_ALLOW, call, 0);
  }
  for (const Requests& requests : kRequests) {
    if (error == 0) {
      error = seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(ioctl), 1,
                               SCMP_A1(SCMP_CMP_MASKED_EQ, requests.mask, requests.value));
    }
  }
  return error;
}

int add_conditional_rules(void* filter) {
  int error = 0;
  const auto add = [&](uint32_t action, int call, auto... conditions) {
    if (error == 0) {
      error = seccomp_rule_add(filter, action, call, sizeof...(conditions), conditions...);
    }
  };
  // A second operand where none is meant: clang wants the whole structure initialised.
  // Threads, not processes. clone3 hides its flags from the filter: ENOSYS makes libc use clone.
  add(SCMP_ACT_ALLOW, SCMP_SYS(clone), SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_THREAD, CLONE_THREAD));
  add(SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3));
  // abort() and raise() signal ourselves.
  add(SCMP_ACT_ALLOW, SCMP_SYS(tgkill),
      SCMP_A0(SCMP_CMP_EQ, static_cast<scmp_datum_t>(::getpid()), 0));
  // fstat() of newer C libraries.
  add(SCMP_ACT_ALLOW, SCMP_SYS(newfstatat),
      SCMP_A3(SCMP_CMP_MASKED_EQ, AT_EMPTY_PATH, AT_EMPTY_PATH));
  add(SCMP_ACT_ALLOW, SCMP_SYS(prctl), SCMP_A0(SCMP_CMP_EQ, PR_SET_NAME, 0));
  // Reading limits is harmless, setting them is not needed.
  add(SCMP_ACT_ALLOW, SCMP_SYS(prlimit64), SCMP_A2(SCMP_CMP_EQ, 0, 0));
  for (const int command : {F_GETFD, F_GETFL, F_GET_SEALS, F_ADD_SEALS}) {
    add(SCMP_ACT_ALLOW, SCMP_SYS(fcntl),
        SCMP_A1(SCMP_CMP_EQ, static_cast<scmp_datum_t>(command), 0));
  }
  return error;
}

Status load_filter(bool uses_gpu) {
  const Filter filter(seccomp_init(SCMP_ACT_ERRNO(EPERM)));
  if (!filter) return {POLYKV_ERR_NO_MEMORY, "lock down polykv-prefill: no memory for its filter"};
  int error = 0;
  for (const int call : kAllowed) {
    if (error == 0) error = seccomp_rule_add(filter.get(), SCMP_ACT_ALLOW, call, 0);
  }
  if (error == 0) error = add_conditional_rules(filter.get());
  if (error == 0 && uses_gpu) error = add_gpu_rules(filter.get());
  // Every thread, those of the warm-up as well.
  if (error == 0) error = seccomp_attr_set(filter.get(), SCMP_FLTATR_CTL_TSYNC, 1);
  if (error == 0) error = seccomp_load(filter.get());
  if (error != 0) {
    return system_error("lock down polykv-prefill by seccomp", -error,
                        "a kernel with CONFIG_SECCOMP_FILTER is needed");
  }
  return Status::ok();
}

Status limit(__rlimit_resource resource, const char* name, uint64_t value) {
  rlimit current{};
  if (::getrlimit(resource, &current) != 0) return system_error(format("read %s", name), errno);
  rlimit wanted{};
  wanted.rlim_max = current.rlim_max < value ? current.rlim_max : value;
  wanted.rlim_cur = wanted.rlim_max;
  if (::setrlimit(resource, &wanted) != 0) return system_error(format("set %s", name), errno);
  return Status::ok();
}

/// Private writable bytes of this process now, as RLIMIT_DATA counts them.
uint64_t data_bytes() {
  std::ifstream file("/proc/self/statm");
  constexpr int kDataField = 5;  // size, resident, shared, text, lib, data: in pages
  uint64_t pages = 0;
  for (int field = 0; field <= kDataField; ++field) file >> pages;
  return file ? pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) : 0;
}

}  // namespace

Status harden_process() {
  if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || ::prctl(PR_SET_DUMPABLE, 0) != 0 ||
      ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
    return system_error("harden polykv-prefill", errno);
  }
  return limit(RLIMIT_CORE, "RLIMIT_CORE", 0);
}

Status enter_sandbox(const SandboxLimits& limits) {
  POLYKV_RETURN_IF_ERROR(harden_process());
  if (limits.memory_bytes != 0) {
    const uint64_t bytes = data_bytes() + limits.memory_bytes + kMemoryMarginBytes;
    POLYKV_RETURN_IF_ERROR(limit(RLIMIT_DATA, "RLIMIT_DATA", bytes));
  }
  POLYKV_RETURN_IF_ERROR(limit(RLIMIT_NOFILE, "RLIMIT_NOFILE",
                               limits.uses_gpu ? kGpuDescriptors : limits.descriptor_count));
  // A write beyond it is an error (EFBIG), not our death.
  if (::signal(SIGXFSZ, SIG_IGN) == SIG_ERR) return system_error("ignore SIGXFSZ", errno);
  POLYKV_RETURN_IF_ERROR(limit(RLIMIT_FSIZE, "RLIMIT_FSIZE", limits.file_bytes));
  return load_filter(limits.uses_gpu);
}

}  // namespace polykv
