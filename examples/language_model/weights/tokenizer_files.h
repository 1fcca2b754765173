// A model's tokenizer beside its exported weights.
#pragma once

#include <filesystem>
#include <string>

#include <nlohmann/json.hpp>
#include <zeropage/text/gguf_file.h>

namespace language_model {

// Hugging Face's tokenizer.json of a GGUF file's vocabulary. Throws zeropage::text::TextError where it is no byte-level BPE, or is
// cut into words in a way that is not known.
nlohmann::json tokenizer_json_of(const zeropage::text::GgufFile& file);
// tokenizer_config.json: the tokens that begin and end a text, and the template of conversations, where the file has them.
nlohmann::json tokenizer_config_of(const zeropage::text::GgufFile& file);

// from: a model's folder, of which the tokenizer's files are copied; a tokenizer.json; or a GGUF file, of whose vocabulary
// tokenizer.json and tokenizer_config.json are made. to: a folder that is there.
// Returns a sentence for whoever asked where `to` has no tokenizer then, or "".
std::string write_tokenizer(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace language_model
