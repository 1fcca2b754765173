#include "tools/token_maker.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <span>
#include <unistd.h>
#include <utility>

#include "text/mapped_file.h"
#include "zeropage/text/text_error.h"

namespace zeropage::tools {
namespace {

using Clock = std::chrono::steady_clock;

// A line now and then, where somebody waits.
class Progress {
 public:
  explicit Progress(int64_t all_bytes) : all_bytes_(all_bytes) {}
  ~Progress() {
    if (shown_ && in_place_) std::fputs("\n", stderr);
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(int64_t bytes) {
    done_ += bytes;
    const auto now = Clock::now();
    if (now - last_ < std::chrono::seconds(in_place_ ? 1 : 10)) return;
    last_ = now;
    shown_ = true;
    const double seconds = std::chrono::duration<double>(now - begin_).count();
    std::fprintf(stderr, "%szp tokens: %.0f of %.0f MB, %.1f MB/s%s", in_place_ ? "\r" : "",
                 static_cast<double>(done_) / 1e6, static_cast<double>(all_bytes_) / 1e6,
                 static_cast<double>(done_) / 1e6 / seconds, in_place_ ? "   " : "\n");
  }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  const int64_t all_bytes_;
  const bool in_place_ = ::isatty(STDERR_FILENO) == 1;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point last_ = begin_;
  int64_t done_ = 0;
  bool shown_ = false;
};

std::vector<std::string_view> documents_of(std::string_view text, std::string_view separator) {
  std::vector<std::string_view> documents;
  while (!text.empty()) {
    const size_t end = separator.empty() ? std::string_view::npos : text.find(separator);
    documents.push_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + separator.size());
  }
  return documents;
}

int64_t count_missing(std::string_view text, const std::string& missing) {
  if (missing.empty()) return 0;
  std::array<bool, 256> is_missing{};
  for (const char byte : missing) is_missing[static_cast<uint8_t>(byte)] = true;
  return std::count_if(text.begin(), text.end(),
                       [&](char byte) { return is_missing[static_cast<uint8_t>(byte)]; });
}

}  // namespace

MadeTokens make_tokens(const std::vector<std::string>& texts, const std::filesystem::path& file,
                       const text::Tokenizer& tokenizer, const TokenMakerOptions& options) {
  text::TokenFileWriter writer(file, options.format, text::TokenVocabulary::of(tokenizer));
  if (!tokenizer.document_end()) {
    throw text::TextError(tokenizer.name(),
                          "expected a token that ends a document, such as "
                          "<|endoftext|>, got a vocabulary without one");
  }
  MadeTokens made;
  std::vector<std::unique_ptr<text::MappedFile>> mapped;
  for (const std::string& name : texts) {
    mapped.push_back(std::make_unique<text::MappedFile>(name));
    made.bytes += static_cast<int64_t>(mapped.back()->bytes().size());
  }
  Progress progress(made.bytes);
  for (const auto& text : mapped) {
    for (const std::string_view document : documents_of(text->bytes(), options.separator)) {
      if (document.empty()) continue;
      made.missing_bytes += count_missing(document, tokenizer.missing_bytes());
      int64_t done = 0;
      tokenizer.encode(document, options.special, [&](std::span<const int32_t> ids) {
        writer.write(ids);
        for (const int32_t id : ids) done += static_cast<int64_t>(tokenizer.bytes_of(id).size());
        progress.add(std::exchange(done, 0));
      });
      writer.end_document();
    }
  }
  if (writer.document_count() == 0) {
    throw text::TextError(texts.front(), "expected text, got none in any of the files");
  }
  writer.finish();
  made.tokens = writer.numel();
  made.documents = writer.document_count();
  made.seconds = progress.seconds();
  return made;
}

}  // namespace zeropage::tools
