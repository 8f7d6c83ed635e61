// REQUIRE and CHECK of a Status or a Result, of the library or its C++ wrapper, that say why it failed.
#pragma once

#include <catch2/catch.hpp>
#include <string>

namespace polykv::test {

/// Why it failed; empty when it did not.
template <typename Outcome>
std::string failure_of(const Outcome& outcome) {
  const auto told = [](const std::string& message) {
    return message.empty() ? std::string("a failure without a message") : message;
  };
  if constexpr (requires { outcome.error(); }) {
    return outcome.ok() ? "" : told(outcome.error().message);
  } else if constexpr (requires { outcome.status(); }) {
    return outcome.is_ok() ? "" : told(outcome.status().message());
  } else {
    return outcome.is_ok() ? "" : told(outcome.message());
  }
}

}  // namespace polykv::test

#define REQUIRE_OK(...) REQUIRE(::polykv::test::failure_of(__VA_ARGS__) == "")
#define CHECK_OK(...) CHECK(::polykv::test::failure_of(__VA_ARGS__) == "")
