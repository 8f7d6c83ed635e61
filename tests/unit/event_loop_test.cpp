// The event loop and the thread pool.
#include "daemon/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/wait.h>

#include <catch2/catch.hpp>

#include "daemon/peer_identity.h"
#include "daemon/thread_pool.h"
#include "tests/support/raw_client.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::daemon;

namespace {
std::unique_ptr<EventLoop> make_loop() {
  auto loop = EventLoop::create();
  REQUIRE_OK(loop);
  return std::move(*loop);
}
}  // namespace

TEST_CASE("timers run in the order of their deadlines, cancelled ones never") {
  const auto loop = make_loop();
  std::string order;
  loop->add_timer(20, [&] {
    order += 'c';
    loop->stop();
  });
  loop->add_timer(0, [&] { order += 'a'; });
  const auto cancelled = loop->add_timer(1, [&] { order += 'x'; });
  loop->add_timer(5, [&] { order += 'b'; });
  loop->cancel_timer(cancelled);
  loop->run();
  CHECK(order == "abc");
}

TEST_CASE("deferred work runs after the callback and before the next one") {
  const auto loop = make_loop();
  std::string order;
  loop->add_timer(0, [&] {
    loop->defer([&] { order += 'b'; });
    order += 'a';
  });
  loop->add_timer(0, [&] {
    order += 'c';
    loop->stop();
  });
  loop->run();
  CHECK(order == "abc");
}

TEST_CASE("a watch that ends in the same batch of events is not called") {
  const auto loop = make_loop();
  const UniqueFd first(eventfd(1, EFD_CLOEXEC));
  const UniqueFd second(eventfd(1, EFD_CLOEXEC));
  int calls = 0;
  const auto on_event = [&](int other) {
    return [&, other](uint32_t) {
      ++calls;
      loop->unwatch(other);
      loop->unwatch(other == first.get() ? second.get() : first.get());
      loop->add_timer(0, [&] { loop->stop(); });
    };
  };
  REQUIRE_OK(loop->watch(first.get(), EPOLLIN, on_event(second.get())));
  REQUIRE_OK(loop->watch(second.get(), EPOLLIN, on_event(first.get())));
  loop->run();
  CHECK(calls == 1);
}

TEST_CASE("pool results come back on the loop's thread") {
  const auto loop = make_loop();
  ThreadPool pool(*loop, 2);
  const auto loop_thread = std::this_thread::get_id();
  int sum = 0;
  int left = 10;
  for (int i = 1; i <= 10; ++i) {
    pool.submit<int>(
        [i, loop_thread] { return std::this_thread::get_id() == loop_thread ? 1000 : i; },
        [&](int value) {
          sum += std::this_thread::get_id() == loop_thread ? value : 1000;
          if (--left == 0) loop->stop();
        });
  }
  loop->run();
  CHECK(sum == 55);
}

TEST_CASE("a client's pidfd must be one, of its own living process") {
  const PeerCredentials self{getpid(), getuid()};
  const UniqueFd own = test::own_pidfd();
  CHECK_OK(check_client_pidfd(own.get(), self));
  CHECK(check_client_pidfd(own.get(), {getpid() + 1, getuid()}).code() == POLYKV_ERR_PERMISSION);
  const UniqueFd other(eventfd(0, EFD_CLOEXEC));
  CHECK(check_client_pidfd(other.get(), self).code() == POLYKV_ERR_PERMISSION);
  const pid_t child = fork();
  if (child == 0) _exit(0);
  const UniqueFd dead(static_cast<int>(syscall(SYS_pidfd_open, child, 0)));
  siginfo_t info;
  REQUIRE(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT) == 0);
  CHECK(check_client_pidfd(dead.get(), {child, getuid()}).code() == POLYKV_ERR_PERMISSION);
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED);
}
