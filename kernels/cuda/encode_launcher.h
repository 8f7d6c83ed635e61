// Queues the kernels that encode a layer. Launcher: as in kernels/cuda/decode_launcher.h.
#pragma once

#include <algorithm>
#include <iterator>

#include "kernels/cuda/attend_call.h"
#include "kernels/cuda/encode_finish_kernels.h"
#include "kernels/cuda/encode_rows_kernel.h"
#include "kernels/cuda/encode_scan_kernels.h"
#include "kernels/cuda/launch_rules.h"

namespace polykv::cuda {

namespace encode_detail {

inline EncodeArguments layer_arguments(const KvSource& source, const LayerSlot& slot,
                                       void* workspace, EncodeOutcome* outcome) {
  EncodeArguments a{};
  a.dtype = source.dtype;
  a.stored_dtype = slot.source_dtype;
  a.blocks = slot.blocks;
  a.block_bytes = slot.block_bytes;
  a.block_count = static_cast<uint32_t>(slot.block_count);
  a.kv_head_count = slot.geometry.kv_head_count;
  a.token_count = slot.token_count;
  a.exact_tokens = slot.exact_tokens;
  a.exact_count = slot.exact_row_count;
  a.exact_capacity = slot.exact_row_capacity;
  a.outcome = outcome;
  auto* memory = static_cast<uint8_t*>(workspace);
  const auto take = [&](auto*& pointer, uint64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory);
    memory += (count * sizeof *pointer + 255) / 256 * 256;
  };
  const uint64_t places = uint64_t{a.kv_head_count} * a.block_count;
  take(a.sums, places * slot.geometry.k_head_dim);
  take(a.numbers, 2 * places * kBlockTokens);
  take(a.most, 2 * places);
  take(a.bad, 2 * places);
  return a;
}

inline SourceTensor source_tensor(const KvSource& source, const LayerSlot& slot,
                                  const TensorPart& part) {
  SourceTensor tensor{};
  tensor.data = part.is_k ? source.k : source.v;
  tensor.strides = part.is_k ? source.k_strides : source.v_strides;
  tensor.head_dim = part.head_dim;
  tensor.bits = part.rule.bits;
  tensor.is_k = part.is_k;
  tensor.is_rotated = part.rule.rotated;
  tensor.gains = static_cast<uint32_t>(part.gains);
  tensor.codes = static_cast<uint32_t>(part.codes);
  tensor.exact_rows = part.is_k ? slot.exact_k : slot.exact_v;
  // null as well where keys are not centred
  tensor.means = part.is_k ? slot.k_means : nullptr;
  tensor.signs = turned_signs(part.rule);
  return tensor;
}

inline EncodeRowsArguments::Book book_of(const TensorRule& rule) {
  EncodeRowsArguments::Book book{};
  if (!rule.rotated) return book;
  std::copy_n(codebook(rule.bits).levels.begin(), std::size(book.levels), book.levels);
  book.inverse_unit = 1 / codebook(rule.bits).unit;
  for (uint32_t i = 0; i < kScaleCandidates; ++i)
    book.scales[i] = static_cast<float>(codebook(rule.bits).scale(i));
  return book;
}

template <typename Launcher>
void encode_quantized(Launcher& launcher, const KvSource& source, const LayerSlot& slot,
                      EncodeArguments& a) {
  const ProfileRule& rule = *profile_rule(slot.profile);
  a.tensors[0] = source_tensor(source, slot, k_part(rule, slot.geometry));
  a.tensors[1] = source_tensor(source, slot, v_part(rule, slot.geometry));
  const uint64_t blocks = uint64_t{2} * a.kv_head_count * a.block_count;
  launcher.template launch<EncodeScanKernel>(blocks, a);
  launcher.template launch<EncodeMeansKernel>(a.kv_head_count, a);
  launcher.template launch<EncodeRowsKernel>(blocks, {a, {book_of(rule.k), book_of(rule.v)}, {}});
  launcher.template launch<EncodeScalesKernel>(2, a);
  launcher.template launch<EncodeFinishKernel>(blocks, a);
  if (a.exact_count > 0)
    launcher.template launch<EncodeExactRowsKernel>(uint64_t{2} * a.kv_head_count, a);
}

template <typename Launcher>
void encode_paper(Launcher& launcher, const KvSource& source, const LayerSlot& slot,
                  EncodeArguments& a) {
  const LayerGeometry& geometry = slot.geometry;
  const TensorPart k = {
      {8, false, false}, geometry.k_head_dim, true, kNoGains, PaperBlock::k_codes};
  const TensorPart v = {{3, true, false},
                        geometry.v_head_dim,
                        false,
                        PaperBlock::v_norms,
                        PaperBlock::v_codes(geometry)};
  a.tensors[0] = source_tensor(source, slot, k);
  a.tensors[1] = source_tensor(source, slot, v);
  a.tensors[0].is_paper = a.tensors[1].is_paper = true;
  EncodeRowsArguments rows{a, {}, {}};
  std::copy(kPaperBoundaries.begin(), kPaperBoundaries.end(), rows.paper_boundaries);
  const uint64_t blocks = uint64_t{2} * a.kv_head_count * a.block_count;
  launcher.template launch<EncodeScanKernel>(blocks, a);
  launcher.template launch<EncodeRowsKernel>(blocks, rows);
  launcher.template launch<EncodeScalesKernel>(2, a);
  launcher.template launch<EncodeFinishKernel>(blocks, a);
}

template <typename Launcher>
void encode_exact(Launcher& launcher, const KvSource& source, const LayerSlot& slot,
                  EncodeArguments& a) {
  const uint64_t k_bytes =
      kBlockTokens * slot.geometry.k_head_dim * dtype_size_bytes(slot.source_dtype);
  constexpr TensorRule kRule = {8, false, false};
  a.tensors[0] = source_tensor(source, slot, {kRule, slot.geometry.k_head_dim, true, 0, 0});
  a.tensors[1] = source_tensor(source, slot, {kRule, slot.geometry.v_head_dim, false, 0, k_bytes});
  launcher.template launch<EncodeCopyKernel>(uint64_t{2} * a.kv_head_count * a.block_count, a);
  launcher.template launch<EncodeScalesKernel>(2, a);
}

}  // namespace encode_detail

template <typename Launcher>
Status encode_with(Launcher& launcher, const KvSource& source, const LayerSlot& slot,
                   const Workspace& workspace, EncodeOutcome* outcome) {
  POLYKV_RETURN_IF_ERROR(check_encode(source, slot));
  const uint64_t needed = encode_workspace_bytes(slot);
  if (workspace.data == nullptr || workspace.size_bytes < needed || outcome == nullptr ||
      reinterpret_cast<uintptr_t>(workspace.data) % 256 != 0) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("encode on the device: no place for the outcome, or a workspace of %llu bytes "
                   "where %llu are needed, aligned to 256",
                   static_cast<unsigned long long>(workspace.size_bytes),
                   static_cast<unsigned long long>(needed))};
  }
  EncodeArguments a = encode_detail::layer_arguments(source, slot, workspace.data, outcome);
  if (slot.profile == Profile::exact) {
    encode_detail::encode_exact(launcher, source, slot, a);
  } else if (slot.profile == Profile::paper_k8v3) {
    encode_detail::encode_paper(launcher, source, slot, a);
  } else {
    encode_detail::encode_quantized(launcher, source, slot, a);
  }
  return launcher.status();
}

}  // namespace polykv::cuda
