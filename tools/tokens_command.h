// zp tokens: files of tokens from texts, and what is in one.
#pragma once

#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tools/subcommand.h"

namespace zeropage::tools {

class TokensCommand : public Subcommand {
 public:
  explicit TokensCommand(CLI::App& zp);
  bool chosen() const override { return parser_->parsed(); }
  // 0; 1 for a file that cannot be read or written, or is damaged.
  int run(const std::vector<std::string>& after_dashes) const override;

 private:
  void make() const;
  void show() const;

  CLI::App* parser_;
  CLI::App* make_;
  CLI::App* show_;
  std::vector<std::string> texts_;
  std::string file_;
  std::string tokenizer_;
  std::string form_ = "nanogpt";
  std::string separator_;
  bool special_ = false;
  bool json_ = false;
};

}  // namespace zeropage::tools
