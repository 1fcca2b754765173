#include "zero/agreement/new_values.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "zero/agreement/agreement_hashes.h"
#include "zero/pages/value_hash.h"
#include "zeropage/check.h"

namespace zeropage::zero {
namespace {

constexpr const char* kStays = "no new values";

// One line a parameter: what is compared, a tabulator, what this rank has of it.
std::vector<std::pair<std::string, std::string>> lines_of(const std::string& text) {
  std::vector<std::pair<std::string, std::string>> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    const size_t tab = line.find('\t');
    lines.emplace_back(line.substr(0, tab), line.substr(tab + 1));
  }
  return lines;
}

// "elements hash": ranks are compared whose first words are the same.
std::pair<std::string, std::string> parts_of(const std::string& text) {
  const size_t space = text.find(' ');
  return {text.substr(0, space), text.substr(space + 1)};
}

// Two ranks that own the same elements, and were given other values of them.
std::optional<std::pair<size_t, size_t>> find_differing(const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    for (size_t other = rank + 1; other < texts.size(); ++other) {
      if (parts_of(texts[rank]).first == parts_of(texts[other]).first &&
          texts[rank] != texts[other]) {
        return std::pair(rank, other);
      }
    }
  }
  return std::nullopt;
}

}  // namespace

NewValues::NewValues(const ParameterPages& pages, const std::map<std::string, at::Tensor>& given)
    : pages_(pages) {
  for (const PlacedParameter& placed : pages.parameters()) {
    const NamedParameter& parameter = placed.parameter;
    const int ranks = pages.world(placed.page).size();
    const bool is_owned_twice = ranks > 1 && (pages.plan().ownership() == Ownership::kWholePage ||
                                              pages.shards(placed.page).size() < ranks);
    const bool is_whole = pages.tensor_world() != nullptr && !parameter.slice;
    const bool is_tied = pipeline_world_of(pages) != nullptr && parameter.is_tied;
    if (!is_owned_twice && !is_whole && !is_tied) continue;
    const Range here = intersection(pages.owned(placed.page), placed.range);
    OfParameter of{.name = parameter.name()};
    if (!here.empty()) of.range = {here.begin - placed.range.begin, here.end - placed.range.begin};
    const at::Tensor& values = given.at(parameter.name());
    of.words = kStays;
    if (values.defined()) {
      // Ranks may give them in other dtypes.
      const bool is_double = parameter.tensor.scalar_type() == at::kDouble;
      of.words =
          words_of_values(values.detach().to(is_double ? at::kDouble : at::kFloat).contiguous());
    }
    if (is_owned_twice) (parameter.is_of_experts() ? of_experts_ : of_data_).push_back(of);
    if (is_whole) of_tensor_.push_back(of);
    if (is_tied) of_pipeline_.push_back(of);
  }
  // Each stage has them in the order of its own layers.
  std::sort(of_pipeline_.begin(), of_pipeline_.end(),
            [](const OfParameter& one, const OfParameter& other) { return one.name < other.name; });
}

std::string NewValues::text_of(const List& list) {
  Fingerprint elements, values;
  for (const OfParameter& of : list) {
    elements.add(std::string_view(of.name));
    elements.add(static_cast<uint64_t>(of.range.begin));
    elements.add(static_cast<uint64_t>(of.range.end));
    values.add(std::string_view(of.words));
  }
  return c10::str(elements.value(), " ", values.value());
}

void NewValues::check(const comm::World& ranks, const List& own,
                      const std::vector<std::string>& texts, const std::string& who) {
  const auto differing = find_differing(texts);
  if (!differing) return;
  std::string lines;
  for (const OfParameter& of : own) lines += of.name + "\t" + of.words + "\n";
  const std::vector<std::string> own_hashes = ranks.gather_text(who + ", what differs", lines);
  const auto first = lines_of(own_hashes[differing->first]),
             second = lines_of(own_hashes[differing->second]);
  for (size_t index = 0; index < std::min(first.size(), second.size()); ++index) {
    const auto& [name, has] = first[index];
    ZP_CHECK(has == second[index].second, who,
             ": nothing was assigned: expected the same new values of parameter \"", name,
             "\" on ranks that own the same elements of it, got ", has, " on rank ",
             ranks.global_rank(static_cast<int>(differing->first)), " and ", second[index].second,
             " on rank ", ranks.global_rank(static_cast<int>(differing->second)),
             "; give them the same, as world.mean() of what each of them has");
  }
  TORCH_INTERNAL_ASSERT(false, "hashes of the same words differ");
}

void NewValues::check_alike(const std::vector<std::string>& texts, const std::string& who) const {
  check(pages_.world(), of_data_, texts, who);
  const auto& same = pages_.worlds().same_experts;
  for (const auto& [ranks, list] : {std::pair{same ? &*same : nullptr, &of_experts_},
                                    std::pair{pages_.tensor_world(), &of_tensor_},
                                    std::pair{pipeline_world_of(pages_), &of_pipeline_}}) {
    if (ranks == nullptr) continue;
    check(*ranks, *list, ranks->gather_text(who, text_of(*list)), who);
  }
}

}  // namespace zeropage::zero
