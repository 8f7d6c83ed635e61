// Kernels' bodies are ordinary C++ that nvcc compiles for the device and any compiler for the tests
// (tests/cuda_emulation). This marks what both need.
#pragma once

#ifdef __CUDACC__
#define POLYKV_HOST_DEVICE __host__ __device__
#else
#define POLYKV_HOST_DEVICE
#endif

/// Before a loop whose counter indexes what has to stay in registers.
#ifdef __CUDA_ARCH__
#define POLYKV_UNROLL _Pragma("unroll")
#else
#define POLYKV_UNROLL
#endif
