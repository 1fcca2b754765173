#include "pipeline/stage_messages.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include "zeropage/check.h"

namespace zeropage::pipeline {
namespace {

constexpr int64_t kMostDimensions = 9;
constexpr int64_t kHeaderNumel = kMostDimensions + 2;  // dtype, dimensions, sizes
constexpr int64_t kNothingFollows = -1;                // in place of the dtype
// The shape that a boundary has behind such a header.
const StageMessages::Shape kClosed = {.sizes = {}, .dtype = at::ScalarType::Undefined};

std::string describe(const Message& message) {
  const bool is_activation = message.what == Message::What::kActivation;
  return c10::str(is_activation ? "activations" : "gradients", " of micro-batch ",
                  message.micro_batch, " from stage ", message.sending_stage(), " to stage ",
                  message.receiving_stage());
}

// What no computation gives: a NaN with bits of its own, as an integer of its dtype's size.
struct BitsOfNothing {
  at::ScalarType integer;
  int64_t bits;
};

std::optional<BitsOfNothing> bits_of_nothing(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return BitsOfNothing{at::kLong, 0x7FFC5A45524F5047};
    case at::kFloat:
      return BitsOfNothing{at::kInt, 0x7FE55A50};
    case at::kBFloat16:
      return BitsOfNothing{at::kShort, 0x7FE5};
    case at::kHalf:
      return BitsOfNothing{at::kShort, 0x7F5A};
    default:
      return std::nullopt;
  }
}

at::Tensor nothing_like(const StageMessages::Shape& shape, c10::Device device) {
  const at::Tensor nothing =
      at::zeros(shape.sizes, at::TensorOptions().dtype(shape.dtype).device(device));
  if (const auto bits = bits_of_nothing(shape.dtype)) nothing.view(bits->integer).fill_(bits->bits);
  return nothing;
}

bool is_nothing(const at::Tensor& tensor) {
  const auto bits = bits_of_nothing(tensor.scalar_type());
  if (!tensor.is_cpu() || tensor.numel() == 0 || !bits) return false;
  // The first element of values says that they are some.
  if (std::memcmp(tensor.const_data_ptr(), &bits->bits, tensor.element_size()) != 0) return false;
  return tensor.view(bits->integer).eq(bits->bits).all().item<bool>();
}

}  // namespace

std::string StageMessages::Shape::describe() const {
  return c10::str(dtype, " ", at::IntArrayRef(sizes));
}

void StageMessages::check_can_be_sent(const Message& message, const at::Tensor& tensor) const {
  const int stage = message.sending_stage();
  ZP_CHECK(
      tensor.defined(), "stage ", stage, " of the pipeline, micro-batch ", message.micro_batch,
      ": expected one tensor for the next stage, got an undefined one; return the activations");
  ZP_CHECK(tensor.is_floating_point(), "stage ", stage, " of the pipeline, micro-batch ",
           message.micro_batch, ": its output is ", tensor.scalar_type(), " ", tensor.sizes(),
           ", which has no gradient to send back: expected floating point; cut the model where "
           "activations pass, or give such values to all stages as data");
  ZP_CHECK(tensor.layout() == at::kStrided && tensor.dim() <= kMostDimensions, "stage ", stage,
           " of the pipeline: its output has layout ", tensor.layout(), " and ", tensor.dim(),
           " dimensions: expected a dense tensor of up to ", kMostDimensions, "; reshape it");
  ZP_CHECK(tensor.device() == links_.device(), "stage ", stage,
           " of the pipeline: its output is on ", tensor.device(), ", expected ", links_.device(),
           tensor.is_meta()
               ? ": it was computed by a layer of another stage, whose parameters are not here; "
                 "list all modules that a layer uses in PipelineLayer::modules"
               : "; move it to the world's device");
}

