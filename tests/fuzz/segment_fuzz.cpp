// libFuzzer target: any bytes as a segment. Opens, verifies, and decodes every layer with both backends.
#include <cstring>

#include "tests/support/segments.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace polykv;
  using namespace polykv::test;
  AlignedBytes bytes(size);
  if (size != 0) std::memcpy(bytes.span().data(), data, size);
  const Result<SegmentView> view = SegmentView::open(bytes.span());
  if (!view.is_ok()) return 0;
  static_cast<void>(view->verify_checksums().is_ok());
  for (uint32_t layer = 0; layer < view->layer_count(); ++layer) {
    decode_all(*view, layer, Backend::reference);
    decode_all(*view, layer, Backend::cpu);
  }
  return 0;
}
