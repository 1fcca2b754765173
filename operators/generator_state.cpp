#include "operators/generator_state.h"

#include <cstring>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/TensorBody.h>

#include "zeropage/check.h"

namespace zeropage::operators {

at::Generator copy_of(const at::Generator& generator) {
  at::Generator source = generator;
  const std::lock_guard lock(source.mutex());
  return source.clone();
}

void assign_state(const at::Generator& to, const at::Generator& from) {
  ZP_CHECK(to.device().type() == from.device().type(),
           "a generator's state: expected one of a generator on ", to.device(), ", got one on ",
           from.device());
  at::Generator target = to;
  const std::lock_guard lock(target.mutex());
  if (target.device().is_cpu()) {
    // Does what set_state does, without a tensor of 5 KB in between.
    auto& target_engine = *target.get<at::CPUGeneratorImpl>();
    auto& source_engine = *from.get<at::CPUGeneratorImpl>();
    target_engine.set_engine(source_engine.engine());
    target_engine.set_next_float_normal_sample(source_engine.next_float_normal_sample());
    target_engine.set_next_double_normal_sample(source_engine.next_double_normal_sample());
  } else {
    target.set_state(from.get_state());
  }
}

bool same_state(const at::Generator& left, const at::Generator& right) {
  if (left.device() != right.device()) return false;
  if (left.device().is_cpu()) {
    auto& a = *left.get<at::CPUGeneratorImpl>();
    auto& b = *right.get<at::CPUGeneratorImpl>();
    const at::mt19937_data_pod x = a.engine().data(), y = b.engine().data();
    return x.seed_ == y.seed_ && x.left_ == y.left_ && x.next_ == y.next_ && x.state_ == y.state_ &&
           a.next_float_normal_sample() == b.next_float_normal_sample() &&
           a.next_double_normal_sample() == b.next_double_normal_sample();
  }
  const at::Tensor x = left.get_state(), y = right.get_state();
  return x.nbytes() == y.nbytes() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace zeropage::operators
