// Options of the library that train_gpt's command line says in a form of its own: several fields by one
// flag, or words instead of a value. Their help begins with the library's (zeropage/fields.h).
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "zeropage/fields.h"

namespace CLI {
class App;
}

namespace train_gpt {

struct Flags;

struct OwnForms {
  std::string reduce_dtype = "auto";
  std::string accumulate_dtype = "auto";
  std::string keep_fp32;  // pattern of module names; "": none
  std::string loss_scale = "auto";
  double spike_z = 0;  // 0: spikes are not looked for
  bool prefetch = true;
  std::string device_memory;                // a size such as 80GiB; "": no limit
  std::string host_memory;                  // likewise
  std::string offload_optimizer = "none";   // none, host or nvme:DIR
  std::string offload_parameters = "none";  // likewise

  bool offloads() const { return offload_optimizer != "none" || offload_parameters != "none"; }
};

// Where the library's field has such a form: adds its flag, writes its value, and returns true.
bool add_own_form(CLI::App& app, const zeropage::memory::FieldText& field, OwnForms& forms);
bool write_own_form(const zeropage::memory::FieldText& field, const OwnForms& forms,
                    nlohmann::json& json);

// Throws CLI::ValidationError for values that make no sense, or none together.
void check_own_forms(const Flags& flags);

// Gives the library's options what the forms come to.
void apply_own_forms(Flags& flags);

}  // namespace train_gpt
