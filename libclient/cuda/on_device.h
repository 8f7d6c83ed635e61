// A layer's parts where a copy of its payload is.
#pragma once

#include <cstdint>
#include <type_traits>

namespace polykv::lib {

/// Layer: LayerView or LayerSlot; means, lists and codes all lie in its payload. `host` and `device`: the
/// same byte of the segment here and there.
template <typename Layer, typename Byte>
Layer on_device(Layer layer, const uint8_t* host, Byte* device) {
  const auto move = [&](auto*& part) {
    if (part == nullptr) return;
    const auto offset = reinterpret_cast<const uint8_t*>(part) - host;
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(device + offset);
  };
  move(layer.k_means);
  move(layer.exact_tokens);
  move(layer.exact_k);
  move(layer.exact_v);
  move(layer.blocks);
  return layer;
}

}  // namespace polykv::lib
