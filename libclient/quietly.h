#pragma once

#include <new>

namespace polykv::lib {

/// For destructors: to tell the daemon needs memory, and the connection's end tells it as well.
template <typename Body>
void quietly(Body body) noexcept {
  try {
    body();
  } catch (const std::bad_alloc&) {
  }
}

}  // namespace polykv::lib
