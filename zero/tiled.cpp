#include "zeropage/tiled.h"

#include <algorithm>
#include <vector>

#include <ATen/Functions.h>

#include "zero/touch_all.h"
#include "zeropage/check.h"
#include "zeropage/checkpoint.h"

namespace zeropage {
namespace {

constexpr int64_t kFewestTokens = 512;
constexpr int64_t kTokens = -2;  // the dimension

// Along the dimension of tokens.
std::vector<int64_t> sizes_of_tiles(const at::Tensor& x, int64_t tokens_of_tile) {
  const int64_t features = x.size(-1), length = x.size(kTokens);
  const int64_t tokens = features == 0 ? length : x.numel() / features;
  const int64_t most = tokens_of_tile > 0 ? tokens_of_tile : std::max(kFewestTokens, features);
  const int64_t tiles =
      std::clamp<int64_t>((tokens + most - 1) / most, 1, std::max<int64_t>(length, 1));
  std::vector<int64_t> sizes;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    sizes.push_back(length / tiles + (tile < length % tiles ? 1 : 0));
  }
  return sizes;
}

at::Tensor checked_tile(const TiledOptions& options, at::Tensor result, const at::Tensor& tile) {
  const auto tokens_of = [](const at::Tensor& of) { return of.sizes().slice(0, of.dim() - 1); };
  ZP_CHECK(result.defined() && result.dim() == tile.dim() && tokens_of(result) == tokens_of(tile),
           options.name, ": expected a function of single tokens, which returns ", tokens_of(tile),
           " tokens of any width for a tile of sizes ", tile.sizes(), ", got ",
           result.defined() ? c10::str("a result of sizes ", result.sizes()) : "none");
  return result;
}

}  // namespace

at::Tensor tiled(const torch::nn::Module& module, const at::Tensor& x,
                 const std::function<at::Tensor(const at::Tensor&)>& function,
                 const TiledOptions& options) {
  ZP_CHECK(x.dim() >= 2, options.name, ": expected x of [..., tokens, features], got sizes ",
           x.sizes());
  ZP_CHECK(options.tokens >= 0, options.name, ": expected 0 or more tokens a tile, got ",
           options.tokens);
  const auto checked = [function, options](const at::Tensor& tile) {
    return checked_tile(options, function(tile), tile);
  };
  const auto tile_by_tile = [&](const at::Tensor& x) {
    std::vector<at::Tensor> results;
    // The backward of one split joins the tiles' gradients once. That of a slice would make one of x's size for each tile.
    for (const at::Tensor& tile :
         at::split_with_sizes(x, sizes_of_tiles(x, options.tokens), kTokens)) {
      // Where neither x nor a parameter asks for a gradient, no backward comes that would repeat a region.
      results.push_back(x.requires_grad()
                            ? checkpointing::checkpoint({.name = options.name}, checked, tile)
                            : checked(tile));
    }
    return at::cat(results, kTokens);
  };
  return zero::run_among_pages("tiled()", module, x, tile_by_tile, zero::Within::kRegions);
}

}  // namespace zeropage
