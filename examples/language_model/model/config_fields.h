// The fields of a config.json.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace language_model {

// Takes fields out of a JSON object and collects what is wrong with them.
class ConfigFields {
 public:
  ConfigFields(const nlohmann::json& object, std::string name)
      : object_(object), name_(std::move(name)) {}

  bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  void refuse(const std::string& what) { problems_.push_back(what); }

  // 1 or more.
  int64_t count(const char* key, int64_t otherwise) {
    if (!has(key)) return otherwise;
    const nlohmann::json& value = object_[key];
    if (value.is_number_integer() && value > 0 && value < (int64_t{1} << 40)) return value;
    refuse(std::string(key) + ": expected a whole number above 0, got " + value.dump());
    return otherwise;
  }
  double positive(const char* key, double otherwise) {
    if (!has(key)) return otherwise;
    const nlohmann::json& value = object_[key];
    if (value.is_number() && value > 0) return value;
    refuse(std::string(key) + ": expected a number above 0, got " + value.dump());
    return otherwise;
  }
  double not_negative(const char* key, double otherwise) {
    if (!has(key)) return otherwise;
    const nlohmann::json& value = object_[key];
    if (value.is_number() && value >= 0) return value;
    refuse(std::string(key) + ": expected a number of 0 or more, got " + value.dump());
    return otherwise;
  }
  double probability(const char* key, double otherwise) {
    if (!has(key)) return otherwise;
    const nlohmann::json& value = object_[key];
    if (value.is_number() && value >= 0 && value < 1) return value;
    refuse(std::string(key) + ": expected a probability below 1, got " + value.dump());
    return otherwise;
  }
  bool flag(const char* key, bool otherwise) {
    if (!has(key)) return otherwise;
    if (object_[key].is_boolean()) return object_[key];
    refuse(std::string(key) + ": expected true or false, got " + object_[key].dump());
    return otherwise;
  }
  // Refuses other words than these.
  void word(const char* key, const std::vector<std::string>& known) {
    if (!has(key)) return;
    for (const std::string& word : known) {
      if (object_[key] == word) return;
    }
    refuse(std::string(key) + ": expected \"" + known.front() + "\", got " + object_[key].dump());
  }
  // Refuses a part of a model that is not built here.
  void must_be(const char* key, const nlohmann::json& expected) {
    if (!has(key) || object_[key] == expected) return;
    refuse(std::string(key) + ": " + object_[key].dump() + " is not supported, only " +
           expected.dump());
  }
  // A token, or a list of some.
  std::vector<int64_t> tokens(const char* key) {
    if (!has(key)) return {};
    const nlohmann::json& value = object_[key];
    std::vector<int64_t> found;
    for (const nlohmann::json& token : value.is_array() ? value : nlohmann::json::array({value})) {
      if (!token.is_number_integer() || token < 0) {
        refuse(std::string(key) + ": expected a token's number, got " + token.dump());
        return {};
      }
      found.push_back(token);
    }
    return found;
  }
  const nlohmann::json& object() const { return object_; }

  void check() const {
    if (problems_.empty()) return;
    std::string message = name_ + ": this model cannot be built:";
    for (const std::string& problem : problems_) message += "\n  " + problem;
    throw std::runtime_error(message);
  }

 private:
  const nlohmann::json& object_;
  const std::string name_;
  std::vector<std::string> problems_;
};

}  // namespace language_model
