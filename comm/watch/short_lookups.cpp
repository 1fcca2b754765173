#include "comm/watch/short_lookups.h"

#include <arpa/inet.h>
#include <array>
#include <netinet/in.h>
#include <resolv.h>

#include "comm/watch/store_socket.h"

namespace zeropage::comm::detail {
namespace {

bool is_in_numbers(const std::string& address) {
  std::array<unsigned char, sizeof(in6_addr)> bytes{};
  return inet_pton(AF_INET, address.c_str(), bytes.data()) == 1 ||
         inet_pton(AF_INET6, address.c_str(), bytes.data()) == 1;
}

}  // namespace

ShortLookups::ShortLookups(const std::string& address)
    : holds_(is_in_numbers(address) || is_loopback(address)) {
  if (!holds_) return;
  // glibc keeps the resolver's options by thread, and takes changed ones for what the program wants.
  if ((_res.options & RES_INIT) == 0) res_init();
  seconds_before_ = _res.retrans;
  attempts_before_ = _res.retry;
  _res.retrans = 1;
  _res.retry = 1;
}

ShortLookups::~ShortLookups() {
  if (!holds_) return;
  _res.retrans = seconds_before_;
  _res.retry = attempts_before_;
}

}  // namespace zeropage::comm::detail
