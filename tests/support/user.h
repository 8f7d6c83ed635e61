// For tests about users: a forked child that gives up root.
#pragma once

#include <grp.h>
#include <unistd.h>

namespace polykv::test {

/// In a forked child: this user and nobody else from now on. Ends the child if that fails.
inline void become_user(uid_t uid) {
  if (::setgroups(0, nullptr) != 0 || ::setresgid(uid, uid, uid) != 0 ||
      ::setresuid(uid, uid, uid) != 0) {
    ::_exit(126);
  }
}

}  // namespace polykv::test
