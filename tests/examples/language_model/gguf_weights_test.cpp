// examples/language_model/weights/gguf_weights: llama.cpp's names and order of rows.
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "examples/language_model/evaluate/evaluation.h"
#include "examples/language_model/weights/open_model.h"
#include "examples/language_model/weights/tokenizer_files.h"
#include "tests/examples/language_model/small_models.h"
#include "tests/harness/errors.h"
#include "tests/harness/ranks.h"
#include "tests/text/gguf_bytes.h"
#include "tests/text/small_vocabulary.h"
#include "zeropage/text/tokenizer.h"
#include "zeropage/zeropage.h"

namespace zeropage::gguf_weights_test {
namespace {

using namespace language_model;
using namespace zeropage::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint32_t kUint32 = 4, kFloat32 = 6, kF32 = 0;

// The rows of queries and keys in llama.cpp's order: the halves of each head in turns.
torch::Tensor interleaved(const torch::Tensor& rows, int64_t heads) {
  std::vector<int64_t> sizes = {heads, 2, rows.size(0) / heads / 2};
  for (int64_t dim = 1; dim < rows.dim(); ++dim) sizes.push_back(rows.size(dim));
  return rows.reshape(sizes).transpose(1, 2).reshape(rows.sizes());
}

std::string gguf_name(const std::string& name) {
  const std::vector<std::pair<std::string, std::string>> parts = {
      {"model.embed_tokens", "token_embd"},
      {"model.norm", "output_norm"},
      {"lm_head", "output"},
      {"model.layers.", "blk."},
      {"input_layernorm", "attn_norm"},
      {"self_attn.q_proj", "attn_q"},
      {"self_attn.k_proj", "attn_k"},
      {"self_attn.v_proj", "attn_v"},
      {"self_attn.o_proj", "attn_output"},
      {"post_attention_layernorm", "ffn_norm"},
      {"mlp.gate_proj", "ffn_gate"},
      {"mlp.up_proj", "ffn_up"},
      {"mlp.down_proj", "ffn_down"}};
  std::string result = name;
  for (const auto& [theirs, ours] : parts) {
    if (const size_t at = result.find(theirs); at != std::string::npos) {
      result.replace(at, theirs.size(), ours);
    }
  }
  return result;
}

GgufBytes gguf_of(const LanguageModel& model) {
  const ModelConfig& config = model.config();
  const bool is_qwen2 = config.architecture == Architecture::kQwen2;
  const std::string kind = is_qwen2 ? "qwen2" : "llama";
  GgufBytes file;
  file.words("general.architecture", kind);
  const auto count = [&](const std::string& key, int64_t value) {
    file.pair(kind + "." + key, kUint32, static_cast<uint32_t>(value));
  };
  count("embedding_length", config.width);
  count("feed_forward_length", config.mlp_width);
  count("block_count", config.layers);
  count("attention.head_count", config.heads);
  count("attention.head_count_kv", config.key_value_heads);
  count("attention.key_length", config.head_width);
  count("rope.dimension_count", config.head_width);
  count("context_length", config.context);
  file.pair(kind + ".attention.layer_norm_rms_epsilon", kFloat32,
            static_cast<float>(config.norm_epsilon));
  for (const auto& parameter : model.named_parameters()) {
    const std::string& name = parameter.key();
    if (config.tied_head && name == "lm_head.weight") continue;
    torch::Tensor values = parameter.value().detach();
    const auto turned = [&](int64_t heads) {
      return is_qwen2 ? values : interleaved(values, heads);
    };
    if (name.find("q_proj") != std::string::npos) values = turned(config.heads);
    if (name.find("k_proj") != std::string::npos) values = turned(config.key_value_heads);
    values = values.contiguous();
    std::vector<uint64_t> sizes(values.sizes().rbegin(), values.sizes().rend());
    file.tensor(gguf_name(name), sizes, kF32,
                {static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
  }
  return file;
}

ModelConfig without_scaling(ModelConfig config) {
  config.rope_scaling.reset();
  config.begin_token.reset();
  config.end_tokens.clear();
  return config;
}

TEST(GgufWeightsTest, HaveTheShapeAndTheLossOfTheModelThatWasConverted) {
  for (ModelConfig config :
       {small_configs()[0], without_scaling(small_configs()[1]), small_configs()[3]}) {
    SCOPED_TRACE(name_of(config.architecture));
    const auto plain = drawn(config);
    const TextScratch scratch;
    const auto path = scratch.put("model.gguf", gguf_of(*plain).text());
    ModelConfig read = ModelFiles(path).config();
    read.initial_deviation = plain->config().initial_deviation;
    EXPECT_EQ(read, plain->config());
    const torch::Tensor ids = random_tokens(config, 1, 30);
    plain->eval();
    const double expected = plain->forward(ids.slice(1, 0, -1), ids.slice(1, 1)).item<double>();
    const torch::Tensor tokens = ids.to(torch::kInt).contiguous();
    for (const int stage : {0, 3}) {
      run_ranks(2, [&](World& world) {
        WrappedModel model = open_model(
            ModelFiles(path), world, {.sharding = {.stage = stage_of(stage), .page_bytes = 4096}});
        const std::vector<int32_t> text(tokens.const_data_ptr<int32_t>(),
                                        tokens.const_data_ptr<int32_t>() + 30);
        EXPECT_NEAR(evaluate(model, text, 30).loss, expected, 1e-6);
      });
    }
  }
}

TEST(GgufWeightsTest, TheTokenizerThatIsWrittenBesideThemHasTheSameNumbers) {
  for (const std::string pre : {"gpt-2", "smollm", "llama-bpe", "qwen2"}) {
    SCOPED_TRACE(pre);
    const TextScratch scratch;
    GgufBytes file = SmallVocabulary().gguf(pre);
    file.pair("tokenizer.ggml.eos_token_id", kUint32, uint32_t{269});
    file.words("tokenizer.chat_template", "{{ messages }}");
    const auto path = scratch.put("model.gguf", file.text());
    EXPECT_EQ(write_tokenizer(path, scratch.path()), "");
    const auto before = text::Tokenizer::from_path(path);
    const auto after = text::Tokenizer::from_path(scratch.path());
    EXPECT_EQ(after.vocabulary_hash(), before.vocabulary_hash());
    for (const std::string words :
         {"the hell, there's 1212 more.\n\n  it's", "e\xCC\x81 \xC3\xA9", "12345\xFF <|im_end|>"}) {
      for (const auto special : {text::SpecialTokens::kAsText, text::SpecialTokens::kRecognised}) {
        EXPECT_EQ(after.encode(words, special), before.encode(words, special)) << words;
      }
    }
    const auto config = nlohmann::json::parse(std::ifstream(scratch / "tokenizer_config.json"));
    EXPECT_EQ(config["eos_token"], "<|im_end|>");
    EXPECT_EQ(config["chat_template"], "{{ messages }}");
  }
  const TextScratch scratch;
  const auto path =
      scratch.put("model.gguf", GgufBytes().words("tokenizer.ggml.model", "llama").text());
  EXPECT_THAT(write_tokenizer(path, scratch.path()),
              AllOf(HasSubstr("expected gpt2"), HasSubstr("take tokenizer.json from the page")));
  EXPECT_FALSE(std::filesystem::exists(scratch / "tokenizer.json"));
}

TEST(GgufWeightsTest, OfModelsThatAreNotKnownAreRefused) {
  const TextScratch scratch;
  const auto error = [&](const GgufBytes& file) {
    return error_of([&] { ModelFiles files(scratch.put("model.gguf", file.text())); });
  };
  EXPECT_THAT(error(GgufBytes().words("general.architecture", "gpt2")),
              HasSubstr("architecture \"gpt2\" is not known in GGUF"));
  const auto plain = drawn(small_llama());
  EXPECT_THAT(error(gguf_of(*plain).words("llama.rope.scaling.type", "yarn")),
              HasSubstr("scaled rotary positions are not read from GGUF"));
  EXPECT_THAT(error(gguf_of(*plain).pair("llama.expert_count", kUint32, uint32_t{8})),
              HasSubstr("models of experts are not known"));
  EXPECT_THAT(error(GgufBytes().words("general.architecture", "llama")),
              HasSubstr("token_embd.weight"));

  GgufBytes more = gguf_of(*plain);
  more.tensor("blk.0.attn_qkv.weight", {4}, kF32, std::string(16, '\0'));
  const auto path = scratch.put("more.gguf", more.text());
  const auto model = make_model(small_llama());
  EXPECT_THAT(error_of([&] { load_weights(*ModelFiles(path).open_weights(), *model); }),
              HasSubstr("1 unexpected: blk.0.attn_qkv.weight"));
}

}  // namespace
}  // namespace zeropage::gguf_weights_test
