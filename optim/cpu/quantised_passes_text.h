// How a stretch with 8-bit states is stepped block by block, for sets of instructions that have few registers; behind
// quantised_loops_text.h. Free of torch.
#pragma once

namespace zeropage::optim::cpu {
namespace {

// How far ahead a block is fetched: a page of fp32, where the processor's own fetching stops. The
// arithmetic of a block is too long for the blocks after it to come in behind it by themselves.
constexpr int64_t kAheadNumel = 1024;

constexpr int64_t kCacheLineBytes = 64;

// Past the end of memory it does nothing.
template <typename Element>
ZEROPAGE_SET_ELEMENT void fetch_block(const Element* block) {
  constexpr int64_t kLineNumel = kCacheLineBytes / int64_t{sizeof(Element)};
  for (int64_t i = 0; i < kStateBlockNumel; i += kLineNumel) __builtin_prefetch(block + i);
}

// In passes over a block, each short enough for the processor to look ahead in it: in a single one the chain
// from a code to the next one is so long that the processor waits.
template <typename Rule, typename Gradient>
ZEROPAGE_SET void step_blocks(const Rule& shared_rule, const QuantisedStretch& all) {
  // A copy: a store through a float pointer could change what is reached through references.
  const Rule rule = shared_rule;
  const auto* const gradients = static_cast<const Gradient*>(all.gradient);
  BlockInFp32 in_fp32;
  PartOfBlock part{.numel = std::min(kStateBlockNumel - all.first_in_block, all.numel)};
  while (part.numel > 0) {
    fetch_block(all.values + part.first + kAheadNumel);
    load_states<Rule>(all, part, in_fp32);
    update_block(rule, all.values + part.first, gradients + part.first, all.gradient_scale,
                 part.numel, in_fp32);
    fetch_block(gradients + part.first + kAheadNumel);
    store_states<Rule>(all, part, in_fp32);
    part = {part.block + 1, part.first + part.numel,
            std::min(kStateBlockNumel, all.numel - part.first - part.numel)};
  }
}

}  // namespace
}  // namespace zeropage::optim::cpu
