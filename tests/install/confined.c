/*
 * confined SYSCALLS PROGRAM ARGUMENT...: runs a program under the rules that systemd makes of the
 * units' SystemCallFilter=, MemoryDenyWriteExecute= and RestrictAddressFamilies=AF_UNIX, for
 * machines where no systemd runs. SYSCALLS is a file with one permitted system call a line.
 * Whatever is not permitted fails with EPERM, as SystemCallErrorNumber= says.
 */
#include <errno.h>
#include <seccomp.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static const int kWriteExecute = PROT_WRITE | PROT_EXEC;

/* 0 or a negative error number, as libseccomp gives it. */
static int permit(scmp_filter_ctx filter, const char* name) {
  const int number = seccomp_syscall_resolve_name(name);
  if (number < 0) return 0; /* of another architecture or a newer kernel */
  if (number == SCMP_SYS(mmap)) {
    static const int kProtections[] = {0, PROT_WRITE, PROT_EXEC};
    for (size_t i = 0; i < sizeof kProtections / sizeof kProtections[0]; ++i) {
      const int error =
          seccomp_rule_add(filter, SCMP_ACT_ALLOW, number, 1,
                           SCMP_A2(SCMP_CMP_MASKED_EQ, kWriteExecute, kProtections[i]));
      if (error != 0) return error;
    }
    return 0;
  }
  if (number == SCMP_SYS(mprotect) || number == SCMP_SYS(pkey_mprotect)) {
    return seccomp_rule_add(filter, SCMP_ACT_ALLOW, number, 1,
                            SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0));
  }
  if (number == SCMP_SYS(socket)) {
    return seccomp_rule_add(filter, SCMP_ACT_ALLOW, number, 1, SCMP_A0(SCMP_CMP_EQ, AF_UNIX, 0));
  }
  return seccomp_rule_add(filter, SCMP_ACT_ALLOW, number, 0);
}

int main(int argc, char** argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: confined SYSCALLS PROGRAM ARGUMENT...\n");
    return 2;
  }
  FILE* names = fopen(argv[1], "re");
  scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ERRNO(EPERM));
  if (names == NULL || filter == NULL) {
    fprintf(stderr, "confined: no %s or no filter\n", argv[1]);
    return 1;
  }
  char name[64];
  int permitted_count = 0;
  while (fscanf(names, "%63s", name) == 1) {
    const int error = permit(filter, name);
    if (error != 0) {
      fprintf(stderr, "confined: %s: %s\n", name, strerror(-error));
      return 1;
    }
    ++permitted_count;
  }
  fclose(names);
  if (permitted_count < 100 || seccomp_load(filter) != 0) {
    fprintf(stderr, "confined: a filter of %d calls was not loaded\n", permitted_count);
    return 1;
  }
  seccomp_release(filter);
  execv(argv[2], argv + 2);
  fprintf(stderr, "confined: %s: %s\n", argv[2], strerror(errno));
  return 1;
}
