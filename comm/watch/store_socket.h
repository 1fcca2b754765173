// The socket at which rank 0 serves the store: bound to the address that the others use, so that nobody
// reaches it over another network of this host.
//
// Lifetime: the caller owns the socket, until it gives it to c10d's TCPStore, which listens at it and
// closes it.
// Threads: plain functions. Throws: nothing; says so in its result.
#pragma once

#include <cstdint>
#include <string>

namespace zeropage::comm::detail {

struct StoreSocket {
  int fd = -1;  // -1: c10d makes one, at all addresses
  // Why it is at all addresses; "": it is not, or c10d will say what is wrong with the port.
  std::string why_everywhere;
};

// address: the others' name for this host. one_host: there are no others.
StoreSocket bind_store_socket(const std::string& address, uint16_t port, bool one_host);

// Whether `fd` is a socket of this process that is bound to that port on loopback, and at which nobody
// listens yet: what a launcher left.
bool is_unused_socket_at(int fd, uint16_t port);

// "127.0.0.1", "::1", "localhost"
bool is_loopback(const std::string& address);

}  // namespace zeropage::comm::detail
