/* A program of somebody else's, in C: prints the version of the library that it really got. */
#include <polykv/polykv.h>
#include <stdio.h>

int main(void) {
  if (polykv_version() != POLYKV_VERSION) return 1;
  printf("%s\n", polykv_version_text());
  return 0;
}
