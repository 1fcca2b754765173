#include "zero/update/archive_values.h"

#include <cmath>
#include <limits>
#include <sstream>

#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

using nlohmann::json;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// An archive keeps the tensors that are written to it, and gives them only as copies, from its bytes. A private member may be
// named where a template is instantiated explicitly.
template <auto kMember>
struct NamedModule {
  friend torch::jit::Module& module_of(OutputArchive& archive) { return archive.*kMember; }
};
torch::jit::Module& module_of(OutputArchive& archive);
template struct NamedModule<&OutputArchive::module_>;

// JSON has neither infinities nor NaN.
json json_of(double value) {
  if (std::isfinite(value)) return value;
  if (std::isnan(value)) return {{"double", "nan"}};
  return {{"double", value > 0 ? "inf" : "-inf"}};
}

double double_of(const json& value) {
  const std::string text = value.at("double");
  if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
  return text == "inf" ? kInfinity : -kInfinity;
}

template <typename List>
json json_of_list(const std::string& who, const List& list);

json json_of(const std::string& who, const c10::IValue& value) {
  if (value.isDouble()) return json_of(value.toDouble());
  if (value.isInt()) return value.toInt();
  if (value.isBool()) return value.toBool();
  if (value.isString()) return value.toStringRef();
  if (value.isNone()) return nullptr;
  if (value.isTuple()) return json_of_list(who, value.toTupleRef().elements());
  if (value.isList()) return json_of_list(who, value.toList());
  ZP_THROW(who, ": saves a ", value.tagKind(),
           " of itself; what can be kept beside tensors are numbers, booleans, text and lists");
}

template <typename List>
json json_of_list(const std::string& who, const List& list) {
  json result = json::array();
  for (const c10::IValue& element : list) result.push_back(json_of(who, element));
  return result;
}

c10::IValue value_of(const json& value) {
  if (value.is_number_float()) return value.get<double>();
  if (value.is_object()) return double_of(value);
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return {};
  std::vector<c10::IValue> elements;
  for (const json& element : value) elements.push_back(value_of(element));
  return c10::ivalue::Tuple::create(std::move(elements));
}

bool is_list_of_doubles(const json& value) {
  return value.is_object() && value.contains("doubles");
}

InputArchive reopened(OutputArchive& archive) {
  std::stringstream stream;
  archive.save_to(stream);
  InputArchive input;
  input.load_from(stream);
  return input;
}

// Archives within the archive are objects.
std::vector<std::pair<std::string, c10::IValue>> all_values(const Save& save) {
  OutputArchive output;
  save(output);
  InputArchive input = reopened(output);
  std::vector<std::pair<std::string, c10::IValue>> values;
  for (const std::string& key : input.keys()) {
    c10::IValue value;
    if (input.try_read(key, value)) values.emplace_back(key, value);
  }
  return values;
}

}  // namespace

std::vector<std::pair<std::string, c10::IValue>> saved_values(const Save& save) {
  std::vector<std::pair<std::string, c10::IValue>> values = all_values(save);
  std::erase_if(values, [](const auto& named) { return named.second.isObject(); });
  return values;
}

std::vector<at::Tensor> tensors_in_place(const Save& save) {
  OutputArchive output;
  save(output);
  std::vector<at::Tensor> tensors;
  for (const auto& named : module_of(output).named_attributes(/*recurse=*/false)) {
    if (named.value.isTensor()) tensors.push_back(named.value.toTensor());
  }
  return tensors;
}

void load_filled(const Save& fill, const Load& load) {
  OutputArchive output;
  fill(output);
  InputArchive input = reopened(output);
  load(input);
}

json saved_json(const std::string& who, const Save& save, Nested nested) {
  json object = json::object();
  for (const auto& [key, value] : all_values(save)) {
    if (value.isObject()) {
      ZP_CHECK(nested == Nested::kLeftOut, who, ": saves an archive \"", key,
               "\" within its own, which is not kept; write its values beside the others");
    } else if (value.isDoubleList()) {
      json list = json::array();
      for (const double element : value.toDoubleVector()) list.push_back(json_of(element));
      object[key] = {{"doubles", std::move(list)}};
    } else {
      object[key] = json_of(who, value);
    }
  }
  return object;
}

void load_json(const json& object, const Load& load) {
  load_filled(
      [&](OutputArchive& archive) {
        for (const auto& [key, value] : object.items()) {
          if (is_list_of_doubles(value)) {
            std::vector<double> list;
            for (const json& element : value.at("doubles")) {
              list.push_back(element.is_object() ? double_of(element) : element.get<double>());
            }
            archive.write(key, c10::IValue(list));
          } else {
            archive.write(key, value_of(value));
          }
        }
      },
      load);
}

}  // namespace zeropage::zero
