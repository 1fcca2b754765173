// The kernels of builds without CUDA: none. Nobody calls them where are_built() is false.
#include <stdexcept>

#include "fused/cuda/rows.h"

namespace zeropage::fused::cuda {
namespace {

[[noreturn]] void refuse() {
  throw std::logic_error("zeropage::fused: this build has no CUDA kernels");
}

}  // namespace

bool are_built() {
  return false;
}

template <typename T>
void normalise(const NormRows<T>& /*norm*/, int64_t /*rows*/, void* /*stream*/) {
  refuse();
}
template <typename T>
void norm_gradient(const NormGradientRows<T>& /*norm*/, int64_t /*rows*/, int64_t /*parts*/,
                   float* /*of_weight*/, float* /*of_bias*/, void* /*stream*/) {
  refuse();
}
template <typename T>
void rotate(const RotaryRows<T>& /*rotary*/, int64_t /*rows*/, void* /*stream*/) {
  refuse();
}
template <typename T>
void swiglu(const T* /*gate*/, const T* /*value*/, T* /*output*/, int64_t /*numel*/,
            void* /*stream*/) {
  refuse();
}
template <typename T>
void swiglu_gradient(const T* /*gradient*/, const T* /*gate*/, const T* /*value*/, T* /*of_gate*/,
                     T* /*of_value*/, int64_t /*numel*/, void* /*stream*/) {
  refuse();
}
template <typename T>
void bias_gelu(GeluForm /*form*/, const T* /*input*/, const T* /*bias*/, T* /*output*/,
               int64_t /*rows*/, int64_t /*width*/, void* /*stream*/) {
  refuse();
}
template <typename T>
void bias_gelu_gradient(GeluForm /*form*/, const T* /*gradient*/, const T* /*input*/,
                        const T* /*bias*/, T* /*of_input*/, float* /*of_bias*/, int64_t /*rows*/,
                        int64_t /*width*/, int64_t /*parts*/, void* /*stream*/) {
  refuse();
}
template <typename T>
void sum_exponents(const LogitTile<T>& /*tile*/, float* /*figures*/, void* /*stream*/) {
  refuse();
}
template <typename T>
void to_gradients(const LogitTile<T>& /*tile*/, const float* /*own*/, const float* /*all*/,
                  void* /*stream*/) {
  refuse();
}

ZEROPAGE_INSTANTIATE_ROWS(float)
ZEROPAGE_INSTANTIATE_ROWS(optim::BFloat16Bits)
ZEROPAGE_INSTANTIATE_ROWS(optim::HalfBits)

}  // namespace zeropage::fused::cuda
