#include "comm/watch/store_socket.h"

#include <arpa/inet.h>
#include <array>
#include <cerrno>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <c10/util/StringUtil.h>

namespace zeropage::comm::detail {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses addresses_of(const std::string& name, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) found = nullptr;
  return {found, &freeaddrinfo};
}

std::string numbers_of(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  const int error =
      getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text.data() : "";
}

// -1 with errno where it cannot be bound.
int bound_to(const addrinfo& address) {
  const int fd = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  // Like c10d's: a port that a program has just left may be served again.
  const int enabled = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &enabled, sizeof(enabled));
  if (bind(fd, address.ai_addr, address.ai_addrlen) == 0) return fd;
  const int error = errno;
  close(fd);
  errno = error;
  return -1;
}

}  // namespace

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address == "localhost";
}

StoreSocket bind_store_socket(const std::string& address, uint16_t port, bool one_host) {
  const Addresses found = addresses_of(address, port);
  // In the order in which c10d's clients try them.
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* at = found.get(); at != nullptr; at = at->ai_next) {
      if (at->ai_family != family) continue;
      const std::string numbers = numbers_of(at->ai_addr, at->ai_addrlen);
      // Debian writes a host's own name as 127.0.1.1 into /etc/hosts. The other hosts do not.
      if (is_loopback(numbers) && !is_loopback(address) && !one_host) {
        return {-1, c10::str(address, " is ", numbers, " here, and something else on other hosts")};
      }
      const int fd = bound_to(*at);
      if (fd >= 0) return {fd, ""};
      if (errno != EADDRNOTAVAIL) return {-1, ""};
    }
  }
  return {-1, c10::str(address, " is not an address of this host")};
}

bool is_unused_socket_at(int fd, uint16_t port) {
  sockaddr_in address{};
  socklen_t length = sizeof(address);
  int listens = 0;
  socklen_t listens_length = sizeof(listens);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
         address.sin_family == AF_INET && address.sin_addr.s_addr == htonl(INADDR_LOOPBACK) &&
         ntohs(address.sin_port) == port &&
         getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &listens_length) == 0 && listens == 0;
}

}  // namespace zeropage::comm::detail
