// Logits of a model as binary fp32, for against_transformers.py:
//
//   print_logits MODEL [ADAPTERS] -- TOKEN... > FILE
//
// Two ranks at stage 3 compute them. With --export FOLDER behind the model it writes the model there
// instead, and with --save-adapters FOLDER its adapters.
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include <zeropage/zeropage.h>

#include "examples/language_model/weights/adapters.h"
#include "examples/language_model/weights/export.h"
#include "examples/language_model/weights/open_model.h"

namespace {

int run(zeropage::World& world, const std::string& path, const std::string& adapters,
        const std::string& out, const std::string& adapters_out,
        const std::vector<int64_t>& tokens) {
  const language_model::ModelFiles files(path);
  auto model = language_model::open_model(
      files, world,
      {.sharding = {.stage = zeropage::Stage::kParameters}, .adapters_from = adapters});
  if (!out.empty()) language_model::export_model(out, model);
  if (!adapters_out.empty()) language_model::save_adapters(adapters_out, model, path);
  if (tokens.empty()) return 0;
  const torch::NoGradGuard no_grad;
  model.eval();
  const torch::Tensor logits = model->logits(torch::tensor(tokens).unsqueeze(0)).contiguous();
  if (world.rank() == 0) {
    std::fwrite(logits.const_data_ptr<float>(), sizeof(float), static_cast<size_t>(logits.numel()),
                stdout);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  std::string adapters, out, adapters_out;
  std::vector<int64_t> tokens;
  bool is_token = false;
  for (size_t i = 1; i < arguments.size(); ++i) {
    if (is_token) {
      tokens.push_back(std::stol(arguments[i]));
    } else if (arguments[i] == "--") {
      is_token = true;
    } else if (arguments[i] == "--export") {
      out = arguments[++i];
    } else if (arguments[i] == "--save-adapters") {
      adapters_out = arguments[++i];
    } else {
      adapters = arguments[i];
    }
  }
  try {
    int code = 0;
    zeropage::World::threads(2, [&](zeropage::World& world) {
      code = run(world, arguments.at(0), adapters, out, adapters_out, tokens);
    });
    return code;
  } catch (const std::exception& error) {
    std::cerr << zeropage::message_of(error) << '\n';
    return 1;
  }
}
