// Writes the batches that `zp-lm finetune --join-documents --held-out-share 0` trains on, for whoever is to train on the same: a safetensors file with int64
// "batches" [steps, rows, length + 1]. training_batches --help.
#include <fstream>
#include <iostream>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include "bench/measuring_main.h"
#include "examples/language_model/data/rows.h"
#include "zeropage/check.h"
#include "zeropage/text/tokenizer.h"

namespace {

struct Flags {
  std::string tokenizer;
  std::vector<std::string> texts;
  std::string out;
  int64_t length = 128;
  int64_t batch = 2;
  int64_t steps = 200;
  uint64_t seed = 1;
};

std::vector<int32_t> training_tokens(const Flags& flags) {
  const auto tokenizer = zeropage::text::Tokenizer::from_path(flags.tokenizer);
  std::vector<int32_t> all;
  for (const std::string& file : flags.texts) {
    std::ifstream stream(file, std::ios::binary);
    ZP_CHECK(stream, file, ": cannot be read; is it there?");
    const auto tokens = tokenizer.encode(std::string{std::istreambuf_iterator<char>(stream), {}});
    all.insert(all.end(), tokens.begin(), tokens.end());
    if (const auto end = tokenizer.document_end()) all.push_back(*end);
  }
  return all;
}

void write(const Flags& flags) {
  const language_model::PackedRows rows(language_model::TokenText::of(training_tokens(flags)),
                                        flags.length, std::nullopt);
  language_model::RowOrder order(rows.count(), flags.seed);
  std::vector<int64_t> places;
  for (int64_t place = 0; place < flags.steps * flags.batch; ++place)
    places.push_back(order.row(place));
  const language_model::Rows read = rows.read(places);
  const torch::Tensor all = torch::cat({read.tokens, read.targets.slice(1, -1)}, 1).contiguous();
  const auto bytes = static_cast<int64_t>(all.nbytes());
  const std::string header = nlohmann::json{
      {"batches",
       {{"dtype", "I64"},
        {"shape", {flags.steps, flags.batch, flags.length + 1}},
        {"data_offsets",
         {0, bytes}}}}}.dump();
  const uint64_t length = header.size();
  std::ofstream out(flags.out, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof(length));
  out << header;
  out.write(static_cast<const char*>(all.const_data_ptr()), bytes);
  ZP_CHECK(out.flush(), flags.out, ": cannot be written; is there room?");
  std::cout << rows.count() << " rows of " << flags.length << " tokens; wrote " << flags.steps
            << " batches of " << flags.batch << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app(
      "Writes the batches of `zp-lm finetune --join-documents --held-out-share 0` as safetensors");
  app.add_option("--tokenizer", flags.tokenizer,
                 "A .gguf file, a tokenizer.json, or a folder with one")
      ->required();
  app.add_option("--text", flags.texts, "Files of text")->required();
  app.add_option("-o,--out", flags.out, "File to write")->required();
  app.add_option("--length", flags.length, "Tokens of a row")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch", flags.batch, "Rows of a step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", flags.steps, "Steps")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "Seed of the rows' order")->capture_default_str();
  return bench::parse_and_measure("training_batches", app, argc, argv, [&] { write(flags); });
}
