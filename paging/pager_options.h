// How many pages a pager keeps, and for how long.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <ATen/core/operator_name.h>

namespace zeropage::paging {

enum class Retention : uint8_t {
  kUntilUnused,    // a page goes when the trace does not need it soon
  kUntilReleased,  // a page stays until release_all(), or until the budget needs its room
};

struct PagerOptions {
  // What the pages hold, for errors: "parameter".
  std::string what = "parameter";

  // Pages that are resident or on their way never hold more. 0: as many as retention keeps; with
  // kUntilUnused that is two largest pages, or what one operator needs.
  int64_t budget_bytes = 0;
  std::string budget_option = "the budget";  // what errors tell the user to raise

  // How far ahead along the trace pages are fetched, within the budget. 0: never.
  // Unset: two largest pages.
  static constexpr int64_t kTwoLargestPages = -1;
  int64_t prefetch_bytes = kTwoLargestPages;

  Retention retention = Retention::kUntilUnused;

  // Called before an operator that is not part of another uses pages, on its thread. reads: it takes a tensor of one for
  // more than to write to it. Empty: nobody.
  std::function<void(const c10::OperatorName& operation, bool reads)> before_use;

  // Whether passes repeat, so that their traces are worth recording.
  bool traced = true;
};

}  // namespace zeropage::paging
