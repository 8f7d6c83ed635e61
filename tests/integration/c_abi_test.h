/* The part of c_abi_test that is compiled as C. */
#ifndef POLYKV_TESTS_C_ABI_TEST_H
#define POLYKV_TESTS_C_ABI_TEST_H

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the number of failed checks, each told on stderr. */
int c_abi_test(const char* socket_path);

#ifdef __cplusplus
}
#endif

#endif
