#include "kernels/cpu/cpu.h"

#include "kernels/reference/reference.h"

namespace polykv::cpu {

const Codec& exact_codec() {
  return reference::exact_codec();
}
const Codec& k8v8_codec() {
  return reference::k8v8_codec();
}
const Codec& paper_k8v3_codec() {
  return reference::paper_k8v3_codec();
}

}  // namespace polykv::cpu
