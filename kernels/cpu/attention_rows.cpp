#include "kernels/cpu/attention_rows.h"

#include "kernels/cpu/ops.h"

namespace polykv {

const AttentionRows& attention_rows() {
#if defined(__x86_64__)
  // Whatever keeps the codecs' loops from AVX2 keeps these as well.
  if (&cpu::ops() == cpu::avx2_ops()) return kAttentionRowsAvx2;
#endif
  return kAttentionRowsPortable;
}

}  // namespace polykv