void StageMessages::agree_on_shape(const Message& message, const at::Tensor& tensor) {
  const Shape shape{tensor.sizes().vec(), tensor.scalar_type()};
  const auto known = shapes_.find(message.boundary);
  if (known != shapes_.end()) {
    ZP_CHECK(known->second == shape, describe(message), ": expected ", known->second.describe(),
             ", as at the first micro-batch of the step, got ", shape.describe(),
             "; give all micro-batches of a step the same sizes, by padding or by dropping the "
             "rest of a batch");
    return;
  }
  shapes_[message.boundary] = shape;
  if (links_.is_local(message)) return;
  std::vector<int64_t> header = {static_cast<int64_t>(shape.dtype), tensor.dim()};
  header.insert(header.end(), shape.sizes.begin(), shape.sizes.end());
  header.resize(kHeaderNumel);
  links_.send(message, at::tensor(header, at::kLong).to(links_.device()),
              "the shape of " + describe(message));
}

void StageMessages::learn_shape(const Message& message) {
  ZP_CHECK(!are_counted_only() || expected_, describe(message),
           ": their shape is not known in a simulated world; call Pipeline::expect_activations()");
  const StageLinks::Arriving arriving =
      links_.receive(message, {kHeaderNumel}, at::kLong, "the shape of " + describe(message));
  arriving.pending.wait();
  if (are_counted_only()) {
    shapes_[message.boundary] = *expected_;
    return;
  }
  const at::Tensor header = arriving.tensor.to(at::kCPU);
  const int64_t* numbers = header.const_data_ptr<int64_t>();
  if (numbers[0] == kNothingFollows) {
    shapes_[message.boundary] = kClosed;
    return;
  }
  shapes_[message.boundary] = {{numbers + 2, numbers + 2 + numbers[1]},
                               static_cast<at::ScalarType>(numbers[0])};
}

void StageMessages::send(const Message& message, const at::Tensor& tensor) {
  check_can_be_sent(message, tensor);
  agree_on_shape(message, tensor);
  if (links_.is_local(message)) {
    stay_here_[message] = tensor.detach();
  } else {
    links_.send(message, tensor, describe(message));
  }
}

void StageMessages::receive_ahead(const Message& message) {
  const auto shape = shapes_.find(message.boundary);
  if (links_.is_local(message) || shape == shapes_.end() || ahead_.contains(message)) return;
  if (is_closed(message.boundary)) return;
  ahead_.emplace(message, links_.receive(message, shape->second.sizes, shape->second.dtype,
                                         describe(message)));
}

at::Tensor StageMessages::receive(const Message& message) {
  if (links_.is_local(message)) {
    const auto here = stay_here_.extract(message);
    TORCH_INTERNAL_ASSERT(!here.empty());
    return here.mapped();
  }
  if (!shapes_.contains(message.boundary)) learn_shape(message);
  if (is_closed(message.boundary)) return {};
  receive_ahead(message);
  const StageLinks::Arriving arriving = std::move(ahead_.extract(message).mapped());
  arriving.pending.wait();
  return is_nothing(arriving.tensor) ? at::Tensor() : arriving.tensor;
}

void StageMessages::send_nothing(const Message& message) {
  if (links_.is_local(message) || is_closed(message.boundary)) return;
  const auto shape = shapes_.find(message.boundary);
  if (shape != shapes_.end()) {
    links_.send(message, nothing_like(shape->second, links_.device()), describe(message));
    return;
  }
  shapes_[message.boundary] = kClosed;
  std::vector<int64_t> header(kHeaderNumel);
  header.front() = kNothingFollows;
  links_.send(message, at::tensor(header, at::kLong).to(links_.device()),
              "the shape of " + describe(message));
}

void StageMessages::discard(const Message& message) {
  if (links_.is_local(message)) {
    stay_here_.erase(message);
  } else {
    receive(message);
  }
}

bool StageMessages::is_closed(int boundary) const {
  const auto shape = shapes_.find(boundary);
  return shape != shapes_.end() && shape->second == kClosed;
}

void StageMessages::end_step() {
  links_.wait_for_sent();
  shapes_.clear();
  stay_here_.clear();
}

}  // namespace zeropage::pipeline
