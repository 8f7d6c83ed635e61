// A program of somebody else's, in C++.
#include <polykv/polykv.h>

#include <iostream>

int main() {
  if (polykv_version() != POLYKV_VERSION) return 1;
  std::cout << polykv_version_text() << '\n';
}
