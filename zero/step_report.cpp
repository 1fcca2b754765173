#include "zeropage/step_report.h"

#include <c10/util/StringUtil.h>

#include "zero/norms/not_finite.h"

namespace zeropage {

std::string StepReport::to_string() const {
  switch (skipped) {
    case Skipped::kNo:
      return clipped_norm < norm ? c10::str("stepped, norm ", norm, " clipped to ", clipped_norm)
                                 : c10::str("stepped, norm ", norm);
    case Skipped::kNotFinite:
      return c10::str("skipped: ", zero::say_not_finite(not_finite), "; loss scale ", loss_scale,
                      ", next ", next_loss_scale, at_lowest_scale ? ", the lowest" : "");
    case Skipped::kNormSpike:
      return c10::str("skipped: the norm ", norm, " is a spike");
    case Skipped::kNoWeight:
      return "skipped: no micro-batch of any rank had weight";
  }
  return "";
}

}  // namespace zeropage
