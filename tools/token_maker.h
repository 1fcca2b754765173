// Texts become a file of tokens, a document each.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "zeropage/text/token_file.h"
#include "zeropage/text/tokenizer.h"

namespace zeropage::tools {

struct TokenMakerOptions {
  text::TokenFormat format = text::TokenFormat::kNanoGpt;
  text::SpecialTokens special = text::SpecialTokens::kAsText;
  // Where a text is cut into documents; "": nowhere.
  std::string separator = {};
};

struct MadeTokens {
  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t bytes = 0;          // of the texts
  int64_t missing_bytes = 0;  // for which the vocabulary has no token
  double seconds = 0;         // of encoding and writing
};

// Opens all texts and the output before it encodes any. Long work tells its progress on stderr. Throws text::TextError.
MadeTokens make_tokens(const std::vector<std::string>& texts, const std::filesystem::path& file,
                       const text::Tokenizer& tokenizer, const TokenMakerOptions& options);

}  // namespace zeropage::tools
