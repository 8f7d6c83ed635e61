// A text as the file or the pipe that a program reads it from. Throws std::runtime_error.
#pragma once

#include <unistd.h>

#include <stdexcept>
#include <string>

#include "common/fd.h"
#include "common/memfd.h"

namespace polykv::test {

inline void write_all(const UniqueFd& file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = ::write(file.get(), text.data() + done, text.size() - done);
    if (written <= 0) throw std::runtime_error("cannot write a text");
    done += static_cast<size_t>(written);
  }
}

/// A file without a name that holds the text.
inline UniqueFd text_file(const std::string& text) {
  Result<UniqueFd> file = memfd_create_sealable("polykv-test");
  if (!file.is_ok()) throw std::runtime_error(file.status().message());
  write_all(*file, text);
  return std::move(file).value();
}

/// The reading end of a pipe that holds the text, at most 64 KiB, and whose writer has gone.
inline UniqueFd text_pipe(const std::string& text) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error("cannot create a pipe");
  UniqueFd reader(ends[0]);
  write_all(UniqueFd(ends[1]), text);
  return reader;
}

}  // namespace polykv::test
