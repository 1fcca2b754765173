// `zp state`: what a saved state has, whether it is whole, how two differ, and its weights to and from
// plain safetensors files.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "tools/subcommand.h"
#include "tools/weights_copy.h"

namespace zeropage::tools {

class StateCommand : public Subcommand {
 public:
  explicit StateCommand(CLI::App& zp);

  bool chosen() const override { return parser_->parsed(); }
  int run(const std::vector<std::string>& after_dashes) const override;

 private:
  // What one of its own subcommands does; returns the exit code.
  struct Verb {
    CLI::App* parser;
    std::function<int()> run;
  };

  CLI::App* add_verb(const char* name, const char* what, const char* footer,
                     std::function<int()> run);
  void add_json(CLI::App* verb);
  void add_names(CLI::App* verb);
  void add_inspect();
  void add_verify();
  void add_diff();
  void add_export();
  void add_import();

  Unmapped unmapped() const;
  NameMap names() const;

  CLI::App* parser_;
  std::vector<Verb> verbs_;
  std::string state_;
  std::string other_state_;
  std::string file_;
  std::string names_file_;
  std::string unmapped_ = "keep";
  int64_t step_ = 0;
  bool all_ = false;
  bool tensors_ = false;
  bool json_ = false;
};

}  // namespace zeropage::tools
