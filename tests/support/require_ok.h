// REQUIRE and CHECK of a Status or a Result, of the library or its C++ wrapper, that say why it failed.
#pragma once

#include <catch2/catch.hpp>
#include <string>

namespace polykv::test {

/// The message of a failure; empty when there is none.
template <typename Outcome>
std::string failure_of(const Outcome& outcome) {
  if constexpr (requires { outcome.error(); }) {
    return outcome.ok() ? "" : outcome.error().message;
  } else if constexpr (requires { outcome.status(); }) {
    return outcome.status().message();
  } else {
    return outcome.message();
  }
}

}  // namespace polykv::test

#define REQUIRE_OK(...) REQUIRE(::polykv::test::failure_of(__VA_ARGS__) == "")
#define CHECK_OK(...) CHECK(::polykv::test::failure_of(__VA_ARGS__) == "")
