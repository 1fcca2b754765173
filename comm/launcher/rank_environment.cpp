#include "comm/launcher/rank_environment.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cstdlib>
#include <netinet/in.h>
#include <string_view>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/launcher/generations.h"

namespace zeropage::comm::detail {

std::vector<std::pair<std::string, std::string>> RankEnvironment::variables() const {
  return {{"RANK", std::to_string(rank)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(world_size)},
          {"LOCAL_WORLD_SIZE", std::to_string(world_size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(master_port)},
          {"ZEROPAGE_STORE_SOCKET",
           rank == 0 && store_socket >= 0 ? std::to_string(store_socket) : std::string()},
          {"ZEROPAGE_LAUNCHER", std::to_string(launcher)},
          {kGenerationsVariable, generations},
          {kCopiesVariable, copies}};
}

std::vector<std::string> RankEnvironment::merged_with_own() const {
  const auto ours = variables();
  const auto is_ours = [&ours](std::string_view entry) {
    const std::string_view name = entry.substr(0, entry.find('='));
    return std::any_of(ours.begin(), ours.end(),
                       [name](const auto& variable) { return variable.first == name; });
  };
  std::vector<std::string> merged;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (!is_ours(*entry)) merged.emplace_back(*entry);
  }
  for (const auto& [name, value] : ours)
    merged.push_back(std::string(name).append("=").append(value));
  return merged;
}

void RankEnvironment::apply() const {
  for (const auto& [name, value] : variables()) ::setenv(name.c_str(), value.c_str(), 1);
}

PortSocket bind_free_port() {
  const auto fail = [](const char* what) {
    throw std::system_error(errno, std::generic_category(),
                            std::string("zeropage launcher: no free port on 127.0.0.1: ") + what);
  };
  FileDescriptor bound(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!bound.is_open()) fail("socket");
  // A program that makes its own socket for the port can do so while nobody listens at this one.
  const int enabled = 1;
  ::setsockopt(bound.get(), SOL_SOCKET, SO_REUSEADDR, &enabled, sizeof(enabled));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof(address);
  if (::bind(bound.get(), generic, size) != 0) fail("bind");
  if (::getsockname(bound.get(), generic, &size) != 0) fail("getsockname");
  return {std::move(bound), ntohs(address.sin_port)};
}

}  // namespace zeropage::comm::detail
