// `tiled()`: a module that works at each token alone, such as an MLP, run on some tokens at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <ATen/core/TensorBody.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace zeropage {

struct TiledOptions {
  // Tokens of a tile. 0: as many as x has features, and 512 at least, so that a tile's activations are about as large as the weights
  // that it reads.
  int64_t tokens = 0;
  std::string name = "tiled()";  // in errors
};

// function(x), computed for tiles of x's tokens one after the other, each a checkpointed region (zeropage/checkpoint.h): the tiled
// MLP of Bekman et al. 2025, "Arctic Long Sequence Training".
//
//   x = x + zeropage::tiled(mlp, norm(x));
//
// module: whose parameters the function uses. x: [..., tokens, features]. It is cut along the last dimension but one, in tiles that
// differ by a token at most; the leading dimensions are whole in each, so options.tokens counts those of all of them. function: takes
// a tile, [..., some tokens, features], and returns as many tokens, [..., some tokens, any features], each of which depends on its own
// token alone. It is called once for each tile, also for an x without tokens, and again in backward; what it captures must live until
// then. Modules with statistics over tokens, such as BatchNorm, compute something else on tiles.
//
// Memory: x and the result are kept for backward, and what the function computes within is there for one tile at a time, in forward
// and in backward, and also inside a region that is repeated itself. Without gradients (torch::NoGradGuard): for one tile. At stage
// 3 also the pages of the module at once, which are gathered once in forward and once in backward, as touch_all()
// (zeropage/touch_all.h) has it: so ranks may have other numbers of tokens, and its other rules hold too.
// Time: the function is computed once more in backward, and each tile reads the weights anew.
// Values: those of the function at once, but for the order of sums. A weight's gradient is the sum of those of the tiles, added up
// in the gradient's dtype by autograd, as for any weight that is used several times: in bf16 each addition rounds.
//
// Throws where x has fewer than two dimensions, where the function returns another number of tokens, for negative options.tokens, and
// what checkpoint() and touch_all() throw.
at::Tensor tiled(const torch::nn::Module& module, const at::Tensor& x,
                 const std::function<at::Tensor(const at::Tensor&)>& function,
                 const TiledOptions& options = {});
// The same for a holder of a module whose forward takes and returns a tensor.
template <typename Contained>
at::Tensor tiled(const torch::nn::ModuleHolder<Contained>& module, const at::Tensor& x,
                 const TiledOptions& options = {}) {
  const auto forward = [held = module.ptr()](const at::Tensor& tile) {
    return held->forward(tile);
  };
  return tiled(*module.ptr(), x, forward, options);
}

}  // namespace zeropage
