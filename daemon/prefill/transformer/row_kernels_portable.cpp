#include "daemon/prefill/transformer/row_kernels.h"

namespace polykv {

namespace {
#include "daemon/prefill/transformer/row_kernels.inl"
}  // namespace

const RowKernels kRowKernelsPortable = {"portable", rms_norm, rotate_half, silu_multiply};

}  // namespace polykv
