// The TCP sockets of this network namespace that listen, as the kernel lists them.
#pragma once

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace zeropage::testing {

struct ListeningSocket {
  std::string address;  // in the digits of /proc: 127.0.0.1 is "0100007F"
  uint16_t port = 0;
  std::string inode;  // /proc/self/fd has "socket:[<inode>]"
};

inline std::vector<ListeningSocket> listening_sockets() {
  std::vector<ListeningSocket> sockets;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream in(table);
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) {
      std::istringstream fields(line);
      std::string slot, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> user >>
          timeout >> inode;
      if (state != "0A") continue;
      const size_t colon = local.find(':');
      sockets.push_back({local.substr(0, colon),
                         static_cast<uint16_t>(std::stoi(local.substr(colon + 1), nullptr, 16)),
                         inode});
    }
  }
  return sockets;
}

}  // namespace zeropage::testing
