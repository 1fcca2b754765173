// The words for the kinds of schedules (zeropage/fields.h).
#pragma once

#include <array>
#include <type_traits>

#include "zeropage/fields.h"
#include "zeropage/schedule.h"

namespace zeropage::parallel {

constexpr auto words_of(std::type_identity<ScheduleKind>) {
  using memory::word;
  return std::array{word<ScheduleKind::kGPipe>("gpipe"),
                    word<ScheduleKind::kOneForwardOneBackward>("1f1b"),
                    word<ScheduleKind::kInterleaved>("interleaved"),
                    word<ScheduleKind::kZeroBubble>("zero-bubble")};
}

}  // namespace zeropage::parallel
