#include "device/host_memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <sys/resource.h>
#include <vector>

#include "zeropage/bytes.h"

namespace zeropage::device {
namespace {

// Version 1 says "no limit" as the largest multiple of a page.
constexpr int64_t kLeastUnlimitedBytes = int64_t{1} << 60;

// How the two versions of cgroups call the same things.
struct CgroupFiles {
  const char* limit;
  const char* used;
  const char* inactive_file;  // a key of memory.stat, with what is below the group
};
constexpr CgroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                                "total_inactive_file"};
constexpr CgroupFiles kVersion2{"memory.max", "memory.current", "inactive_file"};

std::optional<std::string> contents(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::optional<int64_t> leading_number(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{}) return std::nullopt;
  return value;
}

// The number behind `key` at the beginning of a line.
std::optional<int64_t> number_after(std::string_view text, std::string_view key) {
  for (size_t line = 0; line < text.size();) {
    const std::string_view rest = text.substr(line);
    if (rest.starts_with(key)) return leading_number(rest.substr(key.size()));
    const size_t end = rest.find('\n');
    line = end == std::string_view::npos ? text.size() : line + end + 1;
  }
  return std::nullopt;
}

// Whether "cpu,memory" names it.
bool lists(std::string_view controllers, std::string_view controller) {
  while (true) {
    const size_t comma = controllers.find(',');
    if (controllers.substr(0, comma) == controller) return true;
    if (comma == std::string_view::npos) return false;
    controllers.remove_prefix(comma + 1);
  }
}

// One group; none: it has no limit, or is not visible here.
std::optional<CgroupMemory> group_at(const std::string& folder, const CgroupFiles& files) {
  const auto limit_text = contents(folder + "/" + files.limit);
  const auto used_text = contents(folder + "/" + files.used);
  if (!limit_text || !used_text) return std::nullopt;
  const std::optional<int64_t> limit = cgroup_limit(*limit_text);
  const std::optional<int64_t> used = leading_number(*used_text);
  if (!limit || !used) return std::nullopt;
  const std::string stat = contents(folder + "/memory.stat").value_or("");
  const int64_t inactive = number_after(stat, std::string(files.inactive_file) + " ").value_or(0);
  return CgroupMemory{.limit_bytes = *limit, .used_bytes = std::max<int64_t>(*used - inactive, 0)};
}

// Finds which of the group and all above it, up to the root of the mount, leaves the least memory. A
// container sees its own group as the root, under a path that may not be there.
void look_upwards(const std::string& mount, std::string group, const CgroupFiles& files,
                  std::optional<CgroupMemory>& least) {
  while (true) {
    const auto found = group_at(mount + group, files);
    if (found && (!least || found->left_bytes() < least->left_bytes())) least = found;
    if (group.empty()) return;
    group.erase(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}

// Lines of /proc/self/cgroup: "0::/group" of version 2, "4:memory:/group" of version 1.
std::optional<CgroupMemory> cgroup_of(const HostMemoryPaths& paths) {
  std::optional<CgroupMemory> least;
  std::ifstream lines(paths.proc + "/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string group = line.substr(second + 1);
    if (group == "/") group.clear();
    if (controllers.empty()) {
      look_upwards(paths.cgroups, group, kVersion2, least);
    } else if (lists(controllers, "memory")) {
      look_upwards(paths.cgroups + "/memory", group, kVersion1, least);
    }
  }
  return least;
}

std::optional<int64_t> lockable_bytes() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::nullopt;
  }
  return static_cast<int64_t>(limit.rlim_cur);
}

}  // namespace

int64_t HostMemory::usable_bytes() const {
  return cgroup ? std::min(available_bytes, cgroup->left_bytes()) : available_bytes;
}

int64_t meminfo_bytes(std::string_view text, std::string_view key) {
  const auto kibibytes = number_after(text, std::string(key) + ":");
  if (!kibibytes) {
    throw std::runtime_error("/proc/meminfo: expected a line \"" + std::string(key) +
                             ": <number> kB\", got none; mount /proc");
  }
  return *kibibytes * 1024;
}

std::optional<int64_t> cgroup_limit(std::string_view text) {
  const std::optional<int64_t> limit = leading_number(text);
  return limit && *limit < kLeastUnlimitedBytes ? limit : std::nullopt;
}

HostMemory read_host_memory(const HostMemoryPaths& paths) {
  const std::string meminfo = contents(paths.proc + "/meminfo").value_or("");
  return {.total_bytes = meminfo_bytes(meminfo, "MemTotal"),
          .available_bytes = meminfo_bytes(meminfo, "MemAvailable"),
          .cgroup = cgroup_of(paths),
          .lockable_bytes = lockable_bytes()};
}

std::string describe(const HostMemory& memory) {
  std::string text = "MemAvailable " + memory::format_bytes(memory.available_bytes) + " of " +
                     memory::format_bytes(memory.total_bytes);
  if (!memory.cgroup) return text + ", no cgroup limit";
  return text + ", cgroup limit " + memory::format_bytes(memory.cgroup->limit_bytes) + " with " +
         memory::format_bytes(memory.cgroup->used_bytes) + " in use";
}

std::string describe_need(int64_t needed_bytes, const HostMemory& memory) {
  return "needs " + memory::format_bytes(needed_bytes) + " on the host, which has " +
         memory::format_bytes(memory.usable_bytes()) + ": " + describe(memory);
}

}  // namespace zeropage::device
