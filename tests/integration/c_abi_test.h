/* The parts of c_abi_test that are compiled as C. */
#ifndef POLYKV_TESTS_C_ABI_TEST_H
#define POLYKV_TESTS_C_ABI_TEST_H

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the number of failed checks, each told on stderr. on_gpu: polykvd keeps documents in device
 * memory. */
int c_abi_test(const char* socket_path, int on_gpu);

#ifdef __cplusplus
}
#else

#include <stdio.h>
#include <string.h>

#include "polykv/polykv.h"

extern int failures;
#define CHECK(condition)                                                                    \
  ((condition) ? (void)0                                                                    \
               : (void)(++failures, fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", \
                                            __FILE__, __LINE__, #condition, polykv_last_error())))
/* A call that must fail with this code, and say why in one line. */
#define CHECK_FAILS(code, call)                       \
  do {                                                \
    CHECK((call) == (code));                          \
    CHECK(polykv_last_error()[0] != '\0');            \
    CHECK(strchr(polykv_last_error(), '\n') == NULL); \
  } while (0)

enum { LAYERS = 2, KV_HEADS = 2, K_DIM = 64, V_DIM = 32, TOKENS = 700, SEGMENT = 300 };

/* A model of two small layers, and a document of it, for somebody who would produce it. */
polykv_model the_model(void);
extern uint32_t tokens[TOKENS];
polykv_acquire_options producing(const polykv_model* model, polykv_profile profile);

/* Requests that break a rule, each on a session that goes on to work. */
void structs_of_later_versions(polykv_session* session);
void wrong_requests(polykv_session* session);

#endif

#endif
