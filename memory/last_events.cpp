#include "memory/last_events.h"

#include <algorithm>
#include <string_view>

#include <c10/util/StringUtil.h>

#include "zeropage/bytes.h"

namespace zeropage::memory {
namespace {

std::string_view cut_off(std::string_view page, size_t most) {
  return page.substr(0, most);
}

const char* place(Account account) {
  switch (account) {
    case Account::kHost:
      return "host";
    case Account::kAccelerator:
      return "device";
    case Account::kMeta:
      return "simulated device";
    case Account::kHostTier:
      return "host, offloaded";
    case Account::kNvmeTier:
      break;
  }
  return "nvme, offloaded";
}

}  // namespace

bool LastEvents::Event::is_of(Account of_account, Kind of_kind,
                              const OwnerScope::Owner& of_owner) const {
  return account == of_account && kind == of_kind &&
         std::string_view(owner) == std::string_view(of_owner.name) &&
         std::string_view(page.data()) == cut_off(of_owner.page, page.size() - 1);
}

void LastEvents::note(Account account, Kind kind, int64_t bytes, const OwnerScope::Owner& owner) {
  const bool goes_on = noted_ > 0 && events_[(noted_ - 1) % kKept].is_of(account, kind, owner);
  if (!goes_on) {
    Event& begun = events_[noted_++ % kKept];
    begun = {.account = account, .kind = kind, .owner = owner.name};
    const std::string_view page = cut_off(owner.page, begun.page.size() - 1);
    std::copy(page.begin(), page.end(), begun.page.begin());
  }
  Event& event = events_[(noted_ - 1) % kKept];
  Sum& sum = bytes < 0 ? event.freed : event.taken;
  ++sum.count;
  sum.bytes += bytes < 0 ? -bytes : bytes;
}

std::string LastEvents::describe() const {
  std::string text;
  for (size_t number = noted_ < kKept ? 0 : noted_ - kKept; number < noted_; ++number) {
    const Event& event = events_[number % kKept];
    text += c10::str("  ", name(event.kind), " (", place(event.account), "): ");
    if (event.taken.count > 0) {
      text += c10::str(format_bytes(event.taken.bytes), " taken in ", event.taken.count,
                       event.freed.count > 0 ? ", " : "");
    }
    if (event.freed.count > 0) {
      text += c10::str(format_bytes(event.freed.bytes), " freed in ", event.freed.count);
    }
    if (*event.owner != '\0') text += c10::str(", for the ", event.owner);
    if (event.page.front() != '\0') text += c10::str(", page \"", event.page.data(), "\"");
    text += "\n";
  }
  return text;
}

}  // namespace zeropage::memory
