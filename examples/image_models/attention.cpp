#include "image_models/attention.h"

#include <cmath>

#include <zeropage/check.h>

namespace image_models {

SpatialAttentionImpl::SpatialAttentionImpl(int64_t channels, int64_t heads, int64_t side)
    : heads(heads), side(side) {
  ZP_CHECK(heads >= 1 && channels % heads == 0 && side >= 1, "self-attention: ", channels,
           " channels cannot be shared by ", heads, " heads on a square of ", side,
           "; give a width that is a multiple of the heads, and a "
           "larger image where the square is empty");
  qkv = register_module(
      "qkv", torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, 3 * channels, 1).bias(false)));
  const int64_t of_head = channels / heads;
  const double deviation = 1 / std::sqrt(static_cast<double>(of_head));
  rel_height = register_parameter("rel_height", torch::randn({2 * side - 1, of_head}) * deviation);
  rel_width = register_parameter("rel_width", torch::randn({2 * side - 1, of_head}) * deviation);
  const torch::Tensor places = torch::arange(side);
  distance = register_buffer(
      "distance", (places.unsqueeze(0) - places.unsqueeze(1) + side - 1).reshape(-1).contiguous());
}

// queries: [batch, heads, side, side, of_head]. What they say of where a key is from them:
// [batch, heads, side * side, side * side].
torch::Tensor SpatialAttentionImpl::position_logits(const torch::Tensor& queries) const {
  const auto table = [&](const torch::Tensor& learned) {
    return learned.index_select(0, distance).view({side, side, -1});  // [from, to, of_head]
  };
  // Over rows: a query at (y, x) and a key in row j.
  const torch::Tensor rows = torch::matmul(queries, table(rel_height).transpose(1, 2));
  const torch::Tensor columns =
      torch::matmul(queries.transpose(2, 3), table(rel_width).transpose(1, 2)).transpose(2, 3);
  const torch::Tensor both = rows.unsqueeze(-1) + columns.unsqueeze(-2);  // [.., y, x, to y, to x]
  return both.reshape({queries.size(0), heads, side * side, side * side});
}

torch::Tensor SpatialAttentionImpl::forward(const torch::Tensor& x) {
  ZP_CHECK(x.dim() == 4 && x.size(2) == side && x.size(3) == side,
           "self-attention: was made for a square of ", side, " x ", side, ", got ", x.sizes(),
           "; its positions belong to one size of image, so give images of the side that the model "
           "was made for");
  // Each [batch, heads, side * side, of_head].
  const int64_t of_head = x.size(1) / heads;
  const auto parts =
      qkv(x).view({x.size(0), 3, heads, of_head, side * side}).transpose(3, 4).unbind(1);
  const double scale = 1 / std::sqrt(static_cast<double>(of_head));
  const torch::Tensor queries = parts[0] * scale;
  const torch::Tensor logits =
      torch::matmul(queries, parts[1].transpose(2, 3)) +
      position_logits(queries.reshape({x.size(0), heads, side, side, of_head}));
  const torch::Tensor seen = torch::matmul(torch::softmax(logits, -1), parts[2]);
  return seen.transpose(2, 3).reshape(x.sizes());
}

}  // namespace image_models
